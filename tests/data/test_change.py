"""Whatever changes, and whenever: no clip is repeated in an epoch and none is missing from it."""

import hashlib
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from longtake.config import Bucket, DataSection, Stage
from longtake.data.catalog import Catalog
from longtake.data.change import Policy, go_on
from longtake.data.clip import Clip, Media
from longtake.data.plan import Plan, begin

_SHAPES = (Bucket(num_frames=4, height=16, width=16), Bucket(num_frames=4, height=16, width=32))


def catalog_of(numbers: Collection[int]) -> Catalog:
    """Clips that are told apart by a number; every third is wide."""
    return Catalog.of(_clip(number) for number in numbers)


def _clip(number: int) -> Clip:
    return Clip(
        identity=hashlib.blake2b(str(number).encode(), digest_size=16).hexdigest(),
        media=Media(f"/clips/{number}.mp4"),
        kind="video",
        caption=f"clip {number}",
        num_frames=8,
        width=32 if number % 3 == 0 else 16,
        height=16,
        fps=8.0,
        duration_seconds=1.0,
        stream_index=0,
        rotation=0,
        codec="h264",
        pix_fmt="yuv420p",
    )


def section(*stages: Stage, **changes: object) -> DataSection:
    """A recipe's section; the catalog's path plays no part here."""
    values = {"catalog": "c.parquet", "buckets": _SHAPES, "stages": stages, **changes}
    return DataSection.model_validate(values)


def identities_of(catalog: Catalog) -> set[str]:
    """All clips that a catalog holds."""
    return {clip.identity for clip in catalog.clips()}


@dataclass
class _Oracle:
    """What every epoch has to consume, kept with sets and without any plan."""

    num_epochs: int
    wanted: dict[int, set[str]]
    seen: dict[int, Counter[str]] = field(default_factory=dict)

    def consume(self, epoch: int, identity: str) -> None:
        self.seen.setdefault(epoch, Counter())[identity] += 1

    def change(self, policy: Policy, clips: set[str], counted: int) -> None:
        """`counted` is the epoch that the next step would have been counted in."""
        newest = max(self.seen, default=-1)
        for epoch in range(self.num_epochs):
            consumed = set(self.seen.get(epoch, ()))
            if epoch > newest:
                self.wanted[epoch] = set(clips)
            elif policy == "restart":
                self.wanted[epoch] = consumed
            elif consumed == self.wanted[epoch]:
                pass  # it is over
            elif policy == "merge" and epoch == newest and epoch >= counted:
                self.wanted[epoch] = consumed | clips
            elif policy == "merge":
                self.wanted[epoch] = consumed | (self.wanted[epoch] & clips)

    def check(self) -> None:
        for epoch, wanted in self.wanted.items():
            assert self.seen.get(epoch, Counter()) == Counter(wanted), epoch


def _train(plan: Plan, end: int | None, oracle: _Oracle) -> int:
    """Consume a plan's batches up to a step, or all; returns the step after the last."""
    assert plan.end_step is not None
    end = plan.end_step if end is None else min(end, plan.end_step)
    for step in range(plan.first_step, end):
        batch = plan.batch(step)
        assert 0 < len(batch.rows) <= batch.batch_size
        for row, epoch in zip(batch.rows, batch.epochs, strict=True):
            oracle.consume(epoch, batch.catalog.clip(int(row)).identity)
    return end


_policies = st.sampled_from(["finish", "merge", "restart"])
_changes = st.lists(
    st.tuples(_policies, st.sets(st.integers(0, 25), min_size=1), st.integers(1, 7)), max_size=3
)


@settings(max_examples=120, deadline=None)
@given(
    first=st.sets(st.integers(0, 25), min_size=1),
    batch_size=st.integers(1, 7),
    changes=_changes,
    data=st.data(),
    seed=st.integers(0, 5),
)
def test_any_chain_of_changes_is_exact(
    first: set[int],
    batch_size: int,
    changes: list[tuple[Policy, set[int], int]],
    data: st.DataObject,
    seed: int,
) -> None:
    """Against an oracle of sets: grown, shrunk, swapped, other batch sizes, at any steps, twice."""
    num_epochs = 3
    recipe = section(Stage(name="only", epochs=num_epochs))
    catalog = catalog_of(first)
    oracle = _Oracle(num_epochs, {e: identities_of(catalog) for e in range(num_epochs)})
    plan = begin({"catalog": catalog}, recipe, batch_size, seed)
    plans = [plan]
    for policy, clips, next_batch_size in changes:
        assert plan.end_step is not None
        step = data.draw(st.integers(plan.first_step, plan.end_step))
        _train(plan, step, oracle)
        catalog = catalog_of(clips)
        counted = num_epochs if step == plan.end_step else plan.batch(step).epoch
        oracle.change(policy, identities_of(catalog), counted)
        plan = go_on(plans, step, policy, {"catalog": catalog}, recipe, next_batch_size, seed)
        plans.append(plan)
    _train(plan, None, oracle)
    oracle.check()

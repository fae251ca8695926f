"""Random histories of runs: no clip of an epoch is repeated or missing, and the audit says so.

A history trains some steps on some ranks, with pixels that are made up, and then something happens:
the process is killed behind its last checkpoint, the guard rolls back and skips batches, clips are
added, removed, re-encoded, renamed, or the size of batches changes. `Oracle` keeps with sets alone
what each epoch has to consume. LONGTAKE_FUZZ_CASES and LONGTAKE_FUZZ_SEED are those of the other
cases: 300 histories of 2,000 cases.
"""

import copy
import os
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.build import bare_recipe
from tests.data.build import Oracle, catalog_of, clip, identities_of, names_of

from longtake.config import DataSection
from longtake.data import decoding_source
from longtake.data.audit import audit
from longtake.data.batch import Batch
from longtake.data.ledger import Ledger, begin_launch, stream_names
from longtake.data.loader import Loader
from longtake.data.stores import NOTHING, Fetched
from longtake.data.window import Window
from longtake.errors import ClipError
from longtake.run_dir import RunDirectory

_SEED = int(os.environ.get("LONGTAKE_FUZZ_SEED", "2"))
_NUM_HISTORIES = max(4, int(os.environ.get("LONGTAKE_FUZZ_CASES", "120")) * 300 // 2000)
_SQUARE = {"num_frames": 4, "height": 16, "width": 16}
_WIDE = {"num_frames": 4, "height": 16, "width": 32}


class _MadeUpPixels:
    """A stand-in for `DecodePool`: each pixel is the first byte of the clip's identity."""

    broken: frozenset[str] = frozenset()

    @classmethod
    def of_recipe(cls, *_: object) -> "_MadeUpPixels":
        return cls()

    def submit(self, wanted: Window, out: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        if wanted.identity in self.broken:
            done.set_exception(ClipError(wanted.media.path, "is broken"))
        else:
            out[...] = int(wanted.identity[:2], 16)
            done.set_result(out)
        return done

    def incidents(self) -> list[Any]:
        return []

    def take_fetched(self) -> Fetched:
        return NOTHING

    def close(self) -> None:
        pass


class _History:
    """One run and what happens to it, drawn from a seed."""

    def __init__(self, chance: random.Random, place: Path) -> None:
        self.chance, self.place = chance, place
        count = chance.randint(12, 60)
        self.numbers, self.following = list(range(count)), count
        self.moved = False
        self.batch_size = chance.choice([2, 3, 4, 6, 8])
        self.stages: list[dict[str, Any]] = [
            {"name": name, "epochs": chance.randint(1, 3)} for name in "abc"[: chance.randint(1, 3)]
        ]
        self.buckets: list[dict[str, Any]] = [_SQUARE, _WIDE]
        if chance.random() < 0.3:
            self.buckets = [_SQUARE, {**_WIDE, "batch_size": chance.choice([2, 5])}]
        self.broken = frozenset(
            clip(number).identity
            for number in chance.sample(range(count), chance.choice([0, 0, 1, 2]))
        )
        names = [(str(stage["name"]), n) for stage in self.stages for n in range(stage["epochs"])]
        self.epochs = {name: index for index, name in enumerate(names)}
        self.state: dict[str, Any] | None = None
        self.is_saved = False  # by the present launch
        self.run = RunDirectory(place / "run")
        self.run.path.mkdir()
        training = {"steps": 1000, "global_batch_size": self.batch_size}
        recipe = bare_recipe(self.run.path, data=self.data("refuse"), training=training)
        self.run.create(recipe)
        self.oracle = Oracle({index: self.wanted() for index in self.epochs.values()})
        self.trained = Counter[int]()  # clips by epoch
        self.at_state = copy.deepcopy((self.oracle, self.trained))

    def wanted(self) -> set[str]:
        return identities_of(catalog_of(self.numbers)) - self.broken

    def data(self, policy: str) -> dict[str, Any]:
        return {
            "catalog": str(self.place / "catalog.parquet"),
            "buckets": self.buckets,
            "stages": self.stages,
            "workers": 0,
            "on_change": policy,
            "max_quarantined_clips": 100,
        }

    def loaders(self, policy: str, world_size: int, skips: list[tuple[int, int]]) -> list[Loader]:
        folder = "/moved" if self.moved else "/clips"
        catalog = catalog_of(self.numbers, caption=lambda n: f"clip {n} in {folder}")
        catalog.save(self.place / "catalog.parquet")
        data = DataSection.model_validate(self.data(policy))
        found = []
        for rank in range(world_size):
            made = Loader(
                data,
                batch_size=self.batch_size,
                rank=rank,
                world_size=world_size,
                kept=self.run.catalogs_path,
            )
            for span in skips:
                made.skip(*span)
            if self.state is not None:
                made.load_state_dict(self.state)
            found.append(made)
        return found

    def train(
        self, policy: str = "refuse", skips: list[tuple[int, int]] | None = None, *, to_end: bool
    ) -> list[Loader]:
        """Train some steps on some ranks, or to the end, and keep the state of one of them."""
        world_size = self.chance.choice([1, 1, 2, min(3, self.batch_size)])
        smallest = min(each.get("batch_size", self.batch_size) for each in self.buckets)
        loaders = self.loaders(policy, min(world_size, smallest), skips or [])
        first = loaders[0]
        first.keep_catalogs()
        streams = stream_names(first.data)
        history = first.plan_history.history
        folder = begin_launch(
            self.run.ledger_path, first.step, len(loaders), streams, history, first.skipped.spans
        )
        last = first.plan_history.end_step
        assert last is not None
        end = first.end_after(last if to_end else self.chance.randint(1, 12))
        # A launch after a rollback comes past the batches that it skips.
        past = max((skipped_end for _, skipped_end in first.skipped.spans), default=0)
        end = max(end, min(last, past + 1))
        saves_at, self.is_saved = self.chance.randint(min(end, max(first.step, past)), end), False
        with ExitStack() as opened:
            ledgers = [
                opened.enter_context(Ledger(folder, rank, streams)) for rank in range(len(loaders))
            ]
            self._save(first, saves_at)
            for batches in zip(*(each.batches(end) for each in loaders), strict=True):
                for batch, ledger in zip(batches, ledgers, strict=True):
                    ledger.record(batch.consumed)
                    self._consume(batch)
                failed = {
                    key: why for each in loaders for key, why in each.quarantine.failures.items()
                }
                if failed:
                    for each in loaders:
                        each.quarantine.add(failed)
                states = [each.state_dict() for each in loaders]
                assert all(state == states[0] for state in states)
                self._save(first, saves_at)
        return loaders

    def _save(self, first: Loader, at: int) -> None:
        if first.step >= at and not self.is_saved:
            self.state = first.state_dict()
            self.at_state = copy.deepcopy((self.oracle, self.trained))
            self.is_saved = True

    def _consume(self, batch: Batch) -> None:
        samples = zip(batch.identities, batch.epochs, batch.weights.tolist(), strict=True)
        for place, (identity, epoch, weight) in enumerate(samples):
            if weight:
                self.oracle.consume(self.epochs[batch.stage, epoch], identity)
                self.trained[self.epochs[batch.stage, epoch]] += 1
                assert (batch.videos[place] == int(identity[:2], 16)).all()

    # --- What may happen ----------------------------------------------------------------------

    def kill(self) -> None:
        """Lose what was trained since the checkpoint."""
        self.oracle, self.trained = copy.deepcopy(self.at_state)

    def roll_back(self, loaders: list[Loader]) -> list[tuple[int, int]]:
        """Back to the checkpoint, without some of the batches behind it."""
        self.kill()
        assert self.state is not None
        begin, end = self.state["global_step"], loaders[0].step
        if begin >= end:
            return []
        first = self.chance.randrange(begin, end)
        plans = loaders[0].plan_history
        for step in range(first, end):
            if step not in loaders[0].skipped:
                planned = plans.batch(step)
                for identity, epoch in zip(names_of(planned), planned.epochs, strict=True):
                    if identity not in self.broken:
                        self.oracle.consume(self.epochs[planned.stage, epoch], identity)
        return [(first, end)]

    def change(self, loaders: list[Loader]) -> str:
        """Change the data; returns the policy to resume with."""
        self.kill()
        assert self.state is not None
        kind = self.chance.choice(["grow", "shrink", "one removed", "re-encode", "move", "batch"])
        policy = self.chance.choice(["merge", "finish", "restart"])
        if kind in ("shrink", "one removed") and len(self.numbers) < 10:
            kind = "grow"
        if kind == "grow":
            self._add(self.chance.randint(1, 8))
        elif kind in ("shrink", "one removed"):
            count = 1 if kind == "one removed" else len(self.numbers) // 3
            for number in self.chance.sample(self.numbers[1:], min(count, len(self.numbers) - 9)):
                self.numbers.remove(number)
        elif kind == "re-encode":
            self.numbers.remove(self.chance.choice(self.numbers))
            self._add(1)
        elif kind == "move":
            self.moved = not self.moved
        else:
            sizes = {2, 3, 4, 6, 8} - {self.batch_size}
            self.batch_size = self.chance.choice(sorted(sizes))
        step, plans = self.state["global_step"], loaders[0].plan_history
        end = plans.end_step
        counted = max(self.epochs.values()) + 1
        if end is None or step < end:
            planned = plans.batch(step)
            counted = self.epochs[planned.stage, planned.epoch]
        self.oracle.change(policy, self.wanted(), counted)
        return policy

    def _add(self, count: int) -> None:
        self.numbers += range(self.following, self.following + count)
        self.following += count


@pytest.fixture
def _pixels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(decoding_source, "DecodePool", _MadeUpPixels)
    yield
    _MadeUpPixels.broken = frozenset()


@pytest.mark.parametrize("number", range(_NUM_HISTORIES))
@pytest.mark.usefixtures("_pixels")
def test_no_history_repeats_or_loses_a_clip(number: int, tmp_path: Path) -> None:
    chance = random.Random(f"{_SEED}/history/{number}")  # noqa: S311 - it is repeatable
    history = _History(chance, tmp_path)
    _MadeUpPixels.broken = history.broken
    loaders = history.train(to_end=False)
    for _ in range(chance.randint(1, 4)):
        happens = chance.choice(["kill", "roll back", "change", "change"])
        policy, skips = "refuse", list[tuple[int, int]]()
        if happens == "kill":
            history.kill()
        elif happens == "roll back":
            skips = history.roll_back(loaders)
        else:
            policy = history.change(loaders)
        loaders = history.train(policy, skips, to_end=False)
    history.kill()
    history.train("refuse", to_end=True)
    history.oracle.check()
    found = audit(RunDirectory(tmp_path / "run"), with_metrics=False)
    assert found.ok, [each for each in found.epochs if not each.is_exact]
    told = {history.epochs[each.stage, each.epoch]: each.seen for each in found.epochs}
    assert Counter(told) == history.trained

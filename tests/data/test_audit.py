"""The audit proves what a run consumed, and fails when a single record is wrong."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.build import (
    PlannedRun,
    catalog_of,
    names_of,
    on_ranks,
    recipe_of,
    section,
    shape,
    shares_of,
)
from tests.data.catalogs import make_catalog

from longtake.config import DataSection, Recipe
from longtake.data.audit import Audit, EpochAudit, audit
from longtake.data.catalog import Catalog
from longtake.data.ledger import (
    Ledger,
    StepSamples,
    begin_launch,
    read_ledger,
    stream_names,
    with_checksum,
    with_crc,
)
from longtake.data.loader import Loader
from longtake.data.plan import PlannedBatch
from longtake.errors import DataError
from longtake.run_dir import RunDirectory

_BATCH_SIZE = 4
_NUM_CLIPS = 26  # of the fixture stills


def _begin_run(path: Path, **data: Any) -> Recipe:
    """The recipe of a run whose directory is there."""
    recipe = recipe_of(path, **data)
    RunDirectory(path).create(recipe)
    return recipe


class _Run(PlannedRun):
    """A run directory into which launches write what they would have trained on."""

    def __init__(self, path: Path, catalog: Catalog | dict[str, Catalog], **data: Any) -> None:
        self.directory = RunDirectory(path)
        _begin_run(path, **section(**data).model_dump(exclude_none=True))
        super().__init__(self.directory.catalogs_path, catalog, _BATCH_SIZE, **data)

    def launch(self, end: int, world_size: int = 1, lost: Collection[str] = ()) -> None:
        """Train up to a step on so many ranks; clips that are lost cannot be decoded."""
        streams = stream_names(section(**self.data))
        ledger_path, history = self.directory.ledger_path, self.plans.history
        folder = begin_launch(ledger_path, self.step, world_size, streams, history)
        for rank in range(world_size):
            with Ledger(folder, rank, streams) as ledger:
                for step in range(self.step, end):
                    ledger.record(_share(self.plans.batch(step), rank, world_size, lost))
        self.step = end

    def launch_all(self, world_size: int = 1) -> None:
        """Train to the end."""
        assert self.plans.end_step is not None
        self.launch(self.plans.end_step, world_size)


def _share(planned: PlannedBatch, rank: int, world_size: int, lost: Collection[str]) -> StepSamples:
    """What a rank trains and rejects of a batch."""
    local = planned.batch_size // world_size
    samples = list(zip(names_of(planned), planned.epochs, strict=True))[rank * local :][:local]
    trained, rejected = (
        [sample for sample in samples if (sample[0] in lost) == is_lost]
        for is_lost in (False, True)
    )
    return StepSamples(planned.step, f"{planned.stage}/{planned.source}", trained, rejected)


def _audit(run: "_Run | _RolledBackRun", *, is_exact: bool = True) -> Audit:
    found = audit(run.directory)
    assert found.ok == is_exact
    return found


def _facts(epochs: Sequence[EpochAudit]) -> list[tuple[int, int, bool]]:
    return [(each.epoch, each.seen, each.is_over) for each in epochs]


def test_buckets_and_stages_with_batches_of_their_own_are_exact_over_a_change(
    tmp_path: Path,
) -> None:
    stages: list[dict[str, Any]] = [{"name": "a", "epochs": 1}]
    stages += [{"name": "b", "epochs": 2, "global_batch_size": 6, "ramp_steps": 4}]
    stages[1]["where"] = ["num_frames >= 10"]
    shapes = [shape(), shape(32, batch_size=2), shape(num_frames=2, share=0.4)]
    fewer, more = (catalog_of(range(count), num_frames=lambda n: 4 + n) for count in (22, 26))
    run = _Run(tmp_path, fewer, stages=stages, buckets=shapes)
    run.launch(5, world_size=2)
    plans = run.resume(more)
    run.launch(5, world_size=2)
    run.launch_all(world_size=2)
    assert {plans.batch(step).batch_size for step in range(run.step)} == {2, 4, 6}
    found = _audit(run)
    assert [each.stage for each in found.epochs] == ["a", "b", "b"]
    assert _facts(found.epochs) == [(0, 26, True), (0, 20, True), (1, 20, True)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_run_that_consumed_its_plan_is_exact(tmp_path: Path, world_size: int) -> None:
    run = _Run(tmp_path, catalog_of(range(22)))
    run.launch(14, world_size)
    found = _audit(run)
    assert (found.end_step, found.num_abandoned) == (14, 0)
    assert sum(each.seen for each in found.epochs) == 14 * 4
    assert _facts(found.epochs) == [(0, 22, True), (1, 22, True), (2, 12, False)]
    for each in found.epochs:
        assert (each.stage, each.source) == ("all", "catalog")
        assert (each.repeated, each.missing, each.rejected, each.unplanned) == (0, 0, 0, 0)


def test_several_catalogs_are_told_apart(tmp_path: Path) -> None:
    both = {"a": "a.parquet", "b": "b.parquet"}
    clips = {"a": catalog_of(range(12)), "b": catalog_of(range(6, 18))}
    run = _Run(tmp_path, clips, catalogs=both, weights={"a": 2.0})
    run.launch(12)
    found = _audit(run)
    seen = {each.source: each.seen for each in found.epochs if each.epoch == 0}
    assert seen == {"a": 12, "b": 12}


def _ledger_file(run: _Run, rank: int = 0) -> Path:
    return run.directory.ledger_path / "launch_0000" / f"rank_{rank:04d}.bin"


def _rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the records of a ledger, of 15 bytes without their checksums, which are made anew."""
    data = path.read_bytes()
    records = b"".join(data[start : start + 15] for start in range(0, len(data), 16))
    changed = change(records)
    parts = (changed[start : start + 15] for start in range(0, len(changed), 15))
    path.write_bytes(b"".join(map(with_crc, parts)))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("forged", "expected"),
    [
        pytest.param(lambda data: data[:45] + data[30:], (1, 0, 0), id="duplicated"),
        pytest.param(
            lambda data: data[:30] + b"\xaa" * 7 + data[37:45] + data[30:], (0, 0, 1), id="added"
        ),
        pytest.param(lambda data: data[:30] + data[45:], (0, 1, 0), id="removed"),
        pytest.param(lambda data: data[:60] + data[90:], (0, 2, 0), id="a step is missing"),
        pytest.param(lambda data: data[:30] + b"\xaa" * 7 + data[37:], (0, 1, 1), id="foreign"),
        pytest.param(lambda data: data[:30] + data[:7] + data[37:], (1, 1, 0), id="a repeat"),
        pytest.param(lambda data: data[:42] + b"\x05" + data[43:], (0, 1, 1), id="other epoch"),
    ],
)
def test_a_single_wrong_record_is_found(
    tmp_path: Path,
    forged: Callable[[bytes], bytes],
    expected: tuple[int, int, int],
    world_size: int,
) -> None:
    run = _Run(tmp_path, catalog_of(range(22)))
    run.launch(14, world_size)
    _rewrite(_ledger_file(run, world_size - 1), forged)
    found = _audit(run, is_exact=False)
    sums = [
        sum(getattr(e, name) for e in found.epochs) for name in ("repeated", "missing", "unplanned")
    ]
    assert tuple(sums) == expected
    assert all(each.examples for each in found.epochs if not each.is_exact)


def test_rejected_clips_are_not_missing(tmp_path: Path) -> None:
    clips = catalog_of(range(22))
    run = _Run(tmp_path, clips)
    lost = {clips.clip(3).identity, clips.clip(4).identity}
    run.launch(14, world_size=2, lost=lost)
    found = _audit(run)
    assert [each.rejected for each in found.epochs[:2]] == [2, 2]
    assert _facts(found.epochs)[:2] == [(0, 20, True), (1, 20, True)]


@pytest.mark.parametrize(("policy", "step"), [("finish", 3), ("merge", 5)])
def test_a_run_whose_data_changed_twice_is_exact(tmp_path: Path, policy: str, step: int) -> None:
    run = _Run(tmp_path, catalog_of(range(22)), stages=[{"name": "only", "epochs": 4}])
    run.launch(step)
    run.resume(catalog_of(range(4, 30)), on_change=policy)
    run.launch(step + 3, 2)
    run.resume(catalog_of(range(40, 60)), on_change=policy)
    run.launch(step + 3, 2)
    plans = run.resume(catalog_of(range(15)), batch_size=2, on_change=policy)
    run.launch(step + 6, 2)
    found = _audit(run)
    assert found.end_step == step + 6
    planned = sum(len(plans.batch(each).rows) for each in range(step + 6))
    assert sum(each.seen for each in found.epochs) == planned
    run.launch_all()
    found = _audit(run)
    assert _facts(found.epochs)[-1] == (3, 15, True)


def test_an_epoch_with_nothing_left_after_a_change_is_exact(tmp_path: Path) -> None:
    whole = catalog_of([1, 2, 4, 5, 7, 8])  # square ones, in one bucket
    run = _Run(tmp_path, whole, stages=[{"name": "only", "epochs": 2}])
    run.launch(1)
    seen = names_of(run.plans.batch(0))
    run.resume(make_catalog(clip for clip in whole.clips() if clip.identity in seen))
    run.launch(1)
    assert run.plans.end_step == 2
    run.launch_all()
    found = _audit(run)
    assert [epoch[:2] for epoch in _facts(found.epochs)] == [(0, 4), (1, 4)]


def test_clips_whose_first_bytes_coincide_are_no_repeats(tmp_path: Path) -> None:
    twins = catalog_of(range(22), identity=lambda n: "00" * 7 + f"{n:018x}")
    run = _Run(tmp_path, twins)
    run.launch(14)
    _audit(run)
    _rewrite(_ledger_file(run), lambda data: data[:45] + data[30:])
    _audit(run, is_exact=False)


def test_without_a_ledger_or_its_catalogs_nothing_is_proved(tmp_path: Path) -> None:
    run = _Run(tmp_path, catalog_of(range(22)))
    with pytest.raises(DataError, match="has no ledger"):
        _audit(run)
    run.launch(3)
    (kept,) = run.directory.catalogs_path.iterdir()
    kept.unlink()
    with pytest.raises(DataError, match=rf"{kept.name} does not keep it"):
        _audit(run)


class _RolledBackRun:
    """A run of some ranks in one process, that saves after every batch and can go back.

    `kept` are the numbers of the batches that it trained and did not give up: a list that is cut
    when the run goes back, and knows nothing of loaders and ledgers.
    """

    def __init__(self, path: Path, catalog: Path, **data: Any) -> None:
        still = shape(num_frames=1)
        self.recipe = _begin_run(path, catalog=catalog, buckets=[still], workers=0, **data)
        self.directory = RunDirectory(path)
        self.rolled_back: list[tuple[int, int]] = []
        self.kept: list[int] = []
        self.states: dict[int, dict[str, Any]] = {}
        self.loaders: list[Loader] = []
        self.start()

    @property
    def step(self) -> int:
        """Updates that are done and were not given up."""
        return len(self.kept)

    def start(self, world_size: int = 1, step: int | None = None, **data: Any) -> None:
        """Start as a new process, from the beginning or from a state; told of all rollbacks."""
        changed = DataSection.model_validate(self.recipe.data.model_dump(exclude_none=True) | data)
        kept = self.directory.catalogs_path
        self.loaders = on_ranks(changed, world_size, batch_size=_BATCH_SIZE, kept=kept)
        self._go_on_from(step)

    def _go_on_from(self, step: int | None) -> None:
        for loader in self.loaders:
            for span in self.rolled_back:
                loader.skip(*span)
            if step is not None:
                loader.load_state_dict(self.states[step])
        self.kept = self.kept[: step or 0]
        self.states = {at: state for at, state in self.states.items() if at <= (step or 0)}
        first = self.loaders[0]
        self.states.setdefault(self.step, json.loads(json.dumps(first.state_dict())))
        first.keep_catalogs()
        self.folder = begin_launch(
            self.directory.ledger_path,
            first.step,
            len(self.loaders),
            stream_names(first.data),
            first.plan_history.history,
            first.skipped.spans,
        )

    def roll_back(self, step: int, span: tuple[int, int]) -> None:
        """Within the process, to the state of an earlier step."""
        self.rolled_back.append(span)
        self._go_on_from(step)

    def train(self, count: int) -> None:
        """Train so many batches, or those that are left."""
        names = stream_names(self.loaders[0].data)
        (end,) = {loader.end_after(count) for loader in self.loaders}
        with ExitStack() as stack:
            ledgers = [
                stack.enter_context(Ledger(self.folder, rank, names))
                for rank in range(len(self.loaders))
            ]
            for shares in shares_of(self.loaders, end):
                for ledger, share in zip(ledgers, shares, strict=True):
                    ledger.record(share.consumed)
                self.kept.append(shares[0].step)
                states = [json.dumps(loader.state_dict()) for loader in self.loaders]
                assert len(set(states)) == 1
                self.states[self.step] = json.loads(states[0])

    def assert_is_exact(self) -> None:
        """The ledger holds just the samples of the batches that count; the audit says the same."""
        plan_history = self.loaders[0].plan_history
        expected = Counter(
            (number, epoch) for number in self.kept for epoch in plan_history.batch(number).epochs
        )
        consumed = read_ledger(self.directory.ledger_path)
        pairs = zip(consumed.step.tolist(), consumed.epoch.tolist(), strict=True)
        assert Counter(pairs) == expected
        found = _audit(self)
        assert found.end_step - found.num_skipped == self.step
        seen = {each.epoch: each.seen for each in found.epochs if each.seen}
        assert seen == Counter(epoch for _, epoch in expected.elements())
        assert {e.seen + e.skipped for e in found.epochs if e.is_over} <= {_NUM_CLIPS}


def test_a_rollback_is_exact(stills: Path, tmp_path: Path) -> None:
    run = _RolledBackRun(tmp_path, stills)
    run.train(9)
    run.roll_back(3, (5, 11))
    run.train(6)
    assert run.kept == [0, 1, 2, 3, 4, 11, 12, 13, 14]
    run.assert_is_exact()
    found = _audit(run)
    assert (found.end_step, found.num_skipped, found.num_abandoned) == (15, 6, 6 * 4)
    assert [(e.seen, e.skipped, e.missing, e.is_over) for e in found.epochs] == [
        (20, 6, 0, True),
        (8, 18, 0, True),
        (8, 0, 0, False),
    ]


def test_ranks_that_were_killed_after_a_rollback(stills: Path, tmp_path: Path) -> None:
    run = _RolledBackRun(tmp_path, stills)
    run.train(4)
    run.start(2, step=4)
    run.train(5)
    run.roll_back(5, (6, 9))
    run.train(3)
    path = run.folder / "rank_0001.bin"
    path.write_bytes(path.read_bytes()[:-20])
    found = _audit(run)
    assert (found.end_step, found.num_skipped) == (10, 3)
    run.start(4, step=6)
    run.train(4)
    assert run.kept == [0, 1, 2, 3, 4, 5, 9, 10, 11, 12]
    run.assert_is_exact()


def _forge(run: _RolledBackRun, launch: int, **facts: Any) -> None:
    path = run.directory.ledger_path / f"launch_{launch:04d}" / "launch.json"
    path.write_text(json.dumps(with_checksum(json.loads(path.read_text()) | facts)))


def test_a_skipped_batch_that_was_trained_is_found(stills: Path, tmp_path: Path) -> None:
    run = _RolledBackRun(tmp_path, stills)
    run.train(4)
    _forge(run, 0, skipped=[[2, 3]])
    found = _audit(run, is_exact=False)
    assert [(e.seen, e.skipped, e.unplanned, e.repeated) for e in found.epochs] == [(16, 4, 4, 0)]
    assert len(found.epochs[0].examples) == 4
    path = run.folder / "rank_0000.bin"
    path.write_bytes(path.read_bytes() + path.read_bytes()[2 * 64 : 3 * 64])
    (epoch,) = _audit(run, is_exact=False).epochs
    assert (epoch.unplanned, epoch.repeated) == (4, 4)


def test_a_batch_that_was_not_trained_and_not_skipped_is_found(
    stills: Path, tmp_path: Path
) -> None:
    run = _RolledBackRun(tmp_path, stills)
    run.train(4)
    run.roll_back(2, (2, 4))
    run.train(2)
    _audit(run)
    _forge(run, 1, skipped=[[2, 3]])
    found = _audit(run, is_exact=False)
    assert [(e.skipped, e.missing) for e in found.epochs] == [(4, 4)]


def test_a_rollback_and_then_other_data(stills: Path, tmp_path: Path) -> None:
    catalog = Catalog.load(stills)
    changed = tmp_path / "changed.parquet"
    make_catalog(list(catalog.clips())[4:]).save(changed)
    run = _RolledBackRun(tmp_path, stills)
    run.train(7)
    run.roll_back(3, (4, 8))
    run.train(2)
    assert run.kept == [0, 1, 2, 3, 8]
    run.start(2, step=5, catalog=changed, on_change="merge")
    run.train(18)
    found = _audit(run)
    assert found.num_skipped == 4
    whole = [epoch for epoch in found.epochs if epoch.is_over and epoch.epoch > 1]
    assert {(epoch.seen, epoch.skipped) for epoch in whole} == {(_NUM_CLIPS - 4, 0)}
    run.roll_back(12, (run.kept[12], run.kept[12] + 2))
    run.train(4)
    found = _audit(run)
    assert found.num_skipped == 6


def test_a_span_over_the_end_of_a_stage_that_is_made_longer(stills: Path, tmp_path: Path) -> None:
    """Only those batches of the span count that the stage would have had."""
    once, twice = ([{"name": "only", "epochs": number}] for number in (1, 2))
    run = _RolledBackRun(tmp_path, stills, stages=once)
    run.train(6)
    run.roll_back(4, (5, 9))
    run.train(9)
    assert run.kept == [0, 1, 2, 3, 4]
    _audit(run)
    run.start(2, step=5, stages=twice, on_change="merge")
    run.train(9)
    assert run.kept == [0, 1, 2, 3, 4, *range(9, 16)]
    found = _audit(run)
    assert (found.end_step, found.num_skipped) == (16, 2)
    assert [(e.seen, e.skipped) for e in found.epochs] == [(18, 8), (26, 0)]


_ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("train"), st.integers(1, 6), st.just(0)),
        st.tuples(st.just("roll back"), st.integers(0, 6), st.integers(0, 5)),
        st.tuples(st.just("resume"), st.integers(0, 6), st.sampled_from([1, 2, 4])),
    ),
    min_size=2,
    max_size=7,
)


def _act(run: _RolledBackRun, action: tuple[str, int, int]) -> None:
    """Roll back or resume by so many steps; a rolled-back span may begin before the checkpoint."""
    kind, number, more = action
    step = max(0, run.step - number)
    if kind == "train":
        run.train(number)
    elif kind == "resume":
        run.start(more, step)
    else:
        newest = run.kept[-1] if run.kept else 0
        run.roll_back(step, (max(0, newest - more), newest + 2))


@settings(max_examples=30, deadline=None)
@given(actions=_ACTIONS)
def test_any_run_is_exact(stills: Path, actions: Sequence[tuple[str, int, int]]) -> None:
    """Any rollbacks and resumes, from any state, on any ranks: each clip once, minus the skipped.

    A process that starts where another one is has the same state, and hands out the same.
    """
    with TemporaryDirectory() as folder:
        run = _RolledBackRun(Path(folder), stills)
        for action in [*actions, ("train", 4, 0)]:
            _act(run, action)
        run.assert_is_exact()
        here, numbers = run.loaders[0].state_dict(), list(_numbers(run, 5))
        run.start(2, run.step)
        assert run.loaders[0].state_dict() == here
        assert list(_numbers(run, 5)) == numbers
        run.train(5)
        assert run.kept[-5:] == numbers
        run.assert_is_exact()


def _numbers(run: _RolledBackRun, count: int) -> Iterator[int]:
    """The numbers of the next batches."""
    loader = Loader(run.recipe.data, batch_size=_BATCH_SIZE, kept=run.directory.catalogs_path)
    loader.load_state_dict(run.loaders[0].state_dict())
    return (batch.step for batch in loader.batches(loader.end_after(count)))

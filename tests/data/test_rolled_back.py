"""Runs that went back and skipped batches: exactly once, minus what was skipped, is proved."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtake import config
from longtake.config import DataSection
from longtake.data.audit import Audit, audit
from longtake.data.catalog import Catalog
from longtake.data.ledger import begin_launch, keep_ledger, read_ledger, stream_names, with_checksum
from longtake.data.loader import Loader
from longtake.run_dir import RunDirectory

_NUM_CLIPS, _BATCH_SIZE = 26, 4  # of the fixture stills


class _Run:
    """A run of some ranks in one process, that saves after every batch and can go back.

    `kept` are the numbers of the batches that it trained and did not give up: a list that is cut
    when the run goes back, and knows nothing of loaders and ledgers.
    """

    def __init__(self, path: Path, catalog: Path, **data: Any) -> None:
        shape = {"num_frames": 1, "height": 16, "width": 16}
        section = {"catalog": catalog, "buckets": [shape], "workers": 0, **data}
        values = {
            "out": str(path),
            "data": section,
            "model": {"family": "tubelet"},
            "training": {"steps": 100, "batch_size": _BATCH_SIZE},
        }
        self.directory = RunDirectory(path)
        self.recipe = config.parse(json.loads(json.dumps(values, default=str)), "test")
        self.directory.create(self.recipe)
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
        section = DataSection.model_validate(
            {**self.recipe.data.model_dump(exclude_none=True), **data}
        )
        self.loaders = [
            Loader(
                section,
                batch_size=_BATCH_SIZE,
                rank=rank,
                world_size=world_size,
                kept=self.directory.catalogs_path,
            )
            for rank in range(world_size)
        ]
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
            first.course.history,
            first.skipped,
        )

    def roll_back(self, step: int, span: tuple[int, int]) -> None:
        """Within the process, to the state of an earlier step."""
        self.rolled_back.append(span)
        self._go_on_from(step)

    def train(self, count: int) -> None:
        """Train so many batches, or those that are left."""
        names = stream_names(self.loaders[0].data)
        ledgers = [keep_ledger(self.folder, n, names) for n in range(len(self.loaders))]
        open_ledgers = [each.__enter__() for each in ledgers]
        ends = [loader.end_after(count) for loader in self.loaders]
        streams = [loader.batches(end) for loader, end in zip(self.loaders, ends, strict=True)]
        for shares in zip(*streams, strict=True):
            for ledger, share in zip(open_ledgers, shares, strict=True):
                ledger.record(share)
            self.kept.append(shares[0].step)
            states = [json.dumps(loader.state_dict()) for loader in self.loaders]
            assert len(set(states)) == 1
            self.states[self.step] = json.loads(states[0])
        for each in ledgers:
            each.__exit__(None, None, None)

    def audit(self) -> Audit:
        return audit(self.directory)

    def assert_is_exact(self) -> None:
        """The ledger holds just the samples of the batches that count; the audit says the same."""
        course = self.loaders[0].course
        wanted: Counter[tuple[int, int]] = Counter()
        for number in self.kept:
            wanted.update((number, epoch) for epoch in course.batch(number).epochs)
        consumed = read_ledger(self.directory.ledger_path)
        pairs = zip(consumed.step.tolist(), consumed.epoch.tolist(), strict=True)
        assert Counter(pairs) == wanted
        found = self.audit()
        assert found.ok
        assert found.end_step - found.num_skipped == self.step
        assert {each.epoch: each.seen for each in found.epochs if each.seen} == Counter(
            epoch for (_, epoch), count in wanted.items() for _ in range(count)
        )
        for each in found.epochs:
            if each.is_over:
                assert each.seen + each.skipped == _NUM_CLIPS


def test_a_rollback_is_exact(stills: Path, tmp_path: Path) -> None:
    """Innocent batches before the span are trained again, and nothing of the span is."""
    run = _Run(tmp_path, stills)
    run.train(9)
    run.roll_back(3, (5, 11))
    run.train(6)
    assert run.kept == [0, 1, 2, 3, 4, 11, 12, 13, 14]
    run.assert_is_exact()
    found = run.audit()
    assert (found.end_step, found.num_skipped, found.num_abandoned) == (15, 6, 6 * 4)
    assert [(e.seen, e.skipped, e.missing, e.is_over) for e in found.epochs] == [
        (20, 6, 0, True),
        (8, 18, 0, True),
        (8, 0, 0, False),
    ]


def test_what_was_trained_before_the_checkpoint_stays_trained(stills: Path, tmp_path: Path) -> None:
    """A span that begins before the checkpoint is skipped from the checkpoint on.

    What the abandoned launch recorded of it does not count, although the next one begins after it.
    """
    run = _Run(tmp_path, stills)
    run.train(9)
    run.roll_back(6, (4, 11))
    assert [loader.step for loader in run.loaders] == [11]
    run.train(2)
    assert run.kept == [0, 1, 2, 3, 4, 5, 11, 12]
    run.assert_is_exact()
    assert run.audit().num_skipped == 5


def test_several_rollbacks_in_one_process(stills: Path, tmp_path: Path) -> None:
    """Each is a launch of the ledger; the last goes back to before an earlier span."""
    run = _Run(tmp_path, stills)
    run.train(8)
    run.roll_back(6, (6, 9))
    run.train(4)
    run.roll_back(7, (10, 12))
    run.train(5)
    run.roll_back(4, (15, 18))
    run.train(9)
    assert run.kept == [*range(6), 9, 12, 13, 14, 18, 19, 20]
    run.assert_is_exact()
    found = run.audit()
    assert (found.num_skipped, len(list(run.directory.ledger_path.iterdir()))) == (8, 4)


def test_a_rollback_before_anything_is_trained_again(stills: Path, tmp_path: Path) -> None:
    """Killed right after it: what was given up is given up, and nothing is skipped yet."""
    run = _Run(tmp_path, stills)
    run.train(8)
    run.roll_back(5, (5, 10))
    found = run.audit()
    assert found.ok
    assert (found.end_step, found.num_skipped, found.num_abandoned) == (5, 0, 3 * 4)


def test_ranks_that_were_killed_after_a_rollback(stills: Path, tmp_path: Path) -> None:
    """Half a record, and a step that not all ranks have done, are no part of the proof."""
    run = _Run(tmp_path, stills)
    run.train(4)
    run.start(2, step=4)
    run.train(5)
    run.roll_back(5, (6, 9))
    run.train(3)
    path = run.folder / "rank_0001.bin"
    path.write_bytes(path.read_bytes()[:-20])
    found = run.audit()
    assert found.ok
    assert (found.end_step, found.num_skipped) == (10, 3)
    run.start(4, step=6)
    run.train(4)
    assert run.kept == [0, 1, 2, 3, 4, 5, 9, 10, 11, 12]
    run.assert_is_exact()


def _forge(run: _Run, launch: int, **facts: Any) -> None:
    path = run.directory.ledger_path / f"launch_{launch:04d}" / "launch.json"
    path.write_text(json.dumps(with_checksum(json.loads(path.read_text()) | facts)))


def test_a_skipped_batch_that_was_trained_is_found(stills: Path, tmp_path: Path) -> None:
    """Its clips do not belong into the epoch, and a clip of it that comes twice is a repeat."""
    run = _Run(tmp_path, stills)
    run.train(4)
    _forge(run, 0, skipped=[[2, 3]])
    found = run.audit()
    assert not found.ok
    assert [(e.seen, e.skipped, e.unplanned, e.repeated) for e in found.epochs] == [(16, 4, 4, 0)]
    assert len(found.epochs[0].examples) == 4
    path = run.folder / "rank_0000.bin"
    path.write_bytes(path.read_bytes() + path.read_bytes()[2 * 64 : 3 * 64])
    (epoch,) = run.audit().epochs
    assert (epoch.unplanned, epoch.repeated) == (4, 4)


def test_a_batch_that_was_not_trained_and_not_skipped_is_found(
    stills: Path, tmp_path: Path
) -> None:
    """The span in the ledger is shorter than what was left out."""
    run = _Run(tmp_path, stills)
    run.train(4)
    run.roll_back(2, (2, 4))
    run.train(2)
    assert run.audit().ok
    _forge(run, 1, skipped=[[2, 3]])
    found = run.audit()
    assert not found.ok
    assert [(e.skipped, e.missing) for e in found.epochs] == [(4, 4)]


@pytest.mark.parametrize("policy", ["merge", "finish", "restart"])
def test_a_rollback_and_then_other_data(stills: Path, tmp_path: Path, policy: str) -> None:
    """The catalogs of then say what was skipped; epochs that begin later are whole."""
    catalog = Catalog.load(stills)
    changed = tmp_path / "changed.parquet"
    Catalog.of(list(catalog.clips())[4:]).save(changed)
    run = _Run(tmp_path, stills)
    run.train(7)
    run.roll_back(3, (4, 8))
    run.train(2)
    assert run.kept == [0, 1, 2, 3, 8]
    run.start(2, step=5, catalog=changed, on_change=policy)
    run.train(18)
    found = run.audit()
    assert found.ok
    assert found.num_skipped == 4
    whole = [epoch for epoch in found.epochs if epoch.is_over and epoch.epoch > 1]
    assert {(epoch.seen, epoch.skipped) for epoch in whole} == {(_NUM_CLIPS - 4, 0)}
    run.roll_back(12, (run.kept[12], run.kept[12] + 2))
    run.train(4)
    found = run.audit()
    assert found.ok
    assert found.num_skipped == 6


def test_a_span_over_the_end_of_a_stage_that_is_made_longer(stills: Path, tmp_path: Path) -> None:
    """Of the span only those batches count that there would have been."""
    once, twice = ([{"name": "only", "epochs": number}] for number in (1, 2))
    run = _Run(tmp_path, stills, stages=once)
    run.train(6)
    run.roll_back(4, (5, 9))
    run.train(9)
    assert run.kept == [0, 1, 2, 3, 4]
    assert run.audit().ok
    run.start(2, step=5, stages=twice, on_change="merge")
    run.train(9)
    assert run.kept == [0, 1, 2, 3, 4, *range(9, 16)]
    found = run.audit()
    assert found.ok
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


def _act(run: _Run, action: tuple[str, int, int]) -> None:
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
        run = _Run(Path(folder), stills)
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


def _numbers(run: _Run, count: int) -> Iterator[int]:
    """Of the batches that come next."""
    loader = Loader(run.recipe.data, batch_size=_BATCH_SIZE, kept=run.directory.catalogs_path)
    loader.load_state_dict(run.loaders[0].state_dict())
    return (batch.step for batch in loader.batches(loader.end_after(count)))

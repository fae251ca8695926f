"""The audit proves what a run consumed, and fails when a single record is wrong."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from longtake import config
from longtake.config import DataSection
from longtake.data.audit import Audit, EpochAudit, audit
from longtake.data.batch import Batch
from longtake.data.catalog import Catalog
from longtake.data.course import Course, keep_catalogs, resume, start
from longtake.data.ledger import Ledger, begin_launch, keep_ledger, stream_names, with_crc
from longtake.data.plan import PlannedBatch
from longtake.errors import DataError
from longtake.run_dir import RunDirectory

_SHAPES = [{"num_frames": 4, "height": 16, "width": width} for width in (16, 32)]


class _Run:
    """A run directory into which launches write what they would have trained on."""

    def __init__(self, path: Path, batch_size: int = 4, **data: Any) -> None:
        where = {} if "catalogs" in data else {"catalog": "c.parquet"}
        values = {
            "out": str(path),
            "data": {**where, "buckets": _SHAPES, **data},
            "model": {"family": "tubelet"},
            "training": {"steps": 100, "batch_size": batch_size},
        }
        self.recipe = config.parse(values, "test")
        self.directory = RunDirectory(path)
        self.directory.create(self.recipe)
        self.course: Course | None = None

    def launch(
        self,
        catalog: Catalog | dict[str, Catalog],
        steps: range,
        world_size: int = 1,
        lost: Collection[str] = (),
        batch_size: int = 4,
        **changes: Any,
    ) -> Course:
        """Train some steps on so many ranks; clips that are lost cannot be decoded."""
        catalogs = catalog if isinstance(catalog, dict) else {"catalog": catalog}
        values = {**self.recipe.data.model_dump(exclude_none=True), **changes}
        data, kept = DataSection.model_validate(values), self.directory.catalogs_path
        if self.course is None:
            self.course = start(catalogs, data, batch_size, 0)
        else:
            history = self.course.history
            self.course = resume(history, steps.start, catalogs, data, batch_size, 0, kept)
        keep_catalogs(self.course, catalogs, kept)
        streams = stream_names(data)
        ledger_path, history = self.directory.ledger_path, self.course.history
        folder = begin_launch(ledger_path, steps.start, world_size, streams, history)
        for rank in range(world_size):
            with keep_ledger(folder, rank, streams) as ledger:
                for step in steps:
                    _record(ledger, self.course.batch(step), rank, world_size, lost)
        return self.course

    def audit(self) -> Audit:
        return audit(self.directory)


def _record(
    ledger: Ledger, planned: PlannedBatch, rank: int, world_size: int, lost: Collection[str]
) -> None:
    """A rank's share, with stand-ins for what is lost or not there."""
    local = planned.batch_size // world_size
    mine = slice(rank * local, (rank + 1) * local)
    names = planned.catalog.identities.take(pa.array(planned.rows[mine])).to_pylist()
    samples = list(zip([name.hex() for name in names], planned.epochs[mine], strict=True))
    samples += [("ff" * 16, 0)] * (local - len(samples))
    is_lost = [name in lost or name == "ff" * 16 for name, _ in samples]
    batch = Batch(
        step=planned.step,
        stage=planned.stage,
        source=planned.source,
        epoch=planned.epoch,
        begins_epoch=planned.number == 0,
        bucket=planned.bucket,
        videos=torch.empty(0),
        captions=("",) * local,
        seeds=(0,) * local,
        identities=tuple(
            "ee" * 16 if gone else name for (name, _), gone in zip(samples, is_lost, strict=True)
        ),
        epochs=tuple(epoch for _, epoch in samples),
        weights=torch.tensor([0.0 if gone else 1.0 for gone in is_lost]),
        rejected=tuple(sample for sample in samples if sample[0] in lost),
    )
    ledger.record(batch)


def _facts(epochs: Sequence[EpochAudit]) -> list[tuple[int, int, bool]]:
    """(epoch, seen, is_over) of each."""
    return [(each.epoch, each.seen, each.is_over) for each in epochs]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_run_that_consumed_its_plan_is_exact(
    catalog_of: Callable[..., Catalog], tmp_path: Path, world_size: int
) -> None:
    """Epoch by epoch; the one that is going on has seen a part and misses nothing."""
    run = _Run(tmp_path)
    run.launch(catalog_of(range(22)), range(14), world_size)
    found = run.audit()
    assert found.ok
    assert (found.end_step, found.num_abandoned) == (14, 0)
    assert sum(each.seen for each in found.epochs) == 14 * 4
    assert _facts(found.epochs)[:2] == [(0, 22, True), (1, 22, True)]
    assert found.epochs[2].seen == 12
    assert not found.epochs[2].is_over
    for each in found.epochs:
        assert (each.stage, each.source) == ("all", "catalog")
        assert (each.repeated, each.missing, each.rejected, each.unplanned) == (0, 0, 0, 0)


def test_a_run_of_stages_to_its_end_is_exact(
    catalog_of: Callable[..., Catalog], tmp_path: Path
) -> None:
    """With ramps, a smaller last batch on four ranks, and each stage's own epochs."""
    stages = [
        {"name": "a", "epochs": 2},
        {"name": "b", "epochs": 1, "where": ["num_frames >= 10"], "ramp_steps": 4},
    ]
    run = _Run(tmp_path, stages=stages)
    clips = catalog_of(range(22), num_frames=lambda n: 4 + n)
    end = start({"catalog": clips}, run.recipe.data, 4, 0).end_step
    assert end is not None
    run.launch(clips, range(end), world_size=4)
    found = run.audit()
    assert found.ok
    assert [
        (each.stage, *facts) for each, facts in zip(found.epochs, _facts(found.epochs), strict=True)
    ] == [
        ("a", 0, 22, True),
        ("a", 1, 22, True),
        ("b", 0, 16, True),
    ]


def test_several_catalogs_are_told_apart(
    catalog_of: Callable[..., Catalog], tmp_path: Path
) -> None:
    """Each has epochs of its own, even of the same clips."""
    both = {"a": "a.parquet", "b": "b.parquet"}
    run = _Run(tmp_path, catalogs=both, weights={"a": 2.0})
    run.launch({"a": catalog_of(range(12)), "b": catalog_of(range(6, 18))}, range(12))
    found = run.audit()
    assert found.ok
    assert {each.source: each.seen for each in found.epochs if each.epoch == 0} == {
        "a": 12,
        "b": 12,
    }


def test_abandoned_steps_are_no_repeats(catalog_of: Callable[..., Catalog], tmp_path: Path) -> None:
    """The run was killed at step 9 and went on from 6, on other ranks."""
    run = _Run(tmp_path)
    run.launch(catalog_of(range(22)), range(9))
    run.launch(catalog_of(range(22)), range(6, 14), world_size=2)
    found = run.audit()
    assert found.ok
    assert (found.end_step, found.num_abandoned) == (14, 12)
    assert sum(each.seen for each in found.epochs) == 14 * 4


def _ledger_file(run: _Run, rank: int = 0) -> Path:
    return run.directory.ledger_path / "launch_0000" / f"rank_{rank:04d}.bin"


def _rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the records of a ledger, of 15 bytes without their checksums, which are made anew."""
    data = path.read_bytes()
    records = b"".join(data[start : start + 15] for start in range(0, len(data), 16))
    changed = change(records)
    parts = (changed[start : start + 15] for start in range(0, len(changed), 15))
    path.write_bytes(b"".join(map(with_crc, parts)))


_FORGED = {
    "duplicated": lambda data: data[:45] + data[30:],
    "added": lambda data: data[:30] + b"\xaa" * 7 + data[37:45] + data[30:],
    "removed": lambda data: data[:30] + data[45:],
    "foreign": lambda data: data[:30] + b"\xaa" * 7 + data[37:],
    "swapped for a repeat": lambda data: data[:30] + data[:7] + data[37:],
    "of another epoch": lambda data: data[:42] + b"\x05" + data[43:],
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("duplicated", (1, 0, 0)),
        ("added", (0, 0, 1)),
        ("removed", (0, 1, 0)),
        ("foreign", (0, 1, 1)),
        ("swapped for a repeat", (1, 1, 0)),
        ("of another epoch", (0, 1, 1)),
    ],
)
def test_a_single_wrong_record_is_found(
    catalog_of: Callable[..., Catalog],
    tmp_path: Path,
    how: str,
    expected: tuple[int, int, int],
    world_size: int,
) -> None:
    """Whichever bytes of the ledger are edited, the audit is not ok, and says where."""
    run = _Run(tmp_path)
    run.launch(catalog_of(range(22)), range(14), world_size)
    path = _ledger_file(run, world_size - 1)
    _rewrite(path, _FORGED[how])
    found = run.audit()
    assert not found.ok
    sums = [
        sum(getattr(e, name) for e in found.epochs) for name in ("repeated", "missing", "unplanned")
    ]
    assert tuple(sums) == expected
    wrong = [each for each in found.epochs if not each.is_exact]
    assert all(each.examples for each in wrong)


def test_a_step_that_was_skipped_is_found(
    catalog_of: Callable[..., Catalog], tmp_path: Path
) -> None:
    """A rank that trained one batch less than the others, in the middle."""
    run = _Run(tmp_path)
    run.launch(catalog_of(range(22)), range(14), 2)
    path = _ledger_file(run, 1)
    _rewrite(path, lambda data: data[:60] + data[90:])
    found = run.audit()
    assert not found.ok
    assert sum(each.missing for each in found.epochs) == 2


def test_rejected_clips_are_not_missing(catalog_of: Callable[..., Catalog], tmp_path: Path) -> None:
    """They are counted in each epoch that would have had them."""
    run, clips = _Run(tmp_path), catalog_of(range(22))
    lost = {clips.clip(3).identity, clips.clip(4).identity}
    run.launch(clips, range(14), world_size=2, lost=lost)
    found = run.audit()
    assert found.ok
    assert [each.rejected for each in found.epochs[:2]] == [2, 2]
    assert _facts(found.epochs)[:2] == [(0, 20, True), (1, 20, True)]


@pytest.mark.parametrize("step", [3, 5, 6])
@pytest.mark.parametrize("policy", ["finish", "merge", "restart"])
def test_a_run_whose_data_changed_twice_is_exact(
    catalog_of: Callable[..., Catalog], tmp_path: Path, policy: str, step: int
) -> None:
    """The catalogs of then are taken from what the run kept; ranks and batch size changed, too."""
    run = _Run(tmp_path, stages=[{"name": "only", "epochs": 4}])
    run.launch(catalog_of(range(22)), range(step), 1)
    second: dict[str, Any] = {"on_change": policy, "batch_size": 4}
    run.launch(catalog_of(range(4, 30)), range(step, step + 3), 2, **second)
    run.launch(catalog_of(range(40, 60)), range(step + 3, step + 3), 2, **second)
    third: dict[str, Any] = {"on_change": policy, "batch_size": 2}
    course = run.launch(catalog_of(range(15)), range(step + 3, step + 6), 2, **third)
    found = run.audit()
    assert found.ok
    assert found.end_step == step + 6
    planned = sum(len(course.batch(each).rows) for each in range(step + 6))
    assert sum(each.seen for each in found.epochs) == planned
    assert course.end_step is not None
    run.launch(catalog_of(range(15)), range(step + 6, course.end_step), 1, **third)
    found = run.audit()
    assert found.ok
    assert found.epochs[-1].epoch == 3
    assert found.epochs[-1].seen == 15
    assert found.epochs[-1].is_over


@pytest.mark.parametrize("policy", ["finish", "merge", "restart"])
def test_a_run_whose_data_changed_in_its_last_epoch_is_exact(
    catalog_of: Callable[..., Catalog], tmp_path: Path, policy: str
) -> None:
    """Although nothing of the new catalog may be left to train."""
    run = _Run(tmp_path, stages=[{"name": "only", "epochs": 1}])
    run.launch(catalog_of(range(22)), range(3))
    end: dict[str, Any] = {"on_change": policy}
    course = run.launch(catalog_of(range(4, 30)), range(3, 3), **end)
    assert course.end_step is not None
    run.launch(catalog_of(range(4, 30)), range(3, course.end_step), **end)
    assert run.audit().ok


def test_an_epoch_with_nothing_left_after_a_change_is_exact(
    catalog_of: Callable[..., Catalog], tmp_path: Path
) -> None:
    """All that it had not seen was taken out of the catalog."""
    run = _Run(tmp_path, stages=[{"name": "only", "epochs": 2}])
    whole = catalog_of([1, 2, 4, 5, 7, 8])  # square ones, in one bucket
    course = run.launch(whole, range(1))
    seen = {whole.clip(int(row)).identity for row in course.batch(0).rows}
    left = Catalog.of(clip for clip in whole.clips() if clip.identity in seen)
    course = run.launch(left, range(1, 1), on_change="merge")
    assert course.end_step == 2
    run.launch(left, range(1, 2), on_change="merge")
    found = run.audit()
    assert found.ok
    assert [(each.epoch, each.seen) for each in found.epochs] == [(0, 4), (1, 4)]


def test_clips_whose_first_bytes_coincide_are_no_repeats(
    catalog_of: Callable[..., Catalog], tmp_path: Path
) -> None:
    """The ledger holds seven bytes of sixteen: as many as there are of such may be seen."""
    twins = catalog_of(range(22), identity=lambda n: "00" * 7 + f"{n:018x}")
    run = _Run(tmp_path)
    run.launch(twins, range(14))
    assert run.audit().ok
    path = _ledger_file(run)
    _rewrite(path, lambda data: data[:45] + data[30:])
    assert not run.audit().ok


def test_without_a_ledger_or_its_catalogs_nothing_is_proved(
    catalog_of: Callable[..., Catalog], tmp_path: Path
) -> None:
    """Each is named."""
    run = _Run(tmp_path)
    with pytest.raises(DataError, match="has no ledger"):
        run.audit()
    run.launch(catalog_of(range(22)), range(3))
    (kept,) = run.directory.catalogs_path.iterdir()
    kept.unlink()
    with pytest.raises(DataError, match=rf"{kept.name} does not keep it"):
        run.audit()

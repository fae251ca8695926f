"""The ledger: 16 bytes a sample, written by each rank; what was abandoned or torn is known."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.data.build import section

from longtake.data.ledger import (
    Ledger,
    StepSamples,
    begin_launch,
    read_ledger,
    short_identity,
    stream_names,
    with_checksum,
)
from longtake.data.plan_history import PlanRecord
from longtake.errors import DataError

_STREAMS = ("a/catalog", "b/catalog")


def _name(number: int) -> str:
    return f"{number:04x}" + "ab" * 14


def _step(
    step: int,
    trained: Sequence[int],
    *,
    stage: str = "a",
    epoch: int = 0,
    rejected: Sequence[int] = (),
) -> StepSamples:
    return StepSamples(
        step,
        f"{stage}/catalog",
        [(_name(number), epoch) for number in trained],
        [(_name(number), epoch) for number in rejected],
    )


def _entry(step: int) -> PlanRecord:
    return PlanRecord(step=step, policy="start", batch_size=2, order={}, catalogs={}, plan="")


def _launch(folder: Path, start: int, ranks: Sequence[Sequence[StepSamples]]) -> Path:
    """A launch in which each rank did some steps."""
    path = begin_launch(folder / "ledger", start, len(ranks), _STREAMS, [_entry(start)])
    for rank, steps in enumerate(ranks):
        with Ledger(path, rank, _STREAMS) as ledger:
            for samples in steps:
                ledger.record(samples)
            ledger.flush()
    return path


def _numbers(folder: Path) -> list[tuple[int, int]]:
    """(step, number of the clip) of what was consumed, sorted."""
    found = read_ledger(folder / "ledger")
    first = found.identity.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :2].astype(int)
    numbers = first[:, 0] * 256 + first[:, 1]
    return sorted(zip(found.step.tolist(), numbers.tolist(), strict=True))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    high = 2**24 - 1
    ranks = (([1, 2], [5]), ([3], [6]))
    _launch(tmp_path, 0, [[_step(0, a), _step(1, b, stage="b", epoch=high)] for a, b in ranks])
    found = read_ledger(tmp_path / "ledger")
    assert found.streams == _STREAMS
    assert _numbers(tmp_path) == [(0, 1), (0, 2), (0, 3), (1, 5), (1, 6)]
    by_step = {(s, t, e) for s, t, e in zip(found.step, found.stream, found.epoch, strict=True)}
    assert by_step == {(0, 0, 0), (1, 1, high)}
    assert not found.is_rejected.any()
    assert (found.end_step, found.num_abandoned) == (2, 0)
    assert found.history == [_entry(0)]
    expected = np.frombuffer(bytes.fromhex(_name(1) + _name(2) + _name(3)), np.uint8)
    names = set(short_identity(expected.reshape(3, 16)).tolist())
    assert names == set(found.identity[found.step == 0].tolist())


def test_a_sample_takes_sixteen_bytes(tmp_path: Path) -> None:
    path = _launch(tmp_path, 0, [[_step(0, [1, 2, 3]), _step(1, [4])]])
    assert (path / "rank_0000.bin").stat().st_size == 4 * 16


def test_rejected_clips_are_told_apart(tmp_path: Path) -> None:
    _launch(tmp_path, 0, [[_step(0, [1], rejected=[7], stage="b")]])
    found = read_ledger(tmp_path / "ledger")
    assert _numbers(tmp_path) == [(0, 1), (0, 7)]
    assert found.is_rejected.tolist() == [False, True]
    assert found.stream.tolist() == [1, 1]


def test_a_rank_without_samples_has_done_the_step_too(tmp_path: Path) -> None:
    _launch(tmp_path, 0, [[_step(0, [1, 2])], [_step(0, [])]])
    assert _numbers(tmp_path) == [(0, 1), (0, 2)]
    assert read_ledger(tmp_path / "ledger").end_step == 1


def test_a_step_that_not_all_ranks_have_done_does_not_count(tmp_path: Path) -> None:
    _launch(tmp_path, 0, [[_step(0, [1]), _step(1, [2])], [_step(0, [3])]])
    found = read_ledger(tmp_path / "ledger")
    assert (found.end_step, found.num_abandoned) == (1, 1)
    assert _numbers(tmp_path) == [(0, 1), (0, 3)]


@pytest.mark.parametrize("cut", [1, 7, 15])
def test_a_torn_tail_is_passed_over(tmp_path: Path, cut: int) -> None:
    path = _launch(tmp_path, 0, [[_step(0, [1]), _step(1, [2])]]) / "rank_0000.bin"
    path.write_bytes(path.read_bytes()[: 32 - cut])
    assert _numbers(tmp_path) == [(0, 1)]
    assert read_ledger(tmp_path / "ledger").end_step == 1


def test_abandoned_steps_are_counted_apart(tmp_path: Path) -> None:
    _launch(tmp_path, 0, [[_step(step, [step]) for step in range(6)]])
    _launch(tmp_path, 4, [[_step(step, [step]) for step in range(4, 7)]])
    _launch(tmp_path, 2, [[_step(step, [10 + step]) for step in range(2, 4)]])
    found = read_ledger(tmp_path / "ledger")
    assert _numbers(tmp_path) == [(0, 0), (1, 1), (2, 12), (3, 13)]
    assert (found.end_step, found.num_abandoned) == (4, 4 + 3)
    assert found.history == [_entry(2)]


def test_a_launch_that_did_nothing_abandons_what_came_after_its_start(tmp_path: Path) -> None:
    _launch(tmp_path, 0, [[_step(step, [step]) for step in range(6)]])
    begin_launch(tmp_path / "ledger", 4, 2, _STREAMS, [_entry(0)])
    found = read_ledger(tmp_path / "ledger")
    assert (found.end_step, found.num_abandoned) == (4, 2)


def test_streams_of_launches_are_matched_by_name(tmp_path: Path) -> None:
    _launch(tmp_path, 0, [[_step(0, [1], stage="b")]])
    names = ("new/catalog", *_STREAMS)
    path = begin_launch(tmp_path / "ledger", 1, 1, names, [_entry(0)])
    with Ledger(path, 0, names) as ledger:
        ledger.record(_step(1, [2], stage="b"))
    found = read_ledger(tmp_path / "ledger")
    assert {found.streams[number] for number in found.stream} == {"b/catalog"}


def test_a_record_of_no_stream_of_the_launch_is_damage(tmp_path: Path) -> None:
    path = _launch(tmp_path, 0, [[_step(0, [1])]]) / "rank_0000.bin"
    launch = path.with_name("launch.json")
    facts = with_checksum(json.loads(launch.read_text()) | {"streams": []})
    launch.write_text(json.dumps(facts))
    with pytest.raises(DataError, match=r"launch_0000.*is damaged: a record names a stream"):
        read_ledger(tmp_path / "ledger")


def test_every_changed_byte_is_found(tmp_path: Path) -> None:
    path = _launch(tmp_path, 0, [[_step(0, [1]), _step(1, [2])]]) / "rank_0000.bin"
    whole = path.read_bytes()
    for place, bit in itertools.product(range(len(whole)), range(8)):
        data = bytearray(whole)
        data[place] ^= 1 << bit
        path.write_bytes(data)
        with pytest.raises(DataError, match=f"rank_0000.bin is damaged: .* record {place // 16} "):
            read_ledger(tmp_path / "ledger")
    path.write_bytes(whole + bytes(48))  # what a power cut may leave at the end
    assert _numbers(tmp_path) == [(0, 1), (1, 2)]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"world_size": 10**8}, "world_size: "),
        ({"world_size": 10**7}, "its checksum differs"),
        ({"start_step": 1}, "its checksum differs"),
        ({"streams": ["a/catalog"]}, "its checksum differs"),
        ({"history": []}, "history: "),
        ({"format": 2}, "it has format 2, and this longtake reads format 1"),
        ("{", ""),
        ('{"start_step": 0}', "it has no format number, since an older longtake wrote it"),
    ],
)
def test_launch_facts_that_were_changed_are_found(
    tmp_path: Path, changed: dict[str, Any] | str, reason: str
) -> None:
    with pytest.raises(DataError, match="has no ledger"):
        read_ledger(tmp_path / "ledger")
    path = _launch(tmp_path, 0, [[_step(0, [1])]]) / "launch.json"
    path.write_text(
        changed if isinstance(changed, str) else json.dumps(json.loads(path.read_text()) | changed)
    )
    with pytest.raises(DataError, match=f"launch.json cannot be read: {reason}"):
        read_ledger(tmp_path / "ledger")


def test_more_streams_than_a_record_tells_apart_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has 128 pairs of stage and catalog"):
        begin_launch(tmp_path / "ledger", 0, 1, [f"s{n}/c" for n in range(128)], [_entry(0)])
    names = [f"s{n}/catalog" for n in range(127)]
    path = begin_launch(tmp_path / "ledger", 0, 1, names, [_entry(0)])
    with Ledger(path, 0, names) as ledger:
        ledger.record(_step(0, [1], stage="s126", rejected=[2]))
    found = read_ledger(tmp_path / "ledger")
    assert found.stream.tolist() == [126, 126]
    assert found.is_rejected.tolist() == [False, True]


def test_streams_are_all_pairs_of_stage_and_catalog() -> None:
    assert stream_names(section()) == ["all/catalog"]
    stages = [{"name": "x", "steps": 1}, {"name": "y"}]
    two = section(catalogs={"p": "p.parquet", "q": "q.parquet"}, stages=stages)
    assert stream_names(two) == ["x/p", "x/q", "y/p", "y/q"]


def test_the_launchs_facts_are_written(tmp_path: Path) -> None:
    _launch(tmp_path, 0, [[], []])
    path = _launch(tmp_path, 0, [[]])
    assert path.name == "launch_0001"
    facts = json.loads((path / "launch.json").read_text())
    assert len(facts.pop("checksum")) == 32
    assert facts == {
        "format": 1,
        "start_step": 0,
        "world_size": 1,
        "streams": list(_STREAMS),
        "history": [_entry(0)],
        "skipped": [],
    }


def test_a_launch_takes_back_what_is_skipped_at_its_start(tmp_path: Path) -> None:
    _launch(tmp_path, 0, [[_step(step, [step]) for step in range(8)]])
    spans = [(1, 2), (4, 6), (6, 9), (12, 14)]
    path = begin_launch(tmp_path / "ledger", 9, 1, _STREAMS, [_entry(0)], spans)
    assert json.loads((path / "launch.json").read_text())["start_step"] == 4
    found = read_ledger(tmp_path / "ledger")
    assert (found.end_step, found.num_abandoned) == (4, 4)
    assert found.skipped == ((1, 2), (4, 9), (12, 14))

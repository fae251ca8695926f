"""scores.json is read by many; one that is damaged is no result, and stops nobody."""

import json
from pathlib import Path
from typing import Any

import pytest

from longtake.errors import RecordError
from longtake.evaluation_dir import SCORES, EvaluationDirectory, Scores
from longtake.fsio import parse_record
from longtake.run_dir import RunDirectory


def _whole() -> Scores:
    return {
        "preset": "demo",
        "step": 6,
        "key": "0a1b2c3d",
        "weights": "model",
        "time": "2026-01-02T03:04:05.000+00:00",
        "server": "here-1",
        "settings": {"fps": 8.0},
        "videos": [{"file": "00_s0.mp4", "prompt": "a disc", "seed": 0, "measures": {"motion": 1}}],
        "measures": {"motion": float("nan")},
        "held_out": {"mean": 0.5},
        "alarms": [{"measure": "motion", "kind": "drift", "message": "motion fell"}],
        "seconds": {"sample": 1.0},
    }


@pytest.fixture
def directory(tmp_path: Path) -> EvaluationDirectory:
    directory = EvaluationDirectory(RunDirectory(tmp_path))
    _write(directory, 9, json.dumps(_whole() | {"step": 9}))
    return directory


def _is_whole(record: Any) -> bool:
    try:
        parse_record(json.dumps(record).encode(), SCORES, Path("scores.json"))
    except RecordError:
        return False
    return True


def _write(directory: EvaluationDirectory, step: int, text: str) -> None:
    folder = directory.result_path("demo", step)
    folder.mkdir(parents=True)
    (folder / "scores.json").write_text(text)


@pytest.mark.parametrize("without", ["held_out", None])
def test_a_whole_record_is_a_result(directory: EvaluationDirectory, without: str | None) -> None:
    record = {name: value for name, value in _whole().items() if name != without}
    _write(directory, 6, json.dumps(record))
    found = directory.scores("demo", 6)
    assert found is not None
    assert found["key"] == "0a1b2c3d"
    assert [each["step"] for each in directory.all_scores("demo")] == [6, 9]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null", "7", '{"preset": "demo"}', "\0"])
def test_what_is_no_record_is_no_result(directory: EvaluationDirectory, text: str) -> None:
    _write(directory, 6, text)
    assert directory.scores("demo", 6) is None
    assert [each["step"] for each in directory.all_scores("demo")] == [9]


@pytest.mark.parametrize("name", sorted(_whole().keys() - {"held_out"}))
@pytest.mark.parametrize("value", [None, [None], {"motion": "much"}, 0.5])
def test_each_field_is_demanded_of_its_type(name: str, value: Any) -> None:
    record: dict[str, Any] = {**_whole(), name: value}
    assert not _is_whole(record)
    assert not _is_whole({key: each for key, each in record.items() if key != name})


@pytest.mark.parametrize(
    "change",
    [
        {"held_out": None},
        {"videos": [{"file": "00_s0.mp4", "prompt": "a disc", "seed": 0}]},
        {"videos": [{"file": "a", "prompt": "b", "seed": 0, "measures": {"motion": None}}]},
        {"alarms": [{"measure": "motion", "kind": "drift"}]},
        {"settings": {"fps": 0}},
        {"settings": {"fps": 8.0, "conditioning": {"depth": []}}},
        {"time": "yesterday"},
        {"key": "../elsewhere"},
    ],
)
def test_so_is_what_they_hold(change: dict[str, Any]) -> None:
    assert not _is_whole({**_whole(), **change})


def test_a_record_of_another_result_is_none_of_this_one(directory: EvaluationDirectory) -> None:
    _write(directory, 6, json.dumps(_whole() | {"step": 9}))
    assert directory.scores("demo", 6) is None

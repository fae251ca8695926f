"""Files of a run that hold something else than records: each verb ends well, or in one sentence."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

Call = Callable[..., tuple[int, str, str]]

_TIME = "2026-01-02T03:04:05.000+00:00"
_LINES = {
    "a list": "[]",
    "a number": "5",
    "nothing": "{}",
    "null": "null",
    "5,000 digits": '{"step": ' + "9" * 5000 + "}",
    "deep": "[" * 60_000,
    "fields of other types": '{"step": "x", "time": [], "event": {}, "loss": "low"}',
    "a time that is none": '{"step": 1, "time": "yesterday", "event": "finished"}',
    "a verdict without words": f'{{"step": 1, "time": "{_TIME}", "event": "skipped"}}',
    "a start without parts": f'{{"step": 1, "time": "{_TIME}", "event": "started"}}',
    "an epoch without a name": f'{{"step": 1, "time": "{_TIME}", "event": "epoch"}}',
    "a rank without a number": f'{{"step": 1, "time": "{_TIME}", "event": "rank_failed"}}',
    "a lone surrogate": f'{{"time": "{_TIME}", "event": "\\udcff"}}',
}
_LOGS = (
    "metrics.jsonl",
    "events.jsonl",
    "rollbacks.jsonl",
    "nodes/vm/events.jsonl",
    "evaluations/servers/vm-1/events.jsonl",
)


@pytest.fixture
def run(place: Path, tmp_path: Path) -> Path:
    """A copy of a trained run."""
    shutil.copytree(place / "run", tmp_path / "run", ignore=shutil.ignore_patterns("tensorboard"))
    return tmp_path / "run"


def _look(call: Call, run: Path) -> list[tuple[int, str]]:
    """Exit codes and stderr of the verbs that read a run."""
    verbs = (
        ("show", run),
        ("show", run, "--around", 1, "--json"),
        ("show", run, "--out", run / "curves.png"),
        ("data", "audit", run),
        ("compare", run, "--preset", "p", "--out", run / "sheet.png"),
    )
    found = [call(*verb) for verb in verbs]
    return [(code, stderr) for code, _, stderr in found]


@pytest.mark.parametrize("log", _LOGS)
def test_lines_that_are_no_records_are_left_out(log: str, run: Path, call: Call) -> None:
    path = run / log
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in _LINES.values()) + '{"step": 3')
    found = _look(call, run)
    assert [code for code, _ in found] == [0, 0, 0, 0, 2]  # nothing was evaluated
    count = len(_LINES)
    assert f"{path}: {count} lines are no records and were left out." in found[0][1]


def test_another_format_is_refused_in_a_sentence(run: Path, call: Call) -> None:
    path = run / "run.json"
    record = json.loads(path.read_text())
    assert record["format"] == 1
    path.write_text(json.dumps(record | {"format": 2}))
    code, _, stderr = call("show", run)
    assert code == 2
    assert "it has format 2, and this longtake reads format 1" in stderr


def test_flipped_metadata_of_weights_is_damage(run: Path, call: Call, tmp_path: Path) -> None:
    (path,) = run.glob("checkpoints/step_00000002/ema/*/.metadata")
    data = bytearray(path.read_bytes())
    data[10] ^= 4
    path.write_bytes(data)
    code, _, stderr = call("sample", run, "--prompt", "x", "--out", tmp_path / "o.mp4")
    assert code == 2
    assert ".metadata has other bytes than were saved" in stderr

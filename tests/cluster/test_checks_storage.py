"""What is concluded from what nodes measured of their disks."""

from typing import Any

import pytest
from tests.cluster.build import severities

from longtake.cluster.checks_storage import (
    judge_dataset,
    judge_disk_space,
    judge_disk_speed,
    judge_run_directory,
)

_GIB = 2**30


def _catalog(**changes: Any) -> dict[str, Any]:
    usual = {
        "filesystem": "nfs4 store:/clips",
        "fingerprint": "f",
        "clips": "100",
        "sampled files": "s",
        "sampled": 64,
        "missing": [],
        "read": 500.0,
    }
    return {"catalogs": {"catalog": usual | changes}}


def test_missing_clips_are_named() -> None:
    lacks = _catalog(missing=["/clips/1.mp4", "/clips/2.mp4"], **{"sampled files": "t"})
    facts = {"a": _catalog(), "b": _catalog(), "c": _catalog(fingerprint="g"), "d": lacks}
    facts["e"] = _catalog(read=100.0)
    result = judge_dataset(facts)
    said = {each.nodes: each for each in result.findings}
    assert said["e",].severity == "warning"
    assert "100 MB/s" in said["e",].what
    assert said["c",].severity == "error"
    assert any(
        "2 of 64 sampled clips" in each.what and "/clips/1.mp4" in each.what
        for each in result.findings
        if each.nodes == ("d",)
    )


def _folder(**changes: Any) -> dict[str, Any]:
    usual = {"path": "/runs/a", "filesystem": "nfs4 s:/", "exists": True, "seen_after": 0.0}
    return usual | {"cannot_write": ""} | changes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"exists": False, "seen_after": None}, "does not exist"),
        ({"seen_after": None}, "another folder than on the first node"),
        ({"cannot_write": "Permission denied"}, "cannot be written: Permission denied"),
    ],
)
def test_a_run_directory_that_is_not_shared(changes: dict[str, Any], said: str) -> None:
    result = judge_run_directory({"a": _folder(), "b": _folder(**changes)})
    [finding] = result.findings
    assert (finding.severity, finding.nodes) == ("error", ("b",))
    assert said in finding.what


def test_a_folder_that_is_seen_late_is_a_note() -> None:
    """A cache of directories that is seconds old is no error."""
    result = judge_run_directory({"a": _folder(), "b": _folder(seen_after=5.0)})
    assert severities(result) == [("note", ("b",))]


def test_a_slow_disk() -> None:
    facts: dict[str, dict[str, Any]] = {n: {"write": 900.0, "sync_ms": 2.0} for n in "abc"}
    facts["d"] = {"write": 300.0, "sync_ms": 200.0}
    result = judge_disk_speed(facts)
    assert severities(result) == [("warning", ("d",)), ("warning", ("d",))]
    assert "300 MB/s" in result.findings[0].what
    assert "200 ms" in result.findings[1].what
    few = {n: {"write": 900.0, "sync_ms": 0.1 * (1 + 9 * (n == "d"))} for n in "abcd"}
    assert not judge_disk_speed(few).findings, "ten times of next to nothing is nothing"


def test_disk_space_for_checkpoints() -> None:
    free = {"run directory": {"bytes": 30 * _GIB, "files": -1}}
    known = {"bytes": 10 * _GIB, "source": "a checkpoint", "keep": 3}
    [finding] = judge_disk_space({"a": {"folders": free, "checkpoint": known}}).findings
    assert finding.severity == "error"
    assert "30.00 GiB" in finding.what
    assert "40.00 GiB" in finding.expected
    known = {"bytes": 5 * _GIB, "source": "a checkpoint", "keep": 3}
    assert not judge_disk_space({"a": {"folders": free, "checkpoint": known}}).findings


def test_few_files_left_on_a_disk() -> None:
    free = {"temporary files": {"bytes": 99 * _GIB, "files": 12}}
    [finding] = judge_disk_space({"a": {"folders": free}}).findings
    assert finding.what.startswith("12 more files")

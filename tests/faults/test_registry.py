import io
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from rich.console import Console

from longtake.config import TrackingSection
from longtake.errors import LongtakeError, RecipeError, RunError
from longtake.faults import evaluation
from longtake.faults.expect import Evidence
from longtake.faults.registry import (
    DrillResult,
    Fault,
    NotPossibleHereError,
    all_faults,
    find_faults,
    run_drill,
    run_drills,
    show_faults,
    show_results,
)
from longtake.faults.sandbox import Sandbox

_KEYS = [
    *("fault", "passed", "detected_seconds", "samples_repeated", "samples_missing"),
    *("equal_to_undisturbed", "message", "samples_unplanned", "samples_rejected"),
    *("detected_steps", "steps_lost", "samples_skipped", "drill_seconds", "skipped"),
]
_QUIET = Console(quiet=True)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(LongtakeError, match="did you mean decoder-hang") as refused:
        run_drills(["data-grown", "decoder-hung"], _QUIET)
    assert "killed-loader-worker" in str(refused.value)


def test_faults_are_found_once_in_the_order_in_which_they_are_named() -> None:
    names = list(all_faults())
    assert [each.name for each in find_faults(["kill", "data-grown", "kill"])] == names[8::-8]
    assert [each.name for each in find_faults([])] == names
    assert [each.name for each in find_faults(["kill", "all"])] == names


def test_a_family_stands_for_all_of_its_faults() -> None:
    named = [each.name for each in find_faults(["slow-rank", "frozen-loader-worker-stopped"])]
    assert named == ["slow-rank-by-10", "slow-rank-by-30", "frozen-loader-worker-stopped"]
    families = {each.family for each in all_faults().values()} - {""}
    assert families == {"slow-rank", "frozen-loader-worker", "hung-rank"}
    for each in all_faults().values():
        assert each.name.startswith(each.family)


_LIST = """
import sys
from longtake.faults.registry import find_faults
assert len(find_faults([])) == 50
assert "torch" not in sys.modules
"""


def test_listing_faults_imports_no_torch() -> None:
    subprocess.run([sys.executable, "-c", _LIST], check=True)


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(RunError, match="is not empty"):
        run_drills(["data-grown"], _QUIET, keep=tmp_path)
    assert os.listdir(tmp_path) == ["mine.txt"]  # noqa: PTH208 - names only


def _result_of(folder: Path, error: LongtakeError) -> DrillResult:
    def run(sandbox: Sandbox) -> Evidence:
        raise error

    return run_drill(
        Fault("broken", "Does nothing.", "Nothing.", run, __name__, ""), Sandbox(folder, _QUIET)
    )


def test_a_drill_that_cannot_be_finished_has_failed(tmp_path: Path) -> None:
    result = _result_of(tmp_path, RunError("the training process ended with exit code 1"))
    assert result.failed
    assert result.message == "Failed: the training process ended with exit code 1"
    assert result.samples_repeated is None


def test_a_drill_that_is_not_possible_here_is_skipped_with_its_reason(tmp_path: Path) -> None:
    result = _result_of(tmp_path, NotPossibleHereError("W&B is not installed"))
    assert result.skipped == "W&B is not installed"
    assert not result.passed
    assert not result.failed
    lines = _table([result])
    assert any("broken" in line and "skipped" in line for line in lines)
    assert lines[-2:] == ["0 of 1 drill passed.", "1 not possible here: W&B is not installed."]


def test_the_list_says_of_each_fault_what_it_does_and_what_must_happen() -> None:
    written = io.StringIO()
    show_faults(find_faults([]), Console(file=written, width=360))
    for each in all_faults().values():
        for text in (each.name, each.does, each.must):
            assert text in written.getvalue()
            assert "\n" not in text


def test_results_have_the_keys_that_others_read() -> None:
    assert [each.name for each in fields(DrillResult)] == _KEYS


def test_the_table_tells_failures_from_successes() -> None:
    good = DrillResult("decoder-hang", True, 1.7, 0, 0, True, "It was replaced.")
    bad = DrillResult("one-clip-removed", False, None, 3, message="Failed: 3 were repeated.")
    lines = _table([good, bad])
    assert any("decoder-hang" in line and "passed" in line and "yes" in line for line in lines)
    assert any("one-clip-removed" in line and "failed" in line for line in lines)
    assert lines[-1] == "1 of 2 drills passed."


def test_the_table_of_all_faults_fits_80_columns() -> None:
    full = [
        DrillResult(
            name,
            passed=False,
            detected_seconds=1234.5,
            samples_repeated=12345,
            samples_missing=12345,
            equal_to_undisturbed=False,
            detected_steps=12345,
            steps_lost=12345,
            samples_skipped=1234567,
        )
        for name in all_faults()
    ]
    whole = "\n".join(_table(full))
    assert "…" not in whole
    assert whole.count("1234.5 ") == whole.count("1234567 ") == len(full)


def _table(results: list[DrillResult]) -> list[str]:
    written = io.StringIO()
    show_results(results, Console(file=written, width=80))
    return written.getvalue().splitlines()


def test_without_wandb_the_drill_of_a_tracker_is_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(section: TrackingSection) -> None:
        raise RecipeError("tracking.wandb needs W&B")

    monkeypatch.setattr(evaluation, "refuse_missing_packages", refuse)
    result = run_drill(all_faults()["tracker-down"], Sandbox(tmp_path, _QUIET))
    assert result.skipped == "W&B is not installed: pip install 'longtake[wandb]'"
    assert not (tmp_path / "undisturbed").exists(), "it trained a run to compare with"

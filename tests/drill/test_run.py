"""How drills are named, run, kept and told."""

import io
import os
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from longtake import config
from longtake.data.sample import sample_window
from longtake.data.window import read_window
from longtake.drill.fault import Fault, NotPossibleHereError
from longtake.drill.faults import bit_rot_in_checkpoint, corrupt_clip, truncated_checkpoint
from longtake.drill.fleet import cluster_of
from longtake.drill.ground import Ground
from longtake.drill.hosts import why_not
from longtake.drill.launch import Launch
from longtake.drill.place import Place
from longtake.drill.registry import FAMILIES, FAULTS, find_faults
from longtake.drill.report import show_faults, show_results
from longtake.drill.result import Result
from longtake.drill.run import drill, run_drills
from longtake.drill.workers import stop_while_decoding
from longtake.errors import ClipError, LongtakeError, RunError

_KEYS = [
    "fault",
    "passed",
    "detected_seconds",
    "samples_repeated",
    "samples_missing",
    "equal_to_undisturbed",
    "message",
]
_QUIET = Console(quiet=True)


def test_a_name_that_is_none_is_refused_with_the_nearest() -> None:
    """Before anything is trained."""
    with pytest.raises(LongtakeError, match="did you mean decoder-hang") as refused:
        run_drills(["data-grown", "decoder-hung"], _QUIET)
    assert "killed-loader-worker" in str(refused.value)


def test_faults_are_drilled_once_in_the_order_in_which_they_are_named() -> None:
    """All of them, in the registry's order, where none is named, and for `all`."""
    named = find_faults(["kill", "data-grown", "kill"])
    assert [fault.name for fault in named] == ["kill", "data-grown"]
    assert [fault.name for fault in find_faults([])] == list(FAULTS)
    assert [fault.name for fault in find_faults(["kill", "all"])] == list(FAULTS)
    assert all(fault.name == name for name, fault in FAULTS.items())


def test_a_family_stands_for_all_of_its_faults() -> None:
    """In the registry's order; one of them may be named as well."""
    named = [fault.name for fault in find_faults(["slow-rank", "frozen-loader-worker-stopped"])]
    assert named == ["slow-rank-by-10", "slow-rank-by-30", "frozen-loader-worker-stopped"]
    for family in FAMILIES:
        found = find_faults([family])
        assert len(found) > 1
        assert all(fault.name.startswith(f"{family}-") for fault in found)


def test_a_folder_that_holds_something_is_not_used(tmp_path: Path) -> None:
    """Nothing in it is touched."""
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(RunError, match="is not empty"):
        run_drills(["data-grown"], _QUIET, keep=tmp_path)
    assert os.listdir(tmp_path) == ["mine.txt"]  # noqa: PTH208 - names only


def _cannot(ground: Ground) -> Result:
    raise RunError("the training process ended with exit code 1")


def test_a_drill_that_could_not_be_carried_out_has_failed(tmp_path: Path) -> None:
    """It is a result like others, so that the drills after it are run."""
    fault = Fault("broken", "Does nothing.", "Nothing.", _cannot)
    result = drill(fault, Ground(tmp_path, _QUIET))
    assert not result.passed
    assert result.message == "Failed: the training process ended with exit code 1"
    assert result.samples_repeated is None


def _elsewhere(ground: Ground) -> Result:
    raise NotPossibleHereError("hosts as network namespaces need root")


def test_a_drill_that_needs_another_machine_is_skipped(tmp_path: Path) -> None:
    """It has neither passed nor failed, and the table says why."""
    fault = Fault("far", "Does nothing.", "Nothing.", _elsewhere)
    result = drill(fault, Ground(tmp_path, _QUIET))
    assert result.skipped == "hosts as network namespaces need root"
    assert not result.passed
    assert not result.failed
    lines = _table([result])
    assert any("far" in line and "skipped" in line for line in lines)
    assert lines[-2:] == [
        "0 of 1 drill passed.",
        "1 not possible here: hosts as network namespaces need root.",
    ]


def test_hosts_need_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ordinary user is told so, and no drill of theirs fails for it."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why_not() == "hosts as network namespaces need root"
    with pytest.raises(NotPossibleHereError, match="need root"), cluster_of(2, Path()):
        pass


def test_a_launch_that_fails_says_what_it_said(tmp_path: Path) -> None:
    """Whatever was waited for, the error has the process's own words."""
    with Launch(tmp_path, (), 1) as launch:
        with pytest.raises(RunError, match=r"exit code 2.*There is no recipe recipe\.toml"):
            launch.finish()
        with pytest.raises(RunError, match=r"before step 3.*There is no recipe"):
            launch.wait_for_rows(3)
        with pytest.raises(RunError, match="before a decoding process could be caught"):
            stop_while_decoding(launch, tmp_path)
        assert launch.find("finished") is None


def test_damage_is_noticed_by_the_decoder(trained: Place, place: Place) -> None:
    """Every clip of the drills, once damaged, cannot be read; its length is as it was."""
    data = config.load(trained.folder / "recipe.toml").data
    for clip in place.catalog().clips():
        path = Path(clip.path)
        before = path.stat().st_size
        corrupt_clip.damage(path)
        assert path.stat().st_size == before
        with pytest.raises(ClipError):
            read_window(sample_window(clip, data.buckets[0], data, seed=0))


def test_damage_to_a_file_is_what_it_is_called(tmp_path: Path) -> None:
    """Half of it is gone; one bit differs, in the byte that it is in."""
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(7)))
    truncated_checkpoint.truncate(path)
    assert path.read_bytes() == bytes([0, 1, 2])
    bit_rot_in_checkpoint.flip(path, 8 + 3)
    assert path.read_bytes() == bytes([0, 1 + 8, 2])
    bit_rot_in_checkpoint.flip(path, 23)
    assert path.read_bytes() == bytes([0, 9, 2 + 128])


def test_the_list_says_of_each_fault_what_it_does_and_what_must_happen() -> None:
    """One line each."""
    written = io.StringIO()
    show_faults(find_faults([]), Console(file=written, width=360))
    for fault in FAULTS.values():
        assert fault.name in written.getvalue()
        assert fault.does in written.getvalue()
        assert fault.must in written.getvalue()
        assert "\n" not in fault.does + fault.must


def test_a_result_has_the_keys_that_others_read() -> None:
    """First the stable ones; the table tells a failure from a success."""
    good = Result("decoder-hang", True, 1.7, 0, 0, True, "It was replaced.")
    bad = Result("one-clip-removed", False, None, 3, None, None, "Failed: 3 were repeated.")
    assert list(asdict(good))[: len(_KEYS)] == _KEYS
    lines = _table([good, bad])
    assert any("decoder-hang" in line and "passed" in line and "yes" in line for line in lines)
    assert any("one-clip-removed" in line and "failed" in line for line in lines)
    assert lines[-1] == "1 of 2 drills passed."


def test_the_table_of_all_faults_fits_80_columns() -> None:
    """Nothing is cut off, whatever they cost."""
    full = [
        Result(
            name,
            passed=False,
            detected_seconds=1234.5,
            samples_repeated=12345,
            samples_missing=12345,
            equal_to_undisturbed=False,
            message="",
            detected_steps=12345,
            steps_lost=12345,
            samples_skipped=1234567,
        )
        for name in FAULTS
    ]
    whole = "\n".join(_table(full))
    assert "…" not in whole
    assert whole.count("1234.5 ") == whole.count("1234567 ") == len(FAULTS)


def _table(results: list[Result]) -> list[str]:
    written = io.StringIO()
    show_results(results, Console(file=written, width=80))
    return written.getvalue().splitlines()

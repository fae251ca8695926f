"""Disks that are full or mounted read-only, which root cannot pass over as it does permissions."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.fuzz.generators import LOGS, TRAINED
from tests.fuzz.mutations import unevaluate

_TRAIN = ["train", "recipe.toml"]
_EVALUATE = ["evaluate", "run", "--device", "cpu"]
_READ_ONLY, _FULL = "Read-only file system", "No space left on device"
_Check = Callable[..., Any]


@contextmanager
def _mounted(place: Path, *arguments: str) -> Iterator[None]:
    place.mkdir(parents=True, exist_ok=True)
    command = ["mount", *arguments, str(place)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small disk takes root")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@contextmanager
def _read_only(folder: Path) -> Iterator[None]:
    with _mounted(folder, "--bind", str(folder)):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
        yield


@contextmanager
def _full(folder: Path) -> Iterator[None]:
    with _mounted(folder, "-t", "tmpfs", "-o", "size=4k", "tmpfs"):
        (folder / "hog").write_bytes(bytes(4096))
        yield


@pytest.mark.parametrize("command", [_TRAIN, _EVALUATE], ids=["train", "evaluate"])
@pytest.mark.parametrize("folder", ["run", "run/evaluations", "run/checkpoints", "run/ledger"])
def test_a_read_only_folder_of_a_run(
    folder: str, command: list[str], place: Path, check: _Check
) -> None:
    unevaluate(place)
    with _read_only(place / folder):
        ended = check(command, may_change=TRAINED, appended=LOGS)
    is_needed = folder == "run" or (folder == "run/evaluations") == (command is _EVALUATE)
    assert (ended.code != 0) == is_needed
    said = ended.stderr + ended.stdout
    assert not is_needed or _READ_ONLY in said or f"Make {folder} writable" in said


@pytest.mark.parametrize("command", [_TRAIN, _EVALUATE], ids=["train", "evaluate"])
def test_a_read_only_working_directory(command: list[str], place: Path, check: _Check) -> None:
    unevaluate(place)
    with _read_only(place):
        ended = check(command)
    assert ended.code in (1, 2)


def test_the_vocabulary_does_not_fit_on_the_disk(place: Path, check: _Check) -> None:
    """The same command begins the run when there is room."""
    command = [*_TRAIN, "--set", "out=new"]
    with _full(place / "new" / "components" / "tokenizer"):
        ended = check(command)
        assert ended.code == 2
        assert _FULL in ended.stderr
        assert "tokenizer.json" in ended.stderr
    check(command, must_succeed=True)
    assert (place / "new" / "components" / "tokenizer" / "tokenizer.json").exists()


def test_a_catalog_does_not_fit_on_the_disk(place: Path, check: _Check) -> None:
    """The journal of what was probed does not, either; the same command goes on with room."""
    command = ["data", "index", "clips", "--out", "disk/new.parquet"]
    with _full(place / "disk"):
        ended = check(command)
        assert ended.code == 2
        assert _FULL in ended.stderr
    check(command, must_succeed=True)


@pytest.mark.parametrize("command", [_TRAIN, _EVALUATE], ids=["train", "evaluate"])
def test_a_full_disk_under_a_part_of_a_run(command: list[str], place: Path, check: _Check) -> None:
    """Checkpoints or results find no room; the same command goes on when there is."""
    unevaluate(place)
    part = "checkpoints" if command is _TRAIN else "evaluations"
    saved = place / "run" / part
    saved.rename(place / "kept")
    with _full(saved):
        check(command, may_change=TRAINED, appended=LOGS)
    saved.rmdir()
    (place / "kept").rename(saved)
    check(command, may_change=(*TRAINED, "run/evaluations/*"), appended=LOGS, must_succeed=True)

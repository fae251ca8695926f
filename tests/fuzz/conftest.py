"""The command line in forked processes, and a folder with a run for each case."""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fuzz import material
from tests.fuzz.oracle import Ended, complaints
from tests.warm import Forked

_FOLDER = Path(__file__).parent
_NUM_KEPT = 40
_LONGTAKE = (sys.executable, "-P", "-m", "longtake")
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
_MEMORY_BYTES = 8 * 2**30


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep 40 items, evenly spread over the files, unless LONGTAKE_FUZZ_CASES or -k is given."""
    fuzz = [item for item in items if item.path.is_relative_to(_FOLDER)]
    if "LONGTAKE_FUZZ_CASES" in os.environ or config.getoption("keyword"):
        return
    kept = {fuzz[number * len(fuzz) // _NUM_KEPT] for number in range(min(_NUM_KEPT, len(fuzz)))}
    dropped = [item for item in fuzz if item not in kept]
    config.hook.pytest_deselected(items=dropped)
    items[:] = [item for item in items if item not in set(dropped)]


@pytest.fixture(scope="session")
def _home() -> Iterator[Path]:
    """A folder for this session."""
    folder = Path(tempfile.mkdtemp(prefix="longtake-fuzz-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def run_longtake(_home: Path, warm: list[str]) -> Callable[..., Ended]:
    """Runs `longtake` with arguments in a folder, and kills what it leaves behind."""

    def run(
        arguments: list[str],
        cwd: Path,
        *,
        seconds: float = 60.0,
        memory_bytes: int = _MEMORY_BYTES,
        **limits: int,
    ) -> Ended:
        """Run one command; `limits` are those of tests/warm.py, whose server runs it."""
        paths = [_home / name for name in ("stdout", "stderr")]
        begun = time.monotonic()
        with paths[0].open("wb") as stdout, paths[1].open("wb") as stderr:
            process = Forked(
                warm[-1],
                (*_LONGTAKE, *arguments),
                str(cwd),
                os.environ | _QUIET,
                stdout.fileno(),
                stderr.fileno(),
                {"memory_bytes": memory_bytes, **limits},
            )
            code: int | None
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
                process.kill()
                process.wait()
        said, complained = (path.read_text(errors="surrogateescape") for path in paths)
        return Ended(code, said, complained, round(time.monotonic() - begun, 3))

    return run


@pytest.fixture(scope="session")
def base(_home: Path, run_longtake: Callable[..., Ended]) -> Path:
    """Clips, a catalog, a recipe, a run of 4 steps with 2 checkpoints, and its evaluations."""
    base = _home / "base"
    base.mkdir()
    material.begin(base)
    for command in material.COMMANDS:
        ended = run_longtake(command, base, seconds=300.0)
        assert ended.code == 0, ended
    material.finish(base)
    return base


@pytest.fixture
def place(base: Path, _home: Path) -> Iterator[Path]:
    """A copy of the base, to damage."""
    folder = _home / "place"
    material.copy(base, folder)
    yield folder
    _make_removable(folder)
    shutil.rmtree(folder)


def _make_removable(folder: Path) -> None:
    subprocess.run(["chmod", "-R", "u+rwX", str(folder)], check=False, capture_output=True)


@pytest.fixture
def check(place: Path, base: Path, run_longtake: Callable[..., Ended]) -> Callable[..., Ended]:
    """Runs a command in the place, and asserts all that must hold after any command."""

    def run(
        command: list[str],
        *,
        may_change: tuple[str, ...] = (),
        appended: tuple[str, ...] = (),
        must_succeed: bool = False,
        about: str = "",
        **limits: Any,
    ) -> Any:
        before = material.files(place)
        ended = run_longtake(command, place, **limits)
        _make_removable(place)
        wrong = complaints(ended, before, material.files(place), may_change, appended)
        if must_succeed and ended.code != 0:
            wrong.append(f"ended with code {ended.code}, though it could go on")
        said = f"stdout: {ended.stdout[-1500:]}\nstderr: {ended.stderr[-2000:]}"
        assert not wrong, f"{about}\nlongtake {shlex.join(command)}\n{wrong}\n{said}"
        return ended

    return run

"""The forked command line, and a folder with a run for each case."""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def _beside(name: str) -> ModuleType:
    """A module that lies beside this file."""
    full = f"tests.fuzz.{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[full] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[full]


_FOLDER = Path(__file__).parent
_NUM_KEPT = 40


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep 40 items, evenly spread over the files, unless LONGTAKE_FUZZ_CASES or -k is given."""
    fuzz = [item for item in items if item.path.is_relative_to(_FOLDER)]
    if "LONGTAKE_FUZZ_CASES" in os.environ or config.getoption("keyword"):
        return
    kept = {fuzz[number * len(fuzz) // _NUM_KEPT] for number in range(min(_NUM_KEPT, len(fuzz)))}
    dropped = [item for item in fuzz if item not in kept]
    config.hook.pytest_deselected(items=dropped)
    items[:] = [item for item in items if item not in set(dropped)]


for _name in ("mutations", "generators", "damages"):  # the tests import them by these names
    _beside(_name)


@pytest.fixture(scope="session")
def _home() -> Iterator[Path]:
    """A folder for this session."""
    folder = Path(tempfile.mkdtemp(prefix="longtake-fuzz-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def command_line(_home: Path) -> Iterator[Any]:
    """Runs `longtake` in forks of a process that has imported it."""
    (_home / "server").mkdir()
    command_line = _beside("forked").CommandLine(_home / "server")
    yield command_line
    command_line.close()


@pytest.fixture(scope="session")
def base(_home: Path, command_line: Any) -> Path:
    """Clips, a catalog, a recipe, a run of 4 steps with 2 checkpoints, and its evaluations."""
    material = _beside("material")
    base = _home / "base"
    base.mkdir()
    material.begin(base)
    for command in material.COMMANDS:
        ended = command_line.call(command, base, seconds=300.0)
        assert ended.code == 0, ended
    material.finish(base)
    return base


@pytest.fixture
def place(base: Path, _home: Path) -> Iterator[Path]:
    """A copy of the base, to damage."""
    folder = _home / "place"
    _beside("material").copy(base, folder)
    yield folder
    _make_removable(folder)
    shutil.rmtree(folder)


def _make_removable(folder: Path) -> None:
    subprocess.run(["chmod", "-R", "u+rwX", str(folder)], check=False, capture_output=True)


@pytest.fixture
def check(place: Path, base: Path, command_line: Any) -> Callable[..., Any]:
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
        files = _beside("material").files
        before = files(place)
        ended = command_line.call(command, place, **limits)
        _make_removable(place)
        wrong = _beside("oracle").complaints(ended, before, files(place), may_change, appended)
        if must_succeed and ended.code != 0:
            wrong.append(f"ended with code {ended.code}, though it could go on")
        said = f"stdout: {ended.stdout[-1500:]}\nstderr: {ended.stderr[-2000:]}"
        assert not wrong, f"{about}\nlongtake {shlex.join(command)}\n{wrong}\n{said}"
        return ended

    return run

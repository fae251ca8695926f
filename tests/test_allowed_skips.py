"""A skip fails unless tests/allowed_skips.txt lists it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_TESTS = Path(__file__).parent

_EXAMPLE = """
import pytest

@pytest.mark.skipif(True, reason="there is no moon")
def test_by_mark(): ...

def test_by_call():
    pytest.skip("there is no sun")

def test_that_runs(): ...
"""


@pytest.mark.parametrize(
    ("lines", "failed", "workers"),
    [
        ("tests/test_it.py::test_by_*  there is no *", [], ()),
        ("tests/test_it.py::*  there is no sun", ["test_by_mark"], ("-n", "1")),
        ("# nothing", ["test_by_mark", "test_by_call"], ()),
    ],
    ids=["listed", "other reason", "not listed"],
)
def test_a_skip_that_is_not_listed_fails(
    lines: str, failed: list[str], workers: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "tests" / "test_it.py").write_text(_EXAMPLE)
    (tmp_path / "tests" / "test_whole.py").write_text(
        "import pytest\npytest.skip('there is no air', allow_module_level=True)"
    )
    (tmp_path / "tests" / "allowed_skips.txt").write_text(
        f"{lines}\ntests/test_whole.py there is no air\n"
    )
    done = _pytest(tmp_path, "-p", "allowed_skips", "-rfE", *workers)
    said = [
        line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))
    ]
    assert sorted(said) == sorted(f"tests/test_it.py::{name}" for name in failed), done.stdout
    assert done.returncode == bool(failed)


def test_a_skipped_module_that_is_not_listed_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "tests" / "allowed_skips.txt").touch()
    (tmp_path / "tests" / "test_whole.py").write_text(
        "import pytest\npytest.skip('there is no air', allow_module_level=True)"
    )
    done = _pytest(tmp_path, "-p", "allowed_skips")
    assert done.returncode != 0
    assert "there is no air" in done.stdout


def test_every_line_is_about_tests_that_exist() -> None:
    listed = (_TESTS / "allowed_skips.txt").read_text().splitlines()
    patterns = [line.split()[0] for line in listed if line and line[0] not in "#*"]
    assert patterns
    for pattern in patterns:
        file, _, name = pattern.partition("::")
        found = list(_TESTS.parent.glob(file))
        assert found, pattern
        assert any(name.rstrip("*") in path.read_text() for path in found if path.is_file())


def _pytest(folder: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    env = {**os.environ, "PYTHONPATH": str(_TESTS)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)

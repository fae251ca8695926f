"""A skip fails unless tests/allowed_skips.txt lists it."""

import os
import subprocess
import sys
from collections.abc import Sequence
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


_ALL = ("test_it.py::test_by_mark", "test_it.py::test_by_call", "test_whole.py")
_WHOLE = "tests/test_whole.py there is no air\n"


@pytest.mark.parametrize(
    ("lines", "failed", "workers"),
    [
        (f"tests/test_it.py::test_by_*  there is no *\n{_WHOLE}", (), ()),
        (f"tests/test_it.py::*  there is no sun\n{_WHOLE}", _ALL[:1], ("-n", "1")),
        ("# nothing\n", _ALL, ()),
    ],
    ids=["listed", "other reason", "not listed"],
)
def test_a_skip_that_is_not_listed_fails(
    lines: str, failed: Sequence[str], workers: tuple[str, ...], tmp_path: Path
) -> None:
    """A skipped module is then an error of collection."""
    tests = tmp_path / "tests"
    tests.mkdir()
    (tmp_path / "pytest.ini").touch()
    (tests / "test_it.py").write_text(_EXAMPLE)
    (tests / "test_whole.py").write_text(
        "import pytest\npytest.skip('there is no air', allow_module_level=True)"
    )
    (tests / "allowed_skips.txt").write_text(lines)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfE"]
    options = ["-p", "allowed_skips", "--continue-on-collection-errors", *workers]
    env = {**os.environ, "PYTHONPATH": str(_TESTS)}
    done = subprocess.run(
        [*command, *options], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    said = [
        line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))
    ]
    assert sorted(said) == sorted(f"tests/{name}" for name in failed), done.stdout
    assert done.returncode == bool(failed)
    assert ("there is no air" in done.stdout) == (_ALL[2] in failed)


def test_every_line_is_about_tests_that_exist() -> None:
    listed = (_TESTS / "allowed_skips.txt").read_text().splitlines()
    patterns = [line.split()[0] for line in listed if line and line[0] not in "#*"]
    assert patterns
    for pattern in patterns:
        file, _, name = pattern.partition("::")
        found = list(_TESTS.parent.glob(file))
        assert found, pattern
        assert any(name.rstrip("*") in path.read_text() for path in found if path.is_file())

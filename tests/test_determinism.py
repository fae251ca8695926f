"""Random numbers of tests do not depend on the tests that ran before in their process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

_TESTS = Path(__file__).resolve().parent
_DRAWING = """
import random

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st


def draw():
    return random.random(), np.random.random()


@pytest.fixture(scope="module")
def shared():
    return draw()


def test_a(shared):
    print("\\ndrawn by a", shared, draw())


def test_b(shared):
    import many_constants

    print("\\ndrawn by b", shared, draw())


@settings(max_examples=300)
@given(st.integers(0, 10**12))
def test_c(number):
    print("\\ndrawn by c", number)
"""


def test_each_test_draws_the_same_in_any_order(tmp_path: Path) -> None:
    (tmp_path / "test_drawing.py").write_text(_DRAWING)
    constants = "\n".join(f"assert {10**11 + n}" for n in range(500))
    (tmp_path / "many_constants.py").write_text(constants)

    def drawn(*names: str) -> list[str]:
        options = ["-q", "-s", "-p", "determinism", "-p", "no:cacheprovider"]
        ids = [f"test_drawing.py::test_{name}" for name in names]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *ids],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": f"{_TESTS}:{tmp_path}"},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout
        return sorted(line for line in done.stdout.splitlines() if "drawn by" in line)

    found = drawn("a", "c", "b")
    assert len(found) == 302
    assert found == drawn("b", "a", "c")


@pytest.mark.parametrize("time", [1, 2])
def test_torchs_generator_begins_anew(time: int) -> None:
    expected = torch.Generator().manual_seed(0)
    assert torch.equal(torch.rand(time), torch.rand(time, generator=expected))

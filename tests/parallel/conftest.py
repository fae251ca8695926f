"""Real ranks for the tests of what passes between them."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def run_on_two_ranks(on_two_processes: list[str]) -> Callable[[str], None]:
    """Runs a Python file as two ranks and shows what they said if one of them failed."""

    def run(file: str) -> None:
        command, folder = [*on_two_processes, file], Path(file).parent
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=100, check=False, cwd=folder
        )
        assert ended.returncode == 0, ended.stderr

    return run

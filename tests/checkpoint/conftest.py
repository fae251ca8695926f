"""A run with two checkpoints."""

from pathlib import Path

import pytest
from tests.checkpoint.runs import save

from longtake.run_dir import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run directory with checkpoints of the steps 10 and 20."""
    run = RunDirectory(tmp_path / "run")
    for step in (10, 20):
        save(run, step)
    return run

"""Sites of runs that several hosts train."""

import pytest
from rich.console import Console
from tests.cluster import hosts

from longtake.faults.sandbox import Sandbox


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Sandbox:
    """Shared by these drills; their runs are watched. Skips where hosts cannot be made."""
    if reason := hosts.why_not():
        pytest.skip(reason)
    less = "tracking.tensorboard = false\n"
    return Sandbox(tmp_path_factory.mktemp("cluster"), Console(quiet=True), less)

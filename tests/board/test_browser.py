"""The pages in a real browser."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longtake.run_dir import RunDirectory


@pytest.fixture
def runs(told: RunDirectory) -> Path:
    return told.path.parent


def test_plots_show_every_panel(runs: Path, serve: Callable[[Path], str], open_page: Any) -> None:
    page = open_page(f"{serve(runs)}/run/overview/run")
    page.wait_for_selector("#charts[data-drawn='24']")
    assert page.locator(".panel canvas").count() == 6

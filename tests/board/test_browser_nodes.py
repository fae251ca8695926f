"""The pages of nodes and plan in a real browser."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.board.node_runs import add_nodes, add_stall, make_run
from tests.board.test_plan_page import _keep, _plan

pytestmark = pytest.mark.drill


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    run = make_run(folder / "run")
    nodes = add_nodes(run, 60, 8)
    add_stall(run, nodes[:2], cause=1)
    _keep(run, _plan())
    return folder


@pytest.mark.parametrize("page", ["nodes", "plan"])
def test_a_narrow_page_does_not_scroll_sideways(
    page: str, runs: Path, serve: Callable[[Path], str], open_page: Any
) -> None:
    shown = open_page(f"{serve(runs)}/run/{page}/run", width=390)
    assert shown.evaluate("document.body.scrollWidth <= innerWidth")


def test_cells_of_a_thousand_ranks_can_be_seen_and_the_number_chosen(
    runs: Path, serve: Callable[[Path], str], open_page: Any
) -> None:
    page = open_page(f"{serve(runs)}/run/nodes/run", width=390)
    cells = page.locator("svg.heat rect")
    assert cells.count() == 480
    assert cells.first.bounding_box()["width"] >= 8
    assert page.evaluate("getComputedStyle(document.querySelector('svg.heat rect')).fill") != (
        "rgb(0, 0, 0)"
    )
    page.click("text=GPU power")
    assert page.locator(".choice[aria-current]").inner_text() == "GPU power"
    assert "show=power" in page.url


def test_groups_of_stacks_open_and_the_cause_is_open(
    runs: Path, serve: Callable[[Path], str], open_page: Any
) -> None:
    page = open_page(f"{serve(runs)}/run/nodes/run")
    assert page.locator(".group.is-cause .call-own").first.is_visible()
    other = page.locator(".group:not(.is-cause)")
    assert not other.locator(".call-library").first.is_visible()
    other.locator("summary").first.click()
    assert other.locator(".call-library").first.is_visible()


def test_the_dark_page_has_another_scale(
    runs: Path, serve: Callable[[Path], str], open_page: Any
) -> None:
    fill = "getComputedStyle(document.querySelector('svg.scale rect')).fill"
    light, dark = (
        open_page(f"{serve(runs)}/run/nodes/run", color_scheme=theme).evaluate(fill)
        for theme in ("light", "dark")
    )
    assert light != dark

"""Pages of runs, comparisons and reports in a real browser."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.board.conftest import serving

from longtake.board.report import write_report
from longtake.run_dir import RunDirectory

pytestmark = pytest.mark.drill

Serve = Callable[[Path], str]
OpenPage = Callable[..., Any]
_SCREENSHOT_RUNS, _DOCS = "LONGTAKE_SCREENSHOT_RUNS", Path(__file__).parents[2] / "docs"
DRAWN = "#charts[data-drawn='24']"


@pytest.fixture
def runs(told: RunDirectory) -> Path:
    shutil.copytree(told.path, told.path.with_name("second run"))
    return told.path.parent


def test_the_list_leads_to_a_run_and_filters(runs: Path, serve: Serve, open_page: OpenPage) -> None:
    page = open_page(serve(runs))
    assert page.locator("#runs tbody tr").count() == 2
    page.fill("#filter", "second")
    assert page.locator("#runs tbody tr:visible").count() == 1
    assert "filter=second" in page.url
    page.click("text=second run")
    page.wait_for_selector(DRAWN)
    assert page.url.endswith("/run/overview/second%20run")


def test_selected_runs_are_compared(runs: Path, serve: Serve, open_page: OpenPage) -> None:
    page = open_page(serve(runs))
    assert page.is_disabled("#compare")
    for box in page.locator("#runs input[type=checkbox]").all():
        box.check()
    page.click("#compare")
    page.wait_for_selector("#comparison[data-drawn]")
    assert page.locator("#comparison canvas").count() == 5
    assert page.locator("text=The recipes of these runs are the same").is_visible()


def test_plots_zoom_together_and_the_address_says_so(
    runs: Path, serve: Serve, open_page: OpenPage
) -> None:
    page = open_page(f"{serve(runs)}/run/overview/run")
    page.wait_for_selector(DRAWN)
    box = page.locator(".panel-loss .u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 50, steps=5)
    page.mouse.up()
    page.wait_for_function("location.search.includes('from=')")
    page.reload()
    page.wait_for_selector(DRAWN)
    first, last = page.evaluate(
        "(() => { const all = new URLSearchParams(location.search);"
        " return [Number(all.get('from')), Number(all.get('to'))]; })()"
    )
    assert 5 < first < 9
    assert 16 < last < 20
    page.locator(".panel-loss .u-over").dblclick()
    page.wait_for_function("!location.search.includes('from=')")


def test_the_cursor_reads_numbers_in_all_panels(
    runs: Path, serve: Serve, open_page: OpenPage
) -> None:
    page = open_page(f"{serve(runs)}/run/overview/run")
    page.wait_for_selector(DRAWN)
    box = page.locator(".panel-loss .u-over").bounding_box()
    page.mouse.move(box["x"] + 1, box["y"] + 50)
    page.wait_for_function("document.querySelector('.where')?.textContent === 'step 1'")
    assert "weight norm 701" in page.locator(".panel-weight_norm .readout").inner_text()


def test_marks_of_the_time_line_say_what_happened(
    runs: Path, serve: Serve, open_page: OpenPage
) -> None:
    page = open_page(f"{serve(runs)}/run/overview/run")
    page.wait_for_selector(DRAWN)
    launch = page.locator("#lanes .mark[data-kind=launch]")
    assert launch.count() == 1, "it lies before the first step that is plotted"
    assert "rolled back" in page.locator("#lanes-legend").inner_text()
    page.locator("#lanes .mark-error").first.click()
    assert "went back from step 20" in page.locator("#mark-note").inner_text()
    lanes, plot = (
        page.locator(each).first.bounding_box() for each in ("#lanes svg", ".panel-loss .u-over")
    )
    assert lanes["x"] == pytest.approx(plot["x"], abs=1)
    assert lanes["width"] == pytest.approx(plot["width"], abs=1)


def test_a_new_step_is_drawn_without_loading_the_page_again(
    told: RunDirectory, open_page: OpenPage
) -> None:
    with serving(told.path.parent) as url:
        page = open_page(f"{url}run/overview/run")
        page.wait_for_selector(DRAWN)
        page.evaluate("window.isSamePage = true")
        last = json.loads(told.metrics_path.read_bytes().splitlines()[-1])
        with told.metrics_path.open("ab") as file:
            file.write(json.dumps({**last, "step": 25}).encode() + b"\n")
        page.wait_for_selector("#charts[data-drawn='25']")
        assert "step 25 of 40" in page.locator(".status").inner_text()
        assert page.evaluate("window.isSamePage")
        page.close()  # before the server, of whose end its console would tell


@pytest.mark.parametrize("path", ["/", "/run/overview/run", "/compare?run=run&run=second+run"])
def test_pages_fit_a_phone(runs: Path, serve: Serve, open_page: OpenPage, path: str) -> None:
    page = open_page(f"{serve(runs)}{path}", 390, 844, color_scheme="dark")
    page.wait_for_load_state("load")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_board_for_other_machines_opens_with_the_whole_address_only(
    runs: Path, open_page: OpenPage, browser: Any
) -> None:
    with serving(runs, "--host", "0.0.0.0") as url:  # noqa: S104 - that is what is tested
        address, token = url.split("#")
        port = address.rstrip("/").rpartition(":")[2]
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"http://localhost:{port}/")
        assert page.locator("text=This board needs a token").is_visible()
        page.goto(f"http://localhost:{port}/run/overview/run#{token}")
        page.reload()
        page.wait_for_selector(DRAWN)
        assert "token" not in page.url
        context.close()


def test_a_report_works_from_a_file(
    told: RunDirectory, tmp_path: Path, open_page: OpenPage
) -> None:
    out = tmp_path / "report.html"
    write_report(told.path, out)
    page = open_page(out.as_uri())
    page.wait_for_selector(DRAWN)
    assert page.locator("#lanes .mark").count() > 5
    page.click(".panel-loss [data-also]")
    page.wait_for_function(
        "document.querySelector('.panel-loss .readout').textContent.includes('sigma')"
    )


@pytest.mark.parametrize(
    ("name", "path"),
    [("board-run", "/run/overview/{run}"), ("board-samples", "/run/samples/{run}?preset=demo")],
)
def test_pictures_of_the_documentation_show_a_run(
    runs: Path, serve: Serve, open_page: OpenPage, tmp_path: Path, name: str, path: str
) -> None:
    """`make screenshots` takes them of the demo, and writes them to docs/."""
    folder, out, run = os.environ.get(_SCREENSHOT_RUNS), tmp_path, "run"
    if folder is not None:
        runs, out, run = Path(folder).resolve(), _DOCS, "demo"
    page = open_page(f"{serve(runs)}{path.format(run=run)}", 1280, 800)
    page.wait_for_selector("#charts[data-drawn], #samples-page, .empty")
    page.wait_for_timeout(1500)  # videos that are seen have begun
    page.screenshot(path=out / f"{name}.png")
    with Image.open(out / f"{name}.png") as picture:
        assert len(picture.convert("RGB").getcolors(2**20) or ()) > 50

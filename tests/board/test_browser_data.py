"""The data page in a real browser."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longtake.run_dir import RunDirectory

pytestmark = pytest.mark.drill


@pytest.fixture
def page_url(told: RunDirectory, serve: Callable[[Path], str]) -> str:
    return f"{serve(told.path.parent)}/run/data/run"


def test_which_verdict_is_open_stands_in_the_address(page_url: str, open_page: Any) -> None:
    page = open_page(page_url)
    page.locator("details[data-step='9'] > summary").click()
    page.wait_for_url("**/run?step=9")
    assert page.locator("details[data-step='9'] tbody tr").first.inner_text().startswith("NaN")
    page.locator("details[data-step='9'] > summary").click()
    page.wait_for_url("**/run/data/run")
    page = open_page(f"{page_url}?step=20")
    assert page.locator("details[data-step][open]").get_attribute("data-step") == "20"


def test_the_page_fits_a_phone(page_url: str, open_page: Any) -> None:
    page = open_page(f"{page_url}?step=9", 390, 844)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.locator("svg.stages line.now").count() == 1
    assert page.locator("section h2").count() == 6
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((each) => each.id)")
    assert len(ids) == len(set(ids))

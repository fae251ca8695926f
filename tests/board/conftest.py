"""A real board and a real browser."""

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.told_run import _told, teller_of, told

from longtake.process import program

__all__ = ["_told", "teller_of", "told"]

_CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Headless Chromium of the system, driven by Playwright; skips where one is missing."""
    api = pytest.importorskip("playwright.sync_api", reason="there is no playwright (pip install)")
    found = next(filter(None, map(shutil.which, _CHROMIUM)), None)
    if found is None:
        pytest.skip("there is no Chromium (apt install chromium)")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=list(_FLAGS))
        yield chromium
        chromium.close()


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[str]:
    """`longtake board` of a folder in a process of its own; yields its address."""
    command = program("longtake", "board", str(folder), "--port", "0", *arguments)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            found = re.search(r"http://\S+", line)
            assert found is not None, line + process.stderr.read()
            yield found[0]
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture(scope="session")
def serve() -> Iterator[Callable[[Path], str]]:
    """Serves folders until the session ends; each is served once."""
    known: dict[Path, str] = {}
    with ExitStack() as stack:

        def start(folder: Path) -> str:
            if folder not in known:
                known[folder] = stack.enter_context(serving(folder)).rstrip("/")
            return known[folder]

        yield start


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens pages; at the end none may have said an error on its console."""
    complaints: list[str] = []
    with ExitStack() as stack:

        def open_page(url: str, width: int = 1280, height: int = 900, **context: Any) -> Any:
            own = browser.new_context(viewport={"width": width, "height": height}, **context)
            stack.callback(own.close)
            page = own.new_page()
            page.on("console", lambda it: complaints.extend([it.text] * (it.type == "error")))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.goto(url)
            return page

        yield open_page
    assert not complaints

"""A pytest plugin: a skip that tests/allowed_skips.txt does not list fails its test.

A test that silently stops running proves nothing, so every reason is agreed on in that file.
"""

from collections.abc import Generator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from pluggy import Result

LIST = "tests/allowed_skips.txt"


def read_allowed(path: Path) -> list[tuple[str, str]]:
    """Pairs of a pattern of test ids and a pattern of reasons."""
    lines = (line.strip() for line in path.read_text().splitlines())
    pairs = (line.partition(" ") for line in lines if line and not line.startswith("#"))
    return [(test, reason.strip()) for test, _, reason in pairs]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, Result[pytest.TestReport], None]:
    """Turn an unlisted skip of a test into a failure."""
    outcome = yield
    _refuse_unlisted_skip(outcome.get_result(), item.config)


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, Result[pytest.CollectReport], None]:
    """Turn an unlisted skip of a whole module into an error of collection."""
    outcome = yield
    _refuse_unlisted_skip(outcome.get_result(), collector.config)


def _refuse_unlisted_skip(
    report: pytest.TestReport | pytest.CollectReport, config: pytest.Config
) -> None:
    if not report.skipped or not isinstance(report.longrepr, tuple):
        return
    reason = str(report.longrepr[2]).removeprefix("Skipped: ")
    for test_pattern, reason_pattern in read_allowed(config.rootpath / LIST):
        if fnmatchcase(report.nodeid, test_pattern) and fnmatchcase(reason, reason_pattern):
            return
    report.outcome = "failed"
    report.longrepr = (
        f"{report.nodeid} was skipped ({reason}), and {LIST} does not list that. Make the test "
        "run, or add a line with the test and the reason."
    )

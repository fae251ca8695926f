"""A pytest plugin: how much processor time each test takes, with the processes that it starts.

It is a property of each test in the file of --junitxml, and at the end the sums of the folders are
printed, and those that exceed their ceiling in structure_limits.toml. Wall-clock time depends on
what else runs; this does so far less.
"""

import os
import tomllib
from collections import defaultdict
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

_PROPERTY = "core_seconds"
_LIMITS = Path(__file__).with_name("structure_limits.toml")


class CoreSeconds:
    """Measures in the process that runs the tests, and sums up in the one that reports."""

    def __init__(self) -> None:
        self._before = _used()
        self._by_folder: defaultdict[str, float] = defaultdict(float)

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None]:
        """Measure from the end of the test before to the end of this one, its fixtures included."""
        yield
        now = _used()
        item.user_properties.append((_PROPERTY, round(now - self._before, 2)))
        self._before = now

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add what a test has taken to its folder's."""
        if report.when == "teardown":
            folder, _, rest = report.location[0].removeprefix("tests/").partition("/")
            folder = folder if rest else "modules"
            self._by_folder[folder] += sum(
                float(str(value)) for name, value in report.user_properties if name == _PROPERTY
            )

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """One line, the largest folders first."""
        total = sum(self._by_folder.values())
        if total >= 1:
            by_size = sorted(self._by_folder.items(), key=lambda each: -each[1])
            sums = (f"{name} {seconds:.0f}" for name, seconds in by_size)
            terminalreporter.write_line(f"core-seconds: {total:.0f} ({', '.join(sums)})")
            ceilings = tomllib.loads(_LIMITS.read_text())["core_seconds"]
            exceeded = [
                f"{name} {seconds:.0f} of {ceilings.get(name, 0)}"
                for name, seconds in by_size
                if seconds > ceilings.get(name, 0)
            ]
            if exceeded:
                terminalreporter.write_line(f"more core-seconds than usual: {', '.join(exceeded)}")


def _used() -> float:
    """Sum up this process, those that it has waited for, and those that run, with theirs."""
    total = sum(os.times()[:4])
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it has just ended
            total += sum(child.cpu_times()[:4])
    return total

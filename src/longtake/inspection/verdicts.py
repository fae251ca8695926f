"""What the guard said in a run, and where the run went back."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longtake.errors import RecordError, RunError
from longtake.fsio import require_record
from longtake.node_dir import read_events
from longtake.run_dir import GuardReport, ReportedSample, RunDirectory

_REPORT = re.compile(r"step_(\d+)_(\d+)\.json")


@dataclass(frozen=True)
class Report:
    """All that the guard saw around one verdict, as it wrote it down."""

    path: Path
    number: int
    """Of the verdicts on the same step, which may have been run several times."""
    facts: GuardReport

    @property
    def step(self) -> int:
        """The step that was judged, as metrics count: steps done with it."""
        return self.facts["step"] + 1

    def samples_of(self, step: int) -> list[ReportedSample]:
        """Samples of a step, the highest loss first; none of steps long before."""
        samples = [each for each in self.facts["samples"] if each["step"] + 1 == step]
        return sorted(samples, key=_badness, reverse=True)


def events(run: RunDirectory) -> list[dict[str, Any]]:
    """All of a run's events and its nodes', in the order in which they happened."""
    return list(read_events(run))


def verdicts(run: RunDirectory) -> list[dict[str, Any]]:
    """Events of all that were not "ok"; `step` is here as metrics count it."""
    judged = (each for each in events(run) if each["event"] in ("skipped", "suspected"))
    return [{**each, "step": each["step"] + 1} for each in judged]


def report_near(run: RunDirectory, step: int, span: int) -> Report | None:
    """The report that says most about a step; None if there is none within `span` steps.

    One that has the step's samples comes first, then the nearest, then the newest.

    Raises:
        RunError: a report cannot be read.
    """
    names = ((path, _REPORT.fullmatch(path.name)) for path in run.guard_path.glob("step_*.json"))
    near = [
        Report(path, int(name[2]), _read(path))
        for path, name in names
        if name and abs(int(name[1]) + 1 - step) <= span
    ]
    ranked = sorted(near, key=lambda each: (abs(each.step - step), -each.number))
    return next((each for each in ranked if each.samples_of(step)), next(iter(ranked), None))


def _read(path: Path) -> GuardReport:
    try:
        return require_record(path, GuardReport)
    except RecordError as error:
        raise RunError(
            f"{error} It is one of the guard's reports, which nothing else needs: restore it, or "
            "move it away and look at the rest."
        ) from error


def _badness(sample: ReportedSample) -> tuple[bool, float]:
    """Losses that are no numbers come before the highest."""
    loss = float(sample["loss"])
    return (math.isnan(loss), loss)

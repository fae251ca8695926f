"""What people read while a server serves; torch-free."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from longtake.evaluation.measures import MEASURES
from longtake.evaluation.server.task import Task, Tick
from longtake.evaluation_dir import Scores
from longtake.formatting import format_duration
from longtake.progress import counted, phase_lines
from longtake.trust import TrustError

_SHOWN = ("brightness", "motion")
_MOST_NUMBERS = 4
_REMEMBERED = 1000
"""Lines: over weeks there are many, and none of long ago comes again."""


class Report:
    """Tells what is done, and each thing that is wrong once, until much else has been told.

    Args:
        console: where people read.

    Attributes:
        num_wrong: how many things were wrong.
        untrusted: the last run that names code and that somebody else began.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._told: dict[str, None] = {}
        self._lock = threading.Lock()
        self.num_wrong = 0
        self.untrusted: TrustError | None = None

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, highlight=False, markup=False)

    def remark(self, text: str) -> None:
        """Print a line, unless it was printed before."""
        if self._is_new(text):
            self.say(text)

    def wrong(self, text: str) -> None:
        """Tell what is wrong, once; the rest goes on."""
        if self._is_new(text):
            self.num_wrong += 1
            self.say(f"longtake: {text}")

    def evaluated(self, task: Task, scores: Scores) -> None:
        """Tell what came out."""
        self.say(sentence(task, scores))
        for alarm in scores["alarms"]:
            if alarm["kind"] == "drift":
                self.say(f"  alarm: {alarm['message']}")
        unlike = [alarm["measure"] for alarm in scores["alarms"] if alarm["kind"] == "range"]
        if unlike:  # many, as long as a model has learnt little
            self.say(f"  unlike the clips of the training: {', '.join(unlike)}")

    def _is_new(self, text: str) -> bool:
        with self._lock:
            is_new = text not in self._told
            self._told.pop(text, None)
            self._told[text] = None  # the newest
            if len(self._told) > _REMEMBERED:
                del self._told[next(iter(self._told))]
        return is_new

    @contextmanager
    def bar(self, task: Task) -> Iterator[Tick]:
        """A bar over the solver's steps."""
        label = f"{task.preset.name} of step {task.step}"
        with (
            phase_lines(self._console, f"{label}: load") as enter,
            counted(self._console, label) as advance,
        ):

            def shown(what: str, done: int, of: int) -> None:
                enter(f"{label}: {what}")
                if what == "sample":
                    advance(done, of)

            yield shown


def sentence(task: Task, scores: Scores) -> str:
    """One line for people on a result."""
    count = len(scores["videos"])
    videos = "1 video" if count == 1 else f"{count} videos"
    took = _took(sum(scores["seconds"].get(name, 0.0) for name in ("load", "sample", "measure")))
    where = task.directory.result_path(task.preset.name, task.step).relative_to(task.run.path)
    return " · ".join([f"{task}: {videos} in {took}", *_numbers(scores)]) + f" → {where}"


def _numbers(scores: Scores) -> list[str]:
    """What says the most: a preset's own measures first."""
    measures = scores["measures"]
    own = [name for name in measures if name not in MEASURES]
    found = [f"{name} {measures[name]:.2f}" for name in own]
    if "held_out" in scores:
        found.append(f"held-out loss {scores['held_out']['mean']:.3f}")
    found += [f"{name} {measures[name]:.2f}" for name in _SHOWN if name in measures]
    return found[:_MOST_NUMBERS]


def _took(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else format_duration(seconds)

"""What people read while an evaluation server works; torch-free."""

import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from longtake.errors import LongtakeError
from longtake.evaluation.measures import MEASURES
from longtake.evaluation_dir import Scores
from longtake.formatting import format_duration
from longtake.progress import counted, phase_lines
from longtake.sampling.claims import EvaluationTask, Progress
from longtake.trust import TrustError

_SHOWN = ("brightness", "motion")
_MAX_NUMBERS = 4
_MAX_REMEMBERED = 1000
"""Lines: a server runs for weeks, and reports again what it last reported long ago."""


class ServerReport:
    """Prints what is done, and each problem once; any thread may use it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._printed: dict[str, None] = {}
        self._errors: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self.num_wrong = 0
        self.untrusted: TrustError | None = None

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def remark(self, text: str) -> None:
        if self._is_new(text):
            self.say(text)

    def wrong(self, text: str) -> None:
        if self._is_new(text):
            self.num_wrong += 1
            self.say(f"longtake: {text}")

    @contextmanager
    def log_errors(self, scope: Path | str) -> Iterator[None]:
        """End the block at an error, whatever it is, and print each kind of it once.

        A server works for weeks on files that others write: what is wrong with one run must end
        neither the server nor one of its threads.
        """
        try:
            yield
        except Exception as error:
            known = isinstance(error, LongtakeError)
            kind = str(error) if known else raised_at(error)
            if (f"{scope}", kind) not in self._errors:
                self._errors.add((f"{scope}", kind))
                text = kind if known else f"{kind}: {error}"
                self.wrong(f"{scope}: {text.rstrip('.')}. It is tried again; other work continues.")

    def evaluated(self, task: EvaluationTask, scores: Scores) -> None:
        """Print a result."""
        self.say(sentence(task, scores))
        for alarm in scores["alarms"]:
            if alarm["kind"] == "drift":
                self.say(f"  alarm: {alarm['message']}")
        unlike = [alarm["measure"] for alarm in scores["alarms"] if alarm["kind"] == "range"]
        if unlike:  # many, as long as a model has learnt little
            self.say(f"  unlike the clips of the training: {', '.join(unlike)}")

    @contextmanager
    def progress_bar(self, task: EvaluationTask) -> Iterator[Progress]:
        """A bar over the solver's steps."""
        label = f"{task.preset.name} of step {task.step}"
        with (
            phase_lines(self._console, f"{label}: load") as enter,
            counted(self._console, label) as advance,
        ):

            def show(what: str, done: int, total: int) -> None:
                enter(f"{label}: {what}")
                if what == "sample":
                    advance(done, total)

            yield show

    def _is_new(self, text: str) -> bool:
        with self._lock:
            is_new = text not in self._printed
            self._printed.pop(text, None)
            self._printed[text] = None  # the newest
            if len(self._printed) > _MAX_REMEMBERED:
                del self._printed[next(iter(self._printed))]
        return is_new


def raised_at(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(last.filename).name}, line {last.lineno}"


def sentence(task: EvaluationTask, scores: Scores) -> str:
    """One line on a result."""
    count = len(scores["videos"])
    videos = "1 video" if count == 1 else f"{count} videos"
    seconds = sum(scores["seconds"].get(name, 0.0) for name in ("load", "sample", "measure"))
    took = f"{seconds:.1f} s" if seconds < 60 else format_duration(seconds)
    where = task.directory.result_path(task.preset.name, task.step).relative_to(task.run.path)
    return " · ".join([f"{task}: {videos} in {took}", *_numbers(scores)]) + f" → {where}"


def _numbers(scores: Scores) -> list[str]:
    """The most telling measures: the preset's own first."""
    measures = scores["measures"]
    found = [f"{name} {value:.2f}" for name, value in measures.items() if name not in MEASURES]
    if "held_out" in scores:
        found.append(f"held-out loss {scores['held_out']['mean']:.3f}")
    found += [f"{name} {measures[name]:.2f}" for name in _SHOWN if name in measures]
    return found[:_MAX_NUMBERS]

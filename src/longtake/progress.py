"""Progress displays of long work; torch-free.

A terminal gets a live bar; a log, in which no line can be redrawn, gets a line every 20 seconds.
"""

import signal
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from longtake import heartbeat
from longtake.formatting import for_seconds, format_duration, join_words
from longtake.metrics import Metrics

_SECONDS_BETWEEN_LINES = 20.0
_FEWEST_STEPS, _MOST_STEPS = 20, 1000  # bounds of the steps averaged for the time left
_SECONDS_OF_A_LONG_PHASE = 1.0
_PHASE_LOOK_SECONDS = 0.1
_MAX_GROUPS = 3
_MAX_RANKS = 8
_STARTING_PHASES: dict[str, str] = {
    "start": "importing PyTorch",
    "rendezvous": "waiting for the other ranks",
    "open": "opening catalog and run directory",
    "plan": "planning memory",
    "build": "building the model",
    "load": "loading the checkpoint",
    "cache": "filling the cache",
    "data": "waiting for the first batch",
}


class StepProgress:
    """Display of a training's loss, speed and time left, averaged over the later half of steps.

    The first step of a launch is left out: it also compiles kernels and reserves memory.
    """

    def __init__(self, console: Console, bar: Progress, start: int, total: int) -> None:
        self._console = console
        self._bar = bar
        self._total = total
        self._task = bar.add_task("train", total=total, completed=start, facts="")
        self._loss: float | None = None
        self._seconds: deque[float] = deque(maxlen=_MOST_STEPS)
        self._num_steps = 0
        self._last_line = time.monotonic()

    def update(self, metrics: Metrics) -> None:
        """Add the metrics of a training step; redraw the bar or print a line if it is time."""
        if metrics["loss"] is not None:
            before = metrics["loss"] if self._loss is None else self._loss
            # Over about 20 steps, as single losses vary with the sigmas that were drawn.
            self._loss = 0.95 * before + 0.05 * metrics["loss"]
        self._num_steps += 1
        # The first step also compiled kernels; its time would distort the mean for long.
        if self._num_steps == 2:
            self._seconds.clear()
        self._seconds.append(metrics["step_seconds"])
        if self._console.quiet:
            return
        # Without a terminal, each line stays: it is printed only once in a while.
        if not self._console.is_terminal:
            if time.monotonic() - self._last_line <= _SECONDS_BETWEEN_LINES:
                return
            self._last_line = time.monotonic()
        later = list(self._seconds)[-max(_FEWEST_STEPS, self._num_steps // 2) :]
        seconds = statistics.fmean(later)
        left = format_duration((self._total - metrics["step"]) * seconds)
        loss = "" if self._loss is None else f"loss {self._loss:.4f} · "
        facts = f"{loss}{1 / seconds:.2f} steps/s · {left} left"
        if self._console.is_terminal:
            self._bar.update(self._task, completed=metrics["step"], facts=facts)
        else:
            self._console.print(f"step {metrics['step']}/{self._total} · {facts}")

    def say(self, text: str) -> None:
        self._console.print(f"  {text}", highlight=False, markup=False)


@contextmanager
def step_progress(console: Console, start: int, total: int) -> Iterator[StepProgress]:
    """Show the progress of a training from step `start` to step `total` within the block."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}"),
    )
    with Progress(*columns, console=console, disable=_is_hidden(console)) as bar:
        yield StepProgress(console, bar, start, total)


def starting_phase() -> str | None:
    return _STARTING_PHASES.get(heartbeat.current_phase() or "start")


@contextmanager
def phase_lines(
    console: Console, first: str, now: Callable[[], str | None] | None = None
) -> Iterator[Callable[[str], None]]:
    """Print the name of each phase of long work that lasts over a second, until the block ends.

    Args:
        console: console to print to.
        first: the phase that begins now.
        now: function that returns the current phase, or None after the last one; it is polled.

    Yields:
        A function to call with the name of each new phase, if `now` is not given.
    """
    entered = [first]
    ended = threading.Event()

    def watch() -> None:
        shown, since, is_printed = first, time.monotonic(), False
        while not ended.wait(_PHASE_LOOK_SECONDS):
            phase = now() if now is not None else entered[-1]
            if phase is None:
                return
            if phase != shown:
                shown, since, is_printed = phase, time.monotonic(), False
            elif not is_printed and time.monotonic() - since > _SECONDS_OF_A_LONG_PHASE:
                is_printed = True
                console.print(f"{phase} …", highlight=False, markup=False)

    thread = threading.Thread(target=watch, name="phases", daemon=True)
    if not console.quiet:
        thread.start()
    try:
        yield entered.append
    finally:
        ended.set()
        # Joined, so that no line is printed after the block.
        if thread.is_alive():
            thread.join()


def answer_to(received: signal.Signals, ranks: Iterable[heartbeat.Heartbeat]) -> str:
    """Return the text that answers a stop signal: its effect, and the ranks still awaited."""
    groups: dict[str, list[heartbeat.Heartbeat]] = defaultdict(list)
    # Longest in its phase first: it is the likely reason for which the others wait.
    for each in sorted(ranks, key=lambda each: -each.seconds):
        where = heartbeat.PHASE_WORDS.get(each.phase, f"in {each.phase}")
        groups[where.format(step=each.step)].append(each)
    waits = []
    for where, group in groups.items():
        numbers = sorted(each.rank for each in group)
        named = f"rank{'s' * (len(numbers) > 1)} {join_words(numbers)}"
        who = named if len(numbers) <= _MAX_RANKS else f"{len(numbers)} ranks"
        waits.append(f"{who} ({where}, for {for_seconds(group[0].seconds)})")
    if rest := waits[_MAX_GROUPS:]:
        waits[_MAX_GROUPS:] = [f"ranks in {len(rest)} other places"]
    waiting = f" It waits for {join_words(waits)}." if waits else ""
    is_person = received == signal.SIGINT
    again = " Ctrl-C again stops it at once, without saving." if is_person else ""
    return f"{received.name}: training ends after this step and saves it.{waiting}{again}"


@contextmanager
def counted(console: Console, label: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar within the block; yields a function to call with (done, total).

    Without a terminal it prints a line every 20 seconds.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, disable=_is_hidden(console)) as bar:
        task = bar.add_task(label, total=None)
        # The first line comes after a second: shorter work prints none.
        printed_at = time.monotonic() - _SECONDS_BETWEEN_LINES + _SECONDS_OF_A_LONG_PHASE

        def advance(done: int, total: int) -> None:
            nonlocal printed_at
            bar.update(task, completed=done, total=total)
            if not console.is_terminal and time.monotonic() - printed_at > _SECONDS_BETWEEN_LINES:
                printed_at = time.monotonic()
                console.print(f"{label}: {done:,}/{total:,}", highlight=False, markup=False)

        yield advance


def _is_hidden(console: Console) -> bool:
    return console.quiet or not console.is_terminal

"""Options of an evaluation server, its search for runs, and its printed report; torch-free."""

import re
import threading
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from longtake import config, evaluation_dir, progress
from longtake.errors import LongtakeError, RunError
from longtake.evaluation.measures import MEASURES
from longtake.formatting import format_duration, plural
from longtake.run_dir import RunDirectory
from longtake.sampling.claims import EvaluationTask, Progress
from longtake.sampling.presets import read_tables, refuse_unknown
from longtake.trust import TrustError, load_recipe, refuse_foreign_code

_EVERY = re.compile(r"every=([1-9][0-9]{0,11})")
_SHOWN = ("brightness", "motion")
_MAX_NUMBERS = 4
_MAX_REMEMBERED = 1000
"""Maximum number of printed lines that are remembered; a server runs for weeks, and may repeat the
oldest."""


@dataclass(frozen=True)
class Backlog:
    """Choice of the waiting checkpoints to evaluate (option --backlog): all, newest, every=K."""

    every: int | None = 1  # steps that are multiples of it; None: the newest step only

    @property
    def takes_all(self) -> bool:
        return self.every is not None

    def choose(self, steps: Sequence[int], *, with_last: bool) -> list[int]:
        """Choose checkpoints from ascending steps, and return them in the order of evaluation.

        The oldest comes first, because a run deletes the oldest first. With `with_last`, the newest
        is always chosen, because no newer one will come.
        """
        if self.every is None:
            return list(steps[-1:])
        wanted = [step for step in steps if step % self.every == 0]
        return sorted({*wanted, *steps[-1:]}) if with_last else wanted


def parse_backlog(text: str) -> Backlog:
    """Parse the value of --backlog: `all`, `newest` or `every=K`.

    Raises:
        RunError: the text is something else.
    """
    if text in ("all", "newest"):
        return Backlog(1 if text == "all" else None)
    found = _EVERY.fullmatch(text)
    if found is None:
        raise RunError(
            f"--backlog {text[:80]}: expected all, newest or every=K, such as every=1000 for the "
            "checkpoints of the steps 1000, 2000, ..."
        )
    return Backlog(int(found[1]))


@dataclass(frozen=True)
class ServerOptions:
    """Options of an evaluation server."""

    places: tuple[Path, ...]  # run directories, and folders of run directories
    presets: tuple[str, ...] = ()  # names; empty: those that the recipe wants
    own_presets: Path | None = None  # a TOML file of presets
    recipe: Path | None = None  # its [evaluation] and [sampling] replace those of the runs
    backlog: Backlog = field(default_factory=Backlog)
    follows: bool = False  # wait for more when nothing is pending
    until_finished: bool = False  # end when all runs have ended and nothing is pending
    source: str | None = None  # where the runs are trained, see mirror.py; None: on this machine
    trust: bool = False  # run code that runs name, even if another user began them
    every_seconds: float = 100.0  # between two looks at the source
    look_seconds: float = 0.5  # between two looks at the run directories when nothing is pending
    pause_seconds: float = 30.0  # a checkpoint rests after a failure while others are evaluated
    stuck_seconds: float = 1800.0  # a task without progress for this long loses its claim
    lease_seconds: float = 60.0  # a task without a heartbeat for this long is taken over
    max_attempts: int = 3  # attempts at one task

    @property
    def waits(self) -> bool:
        return self.follows or self.until_finished

    def check(self) -> None:
        """Refuse options with which the evaluation server cannot work.

        Raises:
            RunError: a place is missing or holds no run, and the server does not wait for it; or
                one source is to be mirrored into several places.
            RecipeError: a preset is named that no run has.
            TrustError: a run names code, and another user began it.
        """
        if self.source is not None and len(self.places) != 1:
            raise RunError(
                f"--source {self.source} is mirrored into one folder, and {len(self.places)} are "
                "given. Start a server for each."
            )
        if self.own_presets is not None and not self.own_presets.is_file():
            raise RunError(f"--presets {self.own_presets}: there is no such file.")
        if self.recipe is not None:
            load_recipe(self.recipe, (), trust=self.trust, uses_out=False)
        if self.source is None and not self.waits:
            for place in self.places:
                _refuse_empty(place)
            # A preset that no run has, and a --presets file that cannot be read.
            recipes: list[tuple[config.Recipe, Path]] = []
            for run in find_runs(self.places):
                with suppress(LongtakeError):  # an error in one run holds up no other
                    recipes.append((self.recipe_of(run), run.path))
            tables = [read_tables(*each, self.own_presets) for each in recipes]
            known = {name for each in tables for name in each.known}
            if tables:
                refuse_unknown(tables[0], (name for name in self.presets if name not in known))
        if self.source is None:
            for run in find_runs(self.places):
                self.refuse_foreign_code(run)

    def recipe_of(self, run: RunDirectory) -> config.Recipe:
        """Return a run's recipe, with [evaluation] and [sampling] of --recipe, if it is given.

        Raises:
            RunError: there is no run.
            RecipeError: a recipe cannot be read.
        """
        own = run.recipe()
        if self.recipe is None:
            return own
        named = config.load(self.recipe)
        return own.model_copy(update={"evaluation": named.evaluation, "sampling": named.sampling})

    def refuse_foreign_code(self, run: RunDirectory) -> None:
        """Refuse a run whose recipe names own code and that another user began.

        Other errors of its recipe are reported where its presets are read.

        Raises:
            TrustError: the run names code, and another user began it.
        """
        try:
            recipe = run.recipe()
            if self.recipe is not None:  # its measures are not used
                recipe = recipe.model_copy(update={"evaluation": config.EvaluationSection()})
            refuse_foreign_code(run, trust=self.trust, recipe=recipe)
        except LongtakeError as error:
            if isinstance(error, TrustError):
                raise


def find_runs(places: Iterable[Path]) -> list[RunDirectory]:
    """Return the run directories among and in the folders `places`, each once."""
    found: dict[Path, RunDirectory] = {}
    for place in places:
        inside = sorted(place.iterdir()) if place.is_dir() else []
        for folder in [place] if RunDirectory(place).exists() else inside:
            run = RunDirectory(folder)
            # A hidden folder may be the index of a mirror, which has a recipe.toml too.
            if run.exists() and not folder.name.startswith("."):
                # By its real path: a run may be named twice, or reached by a link.
                found.setdefault(folder.resolve(), run)
    return list(found.values())


def _refuse_empty(place: Path) -> None:
    if not place.is_dir():
        raise RunError(
            f"{place} is not a folder. Expected a run directory or a folder of such; with "
            "--follow it may come later."
        )
    try:
        runs = find_runs([place])
    except OSError as error:
        raise RunError(f"{place} cannot be read: {error.strerror or error}.") from error
    if not runs:
        raise RunError(
            f"{place} holds no run: expected a folder with recipe.toml, or a folder of such; "
            "with --follow one may come later."
        )


class ServerReport:
    """Prints what the server does, and each problem once; any thread may use it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._printed = deque[str](maxlen=_MAX_REMEMBERED)
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
        """Suppress any error of the block, and print each kind of error of `scope` once.

        A server works for weeks on files that others write: what is wrong with one run must end
        neither the server nor one of its threads.
        """
        try:
            yield
        except Exception as error:
            known = isinstance(error, LongtakeError)
            # An unexpected error is known by its place: its message may name another file each
            # time, and would then be printed at each look.
            kind = str(error) if known else raised_at(error)
            if (f"{scope}", kind) not in self._errors:
                self._errors.add((f"{scope}", kind))
                text = kind if known else f"{kind}: {error}"
                self.wrong(f"{scope}: {text.rstrip('.')}. It is tried again; other work continues.")

    def evaluated(self, task: EvaluationTask, scores: evaluation_dir.Scores) -> None:
        """Print the result of a task (a checkpoint and a preset), with its alarms."""
        self.say(sentence(task, scores))
        for alarm in scores["alarms"]:
            if alarm["kind"] == "drift":
                self.say(f"  alarm: {alarm['message']}")
        unlike = [alarm["measure"] for alarm in scores["alarms"] if alarm["kind"] == "range"]
        if unlike:  # early in a training these are many
            names = ", ".join(name.replace("_", " ") for name in unlike)
            self.say(f"  differs from the training clips (a comparison, not a fault): {names}")

    @contextmanager
    def progress_bar(self, task: EvaluationTask) -> Iterator[Progress]:
        """Show a progress bar for the sampling of a task during the block."""
        label = f"{task.preset.name} of step {task.step}"
        with (
            progress.phase_lines(self._console, f"{label}: load") as enter,
            progress.counted(self._console, label) as advance,
        ):

            def show(what: str, done: int, total: int) -> None:
                enter(f"{label}: {what}")
                if what == "sample":
                    advance(done, total)

            yield show

    def _is_new(self, text: str) -> bool:
        with self._lock:
            is_new = text not in self._printed
            if not is_new:
                self._printed.remove(text)
            self._printed.append(text)  # the newest comes last; the oldest is forgotten
        return is_new


def raised_at(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(last.filename).name}, line {last.lineno}"


def sentence(task: EvaluationTask, scores: evaluation_dir.Scores) -> str:
    """Return a line on a task's scores, with the most telling measures: first the preset's own."""
    seconds = sum(scores["seconds"].get(name, 0.0) for name in ("load", "sample", "measure"))
    took = f"{seconds:.1f} s" if seconds < 60 else format_duration(seconds)
    where = task.directory.result_path(task.preset.name, task.step).relative_to(task.run.path)
    measures = scores["measures"]
    found = [f"{name} {value:.2f}" for name, value in measures.items() if name not in MEASURES]
    if "held_out" in scores:
        found.append(f"held-out loss {scores['held_out']['mean']:.3f}")
    found += [f"{name} {measures[name]:.2f}" for name in _SHOWN if name in measures]
    videos = plural(len(scores["videos"]), "video")
    return " · ".join([f"{task}: {videos} in {took}", *found[:_MAX_NUMBERS]]) + f" → {where}"

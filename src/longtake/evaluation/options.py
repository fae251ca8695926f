"""What an evaluation server is asked to do, and which runs it finds; torch-free."""

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from longtake import config
from longtake.config import EvaluationSection, Recipe
from longtake.errors import LongtakeError, RunError
from longtake.run_dir import RunDirectory
from longtake.sampling.presets import PresetTables, read_tables, refuse_unknown
from longtake.trust import TrustError, load_recipe, refuse_foreign_code

_EVERY = re.compile(r"every=([1-9][0-9]{0,11})")


@dataclass(frozen=True)
class Backlog:
    """Which of the checkpoints that wait are evaluated."""

    every: int | None = 1

    @property
    def takes_all(self) -> bool:
        return self.every is not None

    def choose(self, steps: Sequence[int], *, with_last: bool) -> list[int]:
        """The wanted ones of ascending steps, in the order in which they are evaluated.

        The oldest comes first, because a run deletes the oldest first. `with_last`: the newest is
        wanted whatever divides it, because no newer one will come.
        """
        if self.every is None:
            return list(steps[-1:])
        wanted = [step for step in steps if step % self.every == 0]
        return sorted({*wanted, *steps[-1:]}) if with_last else wanted


def parse_backlog(text: str) -> Backlog:
    """Read `all`, `newest` or `every=K`.

    Raises:
        RunError: it is something else.
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
    """What a server is asked to do.

    Attributes:
        places: run directories, and folders of run directories.
        presets: names of the wanted presets; none: those that the recipe wants.
        own_presets: a TOML file of presets.
        recipe: its [evaluation] and [sampling] are used instead of those of the runs' recipes.
        backlog: which checkpoints are wanted.
        follows: wait for more when nothing is pending.
        until_finished: end when all runs have ended and nothing is pending.
        source: where the runs are trained, see mirror.py; None: they are here.
        trust: run code that runs name, even if another user began them.
        every_seconds: between two looks at the source.
        look_seconds: between two looks at the run directories when nothing is pending.
        pause_seconds: how long a checkpoint rests after a failure while others are evaluated.
        stuck_seconds: a task that makes no progress for so long loses its claim.
    """

    places: tuple[Path, ...]
    presets: tuple[str, ...] = ()
    own_presets: Path | None = None
    recipe: Path | None = None
    backlog: Backlog = field(default_factory=Backlog)
    follows: bool = False
    until_finished: bool = False
    source: str | None = None
    trust: bool = False
    every_seconds: float = 100.0
    look_seconds: float = 0.5
    pause_seconds: float = 30.0
    stuck_seconds: float = 1800.0

    @property
    def waits(self) -> bool:
        return self.follows or self.until_finished

    def check(self) -> None:
        """Refuse options that cannot be served.

        Raises:
            RunError: a place is missing or holds no run, and the server does not wait for it; or
                one source is to be mirrored into several places.
            RecipeError: it names a preset that no run has.
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
            load_recipe(self.recipe, (), trust=self.trust)
        if self.source is None and not self.waits:
            for place in self.places:
                _refuse_empty(place)
            self._refuse_unknown_presets()
        if self.source is None:
            for run in find_runs(self.places):
                self.refuse_foreign_code(run)

    def recipe_of(self, run: RunDirectory) -> Recipe:
        """A run's recipe, with [evaluation] and [sampling] of the one that the command names.

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
        """Refuse a run that names code and that another user began.

        Other errors of its recipe are reported where its presets are read.

        Raises:
            TrustError: it does.
        """
        try:
            recipe = run.recipe()
            if self.recipe is not None:  # its measures are not used
                recipe = recipe.model_copy(update={"evaluation": EvaluationSection()})
            refuse_foreign_code(run, trust=self.trust, recipe=recipe)
        except TrustError:
            raise
        except LongtakeError:
            return

    def _refuse_unknown_presets(self) -> None:
        """Refuse a preset that none of the runs has, and an own file that cannot be read."""
        tables: list[PresetTables] = []
        for run in find_runs(self.places):
            recipe, beside = None, None
            with suppress(LongtakeError):  # an error in one run holds up no other
                recipe = self.recipe_of(run)
                read_tables(recipe, run.path)
                beside = run.path
            if recipe is not None:
                tables.append(read_tables(recipe, beside, self.own_presets))
        known = {name for each in tables for name in each.known}
        if tables:
            refuse_unknown(tables[0], (name for name in self.presets if name not in known))


def find_runs(places: Iterable[Path]) -> list[RunDirectory]:
    """The run directories that the places are or contain, each once."""
    found: dict[Path, RunDirectory] = {}
    for place in places:
        inside = sorted(place.iterdir()) if place.is_dir() else []
        for folder in [place] if RunDirectory(place).exists() else inside:
            run = RunDirectory(folder)
            if run.exists() and not folder.name.startswith("."):
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

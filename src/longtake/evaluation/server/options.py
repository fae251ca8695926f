"""What a server is asked to do; torch-free."""

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from longtake import config
from longtake.config import EvaluationSection, Recipe
from longtake.errors import LongtakeError, RunError
from longtake.evaluation.presets.preset import refuse_unknown
from longtake.evaluation.presets.tables import Tables, gather
from longtake.evaluation.server.backlog import Backlog
from longtake.evaluation.server.runs import find_runs
from longtake.run_dir import RunDirectory
from longtake.trust import TrustError, load_recipe, refuse_foreign_code


@dataclass(frozen=True)
class Options:
    """How a server serves.

    Attributes:
        places: run directories, and folders of them.
        presets: names of those that are wanted; none: those that the recipe wants.
        own_presets: a TOML file of presets.
        recipe: whose [evaluation] and [sampling] count, rather than those of the runs' recipes.
        backlog: which checkpoints are wanted.
        follows: whether it waits for more when nothing is due.
        until_finished: it ends when all runs have ended and nothing is due.
        source: where the runs come from, see evaluation/sync; None: they are here.
        trust: whether code that runs name may be run, whoever began them.
        every_seconds: how often the source is looked at.
        look_seconds: how often the run directories are, when nothing is due.
        pause_seconds: how long a checkpoint rests after a failure, while others are done.
        stuck_seconds: a sampling that does not go on for so long loses its claim.
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

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            RunError: it names a place that is not there or holds no run, or too many places for
                one source. What may come later is waited for where the server waits.
            RecipeError: it names a preset that no run has.
            TrustError: a run names code, and somebody else began it.
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
            self._refuse_unknown()
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

    @property
    def waits(self) -> bool:
        """Whether what is not there may come later."""
        return self.follows or self.until_finished

    def refuse_foreign_code(self, run: RunDirectory) -> None:
        """Refuse a run that names code, and that somebody else began.

        What else is wrong with it is told where its presets are read.

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

    def _refuse_unknown(self) -> None:
        """Refuse a preset that none of the runs has, and an own file that cannot be read.

        What is wrong with one of the runs keeps no other from being served: the server tells.
        """
        tables: list[Tables] = []
        for run in find_runs(self.places):
            recipe, beside = self._readable(run)
            if recipe is not None:
                tables.append(gather(recipe, beside, self.own_presets))
        known = {name for each in tables for name in each.known}
        if tables:
            refuse_unknown(tables[0], (name for name in self.presets if name not in known))

    def _readable(self, run: RunDirectory) -> tuple[Recipe | None, Path | None]:
        """The recipe and the folder of a run, without what of these cannot be read."""
        recipe = None
        with suppress(LongtakeError):
            recipe = self.recipe_of(run)
            gather(recipe, run.path)
            return recipe, run.path
        return recipe, None


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

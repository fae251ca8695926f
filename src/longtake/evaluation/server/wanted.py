"""Which presets are wanted of a run: what its recipe and the command say; torch-free."""

import math
import time

from longtake.config import EvaluationSection, Recipe
from longtake.errors import LongtakeError
from longtake.evaluation.presets.preset import Preset, find_preset, keep_preset, preset_names
from longtake.evaluation.server.checkpoints import Signature, signature
from longtake.evaluation.server.options import Options
from longtake.evaluation.server.report import Report
from longtake.evaluation_dir import EvaluationDirectory
from longtake.run_dir import RunDirectory
from longtake.trust import TrustError

_SECONDS_UNTIL_READ_AGAIN = 15.0


class Wanted:
    """The presets of one run.

    Args:
        run: the run directory.
        options: of the server.
        report: who is told what is wrong with presets.

    Attributes:
        section: what the recipe says of evaluations.
    """

    def __init__(self, run: RunDirectory, options: Options, report: Report) -> None:
        self._run, self._options, self._report = run, options, report
        self.section = EvaluationSection()
        self._found: list[Preset] = []
        self._refused: dict[str, float] = {}
        self._files_read: tuple[Signature | None, ...] | None = None
        self._read_again_at = math.inf

    def presets(self) -> list[Preset]:
        """Those that are not wrong, nor refused now."""
        now = time.monotonic()
        return [each for each in self._found if self._refused.get(each.name, 0.0) <= now]

    def refuse(self, preset: Preset, seconds: float) -> None:
        """Leave a preset out for so long, or until the recipe changes."""
        self._refused[preset.name] = time.monotonic() + seconds

    def read(self) -> None:
        """Find the presets again when the recipe, or a file of presets, has changed.

        Where one was wrong, now and then in any case: a file that it names may have come.
        """
        own = self._options.own_presets
        files = (self._run.recipe_path, *filter(None, (own, self._options.recipe)))
        now = tuple(map(signature, files))
        if now == self._files_read and time.monotonic() < self._read_again_at:
            return
        if now != self._files_read:
            self._refused.clear()
        self._files_read, self._read_again_at, self._found = now, math.inf, []
        try:
            self._options.refuse_foreign_code(self._run)
            self._find(self._options.recipe_of(self._run))
        except TrustError as error:
            self._report.untrusted = error
            self._tell_wrong(error)
        except LongtakeError as error:
            self._tell_wrong(error)
        except Exception:
            self._read_again_soon()
            raise

    def _find(self, recipe: Recipe) -> None:
        self.section = recipe.evaluation
        names, own, beside = self._options.presets, self._options.own_presets, self._run.path
        for name in preset_names(recipe, names, beside, own):
            try:
                self._found.append(self._checked(find_preset(recipe, name, beside, own)))
            except LongtakeError as error:
                self._tell_wrong(error)

    def _checked(self, preset: Preset) -> Preset:
        """Refuse a preset that is another than the one whose results are there."""
        directory = EvaluationDirectory(self._run)
        if directory.preset_path(preset.name).exists():
            keep_preset(directory, preset)
        return preset

    def _tell_wrong(self, error: LongtakeError) -> None:
        self._report.wrong(f"{self._run.path}: {error}")
        self._read_again_soon()

    def _read_again_soon(self) -> None:
        self._read_again_at = time.monotonic() + _SECONDS_UNTIL_READ_AGAIN

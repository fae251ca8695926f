"""Which runs' code may be run (docs/concepts/trust.md), and the one reader of pickles.

A run names classes (`trainable.module`, measures) and a command (`watch.hook`). They are used only
if this user began the run on this host, or says `--trust`; and never from a file in a run.
"""

import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

from longtake import config, errors, process
from longtake.run_dir import RunDirectory

MIRROR_NOTE = Path(".source") / ".of.json"
"""In a folder of mirrors, or in a mirrored run: where it is mirrored from."""
_OF_A_RUN = ("run.json", "metrics.jsonl", "checkpoints")
PLAIN: Final[Mapping[tuple[str, str], Any]] = {}
"""Allows containers, numbers and texts only, which need no import."""


class TrustError(errors.RunError):
    """A run that this user did not begin on this host names code."""


def run_around(path: Path) -> RunDirectory | None:
    """The run directory that a file lies in, links resolved; None if it lies in none."""
    for folder in path.resolve().parents:
        if (folder / "recipe.toml").is_file() and any((folder / n).exists() for n in _OF_A_RUN):
            return RunDirectory(folder)
    return None


def is_mirror(run: Path) -> bool:
    return any((folder / MIRROR_NOTE).is_file() for folder in (run, run.parent))


def is_own(run: RunDirectory) -> bool:
    """Whether this user began a run on this host."""
    try:
        files = [path.stat().st_uid for path in (run.recipe_path, run.record_path)]
        begun_by = run.record().get("begun_by")
    except (OSError, errors.LongtakeError):
        return False
    is_ours = set(files) == {os.getuid()} and begun_by == process.host_identity()
    return is_ours and not is_mirror(run.path.resolve())


def named_code(recipe: config.Recipe, *, with_hook: bool) -> list[str]:
    """The classes, and the command, that a recipe names, each with its key."""
    found = []
    if recipe.trainable.module:
        found.append(f"trainable.module = {recipe.trainable.module!r}")
    for name, preset in recipe.evaluation.presets.items():
        found += [f"evaluation.presets.{name}.measures: {each!r}" for each in preset.measures or ()]
    if with_hook and recipe.watch.hook:
        found.append(f"watch.hook = {recipe.watch.hook!r}")
    return found


def refuse_foreign_code(
    run: RunDirectory, *, trust: bool, with_hook: bool = False, recipe: config.Recipe | None = None
) -> None:
    """Refuse a run that names code, unless this user began it on this host or trusts it.

    Args:
        run: the run directory.
        trust: whether the user has said `--trust`.
        with_hook: whether its hook would be run too.
        recipe: what would be used of it; by default the recipe as it is now.

    Raises:
        RunError: there is no run.
        TrustError: it names code, and somebody else began it.
    """
    named = named_code(recipe or run.recipe(), with_hook=with_hook)
    if not named or trust or is_own(run):
        return
    listed = "".join(f"\n  {each}" for each in named)
    raise TrustError(
        f"{run.path} was not begun by this user on this host, and names code that would be run:"
        f"{listed}\nRead that code first. Then run the same command with --trust."
    )


def load_recipe(path: Path, changes: Sequence[str], *, trust: bool = False) -> config.Recipe:
    """As `config.load`; the recipe that a run has kept is trusted as the run is.

    Raises:
        LongtakeError: as `config.load`.
        TrustError: it is the recipe of a run that names code, and somebody else began it.
    """
    loaded = config.load(path, changes)
    run = run_around(path)
    if run is not None:
        refuse_foreign_code(run, trust=trust, with_hook=True)
    return loaded


class RestrictedUnpickler(pickle.Unpickler):
    """Builds what pickle has opcodes for, and the named things that are allowed; imports nothing.

    Args:
        file: the pickle.
        allowed: what may be named, by module and name; what each name stands for.
    """

    def __init__(self, file: BinaryIO, allowed: Mapping[tuple[str, str], Any] = PLAIN) -> None:
        super().__init__(file)
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        """What a name stands for.

        Raises:
            pickle.UnpicklingError: it is not allowed.
        """
        if (module, name) not in self._allowed:
            raise pickle.UnpicklingError(
                f"it wants {module}.{name}, which is not allowed here. It was not read further, "
                "and no code was run"
            )
        return self._allowed[module, name]

    def persistent_load(self, pid: Any) -> Any:
        """Refuse references to what lies outside the file.

        Raises:
            pickle.UnpicklingError: always.
        """
        raise pickle.UnpicklingError(f"it refers to {pid!r} outside the file")

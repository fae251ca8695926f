"""Trust in code that recipes and runs name: the only place for imports and pickles; torch-free.

A recipe names classes (added modules, families, optimizers, objectives, measures) and a command
(`watch.hook`).
They are used only if this user began the run on this host or passes `--trust`, and never from a
file in a run directory: docs/concepts/trust.md.
"""

import importlib
import inspect
import os
import pickle
import pkgutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, BinaryIO, Final

from longtake import config, errors, process
from longtake.formatting import did_you_mean
from longtake.run_dir import RunDirectory, refuse_moved

MIRROR_NOTE = Path(".source") / ".of.json"
"""Path of the note that names a mirror's source, in a folder of mirrored runs or in a mirrored
run."""
_OF_A_RUN = ("run.json", "metrics.jsonl", "checkpoints")
PLAIN: Final[Mapping[tuple[str, str], Any]] = {}
"""No allowed names of classes: a `RestrictedUnpickler` then reads containers, numbers and strings
only."""


class TrustError(errors.RunError):
    """Error: a run names code, but was not begun by this user on this host."""


def run_around(path: Path) -> RunDirectory | None:
    """Return the run directory that contains a path (links are resolved); None: no run does."""
    for folder in path.resolve().parents:
        if (folder / "recipe.toml").is_file() and any((folder / n).exists() for n in _OF_A_RUN):
            return RunDirectory(folder)
    return None


def is_mirror(run: Path) -> bool:
    return any((folder / MIRROR_NOTE).is_file() for folder in (run, run.parent))


def is_own(run: RunDirectory) -> bool:
    """Return True if this user began the run on this host, and it is no mirror of another run."""
    # The record alone proves nothing: it may be copied with the run. The owner of the files shows
    # whether somebody else could have written them.
    try:
        files = [path.stat().st_uid for path in (run.recipe_path, run.record_path)]
        begun_by = run.record().get("begun_by")
    except (OSError, errors.LongtakeError):
        return False
    is_ours = set(files) == {os.getuid()} and begun_by == process.host_identity()
    return is_ours and not is_mirror(run.path.resolve())


def training_classes(recipe: config.Recipe) -> dict[str, str]:
    """Return the user's own classes that training imports, by the recipe key that names each."""
    sections = recipe.trainable.modules.items()
    found = {f"trainable.modules.{name}.module": section.module for name, section in sections}
    found |= {"model.family": recipe.model.family, "optimizer.kind": recipe.optimizer.kind}
    found |= {"objective.kind": recipe.objective.kind}
    found |= {"model.transformer_class": recipe.model.transformer_class or ""}
    # Names of longtake's own families, optimizers and objectives have no colon.
    return {key: path for key, path in found.items() if ":" in path}


def named_code(recipe: config.Recipe, *, with_hook: bool) -> list[str]:
    """List all code that a recipe names as "key = value": classes, and optionally `watch.hook`."""
    found = [f"{key} = {path!r}" for key, path in training_classes(recipe).items()]
    for name, preset in recipe.evaluation.presets.items():
        found += [f"evaluation.presets.{name}.measures: {each!r}" for each in preset.measures or ()]
    if with_hook and recipe.watch.hook:
        found.append(f"watch.hook = {recipe.watch.hook!r}")
    return found


def refuse_foreign_code(
    run: RunDirectory, *, trust: bool, with_hook: bool = False, recipe: config.Recipe | None = None
) -> None:
    """Refuse a run that names own code, unless this user began it on this host or trusts it.

    Args:
        run: the run directory.
        trust: True: the user has passed `--trust`.
        with_hook: True: the command `watch.hook` would be run too.
        recipe: the recipe whose code would be run; None: the run's own.

    Raises:
        RunError: there is no run.
        TrustError: the run names code, and somebody else began it.
    """
    named = named_code(recipe or run.recipe(), with_hook=with_hook)
    if not named or trust or is_own(run):
        return
    listed = "".join(f"\n  {each}" for each in named)
    raise TrustError(
        f"{run.path} was not begun by this user on this host, and names code that would be run:"
        f"{listed}\nRead that code first. Then run the same command with --trust."
    )


def load_recipe(
    path: Path,
    changes: Sequence[str],
    *,
    trust: bool = False,
    uses_out: bool = True,
    fresh: bool = False,
) -> config.Recipe:
    """Load a recipe like `config.load`, but refuse foreign code in the recipe of a run directory.

    Args:
        path: the recipe's file.
        changes: changes in the format of `--set`.
        trust: True: run the code that it names even if another user began the run.
        uses_out: True: the recipe's `out` will be used, so a moved run is refused.
        fresh: True: a new run begins, even if there is one in `out`.

    Raises:
        LongtakeError: any error of `config.load` or `refuse_moved`, or a number of steps for a new
            run whose recipe has epochs.
        TrustError: the run of this recipe names code, and somebody else began it.
    """
    loaded = config.load(path, changes)
    if uses_out:
        refuse_moved(path, loaded, changes)
    # A run that is resumed refuses it with the number of epochs that it has.
    is_new = fresh or not RunDirectory(loaded.out).exists()
    names = [change.partition("=")[0].strip() for change in changes]
    if is_new and loaded.training.epochs is not None and "training.steps" in names:
        raise errors.RecipeError(
            f"training.steps = {loaded.training.steps} would be ignored: training.epochs = "
            f"{loaded.training.epochs} of {path} decides the number of steps. Set training.epochs."
        )
    run = run_around(path)
    if run is not None:
        refuse_foreign_code(run, trust=trust, with_hook=True)
    return loaded


def import_class(path: str, setting: str) -> Any:
    """Import a user's class "package.module:Class", first from the current directory.

    Args:
        path: module and class.
        setting: the recipe key that names it, for messages.

    Raises:
        RecipeError: there is no such class (the message suggests the nearest name), importing it
            failed, or its file lies in a run directory.
    """
    name, _, class_name = path.partition(":")
    with _current_directory_first():
        _refuse_file_of_a_run(path, setting)
        try:
            module = importlib.import_module(name)
        except Exception as error:  # a user's file can fail in any way
            raise errors.RecipeError(f"{setting} {path!r}: {_why_not(name, error)}") from error
    found = getattr(module, class_name, None)
    if not inspect.isclass(found):
        classes = [each for each, value in vars(module).items() if inspect.isclass(value)]
        raise errors.RecipeError(
            f"{setting} {path!r}: {module.__file__} has no class {class_name}; "
            f"{did_you_mean(class_name, classes)}"
        )
    return found


def _refuse_file_of_a_run(path: str, setting: str) -> None:
    """Refuse a class whose module, or a package above it, has its file in a run directory.

    The files are only located, part by part: `importlib.util.find_spec` would run the packages.
    """
    parts = path.partition(":")[0].split(".")
    places: Sequence[str] | None = None
    for number, part in enumerate(parts, 1):
        name = ".".join(parts[:number])
        # PathFinder runs no code, and `places` replaces the parent package's __path__.
        spec = None if name in sys.builtin_module_names else PathFinder.find_spec(name, places)
        if spec is None:
            return
        # A namespace package has no file, only folders.
        files = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
        for file in filter(None, files):
            if (run := run_around(Path(file) / part)) is not None:
                raise errors.RecipeError(
                    f"{setting} {path!r}: {file} lies in the run directory {run.path}, from which "
                    "no code is run. Read it, and copy it to a folder of your own."
                )
        places = list(spec.submodule_search_locations or ())


@contextmanager
def _current_directory_first() -> Iterator[None]:
    """Put the current directory first in sys.path, as `python -m` does, unless it is in a run."""
    here = str(Path.cwd())
    # `run_around` looks at the parents of a path, and this folder is to be one of them.
    if run_around(Path(here) / "recipe.toml") is not None:
        yield  # any package could be there under the name of an installed one
        return
    sys.path.insert(0, here)
    importlib.invalidate_caches()  # a file may be seconds old
    try:
        yield
    finally:
        sys.path.remove(here)


def _why_not(name: str, error: Exception) -> str:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    # Not the named module, but one that it imports, may be missing.
    if missing is None or not f"{name}.".startswith(f"{missing}."):
        return f"importing it failed with {type(error).__name__}: {error}"
    package, _, last = missing.rpartition(".")
    # The modules and folders of the imported package, or of the current directory.
    paths = getattr(sys.modules[package], "__path__", ()) if package else [str(Path.cwd())]
    folders = [each.parent.name for path in paths for each in Path(path).glob("*/*.py")]
    files = [each.name for each in pkgutil.iter_modules(paths)]
    names = {each for each in {*files, *folders} if each.isidentifier() and each[0] != "_"}
    return f"{package or Path.cwd()} has no module {last}; {did_you_mean(last, names)}"


class RestrictedUnpickler(pickle.Unpickler):
    """Unpickler that imports nothing: it builds plain containers and explicitly allowed names.

    Args:
        file: the pickle.
        allowed: the object that replaces each allowed name, by (module, name).
    """

    def __init__(self, file: BinaryIO, allowed: Mapping[tuple[str, str], Any] = PLAIN) -> None:
        super().__init__(file)
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement of a class or function that the pickle names.

        Raises:
            pickle.UnpicklingError: the name is not allowed.
        """
        if (module, name) not in self._allowed:
            raise pickle.UnpicklingError(
                f"it wants {module}.{name}, which is not allowed here. It was not read further, "
                "and no code was run"
            )
        return self._allowed[module, name]

    def persistent_load(self, pid: Any) -> Any:
        """Refuse a pickle's references to objects outside of its file.

        Raises:
            pickle.UnpicklingError: always.
        """
        raise pickle.UnpicklingError(f"it refers to {pid!r} outside the file")

"""Whose code may be run: users' classes are imported, and pickles read, here alone; torch-free.

A recipe names classes (added modules, families, optimizers, measures) and a command (`watch.hook`).
They are used only if this user began the run on this host, or says `--trust`; and never from a file
in a run: docs/concepts/trust.md.
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
    """This user began the run on this host."""
    try:
        files = [path.stat().st_uid for path in (run.recipe_path, run.record_path)]
        begun_by = run.record().get("begun_by")
    except (OSError, errors.LongtakeError):
        return False
    is_ours = set(files) == {os.getuid()} and begun_by == process.host_identity()
    return is_ours and not is_mirror(run.path.resolve())


def training_classes(recipe: config.Recipe) -> dict[str, str]:
    """The users' classes that training imports, by their recipe keys."""
    sections = recipe.trainable.modules.items()
    found = {f"trainable.modules.{name}.module": section.module for name, section in sections}
    found |= {"model.family": recipe.model.family, "optimizer.kind": recipe.optimizer.kind}
    found |= {"model.transformer_class": recipe.model.transformer_class or ""}
    return {key: path for key, path in found.items() if ":" in path}


def named_code(recipe: config.Recipe, *, with_hook: bool) -> list[str]:
    """The classes, and the command, that a recipe names, each with its key."""
    found = [f"{key} = {path!r}" for key, path in training_classes(recipe).items()]
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


def load_recipe(
    path: Path, changes: Sequence[str], *, trust: bool = False, uses_out: bool = True
) -> config.Recipe:
    """Load a recipe as `config.load` does; one that a run has kept is trusted as the run is.

    Args:
        path: of the recipe.
        changes: as `--set` takes them.
        trust: run the code that it names, also if others began the run.
        uses_out: whether its `out` is used.

    Raises:
        LongtakeError: as `config.load`, and as `refuse_moved`.
        TrustError: it is the recipe of a run that names code, and somebody else began it.
    """
    loaded = config.load(path, changes)
    if uses_out:
        refuse_moved(path, loaded, changes)
    run = run_around(path)
    if run is not None:
        refuse_foreign_code(run, trust=trust, with_hook=True)
    return loaded


def import_class(path: str, setting: str) -> Any:
    """The class at "package.module:Class", found from the current directory first.

    `setting` is the recipe key that names it.

    Raises:
        RecipeError: there is none (names the nearest), or its file lies in a run directory.
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
    """Refuse a module, or a package above it, whose file is in a run directory; runs nothing."""
    parts = path.partition(":")[0].split(".")
    places: Sequence[str] | None = None
    for number, part in enumerate(parts, 1):
        name = ".".join(parts[:number])
        spec = None if name in sys.builtin_module_names else PathFinder.find_spec(name, places)
        if spec is None:
            return
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
    """Import from there first, as `python -m` does and the installed command does not."""
    here = str(Path.cwd())
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
    if missing is None or not f"{name}.".startswith(f"{missing}."):
        return f"importing it failed with {type(error).__name__}: {error}"
    package, _, last = missing.rpartition(".")
    where = package or Path.cwd()
    return f"{where} has no module {last}; {did_you_mean(last, _modules_in(package))}"


def _modules_in(package: str) -> set[str]:
    """Modules and folders of an imported package, or of the current directory."""
    paths = getattr(sys.modules[package], "__path__", ()) if package else [str(Path.cwd())]
    folders = [each.parent.name for path in paths for each in Path(path).glob("*/*.py")]
    files = [each.name for each in pkgutil.iter_modules(paths)]
    return {each for each in {*files, *folders} if each.isidentifier() and each[0] != "_"}


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
        """The class that a pickle names.

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

"""Finds the class that a recipe names as "package.module:Class", and builds it."""

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from torch import nn

from longtake.config import TrainableSection
from longtake.errors import RecipeError
from longtake.formatting import did_you_mean
from longtake.models.pretrained import construct, defaults
from longtake.trust import run_around

_GIVEN = ("width", "blocks", "latent_channels")


def build_module(
    section: TrainableSection, width: int, blocks: Sequence[str], latent_channels: int
) -> nn.Module:
    """The recipe's added module, new.

    Raises:
        RecipeError: it cannot be imported, is no such module, or does not take the options.
    """
    assert section.module is not None
    found = import_class(section.module)
    _check(found, section)
    given = {"width": width, "blocks": list(blocks), "latent_channels": latent_channels}
    built: nn.Module = construct("trainable.options", found, given | section.options)
    return built


def import_class(path: str, setting: str = "trainable.module") -> Any:
    """The class that "package.module:Class" names, found from the current directory first.

    Args:
        path: its name.
        setting: what names it, for errors.

    Raises:
        RecipeError: there is none; names the nearest.
    """
    name, _, class_name = path.partition(":")
    with _current_directory_first():
        _refuse_file_of_a_run(path, setting)
        try:
            module = importlib.import_module(name)
        except Exception as error:  # running somebody's file can end in any way
            raise RecipeError(f"{setting} {path!r}: {_why_not(name, error)}") from error
    found = getattr(module, class_name, None)
    if not inspect.isclass(found):
        classes = [each for each, value in vars(module).items() if inspect.isclass(value)]
        raise RecipeError(
            f"{setting} {path!r}: {module.__file__} has no class {class_name}; "
            f"{did_you_mean(class_name, classes)}"
        )
    return found


def _refuse_file_of_a_run(path: str, setting: str) -> None:
    """Refuse a module, or a package on the way to it, whose file lies in a run directory.

    Raises:
        RecipeError: it does. Nothing of it was run.
    """
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
                raise RecipeError(
                    f"{setting} {path!r}: {file} lies in the run directory {run.path}, from which "
                    "no code is run. Read it, and copy it to a folder of your own."
                )
        places = list(spec.submodule_search_locations or ())


def _check(found: Any, section: TrainableSection) -> None:
    """Refuse what is no added module, and options that it does not have."""
    name = f"trainable.module {section.module!r}"
    protocol = "See AddedModule in longtake.models.added for the three methods it has to have."
    if not issubclass(found, nn.Module):
        raise RecipeError(f"{name} is no torch.nn.Module. Make it a subclass. {protocol}")
    if not callable(getattr(found, "prepare", None)):
        raise RecipeError(f"{name} has no method prepare(self, conditioning). {protocol}")
    arguments = list(defaults(found.__init__))
    if missing := [each for each in _GIVEN if each not in arguments]:
        raise RecipeError(
            f"{name} is built with width, blocks and latent_channels, but its __init__ does not "
            f"take {', '.join(missing)}. {protocol}"
        )
    options = [each for each in arguments if each not in _GIVEN]
    for option in section.options:
        if option not in options:
            raise RecipeError(
                f"trainable.options.{option} is no option of {found.__name__}; "
                f"{did_you_mean(option, options)}"
            )


@contextmanager
def _current_directory_first() -> Iterator[None]:
    """As `python -m` does; the installed command does not look where it is started."""
    here = str(Path.cwd())
    if run_around(Path(here) / "recipe.toml") is not None:
        yield  # any package could lie there under the name of an installed one
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
    """Modules and folders of a package that is imported, or of the current directory."""
    paths = getattr(sys.modules[package], "__path__", ()) if package else [str(Path.cwd())]
    folders = [each.parent.name for path in paths for each in Path(path).glob("*/*.py")]
    files = [each.name for each in pkgutil.iter_modules(paths)]
    return {each for each in {*files, *folders} if each.isidentifier() and each[0] != "_"}

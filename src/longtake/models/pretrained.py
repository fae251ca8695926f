"""Loads classes and weights of diffusers and transformers, with errors a user can act on."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from longtake.errors import ModelError, RecipeError


def diffusers_class(key: str, name: str) -> Any:
    """A class of diffusers by name; `key` is the recipe key that names it.

    Raises:
        RecipeError: there is no such class; names the nearest.
    """
    import diffusers

    return _class_of(diffusers, key, name)


def transformers_class(key: str, name: str) -> Any:
    """A class of transformers by name; `key` is the recipe key that names it.

    Raises:
        RecipeError: there is no such class; names the nearest.
    """
    import transformers

    return _class_of(transformers, key, name)


def load_pretrained(loaded_class: Any, where: str, subfolder: str, **options: Any) -> Any:
    """`from_pretrained` of a local folder or a repository id.

    Raises:
        ModelError: nothing loadable is there.
    """
    try:
        return loaded_class.from_pretrained(where, subfolder=subfolder, **options)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"{loaded_class.__name__} cannot be loaded from {where} (subfolder {subfolder}): "
            f"{reason} Expected a diffusers folder on disk, or a repository id that can be reached."
        ) from error


def check_arguments(key: str, function: Callable[..., Any], values: Mapping[str, Any]) -> None:
    """Refuse arguments that a function does not take.

    Raises:
        RecipeError: names the argument and the nearest that exists.
    """
    known = list(inspect.signature(function).parameters)
    for name in values:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"known: {', '.join(known)}."
            raise RecipeError(f"{key}.{name} is not an argument of the model; {hint}")


def _class_of(module: ModuleType, key: str, name: str) -> Any:
    found = getattr(module, name, None)
    if not inspect.isclass(found):
        nearest = difflib.get_close_matches(name, dir(module), n=1)
        hint = f" Did you mean {nearest[0]}?" if nearest else ""
        raise RecipeError(f"{key}: {module.__name__} has no class {name}.{hint}")
    return found

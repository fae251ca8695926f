"""A score of the user's own: a function of a clip, found by `module:function`."""

import hashlib
import importlib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from longtake.data.clip import Clip
from longtake.data.workers import Task
from longtake.errors import ClipError, DataError
from longtake.formatting import nearest


@dataclass(frozen=True)
class OwnScore(Task[Clip, float | ClipError]):
    """Call somebody's function for one clip.

    Attributes:
        by: `module:function`.
        folder: where the module is looked for after all other places.
    """

    by: str
    folder: str
    doing = "scoring"
    silence_seconds: float = 3600.0  # it reports no progress

    @cached_property
    def function(self) -> Callable[[Clip], Any]:
        """What is called.

        Raises:
            DataError: there is no such function.
        """
        return _find(self.by, self.folder)

    @property
    def version(self) -> str:
        """Digits that name what the function's module says; empty where it has no file."""
        path = getattr(sys.modules.get(self.function.__module__), "__file__", None)
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12] if path else ""

    def do(self, item: Clip, progress: Callable[[], object]) -> float | ClipError:
        """Call the function.

        Raises:
            DataError: the function raised an error, or returned no number.
        """
        try:
            value = self.function(item)
        except ClipError as error:
            return error
        except Exception as error:
            raise DataError(
                f"{self.by} raised {type(error).__name__} for {item.path} ({item.identity}): "
                f"{error}. Mend the function; to leave a clip unscored, return float('nan')."
            ) from error
        if not _is_number(value):
            raise DataError(
                f"{self.by} returned {value!r} for {item.path} ({item.identity}); expected a "
                "finite number, or float('nan') for unknown."
            )
        return float(value)

    def lost(self, item: Clip, reason: str) -> ClipError:
        """It is not scored."""
        return ClipError(item.path, reason)

    def reads(self, item: Clip) -> str:
        """The clip's file, or its tar."""
        return item.media.path


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, str | bool) and not math.isinf(float(value))
    except (TypeError, ValueError, OverflowError):
        return False


def _find(by: str, folder: str) -> Callable[[Clip], Any]:
    module_name, _, function_name = by.partition(":")
    if folder not in sys.path:
        sys.path.append(folder)  # last: a file that lies here must not hide an installed package
    try:
        found = getattr(importlib.import_module(module_name), function_name, None)
    except Exception as error:
        raise DataError(
            f"The score {by} was not found: importing {module_name} raised "
            f"{type(error).__name__}: {error}. Looked where Python looks, and in {folder}."
        ) from error
    if not callable(found):
        names = [key for key, value in vars(sys.modules[module_name]).items() if callable(value)]
        near = nearest(function_name, names)
        hint = f" Did you mean {near!r}?" if near else ""
        raise DataError(
            f"The score {by} was not found: {module_name} has no function {function_name!r}.{hint}"
        )
    function: Callable[[Clip], Any] = found
    return function

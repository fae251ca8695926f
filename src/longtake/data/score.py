"""Gives every clip of a catalog a number that a curriculum can select by."""

import difflib
import importlib
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longtake.data.catalog import Catalog, Rejection
from longtake.data.clip import Clip
from longtake.data.scores.motion import motion
from longtake.data.scores.words import num_nouns_of_all, num_words
from longtake.data.table import CLIP_SCHEMA
from longtake.errors import ClipError, DataError
from longtake.machine import num_cores

SCORES = {
    "nouns": "nouns in the caption, each as often as it occurs (English)",
    "motion": "how far the picture changes in an eighth of a second (0 to 255)",
    "length": "words in the caption",
}
"""The scores that come with longtake, and what each one counts."""

_Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Scored:
    """A catalog with one more attribute.

    Attributes:
        catalog: the same clips.
        name: what the attribute is called.
        values: [N] float64, in the catalog's order; NaN where unknown: a clip without a caption,
            or one that failed.
        failed: clips that could not be decoded, and why.
    """

    catalog: Catalog
    name: str
    values: NDArray[np.float64]
    failed: tuple[Rejection, ...] = ()

    @property
    def num_known(self) -> int:
        """How many clips have a score."""
        return int(np.count_nonzero(~np.isnan(self.values)))


def score(
    catalog: Catalog,
    by: str,
    *,
    name: str | None = None,
    workers: int | None = None,
    progress: _Progress | None = None,
) -> Scored:
    """Add one attribute to all clips; one of that name that is already there is replaced.

    Args:
        catalog: of which clips; it is not changed.
        by: one of `SCORES`, or `module:function`: a function that takes a `Clip` and returns a
            number, NaN for unknown. It is called in this process, for one clip after the other.
            The module is looked for where Python looks, and then in the working directory.
        name: of the attribute; by default that of the score or of the function.
        workers: processes that tag, or threads that decode; by default as many as there are cores.
        progress: called with (clips done, clips in all).

    Raises:
        DataError: there is no such score or function, the name cannot be an attribute's, or the
            function returned no number or raised an error (a ClipError apart: that clip failed).
    """
    own = None if by in SCORES else _users_function(by)
    name = _checked(by.rpartition(":")[2] if name is None else name)
    cores = workers or num_cores()
    failed: tuple[Rejection, ...] = ()
    if by == "nouns":
        values = num_nouns_of_all(catalog.captions(), cores, progress)
    elif by == "length":
        values = np.array([num_words(caption) for caption in catalog.captions()], dtype=np.float64)
    elif own is None:
        values, failed = _each(catalog, motion, cores, progress)
    else:  # in one thread: nobody promised that a user's function stands several
        values, failed = _each(catalog, own, 1, progress)
    return Scored(catalog.with_attribute(name, values), name, values, failed)


def _each(
    catalog: Catalog, function: Callable[[Clip], float], threads: int, progress: _Progress | None
) -> tuple[NDArray[np.float64], tuple[Rejection, ...]]:
    """Call a function for each clip: its values [N], NaN where it failed, and the failures."""
    values = np.full(len(catalog), np.nan)
    failed = []
    for row, result in enumerate(_results(catalog, function, threads)):
        if isinstance(result, ClipError):
            failed.append(Rejection(catalog.clip(row).path, result.reason))
        else:
            values[row] = result
        if progress is not None:
            progress(row + 1, len(catalog))
    return values, tuple(failed)


def _results(
    catalog: Catalog, function: Callable[[Clip], float], threads: int
) -> Iterator[float | ClipError]:
    if threads == 1:
        yield from (_tried(function, clip) for clip in catalog.clips())
        return
    pool = ThreadPoolExecutor(threads)  # PyAV lets go of the interpreter while it decodes
    waiting: deque[Future[float | ClipError]] = deque()
    try:
        for clip in catalog.clips():
            waiting.append(pool.submit(_tried, function, clip))
            if len(waiting) > 4 * threads:  # a million clips are not all submitted at once
                yield waiting.popleft().result()
        yield from (future.result() for future in waiting)
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C must not wait for what is submitted


def _tried(function: Callable[[Clip], float], clip: Clip) -> float | ClipError:
    try:
        return function(clip)
    except ClipError as error:
        return error


def _users_function(by: str) -> Callable[[Clip], float]:
    """Find `module:function`, and let it say more where it fails."""
    function = _find(by)

    def checked(clip: Clip) -> float:
        try:
            value = function(clip)
        except ClipError:
            raise
        except Exception as error:
            raise DataError(
                f"{by} raised {type(error).__name__} for {clip.path} ({clip.identity}): {error}. "
                "Mend the function; to leave a clip unscored, return float('nan')."
            ) from error
        if not _is_number(value):
            raise DataError(
                f"{by} returned {value!r} for {clip.path} ({clip.identity}); expected a finite "
                "number, or float('nan') for unknown."
            )
        return float(value)

    return checked


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, str | bool) and not math.isinf(float(value))
    except (TypeError, ValueError, OverflowError):
        return False


def _find(by: str) -> Callable[[Clip], Any]:
    module_name, _, function_name = by.partition(":")
    if not (module_name and function_name):
        raise DataError(
            f"There is no score {by!r}.{_did_you_mean(by, list(SCORES))} There are "
            f"{', '.join(SCORES)}, and your own as module:function."
        )
    folder = str(Path.cwd())
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
        raise DataError(
            f"The score {by} was not found: {module_name} has no function {function_name!r}."
            f"{_did_you_mean(function_name, names)}"
        )
    function: Callable[[Clip], Any] = found
    return function


def _did_you_mean(word: str, names: list[str]) -> str:
    nearest = difflib.get_close_matches(word, names, n=1)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""


def _checked(name: str) -> str:
    if not name.isidentifier():
        raise DataError(
            f"An attribute cannot be called {name!r}: recipes use it in conditions such as "
            f"`nouns <= 12`. Choose a name of letters, digits and _ (--name)."
        )
    if name in (*CLIP_SCHEMA.names, "aspect", "difficulty"):
        raise DataError(
            f"An attribute cannot be called {name!r}: in recipes that has "
            f"a meaning already. Choose another name (--name my_{name})."
        )
    return name

"""Further measures, which users bring: any class with a name and a call.

A preset names them, `measures = ["my_project.look:Aesthetics"]`. They are found from where one is,
as `trainable.module` is, and made without arguments; what they need to know (where weights lie, for
one) they take from the environment.
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol, cast

from longtake.errors import LongtakeError, RecipeError
from longtake.evaluation.measures.catalogue import MEASURES
from longtake.evaluation.measures.signals import Video
from longtake.models.imported import import_class

_SEE = "See Measure in longtake.evaluation.measures.extra."


class Measure(Protocol):
    """One further measure.

    Attributes:
        name: what its values are kept under; of small letters, digits and underscores.
    """

    name: str

    def __call__(
        self, videos: Sequence[Video], prompts: Sequence[str], fps: float
    ) -> Sequence[float | None] | float | None:
        """Measure all videos of a preset.

        Args:
            videos: each [F, H, W, 3] uint8 RGB. Look at one after another: each may be read from
                disk when it is asked for.
            prompts: of each.
            fps: frames a second that they are shown at.

        Returns:
            One number for each video, None where it is not defined for it; or one number for all
            of them together, such as a Frechet distance; or None: it is not defined here.
        """


def load_extra(path: str) -> Measure:
    """The measure that "package.module:Class" names, made without arguments.

    Raises:
        RecipeError: there is no such class, it is no measure, or it cannot be made.
    """
    made = made_of(path)
    name = getattr(made, "name", None)
    if not isinstance(name, str) or not name.isidentifier() or not callable(made):
        raise RecipeError(
            f"The measure {path} has the name {name!r} and {'a' if callable(made) else 'no'} "
            f"__call__. Give it a name such as 'clip_score' and __call__(videos, prompts, fps). "
            f"{_SEE}"
        )
    return cast("Measure", made)


def made_of(path: str) -> Any:
    """What "package.module:Class" names, made without arguments.

    Raises:
        RecipeError: there is no such class, or it cannot be made.
    """
    if ":" not in path:
        raise RecipeError(
            f"The measure {path!r} is no name of a class; write it as package.module:Class."
        )
    found = import_class(path, "The measure")
    try:
        return found()
    except LongtakeError:
        raise
    except Exception as error:  # somebody's class can end in any way
        raise RecipeError(
            f"The measure {path} cannot be made: {found.__name__}() failed with "
            f"{type(error).__name__}: {error}. It is made without arguments. {_SEE}"
        ) from error


def load_extras(paths: Sequence[str]) -> list[Measure]:
    """The measures that a preset names.

    Raises:
        RecipeError: as `load_extra`; or two have the same name, or one that is ours.
    """
    extras: dict[str, Measure] = {}
    for path in paths:
        extra = load_extra(path)
        if extra.name in MEASURES or extra.name in extras:
            raise RecipeError(
                f"The measure {path} is called {extra.name!r}, as another one is. Names in use: "
                f"{', '.join([*MEASURES, *extras])}. Call it otherwise."
            )
        extras[extra.name] = extra
    return list(extras.values())


def measure_extra(
    extras: Sequence[Measure], videos: Sequence[Video], prompts: Sequence[str], fps: float
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """What further measures say of a preset's videos.

    Returns:
        The numbers of each video, and those of all together; without what is not defined or no
        finite number.

    Raises:
        RecipeError: a measure fails, or returns what is no measure of these videos.
    """
    of_each: list[dict[str, float]] = [{} for _ in videos]
    of_set: dict[str, float] = {}
    for extra in extras:
        found = _asked(extra, videos, prompts, fps)
        if isinstance(found, float):
            of_set |= _finite(extra.name, found)
        else:
            for each, value in zip(of_each, found, strict=True):
                each |= _finite(extra.name, value)
    return of_each, of_set


def _asked(
    extra: Measure, videos: Sequence[Video], prompts: Sequence[str], fps: float
) -> float | list[float | None]:
    try:
        found: Any = extra(videos, prompts, fps)
        if found is None:
            return [None] * len(videos)
        if not hasattr(found, "__len__"):
            return float(found)
        values = [None if each is None else float(each) for each in found]
    except LongtakeError:
        raise
    except Exception as error:  # as above
        raise RecipeError(
            f"The measure {extra.name} failed with {type(error).__name__}: {error}. {_SEE}"
        ) from error
    if len(values) != len(videos):
        raise RecipeError(
            f"The measure {extra.name} gave {len(values)} numbers for {len(videos)} videos; "
            "expected one for each, or a single number for all of them. " + _SEE
        )
    return values


def _finite(name: str, value: float | None) -> dict[str, float]:
    return {} if value is None or not math.isfinite(value) else {name: value}

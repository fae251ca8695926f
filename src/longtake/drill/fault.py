"""What a fault is."""

from collections.abc import Callable
from dataclasses import dataclass

from longtake.drill.ground import Ground
from longtake.drill.result import Result
from longtake.errors import LongtakeError


class NotPossibleHereError(LongtakeError):
    """A drill needs what this machine does not have, which is no fault of longtake's."""


@dataclass(frozen=True)
class Fault:
    """A fault that can be injected into a run.

    Attributes:
        name: what one types.
        does: what is done to the run, in one line.
        must: what must happen then, in one line.
        drill: trains, injects it, and judges what came of it.
    """

    name: str
    does: str
    must: str
    drill: Callable[[Ground], Result]

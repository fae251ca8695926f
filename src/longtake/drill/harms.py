"""What can be made to go wrong inside a training process; `longtake.drill.sabotage` does it."""

from dataclasses import dataclass
from typing import Literal

Harm = Literal[
    "poison",
    "raise-rate",
    "raise-norm",
    "lose-gradient",
    "lose-gradient-on-rank-1",
    "freeze-worker-in-c",
    "freeze-worker-holding-gil",
    "hang-rank-1-asleep",
    "hang-rank-1-holding-gil",
    "hang-rank-1-stopped",
    "hang-rank-1-in-collective",
    "slow-rank-1-by-10",
    "slow-rank-1-by-30",
    "dawdle",
]

POISONED_BATCHES = 5
"""More than the guard leaves out one by one."""
RATE_FACTOR = 10.0
NORM_FACTOR = 1.007
"""The epoch-end defect that it is like added 5 to a norm of 700."""
PACE_SECONDS = 0.5
"""By which steps are longer, where a run has to last for some seconds."""
SLOW_PACE_SECONDS = 0.25
"""Likewise, where one rank is slower than the others."""
LOST_PARAMETER = "blocks.1.attention.to_out.weight"


@dataclass(frozen=True)
class Sabotage:
    """Something wrong inside a training process."""

    harm: Harm
    at: int
    """The number of the step that it befalls or begins with, or of the batch that it belongs to; of
    a decoding process that freezes, how many windows it reads until then."""
    is_lasting: bool = False
    """Whether it comes again after the run went back."""

    @property
    def arguments(self) -> list[str]:
        """Those of the program that does it, before longtake's own."""
        return [*["--lasting"] * self.is_lasting, self.harm, str(self.at)]

"""What can be made to go wrong inside a training process; `longtake.drill.sabotage` does it."""

from dataclasses import dataclass
from typing import Literal

Harm = Literal["poison", "raise-rate", "raise-norm", "lose-gradient", "lose-gradient-on-rank-1"]

POISONED_BATCHES = 5
"""More than the guard leaves out one by one."""
RATE_FACTOR = 10.0
NORM_FACTOR = 1.007
"""The epoch-end defect that it is like added 5 to a norm of 700."""
LOST_PARAMETER = "blocks.1.attention.to_out.weight"


@dataclass(frozen=True)
class Sabotage:
    """Something wrong inside a training process."""

    harm: Harm
    at: int
    """The number of the step that it befalls, or of the batch that it belongs to."""
    is_lasting: bool = False
    """Whether it comes again after the run went back."""

    @property
    def arguments(self) -> list[str]:
        """Those of the program that does it, before longtake's own."""
        return [*["--lasting"] * self.is_lasting, self.harm, str(self.at)]

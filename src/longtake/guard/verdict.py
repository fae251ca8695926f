"""What is to be done about a step."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["ok", "skip", "roll_back", "stop"]
Reason = Literal["", "non_finite", "spike", "divergence", "weight_step", "edge_step"]


@dataclass(frozen=True)
class Verdict:
    """What is to be done about a step, before its update is made."""

    kind: Kind
    """`skip`: the update is not made; `roll_back`: nor is it, and the run goes back to a
    checkpoint from before the trouble."""
    reason: Reason = ""
    """`edge_step`: a `weight_step` where an epoch or a stage begins."""
    message: str = ""
    """For people: what was seen, compared with what."""
    began: int = 0
    """The step at which the trouble began: the state that it began with is still good."""


OK = Verdict("ok")

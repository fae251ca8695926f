"""Which of a run's checkpoints are evaluated; pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from longtake.errors import RunError

_EVERY = re.compile(r"every=([1-9][0-9]{0,11})")


@dataclass(frozen=True)
class Backlog:
    """What is done about checkpoints that are there already, or come faster than they are done.

    Attributes:
        every: a step is wanted if this divides it; None: only the newest is, at each look.
    """

    every: int | None = 1

    @property
    def takes_all(self) -> bool:
        """Whether no step that is wanted may be left out."""
        return self.every is not None

    def choose(self, steps: Sequence[int], *, with_last: bool) -> list[int]:
        """Those of ascending steps that are wanted, the one to begin with first.

        The oldest comes first, because a run deletes the oldest first. `with_last`: the newest is
        wanted whatever divides it, because no newer one is to come.
        """
        if self.every is None:
            return list(steps[-1:])
        wanted = [step for step in steps if step % self.every == 0]
        return sorted({*wanted, *steps[-1:]}) if with_last else wanted


def parse_backlog(text: str) -> Backlog:
    """Read `all`, `newest` or `every=K`.

    Raises:
        RunError: it is something else.
    """
    if text in ("all", "newest"):
        return Backlog(1 if text == "all" else None)
    found = _EVERY.fullmatch(text)
    if found is None:
        raise RunError(
            f"--backlog {text[:80]}: expected all, newest or every=K, such as every=1000 for the "
            "checkpoints of the steps 1000, 2000, ..."
        )
    return Backlog(int(found[1]))

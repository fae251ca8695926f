"""What a follower says, in tracking/follower.log."""

import sys

from longtake.fsio import now


def say(text: str) -> None:
    """Write a line."""
    sys.stderr.write(f"{now()} {text}\n")
    sys.stderr.flush()

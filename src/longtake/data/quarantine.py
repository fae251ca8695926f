"""Clips that could not be read and are left out, on all ranks alike."""

from collections.abc import Iterable, Mapping, Sequence

from longtake.errors import DataError

NOT_FINITE = "is encoded to"
"""The words by which the reason of a clip tells a fault of its encoding from one of its file."""


class Quarantine:
    """Clips that are left out of all batches, with the reason, by identity.

    `failures` are those that this rank has found since the last `add`. The training loop exchanges
    them after each step, so that all ranks leave out the same clips.
    """

    def __init__(self, most_clips: int) -> None:
        self._most_clips = most_clips
        self.clips: dict[str, str] = {}
        self.failures: dict[str, str] = {}

    def __contains__(self, identity: str) -> bool:
        return identity in self.clips or identity in self.failures

    def add(self, clips: Mapping[str, str]) -> None:
        """Leave out clips that some rank has found; its own are among them."""
        self.clips = dict(sorted({**self.clips, **clips}.items()))
        self.failures = {}

    def all_clips(self) -> dict[str, str]:
        return {**self.clips, **self.failures}

    def restore(self, clips: Mapping[str, str]) -> None:
        self.clips, self.failures = dict(clips), {}

    def refuse_too_many(self) -> None:
        """Refuse to go on.

        Raises:
            DataError: there are more clips than allowed.
        """
        reasons = list(self.all_clips().values())
        if len(reasons) > self._most_clips:
            raise DataError(describe_too_many(reasons, "while training", self._most_clips))


def describe_too_many(reasons: Sequence[str], when: str, allowed: int) -> str:
    """The message where more clips failed than `data.max_quarantined_clips`."""
    return (
        f"{len(reasons)} clips could not be {verb_of(reasons)} {when}, more than "
        f"data.max_quarantined_clips = {allowed} allows. One of them: {with_remedy(reasons[-1])}"
    )


def verb_of(reasons: Iterable[str]) -> str:
    return "encoded" if all(NOT_FINITE in each for each in reasons) else "decoded"


def with_remedy(reason: str) -> str:
    """Why a clip failed, and what to do if it may be its file."""
    if NOT_FINITE in reason:
        return f"{reason}."
    return f"{reason}. Are the files still where they were indexed? Run longtake data index again."

"""The quarantine: clips that could not be read and are left out, on all ranks alike."""

from collections.abc import Iterable, Mapping, Sequence

from longtake.errors import DataError

NOT_FINITE = "is encoded to"
"""Text in a clip's reason that tells that encoding failed, not decoding."""


class Quarantine:
    """Clips that are left out of all batches, with the reason, by identity.

    `failures` holds those that this rank has found since the last `add`. The training loop
    exchanges them after each step, so that all ranks leave out the same clips.
    """

    def __init__(self, most_clips: int) -> None:
        self._most_clips = most_clips
        self.clips: dict[str, str] = {}
        self.failures: dict[str, str] = {}

    def __contains__(self, identity: str) -> bool:
        return identity in self.clips or identity in self.failures

    def add(self, clips: Mapping[str, str]) -> None:
        """Leave out clips that some rank could not read, from now on."""
        # Sorted, so that the state in a checkpoint is the same on all ranks.
        self.clips = dict(sorted({**self.clips, **clips}.items()))
        self.failures = {}

    def all_clips(self) -> dict[str, str]:
        """Return all left-out clips with their reasons, also those that only this rank knows."""
        return {**self.clips, **self.failures}

    def restore(self, clips: Mapping[str, str]) -> None:
        """Replace the quarantine by the left-out clips of a checkpoint."""
        self.clips, self.failures = dict(clips), {}

    def refuse_too_many(self) -> None:
        """Raise DataError if more clips failed than `data.max_quarantined_clips` allows."""
        reasons = list(self.all_clips().values())
        if len(reasons) > self._most_clips:
            raise DataError(describe_too_many(reasons, "while training", self._most_clips))


def describe_too_many(reasons: Sequence[str], when: str, allowed: int) -> str:
    """Return the message that more clips failed than `data.max_quarantined_clips`."""
    return (
        f"{len(reasons)} clips could not be {verb_of(reasons)} {when}, more than "
        f"data.max_quarantined_clips = {allowed} allows. One of them: {with_remedy(reasons[-1])}"
    )


def verb_of(reasons: Iterable[str]) -> str:
    """Return the verb for a message: "encoded" if encoding failed for each clip, else "decoded"."""
    return "encoded" if all(NOT_FINITE in each for each in reasons) else "decoded"


def with_remedy(reason: str) -> str:
    """Return the reason why a clip failed, and a remedy if its file may be the cause."""
    if NOT_FINITE in reason:
        return f"{reason}."
    return f"{reason}. Are the files still where they were indexed? Run longtake data index again."

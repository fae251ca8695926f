"""Batches that a run leaves out for good, by their numbers, and what follows from that."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from longtake.data.course import Course
from longtake.data.plan import PlannedBatch
from longtake.errors import DataError

Span = tuple[int, int]
"""[first, end)"""


@dataclass(frozen=True)
class Skipped:
    """Numbers of batches that are never handed out."""

    spans: tuple[Span, ...] = ()
    """Ascending; none is empty, and none touches another."""

    @classmethod
    def of(cls, spans: Iterable[Iterable[int]]) -> Self:
        """Those of spans in any order, which may overlap.

        Raises:
            DataError: one of them ends before it begins, or begins before the first batch.
        """
        merged: list[Span] = []
        for first, end in sorted(tuple(span) for span in spans):
            if not 0 <= first <= end:
                raise DataError(
                    f"Batches {first} to {end} cannot be skipped: expected the number of the first "
                    "one, at least 0, and the number after the last one, not below it."
                )
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            elif first < end:
                merged.append((first, end))
        return cls(tuple(merged))

    def with_(self, spans: Iterable[Span], since: int) -> "Skipped":
        """With further spans, as far as they are of the batches from `since` on."""
        cut = ((max(first, since), max(end, since)) for first, end in spans)
        return Skipped.of([*self.spans, *cut])

    def __len__(self) -> int:
        return sum(end - first for first, end in self.spans)

    def __contains__(self, number: object) -> bool:
        return any(number in range(first, end) for first, end in self.spans)

    def past(self, number: int) -> int:
        return next((end for first, end in self.spans if first <= number < end), number)

    def before(self, number: int) -> int:
        return next((first for first, end in self.spans if first <= number <= end), number)

    def after(self, number: int, count: int) -> int:
        """The number at which one stands when `count` batches from a number on are done."""
        number = self.past(number)
        for first, end in self.spans:
            if number < first <= number + count:
                number, count = end, count - (first - number)
        return number + count


def begins_epoch(planned: PlannedBatch, course: Course, skipped: Skipped) -> bool:
    """Whether a batch is the first of its epoch, or the first that is not skipped."""
    left, step, earlier = planned.number, planned.step, planned
    if left > len(skipped):
        return False
    while left:
        step -= 1
        earlier = course.batch(step)
        if _epoch(earlier) == _epoch(planned):
            if step not in skipped:
                return False
            left -= 1
    return earlier.begins_epoch


def _epoch(planned: PlannedBatch) -> tuple[str, str, int]:
    return planned.stage, planned.source, planned.epoch

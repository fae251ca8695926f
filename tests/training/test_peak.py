"""Predictions are held against one real step."""

from collections.abc import Sequence

import pytest
import torch

from longtake.config import Bucket
from longtake.data.loader import Batch
from longtake.training.peak import PeakCheck, PeakComparison

_CPU = torch.device("cpu")
_LARGE, _SMALL = (Bucket(num_frames=1, height=size, width=size) for size in (64, 32))


def _batch(bucket: Bucket) -> Batch:
    nothing = torch.empty(0)
    return Batch(
        step=0,
        stage="all",
        source="catalog",
        epoch=0,
        begins_epoch=False,
        bucket=bucket,
        videos=nothing,
        captions=(),
        seeds=(),
        identities=(),
        epochs=(),
        weights=nothing,
        rejected=(),
    )


def _compared(check: PeakCheck, steps: Sequence[tuple[Bucket, int]]) -> list[PeakComparison | None]:
    """What is known after each step, in which so many fp32 numbers are made."""
    found = []
    for bucket, size in steps:
        with check.of_step(_batch(bucket)):
            torch.ones(size)
        found.append(check.comparison)
    return found


def test_one_step_is_measured_and_not_the_first() -> None:
    """In the first, libraries take what they keep."""
    check = PeakCheck(6000, _LARGE, _CPU)
    found = _compared(check, [(_LARGE, 1000), (_LARGE, 1500), (_LARGE, 2000), (_LARGE, 2500)])
    assert found == [None, PeakComparison(6000, 4 * 1500), None, None]


def test_only_clips_of_the_shape_that_was_planned_for_are_compared() -> None:
    """Others take less than the prediction."""
    check = PeakCheck(6000, _LARGE, _CPU)
    found = _compared(check, [(_SMALL, 1), (_SMALL, 2), (_LARGE, 1500), (_SMALL, 3), (_LARGE, 4)])
    assert found == [None, None, PeakComparison(6000, 4 * 1500), None, None]


def test_an_error_is_the_share_that_was_predicted_too_much() -> None:
    """Negative where too little was."""
    assert PeakComparison(110, 100).error == pytest.approx(0.1)
    assert PeakComparison(90, 100).error == pytest.approx(-0.1)


def test_nothing_is_measured_where_nothing_was_predicted() -> None:
    """Then no step is slowed down: a profiler that is at work refuses a second one."""
    check = PeakCheck(None, _LARGE, _CPU)
    for _ in range(3):
        with torch.autograd.profiler.profile(), check.of_step(_batch(_LARGE)):
            torch.ones(10)
        assert check.comparison is None


def test_a_step_that_allocates_nothing_is_compared() -> None:
    """A rank may have no sample of a last batch."""
    *_, last = _compared(PeakCheck(100, _LARGE, _CPU), [(_LARGE, 0), (_LARGE, 0)])
    assert last is not None
    assert last.error == 99

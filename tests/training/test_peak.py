"""Predictions are held against one real step."""

from contextlib import nullcontext

import pytest
import torch

from longtake.training.peak import PeakCheck, PeakComparison

_CPU = torch.device("cpu")


def test_the_second_step_is_measured_and_no_other() -> None:
    """In the first, libraries take what they keep."""
    check = PeakCheck(6000, _CPU)
    compared = []
    for size in (1000, 1500, 2000, 2500):
        with check.of_step():
            torch.ones(size)
        compared.append(check.comparison)
    assert compared == [None, PeakComparison(6000, 4 * 1500), None, None]


def test_an_error_is_the_share_that_was_predicted_too_much() -> None:
    """Negative where too little was."""
    assert PeakComparison(110, 100).error == pytest.approx(0.1)
    assert PeakComparison(90, 100).error == pytest.approx(-0.1)


def test_nothing_is_measured_where_nothing_was_predicted() -> None:
    """Then no step is slowed down: a profiler that is at work refuses a second one."""
    check = PeakCheck(None, _CPU)
    for _ in range(3):
        with torch.autograd.profiler.profile(), check.of_step():
            torch.ones(10)
        assert check.comparison is None


def test_a_step_that_allocates_nothing_is_compared() -> None:
    """A rank may have no sample of a last batch."""
    check = PeakCheck(100, _CPU)
    for _ in range(2):
        with check.of_step(), nullcontext():
            pass
    assert check.comparison is not None
    assert check.comparison.error == 99

"""The training loss."""

import pytest
import torch
from torch.testing import assert_close

from longtake.flow.loss import velocity_loss


def test_each_sample_has_its_own_mean_square() -> None:
    """Errors of 1 and 3 everywhere in two samples give 1 and 9: mean over all but the batch."""
    target = torch.zeros(2, 4, 2, 3, 5)
    predicted = torch.stack([torch.ones(4, 2, 3, 5), torch.full((4, 2, 3, 5), -3.0)])
    assert velocity_loss(predicted, target).tolist() == [1.0, 9.0]


def test_half_precision_is_raised_before_it_is_squared() -> None:
    """fp16 errors of 300, whose square fp16 cannot hold, give 90,000 in fp32."""
    predicted = torch.full((1, 2, 2), 300.0, dtype=torch.float16)
    loss = velocity_loss(predicted, torch.zeros_like(predicted))
    assert loss.dtype == torch.float32
    assert loss.item() == 90_000.0


def test_the_gradient_is_twice_the_error_over_the_count() -> None:
    """The gradient reaches a half-precision prediction in its own type."""
    predicted = torch.full((1, 4), 0.5, dtype=torch.bfloat16, requires_grad=True)
    (gradient,) = torch.autograd.grad(velocity_loss(predicted, torch.zeros(1, 4)).sum(), predicted)
    assert gradient.dtype == torch.bfloat16
    assert_close(gradient.float(), torch.full((1, 4), 2 * 0.5 / 4))


def test_unequal_shapes_are_refused() -> None:
    """A target that would broadcast is a defect of the caller, not a loss."""
    with pytest.raises(AssertionError, match=r"\[2, 3\] and \[2, 1\]"):
        velocity_loss(torch.zeros(2, 3), torch.zeros(2, 1))

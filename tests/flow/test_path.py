"""The straight path, its velocity, and the loss."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from longtake.flow.path import (
    SIGMA_FLOOR,
    interpolate,
    velocity,
    velocity_from_latents,
    velocity_loss,
)


def _pair(batch: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, batch, 4, 2, 3, 5)
    latents, noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    return latents, noise


def test_sigma_zero_is_the_clip_and_one_is_the_noise() -> None:
    """The direction: 0 gives the latents back, 1 the noise, bit for bit, each sample by its own."""
    latents, noise = _pair(batch=2)
    points = interpolate(latents, noise, torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert torch.equal(points[0], latents[0])
    assert torch.equal(points[1], noise[1])


def test_a_quarter_of_noise_is_three_quarters_of_clip() -> None:
    latents, noise = torch.full((1, 1, 1, 1, 1), 8.0), torch.full((1, 1, 1, 1, 1), 4.0)
    assert interpolate(latents, noise, torch.tensor([0.25])).item() == 7.0
    assert velocity(latents, noise).item() == -4.0


def test_velocity_is_the_derivative_with_respect_to_sigma() -> None:
    latents, noise = _pair()
    sigmas = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    moved = interpolate(latents, noise, sigmas + 0.01) - interpolate(latents, noise, sigmas)
    assert_close(moved, 0.01 * velocity(latents, noise))


@given(st.lists(st.floats(SIGMA_FLOOR, 1.0), min_size=1, max_size=4), st.integers(0, 99))
def test_the_true_clip_implies_the_true_velocity(sigmas: list[float], seed: int) -> None:
    """From the floor on, a network that predicts the clip answers with the exact velocity."""
    latents, noise = _pair(len(sigmas), seed)
    levels = torch.tensor(sigmas, dtype=torch.float64)
    noisy = interpolate(latents, noise, levels)
    assert_close(velocity_from_latents(noisy, latents, levels), velocity(latents, noise))


def test_below_the_floor_an_error_is_not_magnified_further() -> None:
    """At sigma 0 a prediction that is off by 1 implies a velocity of 1 / floor, not infinity."""
    noisy = torch.zeros(1, 1, 1, 1, 1)
    implied = velocity_from_latents(noisy, noisy + 1, torch.zeros(1), floor=0.25)
    assert implied.item() == -4.0


def test_half_precision_latents_meet_the_sigmas_in_fp32() -> None:
    """bf16 latents are mixed in the sigmas' fp32, so sigmas keep their digits."""
    latents, noise = torch.zeros(1, 1, dtype=torch.bfloat16), torch.ones(1, 1, dtype=torch.bfloat16)
    point = interpolate(latents, noise, torch.tensor([0.12345]))
    assert point.dtype == torch.float32
    assert_close(point.item(), 0.12345)


def test_each_sample_has_its_own_mean_square() -> None:
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
    predicted = torch.full((1, 4), 0.5, dtype=torch.bfloat16, requires_grad=True)
    (gradient,) = torch.autograd.grad(velocity_loss(predicted, torch.zeros(1, 4)).sum(), predicted)
    assert gradient.dtype == torch.bfloat16
    assert_close(gradient.float(), torch.full((1, 4), 2 * 0.5 / 4))


def test_weights_of_one_change_no_bit_of_loss_or_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(3, 4, 3, 7, 5, generator=generator)
    found = []
    for weights in (None, torch.ones(3, 1, 3, 7, 5)):
        predicted = torch.randn(target.shape, generator=generator.manual_seed(1))
        predicted.requires_grad_()
        loss = velocity_loss(predicted, target, weights)
        found.append((loss, *torch.autograd.grad(loss.sum(), predicted)))
    for plain, weighted in zip(*found, strict=True):
        assert torch.equal(plain, weighted)


def test_the_loss_is_the_mean_inside_a_mask_and_has_no_gradient_outside() -> None:
    target = torch.randn(2, 4, 2, 3, 5, generator=torch.Generator().manual_seed(0))
    predicted = torch.zeros_like(target, requires_grad=True)
    weights = torch.zeros(2, 1, 2, 3, 5)
    weights[0, :, 1, :2] = 1  # of the second sample nothing counts
    loss = velocity_loss(predicted, target, weights)
    inside = target[0, :, 1, :2]
    assert_close(loss, torch.stack([inside.square().mean(), torch.tensor(0.0)]))
    (gradient,) = torch.autograd.grad(loss.sum(), predicted)
    assert_close(gradient[0, :, 1, :2], -2 * inside / inside.numel())
    assert not (gradient * (1 - weights)).any()
    assert not gradient[1].any()
    half = velocity_loss(predicted, target, weights.clamp(min=0.5))[0]
    both = (target[0].square() * weights[0].clamp(min=0.5)).sum()
    assert_close(half, both / (4 * weights[0].clamp(min=0.5).sum()))


def test_unequal_shapes_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"\[2, 3\] and \[2, 1\]"):
        velocity_loss(torch.zeros(2, 3), torch.zeros(2, 1))

"""What a model draws at random follows from seed, step and rank alone."""

import random

import numpy as np
import torch

from longtake.training.randomness import seed_step


def _drawn(seed: int, step: int, rank: int) -> tuple[float, float, float]:
    seed_step(seed, step, rank)
    return random.random(), float(np.random.random()), float(torch.rand(()))  # noqa: S311 - no secret


def test_the_same_step_draws_the_same() -> None:
    """Whatever was drawn in between."""
    first = _drawn(0, 7, 1)
    torch.rand(100)
    assert _drawn(0, 7, 1) == first


def test_other_steps_ranks_and_seeds_draw_otherwise() -> None:
    """All three generators."""
    draws = [_drawn(0, 7, 1), _drawn(0, 8, 1), _drawn(0, 7, 0), _drawn(1, 7, 1)]
    for generator in zip(*draws, strict=True):
        assert len(set(generator)) == len(draws)

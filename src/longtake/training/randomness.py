"""What a model may draw at random beside noise, sigmas and captions, such as dropout."""

import random

import numpy as np
import torch

from longtake.data.order import derive


def seed_step(seed: int, step: int, rank: int) -> None:
    """Make whatever a step draws from Python's, numpy's or torch's generators follow from it.

    So there is no random state to save, and a resumed run draws what it would have drawn, on any
    number of processes as long as it stays the same.
    """
    number = derive("step", seed, step, rank)
    random.seed(number)
    np.random.seed(number % 2**32)  # an older generator, but a user's module may use it
    torch.default_generator.manual_seed(number)  # torch.manual_seed takes ten times as long
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(number)

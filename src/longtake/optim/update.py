"""Learning rates of the optimizers, and averages of the weights (EMA)."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from longtake.config import EmaProfile, OptimizerSection, Recipe
from longtake.data.stages import StagePosition
from longtake.models.trainable import trained_state
from longtake.parallel.fsdp import local_shard

Masters = Mapping[Tensor, Tensor]
"""fp32 master weights that optimizers update in place of rounded parameters, by parameter."""


# --- Learning rates ---------------------------------------------------------------------------

_INVERSE_SQRT_STEPS = 10_000  # that `inverse_sqrt` counts in without a warm-up, as in transformers


def set_learning_rates(optimizers: Sequence[Optimizer], factor: float) -> None:
    """Set each optimizer's learning rate to its own base rate times the schedule's factor."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rate = group["base_lr"] * factor
            if isinstance(group["lr"], Tensor):  # a compiled update reads it from there
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def rate_factor(group: Mapping[str, Any]) -> float:
    """Return a parameter group's present learning rate as a multiple of its base rate."""
    return float(group["lr"]) / (group["base_lr"] or 1.0)


def adapted_rate(group: Mapping[str, Any]) -> float:
    """Return the factor that an optimizer which finds its own learning rate has found; else 1.

    Our Prodigy reports it as `distance`, prodigyopt's and D-Adaptation's classes as `d`.
    """
    found = group.get("distance", group.get("d"))
    return float(found) if isinstance(found, int | float) and found > 0 else 1.0


def schedule_factor(step: int, steps: int, section: OptimizerSection) -> float:
    """Return the schedule's learning rate at a step as a share of its full value, in [0, 1]."""
    warmup = section.num_warmup_steps(steps)
    if step < warmup:
        # The first update already has a rate above 0.
        return (step + 1) / (warmup + 1)
    if section.schedule == "inverse_sqrt":
        # As in transformers and fairseq, whose rate falls as if it had risen in the same curve.
        unit = warmup or _INVERSE_SQRT_STEPS
        return max(section.min_lr_ratio, math.sqrt(unit / (step - warmup + unit)))
    _, done = schedule_cycle(step, steps, section)
    power = {"linear": 1.0, "polynomial": section.schedule_power}.get(section.schedule)
    remaining = (1 + math.cos(math.pi * done)) / 2 if power is None else max(0.0, 1 - done) ** power
    return section.min_lr_ratio + (1 - section.min_lr_ratio) * remaining


def schedule_cycle(step: int, steps: int, section: OptimizerSection) -> tuple[int, float]:
    """Return how often the learning rate has restarted up to a step, and its descent since.

    The descent is a share: 0 at a full rate, 1 at the run's last step. A constant rate does not
    descend.
    """
    count = {"constant": 0, "cosine_restarts": section.schedule_cycles}.get(section.schedule, 1)
    warmup = section.num_warmup_steps(steps)
    done = (step - warmup) * count / max(1, steps - 1 - warmup)
    number = max(0, min(count - 1, int(done)))
    return number, done - number


def learning_rate_factor(recipe: Recipe, step: int, position: StagePosition) -> float:
    """Return the learning rate of a step as a share of `optimizer.learning_rate`.

    It is the run's schedule, times the stage's learning rate over the optimizer's, times the
    stage's warm-up.
    """
    section, stage = recipe.optimizer, recipe.data.stage(position.name)
    rate, warmup = stage.learning_rate or section.learning_rate, stage.warmup_steps or 0
    of_stage = rate / section.learning_rate * min(1.0, (position.num_before + 1) / (warmup + 1))
    return schedule_factor(step, recipe.training.steps, section) * of_stage


# --- Exponential moving averages (EMA), in fp32 and sharded like the model --------------------


class Averages:
    """Running averages (EMA) of a model's trained parameters, one per profile; maybe none.

    After the n-th step each average moves to beta average + (1 - beta) weights, where beta is
    `beta_of(profile, n)`.
    """

    def __init__(self, model: nn.Module, profiles: Sequence[EmaProfile]) -> None:
        self._model = model
        self._trained = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self._profiles = {profile.name: profile for profile in profiles}
        self._averages: dict[str, dict[str, Tensor]] = {
            profile: {
                # A copy also of fp32 weights, which would otherwise be their own average.
                name: parameter.detach().to(torch.float32, copy=True)
                for name, parameter in self._trained.items()
            }
            for profile in self._profiles
        }

    @torch.no_grad()
    def update(self, step: int, masters: Masters | None = None, decay: float | None = None) -> None:
        """Move the averages toward the weights after a step.

        Args:
            step: steps of the run so far, counted from 1. A step whose update was skipped counts,
                though averages do not move in it: `beta_of` depends on a run's length alone.
            masters: exact weights, used in place of rounded ones.
            decay: decay that a stage of the curriculum sets in place of `ema.decay`. A recipe with
                profiles, of which those with `sigma_rel` have no decay, refuses such stages.
        """
        if not self._averages:
            return
        best = masters or {}
        weights = {
            name: local_shard(best.get(parameter, parameter).detach())
            for name, parameter in self._trained.items()
        }
        exact = {name: each for name, each in weights.items() if each.dtype == torch.float32}
        for profile, averages in self._averages.items():
            followed = self._profiles[profile]
            if decay is not None:
                followed = followed.model_copy(update={"decay": decay})
            share = 1 - beta_of(followed, step)
            if exact:
                parts = [local_shard(averages[name]) for name in exact]
                torch._foreach_lerp_(parts, list(exact.values()), share)
            for name in weights.keys() - exact.keys():
                # One at a time: fp32 copies of all of them would be twice the model.
                local_shard(averages[name]).lerp_(weights[name].float(), share)

    @contextmanager
    def in_place_of_weights(self, profile: str) -> Iterator[None]:
        """Put an average into the model inside the context; the weights wait in host memory.

        Afterwards each weight has the same bits as before.
        """
        averages = self._averages[profile]
        weights = {name: local_shard(each.detach()) for name, each in self._trained.items()}
        # The planned memory of the device has no room for a second copy of the model.
        kept = {name: each.to("cpu", copy=True) for name, each in weights.items()}
        try:
            for name, each in weights.items():
                each.copy_(local_shard(averages[name]))
            yield
        finally:
            for name, each in weights.items():
                each.copy_(kept[name])

    def states(self) -> dict[str, dict[str, Any]]:
        """Return by profile the model's `trained_state` with averages in place of the weights.

        The tensors share the averages' memory.
        """
        trained = trained_state(self._model)
        return {profile: trained | averages for profile, averages in self._averages.items()}

    @torch.no_grad()
    def load(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        for profile, averages in self._averages.items():
            for name, average in averages.items():
                average.copy_(states[profile][name])


def beta_of(profile: EmaProfile, step: int) -> float:
    """Return the share of an EMA average that the update of a step (counted from 1) keeps.

    With a decay it is min(decay, (1 + n) / (10 + n)): the ramp, as in Tensorflow's
    ExponentialMovingAverage, forgets the random start of a short run. The half-life is ln 0.5 / ln
    decay updates: 69 at 0.99, 693 at 0.999.

    With a width it is (1 - 1/n)^(gamma + 1): the weights after update i then count in proportion to
    i^gamma, whatever the run's length (Karras et al., "Analyzing and Improving the Training
    Dynamics of Diffusion Models", 2023, section 3.1).
    """
    if profile.sigma_rel is None:
        assert profile.decay is not None, profile
        return min(profile.decay, (1 + step) / (10 + step))
    if step <= 1:
        return 0.0
    return math.exp((gamma_of(profile.sigma_rel) + 1) * math.log1p(-1 / step))


@cache
def gamma_of(width: float) -> float:
    """Return the exponent gamma for a width of an EMA: its standard deviation over its span.

    It solves width^2 = (gamma + 1) / ((gamma + 2)^2 (gamma + 3)), a cubic (Karras et al., as
    above): 16.97 at 0.05, 6.94 at 0.1.
    """
    inverse = width**-2
    roots = np.roots([1, 7, 16 - inverse, 12 - inverse])
    # The largest root, as in the code that the paper prints for it.
    return float(roots.real.max())


def masters_of(optimizers: Iterable[Optimizer]) -> dict[Tensor, Tensor]:
    """Return the fp32 master weights that optimizers keep for rounded parameters.

    Offloaded masters are left out: they would have to be copied back for each update.
    """
    return {
        parameter: state["master"]
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        if "master" in state and state["master"].device == parameter.device
    }

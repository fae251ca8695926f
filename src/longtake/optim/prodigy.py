"""Prodigy: Adam that estimates its learning rate itself."""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longtake.optim.master_weights import Fp32Optimizer
from longtake.parallel.fsdp import local_shard

_FIRST_DISTANCE = 1e-6


class Prodigy(Fp32Optimizer):
    """Adam whose step is scaled by an estimate of the distance to the solution.

    After Mishchenko and Defazio, "Prodigy: An Expeditiously Adaptive Parameter-Free Learner"
    (arXiv:2306.06101), algorithm 4, with Adam's bias correction and with the learning rate left out
    of the estimate's denominator, as its authors advise for a warm-up. The same steps as
    `prodigyopt.Prodigy(use_bias_correction=True, safeguard_warmup=True)`. The learning rate is a
    factor, usually 1.

    The state of a parameter is `exp_avg`, `exp_avg_sq`, `gradients` (a weighted sum), `initial`
    (the weights at the first step) and `master` where the weight is not fp32: all fp32 and sharded
    like the parameter. The estimate is one for all parameters: `distance`, `numerator` and
    `num_steps` of the group. A step waits for the device once.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        eps: float = 1e-8,
    ) -> None:
        self._eps = eps
        estimate = {"distance": _FIRST_DISTANCE, "numerator": 0.0, "num_steps": 0}
        super().__init__(
            params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, **estimate}
        )

    def update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Estimate the distance to the solution from all gradients, then update all weights."""
        if not parameters:
            return
        (beta1, beta2), distance, done = group["betas"], group["distance"], group["num_steps"] + 1
        correction = math.sqrt(1 - beta2**done) / (1 - beta1**done)
        rate = distance * group["lr"] * correction
        sums = [self._accumulate(each, beta1, beta2, distance) for each in parameters]
        # The one wait for the device: both sums of all parameters in one copy. They are added up
        # over all ranks; if each holds all of a tensor, the ratios are still right.
        total = torch.stack(sums).sum(0).cpu()
        if dist.is_initialized():
            dist.all_reduce(total)
        moved, weighted = total.tolist()
        if not weighted:  # no gradient yet
            return
        # Relative to the first distance, as in prodigyopt; it cancels in the quotient below.
        gained = distance / _FIRST_DISTANCE * rate * moved
        group["numerator"] = math.sqrt(beta2) * group["numerator"] + gained
        # The estimate never falls.
        group["distance"] = max(distance, group["numerator"] / weighted)
        group["num_steps"] = done
        for parameter in parameters:
            # In a function of its own, so that only one parameter's temporary tensors are there.
            self._move(parameter, group, rate)

    def _accumulate(self, parameter: Tensor, beta1: float, beta2: float, distance: float) -> Tensor:
        """Update a parameter's averages; return its terms of the estimate of the distance.

        Returns:
            [2] fp64, for this rank's shard: the product of the gradient with the initial minus the
            present weights, and the L1 norm of the weighted sum of gradients.
        """
        assert parameter.grad is not None
        if not self.state[parameter]:
            updated = self.add_master(parameter)
            zeros = ("exp_avg", "exp_avg_sq", "gradients")
            self.state[parameter] |= {name: torch.zeros_like(updated) for name in zeros}
            # Whole also where all weights are 0 (LoRA's B): prodigyopt keeps one number then, a
            # shape that depends on values and that a resumed run may not be able to load.
            self.state[parameter]["initial"] = updated.detach().clone()
        state = {name: local_shard(value) for name, value in self.state[parameter].items()}
        weight = state.get("master", local_shard(parameter.detach()))
        gradient = local_shard(parameter.grad).float()
        moved = torch.dot(gradient.flatten(), (state["initial"] - weight).flatten())
        state["exp_avg"].mul_(beta1).add_(gradient, alpha=distance * (1 - beta1))
        state["exp_avg_sq"].mul_(beta2).addcmul_(
            gradient, gradient, value=distance**2 * (1 - beta2)
        )
        share = distance**2 / _FIRST_DISTANCE
        state["gradients"].mul_(math.sqrt(beta2)).add_(gradient, alpha=share)
        weighted = torch.linalg.vector_norm(state["gradients"], 1)
        return torch.stack([moved, weighted]).double()

    def _move(self, parameter: Tensor, group: dict[str, Any], rate: float) -> None:
        state = {name: local_shard(value) for name, value in self.state[parameter].items()}
        shard = local_shard(parameter.detach())
        weight = state.get("master", shard)
        scale = state["exp_avg_sq"].sqrt().add_(group["distance"] * self._eps)
        weight.mul_(1 - rate * group["weight_decay"])
        weight.addcdiv_(state["exp_avg"], scale, value=-rate)
        if weight is not shard:
            shard.copy_(weight)

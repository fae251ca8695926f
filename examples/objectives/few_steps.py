"""An objective that distils a release for few steps: each of them replaces several of the release.

In the recipe:

    [flow]
    timestep_sampling = "uniform"
    [objective]
    kind = "examples.objectives.few_steps:FewSteps"
    options = { steps = 4, shift = 3.0, guidance = 5.0 }
    [trainable]
    kind = "lora"
    rank = 64

The solver's sigmas for `steps` and `shift` divide the path from noise to latents. From the start of
one of these intervals the release, the model without its LoRA, is integrated to its end in smaller
Euler steps, with guidance. What is learnt is the one velocity that leads there: distillation as in
Salimans and Ho (arXiv:2202.00512), in one round. Sample the result with the same steps and shift,
and a guidance of 1.
"""

from dataclasses import replace

import torch
from torch import Tensor

from longtake.flow import path
from longtake.flow.timesteps import build_sigmas
from longtake.models.objective import FlowBatch, Objective, Passes


class FewSteps(Objective):
    """The velocity over one long step of the solver, taken from several short steps of the release.

    Args:
        steps: steps that the distilled model is sampled with.
        shift: shift of their sigmas, `sampling.shift`.
        guidance: guidance scale of the release's steps; 1 is none.
        substeps: the release's steps for each of them.
    """

    uses_no_caption = True

    def __init__(
        self, steps: int = 4, shift: float = 1.0, guidance: float = 1.0, substeps: int = 4
    ) -> None:
        self.ends = build_sigmas(steps, shift)
        self.guidance, self.substeps = guidance, substeps

    def losses(self, passes: Passes, batch: FlowBatch) -> Tensor:
        # A uniform sigma chooses the interval; where it lies within, is not used.
        ends, last = batch.sigmas.new_tensor(self.ends), len(self.ends) - 2
        chosen = ((1 - batch.sigmas) * (last + 1)).long().clamp(max=last)
        start, end = ends[chosen], ends[chosen + 1]
        begun = path.interpolate(batch.latents, batch.noise, start)
        reached, step = begun, (start - end) / self.substeps
        for number in range(self.substeps):
            at = _at(batch, reached, start - number * step)
            reached = reached - _as_wide(step, reached) * self._release(passes, at)
        target = (begun - reached) / _as_wide(start - end, begun)
        at = replace(batch, sigmas=start)
        return passes.velocity_losses(at, passes.predict(at), target)

    def _release(self, passes: Passes, batch: FlowBatch) -> Tensor:
        velocity = passes.predict_frozen(batch, adapter=False).float()
        if self.guidance == 1:
            return velocity
        plain = passes.predict_frozen(batch.without_captions(), adapter=False).float()
        return torch.lerp(plain, velocity, self.guidance)


def _at(batch: FlowBatch, noisy_latents: Tensor, sigmas: Tensor) -> FlowBatch:
    """Return the batch at given noisy latents: between two equal ends, each place is the same."""
    return replace(batch, latents=noisy_latents, noise=noisy_latents, sigmas=sigmas)


def _as_wide(numbers: Tensor, like: Tensor) -> Tensor:
    """Reshape numbers [B] for products with [B, C, F, H, W]."""
    return numbers.reshape(-1, *(1 for _ in like.shape[1:]))

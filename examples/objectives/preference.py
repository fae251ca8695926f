"""An objective that learns from pairs: of two clips with one caption, people preferred the first.

In the recipe (the catalog's clips are the better ones; beside each lies the worse one):

    [data]
    caption_dropout = 0.0
    [data.conditioning]
    worse = { kind = "picture", path = "../worse/{stem}.png" }    # or kind = "video"
    [objective]
    kind = "examples.objectives.preference:Preference"
    options = { beta = 2000.0 }
    inputs = ["worse"]
    [trainable]
    kind = "lora"

It is Diffusion-DPO (Wallace et al., arXiv:2311.12908) with the error of the velocity in place of
that of the noise: the trained model is to beat the reference on the better clip by more than on the
worse one. The reference is the release without any adapter, so that it takes no memory of its own.
After supervised tuning merge that LoRA first (`longtake export`), and name the result as
`model.pretrained`.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from longtake.models.objective import FlowBatch, Objective, Passes, joined


class Preference(Objective):
    """Diffusion-DPO on velocities.

    Args:
        beta: how strongly a difference of errors counts; the larger it is, the nearer the trained
            model stays to the reference.
        worse: name in data.conditioning of the clip that was not preferred.
    """

    def __init__(self, beta: float = 2000.0, worse: str = "worse") -> None:
        self.beta = beta
        self.worse = worse
        self.inputs: Sequence[str] = (worse,)

    def losses(self, passes: Passes, batch: FlowBatch) -> Tensor:
        """-log sigmoid(-beta / 2 * (what the worse clip's error fell by, less the better one's)).

        Both clips of a pair have the same noise and sigma. They pass the model in one batch, since
        it predicts with gradients once in a step.
        """
        worse = replace(batch, latents=batch.conditioning[f"{self.worse}_latents"])
        pairs = joined([batch, worse])
        reference = passes.velocity_losses(pairs, passes.predict_frozen(pairs, adapter=False))
        gained = passes.velocity_losses(pairs, passes.predict(pairs)) - reference  # [2 B]
        better, worse_gained = gained.chunk(2)
        return -F.logsigmoid(-self.beta / 2 * (better - worse_gained))

"""An added module for any family: after each block a small network of its own corrects the tokens.

In the recipe:

    [trainable]
    module = "examples.modules.style_residual:StyleResidual"
    blocks = ["blocks.1*", "blocks.2*"]      # of Wan's 30 blocks those from 10 on, and 1 and 2
    options = { rank = 32 }

It needs no further pictures: what all clips of a data set have in common, such as their style, goes
into it, and the released model stays frozen. Unlike LoRA it is not linear, and cannot be merged.
After Houlsby et al., "Parameter-Efficient Transfer Learning for NLP" (2019).
"""

from collections.abc import Mapping, Sequence

import torch.nn.functional as F
from torch import Tensor, nn


class StyleResidual(nn.Module):
    """tokens + up(silu(down(normalised tokens))), with a `down` and an `up` for each block.

    Args:
        width: D of the model's tokens.
        blocks: names of the blocks that it follows.
        latent_channels: C of the latents, of which it has no need.
        rank: between `down` and `up`.
    """

    def __init__(
        self, width: int, blocks: Sequence[str], latent_channels: int, rank: int = 16
    ) -> None:
        super().__init__()
        self.number = {block: number for number, block in enumerate(blocks)}
        self.down = nn.ModuleList(nn.Linear(width, rank) for _ in blocks)
        self.up = nn.ModuleList(_zeroed(nn.Linear(rank, width)) for _ in blocks)

    def prepare(self, conditioning: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """There is nothing to prepare: it looks at the tokens alone."""
        return {}

    def forward(self, block: str, tokens: Tensor, prepared: Mapping[str, Tensor]) -> Tensor:
        """[B, T, D]."""
        number = self.number[block]
        hidden = F.silu(self.down[number](F.layer_norm(tokens, tokens.shape[-1:])))
        changed: Tensor = tokens + self.up[number](hidden)
        return changed


def _zeroed(layer: nn.Linear) -> nn.Linear:
    """So that training starts from the very model that was released."""
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer

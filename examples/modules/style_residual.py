"""An added module for any family: after each block a small network corrects the tokens.

In the recipe:

    [trainable.modules.style]
    module = "examples.modules.style_residual:StyleResidual"
    blocks = ["blocks.1*", "blocks.2*"]      # of Wan's 30 blocks those from 10 on, and 1 and 2
    options = { rank = 32 }

It needs no further pictures: what all clips of a data set have in common, such as their style, goes
into it, and the released model stays frozen. Unlike LoRA it is not linear, and cannot be merged.
After Houlsby et al., "Parameter-Efficient Transfer Learning for NLP" (2019).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch.nn.functional as F
from torch import nn

from longtake.models.added_module import BlockCall, BlockInputs


class StyleResidual(nn.Module):
    """tokens + up(silu(down(normalised tokens))), with a `down` and an `up` for each block.

    Args:
        width: D of the model's tokens.
        blocks: names of its blocks.
        rank: between `down` and `up`.
    """

    def __init__(self, width: int, blocks: Sequence[str], rank: int = 16) -> None:
        super().__init__()
        self.number = {block: number for number, block in enumerate(blocks)}
        self.down = nn.ModuleList(nn.Linear(width, rank) for _ in blocks)
        self.up = nn.ModuleList(_zeroed(nn.Linear(rank, width)) for _ in blocks)

    def around(self, block: str, call: BlockCall, inputs: BlockInputs) -> BlockInputs:
        """Run the block, then correct its tokens."""
        number, after = self.number[block], call(inputs)
        normalised = F.layer_norm(after.tokens, after.tokens.shape[-1:])
        hidden = F.silu(self.down[number](normalised))
        return replace(after, tokens=after.tokens + self.up[number](hidden))


def _zeroed(layer: nn.Linear) -> nn.Linear:
    """So that training starts from the very model that was released."""
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer

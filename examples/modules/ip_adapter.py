"""An added module like IP-Adapter: the model attends to a picture's tokens beside its text.

In the recipe (each clip's picture lies beside it):

    [data.conditioning]
    look = { kind = "picture", path = "../look/{stem}.png" }
    [trainable.modules.look]
    module = "examples.modules.ip_adapter:IPAdapter"

The attention is decoupled: the model's queries attend to keys and values of the picture in a second
attention, whose result is added to the model's own. The values start at zero, so training starts
from the released model. Of Wan it is around the attention to the text (`attn2`). The keys are not
rotated, so they stand at position 0, where FLUX's text stands too.
After Ye et al., "IP-Adapter" (2023), with the codec's latents instead of CLIP's features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor, nn

from longtake.models.added_module import Attend
from longtake.models.base import AttentionInputs


class IPAdapter(nn.Module):
    """Makes a few tokens of a picture; each block has a layer for their keys and values.

    Args:
        width: D of the model's tokens.
        blocks: names of its blocks.
        latent_channels: C of the picture's latents.
        picture: which of data.conditioning the picture is.
        grid: rows and columns of tokens that the picture is reduced to.
        hidden_size: width of these tokens.
        scale: of what is added.
    """

    def __init__(
        self,
        width: int,
        blocks: Sequence[str],
        latent_channels: int,
        picture: str = "look",
        grid: int = 4,
        hidden_size: int = 256,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.picture, self.grid, self.scale = f"{picture}_latents", grid, scale
        self.number = {block: number for number, block in enumerate(blocks)}
        self.read = nn.Sequential(
            nn.Linear(latent_channels * grid**2, hidden_size),
            nn.SiLU(),
            nn.Linear(hidden_size, hidden_size * grid**2),
            nn.Unflatten(1, (grid**2, hidden_size)),
            nn.LayerNorm(hidden_size),
        )
        self.keys = nn.ModuleList(nn.Linear(hidden_size, width) for _ in blocks)
        self.values = nn.ModuleList(nn.Linear(hidden_size, width) for _ in blocks)
        for layer in self.values:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def prepare(self, conditioning: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The picture's tokens [B, grid^2, hidden_size]."""
        latents = conditioning[self.picture][:, :, 0]  # [B, C, h, w] of its one frame
        return {"look": self.read(F.adaptive_avg_pool2d(latents, self.grid).flatten(1))}

    def around_attention(self, block: str, attend: Attend, inputs: AttentionInputs) -> Tensor:
        """What the model attends to itself, and the picture."""
        mixed = attend(inputs)
        if inputs.name == "attn1":
            return mixed
        look, number = inputs.block.prepared["look"], self.number[block]
        key, value = (
            layers[number](look).unflatten(-1, (inputs.query.shape[1], -1)).transpose(1, 2)
            for layers in (self.keys, self.values)
        )  # [B, heads, grid^2, width of a head]
        return mixed + self.scale * attend(replace(inputs, key=key, value=value, mask=None))

"""An added module that lets FLUX Kontext follow a picture of a pose, beside the reference picture.

In the recipe (each clip's pose lies beside it, drawn like the picture that is wanted):

    [data.conditioning]
    reference = { kind = "picture", path = "../reference/{stem}.png" }
    pose = { kind = "picture", path = "../pose/{stem}.png" }
    [trainable.modules.pose]
    module = "examples.modules.pose_adapter:PoseAdapter"
    blocks = ["transformer_blocks.*"]

The pose is encoded like every reference and cut into tokens like the picture, so that each of its
tokens has one of the picture's to go with. From it each block's own layer makes what is added to
that token. These layers start at zero: training starts from the very model that was released.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor, nn

from longtake.models.added_module import BlockCall, BlockInputs


class PoseAdapter(nn.Module):
    """Adds a picture's features to the tokens of the picture that is made.

    Args:
        width: D of the model's tokens.
        blocks: names of its blocks.
        latent_channels: C of the pose's latents.
        hidden_size: width of the pose's features.
        picture: the name in data.conditioning of the pose.
    """

    def __init__(
        self,
        width: int,
        blocks: Sequence[str],
        latent_channels: int,
        hidden_size: int = 256,
        picture: str = "pose",
    ) -> None:
        super().__init__()
        self.picture = f"{picture}_latents"
        self.number = {block: number for number, block in enumerate(blocks)}
        self.read = nn.Sequential(
            nn.Linear(4 * latent_channels, hidden_size), nn.SiLU(), nn.LayerNorm(hidden_size)
        )
        self.write = nn.ModuleList(_zeroed(nn.Linear(hidden_size, width)) for _ in blocks)

    def prepare(self, conditioning: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The pose's features, [B, N, hidden_size], one for each 2x2 of its latents."""
        latents = conditioning[self.picture][:, :, 0]  # [B, C, h, w] of a picture's one frame
        patches = F.pixel_unshuffle(latents, 2)  # [B, 4C, h/2, w/2]
        return {"pose": self.read(patches.flatten(2).mT)}

    def around(self, block: str, call: BlockCall, inputs: BlockInputs) -> BlockInputs:
        """The first N tokens are the picture's; the reference's, behind them, stay as they are."""
        after = call(inputs)
        change = self.write[self.number[block]](inputs.prepared["pose"])
        behind = after.tokens.shape[1] - change.shape[1]
        if behind < 0:
            raise ValueError(
                f"{block} has {after.tokens.shape[1]} tokens for {change.shape[1]} of a pose"
            )
        return replace(after, tokens=after.tokens + F.pad(change, (0, 0, 0, behind)))


def _zeroed(layer: nn.Linear) -> nn.Linear:
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer

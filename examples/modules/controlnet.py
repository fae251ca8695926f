"""An added module like ControlNet: a network of its own reads a control picture or video.

In the recipe (each clip's control lies beside it, and is drawn like the clip that is wanted):

    [data.conditioning]
    control = { kind = "video", path = "../control/{stem}.mp4" }    # "picture" for FLUX
    [trainable.modules.control]
    module = "examples.modules.controlnet:ControlNet"

Like the original it sees noisy latents, noise level and prompt beside the control, and adds its
features to the tokens after each block through layers that start at zero: training starts from the
released model. Unlike the original its layers are small and new, not copies of the model's.
After Zhang et al., "Adding Conditional Control to Text-to-Image Diffusion Models" (2023).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtake.models.added_module import BlockCall, BlockInputs


class ControlNet(nn.Module):
    """Runs once in each forward pass, in `prepare`; each block then adds what is its own.

    Args:
        width: D of the model's tokens.
        blocks: names of its blocks.
        latent_channels: C of the latents.
        text_width: D' of the prompt's embeddings: 4096 of FLUX's and Wan's encoders.
        control: which of data.conditioning is the control.
        hidden_size: width of its own tokens.
        depth: its own layers of attention.
    """

    def __init__(
        self,
        width: int,
        blocks: Sequence[str],
        latent_channels: int,
        text_width: int = 4096,
        control: str = "control",
        hidden_size: int = 256,
        depth: int = 2,
    ) -> None:
        super().__init__()
        self.control = f"{control}_latents"
        self.number = {block: number for number, block in enumerate(blocks)}
        self.read = nn.Linear(2 * 4 * latent_channels, hidden_size)  # 2 x 2 pixels of both
        self.read_text = nn.Linear(text_width, hidden_size)
        self.read_sigma = nn.Linear(1, hidden_size)
        self.layers = nn.ModuleList(
            nn.TransformerDecoderLayer(
                hidden_size, 4, 2 * hidden_size, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.write = nn.ModuleList(_zeroed(nn.Linear(hidden_size, width)) for _ in blocks)

    def prepare(self, conditioning: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Features [B, N, hidden_size], one for each token of the noisy latents."""
        noisy = conditioning["noisy_latents"]
        control = conditioning[self.control].expand_as(noisy)  # of a picture: in every frame
        both = torch.cat([noisy, control], dim=1).movedim(1, 2)  # [B, F, 2C, H, W]
        tokens = F.pixel_unshuffle(both, 2).flatten(3).mT.flatten(1, 2)  # [B, F H/2 W/2, 8C]
        sigmas = conditioning["sigmas"].to(noisy.dtype)[:, None, None]
        features, text = self.read(tokens), self.read_text(conditioning["prompt_embeds"])
        features = features + _positions(features) + self.read_sigma(sigmas)
        for layer in self.layers:
            features = layer(features, text)
        return {"features": features}

    def around(self, block: str, call: BlockCall, inputs: BlockInputs) -> BlockInputs:
        """Add to the tokens of the noisy latents, which come first; a reference's come behind."""
        after = call(inputs)
        change = self.write[self.number[block]](inputs.prepared["features"])
        behind = after.tokens.shape[1] - change.shape[1]
        return replace(after, tokens=after.tokens + F.pad(change, (0, 0, 0, behind)))


def _positions(tokens: Tensor) -> Tensor:
    """Sines and cosines [N, width] of each token's number."""
    _, length, width = tokens.shape
    rates = 1e4 ** -torch.linspace(0, 1, width // 2, device=tokens.device)
    angles = torch.arange(length, device=tokens.device)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(tokens.dtype)


def _zeroed(layer: nn.Linear) -> nn.Linear:
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer

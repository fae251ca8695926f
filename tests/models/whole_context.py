"""An added module that reads, and changes, everything that it is given around a block."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from longtake.models.added_module import Attend, BlockCall
from longtake.models.base import AttentionInputs, BlockInputs

_BEFORE = ("tokens", "text", "temb", "rope")
_AFTER = ("tokens after", "text after", "sigmas", "index")
_IN_ATTENTION = ("query", "key", "value", "own")


class WholeContext(nn.Module):
    """A trained number for each of these, shared by its blocks: at 0 it changes nothing."""

    def __init__(self, width: int, latent_channels: int) -> None:
        super().__init__()
        names = (*_BEFORE, *_AFTER, *_IN_ATTENTION)
        self.shares = nn.ParameterDict({name: torch.zeros(1) for name in names})
        self.read = nn.Linear(latent_channels, width)

    def prepare(self, conditioning: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Tokens [B, S, D] of the reference and of the noisy latents, weighted by sigma."""
        latents = conditioning["reference_latents"] + conditioning["noisy_latents"][:, :, :1]
        tokens = self.read(latents.flatten(2).mT)
        return {"own": tokens * conditioning["sigmas"].to(tokens.dtype)[:, None, None]}

    def around(self, block: str, call: BlockCall, inputs: BlockInputs) -> BlockInputs:
        assert block == inputs.name
        assert inputs.text is not None
        assert inputs.temb is not None
        cosines, sines = inputs.rope
        after = call(
            replace(
                inputs,
                tokens=self._scaled(inputs.tokens, "tokens"),
                text=self._scaled(inputs.text, "text"),
                temb=self._scaled(inputs.temb, "temb"),
                rope=(self._scaled(cosines, "rope"), self._scaled(sines, "rope")),
            )
        )
        assert after.text is not None
        level = inputs.sigmas.to(after.tokens.dtype)[:, None, None] * self.shares["sigmas"]
        place = inputs.index * self.shares["index"]
        tokens = self._scaled(after.tokens, "tokens after") * (1 + level + place)
        return replace(after, tokens=tokens, text=self._scaled(after.text, "text after"))

    def around_attention(self, block: str, attend: Attend, inputs: AttentionInputs) -> Tensor:
        num_heads = inputs.query.shape[1]
        own = inputs.block.prepared["own"]
        own = own.reshape(*own.shape[:2], num_heads, -1).transpose(1, 2)
        beside = attend(replace(inputs, key=own, value=own, mask=None))
        mixed = attend(
            replace(
                inputs,
                query=self._scaled(inputs.query, "query"),
                key=self._scaled(inputs.key, "key"),
                value=self._scaled(inputs.value, "value"),
            )
        )
        together: Tensor = mixed + self.shares["own"] * beside
        return together

    def _scaled(self, tensor: Tensor, name: str) -> Tensor:
        scaled: Tensor = tensor * (1 + self.shares[name])
        return scaled

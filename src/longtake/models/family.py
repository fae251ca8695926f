"""What every model family answers, and the words in which it is asked.

A family is the one place that knows how an architecture differs from the others: the layout of its
latents, what its timestep input means, what it is conditioned on, the sign of what it predicts.
Everything outside speaks latents [B, C, F, H, W], sigmas (1 = pure noise) and velocity
(= noise - latents).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from longtake.config import ModelSection, Shift
from longtake.models.codec import Codec
from longtake.models.defaults import Defaults
from longtake.models.text import TextEncoder
from longtake.models.unfilled import Weights
from longtake.parallel.context_parallel import TokenSharing

Conditioning = dict[str, Tensor]
"""What a model is told besides its noisy latents: named tensors, each [B, ...].

From text encoders `token_ids` or `prompt_embeds` and `pooled_prompt_embeds`; of a picture that goes
with each clip `<name>_latents` [B, C, 1, h, w]; for a guidance-distilled model `guidance` [B].
"""


class LatentShape(NamedTuple):
    """Shape of one sample's latents."""

    channels: int
    num_frames: int
    height: int
    width: int


class Family(Protocol):
    """One architecture: how to build it and what to ask of it."""

    references: tuple[str, ...]
    """Pictures, by name, that its conditioning must hold besides what text encoders give."""

    lora_targets: tuple[str, ...]
    """The linear layers that get LoRA unless the recipe says which: attention's projections."""

    def patch(self, section: ModelSection) -> tuple[int, ...]:
        """How many latent frames, rows and columns become one token.

        Raises:
            RecipeError: the section's own are none.
        """
        ...

    def check(self, section: ModelSection, shapes: Sequence[LatentShape]) -> None:
        """Refuse shapes that the model cannot take, before anything is built.

        Raises:
            RecipeError: names the shape and the nearest that fits.
        """
        ...

    def build(
        self,
        section: ModelSection,
        shapes: Sequence[LatentShape],
        text: TextEncoder,
        *,
        weights: Weights = True,
    ) -> nn.Module:
        """The model on the CPU, with random weights in fp32 or pretrained ones in the section's.

        Without `weights` it is the same architecture on torch's meta device, made in seconds at
        any size, and no file of weights is opened or downloaded. With `later` it is built so within
        `parameters_on_meta`: buffers are real, and pretrained weights are read by somebody else.

        Raises:
            RecipeError: the model's arguments do not fit.
            ModelError: pretrained weights, or their configuration, cannot be loaded.
        """
        ...

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The repeated blocks: the units of sharding and recompute, whose matrices Muon trains."""
        ...

    def call_blocks_by(self, model: nn.Module, call: Callable[..., Any]) -> None:
        """Have each block called as `call(block, *inputs)` wherever gradients are enabled.

        `call` must return what `block(*inputs)` returns. A second call replaces the first.
        """
        ...

    def share_tokens(self, model: nn.Module, sharing: TokenSharing) -> None:
        """Have ranks share the tokens of each sample, from now on.

        All of them ask the model alike, and all get the whole answer. Tokens that attend to each
        other are cut before the first block and gathered after the last.
        """
        ...

    def num_heads(self, model: nn.Module) -> int:
        """Of the attention in which tokens of a sample look at each other."""
        ...

    def width(self, model: nn.Module) -> int:
        """D, the width of a token between blocks."""
        ...

    def block_tokens(self, output: Any) -> Tensor:
        """The tokens [B, T, D] of clip or pictures in what one block returned."""
        ...

    def with_tokens(self, output: Any, tokens: Tensor) -> Any:
        """What a block returned, with other tokens in the place of `block_tokens`."""
        ...

    def num_tokens(self, model: nn.Module, shape: LatentShape) -> int:
        """How many tokens the model makes of one sample's noisy latents."""
        ...

    def sequence_length(
        self, model: nn.Module, shape: LatentShape, conditioning: Conditioning
    ) -> int:
        """How many tokens of one sample attend to each other: what memory and time grow with."""
        ...

    def defaults(self, section: ModelSection) -> Defaults:
        """What unset recipe keys stand for, by the section's own or pretrained configuration.

        Raises:
            ModelError: the configuration of the pretrained model cannot be found.
        """
        ...

    def distils_guidance(self, model: nn.Module) -> bool:
        """Whether the model is told a guidance scale (`guidance`), and so needs no second pass."""
        ...

    def predict_velocity(
        self, model: nn.Module, noisy_latents: Tensor, sigmas: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """The model's velocity, [B, C, F, H, W], for latents of that shape and sigmas [B]."""
        ...

    def export(
        self,
        model: nn.Module,
        codec: Codec,
        text: TextEncoder,
        shift: Shift,
        bucket_shift: float,
        folder: Path,
    ) -> None:
        """Write a diffusers pipeline folder that `from_pretrained` loads.

        Args:
            model: without LoRA layers.
            codec: of the run.
            text: of the run.
            shift: of sampling, a number or a rule; the scheduler gets the rule if it has it.
            bucket_shift: the shift at the run's first bucket, for a scheduler without the rule.
            folder: to write.

        Raises:
            RecipeError: diffusers has no pipeline for this family, codec and text encoder.
        """
        ...

    def comfyui_name(self, name: str, *, is_lora: bool) -> str:
        """What ComfyUI expects a weight of the model, or of its LoRA, to be called.

        Raises:
            RecipeError: ComfyUI has no such model.
        """
        ...

"""Tubelet: longtake's own small text-to-video family, trained from scratch on a laptop if need be.

It serves the demo, tests and drills. Clips are cut into tubes of some frames, rows and columns;
tokens of the caption stand before the tokens of the clip, and every token attends to every other.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from longtake.config import ModelSection, Shift
from longtake.errors import ModelError, RecipeError
from longtake.formatting import first_line
from longtake.models.codec import Codec
from longtake.models.defaults import Defaults
from longtake.models.family import Conditioning, LatentShape
from longtake.models.pretrained import check_arguments
from longtake.models.text import TextEncoder
from longtake.models.tubelet_network import TUBE, TubeletTransformer
from longtake.models.unfilled import Weights
from longtake.parallel.context_parallel import TokenSharing


def _tube(section: ModelSection) -> tuple[int, ...]:
    """Frames, height and width of a tube.

    Raises:
        RecipeError: `patch_size` is no such three numbers.
    """
    tube = section.config.get("patch_size", TUBE)
    is_list = isinstance(tube, list | tuple) and len(tube) == 3
    if not is_list or not all(type(side) is int and 0 < side < 2**16 for side in tube):
        raise RecipeError(
            f"model.config.patch_size is {tube!r:.60}; expected frames, height and width of a tube "
            f"such as {list(TUBE)}."
        )
    return tuple(tube)


class Tubelet:
    """The family: it embeds a caption's word ids itself, and is built for one shape of clip."""

    references: tuple[str, ...] = ()
    lora_targets: tuple[str, ...] = ("to_qkv", "to_out")

    def patch(self, section: ModelSection) -> tuple[int, ...]:
        return _tube(section)

    def check(self, section: ModelSection, shapes: Sequence[LatentShape]) -> None:
        """One shape only, which must divide into tubes."""
        if len(set(shapes)) > 1:
            raise RecipeError(
                f"data.buckets lists {len(set(shapes))} shapes, but the tubelet family learns a "
                "position for every tube and is built for one shape. Keep one bucket."
            )
        _, *sizes = shapes[0]
        tube = _tube(section)
        fits = [max(1, round(size / step)) * step for size, step in zip(sizes, tube, strict=True)]
        if fits != sizes:
            raise RecipeError(
                f"data.buckets: {_clip(sizes)} do not divide into tubes of {_clip(tube)}. The "
                f"nearest that do are {_clip(fits)}; or change model.config.patch_size."
            )

    def build(
        self,
        section: ModelSection,
        shapes: Sequence[LatentShape],
        text: TextEncoder,
        *,
        weights: Weights = True,
    ) -> nn.Module:
        """A `TubeletTransformer` with random weights."""
        if section.pretrained is not None:
            raise RecipeError("model.pretrained: the tubelet family has no pretrained weights.")
        if text.embed_dim is not None:
            raise RecipeError(
                'text.kind = "transformers" gives prompt_embeds, but the tubelet family embeds '
                'word ids itself. Set text.kind = "words".'
            )
        fitted = shapes[0]._asdict()
        fitted |= {"max_tokens": text.max_tokens, "vocabulary_size": text.vocabulary_size}
        check_arguments("model.config", TubeletTransformer.__init__, section.config)
        try:
            with torch.device("cpu" if weights else "meta"):
                return TubeletTransformer(**(fitted | section.config))
        except ModelError as error:
            raise RecipeError(f"model.config: {error}") from error
        except (
            ArithmeticError,
            LookupError,
            MemoryError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise RecipeError(
                f"model.config does not fit the tubelet family. {first_line(error)}"
            ) from error

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        network = cast("TubeletTransformer", model)
        return [network.caption_block, *network.blocks]

    def call_blocks_by(self, model: nn.Module, call: Callable[..., Any]) -> None:
        cast("TubeletTransformer", model).block_caller = call

    def share_tokens(self, model: nn.Module, sharing: TokenSharing) -> None:
        """The clip's and the caption's; every rank reads all of the caption before that."""
        cast("TubeletTransformer", model).share_tokens(sharing)

    def num_heads(self, model: nn.Module) -> int:
        return cast("TubeletTransformer", model).caption_block.attention.num_heads

    def width(self, model: nn.Module) -> int:
        """`hidden_size`."""
        return cast("TubeletTransformer", model).tube_in.out_features

    def block_tokens(self, output: Any) -> Tensor:
        tokens: Tensor = output
        return tokens

    def with_tokens(self, output: Any, tokens: Tensor) -> Any:
        return tokens

    def defaults(self, section: ModelSection) -> Defaults:
        return Defaults()

    def distils_guidance(self, model: nn.Module) -> bool:
        return False

    def num_tokens(self, model: nn.Module, shape: LatentShape) -> int:
        network = cast("TubeletTransformer", model)
        return math.prod(shape[1:]) // math.prod(network.patch_size)

    def sequence_length(
        self, model: nn.Module, shape: LatentShape, conditioning: Conditioning
    ) -> int:
        return self.num_tokens(model, shape) + cast("TubeletTransformer", model).max_tokens

    def predict_velocity(
        self, model: nn.Module, noisy_latents: Tensor, sigmas: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """[B, C, F, H, W]."""
        velocity: Tensor = model(noisy_latents, sigmas, conditioning["token_ids"])
        return velocity

    def export(
        self,
        model: nn.Module,
        codec: Codec,
        text: TextEncoder,
        shift: Shift,
        bucket_shift: float,
        folder: Path,
    ) -> None:
        """Diffusers has no such pipeline."""
        raise RecipeError(
            "diffusers has no pipeline for the tubelet family, so it cannot be exported. "
            "`longtake sample` samples it."
        )

    def comfyui_name(self, name: str, *, is_lora: bool) -> str:
        raise RecipeError(
            "ComfyUI has no model of the tubelet family. `longtake sample` samples it."
        )


def _clip(sizes: Sequence[int]) -> str:
    return f"{sizes[0]} frames of {sizes[2]}x{sizes[1]}"

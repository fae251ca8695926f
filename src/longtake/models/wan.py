"""Wan 2.1: diffusers' `WanTransformer3DModel` at any size."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from longtake.config import ModelSection, Shift
from longtake.errors import RecipeError
from longtake.models.architecture import build_transformer, read_release
from longtake.models.codec import AutoencoderCodec, Codec
from longtake.models.defaults import Defaults, scheduler_shift
from longtake.models.family import Conditioning, LatentShape
from longtake.models.precision import mixed_norms
from longtake.models.pretrained import quiet
from longtake.models.shared_attention import share_attention
from longtake.models.text import TextEncoder, TransformersText
from longtake.models.unfilled import Weights
from longtake.models.wan_names import original_name
from longtake.parallel.context_parallel import TokenSharing

_PATCH = (1, 2, 2)


class Wan:
    """Text to video; conditioned on a transformers encoder's `prompt_embeds`.

    Wan's velocity has longtake's sign (noise - latents); its timesteps are 1000 sigma.
    """

    references: tuple[str, ...] = ()
    lora_targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")

    def patch(self, section: ModelSection) -> tuple[int, ...]:
        """1 frame, 2 rows and columns, unless the section says otherwise."""
        return _patch_size(section)

    def check(self, section: ModelSection, shapes: Sequence[LatentShape]) -> None:
        """Latent height and width must divide into patches."""
        patch = _patch_size(section)
        for shape in shapes:
            sizes = (shape.num_frames, shape.height, shape.width)
            if any(size % step for size, step in zip(sizes, patch, strict=True)):
                fits = [
                    max(1, round(size / step)) * step
                    for size, step in zip(sizes, patch, strict=True)
                ]
                raise RecipeError(
                    f"data.buckets: latents of {_words(sizes)} do not divide into Wan's patches of "
                    f"{_words(patch)}. The nearest latents that do are {_words(fits)}: multiply "
                    "height and width by the codec's compression to get the bucket's."
                )

    def build(
        self,
        section: ModelSection,
        shapes: Sequence[LatentShape],
        text: TextEncoder,
        *,
        weights: Weights = True,
    ) -> nn.Module:
        """A `WanTransformer3DModel`; channels and text width follow from codec and encoder."""
        from diffusers import WanTransformer3DModel

        if text.embed_dim is None:
            raise RecipeError(
                'text.kind = "words" gives token ids, but Wan is conditioned on an encoder\'s '
                'prompt_embeds. Set text.kind = "transformers".'
            )
        if text.pooled_dim is not None:
            raise RecipeError(
                "text.pooled is FLUX's second text encoder; Wan has one only. Remove text.pooled."
            )
        channels = shapes[0].channels
        fitted = {"in_channels": channels, "out_channels": channels, "text_dim": text.embed_dim}
        return build_transformer(WanTransformer3DModel, section, fitted, weights=weights)

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        blocks: Any = model.blocks
        return list(blocks)

    def call_blocks_by(self, model: nn.Module, call: Callable[..., Any]) -> None:
        model.enable_gradient_checkpointing(call)  # type: ignore[operator]

    def share_tokens(self, model: nn.Module, sharing: TokenSharing) -> None:
        """The clip's; every rank looks at all of the text."""
        wan: Any = model
        wan.patch_embedding.register_forward_hook(partial(_cut_patches, sharing))
        wan.rope.register_forward_hook(partial(_cut_positions, sharing))
        for block in wan.blocks:
            share_attention(block.attn1, sharing)
        # Until then all is done token by token, and here a token has become narrow.
        wan.proj_out.register_forward_hook(lambda _module, _args, part: sharing.gather(part, 1))

    def num_heads(self, model: nn.Module) -> int:
        config: Any = model.config
        return int(config.num_attention_heads)

    def width(self, model: nn.Module) -> int:
        config: Any = model.config
        return int(config.num_attention_heads * config.attention_head_dim)

    def block_tokens(self, output: Any) -> Tensor:
        tokens: Tensor = output
        return tokens

    def with_tokens(self, output: Any, tokens: Tensor) -> Any:
        return tokens

    def defaults(self, section: ModelSection) -> Defaults:
        """Shift by the release's scheduler; guidance scale and steps are `WanPipeline`'s."""
        shift = scheduler_shift(read_release(section).scheduler, otherwise=5.0)
        return Defaults(shift, guidance_scale=5.0, num_inference_steps=50)

    def distils_guidance(self, model: nn.Module) -> bool:
        return False

    def num_tokens(self, model: nn.Module, shape: LatentShape) -> int:
        config: Any = model.config
        patch: tuple[int, ...] = config.patch_size
        return math.prod(shape[1:]) // math.prod(patch)

    def sequence_length(
        self, model: nn.Module, shape: LatentShape, conditioning: Conditioning
    ) -> int:
        """The clip's; text is looked at from aside."""
        return self.num_tokens(model, shape)

    def predict_velocity(
        self, model: nn.Module, noisy_latents: Tensor, sigmas: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """[B, C, F, H, W]."""
        wrapped: Any = model
        with mixed_norms():
            velocity: Tensor = wrapped(
                hidden_states=noisy_latents.to(wrapped.dtype),
                timestep=sigmas * 1000,
                encoder_hidden_states=conditioning["prompt_embeds"].to(wrapped.dtype),
                return_dict=False,
            )[0]
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
        """A `WanPipeline` folder; call it with max_sequence_length = the recipe's `max_tokens`.

        The scheduler is the one that Wan's releases bring: its steps visit the sigmas of
        `build_sigmas`, where FlowMatchEulerDiscreteScheduler's own would shift twice.
        """
        from diffusers import UniPCMultistepScheduler, WanPipeline

        if not isinstance(codec, AutoencoderCodec) or not isinstance(text, TransformersText):
            raise RecipeError(
                "A WanPipeline needs an autoencoder and a transformers text encoder; this run has "
                f"{type(codec).__name__} and {type(text).__name__}. `longtake sample` samples it."
            )
        pipeline = WanPipeline(
            tokenizer=text.tokenizer,
            text_encoder=text.encoder,
            vae=codec.autoencoder,
            scheduler=UniPCMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=bucket_shift
            ),
            transformer=model,
        )
        with quiet(model), quiet(text.encoder):
            pipeline.save_pretrained(folder)

    def comfyui_name(self, name: str, *, is_lora: bool) -> str:
        """As in Wan's own release; before LoRA's stands the part of ComfyUI that it is for."""
        return f"{'diffusion_model.' if is_lora else ''}{original_name(name)}"


def _patch_size(section: ModelSection) -> tuple[int, ...]:
    patch = section.config.get("patch_size", _PATCH)
    is_list = isinstance(patch, list | tuple) and len(patch) == len(_PATCH)
    if not is_list or not all(isinstance(step, int) and step > 0 for step in patch):
        raise RecipeError(
            f"model.config.patch_size = {patch!r}: expected frames, rows and columns, such as "
            f"{list(_PATCH)}."
        )
    return tuple(patch)


def _cut_patches(
    sharing: TokenSharing, _module: nn.Module, _args: object, patches: Tensor
) -> Tensor:
    """[B, D, t] of [B, D, F, H, W]; Wan would flatten the last three next, and finds it done."""
    tokens = patches.flatten(2)
    sharing.begin(tokens.shape[2])
    return sharing.cut(tokens, 2)


def _cut_positions(
    sharing: TokenSharing, _module: nn.Module, _args: object, tables: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Cosines and sines of this rank's tokens, [1, t, 1, d] each."""
    return tuple(sharing.cut(table, 1) for table in tables)


def _words(sizes: Sequence[int]) -> str:
    return f"{sizes[0]} frames of {sizes[2]}x{sizes[1]}"

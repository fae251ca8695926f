"""Wan 2.1: diffusers' `WanTransformer3DModel` at any size."""

import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from longtake.config import ModelSection, Shift
from longtake.errors import RecipeError
from longtake.models import base, codec, pretrained
from longtake.models.text import TextEncoder, TransformersText
from longtake.parallel.context_parallel import TokenSharing


class Wan(base.DiffusersFamily):
    """Text to video; conditioned on a transformers encoder's `prompt_embeds`.

    Its velocity has longtake's sign (noise - latents); its timesteps are 1000 sigma.
    """

    frozen = pretrained.FrozenParts(
        codec=pretrained.PipelinePart(("AutoencoderKLWan",), "vae"),
        text=pretrained.PipelinePart(("UMT5EncoderModel",), "text_encoder", "tokenizer"),
    )
    label = "Wan"
    transformer_class, pipeline_class = "WanTransformer3DModel", "WanPipeline"
    codec_class, text_class = codec.AutoencoderCodec, TransformersText
    parts = "an autoencoder and a transformers text encoder"
    block_lists = ("blocks",)
    block_arguments: ClassVar[Mapping[str, str]] = {
        **base.DiffusersFamily.block_arguments,
        "rope": "rotary_emb",
    }
    block_outputs: ClassVar[tuple[str, ...]] = ("tokens",)
    attentions: ClassVar[tuple[str, ...]] = ("attn1", "attn2")
    variants: ClassVar[Mapping[float, str]] = {36 / 16: "an image-to-video variant of Wan"}
    time_scale = 1000.0

    def patch(self, section: ModelSection) -> tuple[int, ...]:
        patch = section.config.get("patch_size", self.patch_size)
        is_list = isinstance(patch, list | tuple) and len(patch) == 3
        if not is_list or not all(isinstance(step, int) and step > 0 for step in patch):
            raise RecipeError(
                f"model.config.patch_size = {patch!r}: expected frames, rows and columns, such as "
                f"{list(self.patch_size)}."
            )
        return tuple(patch)

    def num_tokens(self, model: nn.Module, shape: base.LatentShape) -> int:
        config: Any = model.config
        patch: tuple[int, ...] = config.patch_size
        return math.prod(shape[1:]) // math.prod(patch)

    def fitted_config(self, channels: int, text: TextEncoder) -> dict[str, int]:
        if text.embed_dim is None:
            raise RecipeError(
                'text.kind = "words" gives token ids, but Wan is conditioned on an encoder\'s '
                'prompt_embeds. Set text.kind = "transformers".'
            )
        if text.pooled_dim is not None:
            raise RecipeError(
                "text.pooled is FLUX's second text encoder; Wan has one only. Remove text.pooled."
            )
        return {"in_channels": channels, "out_channels": channels, "text_dim": text.embed_dim}

    def call(
        self, model: Any, noisy_latents: Tensor, timesteps: Tensor, conditioning: base.Conditioning
    ) -> base.TransformerCall:
        inputs = {
            "hidden_states": noisy_latents,
            "timestep": timesteps,
            "encoder_hidden_states": conditioning["prompt_embeds"].to(noisy_latents.dtype),
        }
        return base.TransformerCall(inputs, lambda velocity: velocity)

    def share_tokens(self, model: nn.Module, sharing: TokenSharing) -> None:
        """The video's tokens; every rank attends to all of the text."""
        wan: Any = model
        wan.patch_embedding.register_forward_hook(partial(_cut_patches, sharing))
        wan.rope.register_forward_hook(partial(_cut_positions, sharing))
        for block in wan.blocks:
            base.share_attention(block.attn1, sharing)
        # The last layer that works token by token, and its tokens are narrow.
        wan.proj_out.register_forward_hook(lambda _module, _args, part: sharing.gather(part, 1))

    def scheduler(self, shift: Shift, bucket_shift: float) -> Any:
        """As in Wan's releases; with a FlowMatchEulerDiscreteScheduler WanPipeline shifts twice."""
        from diffusers import UniPCMultistepScheduler

        return UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=bucket_shift
        )

    def comfyui_name(self, name: str, *, is_lora: bool) -> str:
        return f"{'diffusion_model.' if is_lora else ''}{original_name(name)}"


def _cut_patches(
    sharing: TokenSharing, _module: nn.Module, _args: object, patches: Tensor
) -> Tensor:
    tokens = patches.flatten(2)
    sharing.begin(tokens.shape[2])
    return sharing.cut(tokens, 2)


def _cut_positions(
    sharing: TokenSharing, _module: nn.Module, _args: object, tables: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    return tuple(sharing.cut(table, 1) for table in tables)


# The inverse of diffusers' `convert_wan_transformer_to_diffusers`, which counts a block's norms in
# another order than Wan's own release.
_IN_BLOCKS = {
    "attn1": "self_attn",
    "attn2": "cross_attn",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "o",
    "add_k_proj": "k_img",
    "add_v_proj": "v_img",
    "norm_added_k": "norm_k_img",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
    "norm2": "norm3",
    "norm3": "norm2",
    "scale_shift_table": "modulation",
}
_AROUND_BLOCKS = {
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.image_embedder.norm1": "img_emb.proj.0",
    "condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1",
    "condition_embedder.image_embedder.ff.net.2": "img_emb.proj.3",
    "condition_embedder.image_embedder.norm2": "img_emb.proj.4",
    "scale_shift_table": "head.modulation",
    "proj_out": "head.head",
}


def original_name(name: str) -> str:
    names = _IN_BLOCKS if name.startswith("blocks.") else _AROUND_BLOCKS
    whole_parts = rf"(?<![^.])({'|'.join(map(re.escape, names))})(?![^.])"
    return re.sub(whole_parts, lambda found: names[found[0]], name)

"""FLUX.1 and FLUX.1 Kontext: diffusers' `FluxTransformer2DModel`, called as FLUX's pipelines do.

Legend: B batch, C latent channels, H and W latent rows and columns, N tokens of an image.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from longtake.config import ModelSection
from longtake.errors import RecipeError
from longtake.flow.shift import MuLine, ShiftRule
from longtake.models import base, codec, diffusers_family, pretrained, releases
from longtake.models.diffusers_family import DiffusersBlocks
from longtake.models.release_scheduler import PipelineScheduler
from longtake.models.text import TextEncoder
from longtake.models.text_contract import TextContract, text_width
from longtake.parallel.context_parallel import TokenSharing

_POOLED = "text_encoder"  # folder of CLIP
_PACK = 2  # latent rows and columns of one token


_STREAMS = (("img", "to_{}", "to_out.0"), ("txt", "add_{}_proj", "to_add_out"))
ORIGINAL_ATTENTION: Mapping[str, tuple[str, ...]] = {
    f"double_blocks.*.{stream}_attn.{own}": tuple(f"transformer_blocks.*.attn.{n}" for n in names)
    for stream, inner, outer in _STREAMS
    for own, names in (("qkv", [inner.format(each) for each in "qkv"]), ("proj", [outer]))
}
"""Names of FLUX's attention in the code of its makers, with diffusers' layers."""
_SINGLE = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")


class FluxText(TextContract):
    """How FLUX encodes text: T5's embeddings, padding included, and one vector of CLIP."""

    def encode(
        self, pipeline: Any, captions: list[str], max_tokens: int, pictures: Mapping[str, Tensor]
    ) -> base.Conditioning:
        embeds, pooled, _ = pipeline.encode_prompt(captions, max_sequence_length=max_tokens)
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}

    def outline(self, encoders: Mapping[str, nn.Module], max_tokens: int) -> base.Conditioning:
        pooled = encoders.get(_POOLED)  # without it `fitted_config` refuses
        width = 0 if pooled is None else text_width(pooled)
        vector = torch.empty(1, width, device="meta")
        return super().outline(encoders, max_tokens) | {"pooled_prompt_embeds": vector}


def share_tokens(model: Any, sharing: TokenSharing) -> None:
    """Split each sample's text tokens and image tokens between ranks (context parallelism)."""
    dims = {"encoder_hidden_states": 1, "txt_ids": 0, "hidden_states": 1, "img_ids": 0}
    lengths = ("encoder_hidden_states", "hidden_states")
    diffusers_family.share_inputs(model, sharing, dims, lengths)
    for block in (*model.transformer_blocks, *model.single_transformer_blocks):
        diffusers_family.share_attention(block.attn, sharing)


class Flux(diffusers_family.DiffusersFamily):
    """Text-to-image family, conditioned on `prompt_embeds` and `pooled_prompt_embeds`.

    Its velocity has longtake's sign (noise - latents), and its timestep is sigma. The released
    FLUX.1-dev is distilled: the guidance scale is an input, and there is no second pass.
    """

    frozen = pretrained.FrozenParts(
        codec=pretrained.PipelinePart(("AutoencoderKL",), "vae"),
        text=pretrained.PipelinePart(("T5EncoderModel",), "text_encoder_2", "tokenizer_2"),
    )
    label = "FLUX"
    transformer_class, pipeline_class = "FluxTransformer2DModel", "FluxPipeline"
    original_layers: Mapping[str, tuple[str, ...]] = {
        **ORIGINAL_ATTENTION,
        "double_blocks.*.img_mlp.0": ("transformer_blocks.*.ff.net.0.proj",),
        "double_blocks.*.img_mlp.2": ("transformer_blocks.*.ff.net.2",),
        "double_blocks.*.txt_mlp.0": ("transformer_blocks.*.ff_context.net.0.proj",),
        "double_blocks.*.txt_mlp.2": ("transformer_blocks.*.ff_context.net.2",),
        "double_blocks.*.img_mod.lin": ("transformer_blocks.*.norm1.linear",),
        "double_blocks.*.txt_mod.lin": ("transformer_blocks.*.norm1_context.linear",),
        "single_blocks.*.linear1": tuple(f"single_transformer_blocks.*.{n}" for n in _SINGLE),
        "single_blocks.*.linear2": ("single_transformer_blocks.*.proj_out",),
        "single_blocks.*.modulation.lin": ("single_transformer_blocks.*.norm.linear",),
    }
    codec_class = codec.ImageCodec
    parts = "an AutoencoderKL and two transformers text encoders"
    text: TextContract = FluxText()
    block = DiffusersBlocks(
        lists=("transformer_blocks", "single_transformer_blocks"),
        joins_text=True,
        share=share_tokens,
    )
    makes_videos = False
    rope_axes: tuple[int, ...] = (16, 56, 56)
    """Widths of the released FLUX.1's rotary position embeddings (axes_dims_rope), one for each
    number of a token's id."""
    scheduler = PipelineScheduler(default_shift=ShiftRule(MuLine()))
    guidance_scale = 3.5
    num_inference_steps = 28

    def fitted_config(self, channels: int, text: TextEncoder) -> dict[str, int]:
        if text.embed_dim is None or text.pooled_dim is None:
            raise RecipeError(
                "FLUX is conditioned on two text encoders, the second of which gives one vector "
                'for a whole caption. Set text.kind = "transformers" and add a section '
                "[text.pooled]."
            )
        return {
            "in_channels": channels * _PACK**2,
            "joint_attention_dim": text.embed_dim,
            "pooled_projection_dim": text.pooled_dim,
        }

    def check_config(self, config: Any) -> None:
        axes, head = tuple(config.axes_dims_rope), config.attention_head_dim
        if sum(axes) != head or len(axes) != len(self.rope_axes):
            raise RecipeError(
                f"model.config.axes_dims_rope {list(axes)} adds up to {sum(axes)}, but "
                f"attention_head_dim is {head}. They must be equal; {self.label}'s release has "
                f"{list(self.rope_axes)} and {sum(self.rope_axes)}."
            )
        if config.out_channels not in (None, config.in_channels) or config.patch_size != 1:
            raise RecipeError(
                f"model.config: out_channels {config.out_channels} and patch_size "
                f"{config.patch_size} give another latent than the codec's. Leave them out."
            )

    def defaults(self, section: ModelSection) -> base.Defaults:
        """Return the sampling defaults of FLUX.1-dev, Kontext, schnell or an undistilled model.

        Schnell has no guidance embedding and a scheduler with the static shift 1.
        """
        release = releases.read_release(section)
        shift = self.scheduler.shift(section)
        # Distilled for guidance: sampled without a second pass, so no caption has to be dropped.
        if release.config.get("guidance_embeds"):
            return base.Defaults(
                shift, self.guidance_scale, self.num_inference_steps, caption_dropout=0.0
            )
        # Not distilled: guided by a second pass. Schnell, below, has a static shift instead of a
        # line.
        if section.pretrained is None or isinstance(shift.by, MuLine):
            return base.Defaults(shift, guidance_scale=5.0, num_inference_steps=28)
        return base.Defaults(
            shift, guidance_scale=1.0, num_inference_steps=4, caption_dropout=0.0, max_tokens=256
        )

    def call(
        self, model: Any, noisy_latents: Tensor, timesteps: Tensor, conditioning: base.Conditioning
    ) -> diffusers_family.TransformerCall:
        """Prepare a call of FLUX with the noisy image's tokens, then those of each reference.

        References are numbered from 1.
        """
        dtype, (height, width) = noisy_latents.dtype, noisy_latents.shape[-2:]
        prompt = conditioning["prompt_embeds"].to(dtype)
        images = [noisy_latents]
        images += [picture.to(images[0]) for picture in self.inputs.pictures(conditioning)]
        tokens, ids = pack(images[0]), image_ids(images[0], 0)
        num_noisy = tokens.shape[1]
        for number, image in enumerate(images[1:], 1):
            tokens = torch.cat([tokens, pack(image)], dim=1)
            ids = torch.cat([ids, image_ids(image, number)])
        # The text's tokens have no position: all their ids are 0.
        inputs = {
            "hidden_states": tokens,
            "timestep": timesteps,
            "guidance": diffusers_family.guidance_scales(self, model, conditioning),
            "pooled_projections": conditioning["pooled_prompt_embeds"].to(dtype),
            "encoder_hidden_states": prompt,
            "txt_ids": ids.new_zeros(prompt.shape[1], 3),
            "img_ids": ids,
        }
        return diffusers_family.TransformerCall(
            inputs, lambda out: unpack(out[:, :num_noisy], height, width)
        )


class FluxKontext(Flux):
    """Image-editing family: text and a reference image (`reference_latents`) to an image."""

    label = "FLUX Kontext"
    pipeline_class = "FluxKontextPipeline"
    inputs = base.InputContract(references=("reference",))
    guidance_scale = 2.5


def pack(latents: Tensor) -> Tensor:
    """Pack latents [B, C, 1, H, W] into tokens [B, N, 4 C], each of 2 x 2 latent pixels."""
    num_samples, channels, _, height, width = latents.shape
    rows, columns = height // _PACK, width // _PACK
    # The values of a token go by channel, then by row and column within its patch.
    parts = latents.reshape(num_samples, channels, rows, _PACK, columns, _PACK)
    return parts.permute(0, 2, 4, 1, 3, 5).reshape(num_samples, rows * columns, -1)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    rows, columns = height // _PACK, width // _PACK
    parts = tokens.reshape(len(tokens), rows, columns, -1, _PACK, _PACK)
    return parts.permute(0, 3, 1, 4, 2, 5).reshape(len(tokens), -1, 1, height, width)


def image_ids(latents: Tensor, number: int, patch: int = _PACK) -> Tensor:
    """Return the ids [N, 3] fp32 of an image's tokens: the image's number, row and column."""
    *_, height, width = latents.shape
    rows, columns = (
        torch.arange(size // patch, dtype=torch.float32, device=latents.device)
        for size in (height, width)
    )
    return torch.cartesian_prod(rows.new_full((1,), number), rows, columns)

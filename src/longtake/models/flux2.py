"""FLUX.2 dev and klein: diffusers' `Flux2Transformer2DModel`, called as FLUX.2's pipelines do.

Legend: B batch, C latent channels, H and W latent rows and columns, N tokens, T' those of a text.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtake.config import ModelSection
from longtake.errors import RecipeError
from longtake.flow.shift import ShiftRule
from longtake.models import base, codec, diffusers_family, flux, pretrained, releases
from longtake.models.diffusers_family import DiffusersBlocks
from longtake.models.release_scheduler import PipelineScheduler
from longtake.models.text import TextEncoder
from longtake.models.text_contract import DECODER, TextContract

_TIME_STEP = 10  # between the image and its first reference, and between references
_MAX_REFERENCES = 10
_LAYERS = 3  # of the text encoder, side by side in prompt_embeds

_COMFYUI = (
    *("transformer_blocks.", "single_transformer_blocks.", "x_embedder.", "context_embedder."),
    *("norm_out.linear.", "proj_out."),
)
"""Prefixes of FLUX.2's layers that ComfyUI's `flux_to_diffusers` knows by diffusers' names."""


class Flux2Text(TextContract):
    """How FLUX.2 encodes text: three hidden layers of a decoder; padding is attended to."""

    def encode(
        self, pipeline: Any, captions: list[str], max_tokens: int, pictures: Mapping[str, Tensor]
    ) -> base.Conditioning:
        embeds = pipeline.encode_prompt(captions, max_sequence_length=max_tokens)[0]
        return {"prompt_embeds": embeds}


class Flux2Blocks(DiffusersBlocks):
    """The blocks of FLUX.2: joint blocks, then single ones with the text's tokens first."""

    def arguments_of(self, block: nn.Module) -> Mapping[str, str]:
        if _is_single(block):
            return {"tokens": "hidden_states", "temb": "temb_mod", "rope": "image_rotary_emb"}
        return {**self.arguments, "temb": "temb_mod_img"}

    def outputs_of(self, block: nn.Module) -> tuple[str, ...]:
        return ("tokens",) if _is_single(block) else self.outputs


def _is_single(block: nn.Module) -> bool:
    # Only joint blocks have a feed-forward network for the text.
    return not hasattr(block, "ff_context")


class Flux2(flux.Flux):
    """Family from a text and any reference images to an image; conditioned on `prompt_embeds`.

    A token is one latent pixel, 16 x 16 pixels of the image. The released dev is distilled for
    guidance: the scale is an input, which klein's transformer does not have.
    """

    frozen = pretrained.FrozenParts(
        codec=pretrained.PipelinePart(("AutoencoderKLFlux2",), "vae"),
        text=pretrained.PipelinePart(
            ("Mistral3ForConditionalGeneration", "Qwen3ForCausalLM"), "text_encoder", "tokenizer"
        ),
        has_random_text=False,
    )
    label = "FLUX.2"
    transformer_class, pipeline_class = "Flux2Transformer2DModel", "Flux2Pipeline"
    original_layers: Mapping[str, tuple[str, ...]] = {
        **flux.ORIGINAL_ATTENTION,
        "double_blocks.*.img_mlp.0": ("transformer_blocks.*.ff.linear_in",),
        "double_blocks.*.img_mlp.2": ("transformer_blocks.*.ff.linear_out",),
        "double_blocks.*.txt_mlp.0": ("transformer_blocks.*.ff_context.linear_in",),
        "double_blocks.*.txt_mlp.2": ("transformer_blocks.*.ff_context.linear_out",),
        "single_blocks.*.linear1": ("single_transformer_blocks.*.attn.to_qkv_mlp_proj",),
        "single_blocks.*.linear2": ("single_transformer_blocks.*.attn.to_out",),
    }
    codec_class = codec.PatchedImageCodec
    parts = "an AutoencoderKLFlux2 and a Mistral3 or Qwen3 text encoder"
    text = Flux2Text(layers=_LAYERS, arguments=DECODER)
    inputs = base.InputContract(
        optional=("reference", *(f"reference_{at}" for at in range(2, _MAX_REFERENCES + 1)))
    )
    block = Flux2Blocks(
        joins_text=True,
        lists=("transformer_blocks", "single_transformer_blocks"),
        patch_size=(1, 1, 1),
        lora_targets=(
            *DiffusersBlocks.lora_targets,
            "to_qkv_mlp_proj",
            "single_transformer_blocks.*.attn.to_out",
        ),
        share=flux.share_tokens,
    )
    rope_axes = (32, 32, 32, 32)
    scheduler = PipelineScheduler(default_shift=ShiftRule("flux2"), mu="flux2")
    guidance_scale = 4.0
    num_inference_steps = 50

    def fitted_config(self, channels: int, text: TextEncoder) -> dict[str, int]:
        width = _LAYERS * self.single_embed_dim(text)
        return {"in_channels": channels, "joint_attention_dim": width}

    def pipeline_of(self, parts: Mapping[str, Any], release: releases.Release | None = None) -> str:
        is_klein = type(parts["text_encoder"]).__name__ == "Qwen3ForCausalLM"
        return "Flux2KleinPipeline" if is_klein else self.pipeline_class

    def defaults(self, section: ModelSection) -> base.Defaults:
        """Return the sampling defaults of FLUX.2 dev, klein's base or distilled klein.

        A distilled klein needs no second pass.
        """
        release = releases.read_release(section)
        shift = self.scheduler.shift(section)
        # A configuration may lack the key, whose default in diffusers' class is True.
        if release.config.get("guidance_embeds", True):
            return base.Defaults(
                shift, self.guidance_scale, self.num_inference_steps, caption_dropout=0.0
            )
        if release.pipeline.get("is_distilled"):
            return base.Defaults(shift, 1.0, num_inference_steps=4, caption_dropout=0.0)
        return base.Defaults(shift, self.guidance_scale, self.num_inference_steps)

    def call(
        self, model: Any, noisy_latents: Tensor, timesteps: Tensor, conditioning: base.Conditioning
    ) -> diffusers_family.TransformerCall:
        """Prepare a call of FLUX.2 with the noisy image's tokens, then those of references.

        The references' times are 10, 20, ...
        """
        prompt, (height, width) = conditioning["prompt_embeds"], noisy_latents.shape[-2:]
        images = [noisy_latents, *self.inputs.pictures(conditioning)]
        ids = [flux.image_ids(image, _TIME_STEP * at, patch=1) for at, image in enumerate(images)]
        words = torch.arange(prompt.shape[1], dtype=ids[0].dtype, device=ids[0].device)
        # A token is one latent pixel, so nothing is packed.
        tokens = [image.to(noisy_latents).flatten(2).mT for image in images]
        inputs = {
            "hidden_states": torch.cat(tokens, dim=1),
            "timestep": timesteps,
            "guidance": diffusers_family.guidance_scales(self, model, conditioning),
            "encoder_hidden_states": prompt.to(noisy_latents.dtype),
            "txt_ids": F.pad(words[:, None], (3, 0)),  # [T', 4]: time, row, column, word
            "img_ids": F.pad(torch.cat(ids), (0, 1)),
        }
        num_noisy = height * width
        return diffusers_family.TransformerCall(
            inputs, lambda out: out[:, :num_noisy].mT.unflatten(2, (1, height, width))
        )

    def comfyui_name(self, name: str, *, is_lora: bool) -> str:
        if is_lora and f"{name}.".startswith(_COMFYUI):
            return f"transformer.{name}"
        advice = "train these" if is_lora else "name a file of this model by --like"
        raise RecipeError(
            f"ComfyUI's name of {'the LoRA of ' if is_lora else ''}FLUX.2's {name} is not known. "
            "ComfyUI reads LoRA of its blocks, x_embedder, context_embedder, norm_out and proj_out "
            f"under diffusers' names: {advice}, or export with --format diffusers."
        )

"""Ideogram 4: diffusers' `Ideogram4Transformer2DModel`, in a forward pass without padding.

Legend: B batch, T tokens of a text, N of the image, S both, D width of a text token's features.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longtake.config import ModelSection
from longtake.errors import ModelError, RecipeError
from longtake.flow.shift import ShiftRule
from longtake.models import base, codec, diffusers_family, flux, pretrained, releases
from longtake.models.base import LatentShape
from longtake.models.diffusers_family import DiffusersBlocks
from longtake.models.release_scheduler import PipelineScheduler, scheduler_shift
from longtake.models.text import TextEncoder
from longtake.models.text_contract import DECODER, TextContract
from longtake.parallel.context_parallel import TokenSharing

_NUM_LAYERS = 13  # of the text encoder, whose values of a token the pipeline interleaves
_IMAGE_START = 65536  # position of an image's first row and column, beyond any text


class Ideogram4Text(TextContract):
    """How Ideogram 4 encodes text: thirteen layers of a Qwen3-VL, the chat template's tokens too.

    The pipeline pads in front, which changes no feature, and refuses a text that is too long.
    """

    def encode(
        self, pipeline: Any, captions: list[str], max_tokens: int, pictures: Mapping[str, Tensor]
    ) -> base.Conditioning:
        texts, tokenizer = [], pipeline.tokenizer
        for caption in captions:
            message = [{"role": "user", "content": [{"type": "text", "text": caption}]}]
            ids = tokenizer.apply_chat_template(
                message, add_generation_prompt=True, return_dict=False
            )
            # For an image of no tokens: neither they nor padding have features.
            device = pipeline.text_encoder.device
            embeds = pipeline.encode_prompt(caption, 0, 0, len(ids), device)[0]
            texts.append(embeds[0, :max_tokens])
        return diffusers_family.pad_texts(texts, max_tokens)


class RowsFirstCodec(codec.PatchedImageCodec):
    """Codec of Ideogram 4: the channels of a latent pixel go by row, column and channel.

    The statistics of its release's batch norm do, too.
    """

    def _normalized(self, mode: Tensor) -> Tensor:
        patched = F.pixel_unshuffle(mode, self._patch)
        parts = patched.reshape(len(mode), -1, self._patch**2, *patched.shape[2:])
        ordered = parts.transpose(1, 2).flatten(1, 2)
        mean, deviation = self._statistics(ordered)
        return (ordered - mean) / deviation

    def _denormalized(self, latents: Tensor) -> Tensor:
        mean, deviation = self._statistics(latents)
        raw = latents * deviation + mean
        parts = raw.reshape(len(latents), self._patch**2, -1, *latents.shape[2:])
        return F.pixel_shuffle(parts.transpose(1, 2).flatten(1, 2), self._patch)


class Ideogram4Scheduler(PipelineScheduler):
    """The scheduler of Ideogram 4, to which its pipeline gives sigmas, and which must leave them.

    An exported pipeline samples by them, too, whatever `sampling.shift` is.
    """

    def shift(self, section: ModelSection) -> ShiftRule:
        where, scheduler = str(section.release()), releases.read_release(section).scheduler
        own = scheduler_shift(scheduler, self.mu, where) or ShiftRule(1.0)
        if own != ShiftRule(1.0):
            raise ModelError(
                f"{where}: its scheduler_config.json shifts ({own}) sigmas that the pipeline has "
                "shifted already. Expected shift 1 and use_dynamic_shifting false."
            )
        return self.default_shift

    def build(self, section: ModelSection, rule: ShiftRule, bucket_shift: float) -> Any:
        return super().build(section, self.shift(section), 1.0)


def _forward(
    model: Any,
    sharing: TokenSharing | None,
    *,
    hidden_states: Tensor,
    timestep: Tensor,
    encoder_hidden_states: Tensor,
    known: Tensor | None,
    image_ids: Tensor,
    return_dict: bool = False,
) -> tuple[Tensor]:
    """Compute the transformer's forward pass for texts [B, T, D] before images [B, N, C].

    diffusers' `forward` takes padding along, and a mask of all pairs of tokens. `known` is bool
    [B, T]; None: nothing is padding. `image_ids` are positions [N, 3].
    """
    num_text, num_image = encoder_hidden_states.shape[1], hidden_states.shape[1]
    of_text, of_image = model.embed_image_indicator.weight
    text = model.llm_cond_proj(model.llm_cond_norm(encoder_hidden_states)) + of_text
    tokens = torch.cat([text, model.input_proj(hidden_states) + of_image], dim=1)
    temb = F.silu(model.adaln_proj(model.t_embedding(timestep)[:, None]))
    text_ids = torch.arange(num_text, device=tokens.device)[:, None].expand(-1, 3)
    ids = torch.cat([text_ids.to(image_ids), image_ids + _IMAGE_START])
    rope = tuple(each.to(tokens.dtype) for each in model.rotary_emb(ids[None]))
    mask = None
    if known is not None:
        mask = torch.cat([known, known.new_ones(len(known), num_image)], dim=1)[:, None, None]
    if sharing is not None:
        sharing.begin(tokens.shape[1])
        tokens, rope = sharing.cut(tokens, 1), tuple(sharing.cut(each, 1) for each in rope)
        mask = mask if mask is None else sharing.cut(mask, 3)
    # As in diffusers' forward passes: the function is the one that `call_by` has set.
    recomputes = torch.is_grad_enabled() and model.gradient_checkpointing
    for block in model.layers:
        run = partial(model._gradient_checkpointing_func, block) if recomputes else block
        tokens = run(tokens, mask, rope, temb)
    velocity = model.final_layer(tokens, conditioning=temb)
    if sharing is not None:
        velocity = sharing.gather(velocity, 1)
    return (velocity[:, num_text:],)


def in_dtype_of(layer: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0].to(layer.weight.dtype),)


def share_tokens(model: Any, sharing: TokenSharing) -> None:
    """Split text and image, as one row of tokens, between ranks (context parallelism)."""
    model.forward = partial(_forward, model, sharing)
    for block in model.layers:
        diffusers_family.share_attention(block.attention, sharing)


class Ideogram4(diffusers_family.DiffusersFamily):
    """Text-to-image family, conditioned on `prompt_embeds` [B, T, D] and `prompt_length`.

    The transformer gets 1 - sigma, and predicts latents - noise. Guidance's second pass, over the
    image alone, is another transformer of the release, which no run trains.
    """

    frozen = pretrained.FrozenParts(
        codec=pretrained.PipelinePart(("AutoencoderKLFlux2",), "vae", codec_class=RowsFirstCodec),
        text=pretrained.PipelinePart(("Qwen3VLModel",), "text_encoder", "tokenizer"),
        has_random_text=False,
    )
    label = "Ideogram 4"
    transformer_class, pipeline_class = "Ideogram4Transformer2DModel", "Ideogram4Pipeline"
    original_layers: Mapping[str, tuple[str, ...]] = {
        "layers.*.attention.qkv": tuple(f"layers.*.attention.to_{name}" for name in "qkv"),
        "layers.*.attention.o": ("layers.*.attention.to_out.0",),
    }
    codec_class = RowsFirstCodec
    parts = "an AutoencoderKLFlux2 and a Qwen3-VL"
    unconditional = "unconditional_transformer"
    copied_parts = ("unconditional_transformer",)
    text = Ideogram4Text(has_lengths=True, layers=_NUM_LAYERS, arguments=DECODER)
    block = DiffusersBlocks(
        lists=("layers",),
        patch_size=(1, 1, 1),
        arguments={"tokens": "hidden_states", "temb": "adaln_input", "rope": "image_rotary_emb"},
        outputs=("tokens",),
        joins_text=True,
        attentions=("attention",),
        lora_targets=(*DiffusersBlocks.lora_targets, "w1", "w2", "w3"),
        share=share_tokens,
    )
    makes_videos = False
    time_range = (1.0, 0.0)
    negates = True
    # Of an image, Open-Sora's factor has the logarithm that the pipeline adds to its mean.
    scheduler = Ideogram4Scheduler(default_shift=ShiftRule("opensora", logit_std=1.5))

    def fitted_config(self, channels: int, text: TextEncoder) -> dict[str, int]:
        width = _NUM_LAYERS * self.single_embed_dim(text)
        return {"in_channels": channels, "llm_features_dim": width}

    def adapt(
        self, model: Any, section: ModelSection, shapes: Sequence[LatentShape], text: TextEncoder
    ) -> None:
        # Times stay fp32 until they are embedded: rounded to bf16, most would be another's.
        model.t_embedding.mlp_in.register_forward_pre_hook(in_dtype_of)
        model.forward = partial(_forward, model, None)

    def defaults(self, section: ModelSection) -> base.Defaults:
        """Return the sampling defaults; a model from scratch is guided by itself, as others are."""
        shift = self.scheduler.shift(section)
        if section.pretrained is None:
            return base.Defaults(shift)
        return base.Defaults(
            shift, 7.0, num_inference_steps=48, caption_dropout=0.0, end_guidance_scale=3.0
        )

    def call(
        self, model: Any, noisy_latents: Tensor, timesteps: Tensor, conditioning: base.Conditioning
    ) -> diffusers_family.TransformerCall:
        height, width = noisy_latents.shape[-2:]
        prompt, known = diffusers_family.cut_texts(
            conditioning["prompt_embeds"], conditioning["prompt_length"]
        )
        inputs = {
            "hidden_states": noisy_latents.flatten(2).mT,
            "timestep": timesteps,
            "encoder_hidden_states": prompt.to(noisy_latents.dtype),
            "known": known,
            "image_ids": flux.image_ids(noisy_latents, 0, patch=1),
        }
        return diffusers_family.TransformerCall(
            inputs, lambda out: out.mT.unflatten(2, (1, height, width))
        )

    def comfyui_name(self, name: str, *, is_lora: bool) -> str:
        raise RecipeError(
            f"ComfyUI's files of Ideogram 4 join layers that are apart here, such as {name}: "
            "export with --format diffusers."
        )

"""Krea 2: diffusers' `Krea2Transformer2DModel`, called as its pipeline does.

Legend: B batch, T' tokens of a text, L layers of the text encoder, D its width, N tokens of an
image.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from longtake.config import ModelSection
from longtake.errors import RecipeError
from longtake.flow.shift import MuLine, ShiftRule
from longtake.models import base, codec, diffusers_family, flux, pretrained, releases
from longtake.models.base import LatentShape
from longtake.models.diffusers_family import DiffusersBlocks
from longtake.models.release_scheduler import PipelineScheduler
from longtake.models.text import TextEncoder
from longtake.models.text_contract import DECODER, TextContract
from longtake.parallel.context_parallel import TokenSharing

_LAYERS = tuple(range(2, 36, 3))
"""Hidden states of the text encoder, one of each side by side in `prompt_embeds`: those that the
pipeline takes unless its release names others."""
_PACK = 2  # latent rows and columns of one token
_DISTILLED_MU = 1.15  # of Turbo at every size, in place of the scheduler's line


class Krea2Text(TextContract):
    """How Krea 2 encodes text: twelve hidden states of a Qwen3-VL for each token of a caption.

    The pipeline pads captions before the template's end. A text's tokens have no positions in the
    transformer, so the padding can stand behind them as well, or be left out.
    """

    def encode(
        self, pipeline: Any, captions: list[str], max_tokens: int, pictures: Mapping[str, Tensor]
    ) -> base.Conditioning:
        embeds, masks = pipeline.encode_prompt(captions, max_sequence_length=max_tokens)
        texts = [text[mask].flatten(1) for text, mask in zip(embeds, masks, strict=True)]
        return diffusers_family.pad_texts(texts, max_tokens)


def _share_tokens(model: Any, sharing: TokenSharing) -> None:
    """Split the tokens of text and image, as one row, between ranks (context parallelism).

    The transformer fuses the layers of a text before it joins text and image, and separates them
    behind the last block by the whole text's length: both happen on each rank.
    """

    def begin(_: nn.Module, args: Any, inputs: dict[str, Any]) -> None:
        names = ("encoder_hidden_states", "hidden_states")
        sharing.begin(sum(inputs[name].shape[1] for name in names))

    def cut_mask(_: nn.Module, args: Any) -> Any:
        *others, mask = args
        return args if mask is None else (*others, sharing.cut(mask, 3))

    def cut_tokens(_: nn.Module, args: Any) -> Any:
        tokens, *others = args
        return sharing.cut(tokens, 1), *others

    model.register_forward_pre_hook(begin, with_kwargs=True)
    diffusers_family.cut_outputs(model.rotary_emb, sharing, 0)
    for block in model.transformer_blocks:
        block.register_forward_pre_hook(cut_mask)
        diffusers_family.share_attention(block.attn, sharing)
    model.transformer_blocks[0].register_forward_pre_hook(cut_tokens)
    model.transformer_blocks[-1].register_forward_hook(
        lambda _block, _args, part: sharing.gather(part, 1)
    )


class Krea2Scheduler(PipelineScheduler):
    """The scheduler of Krea 2, to which the pipeline of Turbo gives one mu at every size."""

    def shift(self, section: ModelSection) -> ShiftRule:
        rule = super().shift(section)
        if _is_distilled(section) and isinstance(rule.by, MuLine):
            return dataclasses.replace(rule, by=math.exp(_DISTILLED_MU))
        return rule


def _is_distilled(section: ModelSection) -> bool:
    return bool(releases.read_release(section).pipeline.get("is_distilled"))


class Krea2(diffusers_family.DiffusersFamily):
    """Text-to-image family, conditioned on `prompt_embeds` [B, T', L D] and `prompt_length`.

    Its velocity has longtake's sign (noise - latents), and its timestep is sigma.
    """

    frozen = pretrained.FrozenParts(
        codec=pretrained.PipelinePart(("AutoencoderKLQwenImage",), "vae"),
        text=pretrained.PipelinePart(
            ("Qwen3VLModel", "Qwen3VLForConditionalGeneration"), "text_encoder", "tokenizer"
        ),
        has_random_text=False,
    )
    label = "Krea 2"
    transformer_class, pipeline_class = "Krea2Transformer2DModel", "Krea2Pipeline"
    codec_class = codec.AutoencoderCodec
    parts = "an AutoencoderKLQwenImage and a Qwen3-VL"
    text = Krea2Text(
        layers=len(_LAYERS),
        has_lengths=True,
        template_tokens=34,  # those that the pipeline drops; text.max_tokens counts the other 5
        arguments=DECODER,
    )
    block = DiffusersBlocks(
        joins_text=True,
        arguments={"tokens": "hidden_states", "temb": "temb", "rope": "image_rotary_emb"},
        outputs=("tokens",),
        lora_targets=(*DiffusersBlocks.lora_targets, "to_gate"),
        share=_share_tokens,
    )
    makes_videos = False
    scheduler = Krea2Scheduler(default_shift=ShiftRule(MuLine(max_tokens=6400)))
    guidance_scale = 5.5  # the pipeline's 4.5, to which it adds 1
    num_inference_steps = 28

    def fitted_config(self, channels: int, text: TextEncoder) -> dict[str, int]:
        return {
            "in_channels": channels * _PACK**2,
            "text_hidden_dim": self.single_embed_dim(text),
        }

    def adapt(
        self, model: Any, section: ModelSection, shapes: Sequence[LatentShape], text: TextEncoder
    ) -> None:
        index = releases.read_release(section).pipeline
        expected = {"text_encoder_select_layers": list(_LAYERS), "patch_size": _PACK}
        for name, value in expected.items():
            if (found := index.get(name) or value) != value:
                raise RecipeError(
                    f"{section.release()}: its model_index.json has {name} {found}. longtake "
                    f"trains Krea 2 with {value}; name a release that has it."
                )
        if model.config.num_text_layers != len(_LAYERS):
            raise RecipeError(
                f"model.config.num_text_layers is {model.config.num_text_layers}, but a token of "
                f"a text has {len(_LAYERS)} hidden states. Leave it out, or set it to that."
            )

    def defaults(self, section: ModelSection) -> base.Defaults:
        """Return the sampling defaults of Krea 2, or of Turbo, which needs no second pass."""
        shift = self.scheduler.shift(section)
        if _is_distilled(section):
            return base.Defaults(shift, 1.0, num_inference_steps=8, caption_dropout=0.0)
        return base.Defaults(shift, self.guidance_scale, self.num_inference_steps)

    def call(
        self, model: Any, noisy_latents: Tensor, timesteps: Tensor, conditioning: base.Conditioning
    ) -> diffusers_family.TransformerCall:
        """Prepare a call of Krea 2, whose text tokens all have the position 0, 0, 0."""
        height, width = noisy_latents.shape[-2:]
        prompt, mask = diffusers_family.cut_texts(
            conditioning["prompt_embeds"], conditioning["prompt_length"]
        )
        ids = flux.image_ids(noisy_latents, 0)
        texts = prompt.to(noisy_latents.dtype)
        inputs = {
            "hidden_states": flux.pack(noisy_latents),
            "encoder_hidden_states": texts.reshape(*texts.shape[:2], len(_LAYERS), -1),
            "timestep": timesteps,
            "position_ids": torch.cat([ids.new_zeros(prompt.shape[1], 3), ids]),
            "encoder_attention_mask": mask,
        }
        return diffusers_family.TransformerCall(inputs, lambda out: flux.unpack(out, height, width))

    def comfyui_name(self, name: str, *, is_lora: bool) -> str:
        if is_lora:
            return f"transformer.{name}"
        raise RecipeError(
            f"ComfyUI's file of a whole Krea 2 has other names and shapes than {name}; it reads "
            "LoRA under diffusers' names. Train LoRA, name such a file of this model by --like, or "
            "export with --format diffusers."
        )

"""LTX-2: diffusers' `LTX2VideoTransformer3DModel`, which makes video and audio.

Each attends to the other. With `model.audio = "off"` they are isolated, as in the passes that the
pipeline makes for modality guidance: the video then depends on no audio, and one token of zeros
stands for it, so that its blocks take next to no time.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from longtake.models.text_contract import TextContract
from longtake.parallel.context_parallel import TokenSharing

_CONNECTORS = "connectors"
_I2V = "LTX2ImageToVideoPipeline"


@dataclass(frozen=True)
class LTX2Text(TextContract):
    """How LTX-2 encodes text: all hidden layers of a Gemma 3, joined by its connectors."""

    with_audio: bool = False
    """True to return the embeddings of the audio's own connector too."""

    def encode(
        self, pipeline: Any, captions: list[str], max_tokens: int, pictures: Mapping[str, Tensor]
    ) -> base.Conditioning:
        """Encode captions one by one, as the 49 hidden layers of each take much memory."""
        embeds = []
        for caption in captions:
            layers, mask, *_ = pipeline.encode_prompt(
                [caption], do_classifier_free_guidance=False, max_sequence_length=max_tokens
            )
            side = pipeline.tokenizer.padding_side
            embeds.append(pipeline.connectors(layers, mask, padding_side=side)[:2])
        video, audio = map(torch.cat, zip(*embeds, strict=True))
        of_audio = {"audio_prompt_embeds": audio} if self.with_audio else {}
        return {"prompt_embeds": video, **of_audio}

    def outline(self, encoders: Mapping[str, nn.Module], max_tokens: int) -> base.Conditioning:
        config: Any = encoders[_CONNECTORS].config
        streams = {"prompt_embeds": "video"}
        streams |= {"audio_prompt_embeds": "audio"} if self.with_audio else {}
        outlined = {}
        for name, stream in streams.items():
            heads = config[f"{stream}_connector_num_attention_heads"]
            width = heads * config[f"{stream}_connector_attention_head_dim"]
            outlined[name] = torch.empty(1, max_tokens, width, device="meta")
        return outlined

    def run(self, encoders: Mapping[str, nn.Module], max_tokens: Mapping[str, int]) -> None:
        for folder, length in max_tokens.items():
            ids = torch.ones(1, length, dtype=torch.long)
            mask = torch.ones_like(ids)
            output = encoders[folder](input_ids=ids, attention_mask=mask, output_hidden_states=True)
            layers = torch.stack(output.hidden_states, dim=-1).flatten(2, 3)
            encoders[_CONNECTORS](layers, mask)


class LTX2Inputs(base.InputContract):
    """The inputs of LTX-2 beyond text: a first frame, which image-to-video releases require."""

    def names(self, section: ModelSection) -> tuple[tuple[str, ...], tuple[str, ...]]:
        named = releases.read_release(section).pipeline.get("_class_name")
        return ("first",) if named == _I2V else (), ("first",)

    def given_frames(self, latents: Tensor, conditioning: base.Conditioning) -> Tensor | None:
        return conditioning.get("first_latents")


def _share_tokens(model: Any, sharing: TokenSharing) -> None:
    """Split a video's tokens between ranks, each of which attends to the whole text."""
    dims = {"hidden_states": 1, "video_coords": 2, "timestep": 1}
    diffusers_family.share_inputs(model, sharing, dims, ["hidden_states"])
    for block in model.transformer_blocks:
        diffusers_family.share_attention(block.attn1, sharing)


_AUDIO_PARTS = (
    pretrained.PipelinePart(("AutoencoderKLLTX2Audio",), "audio_vae", module="diffusers"),
    pretrained.PipelinePart(
        ("LTX2Vocoder", "LTX2VocoderWithBWE"), "vocoder", module="diffusers.pipelines.ltx2.vocoder"
    ),
)
_AUDIO_STREAM = (  # weights of the audio alone; "[!t]" leaves out the attention of the video to it
    "audio_*",
    "av_cross_attn_audio_*",
    "*.audio_[!t]*",
    "*.video_to_audio_*",
)


def _lora_targets(attentions: Sequence[str]) -> tuple[str, ...]:
    # Plain "to_q" and so on would also match the attentions that are not trained.
    layers = DiffusersBlocks.lora_targets
    return tuple(f"{attention}.{layer}" for attention in attentions for layer in layers)


class LTX2(diffusers_family.DiffusersFamily):
    """Text-to-video family, also from a first frame; conditioned on its connectors' output.

    Its velocity has longtake's sign (noise - latents); its timesteps are 1000 sigma, and 0 for the
    tokens of a given frame. Positions in time are seconds.
    """

    frozen = pretrained.FrozenParts(
        codec=pretrained.PipelinePart(("AutoencoderKLLTX2Video",), "vae"),
        text=pretrained.PipelinePart(
            ("Gemma3ForConditionalGeneration",), "text_encoder", "tokenizer"
        ),
        further=(
            pretrained.PipelinePart(
                ("LTX2TextConnectors",), _CONNECTORS, module="diffusers.pipelines.ltx2.connectors"
            ),
        ),
        has_random_text=False,
    )
    label = "LTX-2"
    transformer_class, pipeline_class = "LTX2VideoTransformer3DModel", "LTX2Pipeline"
    codec_class = codec.LTX2Codec
    parts = "an AutoencoderKLLTX2Video and a Gemma 3"
    copied_parts = ("audio_vae", "vocoder")
    text = LTX2Text()
    inputs = LTX2Inputs(takes_fps=True, has_audio=True)
    block = DiffusersBlocks(
        patch_size=(1, 1, 1),
        lora_targets=_lora_targets(("attn1", "attn2")),
        arguments={
            **DiffusersBlocks().arguments,
            "rope": "video_rotary_emb",
            "audio": "audio_hidden_states",
        },
        outputs=("tokens", "audio"),
        attentions=("attn1", "audio_attn1", "attn2", "audio_attn2"),
        untrained=(  # the audio, and what joins it with the video
            "audio_*",
            "av_cross_attn_*",
            "*.audio_*",
            "*.video_to_audio_*",
            "*.video_a2v_*",
        ),
        untrained_because='They are of the audio, which is trained with model.audio = "train".',
        share=_share_tokens,
    )
    time_range = (0.0, 1000.0)
    scheduler = PipelineScheduler(
        options={"use_dynamic_shifting": True},
        default_shift=ShiftRule(MuLine(1024, 0.95, 4096, 2.05), 0.1),
    )
    guidance_scale = 3.0
    max_tokens = 1024
    num_inference_steps = 30

    def with_audio(self, section: ModelSection) -> base.Family:
        if not section.uses_audio:
            return self
        made, trains = copy.copy(self), section.audio == "train"
        made.frozen = replace(self.frozen, codec=replace(self.frozen.codec, audio=_AUDIO_PARTS))
        made.text = LTX2Text(with_audio=True, version=2)
        attentions = (*self.block.attentions, "audio_to_video_attn", "video_to_audio_attn")
        trained = attentions if trains else ("attn1", "attn2", "audio_to_video_attn")
        made.block = replace(
            self.block,
            attentions=attentions,
            lora_targets=_lora_targets(trained),
            untrained=() if trains else _AUDIO_STREAM,
            share=None,
        )
        return made

    def defaults(self, section: ModelSection) -> base.Defaults:
        # The share of Lightricks' own trainer; see `stretched_logit_normal`.
        return replace(super().defaults(section), uniform_share=0.1)

    def fitted_config(self, channels: int, text: TextEncoder) -> dict[str, int]:
        parts = text.pipeline_parts()
        if text.embed_dim is None or _CONNECTORS not in parts:
            raise RecipeError(
                f"{self.label} is conditioned on a Gemma 3 and on the {_CONNECTORS} of its "
                'release. Set text.kind = "transformers", and name the release in text.pretrained.'
            )
        registers = parts[_CONNECTORS].config.video_connector_num_learnable_registers or 1
        if text.max_tokens % registers:
            nearest = max(1, round(text.max_tokens / registers)) * registers
            raise RecipeError(
                f"text.max_tokens is {text.max_tokens}, but {self.label} fills captions with "
                f"{registers} learnt tokens, again and again. Set a multiple of {registers}, such "
                f"as {nearest}; its pipeline's is 1024."
            )
        return {
            "in_channels": channels,
            "out_channels": channels,
            "caption_channels": text.embed_dim,
        }

    def check_config(self, config: Any) -> None:
        if (config.patch_size, config.patch_size_t) != (1, 1):
            raise RecipeError(
                f"The transformer's patch_size and patch_size_t are {config.patch_size} and "
                f"{config.patch_size_t}; longtake trains {self.label} with 1 and 1, as released."
            )

    def call(
        self, model: Any, noisy_latents: Tensor, timesteps: Tensor, conditioning: base.Conditioning
    ) -> diffusers_family.TransformerCall:
        noisy_latents = self.inputs.with_given(noisy_latents, conditioning)
        clips, _, *sizes = noisy_latents.shape
        text = conditioning["prompt_embeds"].to(noisy_latents)
        free = self.inputs.loss_weights(noisy_latents, conditioning)
        video_timesteps = timesteps
        # Given frames are clean: their tokens are at timestep 0.
        if free is not None:
            video_timesteps = free.flatten(1).to(timesteps) * timesteps[:, None]
        inputs = {
            **_audio_inputs(model.config, text, timesteps, conditioning),
            "hidden_states": noisy_latents.flatten(2).mT,
            "encoder_hidden_states": text,
            "timestep": video_timesteps,
            "sigma": timesteps,
            "video_coords": model.rope.prepare_video_coords(
                clips, *sizes, noisy_latents.device, fps=conditioning["fps"][:, None, None]
            ),
            "use_cross_timestep": True,
        }
        return diffusers_family.TransformerCall(
            inputs, lambda tokens: tokens.mT.unflatten(2, tuple(sizes))
        )

    def pipeline_of(self, parts: Mapping[str, Any], release: releases.Release | None = None) -> str:
        is_image_to_video = release is not None and release.pipeline.get("_class_name") == _I2V
        return _I2V if is_image_to_video else self.pipeline_class

    def comfyui_name(self, name: str, *, is_lora: bool) -> str:
        return f"{'diffusion_model.' if is_lora else ''}{original_name(name)}"


def _audio_inputs(
    config: Any, text: Tensor, timesteps: Tensor, conditioning: base.Conditioning
) -> dict[str, Any]:
    """Return the transformer's inputs of the audio: a token of zeros apart where there is none."""
    if "audio" in conditioning:
        audio = conditioning["audio"].to(text)
        return {
            "audio_hidden_states": audio,
            "audio_encoder_hidden_states": conditioning["audio_prompt_embeds"].to(text),
            "audio_timestep": conditioning["audio_sigmas"] * 1000,
            "audio_num_frames": audio.shape[1],
        }
    width = config.caption_channels
    if not config.use_prompt_embeddings:  # LTX-2.3
        width = config.audio_num_attention_heads * config.audio_attention_head_dim
    return {
        "audio_hidden_states": text.new_zeros(len(text), 1, config.audio_in_channels),
        "audio_encoder_hidden_states": text.new_zeros(len(text), 1, width),
        "audio_timestep": timesteps,
        "audio_num_frames": 1,
        "isolate_modalities": True,
    }


# The inverse of diffusers' `_convert_non_diffusers_ltx2_lora_to_diffusers`.
_AROUND_BLOCKS = {
    "proj_in": "patchify_proj",
    "audio_proj_in": "audio_patchify_proj",
    "av_cross_attn_video_scale_shift": "av_ca_video_scale_shift_adaln_single",
    "av_cross_attn_video_a2v_gate": "av_ca_a2v_gate_adaln_single",
    "av_cross_attn_audio_scale_shift": "av_ca_audio_scale_shift_adaln_single",
    "av_cross_attn_audio_v2a_gate": "av_ca_v2a_gate_adaln_single",
    "audio_prompt_adaln": "audio_prompt_adaln_single",
    "prompt_adaln": "prompt_adaln_single",
    "time_embed": "adaln_single",
    "audio_time_embed": "audio_adaln_single",
}
_IN_BLOCKS = {
    "video_a2v_cross_attn_scale_shift_table": "scale_shift_table_a2v_ca_video",
    "audio_a2v_cross_attn_scale_shift_table": "scale_shift_table_a2v_ca_audio",
    "norm_q": "q_norm",
    "norm_k": "k_norm",
}


def original_name(name: str) -> str:
    """Return a parameter's name in the LTX-2 files that Lightricks releases."""
    first, *others = name.split(".")
    return ".".join([_AROUND_BLOCKS.get(first, first), *(_IN_BLOCKS.get(n, n) for n in others)])

"""Wan 2.1 and 2.2: diffusers' `WanTransformer3DModel` at any size, from text and given frames.

Wan 2.1 and A14B get given frames as channels beside the noisy ones: a mask (4), and the latents of
a video that is grey elsewhere (16). TI2V-5B gets them in the place of noisy frames, at time 0. The
first frame may be several: a video that is continued.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from longtake.config import Bucket, ModelSection
from longtake.models import base, diffusers_family, pretrained, releases
from longtake.models.codec import AutoencoderCodec, Codec, encode_videos
from longtake.models.diffusers_family import DiffusersBlocks
from longtake.models.release_scheduler import PipelineScheduler
from longtake.models.text import TextEncoder
from longtake.models.text_contract import TextContract
from longtake.parallel.context_parallel import TokenSharing

_IMAGE_TO_VIDEO = "WanImageToVideoPipeline"
_MASK_CHANNELS = 4  # frames of pixels that one of latents stands for


@dataclass(frozen=True)
class WanInputs(base.InputContract):
    """The inputs of Wan beyond text: one or several first frames of the video, and a last one."""

    def further_channels(self, section: ModelSection) -> int:
        config = releases.read_release(section).config
        takes = int(config.get("in_channels") or 0)
        return takes - int(config.get("out_channels") or takes)

    def names(self, section: ModelSection) -> tuple[tuple[str, ...], tuple[str, ...]]:
        release = releases.read_release(section)
        if self.further_channels(section):
            needs_last = release.config.get("pos_embed_seq_len") is not None
            return ("first", "last") if needs_last else ("first",), ("first", "last")
        return (), ("first",) if release.pipeline.get("expand_timesteps") else ()

    def encode(
        self, codec: Codec, text: TextEncoder, pixels: Mapping[str, Tensor], bucket: Bucket
    ) -> base.Conditioning:
        """Encode given frames to `first_latents` and, for releases with CLIP, `first_embeds`.

        Given are first frames, and perhaps a last one. `first_latents` is [B, 20, F, h, w] with the
        mask, of TI2V-5B [B, C, F', h, w].
        """
        # The given frames of TI2V-5B, whose autoencoder is residual, replace noisy ones.
        is_residual = any(getattr(each.config, "is_residual", False) for each in codec.modules())
        if "first" not in pixels or is_residual:
            return super().encode(codec, text, pixels, bucket)
        others = {name: each for name, each in pixels.items() if name not in ("first", "last")}
        given = [name for name in ("first", "last") if name in pixels]
        frames = {name: pixels[name].float() / 127.5 - 1 for name in given}
        first, *last = frames.values()
        num_grey = bucket.num_frames - sum(each.shape[2] for each in frames.values())
        grey = first.new_zeros(1).expand(len(first), 3, num_grey, bucket.height, bucket.width)
        latents = encode_videos(codec, torch.cat([first, grey, *last], dim=2))
        mask = torch.zeros_like(latents[:, :_MASK_CHANNELS])
        # The first latent frame stands for one pixel frame, each later one for four.
        mask[:, :, : 1 + (first.shape[2] - 1) // _MASK_CHANNELS] = 1
        if last:  # the last of the pixel frames in the last latent frame
            mask[:, -1, -1] = 1
        encoded = {"first_latents": torch.cat([mask, latents], dim=1)}
        encoded |= super().encode(codec, text, others, bucket)
        if "image_encoder" not in text.pipeline_parts():
            return encoded
        # CLIP's last layer but one, [B, tokens, D], of a video's first frame.
        embeds = [
            diffusers_family.embed_pictures(
                text,
                pixels[name],
                lambda pipeline, image: pipeline.encode_image(image),
                further_tokens=1,
            )
            for name in given
        ]
        return encoded | {"first_embeds": torch.cat(embeds, dim=1).to(latents.device)}

    def given_frames(self, latents: Tensor, conditioning: base.Conditioning) -> Tensor | None:
        """Return the latents of TI2V-5B's given first frames, which replace noisy ones.

        None for other kinds, whose `first_latents` have mask channels, too.
        """
        first = conditioning.get("first_latents")
        return first if first is not None and first.shape[1] == latents.shape[1] else None


class WanBlocks(DiffusersBlocks):
    """The blocks of Wan's transformer, one of whose arguments is the patch."""

    def num_tokens(self, model: Any, shape: base.LatentShape) -> int:
        patch: tuple[int, ...] = model.config.patch_size
        return math.prod(shape[1:]) // math.prod(patch)


def _share_tokens(model: Any, sharing: TokenSharing) -> None:
    """Split a video's tokens between ranks, each of which attends to the whole text."""

    def cut_timesteps(
        _model: nn.Module, args: Any, inputs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        # One timestep for each sample, which all ranks need; TI2V-5B has one for each token.
        if inputs["timestep"].ndim == 1:
            return args, inputs
        sharing.begin(inputs["timestep"].shape[1])
        return args, inputs | {"timestep": sharing.cut(inputs["timestep"], 1)}

    def cut_patches(_module: nn.Module, _args: object, patches: Tensor) -> Tensor:
        tokens = patches.flatten(2)
        sharing.begin(tokens.shape[2])
        return sharing.cut(tokens, 2)

    model.register_forward_pre_hook(cut_timesteps, with_kwargs=True)
    model.patch_embedding.register_forward_hook(cut_patches)
    diffusers_family.cut_outputs(model.rope, sharing, 1)
    for block in model.blocks:
        diffusers_family.share_attention(block.attn1, sharing)
    # Gather after the last layer that works token by token, whose tokens are narrow.
    model.proj_out.register_forward_hook(lambda _module, _args, part: sharing.gather(part, 1))


class Wan(diffusers_family.DiffusersFamily):
    """Family from text, with or without first frames, to video; conditioned on `prompt_embeds`.

    Its velocity has longtake's sign (noise - latents); its timesteps are 1000 sigma.
    """

    frozen = pretrained.FrozenParts(
        codec=pretrained.PipelinePart(("AutoencoderKLWan",), "vae"),
        text=pretrained.PipelinePart(("UMT5EncoderModel",), "text_encoder", "tokenizer"),
        further=(
            pretrained.PipelinePart(
                ("CLIPVisionModel",), "image_encoder", "image_processor", "CLIPImageProcessor"
            ),
        ),
    )
    label = "Wan"
    transformer_class, pipeline_class = "WanTransformer3DModel", "WanPipeline"
    codec_class = AutoencoderCodec
    parts = "an autoencoder and a transformers text encoder"
    text = TextContract(by_length=True)
    inputs = WanInputs(continues=("first",))
    block = WanBlocks(
        lists=("blocks",),
        arguments={**DiffusersBlocks().arguments, "rope": "rotary_emb"},
        outputs=("tokens",),
        attentions=("attn1", "attn2"),
        share=_share_tokens,
    )
    channel_ratios: ClassVar[tuple[float, ...]] = (36 / 16,)
    time_range = (0.0, 1000.0)
    # With a FlowMatchEulerDiscreteScheduler WanPipeline would shift twice.
    scheduler = PipelineScheduler(
        "UniPCMultistepScheduler",
        {"prediction_type": "flow_prediction", "use_flow_sigmas": True},
        mu=None,
    )

    def patch(self, section: ModelSection) -> tuple[int, ...]:
        return base.read_patch(section, self.block.patch_size)

    def fitted_config(self, channels: int, text: TextEncoder) -> dict[str, int]:
        width = self.single_embed_dim(text)
        return {"in_channels": channels, "out_channels": channels, "text_dim": width}

    def pipeline_of(self, parts: Mapping[str, Any], release: releases.Release | None = None) -> str:
        named = None if release is None else release.pipeline.get("_class_name")
        is_from_frame = "image_encoder" in parts if release is None else named == _IMAGE_TO_VIDEO
        return _IMAGE_TO_VIDEO if is_from_frame else self.pipeline_class

    def call(
        self, model: Any, noisy_latents: Tensor, timesteps: Tensor, conditioning: base.Conditioning
    ) -> diffusers_family.TransformerCall:
        text = conditioning["prompt_embeds"].to(noisy_latents.dtype)
        free = self.inputs.loss_weights(noisy_latents, conditioning)
        if free is not None:
            noisy_latents = self.inputs.with_given(noisy_latents, conditioning)
            _, rows, columns = model.config.patch_size
            # A timestep for each token: those of given frames, which are clean, are at time 0.
            free = free[:, 0, :, ::rows, ::columns].flatten(1).to(timesteps)
            timesteps = free * timesteps[:, None]
        elif "first_latents" in conditioning:
            first = conditioning["first_latents"].to(noisy_latents)
            noisy_latents = torch.cat([noisy_latents, first], dim=1)
        inputs = {
            "hidden_states": noisy_latents,
            "timestep": timesteps,
            "encoder_hidden_states": text,
        }
        if "first_embeds" in conditioning:
            embeds = conditioning["first_embeds"].to(noisy_latents.dtype)
            if model.config.pos_embed_seq_len is not None:  # first and last as two samples
                embeds = embeds.reshape(2 * len(embeds), -1, embeds.shape[2])
            inputs["encoder_hidden_states_image"] = embeds
        return diffusers_family.TransformerCall(inputs, lambda velocity: velocity)

    def comfyui_name(self, name: str, *, is_lora: bool) -> str:
        return f"{'diffusion_model.' if is_lora else ''}{original_name(name)}"


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
    # Names are replaced in one pass, because norm2 and norm3 change places, and only between dots.
    whole_parts = rf"(?<![^.])({'|'.join(map(re.escape, names))})(?![^.])"
    return re.sub(whole_parts, lambda part: names[part[0]], name)

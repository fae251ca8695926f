"""HunyuanVideo 1.5: diffusers' `HunyuanVideo15Transformer3DModel`, from text and a first frame.

Legend: B batch, C latent channels, F, h, w latent frames, rows and columns, N tokens of the video,
T tokens of a text, D width.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtake.config import Bucket, ModelSection
from longtake.errors import RecipeError
from longtake.models import base, codec, diffusers_family, pretrained, releases
from longtake.models.base import LatentShape
from longtake.models.diffusers_family import DiffusersBlocks
from longtake.models.recognition import HUNYUAN_I2V, makes_from_frame
from longtake.models.release_scheduler import PipelineScheduler
from longtake.models.text import TextEncoder, TransformersText
from longtake.models.text_contract import DECODER, TextContract, text_width
from longtake.parallel.context_parallel import TokenSharing

_GLYPH_TOKENS = 256  # length that the pipelines have for ByT5
_TEMPLATE_TOKENS = 108  # before a caption, which the pipelines drop


class HunyuanText(TextContract):
    """How HunyuanVideo 1.5 encodes text: by a Qwen2.5-VL, and a ByT5 for the words in quotes."""

    def prepare(self, parts: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**parts, "vae": _SizesOfAutoencoder()}

    def encode(
        self, pipeline: Any, captions: list[str], max_tokens: int, pictures: Mapping[str, Tensor]
    ) -> base.Conditioning:
        # encode_prompt has no argument for the length; it reads this attribute.
        pipeline.tokenizer_max_length = max_tokens
        encoded = pipeline.encode_prompt(captions, batch_size=len(captions))
        text, counts, glyphs, glyph_counts = encoded
        texts, words = _unpadded(text, counts), _unpadded(glyphs, glyph_counts)
        padded = diffusers_family.pad_texts(texts, max_tokens)
        return padded | diffusers_family.pad_texts(words, _GLYPH_TOKENS, "glyph")

    def outline(self, encoders: Mapping[str, nn.Module], max_tokens: int) -> base.Conditioning:
        width = text_width(encoders["text_encoder_2"])
        outlined = super().outline(encoders, max_tokens)
        outlined["glyph_embeds"] = torch.empty(1, _GLYPH_TOKENS, width, device="meta")
        outlined["glyph_length"] = torch.empty(1, dtype=torch.int64, device="meta")
        return outlined

    def run(self, encoders: Mapping[str, nn.Module], max_tokens: Mapping[str, int]) -> None:
        super().run(encoders, max_tokens)
        ids = torch.ones(1, _GLYPH_TOKENS, dtype=torch.long)
        encoders["text_encoder_2"](input_ids=ids, attention_mask=torch.ones_like(ids).float())


class HunyuanInputs(base.InputContract):
    """The inputs of HunyuanVideo 1.5 beyond text: a first frame with SigLIP's embeddings."""

    def names(self, section: ModelSection) -> tuple[tuple[str, ...], tuple[str, ...]]:
        needed = ("first",) if _takes_first(releases.read_release(section)) else ()
        return needed, needed

    def encode(
        self,
        codec: codec.Codec,
        text: TextEncoder,
        pixels: Mapping[str, Tensor],
        bucket: Bucket,
    ) -> base.Conditioning:
        """Encode a first frame as `first_latents` [B, C, 1, h, w] and `first_embeds` [B, T, D]."""
        encoded = super().encode(codec, text, pixels, bucket)
        if "first" not in pixels or "image_encoder" not in text.pipeline_parts():
            return encoded
        embeds = diffusers_family.embed_pictures(
            text,
            pixels["first"],
            lambda pipeline, image: pipeline.encode_image(
                image, 1, pipeline.image_encoder.device, torch.float32
            ),
        )
        return encoded | {"first_embeds": embeds.to(pixels["first"].device)}


class HunyuanBlocks(DiffusersBlocks):
    """The blocks of HunyuanVideo 1.5; from text alone, the picture embedder is not trained."""

    def untrained_parameters(self, model: nn.Module) -> list[str]:
        names = super().untrained_parameters(model)
        if _has_first(model):
            return names
        return names + [n for n, _ in model.named_parameters() if n.startswith("image_embedder.")]


def _share_tokens(model: Any, sharing: TokenSharing) -> None:
    """Split each sample's text tokens and video tokens between ranks (context parallelism)."""
    # In place of the forward pass that `adapt` has set, which shares nothing.
    model.forward = partial(_forward, model, sharing)
    for block in model.transformer_blocks:
        diffusers_family.share_attention(block.attn, sharing)


class HunyuanVideo15(diffusers_family.DiffusersFamily):
    """Text-to-video and image-to-video family; its timesteps are 1000 sigma.

    Conditioned on `prompt_embeds` of a Qwen2.5-VL, on `glyph_embeds` of a ByT5 for a caption's
    words in quotes, and for a first frame on its latents and SigLIP's `first_embeds`.
    """

    frozen = pretrained.FrozenParts(
        codec=pretrained.PipelinePart(("AutoencoderKLHunyuanVideo15",), "vae"),
        text=pretrained.PipelinePart(("Qwen2_5_VLTextModel",), "text_encoder", "tokenizer"),
        further=(
            pretrained.PipelinePart(
                ("T5EncoderModel",),
                "text_encoder_2",
                "tokenizer_2",
                "ByT5Tokenizer",
                reads_captions=True,
            ),
            pretrained.PipelinePart(
                ("SiglipVisionModel",), "image_encoder", "feature_extractor", "SiglipImageProcessor"
            ),
        ),
        has_random_text=False,
    )
    label = "HunyuanVideo 1.5"
    transformer_class = "HunyuanVideo15Transformer3DModel"
    pipeline_class = "HunyuanVideo15Pipeline"
    codec_class = codec.ScaledVideoCodec
    parts = "an AutoencoderKLHunyuanVideo15, a Qwen2.5-VL and a ByT5"
    text = HunyuanText(has_lengths=True, template_tokens=_TEMPLATE_TOKENS, arguments=DECODER)
    inputs = HunyuanInputs()
    block = HunyuanBlocks(
        patch_size=(1, 1, 1),
        arguments={**DiffusersBlocks().arguments, "rope": "freqs_cis"},
        outputs=("tokens", "text"),
        untrained=(  # what only the text of the last block is made of
            "transformer_blocks.{last}.attn.add_q_proj.*",
            "transformer_blocks.{last}.attn.to_add_out.*",
            "transformer_blocks.{last}.attn.norm_added_q.*",
            "transformer_blocks.{last}.ff_context.*",
        ),
        share=_share_tokens,
    )
    channel_ratios: ClassVar[tuple[float, ...]] = (65 / 32,)
    time_range = (0.0, 1000.0)
    scheduler = PipelineScheduler(mu=None)
    guidance_scale = 6.0
    max_tokens = 1000

    def fitted_config(self, channels: int, text: TextEncoder) -> dict[str, int]:
        if not isinstance(text, TransformersText) or text.pooled_dim is not None:
            raise RecipeError(
                f"{self.label} is conditioned on a Qwen2.5-VL and a ByT5 of one release. Set "
                'text.kind = "transformers", name the release in text.pretrained, and leave out '
                "text.pooled."
            )
        parts = text.pipeline_parts()
        if "text_encoder_2" not in parts:
            raise RecipeError(
                f"text.pretrained has no text_encoder_2, the ByT5 by which {self.label} reads "
                "words in quotes. Name a release of it there."
            )
        fitted = {
            "in_channels": 2 * channels + 1,
            "out_channels": channels,
            "text_embed_dim": text.embed_dim or 0,
            "text_embed_2_dim": text_width(parts["text_encoder_2"]),
        }
        if "image_encoder" in parts:
            fitted["image_embed_dim"] = parts["image_encoder"].config.hidden_size
        return fitted

    def check_config(self, config: Any) -> None:
        if config.use_meanflow:
            raise RecipeError(
                "The transformer's use_meanflow is set: it is distilled to few steps, between two "
                f"times, which longtake does not train. Start from {self.label} without it."
            )
        if (config.patch_size, config.patch_size_t) != (1, 1):
            raise RecipeError(
                f"model.config: patch_size {config.patch_size} and patch_size_t "
                f"{config.patch_size_t}, but a token of {self.label} is one latent pixel. Leave "
                "them out."
            )
        if sum(config.rope_axes_dim) != config.attention_head_dim:
            raise RecipeError(
                f"model.config: rope_axes_dim {list(config.rope_axes_dim)} does not add up to "
                f"attention_head_dim {config.attention_head_dim}. Choose three even numbers that "
                "do, for frames, rows and columns."
            )

    def adapt(
        self, model: Any, section: ModelSection, shapes: Sequence[LatentShape], text: TextEncoder
    ) -> None:
        """Give the model attention that takes a mask of keys or none, not [B, 1, S, S]."""
        from diffusers.models.transformers import transformer_hunyuan_video as first_version

        takes_first = _takes_first(releases.read_release(section))
        if takes_first != ("image_encoder" in text.pipeline_parts()):
            what, has = ("a first frame", "no") if takes_first else ("text alone", "an")
            raise RecipeError(
                f"The model makes videos from {what}, but text.pretrained has {has} "
                "image_encoder. Name the release of the model in text.pretrained."
            )
        # Both tasks have one class of transformer; `_has_first` reads the task from its config.
        model.register_to_config(task_type="i2v" if takes_first else "t2v")
        for block in model.transformer_blocks:
            block.attn.set_processor(first_version.HunyuanVideoAttnProcessor2_0())
        model.forward = partial(_forward, model, None)

    def pipeline_of(self, parts: Mapping[str, Any], release: releases.Release | None = None) -> str:
        return HUNYUAN_I2V if "image_encoder" in parts else self.pipeline_class

    def call(
        self, model: Any, noisy_latents: Tensor, timesteps: Tensor, conditioning: base.Conditioning
    ) -> diffusers_family.TransformerCall:
        """Prepare a call whose input channels are noisy latents, the first frame, and its mask."""
        dtype, shape = noisy_latents.dtype, noisy_latents.shape
        given, mask = torch.zeros_like(noisy_latents), torch.zeros_like(noisy_latents[:, :1])
        embeds = None
        if _has_first(model):
            others = (0, 0, 0, 0, 0, shape[2] - 1)  # pads the later frames with zeros
            given = F.pad(base.reference_latents(conditioning, "first").to(dtype), others)
            mask = F.pad(torch.ones_like(mask[:, :, :1]), others)
            embeds = conditioning["first_embeds"].to(dtype)
        prompt, known = diffusers_family.cut_texts(
            conditioning["prompt_embeds"], conditioning["prompt_length"]
        )
        glyphs, known_glyphs = diffusers_family.cut_texts(
            conditioning["glyph_embeds"], conditioning["glyph_length"]
        )
        inputs = {
            "hidden_states": torch.cat([noisy_latents, given, mask], dim=1),
            "timestep": timesteps.to(dtype),
            "encoder_hidden_states": prompt.to(dtype),
            "encoder_attention_mask": known,
            "encoder_hidden_states_2": glyphs.to(dtype),
            "encoder_attention_mask_2": known_glyphs,
            "image_embeds": embeds,
        }
        return diffusers_family.TransformerCall(inputs, lambda velocity: velocity)

    def sequence_length(
        self, model: nn.Module, shape: LatentShape, conditioning: base.Conditioning
    ) -> int:
        texts = ("prompt_embeds", "glyph_embeds", "first_embeds")
        lengths = [conditioning[name].shape[1] for name in texts if name in conditioning]
        return self.block.num_tokens(model, shape) + sum(lengths)

    def further_components(self, release: releases.Release) -> dict[str, Any]:
        from diffusers import ClassifierFreeGuidance

        values = {"guidance_scale": self.guidance_scale, **(release.guider or {})}
        with pretrained.quiet(ClassifierFreeGuidance):  # diffusers calls guiders experimental
            return {"guider": ClassifierFreeGuidance.from_config(values)}

    def comfyui_name(self, name: str, *, is_lora: bool) -> str:
        advice = "Export" if is_lora else "Name a file of this model by --like, or export"
        raise RecipeError(
            f"ComfyUI's name of {'the LoRA of ' if is_lora else ''}{self.label}'s {name} is not "
            f"known. {advice} with --format diffusers."
        )


class _SizesOfAutoencoder:
    """Stand-in for an autoencoder: only the sizes that the pipeline's constructor reads."""

    config = SimpleNamespace(latent_channels=32)
    temporal_compression_ratio = 4
    spatial_compression_ratio = 16


def _takes_first(release: releases.Release) -> bool:
    return makes_from_frame({**release.config, "pipeline": release.pipeline.get("_class_name")})


def _has_first(model: Any) -> bool:
    return bool(model.config.task_type == "i2v")


def _unpadded(texts: Tensor, counts: Tensor) -> list[Tensor]:
    return [each[known] for each, known in zip(texts, counts.bool(), strict=True)]


def _forward(
    model: Any,
    sharing: TokenSharing | None,
    *,
    hidden_states: Tensor,
    timestep: Tensor,
    encoder_hidden_states: Tensor,
    encoder_attention_mask: Tensor | None,
    encoder_hidden_states_2: Tensor,
    encoder_attention_mask_2: Tensor | None,
    image_embeds: Tensor | None,
    return_dict: bool = False,
) -> tuple[Tensor]:
    """Compute the transformer's forward pass without the padding that all texts share.

    diffusers' `forward` reads the values of masks and pictures, which a plan does not have, and
    attends to every text at its greatest length. Masks are bool [B, T]; None: nothing is padding.
    """
    rope, temb = model.rope(hidden_states), model.time_embed(timestep)
    video = model.x_embedder(hidden_states)
    refined = _refine(
        model.context_embedder, encoder_hidden_states, timestep, encoder_attention_mask
    )
    texts = [refined, model.context_embedder_2(encoder_hidden_states_2)]
    masks = [encoder_attention_mask, encoder_attention_mask_2]
    if image_embeds is not None:
        texts.append(model.image_embedder(image_embeds))
        masks.append(None)
    # Each kind of text gets a learnt embedding of its own.
    kinds = torch.arange(len(texts), device=video.device)
    typed = zip(texts, model.cond_type_embed(kinds), strict=True)
    text = torch.cat([each + kind for each, kind in typed], dim=1)  # without rope: in any order
    known = None
    if any(mask is not None for mask in masks):
        pairs = zip(texts, masks, strict=True)
        known = torch.cat([_all_known(t) if mask is None else mask for t, mask in pairs], dim=1)
    if sharing is not None:
        # Text and video attend to each other, so a rank gets a part of both.
        sharing.begin(text.shape[1], video.shape[1])
        rope = tuple(sharing.cut(table, 0) for table in rope)
        video, text = sharing.cut(video, 1), sharing.cut(text, 1)
        known = None if known is None else sharing.cut(known, 1)
    if known is not None:  # [B, 1, 1, N + T], of the keys
        known = torch.cat([_all_known(video), known], dim=1)[:, None, None]
    for block in model.transformer_blocks:
        given = (video, text, temb, known, rope)
        video, text = diffusers_family.run_block(model, block, *given)
    velocity = model.proj_out(model.norm_out(video, temb))
    if sharing is not None:
        velocity = sharing.gather(velocity, 1)
    return (velocity.mT.unflatten(2, hidden_states.shape[2:]),)


def _refine(embedder: Any, text: Tensor, timestep: Tensor, known: Tensor | None) -> Tensor:
    """Refine embedded text [B, T, D] as the context embedder does, masking padding as keys."""
    if known is None:
        return embedder(text, timestep)
    weights = known[..., None].float()
    pooled = ((text * weights).sum(dim=1) / weights.sum(dim=1)).to(text.dtype)
    temb = embedder.time_text_embed(timestep, pooled)
    text = embedder.proj_in(text)
    for block in embedder.token_refiner.refiner_blocks:
        text = block(text, temb, known[:, None, None])
    return text


def _all_known(tokens: Tensor) -> Tensor:
    return torch.ones_like(tokens[..., 0], dtype=torch.bool)

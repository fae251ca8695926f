"""Z-Image: diffusers' `ZImageTransformer2DModel`, called as its pipeline does.

Legend: B batch, C latent channels, T tokens of a text, D its width.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from longtake.config import ModelSection
from longtake.errors import RecipeError
from longtake.models import base, codec, diffusers_family, pretrained
from longtake.models.base import LatentShape
from longtake.models.diffusers_family import DiffusersBlocks
from longtake.models.text import TextEncoder
from longtake.models.text_contract import DECODER, TextContract

_STEP = 32  # tokens: the transformer pads text and image to a multiple of it, by learnt tokens


class ZImageText(TextContract):
    """How Z-Image encodes text: the second-to-last hidden layer of a Qwen3, without padding."""

    def encode(
        self, pipeline: Any, captions: list[str], max_tokens: int, pictures: Mapping[str, Tensor]
    ) -> base.Conditioning:
        texts, _ = pipeline.encode_prompt(
            captions, do_classifier_free_guidance=False, max_sequence_length=max_tokens
        )
        return diffusers_family.pad_texts(texts, max_tokens)


class ZImageBlocks(DiffusersBlocks):
    """The blocks of Z-Image's transformer, whose config has `n_heads` and `dim`."""

    def num_heads(self, model: Any) -> int:
        return int(model.config.n_heads)

    def width(self, model: Any) -> int:
        return int(model.config.dim)


class ZImage(diffusers_family.DiffusersFamily):
    """Text-to-image family, conditioned on `prompt_embeds` with their `prompt_length`.

    Its transformer predicts latents - noise, and its time runs from 0 for noise to 1.
    """

    frozen = pretrained.FrozenParts(
        codec=pretrained.PipelinePart(("AutoencoderKL",), "vae"),
        text=pretrained.PipelinePart(
            ("Qwen3Model", "Qwen3ForCausalLM"), "text_encoder", "tokenizer"
        ),
        has_random_text=False,
    )
    label = "Z-Image"
    transformer_class, pipeline_class = "ZImageTransformer2DModel", "ZImagePipeline"
    codec_class = codec.ImageCodec
    parts = "an AutoencoderKL and a Qwen3 text encoder"
    text = ZImageText(has_lengths=True, arguments=DECODER)
    block = ZImageBlocks(
        lists=("noise_refiner", "context_refiner", "layers"),
        arguments={"tokens": "x", "temb": "adaln_input", "rope": "freqs_cis"},
        outputs=("tokens",),
        attentions=("attention",),
        idle=("x_pad_token", "cap_pad_token"),
    )
    makes_videos = False
    time_range = (1.0, 0.0)
    negates = True
    guidance_scale = 6.0  # the pipeline's 5, to which it adds 1
    num_inference_steps = 50

    def fitted_config(self, channels: int, text: TextEncoder) -> dict[str, int]:
        return {"in_channels": channels, "cap_feat_dim": self.single_embed_dim(text)}

    def check_config(self, config: Any) -> None:
        if config.siglip_feat_dim is not None:
            raise RecipeError(
                f"model: the transformer has siglip_feat_dim {config.siglip_feat_dim}: it is "
                "Z-Image Omni's, which takes pictures too. longtake trains Z-Image and Z-Image "
                "Turbo; start from one of these."
            )
        if 2 not in config.all_patch_size or 1 not in config.all_f_patch_size:
            raise RecipeError(
                f"model.config: all_patch_size {list(config.all_patch_size)} and all_f_patch_size "
                f"{list(config.all_f_patch_size)} lack the patch of 1 x 2 x 2 that the pipeline "
                "takes. Leave them out."
            )

    def adapt(
        self, model: Any, section: ModelSection, shapes: Sequence[LatentShape], text: TextEncoder
    ) -> None:
        config = model.config
        text_end = _padded(text.max_tokens) + 2  # positions start at 1; the image's follows
        for name, needed, known in (
            ("tokens of text (text.max_tokens)", text_end, config.axes_lens[0]),
            *(("rows of tokens", shape.height // 2, config.axes_lens[1]) for shape in shapes),
            *(("columns of tokens", shape.width // 2, config.axes_lens[2]) for shape in shapes),
        ):
            if needed > known:
                raise RecipeError(
                    f"Z-Image has positions for {known} {name}, but {needed} are needed. Take "
                    "smaller buckets or a smaller text.max_tokens."
                )

    def call(
        self, model: Any, noisy_latents: Tensor, timesteps: Tensor, conditioning: base.Conditioning
    ) -> diffusers_family.TransformerCall:
        """Prepare a call of Z-Image with lists of images and captions, each of its own length."""
        prompt = conditioning["prompt_embeds"].to(noisy_latents.dtype)
        lengths = conditioning["prompt_length"]
        # Lengths have no values in a plan (meta or fake tensors): each caption then has full
        # length.
        has_values = not (lengths.is_meta or isinstance(lengths, FakeTensor))
        counts = lengths.tolist() if has_values else [prompt.shape[1]] * len(prompt)
        # The rope embedder caches its tables. Those cached from a plan's meta or fake tensors are
        # dropped.
        rope = model.rope_embedder
        if (tables := rope.freqs_cis) is not None and (
            tables[0].device != noisy_latents.device or type(tables[0]) is not type(noisy_latents)
        ):
            rope.freqs_cis = None
        inputs = {
            "x": list(noisy_latents.unbind()),
            "t": timesteps,
            "cap_feats": [each[:count] for each, count in zip(prompt, counts, strict=True)],
        }
        return diffusers_family.TransformerCall(inputs, torch.stack)

    def sequence_length(
        self, model: nn.Module, shape: LatentShape, conditioning: base.Conditioning
    ) -> int:
        num_text = conditioning["prompt_embeds"].shape[1]
        return _padded(self.block.num_tokens(model, shape)) + _padded(num_text)


def _padded(num_tokens: int) -> int:
    return -(-num_tokens // _STEP) * _STEP

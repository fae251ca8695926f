"""Krea 2 and its Turbo with random weights, in folders of the releases' layout."""

from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import transformers
from tests.families import release_qwen_image
from tests.families.row import Asked, Row, encoder_sizes
from torch import Tensor

_WIDTH = 8  # of the text encoder; a token of prompt_embeds has twelve of its hidden states
_LENGTH = 48
"""Tokens of a text, the five that end the template included."""


def language_config(words: Any, width: int = _WIDTH, layers: int = 36) -> Any:
    """Of Qwen3-VL with its vision tower, which text alone does not use."""
    ids = words.convert_tokens_to_ids
    text = transformers.Qwen3VLTextConfig(
        vocab_size=len(words),
        **encoder_sizes(width, 8, layers),
        num_key_value_heads=1,
        head_dim=8,
        rope_parameters={"rope_type": "default", "mrope_section": [2, 1, 1]},
        pad_token_id=words.pad_token_id,
    )
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": width,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
    }
    return transformers.Qwen3VLConfig(
        text_config=text.to_dict(),
        vision_config=vision,
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
    )


def transformer() -> Any:
    return diffusers.Krea2Transformer2DModel(
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=64,
        timestep_embed_dim=32,
        text_hidden_dim=_WIDTH,
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=16,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 6, 6),
    )


def scheduler() -> Any:
    """With constants of its own, so that nothing but this file can tell them."""
    return diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_image_seq_len=8,
        base_shift=0.4,
        max_image_seq_len=600,
        max_shift=0.9,
    )


def make(folder: Path, *, is_distilled: bool = False, **settings: Any) -> None:
    """Write it, or Turbo; its pipeline with these settings changed."""
    words = release_qwen_image.tokenizer()
    diffusers.Krea2Pipeline(
        scheduler=scheduler(),
        vae=release_qwen_image.autoencoder(),
        text_encoder=transformers.Qwen3VLModel(language_config(words)),
        tokenizer=words,
        transformer=transformer(),
        is_distilled=is_distilled,
        **settings,
    ).save_pretrained(folder)


def _call(asked: Asked) -> dict[str, Any]:
    """The pipeline adds 1 to its guidance scale."""
    noise = asked.noise[:, :, 0]
    return {
        "prompt": asked.prompt,
        "latents": asked.pipeline._pack_latents(noise, 1, noise.shape[1], *noise.shape[-2:]),
        "height": asked.height,
        "width": asked.width,
        "guidance_scale": asked.guidance - 1,
        "max_sequence_length": _LENGTH,
    }


def _unpack(asked: Asked, tokens: Tensor) -> Tensor:
    image: Tensor = asked.pipeline._unpack_latents(tokens, asked.height, asked.width)
    return image


_row = partial(
    Row,
    family="krea2",
    call=_call,
    bucket=(1, 48, 64),
    unpack=_unpack,
    keys={"text": {"max_tokens": _LENGTH}},
)
ROWS = (
    _row("Krea 2 Turbo", make=partial(make, is_distilled=True), guidance=1.0),
    _row(
        "Krea 2",
        make=make,
        guidance=5.5,
        real={"transformer": {}, "text_encoder": {"text_config": {"hidden_size": 2560}}},
    ),
)

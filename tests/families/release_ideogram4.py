"""Ideogram 4 with random weights, in the folder layout of its release."""

from pathlib import Path
from typing import Any

import diffusers
import transformers
from tests.families import release_flux2, release_krea2, release_qwen_image
from tests.families.row import Asked, Row
from torch import Tensor

_WIDTH = 8  # of the text encoder; a token of prompt_embeds has thirteen of its hidden states
LENGTH = 64
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def transformer() -> Any:
    return diffusers.Ideogram4Transformer2DModel(
        in_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        intermediate_size=64,
        adaln_dim=16,
        llm_features_dim=13 * _WIDTH,
        mrope_section=(4, 2, 2),
    )


def make(folder: Path) -> None:
    words = release_qwen_image.tokenizer()
    words.chat_template = _TEMPLATE
    diffusers.Ideogram4Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=release_flux2.vae(),
        text_encoder=transformers.Qwen3VLModel(release_krea2.language_config(words)),
        tokenizer=words,
        transformer=transformer(),
        unconditional_transformer=transformer(),
    ).save_pretrained(folder)


def call(asked: Asked) -> dict[str, Any]:
    return {
        "prompt": asked.prompt,
        "latents": asked.noise[:, :, 0].flatten(2).mT,
        "height": asked.height,
        "width": asked.width,
        "guidance_scale": asked.guidance,
        "guidance_schedule": None,
        "max_sequence_length": LENGTH,
    }


def _unpack(asked: Asked, tokens: Tensor) -> Tensor:
    return tokens.mT.reshape(1, -1, 1, asked.height // 16, asked.width // 16)


ROWS = (
    Row(
        "Ideogram 4",
        "ideogram4",
        make,
        call,
        (1, 64, 96),
        _unpack,
        keys={"text": {"max_tokens": LENGTH}},
        guidance=7.0,
        refuses={"comfyui": "join layers that are apart here"},
        real={
            "transformer": {},
            "text_encoder": {"text_config": {"hidden_size": 4096}},
            "vae": {"latent_channels": 32},
        },
    ),
)

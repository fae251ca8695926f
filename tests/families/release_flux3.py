"""FLUX.3 with random weights, in a folder of its release's layout: of a modular pipeline alone.

Two things of its pipeline are not as diffusers has them here: the processor is made without its
part for videos, which needs torchvision, and there is no model that rewrites prompts.
"""

from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import transformers
from tests.families import modular, release_flux2, release_krea2, release_qwen_image
from tests.families.release_qwen_image21 import Processor
from tests.families.row import Asked, Row
from torch import Tensor

_WIDTH = 8  # of the text encoder; a token of prompt_embeds has eight of its hidden states
_LENGTH = 160
"""Tokens of a text: two windows of the text encoder, the tokens of the template included."""
_TEMPLATE = (
    # Of so many tokens that captions of unlike length take one window or two.
    "<|im_start|>system\nOf pictures it is told here what they show.<|im_end|>\n"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def transformer(**settings: Any) -> Any:
    sizes = {
        "in_channels": 16,
        "cond_in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 8 * _WIDTH,
        "timestep_channels": 16,
        "axes_dims_rope": (4, 4, 4, 4),
    }
    return diffusers.Flux3Transformer2DModel(**(sizes | settings))


def make(folder: Path, **settings: Any) -> None:
    words = release_qwen_image.tokenizer()
    words.chat_template = _TEMPLATE
    modular.save(
        folder,
        diffusers.Flux3ModularPipeline,
        text_encoder=transformers.Qwen3VLForConditionalGeneration(
            release_krea2.language_config(words, _WIDTH, layers=33)
        ),
        tokenizer=Processor(transformers.Qwen2VLImageProcessorPil(), words, None, _TEMPLATE),
        vae=release_flux2.vae(),
        transformer=transformer(**settings),
    )


def load(folder: Path) -> Any:
    images = transformers.Qwen2VLImageProcessorPil.from_pretrained(folder / "tokenizer")
    words = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    processor = Processor(images, words, None, words.chat_template)
    return modular.load(folder, ("prompt_upsampler", "decode"), tokenizer=processor)


def _call(asked: Asked) -> dict[str, Any]:
    """The scale of guidance is the guider's."""
    asked.pipeline.guider = diffusers.ClassifierFreeGuidance(guidance_scale=asked.guidance)
    return {
        "prompt": asked.prompt,
        "image": list(asked.pictures.values()) or None,
        "latents": asked.noise[:, :, 0],
        "height": asked.height,
        "width": asked.width,
        "max_sequence_length": _LENGTH,
    }


def _unpack(asked: Asked, tokens: Tensor) -> Tensor:
    return tokens.mT.reshape(1, -1, 1, asked.height // 16, asked.width // 16)


_row = partial(
    Row,
    family="flux3",
    make=make,
    call=_call,
    bucket=(1, 64, 96),
    unpack=_unpack,
    keys={"text": {"max_tokens": _LENGTH}},
    guidance=3.5,
    load=load,
    real={
        "transformer": {},
        "text_encoder": {"text_config": {"hidden_size": 2560}},
        "vae": {"latent_channels": 32},
    },
)
ROWS = (
    _row("FLUX.3"),
    _row(
        "FLUX.3, references",
        pictures=("reference", "reference_2"),
        task="edit by several references",
    ),
)

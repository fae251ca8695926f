"""Qwen-Image 2.1 with random weights, in the folder layout of its release.

One thing of its pipeline is not as diffusers has it here: the processor is made without its part
for videos, which needs torchvision. References are resized to 64 x 64 pixels, not to 1024 x 1024.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import pytest
import transformers
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
from diffusers.pipelines.qwenimage21 import pipeline_qwenimage21
from tests.families import release_krea2, release_qwen_image
from tests.families.row import Asked, Row
from torch import Tensor

_WIDTH = 16  # of the text encoder
_CHANNELS = 64  # of latents, as in the release
_LENGTH = 48
_TEXTS = ("system\nComprehend and analyze the provided prompt.", "<image1>", " <image2>")
_SMALLER = 256  # times fewer pixels of a reference
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}<|im_end|>\n{% endfor %}"
)


class Processor(transformers.Qwen3VLProcessor):  # type: ignore[misc]
    """Of texts and pictures."""

    def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
        return type(argument)

    def save_pretrained(self, folder: Any, **options: Any) -> None:
        self.image_processor.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


Processor.__name__ = "Qwen3VLProcessor"
Processor.__module__ = transformers.Qwen3VLProcessor.__module__


def autoencoder() -> Any:
    mean = [((channel * 7) % 5 - 2) / 4 for channel in range(_CHANNELS)]
    return diffusers.AutoencoderKLQwenImage21(
        base_dim=4,
        decoder_base_dim=4,
        z_dim=_CHANNELS,
        dim_mult=[1, 1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True, True],
        latents_mean=mean,
        latents_std=[1.0 + value / 2 for value in mean],
    )


def transformer(**settings: Any) -> Any:
    return diffusers.QwenImage21Transformer2DModel(
        **{
            "in_channels": _CHANNELS,
            "out_channels": _CHANNELS,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "context_in_dim": _WIDTH,
            "axes_dims_rope": (4, 6, 6),
            **settings,
        }
    )


def make(folder: Path) -> None:
    words = release_qwen_image.tokenizer(*_TEXTS)
    words.chat_template = _TEMPLATE
    images = transformers.Qwen2VLImageProcessorPil(
        patch_size=16, size={"shortest_edge": 32 * 32, "longest_edge": 1024 * 1024}
    )
    diffusers.QwenImage21Pipeline(
        scheduler=release_qwen_image.scheduler(),
        vae=autoencoder(),
        text_encoder=transformers.Qwen3VLForConditionalGeneration(
            release_krea2.language_config(words, _WIDTH, layers=2)
        ),
        processor=Processor(images, words, None, _TEMPLATE),
        transformer=transformer(),
    ).save_pretrained(folder)


def load(folder: Path) -> Any:
    """The pipeline of a release."""
    images = transformers.Qwen2VLImageProcessorPil.from_pretrained(folder / "processor")
    words = transformers.AutoTokenizer.from_pretrained(folder / "processor")
    processor = Processor(images, words, None, words.chat_template)
    return diffusers.DiffusionPipeline.from_pretrained(folder, processor=processor)


_OWN = pipeline_qwenimage21.calculate_dimensions  # which a fixture may have replaced already


@contextmanager
def smaller_references() -> Iterator[None]:
    """Have references resized to fewer pixels, by the pipeline and by longtake."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (pipeline_qwenimage21, pipeline_qwenimage_edit):
            patch.setattr(
                module, "calculate_dimensions", lambda area, ratio: _OWN(area // _SMALLER, ratio)
            )
        yield


def _call(asked: Asked) -> dict[str, Any]:
    noise = asked.noise[:, :, 0]
    tokens = asked.pipeline._pack_latents(noise, 1, noise.shape[1], *noise.shape[-2:])
    given = {"prompt": asked.prompt, "latents": tokens, "height": asked.height}
    given |= {"width": asked.width, "true_cfg_scale": asked.guidance}
    given |= {"image": list(asked.pictures.values()) or None}
    return given | ({"negative_prompt": ""} if asked.guidance > 1 else {})


def _unpack(asked: Asked, tokens: Tensor) -> Tensor:
    image: Tensor = asked.pipeline._unpack_latents(tokens, asked.height, asked.width, 16)
    return image


_row = partial(
    Row,
    family="qwen_image21",
    make=make,
    call=_call,
    bucket=(1, 64, 96),
    unpack=_unpack,
    keys={"text": {"max_tokens": _LENGTH}},
    guidance=3.0,
    load=load,
    real={"transformer": {}, "text_encoder": {"text_config": {"hidden_size": 4096}}},
)
ROWS = (
    _row("Qwen-Image 2.1"),
    _row(
        "Qwen-Image 2.1, references",
        pictures=("reference", "reference_2"),
        task="edit by several references",
        within=smaller_references,
    ),
)

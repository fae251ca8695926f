"""Qwen-Image-Edit and Edit-Plus with random weights, in the folder layout of their releases.

Two things of the pipelines are not as diffusers has them here. Their processor is made without its
part for videos, which needs torchvision. And the text encoder is told which tokens are pictures',
which the pipelines forget: transformers 5 then counts these one by one instead of by rows and
columns. References are resized to 64 x 64 pixels, and not to 1024 x 1024.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import pytest
import transformers
from diffusers.pipelines.qwenimage import (
    pipeline_qwenimage_edit,
    pipeline_qwenimage_edit_plus,
)
from tests.families import release_qwen_image
from tests.families.row import Asked, Row
from torch import Tensor, nn

_SMALLER = 256  # times fewer pixels of a reference
_OWN: Mapping[Any, Callable[..., Any]] = {
    module: module.calculate_dimensions
    for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus)
}
_TEXTS = (
    "system\nDescribe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. "
    "Generate a new image that meets the user's requirements while maintaining consistency with "
    "the original input where appropriate.",
    "Picture 1: ",
    "Picture 2: ",
)


class _Processor(transformers.Qwen2VLProcessor):  # type: ignore[misc]
    """Of pictures; keeps what it has returned."""

    last: Mapping[str, Tensor]

    def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
        return type(argument)

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.last = super().__call__(*args, **options)
        return self.last

    def save_pretrained(self, folder: Any, **options: Any) -> None:
        self.image_processor.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


_Processor.__name__ = "Qwen2VLProcessor"
_Processor.__module__ = transformers.Qwen2VLProcessor.__module__


def make(pipeline_class: Any, folder: Path, **settings: Any) -> None:
    """Write a release; its transformer with these settings changed."""
    words = release_qwen_image.tokenizer(*_TEXTS)
    pipeline_class(
        scheduler=release_qwen_image.scheduler(),
        vae=release_qwen_image.autoencoder(),
        text_encoder=release_qwen_image.language_model(words),
        tokenizer=words,
        processor=_Processor(transformers.Qwen2VLImageProcessorPil(), words, None),
        transformer=release_qwen_image.transformer(**settings),
    ).save_pretrained(folder)


make_edit = partial(make, diffusers.QwenImageEditPipeline)
make_plus = partial(make, diffusers.QwenImageEditPlusPipeline)


def load(folder: Path, *, is_mended: bool = True) -> Any:
    """The pipeline of a release."""
    images = transformers.Qwen2VLImageProcessorPil.from_pretrained(folder / "processor")
    words = transformers.AutoTokenizer.from_pretrained(folder / "processor")
    processor = _Processor(images, words, None)

    def mended(_encoder: nn.Module, args: Any, given: dict[str, Any]) -> Any:
        return args, given | {"mm_token_type_ids": processor.last["mm_token_type_ids"]}

    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, processor=processor)
    if is_mended:
        pipeline.text_encoder.register_forward_pre_hook(mended, with_kwargs=True)
    return pipeline


@contextmanager
def smaller_references() -> Iterator[None]:
    """Have references resized to fewer pixels, by the pipelines and by longtake."""
    with pytest.MonkeyPatch.context() as patch:
        for module, own in _OWN.items():
            smaller = partial(_smaller, own)
            patch.setattr(module, "calculate_dimensions", smaller)
        yield


def _smaller(own: Callable[..., Any], area: int, ratio: float) -> Any:
    return own(area // _SMALLER, ratio)


def _call(asked: Asked) -> dict[str, Any]:
    images = list(asked.pictures.values())
    is_plus = isinstance(asked.pipeline, diffusers.QwenImageEditPlusPipeline)
    return release_qwen_image.call(asked) | {"image": images if is_plus else images[0]}


_TEXT = {"text_encoder": {"text_config": {"hidden_size": 3584}}}
_row = partial(
    Row,
    call=_call,
    bucket=(1, 48, 96),
    unpack=release_qwen_image.unpack,
    guidance=4.0,
    load=load,
    within=smaller_references,
)
ROWS = (
    _row(
        "Qwen-Image-Edit",
        "qwen_image_edit",
        make_edit,
        pictures=("reference",),
        task="edit by a reference",
        real={"transformer": {}, **_TEXT},
    ),
    _row(
        "Qwen-Image-Edit-2509",
        "qwen_image_edit_plus",
        make_plus,
        pictures=("reference", "reference_2"),
        task="edit by several references",
        real={"transformer": {}, **_TEXT},
    ),
    _row(
        "Qwen-Image-Edit-2511",
        "qwen_image_edit_plus",
        partial(make_plus, zero_cond_t=True),
        pictures=("reference", "reference_2"),
        task="edit by several references",
        real={"transformer": {"zero_cond_t": True}, **_TEXT},
    ),
)

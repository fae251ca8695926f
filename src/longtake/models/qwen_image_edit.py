"""Qwen-Image-Edit and Edit-Plus (2509, 2511): Qwen-Image with reference images.

The text encoder, a Qwen2.5-VL, reads the caption together with the references; the latents of the
references come behind the noisy tokens. The pipelines resize each reference to a fixed area,
whatever the size of the image that they make.
"""

import functools
import importlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from longtake.config import Bucket
from longtake.models import base, diffusers_family, pretrained, qwen_image
from longtake.models.codec import Codec, encode_videos
from longtake.models.text import TextEncoder

MORE_REFERENCES = tuple(f"reference_{number}" for number in range(2, 10 + 1))
_AREA = 1024 * 1024  # pixels of a reference
_SMALL_AREA = 384 * 384


@dataclass(frozen=True)
class EditText(qwen_image.QwenText):
    """How a Qwen2.5-VL encodes one caption at a time, after the caption's reference pictures."""

    seen_area: int = _AREA
    """Pixels of a reference image after it is resized for the text encoder."""
    frame_tokens: int = 2
    """Most tokens that the text encoder's template adds around the image tokens of one
    reference."""

    def prepare(self, parts: Mapping[str, Any]) -> Mapping[str, Any]:
        """Let the text encoder get `mm_token_type_ids`, which mark the tokens of images.

        diffusers' pipelines omit them, and transformers 5 then numbers the tokens of an image one
        by one instead of by rows and columns, as the release was trained.
        """
        parts["text_encoder"].register_forward_pre_hook(_with_token_types, with_kwargs=True)
        return parts

    def encode(
        self, pipeline: Any, captions: list[str], max_tokens: int, pictures: Mapping[str, Tensor]
    ) -> base.Conditioning:
        sizes = [(each.shape[-2], each.shape[-1]) for each in pictures.values()]
        longest = max_tokens + self.picture_tokens(pipeline.processor, sizes)
        texts = []
        for row, caption in enumerate(captions):
            seen = [self.resized(each[row]) for each in pictures.values()]
            embeds, _ = pipeline.encode_prompt(caption, seen)
            texts.append(embeds[0, :longest])
        return diffusers_family.pad_texts(texts, longest)

    def resized(self, picture: Tensor) -> Image.Image:
        """Return a picture [3, 1, H, W] uint8 as the text encoder sees it."""
        return _resize(picture, self.seen_area)

    def load_processor(self, where: str, subfolder: str) -> Any:
        return load_processor("Qwen2VLProcessor", where, subfolder)

    def picture_tokens(self, processor: Any, sizes: Sequence[tuple[int, int]]) -> int:
        images, tokens = processor.image_processor, 0
        for size in sizes:
            patches = images.get_number_of_image_patches(*_resized_size(size, self.seen_area))
            tokens += patches // images.merge_size**2 + self.frame_tokens
        return tokens


class EditInputs(base.InputContract):
    """The picture inputs of Qwen-Image-Edit: references, resized to about 1024 x 1024 pixels."""

    def size(self, bucket: Bucket) -> tuple[int, int]:
        return _resized_size((bucket.height, bucket.width), _AREA)

    def encode(
        self, codec: Codec, text: TextEncoder, pixels: Mapping[str, Tensor], bucket: Bucket
    ) -> base.Conditioning:
        encoded: base.Conditioning = {}
        for name, images in pixels.items():
            if name in (*self.references, *self.optional):
                images = self._resized(images, bucket)
            encoded[f"{name}_latents"] = encode_videos(codec, images)
        return encoded

    def _resized(self, pictures: Tensor, bucket: Bucket) -> Tensor:
        """Resize reference pictures [B, 3, 1, H, W] uint8 to the size at which they are encoded."""
        if pictures.is_meta:
            return pictures.new_empty(len(pictures), 3, 1, *self.size(bucket))
        resized = [torch.from_numpy(np.array(_resize(each, _AREA))) for each in pictures]
        return torch.stack(resized).permute(0, 3, 1, 2)[:, :, None].to(pictures.device)


def _resize(picture: Tensor, area: int) -> Image.Image:
    """Resize a picture [3, 1, H, W] uint8 to about `area` pixels, as the pipeline does."""
    from diffusers.image_processor import VaeImageProcessor

    image = diffusers_family.to_image(picture)
    size = _resized_size((image.height, image.width), area)
    return VaeImageProcessor().resize(image, *size)


def _resized_size(size: tuple[int, int], area: int) -> tuple[int, int]:
    """Return the (height, width) of a picture after it is resized to about `area` pixels."""
    module = importlib.import_module("diffusers.pipelines.qwenimage.pipeline_qwenimage_edit")
    width, height, _ = module.calculate_dimensions(area, size[1] / size[0])
    return height, width


def _with_token_types(encoder: Any, args: Any, given: dict[str, Any]) -> Any:
    if given.get("pixel_values") is None or given.get("mm_token_type_ids") is not None:
        return args, given
    types = (given["input_ids"] == encoder.config.image_token_id).int()
    return args, given | {"mm_token_type_ids": types}


def load_processor(class_name: str, where: str, subfolder: str) -> Any:
    """Load a processor of transformers for texts and pictures, without its part for videos.

    Args:
        class_name: name of the class in transformers.
        where: folder or repository id of the pipeline.
        subfolder: the processor's folder inside `where`.
    """
    import transformers

    # Older transformers releases call the PIL-based processor `Qwen2VLImageProcessor`.
    by_pil = getattr(transformers, "Qwen2VLImageProcessorPil", None)
    loaded = by_pil or transformers.Qwen2VLImageProcessor, transformers.AutoTokenizer
    images, words = (pretrained.load_pretrained(each, where, subfolder) for each in loaded)
    processor = _processor_class(class_name)(images, words, None, words.chat_template)
    processor.folder = pretrained.locate(where, subfolder) / subfolder
    return processor


@functools.cache
def _processor_class(name: str) -> Any:
    import transformers

    of_transformers: Any = getattr(transformers, name)

    class Processor(of_transformers):  # type: ignore[misc]
        """Processor of images without its base class's parts for videos, which need torchvision."""

        folder: Path

        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            return type(argument)

        def save_pretrained(self, folder: Any, **_options: Any) -> None:
            """Copy the release's own processor files to an export, including those for videos."""
            shutil.copytree(self.folder, folder, dirs_exist_ok=True)

    # A saved pipeline names the class by module and name: keep those of transformers.
    Processor.__name__, Processor.__module__ = name, of_transformers.__module__
    return Processor


class QwenImageEdit(qwen_image.QwenImage):
    """Image-editing family: text and one reference image (`reference_latents`) to an image."""

    frozen = pretrained.FrozenParts(
        codec=qwen_image.QwenImage.frozen.codec,
        text=qwen_image.QwenImage.frozen.text,
        processor=pretrained.PipelinePart(("Qwen2VLProcessor",), "processor"),
        has_random_text=False,
    )
    label = "Qwen-Image-Edit"
    pipeline_class = "QwenImageEditPipeline"
    text = EditText(
        pictures=("reference",),
        has_lengths=True,
        # As in Qwen-Image: tokens that the pipeline drops, and those that end a caption.
        template_tokens=64 + 5,
        arguments=qwen_image.QwenImage.text.arguments,
    )
    inputs = EditInputs(references=("reference",))
    other_models: ClassVar[Mapping[str, str]] = qwen_image.VARIANTS


class QwenImageEditPlus(QwenImageEdit):
    """Family of Qwen-Image-Edit-2509 and 2511: text and up to ten references to an image."""

    label = "Qwen-Image-Edit-Plus"
    pipeline_class = "QwenImageEditPlusPipeline"
    text = replace(
        QwenImageEdit.text,
        pictures=("reference", *MORE_REFERENCES),
        # These pipelines show references to the text encoder in a smaller size than to the codec.
        seen_area=_SMALL_AREA,
        frame_tokens=8,
    )
    inputs = replace(QwenImageEdit.inputs, optional=MORE_REFERENCES)

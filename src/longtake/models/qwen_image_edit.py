"""Qwen-Image-Edit and Edit-Plus (2509, 2511): Qwen-Image with references, as their pipelines do.

The text encoder, a Qwen2.5-VL, reads the caption together with the references; their latents come
behind the noisy tokens. The pipelines encode a reference at an area of its own, whatever the size
of the image that they make.
"""

import functools
import importlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from longtake.config import Bucket
from longtake.models import base, diffusers_family, pretrained, qwen_image
from longtake.models.codec import Codec, encode_videos
from longtake.models.text import TextEncoder

_MAX_REFERENCES = 10
_AREA = 1024 * 1024  # pixels of a reference
_SMALL_AREA = 384 * 384


class QwenImageEdit(qwen_image.QwenImage):
    """From a text and a reference image to an image; also needs `reference_latents`."""

    frozen = pretrained.FrozenParts(
        codec=qwen_image.QwenImage.frozen.codec,
        text=qwen_image.QwenImage.frozen.text,
        processor=pretrained.PipelinePart(("Qwen2VLProcessor",), "processor"),
        has_random_text=False,
    )
    label = "Qwen-Image-Edit"
    pipeline_class = "QwenImageEditPipeline"
    references: tuple[str, ...] = ("reference",)
    encodes_text_with: tuple[str, ...] = ("reference",)
    encodes_inputs_itself = True
    other_models: ClassVar[Mapping[str, str]] = qwen_image.VARIANTS

    template_tokens = 64 + 5
    seen_area = _AREA
    """Pixels of a reference as the text encoder sees it."""
    frame_tokens = 2
    """At most so many tokens stand around those of a reference in the text."""

    def load_processor(self, where: str, subfolder: str) -> Any:
        import transformers

        # Earlier releases of transformers have it under the other's name.
        by_pil = getattr(transformers, "Qwen2VLImageProcessorPil", None)
        loaded = by_pil or transformers.Qwen2VLImageProcessor, transformers.AutoTokenizer
        parts = [pretrained.load_pretrained(each, where, subfolder) for each in loaded]
        processor = _processor_class()(*parts, None)
        processor.folder = pretrained.locate(where, subfolder) / subfolder
        return processor

    def picture_tokens(self, processor: Any, sizes: Sequence[tuple[int, int]]) -> int:
        images, tokens = processor.image_processor, 0
        for size in sizes:
            patches = images.get_number_of_image_patches(*self._size(size, self.seen_area))
            tokens += patches // images.merge_size**2 + self.frame_tokens
        return tokens

    def text_pipeline(self, parts: Mapping[str, Any]) -> Any:
        """Its encoder gets `mm_token_type_ids`, which say what tokens are pictures'.

        Pipelines of diffusers leave them out, and transformers 5 then counts pictures' tokens one
        by one instead of by rows and columns, as the release was trained.
        """
        parts["text_encoder"].register_forward_pre_hook(_with_token_types, with_kwargs=True)
        return super().text_pipeline(parts)

    def encode_text(
        self, pipeline: Any, captions: list[str], max_tokens: int, pictures: Mapping[str, Tensor]
    ) -> base.Conditioning:
        """Each caption alone, behind its pictures; what is too long for `max_tokens` is cut off."""
        sizes = [(each.shape[-2], each.shape[-1]) for each in pictures.values()]
        longest = max_tokens + self.picture_tokens(pipeline.processor, sizes)
        texts = []
        for row, caption in enumerate(captions):
            seen = [self._resized(each[row], self.seen_area) for each in pictures.values()]
            embeds, _ = pipeline.encode_prompt(caption, seen)
            texts.append(embeds[0, :longest])
        return diffusers_family.pad_texts(texts, longest)

    def reference_size(self, bucket: Bucket) -> tuple[int, int]:
        return self._size((bucket.height, bucket.width), _AREA)

    def encode_inputs(
        self, codec: Codec, text: TextEncoder, given: Mapping[str, Tensor], bucket: Bucket
    ) -> base.Conditioning:
        found: base.Conditioning = {}
        for name, each in given.items():
            images = each
            if name in (*self.references, *self.optional_references):
                resized = [_pixels(self._resized(picture, _AREA)) for picture in each]
                images = torch.stack(resized).to(each.device)
            found[f"{name}_latents"] = encode_videos(codec, images)
        return found

    def outline_inputs(
        self, codec: Codec, text: TextEncoder, given: Mapping[str, int], bucket: Bucket
    ) -> base.Conditioning:
        height, width = self.reference_size(bucket)
        resized = Bucket(num_frames=1, height=height, width=width)
        shape = 1, codec.channels, *codec.latent_shape(resized)
        own = {
            f"{name}_latents": torch.empty(shape, device="meta")
            for name in given
            if name in (*self.references, *self.optional_references)
        }
        return super().outline_inputs(codec, text, given, bucket) | own

    def _resized(self, picture: Tensor, area: int) -> Image.Image:
        """A picture [3, 1, H, W] uint8 as the pipeline's image processor resizes it."""
        from diffusers.image_processor import VaeImageProcessor

        image = Image.fromarray(picture[:, 0].permute(1, 2, 0).cpu().numpy())
        resized: Image.Image = VaeImageProcessor().resize(
            image, *self._size((image.height, image.width), area)
        )
        return resized

    def _size(self, size: tuple[int, int], area: int) -> tuple[int, int]:
        """Height and width of a picture of that size when it is resized to about an area."""
        module = importlib.import_module("diffusers.pipelines.qwenimage.pipeline_qwenimage_edit")
        width, height, _ = module.calculate_dimensions(area, size[1] / size[0])
        return height, width


class QwenImageEditPlus(QwenImageEdit):
    """From a text and up to ten references to an image: Qwen-Image-Edit-2509 and 2511."""

    label = "Qwen-Image-Edit-Plus"
    pipeline_class = "QwenImageEditPlusPipeline"
    optional_references = tuple(f"reference_{number}" for number in range(2, _MAX_REFERENCES + 1))
    encodes_text_with = (*QwenImageEdit.references, *optional_references)
    seen_area = _SMALL_AREA
    frame_tokens = 8


def _pixels(image: Image.Image) -> Tensor:
    """[3, 1, H, W] uint8."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)[:, None]


def _with_token_types(encoder: nn.Module, args: Any, given: dict[str, Any]) -> Any:
    if given.get("pixel_values") is None or given.get("mm_token_type_ids") is not None:
        return args, given
    config: Any = encoder.config
    types = (given["input_ids"] == config.image_token_id).int()
    return args, given | {"mm_token_type_ids": types}


@functools.cache
def _processor_class() -> Any:
    import transformers

    class Qwen2VLProcessor(transformers.Qwen2VLProcessor):  # type: ignore[misc]
        """Of pictures alone: its part for videos needs torchvision, and so does a faster one."""

        folder: Path

        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            return type(argument)

        def save_pretrained(self, folder: Any, **_options: Any) -> None:
            """The release's own files, with those for videos."""
            shutil.copytree(self.folder, folder, dirs_exist_ok=True)

    Qwen2VLProcessor.__module__ = transformers.Qwen2VLProcessor.__module__
    return Qwen2VLProcessor

"""The text contract of a family: how its encoders are called, and what they return."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")

DECODER: Mapping[str, Any] = {"output_hidden_states": True, "use_cache": False}
"""Arguments for a call of a decoder whose hidden layers serve as the text's embeddings."""


@dataclass(frozen=True)
class TextContract:
    """How a family encodes captions to `prompt_embeds`: by the methods of its own pipeline.

    A family whose pipeline encodes in another way overrides methods in a subclass.
    """

    by_length: bool = False
    """True if `encode` gives the same values with less padding, followed by zeros [B, T, D]."""
    has_lengths: bool = False
    """True if embedded captions keep their own lengths, as `pad_texts` returns them."""
    pictures: tuple[str, ...] = ()
    """Names of pictures in `data.conditioning` that the text encoder reads with the caption, in
    this order."""
    version: int = 1
    """Version of `encode` in the keys of a latent cache, where it returns other values than 1."""
    layers: int = 1
    """Number of hidden states of the captions' encoder, side by side in `prompt_embeds`."""
    template_tokens: int = 0
    """Number of tokens that the pipeline's template adds around a caption."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments with which the pipeline calls a text encoder, apart from ids and mask."""

    def prepare(self, parts: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return encoders, tokenizers and processors as the pipeline's constructor takes them."""
        return parts

    def encode(
        self, pipeline: Any, captions: list[str], max_tokens: int, pictures: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Encode captions by the pipeline's own methods, on its device, without gradients.

        Args:
            pipeline: a pipeline of the family's class, with encoders and without a transformer.
            captions: B of them, in a list that may be changed.
            max_tokens: T, what captions are cut or padded to, without `picture_tokens`.
            pictures: [B, 3, 1, H, W] uint8 of each name in `pictures`.
        """
        embeds, *_ = pipeline.encode_prompt(
            captions, do_classifier_free_guidance=False, max_sequence_length=max_tokens
        )
        return {"prompt_embeds": embeds}

    def outline(self, encoders: Mapping[str, nn.Module], max_tokens: int) -> dict[str, Tensor]:
        """Outline what `encode` returns for one caption: shapes on the meta device, no values.

        Args:
            encoders: encoders by their folders, the captions' first; on the meta device.
            max_tokens: T, with the tokens of pictures.
        """
        width = self.layers * text_width(next(iter(encoders.values())))
        outlined = {"prompt_embeds": torch.empty(1, max_tokens, width, device="meta")}
        if self.has_lengths:
            outlined["prompt_length"] = torch.empty(1, dtype=torch.int64, device="meta")
        return outlined

    def run(self, encoders: Mapping[str, nn.Module], max_tokens: Mapping[str, int]) -> None:
        """Run the text encoders on fake tensors, as `encode` does for the longest caption.

        Args:
            encoders: encoders by their folders in the pipeline.
            max_tokens: tokens, those of pictures included, of the encoders that read captions.
        """
        for folder, length in max_tokens.items():
            # The template is computed with the caption, though the pipeline drops its tokens
            # afterwards.
            ids = torch.ones(1, length + self.template_tokens, dtype=torch.long)
            mask = torch.ones_like(ids)
            encoders[folder](input_ids=ids, attention_mask=mask, **self.arguments)

    def load_processor(self, where: str, subfolder: str) -> Any:
        """Load the processor of pictures that are encoded with captions, `frozen.processor`.

        Args:
            where: folder or repository id of the pipeline.
            subfolder: the processor's folder inside `where`.
        """
        raise NotImplementedError(f"{type(self).__name__} encodes captions alone")

    def picture_tokens(self, processor: Any, sizes: Sequence[tuple[int, int]]) -> int:
        """Count the tokens that pictures of these heights and widths add to a text."""
        return 0

    def seen_pictures(self, inputs: Mapping[str, T]) -> dict[str, T]:
        """Select the pictures that the text encoder reads with the caption, in its order."""
        return {name: inputs[name] for name in self.pictures if name in inputs}


def text_width(encoder: Any) -> int:
    """Return the width of a text encoder's hidden states."""
    return int(encoder.config.get_text_config().hidden_size)

"""From captions to what the transformer is conditioned on."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from longtake.config import PooledSection, TextSection
from longtake.errors import ModelError, RecipeError
from longtake.formatting import reason_of
from longtake.fsio import read_regular
from longtake.models.architecture import DTYPES
from longtake.models.captions import clean
from longtake.models.encoder import (
    FIRST,
    ONLY,
    POOLED,
    Encoder,
    Place,
    build_encoder,
    outline_encoder,
)
from longtake.models.pretrained import refuse_unused
from longtake.models.words import SPECIAL, WordIds, word_tokenizer

NO_CAPTION = ""
"""The unconditional one of classifier-free guidance: what a dropped caption is trained as."""


class TextEncoder(Protocol):
    """Encodes captions, `NO_CAPTION` among them."""

    vocabulary_size: int
    max_tokens: int
    """T: what captions are cut or padded to."""

    @property
    def embed_dim(self) -> int | None:
        """Width of `prompt_embeds`, or None where the model embeds token ids itself."""
        ...

    @property
    def pooled_dim(self) -> int | None:
        """Width of `pooled_prompt_embeds`, or None where there are none."""
        ...

    def encode(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Named tensors, each [B, ...], for the family's model."""
        ...

    def outline(self) -> dict[str, Tensor]:
        """What `encode` gives for one caption, as shapes without values (on the meta device)."""
        ...

    def unknown_words(self, caption: str) -> list[str]:
        """Words of a caption that the encoder has never seen."""
        ...

    def modules(self) -> list[nn.Module]:
        """The frozen modules, which take memory; none where the model embeds ids itself."""
        ...

    def to(self, device: torch.device) -> None:
        """Move to a device."""
        ...

    def save(self, folder: Path) -> None:
        """Write what `build_text` cannot make again from the recipe."""
        ...


class TransformersText:
    """A frozen encoder of transformers, such as `UMT5EncoderModel`.

    Encodes to `prompt_embeds` [B, T, D] fp32, zero where a caption has ended, as Wan's pipeline
    has it. Wan attends to those zeros too, so that sampling with another `max_tokens` than it was
    trained with (512 for the released weights) is not the same.
    """

    pooled_dim = None

    def __init__(self, words: Encoder) -> None:
        self._words = words
        self.encoder: nn.Module = words.module
        self.tokenizer = words.tokenizer
        self.max_tokens, self.embed_dim = words.max_tokens, words.width
        self.vocabulary_size = words.vocabulary_size

    @torch.no_grad()
    def encode(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """`prompt_embeds` [B, T, D], cut or padded to T = max_tokens."""
        tokens = self._words.tokens([clean(caption) for caption in captions])
        embeds = self.encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state
        ended = tokens.attention_mask.unsqueeze(-1) == 0
        return {"prompt_embeds": embeds.float().masked_fill(ended, 0)}

    def outline(self) -> dict[str, Tensor]:
        """`prompt_embeds` [1, T, D]."""
        return {"prompt_embeds": torch.empty(1, self.max_tokens, self.embed_dim, device="meta")}

    def unknown_words(self, caption: str) -> list[str]:
        """Words without a token; none for an encoder whose tokens are pieces of words."""
        return self._words.unknown_words(caption)

    def modules(self) -> list[nn.Module]:
        return [self.encoder]

    def to(self, device: torch.device) -> None:
        self._words.to(device)

    def save(self, folder: Path) -> None:
        self._words.save(folder)


class PooledText:
    """FLUX.1's two frozen encoders: T5 for the words of a caption, CLIP for all of it at once.

    Encodes to `prompt_embeds` [B, T, D] and `pooled_prompt_embeds` [B, P], both fp32. As in FLUX's
    pipelines captions go in as they are, and T5 reads the padding like words.
    """

    def __init__(self, words: Encoder, pooled: Encoder) -> None:
        self._words, self._pooled = words, pooled
        self.encoder, self.tokenizer = words.module, words.tokenizer
        self.pooled_encoder, self.pooled_tokenizer = pooled.module, pooled.tokenizer
        self.max_tokens, self.embed_dim = words.max_tokens, words.width
        self.pooled_dim = pooled.width
        self.vocabulary_size = words.vocabulary_size

    @torch.no_grad()
    def encode(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """`prompt_embeds` [B, T, D] and `pooled_prompt_embeds` [B, P]."""
        embeds = self.encoder(self._words.tokens(captions).input_ids).last_hidden_state
        pooled = self.pooled_encoder(self._pooled.tokens(captions).input_ids).pooler_output
        return {"prompt_embeds": embeds.float(), "pooled_prompt_embeds": pooled.float()}

    def outline(self) -> dict[str, Tensor]:
        """`prompt_embeds` [1, T, D] and `pooled_prompt_embeds` [1, P]."""
        return {
            "prompt_embeds": torch.empty(1, self.max_tokens, self.embed_dim, device="meta"),
            "pooled_prompt_embeds": torch.empty(1, self.pooled_dim, device="meta"),
        }

    def unknown_words(self, caption: str) -> list[str]:
        return self._words.unknown_words(caption)

    def modules(self) -> list[nn.Module]:
        return [self.encoder, self.pooled_encoder]

    def to(self, device: torch.device) -> None:
        self._words.to(device)
        self._pooled.to(device)

    def save(self, folder: Path) -> None:
        self._words.save(folder)
        self._pooled.save(folder)


def build_text(section: TextSection, captions: Iterable[str], made: Path | None) -> TextEncoder:
    """The recipe's text encoder on the CPU.

    Args:
        section: of the recipe.
        captions: of the catalog; a vocabulary is made of their words where none is given.
        made: the folder where a run keeps frozen parts that it made itself, once it did.

    Raises:
        DataError: a vocabulary is wanted, but the captions hold no words.
        ModelError: encoder or tokenizer cannot be loaded.
        RecipeError: there is no such class, or it does not take the recipe's arguments.
    """
    if section.kind == "words":
        _refuse_encoders(section)
        return WordIds(_vocabulary(section, captions, made), section.num_tokens())
    dtype = DTYPES[section.kept_in()]
    if section.pooled is None:
        return TransformersText(
            build_encoder(section, ONLY, captions, section.max_words, dtype, made)
        )
    captions = list(captions)
    encoders = (
        build_encoder(each, place, captions, section.max_words, dtype, made)
        for each, place in _two(section, section.pooled)
    )
    return PooledText(*encoders)


def outline_text(section: TextSection) -> TextEncoder:
    """The recipe's text encoder as far as it is known without weights, tokenizers or captions.

    It cannot encode; encoders stand on the meta device, and a vocabulary of the catalog's words is
    taken at its largest.

    Raises:
        ModelError: an encoder's configuration cannot be found.
        RecipeError: there is no such class, or it does not take the recipe's arguments.
    """
    if section.kind == "words":
        _refuse_encoders(section)
        size = section.max_words + len(SPECIAL)
        return WordIds(None, section.num_tokens(), vocabulary_size=size)
    dtype = DTYPES[section.kept_in()]
    if section.pooled is None:
        return TransformersText(outline_encoder(section, ONLY, section.max_words, dtype))
    encoders = (
        outline_encoder(each, place, section.max_words, dtype)
        for each, place in _two(section, section.pooled)
    )
    return PooledText(*encoders)


def _refuse_encoders(section: TextSection) -> None:
    given = {"pretrained": section.pretrained, "config": section.config, "pooled": section.pooled}
    refuse_unused("text", given, 'text.kind is "words"')


def _two(
    section: TextSection, pooled: PooledSection
) -> list[tuple[TextSection | PooledSection, Place]]:
    """Both encoders' sections; the second is from where the first is, unless it says otherwise."""
    if pooled.class_name != "CLIPTextModel":
        raise RecipeError(
            f"text.pooled.class_name: {pooled.class_name} gives no pooled vector that longtake "
            "knows. Use CLIPTextModel."
        )
    if pooled.pretrained is None and not pooled.config:
        pooled = pooled.model_copy(update={"pretrained": section.pretrained})
    return [(section, FIRST), (pooled, POOLED)]


def _vocabulary(section: TextSection, captions: Iterable[str], made: Path | None) -> Tokenizer:
    saved = None if made is None else made / "tokenizer" / "tokenizer.json"
    if saved is not None and saved.exists():
        return _saved_tokenizer(saved)
    return word_tokenizer(captions, section.max_words)


def _saved_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_str(read_regular(path).decode())
    except Exception as error:  # it raises nothing more special
        reason = reason_of(error)
        raise ModelError(
            f"{path} cannot be read: {reason}. Restore it from another checkpoint of the run."
        ) from error

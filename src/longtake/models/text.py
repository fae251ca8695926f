"""From captions to what the transformer is conditioned on."""

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor, nn

from longtake.config import TextSection
from longtake.errors import DataError, RecipeError
from longtake.models.pretrained import (
    construct,
    load_pretrained,
    quiet,
    refuse_unused,
    transformers_class,
)

_PAD, _UNKNOWN, _END = "[PAD]", "[UNK]", "</s>"
_SPECIAL = [_PAD, _UNKNOWN, _END]  # in the order of their ids: padding is 0


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

    def encode(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Named tensors, each [B, ...], for the family's model."""
        ...

    def outline(self) -> dict[str, Tensor]:
        """What `encode` gives for one caption, as shapes without values (on the meta device)."""
        ...

    def unknown_words(self, caption: str) -> list[str]:
        """Words of a caption that the encoder has never seen."""
        ...

    def to(self, device: torch.device) -> None:
        """Move to a device."""
        ...

    def save(self, folder: Path) -> None:
        """Write what `build_text` cannot make again from the recipe."""
        ...


class WordIds:
    """Ids of whole words, for a model that learns their embedding; 0 is padding.

    Encodes to `token_ids` [B, T] int64.
    """

    embed_dim = None

    def __init__(self, tokenizer: Tokenizer, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self.max_tokens = max_tokens
        self._device = torch.device("cpu")
        self.vocabulary_size: int = tokenizer.get_vocab_size()

    def encode(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """`token_ids` [B, T], cut or padded to T = max_tokens."""
        ids = torch.zeros(len(captions), self.max_tokens, dtype=torch.int64)
        for row, encoded in zip(ids, self._tokenizer.encode_batch(list(captions)), strict=True):
            found = encoded.ids[: self.max_tokens]
            row[: len(found)] = torch.tensor(found, dtype=torch.int64)
        return {"token_ids": ids.to(self._device)}

    def outline(self) -> dict[str, Tensor]:
        """`token_ids` [1, T]."""
        return {"token_ids": torch.empty(1, self.max_tokens, dtype=torch.int64, device="meta")}

    def unknown_words(self, caption: str) -> list[str]:
        """Words that stood in no caption of the catalog."""
        return _unknown_words(self._tokenizer, caption)

    def to(self, device: torch.device) -> None:
        """Where `encode` puts its ids."""
        self._device = device

    def save(self, folder: Path) -> None:
        """Write the vocabulary."""
        (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))


class TransformersText:
    """A frozen encoder of transformers, such as `UMT5EncoderModel`.

    Encodes to `prompt_embeds` [B, T, D] fp32, zero where a caption has ended, as Wan's pipeline
    has it. Wan attends to those zeros too, so that sampling with another `max_tokens` than it was
    trained with (512 for the released weights) is not the same.

    Args:
        encoder: the module; is frozen.
        tokenizer: of transformers.
        max_tokens: T.
        is_pretrained: the recipe says where it was loaded from, so that `save` need not copy it.

    Raises:
        RecipeError: the encoder does not take so many tokens.
    """

    def __init__(
        self, encoder: nn.Module, tokenizer: Any, max_tokens: int, is_pretrained: bool = False
    ) -> None:
        self.encoder = encoder.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self._is_pretrained = is_pretrained
        self._device = torch.device("cpu")
        config: Any = encoder.config
        longest = getattr(config, "max_position_embeddings", max_tokens)
        if max_tokens > longest:
            raise RecipeError(
                f"text.max_tokens is {max_tokens}, but {type(encoder).__name__} reads {longest} at "
                f"most. Set it to {longest} or less."
            )
        self.embed_dim: int = config.hidden_size
        self.vocabulary_size = len(tokenizer)

    @torch.no_grad()
    def encode(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """`prompt_embeds` [B, T, D], cut or padded to T = max_tokens."""
        tokens = self.tokenizer(
            [_clean(caption) for caption in captions],
            padding="max_length",
            max_length=self.max_tokens,
            truncation=True,
            return_attention_mask=True,
            return_tensors="pt",
        ).to(self._device)
        embeds = self.encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state
        ended = tokens.attention_mask.unsqueeze(-1) == 0
        return {"prompt_embeds": embeds.float().masked_fill(ended, 0)}

    def outline(self) -> dict[str, Tensor]:
        """`prompt_embeds` [1, T, D]."""
        return {"prompt_embeds": torch.empty(1, self.max_tokens, self.embed_dim, device="meta")}

    def unknown_words(self, caption: str) -> list[str]:
        """Words without a token; none for an encoder whose tokens are pieces of words."""
        tokenizer = getattr(self.tokenizer, "backend_tokenizer", None)
        if tokenizer is None or not isinstance(tokenizer.model, models.WordLevel):
            return []
        return _unknown_words(tokenizer, caption)

    def to(self, device: torch.device) -> None:
        """Move the encoder to a device."""
        self._device = device
        self.encoder.to(device)

    def save(self, folder: Path) -> None:
        """Write encoder and tokenizer in a pipeline's layout, unless they are pretrained ones."""
        if not self._is_pretrained:
            with quiet(self.encoder):
                self.encoder.save_pretrained(folder / "text_encoder")  # type: ignore[operator]
                self.tokenizer.save_pretrained(folder / "tokenizer")


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
    given: dict[str, object] = {"pretrained": section.pretrained, "config": section.config}
    if section.kind == "words":
        refuse_unused("text", given, 'text.kind is "words"')
        return WordIds(_word_tokenizer(section, captions, made), section.max_tokens)
    from transformers import AutoTokenizer

    encoder_class = _encoder_class(section.class_name)
    if section.pretrained is not None:
        refuse_unused("text", {"config": section.config}, "text.pretrained brings its own")
        encoder = load_pretrained(encoder_class, section.pretrained, section.subfolder)
        tokenizer = load_pretrained(AutoTokenizer, section.pretrained, section.tokenizer_subfolder)
        return TransformersText(encoder, tokenizer, section.max_tokens, is_pretrained=True)
    if made is not None and (made / "text_encoder").is_dir():
        encoder = load_pretrained(encoder_class, str(made), "text_encoder")
        tokenizer = load_pretrained(AutoTokenizer, str(made), "tokenizer")
        return TransformersText(encoder, tokenizer, section.max_tokens)
    return _random(encoder_class, section, captions)


def _encoder_class(name: str) -> Any:
    found = transformers_class("text.class_name", name)
    if getattr(found, "config_class", None) is None:
        raise RecipeError(
            f"text.class_name: {name} is not a model of transformers. Use an encoder such as "
            "UMT5EncoderModel."
        )
    return found


def _random(encoder_class: Any, section: TextSection, captions: Iterable[str]) -> TransformersText:
    """An encoder with random weights over a vocabulary of the catalog's words."""
    from transformers import PreTrainedTokenizerFast

    words = _word_tokenizer(section, captions, None)
    words.post_processor = processors.TemplateProcessing(
        single=f"$A {_END}", special_tokens=[(_END, words.token_to_id(_END))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=_PAD, unk_token=_UNKNOWN, eos_token=_END
    )
    fitted = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = construct("text.config", encoder_class.config_class, fitted | section.config)
    try:
        encoder = encoder_class(config)
    except Exception as error:  # there is no end to how wrong sizes fail inside a constructor
        raise RecipeError(f"text.config does not fit {section.class_name}: {error}.") from error
    return TransformersText(encoder, tokenizer, section.max_tokens)


def _clean(caption: str) -> str:
    """A caption as Wan's pipeline cleans a prompt: HTML entities resolved, single spaces."""
    return " ".join(html.unescape(html.unescape(caption)).split())


def _word_tokenizer(section: TextSection, captions: Iterable[str], made: Path | None) -> Tokenizer:
    saved = None if made is None else made / "tokenizer" / "tokenizer.json"
    if saved is not None and saved.is_file():
        return Tokenizer.from_file(str(saved))
    tokenizer = Tokenizer(models.WordLevel(unk_token=_UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(
        vocab_size=section.max_words + len(_SPECIAL), special_tokens=_SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(captions, trainer)
    if tokenizer.get_vocab_size() <= len(_SPECIAL):
        raise DataError(
            "The catalog's captions hold no words to make a vocabulary of. Give the clips captions "
            "and index them again, or name a pretrained text encoder in text.pretrained."
        )
    return tokenizer


def _unknown_words(tokenizer: Tokenizer, caption: str) -> list[str]:
    unknown = tokenizer.token_to_id(_UNKNOWN)
    encoded = tokenizer.encode(caption, add_special_tokens=False)
    return [
        caption[start:end]
        for token, (start, end) in zip(encoded.ids, encoded.offsets, strict=True)
        if token == unknown
    ]

"""A vocabulary of the catalog's own words, for models and encoders that learn from nothing."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn

from longtake.errors import DataError
from longtake.fsio import write_text

PAD, UNKNOWN, START, END = "[PAD]", "[UNK]", "<s>", "</s>"
SPECIAL = (PAD, UNKNOWN, END)
"""In the order of their ids: padding is 0."""


class WordIds:
    """Ids of whole words, for a model that learns their embedding; 0 is padding.

    Encodes to `token_ids` [B, T] int64.
    """

    embed_dim = None
    pooled_dim = None

    def __init__(
        self, tokenizer: Tokenizer | None, max_tokens: int, vocabulary_size: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self.max_tokens = max_tokens
        self._device = torch.device("cpu")
        self.vocabulary_size: int = tokenizer.get_vocab_size() if tokenizer else vocabulary_size

    def encode(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """`token_ids` [B, T], cut or padded to T = max_tokens."""
        assert self._tokenizer is not None, "an outline cannot encode"
        ids = torch.zeros(len(captions), self.max_tokens, dtype=torch.int64)
        for row, encoded in zip(ids, self._tokenizer.encode_batch(list(captions)), strict=True):
            found = encoded.ids[: self.max_tokens]
            row[: len(found)] = torch.tensor(found, dtype=torch.int64)
        return {"token_ids": ids.to(self._device)}

    def outline(self) -> dict[str, Tensor]:
        """`token_ids` [1, T]."""
        return {"token_ids": torch.empty(1, self.max_tokens, dtype=torch.int64, device="meta")}

    def unknown_words(self, caption: str) -> list[str]:
        return unknown_words(self._tokenizer, caption) if self._tokenizer else []

    def modules(self) -> list[nn.Module]:
        """None: the model embeds the ids."""
        return []

    def to(self, device: torch.device) -> None:
        """Where `encode` puts its ids."""
        self._device = device

    def save(self, folder: Path) -> None:
        """Write the vocabulary."""
        assert self._tokenizer is not None, "an outline has no words to save"
        (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
        # By ourselves: the library raises a bare Exception when the disk is full.
        write_text(folder / "tokenizer" / "tokenizer.json", self._tokenizer.to_str(pretty=True))


def word_tokenizer(
    captions: Iterable[str], max_words: int, special: Sequence[str] = SPECIAL
) -> Tokenizer:
    """A tokenizer of the most frequent words in captions.

    Raises:
        DataError: the captions hold no words.
    """
    tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(
        vocab_size=max_words + len(special), special_tokens=list(special), show_progress=False
    )
    tokenizer.train_from_iterator(captions, trainer)
    if tokenizer.get_vocab_size() <= len(special):
        raise DataError(
            "The catalog's captions hold no words to make a vocabulary of. Give the clips captions "
            "and index them again, or name a pretrained text encoder in text.pretrained."
        )
    return tokenizer


def unknown_words(tokenizer: Tokenizer, caption: str) -> list[str]:
    """Words of a caption that a tokenizer of whole words does not know."""
    unknown = tokenizer.token_to_id(UNKNOWN)
    encoded = tokenizer.encode(caption, add_special_tokens=False)
    return [
        caption[start:end]
        for token, (start, end) in zip(encoded.ids, encoded.offsets, strict=True)
        if token == unknown
    ]

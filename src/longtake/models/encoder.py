"""One frozen text encoder of transformers with its tokenizer: loaded, made, or as an outline."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, processors
from torch import nn

from longtake.config import PooledSection, TextSection
from longtake.errors import RecipeError
from longtake.models.architecture import keep_weights_in, on_meta
from longtake.models.pretrained import (
    construct,
    load_pretrained,
    quiet,
    refuse_unused,
    transformers_class,
)
from longtake.models.words import END, PAD, SPECIAL, START, UNKNOWN, unknown_words, word_tokenizer


@dataclass(frozen=True)
class Place:
    """Where a recipe names an encoder, and where a run keeps one that it made itself."""

    key: str
    """Of the recipe's section."""
    encoder: str
    """Folder in a pipeline's layout."""
    tokenizer: str
    """Likewise."""
    special: tuple[str, ...] = SPECIAL
    """Tokens that are no words, in the order of their ids."""


ONLY = Place("text", "text_encoder", "tokenizer")
"""The encoder of a model that has one."""

FIRST = Place("text", "text_encoder_2", "tokenizer_2")
"""The encoder of words where there is one of whole captions too: FLUX counts it second."""

# An end of 2 would mean the highest id to CLIP: the first released had such a configuration.
POOLED = Place("text.pooled", "text_encoder", "tokenizer", (PAD, UNKNOWN, START, END))
"""The encoder of whole captions."""


class Encoder:
    """A frozen encoder and its tokenizer.

    Raises:
        RecipeError: the encoder does not take so many tokens.
    """

    def __init__(
        self,
        module: nn.Module,
        tokenizer: Any,
        max_tokens: int,
        place: Place = ONLY,
        is_pretrained: bool = False,
    ) -> None:
        self.module = module.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self._place = place
        self._is_pretrained = is_pretrained
        config: Any = module.config
        longest = getattr(config, "max_position_embeddings", max_tokens)
        if max_tokens > longest:
            raise RecipeError(
                f"{place.key}.max_tokens is {max_tokens}, but {type(module).__name__} reads "
                f"{longest} at most. Set it to {longest} or less."
            )
        self.width: int = config.hidden_size
        self.vocabulary_size: int = config.vocab_size if tokenizer is None else len(tokenizer)

    def tokens(self, captions: Sequence[str]) -> Any:
        """`input_ids` and `attention_mask`, each [B, T], on the module's device."""
        assert self.tokenizer is not None, "an outline cannot encode"
        return self.tokenizer(
            list(captions),
            padding="max_length",
            max_length=self.max_tokens,
            truncation=True,
            return_attention_mask=True,
            return_tensors="pt",
        ).to(next(self.module.parameters()).device)

    def unknown_words(self, caption: str) -> list[str]:
        """Words without a token; none for an encoder whose tokens are pieces of words."""
        tokenizer = getattr(self.tokenizer, "backend_tokenizer", None)
        if tokenizer is None or not isinstance(tokenizer.model, models.WordLevel):
            return []
        return unknown_words(tokenizer, caption)

    def to(self, device: torch.device) -> None:
        self.module.to(device)

    def save(self, folder: Path) -> None:
        """Write module and tokenizer in a pipeline's layout, unless they are pretrained ones."""
        if not self._is_pretrained:
            assert self.tokenizer is not None, "an outline has no weights to save"
            with quiet(self.module):
                self.module.save_pretrained(folder / self._place.encoder)  # type: ignore[operator]
                self.tokenizer.save_pretrained(folder / self._place.tokenizer)


def build_encoder(
    section: TextSection | PooledSection,
    place: Place,
    captions: Iterable[str],
    max_words: int,
    dtype: torch.dtype,
    made: Path | None,
) -> Encoder:
    """An encoder on the CPU: pretrained, made earlier by the run, or random over its own words.

    Its weights are kept in `dtype`.

    Raises:
        DataError: a vocabulary is wanted, but the captions hold no words.
        ModelError: encoder or tokenizer cannot be loaded.
        RecipeError: there is no such class, or it does not take the recipe's arguments.
    """
    from transformers import AutoTokenizer

    encoder_class, where = _encoder_class(section, place), section.pretrained
    if where is not None:
        _refuse_config(section, place)
        module = load_pretrained(encoder_class, where, section.subfolder, dtype=dtype)
        tokenizer = load_pretrained(AutoTokenizer, where, section.tokenizer_subfolder)
        return Encoder(module, tokenizer, section.num_tokens(), place, is_pretrained=True)
    if made is not None and (made / place.encoder).is_dir():
        module = load_pretrained(encoder_class, str(made), place.encoder, dtype=dtype)
        tokenizer = load_pretrained(AutoTokenizer, str(made), place.tokenizer)
    else:
        words = word_tokenizer(captions, max_words, place.special)
        tokenizer = _transformers_tokenizer(words, place, section.num_tokens())
        module = _random(encoder_class, section, place, len(tokenizer))
        keep_weights_in(module, dtype)
    return Encoder(module, tokenizer, section.num_tokens(), place)


def outline_encoder(
    section: TextSection | PooledSection, place: Place, max_words: int, dtype: torch.dtype
) -> Encoder:
    """The same on the meta device, without a tokenizer; of a vocabulary at its largest.

    Raises:
        ModelError: there is no configuration.
        RecipeError: there is no such class, or it does not take the recipe's arguments.
    """
    encoder_class, where = _encoder_class(section, place), section.pretrained
    if where is not None:
        _refuse_config(section, place)
        module = on_meta(encoder_class, where, section.subfolder)
        keep_weights_in(module, dtype)
        return Encoder(module, None, section.num_tokens(), place, is_pretrained=True)
    with torch.device("meta"):
        module = _random(encoder_class, section, place, max_words + len(place.special))
        keep_weights_in(module, dtype)
    return Encoder(module, None, section.num_tokens(), place)


def _refuse_config(section: TextSection | PooledSection, place: Place) -> None:
    unused = {"config": section.config}
    refuse_unused(place.key, unused, f"{place.key}.pretrained brings its own")


def _encoder_class(section: TextSection | PooledSection, place: Place) -> Any:
    name = section.class_name
    found = transformers_class(f"{place.key}.class_name", name)
    if getattr(found, "config_class", None) is None:
        raise RecipeError(
            f"{place.key}.class_name: {name} is not a model of transformers. Use an encoder such "
            "as UMT5EncoderModel."
        )
    return found


def _transformers_tokenizer(words: Tokenizer, place: Place, max_tokens: int) -> Any:
    """A tokenizer of transformers that ends captions, and begins them where the encoder wants."""
    from transformers import PreTrainedTokenizerFast

    framing = [token for token in place.special if token in (START, END)]
    begin = f"{START} " if START in framing else ""
    words.post_processor = processors.TemplateProcessing(
        single=f"{begin}$A {END}",
        special_tokens=[(token, words.token_to_id(token)) for token in framing],
    )
    begins = {"bos_token": START} if begin else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        model_max_length=max_tokens,
        **begins,
    )


def _random(
    encoder_class: Any, section: TextSection | PooledSection, place: Place, vocabulary_size: int
) -> nn.Module:
    """An encoder with random weights over a vocabulary."""
    key, special = f"{place.key}.config", place.special
    fitted = {
        "vocab_size": vocabulary_size,
        "pad_token_id": special.index(PAD),
        "eos_token_id": special.index(END),
    }
    if START in special:
        fitted |= {"bos_token_id": special.index(START)}
        fitted |= {"max_position_embeddings": section.num_tokens()}
    config = construct(key, encoder_class.config_class, fitted | section.config)
    try:
        module: nn.Module = encoder_class(config)
    except Exception as error:  # there is no end to how wrong sizes fail inside a constructor
        raise RecipeError(f"{key} does not fit {section.class_name}: {error}.") from error
    return module

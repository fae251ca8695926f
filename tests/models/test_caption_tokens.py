"""How many captions a text encoder would truncate, counted by its own tokenizer."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from longtake.config import PooledSection, TextSection
from longtake.models.caption_tokens import MOST_COUNTED, caption_lengths, review_captions
from longtake.models.wan import Wan

_SHORT, _LONG = "a red ball", "a red ball rolls left and then right again"


@pytest.fixture
def pretrained(tmp_path: Path) -> str:
    """A folder with a tokenizer.json, as the releases have it: a token per letter, and an end."""
    letters = {letter: number for number, letter in enumerate("-abcdefghijklmnopqrstuvwxyz'&;#3|")}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="-"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A |", special_tokens=[("|", letters["|"])]
    )
    tokenizer.enable_truncation(4)  # as a saved tokenizer may have it
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("section", "truncated", "longest"),
    [
        (TextSection(max_tokens=9), 0, 9),
        (TextSection(max_tokens=8), 1, 9),
        (TextSection(kind="transformers", max_tokens=9), 1, 10),
    ],
)
def test_words_are_counted_without_a_vocabulary(
    section: TextSection, truncated: int, longest: int
) -> None:
    """An encoder's captions end with a token; a caption that stands twice counts once."""
    found = caption_lengths(section, [_SHORT, _LONG, _LONG])
    assert (found.num_counted, found.num_truncated, found.longest) == (2, truncated, longest)


def test_a_pretrained_tokenizer_counts_what_it_would_be_given(pretrained: str) -> None:
    section = TextSection(kind="transformers", pretrained=pretrained, max_tokens=4)
    caption = "a&#39;b"  # an apostrophe
    assert caption_lengths(section, [caption], Wan.frozen.text).num_truncated == 0
    flux = section.model_copy(update={"pooled": PooledSection()})
    assert caption_lengths(flux, [caption], Wan.frozen.text).longest == len(caption) + 1
    (facts, warning) = review_captions(section, Wan.frozen.text, ["abc", "abcd"])
    assert facts is not None
    assert (facts["num_truncated"], facts["num_counted"], facts["max_tokens"]) == (1, 2, 4)
    assert warning is not None
    assert "1 of 2 captions are truncated: they have more than text.max_tokens = 4" in warning


def test_a_large_catalog_is_sampled() -> None:
    captions = [f"clip {number} of many" for number in range(3 * MOST_COUNTED)]
    found = caption_lengths(TextSection(max_tokens=2), captions)
    assert found.num_truncated == found.num_counted == MOST_COUNTED


def test_without_a_tokenizer_it_says_so(tmp_path: Path) -> None:
    section = TextSection(kind="transformers", pretrained=str(tmp_path), max_tokens=1)
    facts, warning = review_captions(section, Wan.frozen.text, [_LONG])
    assert facts is None
    assert warning is not None
    assert "tokens were not counted: " in warning

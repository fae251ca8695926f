"""How many captions a text encoder would truncate, counted by its own tokenizer."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from longtake.config import PooledSection, TextSection
from longtake.models.caption_tokens import MOST_COUNTED, review_captions
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
    facts, _ = review_captions(section, None, [_SHORT, _LONG, _LONG])
    limit = section.max_tokens
    counted = {"num_counted": 2, "num_truncated": truncated, "longest": longest}
    assert facts == {"max_tokens": limit, **counted}


def test_a_pretrained_tokenizer_counts_what_it_would_be_given(pretrained: str) -> None:
    section = TextSection(kind="transformers", pretrained=pretrained, max_tokens=4)
    caption = "a&#39;b"  # an apostrophe
    counted = {"max_tokens": 4, "num_counted": 1, "num_truncated": 0, "longest": 4}
    assert review_captions(section, Wan.frozen.text, [caption]) == (counted, None)
    flux = section.model_copy(update={"pooled": PooledSection()})
    facts, _ = review_captions(flux, Wan.frozen.text, [caption])
    assert facts == counted | {"num_truncated": 1, "longest": len(caption) + 1}
    facts, warning = review_captions(section, Wan.frozen.text, ["abc", "abcd"])
    assert facts == counted | {"num_counted": 2, "num_truncated": 1, "longest": 5}
    expected = "1 of 2 captions are truncated: they have more than text.max_tokens = 4"
    assert expected in str(warning)


def test_a_large_catalog_is_sampled() -> None:
    captions = [f"clip {number} of many" for number in range(3 * MOST_COUNTED)]
    facts, _ = review_captions(TextSection(max_tokens=2), None, captions)
    assert facts is not None
    assert facts["num_truncated"] == facts["num_counted"] == MOST_COUNTED


def test_without_a_tokenizer_it_says_so(tmp_path: Path) -> None:
    section = TextSection(kind="transformers", pretrained=str(tmp_path), max_tokens=1)
    facts, warning = review_captions(section, Wan.frozen.text, [_LONG])
    assert facts is None
    assert "tokens were not counted: " in str(warning)

"""Cleans captions for a text encoder, and counts the tokens that it would cut; without torch."""

import html
from collections.abc import Callable, Sequence
from typing import Any

import ftfy

from longtake.config import TextSection
from longtake.errors import ModelError
from longtake.models.pretrained import PipelinePart, load_pretrained, locate
from longtake.models.releases import find_part

MOST_COUNTED = 10_000  # captions, evenly spaced; takes a second or two


def review_captions(
    section: TextSection, encoder: PipelinePart | None, captions: Sequence[str]
) -> tuple[dict[str, int] | None, str | None]:
    """Count the tokens of a catalog's captions by the first text encoder's tokenizer.

    The second one of FLUX (CLIP) reads the first 77 tokens of any caption.

    Args:
        section: the recipe's text section.
        encoder: the family's text encoder, needed where it is pretrained.
        captions: captions of the catalog; equal ones are counted once, and at most MOST_COUNTED.

    Returns:
        The tokens that the encoder reads (max_tokens), the captions counted (num_counted), those of
        them that are truncated (num_truncated) and the tokens of the longest; and a warning if any
        is truncated. Without a tokenizer there are no numbers, and the warning says why.
    """
    distinct = list(dict.fromkeys(captions))
    counted = distinct[:: -(-len(distinct) // MOST_COUNTED) or 1]
    limit = section.num_tokens()
    # Each token is at least a byte, except the end token.
    could_be_long = [each for each in counted if len(each.encode()) >= limit]
    try:
        counts = _counter(section, encoder)(could_be_long) if could_be_long else []
    except ModelError as error:
        return None, f"the captions' tokens were not counted: {error}"
    facts = {
        "max_tokens": limit,
        "num_counted": len(counted),
        "num_truncated": sum(count > limit for count in counts),
        "longest": max(counts, default=0),
    }
    if not facts["num_truncated"]:
        return facts, None
    return facts, (
        f"{facts['num_truncated']} of {len(counted)} captions are truncated: they have more than "
        f"text.max_tokens = {limit} tokens (the longest {facts['longest']}). Shorten them or raise "
        "text.max_tokens; a pretrained model should not get more tokens than it was trained with."
    )


def clean(caption: str) -> str:
    """Clean a caption as Wan's pipeline does: ftfy, HTML entities resolved, single spaces.

    ftfy straightens curly quotes, among others; captions by language models are full of them.
    """
    return " ".join(html.unescape(html.unescape(ftfy.fix_text(caption))).split())


def _counter(
    section: TextSection, encoder: PipelinePart | None
) -> Callable[[Sequence[str]], list[int]]:
    """Return a function that counts the tokens of captions, special tokens included."""
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import Whitespace

    if section.pretrained is None:
        split, ends = Whitespace().pre_tokenize_str, section.kind == "transformers"
        return lambda captions: [len(split(caption)) + ends for caption in captions]
    assert encoder is not None, "a pretrained encoder is a family's"
    # Wan's pipeline cleans captions; FLUX's, the one with a pooled encoder, does not.
    cleaned = clean if section.pooled is None else str
    name = find_part(section.pretrained, encoder).tokenizer
    file = locate(section.pretrained, name) / name / "tokenizer.json"
    if not file.is_file():
        from transformers import AutoTokenizer

        slow: Any = load_pretrained(AutoTokenizer, section.pretrained, name, verbose=False)
        return lambda captions: [
            len(ids) for ids in slow([cleaned(each) for each in captions]).input_ids
        ]
    tokenizer = Tokenizer.from_file(str(file))
    # tokenizer.json may store a limit and padding, which would hide the true numbers.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda captions: [
        len(each) for each in tokenizer.encode_batch([cleaned(each) for each in captions])
    ]

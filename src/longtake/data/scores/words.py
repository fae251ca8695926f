"""How much a caption says: its words, and those of them that are nouns.

Nouns are found by HanTa, a tagger whose English model is part of the package: nothing is
downloaded, and every process finds the same.
"""

import math
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import cache
from typing import TYPE_CHECKING

from longtake.data.tasks import in_order, run_tasks
from longtake.data.workers import Task
from longtake.errors import DataError

if TYPE_CHECKING:
    from HanTa.HanoverTagger import HanoverTagger

_CHUNK = 500
"""Captions that one process tags at a time: about a second of work."""

_LONGEST = 32
"""Letters of a word that the tagger sees: its time grows with their square, and a file's name or
an address that got into a caption can have thousands."""

_WORD = re.compile(r"\w+(?:[-'\u2019]\w+)*")
# For the tagger a possessive 's is a token of its own, and so is every punctuation mark.
_TOKEN = re.compile(r"\d+(?:[.,]\d+)*\w*|\w+(?:-\w+)*|['\u2019]s\b|[^\w\s]")
_SENTENCE_END = re.compile(r"(?<=[.!?;])\s+")
_LATIN = re.compile(r"[A-Za-z]")


def num_words(caption: str) -> float:
    """The length of a caption in words; NaN where there is no caption."""
    return float(len(_WORD.findall(caption))) if caption.strip() else math.nan


def num_nouns(caption: str) -> float:
    """The common and proper nouns of an English caption, each as often as it occurs.

    Returns:
        Their number; NaN, that is unknown, where there is no Latin letter to be tagged.
    """
    return float(len(nouns(caption))) if _LATIN.search(caption) else math.nan


def nouns(caption: str) -> list[str]:
    """The nouns of an English caption as they are written, in order.

    HanTa's tags for English are the British National Corpus's (CLAWS C5): NN0, NN1 and NN2 are
    common nouns, NP0 proper ones.
    """
    found = []
    for sentence in _SENTENCE_END.split(caption):
        tokens = _TOKEN.findall(sentence)
        ends = [token[-_LONGEST:] for token in tokens]
        tags = _tagger().tag_sent(ends, taglevel=0)  # level 0: no lemmas, which take longer
        found += [token for token, tag in zip(tokens, tags, strict=True) if tag[:2] in ("NN", "NP")]
    return found


def nouns_of_all(
    captions: Sequence[str], *, on: str | None = None, workers: int | None = None
) -> Generator[float]:
    """`num_nouns` of every caption, in their order.

    Args:
        captions: of which captions.
        on: see `run_tasks`.
        workers: processes that tag; Python lets only one thread at a time do so.

    Raises:
        DataError: no worker can be started, or workers crash at a caption.
    """
    chunks = [captions[start : start + _CHUNK] for start in range(0, len(captions), _CHUNK)]
    if len(chunks) < 2 and on is None:
        workers = 0  # starting another process takes longer
    results = run_tasks(_TagTask(), chunks, on=on, workers=workers)
    with closing(in_order(results)) as results_in_order:
        for counts in results_in_order:
            yield from counts


class _TagTask(Task[Sequence[str], list[float]]):
    """Count the nouns of some captions."""

    doing = "tagging captions"
    silence_seconds = 600.0  # it reports no progress

    def do(self, item: Sequence[str], progress: Callable[[], object]) -> list[float]:
        return [num_nouns(caption) for caption in item]

    def lost(self, item: Sequence[str], reason: str) -> list[float]:
        raise DataError(f"{reason}. It was at the {len(item)} captions from {item[0][:80]!r} on.")


@cache
def _tagger() -> "HanoverTagger":
    from HanTa.HanoverTagger import HanoverTagger  # only who tags needs the model in memory

    return HanoverTagger("morphmodel_en.pgz")

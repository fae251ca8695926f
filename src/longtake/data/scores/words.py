"""How much a caption says: its words, and those of them that are nouns.

Nouns are found by HanTa, a tagger whose English model is part of the package: nothing is
downloaded, and every process finds the same.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

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


def num_nouns_of_all(
    captions: Sequence[str], workers: int, progress: Callable[[int, int], None] | None = None
) -> NDArray[np.float64]:
    """`num_nouns` of every caption, by several processes where there are enough captions: [N].

    Args:
        captions: N of them.
        workers: processes that tag; Python lets only one thread at a time do so.
        progress: called with (captions done, captions in all) now and then.
    """
    chunks = [captions[start : start + _CHUNK] for start in range(0, len(captions), _CHUNK)]
    counts: list[float] = []
    for chunk in _tagged(chunks, workers):
        counts += chunk
        if progress is not None:
            progress(len(counts), len(captions))
    return np.array(counts, dtype=np.float64)


def _tagged(chunks: Sequence[Sequence[str]], workers: int) -> Iterator[list[float]]:
    if min(workers, len(chunks)) < 2:
        yield from map(_count, chunks)
        return
    # Spawned: a fork would copy whatever locks this process's threads happen to hold.
    pool = ProcessPoolExecutor(min(workers, len(chunks)), mp_context=get_context("spawn"))
    try:
        yield from pool.map(_count, chunks)
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C must not wait for a million captions


def _count(captions: Sequence[str]) -> list[float]:
    return [num_nouns(caption) for caption in captions]


@cache
def _tagger() -> "HanoverTagger":
    from HanTa.HanoverTagger import HanoverTagger  # only who tags needs the model in memory

    return HanoverTagger("morphmodel_en.pgz")

"""Scores: one number for each clip of a catalog, by which a curriculum can select."""

import hashlib
import importlib.util
import math
import re
import sys
import unicodedata
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter

from longtake.data import buckets, content, decode_limits, duplicates, tasks
from longtake.data.catalog import CLIP_SCHEMA, Catalog, Rejection
from longtake.data.clip import Clip
from longtake.data.tasks import ALL_CORES, Work
from longtake.data.window import Crop, Window, read_window
from longtake.data.workers import ClipTask, Task
from longtake.errors import ClipError, DataError
from longtake.formatting import nearest
from longtake.fsio import Count, Journal

if TYPE_CHECKING:
    from HanTa.HanoverTagger import HanoverTagger


STEP_SECONDS = 1 / 8  # between two compared frames
SHORT_SIDE = 64  # pixels of the shorter side of the compared frames

_PASSAGES, _FRAMES = 4, 9  # up to 4 passages of 9 frames (one second), evenly spaced over a clip
_LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # luma of R'G'B', ITU-R BT.601
_CHUNK = 500  # captions for one process at a time: about a second of work
_MAX_LETTERS = 32  # letters of a word: the tagger's time grows with their square

_WORD = re.compile(r"\w+(?:[-'\u2019]\w+)*")
# The tagger expects a possessive 's and every punctuation mark as a token of its own.
_TOKEN = re.compile(r"\d+(?:[.,]\d+)*\w*|\w+(?:-\w+)*|['\u2019]s\b|[^\w\s]")
_SENTENCE_END = re.compile(r"(?<=[.!?;])\s+")
_LATIN = re.compile(r"[A-Za-z]")


def num_words(caption: str) -> float:
    """Return the number of words in a caption, or NaN if it is empty (a clip's score)."""
    return float(len(_WORD.findall(caption))) if caption.strip() else math.nan


def num_nouns(caption: str) -> float:
    """Return the number of nouns in an English caption, or NaN for text without Latin letters."""
    return float(len(nouns(caption))) if _LATIN.search(caption) else math.nan


_FUNCTION_WORDS = {
    "English": ("the", "a", "an", "of", "and", "with", "is", "are", "on", "to", "at", "his", "her"),
    "French": ("le", "la", "les", "des", "du", "une", "un", "et", "dans", "est", "sur", "avec"),
    "German": ("der", "die", "das", "und", "ein", "eine", "einen", "mit", "auf", "ist", "dem"),
    "Spanish": ("el", "la", "los", "las", "del", "una", "un", "y", "con", "en", "es", "por"),
}
_SCRIPTS = {"CJK": "Chinese", "HIRAGANA": "Japanese", "KATAKANA": "Japanese", "HANGUL": "Korean"}


def caption_language(caption: str) -> str:
    """Guess the language of a caption by its script and frequent small words; "" if unclear."""
    words = _WORD.findall(caption.lower())
    if _LATIN.search(caption):
        counts = {
            name: sum(word in known for word in words) for name, known in _FUNCTION_WORDS.items()
        }
        best = max(counts, key=lambda name: counts[name])  # English if several are equal
        return best if counts[best] else ""
    # The first word of a Unicode name tells the script, such as HIRAGANA LETTER A.
    letters = {unicodedata.name(each, "?").split()[0] for each in "".join(words)}
    scripts = sorted(letters & _SCRIPTS.keys(), reverse=True)  # kana before Chinese characters
    if scripts:
        return _SCRIPTS[scripts[0]]
    return "Russian or its like" if "CYRILLIC" in letters else ""


def nouns(caption: str) -> list[str]:
    """Return the nouns of an English caption: HanTa's tags NN0, NN1, NN2 (common), NP0 (proper)."""
    found = []
    for sentence in _SENTENCE_END.split(caption):
        tokens = _TOKEN.findall(sentence)
        # Endings tell the part of speech.
        ends = [token[-_MAX_LETTERS:] for token in tokens]
        tags = _tagger().tag_sent(ends, taglevel=0)  # level 0: without lemmas, which take longer
        found += [token for token, tag in zip(tokens, tags, strict=True) if tag[:2] in ("NN", "NP")]
    return found


def nouns_of_all(captions: Sequence[str], work: Work = ALL_CORES) -> Generator[float]:
    """Yield the number of nouns in each caption."""
    chunks = [captions[start : start + _CHUNK] for start in range(0, len(captions), _CHUNK)]
    if len(chunks) < 2 and work.on is None:
        work = tasks.HERE  # starting a process takes longer
    results = tasks.run_tasks(_TagTask(), chunks, work)
    with closing(tasks.in_order(results)) as results_in_order:
        for counts in results_in_order:
            yield from counts


class _TagTask(Task[Sequence[str], list[float]]):
    """Task of a worker process: counts the nouns of some captions."""

    doing = "tagging captions"
    silence_seconds = 600.0  # no progress is reported

    def do(self, item: Sequence[str], progress: Callable[[], object]) -> list[float]:
        return [num_nouns(caption) for caption in item]

    def lost(self, item: Sequence[str], reason: str) -> list[float]:
        raise DataError(f"{reason}. It was at the {len(item)} captions from {item[0][:80]!r} on.")


@cache
def _tagger() -> "HanoverTagger":
    from HanTa.HanoverTagger import HanoverTagger  # loading takes long

    return HanoverTagger("morphmodel_en.pgz")


@dataclass(frozen=True)
class MotionScore(ClipTask[Clip, float]):
    """Task of a worker process: computes one clip's amount of motion."""

    limits: decode_limits.Limits = decode_limits.DEFAULT
    silence_seconds = 600.0  # progress is reported only after each passage

    @property
    def memory_gib(self) -> float:  # type: ignore[override]  # the limits decide it
        return self.limits.memory_gib

    def compute(self, item: Clip, progress: Callable[[], object]) -> float:
        return motion(item, self.limits.timed(item.media, progress))

    def reads(self, item: Clip) -> str:
        return item.media.path if item.num_frames > 1 and not item.media.is_remote else ""


def motion(clip: Clip, progress: Callable[[], object] = lambda: None) -> float:
    """Return a clip's motion: the mean luma difference (0 to 255) of frames 1/8 s apart.

    This is VMAF's motion feature (github.com/Netflix/vmaf, resource/doc/features.md), made
    independent of the frame rate. Frames are small, which removes noise as VMAF's blur does.

    Raises:
        ClipError: the clip cannot be decoded.
    """
    if clip.num_frames < 2:
        return 0.0
    changes = []
    for window in _windows(clip):
        luma = np.einsum("c,cfhw->fhw", _LUMA, read_window(window), dtype=np.float32)
        changes.append(np.abs(np.diff(luma, axis=0)).mean(axis=(1, 2)))
        progress()
    return float(np.concatenate(changes).mean())


def _windows(clip: Clip) -> list[Window]:
    # A short or slow clip has fewer frames, at least two.
    stride = min(max(1, round(clip.fps * STEP_SECONDS)), clip.num_frames - 1)
    num_frames = min(_FRAMES, (clip.num_frames - 1) // stride + 1)
    last_start = clip.num_frames - 1 - (num_frames - 1) * stride
    # Passages do not overlap: a short clip has fewer.
    passages = min(_PASSAGES, last_start // (num_frames * stride) + 1)
    starts = np.linspace(0, last_start, passages) if passages > 1 else [last_start // 2]
    scale = min(1.0, SHORT_SIDE / min(clip.height, clip.width))
    height, width = max(1, round(clip.height * scale)), max(1, round(clip.width * scale))
    whole = Crop(height, width, top=0, left=0)
    passages_frames = (range(int(s), int(s) + num_frames * stride, stride) for s in starts)
    return [buckets.window_of(clip, frames, whole, height, width) for frames in passages_frames]


@dataclass(frozen=True)
class OwnScore(ClipTask[Clip, float]):
    """Task of a worker process: calls a user's score function for one clip."""

    by: str  # `module:function`
    folder: str  # searched last for the module
    doing = "scoring"
    silence_seconds: float = 3600.0  # no progress is reported

    @cached_property
    def function(self) -> Callable[[Clip], Any]:
        return _find(self.by, self.folder)

    @property
    def version(self) -> str:
        """Hash of the file of the user's function; results of another version are not used."""
        path = getattr(sys.modules.get(self.function.__module__), "__file__", None)
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12] if path else ""

    def compute(self, item: Clip, progress: Callable[[], object]) -> float:
        try:
            content.check_unchanged(item.media, progress)
            value = self.function(item)
        except ClipError:
            raise
        except Exception as error:
            raise DataError(
                f"{self.by} raised {type(error).__name__} for {item.path} ({item.identity}): "
                f"{error}. Mend the function; to leave a clip unscored, return float('nan')."
            ) from error
        if not _is_number(value):
            raise DataError(
                f"{self.by} returned {value!r} for {item.path} ({item.identity}); expected a "
                "finite number, or float('nan') for unknown."
            )
        return float(value)


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, str | bool) and not math.isinf(float(value))
    except (TypeError, ValueError, OverflowError):
        return False


def _find(by: str, folder: str) -> Callable[[Clip], Any]:
    module_name, _, function_name = by.partition(":")
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that no file there hides an installed package
    try:
        found = getattr(importlib.import_module(module_name), function_name, None)
    except Exception as error:
        raise DataError(
            f"The score {by} was not found: importing {module_name} raised "
            f"{type(error).__name__}: {error}. Looked where Python looks, and in {folder}."
        ) from error
    if not callable(found):
        names = [key for key, value in vars(sys.modules[module_name]).items() if callable(value)]
        near = nearest(function_name, names)
        hint = f" Did you mean {near!r}?" if near else ""
        raise DataError(
            f"The score {by} was not found: {module_name} has no function {function_name!r}.{hint}"
        )
    return found


SCORES = {
    "nouns": "nouns in the caption, each as often as it occurs (English)",
    "motion": "how far the picture changes in an eighth of a second (0 to 255)",
    "length": "words in the caption",
    "duplicates": "0: kept; 1, 2, ...: the copies of a clip that is kept, seen by their frames",
}
"""Built-in scores of clips by name, and what each one counts."""

_ROW: TypeAdapter[tuple[int, float | str]] = TypeAdapter(tuple[Count, float])
_HASHES_ROW: TypeAdapter[tuple[int, float | str]] = TypeAdapter(
    tuple[Count, Annotated[str, Field(pattern="^([0-9a-f]{64})*$")]]
)


@dataclass(frozen=True)
class Scored:
    """Result of `score`: a catalog with one more attribute of its clips."""

    catalog: Catalog  # the same clips, with the new attribute
    name: str  # name of the attribute
    # [N] float64 in the catalog's order. NaN where unknown: the clip has no caption, or failed.
    values: NDArray[np.float64]
    failed: tuple[Rejection, ...] = ()  # clips that could not be decoded, with the reason
    # Results on disk, which are kept until the catalog is written.
    journal: Journal[tuple[int, float | str]] | None = field(
        default=None, compare=False, repr=False
    )
    groups: tuple[NDArray[np.int64], ...] = ()  # near-duplicates: see `DuplicateGroups.rows`

    def settle(self) -> None:
        """Remove the kept results of scoring; called when the catalog has been written."""
        if self.journal is not None:
            self.journal.remove()

    @property
    def num_known(self) -> int:
        """Number of clips with a known score."""
        return int(np.count_nonzero(~np.isnan(self.values)))


def score(
    catalog: Catalog,
    by: str,
    *,
    name: str | None = None,
    out: Path | None = None,
    distance: int = duplicates.DISTANCE,
    work: Work = ALL_CORES,
) -> Scored:
    """Add a score to all clips of a catalog, or replace the attribute of that name.

    Args:
        catalog: the clips; it is not changed.
        by: one of `SCORES`, or `module:function`: a function that takes a `Clip` and returns a
            number, NaN for unknown. Without `on` it is called in this process. The module is
            searched where Python searches, and then in the working directory.
        name: name of the attribute; by default that of the score or function.
        out: the catalog that will be written. Results are kept beside it for an interrupted call,
            until `Scored.settle` removes them. None keeps nothing.
        distance: for `duplicates`: number of bits in which two similar frames may differ.
        work: where clips are tagged or decoded; the score of one that exceeds its limits is
            unknown.

    Raises:
        DataError: there is no such score or function, the name cannot be an attribute's, the
            function failed or returned no number, or no worker can be started.
    """
    own = None if by in SCORES else _own(by)
    name = _checked(by.rpartition(":")[2] if name is None else name)
    if by == "length":
        values = np.array([num_words(caption) for caption in catalog.captions()], np.float64)
        return Scored(catalog.with_attribute(name, values), name, values)
    if by == "nouns" and importlib.util.find_spec("HanTa") is None:
        raise DataError(
            "The score nouns needs HanTa, which is not installed: pip install 'longtake[nouns]'. A "
            "tagger of your own is a score, too: --by module:function."
        )
    journal, is_hashed = None, by == "duplicates"
    if out is not None:
        path = out.with_name(f".{out.name}.{name}.journal.jsonl")
        # A journal with another header belongs to another score and is not used. Results are kept
        # by row, and rows stay in place while the fingerprint is the same.
        facts = {"by": by, "version": own.version if own else "", "catalog": catalog.fingerprint}
        journal = Journal(path, _HASHES_ROW if is_hashed else _ROW, header=facts)
    known = dict(journal.read()) if journal else {}
    failed = list[Rejection]()
    # An interrupted call resumes: only rows that the journal lacks are scored.
    rows = [row for row in range(len(catalog)) if row not in known]
    with (
        closing(_results(catalog, rows, by, own, work)) as results,
        journal or nullcontext(),
    ):
        for done, (row, result) in enumerate(zip(rows, results, strict=True), len(known) + 1):
            if isinstance(result, ClipError):
                # Not kept in the journal: the next call tries this clip again.
                failed.append(Rejection(catalog.clip(row).path, result.reason))
            else:
                known[row] = result
                if journal:
                    journal.add((row, result))
            work.progress(done, len(catalog))
    values, groups = np.full(len(catalog), np.nan), tuple[NDArray[np.int64], ...]()
    if is_hashed:
        found = duplicates.group(catalog, {row: str(text) for row, text in known.items()}, distance)
        values, groups = found.ranks, found.rows
    else:
        values[list(known)] = list(known.values())
    scored = catalog.with_attribute(name, values)
    return Scored(scored, name, values, tuple(failed), journal, groups)


def _results(
    catalog: Catalog, rows: Sequence[int], by: str, own: OwnScore | None, work: Work
) -> Generator[float | str | ClipError]:
    """Yield the score of the clip in each row, or the hashes of its frames for `duplicates`."""
    if by == "nouns":
        captions = catalog.captions()
        return nouns_of_all([captions[row] for row in rows], work)
    if own and work.on is None:
        work = tasks.HERE  # a user's function may not work in another process
    task: Task[Clip, Any] = own or MotionScore(work.limits)
    if by == "duplicates":
        task = duplicates.HashTask(work.limits)
    # Iterating over all clips is faster than asking for each row.
    clips = catalog.clips() if len(rows) == len(catalog) else (catalog.clip(row) for row in rows)
    return tasks.in_order(tasks.run_tasks(task, clips, work))


def _own(by: str) -> OwnScore:
    if not all(by.partition(":")):
        near = nearest(by, SCORES)
        hint = f" Did you mean {near!r}?" if near else ""
        raise DataError(
            f"There is no score {by!r}.{hint} There are "
            f"{', '.join(SCORES)}, and your own as module:function."
        )
    own = OwnScore(by, str(Path.cwd()))
    _ = own.function  # fails before any work if the function cannot be imported
    return own


def _checked(name: str) -> str:
    if not name.isidentifier():
        raise DataError(
            f"An attribute cannot be called {name!r}: recipes use it in conditions such as "
            f"`nouns <= 12`. Choose a name of letters, digits and _ (--name)."
        )
    if name in (*CLIP_SCHEMA.names, "aspect", "difficulty"):
        raise DataError(
            f"An attribute cannot be called {name!r}: in recipes that has "
            f"a meaning already. Choose another name (--name my_{name})."
        )
    return name

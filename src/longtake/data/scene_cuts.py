"""Finds the hard cuts of films, and writes a table of their scenes that `index` reads.

Frames are compared as grids of 16 x 12 cells. The difference of two frames is the 70 % quantile of
the differences of their cells, so movement in a part of the picture counts for little.
"""

import csv
import os
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation, VideoReformatter
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter

from longtake.data import decode, decode_limits, index, sources, stores, tables
from longtake.data.catalog import Rejection
from longtake.data.clip import Item, Media
from longtake.data.tasks import ALL_CORES, Work, run_tasks
from longtake.data.workers import SILENCE_SECONDS, ClipTask
from longtake.errors import ClipError, DataError
from longtake.formatting import plural
from longtake.fsio import Journal, atomic_write, make_writable, read_lines

THRESHOLD = 2.0  # multiple of the usual difference between neighbouring frames
MIN_SECONDS = 1.0

_GRID = 16, 12  # cells across and down
_SHARE = 0.7  # quantile over the cells that is the difference of two frames
_LEAST = 5.0  # levels of 255 by which frames on both sides of a cut differ at least
_USUAL = 0.9  # quantile of steps: if each frame is shown four times, only every fourth step changes
_NOISE = 0.5  # levels by which frames of a still scene may differ
_FLASH_SECONDS = 0.15  # a picture that returns within this time was a flash
_LASTING = 0.5  # share of a cut's difference that must last, which it does not at a flash
_AROUND_SECONDS = 0.5  # time before and after a cut that tells the usual differences
_MOST_AROUND = 60  # upper limit of frames on each side, whatever the frame rate
_HEADER = ["path", "start", "end"]
_MOST_SHOWN = 5
_DECIMALS = 6  # decimals of seconds in the table; `index` allows for this rounding


@dataclass(frozen=True)
class Scenes:
    """The scenes of one video: their starts, in seconds from its first frame, and the end."""

    starts: tuple[float, ...]  # ascending from 0
    end: float  # end of the last frame


@dataclass(frozen=True)
class CutsTask(ClipTask[Item, Scenes]):
    """Task of a worker process: finds the scenes of one video by decoding all of it."""

    threshold: float = THRESHOLD
    limits: decode_limits.Limits = decode_limits.DEFAULT
    silence_seconds: float = SILENCE_SECONDS

    @property
    def memory_gib(self) -> float:  # type: ignore[override]  # the limits decide it
        return self.limits.memory_gib

    def compute(self, item: Item, progress: Callable[[], object]) -> Scenes:
        with stores.local(item.media) as media:
            timed = self.limits.timed(media, progress)
            with decode.opened(media) as (container, stream):
                frames = decode.decoded(media, container, stream)
                rate = float(stream.average_rate or stream.guessed_rate or 25)
                return find_scenes(media, _progressing(frames, timed), rate, self.threshold)


def _progressing(
    frames: Iterator[VideoFrame], progress: Callable[[], object]
) -> Iterator[VideoFrame]:
    for frame in frames:
        progress()
        yield frame


def find_scenes(
    media: Media, frames: Iterator[VideoFrame], rate: float, threshold: float = THRESHOLD
) -> Scenes:
    """Find the hard cuts between frames; dissolves and fades are not detected.

    At a cut, two frames differ by at least `threshold` times the usual difference of neighbouring
    frames: of those right before and after, and of most in the 0.5 s on either side. Frames within
    0.15 s before and after it must differ too, which frames around a flash do not. Only 24 bytes
    are kept of each frame.

    Args:
        media: the video, for messages.
        frames: its decoded frames in presentation order.
        rate: approximate frames per second.
        threshold: a smaller one finds more cuts.

    Raises:
        ClipError: no frame can be decoded, or their timestamps do not ascend.
    """
    # Frames in which a flash is over, at least two, as one frame can be a flash.
    ahead = max(2, round(rate * _FLASH_SECONDS))
    seconds, steps, lasting = array("d"), array("d"), array("d")
    recent: deque[NDArray[np.float32]] = deque(maxlen=ahead)
    reformatter, first = VideoReformatter(), 0
    for number, frame in enumerate(frames):
        if frame.pts is None or frame.time_base is None:
            raise ClipError(str(media), f"frame {number} has no timestamp, which scenes need")
        first = first if number else frame.pts
        seconds.append(float((frame.pts - first) * frame.time_base))
        if number and seconds[-1] <= seconds[-2]:
            raise ClipError(str(media), f"its timestamps do not ascend at frame {number}")
        cells = _cells(frame, reformatter)
        if number:
            differences = np.abs(np.stack(recent) - cells).mean(axis=1)
            values = np.quantile(differences, _SHARE, axis=1)
            steps.append(values[-1])
            lasting.append(values.min())  # compares frames before a flash with those after it
            # This frame also lies after the recent steps: a picture like one before them was a
            # flash.
            for back in range(1, len(recent)):
                lasting[-1 - back] = min(lasting[-1 - back], values[-1 - back])
        recent.append(cells)
    if not seconds:
        raise ClipError(str(media), "no frame could be decoded")
    cuts = _peaks(np.array(steps), np.array(lasting), round(rate * _AROUND_SECONDS), threshold)
    # Step i lies between frames i and i + 1, and the scene begins with the second.
    starts = [0.0, *(round(seconds[cut + 1], _DECIMALS) for cut in cuts)]
    return Scenes(tuple(starts), seconds[-1] + 1 / rate)


def _cells(frame: VideoFrame, reformatter: VideoReformatter) -> NDArray[np.float32]:
    """Return the mean luma and chroma [3, cells] of the cells of a frame."""
    width, height = _GRID
    # Chroma at full size, so that a cut between scenes of equal brightness is found.
    small = reformatter.reformat(
        frame,
        width=width,
        height=height,
        format="yuv444p",
        interpolation=Interpolation.AREA,
        threads=1,
    )
    return small.to_ndarray().reshape(3, -1).astype(np.float32)


def _peaks(
    steps: NDArray[np.float64], lasting: NDArray[np.float64], around: int, threshold: float
) -> list[int]:
    """Return the indices of the cuts among the differences of neighbouring frames."""
    around = min(max(3, around), _MOST_AROUND)
    found = []
    # Few steps pass this test, so the rest may be slow.
    is_lasting = lasting >= np.maximum(_LEAST, _LASTING * steps)
    for step in np.flatnonzero(is_lasting).tolist():
        before, after = steps[max(0, step - around) : step], steps[step + 1 : step + 1 + around]
        beside = np.concatenate([before, after])
        # The direct neighbours always count, because fast movement lasts only some frames.
        usual = max(
            np.quantile(beside, _USUAL) if len(beside) else 0.0, *before[-1:], *after[:1], 0.0
        )
        if steps[step] >= threshold * (usual + _NOISE):
            found.append(step)
    return found


@dataclass
class _SceneCounts:
    """Numbers of videos, cuts and short scenes, for the report of `write_scenes`."""

    files: int = 0  # number of files that were decoded completely
    cuts: int = 0
    too_short: int = 0  # number of scenes that were left out
    short_files: int = 0  # number of the left out scenes that are whole files without a cut

    def rows_of(self, place: str, scenes: Scenes, min_seconds: float) -> list[list[str]]:
        """Count one video's scenes; return a table row for each scene that is long enough."""
        texts = [f"{start:.{_DECIMALS}f}" for start in scenes.starts]
        # The last scene has no end, so that rounding cannot remove its last frame.
        spans = list(zip(texts, [*texts[1:], ""], strict=True))
        # Compared as written, rounded: `index` sees the same numbers.
        long = [
            span for span in spans if float(span[1] or scenes.end) - float(span[0]) >= min_seconds
        ]
        self.files += 1
        self.cuts += len(spans) - 1
        self.too_short += len(spans) - len(long)
        self.short_files += not long and len(spans) == 1
        # A file without a cut is named as a whole: its clip keeps the identity of the content, and
        # `index` knows it again without decoding.
        return [[place, *(span if len(spans) > 1 else ("", ""))] for span in long]


@dataclass(kw_only=True)
class ScenesReport(_SceneCounts):
    """Result of `write_scenes`: numbers of videos and scenes, and the files that failed."""

    table: Path
    scenes: int  # number of scenes in the table, each a clip for `index`
    rejected: tuple[Rejection, ...]


def write_scenes(
    found_in: Sequence[Path],
    out: Path,
    *,
    threshold: float = THRESHOLD,
    min_seconds: float = MIN_SECONDS,
    work: Work = ALL_CORES,
) -> ScenesReport:
    """Write a table of the scenes of all videos: a row for each, with start and end in seconds.

    Images and files without a cut have a row without start and end. Scenes shorter than
    `min_seconds` are left out. An interrupted call resumes.

    Args:
        found_in: folders, media files, lists and tables, as for `index`.
        out: the CSV table to write. Paths below its folder are relative to it.
        threshold: see `find_scenes`.
        min_seconds: the length from which scenes are written.
        work: where files are decoded, and within which limits.

    Raises:
        DataError: a source cannot be read, no scene is found, or the table cannot be written.
    """
    _check_table(out)
    rows, counts = list[list[str]](), _SceneCounts()
    found = sources.find(found_in, extracted=out.with_name(f"{out.stem}_media"))
    # A table may name several spans of one film, which is decoded once.
    wholes = {str(item.media.whole): Item(item.media.whole) for item in found.items}
    items = [item for item in wholes.values() if item.kind == "video" and not item.media.member]
    path = out.with_name(f".{out.name}.journal.jsonl")
    # "2" is the version of the search: scenes of another one are not used.
    journal = Journal(path, _ROW, header={"cuts": "2", "threshold": repr(threshold)})
    scenes = _find_all(items, CutsTask(threshold, work.limits), journal, work)
    rejected = [index.rejection_of(each) for each in found.refused]
    for name, item in sorted(wholes.items()):
        # Relative paths, so that the table can move together with the films.
        place = item.media.path.removeprefix(f"{out.parent.resolve()}{os.sep}")
        if (unnamed := decode.name_error(item.media)) is not None:
            rejected.append(index.rejection_of(unnamed))
        elif item.media.member:
            rejected.append(Rejection(name, "is in a tar, which a table cannot name; unpack it"))
        elif item.kind == "image":
            rows.append([place, "", ""])
        elif isinstance(result := scenes[name], ClipError):
            rejected.append(index.rejection_of(result))
        else:
            rows += counts.rows_of(place, result, min_seconds)
    if not rows:
        shown = [f"{each.path}: {each.reason}" for each in rejected]
        raise DataError(
            f"No scene of at least {min_seconds:g} s (--min-seconds) was found in "
            f"{plural(len(wholes), 'file')}; no table was written."
            f"{tables.first_of(shown[:_MOST_SHOWN], len(shown))}"
        )
    try:
        with atomic_write(out) as aside, aside.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([_HEADER, *rows])
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror or error}.") from error
    journal.remove()
    return ScenesReport(**vars(counts), table=out, scenes=len(rows), rejected=tuple(rejected))


def _find_all(
    items: Sequence[Item], task: CutsTask, journal: Journal[Any], work: Work
) -> dict[str, Scenes | ClipError]:
    """Find the scenes of each video, by its name; videos in the journal are not decoded again."""
    stamps = {str(item.media): _stamp_text(item.media) for item in items}
    known: dict[str, Scenes | ClipError] = {
        name: Scenes(tuple(starts), end)
        for name, stamp, starts, end in journal.read()
        if stamps.get(name) == stamp
    }
    new = [item for item in items if str(item.media) not in known]
    with closing(run_tasks(task, new, work)) as results, journal:
        for number, result in results:
            name = str(new[number].media)
            known[name] = result
            # Errors are not kept: they may be of the moment, such as a timeout.
            if isinstance(result, Scenes):
                journal.add((name, stamps[name], result.starts, result.end))
            work.progress(len(known), len(items))
    return known


def _stamp_text(media: Media) -> str:
    # A store may give an object no stamp: then its size alone tells whether it has changed.
    stamp = index.stamp_of_media(media)
    return index.stamp_text(stamp) if stamp else f"{media.num_bytes} 0"


_ROW: TypeAdapter[tuple[str, str, list[float], float]] = TypeAdapter(
    tuple[str, str, Annotated[list[float], Field(min_length=1)], float]
)


def _check_table(out: Path) -> None:
    """Refuse an output path that cannot be written, or that holds something else."""
    if out.suffix != ".csv":
        raise DataError(
            f"Scenes are written as CSV, and {out} ends in {out.suffix or 'nothing'}. Name it "
            f"{out.with_suffix('.csv')}."
        )
    first = next(read_lines(out), None) or b""
    if out.exists() and first.strip() != ",".join(_HEADER).encode():
        raise DataError(
            f"{out} exists and is not a table of scenes; it was not overwritten. Name another file."
        )
    try:
        make_writable(out.parent)
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror or error}.") from error

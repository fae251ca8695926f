"""Transcodes a catalog's clips to the size of the training, so that windows are decoded fast.

Prepared clips have the training's size and a keyframe every few frames. They keep frame count,
timestamps, captions and scores; `prepared_from` is the identity of the original.
"""

import hashlib
import json
import math
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from av.video.frame import PictureType
from av.video.reformatter import ColorRange, Interpolation, VideoReformatter
from PIL import Image

from longtake.data.catalog import Catalog, Rejection
from longtake.data.clip import Clip, Item, Media
from longtake.data.decode import MEMORY_GIB, decoded, opened, read_image
from longtake.data.encode import encode_frames
from longtake.data.index import ProbeResults, check_out, probe_all, without_duplicates
from longtake.data.probe import Probe, content_hash
from longtake.data.tasks import run_tasks
from longtake.data.workers import Task
from longtake.errors import ClipError, DataError
from longtake.fsio import atomic_write

CATALOG_NAME = "catalog.parquet"

_VISIBLE_SECONDS = 90.0  # until a network disk shows a file that another machine has written
_ENCODER_GIB = 3.0  # x264 keeps some 60 frames: 0.5 GiB of 3840x2160
_MAX_GOP, _MAX_FPS = 10_000, 1000
_FORMAT = 1  # part of every name: raise it when other pixels would be written


@dataclass(frozen=True)
class Settings:
    """Size and encoding of prepared clips."""

    sizes: tuple[tuple[int, int], ...]  # (height, width); a clip covers the one of nearest aspect
    gop: int = 12  # distance of keyframes in frames
    crf: int = 18  # quality of x264, 0 (lossless) to 51
    fps: float | None = None  # at most so many frames per second; None: all frames

    def check(self) -> None:
        """Raise DataError if a value is out of its range."""
        if not self.sizes or min(min(size) for size in self.sizes) < 2:
            raise DataError(f"Sizes to prepare for: {list(self.sizes)}; expected at least 2x2.")
        has_rate = self.fps is None or 0 < self.fps <= _MAX_FPS  # which NaN is not
        if not 1 <= self.gop <= _MAX_GOP or not 0 <= self.crf <= 51 or not has_rate:
            raise DataError(
                f"gop is {self.gop}, crf {self.crf}, fps {self.fps}; expected a gop from 1 to "
                f"{_MAX_GOP}, a crf from 0 to 51, and more than 0 to {_MAX_FPS} frames per second."
            )

    @property
    def name(self) -> str:
        text = json.dumps([_FORMAT, asdict(self)])
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


@dataclass(frozen=True)
class TranscodeTask(Task[Clip, ClipError | None]):
    """Writes a clip's prepared file if it does not exist; the result is None or the error."""

    folder: Path  # files are below the first two digits of the clip's identity
    settings: Settings
    decoding_gib: float = MEMORY_GIB  # for decoding one clip
    doing = "transcoding"

    @property
    def memory_gib(self) -> float:  # type: ignore[override]  # it follows from that of decoding
        return self.decoding_gib + _ENCODER_GIB

    def do(self, item: Clip, progress: Callable[[], object]) -> ClipError | None:
        target = self.target(item)
        try:
            if not target.exists():
                if content_hash(item.media, progress) != item.identity:
                    raise ClipError(item.path, "is not what was indexed; index again")
                target.parent.mkdir(exist_ok=True)
                write = _write_image if item.kind == "image" else _write_video
                write(item, target, self.settings, progress)
        except ClipError as error:
            return error
        except OSError as error:
            raise DataError(f"{target} cannot be written: {error.strerror or error}.") from error
        return None

    def lost(self, item: Clip, reason: str) -> ClipError:
        return ClipError(item.path, reason)

    def reads(self, item: Clip) -> str:
        return item.media.path

    @property
    def folders(self) -> tuple[Path, ...]:
        return (self.folder,)

    def target(self, clip: Clip) -> Path:
        suffix = ".jpg" if clip.kind == "image" else ".mp4"
        name = f"{clip.identity}.{self.settings.name}{suffix}"
        return self.folder / clip.identity[:2] / name


def scaled_size(height: int, width: int, sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The even height and width at which a picture covers the size of the nearest aspect ratio."""

    def distance(size: tuple[int, int]) -> float:
        return abs(math.log(size[0] / size[1]) - math.log(height / width))

    target_height, target_width = min(sizes, key=distance)
    scale = min(1.0, max(target_height / height, target_width / width))
    return _even(height * scale, height), _even(width * scale, width)


def _even(length: float, limit: int) -> int:
    return max(2, min(2 * math.ceil(length / 2 - 1e-6), limit - limit % 2))


def _write_image(
    clip: Clip, target: Path, settings: Settings, progress: Callable[[], object]
) -> None:
    height, width = scaled_size(clip.height, clip.width, settings.sizes)
    picture = Image.fromarray(read_image(clip.media))
    picture = picture.resize((width, height), Image.Resampling.BICUBIC)
    with atomic_write(target, by_many=True) as aside:
        picture.save(aside, quality=95, subsampling=0)


def _write_video(
    clip: Clip, target: Path, settings: Settings, progress: Callable[[], object]
) -> None:
    size = scaled_size(clip.height, clip.width, settings.sizes)
    with opened(clip.media, clip.stream_index) as (container, stream):
        frames = _scaled(clip, decoded(clip.media, container, stream), size, progress)
        encode_frames(
            target,
            _thinned(frames, settings.fps),
            fps=min(clip.fps, settings.fps or clip.fps),
            crf=settings.crf,
            gop=settings.gop,
            by_many=True,  # a worker that is considered lost may still be writing
        )


def _scaled(
    clip: Clip,
    frames: Iterable[av.VideoFrame],
    size: tuple[int, int],
    progress: Callable[[], object],
) -> Iterator[av.VideoFrame]:
    """Upright frames in 4:2:0 with timestamps from 0; conversion over RGB would darken them."""
    height, width = size if clip.rotation in (0, 180) else size[::-1]
    tick = 1 / Fraction(clip.fps).limit_denominator(1001)  # if the file's own are unusable
    reformatter = VideoReformatter()
    for index, frame in enumerate(frames):
        progress()
        is_full_range = frame.color_range == ColorRange.JPEG
        scaled = reformatter.reformat(
            frame,
            height=height,
            width=width,
            format="yuvj420p" if is_full_range else "yuv420p",
            interpolation=Interpolation.BICUBIC,
            threads=1,
        )
        upright = _turned(scaled, clip.rotation // 90)
        upright.pict_type = PictureType.NONE  # else keyframes stay where they were
        if clip.timing is None or frame.pts is None:
            upright.pts, upright.time_base = index, tick
        else:
            upright.pts, upright.time_base = frame.pts - clip.timing.first, frame.time_base
        yield upright


def _turned(frame: av.VideoFrame, quarters: int) -> av.VideoFrame:
    """Turn a frame in 4:2:0 counterclockwise."""
    if not quarters:
        return frame
    stacked, height = frame.to_ndarray(), frame.height
    chroma = stacked[height:].reshape(2, height // 2, -1)
    planes = (np.rot90(plane, quarters) for plane in (stacked[:height], *chroma))
    width = frame.height if quarters % 2 else frame.width
    values = np.concatenate([plane.reshape(-1) for plane in planes])
    turned = av.VideoFrame.from_ndarray(values.reshape(-1, width), frame.format.name)
    turned.color_range, turned.colorspace = frame.color_range, frame.colorspace
    turned.color_trc, turned.color_primaries = frame.color_trc, frame.color_primaries
    return turned


def _thinned(frames: Iterable[av.VideoFrame], fps: float | None) -> Iterator[av.VideoFrame]:
    """At most `fps` frames a second: the first of each interval."""
    interval = -1
    for frame in frames:
        seconds = frame.time or 0.0
        this = interval + 1 if fps is None else math.floor(seconds * fps + 1e-6)
        if this > interval:
            yield frame
            interval = this


@dataclass(frozen=True)
class PrepareReport:
    """What `prepare` did."""

    prepared: int  # clips in the new catalog
    reused: int  # files that existed already
    rejected: list[Rejection]
    duplicates: int  # prepared files with the same content as another; left out
    bytes_before: int
    bytes_after: int
    catalog: Path  # the new one


def prepare(
    catalog_path: Path,
    out_folder: Path,
    *,
    settings: Settings,
    on: str | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    memory_gib: float = MEMORY_GIB,
) -> PrepareReport:
    """Transcode every clip of a catalog, and write a catalog of the results.

    Videos become H.264 in mp4 with closed groups of pictures; images become JPEG of quality 95
    without chroma subsampling. All are upright, scaled to cover their size (never up), and even in
    height and width. Files are named by the clip's identity and the settings; existing files are
    kept, so an interrupted call resumes.

    Args:
        catalog_path: the catalog of the clips.
        out_folder: where files and the new `catalog.parquet` are written.
        settings: how clips are to look.
        on: where clips are transcoded and checked; see `run_tasks`. The files do not depend on it.
        workers: processes; by default one for each core. 0: this process, which a hostile file can
            then hang or crash.
        progress: called with (done, in all); each clip counts twice, when it is written and when it
            is checked.
        memory_gib: for decoding one clip; a clip that needs more is rejected.

    Raises:
        DataError: the catalog cannot be read, the settings do not fit, the folder cannot be
            written, or no clip could be prepared.
    """
    settings.check()
    source, out = Catalog.load(catalog_path), out_folder / CATALOG_NAME
    if out.resolve() == catalog_path.resolve():
        raise DataError(f"{out} is the catalog to be prepared. Name another folder.")
    check_out(out)
    clips, report = list(source.clips()), progress or (lambda done, total: None)
    task = TranscodeTask(out_folder.resolve(), settings, memory_gib)
    targets = {clip.identity: task.target(clip) for clip in clips}
    reused = sum(target.exists() for target in targets.values())
    failed = _transcode_all(clips, task, on, workers, report)
    written = [clip for clip in clips if clip.identity not in failed]
    probed = probe_all(  # from the first byte to the last
        [Item(Media(str(targets[clip.identity]))) for clip in written],
        out,
        on=on,
        workers=workers,
        progress=lambda done, total: report(total + done, 2 * len(clips)),
    )
    prepared = _checked(written, targets, probed, settings, failed)
    rejected = [Rejection(str(error.path), error.reason) for error in failed.values()]
    rejected.sort(key=lambda each: each.path)
    if not prepared:
        shown = "".join(f"\n  {each.path}: {each.reason}" for each in rejected[:5])
        raise DataError(f"None of {len(rejected)} clips could be prepared.{shown}")
    kept, duplicates = without_duplicates(prepared)
    Catalog.of(kept, rejected, duplicates, probed.stamps).save(out)
    probed.journal.remove()
    members, files = (
        source.column(name).astype(np.float64) for name in ("num_bytes", "file_bytes")
    )
    return PrepareReport(
        prepared=len(kept),
        reused=reused,
        rejected=rejected,
        duplicates=len(duplicates),
        bytes_before=int(np.nansum(np.where(np.isnan(members), files, members))),
        bytes_after=sum(Path(clip.media.path).stat().st_size for clip in kept),
        catalog=out,
    )


def _checked(
    written: Sequence[Clip],
    targets: dict[str, Path],
    probed: ProbeResults,
    settings: Settings,
    failed: dict[str, ClipError],
) -> list[Clip]:
    """The prepared clips with all frames; removes the other files and adds them to `failed`."""
    prepared = []
    for clip in written:
        target = targets[clip.identity]
        found = probed.results[str(target)]
        if isinstance(found, Probe) and (settings.fps or found.num_frames == clip.num_frames):
            prepared.append(
                Clip(
                    media=Media(str(target)),
                    caption=clip.caption,
                    attributes=clip.attributes,
                    prepared_from=clip.identity,
                    **vars(found),
                )
            )
            continue
        target.unlink(missing_ok=True)  # to be written again by the next call
        reason = f"{clip.num_frames} frames became {getattr(found, 'num_frames', 0)}"
        if isinstance(found, ClipError):
            reason = f"its prepared file: {found.reason}"
        failed[clip.identity] = ClipError(clip.path, reason)
    return prepared


def _transcode_all(
    clips: Sequence[Clip],
    task: TranscodeTask,
    on: str | None,
    workers: int | None,
    report: Callable[[int, int], None],
) -> dict[str, ClipError]:
    """Write the missing files; return the errors by identity."""
    missing = [clip for clip in clips if not task.target(clip).exists()]
    if present := len(clips) - len(missing):
        report(present, 2 * len(clips))
    failed = {}
    with closing(run_tasks(task, missing, on=on, workers=workers)) as results:
        for done, (number, error) in enumerate(results, start=present + 1):
            if error is not None:
                failed[missing[number].identity] = error
            else:
                _wait_until_visible(task.target(missing[number]))
            report(done, 2 * len(clips))
    for left in task.folder.glob("??/.*.partial.*"):  # of processes that were killed
        left.unlink(missing_ok=True)
    return failed


def _wait_until_visible(target: Path) -> None:
    """Wait for a file that another machine has written, as network disks show it late."""
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while not target.exists():
        if time.monotonic() > deadline:
            raise DataError(
                f"{target} was written, but is not seen on {socket.gethostname()}. Is it on a disk "
                "that all nodes share?"
            )
        time.sleep(0.1)
        folder = target.parent if target.parent.exists() else target.parents[1]
        list(folder.iterdir())  # so the disk is asked anew

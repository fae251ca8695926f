"""Transcodes a catalog's clips to the size that they are trained in, so that reading is cheap.

A window of a large video costs the decoding of everything from the keyframe before it, at full
size, only for most pixels to be scaled away. Prepared clips have the training's size and a
keyframe every few frames. They keep frame count, timestamps, captions and scores, and say in
`prepared_from` which clip they were made of.
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
from longtake.data.clip import Clip, Media
from longtake.data.decode import decoded, opened
from longtake.data.encode import encode_frames
from longtake.data.image import read_image
from longtake.data.index import Seen, check_out, look_at, without_duplicates
from longtake.data.indexing.item import Item
from longtake.data.indexing.probe import Probe, content_hash
from longtake.data.limits import MEMORY_GIB
from longtake.data.tasks import run_tasks
from longtake.data.workers import Task
from longtake.errors import ClipError, DataError
from longtake.fsio import atomic_write

_ENCODER_GIB = 3.0  # x264 keeps some 60 frames: 0.5 GiB of 3840x2160
_MAX_GOP, _MAX_FPS = 10_000, 1000
_FORMAT = 1  # part of every name: raise it when other pixels would be written


@dataclass(frozen=True)
class Settings:
    """What decides how a prepared clip looks.

    Attributes:
        sizes: heights and widths to cover; each clip covers the one nearest in aspect ratio.
        gop: distance of keyframes in frames.
        crf: quality of x264, 0 (lossless) to 51.
        fps: at most so many frames per second; None: all frames.
    """

    sizes: tuple[tuple[int, int], ...]
    gop: int = 12
    crf: int = 18
    fps: float | None = None

    def check(self) -> None:
        """Refuse what cannot be encoded.

        Raises:
            DataError: a value is out of its range.
        """
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
        """Eight hex digits that name these settings."""
        text = json.dumps([_FORMAT, asdict(self)])
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


@dataclass(frozen=True)
class TranscodeTask(Task[Clip, ClipError | None]):
    """Write a clip's prepared file, if it is not there; what comes of it is None, or why not.

    Attributes:
        folder: where files are written, below two first digits of the clip's identity.
        settings: how they are to look.
        decoding_gib: memory that decoding one clip may take.
    """

    folder: Path
    settings: Settings
    decoding_gib: float = MEMORY_GIB
    doing = "transcoding"

    @property
    def memory_gib(self) -> float:  # type: ignore[override]  # it follows from that of decoding
        """What decoding may take, and the encoder."""
        return self.decoding_gib + _ENCODER_GIB

    def do(self, item: Clip, progress: Callable[[], object]) -> ClipError | None:
        """Write the file.

        Raises:
            DataError: the file cannot be written.
        """
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
        """It is rejected."""
        return ClipError(item.path, reason)

    def reads(self, item: Clip) -> str:
        """The clip's file, or its tar."""
        return item.media.path

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where files are written."""
        return (self.folder,)

    def target(self, clip: Clip) -> Path:
        """The file that a clip's prepared one is, or will be."""
        suffix = ".jpg" if clip.kind == "image" else ".mp4"
        name = f"{clip.identity}.{self.settings.name}{suffix}"
        return self.folder / clip.identity[:2] / name


def scaled_size(height: int, width: int, sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The even height and width at which a picture covers the size that it is most like."""

    def distance(size: tuple[int, int]) -> float:
        return abs(math.log(size[0] / size[1]) - math.log(height / width))

    target_height, target_width = min(sizes, key=distance)
    scale = min(1.0, max(target_height / height, target_width / width))
    return _even(height * scale, height), _even(width * scale, width)


def _even(length: float, limit: int) -> int:
    """The next even number of pixels, but no more than there are."""
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
            by_many=True,  # whoever was thought to be lost may still be at it
        )


def _scaled(
    clip: Clip,
    frames: Iterable[av.VideoFrame],
    size: tuple[int, int],
    progress: Callable[[], object],
) -> Iterator[av.VideoFrame]:
    """Yield upright frames in 4:2:0 whose timestamps begin at 0.

    They stay in YUV: a detour over RGB darkens them by more than one level of 256.
    """
    height, width = size if clip.rotation in (0, 180) else size[::-1]
    tick = 1 / Fraction(clip.fps).limit_denominator(1001)  # where the file's own are unusable
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
    """Leave out frames where there are more than `fps`: of each interval the first stays."""
    interval = -1
    for frame in frames:
        seconds = frame.time or 0.0
        this = interval + 1 if fps is None else math.floor(seconds * fps + 1e-6)
        if this > interval:
            yield frame
            interval = this


CATALOG_NAME = "catalog.parquet"
_SEEN_SECONDS = 90.0


@dataclass(frozen=True)
class PrepareReport:
    """What `prepare` did.

    Attributes:
        prepared: clips in the new catalog.
        reused: of these, files that were there already.
        rejected: clips that could not be transcoded any more.
        duplicates: prepared files with the same content as another; left out.
        bytes_before: of the clips' files.
        bytes_after: of the prepared files.
        catalog: the new catalog.
    """

    prepared: int
    reused: int
    rejected: list[Rejection]
    duplicates: int
    bytes_before: int
    bytes_after: int
    catalog: Path


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
    height and width. Files are named by the clip's identity and the settings, so those that are
    there already are taken as they are, and a call that was stopped goes on where it was.

    Args:
        catalog_path: the catalog of the clips.
        out_folder: where files and the new `catalog.parquet` are written.
        settings: how clips are to look.
        on: where clips are transcoded and checked; see `run_tasks`. What is written is the same to
            the byte.
        workers: processes that do so; by default one for each core. 0: this process, which a
            hostile file can then hang or crash.
        progress: called with (done, in all); each clip counts twice, when it is written and when
            what was written has been read again.
        memory_gib: what decoding one clip may take; a clip that needs more is rejected.

    Raises:
        DataError: the catalog cannot be read, the settings do not fit, the folder cannot be
            written, or no clip could be prepared.
    """
    settings.check()
    source, out = Catalog.load(catalog_path), out_folder / CATALOG_NAME
    if out.resolve() == catalog_path.resolve():
        raise DataError(f"{out} is the catalog to be prepared. Name another folder.")
    check_out(out)
    clips, tell = list(source.clips()), progress or (lambda done, total: None)
    task = TranscodeTask(out_folder.resolve(), settings, memory_gib)
    targets = {clip.identity: task.target(clip) for clip in clips}
    reused = sum(target.exists() for target in targets.values())
    failed = _transcode_all(clips, task, on, workers, tell)
    written = [clip for clip in clips if clip.identity not in failed]
    seen = look_at(  # from the first byte to the last
        [_item(clip, targets[clip.identity]) for clip in written],
        out,
        on=on,
        workers=workers,
        progress=lambda done, total: tell(total + done, 2 * len(clips)),
    )
    prepared = _trusted(written, targets, seen, settings, failed)
    rejected = [Rejection(str(error.path), error.reason) for error in failed.values()]
    rejected.sort(key=lambda each: each.path)
    if not prepared:
        raise DataError(_nothing_left(rejected))
    kept, duplicates = without_duplicates(prepared)
    Catalog.of(kept, rejected, duplicates, seen.stamps).save(out)
    seen.journal.remove()
    return PrepareReport(
        prepared=len(kept),
        reused=reused,
        rejected=rejected,
        duplicates=len(duplicates),
        bytes_before=_num_bytes(source),
        bytes_after=sum(Path(clip.media.path).stat().st_size for clip in kept),
        catalog=out,
    )


def _nothing_left(rejected: Sequence[Rejection]) -> str:
    shown = "".join(f"\n  {each.path}: {each.reason}" for each in rejected[:5])
    return f"None of {len(rejected)} clips could be prepared.{shown}"


def _item(clip: Clip, target: Path) -> Item:
    return Item(Media(str(target)), clip.caption, clip.attributes)


def _trusted(
    written: Sequence[Clip],
    targets: dict[str, Path],
    seen: Seen,
    settings: Settings,
    failed: dict[str, ClipError],
) -> list[Clip]:
    """Return the prepared clips that hold what they should; add the others to `failed`."""
    trusted = []
    for clip in written:
        item = _item(clip, targets[clip.identity])
        found = seen.results[str(item.media)]
        if isinstance(found, Probe) and (settings.fps or found.num_frames == clip.num_frames):
            trusted.append(_prepared(clip, item, found))
        else:
            failed[clip.identity] = _mistrusted(clip, targets[clip.identity], found)
    return trusted


def _prepared(clip: Clip, item: Item, found: Probe) -> Clip:
    return Clip(
        media=item.media,
        caption=clip.caption,
        attributes=clip.attributes,
        prepared_from=clip.identity,
        **vars(found),
    )


def _mistrusted(clip: Clip, target: Path, found: Probe | ClipError) -> ClipError:
    """Remove what did not come out right, so that it is written anew next time."""
    target.unlink(missing_ok=True)
    if isinstance(found, ClipError):
        return ClipError(clip.path, f"its prepared file: {found.reason}")
    return ClipError(clip.path, f"{clip.num_frames} frames became {found.num_frames}")


def _num_bytes(catalog: Catalog) -> int:
    columns = catalog.column("num_bytes"), catalog.column("file_bytes")
    members, files = (column.astype(np.float64) for column in columns)
    return int(np.nansum(np.where(np.isnan(members), files, members)))


def _transcode_all(
    clips: Sequence[Clip],
    task: TranscodeTask,
    on: str | None,
    workers: int | None,
    tell: Callable[[int, int], None],
) -> dict[str, ClipError]:
    """Write what is not there yet; return those that failed, by identity."""
    missing = [clip for clip in clips if not task.target(clip).exists()]
    if present := len(clips) - len(missing):
        tell(present, 2 * len(clips))
    failed = {}
    with closing(run_tasks(task, missing, on=on, workers=workers)) as results:
        for done, (number, error) in enumerate(results, start=present + 1):
            if error is not None:
                failed[missing[number].identity] = error
            else:
                _see(task.target(missing[number]))
            tell(done, 2 * len(clips))
    for left in task.folder.glob("??/.*.partial.*"):  # of processes that were killed
        left.unlink(missing_ok=True)
    return failed


def _see(target: Path) -> None:
    """Wait until a file is seen that another machine has written: network disks take a while.

    Raises:
        DataError: it is not seen in time.
    """
    deadline = time.monotonic() + _SEEN_SECONDS
    while not target.exists():
        if time.monotonic() > deadline:
            raise DataError(
                f"{target} was written, but is not seen on {socket.gethostname()}. Is it on a disk "
                "that all nodes share?"
            )
        time.sleep(0.1)
        folder = target.parent if target.parent.exists() else target.parents[1]
        list(folder.iterdir())  # so the disk is asked anew

"""Writes frames as video files, and transcodes a catalog's clips to the size used in training.

Prepared clips have the size that is trained and a keyframe every few frames, so windows are decoded
fast. They keep frame count, timestamps, captions and scores; `prepared_from` is the identity of the
original.
"""

import hashlib
import json
import math
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import av
import numpy as np
from av.container import OutputContainer
from av.video.frame import PictureType
from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter
from numpy.typing import NDArray
from PIL import Image

from longtake.data import content, decode, decode_limits, stores
from longtake.data.catalog import TRUSTED, Catalog, Rejection, Stamp
from longtake.data.catalog_writer import CatalogWriter, Written
from longtake.data.clip import Clip, Item, Media, is_turned
from longtake.data.index import KnownFiles, ProbeJournal, catalog_before, check_out, probe_all
from longtake.data.tasks import ALL_CORES, Work, run_tasks
from longtake.data.window import at_timestamps
from longtake.data.workers import ClipTask
from longtake.errors import ClipError, DataError
from longtake.fsio import atomic_write

_BT709, _SMPTE170M = 1, 6  # colour matrices of ITU-T H.273; SMPTE 170M is that of BT.601

# Without CABAC and deblocking, windows of 448x256 are read in half the time, for 8 % more bytes.
_FAST_TO_READ = {"preset": "veryfast", "tune": "fastdecode"}


class Sound(NamedTuple):
    """Sound of a video: samples [channels, N] float32 from -1 to 1, and their number per second."""

    samples: NDArray[np.float32]
    rate: int


def write_video(
    path: Path,
    frames: NDArray[np.uint8],
    fps: float,
    crf: int = 12,
    pixel_format: Literal["yuv420p", "rgb24"] = "yuv420p",
    sound: Sound | None = None,
) -> None:
    """Write frames as H.264 in an mp4 file, which appears under its name only when it is complete.

    Args:
        path: the file to write, ending in `.mp4`.
        frames: [F, H, W, 3] uint8 RGB; H and W even, because 4:2:0 chroma needs it.
        fps: frames per second.
        crf: constant rate factor of x264, 0 (lossless) to 51; a lower one gives a larger and better
            file.
        pixel_format: rgb24 keeps the colour of every pixel, but browsers do not play it.
        sound: one or two channels, written as AAC.

    Raises:
        DataError: the frames' shape or type does not fit, or the file cannot be written.
    """
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or not len(frames):
        raise DataError(
            f"{path} was not written: the frames are {frames.dtype} {list(frames.shape)}; "
            "expected uint8 [frames, height, width, 3] with at least one frame."
        )
    _, height, width, _ = frames.shape
    if height % 2 or width % 2:
        raise DataError(
            f"{path} was not written: {width}x{height} pixels; H.264 in 4:2:0 needs an even "
            f"size. Crop or pad to {width + width % 2}x{height + height % 2}."
        )
    codec = "libx264rgb" if pixel_format == "rgb24" else "libx264"
    # Without mbtree=0 x264 encodes tiny pictures differently from run to run, and a clip's
    # identity is the hash of its content.
    options = {"crf": str(crf), "preset": "veryfast", "x264-params": "mbtree=0"}
    with _mp4(path, codec, fps, options) as (container, stream):
        stream.width, stream.height, stream.pix_fmt = width, height, pixel_format
        if pixel_format == "yuv420p":
            _tag(stream.codec_context, height)
        # Before the first frame, at which the file's header is written.
        track = None if sound is None else container.add_stream("aac", rate=sound.rate)
        for picture in frames:
            rgb = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), "rgb24")
            container.mux(stream.encode(rgb if pixel_format == "rgb24" else in_yuv(rgb)))
        if sound is not None and track is not None:
            _mux_sound(container, track, sound)


def _mux_sound(container: OutputContainer, track: Any, sound: Sound) -> None:
    layout = "mono" if len(sound.samples) == 1 else "stereo"
    samples = np.ascontiguousarray(sound.samples)
    frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout=layout)
    frame.sample_rate, frame.pts = sound.rate, 0
    container.mux([*track.encode(frame), *track.encode(None)])


@contextmanager
def _mp4(
    path: Path, codec: str, fps: float, options: Mapping[str, str], *, by_many: bool = False
) -> Iterator[tuple[OutputContainer, av.VideoStream]]:
    """Open an mp4 file to write; yield it and its video stream, and complete them at the end.

    Raises:
        DataError: the file cannot be written.
    """
    try:
        with (
            atomic_write(path, by_many=by_many) as aside,
            av.open(aside, "w", format="mp4") as container,
        ):
            stream = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001))
            assert isinstance(stream, av.VideoStream)
            stream.options = dict(options)
            stream.thread_count = 1  # clips are small: threads cost more than they save
            yield container, stream
            container.mux(stream.encode(None))
    except (OSError, av.FFmpegError) as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}.") from error


def in_yuv(frame: av.VideoFrame) -> av.VideoFrame:
    """Convert RGB to 4:2:0 in limited range, by the matrix that players assume for its height."""
    is_hd = frame.height >= decode.HD_LINES
    matrix = Colorspace.ITU709 if is_hd else Colorspace.ITU601
    converted = frame.reformat(
        format="yuv420p", dst_colorspace=matrix, dst_color_range=ColorRange.MPEG, threads=1
    )
    _tag(converted, frame.height)
    return converted


def _tag(what: "av.VideoFrame | av.VideoCodecContext", height: int) -> None:
    is_hd = height >= decode.HD_LINES
    what.color_range, what.colorspace = ColorRange.MPEG, _BT709 if is_hd else _SMPTE170M
    what.color_trc = what.color_primaries = _BT709


def write_image(path: Path, frame: NDArray[np.uint8]) -> None:
    """Write a picture [H, W, 3] uint8 RGB as PNG, which appears only when it is complete.

    Raises:
        DataError: the file cannot be written.
    """
    try:
        with atomic_write(path) as aside:
            Image.fromarray(np.ascontiguousarray(frame)).save(aside, format="PNG")
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}.") from error


def encode_frames(
    path: Path,
    frames: Iterable[av.VideoFrame],
    *,
    fps: float,
    crf: int,
    gop: int,
    by_many: bool = False,
) -> None:
    """Write frames at their own timestamps, as they arrive, as H.264 (4:2:0) in an mp4 file.

    Exactly every `gop`th frame is a keyframe, and no frame refers past one. Decoding can thus begin
    at each keyframe, and a window is read by decoding at most `gop` - 1 frames too many.

    Args:
        path: the file to write, ending in `.mp4`; it appears only when it is complete.
        frames: all of one even size, yuv420p or yuvj420p, with ascending timestamps. The colour
            properties of the first are written into the file.
        fps: average frames per second.
        crf: constant rate factor of x264, 0 (lossless) to 51.
        gop: distance of keyframes in frames.
        by_many: several processes may write the file at the same time; see `atomic_write`.

    Raises:
        DataError: the file cannot be written; and whatever `frames` raises.
    """
    waiting = iter(frames)
    # The stream must be described before it is written to, so the first frame is taken off here.
    first = next(waiting)
    params = f"mbtree=0:keyint={gop}:min-keyint={gop}:scenecut=0:open-gop=0"
    options = {"crf": str(crf), **_FAST_TO_READ, "x264-params": params}
    with _mp4(path, "libx264", fps, options, by_many=by_many) as (container, stream):
        stream.width, stream.height, stream.pix_fmt = first.width, first.height, first.format.name
        assert first.time_base is not None
        stream.codec_context.time_base = stream.time_base = first.time_base
        _copy_colours(first, stream.codec_context)
        for frame in chain([first], waiting):
            container.mux(stream.encode(frame))


def _copy_colours(frame: av.VideoFrame, to: "av.VideoFrame | av.VideoCodecContext") -> None:
    to.color_range, to.colorspace = frame.color_range, frame.colorspace
    to.color_trc, to.color_primaries = frame.color_trc, frame.color_primaries


CATALOG_NAME = "catalog.parquet"

_VISIBLE_SECONDS = 90.0  # time that a network disk may take to show a file of another machine
_ENCODER_GIB = 3.0  # x264 keeps some 60 frames: 0.5 GiB of 3840x2160
_MAX_GOP, _MAX_FPS = 10_000, 1000
_HALF_WRITTEN = re.compile(r"\.[0-9a-f]{32}\.")
_FORMAT = 2  # part of every file's name: raise it when the pixels that are written change


@dataclass(frozen=True)
class Settings:
    """Size and encoding of clips that `data prepare` writes; part of the names of their files."""

    sizes: tuple[tuple[int, int], ...]  # (height, width); a clip covers the one of nearest aspect
    gop: int = 12  # distance of keyframes in frames
    crf: int = 18  # quality of x264, 0 (lossless) to 51
    fps: float | None = None  # upper limit of frames per second; None keeps all frames

    def check(self) -> None:
        """Raise DataError if a setting of the encoding is out of its range."""
        if not self.sizes or min(min(size) for size in self.sizes) < 2:
            raise DataError(f"Sizes to prepare for: {list(self.sizes)}; expected at least 2x2.")
        has_rate = self.fps is None or 0 < self.fps <= _MAX_FPS  # False for NaN
        if not 1 <= self.gop <= _MAX_GOP or not 0 <= self.crf <= 51 or not has_rate:
            raise DataError(
                f"gop is {self.gop}, crf {self.crf}, fps {self.fps}; expected a gop from 1 to "
                f"{_MAX_GOP}, a crf from 0 to 51, and more than 0 to {_MAX_FPS} frames per second."
            )

    @property
    def name(self) -> str:
        """Short hash of all encoding settings, for the names of prepared files."""
        text = json.dumps([_FORMAT, asdict(self)])
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


@dataclass(frozen=True)
class TranscodeTask(ClipTask[Clip, None]):
    """Task of a worker process: transcodes one clip unless its prepared file exists.

    Returns the error, or None.
    """

    folder: Path  # files lie in subfolders named by the first two digits of the clip's identity
    settings: Settings
    decoding_gib: float = decode_limits.MEMORY_GIB  # memory for decoding one clip
    doing = "transcoding"

    @property
    def memory_gib(self) -> float:  # type: ignore[override]  # decoding and encoding add up
        return self.decoding_gib + _ENCODER_GIB

    def compute(self, item: Clip, progress: Callable[[], object]) -> None:
        target = self.target(item)
        try:
            if not target.exists():
                with stores.local(item.media) as media:
                    # The file is named by the identity of its content, so a changed source must not
                    # fill it.
                    # The spans of one film follow each other: the film is hashed once.
                    if not content.is_indexed(media, content.known_hash(media, progress)):
                        raise content.changed(item.media, "another content")
                    target.parent.mkdir(exist_ok=True)
                    write = _write_image if item.kind == "image" else _write_video
                    write(replace(item, media=media), target, self.settings, progress)
        except OSError as error:
            raise DataError(f"{target} cannot be written: {error.strerror or error}.") from error

    @property
    def folders(self) -> tuple[Path, ...]:
        return (self.folder,)

    def target(self, clip: Clip) -> Path:
        suffix = ".jpg" if clip.kind == "image" else ".mp4"
        name = f"{clip.identity}.{self.settings.name}{suffix}"
        return self.folder / clip.identity[:2] / name


def scaled_size(height: int, width: int, sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the even (height, width) at which a picture covers the size of nearest aspect.

    Pictures are never scaled up.
    """

    def distance(size: tuple[int, int]) -> float:
        return abs(math.log(size[0] / size[1]) - math.log(height / width))

    target_height, target_width = min(sizes, key=distance)
    scale = min(1.0, max(target_height / height, target_width / width))
    return _even(height * scale, height), _even(width * scale, width)


def _even(length: float, limit: int) -> int:
    # 1e-6: a rounding error of the scale must not add two pixels.
    return max(2, min(2 * math.ceil(length / 2 - 1e-6), limit - limit % 2))


def _write_image(
    clip: Clip, target: Path, settings: Settings, progress: Callable[[], object]
) -> None:
    height, width = scaled_size(clip.height, clip.width, settings.sizes)
    picture = Image.fromarray(decode.read_image(clip.media))
    picture = picture.resize((width, height), Image.Resampling.BICUBIC)
    with atomic_write(target, by_many=True) as aside:
        picture.save(aside, quality=95, subsampling=0)


def _write_video(
    clip: Clip, target: Path, settings: Settings, progress: Callable[[], object]
) -> None:
    keyframe = clip.keyframe_before(0) if clip.media.span else None
    # A span deep in a film is reached by a seek; the whole film before it is the slow way.
    if keyframe is not None:
        with suppress(ClipError):  # not every file can be decoded from a keyframe in its middle
            _write_from(keyframe, clip, target, settings, progress)
            return
    _write_from(None, clip, target, settings, progress)


def _write_from(
    keyframe: int | None,
    clip: Clip,
    target: Path,
    settings: Settings,
    progress: Callable[[], object],
) -> None:
    size = scaled_size(clip.height, clip.width, settings.sizes)
    with decode.opened(clip.media, clip.stream_index) as (container, stream):
        if keyframe is not None:
            container.seek(keyframe, stream=stream)
        shown = decode.decoded(clip.media, container, stream, keyframe=keyframe)
        if clip.media.span is not None:
            shown = _within(clip, shown)
        frames = _scaled(clip, shown, size, progress)
        encode_frames(
            target,
            _thinned(frames, settings.fps),
            fps=min(clip.fps, settings.fps or clip.fps),
            crf=settings.crf,
            gop=settings.gop,
            by_many=True,  # a worker that is considered lost may still write the same file
        )


def _within(clip: Clip, frames: Iterator[av.VideoFrame]) -> Iterator[av.VideoFrame]:
    """Yield the frames of a clip that is a span of a video, selected by their timestamps."""
    assert clip.timing is not None
    timestamps, num_read = map(clip.timing.of, range(clip.num_frames)), 0
    for frame in at_timestamps(clip.media, timestamps, frames):
        yield frame
        num_read += 1
    if num_read < clip.num_frames:
        reason = f"ends after {num_read} of {clip.num_frames} frames; index again"
        raise ClipError(clip.path, reason)


def _scaled(
    clip: Clip,
    frames: Iterable[av.VideoFrame],
    size: tuple[int, int],
    progress: Callable[[], object],
) -> Iterator[av.VideoFrame]:
    """Scale and turn decoded frames without leaving 4:2:0, as a detour over RGB would darken them.

    Timestamps of the results begin at 0.
    """
    height, width = size[::-1] if is_turned(clip.rotation) else size
    # Exact, as common rates such as 30000/1001 are fractions.
    tick = 1 / Fraction(clip.fps).limit_denominator(1001)  # if the file has no usable times
    reformatter = VideoReformatter()
    for index, frame in enumerate(frames):
        progress()
        # The range is kept, as converting it would round every value.
        is_full_range = frame.color_range == ColorRange.JPEG
        scaled = reformatter.reformat(
            frame,
            height=height,
            width=width,
            format="yuvj420p" if is_full_range else "yuv420p",
            interpolation=Interpolation.BICUBIC,
            threads=1,
        )
        shown = _upright(scaled, clip.rotation)
        shown.pict_type = PictureType.NONE  # otherwise keyframes stay where the source had them
        if clip.timing is None or frame.pts is None:
            shown.pts, shown.time_base = index, tick
        else:
            shown.pts, shown.time_base = frame.pts - clip.timing.first, frame.time_base
        yield shown


def _upright(frame: av.VideoFrame, rotation: int) -> av.VideoFrame:
    """Turn a frame in 4:2:0 upright, and mirror it if its rotation says so."""
    if not rotation:
        return frame
    # The planes lie below each other: luma, then the two quarter-size chroma planes.
    stacked, height = frame.to_ndarray(), frame.height
    chroma = stacked[height:].reshape(2, height // 2, -1)
    planes = (decode.upright(plane, rotation) for plane in (stacked[:height], *chroma))
    width = frame.height if is_turned(rotation) else frame.width
    values = np.concatenate([plane.reshape(-1) for plane in planes])
    turned = av.VideoFrame.from_ndarray(values.reshape(-1, width), frame.format.name)
    _copy_colours(frame, turned)
    return turned


def _thinned(frames: Iterable[av.VideoFrame], fps: float | None) -> Iterator[av.VideoFrame]:
    """Yield at most `fps` frames per second of a video: the first of each interval."""
    interval = -1
    for frame in frames:
        seconds = frame.time or 0.0
        # Rounded up a little, as times are floats and intervals begin at exact times.
        this = interval + 1 if fps is None else math.floor(seconds * fps + 1e-6)
        if this > interval:
            yield frame
            interval = this


@dataclass(frozen=True)
class PrepareReport:
    """Result of `prepare`: numbers of transcoded and rejected clips, and bytes before and after."""

    prepared: int  # number of clips in the new catalog
    reused: int  # number of files that existed already
    rejected: list[Rejection]
    duplicates: int  # number of prepared files left out because another has the same content
    bytes_before: int
    bytes_after: int
    catalog: Path  # path of the new catalog


def prepare(
    catalog_path: Path,
    out_folder: Path,
    *,
    settings: Settings,
    work: Work = ALL_CORES,
) -> PrepareReport:
    """Transcode every clip of a catalog, and write a catalog of the results.

    Videos become H.264 in mp4 with closed groups of pictures; images become JPEG. All are upright,
    scaled to cover their size (never up), and even in height and width. Files are named by the
    clip's identity and the settings; existing files are kept, so an interrupted call resumes.

    Args:
        catalog_path: the catalog of the clips.
        out_folder: folder to which files and the new `catalog.parquet` are written.
        settings: size and encoding of the results.
        work: where clips are transcoded and checked, and within which memory. A clip that needs
            more is rejected; one counts as progress when it is written and when it is checked.

    Raises:
        DataError: the catalog cannot be read, the settings do not fit, the folder cannot be
            written, or no clip could be prepared.
    """
    settings.check()
    source, out = Catalog.load(catalog_path), out_folder / CATALOG_NAME
    if out.resolve() == catalog_path.resolve():
        raise DataError(f"{out} is the catalog to be prepared. Name another folder.")
    check_out(out)
    # Sorted by path, so that the spans of one film follow each other and it is hashed once.
    clips = sorted(source.clips(), key=lambda clip: clip.path)
    task = TranscodeTask(out_folder.resolve(), settings, work.limits.memory_gib)
    # Counted before transcoding, which makes the others.
    reused = sum(task.target(clip).exists() for clip in clips)
    failed = _transcode_all(clips, task, work)
    result, rejected = _write_catalog(out, clips, failed, task, work)
    return PrepareReport(
        prepared=result.accepted,
        reused=reused,
        rejected=rejected,
        duplicates=result.duplicates,
        bytes_before=_bytes_of(source),
        bytes_after=sum(Path(clip.media.path).stat().st_size for clip in Catalog.load(out).clips()),
        catalog=out,
    )


def _write_catalog(
    out: Path,
    clips: Sequence[Clip],
    failed: dict[str, ClipError],
    task: TranscodeTask,
    work: Work,
) -> tuple[Written, list[Rejection]]:
    """Index the prepared files as `data index` would, and write their catalog.

    `failed` holds the clips that could not be transcoded, by identity.
    """
    written = {str(task.target(clip)): clip for clip in clips if clip.identity not in failed}
    writer, journal = CatalogWriter(), ProbeJournal(out)

    def accept(items: Sequence[Item], stamp: Stamp | None, found: decode.Probe | ClipError) -> None:
        media = items[0].media
        clip = written[media.path]
        checked = _checked(clip, media, found, task.settings)
        if isinstance(checked, Clip):
            writer.add(checked, stamp)
        else:
            media.file.unlink(missing_ok=True)  # the next call writes it again
            failed[clip.identity] = checked

    with closing(writer), closing(KnownFiles(catalog_before(out), journal)) as known:
        probe_all(  # decodes each prepared file completely
            ([Item(Media(path))] for path in sorted(written)),
            len(written),
            accept,
            known=known,
            journal=journal,
            task=decode.ProbeTask(),
            # Counted on from the transcoded clips.
            work=replace(
                work, progress=lambda done, total: work.progress(total + done, 2 * len(clips))
            ),
        )
        for error in failed.values():
            writer.reject(Rejection(str(error.path), error.reason))
        rejected = writer.rejected(len(failed))
        if not writer.num_clips:
            shown = "".join(f"\n  {each.path}: {each.reason}" for each in rejected[:5])
            raise DataError(f"None of {len(rejected)} clips could be prepared.{shown}")
        result = writer.write(out)
        journal.remove()
    return result, rejected


def _bytes_of(catalog: Catalog) -> int:
    """Return the bytes of a catalog's media files; a film from which clips were cut counts once."""
    names = [str(clip.media.whole) for clip in catalog.clips()]
    _, firsts = np.unique(names, return_index=True)
    members, files = (
        catalog.column(name).astype(np.float64)[firsts] for name in ("num_bytes", "file_bytes")
    )
    return int(np.nansum(np.where(np.isnan(members), files, members)))


def _checked(
    clip: Clip, media: Media, found: decode.Probe | ClipError, settings: Settings
) -> Clip | ClipError:
    """Return the catalog record of a prepared clip, or an error if its file lacks frames."""
    if isinstance(found, ClipError):
        return ClipError(clip.path, f"its prepared file: {found.reason}")
    if not settings.fps and found.num_frames != clip.num_frames:
        return ClipError(clip.path, f"{clip.num_frames} frames became {found.num_frames}")
    return Clip(
        media=media,
        caption=clip.caption,
        attributes={name: each for name, each in clip.attributes.items() if name != TRUSTED},
        prepared_from=clip.identity,
        conditioning={} if settings.fps else clip.conditioning,
        **found.clip_fields,
    )


def _transcode_all(clips: Sequence[Clip], task: TranscodeTask, work: Work) -> dict[str, ClipError]:
    missing = [clip for clip in clips if not task.target(clip).exists()]
    if present := len(clips) - len(missing):
        work.progress(present, 2 * len(clips))
    failed = {}
    with closing(run_tasks(task, missing, work)) as results:
        for done, (number, error) in enumerate(results, start=present + 1):
            if error is not None:
                failed[missing[number].identity] = error
            else:
                _wait_until_visible(task.target(missing[number]))
            work.progress(done, 2 * len(clips))
    for left in task.folder.glob("??/.*.partial.*"):  # left by processes that were killed
        if _HALF_WRITTEN.match(left.name):
            left.unlink(missing_ok=True)
    return failed


def _wait_until_visible(target: Path) -> None:
    """Wait until this node sees a file that another node wrote; network disks may be late."""
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while not target.exists():
        if time.monotonic() > deadline:
            raise DataError(
                f"{target} was written, but is not seen on {socket.gethostname()}. Is it on a disk "
                "that all nodes share?"
            )
        time.sleep(0.1)
        folder = target.parent if target.parent.exists() else target.parents[1]
        list(folder.iterdir())  # listing a folder makes NFS clients refresh what they know of it

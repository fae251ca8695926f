"""Reads the conditioning inputs of a clip (`data.conditioning`) for one of its windows.

Videos and masks have one frame for each frame of the clip, counted from the first. The frames of
the window are read, and scaled, cut and mirrored like the window. Decoding has the same limits and
strictness as that of clips.
"""

import csv
import io
import os
import posixpath
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, Literal

import numpy as np
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream
from numpy.typing import NDArray

from longtake.config import STEM, Bucket, ConditioningSection
from longtake.data import stores
from longtake.data.audio import AudioWindow, read_audio
from longtake.data.clip import IMAGE_SUFFIXES, MEDIA_SUFFIXES, Clip, Given, Media, is_turned
from longtake.data.decode import (
    ALPHA,
    decoded,
    in_square_pixels,
    opened,
    read_image,
    rotation_of,
    square_size,
)
from longtake.data.window import (
    Crop,
    FrameSpan,
    Window,
    counted,
    crop,
    planes,
    read_window,
    resized,
    some_frames,
)
from longtake.errors import ClipError, DataError, RecordError
from longtake.fsio import is_there, parse_record, read_regular

ANY_ENDING = ".*"
NUMBERS_SUFFIXES = (".json", ".csv", ".npy")
_MAX_NUMBERS_BYTES = 2**26  # size of a file of numbers
_ALMOST = 4  # compression leaves values this far from black or white
_LUMA = np.array([19595, 38470, 7471], np.uint32)  # ITU-R BT.601 in 1/65536; greys stay equal


@dataclass(frozen=True, slots=True)
class ConditioningPixels(FrameSpan):
    """The pixels to read from a conditioning picture, video or mask for a window of its clip.

    A picture of another size than the clip's is scaled to cover, cut in the middle, and mirrored if
    the clip is. A video or mask may have any size of the clip's aspect ratio.
    """

    kind: Literal["picture", "video", "mask"]
    identity: str  # identity of the clip
    media: Media  # for a `picture` in a video file, the first frame is read
    clip_height: int  # height of the upright clip; 0: no clip, so the cut is in the middle
    clip_width: int
    clip_crop: Crop
    height: int  # rows of the result
    width: int
    is_flipped: bool
    untagged: str = "bt709"  # colour matrix of untagged HD video, as in `Window`
    is_alpha: bool = False  # a mask: the alpha channel of `media`

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return 1 if self.kind == "mask" else 3, self.num_frames, self.height, self.width


@dataclass(frozen=True, slots=True)
class ConditioningNumbers(FrameSpan):
    """The conditioning numbers to read for a clip: one row, or one for each frame of a window."""

    identity: str  # identity of the clip
    media: Media  # the file; with `values`, that of the clip
    width: int
    is_per_frame: bool
    clip_frames: int  # number of rows that a file must have if it is per frame; 0 without a clip
    values: tuple[float, ...] | None = None  # numbers from the catalog; None to read the file

    @property
    def shape(self) -> tuple[int]:
        """Number of bytes of the numbers as float32, since workers return bytes."""
        return (4 * self.width * (self.num_frames if self.is_per_frame else 1),)


ConditioningInput = ConditioningPixels | ConditioningNumbers
Wanted = Window | ConditioningInput | AudioWindow
"""Anything that a decoding worker reads for a sample: a window of the clip, its sound, or an input
of `data.conditioning`."""


def conditioning_path(clip_path: str, pattern: str) -> str:
    """Return the path of a clip's conditioning file, by the pattern of `data.conditioning`.

    Relative patterns stay in the clip's folder or store.
    """
    path = PurePath(clip_path)
    name = pattern.replace(STEM, path.stem)
    scheme, _, place = clip_path.rpartition("://")
    # An absolute path in the recipe is on this machine even if the clip is in a store.
    is_here = "://" not in name and (not scheme or posixpath.isabs(name))
    if name.endswith(ANY_ENDING) and not is_here:
        raise DataError(
            f"data.conditioning: {pattern!r} leaves the ending open, which is looked for in "
            "folders only. Name the ending of the files in the store."
        )
    if "://" in name:
        return name
    if is_here:
        whole = os.path.normpath(path.parent / name)
        return _with_ending(whole) if whole.endswith(ANY_ENDING) else whole
    return f"{scheme}://{posixpath.normpath(posixpath.join(posixpath.dirname(place), name))}"


def _with_ending(path: str) -> str:
    """Complete a path whose ending is open by that of the only such file, if there is one."""
    endings = (*MEDIA_SUFFIXES, *NUMBERS_SUFFIXES)
    places = (path.removesuffix(ANY_ENDING) + ending for ending in endings)
    found = [place for place in places if is_there(place)]
    if len(found) > 1:
        raise DataError(
            f"{found[0]} and {found[1]} are both for one clip ({path}). Remove one of them, or "
            "name the ending in data.conditioning."
        )
    return found[0] if found else path


def given_to(clip: Clip, section: ConditioningSection) -> Given:
    """Return the path of a clip's conditioning file, or its numbers from the catalog.

    For what is made of the clip itself, it is the clip's own path.
    """
    if section.is_of_clip:
        return clip.media.path
    if section.path is not None:
        return conditioning_path(clip.media.path, section.path)
    assert section.column is not None
    return clip.conditioning[section.column]


def conditioning_of(
    clip: Clip, window: Window, sections: Mapping[str, ConditioningSection]
) -> dict[str, Wanted]:
    """Return by name the conditioning pixels or numbers to read for a window of a clip."""
    return {name: _input(section, clip, window) for name, section in sections.items()}


def _input(section: ConditioningSection, clip: Clip, window: Window) -> Wanted:
    if section.frame is not None:
        return some_frames(window, 0 if section.frame == "first" else window.num_frames - 1)
    if section.frames is not None:
        return some_frames(window, 0, section.frames)
    if section.kind == "numbers":
        numbers = whole_numbers(clip, section)
        return replace(numbers, **_frames(window)) if section.per_frame else numbers
    path = given_to(clip, section)
    assert isinstance(path, str)
    return ConditioningPixels(
        kind=section.kind,
        identity=clip.identity,
        media=window.media if section.alpha else Media(path),
        is_alpha=section.alpha,
        clip_height=window.source_height,
        clip_width=window.source_width,
        clip_crop=Crop(window.scaled_height, window.scaled_width, window.top, window.left),
        height=window.height,
        width=window.width,
        is_flipped=window.is_flipped,
        untagged=window.untagged,
        **(_frames(window) if section.kind != "picture" else {}),
    )


def _frames(window: Window) -> dict[str, Any]:
    names = "start", "num_frames", "stride", "frames"
    return {name: getattr(window, name) for name in names}


def conditioning_alone(
    section: ConditioningSection, path: Path, bucket: Bucket, stride: int = 1
) -> ConditioningInput:
    """Return what to read of a conditioning file that belongs to no clip, such as for sampling.

    These are its first frames, in a bucket's size.
    """
    if section.kind == "numbers":
        assert section.width is not None
        return ConditioningNumbers(
            "",
            Media(str(path)),
            section.width,
            is_per_frame=section.per_frame,
            clip_frames=0,
            num_frames=bucket.num_frames if section.per_frame else 1,
            stride=stride,
        )
    return ConditioningPixels(
        kind=section.kind,
        identity="",
        media=Media(str(path)),
        clip_height=0,
        clip_width=0,
        clip_crop=Crop(0, 0, 0, 0),
        height=bucket.height,
        width=bucket.width,
        is_flipped=False,
        num_frames=section.num_frames(bucket),
        stride=1 if section.kind == "picture" else stride,
    )


def whole_numbers(clip: Clip, section: ConditioningSection) -> ConditioningNumbers:
    """Return the input with all conditioning numbers of a clip, not only those of a window."""
    assert section.width is not None
    given = given_to(clip, section)
    return ConditioningNumbers(
        clip.identity,
        Media(given) if isinstance(given, str) else clip.media,
        section.width,
        is_per_frame=section.per_frame,
        clip_frames=clip.num_frames,
        num_frames=clip.num_frames if section.per_frame else 1,
        values=None if isinstance(given, str) else given,
    )


def conditioning_error(window: Window, name: str, error: ClipError) -> ClipError:
    """Return a conditioning input's error as an error of its clip, which is then quarantined."""
    return ClipError(str(window.media), f"its {name}, {error.path}: {error.reason}")


def empty_conditioning(
    section: ConditioningSection, bucket: Bucket, num_samples: int
) -> NDArray[Any]:
    """Return an uninitialised array for a conditioning input of several samples, for `read`.

    It is [B, 3 or 1, F, H, W] uint8, or [B, (F,) width] float32.
    """
    if section.kind == "numbers":
        assert section.width is not None
        rows = (bucket.num_frames,) if section.per_frame else ()
        return np.empty((num_samples, *rows, section.width), np.float32)
    channels = 1 if section.kind == "mask" else 3
    frames = section.num_frames(bucket)
    return np.empty((num_samples, channels, frames, bucket.height, bucket.width), np.uint8)


def as_bytes(place: NDArray[Any]) -> NDArray[np.uint8]:
    """View one sample of an array made by `empty_conditioning` as the bytes that `read` fills."""
    return place if place.dtype == np.uint8 else place.reshape(-1).view(np.uint8)


def as_values(wanted: Wanted, content: NDArray[np.uint8]) -> NDArray[Any]:
    """Convert the bytes that `read` returned: pixels unchanged, numbers and sound to float32."""
    if isinstance(wanted, AudioWindow):
        return content.view(np.float32).reshape(wanted.channels + 1, -1)
    if not isinstance(wanted, ConditioningNumbers):
        return content
    numbers = content.view(np.float32)
    return numbers.reshape(-1, wanted.width) if wanted.is_per_frame else numbers


def read(wanted: Wanted, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """Read a clip's window or conditioning input into `out`, or a new array of `wanted.shape`.

    Raises:
        ClipError: the file is missing, damaged, or not what is expected.
    """
    if isinstance(wanted, Window):
        return read_window(wanted, out)
    content = np.empty(wanted.shape, np.uint8) if out is None else out
    assert content.shape == wanted.shape
    if isinstance(wanted, AudioWindow):
        content[...] = read_audio(wanted).reshape(-1).view(np.uint8)
    elif isinstance(wanted, ConditioningNumbers):
        content[...] = _numbers(wanted).reshape(-1).view(np.uint8)
    elif wanted.is_alpha and not _is_image(wanted.media):
        content[...] = 255
    elif _is_image(wanted.media):
        if wanted.kind == "video" and wanted.num_frames > 1:
            raise ClipError(
                str(wanted.media),
                f'is one picture, and {wanted.num_frames} frames were wanted; kind = "picture" '
                "is one for the whole clip",
            )
        over = "black" if wanted.kind == "mask" else "white"  # transparent: masked out
        over = ALPHA if wanted.is_alpha else over
        content[...] = _fitted(wanted, read_image(wanted.media, over))[:, None]
    elif wanted.kind == "picture":
        with opened(wanted.media) as (container, stream):
            frames = decoded(wanted.media, container, stream, untagged=wanted.untagged)
            if (frame := next(frames, None)) is None:
                raise ClipError(str(wanted.media), "holds no frame")
            content[:, 0] = _fitted(wanted, in_square_pixels(wanted.media, stream, frame))
    else:
        _read_frames(wanted, content)
    return content


def _is_image(media: Media) -> bool:
    return PurePath(media.member or media.path).suffix.lower() in IMAGE_SUFFIXES


def only_colour(media: Media) -> str | None:
    """Return "white" or "black" if a mask has only this colour; None if not, or if unreadable."""
    found: set[str | None] = set()
    with suppress(ClipError):
        for pixels in _pictures(media):
            is_white, is_black = pixels.min() >= 255 - _ALMOST, pixels.max() <= _ALMOST
            found.add("white" if is_white else "black" if is_black else None)
            # Stop at the first frame that is neither: most masks are decided by it.
            if len(found) > 1 or None in found:
                return None
    return next(iter(found), None)


def _pictures(media: Media) -> Iterator[NDArray[np.uint8]]:
    if _is_image(media):
        yield read_image(media, "black")
        return
    with opened(media) as (container, stream):
        for frame in decoded(media, container, stream):
            yield np.asarray(frame.to_ndarray(format="gray"), np.uint8)


def _fitted(wanted: ConditioningPixels, picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Scale and cut a picture [H', W', 3] to [3 or 1, H, W]."""
    how = _crop(wanted, *picture.shape[:2])
    scaled = resized(picture, how.scaled_height, how.scaled_width).transpose(2, 0, 1)
    kept = scaled[:, how.top : how.top + wanted.height, how.left : how.left + wanted.width]
    kept = _grey(kept) if wanted.kind == "mask" else kept
    return kept[..., ::-1] if wanted.is_flipped else kept


def _crop(wanted: ConditioningPixels, height: int, width: int) -> Crop:
    """Return the crop of a conditioning input of this size: for videos and masks the clip's."""
    clip_height, clip_width = wanted.clip_height, wanted.clip_width
    if (height, width) == (clip_height, clip_width):
        return wanted.clip_crop
    if not clip_height or wanted.kind == "picture":
        return crop(height, width, wanted)
    # The two aspect ratios may differ by the rounding of one pixel.
    if abs(height * clip_width - width * clip_height) > max(clip_height, clip_width):
        raise ClipError(
            str(wanted.media),
            f"has {width}x{height} pixels, another aspect ratio than its clip of "
            f"{clip_width}x{clip_height}; a {wanted.kind} is scaled and cut as the clip is",
        )
    return wanted.clip_crop


def _grey(planes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the luma [1, H, W] of red, green and blue [3, H, W]."""
    sums = np.einsum("c,chw->hw", _LUMA, planes.astype(np.uint32))
    grey: NDArray[np.uint8] = ((sums + 2**15) >> 16).astype(np.uint8)
    return grey[None]


def _read_frames(wanted: ConditioningPixels, out: NDArray[np.uint8]) -> None:
    """Read frames by number from the first on, as their timestamps are not in the catalog."""
    # The file may be longer than the window: `counted` stops decoding after the last index.
    indices = wanted.indices()
    reformatter, num_read, window = VideoReformatter(), 0, None
    with opened(wanted.media) as (container, stream):
        frames = decoded(wanted.media, container, stream, untagged=wanted.untagged)
        for number, frame in enumerate(counted(indices, frames)):
            window = window or _window(wanted, stream, frame)
            pixels = np.stack(planes(window, stream, frame, reformatter))
            out[:, number] = _grey(pixels) if wanted.kind == "mask" else pixels
            num_read = number + 1
    if num_read < wanted.num_frames:
        needed = f"a {wanted.kind} has a frame for each of its clip's"
        if not wanted.clip_height:
            needed = f"{wanted.num_frames} frames are needed"
            needed += f", at a stride of {wanted.stride}" * (wanted.stride > 1)
        raise ClipError(str(wanted.media), f"ends before frame {indices[num_read]}; {needed}")


def _window(wanted: ConditioningPixels, stream: VideoStream, frame: VideoFrame) -> Window:
    """Return the window to read from a conditioning video or mask, from one of its frames."""
    rotation = rotation_of(wanted.media, stream, frame)
    shown = square_size(wanted.media, stream, frame)
    height, width = shown[::-1] if is_turned(rotation) else shown
    how = _crop(wanted, height, width)
    return Window(
        identity=wanted.identity,
        media=wanted.media,
        kind="video",
        stream_index=stream.index,
        rotation=rotation,
        source_height=height,
        source_width=width,
        start=wanted.start,
        num_frames=wanted.num_frames,
        stride=wanted.stride,
        timestamps=(),
        seek_to=None,
        scaled_height=how.scaled_height,
        scaled_width=how.scaled_width,
        top=how.top,
        left=how.left,
        height=wanted.height,
        width=wanted.width,
        is_flipped=wanted.is_flipped,
    )


def _numbers(wanted: ConditioningNumbers) -> NDArray[np.float32]:
    """Read the numbers of a conditioning input, as float32 [F, width] or [width]."""
    if wanted.values is None:
        found = np.atleast_1d(_read_numbers(wanted.media))
    else:
        found = np.array(wanted.values, np.float64)
        if wanted.is_per_frame and len(found) % wanted.width == 0:
            found = found.reshape(-1, wanted.width)
    shape = "x".join(map(str, found.shape))
    if not wanted.is_per_frame:
        if found.size != wanted.width:
            raise ClipError(
                str(wanted.media), f"has {shape} numbers; expected {wanted.width} (width)"
            )
        rows: NDArray[np.float64] = found.reshape(-1)
        indices = list(range(len(rows)))
    else:
        # Frames may hold matrices, such as camera poses: each becomes one row.
        rows = found.reshape(len(found), -1) if found.size else found.reshape(0, wanted.width)
        indices = list(wanted.indices())
        end = indices[-1] + 1
        is_long_enough = len(rows) == wanted.clip_frames if wanted.clip_frames else len(rows) >= end
        if rows.shape[1] != wanted.width or not is_long_enough:
            expected = wanted.clip_frames or f"at least {end}"
            raise ClipError(
                str(wanted.media),
                f"has {shape} numbers; expected {expected} rows, one for each frame of the clip, "
                f"of {wanted.width} (width)",
            )
    # Overflow to infinity is reported below, with the file's name.
    with np.errstate(over="ignore"):
        numbers: NDArray[np.float32] = rows.astype(np.float32)
    if not np.isfinite(numbers).all():
        raise ClipError(str(wanted.media), "has numbers that are NaN, infinite or beyond float32")
    return np.ascontiguousarray(numbers[indices])


def _read_numbers(media: Media) -> NDArray[np.float64]:
    """Return the numbers of a JSON, CSV or npy file in their own shape."""
    suffix = PurePath(media.path).suffix.lower()
    if suffix not in NUMBERS_SUFFIXES:
        known = ", ".join(NUMBERS_SUFFIXES)
        raise ClipError(str(media), f"ends in {suffix or 'nothing'}; expected {known}")
    if media.is_remote:
        # Measured first, as an object is fetched whole.
        media = stores.measured(media)
        if (media.num_bytes or 0) > _MAX_NUMBERS_BYTES:
            raise ClipError(str(media), f"has more than {_MAX_NUMBERS_BYTES:,} bytes")
    with stores.local(media) as here:  # checks that a file is unchanged
        try:
            data = read_regular(here.file, _MAX_NUMBERS_BYTES)
            if suffix == ".json":
                kind: Any = list[float] | list[list[float]] | list[list[list[float]]]
                numbers = np.array(parse_record(data, kind, here.file))
            else:
                numbers = _read_csv(data) if suffix == ".csv" else _read_npy(data)
            return np.ascontiguousarray(numbers, np.float64)
        except RecordError as error:
            raise ClipError(str(media), f"no list of numbers: {error.reason}") from error
        except FileNotFoundError as error:
            raise ClipError(str(media), "does not exist") from error
        except OSError as error:
            raise ClipError(str(media), f"cannot be read: {error.strerror or error}") from error
        except (ValueError, TypeError, ArithmeticError, MemoryError, EOFError, csv.Error) as error:
            raise ClipError(str(media), f"no list of numbers: {error}") from error


def _read_csv(data: bytes) -> NDArray[Any]:
    """Return the rows of a CSV file; a first row without numbers is a heading."""
    # utf-8-sig drops the byte order mark that spreadsheets write.
    rows = [row for row in csv.reader(io.StringIO(data.decode("utf-8-sig")), strict=True) if row]
    if rows and not any(map(_is_number, rows[0])):
        rows = rows[1:]
    return np.array([[float(cell) for cell in row] for row in rows], np.float64)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _read_npy(data: bytes) -> NDArray[Any]:
    # A pickle in the file could run any code.
    found = np.load(io.BytesIO(data), allow_pickle=False)
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "fiu":
        raise ValueError(f"it holds {getattr(found, 'dtype', 'several arrays')}")
    return found

"""Stills of videos: decoded once by a process of their own, as no file is trusted, and cached.

They are in the user's cache folder, named by path, inode, size and time of the video.
"""

import atexit
import hashlib
import io
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from longtake import errors, fsio
from longtake.data.clip import Media
from longtake.data.decode import decoded, in_square_pixels, opened, read_image
from longtake.data.workers import Task, WorkerPool
from longtake.formatting import first_line
from longtake.fsio import open_below

MAX_SIDE: Final = 384
"""Maximum width and height of a still in pixels; larger ones are shrunk."""
_LOSSLESS_SIDE = 128
_JPEG_QUALITY = 82
_SECONDS, _MEMORY_GIB = 10.0, 0.5
"""Limits for decoding the first frame of a video: seconds without progress, and GiB of memory."""
_FOLDER = "posters"
_MAX_STILLS, _PRUNED_EVERY = 4000, 200
_MAX_KNOWN_PROBLEMS = 1000
_MAX_STILL_BYTES = 2**20


@dataclass(frozen=True)
class Poster:
    """A picture that a page shows in place of a video, or the problem that prevents it."""

    data: bytes  # empty if there is a problem
    kind: str  # media type
    tag: str  # changes when the video does
    problem: str | None = None  # why there is no picture


def poster_bytes(top: Path, name: str) -> bytes | None:
    """Return the first frame of a video below `top` as PNG or JPEG; None if it has none."""
    try:
        found = still(top, name)
    except OSError:
        return None
    return None if found.problem else found.data


def still(top: Path, name: str) -> Poster:
    """Return the first frame of a video below a folder, or the problem in decoding it.

    Raises:
        OSError: the file cannot be opened without following a link.
    """
    with open_below(top, name) as file:
        status = os.fstat(file.fileno())
        parts = map(str, (top.resolve(), name, *fsio.version_of(status)))
        tag = hashlib.sha256("\0".join(parts).encode(errors="replace")).hexdigest()[:32]
        if kept := _read_kept(tag):
            return Poster(kept, kind_of(kept), tag)
        problem = _problems.get(tag)
        if problem is None:
            try:
                data = _decoder.first_frame(file.fileno())
            except errors.ClipError as error:
                problem = _problems[tag] = error.reason
                while len(_problems) > _MAX_KNOWN_PROBLEMS:
                    _problems.popitem(last=False)
            except (errors.LongtakeError, OSError, RuntimeError) as error:
                problem = first_line(error)  # of this machine, not of the file: tried again
            else:
                with suppress(OSError):
                    _keep(tag, data)
                return Poster(data, kind_of(data), tag)
        return Poster(b"", "", tag, problem)


def kind_of(data: bytes) -> str:
    return "image/png" if data.startswith(b"\x89PNG") else "image/jpeg"


# --- Decoding ---------------------------------------------------------------------------------


class PosterTask(Task[Path, bytes]):
    """Worker's task that decodes the first frame of a video and encodes it as a small picture."""

    doing = "decoding a still"
    silence_seconds = _SECONDS
    memory_gib = _MEMORY_GIB

    def do(self, item: Path, progress: Callable[[], object]) -> bytes:
        image, picture = _first_frame(Media(str(item))), io.BytesIO()
        is_small = max(image.size) <= _LOSSLESS_SIDE
        image.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.BICUBIC)
        if is_small:
            image.save(picture, "PNG")
        else:
            image.save(picture, "JPEG", quality=_JPEG_QUALITY)
        return picture.getvalue()

    def lost(self, item: Path, reason: str) -> bytes:
        raise errors.ClipError(str(item), reason)


def _first_frame(media: Media) -> Image.Image:
    with media.file.open("rb") as file:
        start = file.read(8)
    if start.startswith((b"\x89PNG", b"\xff\xd8", b"GIF8", b"RIFF")):
        return Image.fromarray(read_image(media))
    with opened(media) as (container, stream):
        for frame in decoded(media, container, stream):
            return Image.fromarray(np.ascontiguousarray(in_square_pixels(media, stream, frame)))
    raise errors.ClipError(str(media), "it has no frame")


class _Decoder:
    """The process that decodes videos: started with the first still, and again after failures."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: WorkerPool[Path, bytes] | None = None

    def first_frame(self, descriptor: int) -> bytes:
        """Return the first frame of an open video file as an encoded small picture.

        Raises:
            ClipError: the frame cannot be decoded within the limits.
            DataError: the process that decodes cannot be started.
        """
        with self._lock:
            pool = self._pool = self._pool or WorkerPool(PosterTask(), 1)
        # Through /proc the process opens exactly this file, even if its path was replaced.
        item = Path(f"/proc/{os.getpid()}/fd/{descriptor}")
        try:
            found: bytes = pool.submit(item).result()
        except errors.DataError:
            with self._lock:
                # Another thread may have replaced it already.
                if self._pool is pool:
                    self._pool = None
            pool.close()
            raise
        return found

    def close(self) -> None:
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()


_decoder: Final = _Decoder()
_problems: Final[OrderedDict[str, str]] = OrderedDict()
atexit.register(_decoder.close)


# --- The cache --------------------------------------------------------------------------------


def _read_kept(tag: str) -> bytes | None:
    with suppress(OSError, RuntimeError):
        descriptor = os.open(
            fsio.cache_folder() / _FOLDER / tag, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        )
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            # Another user may have put something in place of the cached file.
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
                found = file.read(_MAX_STILL_BYTES)
                return found if found.startswith((b"\x89PNG", b"\xff\xd8")) else None
    return None


_keeps = count()


def _keep(tag: str, data: bytes) -> None:
    folder = fsio.cache_folder() / _FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with fsio.atomic_write(folder / tag, by_many=True) as partial:
        partial.write_bytes(data)
    if next(_keeps) % _PRUNED_EVERY == 0:
        fsio.remove_oldest(folder, _MAX_STILLS)

"""Stills of training clips that could not be decoded: the last frame of each that can be.

Clips are outside of the folder of runs. They are therefore opened only for runs that this user
began on this host, by the supervised process that training decodes with; a page embeds a small
copy.
"""

import base64
import hashlib
import io
import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from pydantic import Field
from typing_extensions import TypedDict

from longtake import errors, fsio, trust
from longtake.data.clip import Clip
from longtake.run_dir import RunDirectory

if TYPE_CHECKING:
    from longtake.data.decode_worker import DecodePool

MOST_STILLS: Final = 12
_WIDTH, _HEIGHT, _QUALITY = 192, 128, 70
_MOST_PICTURE_BYTES: Final = 24 * 2**10
_CLIP_SECONDS: Final = 10.0  # without a sign of progress
_MOST_TRIES: Final = 8  # frames of a clip that are tried
_MOST_KEPT: Final = 2000
_WAIT_SECONDS: Final = 0.7


class _KeptStill(TypedDict):
    """A frame of a clip, or the reason for its lack, as stored in the cache."""

    frame: fsio.Count | None
    reason: str
    picture: Annotated[str, Field(max_length=2 * _MOST_PICTURE_BYTES)]


@dataclass(frozen=True)
class Still:
    """The last decodable frame of a training clip, or the reason why there is none."""

    picture: str | None
    """The frame as a data: URI; None if no frame could be decoded."""
    words: str


PENDING: Final = Still(None, "The still is being decoded: load the page again in some seconds.")


def why_none(run: RunDirectory, files: Iterable[Path]) -> str | None:
    """Return a sentence that says why no clip of a run may be opened for stills, or None if it may.

    `files` are the catalogs that contain the paths of the clips.
    """
    if not trust.is_own(run):
        return (
            "No stills: this run was not begun by you on this host, and its records could name any "
            "file of yours."
        )
    with suppress(OSError):
        if all(path.lstat().st_uid == os.getuid() for path in files):
            return None
    return "No stills: the run's copies of its catalogs were not written by you."


def stills_of(clips: Sequence[Clip], wait_seconds: float = _WAIT_SECONDS) -> dict[str, Still]:
    """Return the still of each clip by its identity; `PENDING` if it is not decoded in time."""
    found, missing = dict[str, Still](), list[Clip]()
    for clip in clips[:MOST_STILLS]:
        if clip.media.is_remote:
            found[clip.identity] = Still(
                None, "It lies in an object store, which is not read here."
            )
        elif (kept := _read_kept(clip)) is not None:
            found[clip.identity] = kept
        else:
            missing.append(clip)
    if missing:
        # Most clips are decoded by then; a page must not wait for one that hangs.
        _decode_in_background(missing).join(wait_seconds)
        for clip in missing:
            found[clip.identity] = _read_kept(clip) or PENDING
    return found


# --- Cache ------------------------------------------------------------------------------------


def _kept_path(clip: Clip) -> Path:
    """Return the cache path of a clip's still; another one once the clip's file is replaced."""
    parts = clip.identity, clip.path, fsio.file_version(clip.media.file.resolve())
    name = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
    return fsio.cache_folder() / "stills" / f"{name}.json"


_in_memory: dict[str, _KeptStill] = {}  # newest stills, in case the cache cannot be written


def _read_kept(clip: Clip) -> Still | None:
    if (kept := _in_memory.get(_kept_path(clip).name)) is not None:
        return _still(kept, clip)
    with suppress(errors.RecordError, OSError):
        kept = fsio.read_record(_kept_path(clip), _KeptStill, 4 * _MOST_PICTURE_BYTES)
        if kept is not None:
            return _still(kept, clip)
    return None


def _still(kept: _KeptStill, clip: Clip) -> Still:
    if kept["frame"] is None:
        return Still(None, f"No frame can be decoded: {kept['reason']}")
    words = f"frame {kept['frame'] + 1:,} of {clip.num_frames:,}"
    if kept["reason"]:
        words = f"the last good frame, {words}; then: {kept['reason']}"
    # A cache file may contain anything; only valid base64 may go into a page.
    with suppress(ValueError):
        base64.b64decode(kept["picture"], validate=True)
        return Still(f"data:image/jpeg;base64,{kept['picture']}", words)
    return Still(None, words)


def _keep(clip: Clip, kept: _KeptStill) -> None:
    path = _kept_path(clip)
    while len(_in_memory) >= 4 * MOST_STILLS:
        del _in_memory[next(iter(_in_memory))]
    _in_memory[path.name] = kept
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fsio.write_json(path, kept, by_many=True)
        fsio.remove_oldest(path.parent, _MOST_KEPT)


# --- Decoding ---------------------------------------------------------------------------------


_threads: dict[frozenset[Path], threading.Thread] = {}
"""Threads that decode stills, by their cache paths: a reloaded page waits for the same thread."""
_lock, _one_at_a_time = threading.Lock(), threading.Lock()


def _decode_in_background(clips: Sequence[Clip]) -> threading.Thread:
    """Return a thread that decodes the clips' stills one by one, and stores them in the cache."""
    paths = frozenset(map(_kept_path, clips))
    with _lock:
        for known, thread in list(_threads.items()):
            if not thread.is_alive():
                del _threads[known]
            elif paths <= known:
                return thread
        thread = threading.Thread(target=_decode_all, args=(clips,), name="stills", daemon=True)
        _threads[paths] = thread
        thread.start()
        return thread


def _decode_all(clips: Sequence[Clip]) -> None:
    from longtake.data.decode_worker import DecodePool  # PyAV, which few pages need

    # Pages that are opened at the same time share the processor with training.
    with _one_at_a_time:
        missing = [clip for clip in clips if _read_kept(clip) is None]
        if missing:
            with DecodePool(1, _CLIP_SECONDS) as pool:
                for clip in missing:
                    _keep(clip, _decode(clip, pool))


def _decode(clip: Clip, pool: "DecodePool") -> _KeptStill:
    """Find a clip's last decodable frame by bisection, and the error of the frame after it."""
    good: tuple[int, str] | None = None
    last, reason, frame = clip.num_frames, "", clip.num_frames - 1
    # Between the last frame known to be good and the first bad one; damage is taken to last.
    for _ in range(_MOST_TRIES):
        try:
            good = frame, _jpeg(clip, frame, pool)
        except errors.LongtakeError as error:
            reason = error.reason if isinstance(error, errors.ClipError) else str(error)
            last = frame
        first = good[0] + 1 if good else 0
        if first >= last:
            break
        frame = (first + last - 1) // 2
    if good is None:
        return {"frame": None, "reason": reason, "picture": ""}
    return {"frame": good[0], "reason": reason, "picture": good[1]}


def _jpeg(clip: Clip, frame: int, pool: "DecodePool") -> str:
    """Decode one frame of a clip, and encode it as a small JPEG in base64."""
    from PIL import Image

    from longtake.data.buckets import window_of
    from longtake.data.window import Crop

    scale = min(1.0, _WIDTH / clip.width, _HEIGHT / clip.height)
    height, width = max(1, round(clip.height * scale)), max(1, round(clip.width * scale))
    whole = Crop(height, width, top=0, left=0)
    window = window_of(clip, range(frame, frame + 1), whole, height, width)
    picture = pool.submit(window).result()[:, 0].transpose(1, 2, 0)  # [H, W, 3] uint8
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=_QUALITY)
    return base64.b64encode(file.getvalue()).decode()

"""How much moves in a clip: how far its picture changes in an eighth of a second.

The mean absolute difference of luma between two frames is VMAF's motion feature ("the average
absolute pixel difference for the luminance component", github.com/Netflix/vmaf,
resource/doc/features.md). Here the frames are an eighth of a second apart instead of adjacent, so
that a clip scores alike at 24 and at 60 frames a second; and they are small, which takes out noise
and grain as VMAF's blur does.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longtake.data.clip import Clip
from longtake.data.crop import Crop
from longtake.data.limits import DEFAULT, Limits
from longtake.data.sample import window_of
from longtake.data.window import Window, read_window
from longtake.data.workers import Task
from longtake.errors import ClipError

STEP_SECONDS = 1 / 8
SHORT_SIDE = 64
"""Pixels of the shorter side of the frames that are compared."""

_PASSAGES = 4
_FRAMES = 9
"""A clip is looked at in up to 4 passages of 9 frames (a second), evenly spread over it."""

_LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # of R'G'B', ITU-R BT.601


@dataclass(frozen=True)
class MotionScore(Task[Clip, float | ClipError]):
    """Score one clip by its motion."""

    limits: Limits = DEFAULT
    silence_seconds = 600.0  # it reports progress only after each passage

    @property
    def memory_gib(self) -> float:  # type: ignore[override]  # it follows from the limits
        """As the limits say."""
        return self.limits.memory_gib

    def do(self, item: Clip, progress: Callable[[], object]) -> float | ClipError:
        """See `motion`."""
        try:
            return motion(item, self.limits.timed(item.media, progress))
        except ClipError as error:
            return error

    def lost(self, item: Clip, reason: str) -> ClipError:
        """It is not scored."""
        return ClipError(item.path, reason)

    def reads(self, item: Clip) -> str:
        """The clip's file, or its tar; an image is not even opened."""
        return item.media.path if item.num_frames > 1 else ""


def motion(clip: Clip, progress: Callable[[], object] = lambda: None) -> float:
    """The mean absolute luma difference between frames an eighth of a second apart.

    Distances are counted in frames, by the clip's average frame rate. A cut counts as what it is
    for a model too: a large change.

    Args:
        clip: of which clip.
        progress: called after each passage.

    Returns:
        Levels of 255: 0 for an image and a frozen video, 1 to 20 for most others.

    Raises:
        ClipError: the clip cannot be decoded.
    """
    if clip.num_frames < 2:
        return 0.0
    changes = []
    for window in _windows(clip):
        changes.append(_changes(read_window(window)))
        progress()
    return float(np.concatenate(changes).mean())


def _changes(frames: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The mean absolute luma difference of neighbours: [3, F, H, W] to [F - 1]."""
    luma = np.einsum("c,cfhw->fhw", _LUMA, frames, dtype=np.float32)
    changes: NDArray[np.float32] = np.abs(np.diff(luma, axis=0)).mean(axis=(1, 2))
    return changes


def _windows(clip: Clip) -> list[Window]:
    stride = min(max(1, round(clip.fps * STEP_SECONDS)), clip.num_frames - 1)
    num_frames = min(_FRAMES, (clip.num_frames - 1) // stride + 1)
    last_start = clip.num_frames - 1 - (num_frames - 1) * stride
    passages = min(_PASSAGES, last_start // (num_frames * stride) + 1)
    starts = np.linspace(0, last_start, passages) if passages > 1 else [last_start // 2]
    return [_window(clip, int(start), num_frames, stride) for start in starts]


def _window(clip: Clip, start: int, num_frames: int, stride: int) -> Window:
    scale = min(1.0, SHORT_SIDE / min(clip.height, clip.width))
    height, width = max(1, round(clip.height * scale)), max(1, round(clip.width * scale))
    frames = range(start, start + num_frames * stride, stride)
    return window_of(clip, frames, Crop(height, width, top=0, left=0), height, width)

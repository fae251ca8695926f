"""What can be said of videos without any weights, and with those that users bring.

    signals     a few numbers of each frame, and of each pair: one pass over a video
    light       brightness contrast saturation flicker brightness_slope
    detail      sharpness
    change      frame_change duplicate_frames
    cuts        scene_jumps largest_jump
    motion      motion
    catalogue   all of these by name, with unit and the value below which one is small
    extra       the Protocol of further measures, and how a recipe names them
    clip_score  one of those: CLIP score
    frechet     another: Frechet distance between features (FVD, FID)

Formulas, ranges and limits: docs/concepts/measures.md.
"""

from collections.abc import Mapping, Sequence

from longtake.evaluation.measures.catalogue import MEASURES
from longtake.evaluation.measures.signals import Signals, Video

__all__ = ["MEASURES", "mean_of", "measure"]


def measure(video: Video, fps: float) -> dict[str, float]:
    """All measures that need no weights.

    Args:
        video: [F, H, W, 3] uint8 RGB.
        fps: frames a second that it is shown at; motion and brightness_slope are per second.

    Returns:
        By name, finite; without those that are not defined, such as the motion of one frame.
    """
    signals = Signals.of(video)
    found = {name: known.find(signals, fps) for name, known in MEASURES.items()}
    return {name: value for name, value in found.items() if value is not None}


def mean_of(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each measure over the videos that have it."""
    names = dict.fromkeys(name for each in measured for name in each)
    values = {name: [each[name] for each in measured if name in each] for name in names}
    return {name: sum(found) / len(found) for name, found in values.items()}

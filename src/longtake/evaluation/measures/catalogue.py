"""The measures by name, in the order in which they are shown."""

from collections.abc import Callable
from dataclasses import dataclass

from longtake.evaluation.measures.change import duplicate_frames, frame_change
from longtake.evaluation.measures.cuts import largest_jump, scene_jumps
from longtake.evaluation.measures.detail import sharpness
from longtake.evaluation.measures.light import (
    brightness,
    brightness_slope,
    contrast,
    flicker,
    saturation,
)
from longtake.evaluation.measures.motion import motion
from longtake.evaluation.measures.signals import Signals


@dataclass(frozen=True)
class Known:
    """One measure of ours.

    Attributes:
        find: it, of a video's signals and its frames a second; None where it is not defined.
        unit: what its values are in.
        floor: a value that is no longer small for it. Changes of smaller values are told as shares
            of this one: that a motion of 0.01 becomes 0.02 is no doubling that matters.
    """

    find: Callable[[Signals, float], float | None]
    unit: str
    floor: float


MEASURES = {
    "brightness": Known(brightness, "grey levels", 16.0),
    "contrast": Known(contrast, "grey levels", 8.0),
    "saturation": Known(saturation, "share", 0.05),
    "sharpness": Known(sharpness, "squared grey levels", 10.0),
    "flicker": Known(flicker, "grey levels", 0.5),
    "frame_change": Known(frame_change, "grey levels", 1.0),
    "motion": Known(motion, "% of height a second", 5.0),
    "duplicate_frames": Known(duplicate_frames, "share", 0.1),
    "scene_jumps": Known(scene_jumps, "cuts", 0.5),
    "largest_jump": Known(largest_jump, "grey levels", 4.0),
    "brightness_slope": Known(brightness_slope, "grey levels a second", 4.0),
}

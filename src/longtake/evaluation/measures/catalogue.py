"""The measures by name, in the order in which they are shown."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

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
        bad: the direction in which a steady change is a known failure: `up`, `down`, `both`, or
            `none` where a change alone says nothing about quality.
    """

    find: Callable[[Signals, float], float | None]
    unit: str
    floor: float
    bad: Literal["up", "down", "both", "none"]


MEASURES = {
    "brightness": Known(brightness, "grey levels", 16.0, "both"),
    "contrast": Known(contrast, "grey levels", 8.0, "both"),
    "saturation": Known(saturation, "share", 0.05, "both"),
    "sharpness": Known(sharpness, "squared grey levels", 10.0, "down"),
    "flicker": Known(flicker, "grey levels", 0.5, "up"),
    "frame_change": Known(frame_change, "grey levels", 1.0, "none"),
    "motion": Known(motion, "% of height a second", 5.0, "down"),
    "duplicate_frames": Known(duplicate_frames, "share", 0.1, "up"),
    "scene_jumps": Known(scene_jumps, "cuts", 0.5, "up"),
    "largest_jump": Known(largest_jump, "grey levels", 4.0, "none"),
    "brightness_slope": Known(brightness_slope, "grey levels a second", 4.0, "both"),
}

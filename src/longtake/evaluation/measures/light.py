"""How bright, contrasted and colourful a video is, and what its light does over time."""

import numpy as np

from longtake.evaluation.measures.signals import Signals


def brightness(signals: Signals, fps: float) -> float:
    """Mean luma over all frames, 0 (black) to 255 (white)."""
    del fps
    return float(signals.luma.mean())


def contrast(signals: Signals, fps: float) -> float:
    """Standard deviation of the luma in a frame, mean over frames; 0 to 127.5."""
    del fps
    return float(signals.contrast.mean())


def saturation(signals: Signals, fps: float) -> float:
    """Mean saturation over all pixels, as in HSV; 0 (grey) to 1."""
    del fps
    return float(signals.saturation.mean())


def brightness_slope(signals: Signals, fps: float) -> float | None:
    """Slope of the line that fits the frames' luma best; grey levels a second. None: one frame."""
    luma = signals.luma
    times = np.arange(len(luma)) - (len(luma) - 1) / 2
    return float(times @ luma / (times @ times)) * fps if len(luma) > 1 else None


def flicker(signals: Signals, fps: float) -> float | None:
    """Mean absolute second difference of the frames' luma, 0 to 510; None: fewer than 3 frames.

    Light that rises or falls steadily has none; light that comes and goes has most.
    """
    del fps
    return float(np.abs(np.diff(signals.luma, 2)).mean()) if len(signals.luma) > 2 else None

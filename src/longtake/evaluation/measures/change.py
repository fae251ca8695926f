"""How much neighbouring frames differ, and how many of them do not."""

import numpy as np

from longtake.evaluation.measures.signals import Signals

_SAME = 0.5  # grey levels: what compression alone makes of a frame that is shown again


def frame_change(signals: Signals, fps: float) -> float | None:
    """Mean absolute difference of neighbouring frames, 0 to 255; None: one frame.

    Temporal flickering of VBench (Huang et al., 2023) is 1 - frame_change / 255.
    """
    del fps
    return float(signals.change.mean()) if len(signals.change) else None


def duplicate_frames(signals: Signals, fps: float) -> float | None:
    """Share of neighbours whose mean absolute difference is below half a grey level; 0 to 1."""
    del fps
    return float(np.mean(signals.change < _SAME)) if len(signals.change) else None

"""Where a video jumps from one scene to another."""

from longtake.evaluation.measures.signals import Signals

_LEAST = 20.0  # grey levels
_LEAD = 2.0
_REACH = 4  # pairs


def cuts(signals: Signals) -> list[int]:
    """The pairs of neighbours (0: the first two frames) between which there is a cut.

    There the picture changes by 20 grey levels at least, and by twice as much as between any other
    two neighbours within four frames: flicker, a flash, a fade and lasting motion are none.
    """
    change = signals.change
    found = []
    for pair, jump in enumerate(change):
        around = [*change[max(0, pair - _REACH) : pair], *change[pair + 1 : pair + 1 + _REACH]]
        if jump >= _LEAST and jump >= _LEAD * max(around, default=0.0):
            found.append(pair)
    return found


def scene_jumps(signals: Signals, fps: float) -> float | None:
    """How many cuts there are; None where fewer than three frames are there to tell by."""
    del fps  # however long it takes, a cut is one
    return float(len(cuts(signals))) if len(signals.change) > 1 else None


def largest_jump(signals: Signals, fps: float) -> float | None:
    """The largest mean absolute difference of neighbours, 0 to 255; None: one frame."""
    del fps
    return float(signals.change.max()) if len(signals.change) else None

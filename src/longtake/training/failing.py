"""How this rank fails: it leaves a trail, or follows that of the rank that failed before it."""

from longtake.errors import LongtakeError, LostPeerError
from longtake.heartbeat import Heart, read
from longtake.run_dir import RunDirectory
from longtake.trail import Kind, failure_of, last_line, who_failed


def leave_trail(error: Exception, heart: Heart, run: RunDirectory | None) -> None:
    """Tell the other ranks why this one ends; call it before its heart stops.

    A rank that is alone has nobody to tell, and a run that was not begun holds no trail.
    """
    pulse = read(heart.path)
    if pulse is not None and pulse.world_size > 1 and run is not None and run.exists():
        kind: Kind = "error" if isinstance(error, LongtakeError) else "exception"
        failure_of(pulse, kind, last_line(error)).leave(run)


def explained(error: LostPeerError, heart: Heart, run: RunDirectory | None) -> LostPeerError:
    """The same error, with what is known of the rank that was lost."""
    pulse = read(heart.path)
    found = None if pulse is None or run is None else who_failed(run, pulse)
    if pulse is None or found is None:
        return error
    return LostPeerError(
        f"{found.in_words}\nRank {pulse.rank} waited for it at step {pulse.step}, and cannot go on."
    )

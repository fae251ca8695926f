"""How this rank fails: it leaves a trail, or follows that of the rank that failed before it."""

from longtake.errors import LongtakeError, LostPeerError
from longtake.failures import FailureKind, error_line, failure_of, find_failed_rank
from longtake.heartbeat import HeartbeatWriter, read_heartbeat
from longtake.run_dir import RunDirectory


def leave_trail(error: Exception, heart: HeartbeatWriter, run: RunDirectory | None) -> None:
    """Tell the other ranks why this one ends; call it before its heart stops.

    A rank that is alone has nobody to tell, and a run that was not begun holds no trail.
    """
    pulse = read_heartbeat(heart.path)
    if pulse is not None and pulse.world_size > 1 and run is not None and run.exists():
        kind: FailureKind = "error" if isinstance(error, LongtakeError) else "exception"
        failure_of(pulse, kind, error_line(error)).record(run)


def explained(
    error: LostPeerError, heart: HeartbeatWriter, run: RunDirectory | None
) -> LostPeerError:
    """The same error, with what is known of the rank that was lost."""
    pulse = read_heartbeat(heart.path)
    found = None if pulse is None or run is None else find_failed_rank(run, pulse)
    if pulse is None or found is None:
        return error
    return LostPeerError(
        f"{found}\nRank {pulse.rank} waited for it at step {pulse.step}, and cannot go on."
    )

"""The follower: waits for its turn, tells the trackers, gives the turn back."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from longtake.config import TrackingSection
from longtake.evaluation_dir import cursor_path
from longtake.lease import Lease, kept
from longtake.run_dir import RunDirectory
from longtake.tracking.feed import Feed
from longtake.tracking.log import say
from longtake.tracking.shutdown import Shutdown
from longtake.tracking.tracker import Tracker
from longtake.tracking.turn import Role, Turn

LONGEST_END_SECONDS = 60.0
"""For how long after the end of a launch a tracker that cannot be reached is tried."""

_LOOK_SECONDS = 0.5
_SECONDS_TO_GIVE_WAY = 30.0
_EVALUATORS_PATIENCE_SECONDS = 2.0


def follow(run: RunDirectory, role: Role, section: TrackingSection, shutdown: Shutdown) -> None:
    """Tell the trackers what the run's directory says, whenever it is this follower's turn.

    Returns when the end is requested and all are told, or cannot be; or without the run.
    """
    turn = Turn(run, role)
    try:
        while run.exists():
            lease = turn.take()
            if lease is not None:
                if _write_until_it_ends(lease, turn, run, section, shutdown):
                    return
            elif _is_too_late(role, shutdown):
                return
            shutdown.wait(_LOOK_SECONDS)
    finally:
        turn.leave()


def _is_too_late(role: Role, shutdown: Shutdown) -> bool:
    """Whether to wait for the lease no more; at an evaluator's end, a trainer's follower has it."""
    patience = LONGEST_END_SECONDS if role == "trainer" else _EVALUATORS_PATIENCE_SECONDS
    return shutdown.is_requested and (shutdown.is_at_once or shutdown.requested_seconds > patience)


def _write_until_it_ends(
    lease: Lease, turn: Turn, run: RunDirectory, section: TrackingSection, shutdown: Shutdown
) -> bool:
    """Write until the turn or the launch is over; whether this process is to end."""
    paths = {each: cursor_path(run, each.name) for each in _trackers(run, section)}
    feeds = [Feed(run, each, path, lease) for each, path in paths.items()]
    with kept(lease):
        for feed in feeds:
            feed.start()
        is_end = _wait(lease, turn, run, feeds, shutdown)
        for feed in feeds:
            feed.end_now(may_write=lease.is_held and run.exists())
        stuck = [feed for feed in feeds if not feed.join(_SECONDS_TO_GIVE_WAY)]
    if stuck:
        names = ", ".join(feed.name for feed in stuck)
        say(f"{names}: does not come to its end. This process ends instead, and with it its turn.")
        return True  # given back, the lease would have a second writer beside these threads
    if lease.is_held and run.exists():
        with suppress(OSError):
            lease.end("released", **_condition(feeds))
    return is_end


def _wait(
    lease: Lease, turn: Turn, run: RunDirectory, feeds: Sequence[Feed], shutdown: Shutdown
) -> bool:
    """Return when another is to write (False), or after the end, when all is told (True)."""
    said = _condition(feeds)
    while lease.is_held and run.exists():
        shutdown.wait(_LOOK_SECONDS)
        is_ending = shutdown.is_requested
        if turn.must_give_way(is_ending=is_ending):
            return False
        if is_ending:
            for feed in feeds:
                feed.finish()
            if _is_done(feeds, shutdown):
                return True
        if (condition := _condition(feeds)) != said:
            said = condition
            with suppress(OSError):  # a full disk: it is said later
                lease.renew(**said)
    return False


def _is_done(feeds: Sequence[Feed], shutdown: Shutdown) -> bool:
    if all(feed.is_over for feed in feeds):
        return True
    if shutdown.is_at_once:
        return all(feed.is_settled for feed in feeds)
    if shutdown.requested_seconds <= LONGEST_END_SECONDS:
        return False
    late = ", ".join(feed.name for feed in feeds if not feed.is_over)
    say(f"{late}: not told everything. It is told when this run is followed again.")
    return True


def _condition(feeds: Sequence[Feed]) -> dict[str, Any]:
    """What the lease says: what is wrong with which tracker, and whether there is more to do."""
    troubles = {feed.name: feed.trouble for feed in feeds if feed.trouble}
    return {"troubles": troubles, "caught_up": all(feed.is_settled for feed in feeds)}


def _trackers(run: RunDirectory, section: TrackingSection) -> list[Tracker]:
    """Those that a recipe wants; what each needs is imported only then."""
    found: list[Tracker] = []
    if section.tensorboard:
        from longtake.tracking.tensorboard import TensorBoard

        found.append(TensorBoard(run))
    if section.wandb != "off":
        from longtake.tracking.wandb import Wandb

        found.append(Wandb(run, section))
    return found

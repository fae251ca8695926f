"""What rank 0 does so that trackers are told of a run: it starts the run's follower.

The follower (`longtake.tracking`) is a process of its own, so that a tracker that cannot be reached
keeps no step waiting.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from longtake.config import TrackingSection
from longtake.errors import LongtakeError
from longtake.parallel.mesh import World
from longtake.run_dir import RunDirectory
from longtake.tracking.process import Follower

_SECONDS_TO_CATCH_UP = 10.0


@contextmanager
def mirrored(run: RunDirectory, section: TrackingSection, world: World) -> Iterator[Follower]:
    """The run's follower, to be started when there is a run; on other ranks than 0 it is none.

    It has a moment to catch up when the block ends, and then goes on by itself. It has none where
    nobody's wish or mistake ends the block: then others wait for this process to be gone.
    """
    off = TrackingSection(tensorboard=False, wandb="off")
    follower = Follower(run, "trainer", section if world.is_first else off)
    seconds = 0.0
    try:
        yield follower
        seconds = _SECONDS_TO_CATCH_UP
    except (LongtakeError, KeyboardInterrupt):
        seconds = _SECONDS_TO_CATCH_UP
        raise
    finally:
        follower.close(seconds)

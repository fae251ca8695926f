"""What a run does to be watched: a heart in each process, and on each node one watcher.

The watcher is a program of its own (`longtake.monitor`), which this one knows by name only: it must
live on when this one does not.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from longtake.config import Recipe
from longtake.errors import LostPeerError
from longtake.heartbeat import HeartbeatWriter, heartbeat_dir, heartbeat_session, make_private_dir
from longtake.node_dir import this_node
from longtake.parallel.collectives import from_first
from longtake.parallel.mesh import World, place_in_world
from longtake.process import SECTION_VARIABLE, KeptProcess, program
from longtake.run_dir import RunDirectory
from longtake.stacks import enable_stack_dumps, stack_file
from longtake.training.failing import explained, leave_trail

_PROGRAM = "longtake.monitor"
_SECONDS_TO_END = 3.0


class Watcher:
    """Starts this node's watcher when there is a run, and another whenever that one dies.

    Args:
        recipe: the run's.
        heart: this process's.
        is_wanted: whether this is the process that starts it.

    Attributes:
        run: the run, as soon as it is known.
    """

    def __init__(self, recipe: Recipe, heart: HeartbeatWriter, *, is_wanted: bool) -> None:
        self._section = recipe.watch
        self._data = _folders(recipe)
        self._heart = heart
        self._is_wanted = is_wanted
        self.run: RunDirectory | None = None
        self._let_in()
        self._watcher: KeptProcess | None = None

    def join(self, run: RunDirectory, world: World) -> None:
        """Say which run this is, and which launch of it; all ranks call it."""
        self.run = run
        if self._heart.path.parent != heartbeat_dir(run.path):
            self._stacks.unlink(missing_ok=True)
            self._heart.move_to(heartbeat_dir(run.path))
            self._let_in()
        self._heart.set_launch(from_first(secrets.token_hex(4), world))

    def start(self) -> None:
        """Start it, if there is a run and it was not started yet."""
        if self.run is None or not self.run.exists():
            return
        if self._is_wanted and self._watcher is None:
            options = [part for path in self._data for part in ("--data", str(path))]
            self._watcher = KeptProcess(
                "watcher",
                program(_PROGRAM, str(self.run.path.resolve()), *options),
                this_node(self.run).log_path,
                inside=self.run.path,
                # Not an argument: other users of the node read command lines.
                changes={SECTION_VARIABLE: self._section.model_dump_json()},
            )
            self._watcher.start()

    def close(self, *, waits: bool = True) -> None:
        """Give it a moment to end, as it does after the last rank of its node, if one `waits`."""
        self._stacks.unlink(missing_ok=True)
        if self._watcher is not None:
            self._watcher.end()
            self._watcher.wait(_SECONDS_TO_END if waits else 0)
        elif not self._section.enabled or self._is_wanted or self.run is None:
            self._heart.remove()  # nobody else does

    def _let_in(self) -> None:
        self._stacks = stack_file(self._heart.path.parent, os.getpid())
        with suppress(OSError):  # py-spy may still be let in
            enable_stack_dumps(self._stacks)


@contextmanager
def watched(recipe: Recipe) -> Iterator[Watcher]:
    """Let this process's heart beat, from before it meets the others until it has left them.

    Raises:
        RunError: watch.enabled, and another user has made the folder of this user's processes.
        LostPeerError: another rank was lost in the block, with what is known of it.
    """
    rank, local_rank, size = place_in_world()
    if recipe.watch.enabled:
        with suppress(OSError):  # no memory to share is no reason not to train
            make_private_dir(heartbeat_dir(recipe.out))
    heart = HeartbeatWriter(
        heartbeat_dir(recipe.out), "rank", rank=rank, local_rank=local_rank, world_size=size
    )
    watcher = Watcher(recipe, heart, is_wanted=recipe.watch.enabled and local_rank == 0)
    is_waited_for = False  # by who starts all ranks again, as soon as this one is gone
    try:
        with heartbeat_session(heart):
            heart.set_phase("rendezvous")
            try:
                yield watcher
            except LostPeerError as error:
                is_waited_for = True
                raise explained(error, heart, watcher.run) from error
            except Exception as error:
                leave_trail(error, heart, watcher.run)
                raise
    finally:
        watcher.close(waits=not is_waited_for)


def _folders(recipe: Recipe) -> list[Path]:
    paths = [*recipe.data.sources().values(), *filter(None, [recipe.data.cache])]
    return sorted({path.resolve().parent for path in paths})

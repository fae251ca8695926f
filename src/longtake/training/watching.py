"""What a run does to be watched: a heart in each process, and on each node one watcher.

The watcher is a program of its own (`longtake.watch`), which this one knows by name only: it must
live on when this one does not.
"""

import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from longtake.config import Recipe, WatchSection
from longtake.heartbeat import Heart, beating, folder_of
from longtake.node_dir import this_node
from longtake.parallel.collectives import from_first
from longtake.parallel.mesh import World
from longtake.run_dir import RunDirectory
from longtake.stacks import allow_inspection, signal_path

_PROGRAM = "longtake.watch"
_PACKAGES = Path(__file__).parents[2]  # where longtake is imported from
_MAX_STARTS = 5
_SECONDS_BEFORE_ANOTHER = 1.0
_SECONDS_TO_END = 3.0


class Watcher:
    """Starts this node's watcher when there is a run, and another when that one dies.

    Args:
        section: the recipe's.
        run: the run directory.
        data: folders of the data, whose disks are watched.
        is_wanted: whether this is the process that starts it.
    """

    def __init__(
        self, section: WatchSection, run: RunDirectory, data: Sequence[Path], *, is_wanted: bool
    ) -> None:
        options = [part for path in data for part in ("--data", str(path))]
        self._command = [
            *(sys.executable, "-P", "-m", _PROGRAM, str(run.path.resolve())),
            *("--section", section.model_dump_json(), *options),
        ]
        self._run = run
        self._is_wanted = is_wanted
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start it, if there is a run and it was not started yet."""
        if self._is_wanted and self._thread is None and self._run.exists():
            self._thread = threading.Thread(target=self._keep, name="watcher", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Give it a moment to end, as it does after the last rank of its node."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(_SECONDS_TO_END)

    def _keep(self) -> None:
        for _ in range(_MAX_STARTS):
            with suppress(OSError):  # it is no reason not to train
                status = self._start().wait()
                if status == 0 or self._is_over.is_set():
                    return
            if self._is_over.wait(_SECONDS_BEFORE_ANOTHER):
                return

    def _start(self) -> "subprocess.Popen[bytes]":
        log = this_node(self._run).log_path
        log.parent.mkdir(parents=True, exist_ok=True)
        paths = filter(None, [str(_PACKAGES), os.environ.get("PYTHONPATH", "")])
        with log.open("ab") as file:
            return subprocess.Popen(  # noqa: S603 - ourselves
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,  # Ctrl-C and a scheduler's signals are not for it
            )


@contextmanager
def watched(recipe: Recipe, run: RunDirectory, world: World) -> Iterator[Watcher]:
    """Let this process's heart beat, and look after the node's watcher; all ranks call it."""
    folder = folder_of(run.path)
    heart = Heart(
        folder, "rank", rank=world.rank, local_rank=world.local_rank, world_size=world.size
    )
    stacks = signal_path(folder, os.getpid())
    section, is_wanted = recipe.watch, recipe.watch.enabled and world.local_rank == 0
    watcher = Watcher(section, run, _folders(recipe), is_wanted=is_wanted)
    with suppress(OSError):  # py-spy may still be let in
        allow_inspection(stacks)
    try:
        with beating(heart):
            heart.join(from_first(secrets.token_hex(4), world))
            yield watcher
    finally:
        watcher.close()
        stacks.unlink(missing_ok=True)
        if not section.enabled:
            heart.remove()


def _folders(recipe: Recipe) -> list[Path]:
    paths = [*recipe.data.sources().values(), *filter(None, [recipe.data.cache])]
    return sorted({path.resolve().parent for path in paths})

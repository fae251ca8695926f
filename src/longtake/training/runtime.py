"""Heartbeat, node watcher, memory errors and compiled code of a rank's process.

The watcher (`longtake.monitor`) is a separate program, because it must survive this process.
"""

import os
import re
import resource
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from longtake import errors, fsio, heartbeat, node_dir, node_events, process
from longtake.config import Recipe
from longtake.failures import FailureKind, error_line, failure_of, find_failed_rank
from longtake.formatting import format_size
from longtake.models.numerics import is_out_of_memory
from longtake.parallel import collectives, mesh
from longtake.planner.record import MemoryPlan
from longtake.run_dir import RunDirectory
from longtake.stacks import enable_stack_dumps, stack_file
from longtake.training.session import TrainingState

_WATCHER_PROGRAM = "longtake.monitor.watcher"
_SECONDS_TO_END = 3.0
_SILENT_SECONDS = 12.0  # longer than a watcher waits for anything


# --- Heartbeat and watcher --------------------------------------------------------------------


class NodeWatcher:
    """Starts the program that watches this node's ranks once the run exists; keeps it running."""

    def __init__(
        self, recipe: Recipe, writer: heartbeat.HeartbeatWriter, *, is_wanted: bool
    ) -> None:
        self._section = recipe.watch
        paths = [*recipe.data.sources().values(), *filter(None, [recipe.data.cache])]
        self._data = sorted({path.resolve().parent for path in paths})
        self._writer = writer
        self._is_wanted = is_wanted
        self.run: RunDirectory | None = None
        self.has_begun = False  # true once this process holds the run, and the run exists
        self._enable_stack_dumps()
        self._process: process.KeptProcess | None = None

    def join(self, run: RunDirectory, world: mesh.World) -> None:
        """Tell the watcher which run to watch, and agree on an identifier of the launch.

        All ranks must call it.
        """
        self.run = run
        # The folder of a fresh run is known only now; the heartbeat has begun in the recipe's.
        if self._writer.path.parent != heartbeat.heartbeat_dir(run.path):
            self._stacks.unlink(missing_ok=True)
            self._writer.move_to(heartbeat.heartbeat_dir(run.path))
            self._enable_stack_dumps()
        self._writer.set_launch(collectives.from_first(secrets.token_hex(4), world))

    def start(self) -> None:
        """Start the node's watcher program if the run exists and no watcher was started yet."""
        if self.run is None or not self.run.exists():
            return
        self.has_begun = True
        if self._is_wanted and self._process is None:
            options = [part for path in self._data for part in ("--data", str(path))]
            self._process = process.KeptProcess(
                "watcher",
                process.program(_WATCHER_PROGRAM, str(self.run.path.resolve()), *options),
                node_dir.this_node(self.run).log_path,
                inside=self.run.path,
                # Not an argument: other users of the node read command lines.
                changes={process.SECTION_VARIABLE: self._section.model_dump_json()},
                silent_seconds=_SILENT_SECONDS,
                terminal=int(os.environ.get(process.TERMINAL_VARIABLE, "2")),
            )
            self._process.start()

    def close(self, *, waits: bool = True) -> None:
        """Let the watcher program end after its node's last rank; with `waits`, wait a little."""
        self._stacks.unlink(missing_ok=True)
        if self._process is not None:
            self._process.end()
            self._process.wait(_SECONDS_TO_END if waits else 0)
        elif not self._section.enabled or self._is_wanted or self.run is None:
            self._writer.remove()  # no watcher will remove it

    def _enable_stack_dumps(self) -> None:
        self._stacks = stack_file(self._writer.path.parent, os.getpid())
        with suppress(OSError):  # py-spy can still read the stacks, if it is permitted
            enable_stack_dumps(self._stacks)


@contextmanager
def watcher_process(recipe: Recipe) -> Iterator[NodeWatcher]:
    """Start heartbeat and node watcher of this rank, from before the rendezvous to its end.

    An error that ends the context is recorded in the run's directory; that of a lost rank is raised
    again with the rank that was lost.

    Raises:
        LostPeerError: with the failed rank and recent node events in its message.
    """
    rank, local_rank, size = mesh.place_in_world()
    if recipe.watch.enabled:
        with suppress(OSError):  # training also works without shared memory
            heartbeat.make_private_dir(heartbeat.heartbeat_dir(recipe.out))
    writer = heartbeat.HeartbeatWriter(
        heartbeat.heartbeat_dir(recipe.out),
        "rank",
        rank=rank,
        local_rank=local_rank,
        world_size=size,
    )
    watcher = NodeWatcher(recipe, writer, is_wanted=recipe.watch.enabled and local_rank == 0)
    waits = True
    try:
        with heartbeat.heartbeat_session(writer):
            writer.set_phase("rendezvous")
            try:
                yield watcher
            except errors.LostPeerError as error:
                waits = False  # the launcher restarts all ranks once this one has ended
                raise _with_failed_rank(error, writer, watcher.run) from error
            except Exception as error:
                # After any other error the heartbeat stays, so that the watcher outlives this
                # process and reports it.
                waits = isinstance(error, errors.LongtakeError)
                # A single process may have been refused a run that another process trains.
                if size > 1 or watcher.has_begun:
                    _record_failure(error, writer, watcher.run)
                raise
    finally:
        watcher.close(waits=waits)


def _record_failure(
    error: Exception, writer: heartbeat.HeartbeatWriter, run: RunDirectory | None
) -> None:
    """Record the error that ends this rank, if its run has begun, before its heartbeat stops."""
    own, text = heartbeat.read_heartbeat(writer.path), error_line(error)
    writer.set_error(text)  # for the watcher, and before the run's disk, which may hang
    if own is not None and run is not None and run.exists():
        kind: FailureKind = "error" if isinstance(error, errors.LongtakeError) else "exception"
        # A link or GPU that has failed on this node may explain a failed collective.
        if isinstance(error, torch.distributed.DistError):
            text = node_events.add_to(text, node_events.recent(run, launch=own.launch))
        failure_of(own, kind, text).record(run)


def _with_failed_rank(
    error: errors.LostPeerError, writer: heartbeat.HeartbeatWriter, run: RunDirectory | None
) -> errors.LostPeerError:
    """Add the rank that was lost, and recent events of clocks, links and GPUs, to an error."""
    own = heartbeat.read_heartbeat(writer.path)
    if own is None or run is None:
        return error
    found, events = find_failed_rank(run, own), node_events.recent(run, launch=own.launch)
    text = str(error)
    if found is not None:
        text = f"{found}\nRank {own.rank} waited for it at step {own.step}, and cannot continue."
    return errors.LostPeerError(node_events.add_to(text, events))


# --- This process -----------------------------------------------------------------------------


def keep_compiled_code() -> None:
    """Let torch keep compiled code in the user's cache folder, which survives a reboot.

    An existing TORCHINDUCTOR_CACHE_DIR is kept. Ranks and runs may share the folder, because torch
    looks compiled code up by source, shapes, versions and processor.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(fsio.cache_folder() / "compiled"))


@contextmanager
def refuse_out_of_memory(
    plan: MemoryPlan, recipe: Recipe, state: TrainingState, world: mesh.World
) -> Iterator[None]:
    """Turn an out-of-memory error of the context into one with planned and measured memory.

    Raises:
        PlanError: memory was not enough; its message advises settings.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        # torch begins a sentence with it for a GPU, and not for a CPU.
        asked = re.search(r"ried to allocate ([\d.]+ \w+)", str(error))
        where = f"step {state.global_step + 1} on rank {world.rank} ({world.device})"
        where += f", which asked for {asked[1]} more" if asked else ""
        planned = f"Nothing was predicted (recompute.policy = {plan.policy})."
        if plan.memory is not None:
            most = format_size(plan.memory.step_peak_bytes)
            if plan.budget_bytes is not None:
                most += f" of a budget of {format_size(plan.budget_bytes)}"
            planned = f"The plan (recompute.policy = {plan.policy}) predicts at most {most}."
        way = f"recompute.reserve above {recipe.recompute.reserve:g}, so that the plan uses less,"
        if plan.budget_bytes is None:
            way = "recompute.memory to the device's memory,"
        if plan.encodes_ahead:
            way += " training.encode_ahead = false,"
        raise errors.PlanError(
            f"Out of memory in {where}. {planned} {_measured(world.device)} Set {way} or lower "
            "training.micro_batch_size, and start the same command again."
        ) from error


def _measured(device: torch.device) -> str:
    if device.type != "cuda":
        # Linux counts in KiB.
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return f"The process took at most {format_size(most)}."
    peak, held = torch.cuda.max_memory_allocated(device), torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    return (
        f"Measured: tensors took at most {format_size(peak)}, torch holds {format_size(held)}, and "
        f"{format_size(free)} of the GPU's {format_size(total)} are free."
    )

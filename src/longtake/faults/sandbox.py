"""Small runs for drills: folders with clips and a recipe, and observers of their processes.

    data/clips/*.mp4  data/catalog.parquet  recipe.toml  run/  launch_0.log ...

All paths are relative, so a copy of the folder is another run at the same point, and `longtake
train recipe.toml` in it does the same as the drill.
"""

import json
import os
import shutil
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from socket import gethostname
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from rich.console import Console

from longtake import errors, fsio, heartbeat, stacks
from longtake.data.catalog import Catalog
from longtake.data.index import index
from longtake.data.tasks import HERE
from longtake.demo.shapes import write_clips
from longtake.faults.faulty_processes import Hang, read_hang
from longtake.node_dir import NodeDirectory, NodeEventKind
from longtake.process import SETTINGS_VARIABLE, program, read_stat, start
from longtake.run_dir import EventKind, RunDirectory

NUM_CLIPS = 64
BATCH_SIZE = 4
STEPS = 50  # three epochs of the clips and part of a fourth
STEPS_PER_EPOCH = NUM_CLIPS // BATCH_SIZE
LONG_STEPS = 168  # ten and a half epochs
GUARD_WINDOW_STEPS = 32
SAMPLE_TIMEOUT_SECONDS = 1.5  # a thousand times the decoding time of one of these clips
ON_TWO_RANKS = ("data.workers=0",)  # changes of the recipe: two cores have no room for workers
COMPARED_EVERY = 4  # steps from one comparison of the copies of the weights to the next
ON_THREE_RANKS = (
    *ON_TWO_RANKS,
    "training.global_batch_size=3",
    f"guard.compare_replicas_every={COMPARED_EVERY}",
)

POISONED_BATCHES = 5  # more than the guard skips one by one
RATE_FACTOR = 10.0
NORM_FACTOR = 1.007  # like the epoch-end defect that added 5 to a weight norm of 700
PACE_SECONDS = 0.5  # delay of each step if a run has to last for some seconds
SLOW_PACE_SECONDS = 0.25  # delay of each step if one rank is slower than the others
NODE_POLL_SECONDS = 0.05  # a watcher takes seconds to report
NAN_PARAMETER = "blocks.1.attention.to_out.weight"

# The number of threads changes the rounding of sums, so it is fixed; 1 is fastest for small models.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
# Otherwise ranks that torchrun restarts would find values of the former ranks in its store.
RANK_ENVIRONMENT = {**ONE_THREAD, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

_LIMIT_SECONDS = 600.0
_POLL_SECONDS = 0.002  # the time of an event is known this exactly
_DECODER_POLL_SECONDS = 0.0002  # a clip of the drills is decoded in half a millisecond
_STOP_SECONDS = 1.0
_WATCHER = "longtake.monitor"
_DECODER = b"longtake.data.decode_worker"

T = TypeVar("T")


def _recipe(steps: int, checkpoint_every: int, more: str = "") -> str:
    return f"""\
out = "run"
data.catalog = "data/catalog.parquet"
data.buckets = [{{ num_frames = 8, height = 32, width = 32 }}]
data.workers = 2
data.frame_cache_gib = 0                 # so that every epoch decodes every clip
data.sample_timeout_seconds = {SAMPLE_TIMEOUT_SECONDS}
model.family = "tubelet"
model.config = {{ hidden_size = 48, num_blocks = 2 }}
text.max_tokens = 6
flow.logit_mean = 2.0
optimizer.learning_rate = 3e-3
optimizer.warmup_steps = 4
training.steps = {steps}
training.global_batch_size = {BATCH_SIZE}
training.device = "cpu"
training.precision = "fp32"
ema.decay = 0.9
checkpoint.every = {checkpoint_every}
{more}"""


# No multiple of 5 is an epoch's end (16, 32, 48): every resumption is in mid-epoch.
SHORT_RECIPE = _recipe(STEPS, checkpoint_every=5)
# A longer run for faults that the guard finds by comparison with earlier steps.
LONG_RECIPE = _recipe(
    LONG_STEPS,
    checkpoint_every=20,
    more=f"guard.window = {GUARD_WINDOW_STEPS}\nguard.warmup_steps = 16\n",
)


@dataclass(frozen=True)
class Injection:
    """A fault to inject into the training process by `longtake.faults.inject`."""

    kind: str  # a key of `inject.INJECTIONS`
    at: int  # first step or batch; for a frozen worker, the number of windows read before
    lasting: bool = False  # True: it stays active after the run went back

    @property
    def arguments(self) -> list[str]:
        return [*["--lasting"] * self.lasting, self.kind, str(self.at)]


@dataclass(frozen=True)
class ObservedEvent:
    """An event of a run, and the time at which the drill's process saw it."""

    event: dict[str, Any]
    at: float  # seconds by this process's monotonic clock


class RunObserver(ABC):
    """Observer of a run while its processes work; leaving the block kills them.

    Args:
        folder: working directory of the processes, with the run in `run`.
        hosts: names of the nodes that they run on.
        log: beginning of the name of the file for their output.

    Attributes:
        began: start of the processes, in seconds of the monotonic clock.
        polled_at: last time they were found running, by the same clock.
    """

    NAME = "training process"

    def __init__(self, folder: Path, hosts: Sequence[str], log: str = "launch") -> None:
        self._folder = folder
        self._run = RunDirectory(folder / "run")
        self._log = folder / f"{log}_{len(list(folder.glob(f'{log}_*.log')))}.log"
        self._nodes = [NodeDirectory(self._run, host) for host in hosts]
        # A site may be launched several times: lines of former launches must not count.
        self._num_events = _count_lines(self._run.events_path)
        self._num_node_events = {node: _count_lines(node.events_path) for node in self._nodes}
        self.began = self.polled_at = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()

    @abstractmethod
    def exit_code(self) -> int | None:
        """Return the exit code of the observed processes; None while they run."""

    @abstractmethod
    def kill(self) -> bool:
        """Send SIGKILL to the observed processes, and return True if that ended them."""

    @property
    def output(self) -> str:
        """Text that the observed processes have printed so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def events(self) -> list[dict[str, Any]]:
        """Return the run's events since the observed processes were started."""
        return list(fsio.read_json_lines(self._run.events_path))[self._num_events :]

    def node_events(self) -> list[dict[str, Any]]:
        """Return the events of nodes' watchers since the processes were started, node by node."""
        found: list[dict[str, Any]] = []
        for node, num_before in self._num_node_events.items():
            found += list(fsio.read_json_lines(node.events_path))[num_before:]
        return found

    def num_rows(self) -> int:
        """Return the number of rows in the run's metrics, including those of former launches."""
        path = self._run.metrics_path
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def polls(self, seconds: float = _POLL_SECONDS) -> Iterator[None]:
        """Yield every `seconds` while the observed processes run, and once after their end.

        Raises:
            RunError: the processes do not end within ten minutes.
        """
        while self.exit_code() is None:
            self.polled_at = time.monotonic()
            yield
            if self.polled_at > self.began + _LIMIT_SECONDS:
                raise self.failed(f"has not ended in {_LIMIT_SECONDS:g} s")
            time.sleep(seconds)
        yield  # what the processes wrote just before their end is seen, too

    def wait_until(
        self, condition: Callable[[], T | None], else_ended: str, seconds: float = _POLL_SECONDS
    ) -> T:
        """Poll until `condition` is true while the observed processes run; return its value.

        Raises:
            RunError: the processes end before; the message contains `else_ended`.
        """
        for _ in self.polls(seconds):
            if found := condition():
                return found
        raise self.failed(f"ended before {else_ended}")

    def wait_for_rows(self, count: int) -> None:
        """Wait until the run has this number of rows of metrics.

        Raises:
            RunError: the run ends before.
        """
        self.wait_until(lambda: self.num_rows() >= count, f"step {count}")

    def wait_for_checkpoints(self, count: int) -> None:
        """Wait until the run has this number of complete checkpoints.

        Raises:
            RunError: the run ends before.
        """
        run = self._run
        self.wait_until(
            lambda: len(run.checkpoint_steps()) >= count, f"it had {count} whole checkpoints"
        )

    def wait_for_watcher(self) -> int:
        """Wait until the first node has a watcher, and return the watcher's pid on that node.

        Raises:
            RunError: the run ends before.
        """
        node = self._nodes[0]
        return self.wait_until(
            lambda: int(node.read_heartbeat().get("pid") or 0), "it was watched", NODE_POLL_SECONDS
        )

    def wait_for_hang(self) -> Hang:
        """Wait until a process with an injected hang hangs, and return its note of the place.

        Raises:
            RunError: the run ends before.
        """
        return self.wait_until(lambda: read_hang(self._folder), "one of its processes could hang")

    def wait_for_event(self, kind: EventKind, **fields: Any) -> ObservedEvent | None:
        """Wait for a run's event with these fields; None if the run ends without it."""
        return self._wait_for(
            self.events, kind, lambda event: fields.items() <= event.items(), _POLL_SECONDS
        )

    def wait_for_node_event(
        self, kind: NodeEventKind, where: Callable[[dict[str, Any]], bool] = bool
    ) -> ObservedEvent | None:
        """Wait for a watcher's event for which `where` holds; None if the run ends without it."""
        return self._wait_for(self.node_events, kind, where, NODE_POLL_SECONDS)

    def _wait_for(
        self,
        read: Callable[[], list[dict[str, Any]]],
        kind: str,
        where: Callable[[dict[str, Any]], bool],
        seconds: float,
    ) -> ObservedEvent | None:
        for _ in self.polls(seconds):
            for event in read():
                if event["event"] == kind and where(event):
                    return ObservedEvent(event, time.monotonic())
        return None

    def wait(self) -> int:
        """Wait for the end of the observed processes, and return the exit code."""
        for _ in self.polls():
            pass
        code = self.exit_code()
        assert code is not None
        return code

    def finish(self, expected: int = 0) -> None:
        """Wait for the end of the observed processes, and check the exit code.

        Raises:
            RunError: the exit code is not `expected`.
        """
        if (code := self.wait()) != expected:
            raise self.failed(f"ended with exit code {code}")

    def failed(self, how: str) -> errors.RunError:
        """Build an error that quotes the end of the observed processes' output."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        last = " / ".join(lines[-3:]) or "nothing"
        return errors.RunError(
            f"The {self.NAME} {how}. The end of its output ({self._log}): {last}"
        )


class TrainingProcess(RunObserver):
    """An observed process `longtake train`, or a launcher of several ranks of it."""

    def __init__(
        self,
        folder: Path,
        changes: Sequence[str] = (),
        ranks: int = 1,
        inject: Injection | None = None,
        restarts: int = 0,
        watch: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(folder, [gethostname()])
        module, *arguments = _program(ranks, inject, restarts)
        options = ["recipe.toml", *(part for change in changes for part in ("--set", change))]
        with self._log.open("wb") as log:
            command = program(module, *arguments, *options)
            changed = {SETTINGS_VARIABLE: json.dumps(watch)} if watch else {}
            self._process = start(command, log, folder, **RANK_ENVIRONMENT, **changed)
        self.pid = self._process.pid

    def exit_code(self) -> int | None:
        return self._process.poll()

    def kill(self) -> bool:
        """Send SIGKILL to the training and its descendants except the watcher.

        The watcher ends by itself. Returns True if the signal ended the process.
        """
        # A process that was waited for may have left its pid to another one.
        if self._process.returncode is None:
            # All are listed before the first signal: children of a dead process get another parent.
            started = [read_stat(pid) for pid in stacks.descendants(self.pid)]
            ranks = [each.pid for each in started if each and _WATCHER not in each.command]
            for pid in (self.pid, *ranks):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()
        return self._process.returncode == -signal.SIGKILL


def _program(ranks: int, inject: Injection | None, restarts: int) -> list[str]:
    """Return the arguments of `python -m` that start the training, before the recipe."""
    # `longtake launch` starts only `longtake train`: ranks with an injection need torchrun.
    ours = ["longtake", "train"]
    if inject is not None:
        ours = ["longtake.faults.inject", *inject.arguments, "train"]
    elif restarts:
        count = ["--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
        return ["longtake", "launch", *count]
    if ranks == 1:
        return ours
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*torchrun, "--max-restarts", str(restarts), "-m", *ours]


@dataclass(frozen=True)
class TrainingSite:
    """Training site: a folder with clips, catalog and recipe in which a small run is trained."""

    folder: Path

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.folder / "run")

    @property
    def clips(self) -> Path:
        return self.folder / "data" / "clips"

    @property
    def catalog_path(self) -> Path:
        return self.folder / "data" / "catalog.parquet"

    def catalog(self) -> Catalog:
        return Catalog.load(self.catalog_path)

    def newest_file(self, name: str) -> Path:
        return self.run.checkpoint_path(self.run.checkpoint_steps()[-1]) / name

    def prepare(self, recipe: str = SHORT_RECIPE) -> None:
        self.write_clips(NUM_CLIPS)
        self.index()
        self.write_recipe(recipe)

    def write_recipe(self, recipe: str) -> None:
        (self.folder / "recipe.toml").write_text(recipe, encoding="utf-8")

    def write_clips(self, num_clips: int) -> None:
        write_clips(self.clips, num_clips, seed=0)

    def index(self) -> None:
        captions = self.clips / "captions.jsonl"
        index([self.clips], captions=captions, out=self.catalog_path, work=HERE)

    def copied_to(self, folder: Path) -> "TrainingSite":
        shutil.copytree(self.folder, folder, symlinks=True)
        return TrainingSite(folder)

    def launch(
        self,
        *changes: str,
        ranks: int = 1,
        inject: Injection | None = None,
        restarts: int = 0,
        watch: Mapping[str, float] | None = None,
    ) -> TrainingProcess:
        return TrainingProcess(self.folder, changes, ranks, inject, restarts, watch)


class Sandbox:
    """A folder of training sites (folders of small runs); shared ones are made on first use."""

    def __init__(self, folder: Path, console: Console, more: str = "") -> None:
        self._folder = folder.resolve()
        self._console = console
        self._more = more

    def prepare(self) -> None:
        assert self.undisturbed.run.exists()

    def fresh(self, name: str, recipe: str = SHORT_RECIPE) -> TrainingSite:
        site = self._blank.copied_to(self._folder / name)
        site.write_recipe(recipe + self._more)
        return site

    def copied(self, name: str, begins: Literal["killed", "undisturbed"]) -> TrainingSite:
        """Copy the site of a run that was killed in mid-epoch, or trained to its end."""
        source = self._killed if begins == "killed" else self.undisturbed
        return source.copied_to(self._folder / name)

    @cached_property
    def undisturbed(self) -> TrainingSite:
        self._console.print("  trains the undisturbed run, which drills are compared with")
        return self._trained("undisturbed", SHORT_RECIPE)

    # Two ranks add up gradients in another order than one, so they are compared with two.
    @cached_property
    def undisturbed_on_two_ranks(self) -> TrainingSite:
        self._console.print("  trains an undisturbed run on two ranks")
        return self._trained("undisturbed-on-two", SHORT_RECIPE, *ON_TWO_RANKS, ranks=2)

    @cached_property
    def undisturbed_on_three_ranks(self) -> TrainingSite:
        self._console.print("  trains an undisturbed run on three ranks")
        return self._trained("undisturbed-on-three", SHORT_RECIPE, *ON_THREE_RANKS, ranks=3)

    @cached_property
    def undisturbed_long(self) -> TrainingSite:
        self._console.print("  trains a longer undisturbed run, for what needs a history")
        return self._trained("undisturbed-long", LONG_RECIPE)

    def _trained(self, name: str, recipe: str, *changes: str, ranks: int = 1) -> TrainingSite:
        site = self.fresh(name, recipe)
        with site.launch(*changes, ranks=ranks) as process:
            process.finish()
        return site

    @cached_property
    def _blank(self) -> TrainingSite:
        site = TrainingSite(self._folder / "blank")
        site.prepare()
        return site

    @cached_property
    def _killed(self) -> TrainingSite:
        self._console.print("  trains a run and kills it in mid-epoch (SIGKILL)")
        site = self.fresh("killed")
        with site.launch() as process:
            process.wait_for_checkpoints(2)
            process.kill()
        saved = site.run.checkpoint_steps()[-1]
        if saved >= STEPS_PER_EPOCH:
            raise errors.RunError(
                f"{site.run.path} was to be killed in its first epoch, and its newest checkpoint "
                f"is of step {saved}. This machine is busy; run the drill again."
            )
        return site


def stop(pid: int) -> float | None:
    """Stop a process (SIGSTOP), and wait up to a second until it has stopped.

    Returns:
        The time of the signal by the monotonic clock; None: there is no such process.
    """
    try:
        os.kill(pid, signal.SIGSTOP)
    except ProcessLookupError:
        return None
    at = time.monotonic()
    # kill() returns before all threads of the process have stopped, and they may go on for a while.
    while stacks.state_of(pid) != "T" and time.monotonic() < at + _STOP_SECONDS:
        pass
    return at


def stop_while_decoding(process: TrainingProcess, folder: Path) -> Hang:
    """Stop one of a run's decode workers while it has a clip of the folder open (decodes it)."""

    def stop_one() -> Hang | None:
        for pid in _decoders(process.pid):
            if _open_file(pid, folder) and (at := stop(pid)) is not None:
                # It may have closed the file before it stopped: then try again.
                if clip := _open_file(pid, folder):
                    return Hang(pid, at, path=str(clip))
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        return None

    what = "a decode worker could be stopped at work"
    return process.wait_until(stop_one, what, _DECODER_POLL_SECONDS)


def stop_while_idle(process: TrainingProcess, heartbeats: Path) -> Hang:
    """Stop one of a run's decode workers while it waits for its next clip."""

    def stop_one() -> Hang | None:
        for pid in _decoders(process.pid):
            at = stop(pid)
            # Read once it has stopped: a phase that was read before may be over.
            pages = {each.pid: each for each in heartbeat.read_heartbeats(heartbeats)}
            if at is not None and pid in pages and pages[pid].phase == "idle":
                return Hang(pid, at)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        return None

    return process.wait_until(stop_one, "a decode worker could be stopped between two clips")


def _decoders(pid: int) -> Iterator[int]:
    """Yield the pids of the decode workers that are children of a process."""
    # Linux lists children by the thread that forked them; a pool starts its workers in a thread.
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # either may have ended meanwhile
            for child in map(int, children.read_text().split()):
                if _DECODER in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                    yield child


def _open_file(pid: int, folder: Path) -> Path | None:
    """Return a file in the folder that a process has open; None if it has none open."""
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                path = descriptor.readlink()
                if path.parent == folder:
                    return path
    return None


def _count_lines(path: Path) -> int:
    return len(list(fsio.read_json_lines(path)))

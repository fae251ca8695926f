"""Runs a task (such as decoding) over items, in local processes or on a Ray cluster.

Results are the same in both. If an item hangs or crashes its process, only that item fails.
"""

import importlib
import logging
import os
import pickle
import platform
import secrets
import socket
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any, Generic, NamedTuple

from longtake import fsio, process
from longtake.data.decode_limits import DEFAULT, Limits
from longtake.data.workers import Item, Result, Task, WorkerPool
from longtake.errors import DataError, LongtakeError
from longtake.formatting import first_line, one_line

RAY_ATTEMPTS = 3  # number of tries for an item whose Ray worker was lost

# Work per message to a node: more would lose more when a worker is lost.
_BATCH_SECONDS = 10.0
_MAX_BATCH_ITEMS = 1000
_MAX_LOST_IN_A_ROW = 5
_NODES_SECONDS = 10.0  # interval at which new nodes are looked for
_REACH_SECONDS = 5.0
_CLIENT_PORT = "10001"
# Ray would otherwise report usage and print a warning about a coming change.
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
# Makes a Ray that is started here listen on 127.0.0.1 only, its default on other systems.
_ALONE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# Packages whose versions results depend on; they must be equal on all nodes.
_PACKAGES = ("longtake", "av", "numpy", "pillow", "HanTa", "torch", "diffusers", "transformers")
_INSTALL = (
    "Install the same on every node of the cluster: pip install --constraint constraints.txt "
    "'longtake[ray]'."
)


@dataclass(frozen=True)
class Work:
    """Where the items of a task are worked on, with which limits, and who is told of progress.

    Results do not depend on it, unless an item exceeds the limits.
    """

    on: str | None = None
    """None for processes of this machine; `ray` or `ray://HOST:PORT` for a cluster."""
    workers: int | None = None
    """Number of processes; by default one for each core. 0 uses this process, which a hostile file
    can then hang or crash."""
    progress: Callable[[int, int], None] = lambda done, total: None
    """Called with (items done, total items)."""
    limits: Limits = DEFAULT
    """Limits for decoding one file; an item that needs more fails."""


ALL_CORES, HERE = Work(), Work(workers=0)


def run_tasks(
    task: Task[Item, Result], items: Iterable[Item], work: Work = ALL_CORES
) -> Generator[tuple[int, Result]]:
    """Run a task on items and yield (number, result) of each in the order of completion.

    Numbers count from 0. Items are taken from the iterable when they are needed. Close the
    generator to stop early.

    Args:
        task: the work; it is pickled for other processes.
        items: the inputs; each is pickled too.
        work: place and number of the processes.

    Raises:
        DataError: the cluster cannot be reached, or no worker can be started.
    """
    if work.on is not None:
        with connected(work.on) as ray:
            assert ray
            yield from _RayRun(ray, task, work.workers).run(items)
    elif work.workers == 0:
        for number, item in enumerate(items):
            yield number, task.do(item, lambda: None)
    else:
        yield from _run_in_processes(task, items, work.workers or process.num_cores())


def in_order(results: Generator[tuple[int, Result]]) -> Generator[Result]:
    """Yield the results of `run_tasks` in the order of the items, without their numbers."""
    early: dict[int, Result] = {}
    following = 0
    with closing(results):
        for number, result in results:
            early[number] = result
            while following in early:
                yield early.pop(following)
                following += 1


def _run_in_processes(
    task: Task[Item, Result], items: Iterable[Item], count: int
) -> Generator[tuple[int, Result]]:
    waiting = enumerate(items)
    if not (first := list(islice(waiting, count))):
        return
    finished = SimpleQueue[tuple[int, Future[Result]]]()
    with WorkerPool(task, len(first)) as pool:

        def submit(number: int, item: Item) -> None:
            future = pool.submit(item)
            future.add_done_callback(lambda done: finished.put((number, done)))

        for number, item in first:
            submit(number, item)
        num_running = len(first)
        while num_running:
            number, future = finished.get()
            # A new item is submitted before the result is used, so that no process waits for the
            # caller.
            if (following := next(waiting, None)) is None:
                num_running -= 1
            else:
                submit(*following)
            yield number, future.result()


@contextmanager
def connected(on: str | None) -> Iterator[ModuleType | None]:
    """Keep a connection to a Ray cluster for several calls of `run_tasks`; yield module `ray`.

    A connection that the caller already has is used and left open. Without `on` nothing is
    connected, and None is yielded.

    Args:
        on: cluster to connect to, as `Work.on`.

    Raises:
        DataError: `on` names no cluster, Ray is not installed, or the cluster cannot be reached.
    """
    if on is None:
        yield None
        return
    if on != "ray" and not on.startswith("ray://"):
        raise DataError(
            f"--on {on}: expected `ray` (the cluster of RAY_ADDRESS, or else this machine), or "
            "`ray://HOST:PORT`, where a cluster's client server listens (10001, as a rule)."
        )
    address = os.environ.get("RAY_ADDRESS") if on == "ray" else on
    for name, value in (_QUIET if address else _QUIET | _ALONE).items():
        os.environ.setdefault(name, value)
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise DataError(
            f"--on ray needs Ray, which cannot be imported here: {error}. Install it: "
            "pip install 'longtake[ray]'."
        ) from error
    if ray.is_initialized():
        yield ray
        return
    if address:
        _reach(address)
    is_client = address is not None and address.startswith("ray://")
    options = {} if is_client else {"include_dashboard": False}
    try:
        with warnings.catch_warnings():  # the exceptions tell what the warnings do
            warnings.simplefilter("ignore")
            ray.init(address, log_to_driver=False, logging_level=logging.CRITICAL, **options)
    except Exception as error:  # Ray raises many kinds of exceptions
        raise DataError(_unreachable(address, error)) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _reach(address: str) -> None:
    """Raise DataError if nothing listens at a cluster's address; Ray itself needs minutes."""
    host, colon, port = address.removeprefix("ray://").split("/")[0].rpartition(":")
    if not colon and address.startswith("ray://"):
        host, port = port, _CLIENT_PORT
    if not host or not port.isdecimal():
        return  # such as `auto`, which Ray resolves itself
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_SECONDS).close()
    except OSError as error:
        raise DataError(_unreachable(address, error)) from error


def _unreachable(address: str | None, error: Exception) -> str:
    if address is None:
        return f"Ray cannot be started here: {first_line(error).rstrip('.')}."
    return (
        f"The Ray cluster at {address} cannot be reached: {first_line(error).rstrip('.')}. Is it "
        "running (`ray start --head` on one node), is its client server's port open "
        f"({_CLIENT_PORT}, unless it was started otherwise), and is its Ray the version that is "
        "installed here? If it asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH."
    )


class ItemBatches(Generic[Item]):
    """Groups a task's items into batches of some seconds, as each message to a node takes time.

    Items are taken from the iterable when they are needed. Items whose worker was lost come first,
    in batches of one.
    """

    def __init__(self, items: Iterable[Item]) -> None:
        self._waiting = enumerate(items)
        self._ahead: deque[tuple[int, Item]] = deque()
        self._back: deque[tuple[int, Item]] = deque()
        self._losses = Counter[int]()
        self._size = 1

    def ahead(self, count: int) -> int:
        """Take items of the task until `count` wait for a worker, and return how many wait."""
        self._ahead.extend(islice(self._waiting, max(0, count - len(self._ahead))))
        return len(self._ahead) + len(self._back)

    def take(self) -> list[tuple[int, Item]]:
        """Return the next batch of a task's items as (number, item); [] at the end."""
        # Alone, so that another loss shows which item causes it.
        if self._back:
            return [self._back.popleft()]
        self.ahead(self._size)
        return [self._ahead.popleft() for _ in range(min(self._size, len(self._ahead)))]

    def learn(self, seconds: float) -> None:
        """Adapt the size of batches to the measured seconds per item, at most doubling it."""
        # At most doubled, as the first items may be faster than later ones.
        wanted = int(_BATCH_SECONDS / max(seconds, 1e-6))
        self._size = max(1, min(wanted, 2 * self._size, _MAX_BATCH_ITEMS))

    def put_back(self, batch: list[tuple[int, Item]]) -> list[tuple[int, Item]]:
        """Take back the items of a lost worker; return those that have no attempts left."""
        lost: list[tuple[int, Item]] = []
        for number, item in batch:
            self._losses[number] += len(batch) == 1  # in a larger batch the culprit is unknown
            is_over = self._losses[number] >= RAY_ATTEMPTS
            (lost if is_over else self._back).append((number, item))
        return lost


class NodeSetup(NamedTuple):
    """The task, and its folders, that are sent to a Ray worker at its start."""

    task: Task[Any, Any]
    markers: list[Path]  # files that exist on a node if the task's folders are shared with it
    cwd: Path  # working directory, for relative paths


class _Answers(NamedTuple):
    """Results of a batch: of each item the task's result, and whether its file is missing there."""

    results: list[tuple[Any, bool]]
    error: LongtakeError | None  # the error that ended the batch early
    seconds: float


class NodeWorker:
    """Runs a task in one watched process on a cluster's node; it lives in a Ray worker."""

    def __init__(self, pickled: bytes) -> None:
        self._task, markers, cwd = pickle.loads(pickled)  # noqa: S301 - a NodeSetup of our driver
        for marker in markers:
            if not marker.exists():
                raise DataError(
                    f"{marker.parent} on {socket.gethostname()} is another folder than where this "
                    "was started, or cannot be seen there. Put it on a disk that all nodes share, "
                    "mounted at the same place."
                )
        self._pool = WorkerPool(self._task, 1, cwd=cwd if cwd.is_dir() else None)

    def work(self, items: list[Any]) -> _Answers:
        """Run the task on the items of a batch, one after the other, and return their results."""
        begun, results, failure = time.perf_counter(), list[tuple[Any, bool]](), None
        try:
            futures = [self._pool.submit(item) for item in items]
            for item, future in zip(items, futures, strict=True):
                result, path = future.result(), self._task.reads(item)
                results.append((result, bool(path) and not Path(path).exists()))
        except LongtakeError as error:
            failure = error
        return _Answers(results, failure, time.perf_counter() - begun)

    def close(self) -> None:
        self._pool.close()


def package_versions() -> dict[str, str]:
    """Return the versions of Python, packages and longtake, on which a task's results depend."""
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name).partition("+")[0]  # torch +cpu equals +cu130
    return {**found, "longtake's files": process.code_digest("data", "models")}


def version_differences(node: str, there: Mapping[str, str], here: Mapping[str, str]) -> str:
    """Return the error message about a cluster node whose package versions differ."""
    names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
    listed = ", ".join(
        f"{name} is {there.get(name, 'not installed')} there and {here.get(name, 'not installed')} "
        "here"
        for name in names
    )
    return f"{node} would not do the same work: {listed}. {_INSTALL}"


def _actor_class() -> type:
    """Define the class of Ray actors inside a function, so that Ray pickles its code.

    A node may lack longtake.
    """

    class RayWorker:
        def begin(self, setup: bytes, versions: dict[str, str]) -> tuple[str, str, Any]:
            import socket

            node = socket.gethostname()
            try:
                from longtake.data import tasks
                from longtake.errors import DataError
            except ImportError as error:
                return node, "absent", str(error)
            # Other versions may decode to other pixels, and results would depend on the node.
            if (found := tasks.package_versions()) != versions:
                return node, "differs", found
            try:
                self._worker = tasks.NodeWorker(setup)
            except DataError as error:
                return node, "refuses", str(error)
            return node, "", ""

        def work(self, items: list[Any]) -> Any:
            return self._worker.work(items)

    return RayWorker


@dataclass(eq=False)
class _Actor:
    """A Ray actor and the name of its node, which is empty until the actor has started."""

    handle: Any
    node: str = ""


class _RayRun(Generic[Item, Result]):
    """Ray actors (remote workers) of one task, and the items that each of them works on.

    An actor keeps its cores or GPU, and what it has loaded, until the end. A lost actor (its node
    went away, or was out of memory) is replaced, and its items are repeated one by one. Ray's own
    retries are off: they would endlessly repeat an item that takes too much memory.
    """

    def __init__(self, ray: ModuleType, task: Task[Item, Result], workers: int | None) -> None:
        self._ray = ray
        self._task = task
        self._workers = workers
        self._versions = package_versions()
        self._class = ray.remote(_actor_class())
        known = ray.exceptions
        self._losses = (known.RayActorError, known.ObjectLostError, known.OutOfMemoryError)
        self._setup = b""
        self._starting: dict[Any, _Actor] = {}
        self._free: list[_Actor] = []
        self._busy: dict[Any, tuple[_Actor, list[tuple[int, Item]]]] = {}
        self._failed_starts = self._lost_in_a_row = 0
        self._options: dict[str, Any] = {}
        self._room, self._looked = 0, -_NODES_SECONDS

    def run(self, items: Iterable[Item]) -> Generator[tuple[int, Result]]:
        batches = ItemBatches(items)
        with _markers(self._task.folders) as markers:
            self._setup = pickle.dumps(NodeSetup(self._task, markers, Path.cwd()))
            try:
                while self._busy or batches.ahead(1):
                    self._start_actors(batches)
                    while self._free and (batch := batches.take()):
                        actor = self._free.pop()
                        sent = [item for _, item in batch]
                        self._busy[actor.handle.work.remote(sent)] = actor, batch
                    refs = [*self._busy, *self._starting]
                    # The first call waits for one, the second collects all that are ready.
                    some = self._ray.wait(refs, timeout=1.0)[0]
                    ready = some and self._ray.wait(refs, num_returns=len(refs), timeout=0)[0]
                    for ref in ready:
                        if ref in self._starting:
                            self._on_start(ref)
                        else:
                            yield from self._on_results(ref, batches)
            except (ConnectionError, self._ray.exceptions.RaySystemError) as error:
                raise DataError(
                    f"The Ray cluster is gone: {first_line(error).rstrip('.')}. The same command "
                    "again resumes where this one ended."
                ) from error
            finally:
                busy = (actor for actor, _ in self._busy.values())
                for actor in (*self._free, *self._starting.values(), *busy):
                    self._end(actor)

    def _start_actors(self, batches: ItemBatches[Item]) -> None:
        if time.monotonic() - self._looked > _NODES_SECONDS:
            self._look_at_nodes()
        num_idle = len(self._starting) + len(self._free)
        wanted = self._workers or self._room
        # No more actors than there is work for: each one reserves cores or a GPU.
        most = min(wanted - num_idle - len(self._busy), batches.ahead(wanted) - num_idle)
        for _ in range(most):
            actor = _Actor(self._class.options(**self._options).remote())
            self._starting[actor.handle.begin.remote(self._setup, self._versions)] = actor

    def _look_at_nodes(self) -> None:
        """Choose the cores and GPUs of a Ray actor; count the actors that fit the cluster now."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        cores, gpus = ([int(node.get(name, 0)) for node in nodes] for name in ("CPU", "GPU"))
        num_gpus = int(self._task.uses_gpu and any(gpus))
        num_cpus = 1 if num_gpus else max(1, min(self._task.num_cpus, max(cores, default=1)))
        self._options = {
            "num_cpus": num_cpus,
            "num_gpus": num_gpus,
            "scheduling_strategy": "SPREAD",
            "max_restarts": 0,
        }
        self._room = sum(gpus if num_gpus else (of_node // num_cpus for of_node in cores))
        self._looked = time.monotonic()
        if not (self._room or self._workers):
            raise DataError(
                f"The Ray cluster has no core to work on: its {len(nodes)} nodes have {nodes}. "
                "Start nodes that have some, or say how many are to be asked for: --workers."
            )

    def _on_start(self, ref: Any) -> None:
        actor = self._starting.pop(ref)
        try:
            actor.node, problem, detail = self._ray.get(ref)
        except self._losses as error:
            # A node may be lost while it starts; several failures in a row are an error.
            self._failed_starts += 1
            if self._failed_starts >= RAY_ATTEMPTS and not (self._free or self._busy):
                raise DataError(f"No Ray worker can be started: {one_line(error)[:300]}") from error
            return
        # Before the errors below, so that `run` ends this actor too.
        self._free.append(actor)
        self._failed_starts = 0
        if problem == "absent":
            raise DataError(f"longtake cannot be imported on {actor.node}: {detail}. {_INSTALL}")
        if problem == "differs":
            raise DataError(version_differences(actor.node, detail, self._versions))
        if problem == "refuses":
            raise DataError(detail)

    def _on_results(self, ref: Any, batches: ItemBatches[Item]) -> Iterator[tuple[int, Result]]:
        actor, batch = self._busy.pop(ref)
        try:
            answers: _Answers = self._ray.get(ref)
        except self._losses as error:
            self._end(actor)
            # A lost worker says nothing about the items yet: they are tried again, alone.
            for number, item in batches.put_back(batch):
                self._lost_in_a_row += 1
                if self._lost_in_a_row == _MAX_LOST_IN_A_ROW:
                    raise DataError(
                        f"Ray workers are lost again and again; the last one: "
                        f"{one_line(error)[:300]} "
                        "Look at its node. The same command again resumes where this one ended."
                    ) from error
                yield number, self._task.lost(item, f"{self._task.doing} it ended the Ray worker")
            return
        self._free.append(actor)
        batches.learn(answers.seconds / len(batch))
        self._lost_in_a_row = 0
        # Fewer results than items, if an error ended the batch.
        for (number, item), (result, is_missing) in zip(batch, answers.results, strict=False):
            # Missing only there: that is a fault of the cluster and not of the clip.
            if is_missing and Path(path := self._task.reads(item)).exists():
                raise DataError(
                    f"{path} is there on {socket.gethostname()}, but not on {actor.node}. Put it "
                    "on a disk that all nodes of the cluster share, mounted at the same place."
                )
            yield number, result
        if isinstance(answers.error, DataError):
            raise DataError(f"On {actor.node}: {answers.error}") from answers.error
        if answers.error:
            raise answers.error

    def _end(self, actor: _Actor) -> None:
        with suppress(Exception):  # the actor or the cluster may be gone
            self._ray.kill(actor.handle)


@contextmanager
def _markers(folders: Iterable[Path]) -> Iterator[list[Path]]:
    """Create a file in each folder; nodes look for it to check that they see the same folder."""
    markers = [folder.resolve() / f".sign-{secrets.token_hex(8)}" for folder in folders]
    try:
        for marker in markers:
            try:
                fsio.make_writable(marker.parent)
                marker.touch()
            except OSError as error:
                raise DataError(
                    f"{marker.parent} cannot be written: {error.strerror or error}."
                ) from error
        yield markers
    finally:
        for marker in markers:
            with suppress(OSError):
                marker.unlink()

"""One errand's workers on a Ray cluster: who they are, and which of them has which items.

A worker is an actor: it has its cores or its card until it is let go, and what it has loaded is
gone with it. Items go to workers in batches of some seconds, as a message costs a millisecond. A
worker that is lost (a node went away, or was out of memory) is replaced, and its items are done
again, one by one, by others.
"""

import pickle
import socket
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Generic

from longtake.data.crews import far
from longtake.data.crews.batches import TRIES, Batch, Batches
from longtake.data.crews.errand import Errand, Item, Result
from longtake.data.crews.hands import Loss
from longtake.data.crews.processes import result_of
from longtake.errors import DataError, LongtakeError

_MOST_LOST_IN_A_ROW = 5
_LOOK_SECONDS = 10.0
_REMEDY = (
    "Install the same on every node of the cluster: pip install --constraint constraints.txt "
    "'longtake[ray]'."
)


@dataclass(eq=False)
class _Worker:
    """An actor, and where it runs once that is known."""

    actor: Any
    node: str = ""


class Gang(Generic[Item, Result]):
    """Workers for one errand.

    Args:
        ray: the module, connected.
        errand: what they do.
        sent: what each is told at first.
        workers: how many at a time; None: as many as the cluster has room for, now or later.
    """

    def __init__(
        self, ray: ModuleType, errand: Errand[Item, Result], sent: far.Sent, workers: int | None
    ) -> None:
        self._ray = ray
        self._errand = errand
        self._looking = far.Looking(errand)
        self._sent = pickle.dumps(sent)
        self._workers = workers
        self._versions = far.versions()
        self._class = ray.remote(_by_value())
        known = ray.exceptions
        self._losses = (known.RayActorError, known.ObjectLostError, known.OutOfMemoryError)
        self._starting: dict[Any, _Worker] = {}
        self._free: list[_Worker] = []
        self._busy: dict[Any, tuple[_Worker, Batch[Item]]] = {}
        self._failed_starts = self._lost_in_a_row = 0
        self._takes: dict[str, Any] = {}
        self._room, self._looked = 0, -_LOOK_SECONDS

    def work(self, items: Iterable[Item]) -> Generator[tuple[int, Result]]:
        """As `Crew.work`."""
        batches = Batches(items)
        while self._busy or batches.ahead(1):
            self._hire(batches)
            while self._free and (batch := batches.take()):
                worker = self._free.pop()
                self._busy[worker.actor.work.remote(batch.pickled())] = worker, batch
            for ref in self._ready():
                if ref in self._starting:
                    self._welcome(ref)
                else:
                    yield from self._finish(ref, batches)

    def dismiss(self) -> None:
        """Let all workers go, whatever they do."""
        busy = (worker for worker, _ in self._busy.values())
        for worker in (*self._free, *self._starting.values(), *busy):
            self._let_go(worker)

    def _hire(self, batches: Batches[Item]) -> None:
        if time.monotonic() - self._looked > _LOOK_SECONDS:
            self._look()
        idle = len(self._starting) + len(self._free)
        wanted = self._workers or self._room
        for _ in range(min(wanted - idle - len(self._busy), batches.ahead(wanted) - idle)):
            worker = _Worker(self._class.options(**self._takes).remote(self._sent))
            self._starting[worker.actor.begin.remote(self._versions)] = worker

    def _look(self) -> None:
        """Find out what a worker can be given, and how many the cluster has room for by now.

        Raises:
            DataError: for none.
        """
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        cores, cards = ([int(node.get(name, 0)) for node in nodes] for name in ("CPU", "GPU"))
        needs = self._errand.needs
        num_gpus = int(needs.takes_gpu and any(cards))
        num_cpus = 1 if num_gpus else max(1, min(needs.cpus, max(cores, default=1)))
        self._takes = {"num_cpus": num_cpus, "num_gpus": num_gpus, "scheduling_strategy": "SPREAD"}
        self._room = sum(cards if num_gpus else (of_node // num_cpus for of_node in cores))
        self._looked = time.monotonic()
        if not (self._room or self._workers):
            raise DataError(
                f"The Ray cluster has no core to work on: its {len(nodes)} nodes have {nodes}. "
                "Start nodes that have some, or say how many are to be asked for: --workers."
            )

    def _ready(self) -> list[Any]:
        """What has something to say, within a second."""
        refs = [*self._busy, *self._starting]
        if not self._ray.wait(refs, timeout=1.0)[0]:
            return []
        return list(self._ray.wait(refs, num_returns=len(refs), timeout=0)[0])

    def _welcome(self, ref: Any) -> None:
        """Take in a new worker.

        Raises:
            DataError: it cannot work here, or none can be started.
        """
        worker = self._starting.pop(ref)
        try:
            worker.node, how, said = self._ray.get(ref)
        except self._losses as error:
            self._failed_starts += 1
            if self._failed_starts >= TRIES and not (self._free or self._busy):
                raise DataError(f"No Ray worker can be started: {_in_short(error)}") from error
            return
        self._free.append(worker)
        self._failed_starts = 0
        if how == "absent":
            raise DataError(_absent(worker.node, said))
        if how == "differs":
            raise DataError(differences(worker.node, said, self._versions))
        if how == "refuses":
            raise DataError(said)

    def _finish(self, ref: Any, batches: Batches[Item]) -> Iterator[tuple[int, Result]]:
        """What came of a batch, if anything.

        Raises:
            LongtakeError: the errand raised it.
            DataError: the worker does not see the files, or too many are lost.
        """
        worker, batch = self._busy.pop(ref)
        try:
            done: far.Done = pickle.loads(self._ray.get(ref))  # noqa: S301 - of our own worker
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, LongtakeError):
                raise DataError(f"On {worker.node}: {error.cause}") from error
            raise
        except self._losses as error:
            self._let_go(worker)
            yield from self._lost(batch, batches, _in_short(error))
            return
        self._free.append(worker)
        batches.learn(done.seconds / len(batch.numbered))
        self._lost_in_a_row = 0
        for (number, item), answer in zip(batch.numbered, done.answers, strict=True):
            yield number, self._result(worker, item, answer)

    def _result(self, worker: _Worker, item: Item, answer: bytes | Loss) -> Result:
        """What came of an item.

        Raises:
            LongtakeError: the errand raised it.
            DataError: the worker does not see the item's file.
        """
        try:
            looked = result_of(self._looking, item, answer)
        except DataError as error:
            raise DataError(f"On {worker.node}: {error}") from error
        result: Result = looked[0]
        if looked[1]:
            self._refuse_blind(worker, item)
        return result

    def _refuse_blind(self, worker: _Worker, item: Item) -> None:
        """Raise DataError if a file that a worker did not find is there."""
        path = self._errand.reads(item)
        if Path(path).exists():
            raise DataError(
                f"{path} is there on {socket.gethostname()}, but not on {worker.node}. Put it on a "
                "disk that all nodes of the cluster share, mounted at the same place."
            )

    def _lost(
        self, batch: Batch[Item], batches: Batches[Item], reason: str
    ) -> Iterator[tuple[int, Result]]:
        """Have items of a lost worker done again; those that were often enough are given up.

        Raises:
            DataError: it is not these items that workers are lost over.
        """
        for number, item in batches.put_back(batch):
            self._lost_in_a_row += 1
            if self._lost_in_a_row == _MOST_LOST_IN_A_ROW:
                raise DataError(
                    f"Ray workers are lost again and again; the last one: {reason} Look at its "
                    "node. The same command again goes on where this one was."
                )
            yield number, self._errand.lost(item, f"{self._errand.doing} it ended the Ray worker")

    def _let_go(self, worker: _Worker) -> None:
        with suppress(Exception):  # whatever has become of it, or of the cluster
            self._ray.kill(worker.actor)


def differences(node: str, there: Mapping[str, str], here: Mapping[str, str]) -> str:
    """What to say of a node that has other versions."""
    names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
    listed = ", ".join(
        f"{name} is {there.get(name, 'not installed')} there and {here.get(name, 'not installed')} "
        "here"
        for name in names
    )
    return f"{node} would not do the same work: {listed}. {_REMEDY}"


def _absent(node: str, said: str) -> str:
    return f"longtake cannot be imported on {node}: {said}. {_REMEDY}"


def _in_short(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _by_value() -> type:
    """The actor's class, made here so that Ray sends its code: a node may lack longtake."""

    class Far:
        def __init__(self, sent: bytes) -> None:
            self._sent = sent

        def begin(self, versions: dict[str, str]) -> tuple[str, str, Any]:
            import socket

            node = socket.gethostname()
            try:
                from longtake.data.crews import far
                from longtake.errors import DataError
            except ImportError as error:
                return node, "absent", str(error)
            if (found := far.versions()) != versions:
                return node, "differs", found
            try:
                self._far = far.Far(self._sent)
            except DataError as error:
                return node, "refuses", str(error)
            return node, "", ""

        def work(self, items: list[bytes]) -> bytes:
            return self._far.work(items)

    return Far

"""How processes meet and tell each other what they found, so that a silent one gets a name.

They share torch's store of keys and values rather than collectives: a collective that one process
does not enter says nothing about it, where a key that is not there says who has not written it,
and another key what that process was about to do.
"""

import json
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from longtake.errors import LongtakeError
from longtake.preflight.names import listed
from longtake.preflight.place import Place, slurm_hosts

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_TO_SAY_GOODBYE = 5.0
_MARGIN = 10.0
"""Seconds that others wait longer than the first process, which decides."""


class LostError(LongtakeError):
    """Processes that did not answer in time.

    Attributes:
        silent: ranks, and what each was about to do; the word is empty for one never heard of.
    """

    def __init__(self, message: str, silent: dict[int, str]) -> None:
        super().__init__(message)
        self.silent = silent


class Meeting:
    """All processes that look at the cluster together; one that is alone is one, too.

    Args:
        place: this process's.
        seconds: how long anyone is waited for.

    Raises:
        LostError: a process has not come in time; the message says which.
        LongtakeError: the store cannot be reached.
    """

    def __init__(self, place: Place, seconds: float) -> None:
        self.place = place
        self.seconds = seconds
        self.store = None if place.address is None else _store(place, seconds)
        self.came: dict[int, tuple[str, str]] = {}
        """On rank 0: by rank, each process's host, and its node's number."""
        came = self.gather("arrival", (place.host, place.node))
        self.came = {rank: (host, number) for rank, (host, number) in came.items()}

    def doing(self, what: str) -> None:
        """Say what this process is about to do, for when it does not come back."""
        if self.store is not None:
            self.store.set(f"preflight/doing/{self.place.rank}", what)

    def gather(self, name: str, facts: Any) -> dict[int, Any]:
        """Bring facts (of JSON) to rank 0, and let nobody on before all have told theirs.

        Returns:
            By rank, on rank 0; nothing elsewhere.

        Raises:
            LostError: on all processes, if one has not told its facts in time.
        """
        if self.store is None:
            return {0: facts}
        self.store.set(f"preflight/{name}/{self.place.rank}", json.dumps(facts))
        if not self.place.is_first:
            self._await_leave(name)
            return {}
        found, silent = self._collect(name)
        if not self.came:
            self.came = {rank: tuple(told) for rank, told in found.items()}  # to name the others by
        self.store.set(f"preflight/{name}/go", "" if not silent else self._in_words(silent))
        if silent:
            raise LostError(self._in_words(silent), silent)
        return found

    def from_first(self, name: str, value: Any) -> Any:
        """Rank 0's value (of JSON), on every process.

        Raises:
            LostError: rank 0 does not tell it.
        """
        if self.store is None:
            return value
        key = f"preflight/{name}"
        if self.place.is_first:
            self.store.set(key, json.dumps(value))
        if not _is_there(self.store, key, self.seconds + _MARGIN):
            raise self._first_is_lost()
        return json.loads(self.store.get(key))

    def end(self) -> None:
        """Part, once rank 0 has come here; the store may go afterwards."""
        if self.store is None:
            return
        self.from_first("end", True)
        self.store.set(f"preflight/bye/{self.place.rank}", "")
        if self.place.hosts_store:
            self._await_goodbyes()

    def _collect(self, name: str) -> tuple[dict[int, Any], dict[int, str]]:
        assert self.store is not None
        end = time.monotonic() + self.seconds
        found, silent = {}, {}
        for rank in range(self.place.size):
            key = f"preflight/{name}/{rank}"
            if _is_there(self.store, key, end - time.monotonic()):
                found[rank] = json.loads(self.store.get(key))
            else:
                silent[rank] = self._last_word(rank)
        return found, silent

    def _await_leave(self, name: str) -> None:
        assert self.store is not None
        key = f"preflight/{name}/go"
        if not _is_there(self.store, key, self.seconds + _MARGIN):
            raise self._first_is_lost()
        if message := bytes(self.store.get(key)).decode():
            raise LostError(message, {})

    def _first_is_lost(self) -> LostError:
        waited = f"{self.seconds + _MARGIN:.0f} s"
        return LostError(f"Rank 0, which judges, has not been heard of for {waited}.", {0: ""})

    def _await_goodbyes(self) -> None:
        assert self.store is not None
        end = time.monotonic() + _TO_SAY_GOODBYE
        for rank in range(self.place.size):
            _is_there(self.store, f"preflight/bye/{rank}", end - time.monotonic())

    def _last_word(self, rank: int) -> str:
        assert self.store is not None
        key = f"preflight/doing/{rank}"
        return bytes(self.store.get(key)).decode() if self.store.check([key]) else ""

    def _in_words(self, silent: dict[int, str]) -> str:
        known = slurm_hosts() if self.place.started_by == "Slurm" else []
        said = [self._silence(rank, word, known) for rank, word in list(silent.items())[:8]]
        more = f"; and {len(silent) - 8} more" if len(silent) > 8 else ""
        return f"Within {self.seconds:g} s there was no answer of {'; '.join(said)}{more}."

    def _silence(self, rank: int, word: str, known: list[str]) -> str:
        host = self.came[rank][0] if rank in self.came else None
        if host is None and known and self.place.size == len(known):
            host = known[rank]
        of = f"{host} (rank {rank})" if host else f"rank {rank}"
        if host is None and known:
            absent = set(known) - {host for host, _ in self.came.values()}
            of += f" (of the hosts {listed(absent)})" if absent else ""
        return f"{of}, which was at: {word}" if word else f"{of}, which never came"


def _is_there(store: "Store", key: str, seconds: float) -> bool:
    if store.check([key]):
        return True
    if seconds <= 0:
        return False
    try:
        store.wait([key], timedelta(seconds=seconds))
    except (dist.DistStoreError, RuntimeError):  # of which the time-out is one
        return False
    return True


def _store(place: Place, seconds: float) -> "Store":
    assert place.address is not None
    host, port = place.address
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            world_size=place.size,
            is_master=place.hosts_store,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
        )
    except (dist.DistError, RuntimeError) as error:
        raise LongtakeError(
            f"{place.host} (rank {place.rank}) cannot reach {host}:{port}, where all processes "
            f"meet, within {seconds:g} s: {_first_line(error)}. Can {place.host} resolve that "
            "name, and does a firewall let the port through?"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

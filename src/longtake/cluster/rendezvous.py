"""Rendezvous of a preflight's processes: exchange of facts that can name a silent process.

It uses torch's key-value store instead of collectives. A collective that one process does not enter
shows nothing about that process, but a missing key shows which process did not write it, and
another key what that process was doing. Values are JSON.
"""

import ipaddress
import json
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from longtake.cluster.topology import ProcessInfo, fold_hosts
from longtake.errors import LongtakeError
from longtake.formatting import first_line

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_GOODBYE_SECONDS = 5.0
_MARGIN_SECONDS = 10.0
"""Extra seconds that processes wait for rank 0, which decides which processes are silent."""
_POLL_SECONDS = 1.0
"""Longest wait inside of torch in seconds, as Python handles no signal during it."""
_MAX_NAMED = 8
_BACKLOG = 2048  # connections that wait at once, as all processes come at the same time


class SilentProcessError(LongtakeError):
    """Error about processes of a preflight that did not answer in time.

    Attributes:
        silent: silent ranks and the check that each was doing, or "" for a rank that never came.
            Empty in processes other than rank 0.
    """

    def __init__(self, message: str, silent: dict[int, str]) -> None:
        super().__init__(message)
        self.silent = silent


class Rendezvous:
    """Exchange of JSON values between the processes of a preflight; a single one needs no store.

    Args:
        process: this process among the others.
        seconds: limit of each wait.

    Raises:
        LongtakeError: the store cannot be reached.
        SilentProcessError: a process has not come in time.
    """

    def __init__(self, process: ProcessInfo, seconds: float) -> None:
        self.process = process
        self.seconds = seconds
        self.store = None if process.address is None else _store(process, seconds)
        self.came: dict[int, tuple[str, str]] = {}
        came = self.gather("arrival", (process.host, process.node))
        self.came = {rank: (host, node) for rank, (host, node) in came.items()}

    def doing(self, what: str) -> None:
        if self.store is not None:
            self.store.set(f"preflight/doing/{self.process.rank}", what)

    def gather(self, name: str, facts: Any) -> dict[int, Any]:
        """Collect facts of all processes on rank 0; the other ranks wait for it, and get {}.

        Raises:
            SilentProcessError: a process has not answered in time.
        """
        if self.store is None:
            return {0: facts}
        self.store.set(f"preflight/{name}/{self.process.rank}", json.dumps(facts))
        if not self.process.is_first:
            if message := self._read(f"preflight/{name}/silent"):
                raise SilentProcessError(message, {})
            return {}
        found, silent = self._collect(name)
        if not self.came:
            self.came = {rank: tuple(each) for rank, each in found.items()}  # names for the message
        message = ""
        if silent:
            named = [self._name_silent(*each) for each in list(silent.items())[:_MAX_NAMED]]
            named += [f"and {len(silent) - _MAX_NAMED} more"] * (len(silent) > _MAX_NAMED)
            message = f"Within {self.seconds:g} s there was no answer of {'; '.join(named)}."
        # Also without silent processes: the others wait for this key.
        self.store.set(f"preflight/{name}/silent", json.dumps(message))
        if silent:
            raise SilentProcessError(message, silent)
        return found

    def from_first(self, name: str, value: Any) -> Any:
        """Broadcast a JSON value of rank 0 to every process of the preflight.

        Raises:
            SilentProcessError: rank 0 has not answered in time.
        """
        if self.store is None:
            return value
        if self.process.is_first:
            self.store.set(f"preflight/{name}", json.dumps(value))
        return self._read(f"preflight/{name}")

    def close(self) -> None:
        """Leave the exchange once rank 0 does; the process that serves torch's store is last."""
        if self.store is None:
            return
        self.from_first("end", True)
        self.store.set(f"preflight/bye/{self.process.rank}", "")
        # The store ends with its process, so that one leaves last.
        if self.process.serves_store:
            end = time.monotonic() + _GOODBYE_SECONDS
            for rank in range(self.process.world_size):
                self._wait_for(f"preflight/bye/{rank}", end - time.monotonic())

    def _collect(self, name: str) -> tuple[dict[int, Any], dict[int, str]]:
        assert self.store is not None
        # One limit for all: a key that is there already is found even after the end.
        end = time.monotonic() + self.seconds
        found, silent = {}, {}
        for rank in range(self.process.world_size):
            key, doing = f"preflight/{name}/{rank}", f"preflight/doing/{rank}"
            if self._wait_for(key, end - time.monotonic()):
                found[rank] = json.loads(self.store.get(key))
            else:
                is_known = self.store.check([doing])
                silent[rank] = bytes(self.store.get(doing)).decode() if is_known else ""
        return found, silent

    def _read(self, key: str) -> Any:
        assert self.store is not None
        seconds = self.seconds + _MARGIN_SECONDS
        if not self._wait_for(key, seconds):
            message = f"Rank 0, which collects the facts, has not answered for {seconds:.0f} s."
            raise SilentProcessError(message, {0: ""})
        return json.loads(self.store.get(key))

    def _wait_for(self, key: str, seconds: float) -> bool:
        assert self.store is not None
        end = time.monotonic() + seconds
        while True:
            try:
                if self.store.check([key]):
                    return True
                if (left := end - time.monotonic()) <= 0:
                    return False
                # Many short waits: Python handles signals only after torch's wait returns.
                self.store.wait([key], timedelta(seconds=min(left, _POLL_SECONDS)))
            except dist.DistStoreError:  # the timeout
                continue
            except RuntimeError:  # the connection is lost
                return False

    def _name_silent(self, rank: int, doing: str) -> str:
        expected = self.process.expected_hosts
        host = self.came[rank][0] if rank in self.came else None
        if host is None and self.process.world_size == len(expected):
            host = expected[rank]
        name = f"{host} (rank {rank})" if host else f"rank {rank}"
        if host is None and (absent := set(expected) - {host for host, _ in self.came.values()}):
            name += f" (of the hosts {fold_hosts(absent)})"
        return f"{name}, which was at: {doing}" if doing else f"{name}, which never came"


def _store(process: ProcessInfo, seconds: float) -> "Store":
    assert process.address is not None
    host, port = process.address
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            world_size=process.world_size,
            is_master=process.serves_store,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            master_listen_fd=_loopback_socket(host, port) if process.serves_store else None,
        )
    except (dist.DistError, OSError, RuntimeError) as error:
        raise LongtakeError(
            f"{process.host} (rank {process.rank}) cannot reach {host}:{port}, where all processes "
            f"meet, within {seconds:g} s: {first_line(error)}. Let {process.host} resolve that "
            "name, and let firewalls pass that port."
        ) from error


def _loopback_socket(host: str, port: int) -> int | None:
    """Open a socket for torch's store that only this machine can reach; None for other hosts.

    Without such a socket torch listens on all addresses.
    """
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which may be a loopback address on this host alone
        is_loopback = host == "localhost"
    return socket.create_server((host, port), backlog=_BACKLOG).detach() if is_loopback else None

"""Launches a run's ranks on this node, together with those of the other nodes."""

import logging
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from rich.console import Console
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from longtake.errors import LostPeerError
from longtake.launch.agent import Agent
from longtake.launch.ending import Ended, exit_code_of
from longtake.launch.logs import IN_ONE_FILE, RankLogs
from longtake.launch.order import Order
from longtake.launch.stop import LaunchStop
from longtake.node_dir import this_node
from longtake.parallel.mesh import LOOPBACK
from longtake.process import environment, program
from longtake.run_dir import LAUNCH_VARIABLE

_SECONDS_TO_MEET = 600
_SECONDS_BETWEEN_CALLS = 2.0

_ENVIRONMENT: Final = {
    # In a store that outlives a start, ranks would find what those of the start before have left.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGHUP,SIGQUIT",  # the others are heeded here
}
_INTERFACES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_LOOPBACK_INTERFACE: Final = "lo"
_WHO_MAY_REACH_IT: Final = (
    "Nodes meet at {}. torch does not authenticate them: whoever can reach that port can run code "
    "as you. Use a network that only the cluster can reach."
)
_MEETING: Final = {
    "join_timeout": _SECONDS_TO_MEET,
    "last_call_timeout": 10,  # for which more nodes are waited for when there are enough
    "keep_alive_interval": 3,
    "keep_alive_max_attempt": 3,  # after which a silent node is gone
}


def launch(order: Order, console: Console) -> int:
    """Train with all ranks to the end, starting them again where that helps.

    Returns:
        An exit code: 0; 2 for what a restart does not cure; 130, 143 or 75 after a signal; else
        that of the rank that failed first, 128 and more if it was killed.

    Raises:
        LostPeerError: the other nodes cannot be met.
    """
    os.environ.update(environment(**_ENVIRONMENT), **{LAUNCH_VARIABLE: secrets.token_hex(8)})
    if order.endpoint:
        console.print(_WHO_MAY_REACH_IT.format(order.endpoint), markup=False)
    else:
        for name in _INTERFACES:
            os.environ.setdefault(name, _LOOPBACK_INTERFACE)
    _quieten_torch()
    stop, ended = LaunchStop(), None
    try:
        with stop, _met(order, stop) as handler:
            agent = _agent(order, handler, stop, console)
            try:
                result = agent.run()
            finally:
                ended = agent.ended
        if result is not None and not result.is_failed():
            return 0
    except SignalException:
        console.print("Stopped while no rank ran.", markup=False)
        ended = None
    except RendezvousClosedError:
        if ended is None:
            raise LostPeerError("The other nodes have ended this launch already.") from None
    except RendezvousError as error:
        raise LostPeerError(_unmet(order, error)) from error
    return _say_how_it_ended(ended, stop, console)


def _say_how_it_ended(ended: Ended | None, stop: LaunchStop, console: Console) -> int:
    if ended is not None and ended.kind == "mistake":
        again = "The same again would end the same way, so nothing is started again."
        console.print(f"{ended.words}\n{again}", markup=False)
    if stop.first_signal is not None and (ended is None or ended.kind == "stopped"):
        return exit_code_of(stop.first_signal)
    return 1 if ended is None else ended.code


def _agent(order: Order, handler: RendezvousHandler, stop: LaunchStop, console: Console) -> Agent:
    entrypoint, *arguments = [*IN_ONE_FILE, *program("longtake", *order.arguments)]
    spec = WorkerSpec(
        role="",  # which torch would write before each line
        local_world_size=order.processes,
        entrypoint=entrypoint,
        args=tuple(part.replace("$", "$$") for part in arguments),  # torch substitutes in them
        rdzv_handler=handler,
        max_restarts=order.max_restarts,
        monitor_interval=0.1,
        local_addr=_local_address(order),
    )
    logs = RankLogs(this_node(order.run), tee=order.tee)
    count = "1 rank" if order.processes == 1 else f"{order.processes} ranks"
    console.print(f"{count} here; what each says: {logs.root_log_dir}", markup=False)
    return Agent(spec, logs, order, stop, console)


@contextmanager
def _met(order: Order, stop: LaunchStop) -> Iterator[RendezvousHandler]:
    """Where nodes meet, and learn that they need not come again when this one has ended."""
    with TemporaryDirectory(prefix="longtake-", ignore_cleanup_errors=True) as folder:
        handler = _handler(order, Path(folder))
        try:
            yield handler
        finally:
            # Closed, no node could go on without this one.
            if stop.first_signal is None or not order.is_elastic:
                handler.shutdown()


def _handler(order: Order, folder: Path) -> RendezvousHandler:
    settings: dict[str, Any] = dict(_MEETING)
    if not order.endpoint:
        # By TCP torch would listen on all addresses, and unpickle what anybody sends.
        settings["store_type"] = "file"
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=order.endpoint or str(folder / "rendezvous"),
        run_id=order.run_id,
        min_nodes=order.nodes[0],
        max_nodes=order.nodes[1],
        local_addr=_local_address(order),
        **settings,
    )
    until = time.monotonic() + _SECONDS_TO_MEET
    while True:
        try:
            return get_rendezvous_handler(parameters)
        except RendezvousConnectionError:  # the node that the others come to may be a late one
            if time.monotonic() > until:
                raise
        time.sleep(_SECONDS_BETWEEN_CALLS)


def _local_address(order: Order) -> str | None:
    return None if order.endpoint else LOOPBACK


def _unmet(order: Order, error: RendezvousError) -> str:
    least, most = order.nodes
    count = f"{least}" if least == most else f"{least} to {most}"
    return (
        f"{count} nodes were to meet at {order.endpoint or 'this node'} within "
        f"{_SECONDS_TO_MEET} s, and have not: {error}. Was the same command started on each, and "
        "can each resolve and reach that place? longtake preflight looks at this."
    )


def _quieten_torch() -> None:
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)

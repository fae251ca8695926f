"""Launches the ranks of a run on this node, together with those of the other nodes.

torch's elastic agent with another restart policy: no restart after a user's mistake or a stop; a
new checkpoint resets the count of restarts, so that a run of weeks may have many and a crash loop
ends; ranks that lost a peer have seconds, not half a minute, to report it.
"""

import logging
import os
import secrets
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from rich.console import Console
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from longtake.cluster.options import LaunchOptions
from longtake.cluster.ranks import (
    SAVE_SECONDS,
    STDERR_TO_STDOUT,
    LaunchStop,
    RankLogs,
    RanksExit,
    classify_exit,
    describe_code,
    failed_codes,
    is_stop_code,
    last_line,
    machine_oom_kills,
    send_signal,
    wait_for_end,
)
from longtake.errors import LostPeerError
from longtake.failures import (
    FailureKind,
    RankFailure,
    failure_of,
    failures_of_launch,
    failures_of_processes,
)
from longtake.fsio import now
from longtake.heartbeat import Heartbeat, heartbeat_dir, read_heartbeats
from longtake.node_dir import this_node
from longtake.parallel.mesh import LOOPBACK
from longtake.process import EXIT_CODES, environment, program
from longtake.run_dir import LAUNCH_VARIABLE

_RENDEZVOUS_SECONDS = 600
_CONNECT_EVERY_SECONDS = 2.0
_REPORT_SECONDS = 5.0  # after a failure: the other ranks find and report the failed rank
_STOP_SECONDS = 30.0  # in which ranks begin to save before all are restarted for a new node
_SAVING_PHASES = ("checkpoint", "save")

_ENVIRONMENT: Final = {
    # A store that outlives a start would show ranks what those of the start before wrote.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGHUP,SIGQUIT",  # LaunchStop handles the others
}
_INTERFACES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_LOOPBACK_INTERFACE: Final = "lo"
_WARNING: Final = (
    "Nodes meet at {}. torch does not authenticate them: who can reach that port can run code "
    "as you. Use a network that only the cluster can reach."
)
_RENDEZVOUS: Final = {
    "join_timeout": _RENDEZVOUS_SECONDS,
    "last_call_timeout": 10,  # for which more nodes are waited for when there are enough
    "keep_alive_interval": 3,
    "keep_alive_max_attempt": 3,  # after which a silent node counts as lost
}


def launch(options: LaunchOptions, console: Console) -> int:
    """Train with all ranks to the end, restarting them where that helps.

    Returns:
        An exit code: 0; 2 for what a restart does not cure; 130, 143 or 75 after a signal; else
        that of the rank that failed first, 128 + n if signal n killed it.

    Raises:
        LostPeerError: the other nodes cannot be met.
    """
    os.environ.update(environment(**_ENVIRONMENT), **{LAUNCH_VARIABLE: secrets.token_hex(8)})
    if options.endpoint:
        console.print(_WARNING.format(options.endpoint), markup=False)
    else:
        for name in _INTERFACES:
            os.environ.setdefault(name, _LOOPBACK_INTERFACE)
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    stop, ended = LaunchStop(), None
    try:
        with stop, _rendezvous(options, stop) as handler:
            agent = _agent(options, handler, stop, console)
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
        raise LostPeerError(_not_met(options, error)) from error
    return _report_exit(ended, stop, console)


def count_processes(text: str) -> int:
    return max(1, torch.cuda.device_count()) if text == "auto" else int(text)


def _report_exit(ended: RanksExit | None, stop: LaunchStop, console: Console) -> int:
    if ended is not None and ended.kind == "mistake":
        again = "A restart would end the same way, so nothing is started again."
        console.print(f"{ended.message}\n{again}", markup=False)
    if stop.first_signal is not None and (ended is None or ended.kind == "stopped"):
        return EXIT_CODES[stop.first_signal.name]
    return 1 if ended is None else ended.code


# --- Rendezvous of the nodes ----------------------------------------------------------------------


@contextmanager
def _rendezvous(options: LaunchOptions, stop: LaunchStop) -> Iterator[RendezvousHandler]:
    """Where nodes meet; closed at the end, so that the others do not wait for this node."""
    with TemporaryDirectory(prefix="longtake-", ignore_cleanup_errors=True) as folder:
        handler = _rendezvous_handler(options, Path(folder))
        try:
            yield handler
        finally:
            # Once it is closed, the other nodes cannot continue without this one.
            if stop.first_signal is None or not options.is_elastic:
                handler.shutdown()


def _rendezvous_handler(options: LaunchOptions, folder: Path) -> RendezvousHandler:
    settings: dict[str, Any] = dict(_RENDEZVOUS)
    if not options.endpoint:
        # Over TCP torch would listen on all addresses, and unpickle what it receives.
        settings["store_type"] = "file"
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=options.endpoint or str(folder / "rendezvous"),
        run_id=options.run_id,
        min_nodes=options.nodes[0],
        max_nodes=options.nodes[1],
        local_addr=_local_address(options),
        **settings,
    )
    until = time.monotonic() + _RENDEZVOUS_SECONDS
    while True:
        try:
            return get_rendezvous_handler(parameters)
        except RendezvousConnectionError:  # the node of the endpoint may start late
            if time.monotonic() > until:
                raise
        time.sleep(_CONNECT_EVERY_SECONDS)


def _local_address(options: LaunchOptions) -> str | None:
    return None if options.endpoint else LOOPBACK


def _not_met(options: LaunchOptions, error: RendezvousError) -> str:
    least, most = options.nodes
    count = f"{least}" if least == most else f"{least} to {most}"
    return (
        f"{count} nodes did not meet at {options.endpoint or 'this node'} within "
        f"{_RENDEZVOUS_SECONDS} s: {error}. Start the same command on each; each must resolve and "
        "reach that address. longtake preflight checks this."
    )


# --- Ranks of this node ---------------------------------------------------------------------------


def _agent(
    options: LaunchOptions, handler: RendezvousHandler, stop: LaunchStop, console: Console
) -> "Agent":
    entrypoint, *arguments = [*STDERR_TO_STDOUT, *program("longtake", *options.train_arguments)]
    num_ranks = count_processes(options.processes)
    spec = WorkerSpec(
        role="",  # torch would write it before each line
        local_world_size=num_ranks,
        entrypoint=entrypoint,
        args=tuple(part.replace("$", "$$") for part in arguments),  # torch substitutes in them
        rdzv_handler=handler,
        max_restarts=options.max_restarts,
        monitor_interval=0.1,
        local_addr=_local_address(options),
    )
    logs = RankLogs(this_node(options.run), tee=options.tee)
    count = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    console.print(f"{count} on this node; their output: {logs.root_log_dir}", markup=False)
    return Agent(spec, logs, options, stop, console)


class Agent(LocalElasticAgent):
    """Starts the ranks of this node, again where that helps, until they have ended."""

    def __init__(
        self,
        spec: WorkerSpec,
        logs: RankLogs,
        options: LaunchOptions,
        stop: LaunchStop,
        console: Console,
    ) -> None:
        super().__init__(spec, logs, log_line_prefix_template="${role_name}")  # which is empty
        self.ended: RanksExit | None = None
        self._logs, self._options, self._stop, self._console = logs, options, stop, console
        self._newest = self._newest_checkpoint()
        self._oom_kills, self._started_at = 0, ""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._stop.hold()
        self._oom_kills, self._started_at = machine_oom_kills(), now()
        if self._options.endpoint:
            os.environ[LAUNCH_VARIABLE] = _launch_of_all_nodes(worker_group.store)
        pids: dict[int, Any] = super()._start_workers(worker_group)
        self._stop.begin(pids.values())
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """As torch's, but after a failure the other ranks first have time to report it and end."""
        ranks = {worker.id: worker.global_rank for worker in worker_group.workers}
        if codes := failed_codes(ranks):
            killed = self._let_others_end(codes, ranks)
            codes |= {pid: code for pid, code in failed_codes(ranks).items() if pid not in killed}
            by_rank = {ranks[pid]: self._as_stop_code(code) for pid, code in codes.items()}
            failures = self._failures_on_all_nodes(ranks)
            self.ended = classify_exit(by_rank, failures, self._logs.paths)
            self._decide_restarts(self.ended)
        elif self._stop.is_overdue:
            send_signal(ranks, signal.SIGKILL)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state.name != "HEALTHY":
            self._stop.end()
        return result

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Before a restart: ranks that still run may save; those that hang have less time."""
        pids = [worker.id for worker in worker_group.workers if worker.id]
        send_signal(pids, signal.SIGTERM)
        left, seconds = wait_for_end(pids, _STOP_SECONDS), _STOP_SECONDS
        while seconds < SAVE_SECONDS and any(
            heartbeat.phase in _SAVING_PHASES for heartbeat in self._heartbeats(left)
        ):
            left, seconds = wait_for_end(left, _STOP_SECONDS), seconds + _STOP_SECONDS
        send_signal(left, signal.SIGKILL)
        super()._stop_workers(worker_group)
        self._stop.end()

    def _let_others_end(self, codes: dict[int, int], ranks: dict[int, int]) -> list[int]:
        """Record the failure of ranks that were killed, and wait for the others."""
        if self._stop.first_signal is None:
            self._record_failures(codes, ranks)
        is_stop = self._stop.first_signal is not None or any(map(is_stop_code, codes.values()))
        late = wait_for_end(ranks, SAVE_SECONDS if is_stop else _REPORT_SECONDS)
        send_signal(late, signal.SIGKILL)
        return late

    def _record_failures(self, codes: dict[int, int], ranks: dict[int, int]) -> None:
        run = self._options.run
        known = {failure.pid for failure in failures_of_processes(run, ranks, self._started_at)}
        for heartbeat in self._heartbeats(codes):
            code = codes[heartbeat.pid]
            is_known = heartbeat.pid in known or heartbeat.phase == "ended"
            if is_known or heartbeat.world_size == 1:
                continue
            line = last_line(self._logs.paths[ranks[heartbeat.pid]])
            error = describe_code(code) + (f"; its last line: {line}" if line else "")
            if code == -signal.SIGKILL and machine_oom_kills() > self._oom_kills:
                error = f"the kernel killed it, or another process: out of memory; {error}"
            kind: FailureKind = "killed" if code < 0 else "ended"
            log = str(self._logs.paths[heartbeat.rank])
            failure_of(heartbeat, kind, error, log, source="launcher").record(run)

    def _as_stop_code(self, code: int) -> int:
        """A rank that the signal killed, before it could handle it, was stopped too."""
        received = self._stop.first_signal
        killed = -signal.SIGKILL if self._stop.is_urgent else None
        is_stop = received is not None and code in (-received, killed)
        return EXIT_CODES[received.name] if received is not None and is_stop else code

    def _failures_on_all_nodes(self, ranks: dict[int, int]) -> list[RankFailure]:
        run = self._options.run
        failures = failures_of_processes(run, ranks, self._started_at)
        launches = [heartbeat.launch for heartbeat in self._heartbeats(ranks)]
        launch = next(filter(None, [*launches, *(each.launch for each in failures)]), None)
        return [] if launch is None else failures_of_launch(run, launch)

    def _decide_restarts(self, ended: RanksExit) -> None:
        """How many restarts are left; a new checkpoint resets the count."""
        newest, is_requested = self._newest_checkpoint(), self._stop.first_signal is not None
        if newest != self._newest:
            self._newest, self._remaining_restarts = newest, self._options.max_restarts
        if is_requested or ended.kind == "mistake":
            self._remaining_restarts = 0
        elif ended.kind == "stopped":  # on another node; an elastic launch continues without it
            is_elastic = self._options.is_elastic
            self._remaining_restarts = self._options.max_restarts + 1 if is_elastic else 0
        if ended.kind == "crashed" and not is_requested:
            self._print_restart(ended)

    def _print_restart(self, ended: RanksExit) -> None:
        left, allowed = self._remaining_restarts, self._options.max_restarts
        since = "" if self._newest is None else f" since the checkpoint of step {self._newest}"
        restart = f"All ranks are started again ({allowed - left + 1} of {allowed} times{since})."
        if not left:
            restart = f"They were started again {allowed} times{since}; the launch ends."
        self._console.print(f"{ended.message}\n{restart}", markup=False)

    def _heartbeats(self, pids: Collection[int]) -> list[Heartbeat]:
        found = read_heartbeats(heartbeat_dir(self._options.run.path))
        return [each for each in found if each.role == "rank" and each.pid in pids]

    def _newest_checkpoint(self) -> int | None:
        return max(self._options.run.checkpoint_steps(), default=None)


def _launch_of_all_nodes(store: Any) -> str:
    """The name of the launch: the first node to ask chooses it in the store of the rendezvous."""
    while hasattr(store, "underlying_store"):  # a PrefixStore, whose prefix differs per start
        store = store.underlying_store
    own = os.environ[LAUNCH_VARIABLE]
    return str(store.compare_set("longtake/launch", "", own).decode())

"""Launcher of a run's ranks on this node, together with launchers on the other nodes.

It is torch's elastic agent with another restart policy: no restart after a user's mistake or a
stop; a new checkpoint resets the count of restarts, so a run of weeks may have many while a crash
loop ends; ranks that lost a peer have seconds, not half a minute, to report it.
"""

import logging
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal

import torch
from rich.console import Console
from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing import api as subprocesses
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from longtake import errors, failures, fsio, process
from longtake.cluster.options import LaunchOptions
from longtake.health.system import oom_kills
from longtake.heartbeat import Heartbeat, heartbeat_dir, read_heartbeats
from longtake.node_dir import NodeDirectory, this_node
from longtake.parallel.mesh import LOOPBACK
from longtake.progress import answer_to
from longtake.run_dir import LAUNCH_VARIABLE

_RENDEZVOUS_SECONDS = 600
_CONNECT_EVERY_SECONDS = 2.0
_REPORT_SECONDS = 5.0  # time for other ranks to find and report the failed rank
_STOP_SECONDS = 30.0  # time for ranks to begin saving before a restart for a new node
_SAVING_PHASES = ("checkpoint", "save")

_ENVIRONMENT: Final = {
    # A store shared between starts would show ranks values that ranks of an earlier start wrote.
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
    "last_call_timeout": 10,  # wait for further nodes when the minimum has come
    "keep_alive_interval": 3,
    "keep_alive_max_attempt": 3,  # missed intervals after which a node counts as lost
}
_SAVE_SECONDS = 600.0
"""Seconds that ranks get to save after a signal; a scheduler with less patience kills all
anyway."""
_STDERR_TO_STDOUT: Final = ("/bin/sh", "-c", 'exec "$@" 2>&1', "sh")
"""Prefix of a rank's command that joins its stderr and stdout.

With two streams torch would open the log twice, and they would overwrite each other."""
_POLL_SECONDS = 0.02
_LAST_BYTES = 4096
_STOP_CODES: Final = {code: signal.Signals[name] for name, code in process.EXIT_CODES.items()}
_USER_ERROR, _LOST_PEER = errors.LongtakeError.exit_code, errors.LostPeerError.exit_code


def launch(options: LaunchOptions, console: Console) -> int:
    """Train with all ranks of this node to the end; restart them after failures that this may cure.

    Returns:
        An exit code: 0; 2 after an error that a restart does not cure; 130, 143 or 75 after a
        signal; else that of the rank that failed first, 128 + n if signal n killed it.

    Raises:
        LostPeerError: the other nodes did not come to the rendezvous, or have ended the launch.
    """
    # The ranks inherit this process's environment, and torch reads its settings from it.
    os.environ.update(
        process.environment(**_ENVIRONMENT), **{LAUNCH_VARIABLE: secrets.token_hex(8)}
    )
    if options.endpoint:
        console.print(_WARNING.format(options.endpoint), markup=False)
    else:
        # On one node no other machine has to reach the ranks.
        for name in _INTERFACES:
            os.environ.setdefault(name, _LOOPBACK_INTERFACE)
    # torch logs lines of its own about each failed rank, beside the message printed here.
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    stop, ended = LaunchStop(), None
    try:
        with stop, _rendezvous(options, stop) as handler:
            agent = Agent(options, handler, stop, console)
            try:
                result = agent.run()
            finally:
                # Also if `run` raises: a rendezvous that others have closed is then no error.
                ended = agent.ended
        if result is not None and not result.is_failed():
            return 0
    except SignalException:
        console.print("Stopped while no rank ran.", markup=False)
        ended = None
    except rendezvous.RendezvousClosedError:
        if ended is None:
            raise errors.LostPeerError("The other nodes have ended this launch already.") from None
    except rendezvous.RendezvousError as error:
        raise errors.LostPeerError(_not_met(options, error)) from error
    if ended is not None and ended.kind == "mistake":
        again = "A restart would end the same way, so nothing is started again."
        console.print(f"{ended.message}\n{again}", markup=False)
    if stop.first_signal is not None and (ended is None or ended.kind == "stopped"):
        return process.EXIT_CODES[stop.first_signal.name]
    return 1 if ended is None else ended.code


def count_processes(text: str) -> int:
    return max(1, torch.cuda.device_count()) if text == "auto" else int(text)


# --- Rendezvous of the nodes ----------------------------------------------------------------------


@contextmanager
def _rendezvous(
    options: LaunchOptions, stop: "LaunchStop"
) -> Iterator[rendezvous.RendezvousHandler]:
    """Join the nodes' rendezvous, and close it at the end, so that no node waits in it."""
    with TemporaryDirectory(prefix="longtake-", ignore_cleanup_errors=True) as folder:
        handler = _rendezvous_handler(options, Path(folder))
        try:
            yield handler
        finally:
            # A closed rendezvous ends the launch on all nodes. An elastic launch continues without
            # a node that was stopped by a signal.
            if stop.first_signal is None or not options.is_elastic:
                handler.shutdown()


def _rendezvous_handler(options: LaunchOptions, folder: Path) -> rendezvous.RendezvousHandler:
    settings: dict[str, Any] = dict(_RENDEZVOUS)
    if not options.endpoint:
        # Over TCP torch would listen on all addresses, and unpickle what it receives.
        settings["store_type"] = "file"
    parameters = rendezvous.RendezvousParameters(
        backend="c10d",
        endpoint=options.endpoint or str(folder / "rendezvous"),
        run_id=options.run_id,
        min_nodes=options.nodes[0],
        max_nodes=options.nodes[1],
        local_addr=None if options.endpoint else LOOPBACK,
        **settings,
    )
    until = time.monotonic() + _RENDEZVOUS_SECONDS
    while True:
        try:
            return get_rendezvous_handler(parameters)
        except rendezvous.RendezvousConnectionError:  # the node of the endpoint may start late
            if time.monotonic() > until:
                raise
        time.sleep(_CONNECT_EVERY_SECONDS)


def _not_met(options: LaunchOptions, error: rendezvous.RendezvousError) -> str:
    least, most = options.nodes
    count = f"{least}" if least == most else f"{least} to {most}"
    return (
        f"{count} nodes did not meet at {options.endpoint or 'this node'} within "
        f"{_RENDEZVOUS_SECONDS} s: {error}. Start the same command on each; each must resolve and "
        "reach that address. longtake preflight checks this."
    )


# --- Output of ranks ------------------------------------------------------------------------------


class RankLogs(LogsSpecs):
    """Log files of a node's ranks in the run directory, one per rank and start."""

    def __init__(self, node: NodeDirectory, *, tee: bool) -> None:
        super().__init__()
        self._node = node
        self._shows_first = tee
        # A copy of stderr, as in a rank number 2 is its log; a watcher writes its sentences here.
        self._terminal = process.duplicate(2)
        self.paths: dict[int, Path] = {}

    @property
    def root_log_dir(self) -> str:
        return str(self._node.logs_path)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Create log files for ranks that start; torch passes each local rank's environment."""
        time = fsio.file_time()
        ranks = {local: int(env["RANK"]) for local, env in envs.items()}
        self.paths = {rank: self._node.rank_log_path(time, rank) for rank in ranks.values()}
        texts = {local: str(self.paths[rank]) for local, rank in ranks.items()}
        for local, text in texts.items():
            Path(text).parent.mkdir(parents=True, exist_ok=True)
            launcher = {process.LAUNCHER_VARIABLE: str(os.getpid())}
            launcher |= {process.TERMINAL_VARIABLE: str(self._terminal)}
            envs[local] |= {failures.LOG_VARIABLE: text, "PYTHONUNBUFFERED": "1", **launcher}
        shown = {local: texts[local] for local, rank in ranks.items() if rank == 0}
        empty = dict.fromkeys(texts, "")
        return LogsDest(
            stdouts=texts,
            stderrs=empty,
            tee_stderrs=shown if self._shows_first else {},
            error_files=empty,
        )


def _last_line(log: Path, code: int) -> str:
    """Return the last line of a rank's log; empty after SIGKILL, which leaves no message."""
    if code == -signal.SIGKILL:
        return ""
    try:
        with log.open("rb") as file:
            # Only the end: a log of weeks may have gigabytes.
            file.seek(max(0, log.stat().st_size - _LAST_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


# --- Processes of ranks ---------------------------------------------------------------------------


class RankHandler(SubprocessHandler):
    """Starts a rank; lets it inherit the launcher's terminal, on which its watcher writes."""

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        return subprocess.Popen(  # noqa: S603 - ourselves
            args,
            env=env,
            stdout=self._stdout,
            stderr=self._stderr,
            start_new_session=True,
            pass_fds=(int(env[process.TERMINAL_VARIABLE]),),
        )


@contextmanager
def _starting_by_rank_handler() -> Iterator[None]:
    """Make torch start ranks with `RankHandler` in the block; torch has no argument for this."""
    api: Any = subprocesses
    usual = api.get_subprocess_handler
    api.get_subprocess_handler = RankHandler
    try:
        yield
    finally:
        api.get_subprocess_handler = usual


def _failed_codes(pids: Iterable[int]) -> dict[int, int]:
    """Return nonzero exit codes of ended child processes by pid, without reaping.

    Codes are negative for signals.
    """
    found = {}
    for pid in pids:
        with suppress(ChildProcessError):
            ended = _wait_result(pid)
            if ended is not None and ended.si_status:
                is_exit = ended.si_code == os.CLD_EXITED
                found[pid] = ended.si_status if is_exit else -ended.si_status
    return found


def _wait_for_end(pids: Iterable[int], seconds: float) -> list[int]:
    """Wait up to `seconds` for child processes to end, and return those that still run."""
    until = time.monotonic() + seconds
    while (left := [pid for pid in pids if _is_running(pid)]) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
    return left


def _send_signal(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to those of the child processes that are still running."""
    for pid in pids:
        if _is_running(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _is_running(pid: int) -> bool:
    try:
        return _wait_result(pid) is None
    except ChildProcessError:  # it was waited for
        return False


def _wait_result(pid: int) -> "os.waitid_result | None":
    # WNOWAIT leaves the child to be reaped by torch, which needs its exit code too.
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)


class LaunchStop(process.StopSignal):
    """Request to stop the launch of a run: in the block, signals are passed on to the ranks.

    A signal while no rank runs, such as during the rendezvous, raises `SignalException`.
    """

    def __init__(self) -> None:
        super().__init__(process.STOP_SIGNALS, on_signal=self._pass_on, keeps_ignored=False)
        self.is_urgent = False
        self._ranks: list[int] = []
        self._is_held = False

    @property
    def first_signal(self) -> signal.Signals | None:
        return None if self.reason is None else signal.Signals[self.reason]

    @property
    def is_overdue(self) -> bool:
        return self.requested_seconds > _SAVE_SECONDS

    def hold(self) -> None:
        self._is_held = True

    def begin(self, pids: Iterable[int]) -> None:
        self._ranks = list(pids)
        # A signal that came while the ranks were started.
        if self.first_signal is not None:
            _send_signal(self._ranks, self.first_signal)

    def end(self) -> None:
        self._ranks, self._is_held = [], False

    def _pass_on(self, received: signal.Signals, is_first: bool) -> None:
        if is_first and not self._is_held:
            raise SignalException("no rank runs yet", received)
        if is_first:
            _send_signal(self._ranks, received)
        elif received == signal.SIGINT:  # a person is impatient; schedulers repeat signals
            self.is_urgent = True
            _send_signal(self._ranks, signal.SIGKILL)


# --- How ranks ended ------------------------------------------------------------------------------


@dataclass(frozen=True)
class RanksExit:
    """The way in which a node's ranks ended, if not all had exit code 0."""

    code: int  # exit code of the launcher, unless the ranks are restarted
    # stopped: by a signal; mistake: a restart would end the same way; crashed: a restart may help
    kind: Literal["stopped", "mistake", "crashed"]
    message: str


def classify_exit(
    codes: Mapping[int, int], found: Sequence[failures.RankFailure], logs: Mapping[int, Path]
) -> RanksExit:
    """Decide if this node's ranks were stopped, failed by a user's mistake or crashed.

    Args:
        codes: exit codes of this node's ranks, negative for signals.
        found: recorded failures on all nodes, the cause first.
        logs: log file of each rank.
    """
    stops = [code for code in codes.values() if code in _STOP_CODES]
    # A recorded reason comes before exit codes: ranks that lost the one with the mistake have
    # other codes.
    if found and found[0].kind == "error":
        return RanksExit(_USER_ERROR, "mistake", str(found[0]))
    if _USER_ERROR in codes.values() and not found:
        return RanksExit(_USER_ERROR, "mistake", _describe_exit(codes, _USER_ERROR, logs))
    if stops and not found:
        message = f"All ranks stopped by {_STOP_CODES[stops[0]].name}."
        return RanksExit(stops[0], "stopped", message)
    # A rank that only lost a peer is not the cause.
    code = next((each for each in codes.values() if each != _LOST_PEER), _LOST_PEER)
    message = str(found[0]) if found else _describe_exit(codes, code, logs)
    return RanksExit(code if code > 0 else 128 - code, "crashed", message)


def _describe_code(code: int) -> str:
    return failures.describe_signal(-code) if code < 0 else f"ended with exit code {code}"


def _describe_exit(codes: Mapping[int, int], code: int, logs: Mapping[int, Path]) -> str:
    rank = next(rank for rank, each in codes.items() if each == code)
    line = _last_line(logs[rank], code)
    last = f" Its last line: {line}" if line else ""
    how = f"{'was ' if code < 0 else ''}{_describe_code(code)}"
    return f"Rank {rank} {how}.{last} All of its output: {logs[rank]}."


# --- Ranks of this node ---------------------------------------------------------------------------


class Agent(LocalElasticAgent):
    """Torch's elastic agent with longtake's policy: starts and restarts this node's ranks."""

    def __init__(
        self,
        options: LaunchOptions,
        handler: rendezvous.RendezvousHandler,
        stop: LaunchStop,
        console: Console,
    ) -> None:
        entrypoint, *arguments = [
            *_STDERR_TO_STDOUT,
            *process.program("longtake", *options.train_arguments),
        ]
        num_ranks = count_processes(options.processes)
        spec = WorkerSpec(
            role="",  # torch would write it before each line
            local_world_size=num_ranks,
            entrypoint=entrypoint,
            args=tuple(part.replace("$", "$$") for part in arguments),  # torch substitutes in them
            rdzv_handler=handler,
            max_restarts=options.max_restarts,
            monitor_interval=0.1,
            local_addr=None if options.endpoint else LOOPBACK,
        )
        logs = RankLogs(this_node(options.run), tee=options.tee)
        count = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
        console.print(f"{count} on this node; their output: {logs.root_log_dir}", markup=False)
        super().__init__(spec, logs, log_line_prefix_template="${role_name}")  # which is empty
        self.ended: RanksExit | None = None
        self._has_answered = False  # the answer to a stop request was printed
        self._logs, self._options, self._stop, self._console = logs, options, stop, console
        self._newest = self._newest_checkpoint()
        self._oom_kills, self._started_at = 0, ""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # From here on a signal is kept for the ranks, which get it in `begin`.
        self._stop.hold()
        self._oom_kills, self._started_at = oom_kills(), fsio.now()
        if self._options.endpoint:
            # The first node sets the launch's identifier in the rendezvous's store, below the
            # PrefixStores, whose prefix differs per start.
            store: Any = worker_group.store
            while hasattr(store, "underlying_store"):
                store = store.underlying_store
            own = os.environ[LAUNCH_VARIABLE]
            launch = store.compare_set("longtake/launch", "", own)
            os.environ[LAUNCH_VARIABLE] = str(launch.decode())
        with _starting_by_rank_handler():
            pids: dict[int, Any] = super()._start_workers(worker_group)
        self._stop.begin(pids.values())
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Monitor ranks as torch does, but give others time to report a failure and to end."""
        ranks = {worker.id: worker.global_rank for worker in worker_group.workers}
        if self._stop.first_signal is not None and not self._has_answered:
            self._has_answered = True
            text = answer_to(self._stop.first_signal, self._heartbeats(ranks))
            self._console.print(text, markup=False)
        # Torch kills all other ranks as soon as it sees one fail. So failed children are found
        # here first, without reaping them, and the restart is decided before torch monitors.
        if codes := _failed_codes(ranks):
            # The codes are read again, without those of ranks that were killed here for being late.
            killed = self._let_others_end(codes, ranks)
            codes |= {pid: code for pid, code in _failed_codes(ranks).items() if pid not in killed}
            by_rank = {ranks[pid]: self._as_stop_code(code) for pid, code in codes.items()}
            run = self._options.run
            found = failures.failures_of_processes(run, ranks, self._started_at)
            launches = [each.launch for each in self._heartbeats(ranks)]
            launch = next(filter(None, [*launches, *(each.launch for each in found)]), None)
            found = [] if launch is None else failures.failures_of_launch(run, launch)
            self.ended = classify_exit(by_rank, found, self._logs.paths)
            self._decide_restarts(self.ended)
        elif self._stop.is_overdue:
            _send_signal(ranks, signal.SIGKILL)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state.name != "HEALTHY":
            self._stop.end()
        return result

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Stop ranks before a restart; those that are saving get more time than others."""
        pids = [worker.id for worker in worker_group.workers if worker.id]
        # Torch's own method would kill ranks 30 s after SIGTERM, even while they save.
        _send_signal(pids, signal.SIGTERM)
        left, seconds = _wait_for_end(pids, _STOP_SECONDS), _STOP_SECONDS
        while seconds < _SAVE_SECONDS and any(
            heartbeat.phase in _SAVING_PHASES for heartbeat in self._heartbeats(left)
        ):
            left, seconds = _wait_for_end(left, _STOP_SECONDS), seconds + _STOP_SECONDS
        _send_signal(left, signal.SIGKILL)
        super()._stop_workers(worker_group)
        self._stop.end()

    def _let_others_end(self, codes: dict[int, int], ranks: dict[int, int]) -> list[int]:
        """Record the failure of killed ranks of this node, and wait for its other ranks to end."""
        if self._stop.first_signal is None:
            self._record_failures(codes, ranks)
        is_stop = self._stop.first_signal is not None or any(
            code in _STOP_CODES for code in codes.values()
        )
        late = _wait_for_end(ranks, _SAVE_SECONDS if is_stop else _REPORT_SECONDS)
        _send_signal(late, signal.SIGKILL)
        return late

    def _record_failures(self, codes: dict[int, int], ranks: dict[int, int]) -> None:
        run = self._options.run
        known = {
            failure.pid for failure in failures.failures_of_processes(run, ranks, self._started_at)
        }
        for heartbeat in self._heartbeats(codes):
            code = codes[heartbeat.pid]
            # The rank itself has recorded more than an exit code says.
            if heartbeat.pid in known or heartbeat.phase == "ended":
                continue
            line = _last_line(self._logs.paths[ranks[heartbeat.pid]], code)
            error = _describe_code(code) + (f"; its last line: {line}" if line else "")
            if code == -signal.SIGKILL and oom_kills() > self._oom_kills:
                error = f"the kernel killed it, or another process: out of memory; {error}"
            kind: failures.FailureKind = "killed" if code < 0 else "ended"
            log = str(self._logs.paths[heartbeat.rank])
            failures.failure_of(heartbeat, kind, error, log, source="launcher").record(run)

    def _as_stop_code(self, code: int) -> int:
        """Map the exit code of a rank that the stop signal itself killed to a stopped rank's."""
        received = self._stop.first_signal
        # After a second Ctrl-C the launcher itself sends SIGKILL.
        killed = -signal.SIGKILL if self._stop.is_urgent else None
        is_stop = received is not None and code in (-received, killed)
        return process.EXIT_CODES[received.name] if received is not None and is_stop else code

    def _decide_restarts(self, ended: RanksExit) -> None:
        """Set the number of restarts of ranks that are left; a new checkpoint resets it."""
        newest, is_requested = self._newest_checkpoint(), self._stop.first_signal is not None
        # Counted since the last checkpoint: a run of weeks may have many restarts, and a crash
        # loop ends.
        if newest != self._newest:
            self._newest, self._remaining_restarts = newest, self._options.max_restarts
        if is_requested or ended.kind == "mistake":
            self._remaining_restarts = 0
        elif ended.kind == "stopped":  # another node was signalled; elastic launches continue
            is_elastic = self._options.is_elastic
            # One more, as torch counts this restart, which no crash has caused.
            self._remaining_restarts = self._options.max_restarts + 1 if is_elastic else 0
        if ended.kind == "crashed" and not is_requested:
            left, allowed = self._remaining_restarts, self._options.max_restarts
            since = "" if newest is None else f" since the checkpoint of step {newest}"
            times = f"{allowed - left + 1} of {allowed} times{since}"
            restart = f"All ranks are started again ({times})."
            if not left:
                restart = f"They were started again {allowed} times{since}; the launch ends."
            self._console.print(f"{ended.message}\n{restart}", markup=False)

    def _heartbeats(self, pids: Collection[int]) -> list[Heartbeat]:
        found = read_heartbeats(heartbeat_dir(self._options.run.path))
        return [each for each in found if each.role == "rank" and each.pid in pids]

    def _newest_checkpoint(self) -> int | None:
        return max(self._options.run.checkpoint_steps(), default=None)

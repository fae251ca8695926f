"""The ranks of this node as processes: their output, their signals, and how they ended."""

import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException

from longtake.errors import LongtakeError, LostPeerError
from longtake.failures import LOG_VARIABLE, RankFailure, describe_signal
from longtake.fsio import file_time
from longtake.node_dir import NodeDirectory
from longtake.process import EXIT_CODES, LAUNCHER_VARIABLE, STOP_SIGNALS, StopSignal

SAVE_SECONDS: Final = 600.0
"""For saving after a signal; a scheduler that gives less time kills all processes anyway."""
STDERR_TO_STDOUT: Final = ("/bin/sh", "-c", 'exec "$@" 2>&1', "sh")
"""Precedes a command. Torch would open the log once per stream, and the streams would overwrite
each other."""

_POLL_SECONDS = 0.02
_LAST_BYTES = 4096
_STOP_CODES: Final = {code: signal.Signals[name] for name, code in EXIT_CODES.items()}
_USER_ERROR, _LOST_PEER = LongtakeError.exit_code, LostPeerError.exit_code


# --- Output ---------------------------------------------------------------------------------------


class RankLogs(LogsSpecs):
    """One log per rank and start in the run directory."""

    def __init__(self, node: NodeDirectory, *, tee: bool) -> None:
        super().__init__()
        self._node = node
        self._shows_first = tee
        self.paths: dict[int, Path] = {}

    @property
    def root_log_dir(self) -> str:
        return str(self._node.logs_path)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Logs of a start; `envs` are the environments of the ranks, by local rank."""
        time = file_time()
        ranks = {local: int(env["RANK"]) for local, env in envs.items()}
        self.paths = {rank: self._node.rank_log_path(time, rank) for rank in ranks.values()}
        texts = {local: str(self.paths[rank]) for local, rank in ranks.items()}
        for local, text in texts.items():
            Path(text).parent.mkdir(parents=True, exist_ok=True)
            launcher = {LAUNCHER_VARIABLE: str(os.getpid())}
            envs[local] |= {LOG_VARIABLE: text, "PYTHONUNBUFFERED": "1", **launcher}
        shown = {local: texts[local] for local, rank in ranks.items() if rank == 0}
        empty = dict.fromkeys(texts, "")
        return LogsDest(
            stdouts=texts,
            stderrs=empty,
            tee_stderrs=shown if self._shows_first else {},
            error_files=empty,
        )


def last_line(log: Path) -> str:
    """The last line of a log; empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LAST_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


# --- Processes ------------------------------------------------------------------------------------


def failed_codes(pids: Iterable[int]) -> dict[int, int]:
    """Exit codes other than 0, negative for signals, of children that were not waited for yet."""
    found = {}
    for pid in pids:
        with suppress(ChildProcessError):
            ended = _wait_result(pid)
            if ended is not None and ended.si_status:
                is_exit = ended.si_code == os.CLD_EXITED
                found[pid] = ended.si_status if is_exit else -ended.si_status
    return found


def wait_for_end(pids: Iterable[int], seconds: float) -> list[int]:
    """Wait for children to end; returns those that have not."""
    until = time.monotonic() + seconds
    while (left := [pid for pid in pids if _is_running(pid)]) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
    return left


def send_signal(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to the children that are running."""
    for pid in pids:
        if _is_running(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def machine_oom_kills() -> int:
    """Processes of this machine that the kernel killed for lack of memory, since boot."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("oom_kill ")).split()[1])
    return 0


def _is_running(pid: int) -> bool:
    try:
        return _wait_result(pid) is None
    except ChildProcessError:  # it was waited for
        return False


def _wait_result(pid: int) -> "os.waitid_result | None":
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)


class LaunchStop(StopSignal):
    """A request to stop this launch; while it is entered, signals are passed on to the ranks.

    A signal while no rank runs, such as during the rendezvous, raises `SignalException`.
    """

    def __init__(self) -> None:
        super().__init__(STOP_SIGNALS, on_signal=self._pass_on, keeps_ignored=False)
        self.is_urgent = False
        self._ranks: list[int] = []
        self._is_held = False

    @property
    def first_signal(self) -> signal.Signals | None:
        return None if self.reason is None else signal.Signals[self.reason]

    @property
    def is_overdue(self) -> bool:
        return self.requested_seconds > SAVE_SECONDS

    def hold(self) -> None:
        self._is_held = True

    def begin(self, pids: Iterable[int]) -> None:
        self._ranks = list(pids)
        if self.first_signal is not None:
            send_signal(self._ranks, self.first_signal)

    def end(self) -> None:
        self._ranks, self._is_held = [], False

    def _pass_on(self, received: signal.Signals, is_first: bool) -> None:
        if is_first and not self._is_held:
            raise SignalException("no rank runs yet", received)
        if is_first:
            send_signal(self._ranks, received)
        elif received == signal.SIGINT:  # a person is impatient; schedulers repeat signals
            self.is_urgent = True
            send_signal(self._ranks, signal.SIGKILL)


# --- How they ended -------------------------------------------------------------------------------


@dataclass(frozen=True)
class RanksExit:
    """How the ranks of a node ended, not all of them with exit code 0."""

    code: int  # exit code of the launcher, unless the ranks are started again
    # `stopped`: by a signal; `mistake`: a restart would end the same way; `crashed`: it may help
    kind: Literal["stopped", "mistake", "crashed"]
    message: str


def classify_exit(
    codes: Mapping[int, int], failures: Sequence[RankFailure], logs: Mapping[int, Path]
) -> RanksExit:
    """Decide how ranks ended."""
    stops = [code for code in codes.values() if code in _STOP_CODES]
    if failures and failures[0].kind == "error":
        return RanksExit(_USER_ERROR, "mistake", str(failures[0]))
    if _USER_ERROR in codes.values() and not failures:
        return RanksExit(_USER_ERROR, "mistake", _describe_exit(codes, _USER_ERROR, logs))
    if stops and not failures:
        message = f"All ranks stopped by {_STOP_CODES[stops[0]].name}."
        return RanksExit(stops[0], "stopped", message)
    # A rank that only lost a peer is not the cause.
    code = next((each for each in codes.values() if each != _LOST_PEER), _LOST_PEER)
    message = str(failures[0]) if failures else _describe_exit(codes, code, logs)
    return RanksExit(code if code > 0 else 128 - code, "crashed", message)


def is_stop_code(code: int) -> bool:
    return code in _STOP_CODES


def describe_code(code: int) -> str:
    return describe_signal(-code) if code < 0 else f"ended with exit code {code}"


def _describe_exit(codes: Mapping[int, int], code: int, logs: Mapping[int, Path]) -> str:
    rank = next(rank for rank, each in codes.items() if each == code)
    line = last_line(logs[rank])
    last = f" Its last line: {line}" if line else ""
    return f"Rank {rank} {describe_code(code)}.{last} All of its output: {logs[rank]}."

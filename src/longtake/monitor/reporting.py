"""A watcher's node and settings, its reports (events, alerts, log), and the key `watch.action`.

The run directory may be on a disk that hangs or is full, which is when a watcher is needed most. So
only one thread accesses it, and no other thread waits for that one without a limit. Users are told
first, on the terminal of the training and through the hook, neither of which needs the disk.
"""

import errno
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Full, Queue
from typing import Any, Generic, TypeVar

from longtake import errors, fsio, process
from longtake.config import WatchSection
from longtake.formatting import printable_lines
from longtake.heartbeat import STORE_WAIT, Heartbeat, heartbeat_dir, read_heartbeats
from longtake.monitor.observe import PhaseTimeouts, WatchSettings
from longtake.monitor.stall_record import StallDiagnosis, Suspect
from longtake.node_dir import DumpRequest, NodeDirectory, NodeEventKind
from longtake.run_dir import RunDirectory
from longtake.trust import is_own

_T = TypeVar("_T")
_MAX_LINES = 1000
_ASK_SECONDS = 3.0
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_QUIET: frozenset[NodeEventKind] = frozenset({"watcher_started", "clock_slewed"})  # no alerts
# Kinds that are written to the training's terminal. A rank that died is not: its launcher and the
# other ranks name it there.
_SAID: frozenset[NodeEventKind] = frozenset(
    {"stalled", "stall_cleared", "restarted_worker", "killed_rank", "disk_full"}
)
_SECONDS_BETWEEN_EQUAL_ALERTS = 600.0
_HOOK_SECONDS = 10.0
_SECONDS_FOR_TERMINAL = 1.0
_MAX_ALERTS = 100


@dataclass(frozen=True)
class WatchTarget:
    """The node that a watcher watches, of which run and with which settings."""

    run: RunDirectory
    settings: WatchSettings
    host: str
    folder: Path  # the run's heartbeat folder on this node
    data: Sequence[Path] = ()  # folders whose disks are measured
    by_hand: bool = False  # a user has started the watcher and reads its output

    @property
    def node(self) -> NodeDirectory:
        return NodeDirectory(self.run, self.host)


def watch_target(
    run: Path,
    section: WatchSection | None = None,
    data: Sequence[Path] = (),
    *,
    host: str | None = None,
    folder: Path | None = None,
    by_hand: bool = False,
    trust: bool = False,
) -> WatchTarget:
    """Build the target of a watcher, for this node or a simulated one (`host` and `folder`).

    Args:
        run: the run directory.
        section: the launch's section `watch`; None: that of the run's recipe, or the defaults if
            the recipe is unreadable.
        data: folders whose disks are measured.
        host: name of the node; None: this node's.
        folder: heartbeat folder; None: the run's on this node.
        by_hand: a user has started the watcher.
        trust: run the hook of the run's recipe even if others began the run; see `longtake.trust`.
    """
    directory = RunDirectory(run)
    if section is None:
        try:
            section = directory.recipe().watch
        except errors.LongtakeError:
            section = WatchSection()
        # A hook is a shell command: one from another user's run directory would run as this user.
        if section.hook is not None and not trust and not is_own(directory):
            section = section.model_copy(update={"hook": None})
    host, folder = host or socket.gethostname(), folder or heartbeat_dir(run)
    settings = WatchSettings.of(section)
    return WatchTarget(directory, settings, host, folder, data, by_hand)


class NoAnswerError(OSError):
    """Error: the disk of the run directory does not answer in time."""


class RunDirThread:
    """The only thread of a watcher that accesses the run directory.

    Heartbeats, events and log lines are queued and written as soon as the disk allows; of
    heartbeats only the newest is kept. `ask` waits for a result with a time limit.
    """

    def __init__(self, node: NodeDirectory) -> None:
        self.node = node
        self._thread = ThreadPoolExecutor(1, "run directory")
        self._writing: Future[None] | None = None
        self._hanging: Future[Any] | None = None
        self._heartbeat: Mapping[str, Any] | None = None
        self._events: deque[tuple[NodeEventKind, dict[str, Any]]] = deque()
        self._lines: deque[str] = deque(maxlen=_MAX_LINES)
        self._error: OSError | None = None
        self._is_failing = False

    def write_heartbeat(self, record: Mapping[str, Any]) -> None:
        self._heartbeat = record
        self._write_soon()

    def append_event(self, kind: NodeEventKind, fields: Mapping[str, Any]) -> None:
        self._events.append((kind, {"time": fsio.now(), **fields}))
        self._write_soon()

    def log(self, text: str) -> None:
        self._lines.append(f"{fsio.now()} {text}")
        self._write_soon()

    def ask(self, work: Callable[[], _T], seconds: float | None = _ASK_SECONDS) -> _T:
        """Call `work` in the thread for the run directory, and wait for its result.

        The wait is limited to `seconds`; None: it is not limited.

        Raises:
            NoAnswerError: there was no result in time, or an earlier call still hangs.
            OSError: any error of `work`.
        """
        if self._hanging is not None and not self._hanging.done():
            raise NoAnswerError(f"{self.node.run.path} does not answer")
        future = self._thread.submit(work)
        try:
            return future.result(seconds)
        except FutureTimeout:
            # A call that had not begun waits for one that hangs. That one is remembered, so that
            # later calls fail at once.
            self._hanging = self._writing if future.cancel() else future
            text = f"{self.node.run.path} did not answer in {seconds:g} s"
            raise NoAnswerError(text) from None

    def try_ask(self, work: Callable[[], _T], seconds: float = _ASK_SECONDS) -> _T | None:
        """Call `work` as `ask` does; return None after an error or if the disk does not answer."""
        with suppress(OSError):
            return self.ask(work, seconds)
        return None

    def take_error(self) -> OSError | None:
        error, self._error = self._error, None
        return error

    def close(self, seconds: float) -> None:
        """Wait up to `seconds` until all heartbeats, events and lines of the log are on disk."""
        end = time.monotonic() + seconds
        while (self._lines or self._events or self._heartbeat) and time.monotonic() < end:
            self._write_soon()
            if self._writing is not None:
                with suppress(FutureTimeout):
                    self._writing.result(max(0.0, end - time.monotonic()))
            # A full disk fails at once: without a pause this loop would be busy.
            if self._is_failing:
                time.sleep(0.1)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _write_soon(self) -> None:
        if self._writing is None or self._writing.done():
            with suppress(RuntimeError):  # closed
                self._writing = self._thread.submit(self._write)

    def _write(self) -> None:
        while self._lines:
            line = self._lines.popleft()
            with suppress(OSError, ValueError):  # no reader, or no room
                print(printable_lines(line), flush=True)  # noqa: T201 - to the log, or to a person
        try:
            while self._events:
                # Removed only once it is written, so that no event is lost on a full disk.
                kind, fields = self._events[0]
                self.node.append_event(kind, **fields)
                self._events.popleft()
            if (record := self._heartbeat) is not None:
                self._heartbeat = None
                # Read now, as the record may have waited for the disk.
                times = {"monotonic": time.monotonic(), "wall": time.time()}
                self.node.write_heartbeat({**record, **times})
        except OSError as error:
            if not self._is_failing:
                self._is_failing, self._error = True, error
        else:
            self._is_failing = False


def is_disk_full(error: OSError) -> bool:
    return error.errno is not None and error.errno in _FULL


class QueueThread(Generic[_T]):
    """Thread that handles queued items one after the other; callers never wait for it.

    Args:
        name: name of the thread.
        handle: called with each item.
        max_items: number of items that may wait; 0: any number.
    """

    def __init__(self, name: str, handle: Callable[[_T], object], max_items: int = 0) -> None:
        self._items: Queue[_T | None] = Queue(max_items)
        self._handle = handle
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, item: _T) -> bool:
        """Queue an item for the thread; return False if it is dropped as too many wait."""
        try:
            self._items.put_nowait(item)
        except Full:
            return False
        return True

    def close(self, seconds: float) -> None:
        """Wait up to `seconds` until the thread has handled all items."""
        end = time.monotonic() + seconds
        # Waits for room in a full queue: without the mark the thread would never end.
        with suppress(Full):
            self._items.put(None, timeout=seconds)
            self._thread.join(max(0.0, end - time.monotonic()))

    def _work(self) -> None:
        while (item := self._items.get()) is not None:
            self._handle(item)


class Terminal(QueueThread[str]):
    """Writer of lines to the terminal of the training, in a thread that may block.

    The watcher writes there itself, as a rank that is stopped or holds the GIL could not. The line
    of a progress bar is erased; the bar continues on the next line.
    """

    def __init__(self) -> None:
        # Without a terminal each line fails to be written, which is ignored.
        self._descriptor = int(os.environ.pop(process.TERMINAL_VARIABLE, "-1"))
        super().__init__("terminal", self._write)

    def _write(self, text: str) -> None:
        with suppress(OSError):  # it was closed
            begin = "\r\x1b[2K" if os.isatty(self._descriptor) else ""
            line = f"{begin}longtake: {printable_lines(text)}\n"
            os.write(self._descriptor, line.encode(errors="replace"))


class EventReporter:
    """Reports a node's events on the terminal, to the hook, in events.jsonl and in the log.

    Its methods never wait.
    """

    def __init__(self, target: WatchTarget, disk: RunDirThread) -> None:
        self._host, self._run = target.host, str(target.run.path.resolve())
        self._disk, self._terminal = disk, Terminal()
        self._alerts = AlertQueue(target.settings, disk)
        self._alerted: dict[tuple[Any, ...], float] = {}
        self._quiet_tokens: set[str] = set()

    def emit(self, kind: NodeEventKind, /, *, is_alert: bool = True, **fields: Any) -> None:
        """Record an event of the node, and tell the user if its kind is of interest.

        Args:
            kind: kind of the event.
            is_alert: False: never run the hook.
            fields: further fields of the event.
        """
        texts = [str(fields[name]) for name in ("sentence", "message", "reason") if name in fields]
        values = (f"{name}={value}" for name, value in fields.items() if value != "")
        text = texts[0] if texts else " ".join(values)
        # Terminal and hook first, as neither needs the disk, which may be what hangs.
        if kind in _SAID:
            self.tell(text)
        if is_alert and kind not in _QUIET and not self._is_known(kind, fields):
            self.alert(kind, **fields)
        self._disk.append_event(kind, fields)
        self._disk.log(f"{kind}: {text}")

    def tell(self, text: str) -> None:
        """Write a line to the training's terminal."""
        self._terminal.put(text)

    def alert(self, kind: NodeEventKind, /, **fields: Any) -> None:
        event = {"time": fsio.now(), "event": kind, "host": self._host, **fields, "run": self._run}
        self._alerts.put(event)

    def log(self, text: str) -> None:
        self._disk.log(text)

    def close(self, seconds: float) -> None:
        self._alerts.close(seconds)
        self._terminal.close(_SECONDS_FOR_TERMINAL)

    def _is_known(self, kind: NodeEventKind, fields: dict[str, Any]) -> bool:
        """Return True if no alert (call of the hook) is needed for an event.

        This is so for a stall with the same suspect at the same place as a recent alert, and for
        the end of a stall without an alert.
        """
        token = str(fields.get("token", ""))
        if kind == "stall_cleared":
            return token in self._quiet_tokens
        if kind != "stalled" or not fields.get("suspects"):
            return False
        at, suspect = time.monotonic(), fields["suspects"][0]
        where = tuple(suspect.get(name) for name in ("host", "pid", "file", "line"))
        limit = at - _SECONDS_BETWEEN_EQUAL_ALERTS
        recent = {key: then for key, then in self._alerted.items() if then > limit}
        is_known = where in recent
        self._alerted = {where: at} | recent
        if is_known:
            self._quiet_tokens.add(token)
        return is_known


class AlertQueue:
    """Runs the recipe's hook (a shell command) for each alert, one by one, in its own thread."""

    def __init__(self, section: WatchSection, disk: RunDirThread) -> None:
        self._hook, self._disk = section.hook, disk
        self._thread = QueueThread("alerts", self._send, _MAX_ALERTS)

    def put(self, event: Mapping[str, Any]) -> None:
        """Queue an event for which the hook is run; returns at once."""
        if self._hook is not None and not self._thread.put(event):
            self._disk.log(f"alert dropped, {_MAX_ALERTS} others wait: {event['event']}")

    def close(self, seconds: float) -> None:
        """Wait up to `seconds` until the hook has run for all queued events."""
        self._thread.close(seconds)

    def _send(self, event: Mapping[str, Any]) -> None:
        line = json.dumps(event, separators=(",", ":"))
        if problem := run_hook(self._hook or "", line, str(event["event"])):
            self._disk.log(f"hook: {problem}")


def run_hook(command: str, line: str, event: str, seconds: float = _HOOK_SECONDS) -> str:
    """Run the recipe's hook, a shell command, with an event as a line of JSON on its stdin.

    Returns:
        The reason of a failure; empty: it succeeded.
    """
    try:
        hook = subprocess.Popen(
            ["/bin/sh", "-c", 'eval "$LONGTAKE_HOOK"'],  # other users can read arguments
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "LONGTAKE_EVENT": event, "LONGTAKE_HOOK": command},
            start_new_session=True,
        )
    except (OSError, ValueError) as error:  # ValueError: a NUL character
        return f"it cannot be run: {error}"
    try:
        _, output = hook.communicate(f"{line}\n".encode(), timeout=seconds)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            # The whole group: a child of the hook may hold its pipes open.
            os.killpg(hook.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            # With a limit, as a process that waits for a dead disk (state D) outlives SIGKILL.
            hook.wait(1.0)
        for pipe in (hook.stdin, hook.stderr):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        return f"it was ended: it took longer than {seconds:g} s"
    if hook.returncode == 0:
        return ""
    text = output.decode(errors="replace").strip()[-500:]
    return f"it ended with status {hook.returncode}: {text or 'without output'}"


# --- `watch.action` kills a process that hangs, on its own node. Only processes of the run are
# signalled, and only if they are still the ones of the diagnosis and in the same phase. A wrong
# guess costs most for a save that is only slow or a clip that is only long: there the process gets
# twice its limit.

_COMPUTING_SHARE = 0.9  # cores used by a decode worker that computes, even at one line of Python
_ROUNDING_SECONDS = 0.001  # precision of `seconds` in a dump


class StallActions:
    """Executes the recipe's `watch.action`: kills processes suspected of a stall, or reports."""

    def __init__(
        self, target: WatchTarget, reporter: EventReporter, timeouts: PhaseTimeouts
    ) -> None:
        self._action = target.settings.action
        self._host, self._folder = target.host, target.folder
        self._reporter, self._timeouts = reporter, timeouts
        self._clips: set[str] = set()

    def act_on(self, diagnosis: StallDiagnosis, request: DumpRequest) -> None:
        """Kill the suspects of a stall on this node that `watch.action` allows to kill.

        If no process is the cause, the rank that raised the alarm is killed instead.
        """
        if self._action == "report":
            return
        if reason := _blames_no_process(diagnosis):
            if self._action == "kill":
                self._end_alarmed_rank(diagnosis, request, reason)
        elif diagnosis.kind == "stuck":
            # Kill the cause, and other decode workers that hang. More than one rank is never
            # needed: the end of one rank ends all.
            first, *others = diagnosis.suspects
            also = [each for each in others if each.role == "decode" and not each.moved]
            for suspect in (first, *also):
                if suspect.host == self._host and suspect.pid > 0:
                    self._end_suspect(suspect, diagnosis)

    def _end_alarmed_rank(
        self, diagnosis: StallDiagnosis, request: DumpRequest, reason: str
    ) -> None:
        # Only on the node of the alarm, so that one rank of the run is killed and not one per node.
        alarm: dict[str, Any] = {**request.get("stall", {})}
        if alarm.get("host") != self._host or alarm.get("role") != "rank":
            return
        suspect = Suspect(self._host, alarm["pid"], "rank", alarm["rank"])
        suspect = replace(suspect, doing=alarm["phase"], seconds=alarm["seconds"])
        if ended := self._end(suspect):
            event = {**_rank_event(ended, diagnosis), "reason": reason}
            self._reporter.emit("killed_rank", **event)

    def _end_suspect(self, suspect: Suspect, diagnosis: StallDiagnosis) -> None:
        if suspect.role == "decode":
            if STORE_WAIT in suspect.clip_path:
                waits = suspect.clip_path.partition(STORE_WAIT)[2]
                self._reporter.log(f"process {suspect.pid} is not ended, as its store is: {waits}")
            # One restart per clip: a clip that hangs any worker would otherwise be read for ever.
            elif suspect.clip and suspect.clip in self._clips:
                self._reporter.log(
                    f"process {suspect.pid} is not ended: clip {suspect.clip} has cost a process "
                    "already; it is ended after data.sample_timeout_seconds"
                )
            elif ended := self._end(suspect):
                self._clips.add(suspect.clip)
                clip = ended.detail or ended.given
                self._reporter.emit(
                    "restarted_worker",
                    token=diagnosis.token,
                    pid=ended.pid,
                    rank=ended.rank,
                    clip=ended.detail,
                    clip_path=ended.path_of_clip,
                    seconds=round(ended.seconds, 3),
                    reason=f"process {ended.pid} of rank {ended.rank} was ended; clip {clip} is "
                    "read again.",
                )
        elif suspect.role == "rank" and self._action == "kill" and (ended := self._end(suspect)):
            self._reporter.emit("killed_rank", **_rank_event(ended, diagnosis))

    def _end(self, suspect: Suspect) -> Heartbeat | None:
        """Kill a suspect of a stall if it is still the same process and has not moved on.

        Returns:
            Its last heartbeat; None: it was not killed, and the log says why.
        """
        pages = (each for each in read_heartbeats(self._folder) if each.pid == suspect.pid)
        found = next((each for each in pages if each.role == suspect.role), None)
        if found is None or not found.is_alive:
            self._reporter.log(f"process {suspect.pid} is gone already")
        elif (
            found.phase != suspect.doing
            or (suspect.role == "decode" and found.detail != suspect.clip)
            or found.seconds + _ROUNDING_SECONDS < suspect.seconds  # it has entered the phase again
        ):
            self._reporter.log(f"process {suspect.pid} has moved on: it is not ended")
        elif wait := self._reason_to_wait(found, suspect):
            self._reporter.log(f"process {suspect.pid} is not ended yet: {wait}")
        elif problem := kill_process(found):
            self._reporter.log(f"process {suspect.pid} cannot be ended: {problem}")
        else:
            return found
        return None

    def _reason_to_wait(self, heartbeat: Heartbeat, suspect: Suspect) -> str:
        """Return the reason to spare a suspect until twice its phase's limit; empty: none."""
        limit = self._timeouts.limit_of(heartbeat, time.monotonic())
        if limit is None or heartbeat.seconds >= 2 * limit:
            return ""
        until = f"until {2 * limit:.0f} s, twice the limit (it has been {heartbeat.seconds:.0f} s)"
        if heartbeat.phase in ("checkpoint", "save", "rollback"):
            return f"it may still be in its {heartbeat.phase} {until}"
        if heartbeat.role == "decode" and suspect.cpu_share >= _COMPUTING_SHARE:
            return f"it computes ({suspect.cpu_share:.1f} cores), and may do so {until}"
        return ""


def kill_process(heartbeat: Heartbeat) -> str:
    """Send SIGKILL to a process, and never to a later one with the same pid.

    The pidfd is opened before the identity is checked, so the pid cannot be reused in between. On
    kernels before 5.3 and in sandboxes without pidfds, a plain `kill` is used.

    Returns:
        The reason of a failure; empty: the signal was sent.
    """
    pidfd = -1
    try:
        try:
            pidfd = os.pidfd_open(heartbeat.pid)
        except OSError as error:
            if error.errno != errno.ENOSYS:
                raise
        if not heartbeat.is_alive:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        if pidfd >= 0:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        else:
            os.kill(heartbeat.pid, signal.SIGKILL)
    except OSError as error:
        return f"{errno.errorcode.get(error.errno or 0, error.errno)}: {error.strerror}"
    finally:
        if pidfd >= 0:
            os.close(pidfd)
    return ""


def _blames_no_process(diagnosis: StallDiagnosis) -> str:
    """Return why a stall has no guilty process, so that any rank may be killed; else empty."""
    if diagnosis.kind == "link" and not diagnosis.suspects:
        return (
            "all ranks wait at the same place, and none is the cause: any one that ends restarts "
            "the job"
        )
    if diagnosis.kind == "lost" and all(each.role == "node" for each in diagnosis.suspects):
        silent = ", ".join(diagnosis.silent_nodes) or "a node"
        return f"{silent} gives no answer, and all wait: any rank that ends restarts the job"
    return ""


def _rank_event(ended: Heartbeat, diagnosis: StallDiagnosis) -> dict[str, Any]:
    names = ("pid", "rank", "launch", "step", "phase")
    where = f"rank {ended.rank} (process {ended.pid}) was ended at step {ended.step}"
    return {
        "token": diagnosis.token,
        **{name: getattr(ended, name) for name in names},
        "seconds": round(ended.seconds, 3),
        "reason": f"{where}, {ended.phase}.",
    }

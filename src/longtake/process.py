"""Processes and signals: child processes of longtake, stop requests, process identity.

Imports neither pydantic nor torch: `longtake --help` loads this module.
"""

import ctypes
import fcntl
import hashlib
import math
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Any, Final, Literal, NoReturn, Self

LAUNCHER_VARIABLE = "LONGTAKE_LAUNCHER"
"""Environment variable of a rank that `longtake launch` has started: the launcher's pid."""


SECTION_VARIABLE = "LONGTAKE_WATCH_SECTION"
"""Environment variable of a watcher: the recipe's section `watch`, as JSON."""

SETTINGS_VARIABLE = "LONGTAKE_WATCH_SETTINGS"
"""Environment variable of a watcher in tests and drills: constants to replace, as JSON."""

TERMINAL_VARIABLE = "LONGTAKE_TERMINAL"
"""Environment variable with the descriptor of the stderr that the user reads.

In a rank it is the launcher's stderr; in a watcher, the launcher's or else the trainer's.
"""

BEAT_VARIABLE = "LONGTAKE_BEAT"
"""Environment variable of a `KeptProcess`: descriptor of the pipe that its `Beat` writes to."""

EXIT_CODES: Final = {"SIGINT": 130, "SIGTERM": 143, "SIGUSR1": os.EX_TEMPFAIL}
"""Exit code of a launch by the name of the signal that stopped it.

SIGINT is Ctrl-C; SIGTERM may be followed by force soon; SIGUSR1 comes from a scheduler some minutes
before the time limit, and EX_TEMPFAIL asks it to run the job again.
"""

STOP_SIGNALS: Final = tuple(signal.Signals[name] for name in EXIT_CODES)

_PACKAGES = Path(__file__).parents[1]  # where longtake is imported from

_MAX_STARTS = 5
_SHORT_DELAY_SECONDS = 1.0
_LONG_DELAY_SECONDS = 600.0
_FIRST_BEAT_SECONDS = 300.0  # importing from a cold network file system takes long
_BEAT_LOOK_SECONDS = 1.0
_KILL_SECONDS = 3.0
_INTERRUPT_SECONDS = 3.0  # time for Python code to notice a second Ctrl-C; C code may never

boot_seconds = partial(time.clock_gettime, time.CLOCK_BOOTTIME)

_SET_PARENT_DEATH_SIGNAL = 1  # from linux/prctl.h
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


# --- Our own programs -------------------------------------------------------------------------


def command(name: str = "longtake") -> str:
    """Return a program of this installation as a user types it, quoted for a shell.

    Args:
        name: a script installed in the same folder as longtake, such as `tensorboard`. The result
            is the name itself if a shell finds this installation's script by it, else its path.
    """
    called = Path(sys.argv[0])
    scripts = Path(sys.executable).parent if called.name != "longtake" else called.parent
    # Another installation's script of the same name may come first in PATH.
    own, found = scripts / name, shutil.which(name)
    if not own.is_file() or (found is not None and own.samefile(found)):
        return name
    path = own if not own.is_absolute() else Path(os.path.relpath(own))
    return shlex.quote(str(own.absolute() if path.parts[0] == ".." else path))


def program(module: str, *arguments: str) -> list[str]:
    # -P: Python would look for modules in the working directory first, where any file may be.
    return [sys.executable, "-P", "-m", module, *arguments]


def environment(**changes: str) -> dict[str, str]:
    # This process may have found longtake by sys.path, which child processes do not inherit.
    paths = [str(_PACKAGES), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **changes}


def start(
    command: Sequence[str], log: IO[bytes], folder: Path | None = None, **changes: str
) -> "subprocess.Popen[bytes]":
    """Start a command in its own session, so that a terminal's Ctrl-C does not reach it.

    Args:
        command: program and arguments, as `program` returns them.
        log: file for its stdout and stderr.
        folder: working directory; None: this process's.
        changes: environment variables to add or replace.
    """
    return subprocess.Popen(  # noqa: S603 - ourselves
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=environment(**changes),
        start_new_session=True,
    )


def duplicate(descriptor: int) -> int:
    """Duplicate a descriptor to a number above 2, closed on exec.

    Raises:
        OSError: `descriptor` is closed.
    """
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)


def end_with(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process the signal `by` when its parent ends for any reason.

    Closing a pipe is not enough, as a process that hangs does not read it. Linux sends the signal
    already when the parent's thread that started this process ends.

    Raises:
        SystemExit: the parent of this process is not `parent` (any more).
    """
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, by)
    if os.getppid() != parent:  # it ended before prctl; or a wrapper process stands in between
        raise SystemExit(f"the parent should be process {parent}, but is {os.getppid()}")


def code_digest(*folders: str) -> str:
    """Return a digest (12 hex digits) of the modules in folders of the package, such as `data`."""
    digest = hashlib.sha256()
    package = Path(__file__).parent
    for path in sorted(path for folder in folders for path in (package / folder).rglob("*.py")):
        # Names are hashed too, as a file that was renamed is other code.
        digest.update(f"{path.relative_to(package).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


class RestartDelay:
    """Delay before a program is restarted: 1 s, or 600 s after five starts within 600 s."""

    def __init__(self) -> None:
        self._starts: deque[float] = deque(maxlen=_MAX_STARTS)

    def started(self) -> None:
        self._starts.append(time.monotonic())

    @property
    def seconds(self) -> float:
        is_often = len(self._starts) == _MAX_STARTS
        is_often = is_often and time.monotonic() - self._starts[0] < _LONG_DELAY_SECONDS
        return _LONG_DELAY_SECONDS if is_often else _SHORT_DELAY_SECONDS


class Beat:
    """Sign of life of this process to the `KeptProcess` that started it, if any.

    Each call writes a byte to a pipe; without a `KeptProcess` it does nothing.
    """

    def __init__(self) -> None:
        self._descriptor = os.environ.pop(BEAT_VARIABLE, None)  # not for programs that it starts

    def __call__(self) -> None:
        if self._descriptor is not None:
            with suppress(OSError):  # full, as its reader is stopped; or its reader has ended
                os.write(int(self._descriptor), b".")


@dataclass(eq=False)
class KeptProcess:
    """A child program that is restarted whenever it ends, until `end` is called.

    A start that fails raises no error and is repeated later. The program runs in its own session:
    Ctrl-C and a scheduler's signals to this process do not reach it.

    Attributes:
        name: name of the thread that waits for the program.
        command: program and arguments, as the function `program` returns them.
        log: file to which its stdout and stderr are appended; a symbolic link is not followed.
        inside: a folder above `log`; it is not created, and once it is gone nothing is started.
        changes: environment variables to add to this process's, or to replace.
        has_pipe: its stdin is a pipe, which `end` closes; else it is /dev/null.
        until_success: exit code 0 ends it for good.
        silent_seconds: it is killed, and so restarted, after this time without a `Beat`: it is
            stopped or hangs.
        terminal: descriptor to pass on as `TERMINAL_VARIABLE`; None: pass nothing.
    """

    name: str
    command: Sequence[str]
    log: Path
    _: KW_ONLY
    inside: Path
    changes: Mapping[str, str] = field(default_factory=dict)
    has_pipe: bool = False
    until_success: bool = False
    silent_seconds: float = math.inf
    terminal: int | None = None
    _beats: int | None = field(default=None, init=False)  # reads the process's beat pipe
    _process: "subprocess.Popen[bytes] | None" = field(default=None, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _is_over: threading.Event = field(default_factory=threading.Event, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def is_over(self) -> bool:
        """True once the program is not restarted any more; a last one may still run.

        This is so after `end`, after exit code 0 with `until_success`, and when the folder `inside`
        is gone.
        """
        return self._is_over.is_set()

    def start(self) -> None:
        """Start the program and return in milliseconds; does nothing if it was started before."""
        if self._thread is None:
            with self._lock:
                self._begin()
            self._thread = threading.Thread(target=self._keep, name=self.name, daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Stop restarting the program, and close its stdin pipe.

        A program that is stopped by SIGSTOP cannot end by itself and is killed; with
        `until_success`, it is then started one last time.
        """
        # The lock: `_keep` must not start another process between the look and the end.
        with self._lock:
            stat = None if self._process is None else read_stat(self._process.pid)
            if self._process is not None and stat is not None and stat.state == "T":
                self._process.kill()
                with suppress(subprocess.TimeoutExpired):  # so that it holds nothing any more
                    self._process.wait(_KILL_SECONDS)
                if self.until_success:
                    self._begin()
            self._stop_keeping()

    def wait(self, seconds: float) -> bool:
        if self._thread is not None:
            self._thread.join(seconds)
        return not self.is_running

    def _keep(self) -> None:
        delay = RestartDelay()
        while True:
            delay.started()
            process = self._process
            if self._wait_for_end() == 0 and self.until_success:
                self.end()
            # `end` may have started one last process, which has to be waited for, too.
            if self._is_over.wait(delay.seconds) and self._process is process:
                return
            with self._lock:
                if not self._is_over.is_set():
                    self._begin()

    def _wait_for_end(self) -> int | None:
        """Wait until the process has ended, and kill it once it has been silent for too long."""
        # Silence is the number of polls without a beat, not a difference of clocks: if this
        # process was itself stopped, or the machine suspended, the child is not blamed for it.
        process, beats, self._beats = self._process, self._beats, None
        if process is None or beats is None:
            return None if process is None else process.wait()
        poll, silent = select.poll(), -_FIRST_BEAT_SECONDS
        poll.register(beats, select.POLLIN)
        while process.poll() is None:
            if poll.poll(_BEAT_LOOK_SECONDS * 1000):
                # The end of the pipe: the process, and all that inherited the pipe, have ended.
                if not os.read(beats, 4096):
                    break
                silent = 0.0
            elif (silent := silent + _BEAT_LOOK_SECONDS) >= self.silent_seconds:
                process.kill()
        os.close(beats)
        return process.wait()

    def _begin(self) -> None:
        if not self.inside.is_dir():
            self._stop_keeping()
            return
        with suppress(OSError):
            # Not parents=True: a run directory that somebody removes must not come back.
            for folder in [*self.log.relative_to(self.inside).parents][-2::-1]:
                (self.inside / folder).mkdir(exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            log = os.open(self.log, flags, 0o666)
            # A full pipe must not block the child, so its end does not block.
            beats, theirs = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(theirs, False)
            inherited = {BEAT_VARIABLE: theirs}
            with suppress(OSError):  # it was closed
                if self.terminal is not None:
                    inherited[TERMINAL_VARIABLE] = duplicate(self.terminal)
            numbers = {name: str(number) for name, number in inherited.items()}
            try:
                process = subprocess.Popen(  # noqa: S603 - ourselves
                    self.command,
                    stdin=subprocess.PIPE if self.has_pipe else subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment(**self.changes, **numbers),
                    start_new_session=True,
                    pass_fds=tuple(inherited.values()),
                )
            except OSError:
                os.close(beats)
                raise
            finally:
                # The child has its own copies. A copy of the pipe here would hide the child's end.
                for each in (log, *inherited.values()):
                    os.close(each)
            self._close_pipe()
            self._process, self._beats = process, beats

    def _stop_keeping(self) -> None:
        self._is_over.set()
        self._close_pipe()

    def _close_pipe(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # it has ended
                self._process.stdin.close()


@contextmanager
def periodic(name: str, work: Callable[[], object], seconds: float) -> Iterator[None]:
    """Call `work` in a thread after pauses of `seconds`, until the block ends.

    The first call is after `seconds`. The block's end waits for a call that is under way. What
    `work` raises ends the thread.
    """
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.wait(seconds):
            work()

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


# --- Signals ----------------------------------------------------------------------------------


class Stopped(Exception):  # noqa: N818 - nothing is wrong
    """Exception for work that was stopped on request; see `StopSignal.check`."""


@dataclass(eq=False)
class StopSignal:
    """Context manager that turns signals into a request to stop; enter it in the main thread.

    Schedulers and launchers often send a signal twice, so a second signal does nothing unless
    `second` says otherwise. A signal that the process was started to ignore stays ignored (Ctrl-C
    for a background job).

    Attributes:
        signals: signals that request a stop.
        ignored: signals that are ignored within the block.
        patience_seconds: delay from each signal until the stop is `wanted`; missing: 0.
        second: the effect of a later signal. `ignore`: none; `interrupt`: SIGINT raises
            KeyboardInterrupt; `default`: that of the handler before the block.
        on_signal: called in the handler with each signal, and True for the first one.
        keeps_ignored: False: also handle signals that were ignored before.
        answer: called with the first signal, at once, in a thread of its own: C code may block the
            main thread, and with it all Python handlers, for ever. With `answer` and `second` =
            `interrupt`, a second SIGINT exits within seconds even if it cannot raise.
        reason: the signal's name, or the reason given to `request`; None: no stop is requested.
    """

    signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT)
    _: KW_ONLY
    ignored: Sequence[signal.Signals] = ()
    patience_seconds: Mapping[signal.Signals, float] = field(default_factory=dict)
    second: Literal["ignore", "interrupt", "default"] = "ignore"
    on_signal: Callable[[signal.Signals, bool], object] | None = None
    keeps_ignored: bool = True
    answer: Callable[[signal.Signals], object] | None = None
    reason: str | None = field(default=None, init=False)
    _is_interrupted: bool = field(default=False, init=False)
    _wakeups: tuple[int, int] | None = field(default=None, init=False)  # descriptors: old, own
    _requested_at: float | None = field(default=None, init=False)
    _due: float = field(default=math.inf, init=False)
    _before: dict[int, Any] = field(default_factory=dict, init=False)
    # Wakes `wait`; a lock is not safe in a signal handler.
    _pipe: tuple[int, int] | None = field(default=None, init=False)

    @property
    def is_requested(self) -> bool:
        return self.reason is not None

    @property
    def wanted(self) -> bool:
        return time.monotonic() >= self._due

    @property
    def requested_seconds(self) -> float:
        return 0.0 if self._requested_at is None else time.monotonic() - self._requested_at

    def request(self, reason: str, patience_seconds: float = 0.0) -> None:
        """Request a stop after `patience_seconds`; safe in any thread and in signal handlers."""
        due = time.monotonic() + patience_seconds
        self._requested_at = self._requested_at or time.monotonic()
        if due < self._due:
            self.reason, self._due = reason, due
        if self._pipe is not None:
            with suppress(OSError):  # full: it is woken up already
                os.write(self._pipe[1], b"!")

    def wait(self, seconds: float) -> bool:
        """Sleep for `seconds` or until a stop is `wanted`; return `wanted`. One thread may wait."""
        assert self._pipe is not None, "wait() inside of the block"
        end = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self._pipe[0], select.POLLIN)
        while (left := min(end, self._due) - time.monotonic()) > 0:
            # Rounded up: a wait of 0 ms would make this loop busy in the last millisecond.
            if poll.poll(math.ceil(1000 * left)):
                os.read(self._pipe[0], 64)
        return self.wanted

    def check(self) -> None:
        if self.wanted:
            raise Stopped(self.reason)

    def __enter__(self) -> Self:
        # The pipe exists before the first handler is installed, as handlers write to it.
        self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in (*self.signals, *self.ignored):
            before = signal.getsignal(number)
            if number in self.ignored:
                self._before[number] = signal.signal(number, signal.SIG_IGN)
            elif before != signal.SIG_IGN or not self.keeps_ignored:
                self._before[number] = signal.signal(number, self._receive)
        if self.answer is not None:
            received, written = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(written, False)  # set_wakeup_fd requires it
            self._wakeups = signal.set_wakeup_fd(written, warn_on_full_buffer=False), written
            threading.Thread(
                target=self._answer_all, args=(received,), name="signals", daemon=True
            ).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        is_ending = kind is not None or self.is_requested
        for number, before in self._before.items():
            # After a stop or a failure only cleanup is left, which ends by itself. Launchers signal
            # all ranks when one has failed; that must not cut off the message of why it failed.
            is_cut_short = before is _leave and number != signal.SIGINT
            signal.signal(number, signal.SIG_IGN if is_ending and is_cut_short else before)
        self._before = {}
        if self._wakeups is not None:
            signal.set_wakeup_fd(self._wakeups[0])
            os.close(self._wakeups[1])
            self._is_interrupted, self._wakeups = True, None  # the answering thread must not exit
        pipe, self._pipe = self._pipe, None
        for descriptor in pipe or ():
            os.close(descriptor)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        received, is_first = signal.Signals(number), not self.is_requested
        self.request(received.name, self.patience_seconds.get(received, 0.0))
        # From the handler itself, as a second signal may come at any moment.
        if is_first and self.second == "default":
            for each in self.signals:
                if each in self._before:
                    signal.signal(each, self._before[each])
        if self.on_signal is not None:
            self.on_signal(received, is_first)
        if not is_first and self.second == "interrupt" and received == signal.SIGINT:
            self._is_interrupted = True
            raise KeyboardInterrupt

    def _answer_all(self, wakeups: int) -> None:
        """Answer the signals whose numbers Python's handler in C writes to a pipe."""
        assert self.answer is not None
        # CPython runs Python handlers only between bytecodes of the main thread. A collective or
        # a read from a dead file system may never return to it, but set_wakeup_fd still writes.
        is_first = True
        with open(wakeups, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                if (received := signal.Signals(number[0])) not in self.signals:
                    continue
                if is_first:
                    is_first = False
                    self.answer(received)
                elif self.second == "interrupt" and received == signal.SIGINT:
                    time.sleep(_INTERRUPT_SECONDS)
                    if not self._is_interrupted:
                        os._exit(EXIT_CODES[received.name])


class LeftError(SystemExit):
    """Exit after a signal that came when there was nothing to finish or to save.

    Attributes:
        code: the signal's exit code in `EXIT_CODES`.
        signal_name: the signal's name, such as SIGTERM.
    """

    def __init__(self, signal_name: str) -> None:
        super().__init__(EXIT_CODES[signal_name])
        self.signal_name = signal_name


@contextmanager
def leave_on_signals() -> Iterator[None]:
    """Raise `LeftError` at one of `STOP_SIGNALS`, unless a `StopSignal` in the block handles it.

    After a `StopSignal` has stopped or failed, signals other than SIGINT are ignored until the
    block ends.
    """
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    # A signal that the process was started to ignore stays ignored: Ctrl-C for a background job.
    before = {number: was for number, was in before.items() if was != signal.SIG_IGN}
    for number in before:
        signal.signal(number, _leave)
    try:
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, was)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise LeftError(signal.Signals(number).name)


# --- Identity of processes and hosts ----------------------------------------------------------


@dataclass(frozen=True)
class ProcessStat:
    """Fields of /proc/<pid>/stat, see proc_pid_stat(5)."""

    pid: int
    name: str
    state: str  # one letter
    parent: int
    cpu_seconds: float  # user and system time of all its threads
    start_ticks: int  # clock ticks from boot to its start: with the pid, its identity

    @property
    def is_gone(self) -> bool:
        return self.state in "ZX"

    @property
    def command(self) -> str:
        """Return a process's command line; its [name] where that cannot be read."""
        command = ""
        with suppress(OSError):
            if self.state not in "DZ":  # it lies in the process's memory: reading it may block
                command = Path(f"/proc/{self.pid}/cmdline").read_text(errors="replace")
        return command.replace("\0", " ").strip() or f"[{self.name}]"


def read_stat(pid: int) -> ProcessStat | None:
    """Read /proc/<pid>/stat; None: the process does not exist."""
    with suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        # The name, in parentheses, may itself contain blanks and parentheses.
        before, _, after = text.rpartition(")")
        fields = after.split()
        cpu_seconds = (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND
        name = before.partition("(")[2]
        return ProcessStat(pid, name, fields[0], int(fields[1]), cpu_seconds, int(fields[19]))
    return None


def start_ticks(pid: int) -> int | None:
    found = read_stat(pid)
    return None if found is None or found.is_gone else found.start_ticks


def age_seconds(pid: int) -> float:
    """Return the seconds since a process was started, to 0.01 s, or since boot if it is gone.

    The clock is CLOCK_BOOTTIME: changes of the system time do not affect it.
    """
    return max(0.0, boot_seconds() - (start_ticks(pid) or 0) / _TICKS_PER_SECOND)


def pid_namespace() -> str | None:
    """Return this process's boot id and pid namespace, within which pids identify processes.

    None: /proc cannot be read.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return None


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def cpu_flags() -> frozenset[str]:
    """Return an x86 processor's instruction-set flags from /proc/cpuinfo; empty elsewhere."""
    lines = list[str]()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = (line.partition(":")[2] for line in lines if line.startswith("flags"))
    return frozenset(next(flags, "").split())


def host_identity() -> dict[str, Any]:
    """Return this user and host: `uid`, `host`, and `machine`.

    `machine` tells hosts with the same name apart and survives a reboot. It is a hash, because
    machine-id(5) asks not to expose the id itself.
    """
    machine = ""
    with suppress(OSError):
        number = Path("/etc/machine-id").read_text(encoding="ascii").strip()
        machine = hashlib.sha256(f"longtake {number}".encode()).hexdigest()[:16]
    return {"uid": os.getuid(), "host": socket.gethostname(), "machine": machine}


# --- Memory that glibc has freed ------------------------------------------------------------------


# M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of <malloc.h>
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 * 2**20  # glibc refuses more
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed blocks up to 32 MiB, and return True if it accepts.

    Each training step frees blocks that the next one allocates again. By default glibc gives larger
    blocks back to the kernel, which then clears every page again: a third of the demo's step
    (`benchmarks/allocator.py`). Without glibc, or with MALLOC_* variables, nothing changes.
    """
    is_users_choice = any(name.startswith("MALLOC_") for name in os.environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if is_users_choice or mallopt is None:
        return False
    # Setting either switches off glibc's dynamic threshold, mallopt(3), so both are set.
    kept = mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD), mallopt(_TRIM_THRESHOLD, _NEVER)
    return all(kept)


def return_large_blocks(num_bytes: int) -> None:
    """Let glibc return freed blocks of at least `num_bytes` to the kernel at once, from now on."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_MMAP_THRESHOLD, num_bytes)


def return_freed_memory() -> None:
    """Return free heap memory to the kernel within milliseconds; does nothing without glibc."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)

"""By rsync: from another machine over ssh, or on this one."""

import os
import shlex
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import IO

from longtake.errors import RunError
from longtake.evaluation.sync.address import Address
from longtake.evaluation.sync.rules import Rules
from longtake.evaluation.sync.said import error_of, is_fine

_SECONDS_TO_CONNECT = 10
_SECONDS_WITHOUT_BYTES = 300
_SECONDS_OF_CONNECTION = 300
_LONGEST_SOCKET = 80  # of a path: Linux takes 107, and ssh adds to it while it connects
_ALWAYS = (
    "-rs",  # no shell there takes names apart
    "--partial-dir=.partial",  # of whichever folder a file lies in
    "--omit-dir-times",
    "--modify-window=-1",  # times differ that do by a nanosecond
    f"--timeout={_SECONDS_WITHOUT_BYTES}",
    "--exclude-from=-",
)


_NEWER = ("--update", "--times", "--prune-empty-dirs")


class Rsync:
    """Carries by rsync.

    One ssh connection is shared by all transfers, and kept between them.

    Args:
        address: on this machine or another.

    Raises:
        RunError: rsync is not installed here, or ssh, where it is needed.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._program = _needed("rsync", address)
        self._ssh = [_needed("ssh", address)] if address.host else []
        self._sockets = tempfile.mkdtemp(prefix="longtake-") if address.host else None
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._is_interrupted = False

    def fetch(self, folder: str, into: Path, rules: Rules, *, exactly: bool = False) -> None:
        """See `Transport.fetch`."""
        into.mkdir(parents=True, exist_ok=True)
        how = ["-L", *(["--delete"] if exactly else ["--update"])]  # the source's links' targets
        self._carry(
            [*how, "--times", "--prune-empty-dirs"],
            self._there(folder),
            f"{into}/",
            rules,
            fetches=True,
        )

    def send(self, folder: Path, to: str, rules: Rules, *, exactly: bool = False) -> None:
        """See `Transport.send`."""
        how = ["--no-links"]  # one could bring any file of this host there
        how += ["--delete", "--ignore-times"] if exactly else _NEWER
        self._carry(how, f"{folder}/", self._there(to), rules)

    def interrupt(self) -> None:
        """See `Transport.interrupt`; what was fetched in part is kept."""
        with self._lock:
            self._is_interrupted = True
            for process in self._running:
                process.terminate()

    def close(self) -> None:
        """See `Transport.close`."""
        if self._sockets is None:
            return
        if any(Path(self._sockets).glob("*")):
            host = self._address.host.replace("[", "").replace("]", "")
            command = [*self._ssh_words(), "-O", "exit", "--", host]
            subprocess.run(command, capture_output=True, check=False, timeout=30)  # noqa: S603 - ssh, by its path
        shutil.rmtree(self._sockets, ignore_errors=True)

    def _carry(
        self, how: list[str], source: str, target: str, rules: Rules, *, fetches: bool = False
    ) -> None:
        words = [self._program, *_ALWAYS, *how, "--", source, target]
        # What is said goes to a file: the connection that is kept would keep a pipe open.
        with tempfile.TemporaryFile() as told:
            process = self._start(words, told, fetches=fetches)
            status = self._finish(process, "".join(f"{rule}\n" for rule in rules).encode())
            told.seek(0)
            said = told.read().decode(errors="replace")
        if is_fine(status, said):
            return
        raise self._interrupted() if self._is_interrupted else error_of(self._address, status, said)

    def _start(
        self, words: list[str], told: IO[bytes], *, fetches: bool
    ) -> "subprocess.Popen[bytes]":
        """Start rsync so that `interrupt` ends it; or not at all, if that was called already."""
        with self._lock:
            if fetches and self._is_interrupted:
                raise self._interrupted()
            process = subprocess.Popen(  # noqa: S603 - rsync, by its path
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=told,
                env=self._env(),
            )
            self._running.add(process)
        return process

    def _finish(self, process: "subprocess.Popen[bytes]", rules: bytes) -> int:
        try:
            process.communicate(rules)
        finally:
            with self._lock:
                self._running.discard(process)
        return process.returncode

    def _env(self) -> dict[str, str]:
        return {**os.environ, "LC_ALL": "C", "RSYNC_RSH": shlex.join(self._ssh_words())}

    def _ssh_words(self) -> list[str]:
        """Ssh that asks nobody, and notices within 15 s that the other side is gone."""
        options = ["BatchMode=yes", f"ConnectTimeout={_SECONDS_TO_CONNECT}"]
        options += ["ServerAliveInterval=5", "ServerAliveCountMax=3"]
        socket = f"{self._sockets}/ssh"
        if len(socket) <= _LONGEST_SOCKET:
            options += ["ControlMaster=auto", f"ControlPath={socket}"]
            options += [f"ControlPersist={_SECONDS_OF_CONNECTION}"]
        return [*self._ssh, *(word for each in options for word in ("-o", each))]

    def _there(self, folder: str) -> str:
        top = self._address.for_rsync.removesuffix("/")
        return f"{top}/{folder}/" if folder else f"{top}/"

    def _interrupted(self) -> RunError:
        return RunError(f"{self._address.text}: copying was interrupted; it goes on next time.")


def is_installed() -> bool:
    """Whether there is an rsync on this machine."""
    return shutil.which("rsync") is not None


def _needed(program: str, address: Address) -> str:
    found = shutil.which(program)
    if found is None:
        raise RunError(f"--source {address.text} needs {program}, which is not installed here.")
    return found

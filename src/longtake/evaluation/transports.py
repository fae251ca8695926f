"""Copies files of runs between a source and its mirror by rsync, also over ssh; torch-free."""

import os
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from longtake.errors import RunError

_EXPECTED = (
    "Expected user@host:/path or host:/path (over ssh), or /path (a disk that is shared): a run, "
    "or a folder of runs."
)


@dataclass(frozen=True)
class Address:
    """Address of the folder in which runs are trained; `host` is empty for this machine."""

    text: str
    host: str
    path: str

    @property
    def for_rsync(self) -> str:
        return f"{self.host}:{self.path}" if self.host else self.path


def parse_address(text: str) -> Address:
    """Parse the value of --source: HOST:PATH or PATH, relative to the current folder.

    Raises:
        RunError: the text names no host and path, or is a URL.
    """
    if "://" in text:
        raise RunError(
            f"--source {text}: URLs are not read; runs are copied by rsync. {_EXPECTED} Mount the "
            "store (such as with rclone mount) and name the folder, or copy the runs here by "
            "another program and name that folder as RUN, without --source."
        )
    # An IPv6 address has brackets; without a colon it is a path.
    before, bracket, after = text.partition("]:")
    host, colon, path = text.partition(":")
    if bracket and "/" not in before:
        host, colon, path = f"{before}]", ":", after
    elif "/" in host:
        host, colon, path = "", "", text
    if colon and (not host or host.startswith("-") or not path or path.startswith(":")):
        raise RunError(f"--source {text}: this names no host and path. {_EXPECTED}")
    if not text.strip():
        raise RunError(f"--source is empty. {_EXPECTED}")
    if colon:
        return Address(text, host, path.rstrip("/") or "/")
    return Address(text, "", str(Path(text).expanduser().absolute()))


Rules = tuple[str, ...]
"""Filter rules of rsync, `+ PATTERN` and `- PATTERN`: the first that matches a path decides.

A pattern that begins with / is anchored at the top of the tree, another matches a name at any
depth; one that ends with / matches folders only. A folder that is left out is left out with all
that is in it. A path that no rule matches is copied.
"""


def literal(name: str) -> str:
    """Return the rsync pattern that matches exactly this name."""
    return re.sub(r"([*?\[])", r"\\\1", name)


def only(patterns: Iterable[str]) -> Rules:
    """Return rsync rules that copy only the given paths, with the folders that lead to them."""
    wanted: dict[str, None] = {}
    for pattern in patterns:
        parts = pattern.strip("/").split("/")
        ways = ["/" + "/".join(parts[:number]) + "/" for number in range(1, len(parts))]
        # rsync only descends into folders that a rule includes.
        wanted |= dict.fromkeys([*ways, pattern])
    return (*(f"+ {each}" for each in wanted), "- *")


class GoneError(RunError):
    """Raised if the files to copy from the source do not exist, or were deleted meanwhile."""


_CONNECT_SECONDS = 10
_SILENCE_SECONDS = 300
_KEPT_CONNECTION_SECONDS = 300
# Linux allows 107 letters in the path of a socket, and ssh appends some while it connects.
_MAX_SOCKET_LENGTH = 80
_OPTIONS = (
    "-rs",  # recursive; no remote shell splits names
    "--partial-dir=.partial",  # inside each file's folder
    "--omit-dir-times",
    "--modify-window=-1",  # compares nanoseconds
    f"--timeout={_SILENCE_SECONDS}",
    "--exclude-from=-",
)

_PARTIAL, _VANISHED = 23, 24  # exit codes of rsync
_NO_CONNECTION = (5, 10, 12, 30, 35, 255)  # 255 is ssh's
_DANGLING = "symlink has no referent"
_CONSEQUENCES = ("rsync error:", "rsync warning:", "Broken pipe", "unexpectedly closed")
_NOT_FOUND = ("No such file or directory", "vanished")
_KNOWN_CAUSES = (
    ("No space left on device", "a disk is full", "make room"),
    ("Disk quota exceeded", "a quota is used up", "make room"),
    ("Read-only file system", "a disk is read-only", "see what is wrong with it"),
    # rsync's message, before that of ssh, which begins with the same words.
    ("Permission denied (13)", "a file may not be read or written", "change its permissions"),
    ("Host key verification failed", "ssh does not know its host key", "connect once by hand"),
    ("IDENTIFICATION HAS CHANGED", "ssh knows another host key of it", "compare the keys"),
    (
        "Permission denied (",
        "ssh is not let in without a password",
        "put your public key into its ~/.ssh/authorized_keys",
    ),
    ("Could not resolve hostname", "there is no such host", "check its name"),
    ("rsync: command not found", "rsync is not installed there", "install it there"),
    ("rsync: not found", "rsync is not installed there", "install it there"),
    ("rsync: No such file", "rsync is not installed there", "install it there"),
)
"""Texts in the stderr of rsync and ssh, with what each means and what to do."""


class Rsync:
    """Copies folders of runs by rsync; a file at its final name is always whole.

    Folders at the source are named below the address, "" for the address itself. Files that exist
    with the same size and time are not copied again, and a partial file is completed. `GoneError`
    is raised if there is nothing to copy, and `RunError`, one sentence, for any other failure; both
    may be tried again. One ssh connection is shared by all transfers, and kept between them.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._program = _find_program("rsync", address)
        self._ssh = [_find_program("ssh", address)] if address.host else []
        self._sockets = tempfile.mkdtemp(prefix="longtake-") if address.host else None
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._is_interrupted = False

    def fetch(self, folder: str, into: Path, rules: Rules, *, exactly: bool = False) -> None:
        """Copy files that match the rules from a folder at the source to a local folder.

        With `exactly`, files that the source does not have are deleted; else newer files here stay.
        """
        into.mkdir(parents=True, exist_ok=True)
        how = ["-L", "--times", "--prune-empty-dirs"]  # -L: targets instead of links
        how += ["--delete" if exactly else "--update"]
        self._carry(how, self._there(folder), f"{into}/", rules, fetches=True)

    def send(self, folder: Path, to: str, rules: Rules, *, exactly: bool = False) -> None:
        """Copy files that match the rules from a local folder to a folder at the source.

        With `exactly`, all are written again with the current time, and files that are not here are
        deleted; else newer files there stay.
        """
        how = ["--no-links"]  # a link could send any file of this host
        how += (
            ["--delete", "--ignore-times"]
            if exactly
            else ["--update", "--times", "--prune-empty-dirs"]
        )
        self._carry(how, f"{folder}/", self._there(to), rules)

    def interrupt(self) -> None:
        """Stop the copying in other threads, and refuse to fetch from now on."""
        with self._lock:
            self._is_interrupted = True
            for process in self._running:
                process.terminate()

    def close(self) -> None:
        """Close the ssh connection that transfers share."""
        if self._sockets is None:
            return
        if any(Path(self._sockets).glob("*")):
            # rsync needs the brackets of an IPv6 address, and ssh knows none.
            host = self._address.host.replace("[", "").replace("]", "")
            # ssh keeps the shared connection in the background until it is told to end it.
            command = [*self._ssh_command(), "-O", "exit", "--", host]
            subprocess.run(command, capture_output=True, check=False, timeout=30)  # noqa: S603 - ssh, by its path
        shutil.rmtree(self._sockets, ignore_errors=True)

    def _carry(
        self, how: list[str], source: str, target: str, rules: Rules, *, fetches: bool = False
    ) -> None:
        command = [self._program, *_OPTIONS, *how, "--", source, target]
        # In English, since causes are recognised by words of the messages.
        environment = {"LC_ALL": "C", "RSYNC_RSH": shlex.join(self._ssh_command())}
        # stderr goes to a file: the ssh connection that is kept would keep a pipe open.
        with tempfile.TemporaryFile() as file:
            with self._lock:  # either `interrupt` sees the process, or it is not started
                if fetches and self._is_interrupted:
                    raise self._interrupted()
                process = subprocess.Popen(  # noqa: S603 - rsync, by its path
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=file,
                    env={**os.environ, **environment},
                )
                self._running.add(process)
            try:
                # Rules go to stdin, as there may be more than a command line can hold.
                process.communicate("".join(f"{rule}\n" for rule in rules).encode())
            finally:
                with self._lock:
                    self._running.discard(process)
            file.seek(0)
            stderr = file.read().decode(errors="replace")
        if not is_success(process.returncode, stderr):
            if self._is_interrupted:
                raise self._interrupted()
            raise rsync_error(self._address, process.returncode, stderr)

    def _ssh_command(self) -> list[str]:
        """Return an ssh command without questions; it notices a lost connection within 15 s."""
        options = ["BatchMode=yes", f"ConnectTimeout={_CONNECT_SECONDS}"]
        options += ["ServerAliveInterval=5", "ServerAliveCountMax=3"]
        socket = f"{self._sockets}/ssh"
        if len(socket) <= _MAX_SOCKET_LENGTH:
            options += ["ControlMaster=auto", f"ControlPath={socket}"]
            options += [f"ControlPersist={_KEPT_CONNECTION_SECONDS}"]
        return [*self._ssh, *(word for each in options for word in ("-o", each))]

    def _there(self, folder: str) -> str:
        top = self._address.for_rsync.removesuffix("/")
        return f"{top}/{folder}/" if folder else f"{top}/"

    def _interrupted(self) -> RunError:
        return RunError(f"{self._address.text}: copying was interrupted; it resumes next time.")


def is_success(status: int, stderr: str) -> bool:
    """Return whether rsync has copied all files that exist, by its status and stderr.

    A file that is deleted while it is listed may be missing, and so may the target of a link.
    """
    causes = _causes(stderr)
    only_links = bool(causes) and all(_DANGLING in line for line in causes)
    return status in (0, _VANISHED) or (status == _PARTIAL and only_links)


def rsync_error(address: Address, status: int, stderr: str) -> RunError:
    """Return the error to raise for a failed rsync, with its cause and the remedy."""
    causes = _causes(stderr)
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    last = (causes or lines or [f"rsync ended with status {status}"])[-1]
    for words, what, advice in _KNOWN_CAUSES:
        if at := next((line for line in causes if words in line), None):
            return RunError(f"{address.text}: {what} ({at}); {advice}.")
    # Only if nothing else is wrong: a file may be missing as a consequence.
    is_absent = [any(words in line for words in _NOT_FOUND) for line in causes]
    if status == _PARTIAL and causes and all(is_absent):
        return GoneError(f"{address.text}: there is no such file or folder ({causes[0]}).")
    if status in _NO_CONNECTION or not causes:
        by_hand = f"ssh -o BatchMode=yes {address.host} true" if address.host else "rsync by hand"
        return RunError(f"{address.text}: it cannot be reached ({last}); try {by_hand}.")
    return RunError(f"{address.text}: it could not be copied ({last}).")


def _causes(stderr: str) -> list[str]:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return [line for line in lines if not any(words in line for words in _CONSEQUENCES)]


def _find_program(program: str, address: Address) -> str:
    found = shutil.which(program)
    if found is None:
        raise RunError(
            f"--source {address.text} needs {program}, which is not installed here. Install it, "
            "such as with apt-get install rsync openssh-client."
        )
    return found

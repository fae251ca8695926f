"""Carries files between a source and its mirror: by rsync, or by fsspec; torch-free.

Which files are meant is said by ordered rules, of which the first that matches decides: a small
part of rsync's filter rules, so that rsync is given them as they are.
"""

import os
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from longtake.errors import RunError

_EXPECTED = (
    "Expected user@host:/path or host:/path (rsync over ssh), /path (a disk that is shared), or "
    "protocol://path (by fsspec, such as s3://bucket/runs): a run, or a folder of runs."
)


@dataclass(frozen=True)
class Address:
    """Where runs are trained."""

    text: str
    host: str
    path: str

    @property
    def is_url(self) -> bool:
        return "://" in self.path

    @property
    def for_rsync(self) -> str:
        return f"{self.host}:{self.path}" if self.host else self.path


def parse_address(text: str) -> Address:
    """Parse what was given after --source; a relative path is one of this folder."""
    if "://" in text:
        return Address(text, "", text.rstrip("/"))
    host, colon, path = _split(text)
    if colon and (not host or host.startswith("-") or not path or path.startswith(":")):
        raise RunError(f"--source {text}: this names no host and path. {_EXPECTED}")
    if not text.strip():
        raise RunError(f"--source is empty. {_EXPECTED}")
    if colon:
        return Address(text, host, path.rstrip("/") or "/")
    return Address(text, "", str(Path(text).expanduser().absolute()))


def _split(text: str) -> tuple[str, str, str]:
    """Host, colon and path; without a colon it is a path. An IPv6 address has brackets."""
    before, bracket, after = text.partition("]:")
    if bracket and "/" not in before:
        return f"{before}]", ":", after
    host, colon, path = text.partition(":")
    return (host, colon, path) if "/" not in host else ("", "", text)


Rules = tuple[str, ...]
r"""Which files of a tree are meant: `+ PATTERN` and `- PATTERN`; the first that matches decides.

A pattern that begins with / is anchored at the top of the tree, another matches a name at any
depth; one that ends with / matches folders only; * stands for any part of a name; `\` takes the
next character's meaning. A folder that is left out is left out with all that is in it. What no rule
matches is meant.
"""


def literal(name: str) -> str:
    return re.sub(r"([*?\[])", r"\\\1", name)


def chosen(rules: Rules, name: str, *, is_folder: bool) -> bool:
    first = next((rule for rule in rules if _matches(rule[2:], name, is_folder)), "+ ")
    return first.startswith("+")


def only(patterns: Iterable[str]) -> Rules:
    """Rules by which nothing but some paths is meant; with the folders on the way to them."""
    wanted: dict[str, None] = {}
    for pattern in patterns:
        parts = pattern.strip("/").split("/")
        ways = ["/" + "/".join(parts[:number]) + "/" for number in range(1, len(parts))]
        wanted |= dict.fromkeys([*ways, pattern])
    return (*(f"+ {each}" for each in wanted), "- *")


def _matches(pattern: str, name: str, is_folder: bool) -> bool:
    if pattern.endswith("/") and not is_folder:
        return False
    compared = name if pattern.startswith("/") else name.rpartition("/")[2]
    parts, wild = re.findall(r"\\.|.", pattern.strip("/"), re.DOTALL), {"*": "[^/]*", "?": "[^/]"}
    expression = "".join(wild.get(part, re.escape(part[-1])) for part in parts)
    return re.fullmatch(expression, compared, re.DOTALL) is not None


class GoneError(RunError):
    """What was to be carried is not there, or was deleted meanwhile."""


class Transport(Protocol):
    """Carries trees of files; a file at its final name is always whole, or a beginning of it.

    Folders at the source are named below the address, "" for the address itself. What is there
    already, with the same size and time, is not carried again; a partial file is completed. All
    raise `GoneError` if there is nothing to carry, and `RunError`, one sentence, for any other
    failure; both may be tried again.
    """

    def fetch(self, folder: str, into: Path, rules: Rules, *, exactly: bool = False) -> None:
        """Bring the files of a folder at the source that the rules mean into one here.

        `exactly`: delete what the rules mean and the source does not have. Else what is newer here
        stays.
        """

    def send(self, folder: Path, to: str, rules: Rules, *, exactly: bool = False) -> None:
        """Bring the files of a folder here that the rules mean to one at the source.

        `exactly`: write all of them anew, with the time of writing, and delete what the rules mean
        and is not here. Else what is newer there stays.
        """

    def interrupt(self) -> None:
        """End what another thread fetches; nothing is fetched any more."""

    def close(self) -> None:
        """Close connections."""


_CONNECT_SECONDS = 10
_SILENCE_SECONDS = 300
_KEPT_CONNECTION_SECONDS = 300
_MAX_SOCKET_LENGTH = 80  # of a path: Linux takes 107, and ssh adds to it while it connects
_OPTIONS = (
    "-rs",  # no shell there splits names
    "--partial-dir=.partial",  # in the folder of each file
    "--omit-dir-times",
    "--modify-window=-1",  # compares nanoseconds
    f"--timeout={_SILENCE_SECONDS}",
    "--exclude-from=-",
)
_IF_NEWER = ("--update", "--times", "--prune-empty-dirs")

_PARTIAL, _VANISHED = 23, 24  # exit codes of rsync
_NO_CONNECTION = (5, 10, 12, 30, 35, 255)  # 255 is ssh's
_DANGLING = "symlink has no referent"
_CONSEQUENCES = ("rsync error:", "rsync warning:", "Broken pipe", "unexpectedly closed")
_NOT_FOUND = ("No such file or directory", "vanished")
_KNOWN_CAUSES = (
    ("No space left on device", "a disk is full", "make room"),
    ("Disk quota exceeded", "a quota is used up", "make room"),
    ("Read-only file system", "a disk is read-only", "see what is wrong with it"),
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
"""In what rsync and ssh write to stderr: what it means, and what to do."""


class Rsync:
    """Carries by rsync, over ssh or on this machine.

    One ssh connection is shared by all transfers, and kept between them.
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
        into.mkdir(parents=True, exist_ok=True)
        how = ["-L", "--times", "--prune-empty-dirs"]  # the targets of the source's links
        how += ["--delete" if exactly else "--update"]
        self._carry(how, self._there(folder), f"{into}/", rules, fetches=True)

    def send(self, folder: Path, to: str, rules: Rules, *, exactly: bool = False) -> None:
        how = ["--no-links"]  # one could bring any file of this host there
        how += ["--delete", "--ignore-times"] if exactly else _IF_NEWER
        self._carry(how, f"{folder}/", self._there(to), rules)

    def interrupt(self) -> None:
        with self._lock:
            self._is_interrupted = True
            for process in self._running:
                process.terminate()

    def close(self) -> None:
        if self._sockets is None:
            return
        if any(Path(self._sockets).glob("*")):
            host = self._address.host.replace("[", "").replace("]", "")
            command = [*self._ssh_command(), "-O", "exit", "--", host]
            subprocess.run(command, capture_output=True, check=False, timeout=30)  # noqa: S603 - ssh, by its path
        shutil.rmtree(self._sockets, ignore_errors=True)

    def _carry(
        self, how: list[str], source: str, target: str, rules: Rules, *, fetches: bool = False
    ) -> None:
        command = [self._program, *_OPTIONS, *how, "--", source, target]
        environment = {"LC_ALL": "C", "RSYNC_RSH": shlex.join(self._ssh_command())}
        # stderr goes to a file: the connection that is kept would keep a pipe open.
        with tempfile.TemporaryFile() as file:
            with self._lock:  # so that `interrupt` ends it, or it is not started
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
        """Ssh that asks no questions, and notices within 15 s that the other side is gone."""
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
    """Whether rsync has brought all that there is.

    A file that is deleted while it is listed is not missed, nor the target of a link to nothing.
    """
    causes = _causes(stderr)
    only_links = bool(causes) and all(_DANGLING in line for line in causes)
    return status in (0, _VANISHED) or (status == _PARTIAL and only_links)


def rsync_error(address: Address, status: int, stderr: str) -> RunError:
    """A failed rsync as an error that names the cause and what to do."""
    causes = _causes(stderr)
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    last = (causes or lines or [f"rsync ended with status {status}"])[-1]
    for words, what, advice in _KNOWN_CAUSES:
        if at := next((line for line in causes if words in line), None):
            return RunError(f"{address.text}: {what} ({at}); {advice}.")
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
        raise RunError(f"--source {address.text} needs {program}, which is not installed here.")
    return found


_CHUNK = 8 * 2**20
_SMALL = 2**20  # below it, a file whose time is not known is read again
_INSTANT = 1e-3
_TIMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")
_APPENDED = ".jsonl"
_DIRECTORY = "directory"


@dataclass(frozen=True)
class _There:
    """A file of the store."""

    name: str  # below the folder
    path: str
    bytes: int
    time: float | None  # None: unknown


class FsspecTransport:
    """Carries by fsspec: from any store that it knows, and from a folder here without rsync.

    A store that needs a package of its own (s3fs, gcsfs, adlfs, ...) says which. A file that is
    here already is known by its size and, if the store has it, its modification time.
    """

    def __init__(self, address: Address) -> None:
        import fsspec

        self._address = address
        try:
            self._store, self._top = fsspec.core.url_to_fs(address.path, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise RunError(f"--source {address.text} cannot be read: {error}.") from error
        self._renames = type(self._store).mv is not fsspec.AbstractFileSystem.mv
        self._is_interrupted = threading.Event()

    def fetch(self, folder: str, into: Path, rules: Rules, *, exactly: bool = False) -> None:
        into.mkdir(parents=True, exist_ok=True)
        with self._explained():
            found = list(self._files(self._join(folder), rules))
            for there in found:
                if not _is_here(there, into / there.name, exactly=exactly):
                    self._bring(there, into / there.name)
        if exactly:
            names = {there.name for there in found}
            for name in [each for each in names_in(into, rules) if each not in names]:
                (into / name).unlink(missing_ok=True)

    def send(self, folder: Path, to: str, rules: Rules, *, exactly: bool = False) -> None:
        top = self._join(to)
        names = list(names_in(folder, rules))
        with self._explained():
            self._store.makedirs(top, exist_ok=True)
            there = {each.name: each for each in self._files(top, rules)}
            for name in names:
                if exactly or not _is_there(there.get(name), folder / name):
                    self._put(folder / name, f"{top}/{name}")
            for name in there.keys() - set(names) if exactly else ():
                self._store.rm_file(there[name].path)

    def interrupt(self) -> None:
        self._is_interrupted.set()

    def close(self) -> None:
        pass

    def _files(self, top: str, rules: Rules, below: str = "") -> Iterator[_There]:
        """Files that the rules mean; folders that they do not mean are not listed."""
        for about in self._store.ls(f"{top}/{below}".rstrip("/"), detail=True):
            last = about["name"].rstrip("/").rpartition("/")[2]
            if last in ("", ".", "..") or "\0" in last:
                raise RunError(
                    f"{self._address.text}: {about['name']!r} is no name of a file that can be "
                    "mirrored. Rename or remove it there."
                )
            name = f"{below}{last}"
            is_folder = about["type"] == _DIRECTORY
            if not chosen(rules, name, is_folder=is_folder):
                continue
            if is_folder:
                yield from self._files(top, rules, f"{name}/")
            else:
                yield _There(name, about["name"], about["size"] or 0, _time(about))

    def _bring(self, there: _There, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{there.bytes}-{there.time or 0:.3f}.partial")
        if path.suffix == _APPENDED and path.exists() and path.stat().st_size < there.bytes:
            aside = path  # such files only grow: what is here is their beginning
        self._copy(there, aside)
        if there.time is not None:
            os.utime(aside, (there.time, there.time))
        aside.replace(path)

    def _copy(self, there: _There, path: Path) -> None:
        """Append what is missing."""
        with self._store.open(there.path, "rb") as source, path.open("ab") as target:
            source.seek(target.tell())
            while target.tell() < there.bytes:
                if self._is_interrupted.is_set():
                    raise RunError(f"{self._address.text}: copying was interrupted.")
                piece = source.read(min(_CHUNK, there.bytes - target.tell()))
                if not piece:
                    raise FileNotFoundError(there.path)  # replaced by a shorter one
                target.write(piece)

    def _put(self, path: Path, to: str) -> None:
        """Send a file as a whole: where the store can rename files, under a hidden name first."""
        folder, _, name = to.rpartition("/")
        self._store.makedirs(folder, exist_ok=True)
        if not self._renames:  # what keeps objects shows none before it has all of it
            self._store.put_file(str(path), to)
            return
        aside = f"{folder}/.{name}.partial"
        self._store.put_file(str(path), aside)
        self._store.mv(aside, to)

    def _join(self, folder: str) -> str:
        return f"{self._top.rstrip('/')}/{folder}".rstrip("/")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what stores raise, each its own, into errors of ours."""
        try:
            yield
        except RunError:
            raise
        except FileNotFoundError as error:
            raise GoneError(
                f"{self._address.text}: there is no {error.filename or error}."
            ) from error
        except Exception as error:
            said = str(error).strip().splitlines() or [type(error).__name__]
            raise RunError(f"{self._address.text}: it could not be copied ({said[-1]}).") from error


def names_in(top: Path, rules: Rules) -> Iterator[str]:
    """Files here that the rules mean."""
    for folder, folders, names in os.walk(top):

        def below(name: str, folder: str = folder) -> str:
            return (Path(folder) / name).relative_to(top).as_posix()

        folders[:] = [name for name in folders if chosen(rules, below(name), is_folder=True)]
        for name in names:  # a link could bring any file of this host there
            is_link = (Path(folder) / name).is_symlink()
            if not is_link and chosen(rules, below(name), is_folder=False):
                yield below(name)


def _is_here(there: _There, path: Path, *, exactly: bool) -> bool:
    """Whether a file is here as it is there; or, unless it must be that one, newer."""
    if not path.exists():
        return False
    bytes_here, time = path.stat().st_size, path.stat().st_mtime
    if there.time is None:
        return bytes_here == there.bytes and bytes_here > _SMALL
    if not exactly and time > there.time + _INSTANT:
        return True
    return bytes_here == there.bytes and abs(time - there.time) < _INSTANT


def _is_there(there: _There | None, path: Path) -> bool:
    if there is None or there.bytes != path.stat().st_size:
        return False
    return there.time is None or there.time > path.stat().st_mtime - _INSTANT


def _time(about: dict[str, Any]) -> float | None:
    """When the store says that a file was last changed, in seconds since 1970."""
    found = next((about[key] for key in _TIMES if about.get(key) is not None), None)
    if isinstance(found, str):
        found = datetime.fromisoformat(found)
    return found.timestamp() if isinstance(found, datetime) else found

"""Hosts that are up: what can be done on them, and to them."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from longtake.drill.hosts.tools import NAMESPACES, needed
from longtake.drill.hosts.wiring import BRIDGE, SWITCH, cable, private_places
from longtake.errors import RunError

_INIT = "echo ready; sleep infinity & while :; do wait; done"  # wait reaps whoever was orphaned


@dataclass(frozen=True)
class _Init:
    """The first process of new namespaces.

    Attributes:
        unshare: the process that made them, with which all in them ends.
        pid: of process 1, as it is called outside.
    """

    unshare: "subprocess.Popen[bytes]"
    pid: int


@dataclass
class Cluster:
    """Hosts on a switch.

    Attributes:
        folder: where their keys and files are.
        addresses: by host, whether it is up or not.
    """

    folder: Path
    addresses: dict[str, str]
    _inits: dict[str, _Init] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The hosts."""
        return list(self.addresses)

    def command(self, host: str, argv: Sequence[str], cwd: Path | None = None) -> list[str]:
        """What to run outside so that a command runs on a host, as root, in `cwd`."""
        inside = ["--target", str(self._inits[host].pid), "--net"]
        # From the switch cables are laid, to processes by their ids out here.
        inside += ["--uts", "--mount", "--pid"] if host != SWITCH else []
        return [needed("nsenter"), *inside, f"--wd={cwd or self.folder}", "--", *argv]

    def run(
        self,
        host: str,
        argv: Sequence[str],
        timeout: float = 60,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command on a host to its end; `env` comes on top of this process's."""
        return subprocess.run(  # noqa: S603 - ours, or the caller's
            self.command(host, argv, cwd),
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def start(
        self,
        host: str,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        log: Path | None = None,
    ) -> "subprocess.Popen[str]":
        """Start a command on a host; it is killed with the host at the latest.

        What it says is appended to `log`, or comes through pipes where there is none.
        """
        command, environment = self.command(host, argv, cwd), {**os.environ, **(env or {})}
        if log is None:
            pipe = subprocess.PIPE
            return subprocess.Popen(  # noqa: S603 - ours, or the caller's
                command, env=environment, stdout=pipe, stderr=pipe, text=True
            )
        with log.open("ab") as file:
            return subprocess.Popen(  # noqa: S603 - likewise
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                text=True,
                start_new_session=True,  # so that Ctrl-C reaches this process alone
            )

    def own(self, host: str, place: Path) -> Path:
        """Let a host see a folder of its own at a path that is there; returns where it really is.

        It is empty at first.
        """
        real = self.folder / "own" / host / str(place.absolute()).strip("/").replace("/", "_")
        real.mkdir(parents=True)
        self.must(host, "mount", "--bind", str(real), str(place))
        return real

    def unplug(self, host: str) -> None:
        """Pull a host's cable."""
        self.must(SWITCH, "ip", "link", "set", self._port(host), "down")

    def plug(self, host: str) -> None:
        """Put it back."""
        self.must(SWITCH, "ip", "link", "set", self._port(host), "up")

    def limit(self, host: str, rate: str) -> None:
        """Let a host's cable carry no more than a rate (such as `8mbit`), in both directions."""
        limits = ("root", "tbf", "rate", rate, "burst", "16kb", "latency", "100ms")
        self.must(SWITCH, "tc", "qdisc", "replace", "dev", self._port(host), *limits)
        self.must(host, "tc", "qdisc", "replace", "dev", "eth0", *limits)

    def unlimit(self, host: str) -> None:
        """Let it carry what it can again."""
        self.must(SWITCH, "tc", "qdisc", "del", "dev", self._port(host), "root")
        self.must(host, "tc", "qdisc", "del", "dev", "eth0", "root")

    def kill(self, host: str) -> None:
        """End all processes of a host at once; its network and its mounts go with them."""
        init = self._inits.pop(host)
        with suppress(ProcessLookupError):
            os.kill(init.pid, signal.SIGKILL)
        init.unshare.wait()  # which ends when all are gone

    def boot(self, host: str) -> None:
        """Start a host, or start it again after it was killed."""
        init = self._inits[host] = _begin()
        if host == SWITCH:
            for command in BRIDGE:
                self.must(SWITCH, *command)
            return
        port = self._port(host)
        with suppress(RunError):  # of a host that was killed the kernel removes it, in a while
            self.must(SWITCH, "ip", "link", "del", port)
        for command in cable(port, init.pid):
            self.must(SWITCH, *command)
        self.must(host, *private_places(self.folder, host, self.addresses[host]))

    def close(self) -> None:
        """End all of them."""
        for host in list(self._inits):
            self.kill(host)

    def must(self, host: str, *argv: str) -> None:
        """Run a command on a host, as it has to go well.

        Raises:
            RunError: it did not.
        """
        done = self.run(host, argv, cwd=Path("/"))
        if done.returncode:
            raise RunError(f"{' '.join(argv)} failed on the host {host}: {done.stderr.strip()}")

    def _port(self, host: str) -> str:
        return f"port{self.names.index(host)}"


def _begin() -> _Init:
    """Make new namespaces.

    Raises:
        RunError: that is not allowed.
    """
    # Each dies with its parent: the shell with unshare, and unshare with this process.
    dying = [needed("setpriv"), "--pdeathsig", "KILL", needed("unshare"), "--kill-child"]
    command = [*dying, *NAMESPACES, "sh", "-c", _INIT]
    unshare = subprocess.Popen(  # noqa: S603 - the system's
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # it complains when it is killed
    )
    assert unshare.stdout is not None
    with suppress(OSError), unshare.stdout:
        if unshare.stdout.readline() == b"ready\n":
            children = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children").read_text()
            return _Init(unshare, int(children.split()[0]))
    unshare.kill()
    unshare.wait()
    raise RunError("Namespaces could not be made: ask why_not() first.")

"""Several hosts on one machine: network namespaces joined by a bridge.

    if reason := why_not():
        ...                                                   # this machine does not allow it
    with hosts(2, folder) as cluster:
        cluster.run("node0", ["ping", "-c", "1", "node1"])
        cluster.own("node1", folder / "data")           # a folder that only node1 sees there
        cluster.unplug("node1")

Each host has its own host name, network, processes (process 1 is a shell that reaps), mounts,
/etc/hosts, /dev/shm and /run; disks, clock and cores are this machine's. They reach a server of
this process that accepts on a socket of `Cluster.listen`. With ssh, each has an sshd and a key of
`folder` that the others accept. Pids inside a host are not those outside.

A host is one process tree that dies with this process, and its namespaces with it.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from longtake.errors import RunError

SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"

_NAMESPACES = ("--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc")
_TOOLS = ("ip", "tc", "unshare", "nsenter", "mount", "setpriv", "taskset", "env")
_SSH_TOOLS = ("ssh", "sshd", "ssh-keygen")
_NETWORK = "10.77.0."
_SWITCH = "switch"  # the host with the bridge to which all links go
_SWITCH_ADDRESS = f"{_NETWORK}1"
_SSHD_SECONDS = 120.0
_INIT = "echo ready; sleep infinity & while :; do wait; done"  # wait reaps orphans
_BRIDGE: tuple[tuple[str, ...], ...] = (
    ("ip", "link", "add", "bridge", "type", "bridge"),
    ("ip", "link", "set", "bridge", "up"),
    ("ip", "address", "add", f"{_SWITCH_ADDRESS}/24", "dev", "bridge"),
)
_HOST_SCRIPT = """
set -e
mount -t sysfs none /sys
mount -t tmpfs -o size=2g none /dev/shm
mount -t tmpfs -o size=64m none /run
mount --bind {folder}/hosts /etc/hosts
hostname {host}
ip link set lo up
ip link set eth0 up
ip address add {address}/24 dev eth0
"""
_SSHD = """
Port 22
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
UseDNS no
MaxStartups 100
"""
_SSH = """
Host *
    IdentityFile {folder}/key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile /dev/null
"""


def why_not(*, with_ssh: bool = False) -> str | None:
    """Why this machine cannot have hosts; None if it can."""
    if os.geteuid() != 0:
        return "hosts as network namespaces need root"
    tools = (*_TOOLS, *_SSH_TOOLS) if with_ssh else _TOOLS
    if missing := [tool for tool in tools if _find(tool) is None]:
        return (
            f"hosts as network namespaces need {', '.join(missing)} (of iproute2, util-linux "
            "and openssh)"
        )
    command = [_needed("unshare"), *_NAMESPACES, "true"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        return "this machine does not let namespaces be made (a container without CAP_SYS_ADMIN?)"
    return None


@dataclass(frozen=True)
class _Init:
    """The first process of new namespaces."""

    unshare: "subprocess.Popen[bytes]"  # with which all processes of the namespaces end
    pid: int  # of process 1, as seen outside


@dataclass
class Cluster:
    """Hosts on a switch."""

    folder: Path  # of their keys and files
    addresses: dict[str, str]  # by host, whether it is up or not
    _inits: dict[str, _Init] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return list(self.addresses)

    def command(self, host: str, argv: Sequence[str], cwd: Path | None = None) -> list[str]:
        """The command that runs another on a host, as root, in `cwd`."""
        inside = ["--target", str(self._inits[host].pid), "--net"]
        # Links are made from the switch to processes by their pids outside.
        inside += ["--uts", "--mount", "--pid"] if host != _SWITCH else []
        # nsenter's own --wd is opened before, on a mount of this process: relative and absolute
        # paths would then be on two mounts, between which nothing can be renamed.
        change = [_needed("env"), f"--chdir={cwd or self.folder}", "--"]
        return [_needed("nsenter"), *inside, "--", *change, *argv]

    def run(
        self,
        host: str,
        argv: Sequence[str],
        timeout: float = 240,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command on a host to its end; `env` is added to this process's."""
        return subprocess.run(
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
        """Start a command on a host; output is appended to `log`, or read through pipes."""
        command, environment = self.command(host, argv, cwd), {**os.environ, **(env or {})}
        if log is None:
            pipe = subprocess.PIPE
            return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)
        with log.open("ab") as file:
            return subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                text=True,
                start_new_session=True,  # so that Ctrl-C reaches this process alone
            )

    def own(self, host: str, path: Path) -> Path:
        """Mount an empty folder of the host's own at a path; returns where it really is."""
        real = self.folder / "own" / host / str(path.absolute()).strip("/").replace("/", "_")
        real.mkdir(parents=True)
        self.must(host, "mount", "--bind", str(real), str(path))
        return real

    def unplug(self, host: str) -> None:
        self.must(_SWITCH, "ip", "link", "set", self._port(host), "down")

    def plug(self, host: str) -> None:
        self.must(_SWITCH, "ip", "link", "set", self._port(host), "up")

    def limit(self, host: str, rate: str) -> None:
        """Limit a host's link to a rate (such as `8mbit`) in both directions."""
        limits = ("root", "tbf", "rate", rate, "burst", "16kb", "latency", "100ms")
        self.must(_SWITCH, "tc", "qdisc", "replace", "dev", self._port(host), *limits)
        self.must(host, "tc", "qdisc", "replace", "dev", "eth0", *limits)

    def unlimit(self, host: str) -> None:
        self.must(_SWITCH, "tc", "qdisc", "del", "dev", self._port(host), "root")
        self.must(host, "tc", "qdisc", "del", "dev", "eth0", "root")

    def kill(self, host: str) -> None:
        """End all processes of a host at once; its network and mounts go with them."""
        init = self._inits.pop(host)
        with suppress(ProcessLookupError):
            os.kill(init.pid, signal.SIGKILL)
        init.unshare.wait()  # ends when all are gone

    def boot(self, host: str) -> None:
        """Start a host, or start it again after it was killed."""
        init = self._inits[host] = _make_namespaces()
        if host == _SWITCH:
            for command in _BRIDGE:
                self.must(_SWITCH, *command)
            return
        port = self._port(host)
        with suppress(RunError):  # the kernel removes the link of a killed host after a while
            self.must(_SWITCH, "ip", "link", "del", port)
        peer = ("type", "veth", "peer", "name", "eth0", "netns", str(init.pid))
        self.must(_SWITCH, "ip", "link", "add", port, *peer)
        self.must(_SWITCH, "ip", "link", "set", port, "master", "bridge", "up")
        script = _HOST_SCRIPT.format(folder=self.folder, host=host, address=self.addresses[host])
        self.must(host, "sh", "-c", script)

    def close(self) -> None:
        for host in list(self._inits):
            self.kill(host)

    def must(self, host: str, *argv: str) -> None:
        """Run a command on a host; RunError if it fails."""
        done = self.run(host, argv, cwd=Path("/"))
        if done.returncode:
            raise RunError(f"{' '.join(argv)} failed on the host {host}: {done.stderr.strip()}")

    def _port(self, host: str) -> str:
        return f"port{self.names.index(host)}"


@contextmanager
def hosts(count: int, folder: Path, *, with_ssh: bool = False) -> Iterator[Cluster]:
    """Start at most 200 hosts node0, node1, ...; they end with the block.

    All see `folder`, with their keys and files, at its path. One that is booted again has no sshd.
    """
    folder = folder.absolute() / "cluster"
    folder.mkdir(parents=True)
    names = [f"node{number}" for number in range(count)]
    cluster = Cluster(folder, {each: f"{_NETWORK}{at + 10}" for at, each in enumerate(names)})
    lines = [f"{address} {host}" for host, address in cluster.addresses.items()]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    try:
        for each in (_SWITCH, *names):
            cluster.boot(each)
        if with_ssh:
            _write_keys(cluster)
            for each in names:
                _start_sshd(cluster, each)
            for each in names:
                _wait_for_sshd(cluster, each)
        yield cluster
    finally:
        cluster.close()


def _make_namespaces() -> _Init:
    # Each dies with its parent: the shell with unshare, and unshare with this process.
    dying = [_needed("setpriv"), "--pdeathsig", "KILL", _needed("unshare"), "--kill-child"]
    unshare = subprocess.Popen(
        [*dying, *_NAMESPACES, "sh", "-c", _INIT],
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


def _write_keys(cluster: Cluster) -> None:
    folder = cluster.folder
    for name in ("key", "host_key"):
        make = [_needed("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(make, check=True)
    (folder / "ssh_config").write_text(_SSH.format(folder=folder))
    key = (folder / "host_key.pub").read_text().strip()
    known = [f"{host},{address} {key}\n" for host, address in cluster.addresses.items()]
    (folder / "known_hosts").write_text("".join(known))


def _start_sshd(cluster: Cluster, host: str) -> None:
    settings = cluster.folder / f"sshd_{host}"
    settings.write_text(_SSHD.format(folder=cluster.folder, address=cluster.addresses[host]))
    cluster.must(host, "mkdir", "/run/sshd")
    ours = str(cluster.folder / "ssh_config")
    cluster.must(host, "mount", "--bind", ours, "/etc/ssh/ssh_config")
    cluster.must(host, _needed("sshd"), "-f", str(settings), "-E", f"{settings}.log")


def _wait_for_sshd(cluster: Cluster, host: str) -> None:
    end = time.monotonic() + _SSHD_SECONDS
    while (done := cluster.run(host, ["ssh", "-o", "BatchMode=yes", host, "true"])).returncode:
        if time.monotonic() > end:
            raise RunError(f"The sshd of {host} does not answer: {done.stderr.strip()}")
        time.sleep(0.1)


def _needed(name: str) -> str:
    found = _find(name)
    if found is None:
        raise RunError(f"Hosts as network namespaces need {name}, which is not installed.")
    return found


def _find(name: str) -> str | None:
    """Where a program is; root's are often on no user's path."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}")

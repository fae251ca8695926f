"""Several "hosts" on one machine: network namespaces on a bridge, each with an sshd of its own.

    if reason := why_not():
        pytest.skip(reason)
    with hosts(2, tmp_path) as cluster:
        cluster.run("node0", ["ssh", "node1", "hostname"])   # node1
        cluster.own("node1", tmp_path / "data")               # a folder that only node1 sees there
        cluster.unplug("node1")

Each host has its own host name, network, processes (its process 1 is a shell that reaps), mounts,
/etc/hosts, /dev/shm and /run; disks, clock and cores are this machine's. All names resolve on all
of them, and ssh between them needs neither a password nor a known_hosts file of the user's: keys
are made in `folder`. Process ids that are written inside a host are not those outside.

Nothing is left when the block ends, and next to nothing when Python is killed: each host is one
process tree that dies with this process, and its namespaces go with it.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_NETWORK = "10.77.0."
_TOOLS = ("ip", "unshare", "nsenter", "mount", "ssh", "sshd", "ssh-keygen", "setpriv")
_SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"
_NAMESPACES = ("--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc")
_SECONDS_TO_START = 10.0
_INIT = "echo ready; sleep infinity & while :; do wait; done"  # wait reaps whoever was orphaned
_PRIVATE_PLACES = """
set -e
mount -t sysfs none /sys
mount -t tmpfs -o size=2g none /dev/shm
mount -t tmpfs -o size=64m none /run
mkdir /run/sshd
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/ssh_config /etc/ssh/ssh_config
hostname {name}
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


def why_not() -> str | None:
    """Why hosts cannot be made here, or None if they can."""
    if os.geteuid() != 0:
        return "hosts as namespaces need root"
    if missing := [tool for tool in _TOOLS if _program(tool) is None]:
        return f"hosts as namespaces need {', '.join(missing)} (iproute2, util-linux, openssh)"
    command = [_needed("unshare"), *_NAMESPACES, "true"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        return "this machine does not let namespaces be made (a container without CAP_SYS_ADMIN?)"
    return None


@dataclass
class Cluster:
    """Hosts that are up.

    Attributes:
        folder: where their keys and files are.
        addresses: by host.
    """

    folder: Path
    addresses: dict[str, str]
    _inits: dict[str, int] = field(default_factory=dict)
    """Process 1 of each host, as it is called outside; `switch` has the bridge."""

    @property
    def names(self) -> list[str]:
        """The hosts."""
        return list(self.addresses)

    def command(self, host: str, argv: Sequence[str], cwd: Path | None = None) -> list[str]:
        """What to run outside so that a command runs on a host, as root, in `cwd`."""
        inside = ["--target", str(self._inits[host]), "--net"]
        # From the switch cables are laid, to processes by their ids out here.
        inside += ["--uts", "--mount", "--pid"] if host != "switch" else []
        return [_needed("nsenter"), *inside, f"--wd={cwd or self.folder}", "--", *argv]

    def run(
        self,
        host: str,
        argv: Sequence[str],
        timeout: float = 60,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command on a host to its end; `env` comes on top of this process's."""
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
    ) -> "subprocess.Popen[str]":
        """Start a command on a host; it is killed with the host at the latest."""
        return subprocess.Popen(
            self.command(host, argv, cwd),
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def own(self, host: str, place: Path) -> Path:
        """Let a host see a folder of its own at a path that is there; returns where it really is.

        It is empty at first.
        """
        real = self.folder / "own" / host / str(place.absolute()).strip("/").replace("/", "_")
        real.mkdir(parents=True)
        self._inside(host, ["mount", "--bind", str(real), str(place)])
        return real

    def unplug(self, host: str) -> None:
        """Pull a host's cable."""
        self._inside("switch", ["ip", "link", "set", f"port{self.names.index(host)}", "down"])

    def plug(self, host: str) -> None:
        """Put it back."""
        self._inside("switch", ["ip", "link", "set", f"port{self.names.index(host)}", "up"])

    def kill(self, host: str) -> None:
        """End all processes of a host at once, as when its power fails."""
        os.kill(self._inits[host], 9)

    def _inside(self, host: str, argv: Sequence[str]) -> None:
        done = self.run(host, argv, cwd=Path("/"))
        assert done.returncode == 0, f"{host}: {' '.join(argv)}: {done.stderr}"


@contextmanager
def hosts(count: int, folder: Path, name: str = "node") -> Iterator[Cluster]:
    """Bring up some hosts, called node0, node1, ..., until the block ends.

    Args:
        count: how many; at most 200.
        folder: for their keys and files; all hosts see it, at the same path.
        name: what their names begin with.
    """
    place = folder.absolute() / "cluster"
    place.mkdir(parents=True)
    names = [f"{name}{number}" for number in range(count)]
    addresses = {each: f"{_NETWORK}{number + 10}" for number, each in enumerate(names)}
    cluster = Cluster(place, addresses)
    _write_files(cluster)
    with ExitStack() as held:
        cluster._inits["switch"] = held.enter_context(_init())
        cluster._inside("switch", ["ip", "link", "add", "bridge", "type", "bridge"])
        cluster._inside("switch", ["ip", "link", "set", "bridge", "up"])
        for number, each in enumerate(names):
            cluster._inits[each] = held.enter_context(_init())
            _wire(cluster, each, f"port{number}")
        for each in names:
            _await_sshd(cluster, each)
        yield cluster


@contextmanager
def _init() -> Iterator[int]:
    """The first process of new namespaces, by its id here; all in them ends with it."""
    # Each dies with its parent: the shell with unshare, and unshare with this process.
    dying = [_needed("setpriv"), "--pdeathsig", "KILL", _needed("unshare"), "--kill-child"]
    command = [*dying, *_NAMESPACES, "sh", "-c", _INIT]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"ready\n", "namespaces could not be made"
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            yield int(children.split()[0])
        finally:
            process.kill()


def _wire(cluster: Cluster, host: str, port: str) -> None:
    """Lay a cable from a host to the switch, and start its sshd."""
    there = str(cluster._inits[host])
    pair = ["type", "veth", "peer", "name", "eth0", "netns", there]
    cluster._inside("switch", ["ip", "link", "add", port, *pair])
    cluster._inside("switch", ["ip", "link", "set", port, "master", "bridge", "up"])
    facts = {"folder": cluster.folder, "name": host, "address": cluster.addresses[host]}
    cluster._inside(host, ["sh", "-c", _PRIVATE_PLACES.format(**facts)])
    settings = cluster.folder / f"sshd_{host}"
    settings.write_text(_SSHD.format(**facts))
    cluster._inside(host, [_needed("sshd"), "-f", str(settings), "-E", f"{settings}.log"])


def _await_sshd(cluster: Cluster, host: str) -> None:
    end = time.monotonic() + _SECONDS_TO_START
    while (done := cluster.run(host, ["ssh", "-o", "BatchMode=yes", host, "true"])).returncode:
        assert time.monotonic() < end, f"sshd of {host} does not answer: {done.stderr}"
        time.sleep(0.1)


def _write_files(cluster: Cluster) -> None:
    place = cluster.folder
    for name in ("key", "host_key"):
        make = [_needed("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", str(place / name)]
        subprocess.run(make, check=True)
    lines = [f"{address} {host}" for host, address in cluster.addresses.items()]
    (place / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    (place / "ssh_config").write_text(_SSH.format(folder=place))
    key = (place / "host_key.pub").read_text().strip()
    known = [f"{host},{address} {key}\n" for host, address in cluster.addresses.items()]
    (place / "known_hosts").write_text("".join(known))


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_SYSTEM_PATH}")


def _needed(name: str) -> str:
    found = _program(name)
    assert found is not None, f"{name} is not installed: ask why_not() first"
    return found

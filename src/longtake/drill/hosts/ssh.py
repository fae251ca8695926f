"""An sshd on each host, which lets in whoever has the hosts' own key."""

import subprocess
import time

from longtake.drill.hosts.cluster import Cluster
from longtake.drill.hosts.tools import needed
from longtake.errors import RunError

_SECONDS_TO_START = 10.0
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


def write_keys(cluster: Cluster) -> None:
    """Make the keys, and write what ssh has to know on all hosts."""
    place = cluster.folder
    for name in ("key", "host_key"):
        make = [needed("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", str(place / name)]
        subprocess.run(make, check=True)  # noqa: S603 - the system's
    (place / "ssh_config").write_text(_SSH.format(folder=place), encoding="utf-8")
    key = (place / "host_key.pub").read_text(encoding="utf-8").strip()
    known = [f"{host},{address} {key}\n" for host, address in cluster.addresses.items()]
    (place / "known_hosts").write_text("".join(known), encoding="utf-8")


def start_sshd(cluster: Cluster, host: str) -> None:
    """Start a host's sshd; `await_sshd` waits for it."""
    facts = {"folder": cluster.folder, "address": cluster.addresses[host]}
    settings = cluster.folder / f"sshd_{host}"
    settings.write_text(_SSHD.format(**facts), encoding="utf-8")
    cluster.must(host, "mkdir", "/run/sshd")
    ours = str(cluster.folder / "ssh_config")
    cluster.must(host, "mount", "--bind", ours, "/etc/ssh/ssh_config")
    cluster.must(host, needed("sshd"), "-f", str(settings), "-E", f"{settings}.log")


def await_sshd(cluster: Cluster, host: str) -> None:
    """Return when a host lets itself be reached.

    Raises:
        RunError: it does not.
    """
    end = time.monotonic() + _SECONDS_TO_START
    while (done := cluster.run(host, ["ssh", "-o", "BatchMode=yes", host, "true"])).returncode:
        if time.monotonic() > end:
            raise RunError(f"The sshd of {host} does not answer: {done.stderr.strip()}")
        time.sleep(0.1)

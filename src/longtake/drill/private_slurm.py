"""A Slurm of its own on some hosts of one machine: a controller, and a daemon on each of them.

Nothing of it is outside of `folder` and of what the hosts have for themselves; it ends with them.
"""

import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from longtake.drill.fault import NotPossibleHereError
from longtake.drill.hosts import Cluster
from longtake.errors import RunError
from longtake.process import num_cores

_PROGRAMS = (
    "taskset",
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "scontrol",
    "squeue",
    "sinfo",
)
_SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"
_SECONDS_TO_START = 60.0
_LOOK_SECONDS = 0.5

# A job that comes again waits until its old credential has expired, by default for two minutes.
# Sockets of munge and of Slurm lie in each host's own /run: their paths must be short.
_PREPARE = """
set -e
mkdir -p /run/munge /run/slurmd /run/slurmctld /run/cgroup/freezer
chmod 755 /run/munge
mount -t cgroup -o freezer none /run/cgroup/freezer
munged --force --key-file={folder}/munge.key --socket=/run/munge/munge.socket.2 \
    --pid-file=/run/munge/pid --log-file=/run/munge/log --seed-file=/run/munge/seed
"""
_CONF = """\
ClusterName=drill
SlurmctldHost={first}({first_address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
CredType=cred/munge
StateSaveLocation=/run/slurmctld
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd_%n.log
PlugStackConfig={folder}/plugstack.conf
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0,requeue_delay=0
SlurmdParameters=config_overrides
KillWait=30
JobRequeue=1
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_CGROUP_CONF = """\
CgroupPlugin=cgroup/v1
CgroupMountpoint=/run/cgroup
CgroupAutomount=no
ConstrainCores=no
ConstrainRAMSpace=no
"""


def why_not() -> str | None:
    """Why there can be no such Slurm here, beyond hosts; None if there can."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_SYSTEM_PATH) is None]
    return f"a private Slurm needs {', '.join(missing)} (slurm-wlm and munge)" if missing else None


@dataclass(frozen=True)
class PrivateSlurm:
    """A Slurm that is up.

    Attributes:
        folder: with its settings and its logs.
        cluster: its hosts, of which the first is the controller's.
    """

    folder: Path
    cluster: Cluster

    @property
    def environment(self) -> dict[str, str]:
        """What its commands need to find it."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(
        self, argv: Sequence[str], cwd: Path | None = None, **environment: str
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command on the first host to its end."""
        return self.cluster.run(
            self.cluster.names[0], argv, env={**self.environment, **environment}, cwd=cwd
        )

    def job(self, number: str) -> dict[str, str]:
        """What is known of a job, by the names that `scontrol` uses."""
        said = self.run(["scontrol", "--oneliner", "show", "job", number]).stdout
        return dict(part.split("=", 1) for part in said.split() if "=" in part)


@contextmanager
def private_slurm(cluster: Cluster, folder: Path) -> Iterator[PrivateSlurm]:
    """Bring up a Slurm on some hosts; it ends with them.

    Args:
        cluster: the hosts.
        folder: an empty one, or one to be made, that all of them see.

    Raises:
        NotPossibleHereError: it is not installed, or does not start.
    """
    if reason := why_not():
        raise NotPossibleHereError(reason)
    slurm = PrivateSlurm(folder.absolute(), cluster)
    _write_settings(slurm)
    daemons: list[subprocess.Popen[str]] = []
    try:
        try:
            for host in cluster.names:
                cluster.must(host, "sh", "-c", _PREPARE.format(folder=slurm.folder))
            daemons.append(_start(slurm, cluster.names[0], ["slurmctld", "-D", "-i", "-c"]))
            for host, cores in zip(cluster.names, _shares(len(cluster.names)), strict=True):
                command = ["taskset", "--cpu-list", cores, "slurmd", "-D", "-N", host]
                daemons.append(_start(slurm, host, command))
            _await_nodes(slurm)
        except RunError as error:
            raise NotPossibleHereError(f"a private Slurm does not start: {error}") from error
        yield slurm
    finally:
        for daemon in daemons:
            daemon.kill()
            daemon.wait()


def _start(slurm: PrivateSlurm, host: str, argv: Sequence[str]) -> "subprocess.Popen[str]":
    log = slurm.folder / f"daemons_of_{host}.out"
    return slurm.cluster.start(host, argv, env=slurm.environment, log=log)


def _shares(count: int) -> list[str]:
    """Which cores each host has, as many as a rank that shares this machine with the others.

    Sums are rounded otherwise by another number of threads.
    """
    cores = sorted(os.sched_getaffinity(0))
    size = max(1, len(cores) // count)
    mine = (
        [cores[at % len(cores)] for at in range(first, first + size)]
        for first in range(0, count * size, size)
    )
    return [",".join(map(str, each)) for each in mine]


def _await_nodes(slurm: PrivateSlurm) -> None:
    until = time.monotonic() + _SECONDS_TO_START
    count = len(slurm.cluster.names)
    while (said := slurm.run(["sinfo", "--noheader", "--format=%T %D"]).stdout.strip()) != (
        f"idle {count}"
    ):
        if time.monotonic() > until:
            raise RunError(f"its nodes are {said or 'not heard of'}; see {slurm.folder}")
        time.sleep(_LOOK_SECONDS)


def _write_settings(slurm: PrivateSlurm) -> None:
    folder, cluster = slurm.folder, slurm.cluster
    folder.mkdir(parents=True, exist_ok=True)
    first, *_ = cluster.names
    nodes = "\n".join(
        f"NodeName={host} NodeHostname={host} NodeAddr={address} CPUs={num_cores()} State=UNKNOWN"
        for host, address in cluster.addresses.items()
    )
    facts = {"folder": folder, "first": first, "first_address": cluster.addresses[first]}
    (folder / "slurm.conf").write_text(_CONF.format(nodes=nodes, **facts), encoding="utf-8")
    (folder / "cgroup.conf").write_text(_CGROUP_CONF, encoding="utf-8")
    (folder / "plugstack.conf").write_text("", encoding="utf-8")
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)

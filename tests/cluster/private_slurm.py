"""A private Slurm on some hosts of one machine, and a run that is trained as its job.

Nothing of it is outside of `folder` and of what the hosts have for themselves; it ends with them.
"""

import os
import re
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.hosts import SYSTEM_PATH, Cluster
from tests.cluster.launchers import core_shares

from longtake.errors import RunError
from longtake.faults.sandbox import RANK_ENVIRONMENT, RunObserver
from longtake.process import environment, num_cores, program, read_stat
from longtake.stacks import descendants

_PROGRAMS = (
    *("taskset", "munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "sinfo"),
)
_SECONDS_TO_START = 60.0
_NODE_POLL_SECONDS = 0.5
_JOB_POLL_SECONDS = 0.3
_LASTING = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED")
_RANK = "longtake train"

# A requeued job waits until its old credential has expired, by default for two minutes.
# Sockets of munge and Slurm are in each host's own /run: their paths must be short.
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
    """Why there can be no private Slurm here, beyond hosts; None if there can."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=SYSTEM_PATH) is None]
    return f"a private Slurm needs {', '.join(missing)} (slurm-wlm and munge)" if missing else None


class SlurmNotStartedError(RunError):
    """The private Slurm is installed and does not start."""


@dataclass(frozen=True)
class PrivateSlurm:
    """A Slurm that is up."""

    folder: Path  # with its settings and logs
    cluster: Cluster  # its hosts; the first has the controller

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(
        self, argv: Sequence[str], cwd: Path | None = None, **environment: str
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command on the first host to its end."""
        env = {**self.environment, **environment}
        return self.cluster.run(self.cluster.names[0], argv, env=env, cwd=cwd)


@contextmanager
def private_slurm(cluster: Cluster, folder: Path) -> Iterator[PrivateSlurm]:
    """Start a Slurm on hosts, in a new folder that all of them see; it ends with the block."""
    slurm = PrivateSlurm(folder.absolute(), cluster)
    _write_settings(slurm)
    daemons: list[subprocess.Popen[str]] = []
    try:
        try:
            for host in cluster.names:
                cluster.must(host, "sh", "-c", _PREPARE.format(folder=slurm.folder))
            daemons.append(_start(slurm, cluster.names[0], ["slurmctld", "-D", "-i", "-c"]))
            for host, cores in zip(cluster.names, core_shares(len(cluster.names)), strict=True):
                command = ["taskset", "--cpu-list", cores, "slurmd", "-D", "-N", host]
                daemons.append(_start(slurm, host, command))
            _wait_for_nodes(slurm)
        except RunError as error:
            raise SlurmNotStartedError(f"a private Slurm does not start: {error}") from error
        yield slurm
    finally:
        for daemon in daemons:
            daemon.kill()
            daemon.wait()


def _start(slurm: PrivateSlurm, host: str, argv: Sequence[str]) -> "subprocess.Popen[str]":
    log = slurm.folder / f"daemons_of_{host}.out"
    return slurm.cluster.start(host, argv, env=slurm.environment, log=log)


def _wait_for_nodes(slurm: PrivateSlurm) -> None:
    until = time.monotonic() + _SECONDS_TO_START
    wanted = f"idle {len(slurm.cluster.names)}"
    while (told := slurm.run(["sinfo", "--noheader", "--format=%T %D"]).stdout.strip()) != wanted:
        if time.monotonic() > until:
            raise RunError(f"its nodes are {told or 'unknown'}; see {slurm.folder}")
        time.sleep(_NODE_POLL_SECONDS)


def _write_settings(slurm: PrivateSlurm) -> None:
    folder, cluster = slurm.folder, slurm.cluster
    folder.mkdir(parents=True, exist_ok=True)
    first, *_ = cluster.names
    nodes = "\n".join(
        f"NodeName={host} NodeHostname={host} NodeAddr={address} CPUs={num_cores()} State=UNKNOWN"
        for host, address in cluster.addresses.items()
    )
    where = {"folder": folder, "first": first, "first_address": cluster.addresses[first]}
    (folder / "slurm.conf").write_text(_CONF.format(nodes=nodes, **where))
    (folder / "cgroup.conf").write_text(_CGROUP_CONF)
    (folder / "plugstack.conf").write_text("")
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)


class SlurmJob(RunObserver):
    """A job of recipe.toml that `longtake launch --slurm` submitted; cancelled with the block."""

    def __init__(self, folder: Path, slurm: PrivateSlurm, options: Sequence[str]) -> None:
        super().__init__(folder, slurm.cluster.names)
        self._slurm, self._state = slurm, "PENDING"
        command = program("longtake", "launch", "recipe.toml", "--slurm", *options)
        told = slurm.run(command, folder, **environment(**RANK_ENVIRONMENT))
        found = re.search(r"^Job (\d+):", told.stderr, re.MULTILINE)
        if told.returncode or found is None:
            raise RunError(f"The job could not be submitted: {told.stderr.strip()}")
        self._number = found[1]
        self._log = self._run.path / "slurm" / f"job_{self._number}.log"
        self._log.touch()

    def exit_code(self) -> int | None:
        """None while it runs or will run."""
        if self._state in _LASTING:
            time.sleep(_JOB_POLL_SECONDS)  # the controller need not be asked more often
            self._state = self.facts()["JobState"]
        if self._state in _LASTING:
            return None
        return int(self.facts()["ExitCode"].partition(":")[0]) if self._state != "COMPLETED" else 0

    def kill(self) -> bool:
        was_running = self.exit_code() is None
        if was_running:
            self._slurm.run(["scancel", "--full", "--signal=KILL", self._number])
        return was_running

    def facts(self) -> dict[str, str]:
        """The job's record, by the names that `scontrol` uses."""
        told = self._slurm.run(["scontrol", "--oneliner", "show", "job", self._number]).stdout
        return dict(part.split("=", 1) for part in told.split() if "=" in part)

    def set_limit(self, minutes: str) -> None:
        """Change its time limit; RunError if Slurm refuses."""
        update = ["scontrol", "update", f"JobId={self._number}", f"TimeLimit={minutes}"]
        done = self._slurm.run(update)
        if done.returncode:
            raise RunError(f"The limit could not be changed: {done.stderr.strip()}")

    @contextmanager
    def stopped(self) -> Iterator[list[int]]:
        """Stop its ranks (SIGSTOP) within the block; yields their pids."""
        ours = (read_stat(pid) for pid in descendants(os.getpid()))
        ranks = [each.pid for each in ours if each and _RANK in each.command]
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield ranks
        finally:
            for pid in ranks:
                os.kill(pid, signal.SIGCONT)


def is_pending(pid: int, number: signal.Signals) -> bool:
    """Tell whether a signal waits for a stopped process."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    pending = next(line for line in lines if line.startswith("ShdPnd:")).split()[1]
    return bool(int(pending, 16) >> (number - 1) & 1)

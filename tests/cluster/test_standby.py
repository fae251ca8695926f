"""The standby process, with real forks of it."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from tests.build import wait_until

from longtake import stacks
from longtake.cluster.standby import STANDBY_NAME, ForkedRank, Standby, changed_variables
from longtake.faults.sandbox import SHORT_RECIPE, TrainingSite
from longtake.process import program
from longtake.run_dir import RunDirectory

_QUICK = ("data.workers=0", "watch.enabled=false", "tracking.tensorboard=false")
_CHANGES = [part for change in _QUICK for part in ("--set", change)]
_COMMAND = program("longtake", "train", "recipe.toml", *_CHANGES)
_LAUNCHERS = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONUNBUFFERED": "1"}
_STATUS = ("SigBlk", "SigIgn", "SigCgt", "Cpus_allowed", "NoNewPrivs", "Seccomp")


pytestmark = pytest.mark.usefixtures("patient_dumps")


@pytest.fixture
def said() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def standby(
    shapes_catalog: Path, tmp_path: Path, said: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> Standby:
    """It trains in `tmp_path`, once it is started."""
    site = TrainingSite(tmp_path)
    site.write_recipe(SHORT_RECIPE.replace("data/catalog.parquet", str(shapes_catalog)))
    (tmp_path / "sitecustomize.py").touch()  # which Python imports
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    for name, value in _LAUNCHERS.items():
        monkeypatch.setenv(name, value)
    return Standby(_COMMAND[4:], Console(file=said, width=1000))


def _started(standby: Standby) -> psutil.Process:
    """Start it, and wait until it can be forked."""
    before = psutil.Process().children()
    standby.start()
    (found,) = (each for each in psutil.Process().children() if each not in before)
    wait_until(lambda: found.name() == STANDBY_NAME)
    return found


def _frozen_facts(pid: int, run: Path) -> dict[str, object]:
    """What can be seen of a rank that has trained a step, from outside."""
    metrics = RunDirectory(run).metrics_path
    wait_until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 1)
    os.kill(pid, signal.SIGSTOP)
    rank = psutil.Process(pid)
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    files = [Path(f"/proc/{pid}/fd/{number}").readlink() for number in (0, 1, 2)]
    main, *_ = stacks.dump_process(pid, native=False).threads
    return {
        "command": rank.cmdline(),
        "name": rank.name(),
        "parent": rank.ppid(),
        "leads": (os.getsid(pid) == pid, os.getpgid(pid) == pid),
        "place": (rank.cwd(), rank.nice(), rank.cpu_affinity()),
        "status": [line for line in status if line.startswith(_STATUS)],
        "files": [files[0], files[1].name, files[2].name],
        "outermost": main.frames[-6:],
    }


def test_a_fork_looks_like_a_process_started_by_exec_until_a_file_changes(
    standby: Standby, said: io.StringIO, tmp_path: Path
) -> None:
    process = _started(standby)
    found = []
    log = tmp_path / "rank.log"
    terminal = os.open(tmp_path / "terminal", os.O_WRONLY | os.O_CREAT)
    for is_forked in (True, False):
        with log.open("w") as file:
            rank: ForkedRank | subprocess.Popen[bytes] | None
            if is_forked:
                rank = standby.fork({**os.environ, "RANK": "0"}, file, terminal)
            else:
                rank = subprocess.Popen(_COMMAND, stdout=file, stderr=file, start_new_session=True)
        assert rank is not None, said.getvalue()
        found.append(_frozen_facts(rank.pid, tmp_path / "run"))
        if is_forked:
            assert Path(f"/proc/{rank.pid}/fd/3").readlink() == tmp_path / "terminal"
        os.kill(rank.pid, signal.SIGCONT)
        os.kill(rank.pid, signal.SIGTERM)
        assert rank.wait(240) == 143, log.read_text()
        (tmp_path / "run").rename(tmp_path / f"run_{is_forked}")
    os.close(terminal)
    assert found[0] == found[1]
    (tmp_path / "sitecustomize.py").write_text("another = True")
    with log.open("w") as file:
        assert standby.fork(os.environ, file, 2) is None
    assert "sitecustomize.py has changed" in said.getvalue()
    assert not standby.is_started
    assert not process.is_running()


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"RANK": "3", "MASTER_PORT": "2", "LONGTAKE_LAUNCH": "a", "TORCHELASTIC_RUN_ID": "b"}, []),
        ({"OMP_NUM_THREADS": "2", "PATH": "/elsewhere"}, ["OMP_NUM_THREADS", "PATH"]),
        ({"PYTHONHASHSEED": "0"}, ["PYTHONHASHSEED"]),
    ],
)
def test_variables_that_imports_read_must_be_the_same(
    changed: dict[str, str], expected: list[str]
) -> None:
    before = {"RANK": "0", "OMP_NUM_THREADS": "1", "PATH": "/bin"}
    assert changed_variables(before, before | changed) == expected


_LAUNCHER = """
import time
from rich.console import Console
from longtake.cluster.standby import Standby
standby = Standby(["--version"], Console())
standby.start()
print(flush=True)
time.sleep(600)
"""


def test_it_ends_with_a_launcher_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", _LAUNCHER], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.readline()
        (standby,) = psutil.Process(launcher.pid).children()
        launcher.kill()
    wait_until(lambda: not standby.is_running() or standby.status() == psutil.STATUS_ZOMBIE)

"""Real processes that look at this machine together."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_LONGTAKE = [sys.executable, "-m", "longtake", "preflight"]
_OWN_MEMORY = 'mount -t tmpfs none /dev/shm && exec "$@"'
_CONTAINER = ["unshare", "--mount", "sh", "-c", _OWN_MEMORY, "sh"]


@pytest.mark.slow
def test_two_processes_under_torchrun(
    torchrun: list[str], write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    """One report of one node with two processes; nothing is left in the run directory."""
    recipe = write_recipe(tmp_path / "r.toml")
    command = [*torchrun, "-m", "longtake", "preflight", str(recipe), "--json"]
    done = subprocess.run(
        [*command, "--timeout", "60"], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    told: dict[str, Any] = json.loads(done.stdout)
    [node] = told["nodes"]
    assert (node["name"], node["processes"]) == (socket.gethostname(), 2)
    measured = {each["name"] for each in told["measures"]}
    assert {"all-reduce within the node", "writing to the run directory"} <= measured
    assert not [each for each in told["findings"] if each["severity"] == "error"], told["findings"]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_tasks_of_slurm(tmp_path: Path) -> None:
    """Without torchrun two tasks meet by what srun sets, as two nodes that share their name.

    That is an error if they do not share memory either, as two containers do not; where this
    machine makes none, both are on one node, and it is no error.
    """
    apart = subprocess.run([*_CONTAINER, "true"], capture_output=True).returncode == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    given = {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_LOCALID": "0",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
    }
    tasks = [
        subprocess.Popen(
            [*(_CONTAINER if apart and number else []), *_LONGTAKE, "--json", "--timeout", "60"],
            env=os.environ | given | {"SLURM_PROCID": str(number), "SLURM_NODEID": str(number)},
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        for number in range(2)
    ]
    said = [task.communicate(timeout=120)[0] for task in tasks]
    told = json.loads(said[0])
    name = socket.gethostname()
    assert [node["name"] for node in told["nodes"]] == [name, f"{name} (2)"]
    assert tasks[0].returncode == told["exit_status"]
    assert said[1] == ""
    assert tasks[1].returncode == 0
    assert "no recipe was given" in {each["why"] for each in told["skipped"]}
    of_names = [each["nodes"] for each in told["findings"] if each["check"] == "host names"]
    assert of_names == ([[name, f"{name} (2)"]] if apart else [])


@pytest.mark.parametrize(
    "name", ["inspection", "environment", "limits", "clock discipline", "host names"]
)
def test_what_a_node_tells_of_itself_is_json(name: str) -> None:
    """Whatever this machine is like, what it tells can be sent to another."""
    from longtake.preflight.place import Place
    from longtake.preflight.setting import Setting, within
    from longtake.preflight.stages import OF_NODES

    [check] = [each for each in OF_NODES if name == each.NAME]
    found = within(30.0, check, Setting(Place(host="here")))
    assert "failed" not in found
    assert json.loads(json.dumps(found)) == found
    check.judge({"here": found}, None)

"""The stages of a preflight, and real processes that check this machine together.

A CPU build has no CUDA: for nodes with several GPUs `torch.cuda` is replaced by one whose current
device is each thread's own, which starts as device 0, as in CUDA.
"""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.build import own_address

from longtake.cluster import checks_node
from longtake.cluster.findings import Check, CheckContext, CheckResult, Facts
from longtake.cluster.preflight import CHECKS, measure_within
from longtake.cluster.topology import ProcessInfo

_PREFLIGHT = ["-m", "longtake", "preflight", "--json", "--timeout", "60"]
_GPU = 3
_OWN_MEMORY = 'mount -t tmpfs none /dev/shm && exec "$@"'
_CONTAINER = ["unshare", "--mount", "sh", "-c", _OWN_MEMORY, "sh"]


@pytest.mark.slow
def test_two_processes_of_a_node(
    on_two_processes: list[str], write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path / "r.toml")
    command = [*on_two_processes, *_PREFLIGHT, str(recipe)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path)
    told: dict[str, Any] = json.loads(done.stdout)
    [node] = told["nodes"]
    assert (node["name"], node["processes"]) == (socket.gethostname(), 2)
    measured = {each["name"] for each in told["measures"]}
    assert {"all-reduce within the node", "writing to the run directory"} <= measured
    assert not [each for each in told["findings"] if each["severity"] == "error"], told["findings"]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_tasks_of_slurm(warm: list[str], tmp_path: Path) -> None:
    """Without torchrun two tasks meet by what srun sets, as two nodes that share their name.

    That is an error if they do not share memory either, as two containers do not; where this
    machine makes none, both are on one node, and it is no error.
    """
    apart = subprocess.run([*_CONTAINER, "true"], capture_output=True).returncode == 0
    _, port = own_address()
    given = {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_LOCALID": "0",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    second = [*_CONTAINER, sys.executable] if apart else [*warm, "1"]
    tasks = [
        subprocess.Popen(
            [*command, *_PREFLIGHT],
            env=os.environ | given | {"SLURM_PROCID": str(number), "SLURM_NODEID": str(number)},
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        for number, command in enumerate(([*warm, "1"], second))
    ]
    said = [task.communicate(timeout=280)[0] for task in tasks]
    told = json.loads(said[0])
    name = socket.gethostname()
    assert [node["name"] for node in told["nodes"]] == [name, f"{name} (2)"]
    assert tasks[0].returncode == told["exit_status"]
    assert said[1] == ""
    assert tasks[1].returncode == 0
    assert "no recipe was given" in {each["why"] for each in told["skipped"]}
    of_names = [each["nodes"] for each in told["findings"] if each["check"] == "host names"]
    assert of_names == ([[name, f"{name} (2)"]] if apart else [])


def _check(name: str) -> Check:
    return next(check for check in CHECKS if check.name == name)


@pytest.mark.parametrize(
    "name", ["inspection", "environment", "limits", "time sync", "host names", "addresses"]
)
def test_what_a_node_measures_is_json(name: str) -> None:
    found = measure_within(240.0, _check(name), CheckContext(ProcessInfo(host="here")))
    assert "failed" not in found
    assert json.loads(json.dumps(found)) == found
    _check(name).judge({"here": found})


def test_checks_have_names_of_their_own() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)


def _failing(measure: Callable[[CheckContext], Facts]) -> Check:
    return Check("failing", measure, lambda *_: CheckResult())


def test_a_check_that_hangs_is_abandoned() -> None:
    """As on a disk that does not answer: the check has failed, and the process continues."""
    released = threading.Event()

    def hang(_: CheckContext) -> Facts:
        released.wait(600)
        return {}

    found = measure_within(0.2, _failing(hang), CheckContext(ProcessInfo()))
    released.set()
    assert found == {"failed": "it took longer than 0.2 s", "hangs": True}


def test_a_check_that_raises_has_failed() -> None:
    def fail(_: CheckContext) -> Facts:
        raise OSError(5, "Input/output error", "/store")

    found = measure_within(240.0, _failing(fail), CheckContext(ProcessInfo()))
    assert "Input/output error" in found["failed"]


class _Cuda:
    """What was asked of which device."""

    def __init__(self) -> None:
        self._current = threading.local()
        self.events: set[int] = set()
        self.tensors: set[int | None] = set()

    def current_device(self) -> int:
        return getattr(self._current, "index", 0)

    @contextmanager
    def device(self, wanted: Any) -> Iterator[None]:
        before, index = self.current_device(), torch.device("cuda", 0).index
        self._current.index = wanted if isinstance(wanted, int) else wanted.index or index
        yield
        self._current.index = before

    def event(self, **_: Any) -> "_Cuda":
        self.events.add(self.current_device())
        return self

    def record(self) -> None:
        """Of an event."""

    def synchronize(self) -> None:
        """Of an event."""

    def elapsed_time(self, _: Any) -> float:
        return 1.0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> _Cuda:
    """A node with 8 GPUs, whose tensors are small ones on the CPU."""
    fake = _Cuda()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "current_device", fake.current_device)
    monkeypatch.setattr(torch.cuda, "device", fake.device)
    monkeypatch.setattr(torch.cuda, "Event", fake.event)

    def on_gpu(make: Any) -> Any:
        def made(*_: Any, device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
            fake.tensors.add(device.index)
            return make(8, 8, dtype=dtype).squeeze()

        return made

    monkeypatch.setattr(torch, "rand", on_gpu(torch.rand))
    monkeypatch.setattr(torch, "zeros", on_gpu(torch.zeros))
    return fake


def _context() -> CheckContext:
    process = ProcessInfo(rank=_GPU, local_rank=_GPU)
    return CheckContext(process, hosts=("node0",), ranks=((_GPU,),))


def test_products_are_timed_on_the_gpu_that_computes_them(
    cuda: _Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each check runs in a thread of its own, whose current device is 0 at first."""
    monkeypatch.setattr(checks_node, "_GPU_SECONDS", 0.01)
    found = measure_within(60, _check("compute"), _context())
    assert found["on"] == "GPU", found
    assert (cuda.tensors, cuda.events) == ({_GPU}, {_GPU})


def test_each_process_sends_from_its_own_gpu(cuda: _Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else NCCL refuses all of them: they would share GPU 0."""
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        found = measure_within(60, _check("links"), _context())
    finally:
        dist.destroy_process_group()
    assert "failed" not in found, found
    assert cuda.tensors == {_GPU}

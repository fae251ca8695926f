"""`longtake launch` with real ranks: stopped, killed, and with mistakes."""

import os
import re
import signal
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import psutil
import pytest
from tests.build import QUIET, change_options, listening, wait_until
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException

from longtake.cluster import launcher
from longtake.cluster.launcher import Agent, LaunchStop, RanksExit, classify_exit
from longtake.failures import RankFailure
from longtake.faults.sandbox import ONE_THREAD, SHORT_RECIPE, TrainingSite
from longtake.fsio import read_json_lines
from longtake.heartbeat import heartbeat_dir, read_heartbeats
from longtake.process import environment, program

_SECONDS = 300.0
_RANKS = ("--nproc-per-node", "2")
_QUICK = ("data.workers=0", "watch.enabled=false", "tracking.tensorboard=false")


@dataclass(frozen=True)
class LaunchResult:
    code: int
    said: str


def _launch(
    site: TrainingSite,
    *options: str,
    then: Callable[["subprocess.Popen[str]"], None] | None = None,
) -> LaunchResult:
    quick = change_options(*_QUICK)
    command = program("longtake", "launch", "recipe.toml", *_RANKS, *options, *quick)
    with subprocess.Popen(
        command,
        cwd=site.folder,
        env=environment(**ONE_THREAD),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        if then is not None:
            then(process)
        said, _ = process.communicate(timeout=_SECONDS)
    return LaunchResult(process.returncode, said)


def _wait_for_rows(process: "subprocess.Popen[str]", site: TrainingSite, count: int) -> None:
    path = site.run.metrics_path
    wait_until(
        lambda: (
            process.poll() is not None
            or (path.exists() and path.read_bytes().count(b"\n") >= count)
        ),
        _SECONDS,
    )
    assert process.poll() is None


_SLOW = """
import time
from dataclasses import replace
from pathlib import Path

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor


class Slow(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.change = nn.Linear(width, width)
        nn.init.zeros_(self.change.weight)
        nn.init.zeros_(self.change.bias)
        self.passes = 0

    def around(self, block, call, inputs):
        after = call(inputs)
        self.passes += not isinstance(after.tokens, FakeTensor)
        if self.passes > 24 and not Path("fast").exists():
            time.sleep(0.5)
        return replace(after, tokens=after.tokens + self.change(after.tokens))
"""
_WITH_SLOW = 'trainable.modules.slow.module = "slow_steps:Slow"\n'
"""After 12 steps of a launch its steps take seconds, so that a test on a busy machine finds it
running, until there is a file `fast`."""


@pytest.fixture(scope="module")
def make_site(
    shapes_catalog: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], TrainingSite]:
    """Makes folders with a recipe."""

    def make() -> TrainingSite:
        made = TrainingSite(tmp_path_factory.mktemp("site"))
        recipe = SHORT_RECIPE.replace("data/catalog.parquet", str(shapes_catalog))
        made.write_recipe(recipe + _WITH_SLOW)
        (made.folder / "slow_steps.py").write_text(_SLOW)
        return made

    return make


@pytest.fixture(scope="module")
def site(make_site: Callable[[], TrainingSite]) -> TrainingSite:
    """A folder in which a run loses a rank."""
    return make_site()


@pytest.fixture(scope="module")
def stopped_site(make_site: Callable[[], TrainingSite]) -> TrainingSite:
    """A folder in which a run is stopped."""
    return make_site()


@pytest.fixture(scope="module")
def stopped(stopped_site: TrainingSite) -> LaunchResult:
    """A launch that got SIGUSR1, twice, as from a scheduler."""

    def stop(process: "subprocess.Popen[str]") -> None:
        _wait_for_rows(process, stopped_site, 3)
        assert len(psutil.Process(process.pid).children()) == 2
        (stopped_site.folder / "listening").write_text(
            "\n".join(host for host, _ in listening(process.pid))
        )
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGUSR1)

    return _launch(stopped_site, then=stop)


@pytest.fixture(scope="module")
def restarted(site: TrainingSite) -> LaunchResult:
    """A launch, one of whose ranks is killed."""

    def kill(process: "subprocess.Popen[str]") -> None:
        _wait_for_rows(process, site, 8)
        hearts = read_heartbeats(heartbeat_dir(site.run.path))
        (second,) = (each for each in hearts if each.rank == 1 and each.role == "rank")
        os.kill(second.pid, signal.SIGKILL)
        (site.folder / "fast").touch()

    return _launch(site, then=kill)


def _events(site: TrainingSite, kind: str) -> list[dict[str, object]]:
    paths = [site.run.events_path, *site.run.path.glob("nodes/*/events.jsonl")]
    found = [event for path in paths for event in read_json_lines(path)]
    return [event for event in found if event["event"] == kind]


@pytest.mark.drill
@pytest.mark.slow
def test_a_signal_lets_all_ranks_save(stopped_site: TrainingSite, stopped: LaunchResult) -> None:
    assert stopped.code == os.EX_TEMPFAIL, stopped.said
    answer = "SIGUSR1: training ends after this step and saves it. It waits for rank"
    assert stopped.said.count(answer) == 1  # by the launcher, which knows all of its ranks
    (event,) = _events(stopped_site, "interrupted")
    assert event["by"] == "SIGUSR1"
    assert event["step"] in stopped_site.run.checkpoint_steps()


@pytest.mark.drill
@pytest.mark.slow
def test_a_launch_on_one_node_listens_on_this_machine_only(
    stopped_site: TrainingSite, stopped: LaunchResult
) -> None:
    """Neither the launcher nor a rank can be reached from the network; torch would unpickle."""
    assert stopped.code == 75
    listening = (stopped_site.folder / "listening").read_text().splitlines()
    assert listening  # rank 0's store
    assert [each for each in listening if not each.startswith("127.")] == []


def test_a_killed_rank_is_named_and_the_run_goes_on(
    site: TrainingSite, restarted: LaunchResult
) -> None:
    assert restarted.code == 0, restarted.said
    named = "Rank 1 of 2 on "
    assert "killed by SIGKILL" in restarted.said
    assert "All ranks are started again (1 of 3 times" in restarted.said
    (event,) = _events(site, "rank_failed")
    assert (event["rank"], event["kind"], event["source"]) == (1, "killed", "launcher")
    (log,) = (
        path
        for path in site.run.path.glob("nodes/*/logs/*/rank_0000.log")
        if "waited for it at step" in path.read_text()
    )
    assert named in log.read_text()
    assert len(_events(site, "resumed")) == 1
    assert site.run.metrics()[-1]["step"] == 50


@pytest.mark.drill
@pytest.mark.slow
def test_each_rank_of_each_start_has_a_log(site: TrainingSite, restarted: LaunchResult) -> None:
    logs = sorted(site.run.path.glob("nodes/*/logs/*/*.log"))
    assert [path.name for path in logs] == ["rank_0000.log", "rank_0001.log"] * 2
    assert "Done: step 50" in logs[-2].read_text()
    assert "Done: step 50" in restarted.said
    assert str(Path(*logs[-1].parts[-6:-2])) in restarted.said


@pytest.mark.drill
@pytest.mark.slow
def test_a_mistake_is_not_tried_again(site: TrainingSite, tmp_path: Path) -> None:
    ended = _launch(
        site,
        *("--nproc-per-node", "1", "--set", "data.catalog=gone.parquet"),
        *("--set", f"out={tmp_path / 'run'}"),
    )
    assert ended.code == 2
    assert "gone.parquet does not exist" in ended.said
    assert "nothing is started again" in ended.said
    assert "Traceback" not in ended.said
    assert len(list(tmp_path.glob("run/nodes/*/logs/*"))) == 1


_TOO_LARGE = """
from dataclasses import replace

from torch import OutOfMemoryError, nn
from torch._subclasses.fake_tensor import FakeTensor


class Adapter(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.change = nn.Linear(width, width)
        self.passes = 0

    def around(self, block, call, inputs):
        after = call(inputs)
        is_planned = isinstance(after.tokens, FakeTensor)
        self.passes += not is_planned
        if self.passes > 4:
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")
        return replace(after, tokens=after.tokens + self.change(after.tokens))
"""


@pytest.mark.drill
@pytest.mark.slow
def test_out_of_memory_is_explained_and_not_tried_again(site: TrainingSite, tmp_path: Path) -> None:
    """It names what was planned and what was measured; the same again would end the same way."""
    (site.folder / "too_large.py").write_text(_TOO_LARGE)
    changes = change_options(
        "trainable.modules.own.module=too_large:Adapter",
        "recompute.memory=1GiB",
        f"out={tmp_path / 'run'}",
    )
    ended = _launch(site, "--nproc-per-node", "1", *changes)
    assert ended.code == 2
    assert re.search(r"Out of memory in step \d+ on rank 0 \(cpu\), .* 2\.00 GiB more", ended.said)
    assert re.search(r"The plan .* predicts at most .* MiB of a budget of 952\.32 MiB", ended.said)
    assert "The process took at most" in ended.said
    assert "recompute.reserve above 0.07" in ended.said
    assert "nothing is started again" in ended.said
    assert "Traceback" not in ended.said
    assert len(list(tmp_path.glob("run/nodes/*/logs/*"))) == 1


@pytest.fixture
def logs(tmp_path: Path) -> dict[int, Path]:
    """The logs of two ranks."""
    paths = {rank: tmp_path / f"rank_{rank:04d}.log" for rank in (0, 1)}
    for rank, path in paths.items():
        path.write_text(f"Traceback\n  word {rank}\n\n")
    return paths


def _failure(rank: int, kind: Literal["error", "exception", "killed", "ended"]) -> RankFailure:
    return RankFailure(rank, 2, "0a1b2c3d", 77, 12, "forward", kind, "it broke", host="node1")


def test_a_signal_between_two_starts_of_the_ranks_ends_the_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as in the rendezvous after a crash, which may take minutes."""
    agent: Any = object.__new__(Agent)
    monkeypatch.setattr(Agent, "_heartbeats", lambda *_: [])
    monkeypatch.setattr(LocalElasticAgent, "_stop_workers", lambda *_: None)
    with LaunchStop() as agent._stop:
        agent._stop.hold()
        agent._stop_workers(SimpleNamespace(workers=[]))
        with pytest.raises(SignalException):
            os.kill(os.getpid(), signal.SIGUSR1)


@pytest.mark.parametrize(("kind", "code"), [("stopped", os.EX_TEMPFAIL), ("crashed", 137)])
def test_ranks_that_crash_after_a_signal_were_not_stopped_by_it(
    kind: Literal["stopped", "crashed"], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Signalled:
        ended = RanksExit(137, kind, "")

        def __init__(self, *given: Any) -> None:
            self._stop: LaunchStop = given[2]

        def run(self) -> Any:
            self._stop.hold()
            os.kill(os.getpid(), signal.SIGUSR1)
            return SimpleNamespace(is_failed=lambda: True)

    monkeypatch.setattr(launcher, "Agent", Signalled)
    monkeypatch.setattr(launcher, "_rendezvous", lambda *_: nullcontext())
    monkeypatch.setattr(os, "environ", dict(os.environ))
    options: Any = SimpleNamespace(endpoint="")
    assert launcher.launch(options, QUIET) == code


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_mistake_is_not_retried(logs: dict[int, Path], is_recorded: bool) -> None:
    """Neither on the node of the rank that made it, nor where ranks only lost that peer."""
    failures = [_failure(1, "error")] if is_recorded else []
    ended = classify_exit({0: 69, 1: 2}, failures, logs)
    assert (ended.code, ended.kind) == (2, "mistake")
    if is_recorded:
        assert classify_exit({0: 69}, failures, logs).code == 2


@pytest.mark.parametrize("code", [75, 130, 143])
def test_a_requested_stop_is_no_crash(logs: dict[int, Path], code: int) -> None:
    ended = classify_exit({0: code, 1: code}, [], logs)
    assert (ended.code, ended.kind) == (code, "stopped")


def test_the_first_rank_to_fail_is_reported_not_those_that_lost_it(logs: dict[int, Path]) -> None:
    """With host, step and error; the code of a kill is 128 + the signal, as in shells."""
    failures = [_failure(1, "killed"), _failure(0, "exception")]
    ended = classify_exit({0: 69, 1: -9}, failures, logs)
    assert (ended.code, ended.kind) == (137, "crashed")
    assert ended.message == "Rank 1 of 2 on node1 failed at step 12 (forward): it broke."


def test_a_rank_without_a_failure_record_is_reported_by_its_log(logs: dict[int, Path]) -> None:
    """Such as one that failed while it imported."""
    ended = classify_exit({0: 69, 1: 1}, [], logs)
    assert ended.code == 1
    assert ended.message.startswith("Rank 1 ended with exit code 1. Its last line: word 1 All of")
    assert str(logs[1]) in ended.message
    killed = classify_exit({0: 69, 1: -9}, [], logs)  # whose last line is not why
    assert killed.message == f"Rank 1 was killed by SIGKILL. All of its output: {logs[1]}."

"""Runs on another host: an sshd in a network of its own serves as the cluster."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.build import wait_until
from tests.cluster.hosts import Cluster
from tests.evaluation.build import Trainer

from longtake.checkpoint.files import needed_steps
from longtake.fsio import write_json
from longtake.process import environment
from longtake.run_dir import RunDirectory

_DRIVE = Path(__file__).with_name("drive.py")


@dataclass
class Pair:
    """A cluster, whose runs only it sees, and a host that evaluates them.

    Attributes:
        cluster: the hosts.
        runs: the folder of runs, as the cluster calls it.
        really: where that is.
        mirror: on the other host.
    """

    cluster: Cluster
    runs: Path
    really: Path
    mirror: Path

    @property
    def mirrored(self) -> RunDirectory:
        """The mirror of the run `one`."""
        return RunDirectory(self.mirror / "one")

    def act(self, *words: str, source: str | None = None) -> Any:
        done = self.cluster.run("node1", self._command(source, words), env=environment())
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def begin(self, *words: str) -> subprocess.Popen[str]:
        return self.cluster.start("node1", self._command(None, words), env=environment())

    def limit(self, rate: str) -> None:
        self._on_switch("tc", "qdisc", "add", "dev", "port0", "root", "tbf", "rate", rate)

    def unlimit(self) -> None:
        self._on_switch("tc", "qdisc", "del", "dev", "port0", "root")

    def _command(self, source: str | None, words: tuple[str, ...]) -> list[str]:
        text = source or f"node0:{self.runs}"
        return [sys.executable, "-P", str(_DRIVE), text, str(self.mirror), *words]

    def _on_switch(self, *command: str) -> None:
        limits = ["burst", "16kb", "latency", "100ms"] if "add" in command else []
        done = self.cluster.run("switch", [*command, *limits])
        assert done.returncode == 0, done.stderr


@pytest.fixture
def pair(two_hosts: Cluster, tmp_path: Path) -> Iterator[Pair]:
    """One run, `one`, with the checkpoints 1 and 2."""
    runs = tmp_path / "runs"
    runs.mkdir()
    pair = Pair(two_hosts, runs, two_hosts.own("node0", runs), tmp_path / "mirror")
    trainer = Trainer(pair.really / "one")
    trainer.save(1)
    trainer.save(2)
    yield pair
    two_hosts.plug("node0")


@pytest.mark.drill
@pytest.mark.slow
def test_checkpoints_come_from_the_cluster_and_results_go_there(pair: Pair) -> None:
    assert [step for step, _ in pair.act("pull", "1", "2")] == [1, 2]
    assert pair.mirrored.checkpoint_steps() == [1, 2]
    assert not (pair.mirrored.checkpoint_path(1) / "optimizer").exists()
    Trainer(pair.really / "one").save(3)
    Trainer(pair.really / "two").save(7)
    result = pair.mirrored.evaluation_path("demo", 2)
    result.mkdir(parents=True)
    write_json(result / "scores.json", {"step": 2})
    assert pair.act("push") == {"one": [1, 2, 3], "two": [7]}
    assert (pair.really / "one" / "evaluations/demo/step_00000002/scores.json").is_file()
    assert needed_steps(RunDirectory(pair.really / "one")) == set()


def test_what_ssh_says_is_told_in_one_sentence(pair: Pair) -> None:
    nobody = pair.act("look", source="nobody:/runs")["error"]
    assert "no such host" in nobody
    assert "nobody" in nobody
    pair.mirror = pair.mirror.with_name("other")
    assert "no such file or folder" in pair.act("look", source=f"node0:{pair.runs}/no")["error"]
    pair.mirror = pair.mirror.with_name("third")
    refused = pair.act("look", source=f"daemon@node0:{pair.runs}")["error"]
    assert "without a password" in refused
    assert "authorized_keys" in refused


@pytest.mark.drill
@pytest.mark.slow
def test_a_full_disk_is_told_of_and_what_is_there_stays(pair: Pair) -> None:
    Trainer(pair.really / "one").save(4, bytes(3_000_000))
    pair.mirror.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(pair.mirror)]
    assert pair.cluster.run("node1", mount).returncode == 0
    said = pair.act("pull", "1", "4")["error"]
    assert "a disk is full" in said
    assert "make room" in said
    there = pair.cluster.run("node1", ["ls", str(pair.mirrored.checkpoints_path)])
    assert there.stdout.split() == ["step_00000001"]


@pytest.mark.drill
@pytest.mark.slow
def test_an_interrupted_pull_goes_on_where_it_was(pair: Pair) -> None:
    Trainer(pair.really / "one").save(4, bytes(range(256)) * 40_000)
    pair.limit("24mbit")
    pulling = pair.begin("pull", "4")
    partial = pair.mirrored.checkpoints_path / ".pulling" / "step_00000004"
    wait_until(lambda: bytes_below(partial) > 2_000_000, 30)
    assert needed_steps(RunDirectory(pair.really / "one")) == {4}
    assert pair.mirrored.checkpoint_steps() == []
    pair.cluster.run("node0", ["sh", "-c", "kill $(pgrep -x rsync)"])
    said = json.loads(pulling.communicate(timeout=300)[0])
    pair.unlimit()
    assert "cannot be reached" in said["error"]
    kept = bytes_below(partial)
    assert kept > 2_000_000
    assert needed_steps(RunDirectory(pair.really / "one")) == set()
    sent = sent_bytes(pair)
    assert [step for step, _ in pair.act("pull", "4")] == [4]
    assert sent_bytes(pair) - sent < 10_240_000 - kept / 2
    assert pair.mirrored.checkpoint_steps() == [4]


@pytest.mark.drill
@pytest.mark.slow
def test_a_cable_that_is_pulled_is_noticed_and_all_goes_on_when_it_is_back(pair: Pair) -> None:
    Trainer(pair.really / "one").save(4, bytes(range(256)) * 40_000)
    pair.limit("24mbit")
    pulling = pair.begin("pull", "4")
    partial = pair.mirrored.checkpoints_path / ".pulling" / "step_00000004"
    wait_until(lambda: bytes_below(partial) > 1_000_000, 30)
    pair.cluster.unplug("node0")
    begun = time.monotonic()
    said = json.loads(pulling.communicate(timeout=120)[0])
    assert "cannot be reached" in said["error"]
    assert time.monotonic() - begun < 60
    pair.cluster.plug("node0")
    pair.unlimit()
    assert [step for step, _ in pair.act("pull", "4")] == [4]


def bytes_below(folder: Path) -> int:
    """How long the files in a folder are, in all; those that vanish meanwhile do not count."""
    found = 0
    for path in folder.rglob("*") if folder.exists() else ():
        with suppress(FileNotFoundError):  # rsync renames what it has received
            found += path.stat().st_size if path.is_file() else 0
    return found


def sent_bytes(pair: Pair) -> int:
    done = pair.cluster.run("node0", ["cat", "/sys/class/net/eth0/statistics/tx_bytes"])
    return int(done.stdout)

"""Hosts with names, networks and sshds of their own, checked from one of them, as a user does."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.build import own_address, wait_until
from tests.cluster.hosts import Cluster

from longtake.cluster.rendezvous import Rendezvous
from longtake.cluster.topology import ProcessInfo

_PREFLIGHT = [sys.executable, "-P", "-m", "longtake", "preflight"]


def _check(
    cluster: Cluster, folder: Path, *arguments: str, path: Path | None = None
) -> dict[str, Any]:
    """The report of a preflight that is started on node0, which has its exit status."""
    # On node0 itself, so that names are those of the hosts.
    env = {"OMP_NUM_THREADS": "1"} | ({} if path is None else {"PYTHONPATH": str(path)})
    done = cluster.run(
        "node0", [*_PREFLIGHT, *arguments, "--json"], timeout=150, env=env, cwd=folder
    )
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == report["exit_status"]
    return report


def _package(folder: Path, version: str) -> None:
    """A package as pip leaves it, as far as its version goes."""
    place = folder / f"av-{version}.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: av\nVersion: {version}\n")


@pytest.mark.drill
@pytest.mark.slow
def test_nodes_that_differ(
    three_hosts: Cluster, write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    local = tmp_path / "local"
    own = {host: three_hosts.own(host, _made(local)) for host in ("node0", "node1")}
    for host, version, rate in (("node0", "17.0.1", 3e-3), ("node1", "16.1.0", 1e-3)):
        _package(own[host] / "packages", version)
        write_recipe(own[host] / "r.toml", learning_rate=rate)
    three_hosts.own("node1", _made(tmp_path / "run"))
    three_hosts.unplug("node2")
    given = [str(local / "r.toml"), "--nodes", "node0,node1,node2", "--timeout", "60"]
    given += ["--ssh-option", "ConnectTimeout=60"]  # the network says sooner that it is not there
    try:
        report = _check(three_hosts, tmp_path, *given, path=local / "packages")
    finally:
        three_hosts.plug("node2")
    assert [node["name"] for node in report["nodes"]] == ["node0", "node1", "node2"]
    differs = {(each["group"], each["name"]): each["values"] for each in report["differences"]}
    assert differs["packages", "av"] == {"17.0.1": ["node0"], "16.1.0": ["node1"]}
    rates = {"0.003": ["node0"], "0.001": ["node1"]}
    assert differs["recipe", "optimizer.learning_rate"] == rates
    errors = {
        (each["check"], *each["nodes"]): each["what"]
        for each in report["findings"]
        if each["severity"] == "error"
    }
    assert set(errors) == {
        ("nodes", "node2"),
        ("packages", "node0", "node1"),  # PyAV decodes the clips
        ("recipe", "node0", "node1"),
        ("run directory", "node1"),
    }
    assert "another folder than on the first node" in errors["run directory", "node1"]
    assert "cannot be reached by ssh" in errors["nodes", "node2"]
    measured = {each["name"]: each["values"] for each in report["measures"]}
    assert abs(measured["clock ahead"]["node1"]) < 1000, "all hosts have this machine's clock (ms)"
    assert set(measured["sending between nodes"]) == {"node0 to node1", "node1 to node0"}
    assert report["exit_status"] == 1


@pytest.mark.drill
@pytest.mark.slow
def test_a_node_that_never_arrives(three_hosts: Cluster, tmp_path: Path) -> None:
    """Ssh works, but its processes cannot connect to where all meet: it is named, and in time."""
    meeting_point = three_hosts.addresses["node1"]
    # From node2 there is no way to node1, though node0 reaches both.
    block, free = (["ip", "route", do, "blackhole", meeting_point] for do in ("add", "del"))
    assert three_hosts.run("node2", block).returncode == 0
    try:
        report = _check(three_hosts, tmp_path, "--nodes", "node1,node2", "--timeout", "4")
    finally:
        three_hosts.run("node2", free)
    [error] = [each for each in report["findings"] if each["severity"] == "error"]
    assert (error["check"], error["nodes"]) == ("nodes", ["node2"])
    assert "node2 (rank 1) cannot reach node1:" in error["what"]
    assert report["seconds"] < 300


def test_a_process_ends_with_its_stdin_and_leaves_nothing(
    write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    """As when ssh is gone, while it waits for another process that does not answer."""
    host, port = own_address()
    given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": host, "MASTER_PORT": str(port)}
    recipe = write_recipe(tmp_path / "r.toml")
    with subprocess.Popen(
        [*_PREFLIGHT, str(recipe), "--relayed", "--timeout", "300"],
        stdin=subprocess.PIPE,
        env=os.environ | given | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,  # as sshd starts it
    ) as process:
        assert process.stdin is not None
        other = ProcessInfo(1, 2, 0, "other", "1", (host, port))
        Rendezvous(other, 300.0)
        wait_until(lambda: list(tmp_path.glob("run/.longtake_preflight_*")) or process.poll())
        assert process.poll() is None
        process.stdin.close()
        process.wait(240)
    assert not (tmp_path / "run").exists()


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder

"""Runs on several hosts whose nodes and links fail, and a job that reaches its time limit.

Hosts are network namespaces of this machine, each with a launcher, a rank and a watcher.
"""

import json
import signal
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import pytest
from tests.cluster import private_slurm
from tests.cluster.hosts import hosts
from tests.cluster.launchers import Launchers
from tests.cluster.private_slurm import SlurmJob, SlurmNotStartedError, is_pending

from longtake.faults.expect import Evidence
from longtake.faults.nodes import wait_for_recovery
from longtake.faults.sandbox import (
    LONG_RECIPE,
    ON_TWO_RANKS,
    ObservedEvent,
    Sandbox,
    TrainingSite,
)
from longtake.fsio import read_json_lines
from longtake.health.network import RATE
from longtake.node_dir import NodeDirectory
from longtake.process import SETTINGS_VARIABLE

pytestmark = [pytest.mark.drill, pytest.mark.slow]

_STEP = 12
_REPORTED_SECONDS = 30.0
_RATE, _RATE_BYTES = "8mbit", 1e6  # a tenth of what even this model's gradients need
_LARGEST_RATE_ERROR = 0.4  # bytes on their way also wait at the other end of the link
_SLOWER = 3.0
_USUAL_WINDOWS = 5  # in which a link's usual rate is learnt: a link to compare with may be slow too
_CUT_CHANGES = ("watch.action=kill", "watch.min_seconds=4")
_SIGNAL_SECONDS = 120  # before the limit: Slurm looks twice a minute, in whole minutes


def test_a_node_that_is_killed_and_comes_back_changes_nothing(sandbox: Sandbox) -> None:
    site = sandbox.fresh("kill-node")
    evidence = Evidence(site, lambda: sandbox.undisturbed_on_two_ranks)
    with (
        hosts(2, site.folder) as cluster,
        Launchers(site.folder, cluster, "2", ON_TWO_RANKS) as launchers,
    ):
        lost = cluster.names[1]
        launchers.wait_for_rows(_STEP)
        launchers.kill_host(lost)
        lost_at = time.monotonic()
        cluster.boot(lost)
        launchers.start(lost)
        recovery = wait_for_recovery(launchers, site, lost_at)
        launchers.finish()
        evidence.expect_output(launchers.output, f"Rank 1 of 2 on {lost}")
    evidence.expect_recovered(recovery)
    evidence.expect_undisturbed()
    assert evidence.complaints == []


def test_two_of_three_nodes_train_on(sandbox: Sandbox) -> None:
    """The same batches, no clip repeated or missing, weights equal but for rounding."""
    site = sandbox.fresh("lose-node-and-shrink")
    evidence = Evidence(site, lambda: sandbox.undisturbed_on_two_ranks)
    with (
        hosts(3, site.folder) as cluster,
        Launchers(site.folder, cluster, "2:3", ON_TWO_RANKS) as launchers,
    ):
        launchers.wait_for_rows(_STEP)
        lost = cluster.names[-1]
        launchers.kill_host(lost)
        recovery = wait_for_recovery(launchers, site, time.monotonic())
        launchers.finish()
        evidence.expect_output(launchers.output, f"of 3 on {lost}")
    evidence.expect_recovered(recovery)
    evidence.expect_world_sizes(3, 2)
    evidence.expect_near()
    evidence.expect_near_weights()
    assert evidence.complaints == []


def test_a_slow_link_is_named_with_its_rate(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the steps of all ranks are slow; nothing is lost."""
    monkeypatch.setenv(SETTINGS_VARIABLE, json.dumps({"health_seconds": 1.0}))
    site = sandbox.fresh("slow-link", LONG_RECIPE)
    evidence = Evidence(site, lambda: sandbox.undisturbed_long)
    with (
        hosts(3, site.folder) as cluster,
        Launchers(site.folder, cluster, "3", ON_TWO_RANKS) as launchers,
    ):
        host = cluster.names[-1]
        launchers.wait_for_rows(_STEP)
        launchers.wait_until(lambda: _know_usual_rates(site, cluster.names), "rates were known")
        cluster.limit(host, _RATE)
        limited_at, first = time.monotonic(), launchers.num_rows()
        found = launchers.wait_for_node_event("degraded", _names_link)
        last = launchers.num_rows()
        if found is not None:
            cluster.unlimit(host)
        launchers.finish()
        links = [e for e in launchers.node_events() if e["event"] == "degraded" and _names_link(e)]
    seconds = [row["step_seconds"] for row in read_json_lines(site.run.metrics_path)]
    slower = median(seconds[first : last + 1]) / median(seconds[1:first])
    evidence.expect(slower >= _SLOWER, f"steps took {slower:.1f} times as long: the link is fast")
    _expect_link(evidence, found, links, host, limited_at)
    evidence.expect_near()
    assert evidence.complaints == []


def _know_usual_rates(site: TrainingSite, names: Sequence[str]) -> bool:
    """Whether each host has measured often how fast it sends to another."""
    return all(
        sum(any(key.startswith(f"{RATE}:node") for key in row) for row in read_json_lines(path))
        >= _USUAL_WINDOWS
        for path in (NodeDirectory(site.run, name).health_path for name in names)
    )


def _names_link(event: dict[str, Any]) -> bool:
    return "peer" in event


def _expect_link(
    evidence: Evidence,
    found: ObservedEvent | None,
    links: list[dict[str, Any]],
    host: str,
    since: float,
) -> None:
    """Expect that links of the host, and no others, are reported in time, with their rate."""
    none = "no event says that a link is slow"
    evidence.expect_event(found, since, none, within=_REPORTED_SECONDS)
    others = [each["message"] for each in links if host not in (each["host"], each["peer"])]
    evidence.expect(not others, f"a link is called slow that is not {host}'s: {others}")
    if found:
        rate = found.event["send_bytes_per_second"]
        wrong = f"it is said to send {rate / 1e6:.2f} MB/s, and sends {_RATE_BYTES / 1e6:g}"
        evidence.expect(abs(rate / _RATE_BYTES - 1) <= _LARGEST_RATE_ERROR, wrong)


def test_a_link_that_is_cut_is_named_and_the_run_recovers(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that waits for it is ended; when it is up again the run resumes, bitwise the same."""
    monkeypatch.setenv(SETTINGS_VARIABLE, json.dumps({"health_seconds": 1.0}))
    site = sandbox.fresh("cut-link")
    evidence = Evidence(site, lambda: sandbox.undisturbed_on_two_ranks)
    changes = (*ON_TWO_RANKS, *_CUT_CHANGES)
    with (
        hosts(2, site.folder) as cluster,
        Launchers(site.folder, cluster, "2", changes) as launchers,
    ):
        reachable, cut = cluster.names
        launchers.wait_for_rows(_STEP)
        cluster.unplug(cut)
        cut_at = time.monotonic()
        named = launchers.wait_for_node_event(
            "degraded", lambda event: event["host"] == reachable and cut in event["reason"]
        )
        ended = launchers.wait_for_node_event("killed_rank")
        cluster.plug(cut)
        recovery = wait_for_recovery(launchers, site, time.monotonic())
        launchers.finish()
    none = f"no event says that {cut} does not answer"
    evidence.expect_event(named, cut_at, none, within=_REPORTED_SECONDS)
    evidence.expect(ended is not None, "no rank that waited was ended")
    evidence.expect_recovered(recovery)
    evidence.expect_undisturbed()
    assert evidence.complaints == []


def test_a_job_is_requeued_at_its_time_limit_and_resumes(sandbox: Sandbox) -> None:
    """Slurm's signal lets it save; it is requeued once and loses no step."""
    if reason := private_slurm.why_not():
        pytest.skip(reason)
    site = sandbox.fresh("requeue-on-time-limit")
    evidence = Evidence(site, lambda: sandbox.undisturbed_on_two_ranks)
    options = (
        *("--nodes", "2", "--nproc-per-node", "1", "--no-preflight"),
        *("--time", "60", "--signal-seconds", str(_SIGNAL_SECONDS)),
        *(part for change in ON_TWO_RANKS for part in ("--set", change)),
    )
    try:
        with (
            hosts(2, site.folder) as cluster,
            private_slurm.private_slurm(cluster, site.folder / "slurm") as slurm,
            SlurmJob(site.folder, slurm, options) as job,
        ):
            job.wait_for_rows(_STEP)
            with job.stopped() as ranks:  # so that the training is not over before Slurm looks
                minutes = int(time.monotonic() - job.began) // 60 + _SIGNAL_SECONDS // 60
                job.set_limit(str(minutes))
                job.wait_until(
                    lambda: all(is_pending(pid, signal.SIGUSR1) for pid in ranks), "SIGUSR1 came"
                )
            interrupted = job.wait_for_event("interrupted")
            job.wait_until(lambda: int(job.facts()["Restarts"]), "it was requeued")
            job.set_limit("60")
            resumed = job.wait_for_event("resumed")
            job.finish()
            restarts = int(job.facts()["Restarts"])
    except SlurmNotStartedError as error:
        pytest.skip(str(error))
    assert restarts == 1
    assert interrupted is not None
    assert resumed is not None
    assert interrupted.event["by"] == "SIGUSR1"
    assert interrupted.event["step"] == resumed.event["step"]
    evidence.expect_undisturbed()
    assert evidence.complaints == []
    assert evidence.steps_lost == 0

"""Runs with many nodes, as their watchers would have written them."""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.build import bare_recipe
from tests.monitor.build import make_diagnosis, make_dump, make_process, make_thread

from longtake.fsio import write_once
from longtake.monitor.stall_record import Suspect, WaitingRanks
from longtake.node_dir import NodeDirectory, diagnosis_path
from longtake.run_dir import RunDirectory


def make_run(path: Path) -> RunDirectory:
    """A run without clips, of which nothing was trained."""
    path.mkdir(parents=True)
    run = RunDirectory(path)
    run.create(bare_recipe(path))
    run.record_launch(start_step=0, world_size=1, device="cpu", precision="fp32")
    run.append_event("launched", step=0, world_size=1)
    return run


def add_nodes(
    run: RunDirectory,
    num_nodes: int,
    ranks_per_node: int,
    windows: int = 8,
    change: Callable[[int, int, dict[str, float]], None] = lambda node, window, health: None,
    **heartbeat: Any,
) -> list[NodeDirectory]:
    """Nodes with heartbeats and health.jsonl, ten seconds from line to line.

    Args:
        run: to which they are added.
        num_nodes: named node000, node001, ...
        ranks_per_node: each with a GPU.
        windows: lines of health.jsonl.
        change: is given a node's number, a window's and its numbers, to change.
        heartbeat: other values of heartbeat.json.
    """
    found, now = [], time.time()
    for number in range(num_nodes):
        node = NodeDirectory(run, f"node{number:03}")
        node.path.mkdir(parents=True)
        ranks = range(number * ranks_per_node, (number + 1) * ranks_per_node)
        health: dict[str, float] = {}
        with node.health_path.open("w") as file:
            for window in range(windows):
                health = health_of(ranks, window)
                change(number, window, health)
                at = datetime.fromtimestamp(now - 10 * (windows - window), UTC)
                line = {"time": at.isoformat(timespec="milliseconds"), **health}
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
        node.heartbeat_path.write_text(json.dumps(beat_of(ranks, health) | heartbeat))
        found.append(node)
    return found


def health_of(ranks: range, window: int) -> dict[str, float]:
    """A node's numbers, which differ a little from window to window."""
    found: dict[str, float] = {}
    for local, rank in enumerate(ranks):
        wave = math.sin(1.7 * rank + 0.9 * window)
        found[f"step_work_seconds:{rank}"] = round(1.2 * (1 + 0.01 * wave), 6)
        found[f"steps_per_second:{rank}"] = 0.8
        found[f"gpu_power_watts:{local}"] = round(650 + 8 * wave, 1)
        found[f"gpu_temperature_celsius:{local}"] = round(62 + 2 * wave)
        found[f"gpu_sm_clock_mhz:{local}"] = 1755.0
        found[f"gpu_utilization_share:{local}"] = 0.98
        found[f"link_up:mlx5_{local}/1"] = 1
        found[f"link_speed_bits_per_second:mlx5_{local}/1"] = 4e11
        found |= {f"gpu_other_number_{each}:{local}": each * 1.25 for each in range(8)}
        found |= {f"link_other_number_{each}:mlx5_{local}/1": each * 1.25 for each in range(8)}
    found |= {f"node_number_{each}": each * 3.5 for each in range(30)}
    return found | {"disk_write_seconds:run": 0.0008, "disk_free_bytes:run": 5e11}


def beat_of(ranks: range, health: Mapping[str, float]) -> dict[str, Any]:
    phases = {"data": 0.01, "forward": 0.4, "backward": 0.7, "collective": 0.1, "optimizer": 0.05}
    of_each = [
        {"rank": rank, "local_rank": local, "step": 1200} for local, rank in enumerate(ranks)
    ]
    more = {"phase": "backward", "seconds": 0.3, "world_size": 8, "launch": "one", "pid": 7}
    work = {"steps": 8, "work_seconds": 1.2, "phases": phases}
    return {
        "pid": 1,
        "beat": 5,
        "launch": "one",
        "ranks": [{**each, **more} for each in of_each],
        "workers": [],
        "phase_means": [{**each, **work} for each in of_each],
        "health": dict(health),
        "ended": False,
        "stall": "",
    }


def add_stall(
    run: RunDirectory,
    nodes: Sequence[NodeDirectory],
    cause: int,
    *,
    token: str = "stall_x_1_0",  # noqa: S107 - a name
    time: str = "2026-03-01T12:00:00+00:00",
    function: str = "asleep",
    sentence: str = "It hangs.",
) -> str:
    """A stall that the rank of one node caused, with a dump of each node; returns its token."""
    saver = [("_worker", "/usr/lib/python3.11/concurrent/futures/thread.py", 81)]
    for rank, node in enumerate(nodes):
        own = (function, "/own/model.py", 54)
        waits = ("all_reduce", "/x/site-packages/torch/distributed/c10d.py", 9)
        calls = [own if rank == cause else waits, ("train", "/own/train.py", 7)]
        threads = [make_thread("saver", saver)]
        process = make_process(100 + rank, rank, calls, "forward", threads=threads)
        node.write_dump(make_dump([process], host=node.host) | {"token": token, "time": time})
    suspect = Suspect(
        *(nodes[cause].host, 100 + cause, "rank", cause),
        function=function,
        file="/own/model.py",
        line=54,
    )
    waiting = WaitingRanks(
        "a collective", tuple(rank for rank in range(len(nodes)) if rank != cause), 1
    )
    facts = {"token": token, "time": time, "host": nodes[0].host, "sentence": sentence}
    write_once(
        diagnosis_path(run, token), make_diagnosis(suspect, waiting=(waiting,), **facts).as_dict()
    )
    return token

"""Runs with many nodes, as their watchers would have written them."""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from longtake import config
from longtake.node_dir import NodeDirectory, diagnosis_path
from longtake.run_dir import RunDirectory


def make_run(path: Path) -> RunDirectory:
    """A run without clips, of which nothing was trained."""
    values = {
        "out": str(path),
        "data": {
            "catalog": "none.parquet",
            "buckets": [{"num_frames": 8, "height": 32, "width": 32}],
        },
        "model": {"family": "tubelet"},
        "training": {"steps": 40, "global_batch_size": 4},
    }
    path.mkdir(parents=True)
    run = RunDirectory(path)
    run.create(config.parse(values, "test"))
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
    for number, node in enumerate(nodes):
        own = _call(function, "/own/model.py", 54)
        waiting = _call("all_reduce", "/x/site-packages/torch/distributed/c10d.py", 9)
        frames = [own if number == cause else waiting, _call("train", "/own/train.py", 7)]
        node.dump_path(token).parent.mkdir(parents=True, exist_ok=True)
        node.dump_path(token).write_text(json.dumps(_dump(node.host, token, number, frames)))
    path = diagnosis_path(run, token)
    path.parent.mkdir(exist_ok=True)
    suspect: dict[str, Any] = {
        "host": nodes[cause].host,
        "pid": 100 + cause,
        "role": "rank",
        "rank": cause,
    }
    suspect |= {"function": function, "file": "/own/model.py", "line": 54}
    waiting_ranks = [each for each in range(len(nodes)) if each != cause]
    record = {
        "token": token,
        "time": time,
        "host": nodes[0].host,
        "launch": "one",
        "missing_in": [],
        "kind": "stuck",
        "step": 23,
        "phase": "forward",
        "seconds": 6.2,
        "limit": 6.0,
        "suspects": [suspect],
        "waiting": [{"doing": "a collective", "ranks": waiting_ranks, "host_count": 1}],
        "silent_nodes": [],
        "sentence": sentence,
    }
    path.write_text(json.dumps(record))
    return token


def _call(function: str, file: str, line: int) -> dict[str, Any]:
    return {"function": function, "file": file, "line": line}


def _dump(host: str, token: str, rank: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
    pulse = {
        "role": "rank",
        "pid": 100 + rank,
        "rank": rank,
        "step": 23,
        "steps_done": 23,
        "phase": "forward",
        "seconds": 6.0,
        "detail": "",
        "path_of_clip": "",
    }
    saver = {
        "name": "saver",
        "frames": [_call("_worker", "/usr/lib/python3.11/concurrent/futures/thread.py", 81)],
    }
    process = {
        "pid": 100 + rank,
        "ppid": 1,
        "role": "rank",
        "rank": rank,
        "command": "python",
        "state": "S",
        "cpu_seconds": 1.0,
        "method": "py-spy",
        "raw": "",
        "heartbeat": pulse,
        "threads": [{"name": "MainThread", "frames": frames}, saver],
    }
    return {
        "token": token,
        "time": "2026-03-01T12:00:00+00:00",
        "host": host,
        "reason": "stall",
        "launch": "x",
        "rounds": [{"seconds": 0.0, "processes": [process]}],
        "missing": [],
    }

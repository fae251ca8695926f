"""Heartbeats, dumps and diagnoses as their modules make them, without processes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longtake.heartbeat import Heartbeat
from longtake.monitor.stall_record import StallDiagnosis
from longtake.node_dir import NodeDump, ProcessDump

Calls = Sequence[tuple[str, str, int]]


def make_heartbeat(role: Any = "rank", pid: int = 1, **changes: Any) -> Heartbeat:
    """Of a settled process in `forward`; a decode worker knows no launch."""
    facts: dict[str, Any] = {
        "started": pid,
        "rank": 0,
        "local_rank": 0,
        "world_size": 2,
        "launch": "one" if role == "rank" else "",
        "step": 7,
        "steps_done": 7,
        "phase": "forward",
        "seconds": 0.0,
        "detail": "",
        "path_of_clip": "",
        "is_settled": True,
        "timings": {},
        "work_seconds": 0.0,
        "work_count": 0,
    }
    return Heartbeat(path=Path(f"{role}_{pid}"), role=role, pid=pid, **{**facts, **changes})


def make_diagnosis(*suspects: Any, **changes: Any) -> StallDiagnosis:
    facts: dict[str, Any] = {
        "token": "stall_x_1_0",
        "time": "",
        "host": "node",
        "kind": "stuck",
        "launch": "x",
        "step": 1,
        "phase": "forward",
        "seconds": 7.0,
        "limit": 6.0,
        "waiting": (),
        "silent_nodes": (),
        "missing_in": (),
        "sentence": "",
    }
    return StallDiagnosis(suspects=suspects, **{**facts, **changes})


def make_thread(name: str, calls: Calls, *, has_gil: bool = False) -> dict[str, Any]:
    frames = [{"function": name, "file": file, "line": line} for name, file, line in calls]
    return {"name": name, "is_active": False, "has_gil": has_gil, "frames": frames}


def make_process(
    pid: int,
    rank: int,
    calls: Calls,
    phase: str,
    *,
    role: Any = "rank",
    seconds: float = 12.0,
    done: int = 3,
    state: str = "S",
    cpu: float = 0.0,
    world: int = 2,
    clip: str = "",
    given: str = "",
    threads: Sequence[dict[str, Any]] = (),
    has_gil: bool = False,
) -> ProcessDump:
    """One process in one round; without calls its stack could not be read."""
    main = make_thread("MainThread", calls, has_gil=has_gil)
    heartbeat = make_heartbeat(
        role,
        pid,
        rank=rank,
        local_rank=rank,
        world_size=world,
        launch="abcdefgh",
        step=done + 100,
        steps_done=done,
        phase=phase,
        seconds=seconds,
        detail=clip,
        path_of_clip=f"clips/{clip}.mp4" if clip else "",
        given=given,
    )
    return {
        "pid": pid,
        "ppid": 1,
        "role": role,
        "rank": rank,
        "command": "python",
        "state": state,
        "cpu_seconds": cpu,
        "method": "py-spy --nonblocking",
        "threads": [main, *threads] if calls else [],
        "raw": "",
        "heartbeat": heartbeat.as_dict(),
    }


def make_dump(*rounds: Sequence[ProcessDump], host: str = "gpu07", missing: Any = ()) -> NodeDump:
    """A node's dump; each heartbeat's `seconds` are as of the last round."""
    return {
        "token": "t",
        "time": "",
        "host": host,
        "reason": "stall",
        "launch": "abcdefgh",
        "rounds": [
            {
                "seconds": 1.5 * number,
                "processes": [_earlier(each, 1.5 * (len(rounds) - 1 - number)) for each in round_],
            }
            for number, round_ in enumerate(rounds)
        ],
        "missing": list(missing),
    }


def _earlier(process: ProcessDump, seconds: float) -> ProcessDump:
    heartbeat = process["heartbeat"] or {}
    age = max(0.0, heartbeat["seconds"] - seconds)
    return {**process, "heartbeat": {**heartbeat, "seconds": age}}


def make_collective(**changes: Any) -> dict[str, Any]:
    """An entry of NCCL's flight recorder."""
    facts = {"pg_id": 0, "profiling_name": "nccl:all_reduce", "input_sizes": [[3]]}
    return {**facts, "state": "scheduled", "retired": False, "is_p2p": False, **changes}

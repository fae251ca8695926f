"""How fast the run directory takes what is written, on all nodes at once as in a checkpoint."""

import os
import time
from pathlib import Path
from statistics import median

from longtake.config import Recipe
from longtake.preflight.compare import far_above, far_below, middle
from longtake.preflight.finding import Finding, Judged, Measure
from longtake.preflight.setting import Facts, Setting

NAME = "disk speed"

_SECONDS, _MOST_BYTES, _PIECE, _NUM_SYNCS = 1.0, 64 * 2**20, 2**20, 9
_LEAST_SPEED, _LONGEST_SYNC = 20.0, 0.5
_SLOW, _LATE, _LATE_AT_LEAST = 0.5, 3.0, 0.02
_ADVICE = "Look at that node's mount and its link to the storage; checkpoints wait for the slowest."


def measure(setting: Setting) -> Facts:
    """MB/s of writing with a sync at the end, and seconds of syncing a small write."""
    if setting.recipe is None or not setting.recipe.out.is_dir():
        return {}
    path = setting.recipe.out / f".longtake_preflight_{setting.token}_speed_{setting.place.rank}"
    try:
        return {"write": _write_speed(path), "sync": _sync_seconds(path)}
    finally:
        path.unlink(missing_ok=True)


def judge(facts: dict[str, Facts], recipe: Recipe | None) -> Judged:
    """Who writes or syncs far worse than the median, or too slowly by any measure."""
    seen = {node: each for node, each in facts.items() if each}
    if not seen:
        return Judged()
    judged = _judge_writes({node: each["write"] for node, each in seen.items()})
    judged.add(_judge_syncs({node: each["sync"] for node, each in seen.items()}))
    return judged


def _judge_writes(speeds: dict[str, float]) -> Judged:
    slow = far_below(speeds, _SLOW) or tuple(n for n, v in speeds.items() if v < _LEAST_SPEED)
    judged = Judged(measures=[Measure("writing to the run directory", "MB/s", speeds, slow)])
    if slow:
        what = f"the run directory is written at {speeds[slow[0]]:.0f} MB/s"
        expected = f"at least {_LEAST_SPEED:g} MB/s, and half of the {middle(speeds.values()):.0f} "
        expected += "MB/s of the median"
        judged.findings.append(Finding("warning", NAME, slow, what, expected, _ADVICE))
    return judged


def _judge_syncs(seconds: dict[str, float]) -> Judged:
    far = (node for node in far_above(seconds, _LATE) if seconds[node] > _LATE_AT_LEAST)
    late = tuple(far) or tuple(node for node, each in seconds.items() if each > _LONGEST_SYNC)
    shown = {node: each * 1000 for node, each in seconds.items()}
    judged = Judged(measures=[Measure("fsync of the run directory", "ms", shown, late)])
    if late:
        what = f"an fsync takes {shown[late[0]]:.0f} ms"
        expected = f"at most {_LONGEST_SYNC * 1000:.0f} ms, and three times the median"
        judged.findings.append(Finding("warning", NAME, late, what, expected, _ADVICE))
    return judged


def _write_speed(path: Path) -> float:
    piece = os.urandom(_PIECE)  # a disk that compresses gains nothing
    begun, num_bytes = time.perf_counter(), 0
    with path.open("wb", buffering=0) as file:
        while num_bytes < _MOST_BYTES and time.perf_counter() - begun < _SECONDS:
            num_bytes += file.write(piece)
        os.fsync(file.fileno())
    return num_bytes / 1e6 / (time.perf_counter() - begun)


def _sync_seconds(path: Path) -> float:
    taken = []
    with path.open("wb", buffering=0) as file:
        for _ in range(_NUM_SYNCS):
            file.write(bytes(4096))
            begun = time.perf_counter()
            os.fsync(file.fileno())
            taken.append(time.perf_counter() - begun)
    return median(taken)

"""Are the clips there on every node, and are they the same: catalogs, and a sample of files."""

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longtake.config import Recipe
from longtake.data.catalog import Catalog
from longtake.errors import DataError
from longtake.preflight.compare import differences, far_below, middle, tell_differences
from longtake.preflight.finding import Finding, Judged, Measure, Severity, Skipped
from longtake.preflight.mounts import filesystem_of
from longtake.preflight.names import listed
from longtake.preflight.setting import Facts, Setting

NAME = "dataset"

_SAMPLE = 64
_READ_SECONDS, _LEAST_BYTES, _PIECE = 1.0, 8 * 2**20, 2**20
_SLOW = 0.5
_ADVICE = "Mount the same disk at the same place on all nodes, or copy the clips and the catalog."


def measure(setting: Setting) -> Facts:
    """Of each catalog: what it holds, which of some clips are there and how long, how fast."""
    if setting.recipe is None:
        return {}
    sources = setting.recipe.data.sources()
    return {"catalogs": {name: _look_at(path) for name, path in sources.items()}}


def judge(facts: dict[str, Facts], recipe: Recipe | None) -> Judged:
    """Which nodes lack clips, have others, or read them slowly."""
    judged = Judged()
    for name in sorted({name for each in facts.values() for name in each.get("catalogs", {})}):
        seen = {node: each["catalogs"][name] for node, each in facts.items() if each}
        judged.add(_judge_one(name, seen))
    return judged


def _judge_one(name: str, seen: dict[str, dict[str, Any]]) -> Judged:
    judged = Judged()
    for node, each in seen.items():
        if said := each.get("problem") or _missing(each):
            judged.findings.append(Finding("error", NAME, (node,), said, "", _ADVICE))
    told = ("fingerprint", "clips", "sampled files")
    same = {node: {k: each[k] for k in told} for node, each in seen.items() if "clips" in each}
    found = differences(f"dataset {name}", same)
    bad: dict[str, Severity] = {each.name: "error" for each in found}
    mounts = {node: {"filesystem": each["filesystem"]} for node, each in seen.items()}
    found += differences(f"dataset {name}", mounts)
    judged.differences += found
    judged.findings += tell_differences(NAME, found, bad, _ADVICE)
    judged.add(_judge_speed(name, seen))
    return judged


def _missing(each: dict[str, Any]) -> str:
    if not each["missing"]:
        return ""
    count, of = len(each["missing"]), each["sampled"]
    return f"{count} of {of} clips that were looked for are not there, such as {each['missing'][0]}"


def _judge_speed(name: str, seen: dict[str, dict[str, Any]]) -> Judged:
    speeds = {node: each["read"] for node, each in seen.items() if each.get("read")}
    if not speeds:
        few = f"the clips that were looked at have less than {_LEAST_BYTES // 2**20} MiB"
        return Judged(skipped=[Skipped(f"reading clips of {name}", few)])
    slow = far_below(speeds, _SLOW)
    judged = Judged(measures=[Measure(f"reading clips of {name}", "MB/s", speeds, slow)])
    if slow:
        what = f"clips are read at {speeds[slow[0]]:.0f} MB/s on {listed(slow)}"
        expected = f"about {middle(speeds.values()):.0f} MB/s, as on the others"
        advice = "Look at that node's mount options and its link to the storage."
        judged.findings.append(Finding("warning", NAME, slow, what, expected, advice))
    return judged


def _look_at(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"filesystem": filesystem_of(path)}
    try:
        catalog = Catalog.load(path)
    except DataError as error:
        return {**found, "problem": str(error)}
    paths = _sample(catalog)
    sizes = {each: _size(each) for each in paths}
    there = [each for each, size in sizes.items() if size is not None]
    listed_sizes = "\n".join(f"{Path(each).name} {size}" for each, size in sizes.items())
    return {
        **found,
        "fingerprint": catalog.fingerprint[:12],
        "clips": str(len(catalog)),
        "sampled files": hashlib.sha256(listed_sizes.encode()).hexdigest()[:12],
        "sampled": len(paths),
        "missing": [each for each, size in sizes.items() if size is None],
        "read": _read_speed(there),
    }


def _sample(catalog: Catalog) -> list[str]:
    """The files of some clips, spread over all by their identities: the same on every node."""
    if not len(catalog):
        return []
    rows = range(0, len(catalog), max(1, len(catalog) // _SAMPLE))
    paths: list[str] = catalog.table["path"].take(list(rows)).to_pylist()
    return list(dict.fromkeys(paths))


def _size(path: str) -> int | None:
    try:
        return Path(path).stat().st_size
    except OSError:
        return None


def _read_speed(paths: list[str]) -> float | None:
    """MB/s of reading files that are not in this machine's memory; None: too little to tell."""
    begun, num_bytes = time.perf_counter(), 0
    for path in paths:
        for length in _pieces(path):
            num_bytes += length
            if time.perf_counter() - begun > _READ_SECONDS:
                return num_bytes / 1e6 / (time.perf_counter() - begun)
    seconds = time.perf_counter() - begun
    return num_bytes / 1e6 / seconds if num_bytes >= _LEAST_BYTES else None


def _pieces(path: str) -> Iterator[int]:
    with Path(path).open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while piece := file.read(_PIECE):
            yield len(piece)

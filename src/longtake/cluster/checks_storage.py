"""Preflight checks of disks: clips, free space, the run directory and its speed; torch-free."""

import hashlib
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from longtake.cluster.findings import (
    CheckContext,
    CheckResult,
    Facts,
    FactsByNode,
    Severity,
    far_from_median,
    same_everywhere,
)
from longtake.config import Recipe
from longtake.data.catalog import Catalog
from longtake.errors import DataError, LongtakeError
from longtake.formatting import first_line, format_size
from longtake.health.system import disk_space, read_seconds, write_sync_seconds
from longtake.run_dir import RunDirectory

_MIB, _GIB = 2**20, 2**30

# --- Dataset: the catalogs, and a sample of their files -------------------------------------------

_SAMPLE = 64  # clips
_READ_SECONDS, _READ_BYTES = 1.0, 64 * _MIB  # limits: time for all clips, bytes of each
_MIN_READ_BYTES = 8 * _MIB
_READ_FACTOR = 0.5
_DATASET_ADVICE = (
    "Mount the same disk at the same place on all nodes, or copy the clips and the catalog."
)
_READ_ADVICE = "Look at that node's mount options and its link to the storage."


def measure_dataset(context: CheckContext) -> Facts:
    """Read each catalog's fingerprint and a sample of its clips, and measure the read speed."""
    if context.recipe is None:
        return {}
    sources = context.recipe.data.sources()
    return {"catalogs": {name: _look_at_catalog(path) for name, path in sources.items()}}


def judge_dataset(facts: FactsByNode) -> CheckResult:
    result = CheckResult()
    for name in sorted({name for each in facts.values() for name in each.get("catalogs", {})}):
        seen = {node: each["catalogs"][name] for node, each in facts.items() if each}
        result.add(_judge_catalog(name, seen))
    return result


def _judge_catalog(name: str, seen: FactsByNode) -> CheckResult:
    result = CheckResult()
    for node, each in seen.items():
        problem = each.get("problem")
        if problem is None and each["missing"]:
            count, sampled = len(each["missing"]), each["sampled"]
            problem = (
                f"{count} of {sampled} sampled clips do not exist, such as {each['missing'][0]}"
            )
        if problem is not None:
            result.find("error", (node,), problem, "", _DATASET_ADVICE)
    compared = ("fingerprint", "clips", "sampled files")
    same = {node: {k: each[k] for k in compared} for node, each in seen.items() if "clips" in each}
    result.add(same_everywhere(f"dataset {name}", same, "error", _DATASET_ADVICE))
    # Another mount is no fault if the files are the same, so it is listed without a finding.
    mounts = {node: {"filesystem": each["filesystem"]} for node, each in seen.items()}
    result.differences += same_everywhere(f"dataset {name}", mounts, "note", "").differences
    speeds = {node: each["read"] for node, each in seen.items() if each.get("read")}
    if not speeds:
        few = f"the sampled clips have less than {_MIN_READ_BYTES // _MIB} MiB"
        result.skip(f"reading clips of {name}", few)
    read = f"reading clips of {name}, MB/s"
    result.add(far_from_median(read, speeds, "lower", factor=_READ_FACTOR, advice=_READ_ADVICE))
    return result


def _look_at_catalog(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"filesystem": _filesystem_of(path)}
    try:
        catalog = Catalog.load(path)
    except DataError as error:
        return {**found, "problem": str(error)}
    # A sample spread over the catalog, which is sorted by identity: the same on every node.
    rows = range(0, len(catalog), max(1, len(catalog) // _SAMPLE))
    paths: list[str] = catalog.table["path"].take(list(rows)).to_pylist() if len(catalog) else []
    sizes: dict[str, int | None] = dict.fromkeys(paths)  # None: the file does not exist
    for each in sizes:
        with suppress(OSError):
            sizes[each] = Path(each).stat().st_size
    lines = "\n".join(f"{Path(each).name} {size}" for each, size in sizes.items())
    return {
        **found,
        "fingerprint": catalog.fingerprint[:12],
        "clips": str(len(catalog)),
        "sampled files": hashlib.sha256(lines.encode()).hexdigest()[:12],
        "sampled": len(sizes),
        "missing": [each for each, size in sizes.items() if size is None],
        "read": _read_speed({each: size for each, size in sizes.items() if size is not None}),
    }


def _read_speed(sizes: dict[str, int]) -> float | None:
    """Return MB/s of reading files past the page cache, for about a second; None: too few bytes."""
    seconds, num_bytes = 0.0, 0
    for path, size in sizes.items():
        seconds += read_seconds(Path(path), _READ_BYTES)
        num_bytes += min(size, _READ_BYTES)
        if seconds > _READ_SECONDS:
            return num_bytes / 1e6 / seconds
    return num_bytes / 1e6 / seconds if num_bytes >= _MIN_READ_BYTES else None


def _filesystem_of(path: Path) -> str:
    """Return kind and source of a path's file system, such as `nfs4 store:/clips`.

    The path need not exist.
    """
    wanted = path.absolute().resolve()
    above = {str(each) for each in (wanted, *wanted.parents)}
    found = [each for each in psutil.disk_partitions(all=True) if each.mountpoint in above]
    if not found:
        return "unknown"
    # A later mount at the same place hides an earlier one.
    nearest = max(enumerate(found), key=lambda each: (len(each[1].mountpoint), each[0]))[1]
    return f"{nearest.fstype} {nearest.device}"


# --- Disk space for checkpoints and temporary files -----------------------------------------------

_SHORT_BYTES, _OUT_BYTES = 10 * _GIB, _GIB
"""Free bytes of a disk below which there is a warning and an error, if the bytes that the run needs
are unknown."""
_MIN_FILES = 10_000
_BYTES_IN_FP32 = 4
_OPTIMIZER_BYTES = {"adamw": 8, "muon": 8, "adamw8bit": 2}
"""Bytes of optimizer state per trained weight in a checkpoint, by optimizer.

For Muon it is an upper bound, as its matrices have 4. For a user's own class 8 is assumed."""
_SPACE_ADVICE = (
    "Make room, name another folder with --set out=FOLDER, or keep fewer (checkpoint.keep)."
)


def measure_disk_space(context: CheckContext) -> Facts:
    """Measure the free space of each folder of a run; on rank 0 also the size of a checkpoint."""
    folders = {"temporary files": Path(tempfile.gettempdir())}
    if context.recipe is not None:
        folders["run directory"] = context.recipe.out
        if context.recipe.data.cache is not None:
            folders["data.cache"] = context.recipe.data.cache
    facts: Facts = {"folders": {}}
    for name, path in folders.items():
        # The folder may not exist yet: its nearest parent is on the same disk.
        there = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
        space = disk_space(there)
        free, files = space["disk_free_bytes"], space.get("disk_free_inodes", -1)
        facts["folders"][name] = {"bytes": int(free), "files": int(files)}
    if context.recipe is not None and context.process.is_first:
        keep = context.recipe.checkpoint.keep
        facts["checkpoint"] = {**_checkpoint_size(context.recipe), "keep": keep}
    return facts


def judge_disk_space(facts: FactsByNode) -> CheckResult:
    """Check that all kept checkpoints and the one that is being written fit on the disk."""
    result = CheckResult()
    known = next((each["checkpoint"] for each in facts.values() if "checkpoint" in each), None)
    needed = None
    if known:
        if known["bytes"]:
            needed = known["bytes"] * (known["keep"] + 1)
        else:
            result.skip("room for checkpoints", f"size unknown: {known['source']}")
    for name in sorted({name for each in facts.values() for name in each["folders"]}):
        free = {n: each["folders"][name] for n, each in facts.items() if name in each["folders"]}
        result.add(_judge_folder(name, free, needed if name == "run directory" else None))
    return result


def _judge_folder(name: str, free: dict[str, dict[str, int]], needed: int | None) -> CheckResult:
    short = tuple(node for node, each in free.items() if each["bytes"] < (needed or _SHORT_BYTES))
    gib = {node: each["bytes"] / _GIB for node, each in free.items()}
    result = CheckResult()
    result.measure(f"free for {name}", "GiB", gib, short)
    if short:
        least = min(free[node]["bytes"] for node in short)
        what = f"{format_size(least)} are free for {name}"
        expected = format_size(needed or _SHORT_BYTES)
        expected += " for checkpoint.keep and one more" if needed else ""
        severity: Severity = "error" if least < (needed or _OUT_BYTES) else "warning"
        result.find(severity, short, what, expected, _SPACE_ADVICE)
    few = tuple(node for node, each in free.items() if 0 <= each["files"] < _MIN_FILES)
    if few:
        what = f"{min(free[node]['files'] for node in few)} more files fit on the disk of {name}"
        result.find("warning", few, what, f"{_MIN_FILES}", _SPACE_ADVICE)
    return result


def _checkpoint_size(recipe: Recipe) -> dict[str, int | str | None]:
    """Return a checkpoint's size in bytes, None if unknown, and the source of that number.

    The size of the newest checkpoint; before the first one an upper bound: the weights, averages
    and optimizer states of the recipe's model.
    """
    run = RunDirectory(recipe.out)
    if steps := run.checkpoint_steps():
        files = run.checkpoint_path(steps[-1]).rglob("*")
        found = sum(path.stat().st_size for path in files if path.is_file())
        return {"bytes": found, "source": f"the checkpoint of step {steps[-1]}"}
    try:
        from longtake.models.components import outline
        from longtake.models.trainable import trained_state

        num_weights = sum(value.numel() for value in trained_state(outline(recipe).model).values())
    except (LongtakeError, OSError, ImportError) as error:
        return {"bytes": None, "source": first_line(error)}
    num_copies = 1 + len(recipe.ema.averages())
    per_weight = _BYTES_IN_FP32 * num_copies + _OPTIMIZER_BYTES.get(recipe.optimizer.kind, 8)
    return {"bytes": num_weights * per_weight, "source": "predicted from the model"}


# --- Run directory: rank 0 leaves a file in it, which all other nodes must see --------------------

RUN_DIRECTORY_ADVICE = (
    "Put `out` on a disk that all nodes share (NFS, Lustre, ...), mounted at the same place, and "
    "let the user that trains write there."
)
_SEE_SECONDS, _POLL_SECONDS = 5.0, 0.1
_SHOWN_SECONDS, _SLOW_SECONDS = 0.5, 3.0  # delays of a new file that are shown, and reported


def leave_token(context: CheckContext, created: list[Path]) -> None:
    """Create the run directory if needed, and write a file with this preflight's token there.

    Folders to create are appended to `created`, the deepest first, before they exist, so that
    `remove_token` can remove them even after a signal.

    Raises:
        OSError: the folder or the file cannot be written.
    """
    if context.recipe is None:
        return
    folder = context.recipe.out.absolute()
    created += [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    # fsync: NFS sends a file to its server at close or fsync, and other nodes read it from there.
    with _token_path(context).open("w") as file:
        file.write(context.token)
        file.flush()
        os.fsync(file.fileno())


def remove_token(context: CheckContext, created: list[Path]) -> None:
    """Remove, on rank 0, the files of this preflight and the folders created for them."""
    if context.recipe is None or not context.process.is_first:
        return
    # With a pattern, as a rank that was killed may have left its own file.
    with suppress(OSError):
        for path in context.recipe.out.glob(f"{_token_path(context).name}*"):
            path.unlink(missing_ok=True)
    for folder in created:
        with suppress(OSError):
            folder.rmdir()


def measure_run_directory(context: CheckContext) -> Facts:
    """Wait until the first node's token file is visible on this node, and try to write one."""
    if context.recipe is None:
        return {}
    folder, path, cannot_write = context.recipe.out, _token_path(context), ""
    seen_after = _seconds_until_seen(path, context.token)
    own = path.with_suffix(f".{context.process.rank}")
    try:
        own.write_text(context.token)
        own.unlink()
    except OSError as error:
        cannot_write = error.strerror or str(error)
    return {
        "path": str(folder.absolute()),
        "filesystem": _filesystem_of(folder),
        "exists": folder.is_dir(),
        "seen_after": seen_after,
        "cannot_write": cannot_write,
    }


def judge_run_directory(facts: FactsByNode) -> CheckResult:
    """Find nodes that do not see the same run directory as the others.

    If no node has it, rank 0 could not create it and has reported why.
    """
    seen = {node: each for node, each in facts.items() if each}
    paths = {
        node: {key: str(each[key]) for key in ("path", "filesystem")} for node, each in seen.items()
    }
    path_is_error: dict[str, Severity] = {"path": "error"}
    result = same_everywhere("run directory", paths, "note", RUN_DIRECTORY_ADVICE, path_is_error)
    is_somewhere = any(each["exists"] for each in seen.values())
    for node, each in seen.items() if is_somewhere else ():
        path, problem = each["path"], ""
        if not each["exists"]:
            problem = "does not exist, though the first node created it: it is not shared"
        elif each["cannot_write"]:
            problem = f"cannot be written: {each['cannot_write']}"
        elif each["seen_after"] is None:
            waited = f"its file was not seen in {_SEE_SECONDS:g} s"
            problem = f"is another folder than on the first node: {waited}"
        if problem:
            result.find("error", (node,), f"{path} {problem}", "", RUN_DIRECTORY_ADVICE)
    late = {node: each["seen_after"] for node, each in seen.items() if each["seen_after"]}
    slow = tuple(node for node, seconds in late.items() if seconds > _SLOW_SECONDS)
    if slow:
        what = f"a new file is seen only after {late[slow[0]]:.1f} s"
        expected, advice = f"within {_SLOW_SECONDS:g} s", "Mount it with a shorter acdirmax=."
        result.find("note", slow, what, expected, advice)
    if any(seconds > _SHOWN_SECONDS for seconds in late.values()):
        result.measure("new file seen after", "s", late, slow)
    return result


def _token_path(context: CheckContext) -> Path:
    assert context.recipe is not None
    return context.recipe.out / f".longtake_preflight_{context.token}"


def _seconds_until_seen(path: Path, token: str) -> float | None:
    """Return the seconds until a file with the preflight's token is visible; None: too long."""
    begun = time.monotonic()
    while (waited := time.monotonic() - begun) < _SEE_SECONDS:
        with suppress(OSError):
            if path.read_text() == token:
                return waited
        # Without the folder itself, waiting is in vain: it is not shared.
        if not path.parent.is_dir():
            return None
        time.sleep(_POLL_SECONDS)
    return None


# --- Speed of the run directory, on all nodes at once as for a checkpoint -------------------------

_WRITE_SECONDS, _PROBE_BYTES, _MAX_WRITE_BYTES, _NUM_SYNCS = 1.0, 4 * _MIB, 64 * _MIB, 9
_WRITE_FACTOR, _MIN_WRITE_MB = 0.5, 20.0
_SYNC_FACTOR, _HARMLESS_SYNC_MS, _MAX_SYNC_MS = 3.0, 20.0, 500.0
_SPEED_ADVICE = (
    "Look at that node's mount and its link to the storage; checkpoints wait for the slowest."
)


def measure_disk_speed(context: CheckContext) -> Facts:
    """Measure MB/s of a large write to the run directory, and ms of an fsync after a small one."""
    if context.recipe is None or not context.recipe.out.is_dir():
        return {}
    rank = context.process.rank
    path = context.recipe.out / f".longtake_preflight_{context.token}_speed_{rank}"
    try:
        # A small write first, so that the large one takes about a second on any disk.
        probe = write_sync_seconds(path, _PROBE_BYTES)
        num_bytes = int(min(_MAX_WRITE_BYTES, _WRITE_SECONDS / probe * _PROBE_BYTES))
        write = num_bytes / 1e6 / write_sync_seconds(path, num_bytes)
        syncs = [write_sync_seconds(path) for _ in range(_NUM_SYNCS)]
        return {"write": write, "sync_ms": 1000 * median(syncs)}
    finally:
        path.unlink(missing_ok=True)


def judge_disk_speed(facts: FactsByNode) -> CheckResult:
    result = far_from_median(
        "writing to the run directory, MB/s",
        {node: each["write"] for node, each in facts.items() if each},
        "lower",
        factor=_WRITE_FACTOR,
        limit=_MIN_WRITE_MB,
        advice=_SPEED_ADVICE,
    )
    syncs = far_from_median(
        "fsync of the run directory, ms",
        {node: each["sync_ms"] for node, each in facts.items() if each},
        "higher",
        factor=_SYNC_FACTOR,
        harmless=_HARMLESS_SYNC_MS,
        limit=_MAX_SYNC_MS,
        advice=_SPEED_ADVICE,
    )
    result.add(syncs)
    return result

"""Reads what a run, a catalog and a cache hold; each file format is known in one function here.

Nothing of longtake is imported, so that one reader serves the old commit and the new. What is read
is named as the scenarios name it.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from tests.goldens.tree import Tree

VERSION = 1
"""Raise it when other things are read; not when the same is read from another format."""

_FIELDS = (
    "epoch",
    "batch",
    "loss",
    "loss_by_sigma",
    "grad_norm",
    "weight_norm",
    "update_ratio",
    "group_grad_norms",
    "group_weight_norms",
    "group_update_ratios",
    "learning_rate",
    "verdict",
)
_LEDGER = np.dtype(
    [("identity", "V7"), ("step", "<u4"), ("stream", "u1"), ("epoch", "V3"), ("checksum", "u1")]
)
_REJECTED, _NOTHING = 0x80, 0xFF
# Where a clip lies, when its file was written, and what older trees do not read.
_UNSTABLE_COLUMNS = ("path", "file_mtime_ns", "prepared_from", "color_matrix")


def read_run(tree: Tree, run: Path) -> dict[str, Any]:
    """Numbers of each step, samples of each batch, and checksums of each checkpoint."""
    return {
        "steps": read_metrics(tree, run),
        "samples": read_ledger(tree, run),
        "checkpoints": read_checkpoints(tree, run),
        "rollbacks": read_rollbacks(tree, run),
    }


def read_metrics(tree: Tree, run: Path) -> dict[str, Any]:
    """Loss, norms and learning rate by step; of a step that was trained again, the last time."""
    step = tree.name("fields", "step")
    rows = {str(row[step]): row for row in _json_lines(run / tree.name("files", "metrics.jsonl"))}
    names = {field: tree.name("fields", field) for field in _FIELDS}
    return {
        number: {field: row[name] for field, name in names.items() if name in row}
        for number, row in rows.items()
    }


def read_ledger(tree: Tree, run: Path) -> dict[str, list[str]]:
    """Identities that all ranks trained, sorted, by batch; `-` before those that were rejected."""
    folders = sorted((run / tree.name("files", "ledger")).glob("launch_*"))
    starts = [json.loads((each / "launch.json").read_text())["start_step"] for each in folders]
    samples: dict[str, list[str]] = {}
    for number, folder in enumerate(folders):
        # What a later launch began with again was abandoned.
        until = min(starts[number + 1 :], default=1 << 32)
        for path in sorted(folder.glob("rank_*.bin")):
            data = path.read_bytes()
            whole = len(data) // _LEDGER.itemsize * _LEDGER.itemsize
            for record in np.frombuffer(data[:whole], _LEDGER):
                stream, step = int(record["stream"]), int(record["step"])
                if step < until and stream != _NOTHING:
                    mark = "-" if stream & _REJECTED else ""
                    identity = f"{mark}{record['identity'].tobytes().hex()}"
                    samples.setdefault(str(step), []).append(identity)
    return {step: sorted(samples[step]) for step in sorted(samples, key=int)}


def read_checkpoints(tree: Tree, run: Path) -> dict[str, dict[str, str]]:
    """A checksum of each part (model, averages, optimizer) by step, of whole checkpoints."""
    found: dict[str, dict[str, str]] = {}
    for folder in sorted((run / tree.name("files", "checkpoints")).glob("step_*")):
        if (folder / tree.name("files", "COMMITTED")).exists():
            parts = sorted(path.parent for path in folder.rglob(".metadata"))
            names = tree.old_names("files")
            found[folder.name] = {
                names.get(name := part.relative_to(folder).as_posix(), name): _checksum(part)
                for part in parts
            }
    return found


def read_rollbacks(tree: Tree, run: Path) -> list[dict[str, Any]]:
    """Read the steps between which each rollback led, and the batches that it skipped."""
    path = run / tree.name("files", "rollbacks.jsonl")
    names = {field: tree.name("fields", field) for field in ("from_step", "to_step", "skipped")}
    rows = _json_lines(path) if path.exists() else iter(())
    return [{field: row[name] for field, name in names.items()} for row in rows]


def read_catalog(tree: Tree, path: Path) -> list[dict[str, Any]]:
    """Rows in their order, but for where files lie and when they were written."""
    names = tree.old_names("columns")
    rows = []
    for row in pq.read_table(path).to_pylist():
        named = {names.get(name, name): _plain(value) for name, value in row.items()}
        named["file"] = Path(str(named["path"])).name
        rows.append({name: each for name, each in named.items() if name not in _UNSTABLE_COLUMNS})
    return rows


def read_cache(tree: Tree, folder: Path) -> dict[str, list[str]]:
    """Checksums of the tensors of each entry, sorted, by kind; entries are named by code's digest.

    An entry is a file in trees before there were packs, of which each has many.
    """
    from safetensors import safe_open

    found: dict[str, list[str]] = {}
    names = tree.old_names("files")
    for path in sorted(folder.rglob("*.safetensors")):
        entries: dict[str, dict[str, Any]] = {}
        kind = path.relative_to(folder).parts[0]
        if kind == "index":
            continue
        with safe_open(path, framework="pt") as file:
            for full in file.keys():  # noqa: SIM118
                key, _, name = full.rpartition(".")
                entries.setdefault(key, {})[name] = file.get_tensor(full)
        digests = [_digest(tensors) for tensors in entries.values()]
        found.setdefault(names.get(kind, kind), []).extend(digests)
    return {kind: sorted(each) for kind, each in found.items()}


def _checksum(part: Path) -> str:
    """Checksum of all that a folder of torch's distributed checkpoint holds, under any name."""
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    _load_state_dict(
        state,
        storage_reader=FileSystemReader(part),
        planner=_EmptyStateDictLoadPlanner(),  # type: ignore[no-untyped-call]
        no_dist=True,
    )
    return _digest(state)


def _digest(values: object) -> str:
    each = sorted(hashlib.sha256(leaf).hexdigest() for leaf in _leaves(values))
    return hashlib.sha256("".join(each).encode()).hexdigest()[:32]


def _leaves(value: object) -> Iterator[bytes]:
    import torch

    if isinstance(value, dict):
        for inner in value.values():
            yield from _leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, torch.Tensor):
        tensor = value.detach().contiguous().reshape(-1)
        facts = f"{value.dtype} {list(value.shape)}".encode()
        yield facts + tensor.view(torch.uint8).numpy().tobytes()
    else:
        yield repr(value).encode()


def _plain(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else value


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):  # half a line of a process that was killed
            yield json.loads(line)

"""Keeps what planning found out in the user's cache folder, so that nothing is traced twice.

An entry is one record as JSON. Its name is a checksum of everything that the record depends on, so
that another recipe, version or device has another entry. Entries that cannot be read are ignored.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError
from torch.backends import cudnn

import longtake
from longtake import fsio
from longtake.config import Recipe, flat, is_among
from longtake.models.numerics import choose_precision
from longtake.models.releases import release_version
from longtake.parallel import attention_rules
from longtake.planner.devices import DeviceBudget
from longtake.run_dir import package_versions
from longtake.trust import training_classes

VARIABLE = "LONGTAKE_PLAN_CACHE"
"""Environment variable that turns the cache off."""

_NUM_KEPT = 64
_MOST_BYTES = 4 * 2**20  # of an entry; usual are 50 to 300 KB
_SOURCES = (".py", ".json", ".toml")
_IN_NO_PLAN = (
    *("out", "seed", "guard", "watch", "checkpoint", "evaluation", "tracking"),
    *(f"optimizer.{name}" for name in ("learning_rate", "muon_learning_rate", "betas")),
    *(f"optimizer.{name}" for name in ("weight_decay", "max_grad_norm", "min_lr_ratio")),
    *(f"optimizer.{name}" for name in ("schedule", "schedule_cycles", "schedule_power", "eps")),
    *(f"optimizer.{name}" for name in ("warmup_steps", "warmup_ratio")),
    *("training.steps", "sampling.fps"),
)
"""Keys and sections of a recipe that no record in the cache depends on, nor whether a suggested
change of another key would be accepted."""
_OF_CLIPS_ONLY = tuple(
    f"data.{name}"
    for name in (
        *("catalog", "catalogs", "weights", "repeats", "trigger", "workers", "store", "hdr"),
        *("drift_limit", "on_drift", "on_change", "max_quarantined_clips", "retry_quarantined"),
        *("sample_timeout_seconds", "sample_memory_gib", "frame_cache_gib", "loss_weights"),
    )
)
"""Further such keys, of the clips that are trained and of their reading. A plan reads no clip; but
a text encoder of kind "words" takes its vocabulary from their captions."""

_T = TypeVar("_T")
Facts = dict[str, Any]


def recalled(
    kind: str,
    facts: Facts | None,
    adapter: TypeAdapter[_T],
    find: Callable[[], _T],
    is_valid: Callable[[_T], bool] = lambda _: True,
) -> _T:
    """Return a record from the cache, or find it and keep it there.

    Args:
        kind: kind of record, by which entries are named.
        facts: everything that the record depends on; None: it is never kept.
        adapter: reads and writes the record.
        find: finds the record; what it raises is not kept.
        is_valid: tells whether a kept record still holds.
    """
    path = None
    if facts is not None:
        with suppress(RuntimeError):  # raised for a user without a home directory
            name = _checksum(facts | {"kind": kind})
            path = fsio.cache_folder() / "plans" / f"{kind}-{name[:32]}.json"
    if path is not None:
        with suppress(ValidationError, ValueError):
            entry = fsio.read_json(path)
            record = entry.get("record")
            if entry.get("checksum") == _checksum(record):
                kept = adapter.validate_python(record)
                if is_valid(kept):
                    with suppress(OSError):
                        os.utime(path)  # the entries that were used last are kept
                    return kept
    found = find()
    if path is not None:
        with suppress(OSError, ValueError):  # the next plan finds it again
            record = adapter.dump_python(found, mode="json")
            if len(json.dumps(record)) <= _MOST_BYTES:
                path.parent.mkdir(parents=True, exist_ok=True)
                entry = {"checksum": _checksum(record), "record": record}
                fsio.write_json(path, entry, by_many=True)
                fsio.remove_oldest(path.parent, _NUM_KEPT)
    return found


def facts_of(recipe: Recipe, device: DeviceBudget, **more: Any) -> Facts | None:
    """Return everything on which a plan of a recipe depends, or None if that cannot be known.

    It cannot for classes of the user's own: changes of their code are not detected.
    """
    if os.environ.get(VARIABLE) == "off" or training_classes(recipe):
        return None
    file = recipe.model.one_file()
    sections = recipe.model.without_file(), recipe.codec, recipe.text, recipe.text.second_encoder()
    releases = [
        release_version(each.pretrained, getattr(each, "subfolder", ""))
        for each in sections
        if each is not None and each.pretrained
    ]
    if None in releases:
        return None
    if file is not None:
        releases.append(str(fsio.file_version(file)))
    ignored, catalogs = [*_IN_NO_PLAN], dict[str, Any]()
    if recipe.text.kind == "words":
        catalogs = {name: fsio.file_version(path) for name, path in recipe.data.sources().items()}
    else:
        ignored += _OF_CLIPS_ONLY
    sampling = recipe.sampling
    adapters = recipe.model.training_adapter, sampling.adapter, sampling.adapter_2
    return {
        "adapters": [None if each is None else fsio.file_version(each) for each in adapters],
        "recipe": {key: value for key, value in flat(recipe).items() if not is_among(key, ignored)},
        "releases": releases,
        "catalogs": catalogs,
        "device": asdict(device),
        "precision": choose_precision(recipe.training.precision, torch.device("cpu")),
        "threads": torch.get_num_threads() if device.target == "cpu" else None,
        "tf32": cudnn.allow_tf32,
        "diffusers": {
            name: os.environ[name] for name in os.environ if name.startswith("DIFFUSERS")
        },
        "attention": [*attention_rules.CHOICES.items()],
        "python": sys.version_info[:2],
        "versions": package_versions(),
        "code": code_checksum(),
        **more,
    }


@cache
def code_checksum() -> str:
    """Return a checksum of longtake's own source files and of the configurations it ships."""
    folder = Path(longtake.__file__).parent
    sources = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in _SOURCES:
            sources.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return sources.hexdigest()


def _checksum(value: object) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()

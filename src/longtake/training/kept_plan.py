"""Keeps what `fit` has found in the run directory, so that a restart need not look again.

The answer depends on the recipe, the world, the device and the code alone. A module of the user's
own is looked at each time: what it is made of is not known here.
"""

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from importlib import metadata
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

import longtake
from longtake import config
from longtake.config import Recipe
from longtake.fsio import read_json, write_json
from longtake.models.numerics import Precision
from longtake.parallel.collectives import from_first
from longtake.parallel.mesh import World
from longtake.planner.devices import Target
from longtake.run_dir import RunDirectory
from longtake.training.card import card_of
from longtake.training.fit import Fit, fit

_LIBRARIES = ("torch", "diffusers", "transformers", "peft")


def plan_of(
    recipe: Recipe,
    precision: Precision,
    run: RunDirectory,
    world: World,
    free_bytes: int | None = None,
) -> Fit:
    """What `fit` says, or what it said to a launch in the same circumstances.

    Raises:
        PlanError: a trainable parameter would get no gradient, or no policy fits the memory.
    """
    kept = (
        _read(run, _circumstances(recipe, precision, world, free_bytes)) if world.is_first else None
    )
    return from_first(kept, world) or fit(recipe, precision, world, free_bytes)


def keep_plan(
    plan: Fit,
    recipe: Recipe,
    precision: Precision,
    run: RunDirectory,
    world: World,
    free_bytes: int | None = None,
) -> None:
    """Write down what was found; rank 0 calls it when there is a run."""
    if recipe.trainable.module is None:
        key = _circumstances(recipe, precision, world, free_bytes)
        if read_json(run.plan_path).get("circumstances") == key:
            return
        fit_as_json = TypeAdapter(Fit).dump_python(plan, mode="json")
        with suppress(OSError):  # the next launch looks again
            write_json(run.plan_path, {"circumstances": key, "fit": fit_as_json})


def _read(run: RunDirectory, circumstances: str) -> Fit | None:
    kept = read_json(run.plan_path)
    if kept.get("circumstances") != circumstances:
        return None
    try:
        return TypeAdapter(Fit).validate_python(kept.get("fit"))
    except ValidationError:
        return None


def _circumstances(
    recipe: Recipe, precision: Precision, world: World, free_bytes: int | None
) -> str:
    """A checksum of all that the answer depends on."""
    target: Target = "cuda" if world.device.type == "cuda" else "cpu"
    facts = {
        "recipe": config.dump(config.kept(recipe)),
        "precision": precision,
        "world": [world.size, os.environ.get("LOCAL_WORLD_SIZE")],
        "card": asdict(card_of(recipe, target, world.size)),
        "free_bytes": free_bytes,
        "versions": {name: metadata.version(name) for name in _LIBRARIES},
        "code": _code(),
    }
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()


@cache
def _code() -> str:
    """A checksum of what is in the package's own files."""
    folder = Path(longtake.__file__).parent
    sources = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        sources.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return sources.hexdigest()

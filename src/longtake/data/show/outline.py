"""What a recipe makes of its catalogs before it is trained, as numbers."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from longtake.config import Bucket, DataSection, Recipe
from longtake.data.buckets import Rows
from longtake.data.catalog import Catalog
from longtake.data.drift import drifts
from longtake.data.plan import Plan, StagePlan, Stream
from longtake.data.review import review
from longtake.data.show.sieve import Sieve, sift
from longtake.errors import DataError

NUM_EXAMPLES = 3
"""Paths that are named for each reason to drop clips."""
TIMELINE_SPANS = 60
"""Spans that a timeline is cut into; fewer where there are fewer steps."""


def show_plan(plan: Plan, recipe: Recipe) -> dict[str, Any]:
    """Tell what a new run trains on.

    Returns:
        JSON-able, with these keys.

        stages: one entry for each catalog of each stage: `stage`, `source` (the catalog's name),
            `share` of the stage's batches, `first_step`, `steps` (null: no end) and `ramp_steps`
            of the stage; `trained_steps` that fall to this catalog until training ends, `epochs`
            that these make, `clips` of the catalog, `selected` of them, `dropped` {reason: clips},
            `examples` {reason: paths} and `buckets`.
        buckets: those of the first stage. Each has `num_frames`, `height`, `width` and, of all
            clips of the catalog, each in just one bucket: `clips` = `kept` (trained on) +
            `dropped`, the latter by `reasons` {reason: clips}. A dropped clip counts where it
            would be trained otherwise; one that is too short for all buckets, in the nearest one.
            Further `displaced` of the kept (too short for a bucket that would crop them less),
            `batches_per_epoch`, `tail` (clips of the first epoch that are carried into the next),
            `last_batch` (samples of the last batch when the stage's epochs are over; null: they
            never are), and of the kept clips' pictures the mean `share_cut` away, the mean `scale`
            and how many are `enlarged`.
        timeline: for each stage its share of the batches in up to 60 spans of the training.
        drift: how each stage's clips differ from those of the one before; `distance` is null where
            all were alike before.
        warnings: a sentence each.
        refusal: why training would refuse to begin; null if it would not.
        steps, planned_steps: of the training, and of all stages (null: no end).
        batch_size: samples per step.
    """
    steps = recipe.training.steps
    stages = [
        entry
        for number, stage in enumerate(plan.stages)
        for entry in _streams(plan, number, stage, recipe)
    ]
    warnings, refusal = _judged(plan, recipe.data, steps)
    first = plan.stages[0].stage.name
    return {
        "stages": stages,
        "buckets": [
            {"stage": entry["stage"], "source": entry["source"], **bucket}
            for entry in stages
            if entry["stage"] == first
            for bucket in entry["buckets"]
        ],
        "timeline": _timeline(plan, steps),
        "drift": _drift(plan, recipe.data.drift_limit),
        "warnings": [*warnings, *_poor_fits(stages)],
        "refusal": refusal,
        "steps": steps,
        "planned_steps": plan.end_step,
        "batch_size": plan.batch_size,
    }


def _streams(plan: Plan, number: int, stage: StagePlan, recipe: Recipe) -> Iterator[dict[str, Any]]:
    end = _end(plan, recipe.training.steps)
    trained, total = plan.taken(end)[number], sum(stage.weights)
    for stream, weight, count in zip(stage.streams, stage.weights, trained, strict=True):
        catalog = stream.parts[-1].catalog
        sieve = sift(catalog, stage.stage, recipe.data)
        buckets = [_bucket(plan, stream, sieve, i) for i in range(len(sieve.shapes))]
        dropped = dict(zip(sieve.reasons, sieve.counts[:, 1:].sum(0).tolist(), strict=True))
        yield {
            "stage": stream.stage,
            "source": stream.source,
            "share": weight / total,
            "first_step": plan.timeline.borders[number],
            "steps": plan.timeline.lengths[number],
            "ramp_steps": plan.timeline.ramps[number],
            "trained_steps": count,
            "epochs": _epochs(stream, count, plan.batch_size),
            "clips": len(catalog),
            "selected": sum(bucket["kept"] for bucket in buckets),
            "dropped": dropped,
            "examples": _examples(catalog, sieve),
            "buckets": buckets,
        }


def _end(plan: Plan, steps: int) -> int:
    return steps if plan.end_step is None else min(steps, plan.end_step)


def _epochs(stream: Stream, num_batches: int, batch_size: int) -> float:
    """How many epochs some batches make; whole where they are all that there are."""
    leg = stream.parts[-1].leg
    if leg.num_epochs is not None and num_batches == leg.num_batches:
        return float(leg.num_epochs)
    return num_batches * batch_size / sum(leg.sizes)


def _bucket(plan: Plan, stream: Stream, sieve: Sieve, index: int) -> dict[str, Any]:
    catalog, leg = stream.parts[-1].catalog, stream.parts[-1].leg
    rows, shape = sieve.kept(index), sieve.shapes[index]
    kept, *dropped = sieve.counts[index].tolist()
    last = None
    if leg.num_epochs is not None and kept:
        last = leg.num_epochs * kept % plan.batch_size or plan.batch_size
    return {
        **shape.model_dump(),
        "clips": kept + sum(dropped),
        "kept": kept,
        "dropped": sum(dropped),
        "reasons": {name: n for name, n in zip(sieve.reasons, dropped, strict=True) if n},
        "displaced": int(np.count_nonzero(sieve.is_displaced[rows])),
        "batches_per_epoch": kept / plan.batch_size,
        "tail": kept % plan.batch_size,
        "last_batch": last,
        **_fit(catalog, rows, shape),
    }


def _fit(catalog: Catalog, rows: Rows, shape: Bucket) -> dict[str, Any]:
    """How the pictures of some clips become a bucket's: scaled to cover it, then cut to it."""
    if not len(rows):
        return {"share_cut": None, "scale": None, "enlarged": 0, "enlarged_by": None}
    across = shape.width / catalog.column("width")[rows]
    down = shape.height / catalog.column("height")[rows]
    scale = np.maximum(across, down)
    enlarged = scale[scale > 1]
    return {
        "share_cut": float(1 - (np.minimum(across, down) / scale).mean()),
        "scale": float(scale.mean()),
        "enlarged": len(enlarged),
        "enlarged_by": float(enlarged.mean()) if len(enlarged) else None,
    }


def _examples(catalog: Catalog, sieve: Sieve) -> dict[str, list[str]]:
    return {
        name: [catalog.clip(int(row)).path for row in sieve.dropped(reason)[:NUM_EXAMPLES]]
        for reason, name in enumerate(sieve.reasons)
    }


def _timeline(plan: Plan, steps: int) -> dict[str, list[float]]:
    """By stage, its share of the batches in equal spans of the training."""
    end = _end(plan, steps)
    spans = min(end, TIMELINE_SPANS)
    edges = [end * place // spans for place in range(spans + 1)]
    taken = np.array([plan.timeline.taken(edge) for edge in edges])
    shares = np.diff(taken, axis=0) / np.diff(edges)[:, None]
    return {stage.stage.name: shares[:, i].tolist() for i, stage in enumerate(plan.stages)}


def _drift(plan: Plan, limit: float) -> list[dict[str, Any]]:
    return [
        {
            **asdict(drift),
            "distance": drift.distance if math.isfinite(drift.distance) else None,
            "is_above_limit": drift.distance > limit,
        }
        for drift in drifts(plan)
    ]


def _judged(plan: Plan, data: DataSection, steps: int) -> tuple[list[str], str | None]:
    """The warnings, and why training would refuse: to be seen together with what is behind it."""
    try:
        return review(plan, data, steps), None
    except DataError as refusal:
        lenient = data.model_copy(update={"on_drift": "warn"})
        return review(plan, lenient, _end(plan, steps)), str(refusal)


def _poor_fits(stages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What makes worse videos of good clips."""
    is_one = len({entry["source"] for entry in stages}) == 1
    for entry in stages:
        source = "" if is_one else f", catalog {entry['source']}"
        for said in _poor_fits_of(entry["buckets"]):
            yield f"stage {entry['stage']}{source}: {said}"


def _poor_fits_of(buckets: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    kept = sum(bucket["kept"] for bucket in buckets)
    enlarged = sum(bucket["enlarged"] for bucket in buckets)
    if enlarged:
        times = sum(bucket["enlarged"] * (bucket["enlarged_by"] or 0) for bucket in buckets)
        yield (
            f"{enlarged:,} of {kept:,} clips are smaller than their bucket and are enlarged, "
            f"{times / enlarged:.2f} times on average"
        )
    displaced = sum(bucket["displaced"] for bucket in buckets)
    if displaced:
        yield (
            f"{displaced:,} of {kept:,} clips are too short for the bucket that would crop them "
            "least, and are cut to another"
        )

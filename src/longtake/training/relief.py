"""What to change where a recipe does not fit, each change with its own prediction."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from longtake import config
from longtake.config import Bucket, Recipe
from longtake.errors import LongtakeError
from longtake.formatting import format_size
from longtake.planner.activation_checkpointing import options_of
from longtake.training.forecast import Forecast
from longtake.training.outlined import outlined_step
from longtake.training.resident import memory_of

_PIXELS = 32
"""What heights and widths are rounded to: codecs and patches of the shipped models divide it."""
_LEAST_PIXELS = 64
_BESIDE_THE_STEP = ("optimizer.", "data.cache", "data.windows")
"""Keys that do not change what forward and backward pass do."""


@dataclass(frozen=True)
class Relief:
    """One change of the recipe, and the least that a step takes with it."""

    what: str
    changes: Sequence[str]
    """As `--set` takes them."""
    policy: str
    """The recompute policy that takes least."""
    step_peak_bytes: int
    fits: bool


def find_reliefs(recipe: Recipe, known: Forecast, world_size: int = 1) -> list[Relief]:
    """What could be changed, the most helpful first; then, if no change is enough, all together.

    Args:
        recipe: that does not fit.
        known: its forecast, with a budget.
        world_size: processes that share a batch.
    """
    candidates = [_tried(what, new, recipe, known, world_size) for what, new in _all(recipe, known)]
    helping = [each for each in candidates if each and each.step_peak_bytes < _least_bytes(known)]
    helping.sort(key=lambda relief: relief.step_peak_bytes)
    if len(helping) < 2 or any(relief.fits for relief in helping):
        return helping
    together = _tried("all of these together", _joined(helping), recipe, known, world_size)
    return [*helping, together] if together else helping


def as_lines(reliefs: Sequence[Relief]) -> list[str]:
    """Each change in a line."""
    lines = []
    for relief in reliefs:
        settings = " ".join(f"--set '{change}'" for change in relief.changes)
        verdict = "fits" if relief.fits else "not enough"
        lines.append(
            f"  {relief.what}: {format_size(relief.step_peak_bytes)}, {verdict} ({settings})"
        )
    return lines


def _tried(
    what: str, changes: list[str], recipe: Recipe, known: Forecast, world_size: int
) -> Relief | None:
    """The prediction for a changed recipe; None if that does not fit together."""
    policy, budget = known.least.name, known.card.budget_bytes
    assert budget is not None
    try:
        changed = config.changed(recipe, changes)
        if all(change.startswith(_BESIDE_THE_STEP) for change in changes):
            step, trace = replace(known.step, recipe=changed), known.traces[policy]
        else:
            step = outlined_step(changed, known.card.device, world_size, known.step.per_node)
            trace = step.tracer.trace(options_of(policy, tuple(step.tracer.subject.blocks)))
    except LongtakeError:  # a smaller shape may not divide into the codec's or the model's
        return None
    peak = memory_of(policy, trace, step).step_peak_bytes
    return Relief(what, changes, policy, peak, peak <= budget)


def _joined(reliefs: Sequence[Relief]) -> list[str]:
    """All their changes, the more helpful where two change the same."""
    changes: dict[str, str] = {}
    for relief in reliefs:
        keys = [change.partition("=")[0] for change in relief.changes]
        is_free = not any(key in changes for key in keys)
        if is_free and not ("optimizer.kind" in keys and "optimizer.offload" in changes):
            changes |= dict(zip(keys, relief.changes, strict=True))
    return list(changes.values())


def _least_bytes(known: Forecast) -> int:
    return known.least.step_peak_bytes


def _all(recipe: Recipe, known: Forecast) -> Iterator[tuple[str, list[str]]]:
    if known.step.micro_batch_size > 1:
        half = known.step.micro_batch_size // 2
        if known.step.micro_batch_size * known.step.num_micro_batches % half == 0:
            yield f"micro-batches of {half}", [f"training.micro_batch_size={half}"]
    yield from _smaller_clips(recipe.data.buckets)
    if recipe.trainable.base() == "full":
        yield "LoRA instead of all weights", ["trainable.kind=lora"]
    elif recipe.trainable.base() == "lora" and recipe.trainable.rank > 1:
        half = recipe.trainable.rank // 2
        yield f"LoRA of rank {half}", [f"trainable.rank={half}"]
    if recipe.model.dtype == "fp32":
        yield "weights in bf16", ["model.dtype=bf16"]
    if not recipe.optimizer.offload and recipe.optimizer.kind == "adamw":
        if known.card.device.target == "cuda":
            yield "optimizer states in the computer's memory", ["optimizer.offload=true"]
        yield "optimizer states in 8 bits (needs torchao)", ["optimizer.kind=adamw8bit"]
    if known.fixed.encoders:
        yield "cached latents and prompts", ["data.cache=cache", "data.windows=1"]


def _smaller_clips(buckets: Sequence[Bucket]) -> Iterator[tuple[str, list[str]]]:
    smaller = [
        shape.model_copy(update={"height": _less(shape.height), "width": _less(shape.width)})
        for shape in buckets
    ]
    yield f"{_listed(smaller)}", [_as_setting(smaller)]
    if any(shape.num_frames > 1 for shape in buckets):
        shorter = [
            shape.model_copy(update={"num_frames": (shape.num_frames // 2) // 4 * 4 + 1})
            for shape in buckets
        ]
        yield f"{_listed(shorter)}", [_as_setting(shorter)]


def _less(pixels: int) -> int:
    """Three quarters, rounded; what is small already stays."""
    return min(pixels, max(_LEAST_PIXELS, round(0.75 * pixels / _PIXELS) * _PIXELS))


def _listed(shapes: Sequence[Bucket]) -> str:
    return ", ".join(str(shape) for shape in dict.fromkeys(shapes))


def _as_setting(shapes: Sequence[Bucket]) -> str:
    each = ", ".join(
        f"{{num_frames={s.num_frames}, height={s.height}, width={s.width}}}"
        for s in dict.fromkeys(shapes)
    )
    return f"data.buckets=[{each}]"

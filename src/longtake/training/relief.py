"""What to change where a recipe does not fit, each change with its own prediction."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from longtake import config
from longtake.config import Bucket, Recipe
from longtake.errors import LongtakeError
from longtake.recompute.policies import options_of
from longtake.training.forecast import Forecast, memory_of
from longtake.training.outlined import outlined_step

_PIXELS = 32
"""What heights and widths are rounded to: codecs and patches of the shipped models divide it."""
_LEAST_PIXELS = 64


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
    """What could be changed, the most helpful first.

    Args:
        recipe: that does not fit.
        known: its forecast, with a budget.
        world_size: processes that share a batch.
    """
    assert known.budget_bytes is not None
    least = min(known.policies, key=lambda row: row.step_peak_bytes)
    found = []
    for what, changes in _candidates(recipe, known):
        try:
            changed = config.changed(recipe, changes)
            step = outlined_step(changed, known.device, world_size)
            trace = step.tracer.trace(options_of(least.name, tuple(step.tracer.subject.blocks)))
        except LongtakeError:  # a smaller shape may not divide into the codec's or the model's
            continue
        peak = memory_of(least.name, trace, step).step_peak_bytes
        if peak < least.step_peak_bytes:
            found.append(Relief(what, changes, least.name, peak, peak <= known.budget_bytes))
    return sorted(found, key=lambda relief: relief.step_peak_bytes)


def _candidates(recipe: Recipe, known: Forecast) -> Iterator[tuple[str, list[str]]]:
    if known.micro_batch_size > 1:
        half = known.micro_batch_size // 2
        if known.micro_batch_size * known.num_micro_batches % half == 0:
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

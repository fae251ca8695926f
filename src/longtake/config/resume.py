"""The recipe keys that may change when a run is resumed, and the comparison of two recipes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from longtake.config.recipe import Recipe

MAY_CHANGE_ON_RESUME = (
    "out",  # a run directory may be moved
    "data.catalog",  # its content is compared, by a fingerprint
    "data.catalogs",
    "data.auto_buckets",  # the chosen buckets are in data.buckets
    "data.tokens_per_batch",  # the chosen batch sizes are in data.buckets
    "data.on_change",
    # These warn or refuse at the launch, and change no batch.
    "data.on_drift",
    "data.drift_limit",
    # Speed and limits of reading: the content of a sample follows from its seed.
    "data.workers",
    "data.sample_timeout_seconds",
    "data.sample_memory_gib",
    "data.store",
    "data.frame_cache_gib",
    # Training is bitwise equal with and without a cache (docs/decisions/0016-latent-cache.md).
    "data.cache",
    "data.cache_checksums",
    "data.max_quarantined_clips",
    "data.retry_quarantined",
    # Memory and speed: the results differ by rounding at most.
    "model.stream",
    "optimizer.fused_backward",
    # A run that began with `model.quantize = "auto"` keeps the number formats it has chosen.
    "model.quantize_gain",
    "codec.encode_tile",
    "training.micro_batch_size",
    "training.device",
    "training.compile",
    "training.encode_ahead",
    "recompute",
    "parallel",
    # Saving and supervision: only a run that fails notices them.
    "checkpoint",
    "guard",
    "watch",
    # These read checkpoints, and train nothing.
    "sampling",
    "evaluation",
    "tracking",
)
"""Keys and sections that may always change on resume: a healthy run computes the same."""

DECIDES_ORDER = (
    "data.buckets",
    "data.frame_stride",
    "data.fps",
    "data.stills_from_videos",
    "data.max_crop",
    "data.min_size",
    "data.upscale",
    "data.keep_uncaptioned",
    "data.stages",
    "data.weights",
    "data.repeats",
    "data.difficulty",
    "training.global_batch_size",
    "training.steps",
    "training.epochs",
)
"""Keys that may change on resume if `data.on_change` says how to continue.

`training.steps` is among them because other data can make the stages longer or shorter; a schedule
then aims at the new end. `differences` takes it out where `training.epochs` decides it.
"""


def flat(recipe: Recipe) -> dict[str, object]:
    """Return all values of a recipe by their dotted keys, such as `training.steps`."""
    return dict(flatten(recipe.model_dump()))


def defaults(section: type[BaseModel] = Recipe, prefix: str = "") -> dict[str, object]:
    """Return the default values of all optional keys, by their dotted keys."""
    found: dict[str, object] = {}
    for name, field in section.model_fields.items():
        # A section that may be unset (`AutoBucketsSection | None`) is one key with the default
        # None.
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= defaults(kind, f"{prefix}{name}.")
        elif not field.is_required():
            found[f"{prefix}{name}"] = field.get_default(call_default_factory=True)
    return found


def differences(old: Recipe, new: Recipe) -> list[tuple[str, object, object]]:
    """Return differences that forbid a resume, as (key, old value, new value).

    `training.steps` may grow if no learning rate depends on it; other schedules have been aiming at
    the old end. With `training.epochs`, which decides the steps, another number is always refused:
    it would be ignored.
    """
    before, after = flat(old), flat(new)
    may_change = [*MAY_CHANGE_ON_RESUME]
    if new.data.on_change != "refuse":
        may_change += DECIDES_ORDER
    can_grow = not old.optimizer.depends_on_end() and new.training.steps > old.training.steps
    if new.training.epochs is not None:
        may_change = [key for key in may_change if key != "training.steps"]
        can_grow = not new.training.steps  # the data decide it
    if can_grow:
        may_change.append("training.steps")
    return [
        (key, before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not is_among(key, may_change)
    ]


def other_length(old: Recipe, new: Recipe) -> str | None:
    """Return the change that makes a run about as long as the steps that a new recipe names.

    These are epochs for a recipe with epochs, whose steps would be ignored. None: it names no other
    number of steps, or fewer, or more than the length is changed.
    """
    there, here = old.training, new.training
    if here.steps in (0, there.steps):
        return None
    if here.epochs is not None:
        epochs = -(-here.steps * (there.epochs or here.epochs) // (there.steps or here.steps))
        return f"training.epochs={epochs}"
    is_all = [key for key, _, _ in differences(old, new)] == ["training.steps"]
    return f"training.steps={here.steps}" if is_all and here.steps > there.steps else None


def decides_order(key: str) -> bool:
    return is_among(key, DECIDES_ORDER)


def is_among(key: str, keys: Sequence[str]) -> bool:
    return any(key == each or key.startswith(f"{each}.") for each in keys)


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value

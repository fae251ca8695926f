"""Which settings, size and weights are sampled, by the recipe and by whoever asks; torch-free."""

from collections.abc import Mapping

from longtake import config
from longtake.config import Bucket, Recipe, SamplingSection
from longtake.errors import RecipeError

_LEAST_FPS, _MOST_FPS = 0.1, 1000


def settings_for(
    recipe: Recipe,
    *,
    num_frames: int | None = None,
    height: int | None = None,
    width: int | None = None,
    **changes: object,
) -> tuple[SamplingSection, Bucket]:
    """The recipe's sampling settings and first bucket, with whatever is not None changed.

    Raises:
        RecipeError: a value is out of range.
    """
    sizes = {"num_frames": num_frames, "height": height, "width": width}
    values = recipe.model_dump(exclude_none=True)
    values["sampling"] |= _given(changes)
    values["data"]["buckets"] = [values["data"]["buckets"][0] | _given(sizes)]
    changed = config.parse(values, source="The settings of this sampling")
    return changed.sampling, changed.data.buckets[0]


def weights_to_sample(
    recipe: Recipe, *, ema: bool | None = None, profile: str | None = None
) -> str:
    """The part of a checkpoint that is sampled, `model` or `ema/` and a profile's name.

    Raises:
        RecipeError: the run keeps no such average.
    """
    kept = [each.name for each in recipe.ema.averages()]
    if profile is not None and ema is False:
        raise RecipeError(
            f"--profile {profile} names an average, but --no-ema asks for the weights themselves. "
            "Leave one of them out."
        )
    if ema and not kept:
        raise RecipeError(
            "This run keeps no averages of its weights (ema.enabled = false). Leave --ema out: "
            "then the weights themselves are taken."
        )
    if profile is not None and profile not in kept:
        raise RecipeError(
            f"This run has no EMA profile {profile!r}. It keeps: {', '.join(kept) or 'none'}."
        )
    wanted = profile or recipe.ema.sampled()
    return "model" if ema is False or wanted is None else f"ema/{wanted}"


def suffix_of(bucket: Bucket) -> str:
    """Of the files that samples are written to: a sample of one frame is an image."""
    return ".png" if bucket.num_frames == 1 else ".mp4"


def refuse_unwritable(bucket: Bucket, fps: float) -> None:
    """Refuse before the sampling what the encoder would refuse, or change in silence, after it.

    Raises:
        RecipeError: H.264 does not take the size or the frame rate. A PNG takes any.
    """
    if suffix_of(bucket) == ".png":
        return
    height, width = (size + size % 2 for size in (bucket.height, bucket.width))
    if (width, height) != (bucket.width, bucket.height):
        raise RecipeError(
            f"{bucket} cannot be written as mp4: H.264 in 4:2:0 needs an even size, such as "
            f"{width}x{height}."
        )
    if not _LEAST_FPS <= fps <= _MOST_FPS:
        raise RecipeError(
            f"{fps:g} frames a second cannot be written as mp4: expected {_LEAST_FPS} to "
            f"{_MOST_FPS}. Set --fps or sampling.fps."
        )


def _given(values: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not None}

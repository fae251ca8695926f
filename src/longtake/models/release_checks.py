"""Refuses releases that no family can train: another objective, or other experts or inputs."""

from collections.abc import Collection, Mapping
from typing import Any

from longtake.config import ModelSection
from longtake.errors import ModelError
from longtake.models.pretrained import defaults
from longtake.models.releases import Release

_TARGETS = {
    "epsilon": "the noise (epsilon)",
    "v_prediction": "a mixture of noise and latents (v-prediction)",
    "sample": "the latents themselves",
}
"""Descriptions of what diffusers' schedulers without flow matching predict, by their
`prediction_type`.
"""


def refuse_other_objectives(scheduler: Mapping[str, Any] | None, where: str) -> None:
    """Refuse a released model whose scheduler states another objective than flow matching."""
    if scheduler is None:
        return
    name = str(scheduler.get("_class_name", ""))
    predicts = scheduler.get("prediction_type")
    if not predicts:
        import diffusers

        # A configuration leaves out values that were defaults when it was saved.
        scheduler_class = getattr(diffusers, name, None)
        predicts = scheduler_class and defaults(scheduler_class.__init__).get("prediction_type")
    if name.startswith("FlowMatch") or predicts not in _TARGETS:
        return
    raise ModelError(
        f"{where} predicts {_TARGETS[predicts]}, as its scheduler says ({name}, prediction_type "
        f"{predicts}). longtake trains by flow matching, toward the velocity noise - latents: that "
        "is another target, along another path of noise levels, so training would undo what this "
        "checkpoint has learned. Start from a flow-matching checkpoint, such as Wan 2.1 or FLUX.1."
    )


def refuse_untrained(
    release: Release, channel_ratios: Collection[float], section: ModelSection
) -> None:
    """Refuse a release with an objective, expert or inputs that its family does not train."""
    where = str(section.release())
    refuse_other_objectives(release.scheduler, where)
    if release.config.get("quantization_config"):
        raise ModelError(
            f"{where}: the weights of its transformer are quantised by another library, as the "
            "quantization_config in its config.json says. Name a release in bf16, fp16 or fp32; "
            "model.quantize keeps frozen weights in fewer bits."
        )
    refuse_wrong_expert(release.pipeline, section)
    refuse_further_inputs(release, channel_ratios, where)


def has_two_transformers(pipeline: Mapping[str, Any]) -> bool:
    """Return True if a release's model_index.json names a second transformer, for low noise."""
    return (pipeline.get("transformer_2") or (None, None))[0] is not None


def refuse_wrong_expert(pipeline: Mapping[str, Any], section: ModelSection) -> None:
    """Require `model.expert` exactly when the release has two transformers."""
    where, boundary = str(section.release()), pipeline.get("boundary_ratio")
    has_two, expert = has_two_transformers(pipeline), section.expert
    is_between = isinstance(boundary, int | float) and 0 < boundary < 1
    says = "no boundary_ratio" if boundary is None else f"boundary_ratio {boundary}"
    refusals = (
        (
            not has_two and boundary is None and expert is not None,
            f'model.expert = "{expert}", but the model_index.json of {where} names one '
            "transformer and no boundary_ratio. Leave it (--expert) out, or name a release with "
            "two transformers, such as Wan-AI/Wan2.2-T2V-A14B-Diffusers.",
        ),
        (
            not has_two and boundary is not None,
            f"{where} has a boundary_ratio ({boundary}) between two transformers, but its "
            "model_index.json names no transformer_2. Name the whole release.",
        ),
        (
            has_two and not is_between,
            f"{where} has two transformers, but its model_index.json has {says}: at which sigma "
            "one takes over from the other cannot be known. Add the boundary_ratio of the "
            "release, between 0 and 1 (Wan 2.2 A14B: 0.875 from text, 0.9 from a first frame).",
        ),
        (
            has_two and expert is None,
            f"{where} has two transformers, each for a part of the noise levels (boundary_ratio "
            f'{boundary}). Set model.expert = "high" to train the one for sigmas from {boundary} '
            'on, or "low" for those below it; a run trains one of them.',
        ),
    )
    for applies, message in refusals:
        if applies:
            raise ModelError(message)


def refuse_further_inputs(release: Release, channel_ratios: Collection[float], where: str) -> None:
    """Refuse a transformer that takes more channels than it returns (image, mask, control).

    `channel_ratios`: in_channels / out_channels that its family trains, apart from 1.
    """
    takes, returns = release.config.get("in_channels"), release.config.get("out_channels")
    if not takes or not returns or takes <= returns:  # FLUX's out_channels is None if equal
        return
    if takes / returns in channel_ratios:
        return
    name, index = str(release.config.get("_class_name")), release.pipeline
    of_pipeline = f", {index['_class_name']}" if "_class_name" in index else ""
    raise ModelError(
        f"{where} is a variant of {name} with further inputs, which longtake does not train "
        f"(in_channels {takes}, out_channels {returns}{of_pipeline}). "
        "Start from a kind that longtake trains: docs/guides/families.md lists them."
    )

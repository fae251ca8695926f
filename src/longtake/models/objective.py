"""What a checkpoint was trained for; refuses what longtake does not train.

longtake trains velocities of one transformer from noisy latents, text and reference pictures.
"""

from collections.abc import Mapping
from typing import Any

from longtake.errors import ModelError
from longtake.models.pretrained import defaults

_TARGETS = {
    "epsilon": "the noise (epsilon)",
    "v_prediction": "a mixture of noise and latents (v-prediction)",
    "sample": "the latents themselves",
}
"""What diffusers' schedulers with a noise schedule of their own call `prediction_type`."""


def refuse_other_objectives(scheduler: Mapping[str, Any] | None, where: str) -> None:
    """Refuse a checkpoint whose scheduler says that it is no flow-matching model.

    Raises:
        ModelError: it predicts something else.
    """
    if scheduler is None:
        return
    name = str(scheduler.get("_class_name", ""))
    predicts = scheduler.get("prediction_type") or _default_prediction(name)
    if name.startswith("FlowMatch") or predicts not in _TARGETS:
        return
    raise ModelError(
        f"{where} predicts {_TARGETS[predicts]}, as its scheduler says ({name}, prediction_type "
        f"{predicts}). longtake trains by flow matching, toward the velocity noise - latents: that "
        "is another target, along another path of noise levels, so training would undo what this "
        "checkpoint has learned. Start from a flow-matching checkpoint, such as Wan 2.1 or FLUX.1."
    )


def refuse_experts(pipeline: Mapping[str, Any], where: str) -> None:
    """Refuse a transformer that serves a part of the noise levels only.

    Raises:
        ModelError: the pipeline has two transformers, or a boundary between them.
    """
    second = pipeline.get("transformer_2") or (None, None)
    boundary = pipeline.get("boundary_ratio")
    if second[0] is None and boundary is None:
        return
    told = "" if boundary is None else f" (boundary_ratio {boundary})"
    raise ModelError(
        f"{where} has two transformers, each for a part of the noise levels{told}, as Wan 2.2 A14B "
        "has. longtake would train one of them on all noise levels, most of which it never serves. "
        "Start from a model with one transformer, such as Wan-AI/Wan2.1-T2V-14B-Diffusers."
    )


_VARIANTS = {
    ("WanTransformer3DModel", 2.25): "an image-to-video variant of Wan",
    ("FluxTransformer2DModel", 6): "FLUX.1 Fill, an inpainting variant",
    ("FluxTransformer2DModel", 2): "FLUX.1 Depth or Canny, a variant that takes a control image",
}
"""By class and in_channels / out_channels."""


def refuse_further_inputs(
    config: Mapping[str, Any], pipeline: Mapping[str, Any], where: str
) -> None:
    """Refuse a transformer that takes more channels than it returns: an image, a mask, a control.

    Raises:
        ModelError: it does.
    """
    takes, returns = config.get("in_channels"), config.get("out_channels")
    if not takes or not returns or takes <= returns:  # FLUX's out_channels is None if equal
        return
    name = str(config.get("_class_name"))
    variant = _VARIANTS.get((name, takes / returns), f"a variant of {name} with further inputs")
    of_pipeline = f", {pipeline['_class_name']}" if "_class_name" in pipeline else ""
    raise ModelError(
        f"{where} is {variant} (in_channels {takes}, out_channels {returns}{of_pipeline}). "
        "longtake trains text-to-video (Wan), text-to-image (FLUX.1-dev, FLUX.1-schnell) and "
        "FLUX.1-Kontext. Start from one of these."
    )


def _default_prediction(name: str) -> object:
    """What a scheduler's class predicts where its configuration says nothing."""
    import diffusers

    found = getattr(diffusers, name, None)
    return None if found is None else defaults(found.__init__).get("prediction_type")

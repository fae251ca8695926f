"""What a checkpoint was trained to predict: longtake trains velocities, and refuses the rest."""

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

    Args:
        scheduler: the configuration of the pipeline's scheduler; None where there is none, and
            then nothing is known.
        where: names the checkpoint in the message.

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


def _default_prediction(name: str) -> object:
    """What a scheduler's class predicts where its configuration says nothing."""
    import diffusers

    found = getattr(diffusers, name, None)
    return None if found is None else defaults(found.__init__).get("prediction_type")

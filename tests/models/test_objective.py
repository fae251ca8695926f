"""What is refused: a checkpoint that was trained toward another target than the velocity."""

import pytest

from longtake.errors import ModelError
from longtake.models.release import refuse_other_objectives


@pytest.mark.parametrize(
    "scheduler",
    [
        None,
        {},
        {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0},
        {"_class_name": "FlowMatchHeunDiscreteScheduler"},
        {"_class_name": "UniPCMultistepScheduler", "prediction_type": "flow_prediction"},
        {"_class_name": "SomebodysOwnScheduler"},
    ],
)
def test_flow_matching_and_the_unknown_pass(scheduler: dict[str, object] | None) -> None:
    """Nothing is said against what says nothing of itself."""
    refuse_other_objectives(scheduler, "somewhere")


@pytest.mark.parametrize(
    ("scheduler", "target"),
    [
        ({"_class_name": "DDPMScheduler", "prediction_type": "epsilon"}, r"the noise \(epsilon\)"),
        ({"_class_name": "DDPMScheduler"}, r"the noise \(epsilon\)"),
        ({"_class_name": "UniPCMultistepScheduler"}, r"the noise \(epsilon\)"),
        ({"_class_name": "CogVideoXDDIMScheduler", "prediction_type": "v_prediction"}, "a mixture"),
        ({"_class_name": "MyOwn", "prediction_type": "v_prediction"}, "a mixture"),
        ({"_class_name": "DDIMScheduler", "prediction_type": "sample"}, "the latents themselves"),
    ],
)
def test_noise_and_v_prediction_are_refused(scheduler: dict[str, object], target: str) -> None:
    """The sentence says what it predicts, who says so, and why that cannot be trained on."""
    with pytest.raises(ModelError, match=f"somewhere predicts {target}.*as its scheduler") as said:
        refuse_other_objectives(scheduler, "somewhere")
    message = str(said.value)
    assert str(scheduler["_class_name"]) in message
    assert "toward the velocity noise - latents" in message
    assert len(message.splitlines()) == 1

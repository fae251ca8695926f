"""What a release's files say: shipped configurations, and which releases are refused."""

import time
from pathlib import Path

import huggingface_hub
import pytest

from longtake.errors import ModelError
from longtake.models.flux import Flux
from longtake.models.release import (
    SHIPPED,
    Release,
    part_config,
    refuse_experts,
    refuse_further_inputs,
    refuse_other_objectives,
)


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


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A hub that refuses every connection, and an empty folder as its cache."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.usefixtures("no_hub")
def test_what_is_neither_here_nor_shipped_nor_to_be_had_names_the_shipped() -> None:
    """One sentence in seconds."""
    began = time.monotonic()
    with pytest.raises(ModelError, match="the hub cannot be reached") as said:
        part_config("some/where", "transformer")
    assert all(name in str(said.value) for name in SHIPPED)
    assert len(str(said.value).splitlines()) == 1
    assert time.monotonic() - began < 60


def test_a_config_that_was_downloaded_before_needs_no_network(no_hub: None, tmp_path: Path) -> None:
    """Nor do the weights have to be there."""
    commit = tmp_path / "hub" / "models--some--where" / "snapshots" / ("0" * 40)
    (commit / "transformer").mkdir(parents=True)
    (tmp_path / "hub" / "models--some--where" / "refs").mkdir()
    (tmp_path / "hub" / "models--some--where" / "refs" / "main").write_text("0" * 40)
    (commit / "transformer" / "config.json").write_text('{"num_attention_heads": 2}')
    assert part_config("some/where", "transformer")["num_attention_heads"] == 2


def test_a_subfolder_that_a_shipped_model_lacks_is_named() -> None:
    """With those that it has."""
    with pytest.raises(ModelError, match=r"no subfolder text_encoder_2; it has transformer, vae"):
        part_config("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "text_encoder_2")


@pytest.mark.parametrize(
    ("in_channels", "message"),
    [
        (384, r"is FLUX\.1 Fill, an inpainting variant \(in_channels 384, out_channels 64, FluxF"),
        (128, r"is FLUX\.1 Depth or Canny, a variant that takes a control image \(in_channels 128"),
        (320, "is a variant of FluxTransformer2DModel with further inputs"),
    ],
)
def test_a_variant_with_further_inputs_says_what_it_is(in_channels: int, message: str) -> None:
    """Fill and Control take further channels."""
    config = {"_class_name": "FluxTransformer2DModel", "in_channels": in_channels}
    release = Release(config | {"out_channels": 64}, None, {"_class_name": "FluxFillPipeline"})
    with pytest.raises(ModelError, match=f"somewhere {message}"):
        refuse_further_inputs(release, Flux.variants, "somewhere")


def test_a_model_that_is_trained_passes() -> None:
    """As WanPipeline writes its index for Wan 2.1, and FLUX.1 its out_channels."""
    index = {"_class_name": "WanPipeline", "boundary_ratio": None, "transformer_2": [None, None]}
    refuse_experts(index, "somewhere")
    refuse_further_inputs(Release({"in_channels": 64, "out_channels": None}, None, {}), {}, "there")

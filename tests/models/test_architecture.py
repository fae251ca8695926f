"""What is known of a model before its weights: its architecture, at any size, without a network."""

import json
import time
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from diffusers import AutoencoderKLWan, FluxTransformer2DModel, WanTransformer3DModel
from transformers import CLIPTextModel, T5EncoderModel, UMT5EncoderModel

from longtake.config import ModelSection
from longtake.errors import ModelError, RecipeError
from longtake.models.deferred_init import build_transformer, on_meta
from longtake.models.flux import Flux
from longtake.models.numerics import keep_weights_in, main_dtype
from longtake.models.release import SHIPPED, part_config
from longtake.models.wan import Wan

_FLUX = "black-forest-labs/FLUX.1-dev"
_KONTEXT = "black-forest-labs/FLUX.1-Kontext-dev"
_SMALL_WAN = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
_LARGE_WAN = "Wan-AI/Wan2.1-T2V-14B-Diffusers"
_TINY: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "ffn_dim": 16,
    "freq_dim": 8,
    "num_layers": 1,
    "text_dim": 16,
}
_FITTED = {"in_channels": 4, "out_channels": 4}


def _wan(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = WanTransformer3DModel(**_TINY, **_FITTED)
    keep_weights_in(model, dtype)
    model.save_pretrained(folder / "transformer")
    return model


def _section(where: object, **keys: Any) -> ModelSection:
    return ModelSection(family="wan", pretrained=str(where), **keys)


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A hub that refuses every connection, and an empty folder as its cache."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.parametrize(
    ("model_class", "where", "subfolder", "billions"),
    [
        (FluxTransformer2DModel, _FLUX, "transformer", 11.90),
        (FluxTransformer2DModel, _KONTEXT, "transformer", 11.90),
        (T5EncoderModel, _KONTEXT, "text_encoder_2", 4.76),
        (CLIPTextModel, _KONTEXT, "text_encoder", 0.12),
        (WanTransformer3DModel, _SMALL_WAN, "transformer", 1.42),
        (WanTransformer3DModel, _LARGE_WAN, "transformer", 14.29),
        (UMT5EncoderModel, _SMALL_WAN, "text_encoder", 5.68),
        (AutoencoderKLWan, _LARGE_WAN, "vae", 0.13),
    ],
)
@pytest.mark.usefixtures("no_hub")
def test_shipped_models_have_as_many_parameters_as_the_released(
    model_class: Any, where: str, subfolder: str, billions: float
) -> None:
    """Billions of weights in seconds, without a byte of them and without a network."""
    model = on_meta(model_class, where, subfolder)
    found = sum(weight.numel() for weight in model.parameters()) / 1e9
    assert round(found, 2) == billions
    assert {weight.device.type for weight in model.parameters()} == {"meta"}


def test_an_outline_has_the_dtype_that_the_weights_are_stored_in() -> None:
    """Released text encoders are kept as they are stored."""
    encoders = {_KONTEXT: (T5EncoderModel, "text_encoder_2"), _SMALL_WAN: (UMT5EncoderModel, "")}
    dtypes = {
        where: {
            weight.dtype
            for weight in on_meta(encoder, where, subfolder or "text_encoder").parameters()
        }
        for where, (encoder, subfolder) in encoders.items()
    }
    assert dtypes == {_KONTEXT: {torch.bfloat16}, _SMALL_WAN: {torch.float32}}


def test_a_local_folder_needs_its_config_alone(tmp_path: Path) -> None:
    """Of the same shapes as the whole model; weights need not be there."""
    model = _wan(tmp_path)
    for file in (tmp_path / "transformer").glob("*.safetensors"):
        file.unlink()
    outline = build_transformer(WanTransformer3DModel, _section(tmp_path), _FITTED, weights=False)
    shapes = {name: weight.shape for name, weight in outline.named_parameters()}
    assert shapes == {name: weight.shape for name, weight in model.named_parameters()}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_pretrained_weights_come_in_the_recipes_dtype(
    dtype: Any, stored: torch.dtype, tmp_path: Path
) -> None:
    """But for what a pipeline would keep in fp32; buffers of positions stay exact."""
    _wan(tmp_path, stored)
    section = _section(tmp_path, dtype=dtype)
    model = build_transformer(WanTransformer3DModel, section, _FITTED, weights=True)
    wanted = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    keep_weights_in(model, wanted)
    assert main_dtype(model) == wanted
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


def test_wan_in_bf16_is_the_model_that_a_pipeline_runs(tmp_path: Path) -> None:
    """Made, loaded or planned: what diffusers keeps in fp32 is fp32, and all else bf16."""
    made = _wan(tmp_path)
    there = WanTransformer3DModel.from_pretrained(tmp_path / "transformer", dtype=torch.bfloat16)
    kept = {name: weight.dtype for name, weight in there.named_parameters()}
    assert set(kept.values()) == {torch.float32, torch.bfloat16}
    section = _section(tmp_path, dtype="bf16")
    models = [made] + [
        build_transformer(WanTransformer3DModel, section, _FITTED, weights=weights)
        for weights in (True, False)
    ]
    for model in models:
        keep_weights_in(model, torch.bfloat16)
        assert {name: weight.dtype for name, weight in model.named_parameters()} == kept


def test_text_encoders_are_not_kept_apart() -> None:
    """For transformers a list of that name is about fp16 alone."""
    model = on_meta(T5EncoderModel, _KONTEXT, "text_encoder_2")
    assert model._keep_in_fp32_modules
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


def test_loading_in_bf16_makes_no_copy_in_fp32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that just fits into memory in bf16 would not in fp32."""
    _wan(tmp_path)
    asked: list[object] = []
    original: Any = WanTransformer3DModel.from_pretrained.__func__

    def spy(cls: Any, *args: Any, **options: Any) -> Any:
        asked.append(options.get("torch_dtype"))
        return original(cls, *args, **options)

    monkeypatch.setattr(WanTransformer3DModel, "from_pretrained", classmethod(spy))
    section = _section(tmp_path, dtype="bf16")
    build_transformer(WanTransformer3DModel, section, _FITTED, weights=True)
    assert asked == [torch.bfloat16]


@pytest.mark.parametrize("weights", [True, False])
def test_a_checkpoint_of_another_objective_is_refused(weights: bool, tmp_path: Path) -> None:
    """Its scheduler lies beside it; loaded or planned, it is looked at."""
    _wan(tmp_path)
    folder = tmp_path / "scheduler"
    folder.mkdir()
    config = {"_class_name": "DDIMScheduler", "prediction_type": "v_prediction"}
    (folder / "scheduler_config.json").write_text(json.dumps(config))
    for where, subfolder in ((tmp_path, "transformer"), (tmp_path / "transformer", ".")):
        section = _section(where, subfolder=subfolder)
        with pytest.raises(ModelError, match=r"predicts a mixture .*DDIMScheduler, prediction_ty"):
            build_transformer(WanTransformer3DModel, section, _FITTED, weights=weights)
    (folder / "scheduler_config.json").write_text(
        json.dumps(config | {"prediction_type": "flow_prediction"})
    )
    build_transformer(WanTransformer3DModel, _section(tmp_path), _FITTED, weights=weights)


def test_a_transformer_of_other_latents_is_refused_without_its_weights() -> None:
    """A wrong codec is found in a plan as in a run."""
    with pytest.raises(RecipeError, match="in_channels is 16, but codec and text encoder give 4"):
        build_transformer(
            WanTransformer3DModel, _section(_SMALL_WAN), {"in_channels": 4}, weights=False
        )


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
    _wan(tmp_path / "model")
    commit = tmp_path / "hub" / "models--some--where" / "snapshots" / ("0" * 40)
    (commit / "transformer").mkdir(parents=True)
    (tmp_path / "hub" / "models--some--where" / "refs").mkdir()
    (tmp_path / "hub" / "models--some--where" / "refs" / "main").write_text("0" * 40)
    text = (tmp_path / "model" / "transformer" / "config.json").read_text()
    (commit / "transformer" / "config.json").write_text(text)
    assert part_config("some/where", "transformer")["num_attention_heads"] == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"config\.json cannot be read"),
        ("{", r"config\.json cannot be read: .* Expected what save_pretrained writes"),
        ("[]", r"config\.json holds no configuration"),
        ('{"num_layers": "x"}', "configuration of its transformer does not fit WanTransformer"),
    ],
)
def test_a_damaged_config_is_named(text: str | None, message: str, tmp_path: Path) -> None:
    """With its path, and in one sentence."""
    (tmp_path / "transformer").mkdir()
    if text is not None:
        (tmp_path / "transformer" / "config.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        on_meta(WanTransformer3DModel, str(tmp_path), "transformer")


def test_a_subfolder_that_a_shipped_model_lacks_is_named() -> None:
    """With those that it has."""
    with pytest.raises(ModelError, match=r"no subfolder text_encoder_2; it has transformer, vae"):
        part_config(_SMALL_WAN, "text_encoder_2")


@pytest.mark.parametrize(
    ("model_class", "where", "subfolder", "message"),
    [
        (FluxTransformer2DModel, _SMALL_WAN, "transformer", "of WanTransformer3DModel, but Flux"),
        (T5EncoderModel, _KONTEXT, "text_encoder", "of clip_text_model, but t5 is wanted"),
        (UMT5EncoderModel, _KONTEXT, "text_encoder_2", "of t5, but umt5 is wanted"),
        (AutoencoderKLWan, _KONTEXT, "vae", "of AutoencoderKL, but AutoencoderKLWan is wanted"),
    ],
)
def test_a_part_of_another_class_is_refused(
    model_class: Any, where: str, subfolder: str, message: str
) -> None:
    """Defaults would fill in what its configuration does not say."""
    with pytest.raises(ModelError, match=f"what lies in {subfolder} is {message}"):
        on_meta(model_class, where, subfolder)


def test_weights_of_another_class_are_refused_too(tmp_path: Path) -> None:
    """In the same words as in a plan."""
    _wan(tmp_path)
    with pytest.raises(ModelError, match="is of WanTransformer3DModel, but FluxTransformer2DMod"):
        build_transformer(FluxTransformer2DModel, _section(tmp_path), {}, weights=True)


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize(
    ("config", "pipeline", "message"),
    [
        (
            {},
            {"boundary_ratio": 0.875, "transformer_2": ["diffusers", "WanTransformer3DModel"]},
            r"has two transformers, each for a part of the noise levels \(boundary_ratio 0\.875\)",
        ),
        (
            {"in_channels": 36, "out_channels": 16},
            {"_class_name": "WanImageToVideoPipeline", "transformer_2": [None, None]},
            r"is an image-to-video variant of Wan \(in_channels 36, out_channels 16, WanImageToVi",
        ),
    ],
)
def test_a_wan_that_is_not_trained_says_what_it_is(
    weights: bool, config: dict[str, Any], pipeline: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Wan 2.2 A14B and image-to-video, before any weight is read."""
    _wan(tmp_path)
    file = tmp_path / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    (tmp_path / "model_index.json").write_text(json.dumps(pipeline))
    with pytest.raises(ModelError, match=message):
        build_transformer(
            WanTransformer3DModel,
            _section(tmp_path),
            _FITTED,
            weights=weights,
            variants=Wan.variants,
        )


@pytest.mark.parametrize(
    ("in_channels", "message"),
    [(384, "FLUX.1 Fill, an inpainting"), (128, "Depth or Canny"), (320, "with further inputs")],
)
def test_a_flux_that_is_not_trained_says_what_it_is(
    in_channels: int, message: str, tmp_path: Path
) -> None:
    """Fill and Control take further channels."""
    (tmp_path / "transformer").mkdir()
    name = "FluxTransformer2DModel"
    config = {"_class_name": name, "in_channels": in_channels, "out_channels": 64}
    (tmp_path / "transformer" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        build_transformer(
            FluxTransformer2DModel, _section(tmp_path), {}, weights=False, variants=Flux.variants
        )


def test_a_pipeline_with_one_transformer_passes(tmp_path: Path) -> None:
    """As WanPipeline writes its index for Wan 2.1."""
    _wan(tmp_path)
    index = {"_class_name": "WanPipeline", "boundary_ratio": None, "transformer_2": [None, None]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    build_transformer(WanTransformer3DModel, _section(tmp_path), _FITTED, weights=False)

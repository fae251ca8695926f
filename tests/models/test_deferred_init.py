"""Models without weights, and weights that come later: the same as if they came at once."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan, FluxTransformer2DModel, WanTransformer3DModel
from tests.models.tiny import CLIP, FLUX, KL, T5, WAN, make_recipe, write_configs
from torch import nn
from transformers import CLIPTextModel, T5EncoderModel, UMT5EncoderModel

from longtake import config
from longtake.config import ModelSection, Recipe
from longtake.errors import ModelError, RecipeError
from longtake.models.components import Components, Source, assemble, source_of
from longtake.models.deferred_init import (
    build_transformer,
    can_be_filled,
    deferred_parameters,
    files_in,
    on_meta,
    parameters_on_meta,
    record,
)
from longtake.models.numerics import keep_weights_in

_FLUX = "black-forest-labs/FLUX.1-dev"
_KONTEXT = "black-forest-labs/FLUX.1-Kontext-dev"
_SMALL_WAN = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
_LARGE_WAN = "Wan-AI/Wan2.1-T2V-14B-Diffusers"
_FITTED = {"in_channels": 4, "out_channels": 4}
_CPU = torch.device("cpu")
_SIZE = WAN | {"text_dim": T5["d_model"], **_FITTED}


def _wan(folder: Path, dtype: torch.dtype = torch.float32, **how: Any) -> Any:
    torch.manual_seed(7)
    model: Any = WanTransformer3DModel(**_SIZE)
    keep_weights_in(model, dtype)
    model.save_pretrained(folder / "transformer", **how)
    return model


def _section(where: object, **keys: Any) -> ModelSection:
    return ModelSection(family="wan", pretrained=str(where), **keys)


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
    """Also of what transformers would keep in fp32."""
    encoders: tuple[tuple[Any, str, str, torch.dtype], ...] = (
        (T5EncoderModel, _KONTEXT, "text_encoder_2", torch.bfloat16),
        (UMT5EncoderModel, _SMALL_WAN, "text_encoder", torch.float32),
    )
    for encoder, where, subfolder, dtype in encoders:
        model = on_meta(encoder, where, subfolder)
        assert model._keep_in_fp32_modules
        assert {weight.dtype for weight in model.parameters()} == {dtype}


def test_a_local_folder_needs_its_config_alone(tmp_path: Path) -> None:
    model = _wan(tmp_path)
    for file in (tmp_path / "transformer").glob("*.safetensors"):
        file.unlink()
    outline = build_transformer(WanTransformer3DModel, _section(tmp_path), _FITTED, weights=False)
    shapes = {name: weight.shape for name, weight in outline.named_parameters()}
    assert shapes == {name: weight.shape for name, weight in model.named_parameters()}


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
        assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}  # of positions


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
    _wan(tmp_path)
    config = {"_class_name": "DDIMScheduler", "prediction_type": "v_prediction"}
    write_configs(tmp_path, {"scheduler/scheduler_config.json": config})
    for where, subfolder in ((tmp_path, "transformer"), (tmp_path / "transformer", ".")):
        section = _section(where, subfolder=subfolder)
        with pytest.raises(ModelError, match=r"predicts a mixture .*DDIMScheduler, prediction_ty"):
            build_transformer(WanTransformer3DModel, section, _FITTED, weights=weights)
    config["prediction_type"] = "flow_prediction"
    write_configs(tmp_path, {"scheduler/scheduler_config.json": config})
    build_transformer(WanTransformer3DModel, _section(tmp_path), _FITTED, weights=weights)


def test_a_transformer_of_other_latents_is_refused_without_its_weights() -> None:
    with pytest.raises(RecipeError, match="in_channels is 16, but codec and text encoder give 4"):
        build_transformer(
            WanTransformer3DModel, _section(_SMALL_WAN), {"in_channels": 4}, weights=False
        )


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
    (tmp_path / "transformer").mkdir()
    if text is not None:
        (tmp_path / "transformer" / "config.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        on_meta(WanTransformer3DModel, str(tmp_path), "transformer")


@pytest.mark.parametrize(
    ("model_class", "where", "subfolder", "message"),
    [
        (FluxTransformer2DModel, _SMALL_WAN, "transformer", "WanTransformer3DModel, but Flux"),
        (T5EncoderModel, _KONTEXT, "text_encoder", "clip_text_model, but t5 is needed"),
        (UMT5EncoderModel, _KONTEXT, "text_encoder_2", "t5, but umt5 is needed"),
        (AutoencoderKLWan, _KONTEXT, "vae", "AutoencoderKL, but AutoencoderKLWan is needed"),
    ],
)
def test_a_part_of_another_class_is_refused(
    model_class: Any, where: str, subfolder: str, message: str
) -> None:
    """Defaults would fill in what its configuration does not say."""
    with pytest.raises(ModelError, match=f"its {subfolder} is of the class {message}"):
        on_meta(model_class, where, subfolder)


def test_weights_of_another_class_are_refused_too(tmp_path: Path) -> None:
    _wan(tmp_path)
    with pytest.raises(
        ModelError, match="of the class WanTransformer3DModel, but FluxTransformer2DMod"
    ):
        build_transformer(FluxTransformer2DModel, _section(tmp_path), {}, weights=True)


_CODEC = {"z_dim": 4, "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}


def _cached_recipe(**sections: Any) -> Recipe:
    """Cached latents, so that neither codec nor text encoder is built with weights."""
    parts: dict[str, Any] = {
        "codec": {"kind": "autoencoder", "config": _CODEC},
        "text": {"kind": "transformers", "config": T5},
    }
    return make_recipe("wan", (5, 16, 16), **parts | sections)


def _assembled(recipe: Recipe, weights: Source = "here") -> Components:
    return assemble(recipe, ["a red ball"], None, frozen_parts=False, weights=weights)


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.state_dict()) | dict(model.named_buffers())


def _filled(parts: Components) -> nn.Module:
    parts.unfilled.give_memory(parts.model, _CPU)
    parts.unfilled.fill()
    return parts.model


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("how", [{}, {"max_shard_size": "10KB"}], ids=["a file", "many files"])
@pytest.mark.parametrize("trainable", [{}, {"kind": "lora", "rank": 2}], ids=["all", "lora"])
def test_what_is_read_later_is_what_is_loaded_at_once(
    tmp_path: Path,
    stored: torch.dtype,
    dtype: str,
    how: dict[str, Any],
    trainable: dict[str, Any],
) -> None:
    """Bit by bit, in the same dtypes, with what is new from the seed and with the same buffers."""
    _wan(tmp_path, stored, **how)
    model = {"family": "wan", "pretrained": str(tmp_path), "dtype": dtype}
    recipe = _cached_recipe(model=model, trainable=trainable)
    at_once, later = _assembled(recipe), _assembled(recipe, "files")
    assert {each.stored for each in later.unfilled.parameters} == set(
        WanTransformer3DModel(**_SIZE).state_dict()
    )
    assert all(each.parameter.is_meta for each in later.unfilled.parameters)
    torch.testing.assert_close(_values(_filled(later)), _values(at_once.model), rtol=0, atol=0)
    wants = {name for name, each in later.model.named_parameters() if each.requires_grad}
    assert wants == {name for name, each in at_once.model.named_parameters() if each.requires_grad}
    assert dict(later.model.config) == dict(at_once.model.config)  # type: ignore[arg-type]


_RANDOM: dict[str, dict[str, Any]] = {
    "wan": WAN,
    "flux": FLUX,
    "tubelet": {"hidden_size": 24, "num_blocks": 2, "num_heads": 2, "patch_size": [1, 4, 4]},
}


def _random_recipe(family: str, dtype: str, trainable: dict[str, Any]) -> Recipe:
    model = {"family": family, "config": _RANDOM[family], "dtype": dtype}
    sections: dict[str, Any] = {"model": model, "trainable": trainable}
    if family == "flux":
        picture = {"num_frames": 1, "height": 32, "width": 32}
        sections["data"] = {"catalog": "c.parquet", "buckets": [picture]}
        sections["text"] = {"kind": "transformers", "config": T5, "pooled": {"config": CLIP}}
        sections["codec"] = {"kind": "autoencoder", "config": KL}
    if family == "tubelet":
        sections |= {"codec": {"kind": "pixels"}, "text": {"kind": "words"}}
    return _cached_recipe(**sections)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("trainable", [{}, {"kind": "lora", "rank": 2}], ids=["all", "lora"])
@pytest.mark.parametrize("family", _RANDOM)
def test_what_is_drawn_later_is_what_is_drawn_at_once(
    family: str, trainable: dict[str, Any], dtype: str
) -> None:
    recipe = _random_recipe(family, dtype, trainable)
    at_once, later = _assembled(recipe), _assembled(recipe, "seed")
    assert len(later.unfilled.parameters) > 20
    torch.rand(3)  # what was drawn meanwhile changes nothing
    torch.testing.assert_close(_values(_filled(later)), _values(at_once.model), rtol=0, atol=0)


class _Drawing(nn.Module):
    """Initialised in all the ways that constructors use: views, new tensors, own dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4, padding_idx=1)
        self.table = nn.Parameter(torch.randn(1, 6, 4) / 2)
        self.fused = nn.Linear(4, 12)
        for part in self.fused.weight.data.chunk(3):
            nn.init.xavier_uniform_(part)
        self.scale = nn.Parameter(torch.linspace(0, 1, 7).exp().flip(0))
        self.norm = nn.LayerNorm(4)
        nn.init.kaiming_normal_(self.fused.bias.view(3, 4))
        self.gate = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16).normal_())


class _Buffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.randn(4))
        self.linear = nn.Linear(4, 4)


class _Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        if not self.linear.weight.is_meta:  # as torch's trunc_normal_ asks from 2.13 on
            nn.init.normal_(self.linear.weight)


class _Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, int(torch.ones(()).item()))


def _on_meta(module_class: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return module_class()


def test_a_constructor_is_run_again_parameter_by_parameter() -> None:
    torch.manual_seed(5)
    program = record(partial(_on_meta, _Drawing))
    expected = {name: each.detach() for name, each in _Drawing().named_parameters()}
    assert program is not None
    found = {name: torch.zeros_like(each) for name, each in expected.items()}
    program.run(found)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("module_class", [_Buffer, _Asking, _Reading])
def test_a_constructor_that_cannot_be_run_again_is_known(module_class: type[nn.Module]) -> None:
    """It draws a buffer, or does something else on the meta device, or reads values there."""
    assert record(partial(_on_meta, module_class)) is None


def test_weights_in_other_files_are_loaded_at_once(tmp_path: Path) -> None:
    _wan(tmp_path, safe_serialization=False)
    assert files_in(tmp_path / "transformer") is None
    there = {"family": "wan", "pretrained": str(tmp_path)}
    parts = _assembled(_cached_recipe(model=there), "files")
    assert not parts.unfilled.parameters
    assert not any(parameter.is_meta for parameter in parts.model.parameters())


def test_files_that_lack_a_tensor_fail_as_when_they_are_loaded_whole(tmp_path: Path) -> None:
    """They do not fill the model: the error is that of loading it whole."""
    from safetensors.torch import load_file, save_file

    _wan(tmp_path)
    file = tmp_path / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    del tensors["proj_out.weight"]
    save_file(tensors, file, {"format": "pt"})
    recipe = _cached_recipe(model={"family": "wan", "pretrained": str(tmp_path)})
    with pytest.raises(ModelError, match="leave 1 tensors of WanTransformer3DModel"):
        _assembled(recipe, "files")


def test_a_file_that_was_cut_off_is_named(tmp_path: Path) -> None:
    """It was whole when the model was built, and is not when its weights are read."""
    _wan(tmp_path)
    there = {"family": "wan", "pretrained": str(tmp_path)}
    parts = _assembled(_cached_recipe(model=there), "files")
    parts.unfilled.give_memory(parts.model, _CPU)
    file = tmp_path / "transformer" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"cannot be read: .* Download or copy it again"):
        parts.unfilled.fill()


def test_where_a_training_takes_its_weights_from() -> None:
    """What is trained whole is in the checkpoint; a frozen base is not, and new weights nowhere."""
    lora = {"kind": "lora"}
    there = {"family": "wan", "pretrained": "somewhere"}
    for is_sharded, drawn in ((False, "here"), (True, "seed")):
        find = partial(source_of, is_sharded=is_sharded)
        assert find(_cached_recipe(), resumed=False) == drawn
        assert find(_cached_recipe(), resumed=True) == "checkpoint"
        assert find(_cached_recipe(trainable=lora), resumed=True) == drawn
        assert find(_cached_recipe(model=there), resumed=False) == "files"
        assert find(_cached_recipe(model=there), resumed=True) == "checkpoint"
        assert find(_cached_recipe(model=there, trainable=lora), resumed=True) == "files"


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.arange(4.0), persistent=False)


def test_buffers_are_real_and_tied_weights_are_not_filled_later() -> None:
    with parameters_on_meta():
        model = _Tied()
    assert torch.equal(model.get_buffer("table"), torch.arange(4.0))
    assert model.first.weight.is_meta
    assert not can_be_filled(deferred_parameters(model), model, None)
    assert not nn.Linear(2, 2).weight.is_meta


_ON_TWO_RANKS = """
    import os, resource, sys
    from pathlib import Path

    import torch
    import torch.distributed as dist
    from longtake import config
    from longtake.config import ParallelSection
    from longtake.models.components import assemble
    from longtake.parallel.mesh import join
    from longtake.run_dir import RunDirectory
    from longtake.training.build import build_state
    from longtake.training.session import Session
    from rich.console import Console

    def resident():
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    folder = Path(sys.argv[1])
    recipe = config.load(folder / "recipe.toml")
    with join("cpu", ParallelSection(strategy="shard"), None) as world:
        before = resident()
        parts = assemble(recipe, ["x"], None, frozen_parts=False, weights=sys.argv[2])
        size = sum(each.parameter.nbytes for each in parts.unfilled.parameters)
        run = RunDirectory(recipe.out)
        build_state(Session(recipe, run, world, Console(quiet=True), "fp32"), parts)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        (folder / f"grown_{world.rank}").write_text(f"{(peak - before) / size}")
        whole = assemble(recipe, ["x"], None, frozen_parts=False).model.state_dict()
        for name, value in parts.model.state_dict().items():
            assert torch.equal(value.full_tensor(), whole[name]), name
        dist.barrier()
"""


@pytest.mark.parametrize("source", ["files", "seed"])
def test_each_rank_reads_or_draws_its_share(
    source: Source, tmp_path: Path, run_on_two_ranks: Callable[..., None]
) -> None:
    """Of a model that two ranks share, neither ever has all of it in memory."""
    large = {"ffn_dim": 16384, "num_layers": 6, "num_attention_heads": 16, "attention_head_dim": 32}
    made: dict[str, Any] = {"family": "wan", "config": _RANDOM["wan"] | large}
    if source == "files":
        torch.manual_seed(0)
        model: Any = WanTransformer3DModel(**(_SIZE | large))
        model.save_pretrained(tmp_path / "transformer")
        del model
        made = {"family": "wan", "pretrained": str(tmp_path)}
    recipe = _cached_recipe(model=made, trainable={"kind": "lora", "rank": 1}, ema={"decay": 0.0})
    (tmp_path / "recipe.toml").write_text(config.dump(recipe))
    (tmp_path / "ranks.py").write_text(dedent(_ON_TWO_RANKS))
    run_on_two_ranks(str(tmp_path / "ranks.py"), str(tmp_path), source)
    grown = [float((tmp_path / f"grown_{rank}").read_text()) for rank in range(2)]
    assert all(0.3 < each < 0.75 for each in grown), grown

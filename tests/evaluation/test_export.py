"""What is exported is the trained model, under the names that other tools expect."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tests.models import tiny
from torch import Tensor, nn

from longtake import config
from longtake.config import ModuleSection, Recipe, TrainableSection
from longtake.errors import RecipeError, RunError
from longtake.evaluation.export import ExportChoice, Format, check_export, export
from longtake.flow.shift import MuLine
from longtake.models.added_module import added_modules
from longtake.models.components import assemble
from longtake.models.file_header import Words
from longtake.models.trainable import lora_state, plain_copy
from longtake.sampling.presets import Request, settings_for
from longtake.sampling.sampler import Sampler, load_sampler
from longtake.training.train import train

_PROMPT = "a red circle moving up"
_STYLE = "examples.modules.style_residual:StyleResidual"
_OWN = {"own": ModuleSection(module="my:Module")}
_CAPTIONS = ["a red ball"]
_TEXT: dict[str, Any] = {"kind": "transformers", "config": tiny.T5, "max_tokens": 8}
_CAUSAL_CODEC = {
    "base_dim": 4,
    "z_dim": 4,
    "dim_mult": [1, 1],
    "num_res_blocks": 1,
    "temperal_downsample": [True],
}
_BUCKETS = {
    "flux": [{"num_frames": 1, "height": 16, "width": 16}],
    "wan": [{"num_frames": 5, "height": 32, "width": 32}],
}
_PARTS: dict[str, dict[str, Any]] = {
    "flux": {
        "model": {"config": tiny.FLUX | {"num_single_layers": 2, "guidance_embeds": True}},
        "codec": {"kind": "autoencoder", "config": tiny.KL},
        "text": _TEXT | {"pooled": {"config": tiny.CLIP}},
    },
    "wan": {
        "model": {"config": tiny.WAN},
        "codec": {"kind": "autoencoder", "config": _CAUSAL_CODEC},
        "text": _TEXT,
    },
}


def _parts(family: str, **model: str) -> dict[str, Any]:
    parts = _PARTS[family]
    return parts | {"model": {**parts["model"], "family": family, **model}}


_RULES = [{"layers": ["to_q"], "rank": 3, "alpha": 6.0}]


def _sampler(family: str, dtype: str = "fp32", **trainable: Any) -> Sampler:
    values = _parts(family, dtype=dtype) | {
        "out": "run",
        "data": {"catalog": "catalog.parquet", "buckets": _BUCKETS[family]},
        "trainable": trainable,
        "training": {"steps": 1, "global_batch_size": 1},
    }
    recipe = config.parse(values, source="test")
    parts, generator = assemble(recipe, _CAPTIONS, None), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in parts.model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3, generator=generator)
    parts.model.eval().requires_grad_(False)
    return Sampler(parts, recipe, 3, torch.device("cpu"), "fp32")


def _trained(tiny_recipe: Recipe, out: Path, family: str, trainable: dict[str, Any]) -> Sampler:
    values = tiny_recipe.model_dump(exclude_none=True)
    values |= {**_parts(family), "out": str(out), "trainable": trainable}
    values["data"]["buckets"] = _BUCKETS[family]
    values["data"]["stills_from_videos"] = family == "flux"
    values["training"] |= {"steps": 3, "global_batch_size": 4}
    train(config.parse(values, source="_trained"), Console(quiet=True))
    return load_sampler(out, device="cpu")


def _base(sampler: Sampler) -> Any:
    recipe = sampler.recipe.model_copy(update={"trainable": TrainableSection()})
    components = recipe.out / "components"
    kept = components if components.is_dir() else None
    return assemble(recipe, _CAPTIONS, kept).model.eval().requires_grad_(False)


def _velocity(sampler: Sampler, model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    told = {
        "prompt_embeds": torch.randn(1, 8, 12, generator=generator),
        "pooled_prompt_embeds": torch.randn(1, 10, generator=generator),
        "guidance": torch.tensor([3.5]),
    }
    noisy = torch.randn(1, 4, 1, 8, 8, generator=generator)
    family = sampler.components.family
    return family.predict_velocity(model, noisy, torch.tensor([0.7]), told)


# --- Pipelines of diffusers, with what was trained beside a model's own weights ---------------


@pytest.fixture(scope="module")
def wan_sampler(tiny_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Sampler:
    return _trained(tiny_recipe, tmp_path_factory.mktemp("runs") / "wan", "wan", {})


def test_the_pipeline_makes_the_video_that_longtake_makes(
    wan_sampler: Sampler, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate", reason="diffusers loads no WanPipeline without accelerate")
    from diffusers import WanPipeline

    export(wan_sampler, tmp_path / "pipeline", "diffusers")
    pipeline = WanPipeline.from_pretrained(tmp_path / "pipeline")
    pipeline.set_progress_bar_config(disable=True)
    settings, bucket = settings_for(wan_sampler.recipe, num_inference_steps=50)
    ours = wan_sampler.sample([Request(_PROMPT, 3)], settings, bucket)[0]
    noise = torch.randn(1, 4, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    theirs = pipeline(
        _PROMPT,
        latents=noise,
        height=bucket.height,
        width=bucket.width,
        num_frames=bucket.num_frames,
        num_inference_steps=50,
        guidance_scale=settings.guidance_scale,
        max_sequence_length=8,
        output_type="np",
    ).frames[0]
    another = wan_sampler.sample([Request(_PROMPT, 4)], settings, bucket)[0]
    assert np.abs(ours - 255 * theirs).mean() < 1
    assert np.abs(another - 255 * theirs).mean() > 10


def test_the_averaged_or_the_raw_weights_are_exported(wan_sampler: Sampler, tmp_path: Path) -> None:
    raw = load_sampler(wan_sampler.recipe.out, ema=False, device="cpu")
    files = {}
    for name, sampler in {"ema": wan_sampler, "raw": raw}.items():
        export(sampler, tmp_path / name, "diffusers")
        folder = tmp_path / name / "transformer"
        files[name] = load_file(folder / "diffusion_pytorch_model.safetensors")
        state = sampler.components.model.state_dict()
        assert all(torch.equal(files[name][key], value) for key, value in state.items())
    assert any(not torch.equal(files["ema"][key], value) for key, value in files["raw"].items())


def test_nothing_is_overwritten_and_nothing_half_is_left(
    wan_sampler: Sampler, tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty folder is taken, also the present one; refusals leave no trace."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    for out in ("file", "full"):
        with pytest.raises(RunError, match=f"--out .*{out} holds something already"):
            export(wan_sampler, tmp_path / out, "diffusers")
    with pytest.raises(RunError, match=r"cannot be written: .*\. Choose another place"):
        export(wan_sampler, tmp_path / "file" / "below", "diffusers")
    with pytest.raises(RecipeError, match="no pipeline for the tubelet family"):
        export(load_sampler(tiny_run, device="cpu"), tmp_path / "tubelet", "diffusers")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    export(wan_sampler, Path(), "diffusers")
    assert (tmp_path / "empty" / "model_index.json").is_file()


def test_wans_scheduler_gets_the_first_buckets_shift(wan_sampler: Sampler, tmp_path: Path) -> None:
    """`WanPipeline` gives its scheduler no resolution, so a rule is written as a number."""
    sampling = wan_sampler.recipe.sampling.model_copy(update={"shift": "flux"})
    recipe = wan_sampler.recipe.model_copy(update={"sampling": sampling})
    export(replace(wan_sampler, recipe=recipe), tmp_path / "pipeline", "diffusers")
    written = json.loads((tmp_path / "pipeline/scheduler/scheduler_config.json").read_text())
    assert written["flow_shift"] == pytest.approx(math.exp(MuLine().mu(3 * 8 * 8)))


@pytest.fixture(scope="module")
def lora_sampler(tiny_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Sampler:
    trainable = {"kind": "lora", "rank": 2, "alpha": 16.0}
    return _trained(tiny_recipe, tmp_path_factory.mktemp("runs") / "lora", "flux", trainable)


def test_diffusers_loads_the_lora_into_the_base_model(
    lora_sampler: Sampler, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate", reason="diffusers loads no FluxPipeline without accelerate")
    from diffusers import FluxPipeline

    trained = _velocity(lora_sampler, lora_sampler.components.model)
    export(lora_sampler, tmp_path / "trained", "diffusers")
    merged = FluxPipeline.from_pretrained(tmp_path / "trained")
    torch.testing.assert_close(
        _velocity(lora_sampler, merged.transformer), trained, atol=1e-5, rtol=1e-4
    )
    assert torch.equal(_velocity(lora_sampler, lora_sampler.components.model), trained)
    merged.transformer = _base(lora_sampler)
    assert (_velocity(lora_sampler, merged.transformer) - trained).abs().max() > 1e-3
    merged.load_lora_weights(tmp_path / "trained")
    torch.testing.assert_close(
        _velocity(lora_sampler, merged.transformer), trained, atol=1e-5, rtol=1e-4
    )


def test_a_modules_weights_are_beside_the_pipeline_of_its_base(
    tiny_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    modules = {"style": ModuleSection(module=_STYLE)}
    sampler = _trained(tiny_recipe, tmp_path / "run", "flux", {"modules": modules})
    export(sampler, tmp_path / "out", "diffusers")
    module = added_modules(sampler.components.model)["style"]
    saved = load_file(tmp_path / "out" / "added_modules" / "style.safetensors")
    torch.testing.assert_close(saved, dict(module.state_dict()), rtol=0, atol=0)
    assert saved["up.0.weight"].any()
    weights = load_file(tmp_path / "out" / "transformer" / "diffusion_pytorch_model.safetensors")
    torch.testing.assert_close(weights, dict(_base(sampler).state_dict()), rtol=0, atol=0)
    assert not (tmp_path / "out" / "pytorch_lora_weights.safetensors").exists()


# --- Adapters for peft and ComfyUI ------------------------------------------------------------


@pytest.mark.parametrize(("family", "kind"), [("wan", "dora"), ("flux", "lokr")])
def test_dora_and_lokr_are_merged_and_read_by_peft(family: str, kind: str, tmp_path: Path) -> None:
    from peft import PeftModel

    sampler = _sampler(family, kind=kind, rank=2, alpha=4.0)
    trained = _velocity(sampler, sampler.components.model)
    merged = plain_copy(sampler.components.model)
    torch.testing.assert_close(_velocity(sampler, merged), trained, rtol=1e-3, atol=1e-4)
    export(sampler, tmp_path / "adapter", "peft")
    base = _base(sampler)
    assert (_velocity(sampler, base) - trained).abs().max() > 1e-2
    read: Any = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    found = _velocity(sampler, read.merge_and_unload())
    torch.testing.assert_close(found, trained, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["flux", "wan"])
def test_peft_and_diffusers_make_the_trained_model_of_its_base(family: str, tmp_path: Path) -> None:
    from peft import PeftModel

    """Some layers have a rank of their own, which is neither written nor read as another's."""
    lora = _sampler(family, kind="lora", rank=2, alpha=16.0, rules=_RULES)
    export(lora, tmp_path / "adapter", "peft")
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}
    base, trained = _base(lora), _velocity(lora, lora.components.model)
    assert (_velocity(lora, base) - trained).abs().max() > 1e-2
    with_lora: Any = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    found = _velocity(lora, with_lora.merge_and_unload())
    torch.testing.assert_close(found, trained, rtol=1e-4, atol=1e-5)
    base = _base(lora)
    named = {"prefix": "base_model.model", "weight_name": "adapter_model.safetensors"}
    base.load_lora_adapter(str(tmp_path / "adapter"), **named)
    torch.testing.assert_close(_velocity(lora, base), trained, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["flux", "wan"])
def test_lora_for_comfyui_is_read_back_by_diffusers_as_the_trained_model(
    family: str, tmp_path: Path
) -> None:
    import diffusers

    lora = _sampler(family, kind="lora", rank=2, alpha=3.0, targets=["*"], rules=_RULES)
    export(lora, tmp_path / "lora.safetensors", "comfyui")
    pipeline = {"flux": diffusers.FluxPipeline, "wan": diffusers.WanPipeline}[family]
    read = pipeline.lora_state_dict(str(tmp_path / "lora.safetensors"))
    expected = lora_state(lora.components.model)
    assert read.keys() == {f"transformer.{name}" for name in expected}
    assert all(torch.equal(read[f"transformer.{name}"], value) for name, value in expected.items())
    base = _base(lora)
    base.load_lora_adapter(read)
    trained = _velocity(lora, lora.components.model)
    torch.testing.assert_close(_velocity(lora, base), trained, rtol=1e-4, atol=1e-5)


def test_wans_lora_has_the_names_of_its_release(tmp_path: Path) -> None:
    sampler = _sampler("wan", kind="lora", rank=2)
    export(sampler, tmp_path / "lora.safetensors", "comfyui")
    layers = [f"{kind}_attn.{part}" for kind in ("self", "cross") for part in "qkvo"]
    assert load_file(tmp_path / "lora.safetensors").keys() == {
        f"diffusion_model.blocks.{block}.{layer}.lora_{matrix}.weight"
        for block in (0, 1)
        for layer in layers
        for matrix in "AB"
    }


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_whole_wan_for_comfyui_is_read_back_by_diffusers(dtype: str, tmp_path: Path) -> None:
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    sampler = _sampler("wan", dtype)
    export(sampler, tmp_path / "wan.safetensors", "comfyui")
    read = convert_wan_transformer_to_diffusers(load_file(tmp_path / "wan.safetensors"))
    wanted = sampler.components.model.state_dict()
    torch.testing.assert_close(read, dict(wanted), rtol=0, atol=0)


def test_a_whole_flux_for_comfyui_has_the_names_of_diffusers(tmp_path: Path) -> None:
    sampler = _sampler("flux", "bf16")
    export(sampler, tmp_path / "new" / "flux.safetensors", "comfyui")
    read = load_file(tmp_path / "new" / "flux.safetensors")
    wanted = sampler.components.model.state_dict()
    torch.testing.assert_close(read, dict(wanted), rtol=0, atol=0)
    assert read["transformer_blocks.0.attn.norm_added_k.weight"].dtype == torch.bfloat16


def test_an_added_module_is_beside_lora_or_named_as_left_out(
    own_module: Callable[[str], str], tmp_path: Path
) -> None:
    """A folder has room for its weights; one file has not, and the verb says so."""
    module = own_module("self.change(given)")
    modules = {"own": ModuleSection(module=module)}
    sampler = _sampler("flux", kind="lora", rank=2, modules=modules)
    lora = lora_state(sampler.components.model)
    assert export(sampler, tmp_path / "adapter", "peft") == []
    added = load_file(tmp_path / "adapter" / "added_modules" / "own.safetensors")
    assert {"style", "first.weight"} <= added.keys()
    assert len(load_file(tmp_path / "adapter" / "adapter_model.safetensors")) == len(lora)
    where, left_out = export(sampler, tmp_path / "lora.safetensors", "comfyui")
    assert "models/loras" in where
    assert "The added modules (own) are not in it" in left_out
    assert len(load_file(tmp_path / "lora.safetensors")) == len(lora)

    beside_all = _sampler("flux", kind="full", modules=modules)
    export(beside_all, tmp_path / "whole.safetensors", "comfyui")
    plain = plain_copy(beside_all.components.model).state_dict()
    assert load_file(tmp_path / "whole.safetensors").keys() == plain.keys()


@pytest.mark.parametrize(
    ("wanted", "trainable", "message"),
    [
        ("peft", {}, r"peft holds LoRA alone, .* trained none: trainable\.kind is full\."),
        ("peft", {"modules": _OWN}, r"trained none: trainable\.kind is frozen\."),
        ("comfyui", {"modules": _OWN}, r"trained added modules \(own\) alone, and ComfyUI"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(
    wanted: Format, trainable: dict[str, Any], message: str, tmp_path: Path
) -> None:
    sampler = _sampler("wan")
    changed = sampler.recipe.model_copy(update={"trainable": TrainableSection(**trainable)})
    with pytest.raises(RecipeError, match=message):
        export(replace(sampler, recipe=changed), tmp_path / "x.safetensors", wanted)
    assert not list(tmp_path.iterdir())


def test_words_that_no_file_would_have_are_refused(tmp_path: Path) -> None:
    recipe, choice = _sampler("wan").recipe, ExportChoice("diffusers", words=Words("A dog"))
    with pytest.raises(RecipeError, match="leave them out for a pipeline of a whole model"):
        check_export(recipe, tmp_path / "out", choice)
    check_export(recipe, tmp_path / "out", choice._replace(is_pushed=True))  # the card has them


def test_a_file_for_comfyui_is_named_like_one_and_overwrites_none(tmp_path: Path) -> None:
    """So that ComfyUI finds it, and nobody's weights are lost."""
    sampler = _sampler("wan")
    with pytest.raises(RunError, match=r"--out \S+x: expected the name of a \.safetensors file"):
        export(sampler, tmp_path / "x", "comfyui")
    (tmp_path / "mine.safetensors").write_text("mine")
    with pytest.raises(RunError, match=r"mine\.safetensors is there already\. Name a new file\."):
        export(sampler, tmp_path / "mine.safetensors", "comfyui")
    with pytest.raises(RunError, match=r"cannot be written: .*\. Choose another place"):
        export(sampler, tmp_path / "mine.safetensors" / "x.safetensors", "comfyui")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.safetensors"]

"""An exported pipeline is the same model: diffusers samples it as longtake does."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from longtake import config
from longtake.config import Recipe
from longtake.errors import RecipeError, RunError
from longtake.evaluation.export import export
from longtake.flow.timesteps import flux_shift
from longtake.sampling.presets import Request, settings_for
from longtake.sampling.sampler import Sampler, load_sampler
from longtake.training.train import train

_PROMPT = "a red circle moving up"


@pytest.fixture(scope="module")
def wan_sampler(tiny_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Sampler:
    """A tiny Wan on the latents of a tiny autoencoder, after three steps."""
    values = tiny_recipe.model_dump(exclude_none=True)
    autoencoder = {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 1], "num_res_blocks": 1}
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    heads = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2}
    values |= {
        "out": str(tmp_path_factory.mktemp("runs") / "wan"),
        "model": {"family": "wan", "config": heads | {"ffn_dim": 16, "freq_dim": 8}},
        "codec": {
            "kind": "autoencoder",
            "config": autoencoder | {"temperal_downsample": [True]},
        },
        "text": {"kind": "transformers", "config": sizes, "max_tokens": 8},
    }
    values["data"]["buckets"] = [{"num_frames": 5, "height": 32, "width": 32}]
    values["training"]["steps"] = 3
    recipe = config.parse(values, source="wan_sampler")
    train(recipe, Console(quiet=True))
    return load_sampler(recipe.out, device="cpu")


def test_the_pipeline_makes_the_video_that_longtake_makes(
    wan_sampler: Sampler, tmp_path: Path
) -> None:
    """From the same noise, with guidance; its own solver is of a higher order, hence many steps."""
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
    """Whichever the sampler was loaded with."""
    from safetensors.torch import load_file

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
    export(dataclasses.replace(wan_sampler, recipe=recipe), tmp_path / "pipeline", "diffusers")
    written = json.loads((tmp_path / "pipeline/scheduler/scheduler_config.json").read_text())
    assert written["flow_shift"] == pytest.approx(flux_shift(3 * 8 * 8))

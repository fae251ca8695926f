"""What was trained beside a model's own weights reaches diffusers: merged, and as files apart."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor, nn

from longtake import config
from longtake.config import Recipe, TrainableSection
from longtake.evaluation.export import export
from longtake.models.added_module import added_module
from longtake.models.base import family
from longtake.models.build import assemble
from longtake.sampling.presets import Request, settings_for
from longtake.sampling.sampler import Sampler, load_sampler
from longtake.training.train import train

_STYLE = "examples.modules.style_residual:StyleResidual"
_PARTS: dict[str, Any] = {
    "model": {
        "family": "flux",
        "config": {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "axes_dims_rope": [4, 6, 6],
            "num_layers": 1,
            "num_single_layers": 2,
            "guidance_embeds": False,
        },
    },
    "codec": {
        "kind": "autoencoder",
        "class_name": "AutoencoderKL",
        "config": {
            "block_out_channels": [4, 4],
            "layers_per_block": 1,
            "latent_channels": 4,
            "norm_num_groups": 2,
        },
    },
    "text": {
        "kind": "transformers",
        "class_name": "T5EncoderModel",
        "config": {"d_model": 12, "d_kv": 6, "d_ff": 12, "num_layers": 1, "num_heads": 2},
        "max_tokens": 8,
        "pooled": {
            "config": {
                "hidden_size": 10,
                "intermediate_size": 10,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            },
            "max_tokens": 9,
        },
    },
}


def _trained(recipe: Recipe, out: Path, trainable: dict[str, Any]) -> Sampler:
    """A tiny FLUX after three steps of something small."""
    values = recipe.model_dump(exclude_none=True) | _PARTS
    values |= {"out": str(out), "trainable": trainable}
    values["data"]["buckets"] = [{"num_frames": 1, "height": 16, "width": 16}]
    values["data"]["stills_from_videos"] = True
    values["training"] |= {"steps": 3, "batch_size": 4}
    train(config.parse(values, source="_trained"), Console(quiet=True))
    return load_sampler(out, device="cpu")


@pytest.fixture(scope="module")
def lora_sampler(tiny_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Sampler:
    """With a scale that is not 1."""
    trainable = {"kind": "lora", "rank": 2, "alpha": 16.0}
    return _trained(tiny_recipe, tmp_path_factory.mktemp("runs") / "lora", trainable)


def _base(sampler: Sampler) -> nn.Module:
    """The model before anything was trained."""
    recipe = sampler.recipe.model_copy(update={"trainable": TrainableSection()})
    return assemble(recipe, (), sampler.recipe.out / "components").model.eval()


def _velocity(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    told = {
        "prompt_embeds": torch.randn(1, 8, 12, generator=generator),
        "pooled_prompt_embeds": torch.randn(1, 10, generator=generator),
        "guidance": torch.tensor([3.5]),
    }
    noisy = torch.randn(1, 4, 1, 8, 8, generator=generator)
    with torch.no_grad():
        return family("flux").predict_velocity(model, noisy, torch.tensor([0.7]), told)


def test_a_lora_run_samples_what_it_has_learned(lora_sampler: Sampler) -> None:
    """Its checkpoint holds the update alone; the weights beneath it are built again."""
    settings, bucket = settings_for(lora_sampler.recipe, num_inference_steps=2)
    requests = [Request("a red circle", 3)]
    assert lora_sampler.sample(requests, settings, bucket).shape == (1, 1, 16, 16, 3)
    learned, before = _velocity(lora_sampler.components.model), _velocity(_base(lora_sampler))
    assert (learned - before).abs().max() > 1e-3


def test_diffusers_loads_the_lora_into_the_base_model(
    lora_sampler: Sampler, tmp_path: Path
) -> None:
    """And it is then the trained model, as the exported pipeline is without loading it."""
    pytest.importorskip("accelerate", reason="diffusers loads no FluxPipeline without accelerate")
    from diffusers import FluxPipeline

    trained = _velocity(lora_sampler.components.model)
    export(lora_sampler, tmp_path / "trained", "diffusers")
    merged = FluxPipeline.from_pretrained(tmp_path / "trained")
    torch.testing.assert_close(_velocity(merged.transformer), trained, atol=1e-5, rtol=1e-4)
    assert torch.equal(_velocity(lora_sampler.components.model), trained)
    merged.transformer = _base(lora_sampler)
    assert (_velocity(merged.transformer) - trained).abs().max() > 1e-3
    merged.load_lora_weights(tmp_path / "trained")
    torch.testing.assert_close(_velocity(merged.transformer), trained, atol=1e-5, rtol=1e-4)


def test_a_modules_weights_are_beside_the_pipeline_of_its_base(
    tiny_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the module's own names; the pipeline's weights are those that nobody trained."""
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    sampler = _trained(tiny_recipe, tmp_path / "run", {"module": _STYLE})
    export(sampler, tmp_path / "out", "diffusers")
    module = added_module(sampler.components.model)
    assert module is not None
    saved = load_file(tmp_path / "out" / "added_module.safetensors")
    torch.testing.assert_close(saved, dict(module.state_dict()), rtol=0, atol=0)
    assert saved["up.0.weight"].any()
    weights = load_file(tmp_path / "out" / "transformer" / "diffusion_pytorch_model.safetensors")
    torch.testing.assert_close(weights, dict(_base(sampler).state_dict()), rtol=0, atol=0)
    assert not (tmp_path / "out" / "pytorch_lora_weights.safetensors").exists()

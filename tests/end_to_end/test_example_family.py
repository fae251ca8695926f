"""The example of a family of one's own trains, samples as its pipeline and is exported to it."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from tests.build import QUIET, TINY_T5, MakeRecipe, losses

from longtake.evaluation.export import export
from longtake.models import base
from longtake.sampling.presets import Request, settings_for
from longtake.sampling.sampler import load_sampler
from longtake.training.train import train

_TINY = (
    *TINY_T5,
    "data.buckets=[{num_frames=1, height=16, width=24}]",
    "data.stills_from_videos=true",
    "model.family=examples.families.aura_flow:AuraFlow",
    "model.config={num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=8, "
    "num_attention_heads=2, caption_projection_dim=16, pos_embed_max_size=64}",
    "codec.kind=autoencoder",
    "codec.config={block_out_channels=[4, 4], layers_per_block=1, latent_channels=4, "
    "norm_num_groups=2}",
    "trainable={kind='lora', rank=2}",
    "optimizer.learning_rate=1e-2",
    "flow.shift=release",
    "training.steps=3",
)


def test_the_example_is_short() -> None:
    file = Path(__file__).resolve().parents[2] / "examples" / "families" / "aura_flow.py"
    assert len(file.read_text().splitlines()) <= 60


def test_a_family_of_ones_own_trains_and_is_exported(
    small_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the folder where the user is, by the names in the recipe alone."""
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    recipe = small_recipe(*_TINY, f"out={tmp_path / 'run'}")
    train(recipe, QUIET)
    assert len(set(losses(recipe))) == 3
    sampler = load_sampler(recipe.out, ema=False, device="cpu")
    settings, bucket = settings_for(sampler.recipe, num_inference_steps=2)
    assert sampler.sample([Request("a red circle", 0)], settings, bucket).shape == (1, 1, 16, 24, 3)

    export(sampler, tmp_path / "exported", "diffusers")
    pipeline: Any = diffusers.AuraFlowPipeline.from_pretrained(tmp_path / "exported")
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.randn(1, 4, 8, 12, generator=torch.Generator().manual_seed(1))
    prompt, steps = "a red circle", 4
    told = sampler.components.text.encode([prompt])
    theirs = pipeline(
        prompt,
        latents=noise,
        height=16,
        width=24,
        sigmas=[1 - step / steps for step in range(steps)],
        guidance_scale=1.0,
        max_sequence_length=told["prompt_embeds"].shape[1],
        output_type="latent",
    ).images
    latents, sigmas = noise[:, :, None], pipeline.scheduler.sigmas.tolist()
    family: base.Family = sampler.components.family
    with torch.no_grad():
        for sigma, after in pairwise(sigmas):
            found = family.predict_velocity(
                sampler.components.model, latents, torch.tensor([sigma]), told
            )
            latents = latents + (after - sigma) * found
    assert (latents[:, :, 0] - theirs).norm() <= 1e-5 * theirs.norm()

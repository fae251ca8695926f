"""Trainings and exports of tiny releases are diffusers', from captions and pixels to the end.

Tiny models with random weights stand in folders of the releases' layout: tokenizers of subwords,
UMT5, T5 and CLIP, autoencoders with the released statistics of latents, and the released
schedulers' configurations. Recipes leave to the defaults what a user would leave to them.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from tests.families.release_flux import make as save_flux
from tests.families.release_wan import make as save_wan
from tests.families.row import write_edits
from tests.families.tiny import relative
from tests.models.tiny import make_recipe
from tests.sampling.build import make_sampler, sample_latents
from torch import Tensor

from longtake import config
from longtake.config import Recipe
from longtake.data.batch import Batch
from longtake.data.index import index
from longtake.data.loader import Loader
from longtake.data.tasks import HERE
from longtake.demo.shapes import write_clips
from longtake.evaluation.export import export
from longtake.fsio import read_json_lines
from longtake.sampling.presets import Request

_PROMPT = "a \u201cred\u201d  circle, moving &amp; it\u2019s up"  # which Wan's pipeline cleans
_PIPELINES: dict[str, Any] = {
    "wan": diffusers.WanPipeline,
    "flux": diffusers.FluxPipeline,
    "flux_kontext": diffusers.FluxKontextPipeline,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two releases, `wan` and `flux`, and the clips and pictures that are trained on."""
    folder = tmp_path_factory.mktemp("releases")
    torch.manual_seed(0)
    save_wan(folder / "wan")
    save_flux(folder / "flux")
    captions = write_clips(folder / "clips", num_clips=4, seed=0)
    index([folder / "clips"], captions=captions, out=folder / "clips.parquet", work=HERE)
    write_edits(folder, 48, 64, "picture {number}, a red circle")
    index([folder / "after"], captions=None, out=folder / "after.parquet", work=HERE)
    return folder


def _recipe(place: Path, family: str) -> Recipe:
    is_wan, flow = family == "wan", {"shift": 3.0 if family == "wan" else "flux"}
    bucket = (5, 32, 32) if is_wan else (1, 48, 64)
    catalog = place / ("clips.parquet" if is_wan else "after.parquet")
    data: dict[str, Any] = {"catalog": str(catalog), "workers": 0}
    if family == "flux_kontext":
        data["conditioning"] = {"reference": {"kind": "picture", "path": "../before/{stem}.png"}}
    return make_recipe(
        family,
        bucket,
        place / ("wan" if is_wan else "flux"),
        data=data,
        text={} if is_wan else {"pooled": {}},
        flow=flow,
        training={"global_batch_size": 4},
        watch={"enabled": False},
        tracking={"tensorboard": False},
    )


def test_wans_own_sampler_and_a_negative_prompt_are_those_of_its_pipeline(place: Path) -> None:
    negative = "a blue square, fast"
    ours = sample_latents(
        make_sampler(_recipe(place, "wan")),
        Request(_PROMPT, 3),
        num_inference_steps=6,
        solver="unipc",
        negative_prompt=negative,
    )
    noise = torch.randn(tuple(ours.shape[1:]), generator=torch.Generator().manual_seed(3))[None]
    pipeline = diffusers.WanPipeline.from_pretrained(place / "wan")
    pipeline.set_progress_bar_config(disable=True)
    given = {"height": 32, "width": 32, "num_frames": 5, "output_type": "latent"}
    theirs, without = (
        pipeline(
            prompt=_PROMPT, negative_prompt=each, latents=noise, num_inference_steps=6, **given
        )[0]
        for each in (negative, "")
    )
    assert relative(ours, theirs) <= 1e-5
    assert relative(ours, without) > 1e-3


@torch.no_grad()
def _diffusers_loss(pipeline: Any, family: str, batch: Batch) -> float:
    """The mean over a batch of flow matching's loss, by diffusers' parts alone."""
    losses = []
    for number, (seed, caption) in enumerate(zip(batch.seeds, batch.captions, strict=True)):
        latents = _latents(pipeline, family, batch.videos[number])
        # A sample's generator draws for its sigma and its caption's dropout, and then its noise.
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.rand(2, generator=generator, dtype=torch.float64)
        noise = torch.randn(tuple(latents.shape[1:]), generator=generator)
        if family == "wan" and uniform[1] < 0.1:
            caption = ""
        tokens = latents.shape[-1] * latents.shape[-2] // 4
        shift = 3.0 if family == "wan" else np.exp(0.5 + 0.65 * (tokens - 256) / 3840)
        even = torch.sigmoid(torch.special.ndtri(uniform[0]))
        sigma = (shift * even / (1 + (shift - 1) * even)).float()[None]
        noisy = (1 - sigma) * latents + sigma * noise[None]
        reference = None
        if family == "flux_kontext":
            reference = _latents(pipeline, family, batch.inputs["reference"][number])
        velocity = _velocity(pipeline, family, noisy, sigma, caption, reference)
        losses.append((velocity - (noise - latents)).square().mean())
    return float(torch.stack(losses).mean())


def _latents(pipeline: Any, family: str, video: Tensor) -> Tensor:
    """[1, C, F, h, w] of [3, F, H, W] uint8, normalised by the autoencoder's configuration."""
    vae, pixels = pipeline.vae, video[None].float() / 127.5 - 1
    if family == "wan":
        raw = vae.encode(pixels).latent_dist.mode()
        mean, std = (
            torch.tensor(vae.config[f"latents_{name}"]).view(1, -1, 1, 1, 1)
            for name in ("mean", "std")
        )
        latents: Tensor = (raw - mean) / std
        return latents
    raw = vae.encode(pixels[:, :, 0]).latent_dist.mode()
    latents = (raw - vae.config.shift_factor) * vae.config.scaling_factor
    return latents[:, :, None]


def _velocity(
    pipeline: Any,
    family: str,
    noisy: Tensor,
    sigma: Tensor,
    caption: str,
    reference: Tensor | None,
) -> Tensor:
    """[1, C, F, h, w], as a pipeline asks its transformer."""
    if family == "wan":
        embeds, _ = pipeline.encode_prompt(
            caption, do_classifier_free_guidance=False, max_sequence_length=512
        )
        video: Tensor = pipeline.transformer(noisy, sigma * 1000, embeds, return_dict=False)[0]
        return video
    embeds, pooled, text_ids = pipeline.encode_prompt(caption, None)
    height, width = noisy.shape[-2:]
    pictures = [noisy] if reference is None else [noisy, reference]
    tokens, ids = [], []
    for number, picture in enumerate(pictures):
        tokens.append(pipeline._pack_latents(picture[:, :, 0], 1, 16, height, width))
        cpu = torch.device("cpu")
        own = pipeline._prepare_latent_image_ids(1, height // 2, width // 2, cpu, torch.float32)
        own[..., 0] = number
        ids.append(own)
    velocity = pipeline.transformer(
        hidden_states=torch.cat(tokens, dim=1),
        timestep=sigma,
        guidance=torch.tensor([1.0]),
        pooled_projections=pooled,
        encoder_hidden_states=embeds,
        txt_ids=text_ids,
        img_ids=torch.cat(ids),
        return_dict=False,
    )[0]
    of_noisy = velocity[:, : tokens[0].shape[1]]
    image: Tensor = pipeline._unpack_latents(of_noisy, height * 8, width * 8, 8)
    return image[:, :, None]


@pytest.mark.parametrize("family", _PIPELINES)
def test_the_first_loss_of_a_training_is_that_of_diffusers(
    family: str, place: Path, tmp_path: Path, call_longtake: Callable[..., None]
) -> None:
    recipe = _recipe(place, family).model_copy(update={"out": tmp_path / "run"})
    (tmp_path / "recipe.toml").write_text(config.dump(recipe))
    call_longtake("train", tmp_path / "recipe.toml")
    (row,) = read_json_lines(tmp_path / "run" / "metrics.jsonl")

    loader = Loader(recipe.data, batch_size=4, seed=recipe.seed)
    (batch,) = loader.batches(1)
    pipeline = _PIPELINES[family].from_pretrained(recipe.model.pretrained)
    expected = _diffusers_loss(pipeline, family, batch)
    assert row["loss"] == pytest.approx(expected, rel=1e-5)


def test_flux_is_exported_with_the_released_schedulers_rule(place: Path, tmp_path: Path) -> None:
    export(make_sampler(_recipe(place, "flux")), tmp_path / "out", "diffusers")
    written, released = (
        json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
        for folder in (tmp_path / "out", place / "flux")
    )
    assert written == released

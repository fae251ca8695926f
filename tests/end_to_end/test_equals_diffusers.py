"""longtake computes what diffusers' own pipelines compute, from captions and pixels to the end.

Tiny models with random weights stand in folders of the releases' layout: tokenizers of subwords,
UMT5, T5 and CLIP, autoencoders with the released statistics of latents, and the released
schedulers' configurations. Recipes leave to the defaults what a user would leave to them.
"""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor, nn

from longtake import cli, config
from longtake.config import Recipe
from longtake.data.index import index
from longtake.data.loader import Batch, Loader
from longtake.demo.shapes import write_clips
from longtake.evaluation.export import Format, export
from longtake.fsio import read_json_lines
from longtake.models.build import assemble
from longtake.models.codec import Codec
from longtake.models.trainable import lora_state
from longtake.sampling.presets import Request, settings_for
from longtake.sampling.sampler import Sampler

_PROMPT = "a \u201cred\u201d  circle, moving &amp; it\u2019s up"  # which Wan's pipeline cleans
_WIDTH = 16  # of text encoders
_FAMILIES = ("wan", "flux", "flux_kontext")


def _relative(ours: Tensor, theirs: Tensor) -> float:
    """Norm of the difference over the norm; 1e-5 is the rounding of fp32."""
    assert ours.shape == theirs.shape
    return float((ours - theirs).norm() / theirs.norm())


def _tokenizer(*, begins: bool) -> Any:
    """Subwords of a few captions; as CLIP's it begins captions too."""
    special = ["<pad>", "</s>", "<unk>", "<s>"]
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=90, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    texts = [
        _PROMPT,
        "a 'red' circle moving up",
        "a blue square moving left",
        "a green triangle moves down & 'right' \"fast\"",
    ]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if begins else "$A </s>", special_tokens=[("<s>", 3), ("</s>", 1)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        bos_token="<s>",
        model_max_length=77 if begins else 512,
    )


def _t5(kind: str, vocabulary_size: int) -> Any:
    sizes = {"d_model": _WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    settings = getattr(transformers, f"{kind}Config")(vocab_size=vocabulary_size, **sizes)
    return getattr(transformers, f"{kind}EncoderModel")(settings)


def _wan(folder: Path) -> None:
    words = _tokenizer(begins=False)
    diffusers.WanPipeline(
        tokenizer=words,
        text_encoder=_t5("UMT5", len(words)),
        vae=diffusers.AutoencoderKLWan(
            base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1
        ),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        transformer=diffusers.WanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            text_dim=_WIDTH,
            freq_dim=16,
            ffn_dim=32,
            num_layers=2,
        ),
    ).save_pretrained(folder)


def _flux(folder: Path) -> None:
    words, pooled = _tokenizer(begins=False), _tokenizer(begins=True)
    clip = transformers.CLIPTextConfig(
        vocab_size=len(pooled),
        hidden_size=_WIDTH,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=77,
        bos_token_id=3,
        eos_token_id=1,
        pad_token_id=0,
    )
    stages = 4
    diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15
        ),
        vae=diffusers.AutoencoderKL(
            block_out_channels=(4,) * stages,
            down_block_types=("DownEncoderBlock2D",) * stages,
            up_block_types=("UpDecoderBlock2D",) * stages,
            layers_per_block=1,
            latent_channels=16,
            norm_num_groups=2,
            scaling_factor=0.3611,
            shift_factor=0.1159,
            use_quant_conv=False,
            use_post_quant_conv=False,
        ),
        text_encoder=transformers.CLIPTextModel(clip),
        tokenizer=pooled,
        text_encoder_2=_t5("T5", len(words)),
        tokenizer_2=words,
        transformer=diffusers.FluxTransformer2DModel(
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=_WIDTH,
            pooled_projection_dim=_WIDTH,
            guidance_embeds=True,
            axes_dims_rope=(4, 6, 6),
        ),
    ).save_pretrained(folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two releases, `wan` and `flux`, and the clips and pictures that are trained on."""
    folder = tmp_path_factory.mktemp("releases")
    torch.manual_seed(0)
    _wan(folder / "wan")
    _flux(folder / "flux")
    captions = write_clips(folder / "clips", num_clips=4, seed=0)
    index([folder / "clips"], captions=captions, out=folder / "clips.parquet", workers=0)
    random = np.random.default_rng(0)
    for name in ("before", "after"):
        (folder / name).mkdir()
        for number in range(4):
            pixels = random.integers(0, 256, (48, 64, 3), np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
            (folder / name / f"{number}.txt").write_text(f"picture {number}, a red circle")
    index([folder / "after"], captions=None, out=folder / "after.parquet", workers=0)
    return folder


def _recipe(place: Path, family: str, **sections: Any) -> Recipe:
    is_wan = family == "wan"
    release = str(place / ("wan" if is_wan else "flux"))
    frames = {"num_frames": 5, "height": 32, "width": 32}
    picture = {"num_frames": 1, "height": 48, "width": 64}
    values = {
        "out": str(place / "run"),
        "data": {
            "catalog": str(place / ("clips.parquet" if is_wan else "after.parquet")),
            "buckets": [frames if is_wan else picture],
            "conditioning": (
                {"reference": {"kind": "picture", "path": "../before/{stem}.png"}}
                if family == "flux_kontext"
                else {}
            ),
            "workers": 0,
        },
        "model": {"family": family, "pretrained": release},
        "codec": {
            "kind": "autoencoder",
            "pretrained": release,
        },
        "text": {
            "kind": "transformers",
            "pretrained": release,
            "dtype": "fp32",
            **({} if is_wan else {"pooled": {}}),
        },
        "flow": {"shift": 3.0 if is_wan else "flux"},
        "training": {"steps": 1, "global_batch_size": 4, "device": "cpu", "precision": "fp32"},
        "watch": {"enabled": False},
        "tracking": {"tensorboard": False},
        **sections,
    }
    return config.parse(values, source="test")


class _EvenSteps(diffusers.FlowMatchEulerDiscreteScheduler):  # type: ignore[misc]
    """Euler steps at longtake's sigmas, where `WanPipeline` names none of its own."""

    def set_timesteps(self, num_inference_steps: int, **options: Any) -> None:
        even = np.linspace(1, 1 / num_inference_steps, num_inference_steps)
        super().set_timesteps(sigmas=even, **options)


def _pipeline(place: Path, family: str) -> Any:
    names = {"wan": "Wan", "flux": "Flux", "flux_kontext": "FluxKontext"}
    folder = place / ("wan" if family == "wan" else "flux")
    pipeline = getattr(diffusers, f"{names[family]}Pipeline").from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    if family == "wan":
        pipeline.scheduler = _EvenSteps(shift=pipeline.scheduler.config.flow_shift)
    return pipeline


def _sampler(recipe: Recipe) -> Sampler:
    parts = assemble(recipe, (), None)
    parts.model.eval()
    return Sampler(parts, recipe, 0, torch.device("cpu"), "fp32")


class _KeepsLatents:
    """A codec that keeps what it is to decode."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.latents: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.codec, name)

    def decode(self, latents: Tensor, *, tiles: bool = False) -> Tensor:
        """The codec's."""
        self.latents.append(latents.clone())
        return self.codec.decode(latents, tiles=tiles)


@pytest.mark.parametrize("family", _FAMILIES)
def test_sampled_latents_are_those_of_the_pipeline(family: str, place: Path) -> None:
    sampler, pipeline = _sampler(_recipe(place, family)), _pipeline(place, family)
    codec = _KeepsLatents(sampler.components.codec)
    parts = dataclasses.replace(sampler.components, codec=codec)
    settings, bucket = settings_for(sampler.recipe, num_inference_steps=4)
    picture = place / "before" / "0.png"
    references = {"reference": picture} if family == "flux_kontext" else {}
    sampler = dataclasses.replace(sampler, components=parts)
    sampler.sample([Request(_PROMPT, 3, references)], settings, bucket)
    (ours,) = codec.latents

    noise = torch.randn(tuple(ours.shape[1:]), generator=torch.Generator().manual_seed(3))[None]
    given: dict[str, Any] = {"num_frames": bucket.num_frames, "latents": noise}
    if family != "wan":
        packed = pipeline._pack_latents(noise[:, :, 0], 1, 16, *noise.shape[-2:])
        given = {"latents": packed}
    if family == "flux_kontext":
        area = bucket.height * bucket.width
        with Image.open(picture) as image:
            given |= {"image": image.convert("RGB")}
        given |= {"max_area": area, "_auto_resize": False}
        given |= {"guidance_scale": 2.5}  # of the model card
    theirs = pipeline(
        prompt=_PROMPT,
        height=bucket.height,
        width=bucket.width,
        num_inference_steps=4,
        output_type="latent",
        **given,
    )[0]
    if family != "wan":
        theirs = pipeline._unpack_latents(theirs, bucket.height, bucket.width, 8)[:, :, None]
        assert pipeline.vae_scale_factor == 8
    assert _relative(ours, theirs) <= 1e-5


def test_wans_own_sampler_and_a_negative_prompt_are_those_of_its_pipeline(place: Path) -> None:
    sampler = _sampler(_recipe(place, "wan"))
    codec = _KeepsLatents(sampler.components.codec)
    parts = dataclasses.replace(sampler.components, codec=codec)
    sampler = dataclasses.replace(sampler, components=parts)
    negative = "a blue square, fast"
    settings, bucket = settings_for(
        sampler.recipe, num_inference_steps=6, solver="unipc", negative_prompt=negative
    )
    sampler.sample([Request(_PROMPT, 3)], settings, bucket)
    (ours,) = codec.latents
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
    assert _relative(ours, theirs) <= 1e-5
    assert _relative(ours, without) > 1e-3


def _draw(seed: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """A sample's noise, and two uniform numbers: for its sigma and its caption's dropout."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(2, generator=generator, dtype=torch.float64)
    return torch.randn(shape, generator=generator), uniform


@torch.no_grad()
def _diffusers_loss(pipeline: Any, family: str, batch: Batch) -> float:
    """The mean over a batch of flow matching's loss, by diffusers' parts alone."""
    losses = []
    for number, (seed, caption) in enumerate(zip(batch.seeds, batch.captions, strict=True)):
        latents = _latents(pipeline, family, batch.videos[number])
        noise, uniform = _draw(seed, tuple(latents.shape[1:]))
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
    guidance: float = 1.0,
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
        guidance=torch.tensor([guidance]),
        pooled_projections=pooled,
        encoder_hidden_states=embeds,
        txt_ids=text_ids,
        img_ids=torch.cat(ids),
        return_dict=False,
    )[0]
    of_noisy = velocity[:, : tokens[0].shape[1]]
    image: Tensor = pipeline._unpack_latents(of_noisy, height * 8, width * 8, 8)
    return image[:, :, None]


def _call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["longtake", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code


@pytest.mark.parametrize("family", _FAMILIES)
def test_the_first_loss_of_a_training_is_that_of_diffusers(
    family: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = _recipe(place, family, out=str(tmp_path / "run"))
    (tmp_path / "recipe.toml").write_text(config.dump(recipe))
    _call(monkeypatch, "train", tmp_path / "recipe.toml")
    (row,) = read_json_lines(tmp_path / "run" / "metrics.jsonl")

    loader = Loader(recipe.data, batch_size=4, seed=recipe.seed)
    (batch,) = loader.batches(1)
    expected = _diffusers_loss(_pipeline(place, family), family, batch)
    assert row["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.fixture(scope="module", params=_FAMILIES)
def adapted(request: pytest.FixtureRequest, place: Path) -> tuple[str, Sampler]:
    """A model with LoRA that does something, with a scale that is not 1."""
    lora = {"kind": "lora", "rank": 2, "alpha": 3.0}
    sampler = _sampler(_recipe(place, request.param, trainable=lora))
    generator = torch.Generator().manual_seed(5)
    for name, weight in sampler.components.model.named_parameters():
        if "lora_" in name:
            weight.data = torch.randn(weight.shape, generator=generator) / 8
    return request.param, sampler


_LOADERS: dict[Format, Callable[[Any, Path], None]] = {
    "diffusers": lambda pipeline, out: pipeline.load_lora_weights(out),
    "peft": lambda pipeline, out: pipeline.transformer.load_lora_adapter(
        out / "adapter_model.safetensors", prefix="base_model.model"
    ),
    "comfyui": lambda pipeline, out: pipeline.load_lora_weights(out),
}


@pytest.mark.parametrize("written", list(_LOADERS))
def test_diffusers_own_loaders_read_the_lora(
    adapted: tuple[str, Sampler], written: Format, place: Path, tmp_path: Path
) -> None:
    family, sampler = adapted
    out = tmp_path / ("lora.safetensors" if written == "comfyui" else "out")
    export(sampler, out, written)
    generator = torch.Generator().manual_seed(1)
    shape = (1, 16, 2, 4, 4) if family == "wan" else (1, 16, 1, 6, 8)
    noisy, reference = (torch.randn(shape, generator=generator) for _ in range(2))
    sigma = torch.tensor([0.7])
    pipeline = _pipeline(place, family)

    def theirs() -> Tensor:
        picture = reference if family == "flux_kontext" else None
        with torch.no_grad():
            return _velocity(pipeline, family, noisy, sigma, _PROMPT, picture)

    parts = sampler.components
    told = parts.text.encode([_PROMPT])
    told |= {"guidance": torch.tensor([1.0]), "reference_latents": reference}
    with torch.no_grad():
        ours = parts.predict_velocity(noisy, sigma, told)
    released = theirs()
    _LOADERS[written](pipeline, out)
    assert _relative(ours, theirs()) <= 1e-5
    assert _relative(released, ours) > 1e-2
    assert lora_state(parts.model)
    if written == "diffusers":
        _assert_merged(pipeline, out, ours, theirs)


def _assert_merged(pipeline: Any, out: Path, ours: Tensor, theirs: Callable[[], Tensor]) -> None:
    """The transformer of the exported folder has the LoRA merged into its weights."""
    pipeline.transformer = type(pipeline.transformer).from_pretrained(out / "transformer")
    assert isinstance(pipeline.transformer, nn.Module)
    assert _relative(ours, theirs()) <= 1e-5


def test_flux_is_exported_with_the_released_schedulers_rule(place: Path, tmp_path: Path) -> None:
    export(_sampler(_recipe(place, "flux")), tmp_path / "out", "diffusers")
    written, released = (
        json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
        for folder in (tmp_path / "out", place / "flux")
    )
    assert written == released
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(
        tmp_path / "out", subfolder="scheduler"
    )
    assert scheduler.config.use_dynamic_shifting

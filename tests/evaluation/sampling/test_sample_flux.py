"""What sampling FLUX promises: it is told its guidance, and goes by the pictures it is given."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from longtake import config
from longtake.config import Recipe
from longtake.errors import DataError, RunError
from longtake.evaluation.export import export
from longtake.evaluation.sampling.studio import Request, Sampler, settings_for
from longtake.evaluation.sampling.write import references_by_name
from longtake.models.build import assemble

_HEIGHT, _WIDTH = 16, 24
_CAPTIONS = ["a red ball rolls left", "a blue square"]


def _recipe(family: str = "flux_kontext", **model: Any) -> Recipe:
    transformer = {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "axes_dims_rope": [4, 4, 4],
        "num_layers": 1,
        "num_single_layers": 1,
        "guidance_embeds": True,
    }
    autoencoder = {
        "block_out_channels": [4, 4],
        "layers_per_block": 1,
        "latent_channels": 4,
        "norm_num_groups": 2,
    }
    clip = {
        "hidden_size": 10,
        "intermediate_size": 10,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    values = {
        "out": "run",
        "data": {
            "catalog": "catalog.parquet",
            "buckets": [{"num_frames": 1, "height": _HEIGHT, "width": _WIDTH}],
            "references": {"reference": "{stem}.png"} if family == "flux_kontext" else {},
        },
        "model": {"family": family, "config": transformer | model},
        "codec": {"kind": "autoencoder", "class_name": "AutoencoderKL", "config": autoencoder},
        "text": {
            "kind": "transformers",
            "class_name": "T5EncoderModel",
            "max_tokens": 8,
            "config": {"d_model": 12, "d_kv": 6, "d_ff": 12, "num_layers": 1, "num_heads": 2},
            "pooled": {"config": clip},
        },
        "training": {"steps": 1, "batch_size": 1},
        "sampling": {"num_inference_steps": 3, "guidance_scale": 4.0, "shift": 2.0},
    }
    return config.parse(values, source="test")


def _sampler(recipe: Recipe | None = None) -> Sampler:
    recipe = recipe or _recipe()
    parts = assemble(recipe, _CAPTIONS, None)
    parts.model.eval()
    return Sampler(parts, recipe, 0, torch.device("cpu"), "fp32")


def _sample(sampler: Sampler, *requests: Request, **changes: Any) -> NDArray[np.uint8]:
    settings, bucket = settings_for(sampler.recipe, **changes)
    return sampler.sample(requests, settings, bucket)


def _picture(path: Path, seed: int = 0, height: int = _HEIGHT, width: int = _WIDTH) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def asked(tmp_path: Path) -> Request:
    """A request with its picture."""
    return Request("a red ball", 3, {"reference": _picture(tmp_path / "one.png")})


def test_a_distilled_model_is_told_the_scale_in_one_pass(asked: Request) -> None:
    """Once a step, each request once; another scale makes another picture, and 1 is a scale."""
    sampler = _sampler()
    sizes: list[int] = []
    scales: list[list[float]] = []
    model: Any = sampler.components.model

    def watch(module: object, args: object, given: dict[str, Any]) -> None:
        sizes.append(len(given["hidden_states"]))
        scales.append(given["guidance"].tolist())

    handle = model.register_forward_pre_hook(watch, with_kwargs=True)
    at_four = _sample(sampler, asked, asked)
    at_one = _sample(sampler, asked, asked, guidance_scale=1.0)
    handle.remove()
    assert sizes == [2] * 6
    assert scales == [[4.0, 4.0]] * 3 + [[1.0, 1.0]] * 3
    assert at_four.shape == (2, 1, _HEIGHT, _WIDTH, 3)
    assert not np.array_equal(at_four, at_one)


def test_one_that_is_not_distilled_is_guided_by_a_second_pass(asked: Request) -> None:
    """Its picture goes with both halves of the batch."""
    sampler = _sampler(_recipe(guidance_embeds=False))
    sizes: list[int] = []
    model: Any = sampler.components.model
    model.register_forward_pre_hook(
        lambda module, args, given: sizes.append(len(given["hidden_states"])), with_kwargs=True
    )
    _sample(sampler, asked)
    assert sizes == [2] * 3


def test_the_picture_matters_and_not_what_stands_beside_it(asked: Request, tmp_path: Path) -> None:
    """Each request goes by its own."""
    sampler = _sampler()
    Image.new("RGB", (_WIDTH, _HEIGHT), "white").save(tmp_path / "white.png")
    other = Request("a red ball", 3, {"reference": tmp_path / "white.png"})
    alone = _sample(sampler, asked)[0].astype(int)
    together = _sample(sampler, other, asked).astype(int)
    assert np.abs(together[1] - alone).mean() < 0.01
    assert np.abs(together[0] - alone).mean() > 0.1


def test_a_picture_of_another_size_is_scaled_to_cover_and_cut(tmp_path: Path) -> None:
    """Twice as large and a border on both sides: the middle is what counts."""
    sampler = _sampler()
    pixels = np.asarray(Image.open(_picture(tmp_path / "middle.png")))
    border = np.zeros((_HEIGHT, 4, 3), np.uint8)
    Image.fromarray(np.concatenate([border, pixels, border], axis=1)).save(tmp_path / "wide.png")
    middle, wide = (
        _sample(sampler, Request("a red ball", 3, {"reference": tmp_path / f"{name}.png"}))
        for name in ("middle", "wide")
    )
    assert np.array_equal(middle, wide)


@pytest.mark.parametrize(
    ("names", "family", "message"),
    [
        ([], "flux_kontext", r"takes the reference images reference; given: none\. Give exactly"),
        (["pose"], "flux_kontext", r"takes the reference images reference; given: pose\."),
        (["reference"], "flux", "takes no reference images, but reference was given"),
    ],
)
def test_pictures_must_be_those_that_the_run_goes_by(
    names: list[str], family: str, message: str, tmp_path: Path
) -> None:
    """A missing or misspelt one is named before anything is computed."""
    picture = _picture(tmp_path / "one.png")
    with pytest.raises(DataError, match=message):
        _sample(_sampler(_recipe(family)), Request("a", 0, dict.fromkeys(names, picture)))


def test_a_picture_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Gone or no picture at all."""
    (tmp_path / "broken.png").write_text("no picture")
    for name in ("broken.png", "gone.png"):
        with pytest.raises(DataError, match=rf"The picture .*{name} cannot be read: "):
            _sample(_sampler(), Request("a", 0, {"reference": tmp_path / name}))


@pytest.mark.parametrize("family", ["flux", "flux_kontext"])
def test_the_exported_pipeline_makes_the_picture_that_longtake_makes(
    family: str, tmp_path: Path
) -> None:
    """From the same noise, along the same sigmas, with the same guidance and picture."""
    pytest.importorskip("accelerate", reason="diffusers loads pipelines through accelerate")
    import diffusers

    sampler = _sampler(_recipe(family))
    export(sampler, tmp_path / "pipeline", "diffusers")
    name = {"flux": "FluxPipeline", "flux_kontext": "FluxKontextPipeline"}[family]
    pipeline = getattr(diffusers, name).from_pretrained(tmp_path / "pipeline")
    pipeline.set_progress_bar_config(disable=True)
    picture = _picture(tmp_path / "one.png")
    given: dict[str, Any] = {}
    if family == "flux_kontext":
        given = {"image": Image.open(picture), "max_area": _HEIGHT * _WIDTH, "_auto_resize": False}
    references = {"reference": picture} if given else {}
    ours = _sample(sampler, Request("a red ball", 3, references))[0, 0]
    noise = torch.randn(1, 4, 1, 8, 12, generator=torch.Generator().manual_seed(3))
    packed = pipeline._pack_latents(noise[:, :, 0], 1, 4, 8, 12)
    theirs = pipeline(
        prompt="a red ball",
        latents=packed,
        height=_HEIGHT,
        width=_WIDTH,
        num_inference_steps=3,
        guidance_scale=4.0,
        max_sequence_length=8,
        output_type="np",
        **given,
    ).images[0]
    assert ours.std() > 5
    assert np.abs(ours - 255 * theirs).max() <= 1


def test_references_are_given_by_name(tmp_path: Path) -> None:
    """As NAME=FILE; anything else is refused with an example."""
    picture = _picture(tmp_path / "a=b.png")
    assert references_by_name([f"reference={picture}"]) == {"reference": picture}
    assert references_by_name([]) == {}
    for given in (str(picture), "reference=", f"={picture}", "reference"):
        with pytest.raises(RunError, match=r"--reference .*like --reference ref\w+=picture\.png"):
            references_by_name([given])
    with pytest.raises(RunError, match=r"there is no file nowhere\.png\. Give it like"):
        references_by_name(["pose=nowhere.png"])

"""What a sampler promises: which weights, which noise, and that neighbours do not matter."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from longtake.config import CodecSection, EmaSection, Recipe
from longtake.errors import CheckpointError, RecipeError, RunError, SamplingError
from longtake.evaluation.sampling.studio import (
    Request,
    Sampler,
    find_checkpoint,
    load_sampler,
    settings_for,
    weights_to_sample,
)
from longtake.flow.solver import integrate
from longtake.flow.timesteps import build_sigmas
from longtake.models.build import assemble
from longtake.models.codec import build_codec

_PROMPT = "a red circle moving up"
_OTHERS = [Request("a blue square moving left", 1), Request("a green cross moving down", 2)]


@pytest.fixture(scope="module")
def sampler(tiny_run: Path) -> Sampler:
    """The newest averaged weights of the tiny run."""
    return load_sampler(tiny_run, device="cpu")


def _sample(sampler: Sampler, *requests: Request, **changes: Any) -> NDArray[np.uint8]:
    settings, bucket = settings_for(sampler.recipe, **changes)
    return sampler.sample(requests or [Request(_PROMPT, 0)], settings, bucket)


def _apart(left: NDArray[np.uint8], right: NDArray[np.uint8]) -> int:
    """The largest difference in grey levels."""
    return int(np.abs(left.astype(int) - right.astype(int)).max())


def _weights(sampler: Sampler) -> dict[str, Tensor]:
    return sampler.components.model.state_dict()


def test_a_video_has_the_buckets_shape(sampler: Sampler) -> None:
    """[N, F, H, W, 3] in uint8, and more than one colour."""
    videos = _sample(sampler, Request(_PROMPT, 0), *_OTHERS)
    assert videos.shape == (3, 8, 32, 32, 3)
    assert videos.dtype == np.uint8
    assert videos.std() > 5


def test_a_video_of_nan_is_an_error(tiny_run: Path) -> None:
    """It would be black, which can be what somebody asked for; scripts see it by the exit code."""
    sampler = load_sampler(tiny_run, device="cpu")
    with torch.no_grad():
        next(sampler.components.model.parameters()).fill_(torch.nan)
    with pytest.raises(SamplingError, match="The weights hold NaN or inf") as caught:
        _sample(sampler)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("damage", "advice"),
    [
        ("weights", r"The codec's weights hold NaN or inf: load them from another copy\."),
        ("bf16", r'The codec decodes in bf16: set codec\.dtype = "fp32"\.'),
        ("fp32", r"Sample another checkpoint \(--step\), or lower the guidance scale\."),
    ],
)
def test_nan_that_appears_in_decoding_is_an_error(
    damage: str, advice: str, tiny_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its latents are finite, and the video would be black."""
    sampler = load_sampler(tiny_run, device="cpu")
    dtype: Literal["fp32", "bf16"] = "bf16" if damage == "bf16" else "fp32"
    config = {"block_out_channels": [4], "norm_num_groups": 2, "latent_channels": 3}
    codec = build_codec(
        CodecSection(kind="autoencoder", class_name="AutoencoderKL", config=config, dtype=dtype)
    )
    [autoencoder] = codec.modules()
    for weight in autoencoder.decoder.conv_out.parameters():  # type: ignore[union-attr]
        weight.data.fill_(torch.nan if damage == "weights" else torch.finfo(weight.dtype).max)
    recipe = sampler.recipe.model_copy(
        update={"codec": sampler.recipe.codec.model_copy(update={"dtype": dtype})}
    )
    components = replace(sampler.components, codec=codec)
    with pytest.raises(SamplingError, match=advice) as caught:
        _sample(replace(sampler, components=components, recipe=recipe))
    assert re.match(
        r"Decoding a video of step 6 \(ema/\w+\) failed: \d+\.\d\d% of the decoded pixels are NaN "
        r"or infinite\. Its latents are finite, at most \S+ \(1 is usual\)\. None was written\. ",
        str(caught.value),
    )
    assert caught.value.exit_code == 1


def test_the_same_seed_makes_the_same_video_whatever_stands_beside_it(sampler: Sampler) -> None:
    """Bitwise when repeated; a matrix product may round otherwise at another batch size."""
    request = Request(_PROMPT, 0)
    alone = _sample(sampler, request)
    assert np.array_equal(alone, _sample(sampler, request))
    first, last = _sample(sampler, request, *_OTHERS)[0], _sample(sampler, *_OTHERS, request)[-1]
    assert _apart(alone[0], first) <= 1
    assert _apart(alone[0], last) <= 1


def test_another_seed_and_another_prompt_make_another_video(sampler: Sampler) -> None:
    """Both the noise and the caption reach the model."""
    first = _sample(sampler)
    assert _apart(first, _sample(sampler, Request(_PROMPT, 1))) > 10
    assert _apart(first, _sample(sampler, Request("a blue square moving left", 0))) > 0


@pytest.mark.parametrize("profile", ["fixed", "power"])
def test_averaged_weights_follow_from_the_raw_ones(
    profile: str, tiny_run: Path, tiny_recipe: Recipe
) -> None:
    """Recomputed from every step's raw weights by the profile's formula."""
    captions = (tiny_run / "components").is_dir()
    assert captions, "the vocabulary is kept with the run"
    expected = assemble(tiny_recipe, (), tiny_run / "components").model.state_dict()
    for step in range(1, 7):
        raw = _weights(load_sampler(tiny_run, step=step, ema=False, device="cpu"))
        ramped, power = min(0.8, (1 + step) / (10 + step)), (1 - 1 / step) ** (1 + 6.937204)
        beta = {"fixed": ramped, "power": power}[profile]
        expected = {k: beta * expected[k] + (1 - beta) * raw[k] for k in expected}
        averaged = _weights(load_sampler(tiny_run, step=step, profile=profile, device="cpu"))
        assert averaged.keys() == expected.keys()
        for name, weight in averaged.items():
            torch.testing.assert_close(weight, expected[name])
        if step > 1:
            assert any(not torch.equal(averaged[name], raw[name]) for name in raw)


@pytest.mark.parametrize(
    ("ema", "asked", "weights"),
    [
        ({}, {}, "ema/main"),
        ({}, {"ema": True, "profile": "main"}, "ema/main"),
        ({}, {"ema": False}, "model"),
        ({"profiles": [{"name": "a", "decay": 0.9}, {"name": "b", "width": 0.1}]}, {}, "ema/a"),
        ({"profiles": [{"name": "a", "decay": 0.9}], "sample_from": "a"}, {}, "ema/a"),
        ({"enabled": False}, {}, "model"),
        ({"enabled": False}, {"ema": False}, "model"),
    ],
)
def test_which_weights_are_sampled(
    ema: dict[str, Any], asked: dict[str, Any], weights: str, tiny_recipe: Recipe
) -> None:
    """Averaged ones where there are any, those that the recipe or the command names."""
    recipe = tiny_recipe.model_copy(update={"ema": EmaSection(**ema)})
    assert weights_to_sample(recipe, **asked) == weights


@pytest.mark.parametrize(
    ("ema", "asked", "message"),
    [
        ({}, {"profile": "wide"}, r"no EMA profile 'wide'\. It keeps: main\."),
        ({"enabled": False}, {"profile": "main"}, r"no EMA profile 'main'\. It keeps: none\."),
        ({"enabled": False}, {"ema": True}, r"keeps no averages .* Leave --ema out"),
        ({}, {"ema": False, "profile": "main"}, r"--profile main .* but --no-ema asks"),
    ],
)
def test_averages_that_the_run_does_not_keep_are_refused(
    ema: dict[str, Any], asked: dict[str, Any], message: str, tiny_recipe: Recipe
) -> None:
    """By name, before any checkpoint is looked at."""
    recipe = tiny_recipe.model_copy(update={"ema": EmaSection(**ema)})
    with pytest.raises(RecipeError, match=message):
        weights_to_sample(recipe, **asked)


def test_a_sampler_knows_which_weights_it_has(tiny_run: Path) -> None:
    """For whoever writes below a video what made it."""
    assert load_sampler(tiny_run, device="cpu").weights == "ema/fixed"
    assert load_sampler(tiny_run, profile="power", device="cpu").weights == "ema/power"
    assert load_sampler(tiny_run, ema=False, device="cpu").weights == "model"


def test_only_what_is_sampled_has_to_be_there(tiny_run: Path, tmp_path: Path) -> None:
    """An evaluator may leave the rest behind; the weights themselves must be whole to the bit."""
    copy = shutil.copytree(tiny_run, tmp_path / "copy")
    newest = copy / "checkpoints" / "step_00000006"
    for part in ("optimizer", "model", "ema/power"):
        shutil.rmtree(newest / part)
    assert load_sampler(copy, device="cpu").step == 6
    assert load_sampler(newest, device="cpu").step == 6
    with pytest.raises(CheckpointError, match="step_00000006 is damaged"):
        load_sampler(newest, profile="power", device="cpu")
    assert load_sampler(copy, profile="power", device="cpu").step == 5
    shard = next((newest / "ema" / "fixed").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match="step_00000006 is damaged"):
        load_sampler(newest, device="cpu")


def test_a_run_means_its_newest_checkpoint_and_a_checkpoint_itself(
    tiny_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By run and step, by the checkpoint's folder, and from inside the folder of checkpoints."""
    step_4 = tiny_run / "checkpoints" / "step_00000004"
    assert find_checkpoint(tiny_run)[1].name == "step_00000006"
    assert find_checkpoint(tiny_run, 4)[1] == step_4
    run, found = find_checkpoint(step_4)
    assert (run.path, found) == (tiny_run, step_4)
    monkeypatch.chdir(step_4.parent)
    run, found = find_checkpoint(Path("step_00000004"))
    assert (run.path, found) == (tiny_run, Path("step_00000004"))
    by_step = load_sampler(tiny_run, step=4, device="cpu")
    by_folder = load_sampler(Path("step_00000004"), device="cpu")
    assert by_step.step == by_folder.step == 4
    assert np.array_equal(_sample(by_step), _sample(by_folder))


def test_a_run_below_a_folder_named_checkpoints_is_a_run(tiny_run: Path, tmp_path: Path) -> None:
    """People call their folders what they like."""
    moved = shutil.copytree(tiny_run, tmp_path / "checkpoints" / "tiny")
    assert find_checkpoint(moved)[0].path == moved
    assert find_checkpoint(moved, 2)[1] == moved / "checkpoints" / "step_00000002"


def test_what_is_no_whole_checkpoint_is_refused(tiny_run: Path, tmp_path: Path) -> None:
    """No run, no such step, no such folder, and one whose save was cut off."""
    with pytest.raises(RunError, match="is not a run directory"):
        find_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"no whole checkpoint of step 9\. .* steps 1, 2, 3"):
        find_checkpoint(tiny_run, 9)
    with pytest.raises(CheckpointError, match=r"There is no checkpoint .*step_9"):
        find_checkpoint(tiny_run / "checkpoints" / "step_9")
    with pytest.raises(CheckpointError, match="is one checkpoint already"):
        find_checkpoint(tiny_run / "checkpoints" / "step_00000001", 1)
    copy = shutil.copytree(tiny_run, tmp_path / "copy")
    next((copy / "checkpoints" / "step_00000006" / "ema" / "fixed").glob("*.distcp")).unlink()
    assert find_checkpoint(copy)[1].name == "step_00000005"
    with pytest.raises(CheckpointError, match=r"step_00000006 is damaged: ema/fixed/.* is missing"):
        load_sampler(copy, step=6, device="cpu")


def test_a_moved_run_samples_the_same(tiny_run: Path, tmp_path: Path, sampler: Sampler) -> None:
    """Nothing is read from where the run or its catalog were."""
    moved = shutil.copytree(tiny_run, tmp_path / "moved")
    recipe = (moved / "recipe.toml").read_text()
    (moved / "recipe.toml").write_text(recipe.replace(str(tiny_run.parents[1]), "/nowhere"))
    there = load_sampler(moved, device="cpu")
    assert str(there.recipe.out).startswith("/nowhere")
    assert str(there.recipe.data.catalog).startswith("/nowhere")
    assert np.array_equal(_sample(there), _sample(sampler))


def test_guidance_is_used_above_1_only(sampler: Sampler) -> None:
    """As in diffusers' pipelines: unconditional + scale * (conditional - unconditional)."""
    plain = _sample(sampler, guidance_scale=1.0)
    assert _apart(plain, _sample(sampler, guidance_scale=1.0 + 1e-6)) <= 1
    assert _apart(plain, _sample(sampler, guidance_scale=0.0)) == 0
    assert _apart(plain, _sample(sampler, guidance_scale=8.0)) > 1


def test_without_guidance_it_integrates_the_models_velocity(sampler: Sampler) -> None:
    """From the seed's noise along the shifted sigmas, decoded at the end: nothing else happens."""
    parts = sampler.components
    noise = torch.randn(1, 3, 8, 32, 32, generator=torch.Generator().manual_seed(5))
    conditioning = parts.text.encode([_PROMPT])
    with torch.inference_mode():
        latents = integrate(
            lambda x, sigma: parts.predict_velocity(x, torch.tensor([sigma]), conditioning),
            noise,
            build_sigmas(4, 3.0),
        )
    expected = parts.codec.decode(latents).permute(0, 2, 3, 4, 1).numpy()
    video = _sample(sampler, Request(_PROMPT, 5), guidance_scale=1.0)
    assert _apart(expected, video) <= 1


def test_heun_and_euler_come_to_the_same_video(sampler: Sampler) -> None:
    """On the same sigmas they differ, and the less the finer these are."""

    def difference(steps: int) -> float:
        changes = {"num_inference_steps": steps, "shift": 1.0}
        euler = _sample(sampler, solver="euler", **changes).astype(float)
        heun = _sample(sampler, solver="heun", **changes).astype(float)
        return float(np.abs(euler - heun).mean())

    coarse, fine = difference(2), difference(192)
    assert coarse > 1
    assert fine < 0.1 * coarse


def test_settings_are_the_recipes_unless_given(tiny_recipe: Recipe) -> None:
    """Only what is not None changes; what does not fit is named by its key in one line."""
    settings, bucket = settings_for(tiny_recipe)
    assert settings == tiny_recipe.sampling
    assert bucket == tiny_recipe.data.buckets[0]
    settings, bucket = settings_for(tiny_recipe, width=64, shift=None, solver="heun")
    assert settings == tiny_recipe.sampling.model_copy(update={"solver": "heun"})
    assert (bucket.num_frames, bucket.height, bucket.width) == (8, 32, 64)
    with pytest.raises(RecipeError, match=r"sampling\.guidance_scale is nan; it should be a fin"):
        settings_for(tiny_recipe, guidance_scale=float("nan"))
    with pytest.raises(RecipeError, match=r"data\.buckets\.0\.height is -1; it should be greater"):
        settings_for(tiny_recipe, height=-1)

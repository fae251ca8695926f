"""Sampling: weights, noise, guidance, memory strategies, reference pictures, loading."""

import re
import shutil
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from tests.models.tiny import KONTEXT
from tests.sampling.build import make_sampler
from torch import Tensor

from longtake import config
from longtake.config import CodecSection, Recipe, Shift
from longtake.errors import CheckpointError, PlanError, RecipeError, RunError, SamplingError
from longtake.flow.shift import ShiftRule
from longtake.flow.solver import integrate
from longtake.flow.timesteps import build_sigmas
from longtake.models.base import Conditioning, Defaults
from longtake.models.codec import PixelCodec, build_codec
from longtake.models.components import Components, assemble
from longtake.models.flux import Flux
from longtake.run_dir import RunDirectory
from longtake.sampling.checkpoints import find_checkpoint
from longtake.sampling.memory_strategy import MemoryFallback, MemoryStrategy, try_within_memory
from longtake.sampling.presets import Preset, Request, find_preset, settings_for
from longtake.sampling.sampler import (
    Placement,
    Sampler,
    SamplerLoader,
    load_sampler,
    place,
    refuse_unfitting,
)

_PROMPTS = ["a red circle moving up", "a blue square moving left", "a green cross moving down"]
_OTHERS = [Request(prompt, seed) for seed, prompt in enumerate(_PROMPTS[1:], 1)]
_REQUESTS = [Request(prompt, seed) for seed, prompt in enumerate([*_PROMPTS, _PROMPTS[0]])]
_STEPS = 3
_HEIGHT, _WIDTH = 16, 24


@pytest.fixture(scope="module")
def sampler(tiny_run: Path) -> Sampler:
    return load_sampler(tiny_run, device="cpu")


def _sample(sampler: Sampler, *requests: Request, **changes: Any) -> NDArray[np.uint8]:
    settings, bucket = settings_for(sampler.recipe, **changes)
    return sampler.sample(requests or [Request(_PROMPTS[0], 0)], settings, bucket)


def _apart(left: NDArray[np.uint8], right: NDArray[np.uint8]) -> int:
    return int(np.abs(left.astype(int) - right.astype(int)).max())


def _weights(sampler: Sampler) -> dict[str, Tensor]:
    return sampler.components.model.state_dict()


def test_a_video_has_the_buckets_shape(sampler: Sampler) -> None:
    """[N, F, H, W, 3] in uint8, and more than one colour."""
    videos = _sample(sampler, Request(_PROMPTS[0], 0), *_OTHERS)
    assert videos.shape == (3, 8, 32, 32, 3)
    assert videos.dtype == np.uint8
    assert videos.std() > 5


def test_a_video_of_nan_is_an_error(tiny_run: Path) -> None:
    sampler = load_sampler(tiny_run, device="cpu")
    with torch.no_grad():
        next(sampler.components.model.parameters()).fill_(torch.nan)
    with pytest.raises(SamplingError, match="The weights hold NaN or inf") as caught:
        _sample(sampler)
    assert str(caught.value).startswith("1 of 1 videos of step 6 ")
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
    sampler = load_sampler(tiny_run, device="cpu")
    dtype: Literal["fp32", "bf16"] = "bf16" if damage == "bf16" else "fp32"
    config = {"block_out_channels": [4], "norm_num_groups": 2, "latent_channels": 3}
    section = CodecSection(kind="autoencoder", config=config, dtype=dtype)
    codec = build_codec(section, Flux.frozen.codec)
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
    request = Request(_PROMPTS[0], 0)
    alone = _sample(sampler, request)
    assert np.array_equal(alone, _sample(sampler, request))
    first, last = _sample(sampler, request, *_OTHERS)[0], _sample(sampler, *_OTHERS, request)[-1]
    assert _apart(alone[0], first) <= 1
    assert _apart(alone[0], last) <= 1


def test_another_seed_and_another_prompt_make_another_video(sampler: Sampler) -> None:
    first = _sample(sampler)
    assert _apart(first, _sample(sampler, Request(_PROMPTS[0], 1))) > 10
    assert _apart(first, _sample(sampler, Request("a blue square moving left", 0))) > 0


@pytest.mark.parametrize("profile", ["fixed", "power"])
def test_averaged_weights_follow_from_the_raw_ones(
    profile: str, tiny_run: Path, tiny_recipe: Recipe
) -> None:
    captions = (tiny_run / "components").is_dir()
    assert captions, "the vocabulary is kept with the run"
    expected = assemble(tiny_recipe, (), tiny_run / "components").model.state_dict()
    for step in range(1, 4):
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


def test_only_what_is_sampled_has_to_be_there(tiny_run: Path, tmp_path: Path) -> None:
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


def test_what_is_no_whole_checkpoint_is_refused(tiny_run: Path, tmp_path: Path) -> None:
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
    """Also below a folder named checkpoints, which does not make it a checkpoint."""
    moved = shutil.copytree(tiny_run, tmp_path / "checkpoints" / "tiny")
    assert find_checkpoint(moved)[0].path == moved
    assert find_checkpoint(moved, 2)[1] == moved / "checkpoints" / "step_00000002"
    recipe = (moved / "recipe.toml").read_text()
    (moved / "recipe.toml").write_text(recipe.replace(str(tiny_run.parents[1]), "/nowhere"))
    there = load_sampler(moved, device="cpu")
    assert str(there.recipe.out).startswith("/nowhere")
    assert str(there.recipe.data.catalog).startswith("/nowhere")
    assert np.array_equal(_sample(there), _sample(sampler))


def test_guidance_is_used_above_1_only(sampler: Sampler) -> None:
    plain = _sample(sampler, guidance_scale=1.0)
    assert _apart(plain, _sample(sampler, guidance_scale=1.0 + 1e-6)) <= 1
    assert _apart(plain, _sample(sampler, guidance_scale=0.0)) == 0
    assert _apart(plain, _sample(sampler, guidance_scale=8.0)) > 1


@pytest.mark.parametrize(("shift", "terminal"), [(3.0, 0.0), ("release", 0.2)])
def test_without_guidance_it_integrates_the_models_velocity(
    sampler: Sampler, shift: Shift, terminal: float
) -> None:
    """From the seed's noise along the shifted sigmas, decoded at the end: nothing else happens."""
    release = Defaults(ShiftRule(3.0, terminal=0.2))
    parts = replace(sampler.components, defaults=release)
    noise = torch.randn(1, 3, 8, 32, 32, generator=torch.Generator().manual_seed(5))
    conditioning = parts.text.encode([_PROMPTS[0]])
    with torch.inference_mode():
        latents = integrate(
            lambda x, sigma: parts.predict_velocity(x, torch.tensor([sigma]), conditioning),
            noise,
            build_sigmas(4, 3.0, terminal),
        )
    expected = parts.codec.decode(latents).permute(0, 2, 3, 4, 1).numpy()
    own = replace(sampler, components=parts)
    video = _sample(own, Request(_PROMPTS[0], 5), guidance_scale=1.0, shift=shift)
    assert _apart(expected, video) <= 1


def test_the_solver_is_that_of_the_settings(sampler: Sampler) -> None:
    euler, heun = (
        _sample(sampler, solver=solver, num_inference_steps=2) for solver in ("euler", "heun")
    )
    assert np.abs(euler.astype(float) - heun.astype(float)).mean() > 1


class SmallCodec(PixelCodec):
    def __init__(self, fits_tiles: bool = True) -> None:
        self.asked: list[bool] = []
        self._fits_tiles = fits_tiles

    def decode(self, latents: Tensor, *, tiles: bool = False) -> Tensor:
        self.asked.append(tiles)
        if not (tiles and self._fits_tiles):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().decode(latents)


@dataclass(frozen=True)
class SmallGpu(Components):
    room: int = 0
    error: Exception = field(default_factory=lambda: torch.OutOfMemoryError("CUDA out of memory."))
    asked: list[int] = field(default_factory=list)

    def predict_velocity(
        self, noisy_latents: Tensor, sigmas: Tensor, conditioning: Conditioning
    ) -> Tensor:
        self.asked.append(len(noisy_latents))
        if len(noisy_latents) > self.room:
            raise self.error
        return super().predict_velocity(noisy_latents, sigmas, conditioning)


def _on_small_gpu(sampler: Sampler, room: int, **error: Exception) -> Sampler:
    parts = {each.name: getattr(sampler.components, each.name) for each in fields(Components)}
    gpu = SmallGpu(**parts, room=room, **error)  # type: ignore[arg-type]
    return replace(sampler, components=gpu, memory=MemoryFallback())


def _with_codec(sampler: Sampler, codec: PixelCodec) -> Sampler:
    return replace(
        sampler, components=replace(sampler.components, codec=codec), memory=MemoryFallback()
    )


def _sample_all(
    sampler: Sampler, on_step: Callable[[int], None] | None = None, **how: str
) -> NDArray[np.uint8]:
    settings, bucket = settings_for(sampler.recipe, num_inference_steps=_STEPS)
    return sampler.sample(_REQUESTS, settings, bucket, on_step, **how)


def _asked(sampler: Sampler) -> list[int]:
    """Sizes of the model's batches since it was last asked for them, repetitions left out."""
    assert isinstance(sampler.components, SmallGpu)
    asked = sampler.components.asked
    kept = [size for place, size in enumerate(asked) if not place or asked[place - 1] != size]
    asked.clear()
    return kept


@pytest.mark.parametrize(
    ("room", "tried", "way"),
    [
        (8, [8], "all at once"),
        (4, [8, 4], "guidance in two passes"),
        (2, [8, 4, 2], "guidance in two passes, 2 at a time"),
        (1, [8, 4, 2, 1], "guidance in two passes, 1 at a time"),
    ],
)
def test_first_two_passes_then_fewer_at_once(
    room: int, tried: list[int], way: str, sampler: Sampler
) -> None:
    small = _on_small_gpu(sampler, room)
    videos = _sample_all(small)
    assert _asked(small) == tried
    assert [str(each) for each in small.memory.strategies.values()] == [way]
    assert _apart(videos, _sample_all(sampler)) <= 1
    _sample_all(small)
    assert _asked(small) == tried[-1:]


def test_three_videos_are_halved_to_two_and_one(sampler: Sampler) -> None:
    small = _on_small_gpu(sampler, 2)
    settings, bucket = settings_for(sampler.recipe, num_inference_steps=_STEPS)
    videos = small.sample(_REQUESTS[:3], settings, bucket)
    assert _asked(small) == [6, 3, 2, 1]
    assert _apart(videos, sampler.sample(_REQUESTS[:3], settings, bucket)) <= 1


def test_a_video_that_does_not_fit_is_an_error_that_says_so(sampler: Sampler) -> None:
    small = _on_small_gpu(sampler, 0)
    with pytest.raises(PlanError, match=r"One video of 8 frames of 32x32 does not fit .*two pass"):
        _sample_all(small)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate"),
    ],
)
def test_the_machines_own_memory_is_memory_too(error: Exception, sampler: Sampler) -> None:
    assert len(_sample_all(_on_small_gpu(sampler, 4, error=error))) == len(_REQUESTS)


def test_any_other_error_is_raised(sampler: Sampler) -> None:
    small = _on_small_gpu(sampler, 4, error=RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        _sample_all(small)
    assert _asked(small) == [8]


def test_steps_are_counted_over_all_parts(sampler: Sampler) -> None:
    told: list[int] = []
    _sample_all(_on_small_gpu(sampler, 1), told.append)
    assert told == sorted(told)
    assert (len(told), told[-1]) == (len(_REQUESTS) * _STEPS, _STEPS)


def test_whole_pictures_first_and_then_tiles(sampler: Sampler) -> None:
    codec = SmallCodec()
    small = _with_codec(sampler, codec)
    videos = _sample_all(small)
    assert codec.asked == [False, True, True, True, True]
    assert np.array_equal(videos, _sample_all(sampler))
    assert list(small.memory.strategies.values()) == [MemoryStrategy(tiles=True)]
    with pytest.raises(PlanError, match=r'does not fit the memory .decoding = "whole"'):
        _sample_all(small, decoding="whole")
    with pytest.raises(PlanError, match="even in tiles"):
        _sample_all(_with_codec(sampler, SmallCodec(fits_tiles=False)))


def test_what_an_attempt_held_is_free_when_it_has_failed() -> None:
    """The error's traceback keeps no tensor alive, else the next attempt would find no room."""

    class Big:
        """Stands for a tensor."""

    found: list[weakref.ref[Big]] = []

    def work() -> None:
        big = Big()
        found.append(weakref.ref(big))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    assert try_within_memory(work) is None
    assert found[0]() is None


_ON_ONE = "samples on cuda:1, 20.00 GiB free"


@pytest.mark.parametrize(
    ("free_gib", "trained", "expected", "why"),
    [
        ([5, 70], "lora", ("cuda:1", False), "samples on cuda:1, 70.00 GiB free"),
        ([5, 20], "full", ("cpu", False), "samples on the CPU: it needs 30.00 GiB on a GPU, and"),
        ([5, 20], "lora", ("cuda:1", True), f"{_ON_ONE}, the model's frozen weights are copied"),
        ([5, 12], "lora", ("cpu", False), "samples on the CPU: it needs 13.00 GiB on a GPU, and"),
    ],
)
def test_auto_takes_the_gpu_with_most_free_memory(
    free_gib: list[int],
    trained: str,
    expected: tuple[str, bool],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    small_recipe: Callable[..., Recipe],
) -> None:
    """A training on GPU 0 is left alone; where no GPU has enough, the CPU samples."""
    total = 80 * 2**30
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free_gib))
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    properties = SimpleNamespace(total_memory=total)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    used = [total - free * 2**30 for free in free_gib]
    monkeypatch.setattr(
        torch.cuda, "device_memory_used", lambda gpu: used[gpu if isinstance(gpu, int) else 1]
    )
    blocks = [torch.nn.Linear(2**15, 2**15, device="meta", bias=False) for _ in range(7)]
    model = torch.nn.Sequential(*blocks).requires_grad_(False)  # 4 GiB each
    encoder = torch.nn.Linear(2**15, 11 * 2**13, device="meta", bias=False)  # 11 GiB, no layers
    parts: Any = SimpleNamespace(
        part_bytes=lambda: {"model": 28 * 2**30, "text": 11 * 2**30},
        model=model,
        text=SimpleNamespace(modules=lambda: [encoder]),
        family=SimpleNamespace(blocks=list),
        has_other=False,
    )
    recipe = small_recipe(f"trainable.kind={trained}")
    found = place("auto", parts, recipe)
    assert (str(found.device), found.streams) == expected
    assert found.why.startswith(why)
    assert place("cpu", parts, recipe) == Placement(torch.device("cpu"))
    assert chosen == ([1] if expected[0] == "cuda:1" else [])
    named = place("cuda:1", parts, recipe)
    assert named.streams == (trained == "lora" and free_gib[1] < 30)


@pytest.fixture(scope="module")
def studio(tiny_run: Path) -> SamplerLoader:
    return SamplerLoader(RunDirectory(tiny_run), "cpu")


def _preset(studio: SamplerLoader, **changes: Any) -> Preset:
    found = find_preset(studio.recipe, "demo")
    return replace(found, prompts=found.prompts[:1], **changes)


def _video(sampler: Sampler, preset: Preset) -> NDArray[np.uint8]:
    return sampler.sample(preset.requests(), preset.settings, preset.bucket)


def test_only_weights_are_loaded_anew(studio: SamplerLoader, tiny_run: Path) -> None:
    preset, run = _preset(studio), RunDirectory(tiny_run)
    parts = studio.components
    for step, weights in ((2, "model"), (6, "ema/power"), (2, "model")):
        sampler = studio.load(run.checkpoint_path(step), weights)
        assert (sampler.step, sampler.weights) == (step, weights)
        assert sampler.components is parts
        alone = load_sampler(
            tiny_run,
            step=step,
            ema=weights != "model" and None,
            device="cpu",
            profile=weights.removeprefix("ema/") if weights != "model" else None,
        )
        assert np.array_equal(_video(sampler, preset), _video(alone, preset))


def test_after_a_damaged_checkpoint_the_next_is_loaded(
    studio: SamplerLoader, tiny_run: Path, tmp_path: Path
) -> None:
    good = RunDirectory(tiny_run).checkpoint_path(4)
    before = _video(studio.load(good, "model"), _preset(studio))
    damaged = shutil.copytree(good, tmp_path / good.name)
    shard = next((damaged / "model").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match="is damaged"):
        studio.load(damaged, "model")
    with pytest.raises(CheckpointError, match=r"is damaged|is missing"):
        studio.load(tmp_path / "step_00000009", "model")
    assert np.array_equal(_video(studio.load(good, "model"), _preset(studio)), before)


@pytest.mark.parametrize(
    "change",
    ["model.config.num_blocks=1", "model.config.num_blocks=3", "model.config.hidden_size=96"],
)
def test_a_checkpoint_of_another_model_is_refused(
    change: str, tiny_run: Path, tmp_path: Path
) -> None:
    recipe = config.changed(RunDirectory(tiny_run).recipe(), [change])
    shutil.copytree(tiny_run / "components", tmp_path / "components")
    (tmp_path / "recipe.toml").write_text(config.dump(recipe))
    studio = SamplerLoader(RunDirectory(tmp_path), "cpu")
    with pytest.raises(CheckpointError, match="holds another model than the recipe") as caught:
        studio.load(RunDirectory(tiny_run).checkpoint_path(1), "model")
    assert "\n" not in str(caught.value)


def test_weights_of_an_average_that_is_not_there_are_missed(
    studio: SamplerLoader, tiny_run: Path
) -> None:
    with pytest.raises(CheckpointError, match="ema/none"):
        studio.load(RunDirectory(tiny_run).checkpoint_path(1), "ema/none")


def test_a_size_that_the_model_cannot_divide_names_the_preset_and_the_nearest(
    studio: SamplerLoader,
) -> None:
    bucket = studio.recipe.data.buckets[0]
    studio.check(_preset(studio))
    with pytest.raises(RecipeError, match=r"^Preset demo: 8 frames of 34x32 .* nearest .* 32x32"):
        studio.check(_preset(studio, bucket=bucket.model_copy(update={"width": 34})))


def test_a_negative_prompt_without_effect_is_refused(
    sampler: Sampler, studio: SamplerLoader, asked: Request
) -> None:
    unused = r"negative_prompt 'red' would have no effect: guidance_scale 1 makes no second pass"
    with pytest.raises(RecipeError, match=unused):
        _sample(sampler, guidance_scale=1.0, negative_prompt="red")
    preset = _preset(studio)
    settings = preset.settings.model_copy(update={"guidance_scale": 1.0, "negative_prompt": "red"})
    preset = replace(preset, settings=settings)
    with pytest.raises(RecipeError, match=rf"^Preset {preset.name}: {unused}"):
        refuse_unfitting(sampler.components, sampler.recipe, preset)
    with pytest.raises(RecipeError, match="this model is guidance-distilled and takes no second"):
        _sample(_flux_sampler(), asked, guidance_scale=4.0, negative_prompt="red")


def test_a_gpu_that_is_not_there_is_refused_before_anything_is_loaded(
    tiny_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("longtake.sampling.sampler.assemble")
    number = torch.cuda.device_count()
    with pytest.raises(RecipeError, match=f"no GPU cuda:{number}: this machine has {number}"):
        SamplerLoader(RunDirectory(tiny_run), f"cuda:{number}")
    with pytest.raises(RecipeError, match="'gpu' is no device"):
        SamplerLoader(RunDirectory(tiny_run), "gpu")


def _flux_recipe(**model: Any) -> Recipe:
    own = KONTEXT["model"] | {"config": KONTEXT["model"]["config"] | model}
    sampling = {"num_inference_steps": 3, "guidance_scale": 4.0, "shift": 2.0}
    return config.parse(KONTEXT | {"model": own, "sampling": sampling}, source="test")


def _flux_sampler(**model: Any) -> Sampler:
    return make_sampler(_flux_recipe(**model), ["a red ball rolls left", "a blue square"])


def _picture(path: Path, seed: int = 0, height: int = _HEIGHT, width: int = _WIDTH) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def asked(tmp_path: Path) -> Request:
    return Request("a red ball", 3, {"reference": _picture(tmp_path / "one.png")})


@pytest.mark.parametrize(("is_distilled", "batch"), [(True, 2), (False, 4)])
def test_a_distilled_model_is_told_the_scale_and_another_one_makes_a_second_pass(
    is_distilled: bool, batch: int, asked: Request
) -> None:
    sampler = _flux_sampler(guidance_embeds=is_distilled)
    told: list[tuple[int, list[float] | None]] = []
    model: Any = sampler.components.model

    def watch(module: object, args: object, given: dict[str, Any]) -> None:
        scales = given["guidance"]
        told.append((len(given["hidden_states"]), None if scales is None else scales.tolist()))

    model.register_forward_pre_hook(watch, with_kwargs=True)
    at_four = _sample(sampler, asked, asked)
    at_one = _sample(sampler, asked, asked, guidance_scale=1.0)
    scales = ([4.0, 4.0], [1.0, 1.0]) if is_distilled else (None, None)
    assert told == [(batch, scales[0])] * 3 + [(2, scales[1])] * 3
    assert at_four.shape == (2, 1, _HEIGHT, _WIDTH, 3)
    assert not np.array_equal(at_four, at_one)


def test_the_picture_matters_and_not_what_stands_beside_it(asked: Request, tmp_path: Path) -> None:
    sampler = _flux_sampler()
    Image.new("RGB", (_WIDTH, _HEIGHT), "white").save(tmp_path / "white.png")
    other = Request("a red ball", 3, {"reference": tmp_path / "white.png"})
    alone = _sample(sampler, asked)[0].astype(int)
    together = _sample(sampler, other, asked).astype(int)
    assert np.abs(together[1] - alone).mean() < 0.01
    assert np.abs(together[0] - alone).mean() > 0.1

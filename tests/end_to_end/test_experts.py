"""The two experts of Wan 2.2 A14B, trained in two runs, sampled together and exported as a pair."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file
from tests.build import QUIET, MakeRecipe, rows
from tests.families.release_wan import make_a14b
from tests.sampling.build import sample_latents
from typer.testing import CliRunner

from longtake.cli.app import app
from longtake.config import Recipe, SamplingSection
from longtake.errors import LongtakeError, ModelError, RecipeError
from longtake.evaluation.evaluator import SampleEvaluator
from longtake.evaluation.options import ServerReport
from longtake.models.base import latent_shape
from longtake.models.components import assemble, outline
from longtake.models.experts import Experts
from longtake.models.streamed import StreamedBlocks
from longtake.planner.devices import device_budget
from longtake.planner.memory import outline_step, static_memory
from longtake.planner.phases import forecast_phases
from longtake.sampling.other_expert import build_other, load_other, other_bytes
from longtake.sampling.presets import Request
from longtake.sampling.sampler import Sampler, load_sampler
from longtake.training.train import train

_PROMPT = "a red circle moving up"
_LORA_2 = "pytorch_lora_weights_transformer_2.safetensors"
_SCALES = {"guidance_scale": 4.0, "guidance_scale_2": 2.0}


@pytest.fixture(scope="module")
def pair(
    small_recipe_in: Callable[[Path], MakeRecipe], tmp_path_factory: pytest.TempPathFactory
) -> MakeRecipe:
    """Makes recipes of LoRA on a tiny release, which is there, and the high-noise run of one."""
    folder = tmp_path_factory.mktemp("pair")
    torch.manual_seed(0)
    make_a14b(folder / "a14b")
    release = folder / "a14b"

    def recipe(expert: str, *changes: str) -> Recipe:
        return small_recipe_in(folder)(
            "data.buckets=[{num_frames=5, height=32, width=32}]",
            f'model={{family="wan", pretrained="{release}", expert="{expert}"}}',
            f'codec={{kind="autoencoder", pretrained="{release}"}}',
            f'text={{kind="transformers", pretrained="{release}", max_tokens=16, dtype="fp32"}}',
            'trainable={kind="lora", rank=2}',
            'flow={shift="release"}',
            "optimizer={learning_rate=0.1, warmup_steps=0}",
            "training.steps=2",
            f"out={folder / expert}",
            *changes,
        )

    return recipe


@pytest.fixture(scope="module")
def runs(pair: MakeRecipe) -> tuple[Path, Path]:
    """Of the high-noise expert, and then of the other one, which samples with both."""
    high = pair("high")
    train(high, QUIET)
    low = pair(
        "low",
        f"sampling={{every=2, other_expert='{high.out}', num_inference_steps=2}}",
        "evaluation.reference_clips=0",
    )
    train(low, QUIET, evaluate=SampleEvaluator("test", ServerReport(QUIET)))
    return high.out, low.out


def _step(pipeline: Any, noise: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = pipeline(
        _PROMPT,
        latents=noise,
        num_frames=5,
        height=32,
        width=32,
        num_inference_steps=4,
        output_type="latent",
        max_sequence_length=16,
        **_SCALES,
    )[0]
    return found


def _sampled(sampler: Sampler) -> torch.Tensor:
    return sample_latents(
        sampler,
        Request(_PROMPT, 3),
        num_inference_steps=4,
        solver="unipc",
        shift=3.0,
        **_SCALES,
    )


def _pipeline(folder: Path) -> Any:
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_each_run_trains_the_sigmas_of_its_expert(
    runs: tuple[Path, Path], pair: MakeRecipe
) -> None:
    """With boundary_ratio 0.875: the high-noise expert trains none in the first three quarters."""
    for (quarters,) in rows(pair("high"), "loss_by_sigma"):
        assert quarters[:3] == [None] * 3
        assert quarters[3] is not None
    low = [quarters for (quarters,) in rows(pair("low"), "loss_by_sigma")]
    assert any(any(quarters[:3]) for quarters in low)
    parts = outline(pair("low"))
    assert parts.experts == Experts(0.875, "low")
    assert parts.sigma_range(pair("low").flow) == (0.0, 0.875)
    narrowed = pair("low", "flow.sigma_range=[0.25, 0.5]")
    assert parts.sigma_range(narrowed.flow) == (0.25, 0.5)


def test_a_pair_is_sampled_and_exported_as_diffusers_does(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    """From either of the two runs; with the LoRA of both, of which every key is used."""
    high, low = runs
    sampler = load_sampler(high, ema=False, device="cpu", other_expert=low)
    ours = _sampled(sampler)
    # The other run's averages are taken, where it keeps any.
    theirs = _sampled(load_sampler(low, device="cpu"))
    assert not torch.equal(ours, theirs)
    arguments = ["export", str(low), "--other-expert", str(high), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.exception
    assert "load_into_transformer_2=True" in result.output
    exported = _pipeline(tmp_path / "out")
    assert exported.config.boundary_ratio == 0.875
    shape = latent_shape(sampler.components.codec, sampler.recipe.data.buckets[0])
    noise = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(3))[None]
    merged = _step(exported, noise)
    assert (merged - theirs).norm() <= 1e-5 * merged.norm()
    released = _pipeline(Path(str(sampler.recipe.model.pretrained)))
    plain = _step(released, noise)
    assert (plain - merged).norm() > 1e-3 * merged.norm()
    for name, second in (("pytorch_lora_weights.safetensors", False), (_LORA_2, True)):
        options = {"load_into_transformer_2": True} if second else {}
        released.load_lora_weights(tmp_path / "out", weight_name=name, **options)
        part = released.transformer_2 if second else released.transformer
        loaded = {re.sub(r"\.default_\d\.", ".", each) for each in part.state_dict()}
        keys = {each.removeprefix("transformer.") for each in load_file(tmp_path / "out" / name)}
        assert keys <= loaded
    adapted = _step(released, noise)
    assert (adapted - merged).norm() <= 1e-5 * merged.norm()
    # The same files as adapters for samples, of a run that has not begun to train.
    file = tmp_path / "out" / "pytorch_lora_weights.safetensors"
    sampling = SamplingSection(adapter=file, adapter_2=file.with_name(_LORA_2))
    begun = load_sampler(low, step=0, ema=False, device="cpu", sampling=sampling)
    assert (_sampled(begun) - theirs).norm() <= 1e-5 * theirs.norm()


def test_samples_in_training_are_those_of_both_experts(runs: tuple[Path, Path]) -> None:
    high, low = runs
    scores = json.loads((low / "evaluations/default/step_00000002/scores.json").read_text())
    assert scores["videos"]
    record = json.loads((low / "evaluations/default/preset.json").read_text())
    assert record["other_expert"] == str(high)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("sampling={every=2, other_expert='LOW'}", 'has trained "low" .* name a run with .*"high"'),
        ("flow.sigma_range=[0.5, 1.0]", r'\[0\.5, 1\], but model\.expert = "low" serves sigmas f'),
        ("model.subfolder=transformer_3", "is in the folder transformer_2, but model.subfolder"),
    ],
)
def test_the_wrong_expert_is_refused_before_a_run_begins(
    change: str, message: str, runs: tuple[Path, Path], pair: MakeRecipe, tmp_path: Path
) -> None:
    changed = change.replace("LOW", str(runs[1]))
    with pytest.raises((RecipeError, ModelError), match=message):
        train(pair("low", f"out={tmp_path / 'run'}", changed), QUIET, evaluate=_never)
    assert not (tmp_path / "run" / "recipe.toml").exists()


def _never(*_: Any) -> Any:
    raise AssertionError


def test_a_run_cannot_begin_with_the_weights_of_the_other_expert(
    runs: tuple[Path, Path], pair: MakeRecipe, tmp_path: Path
) -> None:
    path = tmp_path / "low.toml"
    shutil.copy(runs[1] / "recipe.toml", path)
    arguments = ["train", str(path), "--from", str(runs[0]), "--set", f"out={tmp_path / 'run'}"]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, LongtakeError)
    assert 'model.expert = "high", and the recipe says "low"' in str(result.exception)


def test_a_plan_counts_the_other_expert_where_it_samples(pair: MakeRecipe) -> None:
    """On a GPU two blocks' buffers, and what is not streamed: all else is in main memory."""
    recipe = pair("high", "sampling.every=2", "recompute.device=a100-80gb")
    step = outline_step(recipe, device_budget(recipe))
    (phase,) = (each for each in forecast_phases(step) if each.name == "sampling")
    static = static_memory(step)
    more = phase.weight_bytes - static.weights - static.resident
    other = build_other(step.recipe, outline(step.recipe))
    whole = sum(each.nbytes for each in (*other.parameters(), *other.buffers()))
    streamed = StreamedBlocks(step.components.family.blocks(other), torch.device("cpu"))
    stays = sum(each.nbytes for each in (*other.parameters(), *other.buffers()))
    expected = stays + sum(len(each.memory) for each in streamed._buffers)
    foreseen = other_bytes(step.recipe, step.components, "cuda")
    assert foreseen == pytest.approx(expected, rel=0.03)  # each weight's place is rounded up
    assert more == foreseen
    assert "the low-noise expert serves its sigmas" in phase.how
    assert other_bytes(step.recipe, step.components, "cpu") == whole


def test_on_another_device_the_other_expert_is_streamed(pair: MakeRecipe) -> None:
    """The meta device stands in for a GPU."""
    recipe = pair("high")
    parts = load_other(recipe, assemble(recipe, (), None), torch.device("meta"))
    assert parts.other is not None
    blocks = parts.family.blocks(parts.other.model)
    weights = [
        layer._parameters["weight"]
        for block in blocks
        for layer in block.modules()
        if isinstance(layer, torch.nn.Linear)
    ]
    assert weights
    assert all(each is None for each in weights)
    here = load_other(recipe, parts, torch.device("cpu")).other
    assert here is not None
    assert here.streamed is None

"""The example that anybody can run: a tiny FLUX Kontext learns by an added module and LoRA."""

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file
from tests.build import saved
from torch import nn

from longtake.models.components import assemble
from longtake.planner.record import newest_plan
from longtake.run_dir import RunDirectory

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_STEPS = 8
_PROGRAMS: dict[str, list[str]] = {"python": [], "longtake": ["-m", "longtake"]}


def _as_given(folder: Path) -> list[list[str]]:
    """The commands of the example's header, without Python's name."""
    opening = (folder / "examples/tiny_flux_module.toml").read_text().partition("\nout = ")[0]
    lines = re.findall(r"^#   (\w+ .*)$", opening, re.MULTILINE)
    commands = [shlex.split(line) for line in lines]
    return [[*_PROGRAMS[program], *arguments] for program, *arguments in commands]


@pytest.fixture(scope="module")
def folder(run_on_ranks: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both commands were run, the second for fewer steps."""
    folder = tmp_path_factory.mktemp("laptop")
    shutil.copytree(_EXAMPLES, folder / "examples")
    draw, train = _as_given(folder)
    run_on_ranks(1, *draw, folder=folder)
    few = ("--set", f"training.steps={_STEPS}", "--json")
    told = json.loads(run_on_ranks(1, *train, *few, folder=folder))
    assert (told["start_step"], told["steps"]) == (0, _STEPS)
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> RunDirectory:
    return RunDirectory(folder / "runs/tiny_flux_module")


@pytest.mark.slow
def test_two_commands_train_it_within_its_memory(run: RunDirectory) -> None:
    losses = run.losses()
    assert len(losses) == _STEPS
    assert np.mean(losses[-3:]) < 0.85 * losses[0]
    plan = newest_plan(run.events())
    assert plan is not None
    assert plan.policy == "best"
    assert 0 < plan.per_block()["keep"] < 4
    (measured,) = (each for each in run.events() if each["event"] == "memory_measured")
    assert abs(measured["error"]) < 0.05  # a processor's own scratchpads included


@pytest.mark.slow
def test_the_module_and_lora_have_learnt_and_nothing_else(
    folder: Path,
    run: RunDirectory,
    call_longtake: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    before = assemble(run.recipe(), [], run.components_path).model
    names = {name for name, weight in before.named_parameters() if weight.requires_grad}
    assert all("lora_" in name or name.startswith("added_modules.pose.") for name in names)
    trained = saved(run.recipe(), _STEPS, "model")
    assert trained.keys() == names
    for name, weight in before.named_parameters():
        assert name not in names or not torch.equal(trained[name], weight), name

    call_longtake("export", run.path, "--out", "pipeline", "--no-ema")
    pipeline = folder / "pipeline"
    added = load_file(pipeline / "added_modules" / "pose.safetensors")
    assert all(
        torch.equal(value, trained[f"added_modules.pose.{name}"]) for name, value in added.items()
    )
    lora = load_file(pipeline / "pytorch_lora_weights.safetensors")
    assert len(added) + len(lora) == len(names)
    _assert_only_targets_changed(before, pipeline / "transformer")


def _assert_only_targets_changed(before: nn.Module, exported: Path) -> None:
    """LoRA is merged into the layers that it adapts; the rest is equal to the bit."""
    weights = load_file(exported / "diffusion_pytorch_model.safetensors")
    base = {
        name.replace(".base_layer.", "."): (name.endswith(".base_layer.weight"), value)
        for name, value in before.state_dict().items()
        if "lora_" not in name and not name.startswith("added_modules.pose.")
    }
    assert weights.keys() == base.keys()
    for name, (is_target, value) in base.items():
        assert torch.equal(weights[name], value) != is_target, name
    assert sum(is_target for is_target, _ in base.values()) == 14


@pytest.mark.slow
def test_it_is_sampled_with_its_pictures(
    folder: Path,
    run: RunDirectory,
    call_longtake: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    made: list[NDArray[np.uint8]] = []
    prompt = ("--prompt", "move the red circle", "--steps", "2", "--out", "out.png")
    for number in ("000", "001"):
        pictures = ("reference=pairs/before/000.png", f"pose=pairs/pose/{number}.png")
        given = [part for picture in pictures for part in ("--conditioning", picture)]
        call_longtake("sample", run.path, *prompt, *given)
        with Image.open("out.png") as picture:
            made.append(np.asarray(picture))
    assert [picture.shape for picture in made] == [(64, 64, 3)] * 2
    assert not np.array_equal(made[0], made[1])

"""LoRA files for other tools that a training writes at each save."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tests.build import QUIET, TINY_WAN, Recipes, events, forget_after

from longtake.config import Recipe
from longtake.errors import RecipeError
from longtake.evaluation.export import export
from longtake.models.lora_export import in_dtype
from longtake.run_dir import RunDirectory
from longtake.sampling.sampler import load_sampler
from longtake.training.train import train

_LORA = (
    *TINY_WAN,
    "trainable={kind='lora', rank=2}",
    "training={steps=3, global_batch_size=4, device='cpu'}",
    "checkpoint.every=1",
)


def _exports(recipe: Recipe) -> list[str]:
    folder = RunDirectory(recipe.out).exports_path
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("wanted", ["comfyui", "peft"])
def test_each_save_has_the_file_of_longtake_export(
    small_recipe: Recipes, tmp_path: Path, wanted: Any
) -> None:
    recipe = small_recipe.trained(*_LORA, f"checkpoint.export={wanted}", "checkpoint.export_keep=2")
    files = [".safetensors"]
    if wanted == "peft":
        files = ["/adapter_config.json", "/adapter_model.safetensors"]
    kept = [f"run-0000000{step}{file}" for step in (2, 3) for file in files]
    assert _exports(recipe) == ["exports.json", *kept]
    out = tmp_path / ("by_hand" + (".safetensors" if wanted == "comfyui" else ""))
    export(load_sampler(recipe.out, step=3, device="cpu"), out, wanted, "bf16")
    by_hand = out if out.is_file() else out / "adapter_model.safetensors"
    ours = RunDirectory(recipe.out).exports_path / kept[-1]
    assert ours.read_bytes() == by_hand.read_bytes()
    with safe_open(ours, "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
        facts = file.metadata()
    assert (facts["ss_network_dim"], facts["ss_steps"], facts["modelspec.title"]) == (
        "2",
        "3",
        "run",
    )
    assert facts["modelspec.date"] == RunDirectory(recipe.out).record()["created"]
    assert not any(str(recipe.out.parent) in value for value in facts.values())


def test_a_resumed_run_exports_what_it_has_left_out_and_touches_no_other_file(
    small_recipe: Recipes,
) -> None:
    changes = (*_LORA, "checkpoint.export=diffusers", "checkpoint.export_dtype=fp16")
    recipe = small_recipe.trained(*changes, "checkpoint.export_keep=2")
    folder = RunDirectory(recipe.out).exports_path
    last, changed = folder / "run-00000003.safetensors", folder / "run-00000002.safetensors"
    whole = load_file(last)
    assert {name.partition(".")[0] for name in whole} == {"transformer"}
    last.unlink()  # as if the run had been killed before it
    changed.write_bytes(b"somebody's own")
    longer = small_recipe(*changes, "checkpoint.export_keep=1", "training.steps=4")
    longer = longer.model_copy(
        update={"data": longer.data.model_copy(update={"on_change": "finish"})}
    )
    (folder / "run-00000004.safetensors").write_bytes(b"another's")
    train(longer, QUIET)
    assert _exports(recipe) == [
        "exports.json",
        "run-00000002.safetensors",
        "run-00000003.safetensors",
        "run-00000004.safetensors",
    ]
    torch.testing.assert_close(load_file(last), whole, rtol=0, atol=0)
    assert changed.read_bytes() == b"somebody's own"
    assert (folder / "run-00000004.safetensors").read_bytes() == b"another's"
    (failed,) = events(recipe, "export_failed")
    assert "run-00000004.safetensors was not written by this run" in failed["reason"]
    known = json.loads((folder / "exports.json").read_text())["exports"]
    assert [each["name"] for each in known] == ["run-00000003.safetensors"]


def test_a_step_that_is_trained_again_replaces_its_export(small_recipe: Recipes) -> None:
    recipe = small_recipe.trained(*_LORA, "checkpoint.export=peft", "training.steps=2")
    run = RunDirectory(recipe.out)
    forget_after(recipe, 1)
    shutil.copytree(run.exports_path, recipe.out / "before")
    train(recipe, QUIET)
    name = "run-00000002/adapter_model.safetensors"
    assert (run.exports_path / name).read_bytes() == (recipe.out / "before" / name).read_bytes()
    assert events(recipe, "export_failed") == []


def test_numbers_that_fp16_cannot_hold_are_no_export() -> None:
    weights = {"up": torch.tensor([1.0, 7e4])}
    with pytest.raises(Exception, match=r"up has numbers up to 7e\+04, .* take bf16"):
        in_dtype(weights, "fp16")
    assert in_dtype(weights, "bf16")["up"].isfinite().all()


def test_a_tool_that_does_not_know_the_model_is_refused_before_the_run(
    small_recipe: Recipes,
) -> None:
    recipe = small_recipe("trainable={kind='lora', targets=['*']}", "checkpoint.export=comfyui")
    with pytest.raises(RecipeError, match="ComfyUI"):
        train(recipe, QUIET)
    assert not RunDirectory(recipe.out).exports_path.exists()

"""A recipe that `longtake init` writes for a small GPU, from its plan to an exported pipeline."""

import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tests.build import events, losses
from tests.families.release_flux import make as save_flux
from tests.families.row import write_edits

from longtake import config
from longtake.cli import init
from longtake.data.index import index
from longtake.data.tasks import HERE
from longtake.evaluation.export import export
from longtake.evaluation_dir import EvaluationDirectory
from longtake.models.quantized import FrozenLinear, QuantizedLinear
from longtake.planner import forecast
from longtake.planner.devices import device_budget
from longtake.planner.phases import forecast_phases
from longtake.planner.record import newest_plan
from longtake.run_dir import RunDirectory
from longtake.sampling import sampler
from longtake.sampling.presets import training_presets

_STEPS, _KILLED_AT = 4, 3
_ADDED = """
[evaluation.presets.edits]
prompts = ["make it a red circle"]
num_inference_steps = 2
conditioning = { reference = ["before/0.png"] }
"""
_SMALLER = (
    "data.buckets=[{num_frames=1, height=64, width=64}]",
    "data.workers=0",
    "text.max_tokens=16",
    "model.quantize=auto",
    "trainable.rank=4",
    "recompute.memory=4MiB",
    "recompute.host_memory=4MiB",
    "recompute.reserve=0",
    "recompute.device=4MiB,0.1TFLOPS",  # so slow that copies hide
    f"training.steps={_STEPS}",
    "training.global_batch_size=2",
    "training.device=cpu",
    "sampling.every=2",
    "checkpoint.every=2",
    "optimizer.warmup_steps=0",
    "optimizer.learning_rate=0.01",
    "ema.decay=0.5",
    "watch.enabled=false",
    "tracking.tensorboard=false",
)
# Trains on a CPU by the plan of the GPU that the recipe names; may end as if it lost its power.
_PROGRAM = """
import os, signal, sys
from longtake import cli
from longtake.planner import devices, plan
from longtake.training import loop

plan._training_device = lambda recipe, world: devices.device_budget(recipe, "cuda", world.size)
killed_at, *sys.argv = sys.argv[1:]
compute = loop.compute_gradients


def compute_or_die(session, state, batch):
    if batch.step == int(killed_at):
        os.kill(os.getpid(), signal.SIGKILL)
    return compute(session, state, batch)


loop.compute_gradients = compute_or_die
cli.main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny release, pictures before and after, and the recipe for them."""
    folder = tmp_path_factory.mktemp("small_gpu")
    torch.manual_seed(0)
    wider = {"attention_head_dim": 32, "num_attention_heads": 4, "axes_dims_rope": (8, 12, 12)}
    save_flux(folder / "release", num_layers=2, num_single_layers=6, **wider)
    write_edits(folder, 64, 64, "make it a red circle")
    index([folder / "after"], captions=None, out=folder / "after.parquet", work=HERE)
    template = init.find_template("flux_kontext", None, None)
    recipe = folder / "mine.toml"
    recipe.write_text(init.render_recipe(template, "24GiB", folder / "after.parquet", recipe))
    recipe.write_text(recipe.read_text() + _ADDED)
    return folder


def _changes(folder: Path, name: str) -> list[str]:
    release = folder / "release"
    places = [f"{part}.pretrained={release}" for part in ("model", "codec", "text")]
    return [*places, f"data.cache={folder / 'cache'}", f"out={folder / name}", *_SMALLER]


def _recipe(folder: Path, name: str) -> config.Recipe:
    return config.load(folder / "mine.toml", _changes(folder, name))


def _train(warm: Sequence[str], folder: Path, name: str, killed_at: int = -1) -> None:
    program = folder / "program.py"
    program.write_text(_PROGRAM)
    sets = [part for change in _changes(folder, name) for part in ("--set", change)]
    command = [*warm, "1", str(program), str(killed_at), "longtake", "train", "mine.toml", *sets]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=600
    )
    assert (done.returncode == 0) is (killed_at < 0), done.stdout + done.stderr


def test_it_is_planned_killed_resumed_sampled_and_loaded_by_diffusers(
    folder: Path, warm: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    whole, parted = (_recipe(folder, name) for name in ("whole", "parted"))
    known = forecast.forecast(whole, device_budget(whole, "cuda"))
    assert known.best is not None
    phases = forecast_phases(known.step, known.best.options)
    assert [each.name for each in phases][-1] == "sampling"
    assert all(each.fits for each in phases), phases

    _train(warm, folder, "whole")
    _train(warm, folder, "parted", _KILLED_AT)
    assert len(losses(parted)) < _STEPS
    _train(warm, folder, "parted")
    assert [each["step"] for each in events(parted, "resumed")] == [2]
    assert len(losses(whole)) == _STEPS
    assert losses(parted) == losses(whole)

    planned, again = events(parted, "memory_planned")
    plan = newest_plan([planned])
    assert plan == newest_plan([again])
    assert plan is not None
    held = Counter(option.weights for option in plan.options.values())
    assert sum(held[kind] for kind in held if kind not in ("keep", "stream")) > 0, held
    assert held["stream"] > 2, held
    assert plan.memory is not None
    assert plan.memory.fits

    _samples_are_those_of_the_checkpoint(parted, monkeypatch)
    _diffusers_uses_every_key(folder, parted)


def _samples_are_those_of_the_checkpoint(
    recipe: config.Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, whether a process of its own streams the model or not."""
    run = RunDirectory(recipe.out)
    assert [each["step"] for each in events(recipe, "sampled")] == [2, 4]
    *_, scores = EvaluationDirectory(run).all_scores("edits")
    (sampled,) = scores["videos"]
    with Image.open(run.evaluation_path("edits", _STEPS) / sampled["file"]) as picture:
        made = np.asarray(picture)
    (preset,) = training_presets(recipe, run)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the training
    for streams in (False, True):
        placed = sampler.Placement(torch.device("cpu"), streams=streams)
        monkeypatch.setattr(sampler, "place", lambda *_, placed=placed, **__: placed)
        loaded = sampler.load_sampler(run.path, device="cpu")
        layers = list(loaded.components.model.modules())
        assert any(isinstance(each, QuantizedLinear) for each in layers)
        assert any(type(each) is FrozenLinear for each in layers) is streams
        (again,) = loaded.sample(preset.requests(), preset.settings, preset.bucket)
        assert np.array_equal(again[0], made)
    torch.set_num_threads(num_threads)


def _diffusers_uses_every_key(folder: Path, recipe: config.Recipe) -> None:
    import diffusers
    from peft import get_peft_model_state_dict

    exact = sampler.load_sampler(recipe.out, device="cpu", exact=True)
    export(exact, folder / "exported", "diffusers")
    stored = load_file(folder / "exported" / "pytorch_lora_weights.safetensors")
    released: Any = diffusers.FluxKontextPipeline.from_pretrained(folder / "release")
    base = {name: each.bfloat16() for name, each in released.transformer.state_dict().items()}
    released.load_lora_weights(folder / "exported")
    loaded = get_peft_model_state_dict(released.transformer, adapter_name="default_0")
    assert {f"transformer.{name}" for name in loaded} == stored.keys()
    assert all(torch.equal(each, stored[f"transformer.{name}"]) for name, each in loaded.items())

    merged: Any = diffusers.FluxKontextPipeline.from_pretrained(folder / "exported")
    weights = merged.transformer.state_dict()
    assert weights.keys() == base.keys()
    changed = {name for name, each in weights.items() if not torch.equal(each, base[name])}
    adapted = {name.removesuffix("lora_B.weight") + "weight" for name in loaded if "lora_B" in name}
    assert changed
    assert changed <= adapted
    merged.to(torch.float32)
    merged.set_progress_bar_config(disable=True)
    size = {"height": 64, "width": 64, "max_area": 64 * 64, "_auto_resize": False}
    with Image.open(folder / "before" / "0.png") as picture:
        (image,) = merged(
            picture, "make it a red circle", num_inference_steps=1, output_type="np", **size
        ).images
    assert np.isfinite(image).all()

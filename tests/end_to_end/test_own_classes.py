"""A family, an optimizer and a module of the user's own in one run, from a file in their folder."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.build import QUIET, TINY_WAN, MakeRecipe, losses, saved

from longtake import config
from longtake.evaluation.export import export
from longtake.run_dir import RunDirectory
from longtake.sampling.presets import Request, settings_for
from longtake.sampling.sampler import load_sampler
from longtake.training.train import train
from longtake.trust import TrustError, load_recipe

_CLASSES = """
from dataclasses import replace

import torch
from longtake.models.wan import Wan


class Reversed(Wan):
    def predict_velocity(self, model, noisy_latents, sigmas, conditioning):
        return -super().predict_velocity(model, noisy_latents, sigmas, conditioning)


class Signs(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in (each for each in group["params"] if each.grad is not None):
                mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                update = mean.lerp(weight.grad, 1 - first).sign_()
                weight.mul_(1 - group["lr"] * group["decay"]).sub_(update, alpha=group["lr"])
                mean.lerp_(weight.grad, 1 - second)


class Gate(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate = torch.nn.Parameter(torch.zeros(width))

    def around(self, block, call, inputs):
        after = call(inputs)
        return replace(after, tokens=after.tokens * (1 + self.gate))
"""
_OWN = (
    *TINY_WAN,
    "model.family=their_classes:Reversed",
    "optimizer.kind=their_classes:Signs",
    "optimizer.schedule=constant",
    "optimizer.learning_rate=1e-3",
    "trainable.kind=lora",
    "trainable.rank=2",
    "trainable.modules.gate.module=their_classes:Gate",
    "checkpoint.every=2",
)


def test_a_run_of_own_classes_is_resumed_sampled_and_exported(
    small_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's run of them is not: the code that it names needs --trust."""
    (tmp_path / "their_classes.py").write_text(_CLASSES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "their_classes", raising=False)
    whole, parted = (small_recipe(*_OWN, f"out={tmp_path / name}") for name in ("whole", "parted"))
    train(config.changed(whole, ["training.steps=4"]), QUIET)
    for steps in (2, 4):
        train(config.changed(parted, [f"training.steps={steps}"]), QUIET)
    assert losses(parted) == losses(whole)
    for part in ("model", "ema/main", "optimizer"):
        torch.testing.assert_close(saved(parted, 4, part), saved(whole, 4, part), rtol=0, atol=0)
    trained = saved(whole, 4, "model")
    assert trained["added_modules.gate.gate"].abs().max() == pytest.approx(4e-3, rel=0.5)

    plain = small_recipe(*_OWN, "model.family=wan", f"out={tmp_path / 'plain'}", "training.steps=1")
    train(plain, QUIET)
    assert losses(plain) != losses(whole)[:1]  # it is their family that trains

    sampler = load_sampler(parted.out, ema=False, device="cpu")
    settings, bucket = settings_for(sampler.recipe, num_inference_steps=1)
    assert sampler.sample([Request("a red circle", 0)], settings, bucket).shape[1:3] == (5, 32)
    export(sampler, tmp_path / "exported", "peft")
    gate = load_file(tmp_path / "exported" / "added_modules" / "gate.safetensors")["gate"]
    assert torch.equal(gate, trained["added_modules.gate.gate"])
    lora = load_file(tmp_path / "exported" / "adapter_model.safetensors")
    assert len(lora) == sum("lora_" in name for name in trained) > 0

    run = RunDirectory(parted.out)
    record = json.loads(run.record_path.read_text())
    record["begun_by"]["host"] = "elsewhere"
    run.record_path.write_text(json.dumps(record))
    for attempt in (
        lambda: load_sampler(run.path, device="cpu"),
        lambda: load_recipe(run.recipe_path, ()),
    ):
        with pytest.raises(TrustError) as refused:
            attempt()
        for named in ("Reversed", "Signs", "Gate"):
            assert f"their_classes:{named}" in str(refused.value)
    assert load_sampler(run.path, device="cpu", trust=True).step == 4

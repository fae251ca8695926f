"""Training by a plan: it stops in time, keeps to the plan, and computes the same numbers."""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.build import QUIET, TINY_WAN, events, not_none, rows

import longtake
from longtake import config
from longtake.config import Recipe
from longtake.errors import PlanError, RecipeError
from longtake.fsio import write_json
from longtake.parallel import attention_rules
from longtake.parallel.attention_rules import Kernel, KernelChoice
from longtake.parallel.attention_trial import AttentionCase
from longtake.parallel.mesh import World
from longtake.planner import attention_check, plan, plan_cache
from longtake.planner.activation_checkpointing import POLICIES
from longtake.planner.attention_check import AttentionAnswer
from longtake.planner.devices import device_budget
from longtake.planner.forecast import forecast, suggest_changes
from longtake.planner.plan import free_memory, make_plan, tile_to_fill
from longtake.planner.record import KEEP, MemoryPlan, newest_plan
from longtake.run_dir import RunDirectory
from longtake.training.train import train

_Make = Callable[..., Recipe]
_CPU = torch.device("cpu")
_ALONE, _OF_TWO = World(0, 0, 1, _CPU, None), World(0, 0, 2, _CPU, None)
_ON_GPU = World(0, 0, 1, torch.device("cuda", 0), None)
_SMALL = ("training.steps=4",)
_FUSED = ("optimizer.fused_backward=true", "optimizer.max_grad_norm=1e9")
_ONE_BLOCK = (*_SMALL, "model.config={hidden_size=48, num_blocks=1}")


_TRAPS = {
    "checkpoint(self.change, given, use_reentrant=True)": (
        "Not everything would train.\n"
        "added_modules.own around caption_block: added_modules.own around caption_block runs in a "
        "reentrant recompute region, and what carries gradient is handed to it inside a dict, list "
        "or dataclass, where such a region does not look. So nothing in it gets a gradient, nor "
        "does anything in added_modules.own around blocks.0 and added_modules.own around blocks.1. "
        "Untrained: 5 trainable parameters (added_modules.own.style, "
        "added_modules.own.first.weight, added_modules.own.first.bias and 2 more).\n"
        "  Fix: Call torch.utils.checkpoint.checkpoint with use_reentrant=False, or drop the call "
        'and set recompute.policy = "all"; or hand that tensor over as an argument of its own.'
    ),
    "tokens + self.first(tokens) * prepared['style']": (
        "Not everything would train.\n"
        "added_modules.own.second: No parameter of added_modules.own.second gets a gradient: the "
        "forward pass does not use them. Untrained: 2 trainable parameters "
        "(added_modules.own.second.weight and added_modules.own.second.bias).\n"
        "  Fix: If they are meant to train, use them, or what they compute, in the forward pass; "
        "if not, freeze them with requires_grad_(False)."
    ),
}


@pytest.mark.parametrize(
    ("returned", "message"),
    _TRAPS.items(),
    ids=["a reentrant region is handed a dict", "a layer is not used"],
)
def test_a_trap_stops_before_there_is_a_run(
    returned: str, message: str, small_recipe: _Make, own_module: Callable[[str], str]
) -> None:
    recipe = small_recipe(*_SMALL, f"trainable.modules.own.module={own_module(returned)}")
    with pytest.raises(PlanError) as refused:
        train(recipe, QUIET)
    assert str(refused.value) == message
    assert not RunDirectory(recipe.out).exists()
    assert [path for path in recipe.out.rglob("*") if path.is_file()] == []
    own_module("checkpoint(self.change, given, use_reentrant=False)")
    assert train(recipe, QUIET).end_step == 4


_WITHIN = {  # a budget in which only a mixture of options is the fastest
    "tubelet, in full": ("small_recipe", _SMALL, "7.6MiB", ("all", "save-attention")),
    "FLUX Kontext, LoRA and a module": ("tiny_flux", (), "27MiB", ()),
    "tubelet, gradients freed": ("small_recipe", (*_SMALL, *_FUSED), "7MiB", ("all",)),
}


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize("case", _WITHIN)
def test_policies_train_the_same_and_take_what_was_predicted(
    case: str, request: pytest.FixtureRequest, tmp_path: Path, threads: Callable[[int], None]
) -> None:
    threads(1)  # others have tiles of their own, which no formula knows
    fixture, changes, memory, policies = _WITHIN[case]
    make: _Make = request.getfixturevalue(fixture)

    def run(name: str, *more: str) -> Recipe:
        recipe = make(*changes, *more, f"out={tmp_path / name}")
        train(recipe, QUIET)
        return recipe

    plain = run("none")
    assert len(rows(plain, "loss", "grad_norm")) == 4
    assert events(plain, "memory_planned") == events(plain, "memory_measured") == []
    within = (f"recompute.memory={memory}", "recompute.reserve=0")
    runs = {policy: run(policy, f"recompute.policy={policy}") for policy in policies}
    for policy, recipe in (runs | {"best": run("best", *within)}).items():
        assert rows(recipe, "loss", "grad_norm") == rows(plain, "loss", "grad_norm")
        (planned,) = events(recipe, "memory_planned")
        assert (planned["step"], planned["policy"]) == (0, policy)
        (measured,) = events(recipe, "memory_measured")
        assert measured["step"] == 2
        assert abs(measured["error"]) <= 0.01
        mixture = not_none(newest_plan([planned]))
        predicted = not_none(mixture.memory)
        assert measured["measured_gib"] * 2**30 < predicted.step_peak_bytes
    assert mixture.budget_bytes == int(float(memory.removesuffix("MiB")) * 2**20)
    assert predicted.step_peak_bytes <= mixture.budget_bytes
    assert (predicted.overhead or 0) > 0
    assert len(mixture.per_block()) > 1
    assert [policy.name for policy in mixture.compared] == list(POLICIES)


def test_a_run_resumes_with_another_policy(small_recipe: _Make, tmp_path: Path) -> None:
    changes = ("optimizer.schedule=constant",)
    whole = small_recipe(*changes, "training.steps=4", f"out={tmp_path / 'whole'}")
    train(whole, QUIET)
    train(small_recipe(*changes, "training.steps=2"), QUIET)
    rest = small_recipe(*changes, "training.steps=4", "recompute.policy=all")
    assert train(rest, QUIET).start_step == 2
    assert rows(rest, "loss", "grad_norm") == rows(whole, "loss", "grad_norm")


def test_what_cannot_fit_is_refused_with_what_would_help(small_recipe: _Make) -> None:
    recipe = small_recipe(*_ONE_BLOCK, "recompute.memory=4MiB", "recompute.reserve=0")
    with pytest.raises(PlanError) as refused:
        train(recipe, QUIET)
    assert not RunDirectory(recipe.out).exists()
    first, *changes = str(refused.value).splitlines()
    known = forecast(recipe, device_budget(recipe))
    least = known.least.step_peak_bytes / 2**20
    assert first == (
        f"No recompute policy fits 4.00 MiB: the least, all, takes {least:.2f} MiB. Take a GPU of "
        f"{least:.2f} MiB. Or:"
    )
    found = suggest_changes(known)
    assert changes == [f"  {relief}" for relief in found]
    for relief in found:
        needed = f"{relief.step_peak_bytes / 2**20:.2f} MiB of GPU memory"
        verdict = "fits" if relief.fits else "still too much GPU memory"
        assert str(relief) == f"{relief.what}: {needed}, {verdict} (--set '{relief.changes[0]}')"
    assert {relief.fits for relief in found} == {True, False}
    fitting = next(relief for relief in found if relief.fits)
    assert make_plan(config.changed(recipe, fitting.changes), "fp32", _ALONE).policy == "best"


def test_a_policy_that_does_not_fit_is_refused_with_one_that_does(small_recipe: _Make) -> None:
    within = ("recompute.memory=7.6MiB", "recompute.reserve=0")
    with pytest.raises(PlanError) as refused:
        make_plan(small_recipe(*_SMALL, *within, "recompute.policy=none"), "fp32", _ALONE)
    takes, fits = r"takes 8\.\d\d MiB", r"7\.\d\d MiB, and a step takes \d% longer"
    expected = (
        rf'recompute\.policy = "none" {takes}, but the budget for all tensors is 7\.60 MiB\. Set '
        rf'recompute\.policy = "best": {fits} than without recompute\.'
    )
    assert re.fullmatch(expected, str(refused.value)), refused.value


def test_two_processes_take_half_a_batch_each(small_recipe: _Make) -> None:
    within = ("recompute.policy=all", "recompute.memory=9MiB", "recompute.reserve=0")
    recipe = small_recipe(*_ONE_BLOCK, *within, "training.global_batch_size=8")
    half = small_recipe(*_ONE_BLOCK, *within, "training.global_batch_size=4")
    plan, alone = make_plan(recipe, "fp32", _OF_TWO), make_plan(half, "fp32", _ALONE)
    assert (plan.options, plan.activation_bytes) == (alone.options, alone.activation_bytes)
    memory = not_none(plan.memory)
    assert memory.fits
    assert memory.peak_bytes == not_none(alone.memory).peak_bytes  # a replica gathers no weight
    recipe = small_recipe(*_ONE_BLOCK, *within, "training.global_batch_size=24")
    with pytest.raises(PlanError, match=r"micro-batches of 6: "):
        make_plan(recipe, "fp32", _OF_TWO)


def test_notes_are_handed_on_and_do_not_stop(tiny_flux: _Make) -> None:
    noted = make_plan(tiny_flux("model.dtype=bf16", "trainable.dtype=fp32"), "fp32", _ALONE)
    (note,) = noted.notes
    assert note.startswith("transformer_blocks.0: Trainable weights in transformer_blocks.0, ")
    assert (noted.policy, noted.memory, noted.activation_bytes) == ("none", None, None)
    assert set(noted.options.values()) == {KEEP}
    last = (
        "trainable.kind=frozen",
        "trainable.modules.pose.blocks=['single_transformer_blocks.1']",
    )
    noted = make_plan(tiny_flux(*last, "recompute.policy=alternate"), "fp32", _ALONE)
    said = "transformer_blocks.1: Recomputing transformer_blocks.1 saves 0 bytes"
    assert noted.notes[0].startswith(said)
    assert noted.memory is not None


def test_a_model_that_cannot_be_followed_may_train(
    small_recipe: _Make, own_module: Callable[[str], str]
) -> None:
    module = own_module("self.change(given) if tokens.mean() < 9 else tokens")
    recipe = small_recipe(*_SMALL, f"trainable.modules.own.module={module}", "recompute.policy=all")
    plan = make_plan(recipe, "fp32", _ALONE)
    (note,) = plan.notes
    assert note.startswith("Gradients are unchecked. The model cannot be planned (")
    assert (plan.memory, plan.activation_bytes) == (None, None)
    without_policy = config.changed(recipe, ["recompute={}"])
    on_gpu = make_plan(without_policy, "fp32", _ON_GPU, 2**30)
    assert (on_gpu.policy, on_gpu.notes[0][:24]) == ("none", note[:24])
    with pytest.raises(PlanError, match=r"^The model cannot be planned \("):
        make_plan(config.changed(recipe, ["recompute={memory='9MiB'}"]), "fp32", _ALONE)


def test_without_a_memory_in_the_recipe_the_gpu_is_asked(
    small_recipe: _Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [2**30 + 5]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free[0], 80 * 2**30))
    recipe = small_recipe(*_SMALL)
    assert free_memory(recipe, _ALONE) is None
    assert free_memory(small_recipe(*_SMALL, "recompute.memory=48GiB"), _ON_GPU) is None
    assert free_memory(recipe, _ON_GPU) == 2**30
    plan = make_plan(recipe, "fp32", _ON_GPU, free_memory(recipe, _ON_GPU))
    assert (plan.policy, set(plan.options.values())) == ("best", {KEEP})
    assert plan.budget_bytes == int(2**30 * 0.93)
    with pytest.raises(PlanError, match=r"1\.86 MiB"):
        make_plan(recipe, "fp32", _ON_GPU, 2 * 2**20)


def test_several_gpus_leave_room_for_nccl(small_recipe: _Make) -> None:
    recipe = small_recipe("recompute.memory=80GiB", "recompute.device=h100")
    budgets = [device_budget(recipe, world_size=size).budget_bytes for size in (1, 8)]
    assert budgets == [int(80 * 2**30 * 0.93), int(80 * 2**30 * 0.93) - 3 * 2**29]
    assert device_budget(recipe, "cpu", world_size=8).budget_bytes == budgets[0]


def test_what_was_planned_is_kept(
    small_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def count(*given: Any) -> MemoryPlan:
        asked.append(given)
        return make_plan(*given)

    monkeypatch.setattr(plan, "make_plan", count)
    source = tmp_path / "package" / "__init__.py"
    source.parent.mkdir()
    source.write_text("")
    monkeypatch.setattr(longtake, "__file__", str(source))
    recipe = small_recipe("training.steps=2", "checkpoint.every=1", "recompute.policy=all")
    run = RunDirectory(recipe.out)

    def again() -> int:
        subprocess.run(["rm", "-r", str(run.checkpoint_path(2))], check=True)
        asked.clear()
        plan_cache.code_checksum.cache_clear()
        train(recipe, QUIET)
        return len(asked)

    plan_cache.code_checksum.cache_clear()
    train(recipe, QUIET)
    made = not_none(newest_plan(events(recipe, "memory_planned")))
    assert [each.name for each in made.compared] == ["none", "all"]
    peak = not_none(made.memory).step_peak_bytes
    assert not_none(made.fixed).weights < peak <= made.compared[0].step_peak_bytes
    assert again() == 0
    assert newest_plan(events(recipe, "memory_planned")[-1:]) == made
    write_json(run.plan_path, {"key": "another"})
    assert again() == 1
    os.utime(source, (0, 0))  # touched, but the same
    assert again() == 0
    source.write_text("changed = True")
    assert again() == 1
    plan_cache.code_checksum.cache_clear()


def test_the_kernel_of_attention_that_was_chosen_is_counted(
    tiny_flux: _Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kept plan holds for the kernels that it was made with."""
    kernel: list[Kernel] = ["math"]

    def choose(cases: tuple[AttentionCase, ...], _: torch.device) -> AttentionAnswer:
        choices = tuple((each.kind, KernelChoice(kernel[0])) for each in cases)
        return AttentionAnswer(cases, choices, (f"{kernel[0]} takes its place",))

    monkeypatch.setattr(attention_rules, "CHOICES", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attention_check, "choose_kernels", choose)
    settings = ("trainable={kind='lora'}", "data.conditioning={}", "model.family=flux")
    recipe = tiny_flux(*settings, "recompute={policy='none', device='h100', memory='48GiB'}")
    run, peaks = RunDirectory(recipe.out), list[int]()
    run.path.mkdir()
    for kernel[0] in ("math", "math", "flash"):
        made = plan.plan_for_training(recipe, "bf16", run, _ON_GPU)
        plan.keep_plan(made, recipe, "bf16", run, _ON_GPU)
        assert f"{kernel[0]} takes its place" in made.notes
        assert {each.chosen for each in attention_rules.CHOICES.values()} == {kernel[0]}
        peaks.append(not_none(made.memory).step_peak_bytes)
    assert peaks[0] == peaks[1] > peaks[2]


def test_a_clusters_workers_need_a_memory_or_tiles(small_recipe: _Make) -> None:
    """Where the codec has tiles: the memory of the machine that asks says nothing of theirs."""
    cached = (*TINY_WAN, "data.cache=cache", "data.windows=1")

    def chosen(*changes: str) -> int:
        return tile_to_fill(small_recipe(*cached, *changes), _ALONE, elsewhere=True)()

    with pytest.raises(RecipeError, match=r"recompute\.memory=24GiB, or .* codec.encode_tile="):
        chosen("training.device=auto")
    assert chosen("training.device=auto", "codec.encode_tile=64") == 64
    assert chosen("training.device=auto", "recompute.memory=24GiB") == 0
    assert chosen("training.device=cpu") == 0
    pixels = small_recipe("training.device=auto", "data.cache=cache", "data.windows=1")
    assert tile_to_fill(pixels, _ALONE, elsewhere=True)() == 0

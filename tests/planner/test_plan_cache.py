"""Plans from the cache: the same numbers, by a key of all that they depend on."""

import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from tests.build import TINY_WAN, MakeRecipe

import longtake
from longtake.cli.plan_json import report_json
from longtake.config import Recipe
from longtake.parallel import attention_rules
from longtake.parallel.attention_rules import Kernel, KernelChoice
from longtake.parallel.attention_trial import AttentionCase
from longtake.parallel.mesh import World
from longtake.planner import attention_check, plan, plan_cache, report
from longtake.planner.attention_check import AttentionAnswer
from longtake.planner.cost import run_cost
from longtake.planner.devices import DEVICES, DeviceBudget, device_budget
from longtake.planner.encoding import TileChoice
from longtake.planner.mesh import links_of
from longtake.planner.plan import make_plan
from longtake.planner.plan_cache import facts_of, recalled
from longtake.planner.report import PlanReport, make_report

_GPU = replace(DEVICES["a6000"], memory_bytes=2 * 2**20, reserve=0.0)
_ALONE = World(0, 0, 1, torch.device("cpu"), None)
_ON_GPU = World(0, 0, 1, torch.device("cuda", 0), None)
_SAMPLING = (
    "sampling.every=2",
    "sampling.presets=['film']",
    "evaluation.presets={film={seeds=[0], prompts=['a', 'b']}}",
)
_OTHERS = (
    "seed=7",
    "out=elsewhere",
    "optimizer.learning_rate=1e-7",
    "optimizer.betas=[0.5, 0.6]",
    "optimizer.weight_decay=0.3",
    "optimizer.max_grad_norm=7.0",
    "optimizer.min_lr_ratio=0.5",
    "optimizer.schedule=linear",
    "optimizer.warmup_steps=0",
    "training.steps=77",
    "sampling.fps=3.0",
    "data.catalog=nowhere.parquet",
    "data.trigger=sks",
    "data.workers=0",
    "guard.mode=off",
    "watch.enabled=false",
    "checkpoint.every=3",
    "tracking.tensorboard=false",
)
"""Changes that no trace depends on."""
_NUMBERS = TypeAdapter(dict[str, list[float]])


@pytest.fixture(autouse=True)
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache, which is turned on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(plan_cache.VARIABLE)
    return tmp_path / "cache" / "longtake" / "plans"


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("it was in the cache")


def _report(recipe: Recipe, device: DeviceBudget = _GPU, ranks: int = 1) -> PlanReport:
    return make_report(recipe, device, links_of(device), ranks)


@pytest.mark.parametrize(
    ("changes", "device", "ranks"),
    [
        (_SAMPLING, _GPU, 1),
        ((), replace(_GPU, memory_bytes=2**17), 1),  # in which nothing fits
        (("parallel.strategy=shard", "training.global_batch_size=4"), _GPU, 4),
        (("trainable.kind=lora", "model.quantize=auto"), replace(_GPU, memory_bytes=2**19), 1),
    ],
)
def test_a_report_from_the_cache_is_equal(
    small_recipe: MakeRecipe,
    monkeypatch: pytest.MonkeyPatch,
    changes: tuple[str, ...],
    device: DeviceBudget,
    ranks: int,
) -> None:
    recipe = small_recipe(*TINY_WAN, *changes)
    made = _report(recipe, device, ranks)
    monkeypatch.setattr(report, "forecast", _never)
    again = _report(recipe, device, ranks)
    assert report_json(again) == report_json(made)
    assert (again.known.traces, again.known.best) == (made.known.traces, made.known.best)


def test_keys_that_no_trace_depends_on_are_ignored(
    small_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And stages show the new learning rate; what needs the model outlines it."""
    recipe = small_recipe(*TINY_WAN, *_SAMPLING)
    changed = small_recipe(
        *(*TINY_WAN, *_SAMPLING, *_OTHERS),
        "evaluation.presets={film={seeds=[4], prompts=['c', 'd']}}",
    )
    monkeypatch.setenv(plan_cache.VARIABLE, "off")
    anew = _report(changed)
    monkeypatch.delenv(plan_cache.VARIABLE)
    _report(recipe)
    monkeypatch.setattr(report, "forecast", _never)
    again = _report(changed)
    assert report_json(again) == report_json(anew)
    rates = again.stages[0].learning_rates
    assert rates is not None
    assert rates[0] == pytest.approx(1e-7)
    links = links_of(_GPU)
    costs = [
        run_cost(
            each.known, each.phases, links, failures_per_day=2.0, restart_seconds=None, storage=1e9
        )
        for each in (again, anew)
    ]
    assert costs[0] == costs[1]
    assert again.known.step.components.model is not anew.known.step.components.model


@pytest.mark.parametrize(
    "change",
    [
        "model.config={num_layers=3, num_attention_heads=2, attention_head_dim=12, ffn_dim=16}",
        "data.buckets=[{num_frames=5, height=32, width=48}]",
        "data.windows=3",
        "trainable={kind='lora', rank=4}",
        "trainable={kind='lora', rank=8}",
        "optimizer.kind=muon",
        "optimizer.offload=true",
        "training.global_batch_size=16",
        "ema.profiles=[{name='slow', decay=0.9}]",
        "flow.shift=7.0",
        "recompute.policy=all",
        "sampling.guidance_scale=9.0",
        "sampling.negative_prompt=blurry",  # refused where nothing is guided
    ],
)
def test_keys_that_a_plan_depends_on_are_in_its_facts(
    small_recipe: MakeRecipe, change: str
) -> None:
    plain = facts_of(small_recipe(*TINY_WAN), _GPU)
    assert plain is not None
    assert plain == facts_of(small_recipe(*TINY_WAN), _GPU)
    assert plain != facts_of(small_recipe(*TINY_WAN, change), _GPU)


def test_facts_name_device_code_versions_catalogs_and_releases(
    small_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "release"
    (folder / "text_encoder").mkdir(parents=True)
    (folder / "text_encoder" / "config.json").write_text("{}")
    recipes = [small_recipe(*TINY_WAN, f"text.pretrained={folder}", "text.config={}")]
    catalog = tmp_path / "catalog.parquet"
    recipes.append(small_recipe(f"data.catalog={catalog}"))  # whose vocabulary are its captions

    def facts(device: DeviceBudget = _GPU) -> str:
        return str([facts_of(each, device) for each in recipes])

    known = [facts(), facts(replace(_GPU, memory_bytes=2**30))]
    (folder / "text_encoder" / "config.json").write_text('{"d_model": 8}')
    known.append(facts())
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text("{}")
    known.append(facts())
    catalog.write_text("captions")
    known.append(facts())
    monkeypatch.setattr(plan_cache, "package_versions", lambda: {"torch": "1.0"})
    known.append(facts())
    monkeypatch.setenv("DIFFUSERS_ATTN_BACKEND", "_native_math")
    known.append(facts())
    (folder / "v2" / "text_encoder").mkdir(parents=True)
    nested = ("model.subfolder=v2/text_encoder", f"model.pretrained={folder}", "model.config={}")
    recipes.append(small_recipe(*TINY_WAN, *nested))
    known.append(facts())
    (folder / "v2" / "text_encoder" / "config.json").write_text("{}")
    known.append(facts())
    source = tmp_path / "package" / "__init__.py"
    source.parent.mkdir()
    source.write_text("")
    monkeypatch.setattr(longtake, "__file__", str(source))
    plan_cache.code_checksum.cache_clear()
    known.append(facts())
    plan_cache.code_checksum.cache_clear()
    assert len({*known}) == len(known)


def test_of_own_classes_of_errors_or_turned_off_nothing_is_kept(
    small_recipe: MakeRecipe, plans: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert facts_of(small_recipe("optimizer.kind=torch.optim:SGD"), _GPU) is None
    assert facts_of(small_recipe("text.kind=transformers", "text.pretrained=/gone"), _GPU) is None
    monkeypatch.setenv(plan_cache.VARIABLE, "off")
    assert facts_of(small_recipe(), _GPU) is None
    assert recalled("numbers", None, _NUMBERS, lambda: {"a": [1.0]}) == {"a": [1.0]}
    for _ in range(2):
        with pytest.raises(AssertionError):
            recalled("numbers", {"recipe": 1}, _NUMBERS, _never)
    assert not plans.exists()


def test_a_damaged_entry_is_found_anew(plans: Path) -> None:
    draw = random.Random(0)  # noqa: S311 - no secret
    numbers = {"a": [0.1 + 0.2, 1e-300, 3.0], "b": [2.0]}
    facts = {"recipe": 1}
    recalled("numbers", facts, _NUMBERS, lambda: numbers)
    (path,) = plans.iterdir()
    whole = path.read_bytes()
    damaged = [b"", b"[]", b"null", b'{"record": {"a": "b"}}', b"{" * 100_000, whole + whole]
    damaged += [whole[: draw.randrange(len(whole))] for _ in range(50)]
    for _ in range(300):
        at = draw.randrange(len(whole))
        damaged.append(whole[:at] + bytes([draw.randrange(256)]) + whole[at + 1 :])
    for content in damaged:
        path.write_bytes(content)
        assert recalled("numbers", facts, _NUMBERS, lambda: numbers) == numbers
        assert recalled("numbers", facts, _NUMBERS, _never) == numbers
    path.unlink()
    path.mkdir()
    assert recalled("numbers", facts, _NUMBERS, lambda: numbers) == numbers


def test_many_write_one_entry_at_once() -> None:
    numbers = {"a": [float(each) for each in range(20_000)]}

    def work(_: int) -> bool:
        return recalled("numbers", {"recipe": 1}, _NUMBERS, lambda: numbers) == numbers

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(64)))
    assert recalled("numbers", {"recipe": 1}, _NUMBERS, _never) == numbers


def test_the_entries_that_were_used_last_are_kept(
    plans: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_cache, "_NUM_KEPT", 3)
    monkeypatch.setattr(plan_cache, "_MOST_BYTES", 1000)

    def recall(recipe: int, find: Callable[[], dict[str, list[float]]] = dict) -> None:
        recalled("numbers", {"recipe": recipe}, _NUMBERS, find)
        for path in plans.iterdir():  # each of them is a second older
            os.utime(path, (path.stat().st_mtime - 1,) * 2)

    for recipe in (0, 1, 2, 0, 3, 4):
        recall(recipe)
    recall(5, lambda: {"a": [0.0] * 1000})  # too large
    assert len([*plans.iterdir()]) == 3
    for recipe in (0, 3, 4):
        recall(recipe, _never)
    for recipe in (1, 2, 5):
        with pytest.raises(AssertionError):
            recall(recipe, _never)


@pytest.mark.parametrize("changes", [(), ("recompute={policy='best', memory='16MiB'}",)])
def test_a_training_plan_is_found_once(
    small_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, changes: tuple[str, ...]
) -> None:
    made = make_plan(small_recipe(*TINY_WAN, *changes), "fp32", _ALONE)
    for name in ("outline_step", "forecast"):
        monkeypatch.setattr(plan, name, _never)
    other = small_recipe(*TINY_WAN, *changes, "optimizer.learning_rate=1e-6", name="other")
    assert make_plan(other, "fp32", _ALONE).as_event() == made.as_event()
    with pytest.raises(AssertionError):
        make_plan(other, "bf16", _ALONE)
    with pytest.raises(AssertionError):
        make_plan(other, "fp32", _ALONE, quantized={"blocks.0": "int8"})


def test_a_training_plan_holds_for_its_kernels_of_attention(
    small_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel: list[Kernel] = ["math"]

    def choose(cases: tuple[AttentionCase, ...], _: torch.device) -> AttentionAnswer:
        choices = tuple((each.kind, KernelChoice(kernel[0])) for each in cases)
        return AttentionAnswer(cases, choices, (f"{kernel[0]} takes its place",))

    monkeypatch.setattr(attention_rules, "CHOICES", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attention_check, "choose_kernels", choose)
    recipe = small_recipe(*TINY_WAN, "recompute={policy='all', device='h100', memory='48GiB'}")
    assert device_budget(recipe, "cuda").target == "cuda"
    found = []

    def count(*given: Any) -> Any:
        found.append(kernel[0])
        return plan_find(*given)

    plan_find = plan._find_plan
    monkeypatch.setattr(plan, "_find_plan", count)
    for kernel[0] in ("math", "math", "flash"):
        made = make_plan(recipe, "bf16", _ON_GPU)
        assert made.notes[-1] == f"{kernel[0]} takes its place"
        assert {each.chosen for each in attention_rules.CHOICES.values()} == {kernel[0]}
    assert found == ["math", "flash"]


def test_a_report_has_the_tiles_with_which_its_run_began(small_recipe: MakeRecipe) -> None:
    """Whatever was planned before there was a run."""
    recipe = small_recipe(*TINY_WAN)
    assert _report(recipe).tile == TileChoice(0)
    found = make_report(recipe, _GPU, links_of(_GPU), begun=TileChoice(16))
    (encode,) = (each for each in found.phases if each.name == "encode")
    assert (found.tile, encode.how) == (TileChoice(16), "in tiles of 16 pixels")

"""What `longtake plan` promises: its JSON, its table, its exit codes, one message per mistake."""

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import save_file
from tests.build import change_options
from tests.cli.conftest import Call, CallJson, Refuse

from longtake import config
from longtake.cli.plan import _choose_device
from longtake.cli.plan_tables import _number, _phase_shortages
from longtake.config import Bucket, Recipe
from longtake.data.catalog import Catalog
from longtake.models.components import outline
from longtake.models.trainable import lora_state
from longtake.planner.activation_checkpointing import POLICIES
from longtake.planner.devices import CPU, DEVICES
from longtake.planner.encoding import TileChoice
from longtake.planner.phases import PhaseForecast
from longtake.planner.record import BlockWeights
from longtake.planner.words import POLICY_WORDS

WriteRecipe = Callable[..., Path]
_ROOT = Path(__file__).resolve().parents[2]
_TINY_FLUX = "examples/tiny_flux_module.toml"

_TYPES: dict[str, Any] = {
    "device": str,
    "budget_gib": float,
    "model": {"parameters": int, "trainable": int, "tokens": int},
    "fixed_gib": {"weights": float, "gradients": float, "optimizer": float, "inputs": float},
    "best": {
        "per_block": {"keep": int, "save-attention": int, "recompute": int, "offload": int},
        "blocks": list,
        "host_gib": float,
        "predicted_gib": float,
        "traced_gib": float,
        "overhead": float,
    },
    "gradients": {"trainable": int, "reached": int, "unreached": list},
    "traps": list,
    "phases": list,
    "seconds": float,
}


def _assert_typed(value: Any, types: Any) -> None:
    if not isinstance(types, dict):
        assert isinstance(value, types), value
        return
    for key, inner in types.items():
        _assert_typed(value[key], inner)


@pytest.fixture
def plan(call: Call, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Calls `longtake plan` in the repository's root."""
    monkeypatch.chdir(_ROOT)
    return lambda *arguments: call("plan", *arguments)


@pytest.fixture
def small(small_recipe: Callable[..., Recipe], few_words: None, tmp_path: Path) -> WriteRecipe:
    """Writes a recipe whose plan takes a second; neither its clips nor its module need exist."""

    def write(*changes: str) -> Path:
        path = tmp_path / "recipe.toml"
        few = ("model.config={hidden_size=48, num_heads=2, num_blocks=1}",)
        path.write_text(config.dump(small_recipe(*few, "data.catalog=none.parquet", *changes)))
        return path

    return write


def test_samples_between_steps_are_said(plan: Call, small: WriteRecipe, refuse: Refuse) -> None:
    preset = "evaluation.presets.tiny={prompts=['a red disk'], num_inference_steps=2}"
    code, out, err = plan(str(small("sampling.every=4", preset)))
    assert code == 0, err
    assert re.search(r"Every 4 steps training stops for about .* and samples ", out)
    assert re.search(r"between two steps, beside model and\s+optimizer\s", out)  # and no more
    unused = ("sampling.guidance_scale=1.0", "sampling.negative_prompt=red")
    said = refuse("plan", small("sampling.every=4", preset, *unused))
    assert "Preset tiny: negative_prompt 'red' would have no effect" in said


def test_the_lora_that_a_run_begins_with_is_checked_and_said(
    plan: Call, small: WriteRecipe, refuse: Refuse, tmp_path: Path
) -> None:
    file = tmp_path / "style.safetensors"
    path = small("trainable.kind=lora", "trainable.rank=4", f"trainable.init_from={file}")
    whole = lora_state(outline(config.load(path, ())).model)
    state = {name: torch.zeros(each.shape) for name, each in whole.items()}
    layers = sorted({name.rpartition(".lora_")[0] for name in state})
    of_one = {name: each for name, each in state.items() if name.startswith(f"{layers[0]}.")}
    save_file(of_one, file)
    code, out, err = plan(path)
    assert code == 0, err
    assert f"Begins with {file}: LoRA of rank 4 for 1 of {len(layers)} layers." in out
    for change, why in (
        (
            "trainable.rank=3",
            "the rule of trainable.rules for it, is 3. Set trainable.rank = 4",
        ),
        ("model.config.hidden_size=24", "is of another model: its LoRA of"),
        (f"trainable.init_from={file}.gone", "cannot be read"),
    ):
        assert why in refuse("plan", path, "--set", change)


def test_stages_are_shown_with_their_settings(
    plan: Call, small: WriteRecipe, call_json: CallJson
) -> None:
    stages = (
        'data.stages=[{name="low", steps=6}, {name="high", learning_rate=1e-3, warmup_steps=2, '
        "global_batch_size=8, ema_decay=0.99, shift=3.0, caption_dropout=0.2}]"
    )
    recipe = small(stages, "optimizer.schedule=constant")
    code, out, err = plan(recipe)
    assert code == 0, err
    (low,) = [line.split() for line in out.splitlines() if line.startswith(" low ")]
    (high,) = [line.split() for line in out.splitlines() if line.startswith(" high* ")]
    assert low[1:6] == ["0", "6", "0.003", "4", "4"]
    assert high[1:7] == ["6", "the", "rest", "0.001", "2", "8"]
    assert high[-3:] == ["0.99", "3.0", "0.2"]
    low, high = (each["learning_rate"] for each in call_json("plan", recipe)["stages"])
    assert (low, high) == (pytest.approx([3e-3, 3e-3]), pytest.approx([1e-3, 1e-3]))
    restarts = ("--set", "optimizer.schedule=cosine_restarts")
    low, high = (each["learning_rate"] for each in call_json("plan", recipe, *restarts)["stages"])
    assert low == pytest.approx([3e-3, 3e-3 * 0.3887], rel=1e-3)
    # The rate of the second stage restarts after its warm-up, which ends in the middle of a cycle.
    assert high == pytest.approx([1e-3, 0.0])


def test_json_says_all_that_others_read(plan: Call, call_json: CallJson) -> None:
    options = ("--set", "training.global_batch_size=2", "--memory=29MiB")
    facts = call_json("plan", _TINY_FLUX, *options)
    _assert_typed(facts, _TYPES)
    assert facts["device"] == "cpu"
    assert facts["budget_gib"] == pytest.approx(0.93 * 29 / 1024, abs=1e-5)  # 7 % is kept back
    assert facts["model"]["tokens"] == 16 * 16 + 16 * 16 + 8
    assert 0 < facts["model"]["trainable"] < 0.1 * facts["model"]["parameters"]
    assert facts["fixed_gib"]["encoders"] == 0  # what they give is cached

    assert [row["name"] for row in facts["policies"]] == list(POLICIES)
    for row in facts["policies"]:
        assert row["fits"] == (row["step_peak_gib"] <= facts["budget_gib"])
    best = facts["best"]
    assert sum(best["per_block"].values()) == len(best["options"]) == 4
    assert best["overhead_with_another_gib"] == 0
    assert facts["gradients"] == {"trainable": 40, "reached": 40, "unreached": []}
    assert facts["traps"] == []
    assert facts["seconds"] > 0


def test_the_table_can_be_read(plan: Call) -> None:
    settings = ("--set", "training.global_batch_size=2", "--memory=33MiB", "--device=rtx4090")
    code, out, err = plan(_TINY_FLUX, *settings)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.strip()}
    for policy in (*POLICIES, "best"):
        name, forward, peak, with_optimizer, time, fits, *words = rows[policy]
        assert float(with_optimizer) >= float(peak) >= float(forward) > 0
        assert time.startswith("+")
        assert time.endswith("%")
        assert fits == {"none": "no", "all": "yes", "best": "yes"}.get(name, fits)
        assert words
    assert rows["weights"][1:3] == ["7.40", "MiB"]
    assert {"gradients", "optimizer", "ema", "inputs"} <= rows.keys()
    assert "1.94 M parameters, of which 0.09 M train (4.74%)." in out
    assert "Clips of 1 frame of 64x64: 520 tokens each. In micro-batches of 2, computed in" in out
    assert "Planned for rtx4090 with 33.00 MiB: 30.69 MiB for tensors, 2.31 MiB is left to" in out
    (verdict,) = [line for line in lines if line.startswith("Best: ")]
    assert "of 4 blocks" in verdict
    assert "% longer than without recompute" in verdict
    (heading,) = [line for line in lines if line.split()[:1] == ["blocks"]]
    assert heading.split() == ["blocks", "activations", "frozen", "weights"]
    assert "transformer_blocks." in out.split(heading)[1]
    assert "Gradient reaches 40 of 40 trainable parameters." in lines
    assert max(len(line.rstrip()) for line in lines if line.startswith(" ")) <= 100


def test_a_thousand_millions_of_parameters_are_one_billion() -> None:
    assert [_number(count) for count in (999_990_000, 10**9)] == ["999.99 M", "1.00 B"]


def test_what_does_not_fit_exits_1_with_what_would_help(small: WriteRecipe, plan: Call) -> None:
    recipe = small(
        "recompute={memory='6MiB', reserve=0, device='h100', host_memory='1MB'}",
        "training.global_batch_size=8",
    )
    code, out, _ = plan(recipe, "--json")
    assert code == 1
    facts = json.loads(out)
    assert facts["device"] == "h100"
    assert facts["budget_gib"] == pytest.approx(6 / 1024, abs=1e-4)
    assert facts["best"] is None
    assert not any(row["fits"] for row in facts["policies"])
    helpful = {change["what"]: change for change in facts["changes"]}
    assert helpful["micro-batches of 4"]["set"] == ["training.micro_batch_size=4"]
    assert {change["fits"] for change in facts["changes"]} == {True, False}

    code, out, err = plan(recipe)
    assert (code, err) == (1, "")
    assert "Nothing fits. Even the least demanding policy takes too much GPU memory: " in out
    assert facts["short"] == ["GPU memory"]
    for change in facts["changes"]:
        verdict = "fits" if change["fits"] else "still too much GPU memory"
        needed = f"{change['step_peak_gib'] * 1024:.2f} MiB of GPU memory"
        assert f"  {change['what']}: {needed}, {verdict}" in out
        assert f"--set '{change['set'][0]}'" in out
    (fitting, *_) = [change for change in facts["changes"] if change["fits"]]
    settings = [part for change in fitting["set"] for part in ("--set", change)]
    assert plan(recipe, *settings, "--json")[0] == 0


def test_what_would_not_train_exits_1(
    small: WriteRecipe, own_module: Callable[[str], str], call: Call
) -> None:
    module = own_module("tokens + self.first(tokens) * prepared['style']")
    recipe = small(f"trainable.modules.own.module={module}")
    code, out, _ = call("plan", recipe, "--json")
    assert code == 1
    facts = json.loads(out)
    assert (facts["budget_gib"], facts["best"], facts["policies"]) == (None, None, [])
    names = ["added_modules.own.second.weight", "added_modules.own.second.bias"]
    assert facts["gradients"] == {"trainable": 5, "reached": 3, "unreached": names}
    (trap, *_) = facts["traps"]
    assert trap["block"] == "added_modules.own.second"
    assert trap["trap"].startswith("No parameter of added_modules.own.second gets a gradient: ")
    assert trap["fix"].startswith("If they are meant to train, use them")
    assert trap["stops"] is True

    code, out, err = call("plan", recipe)
    assert (code, err) == (1, "")
    assert "Gradient reaches 3 of 5 trainable parameters." in out
    assert f"  without: {', '.join(names)}" in out
    assert f"trap added_modules.own.second: {trap['trap']}\n  Fix: {trap['fix']}" in out
    assert "without a limit (--memory 48GiB sets one)" in out


def test_memory_and_device_are_taken_as_they_are_given(
    small: WriteRecipe, call_json: CallJson
) -> None:
    """GiB are not GB; a named GPU has memory of its own, and any other is told by its speed."""
    recipe = small("recompute={memory='1GiB', device='h200'}")
    given = {
        ("--memory=48GiB",): (48, 48 * 0.93),
        ("--memory=48GB",): (48e9 / 2**30, 48e9 * 0.93 / 2**30),
        ("--device=rtx4090",): (24564 / 1024, 24564 * 0.93 / 1024),
        ("--device=312TFLOPS,2TB/s",): (1, 0.93),
    }
    for options, (memory, budget) in given.items():
        facts = call_json("plan", recipe, *options)
        assert facts["memory_gib"] == pytest.approx(memory, abs=1e-4)
        assert facts["budget_gib"] == pytest.approx(budget, abs=1e-4)
        assert facts["device"] == dict([options[0].split("=")]).get("--device", "h200")


def test_a_bucket_that_gets_no_clip_is_said_once_the_catalog_is_there(
    plan: Call, call_json: CallJson, pairs: Path
) -> None:
    """All pictures are square."""
    shapes = (
        "data.buckets=[{num_frames=1, height=64, width=64}, {num_frames=1, height=96, width=32}]"
    )
    changes = ("training.global_batch_size=2", shapes)
    few = pairs / "few.parquet"
    num_captions = len({*Catalog.load(few).captions(), ""})
    assert num_captions < 16
    for catalog, warnings, counts in (
        (few, ["stage all: no clip is for 1 frame of 32x96"], (16, num_captions)),
        ("none.parquet", [], None),
    ):
        options = change_options(*changes, f"data.catalog={catalog}")
        facts = call_json("plan", _TINY_FLUX, *options)
        assert facts["data_warnings"] == warnings
        cache = facts["cache"]
        assert (cache and (cache["clips"], cache["captions"])) == counts


def test_what_training_refuses_ends_a_plan(
    plan: Call, small: WriteRecipe, refuse: Refuse, pairs: Path
) -> None:
    own = ("optimizer.kind=torch.optim:Adafactor", "model.dtype=bf16")
    assert "weights are bfloat16" in refuse("plan", small(*own))
    unknown = small("sampling.every=2", "sampling.presets=['none']")
    assert "There is no preset none" in refuse("plan", unknown)
    catalog = f"data.catalog={pairs / 'few.parquet'}"
    trigger = change_options("data.captions.catalog.prefixes=['a [trigger]']", catalog)
    code, out, _ = plan(_TINY_FLUX, *trigger)
    assert (code, "Training would refuse this recipe." in out) == (2, True)


def test_processes_share_what_is_planned(small: WriteRecipe, call_json: CallJson) -> None:
    recipe = small("parallel.strategy=shard")
    facts = [call_json("plan", recipe, f"--processes={count}") for count in (1, 2)]
    assert [each["processes"] for each in facts] == [1, 2]
    assert [each["micro_batch_size"] for each in facts] == [4, 2]
    alone, together = (each["fixed_gib"] for each in facts)
    assert together["ema"] == pytest.approx(alone["ema"] / 2, abs=1e-6)


def test_a_mesh_is_planned_by_its_links(
    small: WriteRecipe, call: Call, call_json: CallJson
) -> None:
    path = small(
        "model.config={hidden_size=48, num_blocks=2}",
        "parallel.strategy=shard",
        "training.global_batch_size=8",
        "training.precision=bf16",
        "checkpoint.every=1000000",
        "checkpoint.minutes=15",
    )
    options = ("--processes=8", "--per-node=4", "--link=1,0.01", "--device=h100")
    facts = call_json("plan", path, *options)
    mesh = facts["mesh"]
    assert (facts["processes"], facts["per_node"]) == (8, 4)
    assert mesh["link_gb_per_second"] == {"node": 1, "network": 0.01}
    assert (mesh["ranks_of_a_copy"], mesh["copies"]) == (8, 1)
    assert [row["what"] for row in mesh["sent"]] == ["weights", "gradients to shards"]
    assert all(row["exposed_seconds"] <= row["seconds"] * 1.001 for row in mesh["sent"])
    assert mesh["step_seconds"] > mesh["compute_seconds"] > 0
    both = ["parallel.strategy=hybrid", "parallel.param_dtype=bf16"]
    assert [each["set"] for each in mesh["advice"]] == [both, both[:1], both[1:]]
    assert mesh["advice"][-1]["step_seconds"] < mesh["step_seconds"]

    code, out, err = call("plan", path, *options)
    assert (code, err) == (0, "")
    assert "8 processes on 2 nodes: one copy of the model, held by all together." in out
    assert "every 1000000 steps and every 15 minutes: a crash loses at most 15:00 of" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["weights", "8", "the", "network"] in [row[:4] for row in rows]
    assert "That is much. What would help, each by itself:" in out
    assert "  --set parallel.strategy=hybrid --set parallel.param_dtype=bf16: " in out


def test_what_the_whole_run_costs_with_failures(plan: Call, call_json: CallJson) -> None:
    """Stages at their own shapes, saves, failures, and the interval at which least is lost."""
    high = "{name='high', buckets=[{num_frames=1, height=128, width=128}]}"
    settings = change_options(
        f"data.stages=[{{name='low', steps=300}}, {high}]",
        "training={steps=1000, global_batch_size=8, precision='fp32'}",
        "checkpoint={every=100, keep=2, keep_every=500}",
    )
    often = ("--failures-per-day", "6", "--restart-seconds", "100", "--storage", "0.001")
    facts = call_json("plan", _TINY_FLUX, "--processes", "4", *settings, *often)
    cost = facts["cost"]
    low, high = cost["stages"]
    assert [(each["name"], each["steps"]) for each in (low, high)] == [("low", 300), ("high", 700)]
    assert 0 < low["compute_seconds"] < high["compute_seconds"]
    own = high["compute_seconds"] + high["exposed_seconds"]
    assert own == pytest.approx(facts["mesh"]["step_seconds"], rel=1e-4)
    states = 2**30 * (facts["fixed_gib"]["optimizer"] + facts["fixed_gib"]["ema"])
    saved = 4 * facts["model"]["trainable"] + states
    assert cost["save_bytes"] == pytest.approx(saved, rel=0.01)
    assert cost["kept_bytes"] == 4 * cost["save_bytes"]
    assert cost["save_write_seconds"] == pytest.approx(cost["save_bytes"] / 1e6, rel=1e-4)
    assert cost["saves"] == 10
    parts = ("work_seconds", "stalled_seconds", "lost_seconds")
    assert sum(cost[name] for name in parts) == pytest.approx(cost["wall_seconds"], rel=1e-4)
    assert 100 < high["lost_per_failure_seconds"] < 100 + 100 * own + 2 * cost["save_write_seconds"]
    assert 0 < cost["goodput"] <= cost["best"]["goodput"] < 1

    _, out, _ = plan(_TINY_FLUX, "--processes", "4", *settings, *often)
    said = " ".join(out.split())
    assert re.search(r" stage low 300 .* stage high 700 .* saves 10 .* failures .* all ", said)
    assert "with 6 failures a day, restarts of 1:40 (--restart-seconds) and a save every" in said
    assert re.search(r"A save every [\d:.]+.{0,9} loses least: ", said)


def test_intervals_in_epochs_are_those_of_the_data(
    small: WriteRecipe, call: Call, call_json: CallJson, refuse: Refuse, shapes_catalog: Path
) -> None:
    """Also of a run in steps; before the catalogs are indexed they are said to be unknown."""
    saves = ("training.steps=100000", "checkpoint={every_epochs=5}")
    options = ("--processes=2", "--device=h100")
    often = ("--failures-per-day", "2")
    code, out, _ = call("plan", small(*saves), *options)
    assert (code, "every 5 epochs: what a crash loses is known once the catalogs" in out) == (
        0,
        True,
    )
    said = refuse("plan", small(*saves), *options, *often)
    assert "where they are set in epochs are known once the catalogs of `data` are indexed" in said
    _, out, _ = call("plan", small(*saves, "checkpoint.minutes=15"), *options)
    assert "every 5 epochs and every 15 minutes: a crash loses at most 15:00 of" in out

    indexed = small(*saves, f"data.catalog={shapes_catalog}")  # 16 batches of its 64 clips
    assert call_json("plan", indexed, *options, *often)["cost"]["saves"] == 100_000 / (5 * 16)


def test_a_batch_that_does_not_divide_wastes_ranks(
    small: WriteRecipe, call: Call, call_json: CallJson
) -> None:
    path = small("model.config={hidden_size=48, num_blocks=2}", "training.global_batch_size=6")
    options = ("--processes=4", "--per-node=2", "--link=1,1", "--device=h100")
    mesh = call_json("plan", path, *options)["mesh"]
    (row,) = mesh["sent"]
    assert (row["what"], row["ranks"], row["over"]) == ("gradients", 4, "network")
    assert mesh["sent_bytes"] == row["bytes"] > 0
    assert mesh["idle_share"] == pytest.approx(0.25)  # 6 clips in 8 places
    _, out, _ = call("plan", path, *options)
    assert "4 processes on 2 nodes: 4 copies of the model. Each GPU sends 1 GB" in out
    assert "25.0% of all places stay empty" in out


def test_plan_refuses_what_train_would(small: WriteRecipe, refuse: Refuse) -> None:
    path = small("parallel={strategy='hybrid', shard_size=3}", "training.global_batch_size=8")
    said = refuse("plan", path, "--processes=4")
    assert "parallel.shard_size = 3 processes, which would hold one copy of the model" in said
    said = refuse("plan", path, "--processes=3", "--link=quick")
    assert said.startswith("longtake: The link 'quick' cannot be read.")


_MISTAKES = {
    "an unknown device": (
        "--device a600",
        "The device 'a600' is not known. Did you mean a6000? Known are a6000, h100,..."
        "any other is given by its memory and its dense bf16 speed, such as 24GiB,165TFLOPS, and "
        "its bandwidth, where it is known: 24GiB,165TFLOPS,1008GB/s.",
    ),
    "a resolution that the codec cannot divide": (
        "--set 'data.buckets=[{num_frames=1, height=65, width=64}]'",
        "data.buckets: 1 frame of 64x65 cannot be encoded: codec and model want height and "
        "width divisible by 4. The nearest that fits is 1 frame of 64x64.",
    ),
}


@pytest.mark.parametrize("mistake", _MISTAKES)
def test_a_mistake_becomes_one_message_and_exit_code_2(
    mistake: str, plan: Call, refuse: Refuse
) -> None:
    options, message = _MISTAKES[mistake]
    said = refuse("plan", _TINY_FLUX, *shlex.split(options))
    before, dots, after = message.partition("...")
    assert said.startswith(f"longtake: {before}")
    assert said.endswith(f"{after}\n")
    assert dots or said == f"longtake: {message}\n"


@pytest.mark.parametrize("weights", [each for each in get_args(BlockWeights) if each != "keep"])
def test_the_least_of_each_treatment_of_weights_has_words(weights: str) -> None:
    assert POLICY_WORDS[f"all+{weights}"].startswith("every block is, and weights are")


def _report_of(phase: PhaseForecast, *, is_short: bool = True, **codec: Any) -> Any:
    codec = {"can_tile": True, "encode_tile": "auto"} | codec
    step = SimpleNamespace(
        components=SimpleNamespace(codec=SimpleNamespace(can_tile=codec["can_tile"])),
        batch=SimpleNamespace(bucket="9 frames of 64x64"),
        device=replace(CPU, reserve=0.25, ram_bytes=2**30),
    )
    return SimpleNamespace(
        known=SimpleNamespace(step=step),
        recipe=SimpleNamespace(
            codec=SimpleNamespace(encode_tile=codec["encode_tile"]),
            data=SimpleNamespace(cache="cache"),
            sampling=SimpleNamespace(in_training=False),
        ),
        is_filled=False,
        tile=TileChoice(0),
        phases=[phase],
        short_phases=[phase] if is_short else [],
    )


@pytest.mark.parametrize(
    ("codec", "advice"),
    [
        ({"can_tile": False}, "Its codec has no tiles. Train smaller clips"),
        ({"encode_tile": 0}, 'codec.encode_tile = "auto" takes tiles that fit, if there are any.'),
        ({}, "are needed. Train smaller clips"),
    ],
)
def test_it_says_which_clips_cannot_be_encoded(codec: dict[str, Any], advice: str) -> None:
    """By the shape that was found when tiles were chosen, else by the one that is planned."""
    encode = PhaseForecast(2**30, 3 * 2**30, 1.0, name="encode", fits=False)
    report = _report_of(encode, **codec)
    (text,) = _phase_shortages(report)
    assert "[red]Does not fit.[/red] Clips of 9 frames of 64x64 cannot be encoded in this" in text
    assert "3.00 GiB are needed" in text
    assert "or fill a cache on a GPU of 4.00 GiB by" in text
    assert advice in text
    report.tile = TileChoice(128, Bucket(num_frames=5, height=704, width=1472), 2**30)
    report.phases = [replace(encode, how="in tiles of 128 pixels")]
    (text,) = _phase_shortages(report)
    assert "Clips of 5 frames of 1472x704 cannot be encoded in this memory even in tiles" in text
    report.phases = [replace(encode, name="step")]  # encoders beside the model
    (text,) = _phase_shortages(report)
    assert "Clips of 5 frames of 1472x704 cannot be encoded in this memory:" in text
    report.short_phases = []  # its cache was filled
    report.phases = [encode]
    (text,) = _phase_shortages(report)
    assert text.startswith("[yellow]note[/yellow] Clips of")
    assert not list(_phase_shortages(_report_of(replace(encode, fits=True), is_short=False)))


@pytest.mark.parametrize(
    ("name", "ram_bytes", "words"),
    [
        ("text", 2**29, "text encoder: 3.00 GiB are needed. Take a GPU of 4.00 GiB. Or lower text"),
        ("text", 2**31, "text encoder: a process needs 2.00 GiB of RAM to read it. Fill the cache"),
        ("step", 0, "training, encoding: 3.00 GiB are needed. Take a GPU of 4.00 GiB. Or set data"),
        ("sampling", 0, "training, sampling: 3.00 GiB are needed. Take a GPU of 4.00 GiB. Or lea"),
    ],
)
def test_it_says_what_else_does_not_fit_and_what_would(
    name: str, ram_bytes: int, words: str
) -> None:
    phase = PhaseForecast(1, 3 * 2**30, 1.0, name=name, fits=False, ram_bytes=ram_bytes)
    (text,) = _phase_shortages(_report_of(phase))
    assert text.startswith(f"[red]Does not fit.[/red] {words}")
    assert not list(_phase_shortages(_report_of(phase, is_short=False)))


def test_the_ram_of_a_computer_with_a_gpu_is_known(
    small_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longtake.planner.host_memory.usable_ram", lambda: 2**34)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    gpu = DEVICES["h100"].with_own_memory()
    monkeypatch.setattr("longtake.planner.devices.device_budget", lambda *_, **__: gpu)
    own, other = small_recipe(), small_recipe("recompute.device='h100'")
    for recipe, processes, has_gpu, given, ram in (
        (own, 2, False, None, None),
        (own, 2, True, None, 2**33),
        (own, 64, True, None, 2**32),  # on further nodes like this one
        (other, 2, True, None, None),  # of which this computer knows nothing
        (other, 2, False, "12GiB", 3 * 2**31),
        (own, 2, True, "12GiB", 3 * 2**31),
    ):
        monkeypatch.setattr("torch.cuda.is_available", lambda has_gpu=has_gpu: has_gpu)
        chosen = _choose_device(recipe, None, None, given, processes, None)
        assert chosen.ram_bytes == ram

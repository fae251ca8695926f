"""Promises of a forecast: numbers that agree with each other and with the real parts."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.build import TINY_WAN, not_none
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longtake import config
from longtake.config import Quantization, Recipe
from longtake.errors import CannotBePlannedError, ModelError, PlanError
from longtake.models.components import assemble
from longtake.models.tubelet import TubeletTransformer
from longtake.planner import encoding
from longtake.planner.activation_checkpointing import POLICIES, options_of
from longtake.planner.devices import CPU, DEVICES, DeviceBudget, device_budget
from longtake.planner.forecast import (
    Suggestion,
    check_gradients,
    forecast,
    half_as_long,
    suggest_changes,
)
from longtake.planner.memory import outline_step, policy_forecast, static_memory
from longtake.planner.phases import PhaseForecast, forecast_phases
from longtake.planner.plan import does_not_fit
from longtake.planner.record import KEEP

_Make = Callable[..., Recipe]
_MANY_WORDS = " ".join(f"word{number}" for number in range(40))
"""More than there is room for in a vocabulary, which a plan takes at its largest."""
_Write = Callable[[str], str]
_MIB = 2**20
_WAN_LORA = (
    *TINY_WAN,
    "model.config={num_layers=2, num_attention_heads=2, attention_head_dim=32, ffn_dim=128}",
    "trainable.kind=lora",
)
_CASES = {  # with MiB in which only a mixture of options is the fastest
    "Wan, LoRA": ("small_recipe", _WAN_LORA, 9.0),
    "FLUX Kontext, LoRA and a module": ("tiny_flux", (), 27),
}


def _gpu(budget_mib: float | None = None, device: DeviceBudget = CPU) -> DeviceBudget:
    """All of whose memory is for tensors."""
    memory_bytes = None if budget_mib is None else int(budget_mib * _MIB)
    return replace(device, memory_bytes=memory_bytes)


@pytest.mark.parametrize("case", _CASES)
def test_numbers_agree_with_each_other(case: str, request: pytest.FixtureRequest) -> None:
    fixture, changes, budget_mib = _CASES[case]
    recipe: Recipe = request.getfixturevalue(fixture)(*changes)
    known = forecast(recipe, _gpu(budget_mib), tries_more=True)
    budget = known.device.budget_bytes
    assert budget == int(budget_mib * _MIB)
    assert [row.name for row in known.policies] == list(POLICIES)
    for row in known.policies:
        assert row.step_peak_bytes >= row.peak_bytes + known.static.resident
        assert row.peak_bytes >= row.forward_end_bytes > known.static.weights + known.static.inputs
        assert row.fits == (row.step_peak_bytes <= budget)
        assert 0 <= not_none(row.overhead) < 0.5  # a forward pass is half a step at most
        assert row.overhead == 0 or row.name != "none"
    assert (known.policy("none").fits, known.policy("all").fits) == (False, True)
    assert known.least.step_peak_bytes == min(row.step_peak_bytes for row in known.policies)

    best, row = not_none(known.best), known.policy("best")
    assert not known.misses
    assert row.fits
    assert row.step_peak_bytes <= budget
    assert best.predicted_bytes == pytest.approx(best.traced.peak_bytes, rel=0.005)
    assert row.overhead == best.overhead > 0
    assert best.overhead <= min(not_none(each.overhead) for each in known.policies if each.fits)
    assert best.overhead_with_another_gib == 0  # in which everything could be kept
    assert sum(best.per_block().values()) == len(best.options)
    assert len({option for option, count in best.per_block().items() if count}) > 1
    assert not known.gradients.unreached
    assert not known.gradients.fatal


def test_what_stays_in_memory_is_what_the_real_parts_take(small_recipe: _Make) -> None:
    recipe = small_recipe(*_WAN_LORA)
    known = forecast(recipe, _gpu())
    parts = assemble(recipe, [_MANY_WORDS], None)
    trained = [p for p in parts.model.parameters() if p.requires_grad]
    numbers, fixed = sum(p.numel() for p in trained), known.static
    assert known.step.num_parameters == sum(p.numel() for p in parts.model.parameters())
    assert known.step.num_trainable == numbers
    assert fixed.weights == _size(parts.model)
    assert (fixed.gradients, fixed.ema) == (4 * numbers, 4 * numbers)
    assert fixed.optimizer.device == 8 * numbers + 4 * len(trained)  # each counts its steps
    encoders = [*parts.codec.modules(), *parts.text.modules()]
    assert fixed.encoders == sum(map(_size, encoders)) > 0
    assert fixed.resident == fixed.optimizer.device + fixed.ema + fixed.encoders
    latents, prompt = 4 * 3 * 16 * 16, 6 * 16
    assert fixed.inputs == 4 * 4 * (2 * latents + 1 + prompt)  # noise, and a sigma
    assert known.step.num_tokens == 3 * 8 * 8


def _size(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def test_each_average_takes_its_place(small_recipe: _Make) -> None:
    widths = [f'{{name="w{number}", sigma_rel=0.{number}}}' for number in (1, 2)]
    changes = [(), (f"ema.profiles=[{', '.join(widths)}]",), ("ema.decay=0.0",)]
    steps = [outline_step(small_recipe(*each), CPU) for each in changes]
    one, two, none = (static_memory(step) for step in steps)
    assert one.ema == 4 * sum(p.numel() for p in steps[0].components.model.parameters())
    assert (two.ema, none.ema) == (2 * one.ema, 0)
    assert two.resident - one.resident == one.resident - none.resident == one.ema


def test_without_a_limit_everything_is_kept(small_recipe: _Make) -> None:
    """Planning leaves torch as it was."""
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    known = forecast(small_recipe(), _gpu(device=DEVICES["a6000"]))
    torch.testing.assert_close(torch.rand(4), expected, rtol=0, atol=0)
    assert torch.is_grad_enabled()
    assert torch.nn.functional.rms_norm.__module__ == "torch.nn.functional"
    best = not_none(known.best)
    assert (set(best.options.values()), best.overhead) == ({KEEP}, 0)
    assert all(row.fits is None for row in known.policies)
    assert not known.misses


def test_what_is_in_the_computers_memory_has_a_limit(small_recipe: _Make) -> None:
    streamed = small_recipe(*_WAN_LORA, "model.stream=all", "recompute.host_memory=0.01MiB")
    with pytest.raises(PlanError, match=r'"all" keeps .* but a process may take 10\.24 KiB of it'):
        forecast(streamed, device_budget(streamed))


def test_a_gpu_with_little_memory_streams_and_offloads(small_recipe: _Make) -> None:
    """No result changes; what a run has quantised for itself is not chosen anew."""
    eight = tuple(each.replace("num_layers=2", "num_layers=8") for each in _WAN_LORA)
    recipe = small_recipe(*eight, "model.quantize=auto")
    gpu = replace(DEVICES["rtx4090"], host_bandwidth=1e15)
    step = outline_step(recipe, gpu)
    kept = policy_forecast("none", step.tracer.trace({}), step).step_peak_bytes
    known = forecast(recipe, replace(gpu, memory_bytes=int(0.8 * kept)))
    best, policy = not_none(known.best), not_none(known.best_policy)
    assert policy.fits
    assert policy.host_bytes == best.traced.host_bytes > 0
    assert {each.weights for each in best.options.values()} <= {"keep", "stream"}
    without = forecast(recipe, replace(gpu, memory_bytes=int(0.8 * kept), host_bytes=0))
    assert without.best is None or without.best.traced.host_bytes == 0
    kinds: dict[str, Quantization] = dict.fromkeys(known.step.block_names, "nf4")
    fixed = outline_step(recipe, gpu, quantized=kinds)
    assert fixed.tracer.subject.weights == ("keep", "stream")
    assert static_memory(fixed).weights < static_memory(known.step).weights


def test_what_an_update_takes_is_a_limit_too(small_recipe: _Make) -> None:
    recipe = small_recipe("training.global_batch_size=1", "optimizer.kind=muon")
    known = forecast(recipe, _gpu())
    assert {row.step_peak_bytes for row in known.policies} == {known.static.update_bytes}
    passes = max(row.peak_bytes for row in known.policies) + known.static.resident
    assert known.static.update_bytes > passes
    below = forecast(recipe, _gpu((known.static.update_bytes - 1) / _MIB))
    assert below.misses
    assert below.best_policy is None


_SHAPE = "{{num_frames=1, height={}, width={}}}".format
_SMALL_SHAPE, _LARGE_SHAPE = _SHAPE(32, 32), _SHAPE(64, 64)
_WITH_OWN_BATCH = "{num_frames=1, height=32, width=32, batch_size=32}"
_STAGES = (
    f'data.stages=[{{name="few", steps=2, buckets=[{_LARGE_SHAPE}], global_batch_size=2}}, '
    f'{{name="many", buckets=[{_SMALL_SHAPE}], global_batch_size=%d}}]'
)
_OF_TWO = "training.micro_batch_size=2"


@pytest.mark.parametrize(
    ("changes", "num_ranks", "sizes", "expected"),
    [
        (
            [f"data.buckets=[{_SHAPE(32, 96)}, {_LARGE_SHAPE}, {_SHAPE(32, 64)}]"],
            2,
            [8],
            (64, 64, 4, 1),
        ),
        ([f"data.buckets=[{_LARGE_SHAPE}, {_SMALL_SHAPE}]", _OF_TWO], 2, [8], (64, 64, 2, 2)),
        # A bucket's own batch has as many micro-batches.
        ([f"data.buckets=[{_LARGE_SHAPE}, {_WITH_OWN_BATCH}]", _OF_TWO], 2, [32], (32, 32, 8, 2)),
        # Large pictures in small batches, or small ones in large batches, by their tokens.
        ([_STAGES % 2], 1, [2, 2], (64, 64, 2, 1)),
        ([_STAGES % 16], 1, [2, 16], (32, 32, 16, 1)),
    ],
)
def test_the_largest_batch_of_one_process_is_planned(
    changes: list[str],
    num_ranks: int,
    sizes: list[int],
    expected: tuple[int, ...],
    tiny_flux: _Make,
) -> None:
    recipe = tiny_flux("training.global_batch_size=8", *changes)
    step = outline_step(recipe, CPU, num_ranks)
    assert [stage.global_batch_size for stage in step.stages] == sizes
    batch = step.batch
    shape = batch.bucket.height, batch.bucket.width
    assert (*shape, batch.micro_batch_size, batch.num_micro_batches) == expected


def test_processes_that_share_a_model_hold_a_part_of_it_each(small_recipe: _Make) -> None:
    recipe = small_recipe("model.config={hidden_size=48, num_blocks=8}")
    replicated = outline_step(recipe, CPU, world_size=2)
    shared = config.changed(recipe, ["parallel.strategy=shard"])
    sharded = outline_step(shared, CPU, world_size=2)
    whole, half = static_memory(replicated), static_memory(sharded)
    weights = static_memory(outline_step(recipe, CPU)).weights
    assert static_memory(outline_step(recipe, CPU)).elsewhere == 0
    assert whole.elsewhere == 0 < half.elsewhere
    assert half.reduced == 0 < whole.reduced < whole.gradients
    assert half.weights + half.elsewhere == whole.weights + whole.elsewhere == weights
    assert weights / 2 < half.weights < weights
    assert half.ema == whole.ema / 2
    assert half.optimizer.device == whole.optimizer.device // 2
    trace = replicated.tracer.trace({})
    theirs, mine = (
        policy_forecast("none", trace, replicated),
        policy_forecast("none", trace, sharded),
    )
    assert mine.peak_bytes + half.elsewhere == theirs.peak_bytes + whole.elsewhere
    assert mine.step_peak_bytes == mine.peak_bytes + half.resident < theirs.step_peak_bytes


def test_an_offloaded_optimizer_leaves_the_gpu(small_recipe: _Make) -> None:
    gpu = _gpu(device=DEVICES["rtx4090"])
    inside = forecast(small_recipe(), gpu)
    outside = forecast(small_recipe("optimizer.offload=true"), gpu)
    assert outside.static.optimizer.device == inside.static.optimizer.host == 0
    assert (
        outside.static.optimizer.host
        > inside.static.optimizer.device
        > 8 * inside.step.num_trainable
    )
    saved = [
        before.step_peak_bytes - after.step_peak_bytes
        for before, after in zip(inside.policies, outside.policies, strict=True)
    ]
    assert saved == [inside.static.optimizer.device] * len(POLICIES)


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (
            "self.change(given) if tokens.mean() > 0 else tokens",
            CannotBePlannedError,
            "The model cannot be planned ({line}): a tensor's value is asked for. A plan runs the "
            "model on tensors that have a shape but no values, so it can follow no .item() and no "
            "`if` on a tensor. Compute with tensors there, such as by torch.where.",
        ),
        ("tokens + tokens.detach().numpy()", CannotBePlannedError, "compute with torch"),
        (
            "self.first(tokens[..., :3])",
            PlanError,
            "The model cannot be run ({line}): RuntimeError: a and b must have same reduction dim",
        ),
        (
            "given['pose']",
            PlanError,
            "The model cannot be run ({line}): KeyError: 'pose'. A training step would fail in the "
            "same way.",
        ),
        ("tokens[:, 1:]", ModelError, "module own returned tokens of "),
    ],
)
def test_a_module_that_cannot_be_followed_or_run_is_refused(
    returned: str,
    error: type[Exception],
    message: str,
    small_recipe: _Make,
    own_module: _Write,
    tmp_path: Path,
) -> None:
    recipe = small_recipe(f"trainable.modules.own.module={own_module(returned)}")
    line = f"{tmp_path}/my_adapter.py, line 25: return replace(after, tokens={returned})"
    with pytest.raises(error, match=re.escape(message.format(line=line))):
        check_gradients(outline_step(recipe, CPU))


def test_a_checkpoint_call_around_everything_is_said_where_memory_cannot_be_planned(
    small_recipe: _Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(self: TubeletTransformer, *args: Any, **kwargs: Any) -> Tensor:
        whole: Tensor = checkpoint(forward, self, *args, use_reentrant=False, **kwargs)
        return whole

    forward = TubeletTransformer.forward
    monkeypatch.setattr(TubeletTransformer, "forward", run)
    known = forecast(small_recipe(), CPU)
    everything, unplanned = known.gradients.traps
    assert "One recompute region in model holds all blocks" in everything.trap
    assert "blocks do not run once each" in unplanned.trap
    assert not known.policies
    with pytest.raises(CannotBePlannedError, match=r'policy = "none".*\n.*One recompute region in'):
        forecast(small_recipe('recompute.memory="1GiB"'), CPU)


def test_a_budget_below_the_weights_fits_nothing(tiny_flux: _Make) -> None:
    known = forecast(tiny_flux(), replace(CPU, memory_bytes=7 * _MIB, reserve=0.5))
    assert known.misses
    assert known.static.weights > 3.5 * _MIB
    trace = known.step.tracer.trace(options_of("all", known.step.block_names))
    least = policy_forecast("all", trace, known.step).step_peak_bytes / _MIB
    assert str(does_not_fit(known)).startswith(
        f"No recompute policy fits 3.50 MiB: the least, all, takes {least:.2f} MiB. Take a GPU of "
        f"{2 * least:.2f} MiB. Or:\n"
    )


_SMALL = "model.config={hidden_size=48, num_heads=2, num_blocks=1}"


def _suggestions(recipe: Recipe, device: DeviceBudget) -> dict[str, Suggestion]:
    return {each.what: each for each in suggest_changes(forecast(recipe, device))}


def test_what_a_change_is_said_to_take_it_takes(small_recipe: _Make) -> None:
    bucket = "data.buckets=[{num_frames=8, height=96, width=128}]"
    recipe, gpu = small_recipe(_SMALL, bucket), _gpu(57, DEVICES["rtx4090"])
    found = _suggestions(recipe, gpu)
    assert set(found) == {
        "micro-batches of 2",
        "8 frames of 96x64",
        "LoRA instead of all weights",
        "weights in bf16",
        "optimizer states in host RAM",
        "optimizer states in 8 bits (needs torchao)",
    }
    assert {suggestion.fits for suggestion in found.values()} == {True, False}
    for suggestion in (
        found["micro-batches of 2"],
        found["optimizer states in 8 bits (needs torchao)"],
    ):
        changed = config.changed(recipe, suggestion.changes)
        row = forecast(changed, gpu).policy(suggestion.policy)
        assert (row.step_peak_bytes, row.fits) == (suggestion.step_peak_bytes, suggestion.fits)
    sizes = [suggestion.step_peak_bytes for suggestion in found.values()]
    assert sizes == sorted(sizes)


def test_gradients_are_freed_where_no_micro_batch_can_be_smaller(small_recipe: _Make) -> None:
    recipe, gpu = small_recipe(_SMALL, "training.global_batch_size=1"), _gpu(2, DEVICES["rtx4090"])
    found = _suggestions(recipe, gpu)["weights updated in the backward pass, and no clipping"]
    row = forecast(config.changed(recipe, found.changes), gpu).policy(found.policy)
    assert row.step_peak_bytes == found.step_peak_bytes
    assert found.step_peak_bytes < forecast(recipe, gpu).least.step_peak_bytes


def test_only_what_helps_is_offered(small_recipe: _Make) -> None:
    lora = [_SMALL, "trainable.kind=lora", "model.dtype=bf16"]
    lora += ["optimizer.kind=adamw8bit", "model.quantize=int8"]
    least = small_recipe(*lora, "trainable.rank=1", "training.global_batch_size=1")
    assert _suggestions(least, _gpu(0.5)) == {}
    found = _suggestions(small_recipe(*lora), _gpu(0.5))
    assert list(found) == ["micro-batches of 2", "LoRA of rank 8", "all of these together"]
    *alone, together = found.values()
    assert not any(suggestion.fits for suggestion in alone)
    assert together.changes == [change for suggestion in alone for change in suggestion.changes]
    assert together.step_peak_bytes < alone[0].step_peak_bytes


def test_videos_may_be_shorter_and_encoders_cached(small_recipe: _Make) -> None:
    recipe = small_recipe(
        *TINY_WAN,
        "data.buckets=[{num_frames=9, height=96, width=128}]",
        "model.config={num_layers=1, num_attention_heads=2, attention_head_dim=16, ffn_dim=32}",
        "training.global_batch_size=1",
    )
    found = _suggestions(recipe, _gpu(10))
    assert found["5 frames of 128x96"].changes == [
        "data.buckets=[{ num_frames = 5, height = 96, width = 128 }]"
    ]
    assert found["cached latents and prompts"].changes == ["data.cache=cache", "data.windows=1"]


@pytest.mark.parametrize(
    ("shortest", "chunk", "halves"),
    [
        (1, 4, {1: 1, 5: 1, 81: 41}),
        (1, 8, {25: 9, 121: 57}),
        (22, 17, {22: 22, 39: 22, 73: 39, 124: 56, 345: 175}),
    ],
)
def test_shorter_clips_are_of_a_length_that_the_codec_encodes(
    shortest: int, chunk: int, halves: dict[int, int]
) -> None:
    codec: Any = SimpleNamespace(shortest=shortest, chunk=chunk)
    assert {number: half_as_long(number, codec) for number in halves} == halves


def test_micro_batches_divide_what_a_process_has(small_recipe: _Make) -> None:
    recipe = small_recipe(_SMALL, "training.global_batch_size=10")
    known = forecast(recipe, _gpu(2), world_size=2)
    assert known.step.batch.micro_batch_size == 5
    found = [each.what for each in suggest_changes(known)]
    assert "LoRA instead of all weights" in found
    assert not any("micro-batches" in what for what in found)


_ROOT = Path(__file__).resolve().parents[2]
_WAN = (
    *TINY_WAN,
    "data.buckets=[{num_frames=29, height=32, width=32}]",
    "data.catalog=none.parquet",
    "codec.config={base_dim=4, z_dim=4, dim_mult=[1, 1, 1], num_res_blocks=1, "
    "temperal_downsample=[true, true]}",
)


def _phases(recipe: Recipe) -> dict[str, PhaseForecast]:
    return {phase.name: phase for phase in forecast_phases(outline_step(recipe, CPU))}


def test_each_part_counts_its_own_weights(small_recipe: Callable[..., Recipe]) -> None:
    recipe = small_recipe(*_WAN)
    found = _phases(recipe)
    assert list(found) == ["text", "encode", "step", "model", "decode"]
    parts = assemble(recipe, [_MANY_WORDS], None)
    weights = parts.part_bytes()
    assert found["text"].weight_bytes == weights["text"]
    assert found["model"].weight_bytes == weights["model"]
    assert found["encode"].weight_bytes == found["decode"].weight_bytes == weights["codec"]
    assert found["step"].weight_bytes > sum(weights.values())  # averages and the optimizer too
    assert all(phase.peak_bytes > phase.weight_bytes for phase in found.values())
    cached = _phases(small_recipe(*_WAN, "data.cache=cache", "data.windows=1"))
    assert list(cached) == ["text", "encode", "model", "decode"]
    in_bf16 = _phases(small_recipe(*_WAN, "text.dtype=bf16", "codec.dtype=bf16"))
    for name in ("text", "encode", "decode"):
        assert in_bf16[name].weight_bytes == found[name].weight_bytes // 2
        assert in_bf16[name].peak_bytes < found[name].peak_bytes


def test_long_clips_follow_from_a_few_of_their_frames(
    small_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small_recipe(*_WAN)
    short = _phases(recipe)
    monkeypatch.setattr(encoding, "_CHUNK", 1000)
    whole = _phases(recipe)
    for name in ("encode", "decode"):
        assert short[name].peak_bytes == pytest.approx(whole[name].peak_bytes, rel=0.02)
        assert short[name].seconds == pytest.approx(whole[name].seconds, rel=0.02)


@pytest.mark.slow
def test_the_24_gb_example_fits_in_every_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recipe = config.load(
        _ROOT / "examples" / "wan_1_3b_lora_24gb.toml", ['recompute.memory="24GB"']
    )
    gpu = device_budget(recipe)
    step = outline_step(recipe, gpu)
    found = forecast_phases(step)
    assert [phase.name for phase in found] == ["text", "encode", "model", "decode"]
    assert all(phase.fits for phase in found)
    trace = step.tracer.trace(options_of("all", tuple(step.tracer.subject.blocks)))
    trained = policy_forecast("all", trace, step)
    assert trained.fits

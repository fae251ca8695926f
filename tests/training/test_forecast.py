"""What a forecast promises: numbers that agree with each other, with the parts, and in time."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from longtake.config import Recipe
from longtake.errors import PlanError
from longtake.models.assemble import assemble
from longtake.recompute.devices import CPU, DEVICES
from longtake.recompute.policies import POLICIES, options_of
from longtake.training.forecast import check_gradients, forecast, memory_of
from longtake.training.outlined import outlined_step

_Make = Callable[..., Recipe]
_MIB = 2**20
_WAN_LORA = (
    "data.buckets=[{num_frames=5, height=32, width=32}]",
    "model.family=wan",
    "model.config={num_layers=3, num_attention_heads=2, attention_head_dim=32, ffn_dim=128}",
    "codec.kind=autoencoder",
    "codec.config={base_dim=4, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, "
    "temperal_downsample=[true]}",
    "text.kind=transformers",
    "text.config={d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2}",
    "trainable.kind=lora",
)
_CASES = {  # and MiB in which only a mixture of options is the fastest
    "tubelet, in full": ("small_recipe", ("text.max_words=24",), 7.6),
    "Wan, LoRA": ("small_recipe", _WAN_LORA, 9.5),
    "FLUX Kontext, LoRA and a module": ("tiny_flux", (), 27),
}


@pytest.mark.parametrize("case", _CASES)
def test_numbers_agree_with_each_other(case: str, request: pytest.FixtureRequest) -> None:
    """Peaks lie above what they are peaks of; the best plan fits, is true, and is the fastest."""
    fixture, changes, budget_mib = _CASES[case]
    recipe: Recipe = request.getfixturevalue(fixture)(*changes)
    budget = int(budget_mib * _MIB)
    known = forecast(recipe, CPU, 2 * budget, budget)
    assert [row.name for row in known.policies] == list(POLICIES)
    assert (known.memory_bytes, known.budget_bytes) == (2 * budget, budget)
    for row in known.policies:
        assert row.step_peak_bytes >= row.peak_bytes >= row.forward_end_bytes
        assert row.forward_end_bytes > known.fixed.weights + known.fixed.inputs
        assert row.step_peak_bytes >= row.peak_bytes + known.fixed.resident
        assert row.fits == (row.step_peak_bytes <= budget)
        assert row.overhead is not None
        assert 0 <= row.overhead < 0.5  # a forward pass is half a step at most
        assert row.overhead == 0 or row.name != "none"
    assert (known.policy("none").fits, known.policy("all").fits) == (False, True)

    best, row = known.best, known.policy("best")
    assert best is not None
    assert row.fits
    assert row.step_peak_bytes <= budget
    assert best.predicted_bytes == pytest.approx(best.traced.peak_bytes, rel=0.005)
    assert row.overhead == best.overhead > 0
    slower = [each.overhead for each in known.policies if each.fits]
    assert best.overhead <= min(each for each in slower if each is not None)
    assert best.overhead_with_another_gib == 0  # in which everything could be kept
    assert sum(best.per_block().values()) == len(best.options)
    assert len({option for option, count in best.per_block().items() if count}) > 1

    assert not known.gradients.unreached
    assert not known.gradients.traps
    assert 0 < known.seconds < 60


def test_what_stays_in_memory_is_what_the_real_parts_take(small_recipe: _Make) -> None:
    """To the byte: weights, trained ones, EMA, both averages of AdamW, codec and text encoder."""
    recipe = small_recipe(*_WAN_LORA, "text.max_words=4")
    known = forecast(recipe, CPU)
    parts = assemble(recipe, ["a red circle moving left"], None)
    trained = [p for p in parts.model.parameters() if p.requires_grad]
    numbers, fixed = sum(p.numel() for p in trained), known.fixed
    assert known.num_parameters == sum(p.numel() for p in parts.model.parameters())
    assert known.num_trainable == numbers
    assert fixed.weights == _size(parts.model)
    assert (fixed.gradients, fixed.ema) == (4 * numbers, 4 * numbers)
    assert fixed.optimizer == 8 * numbers + 4 * len(trained)  # each counts its steps
    encoders = [*parts.codec.modules(), *parts.text.modules()]
    assert fixed.encoders == sum(map(_size, encoders)) > 0
    assert fixed.resident == fixed.optimizer + fixed.ema + fixed.encoders
    latents, prompt = 4 * 3 * 16 * 16, 6 * 16
    assert fixed.inputs == 4 * 4 * (2 * latents + 1 + prompt)  # noise, and a sigma
    assert known.num_tokens == 3 * 8 * 8


def _size(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def test_the_largest_shape_and_one_processs_share_are_planned(tiny_flux: _Make) -> None:
    """Clips of other shapes fit if those with the most tokens do."""
    shapes = [(32, 96), (64, 64), (32, 64)]
    each = ", ".join(f"{{num_frames=1, height={h}, width={w}}}" for h, w in shapes)
    recipe = tiny_flux(f"data.buckets=[{each}]", "training.batch_size=8")
    step = outlined_step(recipe, CPU, world_size=2)
    assert (step.bucket.height, step.bucket.width) == (64, 64)
    assert (step.micro_batch_size, step.num_micro_batches) == (4, 1)
    recipe = tiny_flux("training.batch_size=8", "training.micro_batch_size=2")
    step = outlined_step(recipe, CPU, world_size=2)
    assert (step.micro_batch_size, step.num_micro_batches) == (2, 2)


def test_gradients_of_earlier_micro_batches_are_there(tiny_flux: _Make) -> None:
    """From the second on."""
    whole = outlined_step(tiny_flux(), CPU).tracer.trace({})
    halves = tiny_flux("training.batch_size=4", "training.micro_batch_size=2")
    trace = outlined_step(halves, CPU).tracer.trace({})
    step = outlined_step(halves, CPU)
    gradients = sum(p.nbytes for p in step.parts.model.parameters() if p.requires_grad)
    assert trace.forward_end_bytes == whole.forward_end_bytes + gradients


def test_an_offloaded_optimizer_leaves_the_card(small_recipe: _Make) -> None:
    """Its states are not in the prediction, and an update needs no room for them."""
    card = DEVICES["rtx4090"]
    inside = forecast(small_recipe(), card)
    outside = forecast(small_recipe("optimizer.offload=true"), card)
    assert outside.fixed.optimizer == 0
    assert outside.optimizer.host > 0
    assert inside.fixed.optimizer > 8 * inside.num_trainable
    saved = [
        before.step_peak_bytes - after.step_peak_bytes
        for before, after in zip(inside.policies, outside.policies, strict=True)
    ]
    assert saved == [inside.fixed.optimizer] * len(POLICIES)


def test_what_gets_no_gradient_is_named(small_recipe: _Make, own_module: _Make) -> None:
    """And everything else is not."""
    module = own_module("tokens + self.first(tokens) * prepared['style']")
    gradients = check_gradients(outlined_step(small_recipe(f"trainable.module={module}"), CPU))
    names = ["added_module.second.weight", "added_module.second.bias"]
    assert list(gradients.unreached) == names
    assert set(gradients.reached) == {
        f"added_module.{name}" for name in ("style", "first.weight", "first.bias")
    }
    (trap,) = gradients.traps
    assert (trap.block, trap.stops) == ("added_module.second", True)
    assert all(name in trap.trap for name in names)


def test_notes_do_not_stop(tiny_flux: _Make) -> None:
    """LoRA in fp32 on a bf16 base, and recompute before what is trained, cost memory and time."""
    recipe = tiny_flux("model.dtype=bf16", "trainable.dtype=fp32")
    (note,) = check_gradients(outlined_step(recipe, CPU)).traps
    assert not note.stops
    assert 'Set trainable.dtype = "model"' in note.fix

    last = "trainable.blocks=['single_transformer_blocks.*']"
    recipe = tiny_flux("trainable.kind=frozen", last, "recompute.policy=all")
    notes = forecast(recipe, CPU).gradients.traps
    assert not any(note.stops for note in notes)
    assert notes[0].block == "transformer_blocks.0"
    said = "Recomputing transformer_blocks.0 and transformer_blocks.1 saves 0 bytes"
    assert notes[0].trap.startswith(said)
    assert "single_transformer_blocks.1 saves" in notes[0].fix


def test_a_model_that_asks_for_values_cannot_be_planned(
    small_recipe: _Make, own_module: _Make, tmp_path: Path
) -> None:
    """The message says where it does, and what to do instead."""
    line = "self.change(given) if tokens.mean() > 0 else tokens"
    recipe = small_recipe(f"trainable.module={own_module(line)}")
    with pytest.raises(PlanError) as refused:
        forecast(recipe, CPU)
    assert str(refused.value) == (
        f"The model cannot be planned ({tmp_path}/my_adapter.py, line 21: return {line}): a "
        "tensor's value is asked for. A plan runs the model on tensors that have a shape but no "
        "values, so it can follow no .item() and no `if` on a tensor. Compute with tensors there, "
        "such as by torch.where."
    )


def test_a_model_that_does_not_run_is_refused(
    small_recipe: _Make, own_module: _Make, tmp_path: Path
) -> None:
    """Before there are weights; with the line and torch's reason."""
    recipe = small_recipe(f"trainable.module={own_module('self.first(tokens[..., :3])')}")
    with pytest.raises(PlanError) as refused:
        forecast(recipe, CPU)
    where = f"{tmp_path}/my_adapter.py, line 21: return self.first(tokens[..., :3])"
    assert str(refused.value).startswith(f"The model cannot be run ({where}): ")
    assert "[24, 3] X [48, 48]" in str(refused.value)


def test_a_budget_below_the_weights_is_refused(tiny_flux: _Make) -> None:
    """With what the weights take, what a step takes at least, and what to change."""
    with pytest.raises(PlanError) as refused:
        forecast(tiny_flux(), CPU, None, 7 * _MIB)
    step = outlined_step(tiny_flux(), CPU)
    trace = step.tracer.trace(options_of("all", tuple(step.tracer.subject.blocks)))
    least = memory_of("all", trace, step).step_peak_bytes
    assert str(refused.value) == (
        "The model's weights alone take 0.01 GiB, but the budget for all tensors is 0.01 GiB. "
        f"With every block recomputed this recipe takes {least / 2**30:.2f} GiB: take a card with "
        'more than that, a smaller model, or model.dtype = "bf16".'
    )


def test_planning_leaves_no_trace(small_recipe: _Make) -> None:
    """Random numbers that are drawn after it are those without it, and autograd is on."""
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    forecast(small_recipe(), DEVICES["a6000"])
    torch.testing.assert_close(torch.rand(4), expected, rtol=0, atol=0)
    assert torch.is_grad_enabled()
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    assert torch.nn.functional.rms_norm.__module__ != "longtake.recompute.kernels"

"""What is offered to a recipe that does not fit: changes whose predictions are true."""

from collections.abc import Callable

import pytest

from longtake import config
from longtake.config import Recipe
from longtake.recompute.devices import CPU, DEVICES
from longtake.training.forecast import forecast
from longtake.training.relief import Relief, find_reliefs

_Make = Callable[..., Recipe]
_FEW_WORDS = "text.max_words=24"
_SMALL = "model.config={hidden_size=48, num_heads=2, num_blocks=1}"


def _reliefs(recipe: Recipe, budget: int, device: str = "cpu") -> dict[str, Relief]:
    card = DEVICES.get(device, CPU)
    return {each.what: each for each in find_reliefs(recipe, forecast(recipe, card, None, budget))}


def test_what_a_change_is_said_to_take_it_takes(small_recipe: _Make) -> None:
    """To the byte, in a plan of the changed recipe; and it fits there if it was said to fit."""
    bucket = "data.buckets=[{num_frames=8, height=96, width=128}]"
    recipe, budget = small_recipe(_FEW_WORDS, _SMALL, bucket), 57 * 2**20
    found = _reliefs(recipe, budget, "rtx4090")
    assert set(found) == {
        "micro-batches of 2",
        "8 frames of 96x64",
        "LoRA instead of all weights",
        "weights in bf16",
        "optimizer states in the computer's memory",
        "optimizer states in 8 bits (needs torchao)",
    }
    assert {relief.fits for relief in found.values()} == {True, False}
    for relief in (*list(found.values())[:2], *list(found.values())[-2:]):
        changed = config.changed(recipe, relief.changes)
        row = forecast(changed, DEVICES["rtx4090"], None, budget).policy(relief.policy)
        assert (row.step_peak_bytes, row.fits) == (relief.step_peak_bytes, relief.fits)
    sizes = [relief.step_peak_bytes for relief in found.values()]
    assert sizes == sorted(sizes)


def test_only_what_helps_is_offered(small_recipe: _Make, tiny_flux: _Make) -> None:
    """Clips that are small stay as they are; nothing is halved that is 1, or 8 bits already."""
    small = ("training.batch_size=1", "optimizer.kind=adamw8bit", "trainable.kind=lora")
    recipe = small_recipe(_FEW_WORDS, *small, "trainable.rank=1", "model.dtype=bf16")
    assert _reliefs(recipe, 2**19) == {}
    recipe = tiny_flux("model.dtype=bf16", "optimizer.offload=true")
    assert set(_reliefs(recipe, 5 * 2**20)) == {"micro-batches of 1", "LoRA of rank 8"}


def test_videos_may_be_shorter_and_encoders_cached(small_recipe: _Make) -> None:
    """Frames stay 4 n + 1, as video codecs want them; what cannot be divided is not offered."""
    recipe = small_recipe(
        "data.buckets=[{num_frames=9, height=96, width=128}]",
        "model.family=wan",
        "model.config={num_layers=2, num_attention_heads=2, attention_head_dim=16, ffn_dim=32}",
        "codec.kind=autoencoder",
        "codec.config={base_dim=4, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, "
        "temperal_downsample=[true]}",
        "text.kind=transformers",
        "text.config={d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2}",
        "training.batch_size=1",
    )
    found = _reliefs(recipe, 10 * 2**20)
    assert found["5 frames of 128x96"].changes == [
        "data.buckets=[{num_frames=5, height=96, width=128}]"
    ]
    assert found["cached latents and prompts"].changes == ["data.cache=cache", "data.windows=1"]


@pytest.mark.parametrize(("batch_size", "offered"), [(16, 4), (12, 3), (10, None)])
def test_micro_batches_divide_what_a_process_has(
    small_recipe: _Make, batch_size: int, offered: int | None
) -> None:
    """5 of 10 cannot be halved where two processes share them: 2 would leave one over."""
    recipe = small_recipe(_FEW_WORDS, f"training.batch_size={batch_size}")
    known = forecast(recipe, CPU, None, 2**20, world_size=2)
    found = [each.what for each in find_reliefs(recipe, known, world_size=2)]
    halved = [what for what in found if what.startswith("micro-batches")]
    assert halved == ([] if offered is None else [f"micro-batches of {offered}"])

"""What is offered to a recipe that does not fit: changes whose predictions are true."""

from collections.abc import Callable

from longtake import config
from longtake.config import Recipe
from longtake.planner.devices import CPU, DEVICES, Device
from longtake.training.card import Card
from longtake.training.forecast import forecast
from longtake.training.relief import Relief, find_reliefs

_Make = Callable[..., Recipe]
_FEW_WORDS = "text.max_words=24"
_SMALL = "model.config={hidden_size=48, num_heads=2, num_blocks=1}"


def _card(budget_mib: float, device: Device = CPU) -> Card:
    """All of whose memory is for tensors."""
    return Card(device, int(budget_mib * 2**20), 0.0)


def _reliefs(recipe: Recipe, card: Card) -> dict[str, Relief]:
    return {each.what: each for each in find_reliefs(recipe, forecast(recipe, card))}


def test_what_a_change_is_said_to_take_it_takes(small_recipe: _Make) -> None:
    """To the byte, in a plan of the changed recipe; and it fits there if it was said to fit."""
    bucket = "data.buckets=[{num_frames=8, height=96, width=128}]"
    recipe, card = small_recipe(_FEW_WORDS, _SMALL, bucket), _card(57, DEVICES["rtx4090"])
    found = _reliefs(recipe, card)
    assert set(found) == {
        "micro-batches of 2",
        "8 frames of 96x64",
        "LoRA instead of all weights",
        "weights in bf16",
        "optimizer states in the computer's memory",
        "optimizer states in 8 bits (needs torchao)",
    }
    assert {relief.fits for relief in found.values()} == {True, False}
    for relief in (
        found["micro-batches of 2"],
        found["optimizer states in 8 bits (needs torchao)"],
    ):
        changed = config.changed(recipe, relief.changes)
        row = forecast(changed, card).policy(relief.policy)
        assert (row.step_peak_bytes, row.fits) == (relief.step_peak_bytes, relief.fits)
    sizes = [relief.step_peak_bytes for relief in found.values()]
    assert sizes == sorted(sizes)


def test_only_what_helps_is_offered(small_recipe: _Make) -> None:
    """Small clips stay as they are, and what is 1 or in 8 bits; all together if nothing fits."""
    lora = [_FEW_WORDS, _SMALL, "trainable.kind=lora", "model.dtype=bf16"]
    lora.append("optimizer.kind=adamw8bit")
    least = small_recipe(*lora, "trainable.rank=1", "training.batch_size=1")
    assert _reliefs(least, _card(0.5)) == {}
    found = _reliefs(small_recipe(*lora), _card(0.5))
    assert list(found) == ["micro-batches of 2", "LoRA of rank 8", "all of these together"]
    *alone, together = found.values()
    assert not any(relief.fits for relief in alone)
    assert together.changes == [change for relief in alone for change in relief.changes]
    assert together.step_peak_bytes < alone[0].step_peak_bytes


def test_videos_may_be_shorter_and_encoders_cached(small_recipe: _Make) -> None:
    """Frames stay 4 n + 1, as video codecs want them; what cannot be divided is not offered."""
    recipe = small_recipe(
        "data.buckets=[{num_frames=9, height=96, width=128}]",
        "model.family=wan",
        "model.config={num_layers=1, num_attention_heads=2, attention_head_dim=16, ffn_dim=32}",
        "codec.kind=autoencoder",
        "codec.config={base_dim=4, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, "
        "temperal_downsample=[true]}",
        "text.kind=transformers",
        "text.config={d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2}",
        "training.batch_size=1",
    )
    found = _reliefs(recipe, _card(10))
    assert found["5 frames of 128x96"].changes == [
        "data.buckets=[{num_frames=5, height=96, width=128}]"
    ]
    assert found["cached latents and prompts"].changes == ["data.cache=cache", "data.windows=1"]


def test_micro_batches_divide_what_a_process_has(small_recipe: _Make) -> None:
    """Each of two processes has 5 of 10: micro-batches of 2 would leave one over."""
    recipe = small_recipe(_FEW_WORDS, _SMALL, "training.batch_size=10")
    known = forecast(recipe, _card(2), world_size=2)
    assert known.step.micro_batch_size == 5
    found = [each.what for each in find_reliefs(recipe, known, world_size=2)]
    assert "LoRA instead of all weights" in found
    assert not any("micro-batches" in what for what in found)

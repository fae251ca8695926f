"""What encoding, sampling and decoding take is planned part by part."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from longtake import config
from longtake.config import Recipe
from longtake.models.build import assemble
from longtake.planner.activation_checkpointing import options_of
from longtake.planner.devices import CPU, device_named
from longtake.training import phases
from longtake.training.card import Card, card_of
from longtake.training.outlined import outlined_step
from longtake.training.phases import Phase, phases_of
from longtake.training.resident import memory_of

_ROOT = Path(__file__).resolve().parents[2]
_WAN = (
    "data.buckets=[{num_frames=29, height=32, width=32}]",
    "data.catalog=none.parquet",
    "model.family=wan",
    "model.config={num_layers=2, num_attention_heads=2, attention_head_dim=12, ffn_dim=16}",
    "codec.kind=autoencoder",
    "codec.config={base_dim=4, z_dim=4, dim_mult=[1, 1, 1], num_res_blocks=1, "
    "temperal_downsample=[true, true]}",
    "text.kind=transformers",
    "text.config={d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2}",
    "text.max_words=16",
)


def _planned(recipe: Recipe) -> dict[str, Phase]:
    card = Card(CPU, None, 0.07)
    return {phase.name: phase for phase in phases_of(outlined_step(recipe, CPU), card)}


def test_each_part_counts_its_own_weights(small_recipe: Callable[..., Recipe]) -> None:
    """Encoders in the step count beside all that training holds; with a cache they do not."""
    recipe = small_recipe(*_WAN)
    found = _planned(recipe)
    assert list(found) == ["text", "encode", "step", "model", "decode"]
    parts = assemble(recipe, ["a b c d e f g h i j k l m n o p"], None)
    weights = parts.part_bytes()
    assert found["text"].weight_bytes == weights["text"]
    assert found["model"].weight_bytes == weights["model"]
    assert found["encode"].weight_bytes == found["decode"].weight_bytes == weights["codec"]
    assert found["step"].weight_bytes > sum(weights.values())  # averages and the optimizer too
    assert all(phase.peak_bytes > phase.weight_bytes for phase in found.values())
    cached = _planned(small_recipe(*_WAN, "data.cache=cache", "data.windows=1"))
    assert list(cached) == ["text", "encode", "model", "decode"]
    in_bf16 = _planned(small_recipe(*_WAN, "text.dtype=bf16", "codec.dtype=bf16"))
    for name in ("text", "encode", "decode"):
        assert in_bf16[name].weight_bytes == found[name].weight_bytes // 2
        assert in_bf16[name].peak_bytes < found[name].peak_bytes


def test_long_clips_follow_from_a_few_of_their_frames(
    small_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a trace of all of them."""
    recipe = small_recipe(*_WAN)
    short = _planned(recipe)
    monkeypatch.setattr(phases, "_MORE_FRAMES", 1000)
    whole = _planned(recipe)
    for name in ("encode", "decode"):
        assert short[name].peak_bytes == pytest.approx(whole[name].peak_bytes, rel=0.02)
        assert short[name].seconds == pytest.approx(whole[name].seconds, rel=0.02)


@pytest.mark.slow
def test_the_24_gb_example_fits_in_every_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """Filling the cache, training and sampling: text encoder, model and codec one after another."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recipe = config.load(
        _ROOT / "examples" / "wan_1_3b_lora_24gb.toml", ['recompute.memory="24GB"']
    )
    card = card_of(recipe)
    step = outlined_step(recipe, device_named("rtx4090"))
    found = phases_of(step, card)
    assert [phase.name for phase in found] == ["text", "encode", "model", "decode"]
    assert all(phase.fits for phase in found)
    trace = step.tracer.trace(options_of("all", tuple(step.tracer.subject.blocks)))
    trained = memory_of("all", trace, step, budget_bytes=card.budget_bytes)
    assert trained.fits

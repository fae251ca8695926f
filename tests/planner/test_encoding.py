"""What encoders take one micro-batch ahead of the model, and when a plan has them work so."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.build import TINY_WAN

from longtake.config import Recipe
from longtake.planner.devices import CPU
from longtake.planner.forecast import Forecast, encoding_ahead, forecast, forecast_phases
from longtake.planner.memory import outline_step

_WAN = (*TINY_WAN, "data.buckets=[{num_frames=13, height=64, width=64}]")


def _known(recipe: Recipe, memory_bytes: int) -> Forecast:
    return forecast(recipe, replace(CPU, target="cuda", memory_bytes=memory_bytes))


@pytest.mark.usefixtures("few_words")
def test_encoders_work_ahead_where_there_is_room(small_recipe: Callable[..., Recipe]) -> None:
    """By `auto` only where nothing has to be recomputed for it; by true the plan makes room."""
    found = {mode: small_recipe(*_WAN, f"training.encode_ahead={mode}") for mode in
             ("auto", "true", "false")}  # fmt: skip
    ample = _known(found["auto"], 2**30)
    ahead = encoding_ahead(ample.step, ample.best_policy)
    assert ahead is not None
    assert ahead.is_chosen
    assert ample.best_policy is not None
    assert ahead.num_bytes is not None
    (working,) = (
        each.peak_bytes - each.weight_bytes
        for each in forecast_phases(ample.step)
        if each.name == "encode"
    )
    batch = ample.step.batch.micro_batch_size
    assert ahead.num_bytes > working + batch * 3 * 13 * 64 * 64  # latents and embeddings, too

    tight = ample.best_policy.step_peak_bytes + ahead.num_bytes - 1
    short = _known(found["auto"], tight)
    assert short.best_policy == ample.best_policy
    in_line = encoding_ahead(short.step, short.best_policy)
    assert in_line == replace(ahead, is_chosen=False)

    wanted = _known(found["true"], tight)
    assert encoding_ahead(wanted.step, wanted.best_policy) == ahead
    assert wanted.static.resident == short.static.resident + ahead.num_bytes
    assert wanted.best_policy is not None
    assert wanted.best is not None
    assert wanted.best_policy.step_peak_bytes <= tight
    assert any(each.activations != "keep" for each in wanted.best.options.values())

    off = outline_step(found["false"], ample.device)
    assert encoding_ahead(off, ample.best_policy) is None
    on_cpu = outline_step(found["true"], CPU)
    assert encoding_ahead(on_cpu, None) is None
    assert on_cpu.encoding_bytes == 0

"""Memory of encoders that work one micro-batch ahead, and the plans that let them."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.build import TINY_WAN, not_none

from longtake.config import Recipe
from longtake.planner.devices import CPU
from longtake.planner.forecast import Forecast, encoding_ahead, forecast, forecast_phases
from longtake.planner.memory import outline_step

_WAN = (*TINY_WAN, "data.buckets=[{num_frames=13, height=64, width=64}]")


def _known(recipe: Recipe, memory_bytes: int) -> Forecast:
    return forecast(recipe, replace(CPU, target="cuda", memory_bytes=memory_bytes))


@pytest.mark.usefixtures("few_words")
def test_encoders_work_ahead_where_there_is_room(small_recipe: Callable[..., Recipe]) -> None:
    """`auto` recomputes nothing for it; for `true` the plan makes room."""
    found = {mode: small_recipe(*_WAN, f"training.encode_ahead={mode}") for mode in
             ("auto", "true", "false")}  # fmt: skip
    ample = _known(found["auto"], 2**30)
    ahead = not_none(encoding_ahead(ample.step, ample.best_policy))
    assert ahead.is_chosen
    num_bytes, best = not_none(ahead.num_bytes), not_none(ample.best_policy)
    (working,) = (
        each.peak_bytes - each.weight_bytes
        for each in forecast_phases(ample.step)
        if each.name == "encode"
    )
    batch = ample.step.batch.micro_batch_size
    assert num_bytes > working + batch * 3 * 13 * 64 * 64  # latents and embeddings, too

    tight = best.step_peak_bytes + num_bytes - 1
    short = _known(found["auto"], tight)
    assert short.best_policy == ample.best_policy
    in_line = encoding_ahead(short.step, short.best_policy)
    assert in_line == replace(ahead, is_chosen=False)

    wanted = _known(found["true"], tight)
    assert encoding_ahead(wanted.step, wanted.best_policy) == ahead
    assert wanted.static.resident == short.static.resident + num_bytes
    assert not_none(wanted.best_policy).step_peak_bytes <= tight
    options = not_none(wanted.best).options.values()
    assert any(each.activations != "keep" for each in options)

    off = outline_step(found["false"], ample.device)
    assert encoding_ahead(off, ample.best_policy) is None
    on_cpu = outline_step(found["true"], CPU)
    assert encoding_ahead(on_cpu, None) is None
    assert on_cpu.encoding_bytes == 0

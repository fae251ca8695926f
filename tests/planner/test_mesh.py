"""Plans of a mesh: links, communication that hides behind compute, and advice."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.build import not_none

from longtake import config
from longtake.config import Recipe
from longtake.data.batch import num_places
from longtake.errors import RecipeError
from longtake.planner.devices import CPU, DEVICES
from longtake.planner.forecast import forecast
from longtake.planner.memory import outline_step
from longtake.planner.mesh import (
    SHARE_OF_LINK,
    BlockTiming,
    Links,
    MeshForecast,
    StepTimeline,
    idle_share,
    links_named,
    links_of,
    mesh_forecast,
    without_advice,
)

_Make = Callable[..., Recipe]
_H100 = DEVICES["h100"]
_SHARED = Links(400e9, 50e9)
_NOTHING = BlockTiming(0.0, 0.0, 0.0, 0.0, 0.0)


def _line(turn: BlockTiming, num_blocks: int = 10, num_micro_batches: int = 1) -> StepTimeline:
    rest = replace(_NOTHING, gather=turn.gather, scatter=turn.scatter, reduce=turn.reduce)
    return StepTimeline([turn] * num_blocks, rest, num_micro_batches, waits=0.0)


def test_links_are_those_of_the_device_or_given() -> None:
    assert links_of(DEVICES["h200"]) == Links(450e9, 50e9)
    assert links_of(replace(DEVICES["h100"], name="NVIDIA H100 80GB HBM3")).node == 450e9
    assert links_of(DEVICES["a6000"]).node < 32e9
    assert links_named("300,12.5", DEVICES["a6000"]) == Links(300e9, 12.5e9)
    assert links_named("300", DEVICES["h100"]) == Links(300e9, 50e9)
    for wrong in ("", "fast", "1,2,3", "0", "450,-1", "inf"):
        with pytest.raises(RecipeError, match=r"GB/s that one GPU sends .* such as 450,50"):
            links_named(wrong, CPU)


def test_gpus_of_a_node_bear_together_what_leaves_it() -> None:
    assert _SHARED.bandwidth(8, 8) == SHARE_OF_LINK * 400e9
    assert _SHARED.bandwidth(64, 8) == SHARE_OF_LINK * 400e9
    assert _SHARED.bandwidth(16, 4) == SHARE_OF_LINK * 200e9
    assert _SHARED.bandwidth(24, 1) == SHARE_OF_LINK * 50e9


def test_what_is_shorter_than_a_block_hides_behind_it() -> None:
    line = _line(BlockTiming(forward=1.0, backward=2.0, gather=0.4, scatter=0.5, reduce=0.1))
    assert line.compute_seconds() == pytest.approx(30)
    # The rest's and the first block's, before anything can begin; the last block's, between the
    # passes; at the end the first block's and the rest's reductions.
    assert line.seconds() == pytest.approx(30 + 3 * 0.4 + 2 * 0.5 + 0.1)
    assert line.without("gather", "scatter", "reduce").seconds() == pytest.approx(30)


def test_what_is_longer_than_a_block_sets_the_pace() -> None:
    line = _line(BlockTiming(forward=1.0, backward=2.0, gather=3.0, scatter=4.0, reduce=0.0))
    link = (10 + 1) * 3.0 + 10 * (3.0 + 4.0)
    assert link < line.seconds() < link + 4.0 + 3 * 2.0
    fast = line.without("scatter").seconds()
    assert fast < line.seconds() - 9 * 3.0


def test_only_the_last_micro_batch_reduces() -> None:
    turn = BlockTiming(forward=1.0, backward=1.0, gather=2.0, scatter=1.0, reduce=5.0)
    one, four = _line(turn).seconds(), _line(turn, num_micro_batches=4).seconds()
    gathering = _line(turn).without("scatter", "reduce").seconds()
    assert gathering < one
    assert four == pytest.approx(3 * gathering + one)
    waiting = replace(_line(turn, num_micro_batches=4), waits=0.5)
    assert waiting.seconds() == pytest.approx(four + 4 * 0.5)


def _planned(recipe: Recipe, links: Links, world_size: int, per_node: int) -> MeshForecast:
    known = forecast(recipe, _H100, world_size=world_size, per_node=per_node)
    return not_none(mesh_forecast(known, links))


def test_what_would_help_is_what_comes_of_it(small_recipe: _Make) -> None:
    few = ("model.config={hidden_size=48, num_blocks=2}",)
    sharded = (
        "parallel.strategy=shard",
        "training.global_batch_size=24",
        "training.precision=bf16",
    )
    recipe = small_recipe(*few, *sharded, "training.micro_batch_size=1")
    slow = Links(1e9, 0.1e9)
    found = _planned(recipe, slow, 8, 4)
    assert found.exposed_share > 0.5
    assert {tuple(each.changes) for each in found.advice} == {
        ("parallel.strategy=hybrid",),
        ("parallel.param_dtype=bf16",),
        ("parallel.strategy=hybrid", "parallel.param_dtype=bf16"),
        ("training.micro_batch_size=2",),
    }
    seconds = [each.step_seconds for each in found.advice]
    assert seconds == sorted(seconds)
    assert seconds[-1] < found.step_seconds
    best = found.advice[0]
    again = _planned(config.changed(recipe, best.changes), slow, 8, 4)
    assert again.step_seconds == pytest.approx(best.step_seconds)
    assert (again.num_shards, again.num_copies) == (4, 2)
    rows = {row.what: row for row in again.sent}
    assert {what: (row.ranks, row.over) for what, row in rows.items()} == {
        "weights": (4, "node"),
        "gradients to shards": (4, "node"),
        "gradients": (2, "network"),
    }
    assert again.num_bytes == sum(row.num_bytes for row in rows.values())
    endless = Links(1e18, 1e18)
    hidden = _planned(recipe, endless, 8, 4)
    assert (hidden.advice, hidden.num_bytes) == ((), found.num_bytes)
    assert hidden.step_seconds == pytest.approx(hidden.compute_seconds, rel=1e-3)
    assert mesh_forecast(forecast(recipe, _H100), slow) is None  # one process is alone


def test_ranks_that_share_tokens_hold_a_part_of_the_activations(small_recipe: _Make) -> None:
    recipe = small_recipe("model.config={hidden_size=48, num_heads=4}")
    shared = config.changed(recipe, ["parallel.context=2"])
    whole, half = outline_step(recipe, CPU), outline_step(shared, CPU, 2)
    assert whole.batch.micro_batch_size == half.batch.micro_batch_size
    traces = [step.tracer.trace({}) for step in (whole, half)]
    kept = [trace.forward_end_bytes - trace.weight_bytes for trace in traces]
    assert 0.45 < kept[1] / kept[0] < 0.75
    assert (traces[0].sent_bytes, traces[1].sent_bytes > 0) == (0, True)
    assert traces[1].seconds < 0.8 * traces[0].seconds


def test_a_ring_hides_behind_attention(small_recipe: _Make) -> None:
    recipe = small_recipe("model.config={hidden_size=48, num_heads=3}", "parallel.context=4")
    for per_node, over in ((4, "node"), (2, "network")):
        step = outline_step(recipe, _H100, 8, per_node)
        trace = step.tracer.trace({})
        beside = trace.attention_seconds * 3 / 4  # of four blocks, all but the last
        for bandwidth, exposes in ((1e15, False), (1e6, True)):
            sent = without_advice(step, trace, Links(bandwidth, bandwidth)).sent
            row = next(each for each in sent if each.what == "keys and values")
            assert (row.ranks, row.over, row.num_bytes) == (4, over, trace.ring_bytes)
            exposed = row.seconds - beside if exposes else 0.0
            assert row.exposed_seconds == pytest.approx(exposed, abs=1e-12)


@given(batch=st.integers(1, 512), ranks=st.integers(1, 64))
def test_the_idle_share_is_that_of_empty_places(batch: int, ranks: int) -> None:
    assert num_places(batch, ranks) * ranks >= batch
    assert (num_places(batch, ranks) - 1) * ranks < batch
    assert idle_share(batch, ranks) == pytest.approx(1 - batch / (num_places(batch, ranks) * ranks))

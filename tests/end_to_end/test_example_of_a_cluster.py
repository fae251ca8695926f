"""The example of a run on 24 nodes: a recipe of the size that it says, planned without weights."""

from pathlib import Path

import pytest

from longtake import config
from longtake.models.build import outline
from longtake.planner.devices import device_named
from longtake.planner.memory import outline_step

_ROOT = Path(__file__).resolve().parents[2]
_EXAMPLE = _ROOT / "examples" / "video_1_1b_192_h100.toml"


def test_it_has_the_size_that_it_says() -> None:
    """1.0 to 1.2 billion parameters, from scratch, all of them trained."""
    recipe = config.load(_EXAMPLE)
    assert recipe.model.pretrained is None
    parameters = list(outline(recipe).model.parameters())
    assert 1.0e9 < sum(parameter.numel() for parameter in parameters) < 1.2e9
    assert all(parameter.requires_grad for parameter in parameters)


def test_its_stages_grow() -> None:
    data = config.load(_EXAMPLE).data
    buckets = [stage.buckets or data.buckets for stage in data.stages]
    sizes = [max(shape.height * shape.width for shape in shapes) for shapes in buckets]
    assert sizes == sorted(set(sizes))
    assert len(sizes) == 3
    assert data.stages[0].where == ("nouns <= q70",)
    for shape in data.shapes():
        assert (shape.num_frames % 4, shape.height % 16, shape.width % 16) == (1, 0, 0)


def test_its_ranks_share_model_and_batch_as_it_says() -> None:
    """A copy of the model on each node of 8; two clips a card, all places taken."""
    step = outline_step(config.load(_EXAMPLE), device_named("h100"), 192, 8)
    assert (step.num_shards, step.num_copies) == (8, 24)
    assert (step.micro_batch_size, step.num_micro_batches) == (2, 1)
    assert (step.bucket.num_frames, step.bucket.height) == (101, 720)


@pytest.mark.parametrize("preset", ["low4s", "high4s"])
def test_its_presets_fit_its_codec(preset: str) -> None:
    """They are what comes along, but for frames and rows that do not divide."""
    changed = config.load(_EXAMPLE).evaluation.presets[preset]
    assert changed.num_frames == 101
    assert (changed.height or 720) % 16 == 0


def test_its_plan_is_of_this_recipe() -> None:
    plan = _EXAMPLE.with_suffix(".plan.txt").read_text()
    assert f"longtake plan examples/{_EXAMPLE.name} --processes 192 --per-node 8" in plan
    assert "1.14 B parameters, of which 1.14 B train (100.00%)" in plan
    assert "192 processes on 24 nodes: 24 copies of the model, each held by 8 together." in plan
    assert "Gradient reaches 663 of 663 trainable parameters." in plan

"""Batch sizes follow from tokens; ranks without a clip are refused."""

import pytest
from tests.build import TINY_WAN, MakeRecipe

from longtake.errors import RecipeError
from longtake.planner.batch_sizes import bucket_tokens, refuse_idle_ranks, with_batch_sizes


def test_more_ranks_than_clips_are_refused(small_recipe: MakeRecipe) -> None:
    recipe = small_recipe("training.global_batch_size=4")
    refuse_idle_ranks(recipe, 4)
    with pytest.raises(RecipeError, match=r"batch_size 4 cannot be shared by 5 .*parallel.contex"):
        refuse_idle_ranks(recipe, 5)
    stages = 'data.stages=[{name="a", steps=2}, {name="few", global_batch_size=3}]'
    with pytest.raises(RecipeError, match="stage few, 3 cannot be shared by 4"):
        refuse_idle_ranks(small_recipe("training.global_batch_size=4", stages), 4)
    shape = "data.buckets=[{num_frames=8, height=32, width=32, batch_size=3}]"
    with pytest.raises(RecipeError, match="bucket of 8 frames of 32x32, 3 cannot be shared by 4"):
        refuse_idle_ranks(small_recipe(shape), 4)


def test_buckets_have_as_many_clips_as_have_so_many_tokens(small_recipe: MakeRecipe) -> None:
    """At least one clip each; buckets that name their batch size keep it."""
    shapes = (
        "{num_frames=1, height=32, width=32}, {num_frames=5, height=32, width=32}, "
        "{num_frames=5, height=64, width=64}, {num_frames=5, height=32, width=64, batch_size=3}"
    )
    stages = f'data.stages=[{{name="a", steps=2, buckets=[{shapes}]}}, {{name="b"}}]'
    recipe = small_recipe(*TINY_WAN, stages, "data.tokens_per_batch=2000")
    filled = with_batch_sizes(recipe)
    tokens = bucket_tokens(recipe)
    first, *_ = filled.data.stages
    assert first.buckets is not None
    for before, after in zip(tokens, first.buckets, strict=True):
        expected = before.batch_size or max(1, 2000 // tokens[before])
        assert (after.batch_size, str(after)) == (expected, str(before))
    sizes = [shape.batch_size or 0 for shape in first.buckets]
    assert sizes[0] > sizes[1] > sizes[2] > 0
    assert filled.data.buckets[0].batch_size == sizes[1]
    assert with_batch_sizes(filled) == filled
    unset = small_recipe(*TINY_WAN, stages)
    assert with_batch_sizes(unset) is unset

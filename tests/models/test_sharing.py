"""Models whose tokens ranks cannot share are refused before the run."""

from collections.abc import Callable

import pytest

from longtake.config import Recipe
from longtake.errors import RecipeError
from longtake.models.build import outline, refuse_sharing

_HEADS = "model.config={hidden_size=48, num_blocks=1, num_heads=4}"


def test_heads_that_divide_are_taken(small_recipe: Callable[..., Recipe]) -> None:
    """Four heads for two and for four."""
    for size in (1, 2, 4):
        recipe = small_recipe(_HEADS, f"parallel.sequence={size}")
        refuse_sharing(outline(recipe), recipe)


def test_heads_that_do_not_divide_are_refused(small_recipe: Callable[..., Recipe]) -> None:
    """The message has what would do."""
    recipe = small_recipe(_HEADS, "parallel.sequence=3")
    with pytest.raises(RecipeError, match=r"3 does not divide the model's 4 heads.* 1, 2, 4\."):
        refuse_sharing(outline(recipe), recipe)


def test_an_added_module_is_refused(
    small_recipe: Callable[..., Recipe], own_module: Callable[[str], str]
) -> None:
    """It would see a part of the tokens and take it for all."""
    module = own_module("tokens")
    recipe = small_recipe(_HEADS, "parallel.sequence=2", f"trainable.module={module}")
    with pytest.raises(RecipeError, match=r"my_adapter:Adapter reads all tokens"):
        refuse_sharing(outline(recipe), recipe)


def test_more_ranks_than_tokens_are_refused(small_recipe: Callable[..., Recipe]) -> None:
    """Some would have nothing to do."""
    one_tube = "data.buckets=[{num_frames=8, height=4, width=4}]"
    recipe = small_recipe(_HEADS, "parallel.sequence=2", one_tube)
    with pytest.raises(RecipeError, match=r"has only 1\. Take fewer processes"):
        refuse_sharing(outline(recipe), recipe)

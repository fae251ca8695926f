"""Captions longer than text.max_tokens are reported when a run starts."""

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from longtake.config import Recipe
from longtake.fsio import read_json_lines
from longtake.run_dir import RunDirectory
from longtake.training.run import train


@pytest.mark.parametrize("max_tokens", [3, 8])
def test_truncated_captions_are_reported_at_the_start(
    max_tokens: int, small_recipe: Callable[..., Recipe]
) -> None:
    """In a warning and an event with the counts; nothing is said if all fit."""
    recipe = small_recipe(f"text.max_tokens={max_tokens}", "training.steps=1")
    said = io.StringIO()
    train(recipe, Console(file=said, width=500))
    events = list(read_json_lines(RunDirectory(recipe.out).events_path))
    found = [each for each in events if each["event"] == "captions_truncated"]
    assert ("captions are truncated" in said.getvalue()) == bool(found) == (max_tokens == 3)
    if found:
        assert found[0]["num_truncated"] == found[0]["num_counted"] > 0
        assert events[0]["event"] == "launched"

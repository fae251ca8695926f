"""What a launch is asked for is understood, or refused before anything starts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from longtake import config
from longtake.config import Recipe
from longtake.errors import LongtakeError
from longtake.launch.order import count_processes, parse_endpoint, parse_nodes, read_recipe


@pytest.mark.parametrize(("text", "nodes"), [("1", (1, 1)), ("24", (24, 24)), ("2:4", (2, 4))])
def test_nodes_are_a_number_or_a_span(text: str, nodes: tuple[int, int]) -> None:
    """As torchrun takes them."""
    assert parse_nodes(text) == nodes


@pytest.mark.parametrize("text", ["0", "4:2", "two", "", "2:", "-1"])
def test_other_numbers_of_nodes_are_refused(text: str) -> None:
    """The message shows what was expected."""
    with pytest.raises(LongtakeError, match="2:4"):
        parse_nodes(text)


def test_a_place_to_meet_has_a_port() -> None:
    """It may be left out; a node that is alone needs none."""
    assert parse_endpoint("node1", (2, 2)) == "node1:29400"
    assert parse_endpoint("node1:2000", (2, 2)) == "node1:2000"
    assert parse_endpoint(None, (1, 1)) == ""


@pytest.mark.parametrize("text", [None, "node1:", ":29400", "node1:high", "node1:70000"])
def test_nodes_that_could_not_meet_are_refused(text: str | None) -> None:
    """Before any of them waits for the others."""
    with pytest.raises(LongtakeError, match="HOST:PORT"):
        parse_endpoint(text, (2, 2))


@pytest.mark.parametrize("text", ["0", "all", "-2"])
def test_other_numbers_of_processes_are_refused(text: str) -> None:
    """None, or no number."""
    with pytest.raises(LongtakeError, match="auto"):
        count_processes(text)


def test_a_fresh_run_gets_its_folder_before_its_ranks_start(
    small_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    """So that a restart goes on in it, rather than begin another one."""
    recipe, path = small_recipe(), tmp_path / "recipe.toml"
    path.write_text(config.dump(recipe))
    recipe.out.mkdir()
    (recipe.out / "metrics.jsonl").touch()
    read, given = read_recipe(path, ("seed=3",), fresh=True, is_alone=True)
    assert read.out == tmp_path / "run-2"
    assert given == ("seed=3", f"out={tmp_path / 'run-2'}")
    with pytest.raises(LongtakeError, match="--set out="):
        read_recipe(path, (), fresh=True, is_alone=False)

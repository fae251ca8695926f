"""Options of a launch are understood, or refused before anything starts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from longtake import config
from longtake.cluster.options import (
    LaunchOptions,
    load_for_all_ranks,
    parse_endpoint,
    parse_nodes,
    parse_processes,
)
from longtake.config import Recipe
from longtake.errors import LongtakeError


@pytest.mark.parametrize(("text", "nodes"), [("1", (1, 1)), ("24", (24, 24)), ("2:4", (2, 4))])
def test_nodes_are_a_number_or_a_span(text: str, nodes: tuple[int, int]) -> None:
    assert parse_nodes(text) == nodes


@pytest.mark.parametrize("text", ["0", "4:2", "two", "", "2:", "-1"])
def test_other_numbers_of_nodes_are_refused(text: str) -> None:
    with pytest.raises(LongtakeError, match="2:4"):
        parse_nodes(text)


def test_an_endpoint_has_a_port() -> None:
    """The default's if it has none; a single node needs no endpoint."""
    assert parse_endpoint("node1", (2, 2)) == "node1:29400"
    assert parse_endpoint("node1:2000", (2, 2)) == "node1:2000"
    assert parse_endpoint(None, (1, 1)) == ""


@pytest.mark.parametrize("text", [None, "node1:", ":29400", "node1:high", "node1:70000"])
def test_nodes_that_could_not_meet_are_refused(text: str | None) -> None:
    with pytest.raises(LongtakeError, match="HOST:PORT"):
        parse_endpoint(text, (2, 2))


def test_processes_are_a_number_or_auto() -> None:
    assert [parse_processes(text) for text in ("8", "auto")] == ["8", "auto"]
    for text in ("auto; touch x", "all", "0", "-1", "٣", "9" * 5000):
        with pytest.raises(LongtakeError, match="expected a number of processes, or auto"):
            parse_processes(text)


def test_a_run_from_scratch_gets_its_folder_before_its_ranks_start(
    small_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    """A restart then resumes in it, and does not begin another one."""
    recipe, path = small_recipe(), tmp_path / "recipe.toml"
    path.write_text(config.dump(recipe))
    recipe.out.mkdir()
    (recipe.out / "metrics.jsonl").touch()
    read, given = load_for_all_ranks(path, ("seed=3",), fresh=True, is_alone=True)
    assert read.out == tmp_path / "run-2"
    assert given == ("seed=3", f"out={tmp_path / 'run-2'}")
    with pytest.raises(LongtakeError, match="--set out="):
        load_for_all_ranks(path, (), fresh=True, is_alone=False)


def test_ranks_train_with_the_options_of_the_launch(small_recipe: Callable[..., Recipe]) -> None:
    launched = LaunchOptions(
        Path("r.toml"), ("seed=3",), small_recipe(), trust=True, begin_from="a@8", weights_only=True
    )
    options = ["--from", "a@8", "--weights-only", "--trust"]
    assert launched.train_arguments == ["train", "r.toml", "--set", "seed=3", *options]

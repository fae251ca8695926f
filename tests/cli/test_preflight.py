"""The verb `preflight`, on this machine alone."""

import json
from pathlib import Path

import pytest
from tests.build import change_options
from tests.cli.conftest import Call, Refuse


def test_alone_with_a_recipe(call: Call, place: Path, tmp_path: Path) -> None:
    recipe, out = place / "recipe.toml", tmp_path / "new" / "run"
    status, stdout, _ = call("preflight", recipe, "--set", f"out={out}", "--json")
    told = json.loads(stdout)
    assert status == told["exit_status"]
    assert not [each for each in told["findings"] if each["severity"] == "error"], told["findings"]
    skipped = {each["why"] for each in told["skipped"]}
    assert "one node" in skipped
    measured = {each["name"] for each in told["measures"]}
    assert {"free for run directory", "fsync of the run directory"} <= measured
    assert not out.parent.exists(), "folders that it made are gone again"


def test_a_table_of_it(call: Call) -> None:
    status, stdout, _ = call("preflight")
    assert status in (0, 1)
    assert max(map(len, stdout.splitlines())) <= 80
    assert stdout.splitlines()[-1].startswith(("Ready", "It will run"))


def test_a_catalog_that_is_gone_and_a_run_directory_that_cannot_be_made(
    call: Call, place: Path, tmp_path: Path
) -> None:
    gone, out = f"data.catalog={tmp_path / 'gone.parquet'}", f"out={place / 'file' / 'run'}"
    arguments = ("preflight", place / "recipe.toml", *change_options(gone, out))
    status, stdout, _ = call(*arguments, "--json")
    findings = json.loads(stdout)["findings"]
    errors = {each["check"]: each["what"] for each in findings if each["severity"] == "error"}
    assert (status, set(errors)) == (1, {"dataset", "run directory"})
    assert "gone.parquet" in errors["dataset"]
    assert "Not a directory" in errors["run directory"]
    status, stdout, _ = call(*arguments)
    assert status == 1
    assert stdout.splitlines()[-1].startswith("Not ready: 2 errors")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.toml"], "There is no recipe nowhere.toml"),
        (["--nodes", "a,a"], "each once"),
        (["--nodes", " , "], "names of nodes"),
    ],
)
def test_mistakes_are_one_message(refuse: Refuse, arguments: list[str], said: str) -> None:
    assert said in refuse("preflight", *arguments)

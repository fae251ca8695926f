"""The verb `evaluate`: what it refuses before it serves, and what it says when nothing is due."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bare(place: Path, tmp_path: Path) -> Path:
    """A run that has no checkpoint."""
    (tmp_path / "runs" / "bare").mkdir(parents=True)
    recipe = (place / "run" / "recipe.toml").read_text().replace("tensorboard = true", "")
    (tmp_path / "runs" / "bare" / "recipe.toml").write_text(recipe)
    return tmp_path / "runs" / "bare"


@pytest.fixture(autouse=True)
def no_lower_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's process leaves the cores to others; this one has further tests to run."""
    monkeypatch.setattr("longtake.evaluation.server._lower_priority", lambda device: None)


def test_what_is_no_run_is_an_error(tmp_path: Path, bare: Path, call: Call) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    code, out, err = call("evaluate", bare, empty)
    assert (code, out) == (2, "")
    said = f"{empty} holds no run: expected a folder with recipe.toml, or a folder of such; "
    assert said in err
    code, _, err = call("evaluate", bare / "recipe.toml")
    assert code == 2
    assert "is not a folder" in err


def test_an_unknown_preset_is_an_error(tmp_path: Path, bare: Path, call: Call) -> None:
    with (bare / "recipe.toml").open("a") as recipe:
        recipe.write('[evaluation.presets.mine]\nprompts = ["a red square"]\n')
    code, out, err = call("evaluate", bare.parent, "--preset", "mine", "--preset", "nosuch")
    assert (code, out) == (2, "")
    assert "There is no preset nosuch. " in err
    assert "low4s, mine." in err


def test_an_own_file_that_is_wrong_is_an_error(tmp_path: Path, bare: Path, call: Call) -> None:
    own = tmp_path / "own.toml"
    own.write_text("[mine]\npromts = []\n")
    code, _, err = call("evaluate", bare, "--presets", own)
    assert code == 2
    assert "mine.promts is not a key of a preset; did you mean prompts?" in err


def test_a_source_without_runs_is_an_error(tmp_path: Path, call: Call) -> None:
    """What there is none of is told of at its place, not at the mirror's."""
    source = tmp_path / "source"
    source.mkdir()
    options = ("--source", source, "--preset", "demo", "--device", "cpu")
    code, out, err = call("evaluate", tmp_path / "mirror", *options)
    assert (code, out) == (2, "")
    assert f"{source} holds no run: " in err


def test_nothing_due_is_said_where_there_is_a_run(bare: Path, call: Call) -> None:
    code, _, err = call("evaluate", bare, "--preset", "demo", "--device", "cpu")
    assert code == 0
    assert "Nothing is due: each checkpoint that is wanted has been evaluated, is " in err


def test_what_failed_is_not_called_done(place: Path, tmp_path: Path, call: Call) -> None:
    run = tmp_path / "run"
    shutil.copytree(place / "run", run)
    own = tmp_path / "own.toml"
    own.write_text('[odd]\nheight = 36\nwidth = 36\nprompts = ["a red square"]\n')
    code, _, err = call("evaluate", run, "--presets", own, "--device", "cpu")
    assert code == 1
    assert "odd of step 2 failed: " in err
    assert "Nothing is due" not in err


def test_another_recipe_says_what_is_evaluated(place: Path, tmp_path: Path, call: Call) -> None:
    run = tmp_path / "run"
    shutil.copytree(place / "run", run)
    recipe = tmp_path / "mine.toml"
    text = (place / "recipe.toml").read_text().replace("num_inference_steps = 2", "")
    more = '[evaluation.presets.mine]\nprompts = ["a red square moving up"]\n'
    recipe.write_text(f"{text}num_inference_steps = 3\n{more}")
    code, out, err = call("evaluate", run, "--recipe", recipe, "--device", "cpu", "--json")
    assert code == 0, err
    (scores,) = json.loads(out)["evaluation_finished"]
    assert (scores["preset"], scores["settings"]["num_inference_steps"]) == ("mine", 3)
    code, _, err = call("evaluate", run, "--recipe", tmp_path / "none.toml")
    assert code == 2
    assert "There is no recipe" in err

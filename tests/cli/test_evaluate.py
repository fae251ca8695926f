"""The verb `evaluate`: what it refuses before it serves, and what it says when nothing is due."""

from pathlib import Path

import pytest
from tests.cli.conftest import Call, CallJson, Refuse


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


_MISTAKES = {
    "a folder without runs": (
        "{bare} {empty}",
        "{empty} holds no run: expected a folder with recipe.toml, or a folder of such; ",
    ),
    "a recipe for a run": ("{bare}/recipe.toml", "is not a folder"),
    "an unknown preset": ("{runs} --preset mine --preset nosuch", "There is no preset nosuch. "),
    "a misspelt key of a preset": (
        "{bare} --presets {own}",
        "mine.promts is not a key of a preset; did you mean prompts?",
    ),
    "a source without runs is told by its own path": (
        "{runs}/mirror --source {empty} --preset demo --device cpu",
        "{empty} holds no run: ",
    ),
    "no device": ("{bare} --device cuda:", "'cuda:' is no device. Expected "),
    "no recipe": ("{bare} --recipe {bare}/none.toml", "There is no recipe"),
}


@pytest.mark.parametrize("mistake", _MISTAKES)
def test_a_mistake_is_refused(mistake: str, tmp_path: Path, bare: Path, refuse: Refuse) -> None:
    places = {"bare": bare, "runs": bare.parent, "empty": tmp_path / "e", "own": tmp_path / "o"}
    places["empty"].mkdir()
    places["own"].write_text("[mine]\npromts = []\n")
    with (bare / "recipe.toml").open("a") as recipe:
        recipe.write('[evaluation.presets.mine]\nprompts = ["a red square"]\n')
    arguments, message = (each.format(**places) for each in _MISTAKES[mistake])
    said = refuse("evaluate", *arguments.split())
    assert message in said
    assert ("low4s, mine." in said) == (mistake == "an unknown preset")


def test_nothing_due_is_said_where_there_is_a_run(bare: Path, call: Call) -> None:
    code, _, err = call("evaluate", bare, "--preset", "demo", "--device", "cpu")
    assert code == 0
    assert "Nothing is due: each checkpoint that is wanted has been evaluated, is " in err


def test_what_failed_is_not_called_done(run: Path, tmp_path: Path, call: Call) -> None:
    own = tmp_path / "own.toml"
    own.write_text('[odd]\nheight = 36\nwidth = 36\nprompts = ["a red square"]\n')
    code, _, err = call("evaluate", run, "--presets", own, "--device", "cpu")
    assert code == 1
    assert "odd of step 2 failed: " in err
    assert "Nothing is due" not in err


def test_another_recipe_says_what_is_evaluated(
    place: Path, run: Path, tmp_path: Path, call_json: CallJson
) -> None:
    recipe = tmp_path / "mine.toml"
    text = (place / "recipe.toml").read_text().replace("num_inference_steps = 2", "")
    more = '[evaluation.presets.mine]\nprompts = ["a red square moving up"]\n'
    recipe.write_text(f"{text}num_inference_steps = 3\n{more}")
    told = call_json("evaluate", run, "--recipe", recipe, "--device", "cpu", says_more=True)
    (scores,) = told["evaluation_finished"]
    assert (scores["preset"], scores["settings"]["num_inference_steps"]) == ("mine", 3)

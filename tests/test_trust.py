"""Classes of the user's own are found, and what is wrong with their names is said."""

import sys
from pathlib import Path

import pytest
from tests.build import MakeRecipe

from longtake import config
from longtake.errors import RecipeError
from longtake.run_dir import RunDirectory
from longtake.trust import import_class, load_recipe, named_code

_ROOT = Path(__file__).resolve().parents[1]
_FILES = {"broken": "1 / 0", "in_need": "import no_such"}


def test_a_class_is_found_from_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything that is installed; sys.path is left as it was."""
    (tmp_path / "colorsys.py").write_text("class Mine: ...")  # as a module of Python's
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    path = list(sys.path)
    found = import_class("colorsys:Mine", "some.key")
    monkeypatch.delitem(sys.modules, "colorsys")
    assert found.__name__ == "Mine"
    assert sys.path == path


def test_every_class_that_a_recipe_names_is_listed(small_recipe: MakeRecipe) -> None:
    named = {
        "trainable.modules.own.module": "my:Module",
        "model.family": "my:Family",
        "optimizer.kind": "my:Optimizer",
        "objective.kind": "my:Objective",
        "model.transformer_class": "my:Transformer",
    }
    recipe = small_recipe(*(f"{key}={path}" for key, path in named.items()), "watch.hook=mail me")
    listed = [f"{key} = {path!r}" for key, path in named.items()]
    assert named_code(recipe, with_hook=False) == listed
    assert named_code(recipe, with_hook=True) == [*listed, "watch.hook = 'mail me'"]


def test_a_number_of_steps_is_refused_for_a_new_run_of_epochs(
    small_recipe: MakeRecipe, tmp_path: Path
) -> None:
    """A run that is there refuses it itself, with the epochs that make it as long."""
    values = small_recipe().model_dump(exclude_none=True)
    values["training"] = {"epochs": 3, "global_batch_size": 2}
    kept = config.parse(values, "test").with_steps(32)
    path, run = tmp_path / "copied.toml", RunDirectory(tmp_path / "there")
    path.write_text(config.dump(kept))
    run.path.mkdir()
    run.create(kept)
    steps, new = "training.steps=100", f"out={tmp_path / 'new'}"
    with pytest.raises(
        RecipeError, match=r"steps = 100 would be ignored: .*epochs = 3 of .*copied"
    ):
        load_recipe(path, [steps, new])
    with pytest.raises(RecipeError, match="would be ignored"):
        load_recipe(path, [steps, f"out={run.path}"], fresh=True)
    assert load_recipe(path, [steps, f"out={run.path}"]).training.steps == 100
    assert load_recipe(path, ["training.epochs=5", new]).training.epochs == 5


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("exampels.modules.pose:A", r": /.* has no module exampels; did you mean examples\?"),
        ("examples.modles.pose:A", r"examples has no module modles; did you mean modules\?"),
        (
            "examples.modules.pose_adaptor:PoseAdapter",
            r"examples\.modules has no module pose_adaptor; did you mean pose_adapter\?",
        ),
        (
            "examples.modules.pose_adapter:PoseAdaptor",
            r"^some\.key .*pose_adapter\.py has no class PoseAdaptor; did you mean PoseAdapter\?",
        ),
        ("torch.nn.Linear:Linear", r"torch\.nn has no module Linear; there are: .*utils"),
    ],
)
def test_a_name_of_nothing_gets_the_nearest(
    monkeypatch: pytest.MonkeyPatch, named: str, message: str
) -> None:
    monkeypatch.chdir(_ROOT)
    with pytest.raises(RecipeError, match=message):
        import_class(named, "some.key")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", r"importing it failed with ZeroDivisionError: division by zero"),
        ("in_need", r"importing it failed with ModuleNotFoundError: No module named 'no_such'"),
    ],
)
def test_a_file_of_the_users_that_fails_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    (tmp_path / f"{name}.py").write_text(_FILES[name])
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    with pytest.raises(RecipeError, match=message):
        import_class(f"{name}:{name.title()}", "some.key")
    assert sys.path == path
    sys.modules.pop(name, None)

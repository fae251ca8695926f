"""A run that begins with the weights of another one."""

import shlex
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.build import QUIET, Recipes, events, forget_after, losses, saved

from longtake.checkpoint.files import find_parent
from longtake.config import Recipe
from longtake.errors import CheckpointError, LongtakeError, RecipeError, RunError
from longtake.run_dir import Parent, RunDirectory
from longtake.sampling.sampler import load_sampler
from longtake.training.train import train
from longtake.trust import TrustError

_SHORT = ("training.steps=4", "checkpoint.every=2", "optimizer.warmup_steps=0")


@pytest.fixture(scope="module")
def parent(
    small_recipe_in: Callable[[Path], Recipes], tmp_path_factory: pytest.TempPathFactory
) -> Recipe:
    return small_recipe_in(tmp_path_factory.mktemp("parent")).trained(*_SHORT)


def _from(recipe: Recipe, at: str = "@2", *, weights_only: bool = False) -> Parent:
    return find_parent(f"{recipe.out}{at}", weights_only=weights_only, trust=False)


_STILL = ("training.steps=1", "optimizer.learning_rate=1e-30", "optimizer.warmup_steps=0")


@pytest.mark.parametrize("weights_only", [False, True])
def test_it_begins_with_the_parents_weights_and_its_own_settings(
    small_recipe: Recipes, parent: Recipe, weights_only: bool
) -> None:
    """With a learning rate of next to nothing, its first checkpoint has the parent's weights."""
    recipe = small_recipe(*_STILL, "data.flip=0.5")
    train(recipe, QUIET, parent=_from(parent, weights_only=weights_only))
    torch.testing.assert_close(saved(recipe, 1, "model"), saved(parent, 2, "model"), rtol=0, atol=0)
    steps = [
        float(value)
        for name, value in saved(recipe, 1, "optimizer").items()
        if name.endswith(".step")
    ]
    assert set(steps) == {1.0 if weights_only else 3.0}
    record = RunDirectory(recipe.out).record()["parent"]
    assert (record["step"], record["weights_only"]) == (2, weights_only)
    assert record["id"] == RunDirectory(parent.out).record()["id"]
    (begun,) = events(recipe, "begun_from")
    assert "data.flip: 0.0 there, 0.5 here" in begun["differences"]
    rates = [row["learning_rate"] for row in RunDirectory(recipe.out).metrics()]
    assert rates == [1e-30]


def test_an_average_that_the_parent_lacks_begins_with_its_weights(
    small_recipe: Recipes, parent: Recipe
) -> None:
    profiles = "ema.profiles=[{name='main', decay=0.9}, {name='slow', decay=0.99}]"
    recipe = small_recipe(*_STILL, profiles)
    train(recipe, QUIET, parent=_from(parent))
    weights, before = saved(recipe, 1, "model"), saved(parent, 2, "model")
    slow, main = saved(recipe, 1, "ema/slow"), saved(recipe, 1, "ema/main")
    torch.testing.assert_close(slow, weights, rtol=1e-6, atol=1e-7)
    average = saved(parent, 2, "ema/main")
    share = 1 - 2 / 11  # of the first update
    for name, value in main.items():
        expected = torch.lerp(average[name].float(), before[name].float(), share)
        torch.testing.assert_close(value.float(), expected)


def test_step_0_is_the_parents_weights_as_long_as_they_are_there(
    small_recipe: Recipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of another user's run may name any folder: it is read with --trust only."""
    parent, recipe = small_recipe.trained(*_SHORT, name="parent"), small_recipe(*_STILL)
    train(recipe, QUIET, parent=_from(parent))
    for ema, weights in ((False, "model"), (True, "ema/main")):
        found = load_sampler(recipe.out, step=0, ema=ema, device="cpu").components.model
        assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)
        assert_equal(dict(found.state_dict()), saved(parent, 2, weights))
    with monkeypatch.context() as others:
        others.setattr("longtake.sampling.checkpoints.is_own", lambda run: False)
        with pytest.raises(TrustError, match=r"says that it began with .* with --trust"):
            load_sampler(recipe.out, step=0, device="cpu")
        load_sampler(recipe.out, step=0, device="cpu", trust=True)
    is_gone = pytest.raises(CheckpointError, match=r"began with .*step_00000002, which is not ther")
    record = RunDirectory(parent.out).record_path
    kept = record.read_text()
    record.write_text(kept.replace(RunDirectory(parent.out).record()["id"], "another-1234"))
    with is_gone:
        load_sampler(recipe.out, step=0, device="cpu")
    record.write_text(kept)
    shutil.rmtree(RunDirectory(parent.out).checkpoint_path(2))
    with is_gone:
        load_sampler(recipe.out, step=0, device="cpu")


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_there_again(
    small_recipe: Recipes, parent: Recipe
) -> None:
    recipe = small_recipe("training.steps=2", "checkpoint.every=2", "optimizer.warmup_steps=0")
    train(recipe, QUIET, parent=_from(parent))
    first, weights = losses(recipe), saved(recipe, 2, "model")
    forget_after(recipe, 0)
    train(recipe, QUIET)  # without saying where it begins
    assert losses(recipe) == first
    torch.testing.assert_close(saved(recipe, 2, "model"), weights, rtol=0, atol=0)
    with pytest.raises(RunError, match=r"began with .*@2, not with .*@4"):
        train(recipe, QUIET, parent=_from(parent, "@4"))


@pytest.mark.parametrize(
    ("change", "at", "error", "expected"),
    [
        ("model.family=wan", "", RecipeError, "is of the family tubelet"),
        (
            "model.config.hidden_size=24",
            "",
            RecipeError,
            r"is \[.*48.*\] there and \[.*24.*\] here",
        ),
        ("trainable.kind=lora", "", RecipeError, "longtake export"),
        ("seed=0", "@3", CheckpointError, "no whole checkpoint of step 3.*steps 2, 4"),
        ("seed=0", "-none", RunError, "is not a run directory"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_run_begins(
    small_recipe: Recipes,
    parent: Recipe,
    change: str,
    at: str,
    error: type[LongtakeError],
    expected: str,
) -> None:
    recipe = small_recipe(change)
    with pytest.raises(error, match=expected):
        train(recipe, QUIET, parent=_from(parent, at))
    assert not RunDirectory(recipe.out).exists()


def test_the_same_command_resumes_whatever_the_parent_has_trained_or_deleted(
    parent: Recipe,
) -> None:
    """The newest checkpoint of a parent that is still trained is another one later."""
    begun = _from(parent)
    for text in (str(parent.out), f"{parent.out}@2"):
        assert find_parent(text, weights_only=False, trust=False, begun=begun) == begun
    gone = begun | {"step": 1}
    assert find_parent(str(parent.out), weights_only=False, trust=False, begun=gone) == gone
    for text, weights_only in ((f"{parent.out}@4", False), (str(parent.out), True)):
        found = find_parent(text, weights_only=weights_only, trust=False, begun=begun)
        assert (found["step"], found["weights_only"]) == (4, weights_only)


def test_states_of_another_optimizer_begin_anew(small_recipe: Recipes, parent: Recipe) -> None:
    recipe = small_recipe(*_STILL, "optimizer.kind=muon", "optimizer.muon_learning_rate=1e-30")
    train(recipe, QUIET, parent=_from(parent))
    torch.testing.assert_close(saved(recipe, 1, "model"), saved(parent, 2, "model"), rtol=0, atol=0)
    found = saved(recipe, 1, "optimizer")
    assert {float(found[name]) for name in found if name.endswith(".step")} == {1.0}


def test_a_run_that_names_code_and_was_begun_by_others_needs_trust(
    small_recipe: Recipes, parent: Recipe
) -> None:
    run = RunDirectory(parent.out)
    kept = run.recipe_path.read_text(), run.record_path.read_text()
    own = '[trainable.modules.own]\nmodule = "m:M"'
    assert "[trainable.modules]" in kept[0]
    run.recipe_path.write_text(kept[0].replace("[trainable.modules]", own))
    run.record_path.write_text(kept[1].replace('"host": "', '"host": "not-', 1))
    try:
        with pytest.raises(RunError, match=shlex.quote("--trust")):
            _from(parent)
        assert find_parent(str(parent.out), weights_only=True, trust=True)["step"] == 4
    finally:
        run.recipe_path.write_text(kept[0])
        run.record_path.write_text(kept[1])

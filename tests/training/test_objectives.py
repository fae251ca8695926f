"""Trainings with other objectives: cached, resumed, sharded and compiled like any other."""

from pathlib import Path

import pytest
import torch
from tests.build import (
    QUIET,
    TINY_WAN,
    Recipes,
    assert_saved_alike,
    copy_clips,
    forget_after,
    losses,
    rows,
    saved,
    train_by,
)

from longtake.config import Recipe
from longtake.errors import RunError
from longtake.training.train import train

_ROOT = Path(__file__).resolve().parents[2]
_GUIDED = ("objective.kind=guided_target", "objective.options.scale=3.0", "checkpoint.every=3")


def test_the_guided_target_is_the_same_cached_and_resumed(
    small_recipe: Recipes, tmp_path: Path
) -> None:
    """The empty caption's embeddings come from the cache, or are encoded for the batch."""
    changes = (*TINY_WAN, *_GUIDED, "data.windows=1", "training.steps=6")
    plain = small_recipe.trained(*changes, "recompute.policy=all", name="plain")
    cached = small_recipe.trained(*changes, f"data.cache={tmp_path / 'cache'}", name="cached")
    assert losses(cached) == losses(plain)
    assert_saved_alike(cached, plain, 6)
    forget_after(cached, 3)
    assert train(cached, QUIET).start_step == 3
    assert_saved_alike(cached, plain, 6)
    unguided = small_recipe.trained(*TINY_WAN, "training.steps=1", name="unguided")
    assert losses(unguided)[0] != losses(plain)[0]
    forget_after(cached, 3)
    with pytest.raises(RunError, match=r"objective\.options\.scale"):
        train(small_recipe(*changes, "objective.options.scale=2.0", name="cached"), QUIET)


@pytest.fixture
def pairs(small_recipe: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipes:
    """Makes recipes whose clips have a worse one: the clip that follows in the folder."""
    monkeypatch.chdir(_ROOT)  # where the objective is found
    catalog = copy_clips(small_recipe.catalog, tmp_path / "pairs")
    clips = sorted((tmp_path / "pairs" / "clips").glob("*.mp4"))
    (tmp_path / "pairs" / "worse").mkdir()
    for clip, following in zip(clips, [*clips[1:], clips[0]], strict=True):
        (tmp_path / "pairs" / "worse" / clip.name).hardlink_to(following)
    return Recipes(small_recipe.path, catalog)


_PAIRS = (
    "data.conditioning.worse={kind='video', path='../worse/{stem}.mp4'}",
    "objective={kind='examples.objectives.preference:Preference', inputs=['worse']}",
    "objective.options.beta=20.0",
    "trainable={kind='lora', rank=2, targets=['to_qkv', 'tube_out']}",
    "checkpoint.every=3",
)


def test_pairs_are_trained_and_resumed(pairs: Recipes) -> None:
    recipe = pairs.trained(*_PAIRS, "training.steps=6")
    found = losses(recipe)
    assert found[0] == pytest.approx(0.6931, abs=1e-4)  # as good as the reference: log 2
    assert found[-1] != found[0]
    whole = saved(recipe, 6, "model")
    forget_after(recipe, 3)
    assert train(recipe, QUIET).start_step == 3
    torch.testing.assert_close(saved(recipe, 6, "model"), whole, rtol=0, atol=0)


def test_a_prior_holds_the_model_where_it_began(small_recipe: Recipes) -> None:
    """Batches know their catalog: the first loss is the usual one, and nothing is learnt of it."""
    lora = ("trainable={kind='lora', rank=2, targets=['tube_out']}", "training.steps=2")
    prior = "objective={kind='prior_preservation', options={catalogs=['catalog']}}"
    plain = small_recipe.trained(*lora, name="plain")
    held = small_recipe.trained(*lora, prior, "training.micro_batch_size=2", name="held")
    (loss, norm), *_ = rows(held, "loss", "grad_norm")
    assert loss == pytest.approx(losses(plain)[0], rel=1e-5)
    assert (norm, rows(plain, "grad_norm")[0][0] > 0) == (0, True)


_PARTS = (*_PAIRS, "training.micro_batch_size=1", "training.steps=3")


@pytest.mark.slow
def test_two_processes_train_the_pairs_that_one_trains(
    pairs: Recipes, on_two_processes: list[str]
) -> None:
    """A pass without gradient and adapter gathers the shards, and leaves nothing behind."""
    alone = pairs.trained(*_PARTS, name="alone")
    together = pairs(*_PARTS, "parallel.strategy=shard", name="together")
    assert "Warning" not in train_by(on_two_processes, together)
    _assert_near(together, alone)


@pytest.mark.drill
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns itself of much
def test_compiled_blocks_train_the_same_pairs(pairs: Recipes) -> None:
    alone = pairs.trained(*_PARTS, name="alone")
    compiled = pairs.trained(*_PARTS, "training.compile=true", name="compiled")
    _assert_near(compiled, alone)


def _assert_near(one: Recipe, other: Recipe) -> None:
    assert len(losses(one)) == 3
    assert losses(one) == pytest.approx(losses(other), rel=1e-4)
    weights = saved(one, 3, "model")
    torch.testing.assert_close(weights, saved(other, 3, "model"), rtol=1e-3, atol=1e-5)

"""Two ranks fill one cache together, and train from it as they would without it."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.build import (
    QUIET,
    TINY_WAN,
    Recipes,
    assert_saved_alike,
    cache_entries,
    copy_clips,
    events,
    rows,
)

from longtake import config
from longtake.config import Recipe
from longtake.process import num_cores
from longtake.training.latent_cache import cache_ahead

_WAN = (
    *TINY_WAN,
    "data.windows=2",
    "data.caption_dropout=0.3",
    "training.steps=6",
    "parallel.strategy=shard",
)


@pytest.fixture
def run_verb(run_on_ranks: Callable[..., str], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs a verb of longtake with a recipe on two processes; gives what it prints as JSON."""

    def run(recipe: Recipe, *verb: str) -> dict[str, Any]:
        path = tmp_path / "recipe.toml"
        path.write_text(config.dump(recipe))
        result: dict[str, Any] = json.loads(
            run_on_ranks(2, "-m", "longtake", *verb, path, "--json")
        )
        return result

    return run


@pytest.mark.slow
def test_two_ranks_train_from_a_cache_as_from_pixels(
    small_recipe: Recipes,
    run_verb: Callable[..., dict[str, Any]],
    shapes_catalog: Path,
    tmp_path: Path,
) -> None:
    catalog = copy_clips(shapes_catalog, tmp_path / "shapes")
    damaged = sorted((catalog.parent / "clips").glob("*.mp4"))[7]
    damaged.write_bytes(damaged.read_bytes()[:300])
    changes = (
        *_WAN,
        f"data.catalog={catalog}",
        "training.global_batch_size=16",
        "training.steps=4",
    )
    plain = small_recipe(*changes, name="plain")
    run_verb(plain, "train")
    cached = small_recipe(*changes, f"data.cache={tmp_path / 'cache'}")
    run_verb(cached, "train")
    found = [rows(recipe, "step", "loss", "grad_norm") for recipe in (plain, cached)]
    assert len(found[0]) == 4
    assert found[0] == found[1]
    assert_saved_alike(cached, plain, 4)
    (one,), (other,) = (events(recipe, "sample_rejected") for recipe in (plain, cached))
    for key in ("step", "rank", "identity", "reason"):
        assert one[key] == other[key]
    kinds = Counter(kind for kind, _ in cache_entries(tmp_path / "cache"))
    assert kinds["latents"] == 63 * 2


@pytest.mark.slow
def test_two_ranks_fill_a_cache_ahead(
    small_recipe: Recipes, run_verb: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Each its share: together the entries that one process makes, and none twice.

    With as many threads as a rank has: sums of other numbers of threads are rounded otherwise.
    """
    once = (*_WAN, "data.windows=1")
    alone = small_recipe(*once, f"data.cache={tmp_path / 'alone'}")
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, num_cores() // 2))
    try:
        cache_ahead(alone, QUIET)
    finally:
        torch.set_num_threads(threads)
    together = small_recipe(*once, f"data.cache={tmp_path / 'together'}")
    facts = run_verb(together, "data", "cache")
    assert facts["latents"] == {"present": 0, "computed": 64}
    entries = [cache_entries(tmp_path / name) for name in ("alone", "together")]
    assert len(entries[0]) == 64 + facts["prompts"]["computed"]
    assert entries[0] == entries[1]

"""Every bucket of every shipped recipe trains clips of sizes that people have."""

from collections.abc import Callable
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from longtake import config
from longtake.data.catalog import Catalog
from longtake.data.plan import begin

_ROOT = Path(__file__).resolve().parents[2]
_DEMO = Path(str(resources.files("longtake.demo"))) / "recipe.toml"
_RECIPES = [*sorted((_ROOT / "examples").glob("*.toml")), _DEMO]
# 1080p, 720p, 480p, portrait, 4:3 (also portrait) and square.
_SIZES = [
    (1920, 1080), (1280, 720), (854, 480), (1080, 1920), (720, 1280), (1440, 1080), (640, 480),
    (1080, 1440), (1024, 1024),
]  # fmt: skip
_FRAMES = [1, 24, 48, 90, 120, 300]
_CLIPS = list(product(_SIZES, _FRAMES))


@pytest.mark.parametrize("path", _RECIPES, ids=lambda path: path.stem)
def test_every_bucket_of_every_stage_gets_clips(
    path: Path, catalog_of: Callable[..., Catalog]
) -> None:
    """And no video is trained as a still picture."""

    def of(index: int) -> Callable[[int], Any]:
        return lambda number: _CLIPS[number][0][index]

    recipe = config.load(path)
    catalog = catalog_of(
        range(len(_CLIPS)),
        width=of(0),
        height=of(1),
        num_frames=lambda number: _CLIPS[number][1],
        kind=lambda number: "image" if _CLIPS[number][1] == 1 else "video",
        attributes=lambda number: {"nouns": float(number % 10)},
    )
    plan = begin(dict.fromkeys(recipe.data.sources(), catalog), recipe.data, 4, seed=0)
    for stage in plan.stages:
        members = stage.streams[0].parts[-1].members
        for bucket, rows in zip(members.shapes, members.rows, strict=True):
            frames = catalog.column("num_frames")[rows]
            assert len(rows), f"{path.name}, stage {stage.stage.name}: no clip for {bucket}"
            assert (bucket.num_frames > 1) == all(frames > 1)

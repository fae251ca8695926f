"""The prompts of the preset `default`: captions of clips, held-out ones first; torch-free."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from longtake.config import Recipe
from longtake.data.catalog import Catalog
from longtake.data.clip import Clip
from longtake.data.references import reference_path
from longtake.errors import DataError
from longtake.evaluation_dir import EvaluationDirectory
from longtake.fsio import read_json
from longtake.run_dir import RunDirectory

DEFAULT = "default"
"""The preset that is sampled where nobody names one."""

_OF_EACH = 4
"""Held-out captions, and as many of clips that are trained on."""
_MOST_LOOKED_AT = 1000


def from_captions(recipe: Recipe, run: Path | None) -> dict[str, Any]:
    """Keys of the preset: `prompts`, and `references` of a model that takes reference images.

    What was sampled once stays: later catalogs of the run do not change it. Empty where no
    caption is known here, so that prompts that come with longtake are sampled.

    Args:
        recipe: of the run.
        run: its directory, which keeps copies of the catalogs that it was trained on.
    """
    if run is None:
        return {}
    directory = RunDirectory(run)
    kept = read_json(EvaluationDirectory(directory).preset_path(DEFAULT)).get("prompts")
    names = recipe.data.references
    if kept and not names:
        return {"prompts": tuple(map(str, kept))}
    held_out = [recipe.evaluation.held_out] if recipe.evaluation.held_out else []
    trained = sorted(directory.catalogs_path.glob("*.parquet"))[:1]
    clips = {
        clip.caption: clip
        for catalog in (*held_out, *trained)
        for clip in islice(_captioned(catalog), _OF_EACH)
    }
    if not clips:
        return {}
    found: dict[str, Any] = {"prompts": tuple(clips)}
    if names:
        found["references"] = {
            name: tuple(Path(reference_path(clip.path, pattern)) for clip in clips.values())
            for name, pattern in names.items()
        }
    return found


def _captioned(path: Path) -> Iterator[Clip]:
    """Clips of a catalog with different captions, in its order; none where it cannot be read."""
    try:
        catalog = Catalog.load(path)
    except DataError:
        return
    seen = set()
    for row in range(min(len(catalog), _MOST_LOOKED_AT)):
        clip = catalog.clip(row)
        if clip.caption and clip.caption.strip() and clip.caption not in seen:
            seen.add(clip.caption)
            yield clip

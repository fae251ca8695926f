"""Recipes that are made up: nothing is trained by them."""

from pathlib import Path
from typing import Any

from longtake import config
from longtake.config import Recipe


def bare_recipe(out: Path, **sections: Any) -> Recipe:
    """A recipe with only the keys that have no default; `sections` add keys or replace them."""
    values: dict[str, Any] = {
        "out": str(out),
        "data": {
            "catalog": "none.parquet",
            "buckets": [{"num_frames": 8, "height": 32, "width": 32}],
        },
        "model": {"family": "tubelet"},
        "training": {"steps": 40, "global_batch_size": 4},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return config.parse(values, "test")

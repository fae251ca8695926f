"""Fixtures that more than one room's tests need."""

from pathlib import Path

import pytest

from longtake.data.catalog import index
from longtake.demo.shapes import write_clips

_MATERIAL = Path(__file__).resolve().parents[2] / "shared" / "material"


@pytest.fixture(scope="session")
def material() -> Path:
    """The folder of real clips, damaged clips and exact numbers; skips where it is not at hand."""
    if not (_MATERIAL / "MATERIAL.md").is_file():
        pytest.skip(f"real material is not at hand (looked for {_MATERIAL})")
    return _MATERIAL


@pytest.fixture(scope="session")
def shapes_catalog(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalog of 64 clips (8 frames of 32 x 32, captioned); copy its folder to change a clip."""
    folder = tmp_path_factory.mktemp("shapes")
    captions = write_clips(folder / "clips", num_clips=64, seed=0)
    out = folder / "catalog.parquet"
    index([folder / "clips"], captions=captions, out=out)
    return out

"""Data that several modules read."""

from pathlib import Path

import pytest
from tests.data.build import write_greys

from longtake.data.catalog import Catalog
from longtake.data.index import index


@pytest.fixture(scope="session")
def stills(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalog of 26 captioned pictures of 16 x 16: files that are really read, and quickly."""
    folder = tmp_path_factory.mktemp("stills")
    for number in range(26):
        write_greys(folder, {f"{number:02d}": f"picture {number}"}, grey=9 * number)
    out = folder / "catalog.parquet"
    index([folder], captions=None, out=out)
    return out


@pytest.fixture
def shapes(shapes_catalog: Path) -> Catalog:
    """64 captioned clips of eight frames."""
    return Catalog.load(shapes_catalog)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a.mp4, b.png, 0017 and sub/c.webm; nobody looks into them here."""
    folder = tmp_path / "media"
    (folder / "sub").mkdir(parents=True)
    for name in ("a.mp4", "b.png", "0017", "sub/c.webm"):
        (folder / name).write_bytes(name.encode())
    return folder

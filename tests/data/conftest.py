"""Catalogs and sections of recipes that are made up: no file is read for them."""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from longtake.config import DataSection
from longtake.data.catalog import Catalog
from longtake.data.clip import Clip, Media
from longtake.data.index import index


@pytest.fixture(scope="session")
def catalog_of() -> Callable[..., Catalog]:
    """Makes catalogs of numbered clips, 8 frames of 16x16, every third 32x16.

    `catalog_of(range(9), num_frames=lambda number: number + 1)` says another value for a field.
    """

    def make(numbers: Collection[int], **fields: Callable[[int], Any]) -> Catalog:
        return Catalog.of(
            _clip(number, **{name: value(number) for name, value in fields.items()})
            for number in numbers
        )

    return make


def _clip(number: int, **fields: Any) -> Clip:
    values: dict[str, Any] = {
        "identity": hashlib.blake2b(str(number).encode(), digest_size=16).hexdigest(),
        "media": Media(f"/clips/{number}.mp4"),
        "kind": "video",
        "caption": f"clip {number}",
        "num_frames": 8,
        "width": 32 if number % 3 == 0 else 16,
        "height": 16,
        "fps": 8.0,
        "duration_seconds": 1.0,
        "stream_index": 0,
        "rotation": 0,
        "codec": "h264",
        "pix_fmt": "yuv420p",
    }
    return Clip(**(values | fields))


@pytest.fixture(scope="session")
def pictures_of() -> Callable[..., NDArray[np.uint8]]:
    """Reads all frames of a video as PyAV itself does: [F, H, W, 3], turned upright."""

    def read(path: str, rotation: int = 0, stream_index: int = 0) -> NDArray[np.uint8]:
        with av.open(path) as container:
            (stream,) = (each for each in container.streams.video if each.index == stream_index)
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        return np.rot90(np.stack(frames), rotation // 90, axes=(1, 2))

    return read


@pytest.fixture(scope="session")
def stills(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalog of 26 captioned pictures of 16 x 16: files that are really read, and quickly."""
    folder = tmp_path_factory.mktemp("stills")
    for number in range(26):
        Image.new("RGB", (16, 16), (9 * number,) * 3).save(folder / f"{number:02d}.png")
        (folder / f"{number:02d}.txt").write_text(f"picture {number}")
    out = folder / "catalog.parquet"
    index([folder], captions=None, out=out)
    return out


@pytest.fixture(scope="session")
def section() -> Callable[..., DataSection]:
    """Makes sections of recipes over a square bucket and a wide one."""

    def make(**values: Any) -> DataSection:
        shapes = [{"num_frames": 4, "height": 16, "width": width} for width in (16, 32)]
        where = {} if "catalogs" in values else {"catalog": "c.parquet"}
        return DataSection.model_validate({**where, "buckets": shapes, **values})

    return make


@dataclass
class Oracle:
    """What every epoch has to consume, kept with sets and without any plan."""

    wanted: dict[int, set[str]]
    seen: dict[int, Counter[str]] = field(default_factory=dict)

    def consume(self, epoch: int, identity: str) -> None:
        """Take note of a sample."""
        self.seen.setdefault(epoch, Counter())[identity] += 1

    def change(self, policy: str, clips: set[str], counted: int) -> None:
        """`counted` is the epoch that the next step would have been counted in."""
        newest = max(self.seen, default=-1)
        for epoch in self.wanted:
            consumed = set(self.seen.get(epoch, ()))
            if epoch > newest:
                self.wanted[epoch] = set(clips)
            elif policy == "restart":
                self.wanted[epoch] = consumed
            elif policy == "merge" and epoch == newest and epoch >= counted:
                self.wanted[epoch] = consumed | clips
            elif policy == "merge":
                self.wanted[epoch] = consumed | (self.wanted[epoch] & clips)

    def check(self) -> None:
        """Nothing was repeated, and nothing is missing."""
        for epoch, wanted in self.wanted.items():
            assert self.seen.get(epoch, Counter()) == Counter(wanted), epoch


@pytest.fixture(scope="session")
def oracle_of() -> Callable[[Catalog, int], Oracle]:
    """Makes an oracle of so many epochs over a catalog."""

    def make(catalog: Catalog, num_epochs: int) -> Oracle:
        identities = {clip.identity for clip in catalog.clips()}
        return Oracle({epoch: set(identities) for epoch in range(num_epochs)})

    return make


_FIRST = range(40)
_CHANGED: dict[str, Collection[int]] = {
    "same": _FIRST,
    "grown": range(44),
    "shrunk": range(28),
    "halved": range(0, 40, 2),
    "one removed": range(1, 40),
    "one re-encoded": [*range(39), 1039],
    "swapped": range(100, 140),
}


@pytest.fixture(scope="session")
def changed_catalogs(catalog_of: Callable[..., Catalog]) -> dict[str, Catalog]:
    """A catalog of 40 clips as it is, and as it may be when a run goes on."""
    return {name: catalog_of(numbers) for name, numbers in _CHANGED.items()}

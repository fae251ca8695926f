"""Catalogs and sections of recipes that are made up: no file is read for them."""

import hashlib
import io
import tarfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from tests.data.catalogs import make_catalog

from longtake.config import DataSection
from longtake.data.batch import Batch
from longtake.data.catalog import Catalog
from longtake.data.clip import Clip, Item, Media
from longtake.data.loader import Loader
from longtake.data.plan import PlannedBatch


def catalog_of(numbers: Collection[int], **fields: Callable[[int], Any]) -> Catalog:
    """Numbered clips, 8 frames of 16x16, every third 32x16.

    `catalog_of(range(9), num_frames=lambda number: number + 1)` says another value for a field.
    """
    return make_catalog(
        clip(number, **{name: value(number) for name, value in fields.items()})
        for number in numbers
    )


def clip(number: int, **fields: Any) -> Clip:
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


def section(**values: Any) -> DataSection:
    """A recipe's section over a square bucket and a wide one."""
    shapes = [{"num_frames": 4, "height": 16, "width": width} for width in (16, 32)]
    where = {} if "catalogs" in values else {"catalog": "c.parquet"}
    return DataSection.model_validate({**where, "buckets": shapes, **values})


def pictures_of(path: str, rotation: int = 0, stream_index: int = 0) -> NDArray[np.uint8]:
    """All frames of a video as PyAV itself reads them: [F, H, W, 3], turned upright."""
    with av.open(path) as container:
        (stream,) = (each for each in container.streams.video if each.index == stream_index)
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
    return np.rot90(np.stack(frames), rotation // 90, axes=(1, 2))


def names_of(planned: PlannedBatch) -> list[str]:
    """The identities of a batch."""
    found = planned.catalog.identities.take(pa.array(planned.rows)).to_pylist()
    return [identity.hex() for identity in found]


def identities_of(catalog: Catalog) -> set[str]:
    return {identity.hex() for identity in catalog.identities.to_pylist()}


@dataclass
class Oracle:
    """What every epoch has to consume, kept with sets and without any plan."""

    wanted: dict[int, set[str]]
    seen: dict[int, Counter[str]] = field(default_factory=dict)

    def consume(self, epoch: int, identity: str) -> None:
        self.seen.setdefault(epoch, Counter())[identity] += 1

    def plan(self, batch: PlannedBatch) -> None:
        """Consume all samples of a planned batch."""
        for identity, epoch in zip(names_of(batch), batch.epochs, strict=True):
            self.consume(epoch, identity)

    def train(self, ranks: Sequence[Loader], end: int | None = None) -> None:
        """Consume what the ranks of a run train up to a step, or to the end."""
        for shares in zip(*(rank.batches(end) for rank in ranks), strict=True):
            assert len({(share.step, share.epoch, share.bucket) for share in shares}) == 1
            for share in shares:
                self.take(share)

    def take(self, share: Batch) -> None:
        """Consume the samples of a rank's share that are trained."""
        samples = zip(share.identities, share.epochs, share.weights, strict=True)
        for identity, epoch, weight in samples:
            if weight:
                self.consume(epoch, identity)

    def change(self, policy: str, clips: set[str], counted: int) -> None:
        """`counted` is the epoch that the next step would have been counted in."""
        newest = max(self.seen, default=-1)
        for epoch, wanted in self.wanted.items():
            consumed = set(self.seen.get(epoch, ()))
            if epoch > newest:
                self.wanted[epoch] = set(clips)
            elif policy == "restart":
                self.wanted[epoch] = consumed
            elif policy == "merge" and consumed != wanted:
                is_open = epoch == newest and epoch >= counted
                self.wanted[epoch] = consumed | (clips if is_open else wanted & clips)

    def check(self) -> None:
        """Nothing was repeated, and nothing is missing."""
        for epoch, wanted in self.wanted.items():
            assert self.seen.get(epoch, Counter()) == Counter(wanted), epoch


def oracle_of(catalog: Catalog, num_epochs: int) -> Oracle:
    return Oracle({epoch: identities_of(catalog) for epoch in range(num_epochs)})


def named_items(items: Iterable[Item], folder: Path) -> dict[str, Item]:
    return {str(Path(str(item.media)).relative_to(folder)): item for item in items}


def write_tar(path: Path, members: dict[str, bytes | str]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            data = content.encode() if isinstance(content, str) else content
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def load(loader: Loader, step: int) -> Batch:
    """One batch; the loader stays where it is."""
    before, loader.step = loader.step, step
    with closing(loader.batches(step + 1)) as batches:
        batch = next(batches)
    loader.step = before
    return batch

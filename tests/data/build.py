"""Catalogs and sections of recipes that are made up: no file is read for them."""

import csv
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image
from tests.data.catalogs import make_catalog

from longtake import config
from longtake.config import DataSection, Recipe
from longtake.data.batch import Batch
from longtake.data.catalog import Catalog
from longtake.data.clip import Clip, Item, Media
from longtake.data.index import index
from longtake.data.loader import Loader
from longtake.data.plan import PlannedBatch
from longtake.data.plan_history import PlanHistory, keep_catalogs, resume, start
from longtake.data.tasks import HERE


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
    where = {} if "catalogs" in values else {"catalog": "c.parquet"}
    return DataSection.model_validate({**where, "buckets": [shape(16), shape(32)], **values})


def shape(width: int = 16, **others: Any) -> dict[str, Any]:
    """A bucket of a recipe."""
    return {"num_frames": 4, "height": 16, "width": width, **others}


def recipe_of(out: Path, **data: Any) -> Recipe:
    """A recipe of 100 steps with batches of 4 clips."""
    values = {
        "out": out,
        "data": data,
        "model": {"family": "tubelet"},
        "training": {"steps": 100, "global_batch_size": 4},
    }
    return config.parse(json.loads(json.dumps(values, default=str)), "test")


def pictures_of(path: str, rotation: int = 0, stream_index: int = 0) -> NDArray[np.uint8]:
    """All frames of a video as PyAV itself reads them: [F, H, W, 3], turned upright."""
    with av.open(path) as container:
        (stream,) = (each for each in container.streams.video if each.index == stream_index)
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
    return np.rot90(np.stack(frames), rotation // 90, axes=(1, 2))


def encode_plainly(
    path: Path,
    pictures: Iterable[NDArray[np.uint8] | av.VideoFrame],
    *,
    codec: str = "libx264",
    pixels: str = "yuv420p",
    ratio: Fraction = Fraction(1),
    matrix: Sequence[int] = (),
    options: dict[str, str] | None = None,
    colours: dict[str, int] | None = None,
    **metadata: str,
) -> Media:
    """Write a video of 8 frames a second by PyAV alone, in the format of the path's ending."""
    frames = [
        each
        if isinstance(each, av.VideoFrame)
        else av.VideoFrame.from_ndarray(each, "rgba" if each.shape[-1] == 4 else "rgb24")
        for each in pictures
    ]
    with av.open(str(path), "w") as out:
        out.metadata.update(metadata)
        stream = out.add_stream(codec, rate=8, options=options)
        assert isinstance(stream, av.VideoStream)
        stream.height, stream.width, stream.pix_fmt = frames[0].height, frames[0].width, pixels
        stream.codec_context.sample_aspect_ratio = ratio
        for name, code in (colours or {}).items():
            setattr(stream.codec_context, name, code)
        if matrix:
            stream.set_display_matrix(list(matrix))
        for frame in frames:
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return Media(str(path))


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
        for shares in shares_of(ranks, end):
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


class PlannedRun:
    """Plans of a run that keeps its catalogs; each resume is what another process makes of them."""

    def __init__(
        self, kept: Path, given: Catalog | dict[str, Catalog], batch_size: int = 4, **data: Any
    ) -> None:
        self.kept, self.batch_size, self.data, self.step = kept, batch_size, data, 0
        self.seen: dict[tuple[str, int], Counter[str]] = {}
        self.oracle: Oracle | None = None  # is told what is consumed
        self.catalogs = given if isinstance(given, dict) else {"catalog": given}
        self.plans = start(self.catalogs, section(**data), batch_size, 0)
        keep_catalogs(self.plans, self.catalogs, kept)

    def train(self, end: int | None = None) -> None:
        """Consume what is planned up to a step, or all."""
        end = self.plans.end_step if end is None else end
        assert end is not None
        for step in range(self.step, end):
            batch = self.plans.batch(step)
            if self.oracle:
                self.oracle.plan(batch)
            for identity, epoch in zip(names_of(batch), batch.epochs, strict=True):
                key = (f"{batch.stage}/{batch.source}", epoch)
                self.seen.setdefault(key, Counter())[identity] += 1
        self.step = end

    def resume(
        self,
        given: Catalog | dict[str, Catalog] | None = None,
        batch_size: int = 0,
        on_change: str = "merge",
        **data: Any,
    ) -> PlanHistory:
        if given is not None:
            self.catalogs = given if isinstance(given, dict) else {"catalog": given}
        self.batch_size, self.data = batch_size or self.batch_size, self.data | data
        history = json.loads(json.dumps(self.plans.history))  # as a checkpoint holds it
        changed = section(**self.data, on_change=on_change)
        at = (self.step, self.catalogs, changed, self.batch_size, 0, self.kept)
        self.plans = resume(history, *at)
        keep_catalogs(self.plans, self.catalogs, self.kept)
        return self.plans

    def batches(self, end: int) -> list[list[str]]:
        return [names_of(self.plans.batch(step)) for step in range(end)]


def on_ranks(data: DataSection, world_size: int, **options: Any) -> list[Loader]:
    """The loaders of a run's ranks."""
    return [Loader(data, rank=r, world_size=world_size, **options) for r in range(world_size)]


def shares_of(ranks: Sequence[Loader], end: int | None = None) -> Iterator[tuple[Batch, ...]]:
    """Each step's shares of ranks that tell each other what they cannot decode, as in training."""
    for shares in zip(*(rank.batches(end) for rank in ranks), strict=True):
        failures = [rank.quarantine.failures for rank in ranks]
        for rank in ranks:
            for clips in failures:
                rank.quarantine.add(clips)
        yield shares


def indexed(out: Path, *sources: Path) -> Catalog:
    """Index files and folders, without captions but those beside them."""
    index(sources, captions=None, out=out, work=HERE)
    return Catalog.load(out)


def named_items(items: Iterable[Item], folder: Path) -> dict[str, Item]:
    return {str(Path(str(item.media)).relative_to(folder)): item for item in items}


def write_table(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows as CSV, JSON lines or Parquet, by the path's ending."""
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=1500)
    return path


def write_greys(folder: Path, captions: Mapping[str, str | None], grey: int = 90) -> None:
    """Write PNGs of one grey, 16 x 16, by their names; those of None have no caption beside."""
    for name, caption in captions.items():
        Image.new("RGB", (16, 16), (grey,) * 3).save(folder / f"{name}.png")
        if caption is not None:
            (folder / f"{name}.txt").write_text(caption)


def write_tar(path: Path, members: dict[str, bytes | str]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            data = content.encode() if isinstance(content, str) else content
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def run_python(code: str, *arguments: object, stdin: str = "", **environment: str) -> str:
    """What a program that ends well prints."""
    ended = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        input=stdin,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=True,
    )
    return ended.stdout


def load(loader: Loader, step: int) -> Batch:
    """One batch; the loader stays where it is."""
    before, loader.step = loader.step, step
    with closing(loader.batches(step + 1)) as batches:
        batch = next(batches)
    loader.step = before
    return batch

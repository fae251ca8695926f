"""Memory and speed of `longtake data index` with many rows, without decoding.

    python benchmarks/index_rows.py [--rows 1000000 10000000] [--source parquet] [--clips FOLDER]

A table names that many files (hard links to a few, so that they need no space but their folders').
They are indexed by a stand-in that makes up what a file holds from its name; all else is done as
usual: the table is read, its files are looked for, results go into the journal, clips are sorted,
and the catalog is written. One file in a thousand is rejected, one in a thousand is a duplicate.
Each size is a new process. With `--clips`, real clips are indexed with and without
`--trust-metadata`, alternately. Needs about 0.6 KB a row below `--folder`, and 0.8 KB in TMPDIR.
Writes benchmarks/results/index_rows.md.
"""

import argparse
import hashlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq

from longtake.data.clip import Item, Timing
from longtake.data.decode import Probe
from longtake.data.index import index
from longtake.data.tasks import HERE
from longtake.data.workers import Task
from longtake.errors import ClipError

_RESULTS = Path(__file__).parent / "results" / "index_rows.md"
_LINKS_PER_FILE = 60_000  # ext4 has room for 65,000
_FILES_PER_FOLDER = 10_000
_ROWS_AT_ONCE = 100_000
_REJECTED_EVERY = _EQUAL_EVERY = 1000


@dataclass(frozen=True)
class _StandIn(Task[Item, tuple[Probe | ClipError, bool]]):
    """Makes up what a file holds from the number that it is called."""

    def do(self, item: Item, progress: Callable[[], object]) -> tuple[Probe | ClipError, bool]:
        number = int(item.media.path[-13:-4])
        if number % _REJECTED_EVERY == 1:
            return ClipError(item.media.path, "not a readable video: Invalid data found"), True
        if number % _EQUAL_EVERY == 2:
            number += 1
        num_frames = 49 + number % 100
        return Probe(
            identity=hashlib.blake2b(str(number).encode(), digest_size=16).hexdigest(),
            kind="video",
            num_frames=num_frames,
            width=1280,
            height=720,
            fps=24.0,
            duration_seconds=num_frames / 24,
            stream_index=0,
            rotation=0,
            codec="h264",
            pix_fmt="yuv420p",
            timing=Timing(0, 512),
            keyframes=(0, 24, 48),
        ), True

    def lost(self, item: Item, reason: str) -> tuple[Probe | ClipError, bool]:
        raise AssertionError(f"{item.media}: {reason}")

    def reads(self, item: Item) -> str:
        return item.media.path


def main() -> None:
    """Make the files, measure each size in a new process, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument(
        "--source", choices=["parquet", "csv", "jsonl", "folder"], default="parquet"
    )
    parser.add_argument("--folder", type=Path, help="where files are made", default=None)
    parser.add_argument("--clips", type=Path, help="a folder of real clips")
    parser.add_argument("--rounds", type=int, default=3, help="for real clips")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        _measure(*map(Path, arguments.child))
        return
    rows = []
    for count in arguments.rows:
        with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="index-rows-") as name:
            source = _make_source(Path(name), count, arguments.source)
            found = _run(source, Path(name, "catalog.parquet"))
            rows.append(f"| {count:,} | " + " | ".join(found) + " |")
            print(rows[-1], flush=True)  # noqa: T201 - a script
    text = _report(arguments.source, rows)
    if arguments.clips:
        text += _compare(arguments.clips, arguments.rounds)
    _RESULTS.write_text(text)
    print(text)  # noqa: T201 - a script


def _make_source(folder: Path, count: int, kind: str) -> Path:
    media = folder / "media"
    media.mkdir()
    for number in range(count):
        path = _path(media, number)
        if number % _FILES_PER_FOLDER == 0:
            path.parent.mkdir()
        if number % _LINKS_PER_FILE == 0:
            path.write_bytes(b"\\0")
            first = path
        else:
            os.link(first, path)
    if kind == "folder":
        return media
    table = folder / f"table.{kind}"
    if kind == "parquet":
        schema = pa.schema(
            [("video", pa.string()), ("caption", pa.string()), ("nouns", pa.float64())]
        )
        with pq.ParquetWriter(table, schema) as writer:
            for start in range(0, count, _ROWS_AT_ONCE):
                some = list(_rows(media, start, min(count, start + _ROWS_AT_ONCE)))
                writer.write_table(pa.Table.from_pylist(some, schema=schema))
        return table
    with table.open("w") as file:
        if kind == "csv":
            file.write("video,caption,nouns\n")
        for row in _rows(media, 0, count):
            line = json.dumps(row) if kind == "jsonl" else ",".join(map(str, row.values()))
            file.write(f"{line}\n")
    return table


def _path(media: Path, number: int) -> Path:
    return media / f"{number // _FILES_PER_FOLDER:04d}" / f"{number:09d}.mp4"


def _rows(media: Path, start: int, end: int) -> Iterator[dict[str, Any]]:
    for number in range(start, end):
        path, caption = str(_path(media, number)), f"A fox runs through a field no. {number}."
        yield {"video": path, "caption": caption, "nouns": number % 17}


def _run(source: Path, out: Path) -> list[str]:
    command = [sys.executable, __file__, "--child", str(source), str(out)]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout  # noqa: S603
    found = json.loads(text)
    return [
        f"{found['rows_per_second']:,.0f}",
        f"{found['rows_per_cpu_second']:,.0f}",
        f"{found['peak_mib']:,.0f}",
        f"{out.stat().st_size / 2**20:,.0f}",
        f"{found['accepted']:,} + {found['rejected']:,} + {found['duplicates']:,}",
    ]


def _measure(source: Path, out: Path) -> None:
    begun, cpu = time.perf_counter(), time.process_time()
    with patch("longtake.data.index.ProbeTask", lambda *_: _StandIn()):
        report = index([source], captions=None, out=out, work=HERE)
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - cpu
    count = report.accepted + report.num_rejected + report.duplicates
    found = {
        "rows_per_second": count / seconds,
        "rows_per_cpu_second": count / cpu_seconds,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "accepted": report.accepted,
        "rejected": report.num_rejected,
        "duplicates": report.duplicates,
    }
    print(json.dumps(found))  # noqa: T201 - read by the parent


def _compare(clips: Path, rounds: int) -> str:
    """The section about trusting metadata: medians of rounds, in one process."""
    speeds: dict[bool, list[float]] = {False: [], True: []}
    reports = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for trusts, found in speeds.items():
                begun = time.process_time()
                reports[trusts] = index(
                    [clips],
                    captions=None,
                    out=Path(folder, "c.parquet"),
                    work=HERE,
                    fresh=True,
                    trusts_metadata=trusts,
                )
                report = reports[trusts]
                count = report.accepted + report.num_rejected + report.duplicates
                found.append(count / (time.process_time() - begun))
    lines = "\n".join(
        f"| {'--trust-metadata' if trusts else 'usual'} | {statistics.median(found):,.0f} | "
        f"{reports[trusts].accepted} + {reports[trusts].num_rejected} + "
        f"{reports[trusts].duplicates} |"
        for trusts, found in speeds.items()
    )
    return f"""
Real clips, some of them damaged; one process, medians of {rounds} rounds:

| | files per CPU-second | clips + rejected + duplicates |
|---|---|---|
{lines}
"""


def _report(source: str, rows: list[str]) -> str:
    load = os.getloadavg()[0]
    busy = (
        f" Other programs were running (load average {load:.0f}): compare rows per CPU-second."
        if load > (os.cpu_count() or 1)
        else ""
    )
    what = "a folder" if source == "folder" else f"a .{source} table"
    lines = "\n".join(rows)
    return f"""# Indexing many rows

`python benchmarks/index_rows.py --source {source}`: files of {what}, by a stand-in that decodes \
nothing, one process on {platform.machine()}.{busy}

| rows | rows per second | rows per CPU-second | peak MiB resident | MiB of the catalog | clips + \
rejected + duplicates |
|---|---|---|---|---|---|
{lines}
"""


if __name__ == "__main__":
    main()

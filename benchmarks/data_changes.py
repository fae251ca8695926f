"""Samples repeated and missing after a resume on changed data, in longtake and in other tools.

    python benchmarks/data_changes.py

600 of 1,000 samples are trained in batches of 20 and the state is saved. Then new loaders restore
it on other data: the same samples, 1,100 (100 more), the first 700, the first 500, or the same ones
on 2 ranks instead of 4; and the epoch is trained to its end. Counted over the epoch, for all ranks
together:

    repeated   how often a sample was given that had been given before
    missing    samples that are in both data sets and were never given
    new        how many of the added samples were given in this epoch

longtake runs its public `Loader` over real (tiny) clips, with each `on_change`; the files of clips
that left the catalog still exist. The other tools run by benchmarks/peers/one_rank.py, each rank in
a process of its own, with the data set rewritten in place. A tool that is not installed is reported
as missing.

Prints a table, and writes it to benchmarks/results/data_changes.md. Two minutes on two CPU cores.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path

import pyarrow as pa

from longtake import __version__
from longtake.config import DataSection, Stage
from longtake.data.batch import Batch
from longtake.data.catalog import Catalog
from longtake.data.index import index
from longtake.data.loader import Loader
from longtake.demo.shapes import HEIGHT, NUM_FRAMES, WIDTH, write_clips
from longtake.errors import DataChangedError

_RESULTS = Path(__file__).parent / "results" / "data_changes.md"
_ONE_RANK = Path(__file__).parent / "peers" / "one_rank.py"
_PEERS = {
    "torchdata": "torchdata",
    "mosaicml-streaming": "streaming",
    "litdata": "litdata",
    "grain": "grain",
}
_BATCH, _STEPS, _SIZE, _MOST = 20, 30, 1000, 1100
_MOST_SECONDS = 100
_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|StopIteration)\b.*(?:\n.*)?", re.MULTILINE)


@dataclass(frozen=True)
class Change:
    """A change of the data between saving and restoring the state."""

    title: str
    size: int = _SIZE
    ranks_before: int = 1
    ranks: int = 1


_CHANGES = (
    Change("the same 1,000"),
    Change("1,100", 1100),
    Change("700", 700),
    Change("500", 500),
    Change("4 ranks, then 2", ranks_before=4, ranks=2),
)


class StoppedError(Exception):
    """A tool refused to resume; the message has its reason."""


def main() -> None:
    """Run all tools through all changes; print and write the table."""
    rows: list[str] = []
    said: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for policy in ("refuse", "merge", "finish"):
            cells = [_ours(Path(folder), policy, change, said) for change in _CHANGES]
            rows.append(f"| longtake, {policy} | " + " | ".join(cells) + " |")
    found = [name for name, module in _PEERS.items() if importlib.util.find_spec(module)]
    for name in found:
        rows.append(f"| {name} | " + " | ".join(_theirs(name, said)) + " |")
    lines = [*_head(found), *rows, *_footnotes(said)]
    _RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))  # noqa: T201


def _cell(change: Change, before: Sequence[int], after: Sequence[int]) -> str:
    given = Counter([*before, *after])
    repeated = given.total() - len(given)
    missing = set(range(min(_SIZE, change.size))) - given.keys()
    cell = f"{repeated} / {len(missing)}"
    added = set(range(_SIZE, change.size))
    return f"{cell} / {len(added & given.keys())} of {len(added)}" if added else cell


def _note(tool: str, change: Change, why: str, said: list[str]) -> str:
    """The field of a tool that refused to resume; its message goes below the table."""
    said.append(f"{tool}, {change.title}: {why}")
    return f"stopped [{len(said)}]"


def _ours(folder: Path, policy: str, change: Change, said: list[str]) -> str:
    everything = folder / "clips" / "all.parquet"
    if not everything.exists():
        captions = write_clips(everything.parent, _MOST, seed=0)
        index([captions.parent], captions=captions, out=everything)
    catalog, numbers = Catalog.load(everything), {}
    for clip in catalog.clips():
        numbers[clip.identity] = int(Path(clip.path).stem.rpartition("_")[2])
    assert len(numbers) == _MOST
    data = DataSection.model_validate(
        {
            "catalog": folder / "now.parquet",
            "buckets": [{"num_frames": NUM_FRAMES, "height": HEIGHT, "width": WIDTH}],
            "stages": [Stage(name="all", epochs=1)],
            "on_change": policy,
            "workers": 0,
        }
    )
    kept = folder / "kept"

    def loaders(ranks: int, size: int) -> list[Loader]:
        is_there = [numbers[clip.identity] < size for clip in catalog.clips()]
        Catalog(catalog.table.filter(pa.array(is_there)), catalog.set_aside).save(
            folder / "now.parquet"
        )
        return [
            Loader(data, batch_size=_BATCH, seed=7, rank=rank, world_size=ranks, kept=kept)
            for rank in range(ranks)
        ]

    before: list[Batch] = []
    after: list[Batch] = []
    ranks = loaders(change.ranks_before, _SIZE)
    ranks[0].keep_catalogs()
    for loader in ranks:
        before += islice(loader.batches(), _STEPS)
    state = json.dumps(ranks[0].state_dict())
    try:
        for loader in loaders(change.ranks, change.size):
            loader.load_state_dict(json.loads(state))
            after += list(loader.batches())
    except DataChangedError as error:
        what = str(error).replace(f"{folder}/", "").splitlines()
        return _note("longtake", change, f"DataChangedError: {' '.join(what[:2])} […]", said)
    return _cell(change, _numbers(before, numbers), _numbers(after, numbers))


def _numbers(batches: Sequence[Batch], numbers: dict[str, int]) -> list[int]:
    return [
        numbers[identity]
        for batch in batches
        for identity, weight in zip(batch.identities, batch.weights.tolist(), strict=True)
        if weight  # else it only fills a place
    ]


def _theirs(tool: str, said: list[str]) -> list[str]:
    """The fields of one tool, in the order of the changes."""
    cells = []
    for ranks, changes in groupby(_CHANGES, lambda change: change.ranks_before):
        with tempfile.TemporaryDirectory() as folder:
            state, data = Path(folder) / "state", Path(folder) / "data"
            state.mkdir()
            _rewrite(tool, data, _SIZE)
            before = _run(tool, "take", data, ranks, state, str(_STEPS))
            for change in changes:
                if change.size != _SIZE:
                    _rewrite(tool, data, change.size)
                try:
                    after = _run(tool, "resume", data, change.ranks, state)
                    cells.append(_cell(change, before, after))
                except StoppedError as error:
                    cells.append(_note(tool, change, str(error), said))
    return cells


def _rewrite(tool: str, data: Path, size: int) -> None:
    """Write a data set, in place of an existing one."""
    if data.exists():
        shutil.rmtree(data)
    data.mkdir()
    _finish([_start(tool, "write", data, 0, 1, 0, str(size))])


def _run(tool: str, what: str, data: Path, ranks: int, state: Path, *rest: str) -> list[int]:
    """The samples that each rank was given."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = (str(_BATCH // ranks), str(state), *rest)
    started = [_start(tool, what, data, rank, ranks, port, *arguments) for rank in range(ranks)]
    return [number for text in _finish(started) for number in json.loads(text.splitlines()[-1])]


def _start(
    tool: str, what: str, data: Path, rank: int, ranks: int, port: int, *rest: str
) -> subprocess.Popen[str]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "GLOBAL_RANK": rank, "MASTER_PORT": port}
    place |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "NNODES": 1}
    return subprocess.Popen(  # noqa: S603 - our own file
        [sys.executable, "-W", "ignore", str(_ONE_RANK), tool, what, str(data), *rest],
        env={**os.environ, "MASTER_ADDR": "127.0.0.1"} | {k: str(v) for k, v in place.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _finish(started: Sequence[subprocess.Popen[str]]) -> list[str]:
    """What each printed.

    Raises:
        StoppedError: one failed or took too long.
    """
    printed = []
    try:
        for process in started:
            text, complaint = process.communicate(timeout=_MOST_SECONDS)
            if process.returncode:
                raise StoppedError((_ERROR.findall(complaint) or ["no word"])[-1])
            printed.append(text)
    except subprocess.TimeoutExpired:
        raise StoppedError(f"it hung for more than {_MOST_SECONDS} s") from None
    finally:
        for process in started:
            process.kill()
            process.wait()
    return printed


def _head(found: Sequence[str]) -> list[str]:
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("torch", "numpy", *found)
    )
    missing = "".join(f" {name} is not installed." for name in _PEERS if name not in found)
    titles = " | ".join(change.title for change in _CHANGES)
    return [
        "# Resuming on data that changed",
        "",
        f"`python benchmarks/data_changes.py`, longtake {__version__}, Python "
        f"{platform.python_version()}, {versions}.{missing}",
        "",
        f"{_STEPS * _BATCH} of {_SIZE:,} samples were trained; then the state was restored on what "
        "a column says, and the epoch was trained to its end. Each field: samples repeated / "
        "samples missing (/ how many of the added ones came in this epoch).",
        "",
        f"| tool | {titles} |",
        "|---|" + "---|" * len(_CHANGES),
    ]


def _footnotes(said: Sequence[str]) -> list[str]:
    """The messages of all refusals, each as one line."""
    if not said:
        return []
    texts = [" ".join(text.split()) for text in said]
    return ["", *(f"[{number}] {text}\n" for number, text in enumerate(texts, start=1))]


if __name__ == "__main__":
    main()

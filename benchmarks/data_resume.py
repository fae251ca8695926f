"""Time and memory until a resumed run knows its first batch.

    python benchmarks/data_resume.py [--clips 1e4 1e6 1e8] [--rounds 3] [--only NAME...]

Each figure comes from a process of its own, in which everything is imported and nothing was called
yet. Resumed in the middle of an epoch, a batch of 256:

    longtake, order      from (sizes of 40 buckets, seed, step) to the batch's clips in its bucket
    longtake, plan       the same through `Plan.batch`, to rows of the catalog; before that, and
                         timed separately, the plan is made once per launch: captions are read,
                         every clip is assigned to its bucket (`longtake.data.plan.begin`)
    longtake, shares     the same where each of four lengths has a batch size of its own, and four
                         more buckets, of 9 frames, get a fifth of the clips that fit them
    torchdata            `load_state_dict` of a StatefulDataLoader over range(N) with shuffle=True,
                         then its first batch
    mosaicml-streaming   `get_partitions` ("relaxed") and `get_shuffle` ("py1e") with drop_first, as
                         its random batching calls them; shards of 10,000
    grain                `set_state` of a DataLoader over a RangeDataSource with a shuffling
                         IndexSampler, then its first batch; IndexSampler has no buckets

The other tools' states are those after one batch with the count of samples set to half an epoch, so
that half an epoch need not be read first. The catalog of the longtake plan is a real `Catalog` of a
table that has only the columns which planning reads, mapped from a file.

Memory is the anonymous memory of the process (RssAnon in /proc/self/status) afterwards, less that
before, both after freed memory was returned to the kernel. Mapped files do not count, as they can
be dropped and read again. The table also has the highest resident set, including mapped files. Of
planning it has the most that it took beside the mapped catalog: the highest anonymous memory, asked
for every 2 ms, and the file that the rows of the buckets are mapped from, 4 bytes a clip. A
tool that is not installed is reported as missing; a process that takes more than 150 seconds is
stopped. Prints a table, and writes it to benchmarks/results/data_resume.md. Three minutes and some
9 GB of memory with all tools at 10^8.
"""

import argparse
import ctypes
import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from longtake.config import Bucket, DataSection
from longtake.data.catalog import ASIDE_SCHEMA, Catalog
from longtake.data.order import EpochSpan
from longtake.data.plan import begin

_RESULTS = Path(__file__).parent / "results" / "data_resume.md"
_BATCH, _SEED = 256, 7
_MOST_SECONDS = 150
_WATCH_SECONDS = 0.002
_ROWS_PER_CHUNK = 2**20
_LENGTHS = (17, 33, 65, 121)
_OF_LENGTHS = {17: 512, 33: 256, 65: 128, 121: 64}  # clips of a batch
_WIDE = ((480, 848), (544, 736), (720, 1280), (816, 1104))
_SIZES = (*_WIDE, *((width, height) for height, width in _WIDE), (640, 640), (960, 960))
_PEERS = {"torchdata": "torchdata", "mosaicml-streaming": "streaming", "grain": "grain"}


def main() -> None:
    """Measure all one after another, or the one of `--one`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clips", type=float, nargs="+", default=[1e4, 1e6, 1e8])
    parser.add_argument("--rounds", type=int, default=3, help="at 10^8 the peers have one")
    parser.add_argument("--only", nargs="+", choices=_WAYS, help="replace the rows of these")
    parser.add_argument("--one", choices=sorted(_WAYS))
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(_measured(asked.one, int(asked.clips[0]))))  # noqa: T201
        return
    lines = _RESULTS.read_text("utf-8").splitlines() if asked.only else _head(asked.rounds)
    for clips in map(int, asked.clips):
        for name in asked.only or _WAYS:
            if name not in _PEERS or importlib.util.find_spec(_PEERS[name]):
                is_quick = clips <= 10**6 or name not in _PEERS
                runs = [_in_a_process(name, clips) for _ in range(asked.rounds if is_quick else 1)]
                row, place = _row(name, clips, [run for run in runs if run]), len(lines)
                for number, line in enumerate(lines):
                    if line.split("|")[:3] == row.split("|")[:3]:
                        place = number
                lines[place : place + 1] = [row]
    _RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))  # noqa: T201


def _in_a_process(name: str, clips: int) -> dict[str, float] | None:
    """The measurements of one process; None if it took too long."""
    command = [sys.executable, "-W", "ignore", __file__, "--one", name, "--clips", str(clips)]
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run(  # noqa: S603 - our own program
            command, stdout=subprocess.PIPE, timeout=_MOST_SECONDS, check=True
        )
        measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return measured
    return None


def _measured(name: str, clips: int) -> dict[str, float]:
    """Run the steps of one tool up to its first batch; the last step is the cost of resuming."""
    steps = _WAYS[name](clips)
    next(steps)  # all is imported, and the state is there
    before, planning, taken = _own_bytes(), 0.0, 0.0
    with _highest_anonymous() as highest:
        begun = time.perf_counter()
        for step in steps:
            elapsed = time.perf_counter() - begun
            if not isinstance(step, int):
                assert len(step) in (_BATCH, *_OF_LENGTHS.values())
                break
            taken = (highest[0] - before + step) / clips
            planning, begun = elapsed, time.perf_counter()
    held = (_own_bytes() - before) / clips
    peak = _status("VmHWM")
    return {"first": elapsed, "planning": planning, "taken": taken, "held": held, "peak": peak}


@contextmanager
def _highest_anonymous() -> Iterator[list[float]]:
    """The highest anonymous memory of this process so far, in a list of one."""
    highest, stopped = [_status("RssAnon")], threading.Event()

    def watch() -> None:
        while not stopped.wait(_WATCH_SECONDS):
            highest[0] = max(highest[0], _status("RssAnon"))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield highest
    finally:
        stopped.set()
        thread.join()


def _own_bytes() -> float:
    """Anonymous memory of the process, after freed memory was returned to the kernel."""
    gc.collect()
    pa.default_memory_pool().release_unused()
    with suppress(AttributeError):  # glibc's
        ctypes.CDLL(None).malloc_trim(0)
    return _status("RssAnon")


def _status(name: str) -> float:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return float(line.split()[1]) * 1024
    raise LookupError(name)


def _order(clips: int) -> Iterator[Any]:
    shares = np.random.default_rng(0).dirichlet(np.ones(len(_LENGTHS) * len(_SIZES)))
    sizes = tuple(int(share * clips) for share in shares)
    step = sum(sizes) // _BATCH * 7 // 2
    yield "ready"
    yield EpochSpan(sizes, _BATCH, _SEED).batch(step).positions


def _plan(clips: int) -> Iterator[Any]:
    return _resumed(
        clips,
        [
            Bucket(num_frames=frames, height=height, width=width)
            for frames in _LENGTHS
            for height, width in _SIZES
        ],
    )


def _shares(clips: int) -> Iterator[Any]:
    shapes = [
        Bucket(num_frames=frames, height=height, width=width, batch_size=batch_size)
        for frames, batch_size in _OF_LENGTHS.items()
        for height, width in _SIZES
    ]
    shapes += [
        Bucket(num_frames=9, height=height // 2, width=width // 2, batch_size=_BATCH, share=0.2)
        for height, width in _WIDE
    ]
    return _resumed(clips, shapes)


def _resumed(clips: int, shapes: list[Bucket]) -> Iterator[Any]:
    data = DataSection(catalog=Path("stand-in.parquet"), buckets=tuple(shapes))
    with tempfile.NamedTemporaryFile() as file:
        _write_table(file.name, clips)
        catalog = Catalog(
            pa.ipc.open_file(pa.memory_map(file.name)).read_all(),
            pa.Table.from_pylist([], schema=ASIDE_SCHEMA),
            stored_fingerprint="0" * 32,
        )
        yield "ready"
        plan = begin({"catalog": catalog}, data, _BATCH, _SEED)
        members = [stream.parts[0].members for stream in plan.streams()]
        rows = [rows for each in members for rows in each.rows]
        rows += [each.rows for member in members for each in member.shared]
        yield sum(each.nbytes for each in rows if isinstance(each, np.memmap))
        yield plan.batch(clips // _BATCH // 2).rows


def _write_table(path: str, clips: int) -> None:
    """Write the columns that planning reads, in chunks as long as a catalog's."""
    chance = np.random.default_rng(1)
    shapes = np.array(_SIZES, np.int32)
    schema = pa.schema([("caption", pa.string())])
    schema = pa.schema(
        [*schema, *((name, pa.int32()) for name in ("num_frames", "height", "width"))]
    )
    with pa.ipc.new_file(path, schema) as writer:
        for start in range(0, clips, _ROWS_PER_CHUNK):
            count = min(_ROWS_PER_CHUNK, clips - start)
            heights, widths = shapes[chance.integers(len(shapes), size=count)].T
            columns = [
                pa.repeat("c", count),
                pa.array(chance.integers(17, 200, count, np.int32)),
                pa.array(np.ascontiguousarray(heights)),
                pa.array(np.ascontiguousarray(widths)),
            ]
            writer.write_table(pa.table(columns, schema))


def _torchdata(clips: int) -> Iterator[Any]:
    import torch
    from torchdata.stateful_dataloader import (  # type: ignore[import-not-found,unused-ignore]
        StatefulDataLoader,
    )

    def loader() -> Any:
        generator = torch.Generator().manual_seed(_SEED)
        return StatefulDataLoader(
            range(clips), batch_size=_BATCH, shuffle=True, generator=generator
        )

    small = iter(StatefulDataLoader(range(2 * _BATCH), batch_size=_BATCH, shuffle=True))
    next(small)
    generator_state = torch.Generator().manual_seed(_SEED).get_state()
    taken = clips // 2 // _BATCH
    state = {
        "_index_sampler_state": None,
        "_sampler_iter_state": {
            "samples_yielded": taken * _BATCH,
            "sampler_iter_state": {"generator": generator_state, "yielded": taken * _BATCH},
        },
        "_sampler_iter_yielded": taken,
        "_num_yielded": taken,
        "_IterableDataset_len_called": None,
        "_shared_seed": None,
        "fetcher_state": None,
        "dataset_state": None,
        "_iterator_finished": False,
    }
    yield "ready"
    resumed = loader()
    resumed.load_state_dict(state)
    batches = iter(resumed)
    yield next(batches)


def _streaming(clips: int) -> Iterator[Any]:
    from streaming.base.partition import (  # type: ignore[import-not-found,unused-ignore]
        get_partitions,
    )
    from streaming.base.shuffle import (  # type: ignore[import-not-found,unused-ignore]
        get_shuffle,
    )

    shards = np.full(-(-clips // 10_000), 10_000)
    shards[-1] = clips - 10_000 * (len(shards) - 1)
    taken = clips // 2 // _BATCH * _BATCH
    yield "ready"
    places = get_partitions("relaxed", clips, 1, 1, 1, 1, _BATCH, taken)
    shuffled = get_shuffle("py1e", shards, 1, _SEED, 0, 1 << 18)
    order = np.where(places != -1, shuffled[places], -1)
    yield order[0, 0, 0, 0]


def _grain(clips: int) -> Iterator[Any]:
    from grain import python as grain  # type: ignore[import-not-found,unused-ignore]

    def batches() -> Any:
        sampler = grain.IndexSampler(
            clips,
            shuffle=True,
            seed=_SEED,
            num_epochs=1,
            shard_options=grain.NoSharding(),
        )
        source = grain.RangeDataSource(0, clips, 1)
        operations = [grain.Batch(_BATCH)]
        return iter(
            grain.DataLoader(
                data_source=source, sampler=sampler, operations=operations, worker_count=0
            )
        )

    first = batches()
    next(first)
    state = json.loads(first.get_state())
    state["last_seen_indices"]["0"] = clips // 2 // _BATCH * _BATCH - 1
    del first
    yield "ready"
    resumed = batches()
    resumed.set_state(json.dumps(state).encode())
    yield next(resumed)


_WAYS: dict[str, Callable[[int], Iterator[Any]]] = {
    "longtake, order": _order,
    "longtake, plan": _plan,
    "longtake, shares": _shares,
    "torchdata": _torchdata,
    "mosaicml-streaming": _streaming,
    "grain": _grain,
}


def _head(rounds: int) -> list[str]:
    found = {name for name, module in _PEERS.items() if importlib.util.find_spec(module)}
    versions = [f"{name} {importlib.metadata.version(name)}" for name in sorted(found)]
    missing = [f"{name} is not installed." for name in sorted(_PEERS.keys() - found)]
    return [
        "# Resuming: time to the first batch, and memory",
        "",
        f"`python benchmarks/data_resume.py`, {platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, "
        + ", ".join([f"numpy {np.__version__}", f"pyarrow {pa.__version__}", *versions])
        + f". Medians of {rounds} processes each, of one where it is longer than that. What is "
        "measured is said in the script. " + " ".join(missing),
        "",
        "Wanted: below 10 ms, and below 1 byte a clip; of planning 10^8 clips at most 5 s, and 16 "
        "bytes a clip.",
        "",
        "| clips | what | first batch | bytes held a clip | held in all | highest resident "
        "| planning, once per launch | most bytes a clip then |",
        "|---|---|---|---|---|---|---|---|",
    ]


def _row(name: str, clips: int, runs: list[dict[str, float]]) -> str:
    if not runs:
        return f"| {clips:,} | {name} | over {_MOST_SECONDS} s | | | | | |"
    first, planning, taken, held, peak = (
        statistics.median(run[key] for run in runs)
        for key in ("first", "planning", "taken", "held", "peak")
    )
    return (
        f"| {clips:,} | {name} | {_seconds(first)} | {held:.2f} | {held * clips / 2**20:.1f} MiB "
        f"| {peak / 2**20:.0f} MiB | {_seconds(planning) if planning else ''} "
        f"| {f'{taken:.1f}' if planning else ''} |"
    )


def _seconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms" if seconds < 0.1 else f"{seconds:.2f} s"


if __name__ == "__main__":
    main()

"""How fast entries of a cache are read from packs, and how fast they are found.

    python benchmarks/cache_packs.py [--rounds 15] [--entries 100000000] [--folder DIR]

Writes a cache of each kind of entry to a new folder in DIR (about 2 GB, and 32 bytes for each of
`--entries`), reads it once so that it is in the page cache, and then times one thread that reads
entries in random order through `PackIndex.read`, with checksums and without. Rounds of both
alternate. A rate is bytes in the packs, per second of the process's CPU time (`per core`) and per
second of the clock. The comparison is `bytes.join` of the same files, read by 8 MiB.

For the index, that of a cache with so many entries is written as `PackIndex.save` would, with
random keys, and entries are looked for in it that are there.

Prints a table, and writes it to benchmarks/results/cache_packs.md; of `--rounds 0`, which leaves
out reading, it prints the sentence about the index only. Some minutes. 10^8 entries need 6 GB of
memory.
"""

import argparse
import hashlib
import os
import platform
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from longtake.data import packs
from longtake.data.packs import CacheEntry, PackIndex, PackWriter

_RESULTS = Path(__file__).parent / "results" / "cache_packs.md"
_LOOKUPS = 10_000
_KINDS = {
    "latents 720p x 81, fp32 (19 MB)": ((16, 21, 90, 160), False, 24),
    "latents 720p x 81, bf16 (10 MB)": ((16, 21, 90, 160), True, 48),
    "latents 240p x 101, bf16 (1.3 MB)": ((16, 26, 30, 54), True, 384),
    "embeddings of 60 tokens, bf16 (0.5 MB)": ((60, 4096), True, 1024),
}
"""Shape, whether values are rounded to bf16, and how many entries."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--entries", type=int, default=10**8)
    parser.add_argument("--folder", type=Path, default=None)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        f"`python benchmarks/cache_packs.py --rounds {asked.rounds} --entries {asked.entries}`: "
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, one thread; "
        f"medians of {asked.rounds} rounds, fastest and slowest in brackets.",
        "",
        "| entries | checksums | GB/s per core | GB/s by the clock | file, GB/s per core |",
        "|---|---|---|---|---|",
    ]
    folder = Path(tempfile.mkdtemp(prefix="packs", dir=asked.folder))
    try:
        for name, (shape, is_narrow, count) in _KINDS.items() if asked.rounds else ():
            lines += _reading(folder / "cache", name, shape, is_narrow, count, asked.rounds)
            shutil.rmtree(folder / "cache")
        lines += ["", *_finding(folder / "large", asked.entries)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if asked.rounds:
        _RESULTS.write_text("\n".join(["# Reading packs", "", *lines]) + "\n", encoding="utf-8")
    print("\n".join(lines if asked.rounds else lines[-1:]))  # noqa: T201


def _reading(
    folder: Path, name: str, shape: tuple[int, ...], is_narrow: bool, count: int, rounds: int
) -> list[str]:
    keys = (hashlib.blake2b(str(number).encode(), digest_size=16) for number in range(count))
    entries = [CacheEntry("latents", key.hexdigest(), name) for key in keys]
    with PackWriter(PackIndex(folder)) as writer:
        for number, entry in enumerate(entries):
            values = torch.randn(shape, generator=torch.Generator().manual_seed(number % 8))
            writer.add(entry, {"latents": values.bfloat16().float() if is_narrow else values})
    files = list(folder.glob("latents/*"))
    indices = {True: PackIndex(folder), False: PackIndex(folder, verify=False)}
    rates: dict[object, list[tuple[float, float]]] = {True: [], False: [], "file": []}
    for number in range(rounds + 1):
        order = np.random.default_rng(number).permutation(count)
        for verify, index in indices.items():

            def read(index: PackIndex = index, order: object = order) -> None:
                for place in order:  # type: ignore[attr-defined]
                    index.read(entries[place])

            rates[verify].append(_rate(read, writer.num_bytes))
        rates["file"].append(_rate(lambda: _read_files(files), writer.num_bytes))
    rows = []
    for verify in (True, False):
        core, clock = (_spread([each[at] for each in rates[verify][1:]]) for at in (0, 1))
        alone = _spread([each[0] for each in rates["file"][1:]])
        rows.append(f"| {name} | {'on' if verify else 'off'} | {core} | {clock} | {alone} |")
    return rows


def _read_files(files: list[Path]) -> None:
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.read(2**23):
                pass


def _finding(folder: Path, count: int) -> list[str]:
    """Lookups in the index of a cache with so many entries, of which no pack is there."""
    rng, per_pack = np.random.default_rng(0), 400
    high = np.sort(rng.integers(0, 2**64, count, np.uint64))
    low, pack = rng.integers(0, 2**64, count, np.uint64), np.empty(count, np.uint32)
    pack[:] = np.arange(count) // per_pack
    small = np.zeros(count, np.uint32)
    (folder / "latents").mkdir(parents=True)
    begun = time.perf_counter()
    index = PackIndex(folder)
    layout = packs._text_of([packs._Part("latents", "BF16", (16, 26, 30, 54), "F32", 16)])
    index._layout(layout)
    for number in range(-(-count // per_pack)):
        index._pack(f"latents/{number:016x}", 0)
    index._runs = [packs._Run(high, low, pack, small, small, small)]
    index.save()
    saving = time.perf_counter() - begun
    keys = [f"{high[at]:016x}{low[at]:016x}" for at in rng.integers(0, count, _LOOKUPS)]
    num_packs = len(index._packs)
    del index, high, low, pack, small
    for number in range(num_packs):  # empty, of the size that is in the index
        (folder / "latents" / f"{number:016x}.safetensors").touch()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.perf_counter()
    found = PackIndex(folder)
    opening = time.perf_counter() - begun
    times = []
    for key in keys:
        begun = time.perf_counter()
        assert found.holds(CacheEntry("latents", key, "one"))
        times.append(time.perf_counter() - begun)
    size = sum(path.stat().st_size for path in (folder / "index").iterdir())
    return [
        f"An index of {count:,} entries in {num_packs:,} packs: {size / count:.1f} bytes an entry, "
        f"written in {saving:.1f} s (peak {peak / 2**20:.1f} GiB), opened in {opening:.2f} s "
        f"(a look at each pack included), an entry found in {statistics.median(times) * 1e6:.0f} "
        f"µs (median of {_LOOKUPS:,}; 99th percentile {np.quantile(times, 0.99) * 1e6:.0f} µs).",
    ]


def _rate(read: Callable[[], None], num_bytes: int) -> tuple[float, float]:
    """GB/s per CPU-second and per second."""
    cpu, clock = time.process_time(), time.perf_counter()
    read()
    cpu, clock = time.process_time() - cpu, time.perf_counter() - clock
    return num_bytes / 1e9 / cpu, num_bytes / 1e9 / clock


def _spread(rates: list[float]) -> str:
    return f"{statistics.median(rates):.2f} ({min(rates):.2f}-{max(rates):.2f})"


if __name__ == "__main__":
    main()

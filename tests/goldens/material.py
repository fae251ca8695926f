"""The clips of all scenarios: a few squares that move, and what else a folder of clips may hold."""

import json
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

NUM_CLIPS = 40
SIDE, FRAMES, BAD_FRAMES = 32, 9, 12
"""Clips of BAD_FRAMES have captions so long that a scenario's module spoils their tokens."""
_NUM_BAD = 8
_COLORS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (40, 70, 220), "white": (240,) * 3}
_WAYS = {"left": (-2, 0), "right": (2, 0), "up": (0, -2), "down": (0, 2)}
BAD_CAPTION = "a square that spoils every batch it is in"


def write_clips(folder: Path) -> None:
    """Write clips, pictures, captions, and files that an index has to reject."""
    folder.mkdir(parents=True)
    captions = []
    for number in range(NUM_CLIPS):
        is_bad = number >= NUM_CLIPS - _NUM_BAD
        color, way = list(_COLORS)[number % 4], list(_WAYS)[number // 4 % 4]
        frames = _frames(number, _COLORS[color], _WAYS[way], BAD_FRAMES if is_bad else FRAMES)
        name = f"clip_{number:02d}.mp4"
        _write(folder / name, frames)
        caption = BAD_CAPTION if is_bad else f"{color} square {way}"
        captions.append({"video": name, "caption": caption})
    for number, color in enumerate(_COLORS):
        picture = _frames(number, _COLORS[color], (0, 0), 1)[0]
        Image.fromarray(picture).save(folder / f"picture_{number}.png")
        captions.append({"video": f"picture_{number}.png", "caption": f"{color} still"})
    (folder / "copy.mp4").write_bytes((folder / "clip_00.mp4").read_bytes())
    (folder / "damaged.mp4").write_bytes((folder / "clip_01.mp4").read_bytes()[:700])
    (folder / "page.mp4").write_text("<html>404</html>")
    lines = "".join(f"{json.dumps(each)}\n" for each in captions)
    (folder / "captions.jsonl").write_text(lines)


def _frames(
    number: int, color: tuple[int, ...], way: tuple[int, int], count: int
) -> NDArray[np.uint8]:
    generator = np.random.default_rng(number)
    background = generator.integers(0, 60, (SIDE, SIDE, 3))
    x, y = generator.integers(4, SIDE - 12, 2)
    frames = np.empty((count, SIDE, SIDE, 3), np.uint8)
    for index in range(count):
        frames[index] = background
        left, top = (x + way[0] * index) % (SIDE - 8), (y + way[1] * index) % (SIDE - 8)
        frames[index, top : top + 8, left : left + 8] = color
    return frames


def _write(path: Path, frames: NDArray[np.uint8]) -> None:
    with av.open(path, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=8)
        stream.width, stream.height, stream.pix_fmt = SIDE, SIDE, "yuv420p"
        stream.options = {"crf": "12", "preset": "veryfast", "x264-params": "mbtree=0"}
        stream.thread_count = 1
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, "rgb24")))
        container.mux(stream.encode(None))

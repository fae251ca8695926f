"""Draws pairs of pictures to try picture editing with: a shape, where it shall go, and there it is.

    python examples/make_pairs.py PAIRS

writes PAIRS/before, PAIRS/pose and PAIRS/after, 96 pictures of 64 x 64 each under the same names,
PAIRS/captions.jsonl, and the catalog of PAIRS/after.
"""

import json
import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw

from longtake.data.index import index

SIZE, RADIUS, COUNT = 64, 9, 96
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230)}
SHAPES = {"circle": "ellipse", "square": "rectangle"}


def main(folder: Path) -> None:
    """Draw all pairs and index them."""
    draw = random.Random(0)  # noqa: S311 - pictures, not secrets
    captions = []
    for name in ("before", "pose", "after"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for number in range(COUNT):
        colour, shape = draw.choice(list(COLOURS)), draw.choice(list(SHAPES))
        start, end = ((_place(draw), _place(draw)) for _ in range(2))
        file = f"{number:03}.png"
        _picture(SHAPES[shape], start, COLOURS[colour]).save(folder / "before" / file)
        _picture("ellipse", end, (255, 255, 255)).save(folder / "pose" / file)
        _picture(SHAPES[shape], end, COLOURS[colour]).save(folder / "after" / file)
        captions.append({"image": file, "caption": f"move the {colour} {shape}"})
    lines = folder / "captions.jsonl"
    lines.write_text("".join(f"{json.dumps(line)}\n" for line in captions))
    index([folder / "after"], captions=lines, out=folder / "catalog.parquet")


def _place(draw: random.Random) -> int:
    return draw.randint(RADIUS + 2, SIZE - RADIUS - 2)


def _picture(shape: str, place: tuple[int, int], colour: tuple[int, int, int]) -> Image.Image:
    picture = Image.new("RGB", (SIZE, SIZE), (16, 16, 24))
    x, y = place
    box = (x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS)
    getattr(ImageDraw.Draw(picture), shape)(box, fill=colour)
    return picture


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("Say where the pictures shall go: python examples/make_pairs.py PAIRS")
    main(Path(sys.argv[1]))

"""How pictures of any size become pictures of one size."""

import math
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Crop:
    """How a frame becomes a bucket's size: scaled to cover it, then cut to it."""

    scaled_height: int
    scaled_width: int
    top: int
    left: int


class Size(Protocol):
    """Anything of a height and a width in pixels, such as a bucket."""

    @property
    def height(self) -> int:
        """Rows."""
        ...

    @property
    def width(self) -> int:
        """Columns."""
        ...


def crop(height: int, width: int, shape: Size, across: float = 0.5, down: float = 0.5) -> Crop:
    """Scale to cover a shape and cut: `across` and `down` (0 to 1) say where, 0.5 the middle."""
    scale = max(shape.height / height, shape.width / width)
    scaled_height = max(shape.height, round(height * scale))
    scaled_width = max(shape.width, round(width * scale))
    top = max(0, math.ceil((scaled_height - shape.height + 1) * down) - 1)
    left = max(0, math.ceil((scaled_width - shape.width + 1) * across) - 1)
    return Crop(scaled_height, scaled_width, top, left)

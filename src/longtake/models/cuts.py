"""Cuts of rows or columns into pieces that are read with what their results depend on."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Reach:
    """The pixels on which a row (or column) of features depends."""

    stride: int  # pixels per row of features
    before: int  # further pixels above the row's own
    after: int  # further pixels below them


@dataclass(frozen=True)
class Cut:
    """One tile's part of the rows, or of the columns."""

    read: slice  # pixels that the tile's layers read
    kept: slice  # features of the tile that are right, because their pixels were all read
    place: slice  # where these are in the features of the whole picture


def cuts(size: int, tile: int, reach: Reach) -> Iterator[Cut]:
    """Divide pixels of a row or column into tiles of nearly equal size, at most `tile` each."""
    stride = reach.stride
    num_features = size // stride
    num_tiles = -(-num_features // max(1, tile // stride))
    each = -(-num_features // num_tiles)
    for start in range(0, num_features, each):
        end = min(start + each, num_features)
        # A tile begins at whole features, so that strided layers meet the same pixels as always.
        first = max(0, start * stride - reach.before) // stride
        last = min(num_features, -(-(end * stride + reach.after) // stride))
        read = slice(first * stride, last * stride)
        yield Cut(read, slice(start - first, end - first), slice(start, end))

"""A file of some bytes cannot take all memory or hours: it is refused, and the reason says why."""

import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from longtake.data.clip import Media
from longtake.data.crop import Crop
from longtake.data.decode_worker import DecodePool
from longtake.data.index import index
from longtake.data.indexing.item import Item
from longtake.data.indexing.probing import probe_all
from longtake.data.limits import Limits
from longtake.data.references import Reference
from longtake.data.show import show
from longtake.data.show.contact_sheet import CropRow, contact_sheet
from longtake.errors import ClipError

_GIF_FRAME = (
    b"\x21\xf9\x04\x04\x05\0\0\0\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\0"
)


def _gif(path: Path, width: int, height: int, num_frames: int = 1) -> Path:
    """Frames of one pixel on a large screen: 23 bytes each."""
    header = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    path.write_bytes(header + _GIF_FRAME * num_frames + b";")
    return path


def _png(path: Path, width: int, height: int, pixels: bytes = b"") -> Path:
    """A picture of black or, without pixels, its beginning."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + data)
    return path


def _found(path: Path, limits: Limits) -> tuple[str, bool]:
    """Why a file is rejected, and whether it would be again."""
    items = [Item(Media(str(path)))]
    (outcome,) = probe_all(items, workers=1, limits=limits)
    assert isinstance(outcome.found, ClipError), outcome.found
    return outcome.found.reason, outcome.is_lasting


@pytest.mark.parametrize(("make", "name"), [(_gif, "large.gif"), (_png, "large.png")])
def test_pictures_of_too_many_pixels_are_rejected(
    tmp_path: Path, make: Callable[[Path, int, int], Path], name: str
) -> None:
    """Before any is decoded; less memory allows fewer."""
    path = make(tmp_path / name, 9400, 9400)
    reason, is_lasting = _found(path, Limits())
    assert "has 9400x9400 pixels, and 67,108,864 are allowed in 1 GiB of memory" in reason
    assert "--memory-gib" in reason
    assert is_lasting
    assert "in 0.5 GiB" in _found(make(path, 7000, 7000), Limits(memory_gib=0.5))[0]


def test_a_file_that_takes_too_long_is_rejected_for_this_time(tmp_path: Path) -> None:
    """Though every frame is a sign of life; a faster machine may read it."""
    path = _gif(tmp_path / "many.gif", 4000, 4000, 5000)
    reason, is_lasting = _found(path, Limits(seconds=0.1))
    assert reason.startswith("was not decoded in 2 s: 0.1 s (raise --timeout-seconds")
    assert not is_lasting


def test_a_process_has_no_more_memory_than_it_may(tmp_path: Path) -> None:
    """An image is read as a whole, however long it is; the next one is read as ever."""
    path = _png(tmp_path / "long.png", 8, 8, bytes(8 * 25))
    with path.open("ab") as file:
        file.truncate(2**28)
    wanted = _reference(path)
    with DecodePool(1, memory_gib=0.125) as pool:
        with pytest.raises(ClipError, match=r"takes more than 0\.125 GiB of memory"):
            pool.submit(wanted).result()
        assert (
            not pool.submit(_reference(_png(tmp_path / "a.png", 8, 8, bytes(8 * 25))))
            .result()
            .any()
        )


def test_a_limit_of_memory_ends_with_its_block() -> None:
    """In a process of its own: this one has freed memory that it could take again."""
    code = (
        "import numpy as np; from longtake.data.limits import memory_limited\n"
        "try:\n    with memory_limited(0.125): np.ones(2**28, np.uint8)\n"
        "except MemoryError: print(np.ones(2**28, np.uint8).any())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def _reference(path: Path) -> Reference:
    return Reference("", Media(str(path)), 8, 8, Crop(8, 8, 0, 0), 8, 8, is_flipped=False)


def test_a_very_wide_picture_is_drawn_small(tmp_path: Path) -> None:
    """A contact sheet is not 7 million pixels wide."""
    _png(tmp_path / "wide.png", 60_000, 1, bytes(1 + 3 * 60_000))
    index([tmp_path], captions=None, out=tmp_path / "catalog.parquet", workers=1)
    (picture,) = show(tmp_path / "catalog.parquet", out=tmp_path / "out")["pictures"][-1:]
    with Image.open(picture) as sheet:
        assert sheet.width < 1000


def test_of_a_caption_of_megabytes_the_beginning_is_drawn(
    tmp_path: Path, pictures_of: Callable[..., NDArray[np.uint8]]
) -> None:
    """The sheet is that of a caption of some lines."""
    frames = np.zeros((1, 8, 8, 3), np.uint8)
    for name, length in (("short", 2000), ("long", 3_000_000)):
        contact_sheet(tmp_path / f"{name}.png", [CropRow("all", "a cat " * length, frames, None)])
    assert (tmp_path / "short.png").read_bytes() == (tmp_path / "long.png").read_bytes()

"""Contact sheets: what is drawn where."""

from pathlib import Path

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from longtake.errors import RunError
from longtake.evaluation.sampling.sheet import FRAME_HEIGHT, MAX_FRAMES, SheetRow, contact_sheet

GREEN, RED = (47, 143, 91), (200, 69, 59)


def _flat(levels: list[int], height: int, width: int) -> NDArray[np.uint8]:
    """One frame of a single grey per level."""
    return np.stack([np.full((height, width, 3), level, np.uint8) for level in levels])


def _draw(path: Path, *rows: SheetRow, title: str = "") -> NDArray[np.uint8]:
    contact_sheet(rows, path, title=title)
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        return np.asarray(picture.convert("RGB"))


def _area(sheet: NDArray[np.uint8], colour: tuple[int, int, int]) -> int:
    return int((sheet == colour).all(axis=-1).sum())


def test_eight_evenly_spaced_frames_with_both_ends(tmp_path: Path) -> None:
    """Of 15 frames every second is drawn, left to right, each 3 times as large as its 32 pixels."""
    levels = [10 * index for index in range(15)]
    sheet = _draw(tmp_path / "sheet.png", SheetRow("", _flat(levels, 32, 32)))
    for level in levels:
        drawn = levels.index(level) % 2 == 0
        assert _area(sheet, (level, level, level)) == (96 * 96 if drawn else 0)
    middle = sheet[sheet.shape[0] // 2, :, 0].tolist()
    places = [middle.index(level) for level in levels[::2]]
    assert len(places) == MAX_FRAMES
    assert places == sorted(places)


def test_a_short_clip_shows_each_frame_once(tmp_path: Path) -> None:
    """An image, a clip of one frame, is one picture and not eight."""
    sheet = _draw(tmp_path / "sheet.png", SheetRow("an image", _flat([77], 48, 32)))
    assert _area(sheet, (77, 77, 77)) == 96 * 64


def test_small_frames_keep_their_pixels(tmp_path: Path) -> None:
    """Enlarging by whole factors adds no colour: a checkerboard stays black and white."""
    board = np.indices((40, 40)).sum(axis=0) % 2 * 255
    frames: NDArray[np.uint8] = np.repeat(board[None, :, :, None], 3, axis=3).astype(np.uint8)
    sheet = _draw(tmp_path / "sheet.png", SheetRow("", frames))
    assert _area(sheet, (0, 0, 0)) == _area(sheet, (255, 255, 255)) == 120 * 120 / 2


def test_large_frames_shrink_in_proportion(tmp_path: Path) -> None:
    """960 x 480 pixels become 192 x 96."""
    sheet = _draw(tmp_path / "sheet.png", SheetRow("", _flat([50], 480, 960)))
    assert _area(sheet, (50, 50, 50)) == 2 * FRAME_HEIGHT * FRAME_HEIGHT


@pytest.mark.parametrize(
    ("correct", "green", "red"), [(True, True, False), (False, False, True), (None, False, False)]
)
def test_the_mark_shows_the_verdict(
    tmp_path: Path, correct: bool | None, green: bool, red: bool
) -> None:
    """A green tick, a red cross or nothing, left of the caption."""
    row = SheetRow("a caption", _flat([0], 32, 32), correct)
    left = _draw(tmp_path / "sheet.png", row)[:, :56]
    assert (_area(left, GREEN) > 20, _area(left, RED) > 20) == (green, red)


def test_a_long_caption_is_wrapped_beside_its_frames(tmp_path: Path) -> None:
    """Many words, or one endless one, make the row taller and never run into the frames."""
    short = _draw(tmp_path / "short.png", SheetRow("two words", _flat([0], 96, 96)))
    for caption in ("many words " * 30, "w" * 300):
        sheet = _draw(tmp_path / "long.png", SheetRow(caption, _flat([0], 96, 96)))
        assert sheet.shape[0] > short.shape[0]
        assert sheet.shape[1] == short.shape[1]
        gap = sheet[:, 28 + 30 + 250 + 1 : 28 + 30 + 250 + 22]
        assert (gap == gap[0, 0]).all()


def test_rows_of_unlike_clips_share_a_sheet(tmp_path: Path) -> None:
    """Clips of other sizes and lengths stand below each other without overlapping."""
    rows = [
        SheetRow("small", _flat([11], 32, 32)),
        SheetRow("wide", _flat([22] * 9, 180, 320), True, "a note"),
        SheetRow("tall", _flat([33] * 3, 320, 180), False),
    ]
    sheet = _draw(tmp_path / "sheet.png", *rows, title="Three clips")
    assert _area(sheet, (11, 11, 11)) == 96 * 96
    assert _area(sheet, (22, 22, 22)) == 8 * 96 * 171
    assert _area(sheet, (33, 33, 33)) == 3 * 96 * 54
    tops = [np.argwhere((sheet == level).all(axis=-1))[0, 0] for level in (11, 22, 33)]
    assert tops == sorted(tops)


def test_a_wide_title_widens_the_sheet(tmp_path: Path) -> None:
    """No part of a title is cut off: the right margin stays empty."""
    sheet = _draw(tmp_path / "sheet.png", SheetRow("", _flat([0], 32, 32)), title="wide " * 40)
    margin = sheet[:, -20:]
    assert (margin == margin[0, 0]).all()


def test_a_real_clip(tmp_path: Path, material: Path) -> None:
    """A decoded video, 320 x 180 and landscape, fills eight places of 171 x 96."""
    with av.open(material / "videos/torchcodec/nasa_13013.mp4") as container:
        decoded = container.decode(video=0)
        images = [next(decoded).to_ndarray(format="rgb24") for _ in range(20)]
    frames: NDArray[np.uint8] = np.stack(images).astype(np.uint8)
    sheet = _draw(tmp_path / "sheet.png", SheetRow("a rocket", frames))
    assert sheet.shape[1] == 2 * 28 + 30 + 250 + 22 + 8 * 171 + 7 * 6


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A missing folder is the user's to mend, and nothing is left behind."""
    path = tmp_path / "missing" / "sheet.png"
    with pytest.raises(RunError, match=r"sheet\.png cannot be written: No such file"):
        contact_sheet([SheetRow("", _flat([0], 8, 8))], path)
    assert list(tmp_path.iterdir()) == []

"""The pictures of `longtake data show`: what is drawn, and that odd data draws too."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from longtake.config import Bucket
from longtake.data.figures import (
    FRAME_HEIGHT,
    MAX_FRAMES,
    CropRow,
    batches_picture,
    buckets_picture,
    contact_sheet,
    histogram_picture,
)
from longtake.errors import RunError

BLUE, RED, GREEN, BARE = (31, 78, 140), (200, 69, 59), (47, 143, 91), (207, 211, 216)
WIDE = Bucket(num_frames=49, height=480, width=832)
TALL = Bucket(num_frames=49, height=832, width=480)


def _pixels(path: Path) -> NDArray[np.uint8]:
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        return np.asarray(picture.convert("RGB"))


def _area(path: Path, colour: tuple[int, int, int]) -> int:
    return int((_pixels(path) == colour).all(axis=-1).sum())


def _clips(*sizes: tuple[int, int]) -> NDArray[np.int64]:
    return np.array(sizes, dtype=np.int64).reshape(-1, 2)


def test_a_bar_is_as_long_as_its_bucket_is_full(tmp_path: Path) -> None:
    path = tmp_path / "buckets.png"
    sizes = _clips(*[(720, 1280)] * 30, *[(1280, 720)] * 10, *[(720, 1280)] * 20)
    choices = np.repeat([0, 1, -1], [30, 10, 20])
    frames = np.repeat([60, 60, 20], [30, 10, 20])
    buckets_picture(path, [WIDE, TALL], choices, sizes, frames, dropped={"too short": 20})
    assert _area(path, BLUE) > 2 * _area(path, RED) > 1000
    assert _area(path, BARE) > 1000


def test_buckets_of_one_size_share_a_colour(tmp_path: Path) -> None:
    path = tmp_path / "buckets.png"
    short = WIDE.model_copy(update={"num_frames": 25})
    sizes, frames = _clips(*[(720, 1280)] * 8), np.full(8, 60)
    buckets_picture(path, [WIDE, short], np.arange(8) % 2, sizes, frames)
    assert _area(path, BLUE) > 1000
    assert _area(path, RED) == 0


def test_clips_tokens_padding_and_time_of_buckets_are_drawn(tmp_path: Path) -> None:
    path, known = tmp_path / "batches.png", {"batch_size": 8, "padding": 0.1}
    costs = {"batch_tokens": 8000, "batch_seconds": 2.0, "time_share": 0.5}
    shapes = [WIDE.model_dump(), TALL.model_dump()]
    entry = {"buckets": [{**shape, **known, **costs, "kept": 9} for shape in shapes]}
    batches_picture(path, entry, "all")
    assert _area(path, BLUE) == pytest.approx(_area(path, RED), rel=0.1)
    whole = _area(path, BLUE)
    entry["buckets"][0].update({"padding": None, "batch_seconds": None, "time_share": None})
    batches_picture(path, entry, "all")
    assert _area(path, BLUE) == pytest.approx(whole * 2 / 5, rel=0.1)


def test_stages_are_drawn_over_all_clips(tmp_path: Path) -> None:
    path = tmp_path / "nouns.png"
    values = np.arange(40, dtype=np.float64)
    histogram_picture(path, "nouns", values, [("half", values[:20]), ("quarter", values[:10])])
    drawn = [
        int((np.abs(_pixels(path).astype(int) - tint).max(axis=-1) < 12).sum())
        for tint in ((67, 107, 159), (208, 99, 91))  # blue and red, a fifth of the grey below
    ]
    assert drawn[0] > 1000
    assert drawn[1] == pytest.approx(drawn[0] / 2, rel=0.1)
    assert _area(path, BARE) > drawn[0]


@pytest.mark.parametrize(
    "values",
    [
        *([], [np.nan] * 3, [2.5], [7.0] * 5, [0.0, 1e9], [0.1, 0.2, np.nan]),
        *([1e308, -1e308], [5e-324, 0.0], [2.0**53, 2.0**53 + 2]),
    ],
)
def test_any_values_of_any_name_can_be_drawn(tmp_path: Path, values: list[float]) -> None:
    """Names are no formulas, and differences may overflow or vanish."""
    path = tmp_path / "score.png"
    all_ = np.array(values, dtype=np.float64)
    histogram_picture(path, r"$\frac{x$", all_, [(r"$a^{", all_), ("none", all_[:0])])
    assert _pixels(path).shape[1] == 1100


def test_buckets_without_clips_can_be_drawn(tmp_path: Path) -> None:
    none, one = np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64)
    image = Bucket(num_frames=1, height=1, width=1)
    buckets_picture(tmp_path / "1.png", [WIDE], none, _clips(), none)
    buckets_picture(tmp_path / "2.png", [image], one, _clips((1, 1)), one + 1, stride=4)
    buckets_picture(tmp_path / "3.png", [WIDE], one - 1, _clips((64, 64)), one + 8)
    assert len(list(tmp_path.iterdir())) == 3


def _row(levels: list[int], height: int, width: int, *kept: float) -> CropRow:
    frames = np.stack([np.full((height, width, 3), level, np.uint8) for level in levels])
    top, left, tall, wide = kept
    return CropRow("49 frames of 832x480", "a caption", frames, (top, left, tall, wide))


def test_what_the_crop_keeps_is_shown_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "sheet.png"
    contact_sheet(path, [_row([0], 120, 240, 0.0, 0.25, 1.0, 0.5)])
    assert _area(path, (0, 0, 0)) == pytest.approx((120 - 4) * (120 - 4), abs=30)
    assert _area(path, RED) == 120 * 120 - (120 - 4) ** 2
    pale = _pixels(path)[60, -28 - 240 + 30]
    assert pale.min() > 150


def test_six_evenly_spaced_frames_with_both_ends(tmp_path: Path) -> None:
    path = tmp_path / "sheet.png"
    levels = [10 + 20 * index for index in range(11)]
    contact_sheet(path, [_row(levels, 240, 240, 0.0, 0.0, 1.0, 1.0)])
    shown = [_area(path, (level, level, level)) > 10_000 for level in levels]
    assert shown == [index % 2 == 0 for index in range(11)]
    assert shown.count(True) == MAX_FRAMES
    assert FRAME_HEIGHT == 120


def test_a_long_caption_is_cut_off(tmp_path: Path) -> None:
    rows = [_row([0], 120, 240, 0.0, 0.0, 1.0, 1.0), _row([0], 120, 240, 0.0, 0.0, 1.0, 1.0)]
    long = CropRow("49 frames", "many words " * 100, rows[0].frames, rows[0].kept)
    contact_sheet(tmp_path / "short.png", rows)
    contact_sheet(tmp_path / "long.png", [rows[0], long])
    short, tall = _pixels(tmp_path / "short.png"), _pixels(tmp_path / "long.png")
    assert tall.shape[1] == short.shape[1]
    assert 0 <= tall.shape[0] - short.shape[0] < 10
    gap = tall[28 : 28 + FRAME_HEIGHT, 28 + 262 : 28 + 280]
    assert (gap == gap[0, 0]).all()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "picture.png"
    with pytest.raises(RunError, match=r"picture\.png cannot be written: No such file"):
        histogram_picture(missing, "nouns", np.ones(3))
    with pytest.raises(RunError, match=r"picture\.png cannot be written: No such file"):
        contact_sheet(missing, [_row([0], 8, 8, 0.0, 0.0, 1.0, 1.0)])
    assert list(tmp_path.iterdir()) == []

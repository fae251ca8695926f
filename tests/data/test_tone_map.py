"""HDR becomes SDR by the curve that is documented, in windows and in the keys of a cache."""

import math
from pathlib import Path

import av
import numpy as np
import pytest
from tests.data import build

from longtake.data.buckets import window_of
from longtake.data.cache import Cache
from longtake.data.catalog import Catalog
from longtake.data.index import index
from longtake.data.tasks import HERE
from longtake.data.tone_map import to_sdr
from longtake.data.window import Crop, read_window


def _pq(light: float) -> float:
    """The signal of light in cd/m2, by ITU-R BT.2100, table 4."""
    power = (light / 10_000) ** (2610 / 16384)
    fraction = (3424 / 4096 + 2413 / 128 * power) / (1 + 2392 / 128 * power)
    return float(fraction ** (2523 / 32))


def _level(signal: float) -> int:
    return round(4095 * signal)


def _grey(signal: float, transfer: str) -> int:
    (level,) = set(to_sdr(np.full((3, 2, 2), _level(signal), np.uint16), transfer).flat)
    return int(level)


@pytest.mark.parametrize("light", [0.05, 1, 10, 50, 90])
def test_light_below_the_knee_stays_as_bright(light: float) -> None:
    """On a display of 203 cd/m2 with a gamma of 2.4, to the step of eight bits."""
    assert abs(_grey(_pq(light), "pq") - 255 * (light / 203) ** (1 / 2.4)) <= 1


def test_above_the_knee_light_is_compressed_and_white_from_the_peak_on() -> None:
    """The spline of BT.2390 has the slope 1 at the knee; here it is solved as a Bezier curve."""
    peak, white = _pq(1000), _pq(203)
    knee = 1.5 * white / peak - 0.5
    ends = (knee, knee + (1 - knee) / 3, white / peak, white / peak)
    for share in (0.1, 0.4, 0.8):
        weights = [math.comb(3, n) * share**n * (1 - share) ** (3 - n) for n in range(4)]
        mapped = peak * sum(weight * end for weight, end in zip(weights, ends, strict=True))
        low = (_pq_light(mapped) / 203) ** (1 / 2.4)
        signal = peak * (knee + share * (1 - knee))
        assert abs(_grey(signal, "pq") - 255 * low) <= 1
    levels = [_grey(_pq(light), "pq") for light in (100, 203, 500, 999, 1000, 4000, 10_000)]
    assert levels == sorted(levels)
    assert levels[-3:] == [255] * 3


def _pq_light(signal: float) -> float:
    low, high = 0.0, 10_000.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _pq(middle) < signal else (low, middle)
    return low


def test_hlg_is_mapped_as_pq_of_the_same_light() -> None:
    """A signal of 75 % is 203 cd/m2 on a display of 1000 (BT.2408), and 50 % is 50.5."""
    assert abs(_grey(0.75, "hlg") - _grey(_pq(203), "pq")) <= 1
    assert abs(_grey(0.5, "hlg") - _grey(_pq(1000 / 12**1.2), "pq")) <= 1
    assert (_grey(0, "hlg"), _grey(1, "hlg")) == (0, 255)


def test_colours_of_bt709_keep_their_hue() -> None:
    """Red of 60 cd/m2 in BT.2020's primaries, by the matrix of BT.2087."""
    light = 60 * np.array([0.6274, 0.0691, 0.0164])
    picture = np.array([_level(_pq(each)) for each in light], np.uint16).reshape(3, 1, 1)
    red, green, blue = to_sdr(picture, "pq").ravel().tolist()
    assert abs(red - 255 * (60 / 203) ** (1 / 2.4)) <= 1
    assert max(green, blue) <= 12


def test_a_clip_in_hdr_is_counted_and_converted_unless_the_recipe_says_no(tmp_path: Path) -> None:
    path = tmp_path / "hdr.mkv"
    frame = av.VideoFrame(64, 32, "yuv444p10le")
    for plane, value in zip(frame.planes, (64 + round(876 * _pq(50)), 512, 512), strict=True):
        plane.update(np.full((32, plane.line_size // 2), value, np.uint16).tobytes())
    colours = {"color_trc": 16, "color_primaries": 9, "colorspace": 9, "color_range": 1}
    build.encode_plainly(path, [frame], codec="ffv1", pixels="yuv444p10le", colours=colours)
    (tmp_path / "hdr.txt").write_text("grey")
    report = index([path], captions=None, out=tmp_path / "c.parquet", work=HERE)
    assert report.in_hdr == 1
    (clip,) = Catalog.load(tmp_path / "c.parquet").clips()
    windows = [
        window_of(clip, range(1), Crop(16, 32, 0, 0), 16, 32, tone_maps=each)
        for each in (True, False)
    ]
    mapped, stored = (set(read_window(window).flat) for window in windows)
    assert all(abs(int(level) - 255 * (50 / 203) ** (1 / 2.4)) <= 2 for level in mapped)
    assert all(abs(int(level) - 255 * _pq(50)) <= 1 for level in stored)
    data = build.section(cache=str(tmp_path / "cache"), windows=1)
    cache = Cache(tmp_path / "cache", "codec", "text", data, no_caption="")
    assert len({cache.latents(window).key for window in windows}) == 2

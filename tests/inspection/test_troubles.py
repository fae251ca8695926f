"""What befell processes and nodes, beside what befell the numbers."""

from pathlib import Path

import numpy as np
from matplotlib.colors import to_rgb
from PIL import Image

from longtake.drawing import SERIES
from longtake.inspection.curves import draw
from longtake.inspection.glance import glance
from longtake.inspection.rows import read_rows
from longtake.inspection.strip import strip_of
from longtake.inspection.troubles import sentence_of, troubles
from longtake.node_dir import NodeDirectory
from longtake.run_dir import RunDirectory

_SENTENCE = "gpu07: rank 3 has been in read (decode.py:88) for 12 s"


def _befall(run: RunDirectory) -> None:
    node = NodeDirectory(run, "gpu07")
    node.append_event("watching", pid=1)
    node.append_event("stalled", step=4, sentence=_SENTENCE)
    node.append_event("clock_stepped", seconds=-2.5, message="the clock went back by 2.5 s")


def test_what_is_of_a_step_is_placed_there_and_the_rest_by_its_time(told: RunDirectory) -> None:
    """A stall after four steps is in the fifth; a clock's step has no step but a time."""
    _befall(told)
    rows = read_rows(told)
    found = [(each["event"], each["at"]) for each in troubles(told, rows)]
    assert found == [("stalled", 5), ("clock_stepped", rows[-1].step)]


def test_a_trouble_is_told_with_its_node(told: RunDirectory) -> None:
    """Unless the sentence names it already."""
    _befall(told)
    stalled, stepped = troubles(told, read_rows(told))
    assert sentence_of(stalled) == f"stalled: {_SENTENCE}"
    assert sentence_of(stepped) == "clock stepped -2.5 s on gpu07: the clock went back by 2.5 s"


def test_glance_and_picture_show_them(told: RunDirectory, tmp_path: Path) -> None:
    """In a lane of their own."""
    before = strip_of(told, read_rows(told), (1, 24))
    _befall(told)
    after = strip_of(told, read_rows(told), (1, 24))
    assert (before.troubles, after.num_lanes) == ((), before.num_lanes + 1)
    assert after.troubles[0] == (5, "stalled")
    assert glance(told)["troubles"][0]["at"] == 5
    draw(told, tmp_path / "curves.png", None, 100)
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_a_hang_after_the_last_step_is_in_the_picture(told: RunDirectory, tmp_path: Path) -> None:
    """A run that hangs has no row of the step that it hangs in."""
    NodeDirectory(told, "gpu07").append_event("stalled", step=24, sentence=_SENTENCE)
    for name, around in (("whole", None), ("last", 24), ("earlier", 5)):
        draw(told, tmp_path / f"{name}.png", around, 3)
    has_mark = {path.stem: _has_mark(path) for path in tmp_path.glob("*.png")}
    assert has_mark == {"whole": True, "last": True, "earlier": False}


def _has_mark(path: Path) -> bool:
    """Whether the colour of what befalls nodes is in a picture."""
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    color = (255 * np.array(to_rgb(SERIES[4]))).round()
    return bool((pixels == color).all(axis=-1).sum() > 10)


def test_a_rank_that_failed_is_told_with_where_and_of_what(told: RunDirectory) -> None:
    """In the step after those that were done."""
    facts = {
        "rank": 3,
        "world_size": 4,
        "launch": "a",
        "pid": 7,
        "step": 4,
        "phase": "backward",
        "kind": "killed",
        "log": "rank_0003.log",
    }
    NodeDirectory(told, "gpu07").append_event("rank_failed", **facts, error="killed by SIGKILL")
    (failed,) = troubles(told, read_rows(told))
    assert failed["at"] == 5
    assert sentence_of(failed) == "rank failed on gpu07: rank 3 (backward): killed by SIGKILL"

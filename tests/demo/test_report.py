"""What the demo draws of its loss."""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from longtake.demo.report import loss_plot, smooth


def _pixels(path: Path) -> NDArray[np.uint8]:
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        return np.asarray(picture.convert("RGB"))


def _has(path: Path, colour: tuple[int, int, int]) -> bool:
    return bool((_pixels(path) == colour).all(axis=-1).any())


RAW, SMOOTH = (169, 191, 216), (31, 78, 140)


def test_raw_and_smoothed_curves_are_drawn(tmp_path: Path) -> None:
    steps = range(200)
    losses = [1 + 0.5 * math.sin(step) for step in steps]
    loss_plot(steps, losses, tmp_path / "both.png", title="a run")
    assert _has(tmp_path / "both.png", RAW)
    assert _has(tmp_path / "both.png", SMOOTH)
    assert [path.name for path in tmp_path.iterdir()] == ["both.png"]


@pytest.mark.parametrize(
    "losses",
    [
        [0.5],
        [0.5, math.nan, math.inf, 0.4],
        [math.nan, math.nan],
        [0.0, 1.0, -1.0],
        [1e-6, 1.0, 1e6],
    ],
)
def test_any_numbers_a_run_can_log_are_drawn(tmp_path: Path, losses: list[float]) -> None:
    loss_plot(range(len(losses)), losses, tmp_path / "loss.png", title="odd")
    assert _pixels(tmp_path / "loss.png").shape == (540, 1080, 3)


def test_the_mean_keeps_a_constant_and_a_line() -> None:
    """A constant stays itself up to both ends; a falling line is not lagged behind."""
    assert smooth(np.full(500, 0.3)) == pytest.approx(np.full(500, 0.3))
    line = np.linspace(2, 1, 500)
    assert smooth(line)[10:-10] == pytest.approx(line[10:-10])


def test_the_mean_is_smooth() -> None:
    noise = np.random.default_rng(0).normal(size=1000)
    assert smooth(noise).std() < noise.std() / 3


def test_gaps_count_for_nothing() -> None:
    values = np.full(500, 0.3)
    values[100] = np.nan
    assert smooth(values) == pytest.approx(np.full(500, 0.3))
    short = np.array([1.0, 3.0, np.nan])
    assert smooth(short) == pytest.approx(short, nan_ok=True)


def test_drawing_touches_no_global_state(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from longtake.demo.report import loss_plot;"
        "loss_plot([1, 2], [1.0, 0.5], Path(sys.argv[1]), title='');"
        "sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path / "loss.png"], check=True)

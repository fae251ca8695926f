"""What the shapes world promises: clips as captioned, the same per seed, and an even hold-out."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tests.demo.decoding import decode

from longtake.demo.shapes import (
    COLOURS,
    DIRECTIONS,
    FPS,
    SHAPES,
    Combination,
    held_out_captions,
    parse_caption,
    render,
    training_captions,
    write_clips,
)
from longtake.errors import DataError


def test_one_caption_in_eight_is_held_out() -> None:
    """192 captions, no two equal, are split into 168 and 24."""
    training, held_out = training_captions(), held_out_captions()
    assert (len(set(training)), len(set(held_out))) == (168, 24)
    assert not set(training) & set(held_out)


def test_every_word_and_nearly_every_pair_of_words_is_left_to_train_on() -> None:
    held_out = [parse_caption(caption) for caption in held_out_captions()]
    assert set(Counter(one.shape for one in held_out).values()) == {6}
    assert set(Counter(one.colour for one in held_out).values()) == {4}
    assert set(Counter(one.direction for one in held_out).values()) == {3}
    assert len({(one.shape, one.colour) for one in held_out}) == 24
    assert len({(one.shape, one.direction) for one in held_out}) == 24
    assert len({(one.colour, one.direction) for one in held_out}) == 24


def test_a_caption_is_read_back() -> None:
    for caption in training_captions() + held_out_captions():
        assert parse_caption(caption).caption == caption
        assert len(caption.split()) <= 6
    assert parse_caption("a red circle moving up left") == Combination("circle", "red", "up left")


@pytest.mark.parametrize("caption", ["", "a red circle", "a pink circle moving up", "A red circle"])
def test_a_foreign_caption_is_refused(caption: str) -> None:
    with pytest.raises(DataError, match="a red circle moving up left"):
        parse_caption(caption)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_rendered_object_moves_as_it_should(direction: str) -> None:
    frames = render("circle", "red", direction, np.random.default_rng(3))
    assert frames.shape == (8, 32, 32, 3)
    assert frames.dtype == np.uint8
    rows, columns = np.mgrid[:32, :32]
    weights = frames[..., 0].astype(float) - frames[..., 0].min()
    weights[weights < 60] = 0
    totals = weights.sum(axis=(1, 2))
    x, y = (weights * columns).sum((1, 2)) / totals, (weights * rows).sum((1, 2)) / totals
    moved = np.array([x[-1] - x[0], y[-1] - y[0]]) / 7
    expected = np.array(DIRECTIONS[direction]) / np.hypot(*DIRECTIONS[direction])
    assert 1.15 < np.hypot(*moved) < 1.75
    assert moved @ expected / np.hypot(*moved) > 0.99


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_rendered_object_is_bright_before_a_dark_ground(shape: str, colour: str) -> None:
    frames = render(shape, colour, "left", np.random.default_rng(4)).astype(int)
    middle = frames[3:5, 15:17, 15:17].mean(axis=(0, 1, 2))
    assert middle.max() > 200
    assert middle.max() - middle.min() > 150
    assert frames[:, [0, 0, -1, -1], [0, -1, 0, -1]].max() < 50


def test_written_clips_are_what_was_rendered(tmp_path: Path) -> None:
    lines = write_clips(tmp_path / "clips", num_clips=6, seed=5).read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    assert len(entries) == 6
    for index, entry in enumerate(entries):
        frames, fps = decode(tmp_path / "clips" / entry["video"])
        wanted = parse_caption(entry["caption"])
        rng = np.random.default_rng([5, index])
        drawn = render(wanted.shape, wanted.colour, wanted.direction, rng)
        assert frames.shape == drawn.shape
        assert fps == FPS
        assert np.abs(frames.astype(int) - drawn).mean() < 2


def test_the_same_seed_writes_the_same_clips(tmp_path: Path) -> None:
    one = write_clips(tmp_path / "one", num_clips=20, seed=0)
    two = write_clips(tmp_path / "two", num_clips=20, seed=0)
    assert one.read_text() == two.read_text()
    for line in one.read_text().splitlines():
        name = json.loads(line)["video"]
        assert (one.parent / name).read_bytes() == (two.parent / name).read_bytes()


def test_another_seed_writes_other_clips(tmp_path: Path) -> None:
    one = write_clips(tmp_path, num_clips=3, seed=0).read_text()
    two = write_clips(tmp_path, num_clips=3, seed=1).read_text()
    assert not {line.split('"')[3] for line in one.splitlines()} & {
        line.split('"')[3] for line in two.splitlines()
    }


def test_every_caption_comes_once_before_one_comes_twice(tmp_path: Path) -> None:
    lines = write_clips(tmp_path, num_clips=200, seed=0).read_text().splitlines()
    captions = [json.loads(line)["caption"] for line in lines]
    assert set(captions[:168]) == set(training_captions())
    assert max(Counter(captions).values()) == 2


def test_an_interrupted_writing_is_taken_up_again(tmp_path: Path) -> None:
    write_clips(tmp_path, num_clips=4, seed=0)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.mp4")}
    lost = sorted(tmp_path.glob("*.mp4"))[1]
    lost.unlink()
    write_clips(tmp_path, num_clips=6, seed=0)
    after = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.mp4")}
    assert len(after) == 6
    assert all(after[name] == before[name] for name in before if name != lost.name)
    assert not list(tmp_path.glob(".*"))


def test_progress_counts_finished_clips(tmp_path: Path) -> None:
    heard: list[int] = []
    write_clips(tmp_path, num_clips=5, seed=0, progress=heard.append)
    assert heard == [1, 2, 3, 4, 5]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(DataError, match="taken"):
        write_clips(tmp_path / "taken", num_clips=1, seed=0)

"""What the oracle promises: it reads real clips, and says nothing about what is none."""

import colorsys
import json

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.demo.decoding import decode

from longtake.demo.oracle import Reading, read, shows
from longtake.demo.shapes import COLOURS, DIRECTIONS, SHAPES, parse_caption, render, write_clips
from longtake.errors import DataError
from longtake.evaluation.extra_measures import load_extras, measure_extra

Clips = list[tuple[NDArray[np.uint8], str]]
_NOTHING = Reading(None, None, None)


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Clips:
    """Return 336 clips, two of each training caption, as read back from their files."""
    listing = write_clips(tmp_path_factory.mktemp("clips"), num_clips=336, seed=11)
    entries = [json.loads(line) for line in listing.read_text().splitlines()]
    return [(decode(listing.parent / entry["video"])[0], entry["caption"]) for entry in entries]


def test_real_clips_are_read_as_captioned(clips: Clips) -> None:
    """All of them, blue squares too: H.264 keeps the corners that tell a square from a circle."""
    assert [caption for video, caption in clips if not shows(video, caption)] == []


def test_a_wrong_caption_is_never_adhered_to(clips: Clips) -> None:
    """Given each other's captions, no clip counts as right unless the captions are equal."""
    videos, captions = zip(*clips[:168], strict=True)
    assert len(set(captions)) == 168
    others = captions[1:] + captions[:1]
    assert not any(shows(video, caption) for video, caption in zip(videos, others, strict=True))


def test_a_clip_played_backwards_reads_as_the_opposite_direction(clips: Clips) -> None:
    """The direction comes from the order of the frames and from nothing else."""
    opposite = {"up": "down", "down": "up", "left": "right", "right": "left"}
    for frames, _ in clips[:100]:
        forwards, backwards = read(frames), read(frames[::-1])
        assert forwards.direction is not None
        turned = " ".join(opposite[word] for word in forwards.direction.split())
        assert backwards == Reading(forwards.shape, forwards.colour, turned)


def test_a_clip_that_stands_still_has_no_direction(clips: Clips) -> None:
    for frames, caption in clips[:100]:
        reading = read(np.repeat(frames[3:4], 8, axis=0))
        assert reading.direction is None
        assert reading.colour == parse_caption(caption).colour


def test_shuffled_frames_have_no_direction(clips: Clips) -> None:
    order = [3, 0, 6, 1, 7, 4, 2, 5]
    assert all(read(frames[order]).direction is None for frames, _ in clips[:100])


@pytest.mark.parametrize("level", [0, 30, 128, 255])
def test_grey_says_nothing(level: int) -> None:
    assert read(np.full((8, 32, 32, 3), level, dtype=np.uint8)) == _NOTHING


@pytest.mark.parametrize("smoothing", [1, 2, 4, 8, 16])
def test_noise_is_never_a_full_reading(smoothing: int) -> None:
    rng = np.random.default_rng(0)
    for frozen in (False, True):
        for _ in range(40):
            coarse = (1 if frozen else 8, 32 // smoothing, 32 // smoothing, 3)
            noise = rng.integers(0, 256, size=coarse, dtype=np.uint8)
            noise = noise.repeat(smoothing, axis=1).repeat(smoothing, axis=2)
            reading = read(np.broadcast_to(noise, (8, 32, 32, 3)))
            assert None in (reading.shape, reading.colour, reading.direction)


@pytest.mark.parametrize("side", [-1, 1])
def test_a_hue_may_be_off_by_22_degrees_on_either_side(side: int) -> None:
    frames = render("circle", "red", "left", np.random.default_rng(3))
    for degrees, colour in ((21.5, "red"), (22.5, None)):
        hue = (COLOURS["red"] + side * degrees) / 360 % 1
        turned = frames[..., :1] * np.array(colorsys.hsv_to_rgb(hue, 1.0, 1.0))
        assert read(turned.astype(np.uint8)).colour == colour


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_soft_and_grainy_clip_is_still_read(shape: str, colour: str) -> None:
    rng = np.random.default_rng(7)
    for direction in DIRECTIONS:
        frames = render(shape, colour, direction, rng).astype(float)
        padded = np.pad(frames, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
        soft = (padded[:, :-2, 1:-1] + 2 * frames + padded[:, 2:, 1:-1]) / 4
        soft += rng.normal(0, 8, soft.shape)
        assert read(soft.clip(0, 255).astype(np.uint8)) == Reading(shape, colour, direction)


def test_an_object_between_two_colours_has_none() -> None:
    frames = render("circle", "red", "up", np.random.default_rng(2))
    frames[..., 1] = np.maximum(frames[..., 1], frames[..., 0] // 2)
    assert read(frames) == Reading("circle", None, "up")


def test_a_grey_object_has_no_colour() -> None:
    frames = render("square", "red", "left", np.random.default_rng(2))
    grey = np.repeat(frames.max(axis=-1, keepdims=True), 3, axis=-1)
    assert read(grey) == Reading("square", None, "left")


def test_two_objects_have_no_shape() -> None:
    rng = np.random.default_rng(2)
    both = np.maximum(render("cross", "red", "left", rng), render("cross", "red", "right", rng))
    assert read(both).shape is None or read(both).direction is None


def test_an_object_that_disappears_says_nothing() -> None:
    frames = render("circle", "green", "up", np.random.default_rng(2))
    frames[4:] = frames[0, 0, 0]
    assert read(frames) == _NOTHING


def test_two_right_fields_of_three_are_wrong() -> None:
    frames = render("circle", "green", "up", np.random.default_rng(2))
    assert shows(frames, "a green circle moving up")
    assert not shows(frames, "a green circle moving down")


def test_a_foreign_caption_is_an_error() -> None:
    frames = render("circle", "green", "up", np.random.default_rng(2))
    with pytest.raises(DataError, match="not of the shapes world"):
        shows(frames, "a cat")


def test_a_preset_of_the_demo_can_name_it_and_its_mean_is_a_share() -> None:
    """1 where all is as asked for, else 0; nothing for other prompts, and for single pictures."""
    (extra,) = load_extras(["longtake.demo.oracle:Adherence"])
    clip = render("square", "red", "right", np.random.default_rng(0))
    prompts = ["a red square moving right", "a blue square moving right", "a dog", "a red square"]
    found, of_set = measure_extra(extra, [clip, clip, clip, clip[:1]], prompts, 8.0)
    assert found == [{"adherence": 1.0}, {"adherence": 0.0}, {}, {}]
    assert of_set == {}

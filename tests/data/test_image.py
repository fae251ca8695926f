"""An image is a clip of one frame: upright, in RGB, and refused where that is not defined."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from longtake.data.clip import Media
from longtake.data.image import probe_image, read_image
from longtake.errors import ClipError


def _corner() -> NDArray[np.uint8]:
    """[32, 48, 3], black but for a white left upper corner."""
    picture = np.zeros((32, 48, 3), np.uint8)
    picture[:16, :16] = 255
    return picture


def _read(path: Path) -> NDArray[np.uint8]:
    return read_image(Media(str(path)))


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".tif", ".webp"])
def test_pixels_come_back_as_they_were(tmp_path: Path, suffix: str) -> None:
    """What was stored without loss is read without loss."""
    path = tmp_path / f"picture{suffix}"
    picture = np.random.default_rng(0).integers(0, 256, (30, 20, 3), np.uint8)
    Image.fromarray(picture).save(path, lossless=True)
    np.testing.assert_array_equal(_read(path), picture)
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
    picture, found = _read(path), probe_image(Media(str(path)))
    assert picture.shape == (found.height, found.width, 3)
    assert (found.height > found.width) == (orientation in (6, 8))
    assert picture[corner].min() > 200
    assert picture.mean() < 60


def test_transparency_is_laid_over_white(tmp_path: Path) -> None:
    """Clear pixels are white, half clear ones half white, in palettes too."""
    rgba = np.zeros((1, 3, 4), np.uint8)
    rgba[0, :, 3] = (0, 128, 255)
    Image.fromarray(rgba).save(tmp_path / "clear.png")
    np.testing.assert_array_equal(_read(tmp_path / "clear.png")[0, :, 0], [255, 127, 0])
    palette = Image.new("P", (1, 1), 0)
    palette.save(tmp_path / "palette.png", transparency=0)
    assert _read(tmp_path / "palette.png").tolist() == [[[255, 255, 255]]]


def test_sixteen_bits_of_grey_are_scaled(tmp_path: Path) -> None:
    """White stays white: 65535 is 255, and half is half."""
    path = tmp_path / "deep.png"
    Image.fromarray(np.array([[0, 257, 32768, 65535]], np.uint16)).save(path)
    assert _read(path)[0, :, 0].tolist() == [0, 1, 128, 255]


def test_real_images_are_read_or_refused(material: Path) -> None:
    """Every real picture is one clip; the cut one, the animation and the text are refused."""
    sizes, refused = {}, {}
    for path in sorted((material / "images" / "skimage").iterdir()):
        try:
            found = probe_image(Media(str(path)))
            sizes[path.name] = (found.width, found.height)
            assert _read(path).shape == (found.height, found.width, 3)
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

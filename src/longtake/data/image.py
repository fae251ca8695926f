"""Reads one image, strictly, as a clip of one frame.

The picture is turned upright by its EXIF orientation, so a clip that is an image has rotation 0.
Transparent pixels are laid over white, 16-bit grey is scaled to 8 bits, and colours are taken as
sRGB whatever profile is embedded. JPEGs with further pictures inside (MPO, as phones write) give
the first. Animations, pages, and pixels without a defined white are refused with the reason.
"""

import io
import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from longtake.data.clip import Media
from longtake.data.indexing.probe import Probe, content_hash
from longtake.data.limits import check_pixels, out_of_memory
from longtake.errors import ClipError


def probe_image(media: Media) -> Probe:
    """Decode the image and return what is in it.

    Raises:
        ClipError: it cannot be read, is damaged or too large, or is not one still picture.
    """
    identity = content_hash(media)
    pixels, codec, mode = _decode(media)
    height, width, _ = pixels.shape
    return Probe(
        identity=identity,
        kind="image",
        num_frames=1,
        width=width,
        height=height,
        fps=0.0,
        duration_seconds=0.0,
        stream_index=0,
        rotation=0,
        codec=codec,
        pix_fmt=mode,
        keyframes=(0,),
    )


def read_image(media: Media) -> NDArray[np.uint8]:
    """Return the picture as [H, W, 3] uint8 RGB, upright.

    Raises:
        ClipError: as `probe_image`.
    """
    return _decode(media)[0]


def _decode(media: Media) -> tuple[NDArray[np.uint8], str, str]:
    """Return the pixels, the format, and the mode that it was stored in."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # remarks on odd metadata, and sizes: see `_check`
            with Image.open(io.BytesIO(_bytes(media))) as image:
                _check(media, image)
                codec, mode = (image.format or "").lower(), image.mode
                return np.asarray(_rgb(ImageOps.exif_transpose(image))), codec, mode
    except ClipError:
        raise
    except Image.DecompressionBombError as error:
        raise ClipError(str(media), "too many pixels for one picture") from error
    except MemoryError as error:
        raise ClipError(str(media), f"not a readable image: {out_of_memory()}") from error
    except Exception as error:  # a hostile file makes Pillow's parsers raise almost anything
        reason = str(error).split(" <_io")[0] or type(error).__name__
        raise ClipError(str(media), f"not a readable image: {reason}") from error


def _bytes(media: Media) -> bytes:
    with Path(media.path).open("rb") as file:
        file.seek(media.offset)
        return file.read(-1 if media.num_bytes is None else media.num_bytes)


def _check(media: Media, image: Image.Image) -> None:
    check_pixels(media, image.width, image.height)
    num_pictures = getattr(image, "n_frames", 1)
    if num_pictures > 1 and image.format != "MPO":
        raise ClipError(str(media), f"holds {num_pictures} pictures; make a video or images of it")
    if image.mode in ("I", "F"):
        raise ClipError(str(media), f"pixels of mode {image.mode} have no defined white")


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        grey = np.asarray(image).astype(np.uint32)
        return Image.fromarray(((grey + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")

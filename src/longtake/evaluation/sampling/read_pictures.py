"""Reads the pictures that requests go by, cut to the size of their videos."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from longtake.config import Bucket
from longtake.data.clip import Media
from longtake.data.crop import Crop
from longtake.data.references import Reference, read
from longtake.errors import ClipError, DataError


@dataclass(frozen=True)
class Request:
    """One video that someone wants."""

    prompt: str
    seed: int
    references: Mapping[str, Path] = field(default_factory=dict)
    """Pictures that it goes by, for a model that was trained with such: images or videos, of which
    the first frame counts, by their names in `data.references`."""


def read_pictures(
    requests: Sequence[Request], names: Sequence[str], bucket: Bucket
) -> dict[str, list[NDArray[np.uint8]]]:
    """A picture [3, 1, H, W] for each request, by the names that the recipe gives them.

    Raises:
        DataError: a request lacks one, names another, or it cannot be read.
    """
    for request in requests:
        refuse_other_pictures(request.references, names)
    return {
        name: [
            read_picture(request.references[name], bucket).transpose(2, 0, 1)[:, None]
            for request in requests
        ]
        for name in names
    }


def read_picture(picture: Path, bucket: Bucket) -> NDArray[np.uint8]:
    """[H, W, 3]: a picture as the model sees it, scaled to cover the bucket and cut in the middle.

    Args:
        picture: an image, or a video, of which the first frame counts.
        bucket: the size of the videos.

    Raises:
        DataError: it cannot be read.
    """
    wanted = Reference(
        identity="",
        media=Media(str(picture)),
        clip_height=0,  # there is no clip that it would have to be cut like
        clip_width=0,
        clip_crop=Crop(0, 0, 0, 0),
        height=bucket.height,
        width=bucket.width,
        is_flipped=False,
    )
    try:
        return np.ascontiguousarray(read(wanted)[:, 0].transpose(1, 2, 0))
    except ClipError as error:
        raise DataError(f"The picture {error.path} cannot be read: {error.reason}.") from error


def refuse_other_pictures(given: Mapping[str, Path], names: Sequence[str]) -> None:
    """Refuse reference images other than those that a model was trained with.

    Raises:
        DataError: one is missing, or is not among the names.
    """
    if set(given) == set(names):
        return
    if not names:
        raise DataError(
            f"This model takes no reference images, but {', '.join(given)} was given. Leave "
            "--reference out."
        )
    advice = " ".join(f"--reference {name}=FILE" for name in names)
    raise DataError(
        f"This model takes the reference images {', '.join(names)}; given: "
        f"{', '.join(given) or 'none'}. Give exactly those: {advice}."
    )

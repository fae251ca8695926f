"""Reference pictures of presets and samples, for a model that takes such; torch-free.

A preset is identified by the content of its pictures, not by their paths. A small copy of each,
cropped as the model sees it, is kept beside the results, so that sheets can show it anywhere.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from longtake.config import Bucket
from longtake.data.clip import Media
from longtake.data.window import Crop, ReferencePicture, read
from longtake.errors import ClipError, DataError, RecipeError, RunError
from longtake.fsio import atomic_write
from longtake.run_dir import RunDirectory
from longtake.trust import is_own

_KEPT_SIZE = 256, 256


@dataclass(frozen=True)
class Picture:
    path: Path
    """An image, or a video, of which the first frame counts."""
    content: str
    """The first 16 hexadecimal digits of the file's sha256."""

    def refuse_change(self) -> None:
        """Refuse the file if it has changed since it was found."""
        try:
            is_same = content_of(self.path) == self.content
        except OSError as error:
            raise RunError(
                f"The picture {self.path} cannot be read any more: {error.strerror or error}."
            ) from error
        if not is_same:
            raise RunError(
                f"The picture {self.path} has changed since the preset was read. Put the old one "
                "back: a row of videos shows the training only if nothing else changes."
            )


Pictures = Mapping[str, tuple[Picture, ...]]
"""By the names in `data.references`: one for each prompt."""


def find_pictures(
    given: Mapping[str, Sequence[Path]] | None,
    names: Sequence[str],
    count: int,
    bucket: Bucket,
    folder: Path | None,
) -> Pictures:
    files = given or {}
    _refuse_others(files, names)
    return {name: _found(name, files[name], count, bucket, folder) for name in names}


def read_pictures(
    references: Sequence[Mapping[str, Path]], names: Sequence[str], bucket: Bucket
) -> dict[str, list[NDArray[np.uint8]]]:
    """For each name a picture [3, 1, H, W] of each video."""
    for each in references:
        refuse_other_pictures(each, names)
    return {
        name: [read_picture(each[name], bucket).transpose(2, 0, 1)[:, None] for each in references]
        for name in names
    }


def read_picture(picture: Path, bucket: Bucket) -> NDArray[np.uint8]:
    """[H, W, 3]: a picture, or a video's first frame, scaled and cropped to the bucket's size."""
    wanted = ReferencePicture(
        identity="",
        media=Media(str(picture)),
        clip_height=0,  # it is cropped in the middle, not like a clip
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


def content_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def kept_picture(preset_json: Path, number: int, name: str) -> Path:
    return preset_json.parent / "pictures" / f"{number:02d}_{name}.png"


def keep_pictures(preset_json: Path, pictures: Pictures, bucket: Bucket) -> None:
    """Write the small copies that do not exist; none of a picture that cannot be read any more."""
    for name, of_prompts in pictures.items():
        for number, picture in enumerate(of_prompts):
            path = kept_picture(preset_json, number, name)
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                with suppress(DataError):
                    small = Image.fromarray(read_picture(picture.path, bucket))
                    small.thumbnail(_KEPT_SIZE)
                    with atomic_write(path, by_many=True) as partial:
                        small.save(partial, format="PNG")


def _refuse_others(given: Mapping[str, object], names: Sequence[str]) -> None:
    if set(given) == set(names):
        return
    if not names:
        raise RecipeError(
            f"references gives pictures ({', '.join(given)}), but this model goes by none "
            "(data.references is empty). Leave references out."
        )
    missing = [name for name in names if name not in given]
    example = f', such as references.{missing[0]} = ["{missing[0]}.png"]' if missing else ""
    raise RecipeError(
        f"this model goes by pictures: {', '.join(names)}; references gives "
        f"{', '.join(given) or 'none'}. Give each of them, and no other: a file for each prompt, "
        f"or one for all{example}."
    )


def _found(
    name: str, files: Sequence[Path], count: int, bucket: Bucket, folder: Path | None
) -> tuple[Picture, ...]:
    """One picture for each prompt; each file is read once."""
    key = f"references.{name}"
    if len(files) not in (1, count):
        raise RecipeError(
            f"{key} names {len(files)} files, but there are {count} prompts. Name one for each "
            "prompt, or one for all."
        )
    paths = {file: find_file(key, file, folder) for file in dict.fromkeys(files)}
    pictures = {file: _checked(path, bucket) for file, path in paths.items()}
    return tuple(pictures[file] for file in files) * (count if len(files) == 1 else 1)


def _checked(path: Path, bucket: Bucket) -> Picture:
    read_picture(path, bucket)
    try:
        return Picture(path, content_of(path))
    except OSError as error:
        raise RecipeError(
            f"The picture {path} cannot be read: {error.strerror or error}."
        ) from error


def find_file(key: str, file: Path, folder: Path | None) -> Path:
    """The path of a file: beside the file that names it, else in the current folder."""
    if folder is not None and RunDirectory(folder).exists() and not is_own(RunDirectory(folder)):
        return _find_inside(key, file, folder)
    here = Path.cwd()
    places = dict.fromkeys([here] if folder is None else [folder.absolute(), here])
    found = next((place / file for place in places if (place / file).is_file()), None)
    if found is not None:
        return found
    if file.is_absolute():
        raise RecipeError(f"{key}: there is no file {file}.")
    raise RecipeError(
        f"{key}: there is no file {file} in {' or in '.join(map(str, places))}. Put it there, or "
        "name it by its whole path."
    )


def _find_inside(key: str, file: Path, folder: Path) -> Path:
    """Another user's run could name any file of this host, whose content the results would show."""
    found, top = (folder / file).resolve(), folder.resolve()
    if not found.is_relative_to(top):
        raise RecipeError(
            f"{key}: {file} lies outside of {folder}, which this user did not begin on this host. "
            "Expected a file in that folder. Copy it there, or name it in a file of your own "
            "(--presets)."
        )
    if not found.is_file():
        raise RecipeError(f"{key}: there is no file {file} in {folder}. Put it there.")
    return found

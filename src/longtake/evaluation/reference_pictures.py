"""The pictures that a preset's videos go by, for a model that takes such; torch-free.

A preset is known by what they show, not by where they lie. What the model sees of each is kept
beside the preset's results, small, so that sheets can show it wherever the pictures are.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from longtake.config import Bucket
from longtake.errors import DataError, RecipeError, RunError
from longtake.evaluation.sampling.read_pictures import read_picture
from longtake.fsio import atomic_write
from longtake.run_dir import RunDirectory
from longtake.trust import is_own

_KEPT_SIZE = 256, 256


@dataclass(frozen=True)
class Picture:
    """A picture that videos go by.

    Attributes:
        path: where it lies; an image or a video, of which the first frame counts.
        content: the first 16 hexadecimal digits of its file's sha256.
    """

    path: Path
    content: str

    def refuse_change(self) -> None:
        """Refuse the file if it has changed since.

        Raises:
            RunError: it has, or cannot be read any more.
        """
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
    """The pictures of a preset.

    Args:
        given: the files that it names.
        names: of the pictures that the model goes by.
        count: of the prompts.
        bucket: the videos' size, to which they are cut.
        folder: of the file that names them, where they are looked for first.

    Raises:
        RecipeError: there are others than those names, not as many as prompts, or a file is gone.
        DataError: one is no picture.
    """
    files = given or {}
    _refuse_others(files, names)
    return {name: _found(name, files[name], count, bucket, folder) for name in names}


def content_of(path: Path) -> str:
    """The first 16 hexadecimal digits of a file's sha256.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def kept_picture(preset_json: Path, number: int, name: str) -> Path:
    """Where the small copy of a prompt's picture lies, whether it exists or not.

    Args:
        preset_json: of the preset.
        number: of the prompt, from 0.
        name: of the picture.
    """
    return preset_json.parent / "pictures" / f"{number:02d}_{name}.png"


def keep_pictures(preset_json: Path, pictures: Pictures, bucket: Bucket) -> None:
    """Write the small copies that are not there yet, cut as the model sees the pictures.

    Sheets do without that of a picture which cannot be read any more.

    Raises:
        OSError: a copy cannot be written.
    """
    for name, of_prompts in pictures.items():
        for number, picture in enumerate(of_prompts):
            path = kept_picture(preset_json, number, name)
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                with suppress(DataError):
                    _keep(picture, bucket, path)


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
    """One for each prompt; each file is read once."""
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


def _keep(picture: Picture, bucket: Bucket, path: Path) -> None:
    small = Image.fromarray(read_picture(picture.path, bucket))
    small.thumbnail(_KEPT_SIZE)
    with atomic_write(path, by_many=True) as partial:
        small.save(partial, format="PNG")


def find_file(key: str, file: Path, folder: Path | None) -> Path:
    """Where a file is: beside the file that names it, else in the folder the command is run in.

    Args:
        key: that names it, for the error.
        file: as it is named.
        folder: of the file that names it, where there is one.

    Raises:
        RecipeError: it is in neither; or a run that somebody else began names a file outside of it.
    """
    if folder is not None and _is_foreign(folder):
        return _inside(key, file, folder)
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


def _is_foreign(folder: Path) -> bool:
    return RunDirectory(folder).exists() and not is_own(RunDirectory(folder))


def _inside(key: str, file: Path, folder: Path) -> Path:
    """Others could have any file of this host read: what it says becomes a part of the results."""
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

"""Reference files (such as pictures) of a preset of prompts: found, checked, read and copied."""

import errno
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from longtake import config, fsio, trust
from longtake.data.conditioning import NUMBERS_SUFFIXES, as_values, conditioning_alone, read
from longtake.errors import ClipError, DataError, RecipeError, RunError
from longtake.run_dir import RunDirectory

_KEPT_SIZE = 256, 256


@dataclass(frozen=True)
class InputFile:
    """A file of a preset's reference input (such as a picture), and a hash of its content."""

    path: Path
    content: str  # first 16 hex digits of the file's SHA-256

    def refuse_change(self) -> None:
        """Refuse a reference file that has changed since the preset was read.

        Raises:
            RunError: the file has changed, or cannot be read.
        """
        try:
            is_same = content_of(self.path) == self.content
        except OSError as error:
            raise RunError(
                f"The file {self.path} cannot be read any more: {error.strerror or error}."
            ) from error
        if not is_same:
            raise RunError(
                f"The file {self.path} has changed since the preset was read. Put the old one "
                "back: a row of videos shows the training only if nothing else changes."
            )


InputFiles = Mapping[str, tuple[InputFile, ...]]
"""Files of reference inputs (pictures, numbers) by name in `data.conditioning`, one per prompt."""


def cannot_be_kept(path: Path, error: OSError) -> RunError:
    advice = " Make room." if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return RunError(f"{path} cannot be kept: {error.strerror or error}.{advice}")


def read_input(
    section: config.ConditioningSection, path: Path, *, bucket: config.Bucket, stride: int = 1
) -> NDArray[Any]:
    """Read a reference input for one video of a bucket's size, as training reads it.

    Pixels are scaled to cover the bucket and cropped in the center; of a longer video or list of
    numbers the first frames are used.

    Raises:
        DataError: the file cannot be read, or is not what the recipe describes.
    """
    wanted = conditioning_alone(section, path, bucket, stride)
    try:
        return as_values(wanted, read(wanted))
    except ClipError as error:
        raise DataError(
            f"The {section.kind} {error.path} cannot be read: {error.reason}."
        ) from error


# A section by which any picture can be read like a model's input.
_SHOWN = config.ConditioningSection(kind="picture", path="shown")


def read_picture(file: Path, bucket: config.Bucket) -> NDArray[np.uint8]:
    """Read a picture, or a video's first frame, as [H, W, 3] in the bucket's size."""
    # The first frame of [C, F, H, W].
    picture: NDArray[np.uint8] = read_input(_SHOWN, file, bucket=bucket)[:, 0]
    return np.ascontiguousarray(picture.transpose(1, 2, 0))


def pictures_in(files: Iterable[Path], bucket: config.Bucket) -> list[NDArray[np.uint8]]:
    """Read the pictures among a video's reference files; files of numbers are left out."""
    return [read_picture(file, bucket) for file in files if is_shown(file)]


def is_shown(file: Path) -> bool:
    return file.suffix.lower() not in NUMBERS_SUFFIXES


def refuse_other_inputs(
    given: Iterable[str], needed: Iterable[str], *, of_preset: bool = False
) -> None:
    """Refuse reference inputs other than those with which the model was trained.

    Args:
        given: names of the inputs in a preset, or of those in `--conditioning`.
        needed: names of the model's inputs.
        of_preset: True for a preset.

    Raises:
        DataError: an input is missing, or unknown.
        RecipeError: the same, in a preset.
    """
    given, needed = list(given), list(needed)
    if set(given) == set(needed):
        return
    error, key = (RecipeError, "conditioning") if of_preset else (DataError, "--conditioning")
    listed = ", ".join(given) or "none"
    if not needed:
        raise error(
            f"{key} gives {listed}, but this model takes no further inputs (data.conditioning is "
            f"empty). Leave {key} out."
        )
    advice = "exactly those: " + " ".join(f"--conditioning {name}=FILE" for name in needed)
    if of_preset:
        missing = next((name for name in needed if name not in given), needed[0])
        advice = (
            "each of them, and no other: a file for each prompt, or one for all, such as "
            f'conditioning.{missing} = ["{missing}.png"] in the table of the preset '
            "([evaluation.presets.NAME] in a recipe)"
        )
    raise error(
        f"{key} gives {listed}, but this model takes the inputs {', '.join(needed)}. Give {advice}."
    )


def content_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def kept_picture(preset_json: Path, number: int, name: str) -> Path:
    return preset_json.parent / "pictures" / f"{number:02d}_{name}.png"


def keep_pictures(preset_json: Path, files: InputFiles, buckets: Sequence[config.Bucket]) -> None:
    """Write small copies of a preset's pictures that are missing; unreadable ones get none.

    Each has the size of its prompt's bucket.
    """
    for name, of_prompts in files.items():
        for number, (file, bucket) in enumerate(zip(of_prompts, buckets, strict=True)):
            path = kept_picture(preset_json, number, name)
            if is_shown(file.path) and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                with suppress(DataError):
                    small = Image.fromarray(read_picture(file.path, bucket))
                    small.thumbnail(_KEPT_SIZE)
                    with fsio.atomic_write(path, by_many=True) as partial:
                        small.save(partial, format="PNG")


def find_files(
    name: str,
    files: Sequence[Path],
    buckets: Sequence[config.Bucket],
    folder: Path | None,
    read_file: Callable[..., object],
) -> tuple[InputFile, ...]:
    """Find one reference file per prompt of a preset, and read each in the prompts' buckets.

    They are read once for each bucket, to find errors.

    Raises:
        RecipeError: the number of files is wrong, or one is missing or unreadable.
    """
    key, count = f"conditioning.{name}", len(buckets)
    if len(files) not in (1, count):
        raise RecipeError(
            f"{key} names {len(files)} files, but there are {count} prompts. Name one for each "
            "prompt, or one for all."
        )
    # A single file serves all prompts.
    of_prompts = [*files] * (count if len(files) == 1 else 1)
    inputs = {}
    for file, bucket in dict.fromkeys(zip(of_prompts, buckets, strict=True)):
        path = find_file(key, file, folder)
        read_file(path, bucket=bucket)
        try:
            inputs[file] = InputFile(path, content_of(path))
        except OSError as error:
            raise RecipeError(
                f"The file {path} cannot be read: {error.strerror or error}."
            ) from error
    return tuple(inputs[file] for file in of_prompts)


def find_file(key: str, file: Path, folder: Path | None) -> Path:
    """Return the path of a file that another file names: beside that one, or in the current folder.

    Raises:
        RecipeError: the file does not exist, or is outside of another user's run.
    """
    run = None if folder is None else RunDirectory(folder)
    if folder is not None and run is not None and run.exists() and not trust.is_own(run):
        # Another user's run could otherwise name any file of this host, and the results would show
        # its content.
        inside, top = (folder / file).resolve(), folder.resolve()
        if not inside.is_relative_to(top):
            raise RecipeError(
                f"{key}: {file} lies outside of {folder}, which this user did not begin on this "
                "host. Expected a file in that folder. Copy it there, or name it in a file of your "
                "own (--presets)."
            )
        if not inside.is_file():
            raise RecipeError(f"{key}: there is no file {file} in {folder}. Put it there.")
        return inside
    here = Path.cwd()
    # Each place once, also if the folder is the current one.
    places = dict.fromkeys([here] if folder is None else [folder.absolute(), here])
    existing = next((place / file for place in places if (place / file).is_file()), None)
    if existing is not None:
        return existing
    if file.is_absolute():
        raise RecipeError(f"{key}: there is no file {file}.")
    raise RecipeError(
        f"{key}: there is no file {file} in {' or in '.join(map(str, places))}. Put it there, or "
        "name it by its whole path."
    )

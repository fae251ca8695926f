"""Finds files that presets name; torch-free."""

from pathlib import Path

from longtake.errors import RecipeError


def find_file(key: str, file: Path, folder: Path | None) -> Path:
    """Where a file is: beside the file that names it, else in the folder the command is run in.

    Args:
        key: that names it, for the error.
        file: as it is named.
        folder: of the file that names it, where there is one.

    Raises:
        RecipeError: it is in neither.
    """
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

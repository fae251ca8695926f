"""Finds files that presets name; torch-free."""

from pathlib import Path

from longtake.errors import RecipeError
from longtake.run_dir import RunDirectory
from longtake.trust import is_own


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

"""Gathers what is said about presets in all places; torch-free.

Later places win, key by key: what comes with longtake, the recipe's [evaluation.presets], and a
file that the command names.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from longtake import config
from longtake.config import PresetSection, Recipe
from longtake.errors import RecipeError
from longtake.formatting import did_you_mean

Table = Mapping[str, Any]
"""What is said about one preset: keys of `PresetSection`."""

_SHIPPED = Path(str(resources.files("longtake.evaluation.presets"))) / "presets.toml"


@dataclass(frozen=True)
class Tables:
    """What is said about presets.

    Attributes:
        known: all that there are, by name, with what is said about them in all places.
        folders: of the file that says each key of each preset.
        of_run: names of those in the recipe.
        of_own: names of those that the command's own file speaks of.
    """

    known: dict[str, dict[str, Any]]
    folders: dict[str, dict[str, Path | None]]
    of_run: tuple[str, ...]
    of_own: tuple[str, ...]


def gather(recipe: Recipe, beside: Path | None = None, own: Path | None = None) -> Tables:
    """Read and merge all tables.

    Args:
        recipe: of the run.
        beside: the run directory, where files that the recipe names may lie.
        own: a file of presets that the command names.

    Raises:
        RecipeError: a file cannot be read, a key is unknown, or a value does not fit.
    """
    of_recipe = {name: _said(section) for name, section in recipe.evaluation.presets.items()}
    of_own = _read(own, recipe) if own is not None else {}
    places: list[tuple[Path | None, Mapping[str, Table]]] = [
        (_SHIPPED.parent, _shipped()),
        (beside, of_recipe),
        (own.parent if own is not None else None, of_own),
    ]
    known: dict[str, dict[str, Any]] = {}
    folders: dict[str, dict[str, Path | None]] = {}
    for folder, tables in places:
        for name, table in tables.items():
            known[name] = _merged(known.get(name, {}), table)
            folders.setdefault(name, {}).update(dict.fromkeys(table, folder))
    return Tables(known, folders, tuple(of_recipe), tuple(of_own))


def _merged(before: Table, table: Table) -> dict[str, Any]:
    """Prompts are given in one of two ways: the later one counts."""
    either = {"prompts", "prompts_file"}
    kept = {key: v for key, v in before.items() if not (key in either and either & table.keys())}
    return {**kept, **table}


def _said(section: PresetSection) -> dict[str, Any]:
    """The keys of a section that say anything."""
    values = {name: getattr(section, name) for name in PresetSection.model_fields}
    return {name: value for name, value in values.items() if value is not None}


@cache
def _shipped() -> dict[str, dict[str, Any]]:
    return tomllib.loads(_SHIPPED.read_text(encoding="utf-8"))


def _read(path: Path, recipe: Recipe) -> dict[str, dict[str, Any]]:
    """The tables of a file, each a preset."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise RecipeError(
            f"The presets {path} cannot be read: {error.strerror or error}."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"The presets {path} are not valid TOML: {error}.") from None
    for name, table in tables.items():
        _refuse_unknown(path, name, table)
    values = recipe.model_dump(exclude_none=True)
    values["evaluation"]["presets"] = tables
    parsed = config.parse(values, source=str(path)).evaluation.presets
    return {
        name: {key: getattr(section, key) for key in tables[name]}
        for name, section in parsed.items()
    }


def _refuse_unknown(path: Path, name: str, table: object) -> None:
    if not isinstance(table, dict):
        raise RecipeError(
            f"{path}: {name} stands outside of a preset's table. Write it below a line such as "
            "[low4s]."
        )
    for key in table:
        if key not in PresetSection.model_fields:
            near = did_you_mean(key, PresetSection.model_fields)
            raise RecipeError(f"{path}: {name}.{key} is not a key of a preset; {near}")

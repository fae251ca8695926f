"""Loading of recipes, with error messages that explain each problem."""

import codecs
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import tomli_w
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from longtake import fsio, process
from longtake.config.recipe import Recipe
from longtake.config.values import Section
from longtake.errors import RecipeError
from longtake.formatting import nearest, shorten

S = TypeVar("S", bound=Section)


def load(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file and apply `a.b=c` overrides.

    Raises:
        RecipeError: the file is missing or not TOML, a key is unknown, or a value does not fit.
    """
    values = _read_toml(path)
    for override in overrides:
        _apply_override(values, override)
    return parse(values, source=str(path))


def changed(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """Return a copy of a recipe with `a.b=c` overrides applied.

    Raises:
        RecipeError: a key is unknown, or a value does not fit.
    """
    values = recipe.model_dump(exclude_none=True)
    for override in overrides:
        _apply_override(values, override)
    return parse(values, source="The changed recipe")


def parse(values: Mapping[str, Any], source: str) -> Recipe:
    """Validate nested values as a recipe; `source` names them in error messages.

    Raises:
        RecipeError: the values are invalid; the message has up to 20 problems, one per line.
    """
    return parse_section(Recipe, values, source)


def parse_section(kind: type[S], values: object, source: str) -> S:
    """Validate nested values as a section of this kind, as `parse` does a whole recipe.

    Raises:
        RecipeError: as `parse`.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        details = error.errors()
        # For unions, pydantic reports both the table as a whole and the keys inside of it. Only
        # the inner errors help the user.
        outer = {detail["loc"][:end] for detail in details for end in range(len(detail["loc"]))}
        inner = (detail for detail in details if not detail["loc"] or detail["loc"] not in outer)
        problems = list(dict.fromkeys(map(_explain, inner)))[:_MAX_PROBLEMS]
        listed = f" {problems[0]}" if len(problems) == 1 else "\n  " + "\n  ".join(problems)
        raise RecipeError(f"{source}:{listed}") from None


def dump(recipe: Recipe) -> str:
    # TOML has no null: unset keys are left out.
    return tomli_w.dumps(recipe.model_dump(exclude_none=True))


def kept(recipe: Recipe) -> Recipe:
    """Return the recipe as a run keeps it: keys that act on one launch have their defaults."""
    once = {"on_change": "refuse", "retry_quarantined": False}
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=once)})


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        # A named pipe would be waited for without end. Editors on Windows begin a file with a byte
        # order mark, which tomllib refuses.
        text = fsio.read_regular(path, _MAX_RECIPE_BYTES).removeprefix(codecs.BOM_UTF8)
        return tomllib.loads(text.decode())
    except FileNotFoundError:
        raise RecipeError(
            f"There is no recipe {path}. `{process.command()} init` writes one."
        ) from None
    except OSError as error:
        raise RecipeError(f"The recipe {path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        # A ValueError also stands for a number of thousands of digits.
        reason = shorten(str(error).partition(";")[0].rstrip("."), 200)
        if isinstance(error, RecursionError):
            reason = "it is nested too deeply"
        if isinstance(error, UnicodeDecodeError):
            reason = "it is not UTF-8 text"
        raise RecipeError(f"The recipe {path} is not valid TOML: {reason}.") from error


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, _, text = (part.strip() for part in override.partition("="))
    parts = [part.strip() for part in key.split(".")]
    if not text or not all(parts):
        raise RecipeError(
            f"--set {shorten(override)}: expected key=value, such as training.steps=2000."
        )
    section = values
    for depth, part in enumerate(parts[:-1], start=1):
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise RecipeError(
                f"--set {shorten(override)}: {shorten('.'.join(parts[:depth]))} is a value, not a "
                "section; set it as a whole."
            )
    section[parts[-1]] = parse_value(text)


def parse_value(text: str) -> object:
    """Parse a TOML value; text that is not TOML is a string, so a shell needs no nested quotes."""
    try:
        values = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # not TOML, or a number of too many digits
        return text
    # A text with line breaks may set several keys; it is a TOML value only if nothing else is left.
    value: object = values.pop("value")
    # TOML would read `out=2024-01-31` as a date, which no key has.
    is_plain = isinstance(value, bool | int | float | str | list | dict)  # and no date
    return value if is_plain and not values else text


def _explain(detail: ErrorDetails) -> str:
    parts = tuple(part for part in detail["loc"] if not _ALTERNATIVE.match(str(part)))
    location = shorten(".".join(map(str, parts)))
    kind, message = detail["type"], shorten(detail["msg"], 400)
    # pydantic reports one error for each type that a shift may have. All get the same sentence,
    # which `parse` then lists once.
    if len(parts) < len(detail["loc"]) and parts[-1:] == ("shift",):
        return f"{location} is {shorten(repr(detail['input']))}; it should be {_SHIFT}."
    if kind == "extra_forbidden":
        return _explain_unknown(location, [part for part in parts if isinstance(part, str)])
    if kind == "missing":
        return f"{location} is missing, and it has no default."
    if kind == "value_error":
        # pydantic puts these words before the sentence of a validator.
        return f"{message.removeprefix('Value error, ')}."
    expected = _EXPECTED.get(kind) or message.removeprefix("Input should ")
    if kind == "string_pattern_mismatch":
        expected = _PATTERNS.get(location) or _PATTERNS[location.rpartition(".")[2]]
    if kind in ("too_short", "too_long"):
        # pydantic says "Tuple should have at least 1 item after validation, not 0".
        expected = message.removeprefix("Tuple should ").partition(" after")[0]
    return f"{location} is {shorten(_repr(detail['input']))}; it should {expected}."


def _repr(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # an integer of thousands of digits
        return "an integer of thousands of digits"


_MAX_RECIPE_BYTES = 2**20
_MAX_PROBLEMS = 20
_SHIFT = 'a number above 0 and up to 1000, "release", "flux" or "opensora"'
# What pydantic appends to a key whose value may be of several types.
_ALTERNATIVE = re.compile(r"(constrained-\w+|tagged-\w+|literal\[.*\])$")
_EXPECTED = {
    "dict_type": "be a table of keys and values",
    "model_type": "be a table of keys and values",
    "path_type": "be a path in quotes",
    "tuple_type": "be a list",
    "string_type": "be a text in quotes",
}
"""Wording for pydantic's errors that mention Python types, by the kind of error."""

_NAME_PATTERN = "be a name of small letters, digits, - and _"
_PATTERNS = {
    "module": "be a module and a class, such as my_project.adapter:PoseAdapter",
    "kind": "be 'adamw', 'muon', 'adamw8bit', 'prodigy', or a class of your own such as "
    "'my_project.optim:Lion'",
    "objective.kind": "be 'flow_matching', 'guided_target', 'prior_preservation', or a class of "
    "your own such as 'my_project.losses:Preference'",
    "name": _NAME_PATTERN,
    "[key]": _NAME_PATTERN,
}
"""Description of the pattern that a string must match, by its key or the last part of it."""


_OTHER_NAMES = {
    **dict.fromkeys(("batch_size", "batchsize"), "training.global_batch_size"),
    **dict.fromkeys(
        ("epochs", "max_epochs", "num_epochs", "num_train_epochs", "max_train_epochs"),
        "training.epochs",
    ),
}
"""Recipe keys by the names that other trainers use for them."""


_NOT_HERE = {"dropout": "no layer has dropout; captions have, by data.caption_dropout."}


def _explain_unknown(location: str, parts: list[str]) -> str:
    *section, name = parts
    if section in ([], ["training"], ["trainable"]) and name in _NOT_HERE:
        return f"{location} is not a key of a recipe; {_NOT_HERE[name]}"
    by_name = (
        ["evaluation", "presets"],
        ["data", "conditioning"],
        ["data", "captions"],
        ["trainable", "modules"],
    )
    if section[:2] in by_name:
        section = section[:2]  # without the name that the user chose
    known = _known_keys()
    inside = [key for key in known if key.split(".")[:-1] == section]
    # Prefer a similar key of the same section to an equal one elsewhere.
    near = (
        _OTHER_NAMES.get(name)
        or _most_similar(name, inside, cutoff=0.6)
        or _most_similar(name, known, cutoff=0.8)
    )
    names = sorted(key.rpartition(".")[2] for key in inside)
    hint = f"did you mean {near}?" if near else f"known there: {', '.join(names)}."
    return f"{location} is not a key of a recipe; {hint}"


def _most_similar(name: str, keys: Sequence[str], cutoff: float) -> str | None:
    """Return a key whose last part resembles `name`, contains it as a word or is its long form."""
    by_name: dict[str, str] = {}
    for key in keys:
        # The first key of a name wins: `_known_keys` lists outer sections before their inner
        # tables.
        by_name.setdefault(key.rpartition(".")[2], key)
    if close := nearest(name, by_name, cutoff):
        return by_name[close]
    for candidate in by_name:
        words = candidate.split("_")
        if name in words or name == "".join(word[0] for word in words):
            return by_name[candidate]
    return None


def _known_keys() -> list[str]:
    """List all keys of a recipe; keys of a section come before those of its inner tables."""
    keys: list[str] = []
    tables: list[tuple[str, type[Section]]] = [("", Recipe)]
    for prefix, table in tables:  # the list grows during the loop
        for name, field in table.model_fields.items():
            keys.append(f"{prefix}{name}")
            tables += [(f"{prefix}{name}.", inner) for inner in _tables_in(field.annotation)]
    return keys


def _tables_in(annotation: Any) -> Iterator[type[Section]]:
    """Yield the section classes within a type such as `tuple[Bucket, ...] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for part in get_args(annotation):
        yield from _tables_in(part)

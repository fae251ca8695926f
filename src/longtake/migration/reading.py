"""Reads a user's configuration files of other trainers: data only, of limited size and depth."""

import json
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longtake import fsio
from longtake.formatting import printable, shorten
from longtake.migration.tables import refusal

MAX_BYTES = 2**18
_MAX_DEPTH = 24
_MAX_VALUES = 20_000
_COMMANDS = (".sh", ".bash", ".txt", ".bat", ".ps1", ".cmd")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_ASSIGNMENT = re.compile(r"(?:export\s+|set\s+)?([A-Za-z_]\w*)=([^\s;]*);?")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass(frozen=True)
class ConfigFile:
    """A file as it was read: nested values of TOML, YAML or JSON, or the words of its commands."""

    name: str
    """The path as the user gave it, printable in one line."""
    content: Any
    """Nested values; None for a file of commands or prompts."""
    lines: tuple[str, ...] = ()
    """Lines of a file of commands or prompts, with continued ones joined."""


def read_config(path: Path) -> ConfigFile:
    """Read one file; its ending says in which language it is written.

    Raises:
        RecipeError: it is not a regular file of text, too large or too deep, or not valid.
    """
    name = printable(path)
    try:
        # Only the file that the user named is read, and not one that it points to.
        if path.is_symlink():
            raise refusal("link", name=name)
        text = fsio.read_regular(path, MAX_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise refusal("no_text", name=name) from None
    except (OSError, ValueError) as error:  # a ValueError stands for a NUL character in the path
        reason = getattr(error, "strerror", None) or error
        raise refusal("unread", name=name, reason=printable(reason)) from None
    suffix = path.suffix.lower()
    if suffix in _COMMANDS:
        # A backslash, ^ or ` at the end of a line continues it.
        joined = re.sub(r"[\\^`][ \t]*\r?\n", " ", text)
        lines = tuple(line.strip() for line in joined.splitlines() if line.strip())
        return ConfigFile(name, None, lines)
    try:
        content = parse_text(text, suffix)
        check_size(content)
    except RecursionError:
        raise refusal("too_deep", name=name) from None
    except ValueError as error:
        reason = shorten(" ".join(printable(str(error)).split()).rstrip("."), 200)
        raise refusal("invalid", name=name, reason=reason) from None
    return ConfigFile(name, content)


def parse_text(text: str, suffix: str) -> Any:
    if suffix in (".yaml", ".yml"):
        return parse_yaml(text)
    if suffix == ".json":
        return json.loads(text)
    if suffix == ".toml":
        return tomllib.loads(text)
    raise ValueError(
        f"its name ends in {suffix or 'nothing'}; expected .toml, .yaml, .json, or a command line "
        f"in a file that ends in {' '.join(_COMMANDS)}"
    )


def parse_yaml(text: str) -> Any:
    import yaml  # type: ignore[import-untyped]

    class PlainLoader(yaml.SafeLoader):  # type: ignore[misc]
        """A safe loader without references, by which a small file could stand for a huge one."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError("it has references (*name): write what they stand for")
            return super().compose_node(parent, index)

    try:
        return yaml.load(text, PlainLoader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        # Its own text has the source's line, which may hold a secret.
        mark = getattr(error, "problem_mark", None)
        at = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
        problem = getattr(error, "problem", None) or getattr(error, "reason", "not valid YAML")
        raise ValueError(f"{problem}{at}") from None


def check_size(content: Any) -> None:
    """Raise ValueError for too many values or too deep nesting, before anything walks through."""
    level, count = [content], 0
    for _ in range(_MAX_DEPTH):
        tables = [each for each in level if isinstance(each, Mapping)]
        lists = [each for each in level if isinstance(each, list)]
        level = [v for each in tables for v in each.values()] + [v for each in lists for v in each]
        count += len(level)
        if count > _MAX_VALUES:
            raise ValueError(f"it has more than {_MAX_VALUES:,} values")
        if not level:
            return
    raise ValueError(f"it is nested more than {_MAX_DEPTH} levels deep")


def flatten(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one, with keys such as `optimizer.lr`; lists stay values."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def command_words(lines: Sequence[str], scripts: Sequence[str]) -> list[list[str]]:
    """Split the commands that call one of the scripts into words, without running anything.

    `$NAME` is replaced where the file itself sets NAME to a plain text; other variables stay.

    Raises:
        RecipeError: the variables stand for more text than a file may have.
    """
    variables: dict[str, str] = {}
    commands = []
    grown = 0
    for line in lines:
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # an open quotation mark
            words = line.split()
        for word in words:
            assigned = _ASSIGNMENT.fullmatch(word)
            if assigned is None and word not in ("export", "set"):
                break
            if assigned is not None and not re.search(r"[$`(]", assigned[2]):
                variables[assigned[1]] = assigned[2]
        found = (m for word in words for m in _VARIABLE.finditer(word))
        grown += sum(len(variables.get(m[1] or m[2], "")) for m in found)
        if grown > MAX_BYTES:
            raise refusal("grown", kib=MAX_BYTES // 1024)
        words = [_VARIABLE.sub(lambda m: variables.get(m[1] or m[2], m[0]), word) for word in words]
        if any(Path(word.replace("\\", "/")).name in scripts for word in words):
            commands.append(words)
    return commands


def arguments_of(words: Sequence[str]) -> dict[str, Any]:
    """Return the options of a command: `--name value`, `--name=value`, lists, and flags as true."""
    found: dict[str, Any] = {}
    key = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, has_value, value = word[2:].partition("=")
            key = name.replace("-", "_")
            found[key] = [plain(value)] if has_value else []
        elif key:
            found[key].append(plain(word))
    # A flag has no value, most options one.
    return {
        name: True if not values else values[0] if len(values) == 1 else values
        for name, values in found.items()
    }


def plain(value: Any) -> Any:
    """Return the number or boolean that a text stands for; anything else as it is."""
    if isinstance(value, str):
        text = value.strip()
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        if len(text) <= 40 and _NUMBER.fullmatch(text):
            value = float(text)
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return int(value) if is_whole else value

"""Writes a recipe with comments: TOML of the draft's values, and what was said about them."""

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import tomli_w

from longtake.migration.draft import Draft, Kind, recipe_order

_WIDTH = 96
HEADINGS: Mapping[Kind, str] = {
    "decide": "To decide; these lines are marked with DECIDE:",
    "none": "Without equivalent, and left out:",
    "differs": "Translated, with a difference:",
    "unknown": "Unknown, and left out:",
    "secret": "Not read, as it may be a secret:",
    "default": "Not set there; the other trainer's default is written:",
    "kept": "Not set there; longtake's default is kept:",
}
"""What is said of notes of each kind, in the order in which people need them."""


def note_lines(draft: Draft) -> Iterator[str]:
    """Yield all notes under headings, each in one line."""
    for kind, heading in HEADINGS.items():
        notes = [note for note in draft.notes if note.kind == kind]
        if not notes:
            continue
        yield heading
        if kind in ("unknown", "secret"):
            yield f"  {', '.join(note.key for note in notes)}"
        else:
            yield from (f"  {note.key}: {note.text}" for note in notes)


def recipe_text(draft: Draft, title: str, commands: list[str]) -> str:
    """Return the recipe: a head of comments, then its sections in the order of the reference."""
    head = [f"{title}; translated from a configuration of {draft.tool.title}.", ""]
    head += [f"  {command}" for command in commands]
    lines = [*head, "", *(line for line in note_lines(draft))]
    text = [comment_line(line) for line in lines]
    order = {key: number for number, key in enumerate(recipe_order())}

    def place(key: str) -> int:
        """Tables that get lines of their own stand behind all plain keys of their section."""
        beginning = "evaluation.presets." if key.startswith("evaluation.presets.") else f"{key}."
        inner = (at for each, at in order.items() if each.startswith(beginning))
        return next(inner) if is_table(key) else order.get(key, len(order))

    # Keys that the user has to decide and that have no value stand there as comments.
    open_keys = [key for key, text in draft.comments.items() if text.startswith("DECIDE")]
    open_keys = [key for key in open_keys if key in order and key not in draft.values]
    keys = sorted([*draft.values, *open_keys], key=place)
    text.append("")
    written = ""
    for key in keys:
        section, _, name = key.rpartition(".")
        value = draft.values.get(key)
        if isinstance(value, dict) and is_table(key):
            text += ["", *named_tables(draft, key, value)]
            written = ""
            continue
        if section != written:
            text += ["", f"[{section}]"]
            written = section
        comment = draft.comments.get(key, "")
        text += key_line(name, value, comment) if value is not None else [comment_line(comment)]
    return "\n".join(text) + "\n"


def is_table(key: str) -> bool:
    """Return True for a table that gets lines of its own, and is not written in one line."""
    by_name = ("data.conditioning", "data.captions", "text.pooled")
    return key in by_name or key.startswith("evaluation.presets.")


def named_tables(draft: Draft, key: str, value: Mapping[str, Any]) -> Iterator[str]:
    yield f"[{key}]"
    for name, each in value.items():
        yield from key_line(name, each, draft.comments.get(f"{key}.{name}", ""))


def key_line(name: str, value: Any, comment: str) -> Iterator[str]:
    line = f"{name} = {toml(value)}"
    is_short = len(line) + len(comment) + 2 <= _WIDTH and not comment.startswith("DECIDE")
    if comment and not is_short:
        yield comment_line(comment)
    yield f"{line.ljust(30)} # {comment}" if comment and is_short else line


def comment_line(text: str) -> str:
    """Return a line as lines of comment; what is indented stays so, and commands stay whole."""
    if not text:
        return "#"
    indent = " " * (len(text) - len(text.lstrip()))
    if text.startswith("  longtake "):
        return f"# {text}"
    wrapped = textwrap.wrap(
        text,
        _WIDTH,
        subsequent_indent=f"{indent}  " if indent else "",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(f"# {line}" for line in wrapped)


def toml(value: Any) -> str:
    """Return a value as TOML in one line."""
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{toml_key(name)} = {toml(each)}" for name, each in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    # tomli-w escapes what TOML forbids in a text.
    return tomli_w.dumps({"v": value}).partition("= ")[2].rstrip("\n")


def toml_key(name: str) -> str:
    return tomli_w.dumps({name: 0}).partition(" =")[0]

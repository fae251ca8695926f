"""A recipe in the making: values by key, and what has to be said about them."""

import functools
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from longtake.config import Recipe
from longtake.config.values import Section
from longtake.formatting import printable, shorten
from longtake.migration.tables import Tool, text

Kind = Literal["decide", "none", "differs", "default", "kept", "unknown", "secret"]


class Note(NamedTuple):
    """A sentence about one setting."""

    kind: Kind
    key: str
    text: str


ALPHA = "{alpha}"
"""In place of a folder of masks: the alpha channels of the pictures themselves."""


@dataclass
class ClipSet:
    """One set of clips of the configuration, which becomes a catalog."""

    name: str = ""
    """Name of its catalog's file."""
    key: str = ""
    """Name of its catalog in the recipe; `catalog` if it is the only one."""
    source: str = ""
    """A folder, or a table of clips."""
    is_kohya: bool = False
    """True if the folder holds folders such as `10_dog`."""
    uncaptioned: str = ""
    """Caption of clips that have none."""
    repeats: int = 1
    loss_weight: float = 1.0
    whole_captions: bool = False
    """True if the lines of a text are one caption, in a trainer that takes them for several."""
    is_regularisation: bool = False
    """True if the run's weight of regularisation sets counts for it."""
    captions: dict[str, Any] = field(default_factory=dict)
    """Keys of `data.captions.NAME`."""
    given: dict[str, Any] = field(default_factory=dict)
    """Values by keys of the recipe and names of facts, of which the recipe has one for all sets."""
    conditioning: dict[str, str] = field(default_factory=dict)
    """Folders of further inputs by their names here."""


@dataclass
class Draft:
    """What is known of a recipe so far."""

    tool: Tool
    values: dict[str, Any] = field(default_factory=dict)
    """Values of the recipe by key."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Values of the configuration that decide a key only together with others."""
    comments: dict[str, str] = field(default_factory=dict)
    """What stands beside a key in the recipe."""
    notes: list[Note] = field(default_factory=list)
    clips: list[ClipSet] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)

    def say(self, kind: Kind, key: str, text: str) -> None:
        note = Note(kind, shorten(printable(key), 80), printable(text))
        if note not in self.notes:
            self.notes.append(note)

    def tell(self, kind: Kind, key: str, name: str, /, **values: Any) -> None:
        """Say a sentence of texts.toml about a setting."""
        self.say(kind, key, text("notes", name, **values))

    def decide(self, key: str, name: str, /, **values: Any) -> None:
        """Mark a key of the recipe as one that the user has to look at."""
        self.comments[key] = f"DECIDE: {printable(text('notes', name, **values))}"
        self.tell("decide", key, name, **values)

    def set(self, key: str, value: Any, comment: str = "", /, **values: Any) -> None:
        """Set a key of the recipe, with a comment of texts.toml beside it."""
        self.values[key] = value
        if comment and not self.comments.get(key, "").startswith("DECIDE"):
            self.comments[key] = printable(text("comments", comment, **values))


def show(value: object) -> str:
    """Return a value as a message shows it: short, and in one printable line."""
    return shorten(printable(value if isinstance(value, str) else repr(value)), 60)


@functools.cache
def recipe_order() -> tuple[str, ...]:
    """Return all keys of a recipe in order, of tables by name too (`data.captions.NAME.trigger`).

    Keys of a section stand before those of its inner tables, as TOML wants it.
    """
    return tuple(_keys_of(Recipe, ""))


def default_of(key: str) -> Any:
    """Return the recipe's own default of a key; None if it has none."""
    section: Any = Recipe
    *outer, name = key.split(".")
    for part in outer:
        section = next(iter(_sections_in(section.model_fields[part].annotation)))
    default = section.model_fields[name].get_default(call_default_factory=True)
    return None if repr(default) == "PydanticUndefined" else default


def _keys_of(section: type[Section], prefix: str) -> list[str]:
    found = [f"{prefix}{name}" for name in section.model_fields]
    for name, info in section.model_fields.items():
        for inner in _sections_in(info.annotation):
            by_name = "dict" in str(info.annotation)
            found += _keys_of(inner, f"{prefix}{name}.{'NAME.' if by_name else ''}")
    return found


def _sections_in(annotation: Any) -> list[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [each for part in get_args(annotation) for each in _sections_in(part)]

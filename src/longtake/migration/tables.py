"""The tables of other trainers' settings, from tables/*.toml; the reference is made from them."""

import functools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from longtake.errors import RecipeError

TOOLS = ("diffusion_pipe", "ai_toolkit", "simpletuner", "onetrainer", "sd_scripts", "musubi_tuner")
"""Names of the tables, in the order in which files are compared with their marks."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What becomes of one setting of a trainer."""

    to: str = ""
    """Key of the recipe that the setting decides; empty: it has no equivalent."""
    how: str = "copy"
    """Name of the function in `convert` that translates the value."""
    fact: str = ""
    """Name under which the value is kept until all settings are read, for `settle`."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Our values by the trainer's, for `choice` and the like."""
    shared: str = ""
    """Name of such a table in shared.toml."""
    note: str = ""
    """A sentence: what differs, or why there is no equivalent."""
    off: Sequence[Any] = ()
    """Values with which the setting does nothing, so that nothing has to be said."""
    ignored: bool = False
    """True if the setting changes nothing of what is trained."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """One trainer: its settings, and its defaults."""

    name: str
    title: str
    facts: str
    """The version and files whose keys these are."""
    layers: str
    """The layers that LoRA trains where nothing is set: `all`, `plain` or `attention`."""
    batch_per_gpu: bool
    families: Mapping[str, Sequence[str]]
    """Families here by the trainer's names of models; an empty list: not trained here."""
    releases: Mapping[str, str]
    """Releases by the trainer's names of models, where one name stands for one release."""
    scripts: Mapping[str, str]
    """Names of models by the scripts that train them."""
    marks: Mapping[str, Sequence[str]]
    """Keys by which a file is known, by the function of `sources` that reads it."""
    noise: Mapping[str, Any]
    run: Mapping[str, Row]
    clips: Mapping[str, Row]
    samples: Mapping[str, Row]
    caption_lines: bool
    """True if each line of a text file is a caption of its own, of which one is trained."""
    micro_steps: str
    """The fact by which steps are divided to be updates; empty: they are updates."""
    defaults: Mapping[str, Any]
    """Values that the trainer uses where a configuration sets none, by the recipe's keys."""
    kept: Mapping[str, str]
    """Defaults that differ and that a recipe keeps, with the reason."""


def shared() -> Mapping[str, Any]:
    """Return what several trainers have in common: names of optimizers, schedules and types."""
    return _load("shared")


def text(part: str, name: str, /, **values: Any) -> str:
    """Return a sentence of texts.toml with its values."""
    return str(_load("texts")[part][name].format(**values))


def refusal(name: str, /, **values: Any) -> RecipeError:
    """Return an error of texts.toml, to be raised."""
    return RecipeError(text("refusals", name, **values))


@functools.cache
def tool(name: str) -> Tool:
    """Return the tables of one trainer."""
    values = dict(_load(name))
    rows: dict[str, Any] = {
        part: {key: Row(**row) for key, row in values.pop(part, {}).items()}
        for part in ("run", "clips", "samples")
    }
    empty: dict[str, Any] = {"releases": {}, "scripts": {}, "noise": {}, "micro_steps": ""}
    empty |= {"caption_lines": False}
    return Tool(name=name, **{**empty, **values, **rows})


@functools.cache
def _load(name: str) -> dict[str, Any]:
    folder = resources.files("longtake.migration").joinpath("tables")
    return tomllib.loads(folder.joinpath(f"{name}.toml").read_text("utf-8"))

"""A recipe from configurations of other trainers: what `longtake init --from` writes."""

import shlex
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from longtake import config
from longtake.formatting import printable
from longtake.migration.clips import join_sets
from longtake.migration.convert import apply
from longtake.migration.draft import ClipSet, Draft
from longtake.migration.reading import read_config
from longtake.migration.settle import Answers, settle
from longtake.migration.sources import collect
from longtake.migration.tables import refusal
from longtake.migration.write import note_lines, recipe_text


@dataclass(frozen=True)
class Migration:
    """A written recipe, and what has to be said about it."""

    text: str
    title: str
    commands: tuple[str, ...]
    """The next commands: index the clips, then plan and train."""
    notes: tuple[str, ...]
    """Lines with headings: to decide, without equivalent, defaults and so on."""


def migrate(paths: Sequence[Path], recipe: Path, answers: Answers) -> Migration:
    """Return a recipe that trains as the configuration files of another trainer say.

    Nothing of what the files name is opened: no weights, no clips, no other configuration.

    Args:
        paths: the files of one training: its settings and its data's.
        recipe: where the recipe will be written; names the run.
        answers: what the files do not say.

    Raises:
        RecipeError: a file cannot be read, something has to be asked, or the model is not trained
            here.
        ModelError: the release is not one that longtake trains.
    """
    source = collect([read_config(path) for path in paths])
    files = ", ".join(source.files)
    draft = Draft(source.tool)
    apply(draft, source.tool.run, source.run)
    for values in source.clips:
        draft.clips.append(ClipSet())
        apply(draft, source.tool.clips, values)
    join_sets(draft)
    for values in source.samples:
        of_sample = Draft(source.tool, notes=draft.notes)
        apply(of_sample, source.tool.samples, values)
        draft.samples.append(of_sample.values)
    title = settle(draft, answers, recipe.stem, files)
    commands = tuple(_commands(draft, recipe))
    text = recipe_text(draft, title, list(commands))
    # The loader names what a configuration's values cannot be, such as a negative rank.
    try:
        config.parse(tomllib.loads(text), source=f"What {files} makes")
    except tomllib.TOMLDecodeError as error:  # our own fault, and no recipe
        raise refusal("bad_toml", files=files, reason=error) from error
    return Migration(text, title, commands, tuple(note_lines(draft)))


def _commands(draft: Draft, recipe: Path) -> Iterator[str]:
    for each in draft.clips:
        source = printable(shlex.quote(each.source or "CLIPS"))
        if each.uncaptioned:
            source += f" --uncaptioned {printable(shlex.quote(each.uncaptioned))}"
        if each.is_kohya:
            yield f"longtake data index {source} --kohya --out catalogs"
        else:
            lines = draft.tool.caption_lines and not each.whole_captions
            option = " --caption-lines" if lines else ""
            yield f"longtake data index {source}{option} --out catalogs/{each.name}.parquet"
    for verb in ("plan", "train"):
        yield f"longtake {verb} {printable(shlex.quote(str(recipe)))}"

"""Prompts of a preset, from its table, a file, captions of clips, or the shipped ones."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from longtake import config, fsio
from longtake.data.catalog import Catalog
from longtake.data.checks import refuse_without_conditioning
from longtake.data.clip import Clip, captions_of
from longtake.data.conditioning import given_to
from longtake.errors import DataError, RecipeError
from longtake.evaluation_dir import EvaluationDirectory
from longtake.formatting import did_you_mean, shorten
from longtake.run_dir import RunDirectory
from longtake.sampling.preset_files import cannot_be_kept, find_file

DEFAULT = "default"
"""Name of the preset that is sampled if a recipe and command name none."""
_SHIPPED_PROMPTS = Path(__file__).with_name("prompts")
_NUM_CAPTIONS = 4
"""Number of captions that the default preset samples: of held-out clips, and of trained clips."""
_MAX_CLIPS_READ = 1000
_MAX_LINES_NAMED = 10
_FLAG = re.compile(r"(?<!\S)--[a-z][a-z_]*(?=[\s=]|$)")
"""Pattern of settings inside a prompt, such as kohya's `--w 64`; dashes between words do not
match."""


def find_prompts(
    section: config.PresetSection, bucket: config.Bucket, folder: Path | None
) -> tuple[config.PromptSection, ...]:
    """Return a preset's prompts; if it sets none, the shipped ones for videos or for images.

    Raises:
        RecipeError: a prompt is empty or has settings in it, or the file cannot be read.
    """
    if section.prompts_file is not None:
        return read_prompts(find_file("prompts_file", section.prompts_file, folder))
    if section.prompts is None:
        return read_prompts(
            _SHIPPED_PROMPTS / ("images.txt" if bucket.num_frames == 1 else "videos.txt")
        )
    prompts = tuple(
        config.PromptSection(prompt=each) if isinstance(each, str) else each
        for each in section.prompts
    )
    empty = [str(number) for number, each in enumerate(prompts) if not each.prompt.strip()]
    if empty:
        raise RecipeError(f"prompts[{', '.join(empty)}] are empty, counted from 0. Remove them.")
    for number, each in enumerate(prompts):
        refuse_flags(each.prompt, f"prompts[{number}]")
    return prompts


def with_trigger(prompts: Sequence[str], recipe: config.Recipe) -> tuple[str, ...]:
    """Replace `[trigger]` in prompts by the trigger word, as in captions.

    Raises:
        RecipeError: a prompt has `[trigger]`, and the recipe no trigger word.
    """
    trigger = recipe.data.trigger
    without = [] if trigger else [each for each in prompts if config.TRIGGER in each]
    if without:
        raise RecipeError(
            f"The prompt {without[0]!r:.200} has {config.TRIGGER}, and data.trigger, which would "
            "replace it, is not set. Set data.trigger, or write the word itself."
        )
    return tuple(each.replace(config.TRIGGER, trigger) for each in prompts)


def refuse_flags(prompt: str, where: str) -> None:
    """Refuse settings inside a prompt, which would be sampled as words.

    Raises:
        RecipeError: names them, and the keys to use instead.
    """
    if flags := _FLAG.findall(prompt):
        raise RecipeError(
            f"{where}: {prompt!r:.200} has {', '.join(flags)}. Settings in a prompt, as other "
            "trainers have them, are not read. Write a preset for prompts of the same settings, or "
            "a table for each prompt (in a file: a line of a .jsonl file), such as "
            '{"prompt": "a cat", "width": 64, "seeds": [3]}: width (--w), height (--h), num_frames '
            "(--f), seeds (--d), num_inference_steps (--s), guidance_scale (--g, --l), shift "
            "(--fs), negative_prompt (--n), and the prompt without them."
        )


def read_prompts(path: Path) -> tuple[config.PromptSection, ...]:
    """Return the stripped lines of a prompts file, without comments (lines that begin with #).

    A line of a .jsonl file is a prompt in quotes, or a table of a prompt and its settings.

    Raises:
        RecipeError: the file cannot be read, or has an empty line, settings in a prompt, or a
            table with unknown keys or values.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RecipeError(
            f"The prompts file {path} cannot be read: {error.strerror or error}."
        ) from None
    try:
        lines = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        # Python counts from behind a byte order mark; the message counts the file's bytes.
        start = error.start + (len(content) - len(error.object))
        line = content[:start].count(b"\n") + 1
        raise RecipeError(
            f"The prompts file {path} is not UTF-8: line {line} has the byte "
            f"0x{content[start]:02x}. Save it as UTF-8."
        ) from None
    if not lines[-1].strip():
        lines.pop()  # empty text after the last line break
    prompts = {
        number: prompt
        for number, prompt in enumerate(map(str.strip, lines), 1)
        if not prompt.startswith("#")
    }
    if not any(prompts.values()):
        raise RecipeError(f"The prompts file {path} is empty. Write one prompt a line.")
    empty = [str(number) for number, prompt in prompts.items() if not prompt]
    if empty:
        more = ", ..." if len(empty) > _MAX_LINES_NAMED else ""
        listed = ", ".join(empty[:_MAX_LINES_NAMED])
        which = f"lines {listed}{more} are" if empty[1:] else f"line {listed} is"
        raise RecipeError(
            f"The prompts file {path} cannot be used: {which} empty. Write one prompt a line, "
            "without empty lines between them."
        )
    found = []
    for number, prompt in prompts.items():
        where = f"The prompts file {path}, line {number}"
        table = _from_json(prompt, where) if path.suffix == ".jsonl" else {"prompt": prompt}
        found.append(config.parse_section(config.PromptSection, table, where))
        refuse_flags(found[-1].prompt, where)
    return tuple(found)


def _from_json(line: str, where: str) -> dict[str, Any]:
    """Read a prompt of a .jsonl file, whose keys are known and whose text is not empty.

    Raises:
        RecipeError: the line is no such prompt.
    """
    try:
        value = json.loads(line)
        json.dumps(value, ensure_ascii=False).encode()  # fails for half of a surrogate pair
    except (ValueError, RecursionError):
        value = None
    prompt = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(prompt, dict) or not str(prompt.get("prompt") or "").strip():
        raise RecipeError(
            f"{where} is {shorten(line)}, and no prompt in JSON. Write a prompt in quotes, or a "
            'table such as {"prompt": "a cat", "width": 64, "seeds": [3]}.'
        )
    keys = config.PromptSection.model_fields
    if other := [key for key in prompt if key not in keys]:
        near = did_you_mean(other[0], keys)
        raise RecipeError(f"{where}: {shorten(other[0])} is not a key of a prompt; {near}")
    return prompt


def caption_prompts(recipe: config.Recipe, run: Path | None) -> dict[str, Any]:
    """Return the prompts of the default preset: captions of held-out and of trained clips.

    The result holds `prompts`, and `conditioning` if the model takes inputs. Prompts that were
    sampled before are kept if catalogs change later. Empty if no caption is known; then the shipped
    prompts are sampled.
    """
    if run is None:
        return {}
    directory = RunDirectory(run)
    kept = fsio.read_json(EvaluationDirectory(directory).preset_path(DEFAULT)).get("prompts")
    inputs = recipe.model_inputs()
    # With inputs the prompts follow from clips again: preset.json has digests of the inputs' files,
    # not their paths.
    if kept and not inputs:
        return {"prompts": tuple(map(str, kept))}
    held_out = [recipe.evaluation.held_out] if recipe.evaluation.held_out else []
    # In the order of names, so that every process of a run chooses the same prompts.
    trained = sorted(directory.catalogs_path.glob("*.parquet"))[:1]
    # By caption, so that one in both catalogs is sampled once.
    clips = {
        clip.caption: clip
        for catalog in (*held_out, *trained)
        for clip in islice(_captioned(catalog, inputs), _NUM_CAPTIONS)
    }
    if not clips:
        return {}
    keys: dict[str, Any] = {"prompts": tuple(clips)}
    if inputs:
        keys["conditioning"] = {
            name: tuple(_file_of(clip, name, each, directory) for clip in clips.values())
            for name, each in inputs.items()
        }
    return keys


def _file_of(clip: Clip, name: str, section: config.ConditioningSection, run: RunDirectory) -> Path:
    """Return the file of a clip's reference input, for the default preset.

    Numbers of a catalog are written to a file.
    """
    given = given_to(clip, section)
    if isinstance(given, str):
        return Path(given)
    folder = EvaluationDirectory(run).preset_path(DEFAULT).with_name("conditioning")
    path = folder / f"{clip.identity}_{name}.json"
    rows = np.reshape(given, (-1, section.width or 1)).tolist() if section.per_frame else given
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            fsio.write_text(path, json.dumps(rows), by_many=True)
    except OSError as error:
        raise cannot_be_kept(path, error) from error
    return path


def _captioned(path: Path, inputs: Mapping[str, config.ConditioningSection]) -> Iterator[Clip]:
    """Yield a catalog's clips with distinct captions; none if unreadable or without an input."""
    try:
        catalog = Catalog.load(path)
        refuse_without_conditioning(catalog, inputs)
    except DataError:
        return
    seen = set()
    # Bounded, since a large catalog may repeat a few captions.
    for row in range(min(len(catalog), _MAX_CLIPS_READ)):
        clip = catalog.clip(row)
        caption = captions_of(clip.caption)[0]
        if caption.strip() and caption not in seen:
            seen.add(caption)
            yield replace(clip, caption=caption)

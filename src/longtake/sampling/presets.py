"""Presets: prompts, seeds, settings and further inputs that are sampled; torch-free.

They are defined in three places, and a key in a later one replaces the same key of an earlier one:
shipped with longtake, the recipe's [evaluation.presets], a file given with `--presets`.
"""

import errno
import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from longtake import config, fsio, trust
from longtake.data.catalog import Catalog
from longtake.data.clip import Clip
from longtake.data.conditioning import (
    NUMBERS_SUFFIXES,
    as_values,
    conditioning_alone,
    given_to,
    read,
)
from longtake.data.plan import refuse_without_conditioning
from longtake.errors import ClipError, DataError, LongtakeError, RecipeError, RecordError, RunError
from longtake.evaluation_dir import EvaluationDirectory
from longtake.formatting import did_you_mean
from longtake.run_dir import RunDirectory

DEFAULT = "default"
"""The preset that is sampled if none is named."""

_SHIPPED = Path(__file__).with_name("presets.toml")
_SHIPPED_PROMPTS = Path(__file__).with_name("prompts")
_BATCH_SIZE = 4
_MIN_FPS, _MAX_FPS = 0.1, 1000
_NUM_CAPTIONS = 4
"""Prompts of the default preset from held-out captions, and as many from trained captions."""
_MAX_CLIPS_READ = 1000
_MAX_LINES_NAMED = 10
_KEPT_SIZE = 256, 256
_FLAG = re.compile(r"(?<!\S)--[a-z][a-z_]*(?=[\s=]|$)")
"""Such as the `--w 64` of kohya's trainers, but no dash between words."""

Table = Mapping[str, Any]
"""Keys of `PresetSection`."""


@dataclass(frozen=True)
class InputFile:
    """A file of an input in `data.conditioning`."""

    path: Path
    content: str  # the first 16 hexadecimal digits of the file's sha256

    def refuse_change(self) -> None:
        """Refuse the file if it has changed since it was found."""
        try:
            is_same = content_of(self.path) == self.content
        except OSError as error:
            raise RunError(
                f"The file {self.path} cannot be read any more: {error.strerror or error}."
            ) from error
        if not is_same:
            raise RunError(
                f"The file {self.path} has changed since the preset was read. Put the old one "
                "back: a row of videos shows the training only if nothing else changes."
            )


InputFiles = Mapping[str, tuple[InputFile, ...]]
"""By the names in `data.conditioning`: one for each prompt."""


@dataclass(frozen=True)
class Request:
    """One video to sample."""

    prompt: str
    seed: int
    conditioning: Mapping[str, Path] = field(default_factory=dict)
    """Files of further inputs by their names in `data.conditioning`."""


@dataclass(frozen=True)
class PresetTables:
    """The tables of all places, merged."""

    known: dict[str, dict[str, Any]]  # the keys of each preset
    folders: dict[str, dict[str, Path | None]]  # of the file that sets each key of each preset
    of_run: tuple[str, ...]  # names of the presets in the recipe
    of_own: tuple[str, ...]  # and in the file given with `--presets`


@dataclass(frozen=True)
class Preset:
    """A set of videos that is sampled of each checkpoint."""

    name: str  # of its folder below evaluations/
    prompts: tuple[str, ...]
    seeds: tuple[int, ...]  # each prompt is sampled with each of them
    settings: config.SamplingSection
    bucket: config.Bucket  # the videos' size
    weights: str  # `model`, or `ema/` and the name of a profile
    batch_size: int = _BATCH_SIZE  # videos sampled at once
    decoding: str = "auto"  # or `whole`, or `tiles`
    measures: tuple[str, ...] = ()  # additional ones, each as `module:Class`
    conditioning: InputFiles = field(default_factory=dict, hash=False)  # one a prompt, by name

    def requests(self) -> list[Request]:
        """All videos, prompt by prompt; of each prompt one per seed."""
        return [
            Request(prompt, seed, {name: of[number].path for name, of in self.conditioning.items()})
            for number, prompt in enumerate(self.prompts)
            for seed in self.seeds
        ]

    def file_name(self, index: int) -> str:
        number, seed = divmod(index, len(self.seeds))
        return f"{number:02d}_s{self.seeds[seed]}{suffix_of(self.bucket)}"

    def as_record(self) -> dict[str, Any]:
        """Content of preset.json: all that determines what the videos show, and nothing else."""
        contents = {
            name: [each.content for each in of_prompts]
            for name, of_prompts in self.conditioning.items()
        }
        # What is unset is left out: records of before there were such keys are equal.
        later = ("negative_prompt", "guidance_scale_2", "other_expert")
        unset = [name for name in later if not getattr(self.settings, name)]
        return {
            "name": self.name,
            **self.bucket.model_dump(exclude={"batch_size"}),
            **self.settings.model_dump(mode="json", exclude={"every", "presets", *unset}),
            "weights": self.weights,
            "seeds": list(self.seeds),
            "prompts": list(self.prompts),
            **({"conditioning": contents} if contents else {}),
        }

    def refuse_changed_files(self) -> None:
        """Refuse files of further inputs that have changed since the preset was read.

        Raises:
            RunError: a file has changed, or is gone.
        """
        for file in dict.fromkeys(each for of in self.conditioning.values() for each in of):
            file.refuse_change()


def preset_names(
    recipe: config.Recipe,
    names: Sequence[str] = (),
    beside: Path | None = None,
    own: Path | None = None,
) -> list[str]:
    """Names of the presets to sample, each once.

    Args:
        recipe: of the run.
        names: given with `--preset`. If there are none: those in the file given with `--presets`,
            else `evaluation.run`, else all in the recipe, else `default`.
        beside: the run directory.
        own: the file given with `--presets`.

    Raises:
        RecipeError: a file of presets is wrong.
    """
    tables = read_tables(recipe, beside, own)
    wanted = names or tables.of_own or recipe.evaluation.run or tables.of_run or [DEFAULT]
    return list(dict.fromkeys(wanted))


def training_presets(recipe: config.Recipe, run: RunDirectory) -> list[Preset]:
    """The presets that the recipe samples in training; none if it samples none.

    Raises:
        RecipeError: one is unknown or wrong, or another one has results under its name.
    """
    if recipe.sampling.every is None:
        return []
    names = preset_names(recipe, recipe.sampling.presets, run.path)
    found = [find_preset(recipe, name, run.path) for name in names]
    directory = EvaluationDirectory(run)
    for preset in found:
        if directory.preset_path(preset.name).exists():
            keep_preset(directory, preset)  # refuses another than that of the results
    return found


def refuse_unknown(tables: PresetTables, names: Iterable[str]) -> None:
    """Refuse presets that are defined nowhere.

    Raises:
        RecipeError: names the unknown preset and the known ones.
    """
    known = sorted(tables.known)
    for name in names:
        if name not in tables.known:
            near = did_you_mean(name, known)
            question = f"{near[0].upper()}{near[1:]} " if near.endswith("?") else ""
            raise RecipeError(
                f"There is no preset {name}. {question}There are: {', '.join(known)}."
            )


def find_preset(
    recipe: config.Recipe, name: str, beside: Path | None = None, own: Path | None = None
) -> Preset:
    """One preset; keys that it does not set are the recipe's.

    Whether codec and model can take its size is checked by `SamplerLoader.check`.

    Raises:
        RecipeError: it is unknown, or a value is invalid.
    """
    tables = read_tables(recipe, beside, own)
    refuse_unknown(tables, [name])
    try:
        section = config.PresetSection.model_validate(tables.known[name])
        if name == DEFAULT and section.prompts is None and section.prompts_file is None:
            section = section.model_copy(update=caption_prompts(recipe, beside))
        preset = _build(recipe, name, section, tables.folders[name])
        refuse_unwritable(preset.bucket, preset.settings.fps)
    except LongtakeError as error:
        raise RecipeError(f"Preset {name}: {error}") from None
    return preset


def keep_preset(directory: EvaluationDirectory, preset: Preset) -> None:
    """Write preset.json and small copies of the pictures unless they exist.

    If they exist nothing is written, so that a full disk does not refuse the preset.

    Raises:
        RecipeError: the results under this name are of another preset.
        RunError: preset.json or a copy cannot be read or written.
    """
    path = directory.preset_path(preset.name)
    keep_record(path, preset.name, preset.as_record())
    try:
        keep_pictures(path, preset.conditioning, preset.bucket)
    except OSError as error:
        raise _cannot_be_kept(path.with_name("pictures"), error) from error


def _build(
    recipe: config.Recipe,
    name: str,
    section: config.PresetSection,
    folders: Mapping[str, Path | None],
) -> Preset:
    own = section.model_dump(
        include={*config.SamplingSection.model_fields, "num_frames", "height", "width"}
    )
    settings, bucket = settings_for(recipe, **own)
    prompts = find_prompts(section, bucket, folders.get("prompts_file"))
    prompts = with_trigger(prompts, recipe)
    inputs, folder = recipe.model_inputs(), folders.get("conditioning")
    files = section.conditioning or {}
    _refuse_others(files, list(inputs))
    stride = recipe.data.frame_stride
    return Preset(
        name=name,
        prompts=prompts,
        seeds=tuple(dict.fromkeys(section.seeds or (0,))),
        settings=settings,
        bucket=bucket,
        weights=_preset_weights(recipe, section.ema),
        batch_size=section.batch_size or _BATCH_SIZE,
        decoding=section.decoding or "auto",
        measures=section.measures or (),
        conditioning={
            name: _find_files(
                name,
                files[name],
                len(prompts),
                folder,
                partial(read_input, inputs[name], bucket=bucket, stride=stride),
            )
            for name in inputs
        },
    )


def read_tables(
    recipe: config.Recipe, beside: Path | None = None, own: Path | None = None
) -> PresetTables:
    """Read and merge the tables of all places.

    Args:
        recipe: of the run.
        beside: the run directory; files that the recipe names are looked for in it.
        own: the file given with `--presets`.

    Raises:
        RecipeError: a file cannot be read, a key is unknown, or a value is invalid.
    """
    of_recipe = {
        name: {key: value for key, value in section if value is not None}
        for name, section in recipe.evaluation.presets.items()
    }
    of_own = _read_presets(own, recipe) if own is not None else {}
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
    return PresetTables(known, folders, tuple(of_recipe), tuple(of_own))


def _merged(before: Table, table: Table) -> dict[str, Any]:
    either = {"prompts", "prompts_file"}
    kept = {key: v for key, v in before.items() if not (key in either and either & table.keys())}
    return {**kept, **table}


@cache
def _shipped() -> dict[str, dict[str, Any]]:
    return tomllib.loads(_SHIPPED.read_text(encoding="utf-8"))


def _read_presets(path: Path, recipe: config.Recipe) -> dict[str, dict[str, Any]]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise RecipeError(
            f"The presets {path} cannot be read: {error.strerror or error}."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"The presets {path} are not valid TOML: {error}.") from None
    for name, table in tables.items():
        _refuse_unknown_keys(path, name, table)
    values = recipe.model_dump(exclude_none=True)
    values["evaluation"]["presets"] = tables
    parsed = config.parse(values, source=str(path)).evaluation.presets
    return {
        name: {key: getattr(section, key) for key in tables[name]}
        for name, section in parsed.items()
    }


def _refuse_unknown_keys(path: Path, name: str, table: object) -> None:
    if not isinstance(table, dict):
        raise RecipeError(
            f"{path}: {name} stands outside of a preset's table. Write it below a line such as "
            "[low4s]."
        )
    for key in table:
        if key not in config.PresetSection.model_fields:
            near = did_you_mean(key, config.PresetSection.model_fields)
            raise RecipeError(f"{path}: {name}.{key} is not a key of a preset; {near}")


def settings_for(
    recipe: config.Recipe,
    *,
    num_frames: int | None = None,
    height: int | None = None,
    width: int | None = None,
    **changes: object,
) -> tuple[config.SamplingSection, config.Bucket]:
    """The recipe's [sampling] and first bucket, with the values that are not None.

    Raises:
        RecipeError: a value is out of range, or the negative prompt has `[trigger]` without one.
    """
    sizes = {"num_frames": num_frames, "height": height, "width": width}
    values = recipe.model_dump(exclude_none=True)
    values["sampling"] |= {k: v for k, v in changes.items() if v is not None}
    bucket = values["data"]["buckets"][0]
    values["data"]["buckets"] = [bucket | {k: v for k, v in sizes.items() if v is not None}]
    changed = config.parse(values, source="The settings of this sampling")
    (negative,) = with_trigger([changed.sampling.negative_prompt], recipe)
    settings = changed.sampling.model_copy(update={"negative_prompt": negative})
    return settings, changed.data.buckets[0]


def _preset_weights(recipe: config.Recipe, profile: str | None) -> str:
    """The part of a checkpoint that a preset samples: `model`, or `ema/` and a profile's name."""
    kept = [each.name for each in recipe.ema.averages()]
    wanted = recipe.ema.sampled() if profile is None else profile
    if wanted is None or wanted == "none":
        return "model"
    if not kept:
        raise RecipeError(
            f"ema = {wanted!r}, but this run keeps no averages of its weights. Leave ema out, or "
            'sample the weights themselves with ema = "none".'
        )
    if wanted not in kept:
        raise RecipeError(
            f"ema = {wanted!r}, but this run keeps no such EMA profile; "
            f"{did_you_mean(wanted, kept)}"
        )
    return f"ema/{wanted}"


def weights_to_sample(
    recipe: config.Recipe, *, ema: bool | None = None, profile: str | None = None
) -> str:
    """The part of a checkpoint that options ask for: `model`, or `ema/` and a profile's name."""
    kept = [each.name for each in recipe.ema.averages()]
    if profile is not None and ema is False:
        raise RecipeError(
            f"--profile {profile} names an average, but --no-ema asks for the weights themselves. "
            "Leave one of them out."
        )
    if ema and not kept:
        raise RecipeError(
            "This run keeps no averages of its weights (ema.decay = 0). Leave --ema out: "
            "then the weights themselves are taken."
        )
    if profile is not None and profile not in kept:
        raise RecipeError(
            f"This run has no EMA profile {profile!r}. It keeps: {', '.join(kept) or 'none'}."
        )
    wanted = profile or recipe.ema.sampled()
    return "model" if ema is False or wanted is None else f"ema/{wanted}"


def suffix_of(bucket: config.Bucket) -> str:
    return ".png" if bucket.num_frames == 1 else ".mp4"


def refuse_unwritable(bucket: config.Bucket, fps: float) -> None:
    """Refuse, before sampling, a size or frame rate that the video encoder would refuse."""
    if suffix_of(bucket) == ".png":
        return
    height, width = (size + size % 2 for size in (bucket.height, bucket.width))
    if (width, height) != (bucket.width, bucket.height):
        raise RecipeError(
            f"{bucket} cannot be written as mp4: H.264 in 4:2:0 needs an even size, such as "
            f"{width}x{height}."
        )
    if not _MIN_FPS <= fps <= _MAX_FPS:
        raise RecipeError(
            f"{fps:g} frames a second cannot be written as mp4: expected {_MIN_FPS} to "
            f"{_MAX_FPS}. Set --fps or sampling.fps."
        )


def find_prompts(
    section: config.PresetSection, bucket: config.Bucket, folder: Path | None
) -> tuple[str, ...]:
    """The prompts of a preset; if it sets none, the shipped ones for videos or for images."""
    if section.prompts_file is not None:
        return read_prompts(find_file("prompts_file", section.prompts_file, folder))
    if section.prompts is None:
        return read_prompts(
            _SHIPPED_PROMPTS / ("images.txt" if bucket.num_frames == 1 else "videos.txt")
        )
    empty = [str(number) for number, each in enumerate(section.prompts) if not each.strip()]
    if empty:
        raise RecipeError(f"prompts[{', '.join(empty)}] are empty, counted from 0. Remove them.")
    for number, each in enumerate(section.prompts):
        refuse_flags(each, f"prompts[{number}]")
    return section.prompts


def with_trigger(prompts: Sequence[str], recipe: config.Recipe) -> tuple[str, ...]:
    """Prompts with the trigger word in place of `[trigger]`, as in captions.

    Raises:
        RecipeError: a prompt has it, and the recipe no trigger word.
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
    """Refuse settings in a prompt, which would be sampled as words.

    Raises:
        RecipeError: names them and the keys to write instead.
    """
    if flags := _FLAG.findall(prompt):
        raise RecipeError(
            f"{where}: {prompt!r:.200} has {', '.join(flags)}. Settings in a prompt, as other "
            "trainers have them, are not read. Write a preset for prompts of the same settings: "
            "width (--w), height (--h), num_frames (--f), seeds (--d), num_inference_steps (--s), "
            "guidance_scale (--g, --l), shift (--fs), negative_prompt (--n), and the prompt "
            "without them."
        )


def read_prompts(path: Path) -> tuple[str, ...]:
    """The lines of a file without the spaces around them; those that begin with # are remarks."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RecipeError(
            f"The prompts file {path} cannot be read: {error.strerror or error}."
        ) from None
    try:
        lines = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        # Counted in the bytes as they are; Python counts from behind a byte order mark.
        start = error.start + (len(content) - len(error.object))
        line = content[:start].count(b"\n") + 1
        raise RecipeError(
            f"The prompts file {path} is not UTF-8: line {line} has the byte "
            f"0x{content[start]:02x}. Save it as UTF-8."
        ) from None
    if not lines[-1].strip():
        lines.pop()  # what stands behind the last line's end
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
    for number, prompt in prompts.items():
        refuse_flags(prompt, f"The prompts file {path}, line {number}")
    return tuple(prompts.values())


def caption_prompts(recipe: config.Recipe, run: Path | None) -> dict[str, Any]:
    """`prompts` of the default preset, and `conditioning` of a model that takes further inputs.

    They are captions of held-out and of trained clips. Prompts that were sampled before are kept
    if later catalogs differ. Empty if no caption is known; then the shipped prompts are sampled.
    """
    if run is None:
        return {}
    directory = RunDirectory(run)
    kept = fsio.read_json(EvaluationDirectory(directory).preset_path(DEFAULT)).get("prompts")
    inputs = recipe.model_inputs()
    if kept and not inputs:
        return {"prompts": tuple(map(str, kept))}
    held_out = [recipe.evaluation.held_out] if recipe.evaluation.held_out else []
    trained = sorted(directory.catalogs_path.glob("*.parquet"))[:1]
    clips = {
        clip.caption: clip
        for catalog in (*held_out, *trained)
        for clip in islice(_captioned(catalog, inputs), _NUM_CAPTIONS)
    }
    if not clips:
        return {}
    found: dict[str, Any] = {"prompts": tuple(clips)}
    if inputs:
        found["conditioning"] = {
            name: tuple(_file_of(clip, name, each, directory) for clip in clips.values())
            for name, each in inputs.items()
        }
    return found


def _file_of(clip: Clip, name: str, section: config.ConditioningSection, run: RunDirectory) -> Path:
    """The file of a clip's further input; numbers of a catalog are written into the preset's."""
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
        raise _cannot_be_kept(path, error) from error
    return path


def _captioned(path: Path, inputs: Mapping[str, config.ConditioningSection]) -> Iterator[Clip]:
    """Clips of a catalog with different captions; none if it cannot be read or lacks an input."""
    try:
        catalog = Catalog.load(path)
        refuse_without_conditioning(catalog, inputs)
    except DataError:
        return
    seen = set()
    for row in range(min(len(catalog), _MAX_CLIPS_READ)):
        clip = catalog.clip(row)
        if clip.caption and clip.caption.strip() and clip.caption not in seen:
            seen.add(clip.caption)
            yield clip


def keep_record(path: Path, name: str, record: Mapping[str, Any]) -> None:
    """Write a preset's record to preset.json unless it exists."""
    try:
        kept = _read_record(path) or _write_record(path, record)
    except OSError as error:
        raise _cannot_be_kept(path, error) from error
    changed = [key for key in record.keys() | kept.keys() if record.get(key) != kept.get(key)]
    if changed:
        raise RecipeError(
            f"Preset {name}: {path.parent} holds videos of another one; they differ in "
            f"{', '.join(sorted(changed))}. A row of videos shows the training only if nothing "
            f"else changes: give the new one another name, such as {name}-2, or move that "
            "folder away."
        )


def _cannot_be_kept(path: Path, error: OSError) -> RunError:
    advice = " Make room." if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return RunError(f"{path} cannot be kept: {error.strerror or error}.{advice}")


def _read_record(path: Path) -> dict[str, Any]:
    with suppress(FileNotFoundError, RecordError):
        return fsio.parse_record(fsio.read_regular(path), dict[str, Any], path)
    return {}


def _write_record(path: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    if not fsio.write_once(path, record) and not _read_record(path):
        fsio.write_json(path, record, by_many=True)  # what is there cannot be read
    return _read_record(path)


def read_input(
    section: config.ConditioningSection, path: Path, *, bucket: config.Bucket, stride: int = 1
) -> NDArray[Any]:
    """A file of a further input for a video of a bucket's size, one sample of what training reads.

    Pixels are scaled to cover the bucket and cut in the middle; of a longer video or list of
    numbers the first frames are taken.

    Raises:
        DataError: it cannot be read, or is not what the recipe says.
    """
    wanted = conditioning_alone(section, path, bucket, stride)
    try:
        return as_values(wanted, read(wanted))
    except ClipError as error:
        raise DataError(
            f"The {section.kind} {error.path} cannot be read: {error.reason}."
        ) from error


_SHOWN = config.ConditioningSection(kind="picture", path="shown")


def read_picture(file: Path, bucket: config.Bucket) -> NDArray[np.uint8]:
    """[H, W, 3]: a picture, or a video's first frame, scaled and cropped to the bucket's size."""
    picture: NDArray[np.uint8] = read_input(_SHOWN, file, bucket=bucket)[:, 0]
    return np.ascontiguousarray(picture.transpose(1, 2, 0))


def pictures_in(files: Iterable[Path], bucket: config.Bucket) -> list[NDArray[np.uint8]]:
    """What is shown of further inputs: all that are no numbers."""
    return [read_picture(file, bucket) for file in files if is_shown(file)]


def is_shown(file: Path) -> bool:
    return file.suffix.lower() not in NUMBERS_SUFFIXES


def refuse_other_inputs(given: Mapping[str, Path], names: Sequence[str]) -> None:
    """Refuse inputs other than those that a model was trained with.

    Raises:
        DataError: one is missing, or is not among the names.
    """
    if set(given) == set(names):
        return
    if not names:
        raise DataError(
            f"This model takes no further inputs, but {', '.join(given)} was given. Leave "
            "--conditioning out."
        )
    advice = " ".join(f"--conditioning {name}=FILE" for name in names)
    raise DataError(
        f"This model takes the inputs {', '.join(names)}; given: "
        f"{', '.join(given) or 'none'}. Give exactly those: {advice}."
    )


def content_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def kept_picture(preset_json: Path, number: int, name: str) -> Path:
    return preset_json.parent / "pictures" / f"{number:02d}_{name}.png"


def keep_pictures(preset_json: Path, files: InputFiles, bucket: config.Bucket) -> None:
    """Write the small copies that do not exist; none of a file that cannot be read any more."""
    for name, of_prompts in files.items():
        for number, file in enumerate(of_prompts):
            path = kept_picture(preset_json, number, name)
            if is_shown(file.path) and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                with suppress(DataError):
                    small = Image.fromarray(read_picture(file.path, bucket))
                    small.thumbnail(_KEPT_SIZE)
                    with fsio.atomic_write(path, by_many=True) as partial:
                        small.save(partial, format="PNG")


def _refuse_others(given: Mapping[str, object], names: Sequence[str]) -> None:
    if set(given) == set(names):
        return
    if not names:
        raise RecipeError(
            f"conditioning gives {', '.join(given)}, but this model takes no further inputs "
            "(data.conditioning is empty). Leave conditioning out."
        )
    missing = [name for name in names if name not in given]
    example = ""
    if missing:
        example = f', such as conditioning.{missing[0]} = ["{missing[0]}.png"] in the table of the '
        example += "preset ([evaluation.presets.NAME] in a recipe)"
    raise RecipeError(
        f"this model takes the inputs {', '.join(names)}; conditioning gives "
        f"{', '.join(given) or 'none'}. Give each of them, and no other: a file for each prompt, "
        f"or one for all{example}."
    )


def _find_files(
    name: str,
    files: Sequence[Path],
    count: int,
    folder: Path | None,
    read_file: Callable[[Path], object],
) -> tuple[InputFile, ...]:
    """One file for each prompt; each is read once, to find what is wrong with it."""
    key = f"conditioning.{name}"
    if len(files) not in (1, count):
        raise RecipeError(
            f"{key} names {len(files)} files, but there are {count} prompts. Name one for each "
            "prompt, or one for all."
        )
    found = {}
    for file in dict.fromkeys(files):
        path = find_file(key, file, folder)
        read_file(path)
        try:
            found[file] = InputFile(path, content_of(path))
        except OSError as error:
            raise RecipeError(
                f"The file {path} cannot be read: {error.strerror or error}."
            ) from error
    return tuple(found[file] for file in files) * (count if len(files) == 1 else 1)


def find_file(key: str, file: Path, folder: Path | None) -> Path:
    """The path of a file: beside the file that names it, else in the current folder."""
    if (
        folder is not None
        and RunDirectory(folder).exists()
        and not trust.is_own(RunDirectory(folder))
    ):
        return _find_inside(key, file, folder)
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


def _find_inside(key: str, file: Path, folder: Path) -> Path:
    """Another user's run could name any file of this host, whose content the results would show."""
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

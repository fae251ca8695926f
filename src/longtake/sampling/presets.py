"""Presets of sampling: prompts, seeds, settings and reference inputs; imports no torch.

They are defined in three places, of which a later one replaces single keys of the earlier ones:
longtake's presets.toml, the recipe's [evaluation.presets], and a file given with `--presets`.
"""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from longtake import config, fsio
from longtake.errors import LongtakeError, RecipeError, RecordError
from longtake.evaluation_dir import EvaluationDirectory, prompt_number
from longtake.formatting import did_you_mean
from longtake.run_dir import RunDirectory
from longtake.sampling import preset_files
from longtake.sampling.preset_prompts import DEFAULT, caption_prompts, find_prompts, with_trigger

_SHIPPED = Path(__file__).with_name("presets.toml")
_BATCH_SIZE = 4
_MIN_FPS, _MAX_FPS = 0.1, 1000

OF_PROMPTS = ("prompts", "prompt_settings")
"""Keys of preset.json that each video of a result states for itself."""

Table = Mapping[str, Any]
"""The TOML table of a preset: keys and values of `PresetSection`."""


@dataclass(frozen=True)
class Request:
    """Prompt, seed and reference inputs of one video to sample."""

    prompt: str
    seed: int
    conditioning: Mapping[str, Path] = field(default_factory=dict)
    """Files of the video's reference inputs by name in `data.conditioning`."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the video that differ from its preset's, by the keys of a preset."""
    file: str = ""
    """Name of the video's file in a result of its preset."""


@dataclass(frozen=True)
class RequestGroup:
    """Videos of equal size and settings, which are sampled in batches."""

    settings: config.SamplingSection
    bucket: config.Bucket
    requests: tuple[Request, ...]


@dataclass(frozen=True)
class PromptSettings:
    """Settings with which one prompt of a preset is sampled."""

    seeds: tuple[int, ...]
    settings: config.SamplingSection
    bucket: config.Bucket
    own: Mapping[str, Any] = field(default_factory=dict)  # those that differ from the preset's


@dataclass(frozen=True)
class PresetTables:
    """The presets that longtake, the recipe and the user's own file define, merged."""

    known: dict[str, dict[str, Any]]  # keys of each preset
    folders: dict[str, dict[str, Path | None]]  # of the file that sets a key, by preset and key
    of_run: tuple[str, ...]  # names of the presets in the recipe
    of_own: tuple[str, ...]  # names of the presets in the file given with `--presets`


@dataclass(frozen=True)
class Preset:
    """Prompts, seeds and settings of a set of videos that is sampled from each checkpoint."""

    name: str  # name of its folder below evaluations/
    prompts: tuple[str, ...]
    seeds: tuple[int, ...]  # each prompt is sampled with each seed
    settings: config.SamplingSection
    bucket: config.Bucket  # size of the videos
    weights: str  # `model`, or `ema/` and the name of a profile
    batch_size: int = _BATCH_SIZE  # videos sampled at once
    decoding: str = "auto"  # `auto`, `whole` or `tiles`
    measures: tuple[str, ...] = ()  # additional measures, each as `module:Class`
    conditioning: preset_files.InputFiles = field(
        default_factory=dict, hash=False
    )  # per prompt, by name
    own: Mapping[int, PromptSettings] = field(default_factory=dict, hash=False)
    """Settings of those prompts that have any of their own, by the prompt's number."""

    def settings_of(self, number: int) -> PromptSettings:
        """Return the settings of a prompt, counted from 0."""
        return self.own.get(number) or PromptSettings(self.seeds, self.settings, self.bucket)

    def groups(self) -> list[RequestGroup]:
        """Return the videos of the preset, grouped by their settings; one without `own`."""
        found: dict[tuple[config.SamplingSection, config.Bucket], list[Request]] = {}
        for number, prompt in enumerate(self.prompts):
            of = self.settings_of(number)
            inputs = {name: each[number].path for name, each in self.conditioning.items()}
            for seed in of.seeds:
                file = f"{number:02d}_s{seed}{suffix_of(of.bucket)}"
                request = Request(prompt, seed, inputs, of.own, file)
                found.setdefault((of.settings, of.bucket), []).append(request)
        return [RequestGroup(*alike, tuple(requests)) for alike, requests in found.items()]

    def requests(self) -> list[Request]:
        """Return a request for each video of the preset: prompt by prompt, one for each seed."""
        requests = [each for group in self.groups() for each in group.requests]
        return sorted(requests, key=lambda each: prompt_number(each.file))

    def as_record(self) -> dict[str, Any]:
        """Return the content of preset.json: all settings of the preset that decide its videos."""
        contents = {
            name: [each.content for each in of_prompts]
            for name, of_prompts in self.conditioning.items()
        }
        own = {str(number): {**of.own, "seeds": list(of.seeds)} for number, of in self.own.items()}
        return {
            "name": self.name,
            **_as_record(self.settings, self.bucket),
            "weights": self.weights,
            "seeds": list(self.seeds),
            "prompts": list(self.prompts),
            **({"conditioning": contents} if contents else {}),
            **({"prompt_settings": own} if own else {}),
        }

    def refuse_changed_files(self) -> None:
        """Refuse to sample if reference files have changed since the preset was read.

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
    """Return the names of the presets to sample, each once.

    Args:
        recipe: recipe of the run.
        names: names given with `--preset`. Without any, those in the file given with `--presets`
            are sampled, else `evaluation.run`, else all in the recipe, else `default`.
        beside: directory of the run.
        own: the file given with `--presets`.

    Raises:
        RecipeError: a file of presets is invalid.
    """
    tables = read_tables(recipe, beside, own)
    wanted = names or tables.of_own or recipe.evaluation.run or tables.of_run or [DEFAULT]
    return list(dict.fromkeys(wanted))


def training_presets(recipe: config.Recipe, run: RunDirectory) -> list[Preset]:
    """Return the presets that a recipe samples during training; empty if it samples none.

    Raises:
        RecipeError: one is unknown or invalid, or its name has results of another preset.
    """
    if not recipe.sampling.in_training:
        return []
    names = preset_names(recipe, recipe.sampling.presets, run.path)
    presets = [find_preset(recipe, name, run.path) for name in names]
    directory = EvaluationDirectory(run)
    for preset in presets:
        if directory.preset_path(preset.name).exists():
            keep_preset(directory, preset)  # refuses a preset other than that of the results
    return presets


def refuse_unknown(tables: PresetTables, names: Iterable[str]) -> None:
    """Refuse names of presets that are not defined.

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
    """Return one preset, with the recipe's values for keys that it does not set.

    `SamplerLoader.check` refuses a size that codec and model cannot take.

    Raises:
        RecipeError: the preset is unknown, or a value is invalid.
    """
    tables = read_tables(recipe, beside, own)
    refuse_unknown(tables, [name])
    try:
        section = config.PresetSection.model_validate(tables.known[name])
        if name == DEFAULT and section.prompts is None and section.prompts_file is None:
            # By default a run samples captions of its own clips.
            section = section.model_copy(update=caption_prompts(recipe, beside))
        preset = _build(recipe, name, section, tables.folders[name])
        for each in preset.groups():
            refuse_unwritable(each.bucket, each.settings.fps)
    except LongtakeError as error:
        raise RecipeError(f"Preset {name}: {error}") from None
    return preset


def keep_preset(directory: EvaluationDirectory, preset: Preset) -> None:
    """Write a preset's preset.json and small copies of its pictures, unless they exist.

    Nothing is written if they exist, so that a full disk does not refuse a known preset.

    Raises:
        RecipeError: the results under this name are of another preset.
        RunError: preset.json or a copy cannot be read or written.
    """
    path, record = directory.preset_path(preset.name), preset.as_record()
    try:
        kept = _read_record(path)
        if not kept:
            # Another process may write the same record at the same time.
            if not fsio.write_once(path, record) and not _read_record(path):
                fsio.write_json(path, record, by_many=True)  # replaces an unreadable file
            kept = _read_record(path)
    except OSError as error:
        raise preset_files.cannot_be_kept(path, error) from error
    changed = [key for key in record.keys() | kept.keys() if record.get(key) != kept.get(key)]
    if changed:
        raise RecipeError(
            f"Preset {preset.name}: {path.parent} holds videos of another one; they differ in "
            f"{', '.join(sorted(changed))}. A row of videos shows the training only if nothing "
            f"else changes: give the new one another name, such as {preset.name}-2, or move that "
            "folder away."
        )
    try:
        buckets = [preset.settings_of(number).bucket for number in range(len(preset.prompts))]
        preset_files.keep_pictures(path, preset.conditioning, buckets)
    except OSError as error:
        raise preset_files.cannot_be_kept(path.with_name("pictures"), error) from error


def _build(
    recipe: config.Recipe,
    name: str,
    section: config.PresetSection,
    folders: Mapping[str, Path | None],
) -> Preset:
    changes = _changes(section)
    settings, bucket = settings_for(recipe, **changes)
    # A seed that is named twice would write the same file twice.
    seeds = tuple(dict.fromkeys(section.seeds or (0,)))
    found = find_prompts(section, bucket, folders.get("prompts_file"))
    prompts = with_trigger([each.prompt for each in found], recipe)
    of_preset = PromptSettings(seeds, settings, bucket)
    inputs, folder = recipe.model_inputs(), folders.get("conditioning")
    files = section.conditioning or {}
    preset_files.refuse_other_inputs(files, inputs, of_preset=True)
    stride = recipe.data.frame_stride
    own = {
        number: _own_settings(recipe, changes, of_preset, number, prompt)
        for number, prompt in enumerate(found)
        if prompt.model_fields_set != {"prompt"}
    }
    buckets = [own.get(number, of_preset).bucket for number in range(len(prompts))]
    return Preset(
        name=name,
        prompts=prompts,
        seeds=seeds,
        settings=settings,
        bucket=bucket,
        weights=weights_to_sample(recipe, profile=section.ema),
        batch_size=section.batch_size or _BATCH_SIZE,
        decoding=section.decoding or "auto",
        measures=section.measures or (),
        conditioning={
            name: preset_files.find_files(
                name,
                files[name],
                buckets,
                folder,
                partial(preset_files.read_input, inputs[name], stride=stride),
            )
            for name in inputs
        },
        own=own,
    )


def _own_settings(
    recipe: config.Recipe,
    changes: Mapping[str, Any],
    of_preset: PromptSettings,
    number: int,
    prompt: config.PromptSection,
) -> PromptSettings:
    """Return the settings of a prompt that has any of its own; `changes` are its preset's."""
    try:
        settings, bucket = settings_for(recipe, **{**changes, **_changes(prompt)})
    except RecipeError as error:
        raise RecipeError(f"Prompt {number}, counted from 0: {error}") from None
    before, after = _as_record(of_preset.settings, of_preset.bucket), _as_record(settings, bucket)
    # Of these only a negative prompt can be unset again.
    own = {
        name: after.get(name, "") for name in before | after if before.get(name) != after.get(name)
    }
    seeds = tuple(dict.fromkeys(prompt.seeds or of_preset.seeds))
    return PromptSettings(seeds, settings, bucket, own)


def _changes(section: config.PresetSection | config.PromptSection) -> dict[str, Any]:
    """Return what a preset or prompt changes of the recipe's settings, for `settings_for`."""
    keys = {*config.SamplingSection.model_fields, "num_frames", "height", "width"}
    return section.model_dump(include=keys, exclude_none=True)


def _as_record(settings: config.SamplingSection, bucket: config.Bucket) -> dict[str, Any]:
    """Return all settings that decide a video, as preset.json has them."""
    # Unset keys are left out, so that records from before they existed stay equal.
    later = ("negative_prompt", "guidance_scale_2", "other_expert")
    unset = [name for name in later if not getattr(settings, name)]
    when = {"every", "every_epochs", "at_start", "presets"}  # which decide no video
    adapters = {"adapter", "adapter_2", "adapter_strength"}
    # By their names: the machine that evaluates may have the files elsewhere.
    names = {key.rpartition(".")[2]: file.name for key, file in settings.adapters().items()}
    return {
        **bucket.model_dump(exclude={"batch_size"}),
        **settings.model_dump(mode="json", exclude={*when, *unset, *adapters}),
        **({**names, "adapter_strength": settings.adapter_strength} if names else {}),
    }


def read_tables(
    recipe: config.Recipe, beside: Path | None = None, own: Path | None = None
) -> PresetTables:
    """Read and merge the preset tables of longtake, the recipe and the user's own file.

    Args:
        recipe: recipe of the run.
        beside: the run directory, in which files that the recipe names are looked for.
        own: the file given with `--presets`.

    Raises:
        RecipeError: a file cannot be read, a key is unknown, or a value is invalid.
    """
    of_recipe = {
        name: {key: value for key, value in section if value is not None}
        for name, section in recipe.evaluation.presets.items()
    }
    of_own = _read_presets(own, recipe) if own is not None else {}
    # In the order in which they override each other.
    places: list[tuple[Path | None, Mapping[str, Table]]] = [
        (_SHIPPED.parent, tomllib.loads(_SHIPPED.read_text(encoding="utf-8"))),
        (beside, of_recipe),
        (own.parent if own is not None else None, of_own),
    ]
    known: dict[str, dict[str, Any]] = {}
    folders: dict[str, dict[str, Path | None]] = {}
    for folder, tables in places:
        for name, table in tables.items():
            # Prompts of a later place replace those of an earlier one, also if one is a file.
            prompts = {"prompts", "prompts_file"}
            gone = prompts if prompts & table.keys() else set()
            before = known.get(name, {})
            known[name] = {key: v for key, v in before.items() if key not in gone} | dict(table)
            folders.setdefault(name, {}).update(dict.fromkeys(table, folder))
    return PresetTables(known, folders, tuple(of_recipe), tuple(of_own))


def _read_presets(path: Path, recipe: config.Recipe) -> dict[str, dict[str, Any]]:
    try:
        # Editors on Windows write a byte order mark, which TOML does not allow.
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise RecipeError(
            f"The presets {path} cannot be read: {error.strerror or error}."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"The presets {path} are not valid TOML: {error}.") from None
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise RecipeError(
                f"{path}: {name} stands outside of a preset's table. Write it below a line such as "
                "[low4s]."
            )
        keys = config.PresetSection.model_fields
        if other := [key for key in table if key not in keys]:
            near = did_you_mean(other[0], keys)
            raise RecipeError(f"{path}: {name}.{other[0]} is not a key of a preset; {near}")
    # Parsed as a part of the whole recipe, against which some values are validated.
    values = recipe.model_dump(exclude_none=True)
    values["evaluation"]["presets"] = tables
    parsed = config.parse(values, source=str(path)).evaluation.presets
    return {
        name: {key: getattr(section, key) for key in tables[name]}
        for name, section in parsed.items()
    }


def settings_for(
    recipe: config.Recipe,
    *,
    num_frames: int | None = None,
    height: int | None = None,
    width: int | None = None,
    **changes: object,
) -> tuple[config.SamplingSection, config.Bucket]:
    """Return the recipe's sampling settings and first bucket, with the given values changed.

    Samples with sound have the frame rate of the training, which decides how long the sound is.

    Raises:
        RecipeError: a value is out of range, or the negative prompt has `[trigger]` without one.
    """
    sizes = {"num_frames": num_frames, "height": height, "width": width}
    values = recipe.model_dump(exclude_none=True)
    values["sampling"] |= {k: v for k, v in changes.items() if v is not None}
    if (rate := rate_with_sound(recipe)) is not None:
        values["sampling"]["fps"] = rate
    bucket = values["data"]["buckets"][0]
    values["data"]["buckets"] = [bucket | {k: v for k, v in sizes.items() if v is not None}]
    # A whole recipe is parsed, so that bounds and combinations of keys are those of training.
    changed = config.parse(values, source="The settings of this sampling")
    (negative,) = with_trigger([changed.sampling.negative_prompt], recipe)
    settings = changed.sampling.model_copy(update={"negative_prompt": negative})
    return settings, changed.data.buckets[0]


def rate_with_sound(recipe: config.Recipe) -> float | None:
    """Return the frames per second of samples that have sound; None for others."""
    data = recipe.data
    return data.fps / data.frame_stride if recipe.model.uses_audio and data.fps else None


def weights_to_sample(
    recipe: config.Recipe, *, ema: bool | None = None, profile: str | None = None
) -> str:
    """Return the weights in a checkpoint to sample: `model`, or `ema/` and a profile.

    Args:
        recipe: recipe of the run.
        ema: sample an average, or the weights themselves; None: an average if the run keeps any.
        profile: the profile that a preset or an option names; "none": the weights themselves.

    Raises:
        RecipeError: the options contradict each other, or the run keeps no such average.
    """
    kept = [each.name for each in recipe.ema.averages()]
    if profile not in (None, "none") and ema is False:
        raise RecipeError(
            f"--profile {profile} names an average, but --no-ema asks for the weights themselves. "
            "Leave one of them out."
        )
    if profile == "none" and ema:
        raise RecipeError(
            "--profile none asks for the weights themselves, but --ema for an average. Leave one "
            "of them out."
        )
    if ema and not kept:
        raise RecipeError(
            "This run keeps no averages of its weights (ema.decay = 0). Leave --ema out: "
            "then the weights themselves are taken."
        )
    if profile not in (None, "none", *kept):
        raise RecipeError(
            f"This run has no EMA profile {profile!r}. It keeps: {', '.join(kept) or 'none'}. Name "
            'one of them, or sample the weights themselves: ema = "none" in a preset, --no-ema in '
            "a command."
        )
    sampled = profile or recipe.ema.sampled()
    return "model" if ema is False or sampled in (None, "none") else f"ema/{sampled}"


def suffix_of(bucket: config.Bucket) -> str:
    return ".png" if bucket.num_frames == 1 else ".mp4"


def refuse_unwritable(bucket: config.Bucket, fps: float) -> None:
    """Refuse a size or frame rate, before sampling, that the video encoder would refuse."""
    if suffix_of(bucket) == ".png":
        return
    # 4:2:0 stores one colour for 2 x 2 pixels.
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


def _read_record(path: Path) -> dict[str, Any]:
    with suppress(FileNotFoundError, RecordError):
        return fsio.parse_record(fsio.read_regular(path), dict[str, Any], path)
    return {}

"""What is sampled of each checkpoint: always the same prompts, seeds and settings; torch-free.

Three places speak of presets, and the later one counts, key by key: what comes with longtake, the
recipe's [evaluation.presets], and a file that the command names.
"""

import errno
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from longtake import config
from longtake.config import Bucket, PresetSection, Recipe, SamplingSection
from longtake.data.catalog import Catalog
from longtake.data.clip import Clip
from longtake.data.references import reference_path
from longtake.errors import DataError, LongtakeError, RecipeError, RecordError, RunError
from longtake.evaluation.reference_pictures import Pictures, find_file, find_pictures, keep_pictures
from longtake.evaluation.sampling.read_pictures import Request
from longtake.evaluation_dir import EvaluationDirectory
from longtake.formatting import did_you_mean
from longtake.fsio import parse_record, read_json, read_regular, write_json, write_once
from longtake.run_dir import RunDirectory

_BATCH_SIZE = 4


Table = Mapping[str, Any]
"""What is said about one preset: keys of `PresetSection`."""

_SHIPPED = Path(__file__).with_name("presets.toml")


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


@dataclass(frozen=True)
class Preset:
    """A set of videos that is sampled again and again.

    Attributes:
        name: of its folder below evaluations/.
        prompts: what the videos show.
        seeds: each prompt is sampled with each of them.
        settings: of the solver, and the frames a second.
        bucket: the videos' size.
        weights: `model`, or `ema/` and the name of a profile.
        batch_size: videos sampled at once.
        guidance: `auto`, `batched` or `two_passes`.
        decoding: `auto`, `whole` or `tiles`.
        measures: further ones, each a class as module:Class.
        references: pictures that the videos go by.
    """

    name: str
    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    settings: SamplingSection
    bucket: Bucket
    weights: str
    batch_size: int = _BATCH_SIZE
    guidance: str = "auto"
    decoding: str = "auto"
    measures: tuple[str, ...] = ()
    references: Pictures = field(default_factory=dict, hash=False)

    def requests(self) -> list[Request]:
        """All videos: of the first prompt with each seed, then of the next."""
        return [
            Request(prompt, seed, {name: of[number].path for name, of in self.references.items()})
            for number, prompt in enumerate(self.prompts)
            for seed in self.seeds
        ]

    def file_name(self, index: int) -> str:
        """What the sample of `requests()[index]` is called: 00_s0.mp4; of one frame 00_s0.png."""
        number, seed = divmod(index, len(self.seeds))
        return f"{number:02d}_s{self.seeds[seed]}{suffix_of(self.bucket)}"

    def as_record(self) -> dict[str, Any]:
        """preset.json: all that decides what the videos show, and nothing else."""
        pictures = {
            name: [each.content for each in of_prompts]
            for name, of_prompts in self.references.items()
        }
        return {
            "name": self.name,
            **self.bucket.model_dump(),
            **self.settings.model_dump(),
            "weights": self.weights,
            "seeds": list(self.seeds),
            "prompts": list(self.prompts),
            **({"references": pictures} if pictures else {}),
        }

    def refuse_changed_pictures(self) -> None:
        """Refuse to go by pictures that are not those it was found with.

        Raises:
            RunError: a file has changed, or is gone.
        """
        files = {each.path: each for of in self.references.values() for each in of}
        for picture in files.values():
            picture.refuse_change()


def preset_names(
    recipe: Recipe,
    names: Sequence[str] = (),
    beside: Path | None = None,
    own: Path | None = None,
) -> list[str]:
    """Names of the presets that are wanted, each once.

    Args:
        recipe: of the run.
        names: that the command gives. Without any: those in its own file, else the recipe's
            `evaluation.run`, else all that the recipe has, else `default`.
        beside: the run directory.
        own: a file of presets that the command names.

    Raises:
        RecipeError: a file of presets is wrong.
    """
    tables = gather(recipe, beside, own)
    wanted = names or tables.of_own or recipe.evaluation.run or tables.of_run or [DEFAULT]
    return list(dict.fromkeys(wanted))


def refuse_unknown(tables: Tables, names: Iterable[str]) -> None:
    """Refuse presets that nothing says anything about.

    Raises:
        RecipeError: there is one; names those that there are.
    """
    for name in names:
        if name not in tables.known:
            raise RecipeError(_unknown(name, tables))


def find_presets(
    recipe: Recipe, names: Sequence[str], beside: Path | None, own: Path | None = None
) -> list[Preset]:
    """The presets that are wanted, as `preset_names` has it.

    Raises:
        RecipeError: a line for each that is unknown or wrong.
    """
    found, wrong = [], []
    for name in preset_names(recipe, names, beside, own):
        try:
            found.append(find_preset(recipe, name, beside, own))
        except RecipeError as error:
            wrong.append(str(error))
    if wrong:
        raise RecipeError("\n".join(wrong))
    return found


def find_preset(
    recipe: Recipe, name: str, beside: Path | None = None, own: Path | None = None
) -> Preset:
    """One preset, with what it leaves out as the recipe has it.

    Whether codec and model can take its size is known only with them: see `Studio.check`.

    Raises:
        RecipeError: it is unknown, or something about it cannot be.
    """
    tables = gather(recipe, beside, own)
    refuse_unknown(tables, [name])
    try:
        section = PresetSection.model_validate(tables.known[name])
        if name == DEFAULT and section.prompts is None and section.prompts_file is None:
            section = section.model_copy(update=from_captions(recipe, beside))
        preset = _resolved(recipe, name, section, tables.folders[name])
        refuse_unwritable(preset.bucket, preset.settings.fps)
    except LongtakeError as error:
        raise RecipeError(f"Preset {name}: {error}") from None
    return preset


def keep_preset(directory: EvaluationDirectory, preset: Preset) -> None:
    """Write preset.json, and what the model sees of its pictures, where they are not yet there.

    Where they are, nothing is written: a full disk takes nobody's preset away.

    Raises:
        RecipeError: what was sampled under this name so far is another set.
        RunError: they cannot be read, or written.
    """
    path = directory.preset_path(preset.name)
    keep_record(path, preset.name, preset.as_record())
    try:
        keep_pictures(path, preset.references, preset.bucket)
    except OSError as error:
        raise not_kept(path.with_name("pictures"), error) from error


def _resolved(
    recipe: Recipe, name: str, section: PresetSection, folders: Mapping[str, Path | None]
) -> Preset:
    settings, bucket = settings_for(
        recipe,
        num_frames=section.num_frames,
        height=section.height,
        width=section.width,
        fps=section.fps,
        solver=section.solver,
        num_inference_steps=section.num_inference_steps,
        guidance_scale=section.guidance_scale,
        shift=section.shift,
    )
    prompts = find_prompts(section, bucket, folders.get("prompts_file"))
    names, folder = list(recipe.data.references), folders.get("references")
    return Preset(
        name=name,
        prompts=prompts,
        seeds=tuple(dict.fromkeys(section.seeds or (0,))),
        settings=settings,
        bucket=bucket,
        weights=_weights(recipe, section.ema),
        batch_size=section.batch_size or _BATCH_SIZE,
        guidance=section.guidance or "auto",
        decoding=section.decoding or "auto",
        measures=section.measures or (),
        references=find_pictures(section.references, names, len(prompts), bucket, folder),
    )


def _weights(recipe: Recipe, profile: str | None) -> str:
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


def _unknown(name: str, tables: Tables) -> str:
    known = sorted(tables.known)
    near, there = did_you_mean(name, known), f"There are: {', '.join(known)}."
    question = f"{near[0].upper()}{near[1:]} " if near.endswith("?") else ""
    return f"There is no preset {name}. {question}{there}"


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


def _read_presets(path: Path, recipe: Recipe) -> dict[str, dict[str, Any]]:
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


_LEAST_FPS, _MOST_FPS = 0.1, 1000


def settings_for(
    recipe: Recipe,
    *,
    num_frames: int | None = None,
    height: int | None = None,
    width: int | None = None,
    **changes: object,
) -> tuple[SamplingSection, Bucket]:
    """The recipe's sampling settings and first bucket, with whatever is not None changed.

    Raises:
        RecipeError: a value is out of range.
    """
    sizes = {"num_frames": num_frames, "height": height, "width": width}
    values = recipe.model_dump(exclude_none=True)
    values["sampling"] |= _given(changes)
    values["data"]["buckets"] = [values["data"]["buckets"][0] | _given(sizes)]
    changed = config.parse(values, source="The settings of this sampling")
    return changed.sampling, changed.data.buckets[0]


def weights_to_sample(
    recipe: Recipe, *, ema: bool | None = None, profile: str | None = None
) -> str:
    """The part of a checkpoint that is sampled, `model` or `ema/` and a profile's name.

    Raises:
        RecipeError: the run keeps no such average.
    """
    kept = [each.name for each in recipe.ema.averages()]
    if profile is not None and ema is False:
        raise RecipeError(
            f"--profile {profile} names an average, but --no-ema asks for the weights themselves. "
            "Leave one of them out."
        )
    if ema and not kept:
        raise RecipeError(
            "This run keeps no averages of its weights (ema.enabled = false). Leave --ema out: "
            "then the weights themselves are taken."
        )
    if profile is not None and profile not in kept:
        raise RecipeError(
            f"This run has no EMA profile {profile!r}. It keeps: {', '.join(kept) or 'none'}."
        )
    wanted = profile or recipe.ema.sampled()
    return "model" if ema is False or wanted is None else f"ema/{wanted}"


def suffix_of(bucket: Bucket) -> str:
    """Of the files that samples are written to: a sample of one frame is an image."""
    return ".png" if bucket.num_frames == 1 else ".mp4"


def refuse_unwritable(bucket: Bucket, fps: float) -> None:
    """Refuse before the sampling what the encoder would refuse, or change in silence, after it.

    Raises:
        RecipeError: H.264 does not take the size or the frame rate. A PNG takes any.
    """
    if suffix_of(bucket) == ".png":
        return
    height, width = (size + size % 2 for size in (bucket.height, bucket.width))
    if (width, height) != (bucket.width, bucket.height):
        raise RecipeError(
            f"{bucket} cannot be written as mp4: H.264 in 4:2:0 needs an even size, such as "
            f"{width}x{height}."
        )
    if not _LEAST_FPS <= fps <= _MOST_FPS:
        raise RecipeError(
            f"{fps:g} frames a second cannot be written as mp4: expected {_LEAST_FPS} to "
            f"{_MOST_FPS}. Set --fps or sampling.fps."
        )


def _given(values: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not None}


_OURS = Path(__file__).with_name("prompts")
_SHOWN = 10
"""Lines that an error names."""


def find_prompts(section: PresetSection, bucket: Bucket, folder: Path | None) -> tuple[str, ...]:
    """The prompts of a preset; where it names none, those that come with longtake.

    Args:
        section: what is said about the preset.
        bucket: the videos' size; images have other prompts.
        folder: of the file that names the prompts file, which is looked for there first.

    Raises:
        RecipeError: there is no such file, or prompts are empty.
    """
    if section.prompts_file is not None:
        return read_prompts(find_file("prompts_file", section.prompts_file, folder))
    if section.prompts is None:
        return read_prompts(_OURS / ("images.txt" if bucket.num_frames == 1 else "videos.txt"))
    empty = [str(number) for number, each in enumerate(section.prompts) if not each.strip()]
    if empty:
        raise RecipeError(f"prompts[{', '.join(empty)}] are empty, counted from 0. Remove them.")
    return section.prompts


def read_prompts(path: Path) -> tuple[str, ...]:
    """The prompts of a file, in its order, without the spaces around them.

    Raises:
        RecipeError: the file is missing, empty, has empty lines, or is no UTF-8; names the lines.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RecipeError(
            f"The prompts file {path} cannot be read: {error.strerror or error}."
        ) from None
    lines = _decoded(content, path).split("\n")
    if not lines[-1].strip():
        lines.pop()  # what stands behind the last line's end
    if not any(line.strip() for line in lines):
        raise RecipeError(f"The prompts file {path} is empty. Write one prompt a line.")
    prompts = tuple(line.strip() for line in lines)
    empty = [str(number) for number, prompt in enumerate(prompts, 1) if not prompt]
    if empty:
        more = ", ..." if len(empty) > _SHOWN else ""
        which = (
            f"lines {', '.join(empty[:_SHOWN])}{more} are" if empty[1:] else f"line {empty[0]} is"
        )
        raise RecipeError(
            f"The prompts file {path} cannot be used: {which} empty. Write one prompt a line, "
            "without empty lines between them."
        )
    return prompts


def _decoded(content: bytes, path: Path) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # Counted in the bytes as they are; Python counts from behind a byte order mark.
        start = error.start + (len(content) - len(error.object))
        line = content[:start].count(b"\n") + 1
        raise RecipeError(
            f"The prompts file {path} is not UTF-8: line {line} has the byte "
            f"0x{content[start]:02x}. Save it as UTF-8."
        ) from None


DEFAULT = "default"
"""The preset that is sampled where nobody names one."""

_OF_EACH = 4
"""Held-out captions, and as many of clips that are trained on."""
_MOST_LOOKED_AT = 1000


def from_captions(recipe: Recipe, run: Path | None) -> dict[str, Any]:
    """Keys of the preset: `prompts`, and `references` of a model that takes reference images.

    What was sampled once stays: later catalogs of the run do not change it. Empty where no
    caption is known here, so that prompts that come with longtake are sampled.

    Args:
        recipe: of the run.
        run: its directory, which keeps copies of the catalogs that it was trained on.
    """
    if run is None:
        return {}
    directory = RunDirectory(run)
    kept = read_json(EvaluationDirectory(directory).preset_path(DEFAULT)).get("prompts")
    names = recipe.data.references
    if kept and not names:
        return {"prompts": tuple(map(str, kept))}
    held_out = [recipe.evaluation.held_out] if recipe.evaluation.held_out else []
    trained = sorted(directory.catalogs_path.glob("*.parquet"))[:1]
    clips = {
        clip.caption: clip
        for catalog in (*held_out, *trained)
        for clip in islice(_captioned(catalog), _OF_EACH)
    }
    if not clips:
        return {}
    found: dict[str, Any] = {"prompts": tuple(clips)}
    if names:
        found["references"] = {
            name: tuple(Path(reference_path(clip.path, pattern)) for clip in clips.values())
            for name, pattern in names.items()
        }
    return found


def _captioned(path: Path) -> Iterator[Clip]:
    """Clips of a catalog with different captions, in its order; none where it cannot be read."""
    try:
        catalog = Catalog.load(path)
    except DataError:
        return
    seen = set()
    for row in range(min(len(catalog), _MOST_LOOKED_AT)):
        clip = catalog.clip(row)
        if clip.caption and clip.caption.strip() and clip.caption not in seen:
            seen.add(clip.caption)
            yield clip


def keep_record(path: Path, name: str, record: Mapping[str, Any]) -> None:
    """Write a preset's record, unless it is there.

    Args:
        path: preset.json, which is read first: where it is there, nothing is written.
        name: of the preset.
        record: all that decides what its videos show.

    Raises:
        RecipeError: another one is there.
        RunError: it cannot be read, or written.
    """
    try:
        kept = _read_record(path) or _write_record(path, record)
    except OSError as error:
        raise not_kept(path, error) from error
    changed = [key for key in record.keys() | kept.keys() if record.get(key) != kept.get(key)]
    if changed:
        raise RecipeError(
            f"Preset {name}: {path.parent} holds videos of another one; they differ in "
            f"{', '.join(sorted(changed))}. A row of videos shows the training only if nothing "
            f"else changes: give the new one another name, such as {name}-2, or move that "
            "folder away."
        )


def not_kept(path: Path, error: OSError) -> RunError:
    """What to raise where something of a preset cannot be read or written."""
    advice = " Make room." if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return RunError(f"{path} cannot be kept: {error.strerror or error}.{advice}")


def _read_record(path: Path) -> dict[str, Any]:
    """What is there; empty where nothing is, or what a loss of power has left.

    Raises:
        OSError: it is there, and cannot be read.
    """
    with suppress(FileNotFoundError, RecordError):
        return parse_record(read_regular(path), dict[str, Any], path)
    return {}


def _write_record(path: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """Write it; returns what is there then, as somebody else may have been first."""
    if not write_once(path, record) and not _read_record(path):
        write_json(path, record, by_many=True)  # nothing can be read in what is there
    return _read_record(path)

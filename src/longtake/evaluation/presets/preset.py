"""What is sampled of each checkpoint: always the same prompts and seeds; torch-free."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longtake.config import Bucket, PresetSection, Recipe, SamplingSection
from longtake.errors import LongtakeError, RecipeError
from longtake.evaluation.presets.captions import DEFAULT, from_captions
from longtake.evaluation.presets.kept import keep_record, not_kept
from longtake.evaluation.presets.pictures import Pictures, find_pictures, keep_pictures
from longtake.evaluation.presets.prompts import find_prompts
from longtake.evaluation.presets.request import Request
from longtake.evaluation.presets.settings import refuse_unwritable, settings_for, suffix_of
from longtake.evaluation.presets.tables import Tables, gather
from longtake.evaluation_dir import EvaluationDirectory
from longtake.formatting import did_you_mean

_BATCH_SIZE = 4


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

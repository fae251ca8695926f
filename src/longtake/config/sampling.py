"""Recipe keys of sampling and evaluation."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from longtake.config.model import Expert
from longtake.config.values import (
    MAX_BATCH,
    MAX_GUIDANCE,
    MAX_SIDE,
    MAX_STEPS,
    FilePath,
    FromList,
    Section,
    SectionName,
    Shift,
    in_words,
)

# An integer of TOML has 64 bits, one of them for the sign.
_Seed = Annotated[int, Field(ge=0, lt=2**63)]
_Files = Annotated[tuple[FilePath, ...], FromList, Field(min_length=1)]


class SamplingSection(Section):
    """Default settings for sampling videos; commands and presets can replace them."""

    solver: Literal["euler", "heun", "unipc"] = "euler"
    """Solver of sampling. `unipc`: second-order solver of Wan's releases, with one velocity per
    step; `heun`: second-order with two velocities per step; `euler`: first-order."""
    num_inference_steps: int | None = Field(None, gt=0, le=10_000)
    """Number of solver steps. Unset: the default of the pretrained model's family."""
    guidance_scale: float | None = Field(None, ge=0, le=MAX_GUIDANCE)
    """Scale of classifier-free guidance, which is used above 1; a guidance-distilled model gets
    the scale as an input. Unset: the default of the pretrained model's family, which may have
    another scale for the last steps (Ideogram 4)."""
    guidance_scale_2: float | None = Field(None, ge=0, le=MAX_GUIDANCE)
    """Guidance scale of the low-noise expert of a release with two transformers; unset:
    `guidance_scale`."""
    other_expert: FilePath | None = None
    """The run, or a checkpoint of it, that trained the release's other transformer (see
    `model.expert`); of a run, the newest checkpoint is used. Unset: the release's weights."""
    adapter: FilePath | None = None
    """A LoRA file, under the names of any tool, that the model has in samples alone, such as one
    for few steps: neither in training nor in held-out losses or exports."""
    adapter_2: FilePath | None = None
    """Such a file for the low-noise expert of a release with two transformers; unset:
    `adapter`."""
    adapter_strength: float = Field(1.0, ge=0, le=10)
    """Factor on the strength of `adapter`; 0: samples are made without it."""
    shift: Shift | None = None
    """Shift of the sigmas that the solver visits, like `flow.shift`; unset: `release`."""
    negative_prompt: str = ""
    """Text that classifier-free guidance moves away from, instead of an empty caption.
    Guidance-distilled models have no negative prompt."""
    fps: float = Field(16.0, gt=0, le=1000)
    """Frames per second of samples. Those with sound have `data.fps` / `data.frame_stride`, also
    where a preset says otherwise."""
    every: int | None = Field(None, gt=0, le=MAX_STEPS)
    """Number of training steps between samplings of the presets on the training devices, from the
    EMA profile that each preset names. A checkpoint is saved at these steps too, and at the last
    step. Unset, like `every_epochs`: only evaluation servers sample."""
    every_epochs: int | None = Field(None, gt=0, le=MAX_STEPS)
    """Instead of `every`: number of epochs between such samplings, counted in each stage, at whose
    end the presets are sampled too."""
    at_start: bool = False
    """Also sample the presets before the first step, and measure the held-out loss, to compare with
    what the run began with. Needs `every` or `every_epochs`."""
    presets: Annotated[tuple[SectionName, ...], FromList] = ()
    """Presets to sample during training. Unset: those of `evaluation.run`, else all in the recipe,
    else `default`."""

    @model_validator(mode="after")
    def _presets_are_sampled(self) -> Self:
        if self.every is not None and self.every_epochs is not None:
            raise ValueError(
                f"sampling.every = {self.every} steps and sampling.every_epochs = "
                f"{self.every_epochs} both say when to sample: leave one of them out"
            )
        if self.at_start and not self.in_training:
            raise ValueError(
                "sampling.at_start also samples before the first step, but sampling.every is "
                "unset, so nothing is sampled in training; set sampling.every, such as 500"
            )
        if self.presets and not self.in_training:
            raise ValueError(
                f"sampling.presets names {', '.join(self.presets)}, but sampling.every is unset, "
                "so nothing is sampled in training; set sampling.every, such as 500"
            )
        if self.adapter_strength != 1 and not self.adapters():
            raise ValueError(
                f"sampling.adapter_strength is {self.adapter_strength:g}, but sampling.adapter, "
                "which it is the strength of, is unset; name its LoRA file, or leave the strength "
                "out"
            )
        return self

    def adapters(self) -> dict[str, Path]:
        """Return the adapters' files by their keys in a recipe."""
        files = {"sampling.adapter": self.adapter, "sampling.adapter_2": self.adapter_2}
        return {key: file for key, file in files.items() if file is not None}

    def adapter_of(self, expert: Expert | None) -> Path | None:
        """Return the adapter's file for one of a release's two transformers, or its only one."""
        return (self.adapter_2 or self.adapter) if expert == "low" else self.adapter

    @property
    def in_training(self) -> bool:
        """True if the presets are sampled on the devices that train."""
        return self.every is not None or self.every_epochs is not None

    def interval(self) -> str:
        """Return the interval of samples in training in words, such as "500 steps"."""
        return in_words(self.every, self.every_epochs)


class _VideoSection(Section):
    """Settings of a preset's videos, which a prompt can replace for its own."""

    num_frames: int | None = Field(None, gt=0, le=MAX_SIDE)
    height: int | None = Field(None, gt=0, le=MAX_SIDE)
    width: int | None = Field(None, gt=0, le=MAX_SIDE)
    solver: Literal["euler", "heun", "unipc"] | None = None
    num_inference_steps: int | None = Field(None, gt=0, le=10_000)
    guidance_scale: float | None = Field(None, ge=0, le=MAX_GUIDANCE)
    guidance_scale_2: float | None = Field(None, ge=0, le=MAX_GUIDANCE)
    adapter_strength: float | None = Field(None, ge=0, le=10)
    shift: Shift | None = None
    negative_prompt: str | None = None
    """Negative prompt, like `sampling.negative_prompt`."""
    seeds: Annotated[tuple[_Seed, ...], FromList] | None = Field(None, min_length=1)
    """Seeds; each prompt is sampled with each of them. Unset: 0."""


class PromptSection(_VideoSection):
    """A prompt with settings of its own; what it leaves out is as in its preset."""

    prompt: str


def _kind_of_prompt(value: object) -> str:
    return "tagged-table" if isinstance(value, dict | PromptSection) else "tagged-text"


_Prompt = Annotated[
    Annotated[str, Tag("tagged-text")] | Annotated[PromptSection, Tag("tagged-table")],
    Discriminator(_kind_of_prompt),
]


class PresetSection(_VideoSection):
    """Prompts, seeds and settings with which every checkpoint is sampled, so that they compare.

    Keys that are left out have the values of the first of `data.buckets` and of `sampling`.
    """

    fps: float | None = Field(None, gt=0, le=1000)
    prompts: Annotated[tuple[_Prompt, ...], FromList] | None = Field(None, min_length=1)
    """Prompts; `data.trigger` replaces `[trigger]` in them. One with settings of its own is a
    table, such as { prompt = "a cat", width = 64, seeds = [3] }, in which keys of a preset from
    `num_frames` to `seeds` can stand. If neither this nor `prompts_file` is set, prompts that come
    with longtake are used."""
    prompts_file: FilePath | None = None
    """Text file with one prompt per line, or a .jsonl file with one prompt or table (see `prompts`)
    per line. It is looked for in the folder of the recipe or preset file that names it, then in the
    current directory. Lines that begin with # are comments; settings in a line of text, such as
    `--w 64`, are refused."""
    conditioning: dict[str, _Files] | None = None
    """Files of the model's further inputs, by the inputs' names in `data.conditioning`: one file
    per prompt, or one for all. They are looked for like `prompts_file`."""
    ema: str | None = None
    """The EMA profile to sample, of `ema.profiles`, or "none" for the raw weights. Unset: the first
    profile."""
    batch_size: int | None = Field(None, gt=0, le=MAX_BATCH)
    """Number of videos sampled at the same time; it does not change them. Unset: 4."""
    decoding: Literal["auto", "whole", "tiles"] | None = None
    """Decoding of the videos. `tiles`: in overlapping tiles, whose seams can be visible; `whole`:
    at once; `auto` (unset): in tiles only if there is not enough memory."""
    measures: Annotated[tuple[str, ...], FromList] | None = None
    """Further measures, each a class as module:Class. Unset: none; an empty list also switches off
    those of the preset of the same name that comes with longtake. See
    evaluation/extra_measures.py."""

    @model_validator(mode="after")
    def _one_source_of_prompts(self) -> Self:
        if self.prompts is not None and self.prompts_file is not None:
            raise ValueError("a preset has either prompts or a prompts_file, not both")
        return self


class EvaluationSection(Section):
    """Settings of `longtake evaluate`; none of them changes the training."""

    presets: dict[SectionName, PresetSection] = Field(default_factory=dict)
    """Presets by name. A preset with the name of one that comes with longtake changes only the
    keys that it sets."""
    run: Annotated[tuple[str, ...], FromList] = ()
    """Names of the presets to evaluate by default; empty: all of `presets`."""
    held_out: FilePath | None = None
    """A catalog of clips that are not trained on, whose loss is measured at each checkpoint."""
    reference_clips: int = Field(64, ge=0, le=MAX_STEPS)
    """Number of training clips whose measures are compared with those of a preset; 0: none."""
    hold_waiting: int = Field(4, ge=0, le=MAX_STEPS)
    """Number of checkpoints waiting for evaluation, oldest first, that are protected from
    deletion: up to this many more than `checkpoint.keep` may be on disk. 0: only those that are
    being sampled are protected."""

"""Keys of sampling and evaluation."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

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
)

_Seed = Annotated[int, Field(ge=0, lt=2**63)]
_Files = Annotated[tuple[FilePath, ...], FromList, Field(min_length=1)]


class SamplingSection(Section):
    """How videos are sampled unless the command says otherwise."""

    solver: Literal["euler", "heun", "unipc"] = "euler"
    """`unipc`: the sampler of Wan's releases, of order 2 with one velocity a step; `heun`: of order
    2 with two."""
    num_inference_steps: int | None = Field(None, gt=0, le=10_000)
    """Unset, as the next two: what the pretrained model's scheduler and family say."""
    guidance_scale: float | None = Field(None, ge=0, le=MAX_GUIDANCE)
    """Of classifier-free guidance, which is used above 1; a guidance-distilled model is given the
    scale itself."""
    guidance_scale_2: float | None = Field(None, ge=0, le=MAX_GUIDANCE)
    """Of the low-noise expert of a release with two transformers; unset: `guidance_scale`."""
    other_expert: FilePath | None = None
    """The run, or one checkpoint of it, that has trained the transformer that this run does not
    train (see `model.expert`): its newest checkpoint is sampled with. Unset: the release's."""
    shift: Shift | None = None
    """Like `flow.shift`, of the sigmas that the solver visits; unset: `release`."""
    negative_prompt: str = ""
    """What classifier-free guidance moves away from, in place of an empty caption. A
    guidance-distilled model takes none."""
    fps: float = Field(16.0, gt=0, le=1000)
    every: int | None = Field(None, gt=0, le=MAX_STEPS)
    """Sample presets every so many steps while the run trains, on the devices that train it, from
    the average that each preset names. A checkpoint is saved at these steps too, and at the last
    step. Unset: only evaluation servers sample."""
    presets: Annotated[tuple[SectionName, ...], FromList] = ()
    """Names of the presets that are sampled while the run trains; unset: those of
    `evaluation.run`, else all in the recipe, else `default`."""

    @model_validator(mode="after")
    def _presets_are_sampled(self) -> Self:
        if self.presets and self.every is None:
            raise ValueError(
                f"sampling.presets names {', '.join(self.presets)}, but sampling.every is unset, "
                "so nothing is sampled in training; set sampling.every, such as 500"
            )
        return self


class PresetSection(Section):
    """What is sampled of each checkpoint: always the same prompts and seeds, so that it shows.

    What is left out is as in `data.buckets` (the first of them) and `sampling`.
    """

    num_frames: int | None = Field(None, gt=0, le=MAX_SIDE)
    height: int | None = Field(None, gt=0, le=MAX_SIDE)
    width: int | None = Field(None, gt=0, le=MAX_SIDE)
    fps: float | None = Field(None, gt=0, le=1000)
    solver: Literal["euler", "heun", "unipc"] | None = None
    num_inference_steps: int | None = Field(None, gt=0, le=10_000)
    guidance_scale: float | None = Field(None, ge=0, le=MAX_GUIDANCE)
    guidance_scale_2: float | None = Field(None, ge=0, le=MAX_GUIDANCE)
    shift: Shift | None = None
    negative_prompt: str | None = None
    """As `sampling.negative_prompt`."""
    seeds: Annotated[tuple[_Seed, ...], FromList] | None = Field(None, min_length=1)
    """Each prompt is sampled with each of them; 0 if unset."""
    prompts: Annotated[tuple[str, ...], FromList] | None = Field(None, min_length=1)
    """Or `prompts_file`, a prompt a line; with neither, prompts that come with longtake. Where one
    has `[trigger]`, `data.trigger` replaces it."""
    prompts_file: FilePath | None = None
    """Looked for beside the file that names it, and then in the folder the command is run in.
    Lines that begin with # are remarks; settings such as `--w 64` in a line are refused."""
    conditioning: dict[str, _Files] | None = None
    """Files of the model's further inputs: by their names in `data.conditioning`, a file for each
    prompt, or one for all; looked for as `prompts_file` is."""
    ema: str | None = None
    """A profile of `ema.profiles`, or "none": the raw weights; the first profile if unset."""
    batch_size: int | None = Field(None, gt=0, le=MAX_BATCH)
    """Videos sampled at once, 4 if unset; what they show does not depend on it."""
    decoding: Literal["auto", "whole", "tiles"] | None = None
    """`tiles`: in overlapping pieces, with seams that can show; `auto`, as if unset: only when
    there is not enough memory for the whole."""
    measures: Annotated[tuple[str, ...], FromList] | None = None
    """Further measures, each a class as module:Class; none if unset. An empty list switches off
    those of the preset of the same name that comes with longtake. See
    evaluation/extra_measures.py."""

    @model_validator(mode="after")
    def _one_source_of_prompts(self) -> Self:
        if self.prompts is not None and self.prompts_file is not None:
            raise ValueError("a preset has either prompts or a prompts_file, not both")
        return self


class EvaluationSection(Section):
    """What `longtake evaluate` samples and measures; nothing in it changes the training."""

    presets: dict[SectionName, PresetSection] = Field(default_factory=dict)
    """By name. One that is called like one that comes with longtake changes only what it says."""
    run: Annotated[tuple[str, ...], FromList] = ()
    """Names of those that are evaluated unless the command says otherwise; all of `presets`, if
    empty."""
    held_out: FilePath | None = None
    """A catalog of clips that are not trained on, whose loss is measured at each checkpoint."""
    reference_clips: int = Field(64, ge=0, le=MAX_STEPS)
    """Clips of the training whose measures a preset's are compared with; 0: they are not."""
    hold_waiting: int = Field(4, ge=0, le=MAX_STEPS)
    """So many checkpoints that wait to be evaluated, the oldest first, are not deleted until they
    are: that many more than `checkpoint.keep` may be on disk. 0: only those that are sampled."""

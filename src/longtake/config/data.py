"""Recipe keys of `data`: clips, captions, further inputs, buckets and stages."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from longtake.config.values import (
    MAX_BATCH,
    MAX_SECONDS,
    MAX_SIDE,
    MAX_STEPS,
    FilePath,
    FromList,
    Section,
    Shift,
)

_MAX_NUMBERS = 2**22
_Frames = Annotated[int, Field(gt=0, le=MAX_SIDE)]
_Aspect = Annotated[float, Field(ge=0.05, le=20)]
STEM = "{stem}"
"""Placeholder for a clip's file name without its suffix, in `path` of `data.conditioning`."""

_CONDITIONING_NAME = re.compile(r"[a-z][a-z0-9_]*")
_TAKEN_NAMES = ("noisy", "sigmas", "guidance", "token_ids")  # names of a model's other inputs
_KEYS_OF_KINDS: dict[str, tuple[Any, ...]] = {  # each key's unset value, and kinds that have it
    "encode": (None, "picture", "video"),
    "frame": (None, "picture"),
    "frames": (None, "video"),
    "width": (None, "numbers"),
    "alpha": (False, "mask"),
    "per_frame": (False, "numbers"),
}
_PLACEHOLDER = re.compile(r"\{[^{}]*\}|[{}]")


class Bucket(Section):
    """One shape of training clips, in frames and pixels; all clips of a batch have the same."""

    num_frames: int = Field(gt=0, le=MAX_SIDE)
    height: int = Field(gt=0, le=MAX_SIDE)
    width: int = Field(gt=0, le=MAX_SIDE)
    batch_size: int | None = Field(None, gt=0, le=MAX_BATCH, repr=False)
    """Number of clips per update, over all processes, instead of `global_batch_size` of the stage
    or the training; useful for shapes with fewer tokens. It is split into as many micro-batches as
    the replaced batch size."""
    share: float | None = Field(None, gt=0, lt=1, repr=False)
    """Fraction of clips to train in this bucket although they fit another bucket better; each epoch
    chooses other clips, and the rest of them goes to the better bucket. Only clips that also fit
    this bucket count: they are long enough, need not be enlarged and lose at most a tenth more of
    their picture. Shares of a clip that sum to more than 1 are scaled down to 1. Unset: each clip
    has one bucket."""

    @property
    def num_pixels(self) -> int:
        return self.num_frames * self.height * self.width

    def toml(self) -> str:
        values = self.model_dump(exclude_none=True).items()
        return f"{{ {', '.join(f'{name} = {value}' for name, value in values)} }}"

    def __str__(self) -> str:
        frames = "1 frame" if self.num_frames == 1 else f"{self.num_frames} frames"
        return f"{frames} of {self.width}x{self.height}"


class Stage(Section):
    """A stage of the curriculum: its clips, their shapes, and its length."""

    name: str = Field(min_length=1)
    where: Annotated[tuple[str, ...], FromList] = ()
    """Conditions that select the stage's clips, such as `num_frames >= 48`, `nouns <= q40` (the
    lower 40 % of all clips with a caption) or `codec == h264`; a clip has to meet all of them.
    Numbers: `num_frames`, `width`, `height`, `aspect` (width / height), `fps`, `duration_seconds`,
    `difficulty` (`data.difficulty`) and all scores; texts: `kind` (`video`, `image`), `codec`,
    `pix_fmt`, `color_range`, `color_transfer`, `color_matrix`."""
    drop_hardest: float = Field(0.0, ge=0, lt=1)
    """Leave out this fraction of the selected clips, those of the highest difficulty."""
    buckets: Annotated[tuple[Bucket, ...], FromList] | None = Field(None, min_length=1)
    """The stage's buckets, instead of `data.buckets`."""
    weights: dict[str, Annotated[float, Field(ge=0, le=1e9)]] | None = None
    """Relative share of the stage's batches by catalog name, instead of `data.weights`."""
    epochs: int | None = Field(None, gt=0, le=MAX_STEPS)
    steps: int | None = Field(None, gt=0, le=MAX_STEPS)
    """Length of the stage, in epochs or in steps. The last stage needs neither; then it lasts to
    the end of the run."""
    ramp_steps: int = Field(0, ge=0, le=MAX_STEPS)
    """Number of steps in which batches of the previous stage and of this one are mixed; this one's
    share rises from 0 to 1. Half of the ramp's batches belong to each of the two stages."""
    learning_rate: float | None = Field(None, gt=0)
    """Learning rate from the stage's first step on (with a ramp: from its middle on), instead of
    `optimizer.learning_rate`. The schedule, which spans the whole run, is applied to it. Muon's
    rate changes by the same factor."""
    warmup_steps: int | None = Field(None, gt=0, le=MAX_STEPS)
    """Steps at the stage's beginning in which the learning rate rises to its value."""
    ema_decay: float | None = Field(None, gt=0, lt=1)
    """Decay of the running average of the weights (EMA) from the stage's first step on (with a
    ramp: from its middle on), instead of `ema.decay`."""
    global_batch_size: int | None = Field(None, gt=0, le=MAX_BATCH)
    """Number of clips in every batch of the stage, instead of `training.global_batch_size`."""
    shift: Shift | None = None
    """Timestep shift in every batch of the stage, instead of `flow.shift`."""
    caption_dropout: float | None = Field(None, ge=0, le=1)
    """Caption dropout in every batch of the stage, instead of `data.caption_dropout`."""

    @model_validator(mode="after")
    def _is_one_length(self) -> Self:
        if self.epochs is not None and self.steps is not None:
            raise ValueError(f"stage {self.name} has both epochs and steps; give one of them")
        if self.steps is not None and (self.warmup_steps or 0) > self.steps:
            raise ValueError(
                f"stage {self.name} has {self.steps} steps and warmup_steps = {self.warmup_steps}, "
                "so its learning rate would never be reached; give it more steps or a shorter "
                "warm-up"
            )
        return self


class ConditioningSection(Section):
    """A further input of each clip: its source, and the form in which the model gets it."""

    kind: Literal["picture", "video", "mask", "numbers"]
    """Kind of the input. `picture`: one per clip (of a video file, the first frame). `video`: one
    frame per frame of the clip. `mask`: a video or one picture, from black (0) to white (1).
    `numbers`: a JSON, CSV or npy file, such as a camera path. Videos and masks are cut, mirrored
    and strided like the clip."""
    path: str | None = None
    """Path of the input's file, relative to the clip's folder, such as "../pose/{stem}.png", where
    `{stem}` stands for the clip's file name without its suffix. `{stem}.*` accepts any suffix."""
    column: str | None = Field(None, min_length=1)
    """Instead of `path`: a column of the catalog with names of the input's files or, for `numbers`,
    with the numbers themselves (`longtake data index --conditioning COLUMN`)."""
    frame: Literal["first", "last"] | None = None
    """Instead of `path`, for a picture: use the first or last frame of the clip's own window.
    Sampling takes it from a file, like every picture."""
    frames: int | None = Field(None, gt=0, le=2**16)
    """Instead of `path`, for a video: use this many first frames of the clip's own window, for a
    model that continues them. Sampling takes the first frames of a file."""
    alpha: bool = False
    """Instead of `path`, for a mask: use the alpha channel of the clip's own picture: 1 where it is
    opaque. Videos, and pictures without one, are opaque. Sampling takes the mask from a file."""
    encode: bool | None = None
    """Encode a picture or video with the codec; the model then gets `<name>_latents`. `false`: the
    model gets `<name>`, pixels from -1 to 1. Unset: `true`."""
    width: int | None = Field(None, gt=0, le=_MAX_NUMBERS)
    """Count of values that an input of kind `numbers` has per clip or, with `per_frame`, per
    frame."""
    per_frame: bool = False
    """For an input of kind `numbers`: it has a row for each frame of the clip. The model gets the
    rows of the frames that it is trained on."""

    def num_frames(self, bucket: "Bucket") -> int:
        """Return the number of frames of this input for a clip of a bucket; 1 for a picture."""
        return 1 if self.kind == "picture" else self.frames or bucket.num_frames

    @property
    def is_of_clip(self) -> bool:
        """True if the input is made of the clip itself, and not read from a file of its own."""
        return self.frame is not None or self.frames is not None or self.alpha

    @property
    def is_encoded(self) -> bool:
        """True if the codec encodes this conditioning input to latents."""
        return self.kind in ("picture", "video") and self.encode is not False


def _check_conditioning(
    sections: dict[str, ConditioningSection],
) -> dict[str, ConditioningSection]:
    """Raise ValueError for inputs whose name no tensor can have, or with another kind's keys."""
    for name, section in sections.items():
        # A model gets an encoded input as `<name>_latents`, and text encoders return `..._embeds`:
        # an input with such a name would replace one of them.
        is_taken = name in _TAKEN_NAMES or name.endswith(("_latents", "_embeds"))
        if is_taken or not _CONDITIONING_NAME.fullmatch(name):
            raise ValueError(
                f"data.conditioning: {name!r} cannot be the name of an input; use small letters, "
                "digits and underscores, such as reference or pose, but not "
                f"{', '.join(_TAKEN_NAMES)} or an ending in _latents or _embeds"
            )
        key, kind = f"data.conditioning.{name}", section.kind
        if kind == "numbers" and section.width is None:
            raise ValueError(f"{key} needs width: how many numbers a clip (or each frame) has")
        for name_of_key, (unset, *kinds) in _KEYS_OF_KINDS.items():
            # A key at its unset value is accepted: the recipe that a run keeps sets every key.
            if getattr(section, name_of_key) not in (None, unset) and kind not in kinds:
                raise ValueError(
                    f'{key}.{name_of_key} is for {" and ".join(kinds)}, not for "{kind}"'
                )
        places = [section.path, section.column, section.frame, section.frames]
        places.append(section.alpha or None)
        if places.count(None) != len(places) - 1:
            raise ValueError(
                f"{key} needs one of path, column, frame, frames and alpha: where it is"
            )
        unknown = (
            [] if section.path is None else _PLACEHOLDER.findall(section.path.replace(STEM, ""))
        )
        if unknown or section.path == "":
            has = f"has {unknown[0]}" if unknown else "is empty"
            raise ValueError(
                f'{key}.path: "{section.path}" {has}; the one placeholder is {STEM}, the clip\'s '
                f'file name without its ending, such as in "../{name}/{STEM}.png"'
            )
    return sections


TRIGGER = "[trigger]"
"""Placeholder in captions, prefixes and prompts that is replaced by `data.trigger`."""


class CaptionsSection(Section):
    """Changes to the captions of one catalog, drawn for each sample of each epoch."""

    trigger: str | None = None
    """Trigger word of this catalog's captions, instead of `data.trigger`; empty: none."""
    prefixes: Annotated[tuple[str, ...], FromList] = ()
    """Texts such as "a photo of", one of which is put before each caption; "" is no prefix."""
    shuffle_tags: bool = False
    """Shuffle the comma-separated parts of a caption each time. Not with `data.cache`, which keeps
    embeddings of fixed texts."""
    keep_tags: int = Field(0, ge=0, le=2**16)
    """Number of first parts of a caption that are not shuffled."""

    @model_validator(mode="after")
    def _keeps_what_is_shuffled(self) -> Self:
        if self.keep_tags and not self.shuffle_tags:
            raise ValueError(
                f"data.captions: keep_tags = {self.keep_tags} needs shuffle_tags = true"
            )
        return self


class AutoBucketsSection(Section):
    """Automatic choice of buckets (clip shapes), each with about the same number of pixels."""

    pixels: int = Field(gt=0, le=2**24)
    """Upper limit of a frame's pixels, such as 399360 for 832x480."""
    frames: Annotated[tuple[_Frames, ...], FromList] = Field((1,), min_length=1, max_length=64)
    """Numbers of frames that the chosen buckets may have; 1 is for images."""
    aspects: Annotated[tuple[_Aspect, ...], FromList] = Field((), max_length=64)
    """Ratios of width to height; unset: 21:9, 16:9, 3:2, 4:3, 1 and the inverse ratios."""
    multiple_of: int = Field(16, ge=8, le=1024)
    """Height and width of buckets are multiples of this number, as the model family needs: 16 for
    Wan and FLUX."""
    min_clips: int = Field(8, gt=0, le=10**9)
    """A bucket with fewer clips is left out; its clips go to the next best one."""

    @model_validator(mode="after")
    def _has_room(self) -> Self:
        if self.multiple_of**2 > self.pixels:
            raise ValueError(
                f"data.auto_buckets.pixels is {self.pixels}, less than one square of "
                f"multiple_of = {self.multiple_of}"
            )
        return self


class StoreSection(Section):
    """Reading of clips from object stores: those with an s3://, gs:// or https:// address."""

    timeout_seconds: float = Field(20.0, gt=0, le=MAX_SECONDS)
    """Time limit of one request to an object store. Requests for large objects get smaller after a
    timeout."""
    retry_seconds: float = Field(300.0, ge=0, le=MAX_SECONDS)
    """Time for which requests to a store are repeated without any success before the clip counts as
    missing. Training waits for it."""
    cache: FilePath | None = None
    """Folder on a local disk of each node for fetched clips; several ranks and runs can share it.
    Unset: a clip is fetched into memory each time."""
    cache_gib: float = Field(100.0, gt=0, le=2**30)
    """Size limit of the folder `cache` of fetched clips, in GiB; the least recently used ones are
    deleted."""


class DataSection(Section):
    """The training clips, their shapes and their order."""

    catalog: FilePath | None = None
    """The Parquet file that `longtake data index` wrote."""
    catalogs: dict[str, FilePath] = Field(default_factory=dict)
    """Instead of `catalog`: several catalogs by name, each with its own epochs; their batches are
    mixed by `weights`."""
    weights: dict[str, Annotated[float, Field(ge=0, le=1e9)]] = Field(default_factory=dict)
    """Relative share of the batches by catalog name; a catalog that is not named has 1."""
    repeats: dict[str, Annotated[int, Field(ge=1, le=10**6)]] = Field(default_factory=dict)
    """Repetitions of a catalog's clips relative to other catalogs, by catalog name (`catalog` if
    there is only one); a catalog that is not named has 1. Instead of `weights`. Each stage epoch
    then repeats the catalog this many times, each time in another order and with other seeds."""
    loss_weights: dict[str, Annotated[float, Field(gt=0, le=1e6)]] = Field(default_factory=dict)
    """Weight of the loss by catalog name (`catalog` if there is only one), such as 0.5 for
    regularisation pictures; a catalog that is not named has 1. The gradients of its batches are
    multiplied by it before they are clipped; recorded losses and norms of gradients are without
    it."""
    trigger: str = Field("", max_length=1000)
    """Word for the trained subject or style, such as "sks dog". It replaces `[trigger]` in captions
    and prefixes, and is put before each caption that has neither; without a trigger, `[trigger]`
    is refused."""
    captions: dict[str, CaptionsSection] = Field(default_factory=dict)
    """Changes to captions, by catalog name (`catalog` if there is only one)."""
    buckets: Annotated[tuple[Bucket, ...], FromList] = ()
    """Shapes of training clips. Every clip goes to the bucket that fits it best, or to several by
    their `share`; a batch holds clips of one bucket. Unset: those of `auto_buckets`."""
    auto_buckets: AutoBucketsSection | None = None
    """Instead of `buckets`: choose buckets from the catalogs when a run begins, and keep them in
    its recipe.toml. If both are set, `buckets` are used."""
    tokens_per_batch: int | None = Field(None, gt=0, le=2**40)
    """Number of the model's tokens per update, over all processes: each bucket without `batch_size`
    gets max(1, tokens_per_batch // tokens of a clip) clips. A run keeps these batch sizes in its
    recipe.toml."""
    frame_stride: int = Field(1, gt=0, le=MAX_SIDE)
    """Take every n-th frame of a clip; with `fps`, every n-th frame at that rate."""
    fps: float | None = Field(None, gt=0, le=1000)
    """Train videos at this frame rate, such as 16 for Wan: take the frame shown at each multiple of
    1/fps seconds, by timestamps. A slower video repeats frames. The same frames of `conditioning`
    videos are read. Unset: all frames as they are."""
    stills_from_videos: bool = False
    """Also train single frames of videos in buckets of one frame. `false`: these buckets take only
    images (clips of one frame), and a video too short for the other buckets is left out."""
    windows: int | None = Field(None, gt=0, le=MAX_SIDE)
    """Number of windows of a longer clip that are trained on, spread evenly over the clip; each
    epoch takes one of them. 1: the middle. Unset: a window begins anywhere."""
    window: Literal["spread", "head", "middle"] = "spread"
    """Place of the window in a longer clip. `head`: its beginning; `middle`: its middle, each the
    only window; `spread`: by `windows`."""
    min_size: int | None = Field(None, gt=0, le=MAX_SIDE)
    """Leave out clips whose shorter side has fewer pixels. Unset: small clips are enlarged."""
    upscale: bool = True
    """Enlarge clips that are smaller than their bucket. `false`: a clip goes to a bucket that it
    covers, and is left out if it covers none."""
    keep_uncaptioned: bool = False
    """Train clips without a caption with an empty one. `false`: they are left out. Another text for
    them, or their file names, is given by `longtake data index --uncaptioned`."""
    max_crop: float | None = Field(None, ge=0, lt=1)
    """Greatest fraction of a picture that the crop to its bucket may remove, such as 0.2; a clip
    that would lose more is left out. Unset: no limit."""
    untagged: Literal["bt601", "bt709"] = "bt709"
    """Colour matrix assumed for videos of 720 lines and more that name none; `longtake data show`
    counts them. Players and most cameras assume BT.709; below 720 lines it is always BT.601."""
    hdr: Literal["tone_map", "as_stored"] = "tone_map"
    """Videos in HDR (PQ or HLG). `tone_map`: converted to SDR in BT.709, by the curve of BT.2390;
    `as_stored`: taken for SDR, in which they look grey. `longtake data index` counts them, and
    files of `conditioning` are always read as stored."""
    random_crop: bool = False
    """Crop a clip's frames at a random position in each epoch instead of in the middle."""
    conditioning: Annotated[dict[str, ConditioningSection], AfterValidator(_check_conditioning)] = (
        Field(default_factory=dict)
    )
    """Further inputs of each clip, by name: pictures, videos, masks and numbers."""
    cache: FilePath | None = None
    """Folder for latents and prompt embeddings. They are computed once, so codec and text encoder
    are not in memory while the model trains."""
    cache_dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type in which the cache keeps latents and embeddings. With bf16 they take half the
    space, and the model trains on rounded values; outputs of a bf16 encoder take half the space in
    either case."""
    cache_checksums: bool = True
    """Verify the checksum of each entry of the cache when it is read."""
    flip: float = Field(0.0, ge=0, le=1)
    """Fraction of samples mirrored left to right; not suitable for captions that name a side."""
    stages: Annotated[tuple[Stage, ...], FromList] = ()
    """Stages of the curriculum; without any, all clips are trained on until the last step."""
    difficulty: str | None = None
    """The attribute that `difficulty` means in stages, such as `nouns` (`longtake data score`)."""
    drift_limit: float = Field(1.0, gt=0)
    """Limit, in standard deviations, of the change of an attribute's mean from one stage to the
    next, and of the distance of a stage's hardest clips, by each score, beyond those of all earlier
    stages."""
    on_drift: Literal["warn", "refuse"] = "warn"
    on_change: Literal["refuse", "finish", "merge", "restart"] = "refuse"
    """Action of a resumed run whose clips, batch size or stages have changed. `finish`: end the
    epoch as it was, then continue with the new ones. `merge`: train in the rest of the epoch
    exactly the clips that it has not seen yet. `restart`: begin the next epoch at once."""
    caption_dropout: float | None = Field(None, ge=0, le=1)
    """Fraction of samples trained with an empty caption, for classifier-free guidance. Unset: 0.1,
    or 0 for a guidance-distilled model, which is sampled without an empty caption."""
    workers: int = Field(2, ge=0, le=256)
    """Number of decode processes per rank; one that hangs is replaced. 0: decode in threads of the
    training process, which are not supervised."""
    sample_timeout_seconds: float = Field(60.0, gt=0, le=MAX_SECONDS)
    """Time limit for decoding one sample; after it the worker's stacks are dumped, and it is killed
    and replaced."""
    sample_memory_gib: float = Field(1.0, gt=0, le=1024)
    """Memory limit for decoding one sample, in GiB; a clip that needs more is quarantined. A
    picture may have 64 million pixels per GiB."""
    frame_cache_gib: float = Field(1.0, ge=0, le=2**16)
    """Memory of each process for decoded clips that are one window long; other clips are decoded
    each time."""
    store: StoreSection = Field(default_factory=StoreSection)
    """Reading of clips from object stores."""
    max_quarantined_clips: int = Field(16, ge=0, le=MAX_STEPS)
    """Number of clips, over all ranks, that may fail to decode before the run stops."""
    retry_quarantined: bool = False
    """Try clips again that failed in earlier launches."""

    @model_validator(mode="after")
    def _has_buckets(self) -> Self:
        if not self.buckets and self.auto_buckets is None:
            raise ValueError(
                "data.buckets is missing: list shapes of clips, or let data.auto_buckets choose "
                "them, such as data.auto_buckets = { pixels = 399360, frames = [81] }"
            )
        return self

    @model_validator(mode="after")
    def _shares_have_others(self) -> Self:
        lists = {"data.buckets": self.buckets}
        lists |= {f"buckets of stage {each.name}": each.buckets or () for each in self.stages}
        for key, shapes in lists.items():
            given = [shape for shape in shapes if shape.share is not None]
            if given and len(shapes) == 1:
                raise ValueError(
                    f"{key}: {shapes[0]} has share = {given[0].share:g} of clips that fit another "
                    "bucket better, and there is no other: leave it out, or add a bucket"
                )
        return self

    @model_validator(mode="after")
    def _has_catalogs(self) -> Self:
        # Equal means that both are set, or neither is.
        if bool(self.catalogs) == (self.catalog is not None):
            raise ValueError("data needs either one catalog or several catalogs by name")
        by_key = {f"the weights of stage {each.name}": each.weights or {} for each in self.stages}
        tables: dict[str, Mapping[str, object]] = {"data.weights": self.weights, **by_key}
        tables |= {"data.repeats": self.repeats, "data.loss_weights": self.loss_weights}
        tables |= {"data.captions": self.captions}
        for key, named in tables.items():
            for name in sorted(named.keys() - self.sources().keys()):
                known = ", ".join(self.sources())
                raise ValueError(f"{key} names {name}, which is not among the catalogs: {known}")
        if self.repeats and self.weights:
            raise ValueError(
                "data.repeats and data.weights both say how often catalogs are trained: give one "
                "of them"
            )
        return self

    @model_validator(mode="after")
    def _has_windows_of_one_kind(self) -> Self:
        if self.window != "spread" and (self.windows or 1) > 1:
            raise ValueError(
                f'data.window = "{self.window}" is one window of each clip, and data.windows = '
                f"{self.windows} are several: leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _can_be_cached(self) -> Self:
        if self.cache is None:
            return self
        if self.random_crop:
            raise ValueError(
                "data.cache keeps the latents of fixed crops, but data.random_crop cuts each epoch "
                "elsewhere: turn one of them off"
            )
        # A clip may have several windows unless all buckets are for images.
        shapes = [*self.buckets, *(each for stage in self.stages for each in stage.buckets or ())]
        frames = [shape.num_frames for shape in shapes]
        if not self.buckets and self.auto_buckets is not None:
            frames += self.auto_buckets.frames
        has_spans = self.stills_from_videos or any(number > 1 for number in frames)
        if self.windows is None and self.window == "spread" and has_spans:
            raise ValueError(
                "data.cache keeps the latents of a fixed number of spans of each clip: say how "
                "many with data.windows, such as data.windows = 1"
            )
        for name, how in self.captions.items():
            if how.shuffle_tags:
                raise ValueError(
                    "data.cache keeps the embeddings of fixed captions, but data.captions."
                    f"{name}.shuffle_tags puts tags in another order each time: turn one of them "
                    "off (trigger and prefixes are cached)"
                )
        return self

    @model_validator(mode="after")
    def _stages_fit_together(self) -> Self:
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ValueError(
                f"data.stages must have names of their own, but are {', '.join(names)}"
            )
        for stage in self.stages[:-1]:
            if stage.epochs is None and stage.steps is None:
                raise ValueError(
                    f"stage {stage.name} has neither epochs nor steps, so the stages after it "
                    "would never begin"
                )
        for stage in self.stages:
            if self.tokens_per_batch is not None and stage.global_batch_size is not None:
                raise ValueError(
                    f"data.tokens_per_batch = {self.tokens_per_batch} and stage {stage.name}'s "
                    f"global_batch_size = {stage.global_batch_size} both say how many clips an "
                    "update has: give one of them"
                )
        if self.stages and self.stages[0].ramp_steps:
            raise ValueError(f"stage {names[0]} is the first: there is nothing to ramp from")
        # Two warm-ups from the first step on would be ambiguous: the run's own is kept.
        if self.stages and self.stages[0].warmup_steps is not None:
            raise ValueError(
                f"stage {names[0]} is the first: its warm-up is that of the section optimizer, so "
                f"leave its own warmup_steps = {self.stages[0].warmup_steps} out"
            )
        return self

    def sources(self) -> dict[str, Path]:
        return dict(self.catalogs) if self.catalog is None else {"catalog": self.catalog}

    def loss_weight(self, source: str) -> float:
        """Return the weight of the loss of a catalog's batches.

        All samples of a batch are of one catalog, so its gradients are multiplied after they have
        been measured: losses and norms of all batches compare.
        """
        return self.loss_weights.get(source, 1.0)

    def curriculum(self) -> tuple[Stage, ...]:
        return self.stages or (Stage(name="all"),)

    def batch_sizes(self, stage: Stage, batch_size: int) -> tuple[int, ...]:
        """Return the clips per update of each bucket (clip shape) of a stage.

        `batch_size` is the run's, which a stage or bucket may replace.
        """
        size = stage.global_batch_size or batch_size
        return tuple(shape.batch_size or size for shape in stage.buckets or self.buckets)

    def stage(self, name: str) -> Stage:
        return next(each for each in self.curriculum() if each.name == name)

    def shapes(self) -> tuple[Bucket, ...]:
        shapes = [shape for stage in self.curriculum() for shape in stage.buckets or self.buckets]
        return tuple(dict.fromkeys(shapes))

"""Keys of `data`: clips, captions, further inputs, buckets and stages."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

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

_MAX_NUMBERS = 2**16  # of a clip or a frame
_Frames = Annotated[int, Field(gt=0, le=MAX_SIDE)]
_Aspect = Annotated[float, Field(ge=0.05, le=20)]
STEM = "{stem}"
"""What stands for a clip's file name, without its ending, in `path` of `data.conditioning`."""

_CONDITIONING_NAME = re.compile(r"[a-z][a-z0-9_]*")
_TAKEN_NAMES = ("noisy", "sigmas", "guidance", "token_ids")  # of other inputs of a model
_KEYS_OF_KINDS: dict[str, tuple[Any, ...]] = {  # what a key is unset, and the kinds that have it
    "encode": (None, "picture", "video"),
    "frame": (None, "picture"),
    "frames": (None, "video"),
    "width": (None, "numbers"),
    "per_frame": (False, "numbers"),
}
_PLACEHOLDER = re.compile(r"\{[^{}]*\}|[{}]")


class Bucket(Section):
    """One shape of training clip: what a batch holds, in pixels and frames."""

    num_frames: int = Field(gt=0, le=MAX_SIDE)
    height: int = Field(gt=0, le=MAX_SIDE)
    width: int = Field(gt=0, le=MAX_SIDE)
    batch_size: int | None = Field(None, gt=0, le=MAX_BATCH, repr=False)
    """Clips per update over all processes, instead of the stage's or `global_batch_size`: more of
    a shape with fewer tokens. They are split into as many micro-batches as that."""
    share: float | None = Field(None, gt=0, lt=1, repr=False)
    """Some clips fit this bucket but fit another one better. This share of them goes to this bucket
    in each epoch, other clips in each; the rest goes to the better one. A clip fits if it is long
    enough, need not be enlarged and loses at most a tenth more of its picture than in the better
    one. Where the shares of a clip sum to more than 1, they are lowered to 1 together. Unset: each
    clip has one bucket."""

    def toml(self) -> str:
        values = self.model_dump(exclude_none=True).items()
        return f"{{ {', '.join(f'{name} = {value}' for name, value in values)} }}"

    def __str__(self) -> str:
        frames = "1 frame" if self.num_frames == 1 else f"{self.num_frames} frames"
        return f"{frames} of {self.width}x{self.height}"


class Stage(Section):
    """A span of the curriculum: which clips, in which shapes, for how long."""

    name: str = Field(min_length=1)
    where: Annotated[tuple[str, ...], FromList] = ()
    """Which clips: conditions such as `num_frames >= 48`, `nouns <= q40` (the lower 40 % of all
    clips with a caption) or `codec == h264`; a clip has to meet all of them. Numbers: `num_frames`,
    `width`, `height`, `aspect` (width / height), `fps`, `duration_seconds`, `difficulty`
    (`data.difficulty`) and all scores; texts: `kind` (`video`, `image`), `codec`, `pix_fmt`,
    `color_range`, `color_transfer`, `color_matrix`."""
    drop_hardest: float = Field(0.0, ge=0, lt=1)
    """Leave out this share of the selected clips, those of the highest difficulty."""
    buckets: Annotated[tuple[Bucket, ...], FromList] | None = Field(None, min_length=1)
    """Instead of `data.buckets`."""
    weights: dict[str, Annotated[float, Field(ge=0, le=1e9)]] | None = None
    """Instead of `data.weights`."""
    epochs: int | None = Field(None, gt=0, le=MAX_STEPS)
    steps: int | None = Field(None, gt=0, le=MAX_STEPS)
    """How long, in epochs or in steps; the last stage may say neither, and never ends."""
    ramp_steps: int = Field(0, ge=0, le=MAX_STEPS)
    """Steps in which batches of this stage and of the one before it are mixed, its share rising
    from none to all: the last half of the ramp's batches of the one, the first half of this."""
    learning_rate: float | None = Field(None, gt=0)
    """Instead of `optimizer.learning_rate` from the stage's first step on (with a ramp: from its
    middle on), times the schedule, which spans the whole run. Muon's rate changes as much."""
    warmup_steps: int | None = Field(None, gt=0, le=MAX_STEPS)
    """Steps at the stage's beginning in which the learning rate rises to its value."""
    ema_decay: float | None = Field(None, gt=0, lt=1)
    """Instead of `ema.decay` from the stage's first step on (with a ramp: from its middle on)."""
    global_batch_size: int | None = Field(None, gt=0, le=MAX_BATCH)
    """Instead of `training.global_batch_size`, in every batch of the stage."""
    shift: Shift | None = None
    """Instead of `flow.shift`, in every batch of the stage."""
    caption_dropout: float | None = Field(None, ge=0, le=1)
    """Instead of `data.caption_dropout`, in every batch of the stage."""

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
    """A further input of each clip, by its name: where it is, and what the model gets of it."""

    kind: Literal["picture", "video", "mask", "numbers"]
    """`picture`: one for the clip; of a video its first frame. `video`: a frame for each of the
    clip's. `mask`: a video or one picture, from black (0) to white (1). `numbers`: a JSON, CSV or
    npy file, such as a camera path. Videos and masks are cut, mirrored and strided as the clip."""
    path: str | None = None
    """From the clip's folder, such as "../pose/{stem}.png", where `{stem}` stands for the clip's
    file name without its ending. `{stem}.*` is the file of that name with any ending."""
    column: str | None = Field(None, min_length=1)
    """Instead of `path`: a column of the catalog that names the files or, of `numbers`, has them
    (`longtake data index --conditioning COLUMN`)."""
    frame: Literal["first", "last"] | None = None
    """Instead of `path`, of a picture: that frame of the clip's own window. In sampling it is a
    file, as each picture is."""
    frames: int | None = Field(None, gt=0, le=2**16)
    """Instead of `path`, of a video: so many first frames of the clip's own window, for a model
    that continues them. In sampling they are the first frames of a file."""
    encode: bool | None = None
    """Whether the codec encodes a picture or video; unset: yes. Then the model gets
    `<name>_latents`, else `<name>`, pixels from -1 to 1."""
    width: int | None = Field(None, gt=0, le=_MAX_NUMBERS)
    """Of `numbers`: how many there are for each clip or, with `per_frame`, for each frame."""
    per_frame: bool = False
    """Of `numbers`: whether there is a row for each frame of the clip. The model gets those of the
    frames that it is trained on."""

    def num_frames(self, bucket: "Bucket") -> int:
        """Frames that are read for a clip of a bucket; of a picture 1."""
        return 1 if self.kind == "picture" else self.frames or bucket.num_frames

    @property
    def is_of_clip(self) -> bool:
        """Whether it is frames of the clip's own window, and no file."""
        return self.frame is not None or self.frames is not None

    @property
    def is_encoded(self) -> bool:
        """Whether the codec makes latents of it."""
        return self.kind in ("picture", "video") and self.encode is not False


def _check_conditioning(name: str, section: ConditioningSection) -> None:
    """Raise ValueError if the model's tensors cannot be called so, or a key is of another kind."""
    is_taken = name in _TAKEN_NAMES or name.endswith(("_latents", "_embeds"))
    if is_taken or not _CONDITIONING_NAME.fullmatch(name):
        raise ValueError(
            f"data.conditioning: {name!r} cannot be the name of an input; use small letters, "
            f"digits and underscores, such as reference or pose, but not {', '.join(_TAKEN_NAMES)} "
            "or an ending in _latents or _embeds"
        )
    key, kind = f"data.conditioning.{name}", section.kind
    if kind == "numbers" and section.width is None:
        raise ValueError(f"{key} needs width: how many numbers a clip (or each frame) has")
    for name_of_key, (unset, *kinds) in _KEYS_OF_KINDS.items():
        if getattr(section, name_of_key) not in (None, unset) and kind not in kinds:
            raise ValueError(f'{key}.{name_of_key} is for {" and ".join(kinds)}, not for "{kind}"')
    places = [section.path, section.column, section.frame, section.frames]
    if places.count(None) != len(places) - 1:
        raise ValueError(f"{key} needs one of path, column, frame and frames: where it is")
    if section.path is None:
        return
    unknown = _PLACEHOLDER.findall(section.path.replace(STEM, ""))
    if unknown or not section.path:
        has = f"has {unknown[0]}" if unknown else "is empty"
        raise ValueError(
            f'{key}.path: "{section.path}" {has}; the one placeholder is {STEM}, the clip\'s file '
            f'name without its ending, such as in "../{name}/{STEM}.png"'
        )


TRIGGER = "[trigger]"
"""The text that `data.trigger` replaces in captions, prefixes and prompts."""


class CaptionsSection(Section):
    """What becomes of the captions of one catalog; anew for each sample of each epoch."""

    trigger: str | None = None
    """Instead of `data.trigger`; empty: none."""
    prefixes: Annotated[tuple[str, ...], FromList] = ()
    """One of these texts is put before each caption, such as "a photo of"; "" is none."""
    shuffle_tags: bool = False
    """Whether the parts of a caption between commas are put in another order each time. Not with
    `data.cache`, which keeps embeddings of fixed texts."""
    keep_tags: int = Field(0, ge=0, le=2**16)
    """How many of the first parts stay in front."""

    @model_validator(mode="after")
    def _keeps_what_is_shuffled(self) -> Self:
        if self.keep_tags and not self.shuffle_tags:
            raise ValueError(
                f"data.captions: keep_tags = {self.keep_tags} needs shuffle_tags = true"
            )
        return self


class AutoBucketsSection(Section):
    """Buckets that are chosen from the catalogs, each of about the same number of pixels."""

    pixels: int = Field(gt=0, le=2**24)
    """The most pixels of a frame, such as 399360 for 832x480."""
    frames: Annotated[tuple[_Frames, ...], FromList] = Field((1,), min_length=1, max_length=64)
    """Numbers of frames; 1 is for images."""
    aspects: Annotated[tuple[_Aspect, ...], FromList] = Field((), max_length=64)
    """Ratios of width to height; unset: 21:9, 16:9, 3:2, 4:3, 1 and the upright ones."""
    multiple_of: int = Field(16, ge=8, le=1024)
    """Of height and width, as the family needs: 16 for Wan and FLUX."""
    min_clips: int = Field(8, gt=0, le=10**9)
    """A bucket that fewer clips go to is left out; they go to the next best."""

    @model_validator(mode="after")
    def _has_room(self) -> Self:
        if self.multiple_of**2 > self.pixels:
            raise ValueError(
                f"data.auto_buckets.pixels is {self.pixels}, less than one square of "
                f"multiple_of = {self.multiple_of}"
            )
        return self


class StoreSection(Section):
    """How clips are read whose catalog says that they lie in an object store (s3://, gs://, https://)."""

    timeout_seconds: float = Field(20.0, gt=0, le=MAX_SECONDS)
    """How long one request may take. Requests for large objects become smaller when they do not."""
    retry_seconds: float = Field(300.0, ge=0, le=MAX_SECONDS)
    """How long a store may give nothing, however often it is asked, before a clip is taken as
    missing. Training waits for as long."""
    cache: FilePath | None = None
    """Folder on a disk of each node in which fetched clips are kept; several ranks and runs may
    share it. Unset: a clip is fetched into memory each time."""
    cache_gib: float = Field(100.0, gt=0, le=2**30)
    """Size of that folder; the clips that were used least recently are deleted."""


class DataSection(Section):
    """Which clips are trained on, in which shapes and in which order."""

    catalog: FilePath | None = None
    """The Parquet file that `longtake data index` wrote."""
    catalogs: dict[str, FilePath] = Field(default_factory=dict)
    """Instead of one: several, by name, each with epochs of its own; batches are mixed by
    `weights`."""
    weights: dict[str, Annotated[float, Field(ge=0, le=1e9)]] = Field(default_factory=dict)
    """Each catalog's share of the batches, by its name; those not named have 1."""
    repeats: dict[str, Annotated[int, Field(ge=1, le=10**6)]] = Field(default_factory=dict)
    """How often each clip of a catalog is trained while one of another catalog is trained once, by
    the catalog's name (`catalog` if there is one); those not named have 1. Instead of `weights`.
    One of a stage's `epochs` is so many epochs of the catalog, each with another order and other
    seeds."""
    trigger: str = Field("", max_length=1000)
    """A word that stands for what is trained, such as "sks dog": put before each caption that does
    not have it. Where a caption or a prefix has `[trigger]`, that is replaced by it instead;
    without a trigger it is refused."""
    captions: dict[str, CaptionsSection] = Field(default_factory=dict)
    """What becomes of a catalog's captions, by its name (`catalog` if there is one)."""
    buckets: Annotated[tuple[Bucket, ...], FromList] = ()
    """Every clip goes to the bucket that fits it best, or to several by their `share`; a batch
    holds clips of one bucket. Unset: those of `auto_buckets`."""
    auto_buckets: AutoBucketsSection | None = None
    """Instead of `buckets`: chosen from the catalogs when a run begins, and kept in its
    recipe.toml. Where both are given, `buckets` count."""
    tokens_per_batch: int | None = Field(None, gt=0, le=2**40)
    """Tokens of the model per update over all processes: each bucket without `batch_size` gets as
    many clips as have so many, at least one. A run keeps these numbers in its recipe.toml."""
    frame_stride: int = Field(1, gt=0, le=MAX_SIDE)
    """Take every n-th frame of a clip; with `fps`, of its frames at that rate."""
    fps: float | None = Field(None, gt=0, le=1000)
    """Train videos at this frame rate, such as 16 for Wan: the frames that are shown at each 1/fps
    second, by their timestamps. A slower video repeats frames. Of `conditioning` the same frames
    are read. Unset: all frames as they are."""
    stills_from_videos: bool = False
    """Whether buckets of one frame also train single frames of videos. Without it they take only
    clips of one frame, that is images, and a video too short for the other buckets is left out."""
    windows: int | None = Field(None, gt=0, le=MAX_SIDE)
    """How many spans of a longer clip are trained on, spread evenly over it; each epoch takes one
    of them. 1: the middle. Without it a span begins anywhere."""
    max_crop: float | None = Field(None, ge=0, lt=1)
    """Share of a picture that the crop to its bucket may remove, such as 0.2; a clip that would
    lose more is left out. Unset: any."""
    untagged: Literal["bt601", "bt709"] = "bt709"
    """Colour matrix of videos of 720 lines and more that name none, which `longtake data show`
    counts. Players and most cameras take BT.709; below 720 lines it is always BT.601."""
    random_crop: bool = False
    """Cut a clip's frames anywhere instead of in the middle, each epoch elsewhere."""
    conditioning: dict[str, ConditioningSection] = Field(default_factory=dict)
    """Further inputs of each clip, by name: pictures, videos, masks and numbers."""
    cache: FilePath | None = None
    """Folder in which latents and prompt embeddings are kept, computed once, so that codec and text
    encoder are not in memory while the model trains."""
    cache_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which the cache keeps latents and embeddings. With bf16 they take half the room,
    and the model trains on the rounded ones; what a bf16 encoder gives takes half of it anyway."""
    cache_checksums: bool = True
    """Whether the checksum of each entry of the cache is compared when it is read."""
    flip: float = Field(0.0, ge=0, le=1)
    """Share of samples that are mirrored left to right: not for captions that name a side."""
    stages: Annotated[tuple[Stage, ...], FromList] = ()
    """The curriculum; without any, all clips are trained on until the last step."""
    difficulty: str | None = None
    """The attribute that `difficulty` means in stages, such as `nouns` (`longtake data score`)."""
    drift_limit: float = Field(1.0, gt=0)
    """Standard deviations that the mean of an attribute may move from a stage to the next, and that
    the hardest clips of a stage, by each score, may lie beyond those of all stages before."""
    on_drift: Literal["warn", "refuse"] = "warn"
    on_change: Literal["refuse", "finish", "merge", "restart"] = "refuse"
    """What a resumed run does if its clips, batch size or stages are others than before. `finish`:
    end the epoch as it was, then continue with what is new. `merge`: train in the rest of the epoch
    exactly what it has not seen yet. `restart`: begin the next epoch at once."""
    caption_dropout: float | None = Field(None, ge=0, le=1)
    """Share of samples trained with an empty caption, for classifier-free guidance. Unset: 0.1, and
    0 for a guidance-distilled model, which is sampled without an empty caption."""
    workers: int = Field(2, ge=0, le=256)
    """Processes of each rank that decode, watched and replaced when one hangs; 0: threads of the
    training process, which are not supervised."""
    sample_timeout_seconds: float = Field(60.0, gt=0, le=MAX_SECONDS)
    """How long decoding one sample may take before its worker is dumped, killed and replaced."""
    sample_memory_gib: float = Field(1.0, gt=0, le=1024)
    """Memory that decoding one sample may take, in GiB; a clip that needs more is quarantined. A
    picture may have 64 million pixels for each GiB."""
    frame_cache_gib: float = Field(1.0, ge=0, le=2**16)
    """Room, in each process, for decoded clips that are one window long; others are read anew."""
    store: StoreSection = Field(default_factory=StoreSection)
    """How clips in object stores are read."""
    max_quarantined_clips: int = Field(16, ge=0, le=MAX_STEPS)
    """Clips that may fail to decode, over all ranks, before the run stops."""
    retry_quarantined: bool = False
    """Whether a launch tries clips again that failed in those before it."""

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
        if bool(self.catalogs) == (self.catalog is not None):
            raise ValueError("data needs either one catalog or several catalogs by name")
        by_key = {f"the weights of stage {each.name}": each.weights or {} for each in self.stages}
        tables: dict[str, Mapping[str, object]] = {"data.weights": self.weights, **by_key}
        tables |= {"data.repeats": self.repeats, "data.captions": self.captions}
        for key, named in tables.items():
            for name in sorted(named.keys() - self.sources().keys()):
                known = ", ".join(self.sources())
                raise ValueError(f"{key} names {name}, which is no catalog of: {known}")
        if self.repeats and self.weights:
            raise ValueError(
                "data.repeats and data.weights both say how often catalogs are trained: give one "
                "of them"
            )
        return self

    @model_validator(mode="after")
    def _conditioning_can_be_read(self) -> Self:
        for name, section in self.conditioning.items():
            _check_conditioning(name, section)
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
        if self.windows is None and self._has_spans():
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

    def _has_spans(self) -> bool:
        """True if a clip may have several windows: not where all clips are images."""
        shapes = [*self.buckets, *(each for stage in self.stages for each in stage.buckets or ())]
        frames = [each.num_frames for each in shapes]
        if not self.buckets and self.auto_buckets is not None:
            frames += self.auto_buckets.frames
        return self.stills_from_videos or any(each > 1 for each in frames)

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
        if self.stages and self.stages[0].warmup_steps is not None:
            raise ValueError(
                f"stage {names[0]} is the first: its warm-up is optimizer.warmup_steps, so leave "
                f"its own warmup_steps = {self.stages[0].warmup_steps} out"
            )
        return self

    def sources(self) -> dict[str, Path]:
        return dict(self.catalogs) if self.catalog is None else {"catalog": self.catalog}

    def curriculum(self) -> tuple[Stage, ...]:
        return self.stages or (Stage(name="all"),)

    def batch_sizes(self, stage: Stage, batch_size: int) -> tuple[int, ...]:
        """Clips per update of each bucket of a stage; `batch_size` is that of the run."""
        size = stage.global_batch_size or batch_size
        return tuple(shape.batch_size or size for shape in stage.buckets or self.buckets)

    def stage(self, name: str) -> Stage:
        return next(each for each in self.curriculum() if each.name == name)

    def shapes(self) -> tuple[Bucket, ...]:
        shapes = [shape for stage in self.curriculum() for shape in stage.buckets or self.buckets]
        return tuple(dict.fromkeys(shapes))

"""The recipe: every key of a run, validated when it is loaded; torch-free.

A recipe is a TOML file. `load` reads it, applies `--set a.b=c` overrides, and returns a frozen
`Recipe`; whatever is wrong with it becomes one `RecipeError` that names the key and, for a
misspelt one, the nearest that exists. Paths in a recipe are relative to the folder in which the
command is run.
"""

import codecs
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    Strict,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from longtake import fsio, process
from longtake.errors import RecipeError
from longtake.formatting import nearest


def _at_home(path: Path) -> Path:
    """A path whose ~ is the home folder, as in a shell."""
    if "\0" in str(path):
        raise ValueError("a path has no NUL character")
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError(f"{path}: {error}") from error


# TOML knows neither paths nor tuples: these two are made from strings and lists.
_Path = Annotated[Path, Strict(False), AfterValidator(_at_home), PlainSerializer(str)]
_FromList = Strict(False)
_MAX_SIDE, _MAX_BATCH, _MAX_STEPS = 2**16, 2**16, 10**9
_MAX_SECONDS, _MAX_GUIDANCE = 1e7, 1000.0
_MAX_NUMBERS = 2**16  # of a clip or a frame
_Beta = Annotated[float, Field(ge=0, lt=1)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Frames = Annotated[int, Field(gt=0, le=_MAX_SIDE)]
_Aspect = Annotated[float, Field(ge=0.05, le=20)]
_Seed = Annotated[int, Field(ge=0, lt=2**63)]
_Files = Annotated[tuple[_Path, ...], _FromList, Field(min_length=1)]


def _not_reserved(name: str) -> str:
    if name in ("claims", "servers"):  # folders beside those of presets
        raise ValueError(f"a preset cannot be called {name}; give it another name")
    return name


_PresetName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$"), AfterValidator(_not_reserved)]


class _Section(BaseModel):
    # Strict, so that caption_dropout = true is refused rather than read as 1.0.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


_CLASS = re.compile(r"[\w.]+:\w+")
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*(gib|gb|mib|mb)")
_MAX_MEMORY_BYTES = 2**50
_UNIT_BYTES = {"gib": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6}


def memory_bytes(text: str) -> int:
    """Bytes of a size such as "48GiB" (2**30) or "48GB" (10**9).

    Raises:
        RecipeError: it is not an amount of memory.
    """
    found = _MEMORY.fullmatch(text.strip().lower())
    num_bytes = 0.0 if found is None else float(found[1]) * _UNIT_BYTES[found[2]]
    if not 1 <= num_bytes <= _MAX_MEMORY_BYTES:
        raise RecipeError(
            f"{_short(repr(text))} is no amount of memory; write it like 48GiB or 48GB."
        )
    return int(num_bytes)


def _checked_memory(text: object, info: ValidationInfo) -> object:
    key = f"recompute.{info.field_name}"
    if isinstance(text, int | float) and not isinstance(text, bool):
        raise ValueError(f'{key} is {text}; write it with its unit, such as "{text}GiB"')
    if isinstance(text, str):
        try:
            memory_bytes(text)
        except RecipeError as error:
            raise ValueError(f"{key}: {str(error).rstrip('.')}") from None
    return text


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


Shift = Annotated[float, Field(gt=0, le=1000)] | Literal["release", "flux", "opensora"]
"""`release`: as the pretrained model's scheduler says; `flux`: exp(mu), mu linear in the
transformer's tokens; `opensora`: by pixels and frames."""


class Bucket(_Section):
    """One shape of training clip: what a batch holds, in pixels and frames."""

    num_frames: int = Field(gt=0, le=_MAX_SIDE)
    height: int = Field(gt=0, le=_MAX_SIDE)
    width: int = Field(gt=0, le=_MAX_SIDE)
    batch_size: int | None = Field(None, gt=0, le=_MAX_BATCH, repr=False)
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


class Stage(_Section):
    """A span of the curriculum: which clips, in which shapes, for how long."""

    name: str = Field(min_length=1)
    where: Annotated[tuple[str, ...], _FromList] = ()
    """Which clips: conditions such as `num_frames >= 48`, `nouns <= q40` (the lower 40 % of all
    clips with a caption) or `codec == h264`; a clip has to meet all of them. Numbers: `num_frames`,
    `width`, `height`, `aspect` (width / height), `fps`, `duration_seconds`, `difficulty`
    (`data.difficulty`) and all scores; texts: `kind` (`video`, `image`), `codec`, `pix_fmt`,
    `color_range`, `color_transfer`, `color_matrix`."""
    drop_hardest: float = Field(0.0, ge=0, lt=1)
    """Leave out this share of the selected clips, those of the highest difficulty."""
    buckets: Annotated[tuple[Bucket, ...], _FromList] | None = Field(None, min_length=1)
    """Instead of `data.buckets`."""
    weights: dict[str, Annotated[float, Field(ge=0, le=1e9)]] | None = None
    """Instead of `data.weights`."""
    epochs: int | None = Field(None, gt=0, le=_MAX_STEPS)
    steps: int | None = Field(None, gt=0, le=_MAX_STEPS)
    """How long, in epochs or in steps; the last stage may say neither, and never ends."""
    ramp_steps: int = Field(0, ge=0, le=_MAX_STEPS)
    """Steps in which batches of this stage and of the one before it are mixed, its share rising
    from none to all: the last half of the ramp's batches of the one, the first half of this."""
    learning_rate: float | None = Field(None, gt=0)
    """Instead of `optimizer.learning_rate` from the stage's first step on (with a ramp: from its
    middle on), times the schedule, which spans the whole run. Muon's rate changes as much."""
    warmup_steps: int | None = Field(None, gt=0, le=_MAX_STEPS)
    """Steps at the stage's beginning in which the learning rate rises to its value."""
    ema_decay: float | None = Field(None, gt=0, lt=1)
    """Instead of `ema.decay` from the stage's first step on (with a ramp: from its middle on)."""
    global_batch_size: int | None = Field(None, gt=0, le=_MAX_BATCH)
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


class ConditioningSection(_Section):
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


class CaptionsSection(_Section):
    """What becomes of the captions of one catalog; anew for each sample of each epoch."""

    trigger: str | None = None
    """Instead of `data.trigger`; empty: none."""
    prefixes: Annotated[tuple[str, ...], _FromList] = ()
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


class AutoBucketsSection(_Section):
    """Buckets that are chosen from the catalogs, each of about the same number of pixels."""

    pixels: int = Field(gt=0, le=2**24)
    """The most pixels of a frame, such as 399360 for 832x480."""
    frames: Annotated[tuple[_Frames, ...], _FromList] = Field((1,), min_length=1, max_length=64)
    """Numbers of frames; 1 is for images."""
    aspects: Annotated[tuple[_Aspect, ...], _FromList] = Field((), max_length=64)
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


class StoreSection(_Section):
    """How clips are read whose catalog says that they lie in an object store (s3://, gs://, https://)."""

    timeout_seconds: float = Field(20.0, gt=0, le=_MAX_SECONDS)
    """How long one request may take. Requests for large objects become smaller when they do not."""
    retry_seconds: float = Field(300.0, ge=0, le=_MAX_SECONDS)
    """How long a store may give nothing, however often it is asked, before a clip is taken as
    missing. Training waits for as long."""
    cache: _Path | None = None
    """Folder on a disk of each node in which fetched clips are kept; several ranks and runs may
    share it. Unset: a clip is fetched into memory each time."""
    cache_gib: float = Field(100.0, gt=0, le=2**30)
    """Size of that folder; the clips that were used least recently are deleted."""


class DataSection(_Section):
    """Which clips are trained on, in which shapes and in which order."""

    catalog: _Path | None = None
    """The Parquet file that `longtake data index` wrote."""
    catalogs: dict[str, _Path] = Field(default_factory=dict)
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
    buckets: Annotated[tuple[Bucket, ...], _FromList] = ()
    """Every clip goes to the bucket that fits it best, or to several by their `share`; a batch
    holds clips of one bucket. Unset: those of `auto_buckets`."""
    auto_buckets: AutoBucketsSection | None = None
    """Instead of `buckets`: chosen from the catalogs when a run begins, and kept in its
    recipe.toml. Where both are given, `buckets` count."""
    tokens_per_batch: int | None = Field(None, gt=0, le=2**40)
    """Tokens of the model per update over all processes: each bucket without `batch_size` gets as
    many clips as have so many, at least one. A run keeps these numbers in its recipe.toml."""
    frame_stride: int = Field(1, gt=0, le=_MAX_SIDE)
    """Take every n-th frame of a clip; with `fps`, of its frames at that rate."""
    fps: float | None = Field(None, gt=0, le=1000)
    """Train videos at this frame rate, such as 16 for Wan: the frames that are shown at each 1/fps
    second, by their timestamps. A slower video repeats frames. Of `conditioning` the same frames
    are read. Unset: all frames as they are."""
    stills_from_videos: bool = False
    """Whether buckets of one frame also train single frames of videos. Without it they take only
    clips of one frame, that is images, and a video too short for the other buckets is left out."""
    windows: int | None = Field(None, gt=0, le=_MAX_SIDE)
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
    cache: _Path | None = None
    """Folder in which latents and prompt embeddings are kept, computed once, so that codec and text
    encoder are not in memory while the model trains."""
    cache_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which the cache keeps latents and embeddings. With bf16 they take half the room,
    and the model trains on the rounded ones; what a bf16 encoder gives takes half of it anyway."""
    cache_checksums: bool = True
    """Whether the checksum of each entry of the cache is compared when it is read."""
    flip: float = Field(0.0, ge=0, le=1)
    """Share of samples that are mirrored left to right: not for captions that name a side."""
    stages: Annotated[tuple[Stage, ...], _FromList] = ()
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
    sample_timeout_seconds: float = Field(60.0, gt=0, le=_MAX_SECONDS)
    """How long decoding one sample may take before its worker is dumped, killed and replaced."""
    sample_memory_gib: float = Field(1.0, gt=0, le=1024)
    """Memory that decoding one sample may take, in GiB; a clip that needs more is quarantined. A
    picture may have 64 million pixels for each GiB."""
    frame_cache_gib: float = Field(1.0, ge=0, le=2**16)
    """Room, in each process, for decoded clips that are one window long; others are read anew."""
    store: StoreSection = Field(default_factory=StoreSection)
    """How clips in object stores are read."""
    max_quarantined_clips: int = Field(16, ge=0, le=_MAX_STEPS)
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


def _with_counts_that_end(config: dict[str, Any]) -> dict[str, Any]:
    """A model of 2^63 layers would be built until memory ends."""
    for name, value in config.items():
        if name.startswith("num_") and isinstance(value, int) and value > _MOST_OF_A_MODEL:
            raise ValueError(
                f"model.config.{name} is {value:.3e}; expected at most {_MOST_OF_A_MODEL}"
            )
    return config


_MOST_OF_A_MODEL = 4096

Quantization = Literal["fp8", "int8", "nf4"]
"""Numbers of fewer bits that a frozen linear layer's weight can be kept in."""


Expert = Literal["high", "low"]
"""Which noise levels one of a release's two transformers serves."""

EXPERT_FOLDERS: Mapping[Expert, str] = {"high": "transformer", "low": "transformer_2"}
"""Their folders in a release."""


class ModelSection(_Section):
    """The transformer."""

    family: str
    """`wan`, `ltx2`, `hunyuan_video15`, `flux`, `flux_kontext`, `flux2`, `qwen_image`,
    `qwen_image_edit`, `qwen_image_edit_plus`, `z_image`, `tubelet`, or your own Family, as
    `package.module:Class`."""
    pretrained: str | None = None
    """A diffusers folder or repository id to start from; without it, random weights."""
    transformer_class: str | None = Field(None, pattern=r"^[\w.]+:\w+$")
    """Instead of the family's transformer of diffusers a class of your own with its name, such as
    an edited copy of its file: "my_project.wan:WanTransformer3DModel", found from where you are."""
    subfolder: str = "transformer"
    expert: Expert | None = None
    """Of a release with two transformers (Wan 2.2 A14B) the one that is trained: `high`, which
    serves sigmas from the release's boundary_ratio on, or `low`, which serves those below it. Only
    its sigmas are drawn. The other one comes from the release, or from `sampling.other_expert`."""
    config: Annotated[dict[str, Any], AfterValidator(_with_counts_that_end)] = Field(
        default_factory=dict
    )
    """Arguments of the family's model class; what is left out is the class's default."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """What weights are kept in. With fp32 the arithmetic's precision is autocast's business; with
    bf16 all is computed in bf16, but for what diffusers keeps in fp32 in such a model (a few parts
    of Wan), and the optimizer keeps fp32 copies of what trains."""
    guidance: float = Field(1.0, gt=0, le=_MAX_GUIDANCE)
    """Guidance scale given to a guidance-distilled model (FLUX.1-dev, Kontext) in training. At 1.0
    the model's output is the unguided velocity, which the loss compares with. At the scale of
    sampling (2.5 to 3.5) the loss would train the guided velocity to be the unguided one, and
    undo the distillation."""
    audio: Literal["off"] | None = None
    """Of a model that makes videos with audio (`ltx2`), which needs it: `off` trains and samples
    the video alone, with audio and video isolated from each other; the audio's weights are frozen,
    and exported as they were. Of others unset."""
    quantize: Literal["none", "fp8", "int8", "nf4", "auto"] = "none"
    """What the frozen linear layers of the blocks are kept in, where a LoRA or a module is trained:
    `fp8` and `int8` take a byte per weight, `nf4` about half a byte. They are computed as before,
    from rounded weights. `auto`: the plan chooses for each block, and the run keeps its choice."""
    stream: Literal["none", "auto", "all"] = "auto"
    """Which blocks' frozen weights stay in the computer's memory and are copied to the GPU one
    block ahead; results are the same. `auto`: those that the plan has no room for."""

    @model_validator(mode="after")
    def _expert_is_of_a_release(self) -> Self:
        if self.expert is None:
            return self
        if self.pretrained is None:
            raise ValueError(
                f'model.expert = "{self.expert}" names one of a release\'s two transformers, but '
                "model.pretrained is unset: name the release, or leave model.expert out"
            )
        if self.subfolder not in ("transformer", self.folder()):
            raise ValueError(
                f'model.expert = "{self.expert}" is in the folder {self.folder()}, but '
                f'model.subfolder = "{self.subfolder}": leave model.subfolder out'
            )
        return self

    def folder(self) -> str:
        """The transformer's, in the release."""
        return self.subfolder if self.expert is None else EXPERT_FOLDERS[self.expert]


class ModuleSection(_Section):
    """A module of your own that is trained beside the model."""

    module: str = Field(pattern=r"^[\w.]+:\w+$")
    """Its class, such as "my_project.adapter:PoseAdapter", found from where you are. See
    docs/guides/modules.md."""
    blocks: Annotated[tuple[str, ...], _FromList] = ("*",)
    """Which blocks run within it: names or patterns such as `single_transformer_blocks.*`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of its class."""


class TrainableSection(_Section):
    """What of the model is trained."""

    kind: Literal["full", "lora", "dora", "lokr", "frozen"] | None = None
    """`full`: all weights; `lora`: low-rank updates of the targets; `dora`: LoRA, and a trained
    length of each row; `lokr`: updates that are Kronecker products; `frozen`: only the added
    modules. Unset: frozen where there are modules, else full."""
    targets: Annotated[tuple[str, ...], _FromList] | None = Field(None, min_length=1)
    """Names of linear layers that get LoRA: their last parts, or patterns such as
    `transformer_blocks.*.attn.to_q` or `blocks.[0-5].*`. Unset: the family's attention
    projections."""
    rank: int = Field(16, gt=0, le=2**14)
    alpha: float | None = Field(None, gt=0, le=1e6)
    """LoRA's scale is alpha / rank; unset: alpha = rank. LoKr of two full matrices has the scale
    1."""
    init_from: _Path | None = None
    """A safetensors file with LoRA of this model to begin with, with the names of diffusers, peft,
    ComfyUI, DiffSynth, VideoX-Fun, LyCORIS or kohya's scripts; its rank may be lower than
    `rank`."""
    dtype: Literal["model", "fp32", "bf16"] = "model"
    """What trained LoRA and module weights are kept in; `model`: what the model is in."""
    modules: dict[_PresetName, ModuleSection] = Field(default_factory=dict)
    """Modules of your own, by names that you choose: they are saved and exported by these. Of
    several the first is the outermost."""

    @model_validator(mode="after")
    def _trains_something(self) -> Self:
        if self.kind == "frozen" and not self.modules:
            raise ValueError(
                'trainable.kind = "frozen" without trainable.modules leaves nothing to train'
            )
        if self.targets is not None and self.base() != "lora":
            raise ValueError('trainable.targets needs trainable.kind = "lora", "dora" or "lokr"')
        if self.init_from is not None and self.kind not in ("lora", "dora"):
            raise ValueError('trainable.init_from needs trainable.kind = "lora" or "dora"')
        return self

    def base(self) -> Literal["full", "lora", "frozen"]:
        """What is trained of the model; `lora` for every kind of adapter."""
        if self.kind == "dora" or self.kind == "lokr":
            return "lora"
        return self.kind or ("frozen" if self.modules else "full")


class RecomputeSection(_Section):
    """Which activations are computed again in the backward pass instead of being kept."""

    policy: Literal[
        "auto", "none", "all", "all-but-first", "alternate", "save-attention", "best"
    ] = "auto"
    """`best`: the fastest that fits `memory`; `auto`: `best` where `memory` is given, and on a GPU;
    else none."""
    memory: Annotated[str | None, BeforeValidator(_checked_memory)] = None
    """Memory of the GPU, such as "48GiB" or "48GB". Unset: what is free on it when training starts,
    the least of all ranks'."""
    reserve: float = Field(0.07, ge=0, lt=1)
    """Share of the GPU's memory that is left to what no plan knows: the CUDA context, libraries'
    workspaces and fragmentation. With several GPUs 1.5 GiB of each are left to NCCL beside it."""
    host_memory: Annotated[str | None, BeforeValidator(_checked_memory)] = None
    """What streamed weights, offloaded activations and checkpoints that are being written of a
    process may take of the computer's memory, such as "64GiB". Unset: 60 % of this computer's where
    it has a GPU, else 64GiB."""
    device: str | None = None
    """The GPU that is planned for: a name such as a100-80gb or rtx4090, or its memory and dense
    bf16 speed, such as "24GiB,165TFLOPS". Unset: the one at hand."""

    @model_validator(mode="after")
    def _has_a_budget(self) -> Self:
        if self.policy == "best" and self.memory is None:
            raise ValueError('recompute.policy = "best" needs recompute.memory, such as "48GiB"')
        return self

    def chosen(self) -> str:
        if self.policy != "auto":
            return self.policy
        return "none" if self.memory is None else "best"


class CodecSection(_Section):
    """From pixels to latents and back."""

    kind: Literal["pixels", "autoencoder"] = "pixels"
    """`pixels` trains on pixels themselves; `autoencoder` on a frozen diffusers VAE's latents."""
    pretrained: str | None = None
    config: dict[str, Any] = Field(default_factory=dict)
    dtype: Literal["fp32", "bf16"] = "fp32"
    """What the autoencoder is kept and computed in; bf16 is faster and rounds latents."""


class PooledSection(_Section):
    """A second text encoder, which gives one vector for a whole caption."""

    pretrained: str | None = None
    """Unset: where the first encoder is from."""
    config: dict[str, Any] = Field(default_factory=dict)
    max_tokens: int = Field(77, gt=0, le=2**16)
    quantize: Literal["none", "fp8", "int8", "nf4"] = "none"
    """Like `text.quantize`, of this encoder."""

    def num_tokens(self) -> int:
        return self.max_tokens


class TextSection(_Section):
    """From captions to what the transformer is conditioned on."""

    kind: Literal["words", "transformers"] = "words"
    """`words`: ids, embedded by a model that learns them; `transformers`: a frozen encoder."""
    pretrained: str | None = None
    config: dict[str, Any] = Field(default_factory=dict)
    max_tokens: int | None = Field(None, gt=0, le=2**16)
    """Tokens that captions are cut or padded to. Unset: what the pretrained model was trained with
    (512 for Wan and FLUX.1-dev, 256 for FLUX.1-schnell); 64 without `pretrained`."""
    dtype: Literal["fp32", "bf16"] | None = None
    """What the encoders are kept and computed in; unset: bf16 where `pretrained` is set, as people
    run released pipelines, else fp32."""
    quantize: Literal["none", "fp8", "int8", "nf4"] = "none"
    """What the linear layers of a pretrained encoder are kept in; computed in `dtype`."""
    pooled: PooledSection | None = None
    """FLUX's second encoder. With it padding is encoded like words, as FLUX's pipelines do it."""

    @model_validator(mode="after")
    def _quantizes_pretrained(self) -> Self:
        for key, section in (("text", self), ("text.pooled", self.second_encoder())):
            if section is not None and section.quantize != "none" and section.pretrained is None:
                raise ValueError(
                    f'{key}.quantize = "{section.quantize}" keeps a pretrained encoder in fewer '
                    f"bits, and {key}.pretrained is unset: name one, or leave {key}.quantize out"
                )
        return self

    def num_tokens(self) -> int:
        if self.max_tokens is not None:
            return self.max_tokens
        return 64 if self.pretrained is None else 512

    def second_encoder(self) -> PooledSection | None:
        """`pooled`, from where the first encoder is unless it says otherwise."""
        if self.pooled is None or self.pooled.pretrained is not None or self.pooled.config:
            return self.pooled
        return self.pooled.model_copy(update={"pretrained": self.pretrained})

    def kept_in(self) -> Literal["fp32", "bf16"]:
        return self.dtype or ("fp32" if self.pretrained is None else "bf16")


class FlowSection(_Section):
    """Which noise levels are trained; sigma = 1 is pure noise."""

    timestep_sampling: Literal["uniform", "logit_normal", "mode", "cosmap"] = "logit_normal"
    logit_mean: float = Field(0.0, ge=-1000, le=1000)
    """Mean of the logit-normal; above 0 leans toward noise."""
    logit_std: float = Field(1.0, gt=0, le=1000)
    mode_scale: float = Field(1.29, ge=-1, le=1.7519)
    """Scale of the mode distribution."""
    shift: Shift = 1.0
    """Moves the sampled sigmas toward noise: a factor, or a rule that follows the resolution.
    `release`: the factor with which the pretrained model is sampled, up to the tokens that its rule
    was made for; LTX-2 draws as its own trainer does. `flux` ends at 4096 tokens in training."""
    loss_mask: str | None = None
    """The name of a mask in `data.conditioning` that weights the loss: 1 where it is white, and
    `loss_mask_floor` where it is black. It is not given to the model."""
    loss_mask_floor: float = Field(0.0, ge=0, le=1)
    """The weight of the loss outside the mask; at 0 nothing is learnt there."""
    sigma_range: Annotated[tuple[_Share, _Share], _FromList] = (0.0, 1.0)
    """Train only sigmas from the first to the second number, with the same distribution inside,
    such as [0.875, 1.0] for an expert of high noise."""

    @model_validator(mode="after")
    def _range_ascends(self) -> Self:
        low, high = self.sigma_range
        if not low < high:
            raise ValueError(
                f"flow.sigma_range is [{low:g}, {high:g}]; it should ascend, such as [0.5, 1.0]"
            )
        return self


_OPTIMIZERS = ("adamw", "muon", "adamw8bit", "prodigy")


def _optimizer_kind(kind: str) -> str:
    if kind not in _OPTIMIZERS and not _CLASS.fullmatch(kind):
        raise ValueError(
            f"optimizer.kind is {kind!r}; it should be 'adamw', 'muon', 'adamw8bit', 'prodigy', or "
            "a class of your own such as 'my_project.optim:Lion'"
        )
    return kind


class OptimizerSection(_Section):
    """How gradients become updates."""

    kind: Annotated[str, AfterValidator(_optimizer_kind)] = "adamw"
    """`adamw`; `muon` trains the blocks' matrices with Muon and all the rest with AdamW;
    `adamw8bit` keeps its states in 8 bits (torchao has to be installed); `prodigy` finds the
    learning rate itself; or a torch.optim.Optimizer of your own, such as "my_project.optim:Lion",
    of which weights must be fp32."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of your own optimizer's class, which gets `lr` and, if it takes them,
    `betas` and `weight_decay` from the keys here."""
    offload: bool = False
    """Keep AdamW's states, and fp32 copies of bf16 weights, in the computer's memory and update
    them there."""
    learning_rate: float = Field(1e-4, gt=0)
    """AdamW's. Of Prodigy a factor on what it finds, 1 if unset."""
    muon_learning_rate: float = Field(0.02, gt=0)
    betas: Annotated[tuple[_Beta, _Beta], _FromList] = (0.9, 0.99)
    weight_decay: float = Field(0.0, ge=0)
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    """What follows the warm-up: a plateau, or a descent to `min_lr_ratio` at the last step."""
    warmup_steps: int = Field(100, ge=0, le=_MAX_STEPS)
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients of a larger norm are scaled down to it; 1e9 clips none."""

    @field_validator("max_grad_norm", mode="before")
    @classmethod
    def _clips_something(cls, value: Any) -> Any:
        if value == 0:
            raise ValueError("it would scale every gradient to 0; to clip none, set 1e9")
        return value

    @model_validator(mode="before")
    @classmethod
    def _prodigy_begins_with_1(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("kind") == "prodigy":
            return {"learning_rate": 1.0, **values}
        return values

    @model_validator(mode="after")
    def _offloads_adamw(self) -> Self:
        if self.offload and self.kind != "adamw":
            raise ValueError(
                f'optimizer.offload works with optimizer.kind = "adamw", not "{self.kind}", whose '
                "states stay on the GPU: choose one of the two"
            )
        if self.options and ":" not in self.kind:
            raise ValueError(
                f"optimizer.options ({', '.join(self.options)}) are arguments of an optimizer of "
                f'your own, but optimizer.kind is "{self.kind}"; remove them'
            )
        return self


class TrainingSection(_Section):
    """How long, how much at once, and on what."""

    steps: int = Field(gt=0, le=_MAX_STEPS)
    """Optimizer updates."""
    global_batch_size: int = Field(gt=0, le=_MAX_BATCH)
    """Clips per update over all processes."""
    micro_batch_size: int | None = Field(None, gt=0, le=_MAX_BATCH)
    """Clips per forward pass and process; gradients are accumulated up to the batch size."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Of the arithmetic; master weights, optimizer and EMA stay in fp32."""
    compile: bool | Literal["auto"] = "auto"
    """Compile each block (torch.compile): faster steps after a first one that takes minutes.
    `auto`: on GPUs, not on a CPU."""
    encode_ahead: bool | Literal["auto"] = "auto"
    """Without `data.cache`: encode the clips and captions of the next micro-batch on a CUDA stream
    of their own while the model computes. It takes memory (`longtake plan`), and no effect on
    results. `auto`: where it fits beside the plan; on a CPU never."""


class EmaProfile(_Section):
    """One running average: how far back it looks, by a fixed decay or by a share of the run."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    """Of a folder in checkpoints, and what `--profile` takes."""
    decay: float | None = Field(None, ge=0, lt=1)
    """Exponential: its half-life is ln 0.5 / ln decay updates."""
    sigma_rel: float | None = Field(None, gt=0, lt=0.28)
    """Power function (EDM2): the standard deviation of its weights over time, as a share of the
    training so far, such as 0.05."""

    @model_validator(mode="after")
    def _is_one_kind(self) -> Self:
        if (self.decay is None) == (self.sigma_rel is None):
            raise ValueError(f"EMA profile {self.name} needs either decay or sigma_rel")
        return self


class EmaSection(_Section):
    """Running averages of the weights, kept in fp32; videos are sampled from one of them."""

    decay: float = Field(0.999, ge=0, lt=1)
    """Of the one average that there is where no profiles are given; its name is `main`. 0: there is
    none, and videos are sampled from the weights themselves."""
    profiles: Annotated[tuple[EmaProfile, ...], _FromList] = ()
    """Several averages side by side, instead of that one. The first is sampled and exported unless
    the command or the preset names another."""

    @model_validator(mode="after")
    def _names_are_known(self) -> Self:
        names = [profile.name for profile in self.profiles]
        if len(set(names)) < len(names):
            raise ValueError(f"ema.profiles must have names of their own, not {', '.join(names)}")
        return self

    def averages(self) -> tuple[EmaProfile, ...]:
        main = (EmaProfile(name="main", decay=self.decay),) if self.decay else ()
        return self.profiles or main

    def sampled(self) -> str | None:
        return next((profile.name for profile in self.averages()), None)


class GuardSection(_Section):
    """What is done about a run that diverges."""

    mode: Literal["act", "report", "off"] = "act"
    """`report`: report and continue; `off`: look only for NaN and inf. In both, a
    loss or gradient that is no number stops the run."""
    window: int = Field(128, ge=32, le=100_000)
    """Steps before, with which a new one is compared; what changes slowly, with four times as
    many."""
    warmup_steps: int = Field(64, ge=16, le=_MAX_STEPS)
    """Steps at the beginning of a run, and of a stage, in which nothing is usual yet: only NaN
    and inf are looked for there, and in a later stage's the norm of the weights."""
    compare_replicas_every: int = Field(10, ge=0, le=_MAX_STEPS)
    """Steps after which ranks that hold the same trained weights compare them to the bit, besides
    before each checkpoint; 0: never. Where copies are unlike, a GPU computes wrongly: the run rolls
    back to its newest checkpoint, and names the one that is alone (of two: both)."""
    max_rollbacks: int = Field(3, ge=0, le=_MAX_STEPS)
    """Rollbacks without progress before the run stops. Progress is 500 steps without trouble beyond
    the furthest one that a rollback gave up."""


class WatchSection(_Section):
    """How hangs are found, and what is done about them."""

    enabled: bool = True
    action: Literal["report", "restart-worker", "kill"] = "report"
    """`restart-worker`: end a decode worker that hangs; its clip is read again, and the run
    continues. `kill`: that too, and end a rank that hangs; torchrun then starts all ranks again."""
    min_seconds: float = Field(6.0, gt=0, le=_MAX_SECONDS)
    """A stall: a phase lasts so long, and 5 times as long as it ever has in this launch."""
    hook: str | None = None
    """A shell command that is run at an alert, which it finds on stdin as one line of JSON. Put no
    secret into it: the run keeps the recipe. It finds the environment of the training."""
    exporter_host: str = "127.0.0.1"
    """Address at which the exporter listens; `0.0.0.0` for a Prometheus on another host. It tells
    host names, run paths and steps to anybody who asks, so keep it inside a closed network."""
    exporter_port: int | None = Field(None, gt=0, lt=65536)
    """Where Prometheus finds each node's watcher; None: nowhere."""


class ParallelSection(_Section):
    """What several processes share."""

    strategy: Literal["replicate", "shard", "hybrid"] = "replicate"
    """`replicate`: every process holds the model; `shard`: each holds a part of it; `hybrid`: each
    holds a part, and groups of `shard_size` processes hold all of it between them."""
    shard_size: int | None = Field(None, gt=1, le=_MAX_BATCH)
    """Of `hybrid`: processes that hold one copy of the model; unset: those of a node."""
    param_dtype: Literal["fp32", "bf16"] = "fp32"
    """What sharded weights kept in fp32 are gathered in for the arithmetic where it is bf16: `bf16`
    halves what ranks send each other, and rounds norms' weights too. Gradients are reduced in fp32
    either way; with `replicate` nothing is gathered."""
    context: int = Field(1, gt=0, le=_MAX_BATCH)
    """Processes that share the tokens of each clip, for clips too long for one GPU; it must
    divide the number of processes. Of the model's heads it shares out what divides; keys and values
    of the rest go around a ring of processes."""
    timeout_seconds: float = Field(600.0, ge=1, le=_MAX_SECONDS)
    """Of a collective that waits for another process: then the launch ends, with an error that
    names process group and operation. Checkpoints are written in one such group."""
    long_timeout_seconds: float = Field(86_400.0, ge=1, le=_MAX_SECONDS)
    """The same where all wait for the work of some: downloads, the cache, samples."""

    @model_validator(mode="after")
    def _shards_in_groups(self) -> Self:
        if self.shard_size is not None and self.strategy != "hybrid":
            raise ValueError(
                f'parallel.shard_size {self.shard_size} needs parallel.strategy = "hybrid", not '
                f'"{self.strategy}"'
            )
        return self

    @model_validator(mode="after")
    def _long_is_longer(self) -> Self:
        if self.long_timeout_seconds < self.timeout_seconds:
            raise ValueError(
                f"parallel.long_timeout_seconds {self.long_timeout_seconds:g} is less than "
                f"parallel.timeout_seconds {self.timeout_seconds:g}; set it to as much or more"
            )
        return self


class CheckpointSection(_Section):
    """When state is saved, and how much of it is kept."""

    every: int = Field(500, gt=0, le=_MAX_STEPS)
    """Steps between checkpoints; the last step is always saved."""
    minutes: float | None = Field(None, gt=0, le=_MAX_SECONDS)
    """Also save when the last checkpoint was begun so many minutes ago: no more training than that
    is lost, however long a step takes."""
    keep: int = Field(3, gt=0, le=_MAX_STEPS)
    """Newest checkpoints that are kept."""
    keep_every: int | None = Field(None, gt=0, le=_MAX_STEPS)
    """Steps of which every multiple's checkpoint is kept for good."""


class SamplingSection(_Section):
    """How videos are sampled unless the command says otherwise."""

    solver: Literal["euler", "heun", "unipc"] = "euler"
    """`unipc`: the sampler of Wan's releases, of order 2 with one velocity a step; `heun`: of order
    2 with two."""
    num_inference_steps: int | None = Field(None, gt=0, le=10_000)
    """Unset, as the next two: what the pretrained model's scheduler and family say."""
    guidance_scale: float | None = Field(None, ge=0, le=_MAX_GUIDANCE)
    """Of classifier-free guidance, which is used above 1; a guidance-distilled model is given the
    scale itself."""
    guidance_scale_2: float | None = Field(None, ge=0, le=_MAX_GUIDANCE)
    """Of the low-noise expert of a release with two transformers; unset: `guidance_scale`."""
    other_expert: _Path | None = None
    """The run, or one checkpoint of it, that has trained the transformer that this run does not
    train (see `model.expert`): its newest checkpoint is sampled with. Unset: the release's."""
    shift: Shift | None = None
    """Like `flow.shift`, of the sigmas that the solver visits; unset: `release`."""
    negative_prompt: str = ""
    """What classifier-free guidance moves away from, in place of an empty caption. A
    guidance-distilled model takes none."""
    fps: float = Field(16.0, gt=0, le=1000)
    every: int | None = Field(None, gt=0, le=_MAX_STEPS)
    """Sample presets every so many steps while the run trains, on the devices that train it, from
    the average that each preset names. A checkpoint is saved at these steps too, and at the last
    step. Unset: only evaluation servers sample."""
    presets: Annotated[tuple[_PresetName, ...], _FromList] = ()
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


class PresetSection(_Section):
    """What is sampled of each checkpoint: always the same prompts and seeds, so that it shows.

    What is left out is as in `data.buckets` (the first of them) and `sampling`.
    """

    num_frames: int | None = Field(None, gt=0, le=_MAX_SIDE)
    height: int | None = Field(None, gt=0, le=_MAX_SIDE)
    width: int | None = Field(None, gt=0, le=_MAX_SIDE)
    fps: float | None = Field(None, gt=0, le=1000)
    solver: Literal["euler", "heun", "unipc"] | None = None
    num_inference_steps: int | None = Field(None, gt=0, le=10_000)
    guidance_scale: float | None = Field(None, ge=0, le=_MAX_GUIDANCE)
    guidance_scale_2: float | None = Field(None, ge=0, le=_MAX_GUIDANCE)
    shift: Shift | None = None
    negative_prompt: str | None = None
    """As `sampling.negative_prompt`."""
    seeds: Annotated[tuple[_Seed, ...], _FromList] | None = Field(None, min_length=1)
    """Each prompt is sampled with each of them; 0 if unset."""
    prompts: Annotated[tuple[str, ...], _FromList] | None = Field(None, min_length=1)
    """Or `prompts_file`, a prompt a line; with neither, prompts that come with longtake. Where one
    has `[trigger]`, `data.trigger` replaces it."""
    prompts_file: _Path | None = None
    """Looked for beside the file that names it, and then in the folder the command is run in.
    Lines that begin with # are remarks; settings such as `--w 64` in a line are refused."""
    conditioning: dict[str, _Files] | None = None
    """Files of the model's further inputs: by their names in `data.conditioning`, a file for each
    prompt, or one for all; looked for as `prompts_file` is."""
    ema: str | None = None
    """A profile of `ema.profiles`, or "none": the raw weights; the first profile if unset."""
    batch_size: int | None = Field(None, gt=0, le=_MAX_BATCH)
    """Videos sampled at once, 4 if unset; what they show does not depend on it."""
    decoding: Literal["auto", "whole", "tiles"] | None = None
    """`tiles`: in overlapping pieces, with seams that can show; `auto`, as if unset: only when
    there is not enough memory for the whole."""
    measures: Annotated[tuple[str, ...], _FromList] | None = None
    """Further measures, each a class as module:Class; none if unset. An empty list switches off
    those of the preset of the same name that comes with longtake. See
    evaluation/extra_measures.py."""

    @model_validator(mode="after")
    def _one_source_of_prompts(self) -> Self:
        if self.prompts is not None and self.prompts_file is not None:
            raise ValueError("a preset has either prompts or a prompts_file, not both")
        return self


class EvaluationSection(_Section):
    """What `longtake evaluate` samples and measures; nothing in it changes the training."""

    presets: dict[_PresetName, PresetSection] = Field(default_factory=dict)
    """By name. One that is called like one that comes with longtake changes only what it says."""
    run: Annotated[tuple[str, ...], _FromList] = ()
    """Names of those that are evaluated unless the command says otherwise; all of `presets`, if
    empty."""
    held_out: _Path | None = None
    """A catalog of clips that are not trained on, whose loss is measured at each checkpoint."""
    reference_clips: int = Field(64, ge=0, le=_MAX_STEPS)
    """Clips of the training whose measures a preset's are compared with; 0: they are not."""
    hold_waiting: int = Field(4, ge=0, le=_MAX_STEPS)
    """So many checkpoints that wait to be evaluated, the oldest first, are not deleted until they
    are: that many more than `checkpoint.keep` may be on disk. 0: only those that are sampled."""


class TrackingSection(_Section):
    """Which trackers are sent metrics, events and evaluations."""

    tensorboard: bool = True
    wandb: Literal["off", "offline", "online"] = "off"
    """`offline` keeps all of it in the run directory's `wandb`, for `wandb sync`."""
    project: str = Field("longtake", min_length=1)
    """Of W&B, which takes the entity from WANDB_ENTITY, and the run's name from WANDB_NAME; without
    it the run is named like its directory."""


class Recipe(_Section):
    """All that decides a run."""

    out: _Path
    """The run directory."""
    seed: int = Field(0, ge=0, lt=2**63)
    data: DataSection
    model: ModelSection
    codec: CodecSection = CodecSection()
    text: TextSection = TextSection()
    flow: FlowSection = FlowSection()
    optimizer: OptimizerSection = OptimizerSection()
    training: TrainingSection
    trainable: TrainableSection = TrainableSection()
    recompute: RecomputeSection = RecomputeSection()
    ema: EmaSection = EmaSection()
    guard: GuardSection = GuardSection()
    watch: WatchSection = WatchSection()
    parallel: ParallelSection = ParallelSection()
    checkpoint: CheckpointSection = CheckpointSection()
    sampling: SamplingSection = SamplingSection()
    evaluation: EvaluationSection = EvaluationSection()
    tracking: TrackingSection = TrackingSection()

    def model_inputs(self) -> dict[str, ConditioningSection]:
        """What of `data.conditioning` the model gets, in training and in sampling."""
        of_loss = self.flow.loss_mask
        return {name: each for name, each in self.data.conditioning.items() if name != of_loss}

    def encodes_in_steps(self) -> bool:
        """Whether codec or text encoder work in training: without a cache, unless there is none."""
        has_encoder = self.codec.kind != "pixels" or self.text.kind != "words"
        return has_encoder and self.data.cache is None

    @model_validator(mode="after")
    def _has_what_is_encoded_ahead(self) -> Self:
        if self.training.encode_ahead is True and not self.encodes_in_steps():
            because = f'codec.kind = "{self.codec.kind}" and text.kind = "{self.text.kind}"'
            if self.data.cache is not None:
                because = f"data.cache = {str(self.data.cache)!r}"
            raise ValueError(
                f"training.encode_ahead = true, but with {because} nothing is encoded in a step: "
                "leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _loss_mask_is_there(self) -> Self:
        name, known = self.flow.loss_mask, self.data.conditioning
        if name is None and self.flow.loss_mask_floor:
            raise ValueError("flow.loss_mask_floor needs flow.loss_mask, the name of a mask")
        if name is not None and (name not in known or known[name].kind != "mask"):
            masks = [each for each, section in known.items() if section.kind == "mask"]
            raise ValueError(
                f'flow.loss_mask = "{name}" is no mask in data.conditioning; masks there: '
                f"{', '.join(masks) or 'none'}"
            )
        return self

    def micro_batch_size(self, stage: Stage, bucket: Bucket, data_size: int) -> int:
        """Clips per forward pass of one of `data_size` processes that share a batch.

        A bucket with a batch size of its own has as many micro-batches as the stage's others.
        """
        of_stage = -(-(stage.global_batch_size or self.training.global_batch_size) // data_size)
        micro = self.training.micro_batch_size
        if bucket.batch_size is None:
            return min(micro or of_stage, of_stage)
        count = 1 if micro is None else -(-of_stage // micro)
        return -(-bucket.batch_size // (data_size * count))

    def in_stage(self, name: str) -> "Recipe":
        """The recipe with what a stage sets in the place of the keys that it stands for.

        Its `warmup_steps` are not among them: they count from the stage's first step.
        """
        stage = self.data.stage(name)
        given: dict[str, dict[str, Any]] = {}
        for key, (section, inner) in _KEYS_OF_STAGES.items():
            if (value := getattr(stage, key)) is not None:
                given.setdefault(section, {})[inner] = value
        sections = {
            section: getattr(self, section).model_copy(update=values)
            for section, values in given.items()
        }
        return self.model_copy(update=sections) if sections else self

    def stage_changes(self, before: str, after: str) -> dict[str, tuple[object, object]]:
        """What differs between two stages, by the stage's key: (value before, value after)."""
        old, new = self.in_stage(before), self.in_stage(after)
        found = {
            key: (getattr(getattr(old, section), inner), getattr(getattr(new, section), inner))
            for key, (section, inner) in _KEYS_OF_STAGES.items()
        }
        changes = {key: (one, other) for key, (one, other) in found.items() if one != other}
        warmup = self.data.stage(after).warmup_steps
        return changes | ({"warmup_steps": (None, warmup)} if warmup else {})

    @model_validator(mode="after")
    def _stalls_are_named_in_time(self) -> Self:
        seconds, stall = self.parallel.timeout_seconds, self.watch.min_seconds
        is_set = "timeout_seconds" in self.parallel.model_fields_set
        if is_set and self.watch.enabled and seconds <= stall:
            raise ValueError(
                f"parallel.timeout_seconds {seconds:g} is not more than watch.min_seconds "
                f"{stall:g}: a launch would end before its stall is named; set it to more"
            )
        return self

    @model_validator(mode="after")
    def _micro_batches_divide(self) -> Self:
        micro = self.training.micro_batch_size
        batches = {"training.global_batch_size": self.training.global_batch_size}
        for stage in self.data.stages:
            if stage.global_batch_size is not None:
                batches[f"global_batch_size of stage {stage.name},"] = stage.global_batch_size
        for key, batch in batches.items():
            if micro is not None and batch % micro:
                raise ValueError(f"training.micro_batch_size {micro} does not divide {key} {batch}")
        return self

    @model_validator(mode="after")
    def _stages_have_an_average_to_change(self) -> Self:
        for stage in self.data.stages:
            if stage.ema_decay is None or (self.ema.decay and not self.ema.profiles):
                continue
            has = "ema.decay = 0 keeps none"
            if self.ema.profiles:
                names = ", ".join(each.name for each in self.ema.profiles)
                has = f"ema.profiles ({names}) have decays of their own"
            raise ValueError(
                f"stage {stage.name} sets ema_decay = {stage.ema_decay:g} of the one average that "
                f"ema.decay makes, but {has}: leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _dora_has_exact_weights(self) -> Self:
        if self.trainable.kind == "dora" and self.model.quantize != "none":
            raise ValueError(
                f'trainable.kind = "dora" begins with the lengths of the weights\' rows, and '
                f'model.quantize = "{self.model.quantize}" rounds them: take trainable.kind = '
                '"lora", or leave model.quantize out'
            )
        return self

    @model_validator(mode="after")
    def _weights_are_frozen_and_whole(self) -> Self:
        """Only frozen weights can be in fewer bits or elsewhere, and each process has all of them.

        With `stream` = "auto" a plan streams nothing where it cannot.
        """
        for key, is_set in (
            (f'model.quantize = "{self.model.quantize}"', self.model.quantize != "none"),
            ('model.stream = "all"', self.model.stream == "all"),
        ):
            if is_set and self.trainable.base() == "full":
                raise ValueError(
                    f'{key} is for frozen weights, and trainable.kind = "full" trains them all: '
                    'set trainable.kind = "lora", or leave the key out'
                )
            if is_set and self.parallel.strategy != "replicate":
                raise ValueError(
                    f'{key} works with parallel.strategy = "replicate", not '
                    f'"{self.parallel.strategy}", whose processes each hold a part of the weights: '
                    "choose one of the two"
                )
        return self


_KEYS_OF_STAGES = {
    "learning_rate": ("optimizer", "learning_rate"),
    "ema_decay": ("ema", "decay"),
    "global_batch_size": ("training", "global_batch_size"),
    "shift": ("flow", "shift"),
    "caption_dropout": ("data", "caption_dropout"),
}
"""Keys of a stage, and the section and key in the place of which each is."""

MAY_CHANGE_ON_RESUME = (
    "out",  # a run directory may be moved
    "data.catalog",  # what a catalog holds is compared by its own fingerprint
    "data.catalogs",
    "data.auto_buckets",  # what they chose is in data.buckets
    "data.tokens_per_batch",  # as above
    "data.on_change",
    "data.on_drift",
    "data.drift_limit",
    "data.workers",
    "data.sample_timeout_seconds",
    "data.sample_memory_gib",
    "data.store",
    "data.frame_cache_gib",
    "data.cache",
    "data.cache_checksums",
    "data.max_quarantined_clips",
    "data.retry_quarantined",
    "model.stream",
    "training.micro_batch_size",
    "training.device",
    "training.compile",
    "training.encode_ahead",
    "recompute",
    "parallel",
    "checkpoint",
    "guard",
    "watch",
    "sampling",
    "evaluation",
    "tracking",
)
"""Keys (or sections) that do not change what a healthy run computes."""

DECIDES_ORDER = (
    "data.buckets",
    "data.frame_stride",
    "data.fps",
    "data.stills_from_videos",
    "data.max_crop",
    "data.stages",
    "data.weights",
    "data.repeats",
    "data.difficulty",
    "training.global_batch_size",
    "training.steps",
)
"""Keys that may change on resume where `data.on_change` says how to continue; of the last, because
other data may make the stages longer or shorter (a schedule then aims at the new end)."""


def load(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file and apply `a.b=c` overrides.

    Raises:
        RecipeError: the file is missing or not TOML, a key is unknown, or a value does not fit.
    """
    values = _read_toml(path)
    for override in overrides:
        _apply_override(values, override)
    return parse(values, source=str(path))


def changed(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """Another recipe, with `a.b=c` overrides applied.

    Raises:
        RecipeError: a key is unknown, or a value does not fit.
    """
    values = recipe.model_dump(exclude_none=True)
    for override in overrides:
        _apply_override(values, override)
    return parse(values, source="The changed recipe")


def parse(values: Mapping[str, Any], source: str) -> Recipe:
    """Validate nested values as a recipe; `source` names them in error messages.

    Raises:
        RecipeError: with every problem found, one per line.
    """
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        problems = _explain_all(error.errors())
        listed = f" {problems[0]}" if len(problems) == 1 else "\n  " + "\n  ".join(problems)
        raise RecipeError(f"{source}:{listed}") from None


def dump(recipe: Recipe) -> str:
    return tomli_w.dumps(recipe.model_dump(exclude_none=True))


def kept(recipe: Recipe) -> Recipe:
    once = {"on_change": "refuse", "retry_quarantined": False}
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=once)})


def flat(recipe: Recipe) -> dict[str, object]:
    """All values by their dotted keys, such as `training.steps`."""
    return dict(flatten(recipe.model_dump()))


def defaults(section: type[BaseModel] = Recipe, prefix: str = "") -> dict[str, object]:
    """The values by dotted keys of what a recipe need not say."""
    found: dict[str, object] = {}
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= defaults(kind, f"{prefix}{name}.")
        elif not field.is_required():
            found[f"{prefix}{name}"] = field.get_default(call_default_factory=True)
    return found


def differences(old: Recipe, new: Recipe) -> list[tuple[str, object, object]]:
    """Keys whose values differ and may not on resume, as (key, old value, new value).

    A run at a constant learning rate may be made longer; any other schedule has aimed at its end.
    """
    before, after = flat(old), flat(new)
    keys = sorted(before.keys() | after.keys())
    return [
        (key, before.get(key), after.get(key))
        for key in keys
        if before.get(key) != after.get(key)
        and not _may_change(key, new.data.on_change)
        and not (key == "training.steps" and _is_longer(old, new))
    ]


def _is_longer(old: Recipe, new: Recipe) -> bool:
    return old.optimizer.schedule == "constant" and new.training.steps > old.training.steps


def decides_order(key: str) -> bool:
    return is_among(key, DECIDES_ORDER)


def _may_change(key: str, on_change: str) -> bool:
    is_free = is_among(key, MAY_CHANGE_ON_RESUME)
    return is_free or (on_change != "refuse" and decides_order(key))


def is_among(key: str, keys: Sequence[str]) -> bool:
    return any(key == each or key.startswith(f"{each}.") for each in keys)


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        text = fsio.read_regular(path, _MAX_RECIPE_BYTES).removeprefix(codecs.BOM_UTF8)
        return tomllib.loads(text.decode())
    except FileNotFoundError:
        raise RecipeError(
            f"There is no recipe {path}. `{process.command()} init` writes one."
        ) from None
    except OSError as error:
        raise RecipeError(f"The recipe {path} cannot be read: {error.strerror}.") from error
    except RecursionError as error:
        raise RecipeError(
            f"The recipe {path} is not valid TOML: it is nested too deeply."
        ) from error
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"The recipe {path} is not valid TOML: it is no text in UTF-8."
        ) from error
    except ValueError as error:  # no TOML, or a number of thousands of digits
        raise RecipeError(f"The recipe {path} is not valid TOML: {_first(error)}.") from error


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, _, text = (part.strip() for part in override.partition("="))
    parts = [part.strip() for part in key.split(".")]
    if not text or not all(parts):
        raise RecipeError(
            f"--set {_short(override)}: expected key=value, such as training.steps=2000."
        )
    section = values
    for depth, part in enumerate(parts[:-1], start=1):
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise RecipeError(
                f"--set {_short(override)}: {_short('.'.join(parts[:depth]))} is a value, not a "
                "section; set it as a whole."
            )
    section[parts[-1]] = parse_value(text)


def parse_value(text: str) -> object:
    """A TOML value, or the text itself, so that quotes need no quotes in a shell."""
    try:
        values = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # the text is no TOML, or too long to be a number
        return text
    value: object = values.pop("value")
    is_plain = isinstance(value, bool | int | float | str | list | dict)  # and no date
    return value if is_plain and not values else text


def _explain_all(details: Sequence[ErrorDetails]) -> list[str]:
    blamed = {detail["loc"][:end] for detail in details for end in range(len(detail["loc"]))}
    said = (_explain(each) for each in details if not each["loc"] or each["loc"] not in blamed)
    return list(dict.fromkeys(said))[:_MAX_PROBLEMS]


def _explain(detail: ErrorDetails) -> str:
    parts = tuple(part for part in detail["loc"] if not _ALTERNATIVE.match(str(part)))
    location = _short(".".join(map(str, parts)))
    kind, message = detail["type"], _short(detail["msg"], 400)
    if len(parts) < len(detail["loc"]) and parts[-1:] == ("shift",):
        return f"{location} is {_short(repr(detail['input']))}; it should be {_SHIFT}."
    if kind == "extra_forbidden":
        return _explain_unknown(location, [part for part in parts if isinstance(part, str)])
    if kind == "missing":
        return f"{location} is missing, and it has no default."
    if kind == "value_error":
        return f"{message.removeprefix('Value error, ')}."
    expected = _EXPECTED.get(kind) or message.removeprefix("Input should ")
    if kind == "string_pattern_mismatch":
        expected = _PATTERNS[location.rpartition(".")[2]]
    if kind in ("too_short", "too_long"):
        expected = message.removeprefix("Tuple should ").partition(" after")[0]
    return f"{location} is {_short(_repr(detail['input']))}; it should {expected}."


def _repr(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # an integer of thousands of digits
        return "an integer of thousands of digits"


def _first(error: Exception) -> str:
    return _short(str(error).partition(";")[0].rstrip("."), 200)


def _short(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


_MAX_RECIPE_BYTES = 2**20
_MAX_PROBLEMS = 20
_SHIFT = 'a number above 0 and up to 1000, "release", "flux" or "opensora"'
# What pydantic appends to a key whose value may be of several types.
_ALTERNATIVE = re.compile(r"(constrained-\w+|literal\[.*\])$")

_EXPECTED = {
    "dict_type": "be a table of keys and values",
    "model_type": "be a table of keys and values",
    "path_type": "be a path in quotes",
    "tuple_type": "be a list",
    "string_type": "be a text in quotes",
}
"""What pydantic says in Python's words, by the kind of error."""

_NAME_PATTERN = "be a name of small letters, digits, - and _"
_PATTERNS = {
    "module": "be a module and a class, such as my_project.adapter:PoseAdapter",
    "name": _NAME_PATTERN,
    "[key]": _NAME_PATTERN,
}
"""What a text should be that a pattern does not fit, by the last part of its key."""


_OTHER_NAMES = dict.fromkeys(("batch_size", "batchsize"), "training.global_batch_size")
"""Keys by the names that other trainers give them."""


_IN_STEPS = "a run ends by training.steps; longtake data show says how many steps an epoch has."
_NOT_HERE = {
    **dict.fromkeys(("epochs", "max_epochs", "num_epochs", "num_train_epochs"), _IN_STEPS),
    "max_train_epochs": _IN_STEPS,
    "dropout": "no layer has dropout; captions have, by data.caption_dropout.",
}


def _explain_unknown(location: str, parts: list[str]) -> str:
    *section, name = parts
    if section in ([], ["training"], ["trainable"]) and name in _NOT_HERE:
        return f"{location} is not a key of a recipe; {_NOT_HERE[name]}"
    by_name = (
        ["evaluation", "presets"],
        ["data", "conditioning"],
        ["data", "captions"],
        ["trainable", "modules"],
    )
    if section[:2] in by_name:
        section = section[:2]  # whatever the preset, the input, catalog or module is called
    known = _known_keys()
    inside = [key for key in known if key.split(".")[:-1] == section]
    # Rather a similar key of the same section than an equal one elsewhere.
    near = (
        _OTHER_NAMES.get(name)
        or _most_similar(name, inside, cutoff=0.6)
        or _most_similar(name, known, cutoff=0.8)
    )
    names = sorted(key.rpartition(".")[2] for key in inside)
    hint = f"did you mean {near}?" if near else f"known there: {', '.join(names)}."
    return f"{location} is not a key of a recipe; {hint}"


def _most_similar(name: str, keys: Sequence[str], cutoff: float) -> str | None:
    """The key whose last part resembles a name, has it as a word, or is abbreviated by it."""
    by_name: dict[str, str] = {}
    for key in keys:
        by_name.setdefault(key.rpartition(".")[2], key)
    if close := nearest(name, by_name, cutoff):
        return by_name[close]
    for candidate in by_name:
        words = candidate.split("_")
        if name in words or name == "".join(word[0] for word in words):
            return by_name[candidate]
    return None


def _known_keys() -> list[str]:
    keys = []
    for name, field in Recipe.model_fields.items():
        keys.append(name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, _Section):
            keys += [f"{name}.{inner}" for inner in field.annotation.model_fields]
    keys += [f"data.buckets.{inner}" for inner in Bucket.model_fields]
    keys += [f"data.conditioning.{inner}" for inner in ConditioningSection.model_fields]
    keys += [f"data.captions.{inner}" for inner in CaptionsSection.model_fields]
    keys += [f"text.pooled.{inner}" for inner in PooledSection.model_fields]
    keys += [f"ema.profiles.{inner}" for inner in EmaProfile.model_fields]
    keys += [f"evaluation.presets.{inner}" for inner in PresetSection.model_fields]
    keys += [f"trainable.modules.{inner}" for inner in ModuleSection.model_fields]
    return [*keys, *(f"data.stages.{inner}" for inner in Stage.model_fields)]

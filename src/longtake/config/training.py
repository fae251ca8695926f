"""Keys of a training: noise levels, optimizer, averages, guard, watcher, processes, checkpoints."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from longtake.config.values import (
    MAX_BATCH,
    MAX_SECONDS,
    MAX_STEPS,
    FromList,
    Section,
    Shift,
    check_memory,
)

_Beta = Annotated[float, Field(ge=0, lt=1)]
_Share = Annotated[float, Field(ge=0, le=1)]
_CLASS = re.compile(r"[\w.]+:\w+")


class RecomputeSection(Section):
    """Which activations are computed again in the backward pass instead of being kept."""

    policy: Literal[
        "auto", "none", "all", "all-but-first", "alternate", "save-attention", "best"
    ] = "auto"
    """`best`: the fastest that fits `memory`; `auto`: `best` where `memory` is given, and on a GPU;
    else none."""
    memory: Annotated[str | None, BeforeValidator(check_memory)] = None
    """Memory of the GPU, such as "48GiB" or "48GB". Unset: what is free on it when training starts,
    the least of all ranks'."""
    reserve: float = Field(0.07, ge=0, lt=1)
    """Share of the GPU's memory that is left to what no plan knows: the CUDA context, libraries'
    workspaces and fragmentation. With several GPUs 1.5 GiB of each are left to NCCL beside it."""
    host_memory: Annotated[str | None, BeforeValidator(check_memory)] = None
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


class FlowSection(Section):
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
    sigma_range: Annotated[tuple[_Share, _Share], FromList] = (0.0, 1.0)
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


class OptimizerSection(Section):
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
    betas: Annotated[tuple[_Beta, _Beta], FromList] = (0.9, 0.99)
    weight_decay: float = Field(0.0, ge=0)
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    """What follows the warm-up: a plateau, or a descent to `min_lr_ratio` at the last step."""
    warmup_steps: int = Field(100, ge=0, le=MAX_STEPS)
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


class TrainingSection(Section):
    """How long, how much at once, and on what."""

    steps: int = Field(gt=0, le=MAX_STEPS)
    """Optimizer updates."""
    global_batch_size: int = Field(gt=0, le=MAX_BATCH)
    """Clips per update over all processes."""
    micro_batch_size: int | None = Field(None, gt=0, le=MAX_BATCH)
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


class EmaProfile(Section):
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


class EmaSection(Section):
    """Running averages of the weights, kept in fp32; videos are sampled from one of them."""

    decay: float = Field(0.999, ge=0, lt=1)
    """Of the one average that there is where no profiles are given; its name is `main`. 0: there is
    none, and videos are sampled from the weights themselves."""
    profiles: Annotated[tuple[EmaProfile, ...], FromList] = ()
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


class GuardSection(Section):
    """What is done about a run that diverges."""

    mode: Literal["act", "report", "off"] = "act"
    """`report`: report and continue; `off`: look only for NaN and inf. In both, a
    loss or gradient that is no number stops the run."""
    window: int = Field(128, ge=32, le=100_000)
    """Steps before, with which a new one is compared; what changes slowly, with four times as
    many."""
    warmup_steps: int = Field(64, ge=16, le=MAX_STEPS)
    """Steps at the beginning of a run, and of a stage, in which nothing is usual yet: only NaN
    and inf are looked for there, and in a later stage's the norm of the weights."""
    compare_replicas_every: int = Field(10, ge=0, le=MAX_STEPS)
    """Steps after which ranks that hold the same trained weights compare them to the bit, besides
    before each checkpoint; 0: never. Where copies are unlike, a GPU computes wrongly: the run rolls
    back to its newest checkpoint, and names the one that is alone (of two: both)."""
    max_rollbacks: int = Field(3, ge=0, le=MAX_STEPS)
    """Rollbacks without progress before the run stops. Progress is 500 steps without trouble beyond
    the furthest one that a rollback gave up."""


class WatchSection(Section):
    """How hangs are found, and what is done about them."""

    enabled: bool = True
    action: Literal["report", "restart-worker", "kill"] = "report"
    """`restart-worker`: end a decode worker that hangs; its clip is read again, and the run
    continues. `kill`: that too, and end a rank that hangs; torchrun then starts all ranks again."""
    min_seconds: float = Field(6.0, gt=0, le=MAX_SECONDS)
    """A stall: a phase lasts so long, and 5 times as long as it ever has in this launch."""
    hook: str | None = None
    """A shell command that is run at an alert, which it finds on stdin as one line of JSON. Put no
    secret into it: the run keeps the recipe. It finds the environment of the training."""
    exporter_host: str = "127.0.0.1"
    """Address at which the exporter listens; `0.0.0.0` for a Prometheus on another host. It tells
    host names, run paths and steps to anybody who asks, so keep it inside a closed network."""
    exporter_port: int | None = Field(None, gt=0, lt=65536)
    """Where Prometheus finds each node's watcher; None: nowhere."""


class ParallelSection(Section):
    """What several processes share."""

    strategy: Literal["replicate", "shard", "hybrid"] = "replicate"
    """`replicate`: every process holds the model; `shard`: each holds a part of it; `hybrid`: each
    holds a part, and groups of `shard_size` processes hold all of it between them."""
    shard_size: int | None = Field(None, gt=1, le=MAX_BATCH)
    """Of `hybrid`: processes that hold one copy of the model; unset: those of a node."""
    param_dtype: Literal["fp32", "bf16"] = "fp32"
    """What sharded weights kept in fp32 are gathered in for the arithmetic where it is bf16: `bf16`
    halves what ranks send each other, and rounds norms' weights too. Gradients are reduced in fp32
    either way; with `replicate` nothing is gathered."""
    context: int = Field(1, gt=0, le=MAX_BATCH)
    """Processes that share the tokens of each clip, for clips too long for one GPU; it must
    divide the number of processes. Of the model's heads it shares out what divides; keys and values
    of the rest go around a ring of processes."""
    timeout_seconds: float = Field(600.0, ge=1, le=MAX_SECONDS)
    """Of a collective that waits for another process: then the launch ends, with an error that
    names process group and operation. Checkpoints are written in one such group."""
    long_timeout_seconds: float = Field(86_400.0, ge=1, le=MAX_SECONDS)
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


class CheckpointSection(Section):
    """When state is saved, and how much of it is kept."""

    every: int = Field(500, gt=0, le=MAX_STEPS)
    """Steps between checkpoints; the last step is always saved."""
    minutes: float | None = Field(None, gt=0, le=MAX_SECONDS)
    """Also save when the last checkpoint was begun so many minutes ago: no more training than that
    is lost, however long a step takes."""
    keep: int = Field(3, gt=0, le=MAX_STEPS)
    """Newest checkpoints that are kept."""
    keep_every: int | None = Field(None, gt=0, le=MAX_STEPS)
    """Steps of which every multiple's checkpoint is kept for good."""


class TrackingSection(Section):
    """Which trackers are sent metrics, events and evaluations."""

    tensorboard: bool = True
    wandb: Literal["off", "offline", "online"] = "off"
    """`offline` keeps all of it in the run directory's `wandb`, for `wandb sync`."""
    project: str = Field("longtake", min_length=1)
    """Of W&B, which takes the entity from WANDB_ENTITY, and the run's name from WANDB_NAME; without
    it the run is named like its directory."""

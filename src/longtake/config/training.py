"""Recipe keys of training: noise, optimizer, averages, guard, watcher, processes, checkpoints."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from longtake.config.values import (
    MAX_BATCH,
    MAX_SECONDS,
    MAX_STEPS,
    FromList,
    Section,
    Shift,
    check_memory,
    in_words,
)

_Beta = Annotated[float, Field(ge=0, lt=1)]
_Share = Annotated[float, Field(ge=0, le=1)]


class RecomputeSection(Section):
    """Activation checkpointing: the memory budget, and the activations that are recomputed."""

    policy: Literal[
        "auto", "none", "all", "all-but-first", "alternate", "save-attention", "best"
    ] = "auto"
    """Recompute policy. `best`: the fastest mixture of policies that fits `memory`; `auto`: `best`
    on a GPU or if `memory` is set, else `none`."""
    memory: Annotated[str | None, BeforeValidator(check_memory)] = None
    """Memory of the GPU, such as "48GiB" or "48GB". Unset: the free memory when training starts,
    the minimum over all ranks."""
    reserve: float = Field(0.07, ge=0, lt=1)
    """Fraction of the GPU's memory reserved for use that a plan cannot know: the CUDA context,
    workspaces of libraries and fragmentation. With several GPUs, 1.5 GiB of each are also reserved
    for NCCL."""
    host_memory: Annotated[str | None, BeforeValidator(check_memory)] = None
    """Host RAM that a process may use for streamed weights, offloaded activations and checkpoints
    being written, such as "64GiB". Unset: 60 % of this computer's RAM if it has a GPU, else
    64GiB."""
    device: str | None = None
    """The GPU to plan for: a name such as a100-80gb or rtx4090, or memory and dense bf16 speed,
    such as "24GiB,165TFLOPS". Unset: the GPU of this computer."""

    @model_validator(mode="after")
    def _has_a_budget(self) -> Self:
        if self.policy == "best" and self.memory is None:
            raise ValueError('recompute.policy = "best" needs recompute.memory, such as "48GiB"')
        return self

    def chosen(self) -> str:
        if self.policy != "auto":
            return self.policy
        # On a GPU the planner first sets `memory` to the free memory.
        return "none" if self.memory is None else "best"


class FlowSection(Section):
    """The noise levels (sigmas) that are trained; sigma = 1 is pure noise."""

    timestep_sampling: Literal["uniform", "logit_normal", "mode", "cosmap"] = "logit_normal"
    logit_mean: float = Field(0.0, ge=-1000, le=1000)
    """Mean of the logit-normal distribution of noise levels; above 0 leans toward noise."""
    logit_std: float = Field(1.0, gt=0, le=1000)
    # Outside of -1 and 2 / (pi - 2) = 1.7519 the distribution has no monotone quantile function;
    # see `mode` in flow/timesteps.py.
    mode_scale: float = Field(1.29, ge=-1, le=1.7519)
    """Scale of the distribution `mode` of noise levels; above 0 samples more in the middle, below 0
    at the ends."""
    shift: Shift = 1.0
    """Moves the sampled sigmas toward noise: a factor, or a rule that depends on the resolution.
    `release`: the pretrained model's factor for sampling, capped at the number of tokens that its
    rule is made for; LTX-2 uses its own trainer's distribution. `flux` is capped at 4096 tokens in
    training."""
    loss_mask: str | None = None
    """Name of a mask in `data.conditioning` that weights the loss: 1 where it is white,
    `loss_mask_floor` where it is black. The model does not get this mask."""
    loss_mask_floor: float = Field(0.0, ge=0, le=1)
    """Weight of the loss outside of the mask; at 0 nothing is learnt there."""
    sigma_range: Annotated[tuple[_Share, _Share], FromList] = (0.0, 1.0)
    """Train only sigmas from the first to the second number, with the same distribution within,
    such as [0.875, 1.0] for a high-noise expert."""

    @model_validator(mode="after")
    def _range_ascends(self) -> Self:
        low, high = self.sigma_range
        if not low < high:
            raise ValueError(
                f"flow.sigma_range is [{low:g}, {high:g}]; it should ascend, such as [0.5, 1.0]"
            )
        return self


class ObjectiveSection(Section):
    """What the model learns: the loss of each sample."""

    kind: str = Field(
        "flow_matching", pattern=r"^(flow_matching|guided_target|prior_preservation|[\w.]+:\w+)$"
    )
    """Kind of objective. `flow_matching`: the velocity of the path from clip to noise;
    `guided_target`: that velocity, moved away from the model's own prediction without caption by
    `options.scale`, for models whose guidance is distilled; `prior_preservation`: for the clips of
    `options.catalogs` the prediction of the model without its adapter, with `options.weight`; or an
    Objective of your own, such as "my_project.losses:Preference". See docs/guides/objectives.md."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the objective's class, such as `scale` of `guided_target`."""
    inputs: Annotated[tuple[str, ...], FromList] = ()
    """Names in `data.conditioning` that only the objective reads, such as the worse clip of a
    pair. They are read and encoded in training; sampling does not ask for them."""


class RateRule(Section):
    """Learning rate of some of the trained weights."""

    layers: Annotated[tuple[str, ...], FromList] = Field(min_length=1)
    """Blocks, layers or weights: last parts of their names, or patterns such as `blocks.[0-9].*`,
    or `*.lora_B.*` for the second factors of LoRA (LoRA+). Of several rules that name a weight the
    first one holds."""
    factor: float = Field(gt=0, le=1e6)
    """Their learning rate as a multiple of the optimizer's own."""


class OptimizerSection(Section):
    """The optimizer, its learning-rate schedule and gradient clipping."""

    kind: str = Field("adamw", pattern=r"^(adamw|muon|adamw8bit|prodigy|[\w.]+:\w+)$")
    """Kind of optimizer: `adamw`; `muon` trains the blocks' matrices with Muon and all other
    weights with AdamW; `adamw8bit` keeps its states in 8 bits (torchao has to be installed);
    `prodigy` finds the learning rate itself; or a torch.optim.Optimizer of your own, such as
    "my_project.optim:Lion", which needs fp32 weights."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of your own optimizer's class. It also gets `lr` and, if it takes them,
    `betas`, `weight_decay` and, where it is set, `eps` from the keys of this section."""
    offload: bool = False
    """Keep AdamW's states, and fp32 copies of bf16 weights, in host RAM and update them there."""
    fused_backward: bool = False
    """Update each weight within the backward pass, as soon as its gradient is complete, and free
    the gradient: it saves the 4 bytes per trained weight that all gradients take. Their norm is
    known only afterwards, so they are not clipped (`max_grad_norm` has to be 1e9), and the guard
    cannot skip an update: it rolls back instead. With `adamw` or `adamw8bit`, in one process,
    without gradient accumulation."""
    learning_rate: float = Field(1e-4, gt=0)
    """Learning rate of AdamW. For Prodigy, a factor on the rate that it finds; unset: 1."""
    muon_learning_rate: float = Field(0.02, gt=0)
    rules: Annotated[tuple[RateRule, ...], FromList] = ()
    """Learning rates of some of the weights, with `adamw`, `adamw8bit` or `muon`."""
    betas: Annotated[tuple[_Beta, _Beta], FromList] = (0.9, 0.99)
    eps: float | None = Field(None, gt=0, le=1)
    """Number that AdamW and Prodigy add to the denominator of their steps, and an optimizer of your
    own that has this argument. Unset: 1e-8, or the default of your own class."""
    weight_decay: float = Field(0.0, ge=0)
    schedule: Literal[
        "constant", "cosine", "cosine_restarts", "linear", "polynomial", "inverse_sqrt"
    ] = "cosine"
    """Learning rate after the warm-up: constant, or a descent to `min_lr_ratio` times its value
    at the last step. `cosine_restarts` descends `schedule_cycles` times, each time from the full
    value (SGDR); `polynomial` by the power `schedule_power`; `inverse_sqrt` by 1 / sqrt(t), where t
    counts in warm-ups (without one, in 10,000 steps): it does not depend on the last step, and
    stays at `min_lr_ratio` once it is there."""
    schedule_cycles: int = Field(4, ge=1, le=MAX_STEPS)
    """Number of descents of `cosine_restarts`, all of the same length; the last one ends with the
    run. Other schedules ignore it."""
    schedule_power: float = Field(1.0, gt=0, le=100)
    """Power of the share of steps that `polynomial` has left; 1 descends like `linear`. Other
    schedules ignore it."""
    warmup_steps: int = Field(100, ge=0, le=MAX_STEPS)
    """Steps at the beginning of the run in which the learning rate rises to its value."""
    warmup_ratio: float | None = Field(None, ge=0, lt=1)
    """Instead of `warmup_steps`: the warm-up as a share of `training.steps`, such as 0.05.
    `warmup_steps` at its default, even if written down, counts as unset beside it."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients with a larger norm are scaled down to this norm; 1e9 disables clipping."""

    @field_validator("max_grad_norm", mode="before")
    @classmethod
    def _clips_something(cls, value: Any) -> Any:
        # Other trainers read 0 as "no clipping".
        if value == 0:
            raise ValueError("it would scale every gradient to 0; to clip none, set 1e9")
        return value

    def num_warmup_steps(self, steps: int) -> int:
        """Return the steps of the warm-up in a run of this many steps."""
        return self.warmup_steps if self.warmup_ratio is None else round(self.warmup_ratio * steps)

    def depends_on_end(self) -> bool:
        """Return True if the learning rates of a run's steps depend on how long it is."""
        ends = self.schedule not in ("constant", "inverse_sqrt")
        return ends or self.warmup_ratio is not None

    @model_validator(mode="after")
    def _warms_up_once(self) -> Self:
        # The recipe that a run keeps sets every key: the default is known by its value.
        is_default = self.warmup_steps == type(self).model_fields["warmup_steps"].default
        if self.warmup_ratio is not None and not is_default:
            raise ValueError(
                f"optimizer.warmup_steps = {self.warmup_steps} and optimizer.warmup_ratio = "
                f"{self.warmup_ratio:g} both say how long the warm-up is: leave one of them out"
            )
        return self

    # Before validation, as the section is frozen afterwards.
    @model_validator(mode="before")
    @classmethod
    def _prodigy_begins_with_1(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("kind") == "prodigy":
            return {"learning_rate": 1.0, **values}
        return values

    @model_validator(mode="after")
    def _suits_its_kind(self) -> Self:
        if self.offload and self.kind != "adamw":
            raise ValueError(
                f'optimizer.offload works with optimizer.kind = "adamw", not "{self.kind}", whose '
                "states stay on the GPU: choose one of the two"
            )
        if self.fused_backward and self.kind not in ("adamw", "adamw8bit"):
            raise ValueError(
                "optimizer.fused_backward updates each weight alone, but optimizer.kind = "
                f'"{self.kind}" may need several gradients at once: take adamw or adamw8bit, or '
                "leave optimizer.fused_backward out"
            )
        if self.fused_backward and self.max_grad_norm < 1e9:
            raise ValueError(
                f"optimizer.max_grad_norm = {self.max_grad_norm:g} clips by the norm of all "
                "gradients, which optimizer.fused_backward does not wait for: set it to 1e9, which "
                "clips none, or leave optimizer.fused_backward out"
            )
        if self.rules and self.kind not in ("adamw", "adamw8bit", "muon"):
            raise ValueError(
                f'optimizer.rules needs optimizer.kind = "adamw", "adamw8bit" or "muon", and not '
                f'"{self.kind}": take one of them, or leave the rules out'
            )
        if self.options and ":" not in self.kind:
            raise ValueError(
                f"optimizer.options ({', '.join(self.options)}) are arguments of an optimizer of "
                f'your own, but optimizer.kind is "{self.kind}"; remove them'
            )
        return self


class TrainingSection(Section):
    """Length of the training, batch sizes, device and precision."""

    # The default stands for a number that the data decide: see `Recipe.with_steps`.
    steps: int = Field(0, gt=0, le=MAX_STEPS)
    """Number of optimizer updates. Required without `epochs`."""
    epochs: int | None = Field(None, gt=0, le=MAX_STEPS)
    """Instead of `steps`: the run's length as a number of epochs, in each of which every clip is
    trained once or, with `data.repeats`, as often as it says. The run keeps the number of steps
    that this makes in its recipe.toml, and on changed data computes it anew. Not with
    `data.stages`, which have epochs of their own, nor with weights of catalogs."""
    global_batch_size: int = Field(gt=0, le=MAX_BATCH)
    """Number of clips per update, over all processes."""
    micro_batch_size: int | None = Field(None, gt=0, le=MAX_BATCH)
    """Number of clips per forward pass and process; gradients accumulate up to the batch size."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Precision of the arithmetic; master weights, optimizer and EMA stay in fp32."""
    compile: bool | Literal["auto"] = "auto"
    """Compile each block (torch.compile): faster steps after a first one that takes minutes.
    `auto`: on GPUs only, and a block that cannot be compiled runs as it is."""
    encode_ahead: bool | Literal["auto"] = "auto"
    """Without `data.cache`: encode the clips and captions of the next micro-batch on a separate
    CUDA stream while the model computes. Results are the same; it takes memory (`longtake plan`).
    `auto`: if the memory plan leaves enough memory; never on a CPU."""

    @model_validator(mode="after")
    def _has_a_length(self) -> Self:
        if not self.steps and self.epochs is None:
            raise ValueError(
                "training.steps is missing, and it has no default: give it, or training.epochs"
            )
        return self


class EmaProfile(Section):
    """One running average of the weights: exponential (`decay`) or power function (`sigma_rel`)."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    """Name of the profile for `--profile`, and of its folder in checkpoints."""
    decay: float | None = Field(None, ge=0, lt=1)
    """Decay of an exponential average; its half-life is ln 0.5 / ln decay updates."""
    # Equal weights over the whole training, the widest average of this kind, have a width of 1 /
    # sqrt(12) = 0.289.
    sigma_rel: float | None = Field(None, gt=0, lt=0.28)
    """Width of a power-function average (EDM2): the standard deviation of its weights over time as
    a fraction of the training so far, such as 0.05."""

    @model_validator(mode="after")
    def _is_one_kind(self) -> Self:
        if (self.decay is None) == (self.sigma_rel is None):
            raise ValueError(f"EMA profile {self.name} needs either decay or sigma_rel")
        return self


class EmaSection(Section):
    """Running averages of the weights, kept in fp32; videos are sampled from one of them."""

    decay: float = Field(0.999, ge=0, lt=1)
    """Decay of the only running average, called `main`, if no profiles are given. 0: no average;
    videos are sampled from the raw weights."""
    profiles: Annotated[tuple[EmaProfile, ...], FromList] = ()
    """Several running averages of the weights, which replace `main`. The first is sampled and
    exported unless the command or the preset names another."""

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
    """Detection of divergence, and the reaction to it."""

    mode: Literal["act", "report", "off"] = "act"
    """Reaction to a divergence. `act`: skip updates and roll back; `report`: report and continue;
    `off`: check only for NaN and inf. With `report` and `off`, a loss or gradient of NaN or inf
    stops the run."""
    window: int = Field(128, ge=32, le=100_000)
    """Number of earlier steps with which the guard compares a new one; for quantities that change
    slowly, four times as many."""
    warmup_steps: int = Field(64, ge=16, le=MAX_STEPS)
    """Steps at the beginning of a run and of each stage in which the guard has no baseline yet:
    only NaN and inf are detected, and in later stages also the norm of the weights."""
    compare_replicas_every: int = Field(10, ge=0, le=MAX_STEPS)
    """Steps between bitwise comparisons of the trained weights of ranks that hold the same ones;
    they are also compared before each checkpoint. 0: never. If copies differ, a GPU computes
    wrongly: the run rolls back to its newest checkpoint, and names the rank that differs from the
    others (of two ranks: both)."""
    max_rollbacks: int = Field(3, ge=0, le=MAX_STEPS)
    """Rollbacks without progress before the run stops. Progress is 500 steps without an anomaly
    beyond the furthest step that was rolled back."""


class WatchSection(Section):
    """Detection of hangs, and the reaction to them."""

    enabled: bool = True
    action: Literal["report", "restart-worker", "kill"] = "report"
    """Reaction to a hang. `restart-worker`: kill a decode worker that hangs; its clip is read
    again, and the run continues. `kill`: also kill a rank that hangs; torchrun then restarts all
    ranks."""
    min_seconds: float = Field(6.0, gt=0, le=MAX_SECONDS)
    """A phase of a process's work (data, forward, save ...) is a stall if it lasts at least this
    long, and at least 5 times its longest duration in this launch."""
    hook: str | None = None
    """A shell command that is run at an alert, with the alert on stdin as one line of JSON and the
    environment variables of the training. Put no secret into it: the run keeps the recipe."""
    exporter_host: str = "127.0.0.1"
    """Address at which the Prometheus exporter listens; `0.0.0.0` for a Prometheus on another host.
    Anybody who can connect reads host names, run paths and steps: use it in a closed network
    only."""
    exporter_port: int | None = Field(None, gt=0, lt=65536)
    """Port of the Prometheus exporter of each node's watcher; unset: no exporter."""


class ParallelSection(Section):
    """Distribution of the model and of each clip over several processes."""

    strategy: Literal["replicate", "shard", "hybrid"] = "replicate"
    """Placement of the model. `replicate`: every process holds the whole model; `shard`: each holds
    a part of it; `hybrid`: the model is sharded within groups of `shard_size` processes, and
    each group holds a copy."""
    shard_size: int | None = Field(None, gt=1, le=MAX_BATCH)
    """Number of processes that hold one copy of the model with `hybrid`; unset: those of a node."""
    param_dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type in which sharded fp32 weights are gathered for bf16 arithmetic: `bf16` halves the
    communication, and also rounds the weights of norms. Gradients are reduced in fp32 either way;
    with `replicate` nothing is gathered."""
    context: int = Field(1, gt=0, le=MAX_BATCH)
    """Number of processes that share the tokens of each clip (context parallelism), for clips too
    long for one GPU; it must divide the number of processes. As many of them as possible share out
    the attention heads (Ulysses); keys and values go around a ring of the rest."""
    timeout_seconds: float = Field(600.0, ge=1, le=MAX_SECONDS)
    """Longest wait of a collective for another process. After it the launch ends with an error
    that names process group and operation; this includes the writing of checkpoints."""
    long_timeout_seconds: float = Field(86_400.0, ge=1, le=MAX_SECONDS)
    """Longest wait of all ranks for work that only some do: downloads, the cache, samples."""

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
    """The intervals of checkpoints, and the number that is kept."""

    every: int = Field(500, gt=0, le=MAX_STEPS)
    """Steps between checkpoints; the last step is always saved."""
    every_epochs: int | None = Field(None, gt=0, le=MAX_STEPS)
    """Instead of `every`: epochs between checkpoints, counted in each stage, whose end is saved
    too. An epoch is saved after its last whole batch. `every` at its default, even if written down,
    counts as unset beside it."""
    minutes: float | None = Field(None, gt=0, le=MAX_SECONDS)
    """Also save this many minutes after the last checkpoint was begun, which limits the training
    lost by a failure, however long a step takes."""
    keep: int = Field(3, gt=0, le=MAX_STEPS)
    """Number of newest checkpoints to keep."""
    keep_every: int | None = Field(None, gt=0, le=MAX_STEPS)
    """Checkpoints at multiples of this number of steps are never deleted."""

    export: Literal["comfyui", "diffusers", "peft"] | None = None
    """At each save also write the trained LoRA for another tool, as `longtake export` does: a file
    for ComfyUI or for `load_lora_weights` of diffusers, or a folder for peft. They are in the
    folder `exports` of the run, of the first average if the run keeps any."""
    export_dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Data type of these files' weights."""
    export_keep: int | None = Field(None, gt=0, le=MAX_STEPS)
    """Number of newest exports to keep; unset: all. A file that was changed since it was written is
    never deleted."""

    @model_validator(mode="after")
    def _has_one_interval(self) -> Self:
        # The recipe that a run keeps sets every key: the default is known by its value.
        if self.every_epochs and self.every != type(self).model_fields["every"].default:
            raise ValueError(
                f"checkpoint.every = {self.every} steps and checkpoint.every_epochs = "
                f"{self.every_epochs} both say when to save: leave one of them out; "
                "checkpoint.minutes also saves in between"
            )
        return self

    def interval(self) -> str:
        """Return the interval of checkpoints in words, such as "500 steps"."""
        return in_words(self.every, self.every_epochs)


class TrackingSection(Section):
    """The trackers that get metrics, events and evaluations."""

    tensorboard: bool = True
    wandb: Literal["off", "offline", "online"] = "off"
    """Tracking by W&B: `offline` writes to the folder `wandb` of the run directory, for `wandb
    sync`."""
    project: str = Field("longtake", min_length=1)
    """Project in W&B. The entity is taken from WANDB_ENTITY, and the run's name from WANDB_NAME
    (unset: the name of the run directory)."""

"""The plan of a step's memory, as the planner makes it; torch-free.

A launch keeps it in plan.json and in its event `memory_planned`, from which the board reads it.
`longtake plan` prints the same classes. Numbers of bytes are checked when they are read, as another
user may have written the file.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, TypeAdapter

from longtake import fsio
from longtake.config import Bucket
from longtake.errors import RecordError
from longtake.run_dir import EventKind

_T = TypeVar("_T")
_Name = Annotated[str, Field(max_length=300)]
_Note = Annotated[str, Field(max_length=4000)]
_Signed = Annotated[int, Field(ge=-(2**53), le=2**53)]

Activations = Literal["keep", "save-attention", "recompute", "offload", "offload-input"]
"""The fate of tensors that a block's forward pass leaves to its backward pass."""
BlockWeights = Literal["keep", "stream", "fp8", "int8", "nf4"]
"""The place and kind of a block's frozen weights: on the device as they are; in the computer's
memory, copied when the block that runs before it begins and dropped when its pass ends; or
quantised on the device, and made again for each product."""


@dataclass(frozen=True, slots=True)
class BlockOption:
    """Two independent choices about a block: its activations, and its frozen weights."""

    activations: Activations = "keep"
    weights: BlockWeights = "keep"

    def __str__(self) -> str:
        if self.weights == "keep":
            return self.activations
        return f"{self.activations}+{self.weights}"


KEEP = BlockOption()
Options = Mapping[_Name, BlockOption]
"""The option of each block, by the block's name; blocks that are not named are kept."""


def blocks_by_option(options: Options) -> list[tuple[BlockOption, int, str]]:
    """Group blocks by their option: it, how many have it, and their names as ranges."""
    names: dict[BlockOption, list[str]] = {}
    for name, option in options.items():
        names.setdefault(option, []).append(name)
    return [(option, len(blocks), name_ranges(blocks)) for option, blocks in names.items()]


def name_ranges(names: Sequence[str]) -> str:
    """Shorten names: blocks.0, blocks.1 and blocks.3 are blocks.0-1, 3."""
    ranges: list[tuple[str, int, int]] = []  # what is before the number, the first and the last
    for name in names:
        front, _, end = name.rpartition(".")
        number = int(end) if end.isdigit() else -1
        if ranges and ranges[-1][::2] == (front, number - 1):
            ranges[-1] = front, ranges[-1][1], number
        else:
            ranges.append((front if number >= 0 else name, number, number))
    texts = []
    for (before, *_), (front, first, last) in pairwise([("", -1, -1), *ranges]):
        numbers = "" if first < 0 else f"{first}-{last}" if last > first else str(first)
        texts.append(numbers if numbers and front == before else f"{front}.{numbers}".rstrip("."))
    return ", ".join(texts)


@dataclass(frozen=True)
class OptimizerBytes:
    """Memory of a model's optimizers, without its weights and gradients."""

    device: fsio.Count  # running averages, and fp32 copies of weights that are not fp32
    host: fsio.Count  # the same, where it is kept in host memory instead
    step: fsio.Count  # the most that an update takes on the device for a while


@dataclass(frozen=True)
class StaticMemory:
    """Bytes in a device's memory under every policy."""

    weights: fsio.Count
    """Bytes of the transformer, frozen weights included. If sharded: this process's shards, and
    what is gathered at a time: three blocks, and what is outside of blocks."""
    elsewhere: _Signed
    """Weights of the whole model that are not here, less what is gathered beside the shards."""
    gradients: fsio.Count
    reduced: fsio.Count  # a copy of gradients in which copies of the model all-reduce theirs
    optimizer: OptimizerBytes
    inputs: fsio.Count  # latents, noise and conditioning of one micro-batch
    inputs_ahead: fsio.Count  # the next micro-batch's, which are copied to a GPU meanwhile
    ema: fsio.Count  # the running averages, each in fp32
    encoders: fsio.Count  # codec and text encoders; none where data.cache keeps what they give
    encoding: fsio.Count  # what encoders need at work, where they work one micro-batch ahead
    pinned_beside: fsio.Count  # of host memory, see `memory.pinned_beside_bytes`

    @property
    def resident(self) -> int:
        ahead = self.inputs_ahead + self.encoding
        return self.optimizer.device + self.ema + self.encoders + ahead

    @property
    def update_bytes(self) -> int:
        fixed = self.weights + self.gradients + self.inputs + self.resident
        return fixed + max(self.optimizer.step, self.reduced)


@dataclass(frozen=True)
class PolicyForecast:
    """The memory and time of a step under one policy."""

    name: _Name
    forward_end_bytes: fsio.Count  # when the backward pass begins: weights, inputs, activations
    peak_bytes: fsio.Count  # the most in forward and backward pass of the first step
    step_peak_bytes: fsio.Count  # the most in any later step, with all that stays in memory
    overhead: fsio.Finite | None  # share that a step takes longer than without recompute, if known
    fits: bool | None  # None without a budget
    host_bytes: fsio.Count = 0  # of weights and activations in host memory
    link_share: fsio.Finite = 0.0  # of a step, in which the device waits for copies from and to it


@dataclass(frozen=True)
class MemoryPlan:
    """The option of each block of a run, and the memory of a step."""

    policy: _Name
    options: Options
    memory: PolicyForecast | None  # None: nothing is recomputed, and there is no budget
    activation_bytes: _Signed | None  # predicted peak of both passes, without the weights
    bucket: Bucket  # the shape of clips that was planned for
    notes: Sequence[_Note]  # traps that cost memory or time, but keep nothing from training
    budget_bytes: fsio.Count | None = None  # what tensors may take of the device
    encodes_ahead: bool = False  # see `training.encode_ahead`
    compared: Sequence[PolicyForecast] = ()  # the policies that the choice was made from
    fixed: StaticMemory | None = None  # in memory under every policy, by part

    def per_block(self) -> dict[str, int]:
        """Count the blocks of each option."""
        return dict(Counter(map(str, self.options.values())))

    def as_event(self) -> dict[str, Any]:
        """Fields of the event `memory_planned`: those of this class."""
        fields: dict[str, Any] = TypeAdapter(MemoryPlan).dump_python(self, mode="json")
        return fields


@dataclass(frozen=True)
class KeptPlan:
    """The file plan.json, without what only a next launch reads."""

    plan: MemoryPlan


@dataclass(frozen=True)
class MeasuredStep:
    """The event `memory_measured`: both passes of a step, beside the plan of them."""

    step: fsio.Count
    predicted_gib: fsio.Finite
    measured_gib: fsio.Finite
    error: fsio.Finite  # predicted / measured - 1


def newest_plan(events: Sequence[Mapping[str, Any]]) -> MemoryPlan | None:
    """Read the newest plan among a run's events; None if no launch planned."""
    return next(_newest(events, "memory_planned", MemoryPlan), None)


def newest_measurements(events: Sequence[Mapping[str, Any]]) -> Iterator[MeasuredStep]:
    """Read the measurements among a run's events, the newest first."""
    return _newest(events, "memory_measured", MeasuredStep)


def _newest(events: Sequence[Mapping[str, Any]], kind: EventKind, of: type[_T]) -> Iterator[_T]:
    for event in reversed(events):
        if event["event"] == kind:
            with suppress(RecordError):
                yield fsio.parse_record(json.dumps(event).encode(), of, Path("events.jsonl"))

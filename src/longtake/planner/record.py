"""Records of a memory plan, as the planner writes and others read them; imports no torch.

A launch keeps its plan in plan.json and in the event `memory_planned`, which the board reads;
`longtake plan` prints the same classes. Numbers of bytes are validated on reading, since another
user may have written the file.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import Field, TypeAdapter

from longtake import fsio
from longtake.config import Bucket, Quantization
from longtake.errors import RecordError
from longtake.formatting import number_ranges
from longtake.run_dir import EventKind

_T = TypeVar("_T")
_Name = Annotated[str, Field(max_length=300)]
_Note = Annotated[str, Field(max_length=4000)]
# Integers up to 2**53 are exact in every JSON reader.
_Signed = Annotated[int, Field(ge=-(2**53), le=2**53)]

Activations = Literal["keep", "save-attention", "recompute", "offload", "offload-input"]
"""Treatment of the activations that a block's forward pass leaves for its backward pass."""
BlockWeights = Literal["keep", "stream", "fp8", "int8", "nf4", "stream-int8", "stream-nf4"]
"""Treatment of a block's frozen weights: `keep` leaves them on the device; `stream` keeps them in
host memory, and copies them while the block before runs; `fp8`, `int8` and `nf4` quantise them on
the device, and dequantise them for each product; the last two do both."""


ON_DEVICE: Mapping[BlockWeights, BlockWeights] = {
    "stream": "keep",
    "stream-int8": "int8",
    "stream-nf4": "nf4",
}
"""What streamed weights are on the device: the same format, not streamed."""


def is_streamed(weights: BlockWeights) -> bool:
    return weights.startswith("stream")


def quantization_of(weights: BlockWeights) -> Quantization | None:
    """Return the number format of a treatment's weights; None for exact ones."""
    kind = weights.removeprefix("stream").removeprefix("-")
    return next((each for each in get_args(Quantization) if each == kind), None)


@dataclass(frozen=True, slots=True)
class BlockOption:
    """Options of one block: the treatment of its activations, and that of its frozen weights."""

    activations: Activations = "keep"
    weights: BlockWeights = "keep"

    def __str__(self) -> str:
        if self.weights == "keep":
            return self.activations
        return f"{self.activations}+{self.weights}"


KEEP = BlockOption()
Options = Mapping[_Name, BlockOption]
"""Option of each block (treatment of activations and weights) by the block's name; a block without
an entry is kept."""


def blocks_by_option(options: Options) -> list[tuple[BlockOption, int, str]]:
    """Group blocks with the same option: option, number of blocks, and their names as ranges."""
    names: dict[BlockOption, list[str]] = {}
    for name, option in options.items():
        names.setdefault(option, []).append(name)
    return [(option, len(blocks), name_ranges(blocks)) for option, blocks in names.items()]


def name_ranges(names: Sequence[str]) -> str:
    """Shorten names of blocks to ranges: blocks.0, blocks.1 and blocks.3 become blocks.0-1, 3."""

    def split(name: str) -> tuple[str, bool]:
        """Return a block's name without its number, and whether it has a number."""
        front, _, end = name.rpartition(".")
        return (front, True) if end.isdecimal() else (name, False)

    texts = []
    for (front, is_numbered), group in groupby(names, split):
        numbers = [int(name.rpartition(".")[2]) for name in group if is_numbered]
        texts.append(f"{front}.{number_ranges(numbers)}" if is_numbered else front)
    return ", ".join(texts)


@dataclass(frozen=True)
class OptimizerBytes:
    """Bytes that a model's optimizers take, without the model's weights and gradients."""

    device: fsio.Count  # states, and fp32 masters of weights that are not fp32
    host: fsio.Count  # states and masters that are kept in host memory instead
    step: fsio.Count  # most temporary memory of an update on the device


@dataclass(frozen=True)
class StaticMemory:
    """Bytes of device memory that are taken however blocks are recomputed or offloaded."""

    weights: fsio.Count
    """Bytes of the transformer, frozen weights included. With sharding: this process's shards, plus
    three gathered blocks and the gathered weights outside of blocks."""
    elsewhere: _Signed
    """Bytes of the model's weights that are on other ranks, minus those that are gathered here."""
    gradients: fsio.Count
    reduced: fsio.Count  # buffer of the largest all-reduce of gradients between replicas
    optimizer: OptimizerBytes
    inputs: fsio.Count  # latents, noise and conditioning of one micro-batch
    inputs_ahead: fsio.Count  # inputs of the next micro-batch, copied to a GPU during this one
    ema: fsio.Count  # all running averages, in fp32
    encoders: fsio.Count  # codec and text encoders; 0 with data.cache
    encoding: fsio.Count  # activations of encoders that work one micro-batch ahead
    pinned_beside: fsio.Count  # page-locked host memory beside weights and activations

    def parts(self) -> dict[str, int]:
        """Return the bytes of device memory by part: weights, gradients, optimizer, and so on.

        The names are those in `FIXED_WORDS`.
        """
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer.device,
            "ema": self.ema,
            "encoders": self.encoders,
            "inputs": self.inputs,
        }

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
    """Predicted memory and time of a step under one recompute policy."""

    name: _Name
    forward_end_bytes: fsio.Count  # at the start of the backward pass: weights, inputs, activations
    peak_bytes: fsio.Count  # peak of forward and backward pass in the first step
    step_peak_bytes: fsio.Count  # peak of any later step, with everything that stays in memory
    overhead: fsio.Finite | None  # step time over that without recompute, minus 1; None: unknown
    fits: bool | None  # None without a budget
    host_bytes: fsio.Count = 0  # weights and activations in host memory
    link_share: fsio.Finite = 0.0  # of a step's time, spent waiting for copies


@dataclass(frozen=True)
class MemoryPlan:
    """How each block of a run is treated (kept, recomputed, offloaded ...), and a step's memory."""

    policy: _Name
    options: Options
    memory: PolicyForecast | None  # None: nothing is recomputed, and memory has no limit
    activation_bytes: _Signed | None  # predicted peak of both passes, without weights
    bucket: Bucket  # clip shape of the largest micro-batch
    notes: Sequence[_Note]  # traps that cost memory or time
    budget_bytes: fsio.Count | None = None  # limit for all tensors on the device; None: no limit
    encodes_ahead: bool = False  # as `training.encode_ahead` was decided
    encode_tile: fsio.Count = 0  # as `codec.encode_tile` was decided; pixels
    compared: Sequence[PolicyForecast] = ()  # policies from which one was chosen
    fixed: StaticMemory | None = None  # memory under every policy, by part

    def per_block(self) -> dict[str, int]:
        """Count the blocks that each option (treatment of activations and weights) is used for."""
        return dict(Counter(map(str, self.options.values())))

    def as_event(self) -> dict[str, Any]:
        """Return the fields of the event `memory_planned`."""
        return TypeAdapter(MemoryPlan).dump_python(self, mode="json")


@dataclass(frozen=True)
class KeptPlan:
    """The fields of a run's plan.json that the board and other readers use, not the next launch."""

    plan: MemoryPlan


@dataclass(frozen=True)
class MeasuredStep:
    """The event `memory_measured`: memory of a forward and backward pass, and its prediction."""

    step: fsio.Count
    predicted_gib: fsio.Finite
    measured_gib: fsio.Finite
    error: fsio.Finite  # predicted / measured - 1


def newest_plan(events: Sequence[Mapping[str, Any]]) -> MemoryPlan | None:
    """Return the newest memory plan among a run's events; None if no launch planned."""
    return next(_newest(events, "memory_planned", MemoryPlan), None)


def newest_measurements(events: Sequence[Mapping[str, Any]]) -> Iterator[MeasuredStep]:
    """Yield the measurements of a step's memory among a run's events, newest first."""
    return _newest(events, "memory_measured", MeasuredStep)


def _newest(events: Sequence[Mapping[str, Any]], kind: EventKind, of: type[_T]) -> Iterator[_T]:
    for event in reversed(events):
        if event["event"] == kind:
            # Another user may have written the events: those that are not valid are ignored.
            with suppress(RecordError):
                yield fsio.parse_record(json.dumps(event).encode(), of, Path("events.jsonl"))

"""What a step holds of a device's memory beside activations, and with them."""

from dataclasses import dataclass

from torch import nn

from longtake.planner.trace import CUDA_ROUNDS_TO, StepTrace
from longtake.training.optimizer_memory import OptimizerBytes, optimizer_bytes
from longtake.training.outlined import OutlinedStep
from longtake.training.traffic import gathered_size


@dataclass(frozen=True)
class Fixed:
    """What is in the device's memory whatever is recomputed, in bytes."""

    weights: int
    """Of the transformer, frozen ones included. On several processes: this one's part of them, and
    what is gathered at a time: two or three blocks, and what is outside of blocks."""
    elsewhere: int
    """Weights of the whole that are not here, less what is gathered beside this process's part."""
    gradients: int
    optimizer: OptimizerBytes
    inputs: int
    """Latents, noise and conditioning of one micro-batch."""
    ema: int
    """The running averages, each in fp32."""
    encoders: int
    """Codec and text encoders; none where data.cache keeps what they give."""

    @property
    def resident(self) -> int:
        return self.optimizer.device + self.ema + self.encoders

    @property
    def update_bytes(self) -> int:
        return self.weights + self.gradients + self.inputs + self.resident + self.optimizer.step


@dataclass(frozen=True)
class PolicyForecast:
    """One policy's memory and time."""

    name: str
    forward_end_bytes: int
    """When the backward pass begins: weights, inputs and activations."""
    peak_bytes: int
    """The most in forward and backward pass of the first step."""
    step_peak_bytes: int
    """The most in any later step, with optimizer states, EMA and encoders there."""
    overhead: float | None
    """Share of a step without recompute that it takes longer; None where nobody asked."""
    fits: bool | None
    """None without a budget."""


def fixed_of(step: OutlinedStep, input_bytes: int = 0) -> Fixed:
    """What is there whatever is recomputed."""
    recipe, parts, shards = step.recipe, step.parts, step.num_shards
    trained = [p for p in parts.model.parameters() if p.requires_grad]
    blocks = parts.family.blocks(parts.model)
    target = step.tracer.device.target
    granule = CUDA_ROUNDS_TO if target == "cuda" else 1
    optimizer = optimizer_bytes(
        parts.model, blocks, recipe.optimizer, step.precision, target, granule
    )
    frozen = [*parts.codec.modules(), *parts.text.modules()]
    weights, elsewhere = size_of(parts.model, granule), _elsewhere(step)
    return Fixed(
        weights=weights - elsewhere,
        elsewhere=elsewhere,
        gradients=sum((p.grad_dtype or p.dtype).itemsize * p.numel() for p in trained) // shards,
        optimizer=OptimizerBytes(
            optimizer.device // shards, optimizer.host // shards, optimizer.step // shards
        ),
        inputs=input_bytes,
        ema=len(recipe.ema.averages()) * sum(4 * p.numel() for p in trained) // shards,
        encoders=0 if recipe.data.cache is not None else sum(map(size_of, frozen)),
    )


def memory_of(
    policy: str,
    trace: StepTrace,
    step: OutlinedStep,
    overhead: float | None = None,
    budget_bytes: int | None = None,
) -> PolicyForecast:
    """What a traced step takes of the device, with all that is there beside it.

    On several processes it is an estimate: of buffers of collectives, those of FSDP2 are counted.
    """
    fixed = fixed_of(step, trace.input_bytes)
    peak = trace.peak_bytes - fixed.elsewhere
    step_peak = max(fixed.resident + peak, fixed.update_bytes)
    return PolicyForecast(
        name=policy,
        forward_end_bytes=trace.forward_end_bytes - fixed.elsewhere,
        peak_bytes=peak,
        step_peak_bytes=step_peak,
        overhead=overhead,
        fits=None if budget_bytes is None else step_peak <= budget_bytes,
    )


def size_of(module: nn.Module, granule: int = 1) -> int:
    """Bytes of a module's parameters and buffers, each rounded up to multiples of `granule`."""
    held = (*module.parameters(), *module.buffers())
    return sum(-(-tensor.nbytes // granule) * granule for tensor in held)


def _elsewhere(step: OutlinedStep) -> int:
    """What is not here while blocks are gathered.

    FSDP2 gathers copies even where each process holds the whole model: of the block that runs and
    of the next one. With shards it also keeps the buffer of the all-gather before.
    """
    if step.world_size == 1:
        return 0
    model, blocks = step.parts.model, step.parts.family.blocks(step.parts.model)
    whole, gathered = size_of(model), _gathered_size(model, step)
    in_blocks = [_gathered_size(block, step) for block in blocks]
    at_once = (3 if step.num_shards > 1 else 2) * max(in_blocks) + gathered - sum(in_blocks)
    return whole - whole // step.num_shards - at_once


def _gathered_size(module: nn.Module, step: OutlinedStep) -> int:
    """Bytes of all of a module while FSDP2 has gathered it."""
    weights = sum(gathered_size(p, step) * p.numel() for p in module.parameters())
    return weights + sum(buffer.nbytes for buffer in module.buffers())

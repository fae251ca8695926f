"""Shards a model by FSDP2 (`fully_shard`) or replicates it, and reduces and clips gradients."""

import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

from longtake.parallel.collectives import refuse_failed_peers
from longtake.parallel.mesh import World

BUCKET_BYTES = 2**28
"""Most bytes of gradients that are copied into one all-reduce."""
_LEAST_NORM = 1e-6
"""Number that is added to a gradient norm before dividing by it, so that it is never 0."""


def apply_fsdp(
    model: nn.Module, blocks: Sequence[nn.Module], world: World, *, gather_in_bf16: bool = False
) -> None:
    """Shard a model's blocks and then the rest onto the device; with one shard, only move it.

    The model comes on the CPU: a GPU never holds more of it than its share and one block.

    Sharded parameters become DTensors of the dtype that they have. Gradients are summed over ranks
    in fp32. Autocast decides the precision of the arithmetic, on one process as on many.

    Args:
        model: model on the CPU.
        blocks: the model's blocks, units of sharding.
        world: all ranks.
        gather_in_bf16: whether ranks send fp32 weights to each other as bf16; only if autocast
            would convert them to bf16 anyway.
    """
    if not world.is_sharded:
        model.to(world.device)
        accumulate_in_fp32(model)
        return
    # Some families return a view. torch warns at each step that it must not be changed in place;
    # the loss only reads it.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    kept = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if gather_in_bf16 else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for part, module, _ in list(sharding_units(model, blocks)):
        sharded = fully_shard(module, mesh=world.mesh, mp_policy=kept)
        sharded.set_custom_all_gather(_Gather())
        # An added module's `prepare` is called apart from its forward pass.
        if module is not part and hasattr(module, "prepare"):
            register_fsdp_forward_method(module, "prepare")


def sharding_units(
    model: nn.Module, blocks: Sequence[nn.Module]
) -> Iterator[tuple[nn.Module, nn.Module, list[nn.Parameter]]]:
    """Yield the modules that FSDP2 shards as units, in order.

    A unit of FSDP2 must train in one dtype, but Wan keeps a few weights of each block in fp32 while
    all others are in bf16.

    Yields:
        The block or model that a unit belongs to, its module, and those of its parameters that
        belong to no unit before.
    """
    taken: set[nn.Parameter] = set()
    # Blocks first: `fully_shard` of the model takes the parameters that no unit inside it has.
    for part in (*blocks, model):
        trained = [p.dtype for p in part.parameters() if p.requires_grad and p not in taken]
        inner = _of_other_dtypes(part, trained[0], taken) if trained else []
        for module in (*inner, part):
            mine = [p for p in module.parameters() if p not in taken]
            taken.update(mine)
            yield part, module, mine


class _Gather(DefaultAllGather):
    """All-gather of FSDP2 that, inside of `joint_work`, first checks that no rank has failed."""

    def __call__(self, *given: Any, **named: Any) -> dist.Work | None:
        refuse_failed_peers()
        return super().__call__(*given, **named)


def accumulate_in_fp32(model: nn.Module) -> None:
    """Keep the gradients of bf16 weights in fp32, so that micro-batches add up without rounding.

    For sharded weights, FSDP2's `reduce_dtype` has this effect.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype == torch.bfloat16:
            parameter.grad_dtype = torch.float32


@contextmanager
def gradients_of_any_dtype(model: nn.Module) -> Iterator[None]:
    """Allow gradients to be assigned in any dtype inside the context, in spite of `grad_dtype`.

    `torch.distributed.checkpoint.state_dict` assigns them to create the states of optimizers.
    """
    before = {parameter: parameter.grad_dtype for parameter in model.parameters()}
    for parameter in before:
        parameter.grad_dtype = None
    try:
        yield
    finally:
        for parameter, dtype in before.items():
            parameter.grad_dtype = dtype


def _of_other_dtypes(
    module: nn.Module, dtype: torch.dtype, taken: Collection[nn.Parameter]
) -> list[nn.Module]:
    """Return the largest parts of a module in which no trained weight has the given dtype."""
    parts: list[nn.Module] = []
    for child in module.children():
        dtypes = {p.dtype for p in child.parameters() if p.requires_grad and p not in taken}
        if dtype in dtypes or isinstance(child, nn.ModuleList):
            parts += _of_other_dtypes(child, dtype, taken)
        elif dtypes:
            parts.append(child)
    return parts


def set_gradient_sync(model: nn.Module, wanted: bool) -> None:
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(wanted)


def gathers_weights(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def free_gathered(model: nn.Module) -> None:
    """Free the weights that FSDP2 has gathered, and reset its record of the passes.

    After a forward pass without a backward pass FSDP2 keeps the weights of the outermost module.
    After a pass that an error ended it keeps those of the module that raised it, and the next
    backward pass would gather in the order of the broken pass, which differs between ranks.
    """
    if not isinstance(model, FSDPModule) or model._get_fsdp_state()._is_root is None:
        return  # no pass has begun
    if hasattr(model, "reset_iter_state"):
        model.reset_iter_state()
        return
    for module in model.modules():  # torch before 2.13
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            state._training_state = TrainingState.IDLE
            state._state_ctx.iter_forward_root = None
            state._comm_ctx.post_forward_order.clear()
            if (group := state._fsdp_param_group) is not None:
                group._training_state = TrainingState.IDLE
                group._post_forward_indices.clear()
            module.reshard()


@torch.no_grad()
def send_weights(model: nn.Module, world: World) -> None:
    """Broadcast rank 0's trained weights to all ranks that hold the whole model.

    From then on equal gradients keep them equal. Frozen weights come from the same files or the
    same seed.
    """
    if world.mesh is not None and not world.is_sharded:
        for parameter in _trained(model):
            dist.broadcast(parameter.detach(), src=0)


@torch.no_grad()
def reduce_gradients(model: nn.Module, blocks: Sequence[nn.Module], world: World) -> None:
    """Average the gradients of ranks that hold the whole model; FSDP2 reduces those of shards.

    All ranks call it after the last micro-batch of a step. A parameter without a gradient counts as
    0, because other ranks may have one. The sums are in fp32, block by block.
    """
    if world.mesh is None or world.is_sharded:
        return
    for bucket in gradient_buckets(model, blocks):
        for parameter in bucket:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
                parameter.grad.stands_in = True  # type: ignore[attr-defined]  # for no gradient
        gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
        flat = torch.cat([gradient.flatten().float() for gradient in gradients])
        dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=dist.group.WORLD)
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        averages = [part.view_as(each) for part, each in zip(parts, gradients, strict=True)]
        torch._foreach_copy_(gradients, averages)


def gradient_buckets(model: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[list[nn.Parameter]]:
    """Group trained weights, block by block, into buckets for the all-reduce of their gradients.

    A bucket has at most `BUCKET_BYTES` in fp32.
    """
    taken: set[nn.Parameter] = set()
    for module in (*blocks, model):
        bucket: list[nn.Parameter] = []
        for parameter in _trained(module):
            if parameter in taken:
                continue
            # The model, which comes last, lists the parameters of its blocks again.
            taken.add(parameter)
            if bucket and bucket_bytes([*bucket, parameter]) > BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(parameter)
        if bucket:
            yield bucket


def bucket_bytes(bucket: Sequence[nn.Parameter]) -> int:
    return sum(torch.float32.itemsize * parameter.numel() for parameter in bucket)


def _trained(module: nn.Module) -> Iterable[nn.Parameter]:
    return (parameter for parameter in module.parameters() if parameter.requires_grad)


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def clip_gradients(model: nn.Module, norm: float, max_norm: float, scale: float = 1.0) -> None:
    """Multiply gradients by `scale`, then scale them down to a norm of at most `max_norm`.

    Args:
        model: model with gradients.
        norm: norm of all gradients, over all ranks, after the multiplication by `scale`.
        max_norm: largest norm that gradients keep.
        scale: factor of the gradients before they are clipped.
    """
    # Local shards: a DTensor dispatches each of many tensors again, which takes milliseconds.
    gradients = [local_shard(p.grad) for p in model.parameters() if p.grad is not None]
    factor = scale * min(1.0, max_norm / (norm + _LEAST_NORM))
    if factor == 1:
        return
    # In place and by a number: a tensor would be rounded to the gradients' dtype, and
    # `_foreach_mul_` on a CPU rounds numbers as well.
    exact = [gradient for gradient in gradients if gradient.dtype == torch.float32]
    if exact:
        torch._foreach_mul_(exact, factor)
    for gradient in gradients:
        if gradient.dtype != torch.float32:
            gradient.mul_(factor)


def local_shard(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of each tensor, [N] fp64 on their device; [0] without tensors.

    Norms are computed in fp32 for any dtype; beyond 3.4e38 they are infinite.
    """
    norms: dict[int, Tensor] = {}
    # One call for each dtype: with mixed ones `_foreach_norm` leaves its fused kernels.
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        alike = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        own = torch._foreach_norm([tensors[place] for place in alike], dtype=torch.float32)
        norms |= dict(zip(alike, own, strict=True))
    if not norms:
        return torch.zeros(0, dtype=torch.float64)
    return torch.stack([norms[place] for place in range(len(tensors))]).double().square()

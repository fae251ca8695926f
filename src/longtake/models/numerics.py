"""Precision and cost of a model's arithmetic: dtypes of weights, autocast, operation counts."""

import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from longtake.models.quantized import FrozenLinear, QuantizedLinear
from longtake.process import cpu_flags

Precision = Literal["bf16", "fp32"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Dtypes of torch by the names that recipes use."""

_ISAS_WITHOUT_BF16 = frozenset(
    {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}
)
"""Values of the environment variable ONEDNN_MAX_CPU_ISA with which oneDNN uses no bf16 instructions
in matrix products."""


def choose_precision(wanted: Literal["auto", "bf16", "fp32"], device: torch.device) -> Precision:
    """Choose the precision of a training; `auto` is bf16 if the device has instructions for it."""
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    # Without AMX or avx512_bf16, or where oneDNN may not use them, it emulates bf16, more slowly
    # than it computes fp32. DNNL is the former name of oneDNN.
    limits = (os.environ.get(f"{name}_MAX_CPU_ISA", "") for name in ("ONEDNN", "DNNL"))
    may_use = not any(limit.upper() in _ISAS_WITHOUT_BF16 for limit in limits)
    return "bf16" if may_use and cpu_flags() & {"amx_bf16", "avx512_bf16"} else "fp32"


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """Return a context in which matrix products run in bf16; with "fp32" it changes nothing.

    autocast's cache is off: a forward pass uses each weight once, and the cache would keep the bf16
    copies of all weights until its end.
    """
    return torch.autocast(
        device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False
    )


@contextmanager
def mixed_norms() -> Iterator[None]:
    """Silence torch's warning about norms with bf16 inputs and fp32 weights, usual under autocast.

    torch has no fused kernel for them and says so at every launch.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
        yield


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # torch's allocator on the CPU raises a plain RuntimeError, known by its message alone.
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def in_backward() -> bool:
    # -1 is no backward pass. Recomputed forward passes run within one; torch has no public
    # function.
    return bool(torch._C._current_graph_task_id() != -1)


def keep_weights_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert a model's weights in place, one by one: no two copies of the whole model exist.

    What a class of diffusers lists in `_keep_in_fp32_modules` stays in fp32, as with
    `from_pretrained(torch_dtype=...)`; transformers means fp16 only by its list of that name.
    Buffers are not converted: bf16 is too coarse for the positions in them.
    """
    is_of_diffusers = hasattr(model, "load_config")
    exact = set(getattr(model, "_keep_in_fp32_modules", None) or [] if is_of_diffusers else [])
    for name, parameter in model.named_parameters():
        kept = dtype if exact.isdisjoint(name.split(".")) else torch.float32
        parameter.data = parameter.data.to(kept)


def main_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of most of a model's weights; quantised ones count as dequantised."""
    sizes = Counter[torch.dtype]()
    for parameter in model.parameters():
        sizes[parameter.dtype] += parameter.numel()
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear):
            sizes[layer.dtype] += layer.in_features * layer.out_features
    return sizes.most_common(1)[0][0]


def count_weights(model: nn.Module) -> int:
    """Count a model's weights, including those that are quantised or not on a device."""
    # `_parameters`, because the attribute `weight` of a quantised layer dequantises it.
    away = (
        layer.in_features * layer.out_features
        for layer in model.modules()
        if isinstance(layer, FrozenLinear) and layer._parameters.get("weight") is None
    )
    return sum(away) + sum(parameter.numel() for parameter in model.parameters())


class ForwardFlops(NamedTuple):
    """Floating-point operations of one forward pass; a multiply-add counts as two."""

    total: int
    of_activations: int  # products of two activations: attention, which has no weights

    def for_training(self, *, trains_all: bool = True) -> int:
        """Return the operations of a training step: up to three times the forward pass's.

        The backward pass has two products for each of the forward pass: the gradients of inputs and
        of weights. Where nearly all weights are frozen (LoRA, an added module) the second is
        missing, so that a product with weights counts twice; one of two activations needs both.
        Recomputed activations do not count, so that utilisation (MFU) does not rise with them.
        """
        return 3 * self.total if trains_all else 2 * self.total + self.of_activations


def count_flops(module: nn.Module, inputs: Mapping[str, object]) -> ForwardFlops:
    """Count the operations of one forward pass, without running it.

    Matrix products, convolutions and attention count, elementwise operations do not. Weights and
    inputs are replaced by meta tensors: the module is unchanged, and its size does not matter. On a
    CPU device torch's counter would miss fused attention.
    """
    named = chain(module.named_parameters(), module.named_buffers())
    weights = {name: tensor.detach().to("meta") for name, tensor in named}
    shapes = {
        name: value.to("meta") if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        functional_call(module, weights, kwargs=shapes)
    by_operation = counter.get_flop_counts().get("Global", {})
    # Linear layers are mm and addmm; attention on the meta device is two batches of products.
    between = (count for operation, count in by_operation.items() if "bmm" in str(operation))
    return ForwardFlops(int(counter.get_total_flops()), int(sum(between)))

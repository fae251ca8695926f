"""How long an operation takes: as long as its arithmetic or its traffic, whichever is more.

A roofline (Williams, Waterman and Patterson, 2009). Real kernels reach a share of their maker's
figures; the shares below are usual for large transformers. Only ratios of such times are shown.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from longtake.recompute.devices import Device

_SHARE_OF_FLOPS = 0.7
_SHARE_OF_FLOPS_IN_ATTENTION = 0.5
_SHARE_OF_BANDWIDTH = 0.8

_aten = torch.ops.aten
_OF_CPU_ATTENTION = {  # torch knows the formulas for CUDA's kernels alone
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        _aten._scaled_dot_product_flash_attention
    ],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
}
_FORMULAS = {**flop_registry, **_OF_CPU_ATTENTION}


def seconds(
    operation: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, device: Device
) -> float:
    """How long a device takes for one operation that makes or changes something."""
    packet = operation.overloadpacket if hasattr(operation, "overloadpacket") else operation
    touched = [tensor for value in (*args, *kwargs.values()) for tensor in tensors(value)]
    made = tensors(result)
    moved = sum(tensor.numel() * tensor.itemsize for tensor in (*touched, *made))
    traffic = moved / (device.bandwidth * _SHARE_OF_BANDWIDTH)
    formula = _FORMULAS.get(packet)
    if formula is None:
        return traffic
    share = _SHARE_OF_FLOPS_IN_ATTENTION if "attention" in str(packet) else _SHARE_OF_FLOPS
    count = formula(*args, **kwargs, out_val=result)
    return max(traffic, float(count) / (device.flops(touched[0].dtype) * share))


def tensors(result: Any) -> list[Tensor]:
    """The tensors that a result or an argument is, or is made of."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, Iterable):
        return [value for value in result if isinstance(value, Tensor)]
    return []

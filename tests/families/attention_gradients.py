"""A step's gradients by the attention kernel that is chosen, and by torch's formula."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from tests.families.row import Row
from tests.families.rows import transformer_class
from tests.families.tiny import Tiny
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from longtake.config import TrainableSection
from longtake.models.components import Components
from longtake.models.objective import FlowBatch, flow_losses

TOLERANCE = 0.05
"""Of the relative error of each parameter's gradient in bf16; kernels are within 0.02."""
_FACTOR = 8
"""Heads of tiny releases are too narrow for the kernels that real ones use: 12 and 16 channels."""
_WIDER = (
    *("attention_head_dim", "audio_attention_head_dim", "dim"),
    *("cross_attention_dim", "audio_cross_attention_dim", "added_kv_proj_dim"),
    *("axes_dims", "axes_dims_rope", "rope_axes_dim"),
)
_OF_CONNECTORS = (
    *("video_hidden_dim", "video_connector_attention_head_dim"),
    *("audio_hidden_dim", "audio_connector_attention_head_dim"),
)


def make_wide(row: Row, folder: Path) -> Tiny:
    """The tiny release of a row with heads of 64 to 128 channels, and 4 times the pixels."""
    name = transformer_class(row)
    made, connectors = getattr(diffusers, name), LTX2TextConnectors

    def make_wider(**sizes: Any) -> Any:
        return made(**_wider(sizes, _WIDER))

    def make_wider_connectors(**sizes: Any) -> Any:
        # LTX-2.3's make text of the width of each stream, and LTX-2's of its own.
        return connectors(**_wider(sizes, _OF_CONNECTORS if "video_hidden_dim" in sizes else ()))

    frames, height, width = row.bucket
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diffusers, name, make_wider)
        patch.setattr("tests.families.release_ltx2.LTX2TextConnectors", make_wider_connectors)
        return Tiny(dataclasses.replace(row, bucket=(frames, 2 * height, 2 * width)), folder)


def _wider(sizes: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    wider = dict(sizes)
    for key in keys:
        size = sizes.get(key)
        if isinstance(size, int):
            wider[key] = _FACTOR * size
        elif size is not None:
            wider[key] = type(size)(_FACTOR * each for each in size)
    return wider


def check_gradients_by_kernels(tiny: Tiny, device: torch.device) -> None:
    """Compare LoRA's gradients by the chosen kernels, in bf16, with those of the formula."""
    parts = tiny.training(TrainableSection(kind="lora"))
    batch = moved(tiny.batch(), device)
    parts.model.to(device)
    found, kernels = _gradients(parts, batch, device)
    assert kernels, "no fused kernel computes its attention"
    with sdpa_kernel(SDPBackend.MATH):
        expected, others = _gradients(parts, batch, device)
    assert not others
    assert found.keys() == expected.keys()
    largest = max(float(each.norm()) for each in expected.values())
    errors = {
        # What is nearly zero is rounding.
        name: float((found[name] - each).norm()) / max(float(each.norm()), 1e-3 * largest)
        for name, each in expected.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= TOLERANCE, (worst, errors[worst], kernels)


def _gradients(
    parts: Components, batch: FlowBatch, device: torch.device
) -> tuple[dict[str, Tensor], set[str]]:
    """In fp32 by the parameters' names, and the fused kernels that computed attention."""
    parts.model.zero_grad(set_to_none=True)
    with _KernelNames() as seen:
        loss = flow_losses(parts, batch, "bf16", device).sum()
    torch.autograd.backward(loss)
    named = parts.model.named_parameters()
    return {name: each.grad.float() for name, each in named if each.grad is not None}, seen.names


class _KernelNames(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith("_scaled_dot_product"):
            self.names.add(name)
        return func(*args, **(kwargs or {}))


def moved(batch: FlowBatch, device: torch.device) -> FlowBatch:
    """The batch on a device."""

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device)
        return {name: move(each) for name, each in value.items()} if value else value

    fields = {each.name: move(getattr(batch, each.name)) for each in dataclasses.fields(batch)}
    return dataclasses.replace(batch, **fields)

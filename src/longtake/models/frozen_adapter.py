"""Frozen LoRA beside a model: while it is trained (`model.training_adapter`), or while it samples.

A distilled release plus a training adapter behaves as if it were not distilled, so that what is
trained on both leaves the distillation alone. An accelerator (`sampling.adapter`) makes videos in
few steps, and is not there in training, in held-out losses, or in exports.

Adapters are added to the outputs of layers, not to their weights: where one is not used, outputs
are without it to the bit, and quantised or streamed weights stay as they are. The training adapter
is used in training mode (`Module.train`), the other one in evaluation mode within `sampled_with`.
Buffers of adapters are in no state dict, so neither checkpoints nor exports have them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtake.config import Expert, Recipe, SamplingSection
from longtake.models import numerics
from longtake.models.added_module import ADDED
from longtake.models.base import Family
from longtake.models.lora_files import read_adapter
from longtake.models.trainable import adapter_layers

_Kind = Literal["training", "sampling"]
_DOWN, _UP = "{}_adapter_down", "{}_adapter_up"
_sampling_strength: ContextVar[float] = ContextVar("_sampling_strength", default=0.0)


def attach_adapters(recipe: Recipe, model: nn.Module, family: Family, device: torch.device) -> None:
    """Add the LoRA files that a training needs to its model's linear layers.

    Args:
        recipe: recipe of the training, which may sample between its steps.
        model: model with whatever is trained; it may be on the meta device.
        family: the model's family.
        device: device of the adapters' weights; the meta device for a plan.

    Raises:
        ModelError: a file cannot be read.
        RecipeError: it is no LoRA of this model.
    """
    section = recipe.model
    if section.training_adapter is not None:
        file, key = section.training_adapter, "model.training_adapter"
        _attach("training", file, key, model, family, section.expert, device)
    if recipe.sampling.in_training:
        attach_sampling_adapter(recipe.sampling, model, family, section.expert, device)


def attach_sampling_adapter(
    sampling: SamplingSection,
    model: nn.Module,
    family: Family,
    expert: Expert | None,
    device: torch.device,
) -> None:
    """Add the LoRA of `sampling.adapter`, if it is set, to a model's linear layers.

    `expert` says which of a release's two transformers the model is. Raises as `attach_adapters`.
    """
    if (file := sampling.adapter_of(expert)) is not None:
        key = "sampling.adapter" if file == sampling.adapter else "sampling.adapter_2"
        _attach("sampling", file, key, model, family, expert, device)


@contextmanager
def sampled_with(strength: float) -> Iterator[None]:
    """Use the models' sampling adapters in the context, at this strength."""
    token = _sampling_strength.set(strength)
    try:
        yield
    finally:
        _sampling_strength.reset(token)


def _attach(
    kind: _Kind,
    file: Path,
    key: str,
    model: nn.Module,
    family: Family,
    expert: Expert | None,
    device: torch.device,
) -> None:
    # The model's own linear layers, by their names without adapters.
    adapted = dict(adapter_layers(model))
    layers = {name: layer.get_base_layer() for name, layer in adapted.items()}
    for name, layer in model.named_modules():
        parts = name.split(".")
        parents = {".".join(parts[:end]) for end in range(1, len(parts))}
        is_own = isinstance(layer, nn.Linear) and parts[0] != ADDED
        if is_own and parents.isdisjoint(adapted):
            layers[name] = layer
    dtype = numerics.main_dtype(model)
    for name, lora in read_adapter(file, layers, family, expert, key).items():
        layer = layers[name]
        up = lora.up.float() * lora.scale
        layer.register_buffer(_DOWN.format(kind), lora.down.to(device, dtype), persistent=False)
        layer.register_buffer(_UP.format(kind), up.to(device, dtype), persistent=False)
        # A method, and no hook, whose numbers would make equal blocks unlike others to a plan.
        layer.forward = MethodType(_forward, layer)


def _forward(layer: Any, inputs: Tensor) -> Tensor:
    # By the class: streaming and quantisation may have changed it.
    plain: Tensor = type(layer).forward(layer, inputs)
    kind: _Kind = "training" if layer.training else "sampling"
    strength = 1.0 if layer.training else _sampling_strength.get()
    down: Tensor | None = getattr(layer, _DOWN.format(kind), None)
    if down is None or strength == 0:
        return plain
    update = F.linear(F.linear(inputs.to(down.dtype), down), getattr(layer, _UP.format(kind)))
    return plain + (update if strength == 1 else strength * update).to(plain.dtype)

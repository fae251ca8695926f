"""A frozen LoRA that belongs to the model only while it is trained: `model.training_adapter`.

A distilled release plus such an adapter behaves as if it were not distilled, so that what is
trained on both leaves the distillation alone. The adapter is added to the outputs of layers in
training mode (`Module.train`), not to their weights: samples and held-out losses, which are
computed in evaluation mode, are without it to the bit, and quantised or streamed weights stay as
they are. Its buffers are in no state dict, so neither checkpoints nor exports have them.
"""

from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtake.config import Expert
from longtake.models import numerics
from longtake.models.added_module import ADDED
from longtake.models.base import Family
from longtake.models.lora_files import read_adapter
from longtake.models.trainable import adapter_layers

_DOWN, _UP = "training_adapter_down", "training_adapter_up"


def attach_training_adapter(
    file: Path, model: nn.Module, family: Family, expert: Expert | None, device: torch.device
) -> None:
    """Add a file's LoRA to a model's linear layers, for training mode only.

    Args:
        file: LoRA file, under the names of any tool that `trainable.init_from` reads.
        model: model with whatever is trained; it may be on the meta device.
        family: the model's family.
        expert: which of a release's two transformers the model is.
        device: device of the adapter's weights; the meta device for a plan.

    Raises:
        ModelError: the file cannot be read.
        RecipeError: it is no LoRA of this model.
    """
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
    for name, lora in read_adapter(file, layers, family, expert).items():
        layer = layers[name]
        up = lora.up.float() * lora.scale
        layer.register_buffer(_DOWN, lora.down.to(device, dtype), persistent=False)
        layer.register_buffer(_UP, up.to(device, dtype), persistent=False)
        # A method, and no hook, whose numbers would make equal blocks unlike others to a plan.
        layer.forward = MethodType(_forward, layer)


def _forward(layer: Any, inputs: Tensor) -> Tensor:
    # By the class: streaming and quantisation may have changed it.
    plain: Tensor = type(layer).forward(layer, inputs)
    if not layer.training:
        return plain
    down, up = getattr(layer, _DOWN), getattr(layer, _UP)
    return plain + F.linear(F.linear(inputs.to(down.dtype), down), up).to(plain.dtype)

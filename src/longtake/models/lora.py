"""Low-rank updates (LoRA) of a frozen model's linear layers, by peft.

A layer W becomes W + (alpha / rank) B A. A is random and B zero, so that training starts from the
very model that was loaded. The names are peft's, which diffusers reads.
"""

import copy
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from longtake.config import TrainableSection
from longtake.errors import RecipeError
from longtake.formatting import did_you_mean

_ADAPTER = "default"


def add_lora(
    model: nn.Module, targets: Sequence[str], section: TrainableSection, dtype: torch.dtype
) -> None:
    """Give linear layers low-rank updates, which alone require gradients from then on.

    Args:
        model: on any device, also on torch's meta device.
        targets: the last part(s) of layers' names, or patterns of whole names.
        section: rank and alpha.
        dtype: of A and B. Where it is not the layer's, the layer's input is converted, and a copy
            of it is kept for the backward pass.

    Raises:
        RecipeError: a target matches no linear layer.
    """
    from peft import LoraConfig, inject_adapter_in_model

    layers = find_targets(model, targets)
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha or section.rank,
        # As a list, peft would take each for the end of further names.
        target_modules="|".join(re.escape(name) for name in layers),
    )
    inject_adapter_in_model(config, model, _ADAPTER)
    for _, layer in _layers(model):
        layer.lora_A.to(dtype)  # peft has chosen: not the same on every device
        layer.lora_B.to(dtype)
        # Under autocast peft would convert the input to fp32, only for autocast to convert it back
        # and to keep that copy.
        layer.cast_input_dtype_enabled = layer.get_base_layer().weight.dtype != dtype


def find_targets(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """Names of the linear layers that targets mean, in the model's order.

    Raises:
        RecipeError: one of them means none; names the nearest.
    """
    names = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    found = {target: {name for name in names if _is_meant(name, target)} for target in targets}
    for target, matched in found.items():
        if not matched:
            raise RecipeError(_explain_unmatched(target, names, model))
    return [name for name in names if any(name in matched for matched in found.values())]


def lora_state(model: nn.Module) -> dict[str, Tensor]:
    """What diffusers' `load_lora_weights` reads: A and B of every layer, without a prefix.

    The scale alpha / rank is multiplied into B, because readers of such files assume 1. Empty
    where the model has no LoRA.
    """
    state = {}
    for name, layer in _layers(model):
        state[f"{name}.lora_A.weight"] = layer.lora_A[_ADAPTER].weight.detach()
        state[f"{name}.lora_B.weight"] = (
            layer.lora_B[_ADAPTER].weight.detach() * layer.scaling[_ADAPTER]
        )
    return state


def adapter_config(model: nn.Module, base: str | None) -> Any:
    """Peft's `LoraConfig` of what `lora_state` holds, whose scale is 1.

    `base` is where the weights beneath it come from, if from anywhere.
    """
    host: Any = model
    config = copy.deepcopy(host.peft_config[_ADAPTER])
    config.lora_alpha, config.inference_mode = config.r, True
    config.base_model_name_or_path = base
    return config


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Make LoRA part of the weights, in new tensors; the model has its first names again."""
    for name, layer in list(_layers(model)):
        plain, a, b = layer.get_base_layer(), layer.lora_A[_ADAPTER], layer.lora_B[_ADAPTER]
        update = layer.scaling[_ADAPTER] * (b.weight.float() @ a.weight.float())
        merged = (plain.weight.float() + update).to(plain.weight.dtype)
        plain.weight = nn.Parameter(merged, requires_grad=False)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, plain)
    if hasattr(model, "peft_config"):
        del model.peft_config


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Names and layers that have LoRA."""
    if not hasattr(model, "peft_config"):
        return
    from peft.tuners.lora import LoraLayer

    for name, part in model.named_modules():
        if isinstance(part, LoraLayer):
            yield name, part


def _is_meant(name: str, target: str) -> bool:
    if "*" in target:
        return fnmatchcase(name, target)
    return name == target or name.endswith(f".{target}")


def _explain_unmatched(target: str, layers: Sequence[str], model: nn.Module) -> str:
    says = f"trainable.targets: {target!r} matches no linear layer of the model; "
    meant = [name for name, _ in model.named_modules() if name and _is_meant(name, target)]
    if any(layer.startswith(f"{name}.") for name in meant for layer in layers):
        return f"{says}it has such layers inside: write {f'*{target}.*'!r} for all of them."
    if "*" in target:
        return says + did_you_mean(
            target, {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in layers}
        )
    num_parts = target.count(".") + 1
    endings = {".".join(name.split(".")[-num_parts:]) for name in layers}
    return says + did_you_mean(target, {each for each in endings if not each[0].isdigit()})

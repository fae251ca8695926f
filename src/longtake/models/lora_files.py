"""Starts LoRA from a file: names of diffusers, peft, ComfyUI and kohya's scripts."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from longtake.errors import ModelError, RecipeError
from longtake.fsio import read_json
from longtake.models.base import Family
from longtake.models.trainable import ADAPTER, lora_layers

_SUFFIXES = {
    ".lora_A.weight": "down",
    ".lora_B.weight": "up",
    ".lora_down.weight": "down",
    ".lora_up.weight": "up",
    ".alpha": "alpha",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
    ".dora_scale": "magnitude",
}
_OF_TEXT_ENCODERS = ("lora_te", "text_encoder")
_PREFIXES = ("transformer.", "base_model.model.", "")
_MAX_NAMED = 3


@dataclass(frozen=True)
class StoredLora:
    """The LoRA of one layer as a file has it."""

    down: Tensor  # [rank, in]
    up: Tensor  # [out, rank]
    alpha: float | None  # None: the rank, that is a scale of 1
    magnitude: Tensor | None  # of DoRA

    @property
    def rank(self) -> int:
        return len(self.down)

    @property
    def scale(self) -> float:
        return 1.0 if self.alpha is None else self.alpha / self.rank


def read_lora(path: Path, model: nn.Module, family: Family) -> dict[str, StoredLora]:
    """The LoRA of each layer of a model that a file has, by the layer's name.

    The model may be on the meta device.

    Raises:
        ModelError: the file cannot be read.
        RecipeError: it has no LoRA of this model, or one of a higher rank than the model's.
    """
    stored, alpha = _read(path)
    layers = dict(lora_layers(model))
    names = dict(_names_of_layers(layers, family))
    found, unknown = _sorted(stored, names)
    if unknown and (converted := _converted(stored, family)) is not None:
        other, still_unknown = _sorted(converted, names)
        if len(still_unknown) < len(unknown):
            found, unknown = other, still_unknown
    if unknown:
        fitting = sum(map(len, found.values()))
        named = ", ".join(unknown[:_MAX_NAMED])
        raise RecipeError(
            f"trainable.init_from {path}: {fitting} of its {fitting + len(unknown)} weights fit "
            f"the layers that this recipe trains with LoRA; the first that do not: {named}. Is it "
            "of another model? If the layers are this model's, name them in trainable.targets."
        )
    if not found:
        raise RecipeError(
            f"trainable.init_from {path}: none of its {len(stored)} weights is LoRA of this model. "
            "LoRA of text encoders is not trained here."
        )
    whole = {name: _whole(path, name, parts, alpha) for name, parts in found.items()}
    for name, lora in whole.items():
        _refuse_other_shapes(path, name, lora, layers[name])
    return whole


@torch.no_grad()
def load_lora(lora: Mapping[str, StoredLora], model: nn.Module) -> None:
    """Give a model's LoRA the values of a file; layers that it lacks keep theirs.

    A lower rank is filled up: what is beyond it changes nothing at first, and trains.
    """
    for name, layer in lora_layers(model):
        if (stored := lora.get(name)) is None:
            continue
        down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        scale = stored.scale / layer.scaling[ADAPTER]
        down[: stored.rank] = stored.down.to(down.dtype)
        up.zero_()
        up[:, : stored.rank] = (stored.up if scale == 1 else stored.up.float() * scale).to(up.dtype)
        if stored.magnitude is not None:
            layer.lora_magnitude_vector[ADAPTER].weight.copy_(stored.magnitude.flatten())


def _read(path: Path) -> tuple[dict[str, Tensor], float | None]:
    """The tensors of a file, and alpha where its header, or peft's file beside it, says so."""
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"trainable.init_from {path} cannot be read: {error}. Expected a safetensors file with "
            "LoRA."
        ) from error
    settings: Mapping[str, Any] = read_json(path.with_name("adapter_config.json"))
    alpha = settings.get("lora_alpha")
    try:
        if (saved := header.get("lora_adapter_metadata")) is not None:
            alpha = json.loads(saved).get("transformer.lora_alpha", alpha)
        return stored, None if alpha is None else float(alpha)
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(
            f"trainable.init_from {path}: its alpha cannot be read: {error}. Expected JSON such as "
            '{"transformer.lora_alpha": 16} in its header.'
        ) from error


def _names_of_layers(layers: Mapping[str, Any], family: Family) -> Iterator[tuple[str, str]]:
    """Each name that a tool gives a layer, with the model's own."""
    for name in layers:
        originals = [name]
        with suppress(RecipeError):  # ComfyUI has no such model
            originals.append(family.comfyui_name(name, is_lora=False))
            yield family.comfyui_name(name, is_lora=True), name
        for prefix in _PREFIXES:
            yield f"{prefix}{name}", name
        for original in originals:
            yield f"diffusion_model.{original}", name
            yield f"lora_unet_{original.replace('.', '_')}", name


def _sorted(
    stored: Mapping[str, Tensor], names: Mapping[str, str]
) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """The weights of each layer by kind, and the names of those that belong to no layer."""
    found: dict[str, dict[str, Tensor]] = {}
    unknown = []
    for key, value in stored.items():
        suffix = next((each for each in _SUFFIXES if key.endswith(each)), "")
        layer = names.get(key.removesuffix(suffix)) if suffix else None
        if layer is not None:
            found.setdefault(layer, {})[_SUFFIXES[suffix]] = value
        elif not key.startswith(_OF_TEXT_ENCODERS):  # these are not trained here
            unknown.append(key)
    return found, unknown


def _converted(stored: Mapping[str, Tensor], family: Family) -> dict[str, Tensor] | None:
    """The weights under diffusers' names, by its own converters; None if these do not know them."""
    import diffusers

    pipeline: Any = getattr(diffusers, getattr(family, "pipeline_class", ""), None)
    try:
        converted: dict[str, Tensor] = pipeline.lora_state_dict(dict(stored))
    except Exception:  # a file of another model; what they raise depends on the file
        return None
    return converted


def _whole(path: Path, name: str, parts: Mapping[str, Tensor], alpha: float | None) -> StoredLora:
    missing = [kind for kind in ("down", "up") if kind not in parts]
    if missing:
        raise RecipeError(f"trainable.init_from {path}: of {name} it lacks lora {missing[0]}.")
    down, up, magnitude = parts["down"], parts["up"], parts.get("magnitude")
    is_lora = down.ndim == up.ndim == 2 and len(down) == up.shape[1] > 0
    if not is_lora or any(parts[kind].numel() != 1 for kind in ("alpha",) if kind in parts):
        shapes = ", ".join(f"{kind} {list(value.shape)}" for kind, value in parts.items())
        raise RecipeError(
            f"trainable.init_from {path}: of {name} it has {shapes}. Expected down [rank, in], up "
            "[out, rank] and one number as alpha."
        )
    own = float(parts["alpha"]) if "alpha" in parts else alpha
    return StoredLora(down, up, own, magnitude)


def _refuse_other_shapes(path: Path, name: str, lora: StoredLora, layer: Any) -> None:
    sizes = layer.lora_B[ADAPTER].weight.shape[0], layer.lora_A[ADAPTER].weight.shape[1]
    found = lora.up.shape[0], lora.down.shape[1]
    rank = layer.lora_A[ADAPTER].weight.shape[0]
    if found != sizes:
        raise RecipeError(
            f"trainable.init_from {path} is of another model: its LoRA of {name} maps "
            f"{found[1]} to {found[0]} numbers, and the layer {sizes[1]} to {sizes[0]}."
        )
    if lora.rank > rank:
        raise RecipeError(
            f"trainable.init_from {path} has rank {lora.rank}, and trainable.rank is {rank}. Set "
            f"trainable.rank = {lora.rank} or more."
        )
    if lora.magnitude is None:
        return
    if not getattr(layer, "lora_magnitude_vector", None):
        raise RecipeError(f'trainable.init_from {path} holds DoRA. Set trainable.kind = "dora".')
    if lora.magnitude.numel() != sizes[0]:
        raise RecipeError(
            f"trainable.init_from {path}: DoRA of {name} has {lora.magnitude.numel()} lengths of "
            f"rows, and the layer has {sizes[0]} rows."
        )

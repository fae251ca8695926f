"""Files of a model's LoRA for other tools: ComfyUI, pipelines of diffusers, peft."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from longtake.errors import RunError
from longtake.formatting import first_line
from longtake.models import file_header
from longtake.models.base import Family
from longtake.models.lora_files import COMFYUI_DORA
from longtake.models.numerics import DTYPES
from longtake.models.trainable import dora_norm_ratio, lora_layers, lora_state

LoraFormat = Literal["comfyui", "diffusers", "peft"]
ExportDtype = Literal["fp32", "bf16", "fp16"]

PEFT_PREFIX = "base_model.model."
"""Prefix of weights' names in peft's files; diffusers' `load_lora_adapter` takes it as `prefix`."""
_DTYPES: Mapping[str, torch.dtype] = {**DTYPES, "fp16": torch.float16}


def lora_weights(
    model: nn.Module, family: Family, wanted: LoraFormat
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return a model's LoRA under a tool's names, and metadata of the file; empty without LoRA.

    The tensors may be sharded over the ranks, all of which must call it then.

    Raises:
        RecipeError: ComfyUI does not know the family.
    """
    weights, metadata = lora_state(model), dict[str, str]()
    for name, layer in lora_layers(model) if wanted == "comfyui" else ():
        # ComfyUI stores DoRA's magnitude as a column, and divides by other norms than peft.
        if (magnitude := weights.pop(f"{name}.lora_magnitude_vector", None)) is not None:
            scale = magnitude.float() * dora_norm_ratio(layer)
            weights[f"{name}.dora_scale"] = scale.to(magnitude.dtype)[:, None]
            metadata = dict(COMFYUI_DORA)
    return lora_named(weights, family, wanted), metadata


def lora_named(
    weights: Mapping[str, Tensor], family: Family, wanted: LoraFormat
) -> dict[str, Tensor]:
    """Return LoRA with peft's names under those of a tool.

    Raises:
        RecipeError: ComfyUI does not know the family, or a layer of it.
    """
    if wanted == "comfyui":
        return family.comfyui_lora(weights)
    prefix = "transformer." if wanted == "diffusers" else PEFT_PREFIX
    return {f"{prefix}{name}": value for name, value in weights.items()}


def in_dtype(weights: Mapping[str, Tensor], dtype: str | None) -> dict[str, Tensor]:
    """Convert weights to a data type on the CPU; None keeps theirs.

    Raises:
        RunError: a number of them is too large for it.
    """
    converted = {}
    for name, value in weights.items():
        value = value.detach().to("cpu")
        converted[name] = value if dtype is None else value.to(_DTYPES[dtype])
        if dtype == "fp16" and converted[name].isinf().any() and not value.isinf().any():
            raise RunError(
                f"{name} has numbers up to {value.abs().max():.3g}, and fp16 holds none above "
                "65504: take bf16."
            )
    return converted


def write_weights(
    weights: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file, whose header gets metadata and the hash of the tensors.

    Raises:
        OSError: it cannot be written, such as to a full disk.
    """
    # safetensors only stores contiguous tensors.
    whole = {name: value.detach().contiguous() for name, value in weights.items()}
    try:
        save_file(whole, path, {"format": "pt", **(metadata or {}), **file_header.HASHES})
    except SafetensorError as error:
        raise OSError(first_line(error)) from error
    file_header.write_header(path)


def write_peft_folder(
    weights: Mapping[str, Tensor], config: Any, folder: Path, metadata: Mapping[str, str]
) -> None:
    """Write LoRA for peft into a folder, with its configuration."""
    write_weights(weights, folder / "adapter_model.safetensors", metadata)
    config.save_pretrained(str(folder))

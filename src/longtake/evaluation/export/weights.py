"""Writes tensors as other tools read them."""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

from longtake.models.added import added_module


def save_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file; no two of the tensors may share memory.

    Raises:
        OSError: it cannot be written.
    """
    whole = {name: value.detach().contiguous() for name, value in weights.items()}
    save_file(whole, path, {"format": "pt"})


def save_added_module(model: nn.Module, folder: Path) -> None:
    """Write `added_module.safetensors`, under the module's own names; nothing without a module.

    No other tool has a place for it.

    Raises:
        OSError: it cannot be written.
    """
    module = added_module(model)
    if module is not None:
        apart = {name: value.clone() for name, value in module.state_dict().items()}
        save_weights(apart, folder / "added_module.safetensors")

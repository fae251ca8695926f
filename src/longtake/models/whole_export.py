"""A trained transformer as one file for ComfyUI: names, layout, and weights in 8 bits."""

import math
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longtake.errors import ModelError
from longtake.formatting import printable
from longtake.models.added_module import block_names
from longtake.models.base import Family
from longtake.models.low_bit import LARGEST_CODE, LEAST_SCALE
from longtake.models.stored_weights import find_in_one_file, prefix_of, refuse_misfits
from longtake.models.weight_files import read_weights

_CODES = torch.float8_e4m3fn


class Piece(NamedTuple):
    """Rows of a model's tensor that are rows of a tensor of a file, from `start` on."""

    start: int
    length: int
    name: str
    at: int  # in the tensor of the model, of rows that are as long as those of the file


class Laid(NamedTuple):
    """A tensor of a file: its shape, and what of a model it consists of, in order."""

    shape: tuple[int, ...]
    pieces: list[Piece]

    def made_of(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Return this tensor for other weights of the model; it may share their memory."""
        rows = [weights[each.name].reshape(-1, *self.shape[1:]) for each in self.pieces]
        if len(rows) == 1 and len(rows[0]) == self.pieces[0].length:
            return rows[0].reshape(self.shape)
        parts = zip(rows, self.pieces, strict=True)
        cut = [value[each.at : each.at + each.length] for value, each in parts]
        return torch.cat(cut).reshape(self.shape)


def layout_of(file: Path, model: nn.Module, qkv_layout: str | None) -> dict[str, Laid]:
    """Return how a file of weights holds a model: the inverse of reading it.

    Raises:
        ModelError: the file cannot be read, or is of another model.
    """
    stored = read_weights(file)
    prefix = prefix_of(stored)
    laid = {
        key: Laid(each.shape, [])
        for key, each in stored.items()
        if key.startswith(prefix) and not key.endswith(".inv_freq")  # which is computed
    }
    found = find_in_one_file(file, model, qkv_layout)
    refuse_misfits(model, found, file, "this run", "--like", "Name a file of the same model.")
    for name, place in found.items():
        at = 0
        for key, start, stop, *_ in place.rows:
            length = (math.prod(stored[key].shape[:1]) if stop is None else stop) - start
            laid[key].pieces.append(Piece(start, length, name, at))
            at += length
    for key, (shape, pieces) in laid.items():
        pieces.sort()
        ends = list(accumulate((each.length for each in pieces), initial=0))
        if [*(each.start for each in pieces), math.prod(shape[:1])] != ends:
            raise ModelError(
                f"--like {file}: {printable(key)} has rows that no tensor of the model has. Name "
                f"another file of the same {type(model).__name__}."
            )
    return laid


def comfyui_layout(
    model: nn.Module, family: Family, like: Path | None, qkv_layout: str | None
) -> dict[str, Laid]:
    """Return the layout of a file of this model, or else the family's ComfyUI names.

    Raises:
        RecipeError: the family's names in ComfyUI are not known.
        ModelError: the file cannot be read, or is of another model.
    """
    if like is not None:
        return layout_of(like, model, qkv_layout)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    layout = {
        family.comfyui_name(name, is_lora=False): Laid(
            shape, [Piece(0, math.prod(shape[:1]), name, 0)]
        )
        for name, shape in shapes.items()
    }
    assert len(layout) == len(shapes), "two weights have one name"
    return layout


def in_scaled_fp8(
    weights: dict[str, Tensor], layout: dict[str, Laid], model: nn.Module, family: Family
) -> dict[str, Tensor]:
    """Convert matrices of linear layers in the blocks to fp8 with one scale each, others to bf16.

    These are the layers that `model.quantize` quantises. The names are those of ComfyUI's first
    format, which its later versions read, too; two numbers in its marker mean that the weights are
    scaled back before they are multiplied.
    """
    matrices = {
        f"{prefix}.{name}.weight"
        for prefix in block_names(model, family, ("*",))
        for name, layer in model.get_submodule(prefix).named_modules()
        if isinstance(layer, nn.Linear)
    }
    largest, made = LARGEST_CODE[_CODES], dict[str, Tensor]()
    for key, value in weights.items():
        if not matrices.issuperset(each.name for each in layout[key].pieces):
            made[key] = value.detach().to("cpu", torch.bfloat16)
            continue
        exact = value.detach().to("cpu", torch.float32)
        scale = (exact.abs().max() / largest).clamp(min=LEAST_SCALE)
        made[key] = (exact / scale).clamp(-largest, largest).to(_CODES)
        made[f"{key.removesuffix('weight')}scale_weight"] = scale
    return {**made, f"{prefix_of(made)}scaled_fp8": torch.zeros(2, dtype=_CODES)}

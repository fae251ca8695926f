"""Weights in safetensors files, of which each rank reads its own part and no more."""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from longtake.errors import ModelError

_NAME = "diffusion_pytorch_model.safetensors"
_THREADS = 4  # a network disk answers several at a time
_AT_A_TIME = 2**25
"""Bytes after which a file is mapped anew: what was read of it would count as memory until then."""


def files_in(folder: Path) -> dict[str, Path] | None:
    """The file of each tensor, by the tensor's name, as `save_pretrained` of diffusers writes them.

    None where they lie there in another way, or not whole: whoever knows more ways loads them.
    """
    try:
        if (folder / _NAME).is_file():
            with safe_open(folder / _NAME, framework="pt") as opened:
                return dict.fromkeys(opened.keys(), folder / _NAME)
        listed = json.loads((folder / f"{_NAME}.index.json").read_bytes())["weight_map"]
        found = {str(name): folder / file for name, file in listed.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError):
        return None
    return found if all(file.is_file() for file in set(found.values())) else None


def shapes_in(
    files: Mapping[str, Path], names: Mapping[str, object]
) -> dict[str, tuple[int, ...]] | None:
    """The shapes of tensors by name; only the files' heads are read. None: one cannot be."""
    shapes = {}
    try:
        for file, group in _by_file(files, names):
            with safe_open(file, framework="pt") as opened:
                shapes.update({name: tuple(opened.get_slice(name).get_shape()) for name in group})
    except (OSError, SafetensorError):
        return None
    return shapes


def read_into(tensors: Mapping[str, Tensor], files: Mapping[str, Path]) -> None:
    """Fill tensors, in their own dtypes; of a DTensor the part that this rank has.

    Raises:
        ModelError: a file cannot be read.
    """

    def read(file: Path, names: Sequence[str]) -> None:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in names:
                    _fill(tensors[name], opened.get_slice(name))
        except (OSError, RuntimeError, SafetensorError) as error:
            raise ModelError(
                f"{file} cannot be read: {error}. Download or copy it again."
            ) from error

    batches = [
        (file, names) for file, group in _by_file(files, tensors) for names in _cut(group, tensors)
    ]
    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(lambda each: read(*each), batches))


def _by_file(
    files: Mapping[str, Path], names: Mapping[str, object]
) -> list[tuple[Path, list[str]]]:
    ordered = sorted(names, key=lambda name: (files[name], name))
    return [(file, list(group)) for file, group in groupby(ordered, key=lambda name: files[name])]


def _cut(names: Sequence[str], tensors: Mapping[str, Tensor]) -> Iterator[Sequence[str]]:
    """Names in parts of not much more than so many bytes."""
    first = size = 0
    for number, name in enumerate(names):
        size += tensors[name].nbytes
        if size >= _AT_A_TIME:
            yield names[first : number + 1]
            first, size = number + 1, 0
    if first < len(names):
        yield names[first:]


@torch.no_grad()
def _fill(tensor: Tensor, stored: Any) -> None:
    """Copy the part of a stored tensor that a rank has; files are mapped, not read whole."""
    if not isinstance(tensor, DTensor):
        tensor.copy_(stored[...])
        return
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    if all(shape):
        part = tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))
        tensor.to_local().copy_(stored[part])

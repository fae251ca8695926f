"""Writes GGUF files of weights, as ComfyUI-GGUF's converter does."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor


def quantized(values: Tensor, kind: Kind) -> np.ndarray:
    """Values as bytes of a format; those that gguf cannot make are random, with finite scales."""
    try:
        return gguf.quantize(values.float().numpy(), kind)
    except NotImplementedError:
        block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        shape = (*values.shape[:-1], values.shape[-1] // block * num_bytes)
        # As fp16 a byte of at most 0x3f above any other is no more than 2.
        return np.random.default_rng(0).integers(0, 0x40, shape, np.uint8)


def write_gguf(
    file: Path,
    tensors: Mapping[str, tuple[np.ndarray, Kind]],
    folded: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """Write tensors in their formats; `folded` has the shapes of those stored in another one."""
    writer = gguf.GGUFWriter(file, "wan")
    for name, shape in (folded or {}).items():
        writer.add_array(f"comfy.gguf.orig_shape.{name}", list(shape))
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def dequantized(values: np.ndarray, kind: Kind) -> Tensor:
    return torch.from_numpy(gguf.dequantize(values, kind).copy())


def write_as_gguf(file: Path, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Write weights, matrices as Q8_0 where they divide into blocks; return what they are then."""
    stored = dict[str, tuple[np.ndarray, Kind]]()
    for name, value in weights.items():
        kind = Kind.Q8_0 if value.dim() == 2 and value.shape[1] % 32 == 0 else Kind.F32
        stored[name] = quantized(value, kind), kind
    write_gguf(file, stored)
    return {name: dequantized(*each) for name, each in stored.items()}

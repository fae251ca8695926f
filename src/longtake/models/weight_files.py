"""Opens files of weights for readers of tensors: safetensors, and GGUF by the package gguf.

Both are mapped into memory, and only the rows that are asked for are read. Blocks of GGUF's formats
of few bits become fp32 when they are read.
"""

import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from longtake import fsio
from longtake.errors import ModelError
from longtake.formatting import first_line, printable

PREFIXES = ("model.diffusion_model.", "diffusion_model.")
"""Beginnings of the transformer's names in ComfyUI's files; other names are of other parts then."""
_SCALES = (".scale_weight", ".weight_scale")  # of ComfyUI, and of later files
_NOT_WEIGHTS = (".scale_input", ".input_scale", ".comfy_quant", "scaled_fp8")
"""Endings of names that say how a file is to be multiplied, which changes none of its weights."""
_INT8 = "int8_tensorwise"  # of ComfyUI; rows may have a scale each, in spite of the name
_MOST_SETTINGS = 2**16  # bytes of a layer's comfy_quant
_FORMATS = (None, "float8_e4m3fn", "float8_e5m2", _INT8)
_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I8")  # as safetensors names them
_NOT_QUANTIZED = ("F64", "F32", "F16", "BF16")  # in GGUF, too
_KEPT = {"fp8": "F8_E4M3", "int8": "I8"}
"""Format of a file whose numbers quantised layers keep, by their own format."""
_DEQUANTIZED_AT_ONCE = 2**22  # weights; gguf's functions take several times their size
_MOST_READS = 2**17  # of a GGUF's header, for which gguf makes an array each; models have some 10^4
_OF_DAMAGE = OSError, SafetensorError, ValueError, AttributeError, TypeError, RecursionError


class Held(NamedTuple):
    """A tensor of weights in a file."""

    shape: tuple[int, ...]
    dtype: str
    """Name of its numbers in safetensors or GGUF, such as BF16, F8_E4M3 or Q4_K."""
    scale: str = ""
    """Name of the tensor by which values in 8 bits are multiplied; one number, or one a row."""
    group: int = 0
    """Number of columns that ComfyUI's ConvRot has rotated together; 0: it has not."""


@contextmanager
def open_weights(file: Path) -> Iterator[Any]:
    """Open a file of weights; a GGUF has the functions of safetensors' `safe_open` that are used.

    Raises:
        OSError, ValueError, SafetensorError: the file cannot be read.
    """
    if file.suffix.lower() == ".gguf":
        yield _Gguf(file)
        return
    with safe_open(file, framework="pt") as opened:
        yield opened


def read_weights(file: Path) -> dict[str, Held]:
    """Read what tensors of weights a file has, without their values.

    Raises:
        ModelError: the file cannot be read, or has weights in a format that longtake does not know.
    """
    try:
        fsio.open_regular(file).close()  # a named pipe would make the reader wait forever
        with open_weights(file) as opened:
            return _weights_in(opened, file)
    except _OF_DAMAGE as error:
        raise ModelError(
            f"{file} cannot be read: {first_line(error)}. Expected a safetensors or GGUF file of a "
            "model's weights: download or copy it again."
        ) from error


def quantized_again(file: Path, kind: str) -> list[str]:
    """Return a file's formats of few bits whose numbers quantised layers do not keep.

    Args:
        file: one file of weights.
        kind: value of model.quantize.
    """
    kept = _KEPT.get(kind.removesuffix("_dynamic"))
    held = read_weights(file).values()
    named = {f"rotated {each.dtype}" if each.group else each.dtype for each in held}
    return sorted(named - {*_NOT_QUANTIZED, kept})


def proposed_quantization(file: Path) -> str:
    """Return the model.quantize in whose numbers most of a file's weights are stored, or ""."""
    sizes = Counter[str]()
    for each in read_weights(file).values():
        sizes[each.dtype] += math.prod(each.shape)
    ((most, _),) = sizes.most_common(1) or [("", 0)]
    return next((kind for kind, dtype in _KEPT.items() if dtype == most), "")


def _weights_in(opened: Any, file: Path) -> dict[str, Held]:
    names = set(opened.keys())
    scale_of = {
        f"{name.removesuffix(ending)}.weight": name
        for name in names
        for ending in _SCALES
        if name.endswith(ending)
    }
    told = _quantization(opened, names)
    weights = dict[str, Held]()
    for name in sorted(names - set(scale_of.values())):
        if name.endswith(_NOT_WEIGHTS):
            continue
        stored, settings = opened.get_slice(name), told.get(name.removesuffix(".weight"), {})
        group = settings.get("convrot_groupsize", 256) if settings.get("convrot") else 0
        shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
        weights[name] = Held(shape, dtype, scale_of.get(name, ""), group)
        is_known = _can_dequantize(dtype) if isinstance(opened, _Gguf) else dtype in _DTYPES
        problem = _problem(weights[name], settings.get("format"), is_known=is_known)
        if problem is not None:
            raise _unknown_format(file, name, problem)
    for name, scale in scale_of.items():
        given = tuple(opened.get_slice(scale).get_shape())
        rows = weights[name].shape[:1] if name in weights else given
        if given not in ((), (1,), rows, (*rows, 1)):
            raise _unknown_format(file, scale, f"a scale of the shape {list(given)}")
    return weights


def _quantization(opened: Any, names: Collection[str]) -> dict[str, dict[str, Any]]:
    """Read ComfyUI's settings of quantised layers, by the layers' names in the file.

    They are in a tensor beside the weight, or in the file's header, maybe without the prefix.
    """
    header = json.loads((opened.metadata() or {}).get("_quantization_metadata", "{}"))
    listed = dict(header.get("layers", {}))
    for name in names:
        layer = name.removesuffix(".comfy_quant")
        if layer != name:
            stored = opened.get_slice(name)
            size = [*stored.get_shape()]
            # bytes() of a single number would be that many zeros.
            if stored.get_dtype() != "U8" or len(size) != 1 or size[0] > _MOST_SETTINGS:
                raise ValueError(f"{printable(name)} is {stored.get_dtype()} {size}, expected JSON")
            listed[layer] = json.loads(bytes(opened.get_tensor(name).tolist()))
    found = dict[str, dict[str, Any]]()
    for layer, given in listed.items():
        settings: dict[str, Any] = {"format": given} if isinstance(given, str) else dict(given)
        for prefix in ("", *PREFIXES):
            found[f"{prefix}{layer}"] = {**settings.get("params", {}), **settings}
    return found


def _problem(held: Held, format_: object, *, is_known: bool) -> str | None:
    """Return what of a weight is unknown, whose format ComfyUI's settings may name; or None."""
    if format_ not in _FORMATS:
        return str(format_)
    if not is_known:
        return held.dtype
    if held.dtype == "I8" and not (format_ == _INT8 and held.scale):
        return "I8 without a scale and ComfyUI's comfy_quant, which says if it is rotated"
    if held.group:
        is_power = held.group in [4**n for n in range(1, 9)]
        if not is_power or held.dtype != "I8" or len(held.shape) != 2 or held.shape[1] % held.group:
            return f"columns rotated in groups of {held.group}"
    return None


def _unknown_format(file: Path, name: str, what: str) -> ModelError:
    return ModelError(
        f"{file}: {printable(name)} is of a format that longtake does not read ({printable(what)})."
        " Take the model's file in bf16, fp16, fp32, in fp8 or ComfyUI's int8 with one scale for "
        "each tensor or row, or as GGUF; model.quantize keeps frozen weights in fewer bits."
    )


class _GgufTensor(NamedTuple):
    """The place of a tensor in a GGUF file."""

    kind: Any  # GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    block: int
    """Number of weights in a row that share a scale."""


@lru_cache(maxsize=4)
def _read_gguf(file: Path, _version: object) -> Mapping[str, _GgufTensor]:
    """Read the places of a GGUF file's tensors; `_version` changes when the file does."""
    import gguf

    class Reader(gguf.GGUFReader):
        """Ends where gguf would count on: past the file's end, or for hours."""

        num_reads = 0

        def _get(self, offset: int, dtype: Any, count: Any = 1, *order: Any, **named: Any) -> Any:
            self.num_reads += 1
            if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise ValueError("it ends too early")
            if self.num_reads > _MOST_READS:
                raise ValueError(f"its header has more than {_MOST_READS} numbers and names")
            return super()._get(offset, dtype, count, *order, **named)

    try:
        reader = Reader(file)
        if reader.byte_order != "I":
            raise ValueError("its numbers have the order of bytes of other processors")
        found = dict[str, _GgufTensor]()
        for each in reader.tensors:
            shape = tuple(int(size) for size in reversed(each.shape))
            # ComfyUI-GGUF's converter can fold a tensor, to have whole blocks in each row.
            folded = reader.get_field(f"comfy.gguf.orig_shape.{each.name}")
            if folded is not None:
                shape = tuple(int(size) for size in folded.contents())
            if min(shape, default=1) < 0 or math.prod(shape) != each.n_elements:
                raise ValueError(f"{printable(each.name)} has not the shape {list(shape)}")
            block, _ = gguf.GGML_QUANT_SIZES[each.tensor_type]
            found[each.name] = _GgufTensor(
                each.tensor_type, shape, each.data_offset, each.n_bytes, block
            )
    except Exception as error:  # gguf checks little: a damaged file raises anything
        raise ValueError(f"it is no complete GGUF file ({first_line(error)})") from error
    return found


@lru_cache
def _can_dequantize(dtype: str) -> bool:
    import gguf

    kind = gguf.GGMLQuantizationType[dtype]
    _, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.dequantize(np.zeros((1, num_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


class _Gguf:
    """An opened GGUF file, with the functions of safetensors' `safe_open` that are used."""

    def __init__(self, file: Path) -> None:
        self.tensors = _read_gguf(file, fsio.version_of(file.stat()))
        # Mapped anew each time: pages that were read count as memory as long as they are mapped.
        self.data = np.memmap(file, np.uint8, mode="r")

    def metadata(self) -> None:
        """What a GGUF says beside its tensors changes none of them."""

    def keys(self) -> list[str]:
        return list(self.tensors)

    def get_slice(self, name: str) -> "_GgufSlice":
        return _GgufSlice(self.tensors[name], self.data)

    def get_tensor(self, name: str) -> Tensor:
        return self.get_slice(name)[...]


class _GgufSlice:
    """A tensor of a GGUF file, of which parts are read as fp32."""

    def __init__(self, tensor: _GgufTensor, data: np.ndarray[Any, Any]) -> None:
        self.tensor = tensor
        self.data = data[tensor.offset : tensor.offset + tensor.num_bytes]

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        name: str = self.tensor.kind.name
        return name

    def __getitem__(self, index: Any) -> Tensor:
        shape = self.tensor.shape
        width = math.prod(shape[1:])
        if not shape or width % self.tensor.block:  # a block has weights of several rows
            return self._dequantized(self.data[None], 1, math.prod(shape)).view(shape)[index]
        rows, *others = (slice(None),) if index is ... else index
        start, stop, _ = rows.indices(shape[0])
        data = self.data.reshape(shape[0], -1)[start:stop]
        read = self._dequantized(data, len(data), width).view(len(data), *shape[1:])
        return read[(slice(None), *others)]

    def _dequantized(self, data: np.ndarray[Any, Any], num_rows: int, width: int) -> Tensor:
        import gguf

        made = np.empty((num_rows, width), np.float32)
        step = max(1, _DEQUANTIZED_AT_ONCE // max(1, width))
        for at in range(0, num_rows, step):
            rows = slice(at, at + step)
            made[rows] = gguf.dequantize(data[rows], self.tensor.kind)
        return torch.from_numpy(made)

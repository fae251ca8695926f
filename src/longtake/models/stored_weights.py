"""Finds a transformer's weights in safetensors files: in a release's, or in one of another layout.

Such one file has the names of the model's own authors or of ComfyUI, joined projections, and maybe
weights in 8 bits with scales. diffusers' converters rename, split and reorder its tensors. They are
run once, on tensors whose rows are numbered in place of weights, which tells where in the file each
row of the model is: nothing but a rank's share is read later.
"""

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from longtake import fsio
from longtake.errors import ModelError
from longtake.formatting import plural, printable

_PREFIXES = ("model.diffusion_model.", "diffusion_model.")
"""Beginnings of the transformer's names in ComfyUI's files; other names are of other parts then."""
_SCALES = (".scale_weight", ".weight_scale")  # of ComfyUI, and of later files
_NOT_WEIGHTS = (".scale_input", ".input_scale", ".comfy_quant", "scaled_fp8")
"""Endings of names that say how a file is to be multiplied, which changes none of its weights."""
_FORMATS = ("float8_e4m3fn", "float8_e5m2")
_LATER_NAMES = {"prompt_adaln_single.": "prompt_adaln."}
"""Names of LTX-2.3 that diffusers' converter of LTX-2 leaves as they are."""
_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")  # as safetensors names them


class Rows(NamedTuple):
    """Rows of one tensor of a file."""

    key: str
    start: int = 0
    stop: int | None = None
    """None: the whole tensor, which may have no rows at all."""
    scale: str = ""
    """Name of the tensor by which values in 8 bits are multiplied; one number, or one a row."""


@dataclass(frozen=True)
class StoredTensor:
    """The place of a model's tensor in a file."""

    file: Path
    rows: tuple[Rows, ...]
    shape: tuple[int, ...] | None = None
    """Shape in the model; None: that of the one tensor in the file."""
    is_reshaped: bool = False
    """True if rows of the file are not rows of the model."""

    def shape_in(self, opened: Any) -> tuple[int, ...]:
        """Return the tensor's shape; `opened` is its file."""
        return self.shape or tuple(opened.get_slice(self.rows[0].key).get_shape())

    def read(self, opened: Any, part: tuple[slice, ...] | None = None) -> Tensor:
        """Read the tensor, or a part of it; values in 8 bits with a scale become fp32."""
        if len(self.rows) == 1 and not self.is_reshaped:
            return _multiplied(*_read(opened, self.rows[0], part))
        whole = torch.cat([_multiplied(*_read(opened, each)) for each in self.rows])
        if self.is_reshaped and self.shape is not None:
            whole = whole.view(self.shape)
        return whole if part is None else whole[part]

    def read_codes(self, opened: Any) -> tuple[Tensor, Tensor] | None:
        """Read a matrix in 8 bits as codes, and scales [rows, 1]; None if it has no scales."""
        if not all(each.scale for each in self.rows):
            return None
        read = [_read(opened, each) for each in self.rows]
        scales = [scale.expand(len(codes), 1) for codes, scale in read if scale is not None]
        return torch.cat([codes for codes, _ in read]), torch.cat(scales)


def _read(
    opened: Any, rows: Rows, part: tuple[slice, ...] | None = None
) -> tuple[Tensor, Tensor | None]:
    """Read values of rows and their scale, which may be one for all; `part` counts from `start`."""
    index: Any = ... if part is None else part
    if rows.stop is not None:
        first, *others = part or (slice(0, rows.stop - rows.start),)
        index = (slice(first.start + rows.start, first.stop + rows.start), *others)
    values: Tensor = opened.get_slice(rows.key)[index]
    if not rows.scale:
        return values, None
    scale = opened.get_tensor(rows.scale).float().reshape(-1, *[1] * (values.dim() - 1))
    return values, scale if len(scale) == 1 or index is ... else scale[index[0]]


def _multiplied(values: Tensor, scale: Tensor | None) -> Tensor:
    return values if scale is None else values.float() * scale


def find_in_one_file(file: Path, model: nn.Module) -> dict[str, StoredTensor]:
    """Find a transformer's tensors in one file, by their names in the model.

    The file has these names, or those that diffusers converts to them; the better fit is taken.

    Raises:
        ModelError: the file cannot be read, or has weights in a format that longtake does not know.
    """
    shapes, scales = _weights_of(file)
    prefix = next((each for each in _PREFIXES if any(k.startswith(each) for k in shapes)), "")
    keys = {key.removeprefix(prefix): key for key in shapes if key.startswith(prefix)}

    def in_file(rows: Rows) -> Rows:
        key = keys[rows.key]
        return rows._replace(key=key, scale=scales.get(key, ""))

    found = {name: StoredTensor(file, (in_file(Rows(name)),)) for name in keys}
    expected = model.state_dict().keys()
    convert = _converter(type(model))
    if found.keys() == expected or convert is None:
        return found
    try:
        converted = _converted(file, {name: shapes[key] for name, key in keys.items()}, convert)
    except Exception:  # of a file in no layout that it knows, a converter raises anything
        return found
    if len(expected - converted.keys()) >= len(expected - found.keys()):
        return found
    return {
        name: replace(each, rows=tuple(in_file(rows) for rows in each.rows))
        for name, each in converted.items()
    }


def refuse_misfits(
    model: nn.Module, found: Mapping[str, StoredTensor], file: Path, release: str
) -> None:
    """Refuse one file that is not exactly a model's weights, whose shapes are those of a release.

    Raises:
        ModelError: with the first names that are missing, left over, or of another shape.
    """
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    missing, more = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    with safe_open(file, "pt") as opened:
        shapes = {name: found[name].shape_in(opened) for name in expected.keys() & found.keys()}
    other = [name for name in sorted(shapes) if shapes[name] != expected[name]]
    name, title = f"model.pretrained {file}", type(model).__name__
    problems = []
    if missing:
        problems.append(f"lacks {len(missing)} of {len(expected)} tensors, such as {missing[0]}")
    if more:
        problems.append(f"has {plural(len(more), 'tensor')} too many, such as {printable(more[0])}")
    if other:
        first = f"{other[0]} ({[*shapes[other[0]]]} in place of {[*expected[other[0]]]})"
        problems.append(f"has {plural(len(other), 'tensor')} of another shape, such as {first}")
    if not problems:
        return
    known = (
        ""
        if _converter(type(model))
        else (f" diffusers converts no other layout of a {title}: the file must have its names.")
    )
    raise ModelError(
        f"{name} does not fit the {title} of {release}: it {'; it '.join(problems)}.{known} Set "
        "model.config_from to the release that the file was made of, or name another file."
    )


def _weights_of(file: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Read the shapes of a file's weights, and the names of the scales of those in 8 bits."""
    shapes = dict[str, tuple[int, ...]]()
    try:
        fsio.open_regular(file).close()  # a named pipe would make safetensors wait forever
        with safe_open(file, "pt") as opened:
            names = set(opened.keys())
            scale_of = {
                f"{name.removesuffix(ending)}.weight": name
                for name in names
                for ending in _SCALES
                if name.endswith(ending)
            }
            for name in sorted(names - set(scale_of.values())):
                stored = opened.get_slice(name)
                if name.endswith(".comfy_quant"):
                    settings = bytes(opened.get_tensor(name).tolist())
                    if (kind := json.loads(settings).get("format")) not in _FORMATS:
                        raise _unknown_format(file, name, printable(str(kind)))
                if name.endswith(_NOT_WEIGHTS):
                    continue
                shapes[name] = tuple(stored.get_shape())
                if stored.get_dtype() not in _DTYPES:
                    raise _unknown_format(file, name, stored.get_dtype())
            for name, scale in scale_of.items():
                given = tuple(opened.get_slice(scale).get_shape())
                if name in shapes and given not in (
                    (),
                    (1,),
                    shapes[name][:1],
                    (shapes[name][0], 1),
                ):
                    raise _unknown_format(file, scale, f"a scale of the shape {list(given)}")
    except (OSError, SafetensorError, ValueError) as error:
        raise ModelError(
            f"model.pretrained {file} cannot be read: {error}. Expected a safetensors file."
        ) from error
    return shapes, scale_of


def _unknown_format(file: Path, name: str, what: str) -> ModelError:
    return ModelError(
        f"{file}: {name} is of a format that longtake does not read ({what}). Take the model's "
        "file in bf16, fp16, fp32, or in fp8 with one scale for each tensor or row; model.quantize "
        "keeps frozen weights in fewer bits."
    )


def _converter(model_class: type) -> Callable[..., dict[str, Tensor]] | None:
    """Return diffusers' converter of the original layout of a class; None if it has none."""
    known = importlib.import_module("diffusers.loaders.single_file_model")
    rows = (known.SINGLE_FILE_LOADABLE_CLASSES.get(each.__name__) for each in model_class.__mro__)
    return next((row["checkpoint_mapping_fn"] for row in rows if row is not None), None)


def _converted(
    file: Path, shapes: Mapping[str, tuple[int, ...]], convert: Callable[..., dict[str, Tensor]]
) -> dict[str, StoredTensor]:
    """Run a converter on numbered rows, and return where each converted tensor's rows are.

    A vector has one number for each value; a larger tensor one for each row, and its other sizes
    are 1: no converter of a transformer that longtake trains changes anything within a row.
    """
    names, numbered, starts = list(shapes), dict[str, Tensor](), [0]
    for name in names:
        shape = shapes[name]
        count = shape[0] if shape else 1
        numbers = torch.arange(starts[-1], starts[-1] + count)
        numbered[name] = numbers.view(*shape[:1], *[1] * len(shape[1:]))
        starts.append(starts[-1] + count)
    places = dict[str, StoredTensor]()
    for name, value in convert(numbered).items():
        for before, after in _LATER_NAMES.items():
            name = name.replace(before, after)
        places[name] = _place(file, value, names, torch.tensor(starts), shapes)
    return places


def _place(
    file: Path,
    numbers: Tensor,
    names: Sequence[str],
    starts: Tensor,
    shapes: Mapping[str, tuple[int, ...]],
) -> StoredTensor:
    """Return the rows of a file that a converted tensor of numbers stands for."""
    if numbers.dtype != torch.int64:
        raise ValueError("a converter that calculates with weights")
    flat = numbers.flatten()
    owners = torch.searchsorted(starts, flat, right=True) - 1
    is_cut = (flat.diff() != 1) | (owners.diff() != 0)
    ends = [*(is_cut.nonzero().flatten() + 1).tolist(), len(flat)]
    rows = list[Rows]()
    begin = 0
    for end in ends:
        name = names[int(owners[begin])]
        first = int(flat[begin] - starts[owners[begin]])
        rows.append(Rows(name, first, first + end - begin))
        begin = end
    source = shapes[rows[0].key]
    shape = (*numbers.shape[:1], *source[1:]) if len(source) == numbers.dim() else (*numbers.shape,)
    if shape == source and len(rows) == 1:
        return StoredTensor(file, (Rows(rows[0].key),))
    return StoredTensor(file, tuple(rows), shape, len(source) != len(shape))

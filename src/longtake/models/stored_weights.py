"""Finds a transformer's weights in files: in a release's, or in one file of another layout.

Such one file has the names of the model's own authors or of ComfyUI, joined projections, and maybe
weights in fewer bits. diffusers' converters rename, split and reorder its tensors. They are run
once, on tensors whose rows are numbered in place of weights, which tells where in the file each
row of the model is: nothing but a rank's share is read later.
"""

import importlib
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longtake.errors import ModelError
from longtake.formatting import plural, printable
from longtake.models.original_names import converter_of
from longtake.models.weight_files import PREFIXES, open_weights, read_weights

_LATER_NAMES = {"prompt_adaln_single.": "prompt_adaln."}
"""Names of LTX-2.3 that diffusers' converter of LTX-2 leaves as they are."""


class Rows(NamedTuple):
    """Rows of one tensor of a file."""

    key: str
    start: int = 0
    stop: int | None = None
    """None: the whole tensor, which may have no rows at all."""
    scale: str = ""
    """Name of the tensor by which values in 8 bits are multiplied; one number, or one a row."""
    group: int = 0
    """Number of columns that are rotated together; 0: none."""


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
            return _read_exact(opened, self.rows[0], part)
        whole = torch.cat([_read_exact(opened, each) for each in self.rows])
        if self.is_reshaped and self.shape is not None:
            whole = whole.view(self.shape)
        return whole if part is None else whole[part]

    def read_codes(self, opened: Any) -> tuple[Tensor, Tensor] | None:
        """Read a matrix in 8 bits as codes, and scales [rows, 1], which are 1 for plain fp8.

        None if it is not in 8 bits, or rotated.
        """
        is_in_8_bits = all(
            each.scale or opened.get_slice(each.key).get_dtype() == "F8_E4M3" for each in self.rows
        )
        if not is_in_8_bits or any(each.group for each in self.rows):
            return None
        read = [_read(opened, each) for each in self.rows]
        one = torch.ones(1, 1)
        scales = [(one if scale is None else scale).expand(len(codes), 1) for codes, scale in read]
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


def _read_exact(opened: Any, rows: Rows, part: tuple[slice, ...] | None = None) -> Tensor:
    """Read values of rows; those in 8 bits with a scale become fp32."""
    if rows.group and part is not None:  # of a rotation all columns are needed
        return _read_exact(opened, rows, part[:1])[:, *part[1:]]
    values, scale = _read(opened, rows, part)
    if scale is not None:
        values = values.float() * scale
    if not rows.group:
        return values
    groups = torch.unflatten(values.float(), 1, (-1, rows.group)) @ _rotation(rows.group)
    return groups.flatten(1)


@cache
def _rotation(size: int) -> Tensor:
    """Return ConvRot's rotation: the regular Hadamard matrix of a size that is a power of 4.

    It is symmetric and orthogonal, and so its own inverse.
    """
    matrix = seed = 1 - 2 * torch.eye(4).flip(0)
    while len(matrix) < size:
        matrix = torch.kron(matrix, seed)
    return matrix / math.sqrt(size)


def find_in_one_file(
    file: Path, model: nn.Module, qkv_layout: str | None = None
) -> dict[str, StoredTensor]:
    """Find a transformer's tensors in one file, by their names in the model.

    The file has these names, or those that diffusers converts to them; the better fit is taken.

    Args:
        file: a safetensors file.
        model: the transformer, which may be on the meta device.
        qkv_layout: `model.qkv_layout` of the recipe.

    Raises:
        ModelError: the file cannot be read, has weights in a format that longtake does not know, or
            may have its rows in two orders.
    """
    weights = read_weights(file)
    prefix = prefix_of(weights)
    keys = {key.removeprefix(prefix): key for key in weights if key.startswith(prefix)}

    def in_file(rows: Rows) -> Rows:
        key = keys[rows.key]
        return rows._replace(key=key, scale=weights[key].scale, group=weights[key].group)

    found = {name: StoredTensor(file, (in_file(Rows(name)),)) for name in keys}
    expected = model.state_dict().keys()
    convert = _converter(type(model))
    if found.keys() == expected or convert is None:
        return found
    if "qkv_layout" in inspect.signature(convert).parameters:
        if qkv_layout is None:
            raise ModelError(
                f"{file} joins queries, keys and values, and two orders of their "
                "rows are in use, which no name or shape tells apart. Set model.qkv_layout = "
                '"stacked" for a file made for ComfyUI, such as Comfy-Org\'s, or "interleaved" '
                "for one that was joined from MiniMax's own files."
            )
        config: Any = model.config
        convert = partial(convert, config=config, qkv_layout=qkv_layout)
    try:
        shapes = {name: weights[key].shape for name, key in keys.items()}
        converted = _converted(file, shapes, convert)
    except Exception:  # of a file in no layout that it knows, a converter raises anything
        return found
    if len(expected - converted.keys()) >= len(expected - found.keys()):
        return found
    return {
        name: replace(each, rows=tuple(in_file(rows) for rows in each.rows))
        for name, each in converted.items()
    }


def prefix_of(names: Collection[str]) -> str:
    """Return what ComfyUI's files have before the names of a transformer, or nothing."""
    return next((each for each in PREFIXES if any(n.startswith(each) for n in names)), "")


def refuse_misfits(
    model: nn.Module,
    found: Mapping[str, StoredTensor],
    file: Path,
    release: str,
    key: str = "model.pretrained",
    advice: str = "Set model.config_from to the release that the file was made of, or name another "
    "file.",
) -> None:
    """Refuse one file that is not exactly a model's weights, whose shapes are those of a release.

    `key` is the recipe key or the option that names the file.

    Raises:
        ModelError: with the first names that are missing, left over, or of another shape.
    """
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    missing, more = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    with open_weights(file) as opened:
        shapes = {name: found[name].shape_in(opened) for name in expected.keys() & found.keys()}
    other = [name for name in sorted(shapes) if shapes[name] != expected[name]]
    name, title = f"{key} {file}", type(model).__name__
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
        else (f" No other layout of a {title} is known: the file must have diffusers' names.")
    )
    raise ModelError(
        f"{name} does not fit the {title} of {release}: it {'; it '.join(problems)}.{known} "
        f"{advice}"
    )


def _converter(model_class: type) -> Callable[..., dict[str, Tensor]] | None:
    """Return a converter of a class's original layout, diffusers' or ours; None without one."""
    known = importlib.import_module("diffusers.loaders.single_file_model")
    names = [each.__name__ for each in model_class.__mro__]
    rows = (known.SINGLE_FILE_LOADABLE_CLASSES.get(name) for name in names)
    theirs = (row["checkpoint_mapping_fn"] for row in rows if row is not None)
    return next(theirs, next(filter(None, map(converter_of, names)), None))


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

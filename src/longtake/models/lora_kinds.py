"""Kinds of updates in LoRA files: LoRA itself, and LoHa and LoKr of LyCORIS.

All are made of products of two matrices: one for LoRA; the elementwise (LoHa) or the Kronecker
product (LoKr) of two. So LoHa and LoKr are LoRA, too, whose rank is the product of two ranks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from longtake.models.trainable import ADAPTER, dora_norm_ratio, lora_row_norms

Kind = Literal["lora", "loha", "lokr"]

_MATRICES = ("hada_w1", "hada_w2", "lokr_w1", "lokr_w2")
LYCORIS_PARTS = tuple(f"{name}{end}" for name in _MATRICES for end in ("", "_a", "_b"))
"""Last parts of the names of LoHa's and LoKr's tensors."""

_PAIRS: Mapping[Kind, tuple[tuple[str, str], ...]] = {
    "lora": (("up", "down"),),
    "loha": (("hada_w1_a", "hada_w1_b"), ("hada_w2_a", "hada_w2_b")),
    "lokr": (("lokr_w1_a", "lokr_w1_b"), ("lokr_w2_a", "lokr_w2_b")),
}
EXPECTED: Mapping[Kind, str] = {
    "lora": "down [rank, in], up [out, rank]",
    "loha": "hada_w1_a and hada_w2_a [out, rank], hada_w1_b and hada_w2_b [rank, in]",
    "lokr": "lokr_w1 and lokr_w2, each one matrix or two (_a [rows, rank], _b [rank, columns]), ",
}


@dataclass(frozen=True)
class Factor:
    """A matrix, or the product of two."""

    left: Tensor  # [rows, columns], or [rows, rank] with `right`
    right: Tensor | None = None  # [rank, columns]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.left), (self.left if self.right is None else self.right).shape[1]

    @property
    def rank(self) -> int:
        return min(self.left.shape) if self.right is None else len(self.right)

    def whole(self) -> Tensor:
        left = self.left.float()
        return left if self.right is None else left @ self.right.float()

    def pair(self) -> tuple[Tensor, Tensor]:
        """Return two matrices with this product; the inner size is `rank`."""
        left = self.left.float()
        if self.right is not None:
            return left, self.right.float()
        unit = torch.eye(self.rank)
        return (left, unit) if left.shape[0] >= left.shape[1] else (unit, left)


@dataclass(frozen=True)
class Update:
    """What a file adds to one layer, without its strength."""

    kind: Kind
    factors: tuple[Factor, ...]

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = zip(*(each.shape for each in self.factors), strict=True)
        if self.kind == "lokr":
            return math.prod(rows), math.prod(columns)
        return rows[0], columns[0]

    @property
    def rank(self) -> int:
        """The rank of this update as LoRA."""
        return math.prod(each.rank for each in self.factors)

    @property
    def trained_rank(self) -> int | None:
        """The rank that alpha is divided by; None for LoKr of two full matrices."""
        return next((each.rank for each in self.factors if each.right is not None), None)

    def rank_in(self, heights: Sequence[int]) -> int:
        """The rank as LoRA of layers that are one in the file, with so many rows."""
        if self.kind != "lora":
            return self.rank  # without making the matrices, which may be large
        return max(len(down) for down, _ in divide(*self.as_lora(), heights))

    def as_lora(self) -> tuple[Tensor, Tensor]:
        """Return A [rank, in] and B [out, rank] whose product B A is this update."""
        if self.kind == "lora":
            (factor,) = self.factors
            assert factor.right is not None
            return factor.right, factor.left
        (left, right), (left_2, right_2) = (each.pair() for each in self.factors)
        if self.kind == "lokr":
            return torch.kron(right, right_2), torch.kron(left, left_2)
        # (a b) * (c d), elementwise, is a sum over pairs of a column of a and one of c.
        down = right[:, None] * right_2[None]
        return down.flatten(0, 1), (left[:, :, None] * left_2[:, None]).flatten(1)


def divide(down: Tensor, up: Tensor, heights: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Return the LoRA of layers that are one in a file, from its A and B; rows by `heights`.

    kohya's scripts can train a LoRA for each of them, and store zeros in the others' columns: they
    are left out, and with them the rows of A that they belong to.
    """
    parts = []
    for rows in torch.split(up, list(heights)):
        kept = rows.any(dim=0) if len(heights) > 1 else torch.ones(len(down), dtype=torch.bool)
        parts.append((down, rows) if kept.all() else (down[kept], rows[:, kept]))
    return parts


def kind_of(names: Mapping[str, Any]) -> Kind:
    """Return the kind of update whose parts have these names."""
    if any("lokr_" in name for name in names):
        return "lokr"
    return "loha" if any("hada_" in name for name in names) else "lora"


def missing_part(parts: Mapping[str, Tensor]) -> str | None:
    """Return the name of a tensor that a layer's update lacks, or None."""
    for left, right in _PAIRS[kind_of(parts)]:
        if left.removesuffix("_a") not in parts or left in parts:
            for each in (right, left):
                if each not in parts:
                    return each if "_" in each else f"lora {each}"
    return None


def read_update(parts: Mapping[str, Tensor]) -> Update | None:
    """Return the update of a layer's tensors, none of which is missing; None if they do not fit."""
    kind, used = kind_of(parts), {"alpha", "magnitude"}
    factors = []
    for left, right in _PAIRS[kind]:
        names = (left, right) if left in parts else (left.removesuffix("_a"),)
        used.update(names)
        factors.append(Factor(*(parts[name] for name in names)))
    if parts.keys() - used or ("alpha" in parts and parts["alpha"].numel() != 1):
        return None
    for factor in factors:
        if factor.left.ndim != 2 or not factor.left.numel():
            return None
        if factor.right is not None and (
            factor.right.ndim != 2 or len(factor.right) != factor.left.shape[1]
        ):
            return None
    if kind == "loha" and factors[0].shape != factors[1].shape:
        return None
    if len({each.rank for each in factors if each.right is not None}) > 1:
        return None  # tools would divide alpha by different ranks
    return Update(kind, tuple(factors))


@dataclass(frozen=True)
class StoredLora:
    """The LoRA of one layer as stored in a file."""

    down: Tensor  # [rank, in]
    up: Tensor  # [out, rank]
    scale: float
    magnitude: Tensor | None  # [out] of DoRA
    is_for_comfyui: bool = False
    """True if the DoRA magnitude must be divided by `dora_norm_ratio`, as it was made for
    ComfyUI."""

    @property
    def rank(self) -> int:
        return len(self.down)

    def load(self, layer: Any) -> None:
        """Set a layer's LoRA; what it has of a higher rank changes nothing at first."""
        down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        # The file's scale is folded into B, because the layer multiplies by its own alpha / rank.
        scale = self.scale / layer.scaling[ADAPTER]
        down[: self.rank] = self.down.to(down.dtype)
        up.zero_()
        up[:, : self.rank] = (self.up if scale == 1 else self.up.float() * scale).to(up.dtype)
        if not layer.lora_magnitude_vector:
            return
        if self.magnitude is None:  # rows as long as LoRA makes them
            magnitude = lora_row_norms(layer)
        else:
            ratio = dora_norm_ratio(layer) if self.is_for_comfyui else 1.0
            magnitude = self.magnitude.flatten().float() / ratio
        layer.lora_magnitude_vector[ADAPTER].weight.copy_(magnitude)


@dataclass(frozen=True)
class StoredLokr:
    """The LoKr of one layer as stored in a file."""

    factors: tuple[Factor, ...]
    scale: float
    rank: int

    def load(self, layer: Any) -> None:
        """Set a layer's LoKr; what it has of a higher rank changes nothing at first."""
        for number, (factor, own) in enumerate(zip(self.factors, lokr_factors(layer), strict=True)):
            # The first factor gets the scale, as the layer multiplies by its own.
            scale = 1.0 if number else self.scale / layer.scaling[ADAPTER]
            if own.right is None:
                own.left.copy_(factor.whole() * scale)
                continue
            left, right = factor.pair()
            own.left.zero_()
            own.left[:, : factor.rank] = (left * scale).to(own.left.dtype)
            own.right[: factor.rank] = right.to(own.right.dtype)


def lokr_factors(layer: Any) -> tuple[Factor, Factor]:
    """Return the two factors of a layer of peft with LoKr; they share its memory."""

    def factor(name: str) -> Factor:
        held = getattr(layer, name)
        if ADAPTER in held:
            return Factor(held[ADAPTER])
        return Factor(getattr(layer, f"{name}_a")[ADAPTER], getattr(layer, f"{name}_b")[ADAPTER])

    return factor("lokr_w1"), factor("lokr_w2")

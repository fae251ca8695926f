"""Program that tries attention kernels, forward and backward, against the formula in fp32.

It reads cases and refused kernels as JSON from stdin, and writes a line before and after each
attempt: after a crash the last line names what was tried. See `longtake.planner.attention_check`.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import TypeAdapter
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from longtake.parallel import attention_rules
from longtake.parallel.attention_rules import AttentionKind, Kernel, KernelChoice, Layout

TOLERANCE = 0.05
"""Bound of the relative error (of norms) of the output and each gradient. Kernels in bf16 stay
within 0.01 of the formula; a wrong layout gives 1.
"""
_MOST_SAMPLES, _MOST_HEADS, _MOST_TOKENS, _TILE = 2, 4, 1024, 128
_ROUNDS = 2


class AttentionCase(NamedTuple):
    """An attention call of a model, made small for a trial.

    Lengths keep their remainder beyond whole tiles of the kernels.
    """

    kind: AttentionKind
    num_samples: int
    heads: tuple[int, int]  # queries, keys
    lengths: tuple[int, int]  # queries, keys
    mask: tuple[int, ...]  # shape of the mask; () without one


class Trials(NamedTuple):
    """The program's input: the attention calls (cases) of a model to try on a device."""

    device: str
    cases: tuple[AttentionCase, ...]
    refused: tuple[tuple[Kernel, ...], ...]  # by case


class Attempt(NamedTuple):
    """A line of the trial's output, before or after it computes a case by one kernel."""

    case: int
    kernel: Kernel
    why: str | None  # None: it begins; "": it agrees; else the fault


def case_of(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool
) -> AttentionCase:
    """Return the small case of an attention call with query, key and value [B, H, T, D].

    Mask dimensions of stride 0 get size 1.
    """

    def length(tokens: int) -> int:
        return tokens if tokens <= _MOST_TOKENS + _TILE else _MOST_TOKENS + tokens % _TILE

    # Heads are taken away in groups that share their keys.
    ratio = query.shape[1] // key.shape[1]
    num_keys = min(key.shape[1], max(1, _MOST_HEADS // ratio))
    samples, heads = min(len(query), _MOST_SAMPLES), (num_keys * ratio, num_keys)
    lengths = length(query.shape[2]), length(key.shape[2])
    shape: tuple[int, ...] = ()
    if mask is not None:
        whole = (samples, heads[0], *lengths)[-mask.dim() :]
        used = zip(mask.shape, mask.stride(), whole, strict=True)
        shape = tuple(size if old > 1 and stride else 1 for old, stride, size in used)
    kind = attention_rules.kind_of(query, key, value, mask, is_causal=is_causal)
    return AttentionCase(kind, samples, heads, lengths, shape)


def make_inputs(case: AttentionCase, device: str) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """Make a case's query, key, value and mask, and the gradient [B, T, H, D] of the output."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, case.kind.dtype)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    def laid_out(shape: Sequence[int], layout: Layout) -> Tensor:
        strides, packed = [0] * len(shape), 1
        for dim, gap in reversed(layout):
            strides[dim] = gap * packed
            packed = max(packed, strides[dim] * shape[dim])
        strides = [
            stride if size > 1 else packed for stride, size in zip(strides, shape, strict=True)
        ]
        num_values = 1 + sum(s * (n - 1) for s, n in zip(strides, shape, strict=True))
        return draw(num_values).as_strided(shape, strides)

    (queries, keys), (length, key_length) = case.heads, case.lengths
    width, value_width = case.kind.widths
    shapes = [
        (case.num_samples, queries, length, width),
        (case.num_samples, keys, key_length, width),
        (case.num_samples, keys, key_length, value_width),
    ]
    inputs = [laid_out(*each) for each in zip(shapes, case.kind.layouts, strict=True)]
    mask = draw(*case.mask) > -1 if case.kind.is_masked else None
    if mask is not None:
        mask[..., 0] = True  # a row without any key has no attention
    return inputs, mask, draw(case.num_samples, length, queries, value_width)


def _attend(
    case: AttentionCase, inputs: Sequence[Tensor], mask: Tensor | None, gradient: Tensor
) -> list[Tensor]:
    """Compute attention; return the output and the gradients of query, key and value."""
    query, key, value = leaves = [each.detach().requires_grad_() for each in inputs]
    how: Any = {"is_causal": case.kind.is_causal, "enable_gqa": case.kind.shares_keys}
    output = F.scaled_dot_product_attention(query, key, value, mask, **how)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]


class _Trial:
    """A case to try: its inputs, and the results that the formula in fp32 gives."""

    def __init__(self, number: int, case: AttentionCase, device: str) -> None:
        self.number, self.case, self.device = number, case, device
        self.inputs, self.mask, gradient = make_inputs(case, device)
        with sdpa_kernel(SDPBackend.MATH):
            wide = [each.float() for each in self.inputs]
            exact = gradient.float().transpose(1, 2)
            self.expected = _attend(case, wide, self.mask, exact)
        # The same gradient with gaps in memory: some kernels read it by another layout.
        wider = torch.cat([gradient.flatten(2)] * 3, dim=2)
        gapped = wider[..., : wider.shape[2] // 3].unflatten(2, gradient.shape[2:])  # type: ignore[no-untyped-call]
        self.gradients = [gradient.transpose(1, 2), gapped.transpose(1, 2)]

    def chosen(self) -> Kernel:
        how = {"is_causal": self.case.kind.is_causal, "enable_gqa": self.case.kind.shares_keys}
        query, key, value = self.inputs
        return attention_rules.kernel_of(query, key, value, self.mask, how)

    def find_fault(self, gradient: Tensor) -> str:
        try:
            results = _attend(self.case, self.inputs, self.mask, gradient)
            pairs = zip(results, self.expected, strict=True)
            errors = [float((one.float() - two).norm() / two.norm()) for one, two in pairs]
        except Exception as error:  # a kernel may raise anything
            if self.device != "cpu":
                torch.ones(1, device=self.device).sum().item()  # raises if CUDA is lost: a crash
            return f"fails: {str(error).partition(chr(10))[0][:200]}"
        names = ("output", "gradient of queries", "gradient of keys", "gradient of values")
        # NaN, which does not equal itself, counts as the largest error.
        worst = max(range(4), key=lambda each: (errors[each] != errors[each], errors[each]))
        if errors[worst] <= TOLERANCE:
            return ""
        return f"differs from the formula by {errors[worst]:.2g} of its {names[worst]}"


def run_trials(trials: Trials) -> Iterator[Attempt]:
    """Try every case with both memory layouts of gradients, in both orders and twice."""
    attention_rules.guard_attention(torch.device(trials.device).type)
    known = [_Trial(number, case, trials.device) for number, case in enumerate(trials.cases)]
    for each, refused in zip(known, trials.refused, strict=True):
        before = attention_rules.CHOICES.get(each.case.kind, KernelChoice("math"))
        refused = tuple(dict.fromkeys((*before.refused, *refused)))
        attention_rules.CHOICES[each.case.kind] = KernelChoice("math", refused)
    # cuDNN's graphs are cached by a part of the layouts: a fault shows only where a gradient of the
    # other layout came before, in either order.
    for order in (1, -1) * _ROUNDS:
        for each in known[::order]:
            for gradient in each.gradients[::order]:
                yield from _settle(each, gradient)


def _settle(trial: _Trial, gradient: Tensor) -> Iterator[Attempt]:
    """Try kernels in torch's order until one agrees with the formula; the others are refused."""
    while (kernel := trial.chosen()) != "math":
        yield Attempt(trial.number, kernel, None)
        why = trial.find_fault(gradient)
        yield Attempt(trial.number, kernel, why)
        if not why:
            return
        refused = attention_rules.CHOICES[trial.case.kind].refused
        attention_rules.CHOICES[trial.case.kind] = KernelChoice("math", (*refused, kernel))
    yield Attempt(trial.number, "math", "")


if __name__ == "__main__":
    for attempt in run_trials(TypeAdapter(Trials).validate_json(sys.stdin.buffer.read())):
        print(json.dumps(attempt), flush=True)  # noqa: T201
    print(json.dumps("end"), flush=True)  # noqa: T201

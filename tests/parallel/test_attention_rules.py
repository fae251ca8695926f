"""Kernels of attention that trains. See also tests/families/test_gradient_layouts.py."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import get_kernel
from torch.nn.attention import SDPBackend

from longtake.parallel import attention, attention_rules
from longtake.parallel.attention_rules import KernelChoice, kind_of, refusals

_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
_MASK = torch.ones(1, 1, 1, 8, dtype=torch.bool)


def _heads(*, length: int = 8, parts: int = 1) -> Tensor:
    """[B, H, T, D], in memory [B, T, parts, H, D]."""
    torch.manual_seed(0)
    return torch.randn(2, length, parts, 4, 16)[:, :, 0].transpose(1, 2).requires_grad_()


def _replaced(operation: str, function: Any, key: str = "CPU") -> Iterator[None]:
    library = attention_rules.replace_kernel(operation, function, key)
    yield
    library._destroy()


@pytest.fixture
def flash_runs() -> Iterator[list[Tensor]]:
    """Queries that the CPU's fused kernel was called with."""
    runs, torchs = list[Tensor](), get_kernel(f"aten::{_FLASH}", "CPU")

    def seen(keys: Any, query: Tensor, *args: Any, **how: Any) -> Any:
        runs.append(query)
        return torchs.call_boxed(keys, query, *args, **how)

    for _ in _replaced(_FLASH, seen):
        yield runs


def test_attention_that_trains_uses_no_refused_kernel(
    flash_runs: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, guard = _heads(), attention_rules.obey_refusals("AutogradCPU")
    kind = kind_of(heads, heads, heads, None, is_causal=True)
    monkeypatch.setitem(attention_rules.CHOICES, kind, KernelChoice("math", ("flash",)))
    expected = attention.attend(
        attention.FLASH_ON_CPU, attention.ScoreTerms(None, True, None), heads, heads, heads
    )
    flash_runs.clear()
    found = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    assert not flash_runs
    torch.testing.assert_close(found, expected)
    assert found.requires_grad
    how = {"is_causal": True}
    assert attention.choose_kernel(heads, heads, heads, None, how) is None

    F.scaled_dot_product_attention(heads, heads, heads)  # of another kind
    with torch.no_grad():
        F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    assert len(flash_runs) == 2
    assert torch._C._get_flash_sdp_enabled()
    guard._destroy()


@pytest.mark.parametrize(
    ("version", "kernel"), [("2.13.0+cu130", "efficient"), ("2.14.1", "cudnn")]
)
def test_masked_attention_is_kept_by_a_kernel_without_faults(
    version: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU's choice stands for Hopper's, which is cuDNN unless it is switched off."""

    def choose(_: Any, *args: Any, **how: Any) -> int:
        is_on = torch._C._get_cudnn_sdp_enabled()
        chosen = SDPBackend.CUDNN_ATTENTION if is_on else SDPBackend.EFFICIENT_ATTENTION
        return int(chosen.value)

    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    heads = _heads()
    for _ in _replaced("_fused_sdp_choice", choose):
        plain, masked = (
            attention.choose_kernel(heads, heads, heads, mask, {}) for mask in (None, _MASK)
        )
    assert plain is attention.CUDNN
    assert masked is {"efficient": attention.EFFICIENT, "cudnn": attention.CUDNN}[kernel]


def test_kinds_differ_by_layout_and_mask_but_not_by_length() -> None:
    heads, gapped, short = _heads(), _heads(parts=3), _heads(length=5)
    kinds = {
        kind_of(query, query, query, mask, is_causal=False)
        for query, mask in ((heads, None), (gapped, None), (heads, _MASK), (short, None))
    }
    assert len(kinds) == 3
    assert kind_of(heads, heads, heads, None, is_causal=False).layouts[0] == (
        *((0, 1), (2, 1), (1, 1), (3, 1)),
    )
    assert not refusals(heads, heads, heads, None, is_causal=False)


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns itself of much
def test_a_program_for_any_length_obeys_the_rule_of_its_kind(
    flash_runs: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, guard = _heads(), attention_rules.obey_refusals("AutogradCPU")
    kind = kind_of(heads, heads, heads, None, is_causal=False)
    monkeypatch.setitem(attention_rules.CHOICES, kind, KernelChoice("math", ("flash",)))
    torch._dynamo.reset()
    compiled = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=compiled, dynamic=True)
    def attend(query: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, query, query)

    for length in (8, 12, 17, 40):
        torch.autograd.backward(attend(_heads(length=length)).sum())
    guard._destroy()
    assert compiled.frame_count == 1
    assert not flash_runs


@pytest.mark.parametrize(
    ("version", "capability", "says"),
    [
        ("2.13.0", (9, 0), True),
        ("2.11.0+cu130", (12, 0), True),
        ("2.13.0", (8, 9), False),
        ("2.14.1+cu130", (9, 0), False),
    ],
)
def test_a_launch_says_where_cudnn_has_faults(
    version: str, capability: tuple[int, int], says: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    note = attention_rules.cudnn_note(capability)
    assert (attention_rules.REPAIRED_IN in note) == says

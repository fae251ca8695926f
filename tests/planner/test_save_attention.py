"""A block whose attention is kept has the gradients of the plain block."""

import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from longtake.models.numerics import autocast
from longtake.parallel import attention
from longtake.planner import activation_checkpointing
from longtake.planner.activation_checkpointing import run_block
from longtake.planner.kernels import as_on_cuda
from longtake.planner.record import Activations

_CPU = torch.device("cpu")
_KERNEL = "_scaled_dot_product_flash_attention_for_cpu"


class Block(nn.Module):
    """Two attentions, the second to other tokens, as Wan's blocks have them."""

    def __init__(self, how: Mapping[str, Any]) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 16)
        self.how = how
        self.modes: list[object] = []

    def forward(self, tokens: Tensor, others: Tensor) -> Tensor:
        """[B, heads, T, channels] in and out."""
        self.modes.append(_get_current_dispatch_mode())
        mixed = self.mix(tokens)
        aside = threading.Thread(target=F.scaled_dot_product_attention, args=(tokens,) * 3)
        aside.start()
        aside.join()
        attended = F.scaled_dot_product_attention(mixed, mixed.sin(), mixed.cos(), **self.how)
        again: Tensor = self.mix(F.scaled_dot_product_attention(attended, others, others))
        return again + tokens


class _Ran(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def _block(how: Mapping[str, Any]) -> Block:
    torch.manual_seed(0)
    return Block(how)


def _gradients(block: Block, option: Activations, precision: str, times: int = 1) -> list[Tensor]:
    tokens, others = _random(2, 3, 20, 16).requires_grad_(), _random(2, 3, 9, 16)
    with autocast("bf16", _CPU) if precision == "bf16" else nullcontext():
        output = run_block(option, block, tokens, others)
    for _ in range(times):
        torch.autograd.backward(output.float().square().sum(), retain_graph=times > 1)
    found = [output, tokens.grad, *(each.grad for each in block.parameters())]
    return [each.detach() for each in found if each is not None]


_CALLS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "causal, scaled": {"is_causal": True, "scale": 0.2},
    "boolean mask": {"attn_mask": _random(20, 20) > 0},
    "added mask": {"attn_mask": _random(2, 1, 20, 20)},
    "mask that learns": {"attn_mask": _random(20, 20).requires_grad_()},
    "dropout": {"dropout_p": 0.5},
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", _CALLS)
def test_gradients_are_the_same_to_the_bit(name: str, precision: str) -> None:
    outcomes = []
    for option in ("keep", "save-attention"):
        block = _block(_CALLS[name])
        torch.manual_seed(1)
        outcomes.append(_gradients(block, option, precision))
    assert len(outcomes[0]) == 4
    assert all(map(torch.equal, *outcomes))


@pytest.mark.parametrize("name", ["plain", "causal, scaled", "boolean mask", "added mask"])
def test_a_kernel_runs_once_and_no_operation_passes_through_python(name: str) -> None:
    block = _block(_CALLS[name])
    _gradients(block, "save-attention", "fp32")
    assert block.modes == [None, None]  # forward, and recomputed
    with _Ran() as ran:
        _gradients(_block(_CALLS[name]), "save-attention", "fp32")
    assert ran.counts[_KERNEL] == 2  # one of each attention; the mode does not see other threads


def test_a_second_backward_pass_computes_attention_again() -> None:
    outcomes = [
        _gradients(_block({}), option, "fp32", times=2) for option in ("keep", "save-attention")
    ]
    assert all(map(torch.equal, *outcomes))


def _checkpoint_of_torch_2_11(block: Any, *args: Any, context_fn: Any, **_: Any) -> Any:
    """Leave the forward pass's context only if the block returns."""
    context = context_fn()[0]
    context.__enter__()
    output = block(*args)
    context.__exit__(None, None, None)
    return output


@pytest.mark.parametrize("run_by", [checkpoint, _checkpoint_of_torch_2_11])
def test_torchs_function_is_back_after_an_error(
    run_by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation_checkpointing, "checkpoint", run_by)
    plain, choose = F.scaled_dot_product_attention, attention.choose_kernel
    with pytest.raises(TypeError), as_on_cuda():
        run_block("save-attention", _block({}), torch.ones(1))
    assert F.scaled_dot_product_attention is plain
    assert attention.choose_kernel is choose
    assert attention.THIS_THREAD.obtain is None

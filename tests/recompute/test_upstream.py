"""What a tensor was computed from, where autograd knows and where it does not."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtake.recompute.upstream import Place, Upstream

_A, _B = 1, 2


@pytest.fixture
def weights() -> tuple[nn.Parameter, nn.Parameter]:
    """Two trainable matrices: bits 0 and 1."""
    return nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3, 3))


def _upstream(weights: tuple[nn.Parameter, nn.Parameter]) -> Upstream:
    return Upstream({"a": weights[0], "b": weights[1]}, [], Place(), half_base=False)


def _written_into(product: Tensor) -> Tensor:
    buffer = torch.zeros(4, 3)
    buffer[1:] = product.detach()
    return buffer


@torch.library.custom_op("longtake_tests::twice", mutates_args=())
def _twice(value: Tensor) -> Tensor:
    return 2 * value


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:
        return 2 * value


def _doubled(value: Tensor) -> Tensor:
    doubled: Tensor = _Double.apply(value)  # type: ignore[no-untyped-call]
    return doubled


@pytest.mark.parametrize(
    "function",
    [
        lambda product: product.detach(),
        lambda product: product.data,
        lambda product: product.argmax(-1),
        lambda product: torch.stack([torch.zeros(3, 3), product]),
        lambda product: product.chunk(3)[1],
        lambda product: F.scaled_dot_product_attention(torch.ones(3, 3), torch.ones(3, 3), product),
        _written_into,
        _twice,
        _doubled,
    ],
)
def test_what_is_upstream(
    weights: tuple[nn.Parameter, nn.Parameter], function: Callable[[Tensor], Tensor]
) -> None:
    """Whatever happens to values, where they come from is remembered."""
    with _upstream(weights) as upstream, torch.no_grad():
        product = torch.ones(3, 3) @ weights[1]
        assert upstream.of(function(product)) == _B
        assert upstream.of(function(product + weights[0])) == _A | _B
        assert upstream.of(torch.ones(3, 3) @ torch.ones(3, 3)) == 0


def test_what_is_not_upstream(weights: tuple[nn.Parameter, nn.Parameter]) -> None:
    """New tensors of a shape have nothing of the values."""
    with _upstream(weights) as upstream:
        product = torch.ones(3, 3) @ weights[0]
        assert upstream.of(torch.zeros_like(product)) == 0
        assert upstream.of(product.new_ones(3)) == 0
        assert upstream.of(torch.zeros(product.shape)) == 0


def test_where_a_gradient_was_lost(weights: tuple[nn.Parameter, nn.Parameter]) -> None:
    """Each place once, with what lost its gradient there; what carries none cannot lose any."""
    with _upstream(weights) as upstream:
        product = (torch.ones(3, 3) @ weights[0]).detach() @ weights[1]
        mask = product > 0
        with torch.no_grad():
            product.exp().exp()
    assert [(cut.how, cut.parameters) for cut in upstream.cuts] == [
        ("detach", _A),
        ("no_grad", _A | _B),
    ]
    assert mask.dtype == torch.bool

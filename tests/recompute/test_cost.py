"""How long operations take, against numbers made by hand."""

from typing import Any

import pytest
import torch

from longtake.recompute.cost import seconds, tensors
from longtake.recompute.devices import Device

_DEVICE = Device("made up", "cuda", 1e12, 1e11, 1e10, None)
_PRODUCTS, _ATTENTION, _TRAFFIC = 0.7, 0.5, 0.8
_aten = torch.ops.aten


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _seconds(operation: Any, *args: Any) -> float:
    return seconds(operation, args, {}, operation(*args), _DEVICE)


@pytest.mark.parametrize(("dtype", "flops"), [(torch.bfloat16, 1e12), (torch.float32, 1e11)])
def test_a_product_takes_its_arithmetic(dtype: torch.dtype, flops: float) -> None:
    """Two operations for each of m x k x n, at a share of the data sheet's figure."""
    took = _seconds(_aten.mm.default, _meta(600, 500, dtype=dtype), _meta(500, 400, dtype=dtype))
    assert took == pytest.approx(2 * 600 * 500 * 400 / (flops * _PRODUCTS))


def test_a_thin_product_takes_its_traffic() -> None:
    """Where there is little arithmetic, operands and result are moved all the same."""
    took = _seconds(_aten.mm.default, _meta(1, 500), _meta(500, 400))
    assert took == pytest.approx(2 * (500 + 500 * 400 + 400) / (1e10 * _TRAFFIC))


def test_a_copy_takes_its_traffic() -> None:
    """Read once and written once."""
    took = _seconds(_aten.clone.default, _meta(1000, 30))
    assert took == pytest.approx(2 * 2 * 1000 * 30 / (1e10 * _TRAFFIC))


def test_joining_takes_the_traffic_of_all_parts() -> None:
    """Tensors in a list are read, too."""
    took = _seconds(_aten.cat.default, [_meta(700, 30), _meta(300, 30)])
    assert took == pytest.approx(2 * 2 * 1000 * 30 / (1e10 * _TRAFFIC))


@pytest.mark.parametrize(
    "operation",
    [
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
    ],
)
def test_attention_takes_two_products_on_any_device(operation: Any) -> None:
    """Queries by keys and scores by values, for each head; also by the CPU's kernel."""
    took = _seconds(operation, *[_meta(2, 3, 1000, 64)] * 3)
    assert took == pytest.approx(2 * 2 * 2 * 3 * 1000 * 1000 * 64 / (1e12 * _ATTENTION))


def test_attentions_backward_pass_takes_five_products() -> None:
    """Scores again, and four gradients: 2.5 times the forward pass."""
    query = _meta(2, 3, 1000, 64)
    forward = _seconds(_aten._scaled_dot_product_flash_attention.default, query, query, query)
    rows = _meta(2, 3, 1000, dtype=torch.float32)
    none = torch.empty(0, device="meta")
    backward = _seconds(
        _aten._scaled_dot_product_flash_attention_backward.default,
        *(query, query, query, query, query, rows, none, none, 1000, 1000, 0.0, False, none, none),
    )
    assert backward == pytest.approx(2.5 * forward)


def test_finds_the_tensors_of_a_result() -> None:
    """Alone, among others, in a list, or none."""
    one, other = torch.ones(1), torch.ones(2)
    assert tensors(one)[0] is one
    assert [id(tensor) for tensor in tensors((one, None, 3, other))] == [id(one), id(other)]
    assert tensors([one, other])[1] is other
    assert tensors(None) == tensors(3.0) == []

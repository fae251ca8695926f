"""Products in 8 bits on a GPU are those of the CPU, forward and backward."""

import pytest
import torch

from longtake.models.low_bit import can_multiply, product, product_gradient, quantized_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("num_rows", [17, 512, 4000])
def test_products_are_those_of_the_cpu(dtype: torch.dtype, num_rows: int) -> None:
    torch.manual_seed(1)
    inputs, gradient = torch.randn(num_rows, 1536), torch.randn(num_rows, 512)
    codes, scale = quantized_rows(torch.randn(512, 1536), dtype)
    if not can_multiply(num_rows, codes.cuda()):
        pytest.skip("this GPU has no products of fp8")
    for values, multiply in ((inputs, product), (gradient, product_gradient)):
        found = multiply(values.cuda(), codes.cuda(), scale.cuda()).cpu()
        expected = multiply(values, codes, scale)
        # A scale that is rounded otherwise moves a few codes by one.
        assert (found - expected).norm() < 1e-3 * expected.norm()

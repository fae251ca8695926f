"""What tests/gpu asks of each family's gradients on a GPU, on the CPU for two of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.families.attention_gradients import check_gradients_by_kernels, make_wide
from tests.families.rows import ROWS
from torch import Tensor
from torch.library import get_kernel

from longtake.parallel.attention_rules import replace_kernel

_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
_CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["FLUX.1", "Qwen-Image"])
def test_gradients_are_those_of_the_formula_and_a_wrong_kernel_fails(
    kind: str, tmp_path: Path
) -> None:
    """Of the two, Qwen-Image's attention has a mask."""
    (row,) = (each for each in ROWS if each.kind == kind)
    torchs = get_kernel(f"aten::{_BACKWARD}", "CPU")

    def swap(keys: Any, gradient: Tensor, *args: Any, **how: Any) -> Any:
        for_query, for_key, for_value = torchs.call_boxed(keys, gradient, *args, **how)
        return for_query, for_value, for_key

    with row.within():
        tiny = make_wide(row, tmp_path)
        check_gradients_by_kernels(tiny, _CPU)
        wrong = replace_kernel(_BACKWARD, swap, "CPU")
        try:
            with pytest.raises(AssertionError, match="flash_attention_for_cpu"):
                check_gradients_by_kernels(tiny, _CPU)
        finally:
            wrong._destroy()

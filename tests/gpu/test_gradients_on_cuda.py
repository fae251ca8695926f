"""Each family's gradients by the kernel that is chosen for its attention; skipped without a GPU.

tests/families/test_attention_gradients.py runs the same on the CPU.
"""

from pathlib import Path

import pytest
import torch
from tests.families.attention_gradients import check_gradients_by_kernels, make_wide
from tests.families.row import Row
from tests.families.rows import ROWS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.kind)
def test_gradients_are_those_of_the_formula(row: Row, tmp_path: Path) -> None:
    with row.within():
        check_gradients_by_kernels(make_wide(row, tmp_path), torch.device("cuda"))

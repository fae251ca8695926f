"""Blocks that are compiled for captions of any length; skipped where there is no GPU."""

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from tests.build import block_names
from tests.families.attention_gradients import make_wide, moved
from tests.families.rows import ROWS
from tests.families.tiny import relative
from torch import Tensor

from longtake.config import TrainableSection
from longtake.models.components import Components
from longtake.models.numerics import Precision
from longtake.models.objective import FlowBatch, flow_losses
from longtake.planner.record import KEEP
from longtake.training.compiled import compile_blocks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")

_DEVICE = torch.device("cuda")
_TOLERANCE = 0.25
"""Of the relative error of all gradients in bf16: 0.13 on a CPU; a wrong kernel gives 1."""


def _gradients(parts: Components, batch: FlowBatch, precision: Precision) -> Tensor:
    """All of them in one vector."""
    parts.model.zero_grad(set_to_none=True)
    torch.autograd.backward(flow_losses(parts, batch, precision, _DEVICE).sum())
    gradients = (each.grad for each in parts.model.parameters())
    return torch.cat([each.float().flatten() for each in gradients if each is not None])


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns itself of much
def test_gradients_are_right_without_a_program_for_each_length(tmp_path: Path) -> None:
    """Of two captions of one length, and of two with a mask."""
    torch._dynamo.reset()
    (row,) = (each for each in ROWS if each.kind == "Qwen-Image")
    tiny = make_wide(row, tmp_path)
    parts = tiny.training(TrainableSection(kind="lora"))
    parts.model.to(_DEVICE)
    compiled = dataclasses.replace(parts, model=copy.deepcopy(parts.model))
    compile_blocks(dict.fromkeys(block_names(parts), KEEP), compiled, tiny.recipe())
    batch, programs = moved(tiny.batch(), _DEVICE), list[int]()
    width = batch.conditioning["prompt_embeds"].shape[-1]
    for lengths in ((20, 20), (45, 45), (70, 70), (30, 70), (17, 53), (40, 41)):
        text = {"prompt_embeds": torch.randn(2, 70, width, device=_DEVICE)}
        text["prompt_length"] = torch.tensor(lengths, device=_DEVICE)
        each = dataclasses.replace(batch, conditioning={**batch.conditioning, **text})
        found, expected = _gradients(compiled, each, "bf16"), _gradients(parts, each, "fp32")
        assert relative(found, expected) <= _TOLERANCE
        programs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert programs[1] == programs[2]
    assert programs[4] == programs[5]

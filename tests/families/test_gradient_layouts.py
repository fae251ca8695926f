"""What attention's backward pass is given, by families, added modules and kept attention."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.families.row import Row
from tests.families.rows import ONE_OF_EACH
from tests.families.tiny import Tiny, loss_and_gradients
from torch import Tensor, nn
from torch.library import get_kernel

from longtake.config import ModuleSection, TrainableSection
from longtake.parallel import attention_rules
from longtake.parallel.attention_rules import (
    AttentionKind,
    give_whole_gradients,
    kind_of,
    obey_refusals,
    replace_kernel,
)
from longtake.planner.activation_checkpointing import run_block
from longtake.planner.devices import device_named
from longtake.planner.forecast import check_gradients
from longtake.planner.memory import outline_step

Layouts = dict[tuple[Any, ...], set[tuple[int, ...]]]
_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
_LORA = TrainableSection(kind="lora")


@pytest.fixture
def layouts() -> Iterator[Layouts]:
    """Of the gradients that the CPU's kernel gets, by shapes and strides of its other tensors."""
    found: Layouts = {}
    torchs = get_kernel(f"aten::{_BACKWARD}", "CPU")

    def seen(keys: Any, gradient: Tensor, *args: Any, **how: Any) -> Any:
        given = tuple((each.shape, each.stride()) for each in args[:3])
        found.setdefault(given, set()).add(gradient.stride())
        return torchs.call_boxed(keys, gradient, *args, **how)

    below = replace_kernel(_BACKWARD, seen, "CPU")
    above = give_whole_gradients(_BACKWARD, "CPU")
    yield found
    above._destroy()
    below._destroy()


def _is_one_each(layouts: Layouts) -> bool:
    return bool(layouts) and all(len(each) == 1 for each in layouts.values())


def test_attentions_of_one_layout_get_gradients_of_one_layout(tiny: Tiny, layouts: Layouts) -> None:
    """Torch 2.11 to 2.13 keep cuDNN's backward graph by the layout of what attention is given."""
    loss_and_gradients(tiny.training(_LORA), tiny.batch())
    assert _is_one_each(layouts)


_EXAMPLES = {
    "camera:Camera": {"width_of_camera": 4},
    "controlnet:ControlNet": {"text_width": 16, "hidden_size": 32},
    "ip_adapter:IPAdapter": {"grid": 2},
    "pose_adapter:PoseAdapter": {},
    "style_residual:StyleResidual": {},
}


@pytest.mark.parametrize("example", _EXAMPLES)
def test_so_do_those_of_the_example_modules(
    example: str,
    tiny_of: Callable[[Row], Tiny],
    layouts: Layouts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    (row,) = (each for each in ONE_OF_EACH if each.family == "flux_kontext")
    module = ModuleSection(module=f"examples.modules.{example}", options=_EXAMPLES[example])
    tiny = tiny_of(row)
    parts, batch = tiny.training(TrainableSection(modules={"own": module})), tiny.batch()
    names = ("control_latents", "look_latents", "pose_latents")
    told = dict.fromkeys(names, batch.noise) | {"camera": torch.randn(2, 3, 4)}
    told |= batch.conditioning
    loss_and_gradients(parts, dataclasses.replace(batch, conditioning=told))
    assert _is_one_each(layouts)


class Concatenates(nn.Module):
    """Attention with and without a concatenation behind it."""

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T, D] in and out."""
        again = self.attend(tokens + self.attend(tokens))
        wide = torch.cat([again, tokens, tokens], dim=2) * torch.linspace(0, 1, 3 * 16)
        return sum(wide.chunk(3, dim=2), torch.zeros(()))

    def attend(self, tokens: Tensor) -> Tensor:
        heads = tokens.reshape(2, 20, 2, 8).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("runs", ["keep", "save-attention", "compiled"])
def test_so_do_those_of_a_module_of_ones_own(runs: Any, layouts: Layouts) -> None:
    module, tokens = Concatenates(), torch.randn(2, 20, 16, requires_grad=True)
    run = (
        torch.compile(module, backend="aot_eager")
        if runs == "compiled"
        else partial(run_block, runs, module)
    )
    (gradient,) = torch.autograd.grad(run(tokens).sum(), tokens)
    ((strides,),) = layouts.values()
    assert strides == (20 * 16, 8, 16, 1)  # the output's
    (expected,) = torch.autograd.grad(module(tokens).sum(), tokens)
    torch.testing.assert_close(gradient, expected)


def test_what_a_plan_sees_are_the_kinds_that_train(
    tiny_of: Callable[[Row], Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    (row,) = (each for each in ONE_OF_EACH if each.family == "flux2")
    tiny, trained = tiny_of(row), set[AttentionKind]()

    def note(*given: Tensor, is_causal: bool) -> tuple[()]:
        trained.add(kind_of(*given, is_causal=is_causal))
        return ()

    rules = obey_refusals("AutogradCPU")
    monkeypatch.setattr(attention_rules, "refusals", note)
    loss_and_gradients(tiny.training(_LORA), tiny.batch())
    rules._destroy()
    recipe = tiny.recipe(trainable={"kind": "lora"}, training={"micro_batch_size": 2})
    step = outline_step(recipe, device_named("h100"))
    check_gradients(step)
    assert {each.kind for each in step.tracer.attentions} == trained
    assert len(trained) == 2

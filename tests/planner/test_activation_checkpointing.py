"""Running blocks by an option: what comes out, and what autograd keeps."""

from collections.abc import Mapping

import pytest
import torch
from tests.build import LateCopies
from tests.planner.build import make_toy
from torch import Tensor, nn
from torch.nn import functional as F

from longtake.config import RecomputeSection
from longtake.models.numerics import autocast
from longtake.planner.activation_checkpointing import (
    ACTIVATIONS,
    POLICIES,
    caller,
    options_of,
    run_block,
)
from longtake.planner.profiler import measured
from longtake.planner.record import Activations, BlockOption
from longtake.planner.trace import Subject


def _outcome(subject: Subject, options: Mapping[nn.Module, BlockOption]) -> list[Tensor]:
    """Loss and all gradients of a step whose dropout begins from the same seed each time."""
    subject.call_blocks_by(caller(options))
    subject.model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    loss = subject.loss(torch.randn(2, 40, 6, generator=torch.Generator().manual_seed(2)))
    torch.rand(7)  # whatever is drawn between forward and backward pass
    torch.autograd.backward(loss)
    gradients = [parameter.grad for parameter in subject.model.parameters()]
    return [loss.detach(), *(gradient for gradient in gradients if gradient is not None)]


@pytest.fixture
def _copies_as_late_as_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longtake.planner.activation_offload.CopyStream", LateCopies)


@pytest.mark.usefixtures("_copies_as_late_as_may_be")
@pytest.mark.parametrize("option", ACTIVATIONS)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_options_are_the_same_to_the_bit(option: Activations, dropout: float) -> None:
    subject = make_toy("cpu", dropout=dropout)
    kept = _outcome(subject, {})
    recomputed = _outcome(subject, dict.fromkeys(subject.blocks.values(), BlockOption(option)))
    assert len(kept) == 1 + len(list(subject.model.parameters()))
    assert all(map(torch.equal, kept, recomputed))


@pytest.mark.usefixtures("_copies_as_late_as_may_be")
def test_mixtures_are_the_same_to_the_bit() -> None:
    subject = make_toy("cpu", dropout=0.1, num_blocks=5)
    mixed = dict(zip(subject.blocks.values(), map(BlockOption, ACTIVATIONS), strict=False))
    assert all(map(torch.equal, _outcome(subject, {}), _outcome(subject, mixed)))


def test_an_added_dropout_is_drawn_again() -> None:
    subject = make_toy("cpu")
    for block in subject.blocks.values():
        block.register_forward_hook(lambda _, __, tokens: F.dropout(tokens, 0.5))
    recomputed = dict.fromkeys(subject.blocks.values(), BlockOption("recompute"))
    assert all(map(torch.equal, _outcome(subject, {}), _outcome(subject, recomputed)))


def test_under_autocast_no_bf16_copies_of_weights_are_kept() -> None:
    subject = make_toy("cpu", num_blocks=8, width=128)
    tokens = torch.randn(1, 10, 6)
    subject.call_blocks_by(caller(dict.fromkeys(subject.blocks.values(), BlockOption("recompute"))))
    with measured(torch.device("cpu")) as memory, autocast("bf16", torch.device("cpu")):
        loss = subject.loss(tokens)
        memory.mark("forward")
    assert loss.requires_grad
    copies = sum(2 * weight.numel() for weight in subject.model.parameters())
    assert memory.at["forward"] < copies / 8


def test_without_gradients_nothing_is_kept() -> None:
    subject = make_toy("cpu", num_blocks=1)
    block, tokens = subject.blocks["blocks.0"], torch.randn(2, 40, 32)
    with torch.no_grad():
        outputs = [run_block(option, block, tokens) for option in ACTIVATIONS]
    assert all(torch.equal(outputs[0], output) for output in outputs)
    assert not any(output.requires_grad for output in outputs)


@pytest.mark.parametrize("option", ACTIVATIONS)
def test_parameters_of_a_block_train_whatever_it_is_given(option: Activations) -> None:
    """Inputs without gradient, in a dict or none at all, are no obstacle: it is never reentrant."""

    class Told(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, told: dict[str, Tensor]) -> Tensor:
            return self.layer(told["tokens"])

    block = Told()
    output = run_block(option, block, {"tokens": torch.ones(2, 4)})
    torch.autograd.backward(output.sum())
    assert block.layer.weight.grad is not None


_BLOCKS = ("a", "b", "c", "d", "e")
_SHORT = {"keep": "k", "recompute": "r", "save-attention": "s"}


@pytest.mark.parametrize(
    ("policy", "expected"),
    {
        "none": "kkkkk",
        "all": "rrrrr",
        "all-but-first": "krrrr",
        "alternate": "krkrk",
        "save-attention": "sssss",
    }.items(),
)
def test_what_each_policy_does(policy: str, expected: str) -> None:
    options = options_of(policy, _BLOCKS)
    assert tuple(options) == _BLOCKS
    assert "".join(_SHORT[option.activations] for option in options.values()) == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_may_have_one_block(policy: str) -> None:
    assert len(options_of(policy, ("only",))) == 1


def test_recipes_know_every_policy() -> None:
    for policy in POLICIES:
        assert RecomputeSection.model_validate({"policy": policy}).chosen() == policy

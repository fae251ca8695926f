"""Steps of which a trace runs only some of many equal blocks: they are as if all had run."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.planner.build import Toy, make_tiny, make_toy
from torch import Tensor, nn

from longtake.errors import CannotBePlannedError
from longtake.planner import trace
from longtake.planner.activation_checkpointing import POLICIES, options_of
from longtake.planner.devices import CPU, device_named
from longtake.planner.record import Activations, BlockOption, Options
from longtake.planner.repeats import UnlikeError, find_runs, kinds_of
from longtake.planner.trace import StepTrace, Subject, Tracer

_NUM_BLOCKS = 14


class _Traces:
    """Traces of a step with all blocks, and of the same step with as few as possible."""

    def __init__(self, tracer: Tracer, monkeypatch: pytest.MonkeyPatch) -> None:
        self._tracer = tracer
        self.are_unlike = False
        honest = Tracer._trace

        def watched(*args: Any) -> StepTrace:
            try:
                return honest(*args)
            except UnlikeError:
                self.are_unlike = True
                raise

        monkeypatch.setattr(Tracer, "_trace", watched)

    def num_left_out(self, options: Options) -> int:
        """The number of blocks that did not run, after both traces were found equal."""
        assert self._tracer.trace(options) == self._tracer.trace(options, composes=False)
        if self.are_unlike:
            return 0
        runs = self._tracer._runs(options)
        return sum(len(unit) for run in runs for unit in run.left_out)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("trained", "facts"),
    [
        ("", {}),
        ("", {"is_accumulating": True}),
        ("", {"num_shards": 4, "gathers_in_bf16": True}),
        ("blocks.13", {}),
        ("head", {}),
    ],
    ids=["everything", "accumulating", "sharded", "the last block", "behind all blocks"],
)
def test_a_toy(
    monkeypatch: pytest.MonkeyPatch, policy: str, trained: str, facts: dict[str, Any]
) -> None:
    subject = replace(make_toy("meta", trained, _NUM_BLOCKS), **facts)
    traces = _Traces(Tracer(subject, CPU), monkeypatch)
    assert traces.num_left_out(options_of(policy, tuple(subject.blocks))) >= 2
    assert not traces.are_unlike


_MANY = {
    "wan": "model.config.num_layers=12",
    "wan with modules": "model.config.num_layers=12",
    "flux_kontext": "model.config.num_single_layers=12",
}


@pytest.mark.parametrize(
    ("activations", "family", "kind", "precision"),
    [
        ("keep", "wan with modules", "lora", "fp32"),
        ("keep", "wan", "full", "bf16"),
        ("recompute", "wan", "full", "bf16"),
        ("save-attention", "wan", "lora", "bf16"),
        ("offload", "wan", "lora", "bf16"),
        ("save-attention", "flux_kontext", "full", "bf16"),
        ("offload", "flux_kontext", "lora", "fp32"),
    ],
)
def test_families(
    monkeypatch: pytest.MonkeyPatch,
    activations: Activations,
    family: str,
    kind: str,
    precision: str,
) -> None:
    """Casts that autocast keeps, text beside the tokens, adapters, and copies to the host.

    An added module is told the block's number, which may change what it does: all blocks run.
    """
    monkeypatch.chdir(Path(__file__).resolve().parents[2])  # where the modules are found
    gpu, further = device_named("a6000"), [_MANY[family]]
    tracer = make_tiny(family, kind, "fp32", gpu, further, precision=precision).tracer
    options = dict.fromkeys(tracer.subject.blocks, BlockOption(activations))
    expected = 0 if "modules" in family else 7
    assert _Traces(tracer, monkeypatch).num_left_out(options) == expected


def test_blocks_that_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = make_tiny("wan", "lora", "bf16", device_named("a6000"), [_MANY["wan"]]).tracer
    options = dict.fromkeys(tracer.subject.blocks, BlockOption("recompute", "stream"))
    assert _Traces(tracer, monkeypatch).num_left_out(options) >= 6


class _Odd(Toy):
    """Something happens between its blocks, or in one of them, that no attribute tells."""

    def __init__(self, oddity: str) -> None:
        super().__init__(_NUM_BLOCKS, 32, 0.0)
        self._oddity = oddity
        for number, block in enumerate(self.blocks):
            block.register_forward_pre_hook(partial(self._before, number))

    def _before(self, number: int, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        if self._oddity == "more in a block" and number == 2:
            return (args[0].exp(),)
        if self._oddity == "more backward" and number == 3:
            args[0].register_hook(torch.exp)  # type: ignore[no-untyped-call]
        return args

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T, 6] in and out."""
        tokens, kept = self.embed(tokens), []
        order = list(range(_NUM_BLOCKS))
        if self._oddity in _WRONG_ORDERS:
            order[7:9] = _WRONG_ORDERS[self._oddity]
        for number in order:
            in_half = self._oddity == "autocast" and number == 8
            with torch.autocast("cpu", enabled=in_half):
                tokens = self.call(self.blocks[number], tokens)
            if self._oddity == "more between" and number == 8:
                tokens = tokens.exp()
            if self._oddity == f"kept {number}":
                kept.append(tokens)
        result: Tensor = self.head(tokens)
        return sum((each.mean() for each in kept), result)


_WRONG_ORDERS = {"one twice": [7, 7], "two swapped": [8, 7], "one missing": [7]}


def _odd(oddity: str) -> Subject:
    with torch.device("meta"):
        model = _Odd(oddity)
    return Subject(
        model=model,
        blocks={f"blocks.{number}": block for number, block in enumerate(model.blocks)},
        call_blocks_by=lambda call: setattr(model, "call", call),
        make_inputs=lambda: torch.ones(2, 40, 6),
        loss=lambda inputs: model(inputs).square().mean(),
    )


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize(
    "oddity",
    [
        *("more in a block", "more backward", "more between", "autocast"),
        *("kept 2", "kept 3", "kept 8", "kept 11"),
    ],
)
def test_all_blocks_run_if_some_turn_out_to_be_unlike(
    monkeypatch: pytest.MonkeyPatch, oddity: str, activations: Activations
) -> None:
    subject = _odd(oddity)
    # Hooks make blocks unlike for the planner, so that no run of theirs would be tried.
    monkeypatch.setattr(trace, "kinds_of", lambda _, blocks: dict.fromkeys(blocks, "a block"))
    traces = _Traces(Tracer(subject, CPU), monkeypatch)
    options = dict.fromkeys(subject.blocks, BlockOption(activations))
    assert traces.num_left_out(options) == 0
    assert traces.are_unlike


@pytest.mark.parametrize("oddity", _WRONG_ORDERS)
def test_a_wrong_order_is_refused(monkeypatch: pytest.MonkeyPatch, oddity: str) -> None:
    """As it is if all blocks run."""
    monkeypatch.setattr(trace, "kinds_of", lambda _, blocks: dict.fromkeys(blocks, "a block"))
    with pytest.raises(CannotBePlannedError, match="do not run once each"):
        Tracer(_odd(oddity), CPU).trace({})


@pytest.mark.parametrize(
    ("kinds", "left_out"),
    [
        ("aaaaa", []),
        ("aaaaaaa", ["e", "f"]),
        ("abababababab", ["ij"]),
        ("aaaaaaabbbbbbb", ["e", "f", "l", "m"]),
        ("xaaaaaaax", ["f", "g"]),
        ("abcabcabcabcabcabc", []),
    ],
)
def test_runs(kinds: str, left_out: Sequence[str]) -> None:
    names = [chr(ord("a") + number) for number in range(len(kinds))]
    runs = find_runs(names, list(kinds))
    assert ["".join(unit) for run in runs for unit in run.left_out] == left_out


class _Processor:
    def __init__(self, scale: float) -> None:
        self.scale = scale


class _Number(int): ...


class _Slots:
    __slots__ = ("scale",)


def test_kinds() -> None:
    """Of blocks: weights' values, names and equal objects do not count; all settings do."""
    alive = []  # as an object that cannot be compared is known by its address

    def kind(name: str = "blocks.1", **attributes: Any) -> Any:
        block = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5))
        alive.append(block)
        for key, value in attributes.items():
            setattr(block[0], key, value)
        return kinds_of(block, {name: block})[name]

    assert kind() == kind("blocks.2")
    assert kind(target="blocks.1.0") == kind("blocks.2", target="blocks.2.0")
    assert kind(processor=_Processor(1.0)) == kind(processor=_Processor(1.0))
    assert kind(act=partial(round, ndigits=1)) == kind(act=partial(round, ndigits=1))
    assert kind(training=True) == kind()
    others = [
        kind(target="blocks.3.0"),
        kind(processor=_Processor(2.0)),
        kind(processor=_Slots()),
        kind(processor=_Slots()),
        kind(act=partial(round, ndigits=1)),
        kind(act=partial(round, ndigits=2)),
        kind(index=1),
        kind(index=_Number(1)),
        kind(index=[1, {"a": 2}]),
        kind(training=False),
        kind(forward=lambda tokens: tokens),
    ]
    assert len({kind(), *others}) == len(others) + 1


def test_blocks_that_share_weights_are_unlike() -> None:
    blocks = {f"blocks.{number}": nn.Linear(2, 2) for number in range(4)}
    blocks["blocks.3"].weight = blocks["blocks.0"].weight
    kinds = kinds_of(nn.ModuleList(blocks.values()), blocks)
    assert kinds["blocks.1"] == kinds["blocks.2"]
    assert len(set(kinds.values())) == 3

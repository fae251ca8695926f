"""Compiled blocks of each transformer compute what the others do, whatever their options are.

Each pair of two options' values is in a case, not each combination. By CPU, in fp32.
"""

import copy
import dataclasses
from collections.abc import Iterator
from itertools import cycle, pairwise
from typing import Any, NamedTuple

import pytest
import torch
from tests.build import block_names
from tests.families.rows import ONE_OF_EACH
from tests.families.tiny import LONG, SHORT, Tiny, loss_and_gradients
from torch._dynamo.utils import counters

from longtake.config import Bucket, Quantization, TrainableSection
from longtake.models.base import latent_shape
from longtake.models.components import Components
from longtake.models.objective import FlowBatch
from longtake.models.streamed import StreamedBlocks
from longtake.parallel import attention_rules
from longtake.planner.record import Activations, BlockOption, BlockWeights
from longtake.sampling.presets import Request
from longtake.training.compiled import FAULTS, compile_blocks

pytestmark = [
    pytest.mark.drill,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # torch's compiler warns itself of much
    pytest.mark.parametrize("tiny", ONE_OF_EACH, ids=lambda row: row.kind, indirect=True),
]
_LESS = "a blue square"
_EXACT = 1e-5
_CODES = 0.02
"""Relative error of products in 8 bits: a compiled norm may round an input to the next code."""


class Case(NamedTuple):
    """Options of all blocks, whose activations alternate."""

    trained: str
    quantize: Quantization | None
    activations: tuple[Activations, ...]
    is_streamed: bool = False
    has_module: bool = False
    backend: str = "aot_eager"

    def __str__(self) -> str:
        flags = ["streamed"] * self.is_streamed + ["module"] * self.has_module
        return "-".join([self.trained, self.quantize or "exact", *self.activations, *flags])


CASES = (
    Case("lora", None, ("keep", "recompute"), backend="inductor"),
    Case("full", None, ("save-attention", "keep"), backend="inductor"),
    Case("full", None, ("recompute", "offload")),
    Case("full", None, ("offload-input", "recompute"), has_module=True),
    Case("lora", None, ("save-attention", "offload"), has_module=True),
    Case("lora", "int8", ("keep", "offload-input")),
    Case("lora", "int8", ("offload", "keep")),
    Case("lora", "nf4", ("recompute", "save-attention")),
    Case("lora", "nf4", ("keep", "recompute"), has_module=True),
    Case("lora", "int8_dynamic", ("offload-input", "keep")),
    Case("lora", "int8_dynamic", ("keep", "recompute"), has_module=True),
    Case("lora", None, ("recompute", "keep"), is_streamed=True),
    Case("lora", "int8", ("save-attention", "recompute"), is_streamed=True, has_module=True),
    Case("lora", "nf4", ("offload-input", "offload"), is_streamed=True),
    Case("lora", "int8_dynamic", ("offload", "save-attention"), is_streamed=True),
)


@pytest.fixture(autouse=True)
def _attention_has_rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a GPU, where each kind of attention is looked up while blocks are compiled."""
    choice = attention_rules.KernelChoice("flash")
    kind = attention_rules.AttentionKind("float32", (0, 0), ((), (), ()), False, False, False)
    monkeypatch.setitem(attention_rules.CHOICES, kind, choice)
    rules = attention_rules.obey_refusals("AutogradCPU")
    yield
    rules._destroy()


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    FAULTS.new.clear()
    with torch._dynamo.config.patch(recompile_limit=8):
        yield
    torch._dynamo.reset()


def _compile_by(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block in one graph: a break is an error."""
    torchs = torch.compile

    def compile_whole(call: Any, **how: Any) -> Any:
        return torchs(call, backend=backend, fullgraph=True, **how)

    monkeypatch.setattr(torch, "compile", compile_whole)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_blocks_have_the_gradients_of_others(
    tiny: Tiny, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another batch of the same shapes needs no other program, and a bucket needs no more."""
    if case.quantize in tiny.row.refuses:
        pytest.skip(f"{tiny.row.kind} is refused in {case.quantize}")
    _compile_by(case.backend, monkeypatch)
    plain = _parts(tiny, case)
    compiled = _compiled(tiny, case, plain)
    first, other = _buckets(tiny)
    batches = [_batch(tiny, first, LONG, SHORT), _batch(tiny, first, _LESS, LONG)]
    if case.backend != "inductor":  # which takes minutes
        batches += [_batch(tiny, first, SHORT), _batch(tiny, first, _LESS)]
        batches += [_batch(tiny, other, SHORT)]
    programs = [0]
    for batch in batches:
        expected, found = (loss_and_gradients(each, batch) for each in (plain, compiled))
        assert found.keys() == expected.keys()
        tolerance = _CODES if case.quantize == "int8_dynamic" else _EXACT
        least = 1e-6 * max(float(each.norm()) for each in expected.values())
        for name, gradient in expected.items():
            # What is nearly zero is rounding.
            error = float((found[name] - gradient).norm()) / max(float(gradient.norm()), least)
            assert error <= tolerance, (name, error)
        programs.append(counters["stats"]["unique_graphs"])
    new = [after - before for before, after in pairwise(programs)]
    assert new[0] > 0 or case.is_streamed
    assert new[1] == 0
    assert max(new[2:], default=0) <= new[0]
    assert counters["frames"]["total"] == counters["frames"]["ok"]
    assert FAULTS.new == []


def _parts(tiny: Tiny, case: Case) -> Components:
    own = {"own": {"module": "tests.families.own_module:Scales"}}
    values: dict[str, Any] = {"kind": case.trained, "modules": own if case.has_module else {}}
    if case.trained == "lora":
        values["rank"] = 2
    return tiny.training(TrainableSection.model_validate(values), case.quantize)


def _compiled(tiny: Tiny, case: Case, plain: Components) -> Components:
    """A copy of the parts with compiled blocks, as a training builds them."""
    parts = dataclasses.replace(plain, model=copy.deepcopy(plain.model))
    named = zip(block_names(parts), cycle(case.activations), strict=False)
    weights: BlockWeights = "stream" if case.is_streamed else "keep"
    options = {name: BlockOption(activations, weights) for name, activations in named}
    compile_blocks(options, parts, tiny.recipe(training={"compile": True}))
    if case.is_streamed:
        StreamedBlocks(parts.family.blocks(parts.model), torch.device("cpu"))
    return parts


def _buckets(tiny: Tiny) -> tuple[Bucket, Bucket]:
    frames, height, width = tiny.row.bucket
    turned = (width, height) if width != height else (height, 2 * width)
    return tiny.recipe().data.buckets[0], Bucket(
        num_frames=frames, height=turned[0], width=turned[1]
    )


def _batch(tiny: Tiny, bucket: Bucket, *prompts: str) -> FlowBatch:
    sampler, size = tiny.sampler, len(prompts)
    requests = [Request(prompt, 3, tiny.pictures(0)) for prompt in prompts]
    told = sampler._guidance(requests, bucket, tiny.scale, "").conditional
    generator = torch.Generator().manual_seed(1)
    shape = (size, *latent_shape(sampler.components.codec, bucket))
    latents, noise = (torch.randn(shape, generator=generator) for _ in range(2))
    return FlowBatch(latents, noise, torch.linspace(0.3, 0.8, size), told)

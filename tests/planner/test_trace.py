"""Tracing a step without values: what it says is what the allocator does."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import save_file
from tests.build import fill_weights, hold_weights, measure_step
from tests.planner.build import make_tiny, make_toy
from torch import Tensor, nn

from longtake.config import OptimizerSection
from longtake.optim.build import build_optimizers
from longtake.optim.fused_backward import updating_in_backward
from longtake.planner.activation_checkpointing import ACTIVATIONS, POLICIES, options_of
from longtake.planner.block_weights import weight_costs
from longtake.planner.devices import CPU, DeviceBudget, device_named
from longtake.planner.record import Activations, BlockOption, BlockWeights
from longtake.planner.trace import Subject, Tracer
from longtake.planner.tracker import seconds

Threads = Callable[[int], None]


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize(
    ("trained", "num_threads"),
    [("", 1), ("", 2), ("blocks.2", 1), ("head", 2)],
    ids=["everything-1", "everything-2", "the last block-1", "the head-2"],
)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_byte_of_a_step_is_foreseen(
    threads: Threads, policy: str, trained: str, num_threads: int
) -> None:
    """Forward's end, peak and end are the allocator's, whatever trains and is recomputed."""
    threads(num_threads)
    planned = make_toy("meta", trained)
    options = options_of(policy, tuple(planned.blocks))
    trace = Tracer(planned, CPU).trace(options)
    memory = measure_step(make_toy("cpu", trained), options)
    assert trace.forward_end_bytes - trace.weight_bytes == memory.at["forward"]
    assert trace.peak_bytes - trace.weight_bytes == memory.peak_bytes
    assert trace.end_bytes - trace.weight_bytes == memory.end_bytes


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize("family", ["flux_kontext", "wan"])
def test_families_are_foreseen_to_the_byte(threads: Threads, family: str) -> None:
    threads(1)
    planned, real = (make_tiny(family, "full").tracer for _ in range(2))
    fill_weights(real.subject.model)
    for policy in ("none", "alternate", "save-attention"):
        options = options_of(policy, tuple(planned.subject.blocks))
        trace, memory = planned.trace(options), measure_step(real.subject, options)
        assert trace.peak_bytes - trace.weight_bytes == memory.peak_bytes, policy


_FROZEN: tuple[BlockWeights, ...] = get_args(BlockWeights)
_MIXED = (*_FROZEN[1:], "keep")


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize("weights", [*((each,) for each in _FROZEN), _MIXED], ids="-".join)
@pytest.mark.parametrize(
    ("family", "dtype", "precision"),
    [("flux_kontext", "bf16", "fp32"), ("wan", "fp32", "fp32"), ("wan", "fp32", "bf16")],
    ids=["FLUX in bf16", "Wan in fp32", "Wan under autocast"],
)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_streamed_quantised_and_offloaded_blocks_are_foreseen(
    threads: Threads, family: str, dtype: str, precision: str, weights: tuple[BlockWeights, ...]
) -> None:
    """Every block with each kind of weights and all kinds of activations; and all mixed."""
    threads(1)
    _assert_foreseen(weights, family, dtype=dtype, precision=precision)


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_products_of_int8_are_foreseen(threads: Threads) -> None:
    """Not those of fp8: torch's kernel for CPUs makes copies of its own."""
    threads(1)
    _assert_foreseen(["keep"], "wan", dtype="bf16", further=["model.quantize=int8_dynamic"])


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize(
    "family", ["wan with modules", "flux_kontext with modules", "wan with a mask"]
)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_mixtures_with_modules_and_masks_are_foreseen(
    threads: Threads, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads(1)
    monkeypatch.chdir(Path(__file__).resolve().parents[2])  # where its modules are found
    _assert_foreseen(_MIXED, family, dtype="bf16")


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize("family", ["wan", "flux_kontext with modules"])
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_passes_without_gradient_are_foreseen(
    threads: Threads, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The further pass of an objective, through blocks of every treatment."""
    threads(1)
    monkeypatch.chdir(Path(__file__).resolve().parents[2])  # where its modules are found
    guided = ["objective.kind=guided_target", "objective.options.scale=3.0"]
    _assert_foreseen(_MIXED, family, dtype="bf16", further=guided)


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_an_adapter_for_training_is_foreseen(threads: Threads, tmp_path: Path) -> None:
    """On all layers that a LoRA is trained on, and on others, of every treatment."""
    threads(1)
    names = [f"blocks.{n}.{layer}" for n in range(4) for layer in ("attn1.to_q", "ffn.net.2")]
    columns = {"attn1.to_q": 48, "ffn.net.2": 96}
    weights = dict[str, torch.Tensor]()
    for name in names:
        wide = columns[name.split(".", 2)[2]]
        weights[f"{name}.lora_A.weight"] = torch.zeros(8, wide)
        weights[f"{name}.lora_B.weight"] = torch.zeros(48, 8)
    save_file(weights, tmp_path / "adapter.safetensors")
    further = [f"model.training_adapter={tmp_path / 'adapter.safetensors'}"]
    _assert_foreseen(_MIXED, "wan", dtype="bf16", further=further)


def _assert_foreseen(weights: Sequence[BlockWeights], family: str, **sections: Any) -> None:
    """Peak and forward's end to 1 % with these weights in turn; LoRA's scales are in no trace."""
    planned, real = (make_tiny(family, **sections).tracer for _ in range(2))
    fill_weights(real.subject.model)
    pairs = zip(cycle(weights), cycle(reversed(ACTIVATIONS)), strict=False)
    names = real.subject.blocks
    options = {name: BlockOption(b, a) for name, (a, b) in zip(names, pairs, strict=False)}
    hold_weights(real.subject.blocks, options)
    trace, memory = planned.trace(options), measure_step(real.subject, options)
    predicted = trace.peak_bytes - trace.weight_bytes
    assert predicted == pytest.approx(memory.peak_bytes, rel=0.01), weights
    forward_end = trace.forward_end_bytes - trace.weight_bytes
    assert forward_end == pytest.approx(memory.at["forward"], rel=0.01), weights


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_what_is_on_the_host_is_not_on_the_gpu(activations: Activations) -> None:
    tracer = make_tiny("flux_kontext", "lora", "bf16", device_named("a6000")).tracer
    names = tuple(tracer.subject.blocks)
    here = tracer.trace(dict.fromkeys(names, BlockOption(activations)))
    away = tracer.trace(dict.fromkeys(names, BlockOption(activations, "stream")))
    blocks = list(tracer.subject.blocks.values())
    streamed = weight_costs("stream", blocks, tracer.device).streamed
    assert away.host_bytes - here.host_bytes == streamed.sum() > 0
    assert here.weight_bytes - away.weight_bytes == streamed.sum() - 2 * streamed.max()
    assert here.peak_bytes - away.peak_bytes == here.weight_bytes - away.weight_bytes
    kept = tracer.trace({})
    if activations == "offload":
        assert here.host_bytes > 0
        moved = [block.offloaded_bytes for block in here.blocks.values()]
        assert sum(moved) < here.host_bytes <= 2 * sum(moved)  # page-locked memory is rounded up
        freed = kept.forward_end_bytes - here.forward_end_bytes
        assert freed == pytest.approx(sum(moved[:-1]), rel=0.2)  # some is other blocks' too


def test_traces_leave_nothing_behind() -> None:
    subject = make_toy()
    tracer = Tracer(subject, CPU)
    first = tracer.trace({})
    tracer.trace(options_of("all", tuple(subject.blocks)))
    for weights in _FROZEN:
        tracer.trace(dict.fromkeys(subject.blocks, BlockOption("offload", weights)))
    assert tracer.trace({}) == first
    assert all(parameter.grad is None for parameter in subject.model.parameters())


def test_gradients_of_earlier_micro_batches_are_there() -> None:
    anew = Tracer(make_toy(), CPU).trace({})
    added = Tracer(make_toy(is_accumulating=True), CPU).trace({})
    gradients = anew.weight_bytes
    assert added.forward_end_bytes == anew.forward_end_bytes + gradients
    assert added.end_bytes == anew.end_bytes
    assert added.input_bytes == anew.input_bytes


@pytest.mark.usefixtures("without_onednn")
def test_accumulating_is_foreseen() -> None:
    planned, real = make_toy(is_accumulating=True), make_toy("cpu")
    options = options_of("alternate", tuple(planned.blocks))
    trace = Tracer(planned, CPU).trace(options)
    measure_step(real, options)
    # The next runs add to what is there.
    real.model.zero_grad = lambda **_: None  # type: ignore[method-assign]
    memory = measure_step(real, options)
    gradients = trace.weight_bytes
    assert trace.peak_bytes - trace.weight_bytes - gradients == memory.peak_bytes


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize("policy", ["none", "all", "save-attention"])
def test_gradients_that_the_backward_pass_applies_are_foreseen(
    threads: Threads, policy: str
) -> None:
    """Also of the many equal blocks of which a trace runs a few."""
    threads(1)
    planned, real = make_toy(num_blocks=8, updates=0), make_toy("cpu", num_blocks=8)
    options = options_of(policy, tuple(planned.blocks))
    trace = Tracer(planned, CPU).trace(options)
    section = OptimizerSection(fused_backward=True, max_grad_norm=1e9)
    optimizers = build_optimizers(real.model, [], section, "fp32")
    memory = measure_step(real, options, lambda: updating_in_backward(optimizers, 1.0))
    norms = 4 * len(list(real.model.parameters()))  # a number for each gradient
    assert trace.peak_bytes - trace.weight_bytes == pytest.approx(memory.peak_bytes, abs=norms)
    assert trace.end_bytes - trace.weight_bytes + norms == memory.end_bytes


def test_updates_take_memory_and_compiled_blocks_return_all_gradients_at_their_end() -> None:
    at_once, greedy = (make_toy(width=1024, updates=each) for each in (0, 10**8))
    options = options_of("all", tuple(at_once.blocks))
    compiled = replace(make_toy(width=1024, updates=0), compiles=True)
    least, more, most = (Tracer(each, CPU).trace(options) for each in (at_once, compiled, greedy))
    gradients = sum(each.nbytes for each in at_once.blocks["blocks.0"].parameters())
    assert gradients / 2 < more.peak_bytes - least.peak_bytes < gradients
    assert 10**8 <= most.peak_bytes - least.weight_bytes < 10**8 + least.peak_bytes
    assert least.end_bytes == more.end_bytes == least.weight_bytes + least.input_bytes


def test_a_block_of_two_outputs_has_one_backward_pass() -> None:
    """Its pass begins with the gradient of either output, and takes as long as after the other."""
    trace = make_tiny("flux_kontext", "full").tracer.trace({})
    double = trace.blocks["transformer_blocks.0"]
    assert double.backward is not None
    assert 1.5 * double.forward.seconds < double.backward.seconds < 3 * double.forward.seconds


def test_names_who_gets_a_gradient() -> None:
    subject = make_toy(trained="blocks.1")
    subject.model.idle = nn.Linear(3, 3, device="meta")
    watch = Tracer(subject, CPU).watch_gradients()
    assert watch.unreached() == ["idle.weight", "idle.bias"]
    assert all(name.startswith("blocks.1.") for name in watch.reached())
    assert len(watch.reached()) == len(list(subject.blocks["blocks.1"].parameters()))


def test_where_nothing_trains_no_gradient_passes() -> None:
    trace = Tracer(make_toy(trained="nothing"), CPU).trace({})
    assert all(block.backward is None for block in trace.blocks.values())


def test_a_frozen_front_has_no_backward_pass() -> None:
    trace = Tracer(make_toy(trained="blocks.1"), CPU).trace({})
    passes = {name: block.backward is not None for name, block in trace.blocks.items()}
    assert passes == {"blocks.0": False, "blocks.1": True, "blocks.2": True}


@pytest.mark.parametrize("option", ACTIVATIONS)
def test_frozen_blocks_in_front_keep_nothing(option: Activations) -> None:
    subject = make_toy(trained="blocks.2")
    options = dict.fromkeys(("blocks.0", "blocks.1"), BlockOption(option))
    trace = Tracer(subject, CPU).trace(options)
    tokens = 2 * 40 * 32 * 4
    begins = [block.forward.begin_bytes for block in trace.blocks.values()]
    assert begins == [begins[0]] * 3  # each hands on its tokens, in the place of those it was given
    assert begins[0] - trace.weight_bytes - trace.input_bytes == tokens


def test_shared_and_buffered_tensors_count_once() -> None:

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Linear(8, 8, bias=False)
            self.again = nn.Linear(8, 8, bias=False)
            self.again.weight = self.block.weight
            self.register_buffer("offset", torch.empty(10))
            self.register_buffer("nothing", None)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.again(self.call(self.block, inputs))

        call: Any

    with torch.device("meta"):
        model = Tied()
    subject = Subject(
        model,
        {"block": model.block},
        lambda call: setattr(model, "call", call),
        lambda: torch.empty(3, 8),
        lambda inputs: model(inputs).sum(),
    )
    trace = Tracer(subject, CPU).trace({})
    assert trace.weight_bytes == 4 * (8 * 8 + 10)
    assert model.block.weight is model.again.weight


def test_cuda_hands_out_multiples_of_512_bytes() -> None:
    subject = make_toy()
    sizes = [parameter.nbytes for parameter in subject.model.parameters()]
    trace = Tracer(subject, device_named("a6000")).trace({})
    assert trace.weight_bytes == sum(-(-size // 512) * 512 for size in sizes)
    assert trace.input_bytes == -(-subject.make_inputs().nbytes // 512) * 512
    assert trace.end_bytes == 2 * trace.weight_bytes + trace.input_bytes


def test_recomputing_takes_time_and_saves_memory() -> None:
    subject = make_toy()
    tracer, names = Tracer(subject, CPU), tuple(subject.blocks)
    kept, recomputed = (tracer.trace(options_of(policy, names)) for policy in ("none", "all"))
    forward = sum(block.forward.seconds for block in kept.blocks.values())
    assert recomputed.peak_bytes < kept.peak_bytes
    assert kept.seconds < recomputed.seconds <= 1.001 * (kept.seconds + forward)


_DEVICE = DeviceBudget("made up", "cuda", 1e12, 1e11, 1e10, None)
_PRODUCTS, _ATTENTION, _TRAFFIC = 0.7, 0.5, 0.8
_aten = torch.ops.aten


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _seconds(operation: Any, *args: Any) -> float:
    return seconds(operation, args, {}, operation(*args), _DEVICE)


@pytest.mark.parametrize(("dtype", "flops"), [(torch.bfloat16, 1e12), (torch.float32, 1e11)])
def test_a_product_takes_its_arithmetic(dtype: torch.dtype, flops: float) -> None:
    took = _seconds(_aten.mm.default, _meta(600, 500, dtype=dtype), _meta(500, 400, dtype=dtype))
    assert took == pytest.approx(2 * 600 * 500 * 400 / (flops * _PRODUCTS))


@pytest.mark.parametrize(("dtype", "rate"), [(torch.int8, 4.0), (torch.float8_e4m3fn, 2.0)])
def test_a_product_in_8_bits_runs_at_its_own_rate(dtype: torch.dtype, rate: float) -> None:
    first, second = _meta(6400, 4800, dtype=dtype), _meta(4000, 4800, dtype=dtype).t()
    device = replace(_DEVICE, int8_rate=4.0, bandwidth=1e12)
    args: tuple[Any, ...]
    if dtype == torch.int8:
        operation, args = _aten._int_mm.default, (first, second)
    else:
        one: Any = torch.empty((), device="meta")
        operation = _aten._scaled_mm.default
        args = first, second, one, one, None, None, torch.float32
    took = seconds(operation, args, {}, operation(*args), device)
    assert took == pytest.approx(2 * 6400 * 4800 * 4000 / (rate * 1e12 * _PRODUCTS))


@pytest.mark.parametrize("allowed", [True, False])
def test_fp32_convolutions_are_rounded_to_tf32_where_that_is_allowed(
    monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
    flops = 2 * 64 * 64 * 9 * 32 * 32
    fp32 = torch.float32
    tensors = _meta(1, 64, 32, 32, dtype=fp32), _meta(64, 64, 3, 3, dtype=fp32), None
    took = _seconds(_aten.convolution.default, *tensors, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert took == pytest.approx(flops / ((5e11 if allowed else 1e11) * _PRODUCTS))


@pytest.mark.parametrize(
    ("operation", "args", "numbers"),
    [
        (_aten.mm.default, (_meta(1, 500), _meta(500, 400)), 500 + 500 * 400 + 400),  # thin
        (_aten.clone.default, (_meta(1000, 30),), 2 * 1000 * 30),
        (_aten.cat.default, ([_meta(700, 30), _meta(300, 30)],), 2 * 1000 * 30),  # all parts
    ],
)
def test_traffic_takes_time(operation: Any, args: Any, numbers: int) -> None:
    assert _seconds(operation, *args) == pytest.approx(2 * numbers / (1e10 * _TRAFFIC))


@pytest.mark.parametrize(
    "operation",
    [
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
    ],
)
def test_attention_takes_two_products_on_any_device(operation: Any) -> None:
    took = _seconds(operation, *[_meta(2, 3, 1000, 64)] * 3)
    assert took == pytest.approx(2 * 2 * 2 * 3 * 1000 * 1000 * 64 / (1e12 * _ATTENTION))


def test_attentions_backward_pass_takes_five_products() -> None:
    query = _meta(2, 3, 1000, 64)
    forward = _seconds(_aten._scaled_dot_product_flash_attention.default, query, query, query)
    rows = _meta(2, 3, 1000, dtype=torch.float32)
    none = torch.empty(0, device="meta")
    backward = _seconds(
        _aten._scaled_dot_product_flash_attention_backward.default,
        *(query, query, query, query, query, rows, none, none, 1000, 1000, 0.0, False, none, none),
    )
    assert backward == pytest.approx(2.5 * forward)


def test_seconds_of_a_product_follow_all_shapes() -> None:
    """Its operations are counted once for equal shapes, and anew for others."""
    gpu, found = device_named("a6000"), list[float]()
    for inner in (4096, 8192, 4096):
        one = torch.empty(8192, inner, dtype=torch.bfloat16, device="meta")
        result = one @ one.t()
        found.append(seconds(_aten.mm.default, (one, one.t()), {}, result, gpu))
    assert found[1] == pytest.approx(2 * found[0])
    assert found[2] == found[0]

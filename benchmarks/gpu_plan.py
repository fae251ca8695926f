"""Predicted and measured memory and time on a CUDA GPU.

    python benchmarks/gpu_plan.py [--budget 44.5] [--only rates kernels small large]

Four parts. The first one is `longtake plan --calibrate`, whose rates the others' predictions go by;
these are each predicted without weights or values and then run:

- kernels: memory and time of attention, norms and matrix products
- small: FLUX Kontext and Wan with a few narrow blocks, under every recompute policy and the best
- large: FLUX.1 Kontext itself, 12 billion random weights made on the GPU, at 1024x1024 with a
  reference; LoRA of rank 16 in bf16, as in examples/flux_kontext_lora_48gb.toml

After small and large the optimizer's update. Memory is `torch.cuda.max_memory_allocated`; times are
medians of three runs after one warm-up. A policy that is predicted not to fit is left out. Prints
the tables and writes them to benchmarks/results/gpu_plan.md, line by line. Each part has a process
of its own: after an error of CUDA nothing else runs in its process. Under eight minutes on one GPU
of 80 GB.

It needs torch, diffusers, transformers, peft, accelerate, safetensors, tokenizers, pydantic,
tomli-w, numpy and scipy, and no clips and no weights. Without a GPU it ends with a message.
"""

import argparse
import gc
import itertools
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from longtake import config
from longtake.config import Recipe
from longtake.models.objective import flow_losses
from longtake.optim.build import build_optimizers
from longtake.planner.activation_checkpointing import POLICIES, BlockCall, caller, options_of
from longtake.planner.calibration import calibrate
from longtake.planner.devices import DeviceBudget, device_for, rounded
from longtake.planner.memory import MetaStep, foreach_bytes, optimizer_bytes, outline_step
from longtake.planner.profiler import MeasuredMemory, measured
from longtake.planner.record import Options
from longtake.planner.solver import PolicySweep, find_best, sweep_policies
from longtake.planner.trace import StepTrace, Subject, Tracer

_RESULTS = Path(__file__).parent / "results" / "gpu_plan.md"
_EXAMPLES = Path(__file__).parents[1] / "examples"
_GIB = 2**30
_SHARE_OF_MEMORY = 0.93
_LARGE = "flux_kontext_lora_48gb.toml"
_SECTIONS = ("rates", "kernels", "small", "large")
_NOTHING = """# Predicted against measured on a GPU

`python benchmarks/gpu_plan.py`

**Nothing was measured on a GPU**: {reason}.

All that `longtake plan` prints about a GPU is a prediction. [plan_accuracy.md](plan_accuracy.md)
compares its traces with the CPU's allocator, and the replacements of CUDA's kernels with torch's
own derivatives. The temporary memory of CUDA's kernels is taken from their source, and times are a
roofline of the GPU's data sheet.
"""

_HEADS = {"num_attention_heads": 8, "attention_head_dim": 128}
_SMALL: Mapping[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "FLUX Kontext": (
        _LARGE,
        {**_HEADS, "num_layers": 3, "num_single_layers": 5, "guidance_embeds": True},
        {"num_frames": 1, "height": 512, "width": 512},
    ),
    "Wan": (
        "wan_1_3b_full_80gb.toml",
        {**_HEADS, "num_layers": 8, "ffn_dim": 4096},
        {"num_frames": 33, "height": 256, "width": 384},
    ),
}
"""The example of each, its model's arguments, and the shape of its clips."""


def main() -> None:
    """Measure the requested parts; print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=44.5, help="GiB, of the large model's best")
    parser.add_argument("--only", nargs="+", choices=_SECTIONS, default=_SECTIONS)
    parser.add_argument("--part", choices=_SECTIONS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        _skip("torch finds no CUDA GPU here")
        return
    if asked.part is not None:
        for line in _part(asked.part, int(asked.budget * _GIB)):
            print(line, flush=True)  # noqa: T201
        return
    begun, gpu = time.perf_counter(), device_for("cuda")
    lines = [
        "# Predicted against measured on a GPU",
        "",
        f"`python benchmarks/gpu_plan.py`, {torch.cuda.get_device_name()}, torch "
        f"{torch.__version__}; predicted by rates that this GPU reached, for which longtake knows "
        f"the data sheet of {gpu.name}. Memory is that of "
        "tensors, beside weights, in GiB; times are those of forward and backward pass.",
        "",
    ]
    for part in asked.only:
        command = [sys.executable, __file__, "--part", part, "--budget", str(asked.budget)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - our own program
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)  # noqa: T201
                lines.append(line.rstrip("\n"))
                _RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
        if process.returncode:
            lines += ["", f"The part {part} ended early, with {process.returncode}.", ""]
    lines += [f"{time.perf_counter() - begun:.0f} s for everything.", ""]
    _RESULTS.write_text("\n".join(lines), encoding="utf-8")


def _part(part: str, budget_bytes: int) -> Iterator[str]:
    """The lines of a part, as they come."""
    gpu, device = device_for("cuda"), torch.device("cuda")
    if part == "rates":
        rates = calibrate(torch.device("cuda", 0))
        yield from ("| rate | reached |", "|---|---|")
        for name, rate in asdict(rates).items():
            if name != "measured_at":
                yield f"| {name} | {rate / 1e12:.4g} x 10^12 a second |"
        yield ""
    if part == "kernels":
        yield from _kernels(gpu, device)
    if part == "small":
        for case in itertools.product(_SMALL, ("full", "lora"), ("bf16", "autocast")):
            yield from (f"## Small {', '.join(case)}", "")
            yield from _model(_small(*case), gpu, device)
    if part == "large":
        recipe = config.load(_EXAMPLES / _LARGE, ("training.global_batch_size=1",))
        yield from ("## FLUX.1 Kontext, LoRA, bf16", "")
        yield from _model(recipe, gpu, device, budget_bytes)


def _skip(reason: str) -> None:
    """Print the reason, and write it to the results unless they have figures of a GPU."""
    print(f"Skipped: {reason}. All figures for GPUs are predictions.")  # noqa: T201
    if not _RESULTS.exists() or "Nothing was measured" in _RESULTS.read_text(encoding="utf-8"):
        _RESULTS.write_text(_NOTHING.format(reason=reason), encoding="utf-8")


def _small(name: str, trained: str, arithmetic: str) -> Recipe:
    example, arguments, bucket = _SMALL[name]
    values: dict[str, Any] = tomllib.loads((_EXAMPLES / example).read_text(encoding="utf-8"))
    del values["model"]["pretrained"]
    values["model"] |= {"config": arguments, "dtype": "bf16" if arithmetic == "bf16" else "fp32"}
    values["data"]["buckets"] = [bucket]
    values["training"] |= {"global_batch_size": 4, "micro_batch_size": 4}
    values["trainable"] = {"kind": trained}
    return config.parse(values, source=example)


class Run(NamedTuple):
    """A measurement, in bytes above the memory before it."""

    forward_end_bytes: int
    peak_bytes: int
    seconds: float


def _run(once: Callable[[MeasuredMemory | None], None], device: torch.device) -> Run:
    """Measure a function that runs a forward and a backward pass and leaves no memory."""
    once(None)  # libraries allocate what they keep
    with measured(device) as memory:
        once(memory)
    seconds = [_seconds(lambda: once(None)) for _ in range(3)]
    return Run(memory.at["forward"], memory.peak_bytes, statistics.median(seconds))


def _seconds(work: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def _model(
    recipe: Recipe, gpu: DeviceBudget, device: torch.device, budget_bytes: int | None = None
) -> Iterator[str]:
    """Every policy of a recipe, and its update; `best` for the middle of the range."""
    planned = outline_step(recipe, gpu)
    surveyed = sweep_policies(planned.tracer)
    peaks = [trace.peak_bytes for trace in surveyed.traces.values()]
    budget_bytes = budget_bytes or (min(peaks) + max(peaks)) // 2
    names = tuple(planned.tracer.subject.blocks)
    cases: dict[str, tuple[Options, StepTrace]]
    cases = {policy: (options_of(policy, names), surveyed.traces[policy]) for policy in POLICIES}
    if best := find_best(planned.tracer, surveyed, budget_bytes):
        counts = ", ".join(f"{count} {option}" for option, count in best.per_block().items())
        cases[f"best for {budget_bytes / _GIB:.2f} GiB: {counts}"] = best.options, best.traced
    step = _on_device(outline_step(recipe, gpu), device)
    num_parameters = sum(p.numel() for p in step.components.model.parameters())
    size = surveyed.traces["none"].weight_bytes / _GIB
    yield f"{num_parameters / 1e9:.2f} billion parameters, {size:.3f} GiB."
    yield ""
    yield from _policies(cases, surveyed, step, device, room=gpu.total_bytes)
    yield ""
    yield from _update(step, device)
    yield ""
    del step
    gc.collect()
    torch.cuda.empty_cache()


def _policies(
    cases: Mapping[str, tuple[Options, StepTrace]],
    surveyed: PolicySweep,
    step: MetaStep,
    device: torch.device,
    room: int | None,
) -> Iterator[str]:
    yield _COLUMNS
    yield "|" + "---|" * (_COLUMNS.count("|") - 1)
    without = None
    for name, (options, trace) in cases.items():
        if room is not None and trace.peak_bytes > _SHARE_OF_MEMORY * room:
            yield f"| {name} | {trace.peak_bytes / _GIB:.3f} with weights: does not fit |"
            continue
        try:
            run = _run(_once(step, options, device), device)
        except torch.OutOfMemoryError as error:
            step.components.model.zero_grad(set_to_none=True)
            yield f"| {name} | {str(error).strip().splitlines()[0][:100]} |"
            continue
        without = run if name == "none" else without
        yield _line(name, trace, run, surveyed.overhead(trace), without)


_COLUMNS = (
    "| policy | peak, predicted | measured | off | forward's end, predicted | measured | off "
    "| seconds, predicted | measured | overhead, predicted | measured |"
)


def _line(name: str, trace: StepTrace, run: Run, overhead: float, without: Run | None) -> str:
    peak, forward = (
        predicted - trace.weight_bytes for predicted in (trace.peak_bytes, trace.forward_end_bytes)
    )
    cells = (
        name,
        *_compared(peak, run.peak_bytes),
        *_compared(forward, run.forward_end_bytes),
        f"{trace.seconds:.4f}",
        f"{run.seconds:.4f}",
        f"{overhead:+.1%}",
        f"{run.seconds / without.seconds - 1:+.1%}" if without else "",
    )
    return f"| {' | '.join(cells)} |"


def _compared(predicted: int, real: int) -> tuple[str, str, str]:
    off = f"{predicted / real - 1:+.1%}" if real else ""
    return f"{predicted / _GIB:.4f}", f"{real / _GIB:.4f}", off


def _once(
    step: MetaStep, options: Options, device: torch.device
) -> Callable[[MeasuredMemory | None], None]:
    subject = step.tracer.subject
    subject.call_blocks_by(caller({subject.blocks[name]: each for name, each in options.items()}))

    def once(memory: MeasuredMemory | None) -> None:
        with device:
            examples = subject.make_inputs()
        for tensor in (examples.latents, examples.noise, *examples.conditioning.values()):
            tensor.normal_()
        examples.sigmas.fill_(0.5)
        loss = flow_losses(step.components, examples, step.precision, device).mean()
        if memory:
            memory.mark("forward")
        torch.autograd.backward(loss)
        subject.model.zero_grad(set_to_none=True)

    return once


def _on_device(step: MetaStep, device: torch.device) -> MetaStep:
    """The step with random weights, created on the device."""

    def real(tensor: Tensor) -> Tensor:
        values = torch.empty(tensor.shape, dtype=tensor.dtype, device=device).normal_(std=0.02)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(values, tensor.requires_grad)
        return values

    for module in step.components.model.modules():
        for held in (cast("dict[str, Tensor | None]", module._parameters), module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = real(tensor)
    return step


def _held(num_bytes: int) -> int:
    return rounded(num_bytes, 512)


def _update(step: MetaStep, device: torch.device) -> list[str]:
    """Persistent and temporary memory of the recipe's optimizer, and of torch's default."""
    model, section = step.components.model, step.recipe.optimizer
    blocks = step.components.family.blocks(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ours = optimizer_bytes(model, blocks, section, step.precision, device.type, held=_held)

    def build() -> list[Optimizer]:
        return build_optimizers(model, blocks, section, step.precision)

    def foreach() -> list[Optimizer]:
        return [torch.optim.AdamW(trained, foreach=True)]

    for parameter in trained:
        parameter.grad = torch.full_like(parameter, 1e-3)
    kept, passing = _of_update(build, device)
    _, passing_foreach = _of_update(foreach, device)
    model.zero_grad(set_to_none=True)
    rows = {
        "kept by the optimizer": (ours.device, kept),
        "temporary memory of an update": (ours.step, passing),
        "temporary memory of torch's foreach AdamW": (foreach_bytes(model), passing_foreach),
    }
    lines = [f"| {what} | {' | '.join(_compared(*both))} |" for what, both in rows.items()]
    return ["| update | predicted | measured | off |", "|---|---|---|---|", *lines]


def _of_update(build: Callable[[], list[Optimizer]], device: torch.device) -> tuple[int, int]:
    """Bytes that optimizers keep, and temporary bytes of their second update."""
    with measured(device) as memory:
        optimizers = build()
        for optimizer in optimizers:
            optimizer.step()
    with measured(device) as second:
        for optimizer in optimizers:
            optimizer.step()
    return memory.end_bytes, second.peak_bytes


class Kernel(NamedTuple):
    """A single operation on leaf tensors of these shapes."""

    function: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    backend: SDPBackend | None = None
    """Of attention; unset: torch's choice."""


def _kernels_of_flux(length: int = 8704, num_heads: int = 24) -> dict[str, Kernel]:
    """The operations of a block of FLUX, for an image of 1024x1024 with a reference."""
    width = 128 * num_heads
    heads, tokens, wide = (1, num_heads, length, 128), (1, length, width), (1, length, 4 * width)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value)

    return {
        "attention, as torch chooses": Kernel(attention, (heads,) * 3),
        "attention, flash": Kernel(attention, (heads,) * 3, SDPBackend.FLASH_ATTENTION),
        "attention, cuDNN": Kernel(attention, (heads,) * 3, SDPBackend.CUDNN_ATTENTION),
        "attention, other": Kernel(attention, (heads,) * 3, SDPBackend.EFFICIENT_ATTENTION),
        "RMSNorm": Kernel(lambda x: F.rms_norm(x, (128,)), (heads,)),
        "LayerNorm": Kernel(lambda x: F.layer_norm(x, (width,)), (tokens,)),
        "GELU": Kernel(lambda x: F.gelu(x, approximate="tanh"), (wide,)),
        "product": Kernel(lambda x, weight: F.linear(x, weight), (tokens, (4 * width, width))),
    }


def _kernels(gpu: DeviceBudget, device: torch.device) -> Iterator[str]:
    yield from ("## Kernels, bf16", "", _KERNEL_COLUMNS, "|" + "---|" * 9)
    for name, kernel in _kernels_of_flux().items():
        try:
            yield _kernel_line(name, kernel, gpu, device)
        except RuntimeError as error:  # a backend that this GPU does not have
            yield f"| {name} | {str(error).strip().splitlines()[0]} |"
        torch.cuda.empty_cache()
    yield ""


_BF16 = torch.bfloat16
_KERNEL_COLUMNS = (
    "| operation and its squares' sum | peak, predicted | measured | off "
    "| kept, predicted | measured | off | ms, predicted | measured |"
)


def _kernel_line(name: str, kernel: Kernel, gpu: DeviceBudget, device: torch.device) -> str:
    """Peak in forward and backward pass and saved bytes of an operation, without its operands."""
    trace = Tracer(_subject(kernel), gpu).trace({})
    leaves = [torch.randn(shape, dtype=_BF16, device=device) for shape in kernel.shapes]

    def once(memory: MeasuredMemory | None) -> None:
        inputs = [leaf.detach().requires_grad_() for leaf in leaves]
        loss = kernel.function(*inputs).square().sum()  # whose gradient has no gaps
        if memory:
            memory.mark("forward")
        torch.autograd.backward(loss)

    with nullcontext() if kernel.backend is None else sdpa_kernel(kernel.backend):
        run = _run(once, device)
    peak = _compared(trace.peak_bytes - trace.input_bytes, run.peak_bytes)
    kept = _compared(trace.forward_end_bytes - trace.input_bytes, run.forward_end_bytes)
    times = f"{1e3 * trace.seconds:.2f} | {1e3 * run.seconds:.2f}"
    return f"| {name} | {' | '.join((*peak, *kept))} | {times} |"


class _Block(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.forward = function


def _subject(kernel: Kernel) -> Subject:
    """A model with one block that runs the operation."""
    block, held = _Block(kernel.function), dict[str, BlockCall]()

    def make_inputs() -> list[Tensor]:
        return [torch.empty(shape, dtype=_BF16, requires_grad=True) for shape in kernel.shapes]

    def loss(inputs: list[Tensor]) -> Tensor:
        return held["call"](block, *inputs).square().sum()

    return Subject(block, {"": block}, lambda call: held.update(call=call), make_inputs, loss)


if __name__ == "__main__":
    main()

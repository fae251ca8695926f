"""Predicted and measured memory, on the CPU's allocator.

    python benchmarks/plan_accuracy.py

Tiny FLUX Kontext, FLUX and Wan, trained in full, with LoRA and with an added module, in fp32, in
bf16 and under autocast, whole batches and micro-batches, under every recompute policy and the best
one for a budget between the least and the most. Each step is predicted without weights or values,
and then run, forward and backward, while the profiler records the allocations. Gradients are
compared bitwise over all policies. Then the replacements of CUDA's kernels are compared with what
torch itself does without a GPU.

oneDNN is off: its scratchpads depend on the processor. Prints the tables and writes them to
benchmarks/results/plan_accuracy.md. Under three minutes on two idle CPU cores.
"""

import hashlib
import platform
import time
import tomllib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from longtake import config
from longtake.config import Recipe
from longtake.planner.activation_checkpointing import POLICIES, caller, options_of
from longtake.planner.devices import CPU
from longtake.planner.kernels import as_on_cuda
from longtake.planner.memory import MetaStep, outline_step
from longtake.planner.profiler import measured
from longtake.planner.record import Options
from longtake.planner.solver import BestOptions, PolicySweep, find_best, sweep_policies
from longtake.planner.trace import StepTrace
from longtake.process import keep_freed_memory

_RESULTS = Path(__file__).parent / "results" / "plan_accuracy.md"
_MIB = 2**20
_ALL_POLICIES = (*POLICIES, "best")

_FLUX = """
out = "unused"
data.catalog = "unused"
data.buckets = [{ num_frames = 1, height = 128, width = 128 }]
training = { steps = 1, global_batch_size = 2, device = "cpu" }
[model.config]
num_layers = 2
num_single_layers = 3
num_attention_heads = 2
attention_head_dim = 32
axes_dims_rope = [8, 12, 12]
guidance_embeds = true
[codec]
kind = "autoencoder"
[codec.config]
block_out_channels = [8, 8, 8, 8]
down_block_types = ["DownEncoderBlock2D", "DownEncoderBlock2D", "DownEncoderBlock2D", "DownEncoderBlock2D"]
up_block_types = ["UpDecoderBlock2D", "UpDecoderBlock2D", "UpDecoderBlock2D", "UpDecoderBlock2D"]
latent_channels = 16
norm_num_groups = 4
[text]
kind = "transformers"
max_tokens = 16
config = { d_model = 64, d_kv = 8, d_ff = 64, num_layers = 1, num_heads = 2 }
[text.pooled]
max_tokens = 16
config = { hidden_size = 32, intermediate_size = 32, num_hidden_layers = 1, num_attention_heads = 2 }
"""  # noqa: E501
_WAN = """
out = "unused"
data.catalog = "unused"
data.buckets = [{ num_frames = 9, height = 64, width = 64 }]
training = { steps = 1, global_batch_size = 2, device = "cpu" }
[model.config]
num_layers = 5
num_attention_heads = 2
attention_head_dim = 32
ffn_dim = 256
freq_dim = 64
[codec]
kind = "autoencoder"
config = { base_dim = 8, z_dim = 8, num_res_blocks = 1 }
[text]
kind = "transformers"
max_tokens = 16
config = { d_model = 64, d_kv = 16, d_ff = 64, num_layers = 1, num_heads = 4 }
"""
_RECIPES = {"flux": _FLUX, "flux_kontext": _FLUX, "wan": _WAN}
_MODULES = {
    "flux_kontext": "examples.modules.pose_adapter:PoseAdapter",
    "wan": "examples.modules.style_residual:StyleResidual",
}


@dataclass(frozen=True)
class Case:
    """A step that is predicted and run."""

    family: str
    trainable: str
    """`full`, `lora` or `module`."""
    dtype: str
    """Of the weights."""
    precision: str = "fp32"
    """bf16: autocast over fp32 weights."""
    num_micro_batches: int = 1

    def recipe(self) -> Recipe:
        """For a plan only: its run has neither clips nor weights."""
        values: dict[str, Any] = tomllib.loads(_RECIPES[self.family])
        values["model"] |= {"family": self.family, "dtype": self.dtype}
        micro = values["training"]["global_batch_size"]
        values["training"] |= {
            "precision": self.precision,
            "micro_batch_size": micro,
            "global_batch_size": self.num_micro_batches * micro,
        }
        is_added = self.trainable == "module"
        if self.family == "flux_kontext":
            names = ["reference", "pose"] if is_added else ["reference"]
            picture = {"kind": "picture", "path": "{stem}.png"}
            values["data"]["conditioning"] = dict.fromkeys(names, picture)
        if is_added:
            values["trainable"] = {"modules": {"added": {"module": _MODULES[self.family]}}}
        else:
            values["trainable"] = {"kind": self.trainable, "rank": 8}
        return config.parse(values, source="the benchmark's recipe")

    def __str__(self) -> str:
        arithmetic = f"{self.dtype}, autocast" if self.precision == "bf16" else self.dtype
        micro = f", {self.num_micro_batches}nd micro-batch" if self.num_micro_batches > 1 else ""
        return f"{self.family} | {self.trainable} | {arithmetic}{micro}"


_CASES = (
    *(
        Case(family, trainable, dtype)
        for family in ("flux_kontext", "wan")
        for trainable in ("full", "lora", "module")
        for dtype in ("fp32", "bf16")
    ),
    Case("flux", "full", "fp32"),
    Case("flux", "lora", "bf16"),
    Case("flux_kontext", "lora", "fp32", precision="bf16"),
    Case("wan", "full", "fp32", precision="bf16"),
    Case("flux_kontext", "lora", "bf16", num_micro_batches=2),
    Case("wan", "full", "fp32", num_micro_batches=2),
)


@dataclass(frozen=True)
class Result:
    """One case under every policy, in bytes besides weights and older gradients."""

    case: Case
    predicted: Mapping[str, int]
    measured: Mapping[str, int]
    best: BestOptions
    num_gradients: int
    """Number of sets of gradients that differ bitwise; it should be one."""

    def error(self, policy: str) -> float:
        """Predicted over measured, less 1."""
        return self.predicted[policy] / self.measured[policy] - 1

    @property
    def plan_error(self) -> float:
        """The best plan's composed peak over its trace's, less 1."""
        return self.best.predicted_bytes / self.best.traced.peak_bytes - 1


def main() -> None:
    """Run all cases; print and write the tables."""
    keep_freed_memory()
    # Autocast leaves it so on a CPU; CUDA's widens both.
    warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
    torch.backends.mkldnn.set_flags(_enabled=False)  # type: ignore[no-untyped-call]
    begun = time.perf_counter()
    results = [_result(case) for case in _CASES]
    lines = [*_accuracy(results), "", *_replaced_kernels()]
    lines += ["", f"{time.perf_counter() - begun:.0f} s for everything."]
    _RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))  # noqa: T201


def _result(case: Case) -> Result:
    planned, real = outline_step(case.recipe(), CPU), outline_step(case.recipe(), CPU)
    names = tuple(planned.tracer.subject.blocks)
    surveyed = sweep_policies(planned.tracer)
    best = _best(planned, surveyed)
    options = {policy: options_of(policy, names) for policy in POLICIES} | {"best": best.options}
    traces = {**surveyed.traces, "best": best.traced}
    older = _gradient_bytes(planned) if case.num_micro_batches > 1 else 0
    _fill(real.tracer.subject.model)
    _run(real, options["none"], case)  # the first time, libraries allocate what they keep
    runs = {policy: _run(real, options[policy], case) for policy in _ALL_POLICIES}
    return Result(
        case=case,
        predicted={policy: _beside(traces[policy]) - older for policy in _ALL_POLICIES},
        measured={policy: peak for policy, (peak, _) in runs.items()},
        best=best,
        num_gradients=len({digest for _, digest in runs.values()}),
    )


def _best(step: MetaStep, surveyed: PolicySweep) -> BestOptions:
    """The best plan for a budget between the least and the most of all policies."""
    peaks = [trace.peak_bytes for trace in surveyed.traces.values()]
    best = find_best(step.tracer, surveyed, (max(peaks) + min(peaks)) // 2)
    assert best is not None
    return best


def _beside(trace: StepTrace) -> int:
    return trace.peak_bytes - trace.weight_bytes


def _gradient_bytes(step: MetaStep) -> int:
    trained = [p for p in step.components.model.parameters() if p.requires_grad]
    return sum((p.grad_dtype or p.dtype).itemsize * p.numel() for p in trained)


def _run(step: MetaStep, options: Options, case: Case) -> tuple[int, str]:
    """Run a step: bytes at its peak above those before, and a digest of its gradients."""
    subject = step.tracer.subject
    subject.call_blocks_by(caller({subject.blocks[name]: each for name, each in options.items()}))
    subject.model.zero_grad(set_to_none=True)
    for _ in range(case.num_micro_batches - 1):
        _forward_and_backward(step)
    with measured(torch.device("cpu")) as memory:
        _forward_and_backward(step)
    digest = hashlib.sha256()
    for parameter in subject.model.parameters():
        if parameter.grad is not None:
            digest.update(parameter.grad.view(torch.uint8).numpy().tobytes())
    return memory.peak_bytes, digest.hexdigest()


def _forward_and_backward(step: MetaStep) -> None:
    examples = step.tracer.subject.make_inputs()
    conditioning = examples.conditioning.values()
    given = (examples.latents, examples.noise, examples.sigmas, *conditioning)
    for number, tensor in enumerate(given):
        tensor.fill_(0.1 + 0.1 * number)
    torch.autograd.backward(step.tracer.subject.loss(examples))


def _fill(model: nn.Module) -> None:
    """Give a model real weights."""
    generator = torch.Generator().manual_seed(0)

    def real(tensor: Tensor) -> Tensor:
        values = torch.randn(tensor.shape, generator=generator).mul_(0.05).to(tensor.dtype)
        if isinstance(tensor, nn.Parameter):
            parameter = nn.Parameter(values, tensor.requires_grad)
            parameter.grad_dtype = tensor.grad_dtype
            return parameter
        return values

    for module in model.modules():
        for held in (cast("dict[str, Tensor | None]", module._parameters), module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = real(tensor)


def _accuracy(results: Sequence[Result]) -> list[str]:
    errors = {
        (str(result.case), policy): result.error(policy)
        for result in results
        for policy in _ALL_POLICIES
    }
    where, worst = max(errors.items(), key=lambda item: abs(item[1]))
    plan_error = max(abs(result.plan_error) for result in results)
    is_same = all(result.num_gradients == 1 for result in results)
    num_exact = sum(error == 0 for error in errors.values())
    return [
        "# Predicted and measured memory",
        "",
        f"`python benchmarks/plan_accuracy.py`, {platform.machine()}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}. Without oneDNN, whose "
        "scratchpads follow the processor and have no formula. Peaks of forward and backward pass "
        "beside the weights, in MiB, as the CPU's allocator saw them, and by how much the "
        "prediction is off.",
        "",
        f"- worst error of {len(errors)} rows: {worst:+.3%} ({' '.join(where[0].split(' | '))}, "
        f"{where[1]}); {num_exact} are exact to the byte",
        f"- best plan, composed of single blocks, against its own trace: at most {plan_error:.3%}",
        f"- gradients identical to the bit over all policies: {'yes' if is_same else 'NO'}",
        "",
        "With LoRA the allocator also sees each layer's scale, 8 bytes that autograd keeps in "
        "host memory on any device; predictions do not include them.",
        "",
        f"| model | trained | weights | {' | '.join(_ALL_POLICIES)} | plan to trace | gradients |",
        "|" + "---|" * (5 + len(_ALL_POLICIES)),
        *(_line(result) for result in results),
    ]


def _line(result: Result) -> str:
    cells = [
        f"{result.measured[policy] / _MIB:.2f} ({result.error(policy):+.3%})"
        for policy in _ALL_POLICIES
    ]
    gradients = "same" if result.num_gradients == 1 else f"{result.num_gradients} sets"
    return f"| {result.case} | {' | '.join(cells)} | {result.plan_error:+.3%} | {gradients} |"


def _replaced_kernels() -> list[str]:
    """Replacements of CUDA's kernels, compared with what torch does without a GPU."""
    rows = []
    for what, function, shape, truth, source in _KEPT:
        with FakeTensorMode(), as_on_cuda():
            mine = _kept(function, shape)
        rows.append(f"| {what} | {mine} | {truth(function, shape)} | {source} |")
    return [
        "# Replacements of CUDA's kernels",
        "",
        "For a GPU the same traces use operations that save what CUDA's kernels save. This is "
        "checked as far as possible without a GPU (in bf16):",
        "",
        "| | bytes kept | expected | by |",
        "|---|---|---|---|",
        *rows,
        "",
        "CUDA's attention also keeps the state of its random numbers, 16 or 24 bytes. The "
        "temporary memory and the time of its kernels can only be measured on a GPU: "
        "[gpu_plan.md](gpu_plan.md).",
    ]


_Function = Callable[[Tensor], Tensor]


def _kept(function: _Function, shape: torch.Size) -> int:
    """Bytes that a function of bf16 tensors saves for its backward pass, each storage once."""
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        function(torch.ones(shape, dtype=torch.bfloat16, requires_grad=True))
    return sum(storage.nbytes() for storage in storages.values())


def _kept_by_torch(function: _Function, shape: torch.Size) -> int:
    """Bytes kept by torch's own derivative, with RMSNorm as one kernel on the CPU too."""

    def fused(x: Tensor, _: Any, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        rstd = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
        return (x * rstd).to(x.dtype), rstd

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_fused_rms_norm", fused, "CPU")
        return _kept(function, shape)


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-6)


def _weighted_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], torch.ones(x.shape[-1], dtype=x.dtype), eps=1e-6)


def _attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, 2 * x, 3 * x)


def _masked_attention(x: Tensor) -> Tensor:
    mask = torch.zeros(x.shape[-2], x.shape[-2], dtype=x.dtype)
    return F.scaled_dot_product_attention(x, 2 * x, 3 * x, mask)


_TOKENS, _HEADS = torch.Size((2, 256, 64)), torch.Size((2, 2, 256, 32))
_KEPT = (
    ("RMSNorm", _norm, _TOKENS, _kept_by_torch, "its derivative in torch"),
    ("RMSNorm with weights", _weighted_norm, _TOKENS, _kept_by_torch, "its derivative in torch"),
    ("attention", _attention, _HEADS, _kept, "torch's flash kernel for CPUs"),
    ("attention with a mask", _masked_attention, _HEADS, _kept, "torch's flash kernel for CPUs"),
)
"""Name, function, shape, expected bytes and their source."""


if __name__ == "__main__":
    main()

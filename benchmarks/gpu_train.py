"""Speed and memory of training steps on a CUDA GPU, compared with diffusers' training examples.

    python benchmarks/gpu_train.py [--only wan flux] [--minutes 7.5] [--eager] [--tiny]

Wan with 1.3 billion weights, all trained, and FLUX.1 with 12 billion, LoRA of rank 16; both with
random weights, and with latents and prompt embeddings as from a cache. Of each model, smaller clips
first:

- diffusers: a step of its training examples (the same computation, written again): noise and times
  drawn on the GPU, the flow-matching loss in fp32, `clip_grad_norm_`, `torch.optim.AdamW` with its
  defaults, `zero_grad`; with and without diffusers' own gradient checkpointing
- longtake: `compute_gradients`, the norms' sums, `apply_update` with fused AdamW; without
  recompute, with the plan's best, and with compiled blocks; of these also what runs outside of them

On several GPUs a last case shards Wan over them (the script starts itself by torchrun). After each
row all results are written to benchmarks/results/gpu_train.md, so that an interrupted run keeps
them. Each case has a process of its own: after an error of CUDA nothing else runs in its process.
It needs no clips and no weights, and ends within eight minutes. Without a GPU it ends with a
message; `--tiny` runs every path with small sizes on the CPU, and writes nothing.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from longtake import config
from longtake.config import ParallelSection, Recipe
from longtake.data.batch import Batch
from longtake.data.stages import StagePosition
from longtake.flow.timesteps import sample_sigmas
from longtake.models.components import outline
from longtake.models.numerics import autocast
from longtake.models.objective import FlowMatching, training_flops
from longtake.parallel.fsdp import gradients_of_any_dtype
from longtake.parallel.mesh import World, join
from longtake.planner.activation_checkpointing import caller, options_of
from longtake.planner.devices import CPU, DeviceBudget, device_for
from longtake.planner.memory import MetaStep, outline_step, static_memory
from longtake.planner.record import Options
from longtake.planner.solver import find_best, sweep_policies
from longtake.run_dir import RunDirectory
from longtake.training.build import build_state
from longtake.training.compiled import compile_blocks
from longtake.training.session import Session, TrainingState
from longtake.training.statistics import NormStats
from longtake.training.step import apply_update, compute_gradients

_RESULTS = Path(__file__).parent / "results" / "gpu_train.md"
_EXAMPLES = Path(__file__).parents[1] / "examples"
_GIB = 2**30
_SHARE_OF_MEMORY = 0.9
_TIMED = 4
_LEAST_SECONDS = {"eager": 25.0, "compiled": 90.0, "case": 30.0}
"""Minimum time that must be left to begin another."""
_ROW = "row: "
_OUTSIDE = "outside: "
_MOST_SHARES = 12
_COMPILED = ("Torch-Compiled Region", "CompiledFunctionBackward")
"""Beginnings of the profiler's names for compiled code, forward and backward."""
_NOTHING = """# Training steps on a GPU

`python benchmarks/gpu_train.py`

**Nothing was measured on a GPU**: {reason}. The script's paths were run on a CPU (`--tiny`).
"""
_MFU = (
    "MFU = FLOPs of a step / (seconds x the GPU's dense bf16 FLOP/s). FLOPs of a step = B f F: "
    "F = those of one sample's forward pass, a multiply-add being two, counted in products, "
    "convolutions and attention by torch's FlopCounterMode; f = 3 where all weights train (one "
    "product forward, two backward), f = 2 for LoRA (the gradients of frozen "
    "weights are not computed). Recompute does not count."
)


class Case(NamedTuple):
    """A model, and clips of one shape."""

    name: str
    example: str
    model: Mapping[str, Any]
    bucket: Mapping[str, int]
    batch_size: int
    changes: Mapping[str, Mapping[str, Any]] = {}

    def recipe(self) -> Recipe:
        """The example with this model and these clips."""
        text = (_EXAMPLES / self.example).read_text(encoding="utf-8")
        values: dict[str, Any] = tomllib.loads(text)
        values["model"] |= self.model
        values["data"] |= {"buckets": [dict(self.bucket)], "conditioning": {}}
        values["training"] |= {
            "global_batch_size": self.batch_size,
            "micro_batch_size": self.batch_size,
        }
        values["recompute"] = {}
        for section, changed in self.changes.items():
            values[section] = values.get(section, {}) | changed
        return config.parse(values, source=self.example)


_FLUX = {"family": "flux", "pretrained": None, "config": {
    "num_layers": 19, "num_single_layers": 38, "num_attention_heads": 24,
    "attention_head_dim": 128, "guidance_embeds": True,
}}  # fmt: skip
_WAN, _KONTEXT = "wan_1_3b_full_80gb.toml", "flux_kontext_lora_48gb.toml"
_CASES = {
    "wan": (
        Case("Wan 1.3B, full, 17 frames of 832x480", _WAN, {},
             {"num_frames": 17, "height": 480, "width": 832}, 1),
        Case("Wan 1.3B, full, 81 frames of 832x480", _WAN, {},
             {"num_frames": 81, "height": 480, "width": 832}, 1),
    ),
    "flux": (
        Case("FLUX.1 12B, LoRA, 512x512", _KONTEXT, _FLUX,
             {"num_frames": 1, "height": 512, "width": 512}, 4),
        Case("FLUX.1 12B, LoRA, 1024x1024", _KONTEXT, _FLUX,
             {"num_frames": 1, "height": 1024, "width": 1024}, 2),
    ),
}  # fmt: skip
_ON_CPU = {"training": {"device": "cpu", "precision": "fp32"}}
_TINY_HEADS = {"num_attention_heads": 2, "attention_head_dim": 32}
_TINY = {
    "wan": (
        Case("tiny Wan", _WAN, {"pretrained": None, "config": {
                **_TINY_HEADS, "num_layers": 2, "ffn_dim": 128}},
             {"num_frames": 5, "height": 32, "width": 32}, 2, _ON_CPU),
    ),
    "flux": (
        Case("tiny FLUX", _KONTEXT, {**_FLUX, "config": {
                "attention_head_dim": 32, "num_attention_heads": 2, "num_layers": 1,
                "num_single_layers": 1, "guidance_embeds": True, "axes_dims_rope": [8, 12, 12]}},
             {"num_frames": 1, "height": 32, "width": 32}, 2, _ON_CPU),
    ),
}  # fmt: skip


def main() -> None:
    """Measure the requested cases while there is time; write after each row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(_CASES), default=list(_CASES))
    parser.add_argument("--minutes", type=float, default=7.5)
    parser.add_argument("--tiny", action="store_true", help="small sizes, on the CPU")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--case", nargs=2, metavar=("KIND", "NUMBER"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank_of is not None:
        _as_rank(asked.rank_of, asked.tiny)
        return
    if asked.case is not None:
        _as_case(asked)
        return
    if not asked.tiny and not torch.cuda.is_available():
        _skip("torch finds no CUDA GPU here")
        return
    until = time.monotonic() + 60 * asked.minutes
    report = _Report(asked.tiny)
    for kind in range(2):
        for name in asked.only:
            cases = (_TINY if asked.tiny else _CASES)[name]
            if kind < len(cases) and until - time.monotonic() > _LEAST_SECONDS["case"]:
                for found in _in_own_process(name, kind, until, asked):
                    if isinstance(found, Row):
                        report.add(cases[kind].name, found)
                    else:
                        report.add_shares(cases[kind].name, found)
    if asked.tiny or torch.cuda.device_count() > 1:
        for row in _on_all_gpus(asked.tiny, until):
            report.add("Wan, sharded", row)


def _skip(reason: str) -> None:
    print(f"Skipped: {reason}.")  # noqa: T201
    if not _RESULTS.exists() or "Nothing was measured" in _RESULTS.read_text(encoding="utf-8"):
        _RESULTS.write_text(_NOTHING.format(reason=reason), encoding="utf-8")


class Row(NamedTuple):
    """One way to run a step."""

    name: str
    seconds: float
    tokens_per_second: float
    mfu: float
    peak_bytes: int
    note: str = ""


Shares = dict[str, float]
"""Share of a step's time by operation, of those outside of compiled blocks."""


def _in_own_process(
    name: str, kind: int, until: float, asked: argparse.Namespace
) -> Iterator[Row | Shares]:
    """The rows of a case, as its process prints them; the reason if it ends early."""
    minutes = (until - time.monotonic()) / 60
    command = [sys.executable, __file__, "--case", name, str(kind), "--minutes", f"{minutes:.3f}"]
    command += [
        flag for flag, is_set in (("--tiny", asked.tiny), ("--eager", asked.eager)) if is_set
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - our own program
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(_ROW):
                yield Row(*json.loads(line.removeprefix(_ROW)))
            elif line.startswith(_OUTSIDE):
                yield json.loads(line.removeprefix(_OUTSIDE))
            else:
                print(line, end="", flush=True)  # noqa: T201
    if process.returncode:
        yield Row("(the rest)", 0.0, 0.0, 0.0, 0, f"its process ended with {process.returncode}")


def _as_case(asked: argparse.Namespace) -> None:
    name, kind = asked.case
    until = time.monotonic() + 60 * asked.minutes
    for row in _measured((_TINY if asked.tiny else _CASES)[name][int(kind)], until, asked):
        print(f"{_ROW}{json.dumps(row)}", flush=True)  # noqa: T201
        if row.note.startswith("CUDA error"):
            return  # the process can do nothing more on this GPU


class _Report:
    """Prints rows, and writes all rows after each."""

    def __init__(self, is_tiny: bool) -> None:
        self._is_tiny = is_tiny
        self._rows: list[tuple[str, Row]] = []
        self._outside: list[str] = []

    def add(self, case: str, row: Row) -> None:
        self._rows.append((case, row))
        self._write([_cells(case, row)])

    def add_shares(self, case: str, shares: Shares) -> None:
        whole = f"| {case} | all | {sum(shares.values()):.1%} |"
        most = sorted(shares.items(), key=lambda each: -each[1])[:_MOST_SHARES]
        new = [whole, *(f"| {case} | `{name}` | {share:.2%} |" for name, share in most)]
        self._outside += new
        self._write(new)

    def _write(self, new: Sequence[str]) -> None:
        print("\n".join(new), flush=True)  # noqa: T201
        if not self._is_tiny:
            _RESULTS.write_text("\n".join(self._lines()) + "\n", encoding="utf-8")

    def _lines(self) -> Iterator[str]:
        yield from ("# Training steps on a GPU", "")
        yield f"`python benchmarks/gpu_train.py`, {torch.cuda.get_device_name()}, torch "
        yield f"{torch.__version__}. Medians of {_TIMED} steps after two to warm up."
        yield from ("", _MFU, "")
        yield "| model and clips | step | seconds | tokens/s | MFU | peak GiB | |"
        yield "|---|---|---|---|---|---|---|"
        yield from (_cells(case, row) for case, row in self._rows)
        if self._outside:
            yield from ("", "## Outside of compiled blocks", "")
            yield "Time of the GPU's kernels by the operation that starts them, of one step."
            yield from ("", "| model and clips | operation | share |", "|---|---|---|")
            yield from self._outside


def _cells(case: str, row: Row) -> str:
    if not row.seconds:
        return f"| {case} | {row.name} | | | | | {row.note} |"
    numbers = f"{row.seconds:.3f} | {row.tokens_per_second:.0f} | {row.mfu:.1%}"
    return f"| {case} | {row.name} | {numbers} | {row.peak_bytes / _GIB:.1f} | {row.note} |"


class Bench(NamedTuple):
    """A model on the device, and one batch for it."""

    step: MetaStep
    session: Session
    state: TrainingState
    batch: Batch
    gpu: DeviceBudget
    flops: float
    """Of a step of all ranks."""

    @property
    def recipe(self) -> Recipe:
        """Of both."""
        return self.step.recipe

    @property
    def world(self) -> World:
        """All ranks."""
        return self.session.world


def _session(step: MetaStep, world: World) -> Session:
    run = RunDirectory(step.recipe.out)
    return Session(step.recipe, run, world, Console(quiet=True), step.precision)


def _measured(case: Case, until: float, asked: argparse.Namespace) -> Iterator[Row]:
    """Each way to train the case that fits, while there is time."""
    gpu, device = (CPU, torch.device("cpu")) if asked.tiny else (device_for("cuda"), _cuda())
    plans = dict(_plans(case.recipe(), gpu))
    step = _on_device(outline_step(case.recipe(), gpu), device)
    world = World(0, 0, 1, device, None)
    session = _session(step, world)
    state = build_state(session, step.components)
    flops = _step_flops(step.recipe, step)
    bench = Bench(step, session, state, _batch(step), gpu, flops)
    for name, options in plans.items():
        theirs = {"none": "diffusers", "all": "diffusers, checkpointing"}
        if name in theirs and options is not None and _is_time(until, "eager"):
            yield _row(theirs[name], _diffusers_step(bench, options), bench)
        if name != "all" and _is_time(until, "eager"):
            fits = options is not None
            yield _ours(f"longtake, {name}", options, bench) if fits else _not_fitting(name)
    if not asked.eager and _is_time(until, "compiled"):
        fitting = [(name, plans[name]) for name in ("none", "best") if plans.get(name)]
        for name, options in fitting[:1]:
            assert options is not None
            compile_blocks(options, step.components, step.recipe)
            # The blocks run by their options already.
            yield _ours(f"longtake, {name}, compiled", {}, bench)
            _print_outside(bench)
    del state, step, bench
    gc.collect()
    if not asked.tiny:
        torch.cuda.empty_cache()


def _is_time(until: float, what: str) -> bool:
    return until - time.monotonic() > _LEAST_SECONDS[what]


def _not_fitting(name: str) -> Row:
    return Row(f"longtake, {name}", 0.0, 0.0, 0.0, 0, "is predicted not to fit")


def _plans(recipe: Recipe, gpu: DeviceBudget) -> Iterator[tuple[str, Options | None]]:
    """Options of the blocks; None if they are predicted not to fit."""
    step = outline_step(recipe, gpu)
    surveyed, fixed = sweep_policies(step.tracer), static_memory(step)
    names = tuple(step.tracer.subject.blocks)
    peaks = {name: trace.peak_bytes for name, trace in surveyed.traces.items()}
    half = (peaks["none"] + peaks["all"]) // 2
    room = peaks["none"]
    if gpu.total_bytes is not None:
        room = int(_SHARE_OF_MEMORY * gpu.total_bytes) - fixed.resident
    for name in ("none", "all"):
        yield name, options_of(name, names) if peaks[name] <= room else None
    best = find_best(step.tracer, surveyed, min(room, half))
    yield "best", best.options if best else None


def _row(name: str, one: Callable[[], None], bench: Bench) -> Row:
    """The measurements, or the reason why there are none: too little memory, or no compiler."""
    try:
        return _timed(name, one, bench)
    except RuntimeError as error:
        bench.state.components.model.zero_grad(set_to_none=True)
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return Row(name, 0.0, 0.0, 0.0, 0, lines[0][:100])


def _timed(name: str, one: Callable[[], None], bench: Bench) -> Row:
    device = bench.world.device
    one()  # AdamW's states are made
    one()
    _wait(device, reset=True)
    seconds = []
    for _ in range(_TIMED):
        begun = time.perf_counter()
        one()
        _wait(device)
        seconds.append(time.perf_counter() - begun)
    median, is_cuda = statistics.median(seconds), device.type == "cuda"
    tokens = bench.recipe.training.global_batch_size * bench.step.num_tokens
    share = bench.flops / (median * bench.gpu.bf16_flops) / bench.world.size
    peak = torch.cuda.max_memory_allocated(device) if is_cuda else 0
    return Row(name, median, tokens / median, share, peak)


def _wait(device: torch.device, reset: bool = False) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        if reset:
            torch.cuda.reset_peak_memory_stats(device)


def _step_flops(recipe: Recipe, step: MetaStep) -> float:
    """FLOPs of a step, counted without weights: a compiled or sharded model cannot be."""
    parts = outline(recipe)
    of_sample = training_flops(FlowMatching(), parts, recipe, step.batch.bucket)
    return step.batch.global_batch_size * of_sample


def _ours(name: str, options: Options | None, bench: Bench) -> Row:
    """The step of longtake's loop, from a batch to the update."""
    _run_by(options or {}, bench)
    return _row(name, _step_of(bench), bench)


def _step_of(bench: Bench) -> Callable[[], None]:
    session, state = bench.session, bench.state
    model = state.components.model
    norms_of = NormStats(model, state.components.family.blocks(model), bench.world)

    def one() -> None:
        compute_gradients(session, state, bench.batch)
        norms = norms_of.norms(norms_of.sums(), 1.0)
        with norms_of.track_update():
            apply_update(session, state, norms.grad_norm, 1.0, bench.batch.position)

    return one


def _print_outside(bench: Bench) -> None:
    """Print the share of a step's time by operation, of those outside of compiled blocks."""
    one, is_cuda = _step_of(bench), bench.world.device.type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    for _ in range(2):  # the first one has the profiler's own beginning in it
        with profile(activities=kinds) as seen:
            one()
            _wait(bench.world.device)
    total, outside = 0.0, Counter[str]()
    for event in seen.events() or ():
        # On a GPU each kernel belongs to the innermost operation that has started it.
        spent = sum(kernel.duration for kernel in event.kernels)
        spent = spent if is_cuda else event.self_cpu_time_total
        total += spent
        above: Any = event
        while above is not None and not above.name.startswith(_COMPILED):
            above = above.cpu_parent
        if above is None:
            outside[event.name] += spent
    shares = {name: spent / total for name, spent in outside.items() if spent}
    print(f"{_OUTSIDE}{json.dumps(shares)}", flush=True)  # noqa: T201


def _diffusers_step(bench: Bench, options: Options) -> Callable[[], None]:
    """A step as in diffusers' examples, with the same model and batch."""
    parts, recipe, device = bench.state.components, bench.recipe, bench.world.device
    _run_by(options, bench)
    trained = [parameter for parameter in parts.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=recipe.optimizer.learning_rate, weight_decay=1e-4)
    is_fp32 = parts.dtype == torch.float32  # else the arithmetic is bf16 by itself
    assert bench.batch.latents is not None
    latents = bench.batch.latents.to(device)  # theirs are there already; ours are copied every step
    conditioning = {name: each.to(device) for name, each in bench.batch.conditioning.items()}
    if parts.family.distils_guidance(parts.model):
        conditioning["guidance"] = torch.full((len(latents),), recipe.model.guidance, device=device)

    def one() -> None:
        with gradients_of_any_dtype(parts.model):  # theirs have the weights' dtype
            step()

    def step() -> None:
        noise = torch.randn_like(latents)
        uniform = torch.rand(len(latents), dtype=torch.float64)
        sigmas = sample_sigmas(uniform, "logit_normal", mean=0.0, std=1.0, scale=1.0, shift=3.0)
        sigmas = sigmas.to(device, torch.float32)
        mixed = sigmas.reshape(-1, 1, 1, 1, 1)
        noisy = (1 - mixed) * latents + mixed * noise
        with autocast(bench.step.precision if is_fp32 else "fp32", device):
            velocity = parts.predict_velocity(noisy, sigmas, conditioning)
        squared = (velocity.float() - (noise - latents).float()).square()
        loss = squared.reshape(len(latents), -1).mean(1).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return one


def _run_by(options: Options, bench: Bench) -> None:
    blocks = bench.step.tracer.subject.blocks
    call = caller({blocks[name]: option for name, option in options.items()})
    bench.step.tracer.subject.call_blocks_by(call)


def _batch(step: MetaStep) -> Batch:
    """Latents and embeddings of the samples of a micro-batch, on the CPU, as a cache has them."""
    examples = step.tracer.subject.make_inputs()
    size = step.batch.micro_batch_size
    conditioning = {
        name: each for name, each in examples.conditioning.items() if name != "guidance"
    }
    return Batch(
        step=0,
        stage=step.batch.name,
        source="",
        epoch=0,
        begins_epoch=False,
        bucket=step.batch.bucket,
        videos=torch.zeros(
            size, 3, 0, step.batch.bucket.height, step.batch.bucket.width, dtype=torch.uint8
        ),
        captions=("a caption",) * size,
        seeds=tuple(range(size)),
        identities=tuple(map(str, range(size))),
        epochs=(0,) * size,
        weights=torch.ones(size),
        rejected=(),
        global_size=step.batch.global_batch_size,
        position=StagePosition(step.batch.name, 0),
        position_before=StagePosition(step.batch.name, 0),
        latents=examples.latents.normal_(),
        conditioning={name: each.normal_() for name, each in conditioning.items()},
    )


def _on_device(step: MetaStep, device: torch.device) -> MetaStep:
    """The step with random weights, created on the device."""
    generator = torch.Generator(device).manual_seed(0)

    def real(tensor: Tensor) -> Tensor:
        values = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if values.is_floating_point():
            values.normal_(std=0.02, generator=generator)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(values, tensor.requires_grad)
        return values

    for module in step.components.model.modules():
        for held in (cast("dict[str, Tensor | None]", module._parameters), module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = real(tensor)
    return step


def _cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _on_all_gpus(is_tiny: bool, until: float) -> Iterator[Row]:
    """Wan, sharded over all GPUs: torchrun starts this file once for each."""
    count, left = 2 if is_tiny else torch.cuda.device_count(), until - time.monotonic()
    if left < _LEAST_SECONDS["compiled"]:
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        launched = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        script = [__file__, "--rank-of", str(out), *(["--tiny"] if is_tiny else [])]
        command = [*launched, "--nproc-per-node", str(count), *script]
        subprocess.run(command, env=os.environ, check=False, timeout=left)  # noqa: S603 - our own program
        if out.exists():
            yield Row(*json.loads(out.read_text(encoding="utf-8")))


def _as_rank(out: Path, is_tiny: bool) -> None:
    case = (_TINY if is_tiny else _CASES)["wan"][0]
    section = ParallelSection(strategy="shard", param_dtype="bf16")
    with join("cpu" if is_tiny else "cuda", section) as world:
        size = case.batch_size * world.size
        changed = _of_batch(case, size)
        recipe = changed.recipe().model_copy(update={"parallel": section})
        gpu = CPU if is_tiny else device_for("cuda")
        step = _on_device(outline_step(recipe, gpu, world.size), world.device)
        session = _session(step, world)
        state = build_state(session, step.components)
        flops = _step_flops(recipe, step)
        bench = Bench(step, session, state, _batch(step), gpu, flops)
        row = _ours(f"longtake, all, {world.size} GPUs", _all(step), bench)
        if world.is_first:
            out.write_text(json.dumps(row), encoding="utf-8")


def _of_batch(case: Case, size: int) -> Case:
    """The same case with another global batch size."""
    changes = dict(case.changes)
    changes["training"] = {**changes.get("training", {}), "global_batch_size": size}
    return case._replace(changes=changes)


def _all(step: MetaStep) -> Options:
    return options_of("all", tuple(step.tracer.subject.blocks))


if __name__ == "__main__":
    main()

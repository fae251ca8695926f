"""What a launch says, and writes down, before its first step (rank 0)."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from torch.nn.attention import SDPBackend

from longtake.config import Recipe
from longtake.data.loader import Loader
from longtake.formatting import escape, format_size, plural
from longtake.fsio import read_last_record, skipped_lines
from longtake.parallel.mesh import World
from longtake.run_dir import EventKind, Metrics, RunDirectory
from longtake.training.fit import Fit
from longtake.training.startup import parts_so_far
from longtake.training.step import TrainingState

_ATTENTION_NAMES = {
    SDPBackend.FLASH_ATTENTION: "FlashAttention-2",
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.MATH: "math",
}


def announce(
    state: TrainingState,
    loader: Loader,
    warnings: Sequence[str],
    recipe: Recipe,
    run: RunDirectory,
    world: World,
    console: Console,
    *,
    attention: str | None = None,
) -> None:
    """Record the launch and say in a few lines what is about to happen."""
    step, device = state.global_step, str(world.device)
    facts: dict[str, Any] = {
        "world_size": world.size,
        "device": device,
        "precision": state.precision,
    }
    if attention is not None:
        facts["attention"] = attention
    lost = _lost_steps(run, step)
    run.record_launch(start_step=step, **facts)
    kind: EventKind = "resumed" if step else "launched"
    run.append_event(kind, step=step, lost_steps=lost, seconds=parts_so_far(), **facts)
    if loader.course.changes:
        plan = {"policy": recipe.data.on_change, "plan_version": loader.course.plan.version}
        run.append_event("data_changed", step=step, **plan, changes=loader.course.changes)
    parameters = sum(parameter.numel() for parameter in state.components.model.parameters())
    processes = f"{world.size} process{'es' if world.size > 1 else ''}"
    size = f"{parameters / 1e6:.2f} M parameters"
    steps = f"step {step} to {recipe.training.steps}"
    console.print(
        f"[bold]{escape(str(run.path))}[/bold]: {recipe.model.family}, {size}, "
        f"{_clips_of(loader)}, {steps}, {processes} on {device} in {state.precision}"
        + ("" if attention is None else f", attention by {attention}"),
        highlight=False,
    )
    if lost:
        since = f"the checkpoint of step {step}" if step else "the beginning"
        console.print(
            f"  {lost} step{'s' * (lost > 1)} since {since} had not been saved, and will be "
            "trained again",
            highlight=False,
        )
    if loader.course.changes:
        changed = f"  changed, going on with {recipe.data.on_change}: {loader.course.changes}"
        console.print(escape(changed), highlight=False)
    for stage in loader.course.plan.stages:
        for reason, count in sum(stage.dropped.values(), Counter()).most_common():
            left_out = f"  {count} clips are left out of stage {stage.stage.name}: {reason}"
            console.print(escape(left_out), highlight=False)
    if loader.quarantined:
        console.print(
            f"  {len(loader.quarantined)} clips stay set aside because they could not be decoded; "
            "data.retry_quarantined=true tries them again",
            highlight=False,
        )
    for warning in (*warnings, *skipped_lines()):
        console.print(f"  [yellow]warning:[/yellow] {escape(warning)}", highlight=False)


def announce_plan(plan: Fit, state: TrainingState, run: RunDirectory, console: Console) -> None:
    """Record which recompute policy is run, and what it is expected to take."""
    if plan.memory is None:
        return
    budget, counts = plan.budget_bytes, Counter(plan.options.values())
    peak = plan.memory.step_peak_bytes
    run.append_event(
        "memory_planned",
        step=state.global_step,
        policy=plan.policy,
        per_block=dict(counts),
        options=dict(plan.options),
        step_peak_gib=round(peak / 2**30, 4),
        budget_gib=budget and round(budget / 2**30, 4),
        overhead=plan.memory.overhead,
    )
    blocks = ", ".join(f"{count} {option}" for option, count in counts.items())
    limit = "" if budget is None else f" of {format_size(budget)}"
    console.print(
        f"  memory: recompute policy {plan.policy} ({blocks}), "
        f"{format_size(peak)}{limit} predicted",
        highlight=False,
    )


def _lost_steps(run: RunDirectory, step: int) -> int:
    """Steps beyond this one that were trained and of which no checkpoint is left."""
    last, rollbacks = read_last_record(run.metrics_path, Metrics), run.rollbacks()
    if last is None or (rollbacks and rollbacks[-1]["from_step"] == last["step"]):
        return 0  # what comes after the checkpoint was given up
    return max(0, int(last["step"]) - step)


def _clips_of(loader: Loader) -> str:
    """How much there is to train on, in the stages that are still to come."""
    parts = []
    for stage in loader.course.plan.stages:
        members = [stream.parts[-1].members for stream in stage.streams]
        num_buckets = len({shape for each in members for shape in each.shapes})
        clips = plural(sum(map(len, members)), "clip")
        parts.append(f"{clips} in {plural(num_buckets, 'bucket')}")
    return " then ".join(parts) or "no clips left"


def attention_backend(device: torch.device) -> str | None:
    """The attention kernel that torch chooses for bf16 and heads of 128; None on a CPU."""
    if device.type != "cuda":
        return None
    heads = torch.empty(1, 2, 256, 128, dtype=torch.bfloat16, device=device)
    chosen = SDPBackend(torch._fused_sdp_choice(heads, heads, heads))
    return _ATTENTION_NAMES.get(chosen, chosen.name)


def slow_attention(backend: str | None, device: torch.device) -> str:
    """What to do where a Hopper GPU runs another kernel than cuDNN's; empty: nothing."""
    if backend in (None, "cuDNN") or torch.cuda.get_device_capability(device) != (9, 0):
        return ""
    return (
        f"attention runs by {backend}; on this GPU cuDNN's kernel is about 1.6 times as fast. "
        "PyTorch uses it with cuDNN above 9.15, which its wheels for CUDA 13 bring."
    )

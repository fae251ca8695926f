"""Reports of a launch's beginning: settings, warnings, and how long each part of it took."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from longtake import fsio, heartbeat
from longtake.data.loader import Loader
from longtake.formatting import escape, escape_lines, format_size, plural
from longtake.metrics import Metrics
from longtake.models.numerics import count_weights
from longtake.parallel import attention_rules, collectives, mesh
from longtake.planner.record import MemoryPlan
from longtake.run_dir import BEGINNINGS, EventKind, RunDirectory, last_ending
from longtake.training.session import Session, TrainingState

PARTS: dict[heartbeat.Phase, str] = {
    "start": "imports",
    "rendezvous": "rendezvous",
    "open": "data",
    "plan": "plan",
    "build": "build",
    "cache": "cache",
    "load": "load",
    "data": "first_batch",
}
"""Names under which the startup report shows a launch's phases before its first step; all other
time counts as `first_step`."""


def announce(
    session: Session, state: TrainingState, loader: Loader, warnings: Sequence[str]
) -> None:
    """Record the beginning of a launch, and show its settings and warnings (rank 0)."""
    recipe, run, world, console = session.recipe, session.run, session.world, session.console
    step, device = state.global_step, str(world.device)
    facts: dict[str, Any] = {
        "world_size": world.size,
        "device": device,
        "precision": session.precision,
    }
    attention = attention_backend(world.device)
    if attention is not None:
        facts["attention"] = attention
    # Trained steps after this one are lost, unless a rollback has abandoned them.
    last, rollbacks = fsio.read_last_record(run.metrics_path, Metrics), run.rollbacks()
    is_abandoned = last is None or (rollbacks and rollbacks[-1]["from_step"] == last["step"])
    lost = 0 if last is None or is_abandoned else max(0, int(last["step"]) - step)
    run.record_launch(start_step=step, **facts)
    kind: EventKind = "resumed" if step else "launched"
    run.append_event(kind, step=step, lost_steps=lost, seconds=parts_so_far(), **facts)
    if session.differences:
        differing = {each.name: each.values for each in session.differences}
        run.append_event("ranks_differ", step=step, differences=differing)
    if loader.plan_history.changes:
        plan = {"policy": recipe.data.on_change, "plan_version": loader.plan_history.plan.version}
        run.append_event("data_changed", step=step, **plan, changes=loader.plan_history.changes)
    parameters = count_weights(state.components.model)
    processes = f"{world.size} process{'es' if world.size > 1 else ''}"
    size = f"{parameters / 1e6:.2f} M parameters"
    steps = f"step {step} to {recipe.training.steps}"
    console.print(
        f"[bold]{escape(str(run.path))}[/bold]: {recipe.model.family}, {size}, "
        f"{_describe_clips(loader)}, {steps}, {processes} on {device} in {session.precision}"
        + ("" if attention is None else f", attention by {attention}"),
        highlight=False,
    )
    for line in _describe_changes(session, loader, step, lost):
        console.print(f"  {escape_lines(line)}", highlight=False)
    notes = list[str]()
    if attention is not None:
        capability = torch.cuda.get_device_capability(world.device)
        about = [slow_attention(attention, capability), attention_rules.cudnn_note(capability)]
        notes += filter(None, about)
    for warning in (*warnings, *notes, *fsio.skipped_lines()):
        console.print(f"  [yellow]warning:[/yellow] {escape_lines(warning)}", highlight=False)


def _describe_changes(session: Session, loader: Loader, step: int, lost: int) -> list[str]:
    """Describe what a resumed run does otherwise: repeated steps, changed data, excluded clips."""
    lines = []
    if lost:
        since = f"the checkpoint of step {step}" if step else "the beginning"
        steps = f"{lost} step{'s' * (lost > 1)}"
        lines.append(f"{steps} since {since} had not been saved, and will be trained again")
    if loader.plan_history.changes:
        policy = session.recipe.data.on_change
        lines.append(f"changed, resuming with {policy}: {loader.plan_history.changes}")
    for stage in loader.plan_history.plan.stages:
        for reason, count in sum(stage.dropped.values(), Counter()).most_common():
            lines.append(f"left out of stage {stage.name}: {plural(count, 'clip')}: {reason}")
    if loader.quarantine.clips:
        lines.append(
            f"{plural(len(loader.quarantine.clips), 'clip')} set aside, not decodable; "
            "data.retry_quarantined=true tries them again"
        )
    return lines


def announce_plan(session: Session, plan: MemoryPlan, step: int) -> None:
    """Record and show the memory plan's policy and predicted memory (rank 0)."""
    if plan.memory is None:
        return
    session.run.append_event("memory_planned", step=step, **plan.as_event())
    blocks = ", ".join(f"{count} {option}" for option, count in plan.per_block().items())
    limit = "" if plan.budget_bytes is None else f" of {format_size(plan.budget_bytes)}"
    in_host = plan.memory.host_bytes
    host = f", {format_size(in_host)} in host RAM" if in_host else ""
    session.console.print(
        f"  memory: recompute policy {plan.policy} ({blocks}), "
        f"{format_size(plan.memory.step_peak_bytes)}{limit} predicted{host}",
        highlight=False,
    )


def _describe_clips(loader: Loader) -> str:
    """Describe how many clips and buckets (clip shapes) the remaining stages of the data have."""
    parts = []
    for stage in loader.plan_history.plan.stages:
        # The last part of a stream has its whole epochs; parts before it are rests of earlier
        # plans.
        members = [stream.parts[-1].members for stream in stage.streams]
        num_buckets = len({shape for each in members for shape in each.shapes})
        clips = plural(sum(map(len, members)), "clip")
        parts.append(f"{clips} in {plural(num_buckets, 'bucket')}")
    return " then ".join(parts) or "no clips left"


def attention_backend(device: torch.device) -> str | None:
    """Return the name of the attention kernel that torch chooses for bf16 and heads of 128.

    None on a CPU.
    """
    if device.type != "cuda":
        return None
    heads = torch.empty(1, 2, 256, 128, dtype=torch.bfloat16, device=device)
    return attention_rules.NAMES[attention_rules.kernel_of(heads, heads, heads, None, {})]


def slow_attention(backend: str | None, capability: tuple[int, int]) -> str:
    """Return a warning if a Hopper GPU uses another attention kernel than cuDNN's; else ""."""
    if backend in (None, attention_rules.NAMES["cudnn"]) or capability != (9, 0):
        return ""
    return (
        f"attention runs by {backend}; on this GPU cuDNN's kernel is about 1.6 times as fast. "
        f"{attention_rules.INSTALL} It uses that kernel, and its backward pass is right."
    )


# --- Seconds from the command to the first step -----------------------------------------------


def parts_so_far() -> dict[str, float]:
    """Return the seconds that this process has spent in each part of its launch, in order."""
    taken: dict[str, float] = dict.fromkeys((*PARTS.values(), "first_step"), 0.0)
    for phase, seconds in heartbeat.launch_seconds().items():
        taken[PARTS.get(phase, "first_step")] += seconds
    return {part: round(seconds, 3) for part, seconds in taken.items() if seconds}


def report_start(step: int, run: RunDirectory, world: mesh.World) -> None:
    """Record how long this launch took until the end of its first step; all ranks must call it.

    Rank 0 must call it before it writes that step's metrics. Ranks wait for each other in most
    parts, so the time that one rank needs in a part shows as the other ranks' time in the next.
    """
    everyone = collectives.gather_objects(parts_so_far(), world)
    if world.is_first:
        run.append_event(
            "startup_timing", step=step, **slowest(everyone), down_seconds=_down_seconds(run)
        )


def slowest(everyone: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return each launch part's longest time and its rank, and the `total` of the slowest rank."""
    # A dict keeps the order in which the parts come.
    parts = {part: None for each in everyone for part in each}
    taken = {part: [each.get(part, 0.0) for each in everyone] for part in parts}
    return {
        "seconds": {part: max(each) for part, each in taken.items()},
        "total": round(max(sum(each.values()) for each in everyone), 3),
        "slowest": {part: each.index(max(each)) for part, each in taken.items()},
    }


def _down_seconds(run: RunDirectory) -> float | None:
    """Return the seconds since the previous launch's last step, if it crashed on this host.

    None otherwise: clocks of two hosts cannot be compared.
    """
    last = fsio.read_last_record(run.metrics_path, Metrics)
    hosts = [each["host"] for each in run.record()["launches"][-2:]]
    kinds = [each["event"] for each in run.events()]
    beginnings = [at for at, kind in enumerate(kinds) if kind in BEGINNINGS]
    # The launch before this one has crashed if it began and recorded no end.
    has_crashed = len(beginnings) > 1 and last_ending(kinds[: beginnings[-1]]) is None
    if last is None or len(set(hosts)) != 1 or not has_crashed:
        return None
    passed = round(time.time() - float(last["time"]), 3)
    return passed if passed >= 0 else None  # the clock was set back

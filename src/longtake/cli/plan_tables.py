"""Prints the report of `longtake plan` as sentences and tables."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from longtake.cli.cost import cost_report, plan_table
from longtake.formatting import (
    escape,
    escape_lines,
    format_duration,
    format_short_duration,
    format_size,
    format_time,
    plural,
)
from longtake.planner.record import blocks_by_option
from longtake.planner.words import (
    ACTIVATION_WORDS,
    FIXED_WORDS,
    PHASE_REMEDIES,
    PHASE_WORDS,
    POLICY_WORDS,
    WEIGHT_WORDS,
    cannot_encode,
)

if TYPE_CHECKING:
    from longtake.planner.forecast import Forecast
    from longtake.planner.mesh import MeshForecast
    from longtake.planner.phases import PhaseForecast
    from longtake.planner.report import PlanReport, StageForecast

_GIB = 2**30
_GB = 1e9
_PIPE_WIDTH = 100
_MOST_NAMES = 12
_LITTLE_WAITING = 0.001
_MUCH_MORE_THAN_A_GIB = 4 * _GIB
"""Peak memory in bytes above which one more GiB is a small step; below it, one more GiB means
another GPU."""
_FITS = {True: "[green]yes[/green]", False: "[red]no[/red]", None: ""}
_LITTLE_EXPOSED = 0.05
_SENT_WHEN = {
    "weights": "twice in each micro-batch",
    "gradients to shards": "in the last one",
    "gradients": "in the last one, between copies",
    "tokens": "in each attention",
    "keys and values": "around a ring, in each attention",
}
_LINKS = {"node": "a node's links", "network": "the network"}
_LEGEND = (
    "forward: when the backward pass begins. peak: the most in forward and backward pass of the "
    "first step. with optimizer: the most in any later step, with all that stays in memory. time: "
    "how much longer a step takes than without recompute, predicted from the device's rates."
)


def print_plan(console: Console, recipe: str, report: "PlanReport", seconds: float) -> None:
    """Print the report of `longtake plan`, in at least 100 columns in a pipe."""
    if not console.is_terminal:
        # rich assumes 80 columns without a terminal, in which the tables would wrap.
        console.width = max(console.width, _PIPE_WIDTH)
    parts = (f"[bold]{escape(recipe)}[/bold]", *_parts(report))
    end = f"[dim]Predicted in {seconds:.1f} s; nothing was run on the device.[/dim]"
    # The terminal may wrap sentences; tables have to be fitted to its width here.
    for part in (*parts, end):
        console.print(part, highlight=False, soft_wrap=isinstance(part, str))


def _parts(report: "PlanReport") -> Iterator[RenderableType]:
    known, recipe = report.known, report.recipe
    yield escape(_describe_model(known))
    yield escape(_describe_device(known))
    for rule, number in known.step.rules.items():
        yield escape(f"{number:,} parameters train by the rule for {rule}.")
    if (start := report.start) is not None:
        of_expert = f" of {recipe.model.folder()}" if recipe.model.expert else ""
        yield escape(
            f"Begins with {recipe.trainable.init_from}: LoRA of rank {start.rank} for "
            f"{start.num_layers} of {start.num_trained} layers{of_expert}."
        )
    if len(report.stages) > 1:
        yield _stage_table(report.stages)
        yield (
            "[dim]batch: clips of an update, on all processes together. at once: micro-batches of "
            "a process, and clips in each. tokens: of a micro-batch. Memory and time "
            "below are those of the stage marked *, the largest.[/dim]"
        )
    yield ""
    yield _fixed_table(known)
    if known.policies:
        yield _policy_table(known)
        yield f"[dim]{_LEGEND}[/dim]"
        yield ""
        yield from _verdict(report)
        yield from _remarks(report)
        yield from _phase_table(report.phases)
        if (mesh := report.mesh) is not None:
            yield ""
            yield from _mesh_report(mesh, known.step.world_size, known.step.per_node)
            yield _describe_loss(report, mesh.step_seconds)
        if report.cost is not None:
            yield ""
            yield from cost_report(report.cost)
    # Also where nothing fits: a module without gradients is a fault at any size.
    yield from _gradient_lines(known)
    for warning in report.data_warnings:
        yield f"[yellow]data[/yellow] {escape_lines(warning)}"
    for warning in report.warnings:
        yield f"[yellow]note[/yellow] {escape_lines(warning)}"
    if report.refusal is not None:
        yield f"[red]Training would refuse this recipe.[/red] {escape_lines(report.refusal)}"


def _describe_model(known: "Forecast") -> str:
    step = known.step
    total, trained = step.num_parameters, step.num_trainable
    batch = f"micro-batches of {step.batch.micro_batch_size}"
    if step.batch.num_micro_batches > 1:
        batch += f", {step.batch.num_micro_batches} for an update"
    return (
        f"{_number(total)} parameters, of which {_number(trained)} train ({trained / total:.2%}). "
        f"Clips of {step.batch.bucket}: {step.num_tokens} tokens each. In {batch}, computed in "
        f"{known.precision}."
    )


def _stage_table(stages: "Sequence[StageForecast]") -> Table:
    """Return a table of the stages' settings (learning rate ...), without empty columns."""
    names = ("stage", "begins", "steps", "learning rate", "warm-up", "batch", "at once")
    cells = []
    for stage in stages:
        batch, rates = stage.batch, stage.learning_rates
        settings = (stage.ema_decay, stage.shift, stage.caption_dropout)
        cells.append(
            (
                escape(batch.name) + ("*" if stage.is_planned else ""),
                "-" if stage.first_step is None else f"{stage.first_step:,}",
                "the rest" if stage.num_steps is None else f"{stage.num_steps:,}",
                "-" if rates is None else " to ".join(dict.fromkeys(f"{r:.3g}" for r in rates)),
                str(stage.warmup_steps or "-"),
                f"{batch.global_batch_size:,}",
                f"{batch.num_micro_batches} x {batch.micro_batch_size}",
                f"{batch.num_tokens:,}",
                *("-" if value is None else str(value) for value in settings),
            )
        )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    columns = zip((*names, "tokens", "EMA", "shift", "no caption"), *cells, strict=True)
    # Most recipes set few keys by stage: with all columns the table would not fit a terminal.
    shown = [(name, *column) for name, *column in columns if set(column) != {"-"}]
    for name, *_ in shown:
        table.add_column(name, justify="left" if name == "stage" else "right")
    for row in zip(*(column for _, *column in shown), strict=True):
        table.add_row(*row)
    return table


def _describe_device(known: "Forecast") -> str:
    device = known.device
    if device.memory_bytes is None or device.budget_bytes is None:
        return f"Planned for {device.name}, without a limit (--memory 48GiB sets one)."
    nccl = ", NCCL" if known.step.world_size > 1 else ""
    return (
        f"Planned for {device.name} with {format_size(device.memory_bytes)}: "
        f"{format_size(device.budget_bytes)} for tensors, "
        f"{format_size(device.memory_bytes - device.budget_bytes)} is left to the CUDA "
        f"context{nccl} and fragmentation (recompute.reserve)."
    )


def _fixed_table(known: "Forecast") -> Table:
    static = known.static
    table = plan_table("in memory under every policy", "", "")
    for name, size in static.parts().items():
        # Parts that every training has are listed even if they take nothing.
        if size or name not in ("encoders", "ema"):
            table.add_row(name, format_size(size), FIXED_WORDS[name])
    if static.optimizer.host:
        meaning = "optimizer states and fp32 weights, in host RAM"
        table.add_row("offloaded", format_size(static.optimizer.host), meaning)
    return table


def _policy_table(known: "Forecast") -> Table:
    most = max(row.step_peak_bytes for row in known.policies)
    unit, unit_bytes = ("GiB", _GIB) if most >= _GIB else ("MiB", 2**20)
    table = plan_table(f"policy, {unit}", "forward", "peak", "with optimizer", "time", "fits", "")
    best = [] if known.best_policy is None else [known.best_policy]
    for row in (*known.policies, *best):
        sizes = (row.forward_end_bytes, row.peak_bytes, row.step_peak_bytes)
        cells = [row.name, *(f"{size / unit_bytes:.2f}" for size in sizes)]
        cells += [f"+{row.overhead:.1%}", _FITS[row.fits], POLICY_WORDS[row.name]]
        table.add_row(*cells, style="bold" if row.name == "best" else None)
    return table


def _verdict(report: "PlanReport") -> Iterator[RenderableType]:
    """Yield sentences on which plan fits the memory, or on what is short and would help."""
    known = report.known
    if known.best is None or known.best_policy is None:
        yield from _shortage(report)
        return
    if report.policy_problem is not None:
        yield f"[red]Does not fit.[/red] {escape(report.policy_problem)}"
    elif report.named_policy is not None:
        yield f'The recipe sets recompute.policy = "{report.named_policy}". In its place:'
    yield _describe_best(known)
    if report.needed_ram >= _GIB:
        reads = "what the text encoder is read into"
        why = "60 % of it may be pinned" if report.needed_ram == known.needed_host_bytes else reads
        yield (
            f"The computer needs {format_size(report.needed_ram)} of RAM at least "
            f"(--host-memory plans for another): {why}."
        )
    groups = blocks_by_option(known.best.options)
    # If all blocks have one option, the sentence above has said so.
    if len(groups) > 1 or known.best_policy.host_bytes:
        table = plan_table("blocks", "", "activations", "frozen weights")
        for option, count, names in groups:
            words = ACTIVATION_WORDS[option.activations], WEIGHT_WORDS[option.weights]
            table.add_row(names, str(count), *words)
        yield table


def _shortage(report: "PlanReport") -> Iterator[str]:
    known = report.known
    sizes = {
        "GPU memory": (known.least.step_peak_bytes, known.device.budget_bytes or 0),
        "host RAM": (known.pinned_host_bytes, known.step.host_room),
    }
    lacking = "; ".join(
        f"{name}: {format_size(needed)} of the {format_size(limit)} that a process may take"
        for name, (needed, limit) in sizes.items()
        if name in report.short
    )
    yield (
        "[red]Nothing fits.[/red] Even the least demanding policy takes too much "
        f"{lacking or 'of both memories'}."
    )
    if "host RAM" in report.short:
        yield "A computer with more RAM is planned for by --host-memory 128GiB."
    yield "What would help, each by itself:"
    for change in report.suggestions:
        yield f"  {escape(str(change))}"


def _describe_best(known: "Forecast") -> str:
    best, row = known.best, known.best_policy
    assert best is not None
    assert best.overhead_with_another_gib is not None
    assert row is not None
    counts = best.per_block()
    chosen = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    text = f"Best: of {sum(counts.values())} blocks {chosen}."
    if row.host_bytes:
        size = format_size(row.host_bytes)
        text += f" {size} of host RAM are pinned for weights and activations."
    if best.overhead > 0:
        text += f" A step takes {best.overhead:.1%} longer than without recompute"
        if row.link_share >= _LITTLE_WAITING:
            text += f", of which it waits {row.link_share:.1%} of its time for copies"
        more = 100 * (best.overhead - best.overhead_with_another_gib)
        # Less would be printed as 0.0 points.
        is_much = more >= 0.05 and row.peak_bytes > _MUCH_MORE_THAN_A_GIB
        text += f"; the next GiB would take {more:.1f} points off." if is_much else "."
    if known.device.measured_at is not None:
        seconds = best.traced.seconds * known.step.batch.num_micro_batches
        when = format_time(known.device.measured_at, with_date=True)
        text += (
            f" By the rates that this GPU reached on {when} (--calibrate), forward and backward "
            f"passes of a step take {format_short_duration(seconds)}."
        )
    return text


def _describe_loss(report: "PlanReport", step_seconds: float) -> str:
    """Say how much training a crash can cost, by the recipe's interval of checkpoints."""
    section, minutes = report.recipe.checkpoint, report.recipe.checkpoint.minutes
    between = report.recipe.steps_between
    steps = [between(section, each.epoch_steps, each.num_steps) for each in report.stages]
    # Unknown where the interval is in epochs and there is no catalog yet.
    lost = max((math.inf if each is None else each * step_seconds) for each in steps)
    also = ""
    if minutes is not None:
        # A checkpoint is due by steps or by minutes, whichever comes first.
        lost = min(lost, 60 * minutes)
        also = f" and every {minutes:g} minutes"
    saved = f"A checkpoint is saved every {section.interval()}{also}"
    if math.isinf(lost):
        return (
            f"{saved}: what a crash loses is known once the catalogs are indexed (longtake data "
            "index)."
        )
    return (
        f"{saved}: a crash loses at most {format_duration(lost)} of training, and what one save "
        "takes."
    )


def _phase_table(phases: "Sequence[PhaseForecast]") -> Iterator[RenderableType]:
    """Yield a table of work other than steps, such as encoding and sampling, part by part."""
    if not phases:
        return
    table = plan_table("one part at a time, GiB", "weights", "peak", "takes", "fits", "")
    for phase in phases:
        sizes = [f"{size / _GIB:.2f}" for size in (phase.weight_bytes, phase.peak_bytes)]
        label, meaning = PHASE_WORDS[phase.name]
        if phase.name != "sampling" and phase.how:
            meaning += f", {phase.how}"
        table.add_row(label, *sizes, f"{phase.seconds:.2g} s", _FITS[phase.fits], meaning)
    yield ""
    yield table


def _remarks(report: "PlanReport") -> Iterator[str]:
    """Yield notes on memory and time that the tables of the plan do not contain."""
    phases = {phase.name: phase for phase in report.phases}
    if (between := phases.get("sampling")) is not None:
        yield (
            f"Every {report.recipe.sampling.interval()} training stops for about "
            f"{format_duration(between.seconds)} and samples {between.how}."
        )
    if (encoding := phases.get("step")) is not None:
        yield (
            "[yellow]note[/yellow] Step times leave out the encoders in the step: about "
            f"{encoding.seconds:.1f} s more for this process's clips of one update. With "
            "data.cache they are not in the step."
        )
    yield from _phase_shortages(report)
    if (cache := report.cache) is not None:
        yield (
            f"Filling the cache of {plural(cache.num_clips, 'clip')}, in "
            f"{plural(cache.num_windows, 'window')} at most, and of "
            f"{plural(cache.num_captions, 'different caption')} takes about "
            f"{format_duration(cache.seconds)} of encoding and {format_size(cache.num_bytes)} of "
            "disk."
        )
    if (ahead := report.ahead) is not None:
        size = "an unknown amount" if ahead.num_bytes is None else format_size(ahead.num_bytes)
        if ahead.is_chosen:
            yield (
                "Encoders work on a CUDA stream of their own, one micro-batch ahead, and take "
                f"{size} of memory for it (training.encode_ahead)."
            )
        else:
            yield (
                "Encoders work in line with the model: one micro-batch ahead they would take "
                f"{size} of memory, which is not left. With training.encode_ahead = true the plan "
                "makes room for it."
            )
    if report.known.step.world_size > 1:
        yield (
            f"[yellow]note[/yellow] For one of {report.known.step.world_size} processes: an "
            "estimate, which does not know the buffers of collectives."
        )
    if report.known.foreach_bytes >= _GIB:
        yield (
            "AdamW is fused: torch's own default (foreach) would need "
            f"{report.known.foreach_bytes / _GIB:.1f} GiB more at each update."
        )


def _phase_shortages(report: "PlanReport") -> Iterator[str]:
    """Yield a sentence on each phase beside the steps for which the memory is too little."""
    step, tile = report.known.step, report.tile
    short = {phase.name for phase in report.short_phases}
    for phase in report.phases:
        gpu = f"a GPU of {format_size(step.device.memory_for(phase.peak_bytes))}"
        encodes = phase.name == "encode" or (phase.name == "step" and tile.bucket is not None)
        if phase.fits is not False or not (encodes or phase.name in short):
            continue
        label = PHASE_WORDS[phase.name][0]
        if encodes:
            more = ""
            if not step.components.codec.can_tile:
                more = "Its codec has no tiles. "
            elif report.recipe.codec.encode_tile != "auto":
                more = 'codec.encode_tile = "auto" takes tiles that fit, if there are any. '
            bucket, needed = tile.bucket or step.batch.bucket, format_size(phase.peak_bytes)
            text = cannot_encode(str(bucket), needed, phase.how, more, gpu)
        elif phase.lacks_ram(step.device):
            needed, data = format_size(phase.ram_bytes), report.recipe.data
            text = f"{label}: a process needs {needed} of RAM to read it."
            if not report.is_filled:
                how = "Fill the cache" if data.cache is not None else "Set data.cache, and fill it"
                text += f" {how} on a computer that has it, by `longtake data cache`."
            if report.recipe.sampling.in_training:
                text += " Let an evaluation server there make the samples, without sampling.every."
        else:
            text = f"{label}: {format_size(phase.peak_bytes)} are needed. Take {gpu}. "
            text += PHASE_REMEDIES[phase.name]
        what = "[red]Does not fit.[/red]" if phase.name in short else "[yellow]note[/yellow]"
        yield f"{what} {escape(text)}"


def _gradient_lines(known: "Forecast") -> Iterator[str]:
    reached, unreached = known.gradients.reached, known.gradients.unreached
    colour = "red" if unreached else "green"
    count = f"{len(reached)} of {len(reached) + len(unreached)}"
    yield f"[{colour}]Gradient reaches {count} trainable parameters.[/{colour}]"
    if unreached:
        names, left = unreached[:_MOST_NAMES], len(unreached) - _MOST_NAMES
        more = f" and {left} more" if left > 0 else ""
        yield f"  without: {escape(', '.join(names) + more)}"
    for trap in known.gradients.traps:
        kind = "[red]trap[/red]" if trap.stops else "[yellow]note[/yellow]"
        yield f"{kind} {escape(trap.block)}: {escape(trap.trap)}"
        yield f"  Fix: {escape(trap.fix)}"


def _number(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"


# --- Several ranks ----------------------------------------------------------------------------


def _mesh_report(mesh: "MeshForecast", processes: int, per_node: int) -> Iterator[RenderableType]:
    """Yield a table of what each rank sends to others, how much time it costs, and what helps."""
    nodes = -(-processes // per_node)
    copies, ranks = mesh.num_copies, mesh.num_shards
    held = f"{copies} copies of the model" if copies > 1 else "one copy of the model"
    if ranks > 1:
        held += f", each held by {ranks} together" if copies > 1 else ", held by all together"
    beyond = f" and {mesh.links.network / _GB:g} GB/s beyond" if nodes > 1 else ""
    yield (
        f"{processes} processes on {nodes} node{'s' * (nodes > 1)}: {held}. "
        f"Each GPU sends {mesh.links.node / _GB:g} GB/s within its node{beyond}."
    )
    table = plan_table("each rank sends", "among", "over", "GB a step", "takes", "exposed", "")
    for row in mesh.sent:
        table.add_row(
            row.what,
            str(row.ranks),
            _LINKS[row.over],
            f"{row.num_bytes / _GB:.3g}",
            format_short_duration(row.seconds),
            format_short_duration(row.exposed_seconds),
            _SENT_WHEN[row.what],
        )
    yield table
    yield _describe_exposed(mesh)
    for change in mesh.advice:
        settings = escape(" ".join(f"--set {setting}" for setting in change.changes))
        suffix = "" if change.fits is not False else ", [red]does not fit[/red]"
        yield f"  {settings}: {format_short_duration(change.step_seconds)} a step{suffix}"
    if mesh.idle_share:
        yield (
            f"[yellow]note[/yellow] The batch does not divide: {mesh.idle_share:.1%} of all "
            "places stay empty, and their ranks compute for nothing."
        )


def _describe_exposed(mesh: "MeshForecast") -> str:
    step, compute, share = mesh.step_seconds, mesh.compute_seconds, mesh.exposed_share
    text = (
        f"A step takes {format_short_duration(step)}, of which "
        f"{format_short_duration(compute)} is compute: {format_short_duration(step - compute)} "
        f"({share:.1%}) waits for other ranks."
    )
    if share < _LITTLE_EXPOSED:
        return f"{text} The rest of what is sent hides behind compute."
    if not mesh.advice:
        return f"{text} [yellow]That is much[/yellow]: faster links, or more work for each rank."
    return f"{text} [yellow]That is much.[/yellow] What would help, each by itself:"

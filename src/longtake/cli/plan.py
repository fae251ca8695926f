"""The verb `plan`: will it fit, and will everything train; its JSON, and tables made from that."""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from longtake.cli import say
from longtake.cli.cost import cost_facts, cost_report
from longtake.formatting import (
    escape,
    escape_lines,
    format_duration,
    format_short_duration,
    format_size,
)
from longtake.planner.words import ACTIVATION_WORDS, FIXED_WORDS, POLICY_WORDS, WEIGHT_WORDS
from longtake.progress import phase_lines

if TYPE_CHECKING:
    from longtake.config import Recipe
    from longtake.data.plan import Plan
    from longtake.planner.forecast import Forecast, PhaseForecast, Suggestion
    from longtake.planner.mesh import MeshForecast
    from longtake.planner.record import Options, PolicyForecast, StaticMemory

_GIB = 2**30
_GB = 1e9
_PIPE_WIDTH = 100
_MOST_NAMES = 12
_LITTLE_WAITING = 0.001
_MUCH_MORE_THAN_ONE_GIB = 4
"""Below it "the next GiB" would be another GPU."""
_PHASES = {
    "text": ("text encoder", "a caption: to fill a cache, and to sample"),
    "encode": ("codec, encoding", "a clip: to fill a cache"),
    "step": ("training, encoding", "encoders in the step, beside model and optimizer"),
    "model": ("model, sampling", "a video, one forward pass"),
    "decode": ("codec, decoding", "a video as a whole; tiles take less"),
    "sampling": ("training, sampling", "between two steps, beside model and optimizer"),
}
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
    "how much longer a step takes than without recompute, predicted from the device's data sheet."
)


def plan(
    recipe: Annotated[Path, typer.Argument(help="A recipe (TOML); no clips or weights needed.")],
    memory: Annotated[
        str | None, typer.Option(help="Memory of the GPU: 48GiB or 48GB [default: the recipe's].")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="The GPU: a100-80gb, a10, l4, l40s, rtx4090, h100, b200, ...; or its memory and "
            "dense bf16 speed: 24GiB,165TFLOPS [default: the recipe's]. Without --memory: all its "
            "memory."
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            help="RAM of the computer, such as 64GiB, of which a run may pin 60 % "
            "[default: recompute.host_memory, this computer's, or 107GiB]."
        ),
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Number of ranks.")] = 1,
    per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks per node [default: all].")
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="NODE[,NETWORK]",
            help="GB/s that one GPU sends to others of its node, and to other nodes: 450,50 "
            "[default: what is usual for the GPU].",
        ),
    ] = None,
    failures_per_day: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=500,
            help="Also tell what the whole run costs, if a launch ends so often by a failure.",
        ),
    ] = None,
    restart_seconds: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=86_400,
            help="From a failure until training continues [default: 60 s, and reading a save].",
        ),
    ] = None,
    storage: Annotated[
        float,
        typer.Option(
            min=0.001,
            max=1e6,
            metavar="GB/S",
            help="What all ranks together write to the run's disk, or read from it.",
        ),
    ] = 5.0,
    changes: say.Changes = None,
    trust: say.Trust = False,
    as_json: say.AsJson = False,
) -> None:
    """Tell before the run whether it fits and whether everything trains.

    Runs the model's own code on tensors without values: seconds, on any laptop. Exit code 1 if
    nothing fits, the recipe's own policy does not, or something would not train; 2 if training
    would refuse the recipe or its data.
    """
    with phase_lines(say.console(), "importing PyTorch") as enter:
        from longtake.config import memory_bytes
        from longtake.data.auto_buckets import with_buckets
        from longtake.planner.batch_sizes import with_batch_sizes
        from longtake.planner.cost import run_cost
        from longtake.planner.devices import device_budget, with_host_memory
        from longtake.planner.forecast import encoding_ahead, forecast, forecast_phases
        from longtake.planner.mesh import links_named, links_of, mesh_forecast
        from longtake.run_dir import RunDirectory
        from longtake.training.samples import refuse_wrong_samples
        from longtake.trust import load_recipe

        begun = time.perf_counter()
        given = [f'recompute.memory="{memory}"'] if memory else []
        given += [f'recompute.device="{device}"'] if device else []
        loaded = with_buckets(load_recipe(recipe, [*(changes or ()), *given], trust=trust))
        loaded = with_batch_sizes(loaded)
        refuse_wrong_samples(loaded, RunDirectory(loaded.out))
        planned = device_budget(loaded, world_size=processes)
        if memory is None and (device or planned.memory_bytes is None):
            planned = planned.with_own_memory()
        if host_memory is not None:
            ram = memory_bytes(host_memory)
            planned = with_host_memory(planned, ram, per_node or processes)
        links = links_named(link, planned) if link else links_of(planned)
        enter("running a training step on tensors without values")
        known = forecast(loaded, planned, world_size=processes, per_node=per_node)
        options = None if known.chosen is None else known.chosen[0]
        phases = forecast_phases(known.step, options)
        facts = _facts(loaded, known, phases)
        wanted = loaded.recompute.chosen()
        is_named = known.policies and wanted != "best" and not known.misses
        policy = known.policy(wanted) if is_named else known.best_policy
        if known.policies and (ahead := encoding_ahead(known.step, policy)) is not None:
            more = None if ahead.num_bytes is None else _gib(ahead.num_bytes)
            facts["encode_ahead"] = {"gib": more, "is_chosen": ahead.is_chosen}
        facts["mesh"] = mesh_facts(mesh_forecast(known, links))
        if failures_per_day is not None:
            enter("working out what the whole run costs")
            found = run_cost(
                known,
                phases,
                links,
                failures_per_day=failures_per_day,
                restart_seconds=restart_seconds,
                storage=storage * _GB,
            )
            facts["cost"] = None if found is None else cost_facts(found, processes)
        facts["seconds"] = round(time.perf_counter() - begun, 2)
    if as_json:
        say.result(facts)
    else:
        print_plan(say.stdout_console(), str(recipe), facts)
    if facts["refusals"]:
        raise typer.Exit(2)
    if known.misses or facts["policy_misses"] or known.gradients.fatal:
        raise typer.Exit(1)


def _facts(
    recipe: "Recipe", known: "Forecast", phases: "Sequence[PhaseForecast]"
) -> dict[str, Any]:
    """What the verb tells of one process, as JSON."""
    from longtake.data.checks import review_catalogs
    from longtake.models.review import review_model
    from longtake.planner.forecast import stored_start, suggest_changes
    from longtake.planner.plan import does_not_fit

    start = stored_start(known.step)
    suggestions = suggest_changes(known) if known.misses else []
    data_plan, warnings, refusal = review_catalogs(recipe)
    policy, is_named = recipe.recompute.policy, recipe.recompute.policy not in ("auto", "best")
    misses = is_named and known.best is not None and known.policy(policy).fits is False
    every, minutes = recipe.checkpoint.every, recipe.checkpoint.minutes
    return _forecast_facts(known) | {
        "changes": [_suggestion(each) for each in suggestions],
        "phases": [_phase(each, recipe) for each in phases],
        "checkpoint": {"every": every, "minutes": minutes},
        "init_from": start
        and {
            "file": str(recipe.trainable.init_from),
            "layers": start.num_layers,
            "trained_layers": start.num_trained,
            "rank": start.rank,
            "expert": recipe.model.expert and recipe.model.folder(),
        },
        "stages": _stages(recipe, known, data_plan),
        "policy": policy if is_named else None,
        "policy_misses": str(does_not_fit(known)) if misses else None,
        "data_warnings": warnings,
        "refusals": [] if refusal is None else [refusal],
        "warnings": review_model(known.step.components, recipe),
    }


def _stages(recipe: "Recipe", known: "Forecast", data_plan: "Plan | None") -> list[dict[str, Any]]:
    """What is trained at once in each stage, and with which settings.

    Where a stage begins may follow from its clips: it is None without a catalog.
    """
    from longtake.data.stages import StagePosition
    from longtake.optim.update import learning_rate_factor

    first: int | None = 0
    rows = []
    lengths = [each.steps for each in recipe.data.curriculum()]
    if data_plan is not None:
        lengths = list(data_plan.timeline.lengths)
    for batch, length in zip(known.step.stages, lengths, strict=True):
        inside, stage = recipe.in_stage(batch.name), recipe.data.stage(batch.name)
        end = recipe.training.steps if length is None else (first or 0) + length
        rates = None
        if first is not None:
            warm = first + (stage.warmup_steps or 0) if first else recipe.optimizer.warmup_steps
            last = max(first, min(end, recipe.training.steps) - 1)
            rates = [
                recipe.optimizer.learning_rate
                * learning_rate_factor(recipe, step, StagePosition(batch.name, step - first))
                for step in (min(warm, last), last)
            ]
        rows.append(
            {
                "name": batch.name,
                "first_step": first,
                "steps": length,
                "learning_rate": rates,
                "warmup_steps": stage.warmup_steps if first else recipe.optimizer.warmup_steps,
                "global_batch_size": batch.global_batch_size,
                "micro_batch_size": batch.micro_batch_size,
                "num_micro_batches": batch.num_micro_batches,
                "bucket": batch.bucket.model_dump(exclude_none=True),
                "tokens": batch.num_tokens,
                "ema_decay": inside.ema.decay if not inside.ema.profiles else None,
                "shift": inside.flow.shift,
                "caption_dropout": inside.data.caption_dropout,
                "is_planned": batch.name == known.step.stage,
            }
        )
        first = None if first is None or length is None else end
    return rows


def _forecast_facts(known: "Forecast") -> dict[str, Any]:
    from longtake.planner.forecast import short_memory

    device, step, gradients = known.device, known.step, known.gradients
    chosen = known.best_policy or (known.least if known.policies else None)
    return {
        "device": device.name,
        "memory_gib": _gib(device.memory_bytes),
        "budget_gib": _gib(device.budget_bytes),
        "model": {
            "parameters": known.num_parameters,
            "trainable": known.num_trainable,
            "tokens": known.step.num_tokens,
        },
        "bucket": step.bucket.model_dump(exclude_none=True),
        "micro_batch_size": step.micro_batch_size,
        "num_micro_batches": step.num_micro_batches,
        "precision": step.recipe.model.dtype
        if step.recipe.model.dtype == "bf16"
        else step.precision,
        "processes": step.world_size,
        "per_node": step.per_node,
        "fixed_gib": _static(known.static),
        "host_gib": _gib(known.static.optimizer.host),
        "host_ram": {
            "pinned_gib": _gib(known.pinned_host_bytes),
            "limit_gib": _gib(step.host_room),
            "needed_gib": _gib(known.needed_host_bytes),
        },
        "short": [] if chosen is None else list(short_memory(step, chosen)),
        "foreach_gib": _gib(known.foreach_bytes),
        "policies": [_row(row) for row in known.policies],
        "best": _best(known),
        "gradients": {
            "trainable": len(gradients.reached) + len(gradients.unreached),
            "reached": len(gradients.reached),
            "unreached": list(gradients.unreached),
        },
        "traps": [
            {"block": trap.block, "trap": trap.trap, "fix": trap.fix, "stops": trap.stops}
            for trap in gradients.traps
        ],
    }


def _static(static: "StaticMemory") -> dict[str, float | None]:
    return {
        "weights": _gib(static.weights),
        "gradients": _gib(static.gradients),
        "optimizer": _gib(static.optimizer.device),
        "inputs": _gib(static.inputs),
        "ema": _gib(static.ema),
        "encoders": _gib(static.encoders),
    }


def _row(row: "PolicyForecast") -> dict[str, Any]:
    return {
        "name": row.name,
        "forward_end_gib": _gib(row.forward_end_bytes),
        "peak_gib": _gib(row.peak_bytes),
        "step_peak_gib": _gib(row.step_peak_bytes),
        "overhead": None if row.overhead is None else round(row.overhead, 4),
        "fits": row.fits,
    }


def _best(known: "Forecast") -> dict[str, Any] | None:
    best, row = known.best, known.best_policy
    if best is None or row is None:
        return None
    away = known.static.elsewhere
    return {
        **{key: value for key, value in _row(row).items() if key not in ("name", "peak_gib")},
        "host_gib": _gib(row.host_bytes),
        "link_share": round(row.link_share, 4),
        "per_block": best.per_block(),
        "blocks": _blocks(best.options),
        "options": {name: str(option) for name, option in best.options.items()},
        "predicted_gib": _gib(best.predicted_bytes - away),
        "traced_gib": _gib(best.traced.peak_bytes - away),
        "overhead_with_another_gib": round(best.overhead_with_another_gib, 4),
    }


def _blocks(options: "Options") -> list[dict[str, Any]]:
    """Each kind of choice, with the blocks that it is made for."""
    names: dict[Any, list[str]] = {}
    for name, option in options.items():
        names.setdefault(option, []).append(name)
    return [
        {
            "blocks": _ranges(each),
            "count": len(each),
            "activations": option.activations,
            "weights": option.weights,
        }
        for option, each in names.items()
    ]


def _ranges(names: list[str]) -> str:
    """Names such as blocks.0, blocks.1 and blocks.2, as blocks.0-2."""
    ranges: list[tuple[str, int, int]] = []  # what is before the number, the first and the last
    for name in names:
        front, _, end = name.rpartition(".")
        number = int(end) if end.isdigit() else -1
        if ranges and ranges[-1][::2] == (front, number - 1):
            ranges[-1] = front, ranges[-1][1], number
        else:
            ranges.append((front if number >= 0 else name, number, number))
    texts, last = list[str](), ""
    for front, first, end_at in ranges:
        numbers = "" if first < 0 else f"{first}-{end_at}" if end_at > first else str(first)
        texts.append(numbers if numbers and front == last else f"{front}.{numbers}".rstrip("."))
        last = front
    return ", ".join(texts)


def _suggestion(suggestion: "Suggestion") -> dict[str, Any]:
    return {
        "what": suggestion.what,
        "set": list(suggestion.changes),
        "policy": suggestion.policy,
        "step_peak_gib": _gib(suggestion.step_peak_bytes),
        "host_gib": _gib(suggestion.host_bytes),
        "short": list(suggestion.short),
        "fits": suggestion.fits,
    }


def _phase(phase: "PhaseForecast", recipe: "Recipe") -> dict[str, Any]:
    between = {"every": recipe.sampling.every} if phase.name == "sampling" else {}
    how = {"how": phase.how} if phase.how else {}
    return {
        "name": phase.name,
        "weights_gib": _gib(phase.weight_bytes),
        "peak_gib": _gib(phase.peak_bytes),
        "seconds": float(f"{phase.seconds:.3g}"),
        "fits": phase.fits,
        **between,
        **how,
    }


def _gib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else round(num_bytes / _GIB, 6)


def mesh_facts(mesh: "MeshForecast | None") -> dict[str, Any] | None:
    """What is sent over which link, and whether it hides; None where one process is alone."""
    if mesh is None:
        return None
    return {
        "link_gb_per_second": {"node": mesh.links.node / _GB, "network": mesh.links.network / _GB},
        "ranks_of_a_copy": mesh.num_shards,
        "copies": mesh.num_copies,
        "sent_bytes": mesh.num_bytes,
        "sent": [
            {
                "what": row.what,
                "ranks": row.ranks,
                "over": row.over,
                "bytes": row.num_bytes,
                "seconds": _rounded(row.seconds),
                "exposed_seconds": _rounded(row.exposed_seconds),
            }
            for row in mesh.sent
        ],
        "compute_seconds": _rounded(mesh.compute_seconds),
        "step_seconds": _rounded(mesh.step_seconds),
        "exposed_share": round(mesh.exposed_share, 4),
        "idle_share": round(mesh.idle_share, 4),
        "advice": [
            {
                "set": list(each.changes),
                "step_seconds": _rounded(each.step_seconds),
                "step_peak_gib": round(each.step_peak_bytes / _GIB, 6),
                "fits": each.fits,
            }
            for each in mesh.advice
        ],
    }


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.5g}")


# --- What `plan` prints: tables made from its JSON --------------------------------------------


def print_plan(console: Console, recipe: str, facts: Mapping[str, Any]) -> None:
    """Print what `longtake plan --json` would, at least 100 columns wide in a pipe."""
    if not console.is_terminal:
        console.width = max(console.width, _PIPE_WIDTH)
    for part in _parts(recipe, facts):
        console.print(part, highlight=False, soft_wrap=isinstance(part, str))


def _parts(recipe: str, facts: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield f"[bold]{escape(recipe)}[/bold]"
    yield escape(_of_model(facts))
    yield escape(_of_device(facts))
    if (start := facts["init_from"]) is not None:
        of_expert = f" of {start['expert']}" if start["expert"] else ""
        yield escape(
            f"Begins with {start['file']}: LoRA of rank {start['rank']} for {start['layers']} of "
            f"{start['trained_layers']} layers{of_expert}."
        )
    if len(facts["stages"]) > 1:
        yield _stage_table(facts["stages"])
        yield (
            "[dim]batch: clips of an update, on all processes together. at once: micro-batches of "
            "a process, and clips in each. tokens: of a micro-batch. Memory and time "
            "below are those of the stage marked *, the largest.[/dim]"
        )
    yield ""
    yield _fixed(facts)
    if facts["policies"]:
        yield _policies(facts)
        yield f"[dim]{_LEGEND}[/dim]"
        yield ""
        yield from _result(facts)
        yield from _remarks(facts)
        yield from _phases(facts)
        if facts["mesh"]:
            yield ""
            yield from mesh_report(facts["mesh"], facts["processes"], facts["per_node"])
            yield _of_checkpoints(facts["checkpoint"], facts["mesh"]["step_seconds"])
        if facts.get("cost"):
            yield ""
            yield from cost_report(facts["cost"])
    yield from _gradients(facts)
    for warning in facts["data_warnings"]:
        yield f"[yellow]data[/yellow] {escape_lines(warning)}"
    for warning in facts["warnings"]:
        yield f"[yellow]note[/yellow] {escape_lines(warning)}"
    for refusal in facts["refusals"]:
        yield f"[red]Training would refuse this recipe.[/red] {escape_lines(refusal)}"
    yield f"[dim]Predicted in {facts['seconds']:.1f} s; nothing was run on the device.[/dim]"


def _of_model(facts: Mapping[str, Any]) -> str:
    model, bucket = facts["model"], facts["bucket"]
    frames = bucket["num_frames"]
    clips = f"{frames} frame{'s' if frames > 1 else ''} of {bucket['width']}x{bucket['height']}"
    share = model["trainable"] / model["parameters"]
    batch = f"micro-batches of {facts['micro_batch_size']}"
    if facts["num_micro_batches"] > 1:
        batch += f", {facts['num_micro_batches']} for an update"
    return (
        f"{_number(model['parameters'])} parameters, of which {_number(model['trainable'])} train "
        f"({share:.2%}). Clips of {clips}: {model['tokens']} tokens each. In {batch}, computed in "
        f"{facts['precision']}."
    )


def _stage_table(stages: Sequence[Mapping[str, Any]]) -> Table:
    names = ("stage", "begins", "steps", "learning rate", "warm-up", "batch", "at once")
    cells = []
    for row in stages:
        rates = (
            ["-"] if row["learning_rate"] is None else [f"{r:.3g}" for r in row["learning_rate"]]
        )
        settings = (row["ema_decay"], row["shift"], row["caption_dropout"])
        cells.append(
            (
                escape(row["name"]) + ("*" if row["is_planned"] else ""),
                "-" if row["first_step"] is None else f"{row['first_step']:,}",
                "the rest" if row["steps"] is None else f"{row['steps']:,}",
                " to ".join(dict.fromkeys(rates)),
                str(row["warmup_steps"] or "-"),
                f"{row['global_batch_size']:,}",
                f"{row['num_micro_batches']} x {row['micro_batch_size']}",
                f"{row['tokens']:,}",
                *("-" if value is None else str(value) for value in settings),
            )
        )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    columns = zip((*names, "tokens", "EMA", "shift", "no caption"), *cells, strict=True)
    shown = [(name, *each) for name, *each in columns if set(each) != {"-"}]
    for name, *_ in shown:
        table.add_column(name, justify="left" if name == "stage" else "right")
    for row_cells in zip(*(each for _, *each in shown), strict=True):
        table.add_row(*row_cells)
    return table


def _of_device(facts: Mapping[str, Any]) -> str:
    if facts["budget_gib"] is None:
        return f"Planned for {facts['device']}, without a limit (--memory 48GiB sets one)."
    kept_back = facts["memory_gib"] - facts["budget_gib"]
    nccl = ", NCCL" if facts["processes"] > 1 else ""
    return (
        f"Planned for {facts['device']} with {_size(facts['memory_gib'])}: "
        f"{_size(facts['budget_gib'])} for tensors, {_size(kept_back)} is left to the CUDA "
        f"context{nccl} and fragmentation (recompute.reserve)."
    )


def _fixed(facts: Mapping[str, Any]) -> Table:
    table = _table("in memory under every policy", "", "")
    for name, meaning in FIXED_WORDS.items():
        value = facts["fixed_gib"][name]
        if value or name not in ("encoders", "ema"):
            table.add_row(name, _size(value), meaning)
    if facts["host_gib"]:
        meaning = "optimizer states and fp32 weights, in host RAM"
        table.add_row("offloaded", _size(facts["host_gib"]), meaning)
    return table


def _policies(facts: Mapping[str, Any]) -> Table:
    most = max(row["step_peak_gib"] for row in facts["policies"])
    unit, scale = ("GiB", 1) if most >= 1 else ("MiB", 2**10)
    table = _table(f"policy, {unit}", "forward", "peak", "with optimizer", "time", "fits", "")
    for row in facts["policies"]:
        table.add_row(*_cells(row, scale), POLICY_WORDS[row["name"]])
    if best := facts["best"]:
        row = {**best, "name": "best", "peak_gib": best["traced_gib"]}
        table.add_row(*_cells(row, scale), POLICY_WORDS["best"], style="bold")
    return table


def _cells(row: Mapping[str, Any], scale: int) -> list[str]:
    fits = {True: "[green]yes[/green]", False: "[red]no[/red]", None: ""}[row["fits"]]
    sizes = [f"{row[key] * scale:.2f}" for key in ("forward_end_gib", "peak_gib", "step_peak_gib")]
    return [row["name"], *sizes, f"+{row['overhead']:.1%}", fits]


def _result(facts: Mapping[str, Any]) -> Iterator[RenderableType]:
    if facts["best"] is not None:
        if facts["policy_misses"]:
            yield f"[red]Does not fit.[/red] {escape(facts['policy_misses'])}"
        elif facts["policy"]:
            yield f'The recipe sets recompute.policy = "{facts["policy"]}". In its place:'
        yield _of_best(facts["best"])
        host = facts["host_ram"]
        if host["needed_gib"] >= 1:
            yield (
                f"The computer needs {_size(host['needed_gib'])} of RAM at least (--host-memory "
                "plans for another): 60 % of it may be pinned."
            )
        if len(facts["best"]["blocks"]) > 1 or facts["best"]["host_gib"]:
            yield _mixture(facts["best"]["blocks"])
        return
    least = min(facts["policies"], key=lambda row: row["step_peak_gib"])
    host = facts["host_ram"]
    sizes = {
        "GPU memory": (least["step_peak_gib"], facts["budget_gib"]),
        "host RAM": (host["pinned_gib"], host["limit_gib"]),
    }
    lacking = "; ".join(
        f"{name}: {_size(sizes[name][0])} of the {_size(sizes[name][1])} that a process may take"
        for name in facts["short"]
    )
    yield f"[red]Nothing fits.[/red] At least, it takes too much of {lacking or 'both memories'}."
    if "host RAM" in facts["short"]:
        yield "A computer with more RAM is planned for by --host-memory 128GiB."
    yield "What would help, each by itself:"
    for change in facts["changes"]:
        settings = " ".join(f"--set '{each}'" for each in change["set"])
        taken = {"GPU memory": change["step_peak_gib"], "host RAM": change["host_gib"]}
        still = ", ".join(f"{_size(taken[name])} of {name}" for name in change["short"])
        result = f"still too much: {still}" if still else "[green]fits[/green]"
        sizes_said = _size(taken["GPU memory"])
        if taken["host RAM"]:
            sizes_said += f" and {_size(taken['host RAM'])} of host RAM"
        yield (f"  {escape(change['what'])}: {sizes_said}, {result}  [dim]{escape(settings)}[/dim]")


def _of_checkpoints(checkpoint: Mapping[str, Any], step_seconds: float) -> str:
    """How much training a crash can cost."""
    every, minutes = checkpoint["every"], checkpoint["minutes"]
    lost = every * step_seconds
    also = ""
    if minutes is not None:
        lost = min(lost, 60 * minutes)
        also = f" and every {minutes:g} minutes"
    return (
        f"A checkpoint is saved every {every} steps{also}: a crash loses at most "
        f"{format_duration(lost)} of training, and what one save takes."
    )


def _phases(facts: Mapping[str, Any]) -> Iterator[RenderableType]:
    """What the other work takes, part by part."""
    if not facts["phases"]:
        return
    table = _table("one part at a time, GiB", "weights", "peak", "takes", "fits", "")
    for row in facts["phases"]:
        fits = {True: "[green]yes[/green]", False: "[red]no[/red]", None: ""}[row["fits"]]
        sizes = [f"{row[key]:.2f}" for key in ("weights_gib", "peak_gib")]
        label, meaning = _PHASES[row["name"]]
        if row["name"] == "model" and "how" in row:
            meaning += f", {row['how']}"
        table.add_row(label, *sizes, f"{row['seconds']:.2g} s", fits, meaning)
    yield ""
    yield table


def _remarks(facts: Mapping[str, Any]) -> Iterator[str]:
    """What the table does not say."""
    phases = {phase["name"]: phase for phase in facts["phases"]}
    if (between := phases.get("sampling")) is not None:
        yield (
            f"Every {between['every']} steps training stops for about "
            f"{format_duration(between['seconds'])} and samples {between['how']}."
        )
    encoding = phases.get("step")
    if encoding is not None:
        yield (
            "[yellow]note[/yellow] Step times leave out the encoders in the step: about "
            f"{encoding['seconds']:.1f} s more for this process's clips of one update. With "
            "data.cache they are not in the step."
        )
    if (ahead := facts.get("encode_ahead")) is not None:
        yield _of_encoding_ahead(ahead)
    if facts["processes"] > 1:
        yield (
            f"[yellow]note[/yellow] For one of {facts['processes']} processes: an estimate, which "
            "does not know the buffers of collectives."
        )
    if facts["foreach_gib"] >= 1:
        yield (
            f"AdamW is fused: torch's own default (foreach) would need {facts['foreach_gib']:.1f} "
            "GiB more at each update."
        )


def _of_encoding_ahead(ahead: Mapping[str, Any]) -> str:
    """What `training.encode_ahead` comes to."""
    more = "an unknown amount" if ahead["gib"] is None else _size(ahead["gib"])
    if ahead["is_chosen"]:
        return (
            "Encoders work on a CUDA stream of their own, one micro-batch ahead, and take "
            f"{more} of memory for it (training.encode_ahead)."
        )
    return (
        f"Encoders work in line with the model: one micro-batch ahead they would take {more} of "
        "memory, which is not left. With training.encode_ahead = true the plan makes room for it."
    )


def _of_best(best: Mapping[str, Any]) -> str:
    counts = best["per_block"]
    chosen = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    text = f"Best: of {sum(counts.values())} blocks {chosen}."
    if best["host_gib"]:
        text += f" {_size(best['host_gib'])} of host RAM are pinned for weights and activations."
    if best["overhead"] > 0:
        text += f" A step takes {best['overhead']:.1%} longer than without recompute"
        if best["link_share"] >= _LITTLE_WAITING:
            text += f", of which it waits {best['link_share']:.1%} of its time for copies"
        more = 100 * (best["overhead"] - best["overhead_with_another_gib"])
        is_much = more >= 0.05 and best["traced_gib"] > _MUCH_MORE_THAN_ONE_GIB
        text += f"; the next GiB would take {more:.1f} points off." if is_much else "."
    return text


def _mixture(blocks: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("blocks", "", "activations", "frozen weights"):
        table.add_column(column, justify="left" if column else "right")
    for row in blocks:
        words = ACTIVATION_WORDS[row["activations"]], WEIGHT_WORDS[row["weights"]]
        table.add_row(row["blocks"], str(row["count"]), *words)
    return table


def _gradients(facts: Mapping[str, Any]) -> Iterator[str]:
    gradients = facts["gradients"]
    trained, reached = gradients["trainable"], gradients["reached"]
    colour = "green" if reached == trained else "red"
    yield (f"[{colour}]Gradient reaches {reached} of {trained} trainable parameters.[/{colour}]")
    if unreached := gradients["unreached"]:
        names, left = unreached[:_MOST_NAMES], len(unreached) - _MOST_NAMES
        more = f" and {left} more" if left > 0 else ""
        yield f"  without: {escape(', '.join(names) + more)}"
    for trap in facts["traps"]:
        kind = "[red]trap[/red]" if trap["stops"] else "[yellow]note[/yellow]"
        yield f"{kind} {escape(trap['block'])}: {escape(trap['trap'])}"
        yield f"  Fix: {escape(trap['fix'])}"


def _size(gib: float) -> str:
    return format_size(round(gib * 2**30))


def _number(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        is_text = number in (0, len(columns) - 1) or column == "fits"
        table.add_column(column, justify="left" if is_text else "right", no_wrap=not is_text)
    return table


def mesh_report(mesh: Mapping[str, Any], processes: int, per_node: int) -> Iterator[RenderableType]:
    """What each rank sends as a table, how much of it is exposed, and what would help."""
    yield _mesh_opening(mesh, processes, per_node)
    yield _mesh_table(mesh["sent"])
    yield _exposed(mesh)
    for each in mesh["advice"]:
        settings = escape(" ".join(f"--set {change}" for change in each["set"]))
        suffix = "" if each["fits"] is not False else ", [red]does not fit[/red]"
        yield f"  {settings}: {format_short_duration(each['step_seconds'])} a step{suffix}"
    if mesh["idle_share"]:
        yield (
            f"[yellow]note[/yellow] The batch does not divide: {mesh['idle_share']:.1%} of all "
            "places stay empty, and their ranks compute for nothing."
        )


def _mesh_opening(mesh: Mapping[str, Any], processes: int, per_node: int) -> str:
    nodes, link = -(-processes // per_node), mesh["link_gb_per_second"]
    text = f"{processes} processes on {nodes} node{'s' * (nodes > 1)}: "
    copies, ranks = mesh["copies"], mesh["ranks_of_a_copy"]
    many = f"{copies} copies of the model" if copies > 1 else "one copy of the model"
    held = (
        f"{many}, each held by {ranks} together" if copies > 1 else f"{many}, held by all together"
    )
    text += held if ranks > 1 else many
    text += f". Each GPU sends {link['node']:g} GB/s within its node"
    return text + (f" and {link['network']:g} GB/s beyond." if nodes > 1 else ".")


def _mesh_table(sent: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("each rank sends", "among", "over", "GB a step", "takes", "exposed", ""):
        is_text = column in ("each rank sends", "over", "")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=column != "")
    for row in sent:
        table.add_row(
            row["what"],
            str(row["ranks"]),
            _LINKS[row["over"]],
            f"{row['bytes'] / _GB:.3g}",
            format_short_duration(row["seconds"]),
            format_short_duration(row["exposed_seconds"]),
            _SENT_WHEN[row["what"]],
        )
    return table


def _exposed(mesh: Mapping[str, Any]) -> str:
    step, compute, share = mesh["step_seconds"], mesh["compute_seconds"], mesh["exposed_share"]
    text = (
        f"A step takes {format_short_duration(step)}, of which "
        f"{format_short_duration(compute)} is compute: {format_short_duration(step - compute)} "
        f"({share:.1%}) waits for other ranks."
    )
    if share < _LITTLE_EXPOSED:
        return f"{text} The rest of what is sent hides behind compute."
    if not mesh["advice"]:
        return f"{text} [yellow]That is much[/yellow]: faster links, or more work for each rank."
    return f"{text} [yellow]That is much.[/yellow] What would help, each by itself:"

"""One run, from a recipe to its last checkpoint: builds the parts and owns their lifetimes."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from longtake.checkpoint import store
from longtake.config import Bucket, Recipe
from longtake.data.files import refuse_missing
from longtake.data.ledger import begin_launch, keep_ledger, stream_names
from longtake.data.loader import Loader
from longtake.data.review import review
from longtake.models.assemble import Components, assemble, forward_flops, latent_shape, outline
from longtake.models.flops import training_flops
from longtake.models.precision import Precision, choose_precision
from longtake.parallel.collectives import first_does, from_first
from longtake.parallel.fsdp import spread
from longtake.parallel.mesh import World, join
from longtake.run_dir import EventKind, RunDirectory
from longtake.training.allocator import keep_freed_memory
from longtake.training.caching import captions_of, fill_cache, make_parts
from longtake.training.card import card_of
from longtake.training.eight_bit import refuse_missing_torchao
from longtake.training.ema import Ema
from longtake.training.fit import Fit, fit, run_blocks_by
from longtake.training.loop import train_steps
from longtake.training.optim import build_optimizers
from longtake.training.outlined import refuse_uneven_batch
from longtake.training.peak import PeakCheck
from longtake.training.record import keep_record
from longtake.training.resume import data_state, refuse_other_plans, restore
from longtake.training.step import TrainingState
from longtake.units import size


@dataclass(frozen=True)
class Outcome:
    """How a launch ended."""

    start_step: int
    """Updates that were done before this launch."""
    end_step: int
    """Updates that are done now."""
    training_seconds: float
    """Wall-clock time of this launch's steps, saving included."""
    interrupted_by: str | None
    """The signal that ended it before the last step, if one did."""


def train(recipe: Recipe, console: Console) -> Outcome:
    """Train a recipe to its end, from its newest checkpoint if there is one.

    Call it in one process, or in each that torchrun started.

    Raises:
        LongtakeError: whatever is wrong with recipe, data or run directory; before the first step
            where it can be known then.
    """
    with join(recipe.training.device, recipe.parallel.strategy) as world:
        refuse_uneven_batch(recipe, world.size)
        refuse_missing_torchao(recipe.optimizer)
        if world.device.type == "cpu":
            keep_freed_memory()
        run = RunDirectory(recipe.out)
        loader = Loader(
            recipe.data,
            batch_size=recipe.training.batch_size,
            seed=recipe.seed,
            rank=world.rank,
            world_size=world.size,
            kept=run.catalogs_path,
        )
        if not run.exists():  # what is wrong is said before there is a run
            review(loader.course.plan, recipe.data, recipe.training.steps)
        trainer = _go_on(run, recipe, loader, world)
        refuse_other_plans(loader, world)
        start, total = loader.step, recipe.training.steps
        warnings = review(loader.course.plan, recipe.data, total)
        precision = _precision(recipe, trainer, world)
        plan = fit(recipe, precision, world)
        if recipe.data.cache is None:
            warnings += _look_for_files(loader, world)
            parts = _assemble_in_turn(run, recipe, loader, world)
        else:  # only files of which it lacks something are needed, and it looks for those
            parts = _assemble_around_cache(run, recipe, loader, world, console)
        step_flops = _count_flops(parts, recipe)  # before the weights are spread over ranks
        run_blocks_by(plan.options, parts)
        state = _begin_or_resume(parts, precision, trainer, recipe, run, world)
        folder = _begin_ledger(loader, recipe, run, world)
        if world.is_first:
            _announce(state, loader, [*warnings, *plan.notes], recipe, run, world, console)
            _announce_plan(plan, state, recipe, run, console)
        streams = stream_names(recipe.data)
        peak = _peak_check(plan, recipe, world)
        begun = time.perf_counter()
        with (
            keep_record(start, total, step_flops, run, world, console) as record,
            keep_ledger(folder, world.rank, streams) as ledger,
        ):
            signal = train_steps(state, loader, ledger, recipe, run, world, record, peak)
        seconds = time.perf_counter() - begun
        if world.is_first:
            kind: EventKind = "interrupted" if signal else "finished"
            run.append_event(kind, step=state.global_step, seconds=round(seconds, 3), by=signal)
        return Outcome(start, state.global_step, seconds, signal)


def _go_on(
    run: RunDirectory, recipe: Recipe, loader: Loader, world: World
) -> dict[str, Any] | None:
    """What the run's newest checkpoint says, with the loader brought there; None if there is none.

    Refuses a run directory that belongs to another recipe.
    """
    first_does(lambda: run.claim(recipe), world)
    path = store.newest_on_all(run, world)
    if path is None:
        return None
    trainer = store.load_trainer(path)
    loader.load_state_dict(data_state(trainer, run))
    return trainer


def _assemble_in_turn(
    run: RunDirectory, recipe: Recipe, loader: Loader, world: World
) -> Components:
    """Build the parts on every rank; rank 0 first, which keeps what exists nowhere else."""
    captions = captions_of(loader)
    made: list[Components] = []

    def open_run() -> None:
        is_new = not run.exists()
        parts = assemble(recipe, captions, None if is_new else run.components_path)
        if is_new:
            parts.codec.save(run.components_path)
            parts.text.save(run.components_path)
            run.create(recipe)
        made.append(parts)

    first_does(open_run, world)
    parts = made[0] if made else assemble(recipe, captions, run.components_path)
    parts.codec.to(world.device)
    parts.text.to(world.device)
    return parts


def _assemble_around_cache(
    run: RunDirectory, recipe: Recipe, loader: Loader, world: World, console: Console
) -> Components:
    """Fill the cache, and only then build the model, with outlines of codec and text encoder."""
    captions = captions_of(loader)
    made: list[Components] = []

    def open_run() -> None:
        if not run.exists():
            outline(recipe)  # what is wrong is said before there is a run
            make_parts(recipe, captions, run.components_path)
            run.create(recipe)

    def build() -> None:
        made.append(assemble(recipe, captions, run.components_path, frozen_parts=False))

    first_does(open_run, world)
    outcome = fill_cache(recipe, loader, run.components_path, world, console)
    loader.read_from(outcome.filled, outcome.incidents)
    if world.is_first:
        console.print(escape(str(outcome)), highlight=False)
    first_does(build, world)  # first: it may have to be downloaded
    if not made:
        build()
    return made[0]


def _count_flops(parts: Components, recipe: Recipe) -> dict[Bucket, int]:
    """Operations of a training step on clips of each shape, where they can be counted."""
    shapes = {bucket: latent_shape(parts.codec, bucket) for bucket in recipe.data.shapes()}
    try:
        return {
            bucket: recipe.training.batch_size * training_flops(forward_flops(parts, recipe, shape))
            for bucket, shape in shapes.items()
        }
    except RuntimeError:  # a module that looks at values cannot be run without any
        return {}


def _precision(recipe: Recipe, trainer: dict[str, Any] | None, world: World) -> Precision:
    """Of the arithmetic, the same on all ranks; a resumed run computes as it did before."""
    wanted = recipe.training.precision
    if wanted == "auto" and trainer is not None:
        wanted = trainer["precision"]
    return from_first(choose_precision(wanted, world.device), world)


def _begin_or_resume(
    parts: Components,
    precision: Precision,
    trainer: dict[str, Any] | None,
    recipe: Recipe,
    run: RunDirectory,
    world: World,
) -> TrainingState:
    """The state at step 0, or where the newest checkpoint left it."""
    parts.model.train()
    blocks = parts.family.blocks(parts.model)
    spread(parts.model, blocks, world)
    optimizers = build_optimizers(parts.model, blocks, recipe.optimizer, precision)
    ema = Ema(parts.model, recipe.ema.decay)
    state = TrainingState(parts, optimizers, ema, precision)
    if trainer is not None:
        restore(state, trainer, run, world)
    return state


def _look_for_files(loader: Loader, world: World) -> list[str]:
    """Refuse, before the first step, data of which too much is gone; name the little that is."""
    said: list[str] = []

    def look() -> None:
        for catalog in loader.catalogs.values():
            said.extend(
                refuse_missing(catalog, loader.data.max_quarantined_clips, loader.data.references)
            )

    first_does(look, world)
    return said


def _begin_ledger(loader: Loader, recipe: Recipe, run: RunDirectory, world: World) -> Path:
    """The folder of this launch's ledger; what it will be audited against is kept beside it.

    Only now does the run take over a recipe that may change on resume: everything that could
    refuse it has looked at it.
    """
    made: list[Path] = []

    def begin() -> None:
        run.adopt(recipe)
        loader.keep_catalogs()
        made.append(
            begin_launch(
                run.ledger_path,
                loader.step,
                world.size,
                stream_names(loader.data),
                loader.course.history,
            )
        )

    first_does(begin, world)
    return from_first(made[0] if made else run.ledger_path, world)


def _announce(
    state: TrainingState,
    loader: Loader,
    warnings: Sequence[str],
    recipe: Recipe,
    run: RunDirectory,
    world: World,
    console: Console,
) -> None:
    """Record the launch and say in a few lines what is about to happen."""
    step, device = state.global_step, str(world.device)
    facts = {"world_size": world.size, "device": device, "precision": state.precision}
    run.record_launch(start_step=step, **facts)
    run.append_event("resumed" if step else "launched", step=step, **facts)
    if loader.course.changes:
        plan = {"policy": recipe.data.on_change, "plan_version": loader.course.plan.version}
        run.append_event("data_changed", step=step, **plan, changes=loader.course.changes)
    parameters = sum(parameter.numel() for parameter in state.components.model.parameters())
    processes = f"{world.size} process{'es' if world.size > 1 else ''}"
    size = f"{parameters / 1e6:.2f} M parameters"
    steps = f"step {step} to {recipe.training.steps}"
    console.print(
        f"[bold]{escape(str(run.path))}[/bold]: {recipe.model.family}, {size}, "
        f"{_clips_of(loader)}, {steps}, {processes} on {device} in {state.precision}",
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
    for warning in warnings:
        console.print(f"  [yellow]warning:[/yellow] {escape(warning)}", highlight=False)
    for path in store.passed_over(run, step):
        console.print(
            f"  [yellow]warning:[/yellow] {escape(str(path))} is not whole and was passed over; "
            f"training goes on from step {step}",
            highlight=False,
        )


def _announce_plan(
    plan: Fit, state: TrainingState, recipe: Recipe, run: RunDirectory, console: Console
) -> None:
    """Record which recompute policy is run, and what it is expected to take."""
    if plan.memory is None:
        return
    budget, counts = card_of(recipe).budget_bytes, Counter(plan.options.values())
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
    limit = "" if budget is None else f" of {size(budget)}"
    console.print(
        f"  memory: recompute policy {plan.policy} ({blocks}), {size(peak)}{limit} predicted",
        highlight=False,
    )


def _peak_check(plan: Fit, recipe: Recipe, world: World) -> PeakCheck:
    """Compares one step with its prediction, which knows nothing of encoders at work."""
    encodes = recipe.data.cache is None and recipe.codec.kind != "pixels"
    wanted = plan.activation_bytes if world.is_first and not encodes else None
    return PeakCheck(wanted, plan.bucket, world.device)


def _clips_of(loader: Loader) -> str:
    """How much there is to train on, in the stages that are still to come."""
    parts = []
    for stage in loader.course.plan.stages:
        members = [stream.parts[-1].members for stream in stage.streams]
        num_buckets = len({shape for each in members for shape in each.shapes})
        parts.append(f"{sum(map(len, members))} clips in {num_buckets} bucket(s)")
    return " then ".join(parts) or "no clips left"

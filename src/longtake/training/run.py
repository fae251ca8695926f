"""One run, from a recipe to its last checkpoint: builds the parts and owns their lifetimes."""

import shlex
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from longtake import heartbeat
from longtake.checkpoint import files
from longtake.checkpoint.store import keep_saver
from longtake.config import Recipe
from longtake.data.files import refuse_missing
from longtake.data.ledger import begin_launch, keep_ledger, stream_names
from longtake.data.ledger import damage as ledger_damage
from longtake.data.loader import Loader
from longtake.data.review import review
from longtake.errors import CheckpointError, DivergedError
from longtake.guard.detectors import GuardVerdict
from longtake.guard.history import MAX_WINDOWS
from longtake.guard.rollback import RollBack
from longtake.models.build import source_of, text_section
from longtake.models.captions import review_captions
from longtake.models.numerics import Precision, choose_precision
from longtake.models.pretrained import local_copies
from longtake.optim.build import refuse_missing_torchao
from longtake.parallel.collectives import first_does, from_first, gather_objects
from longtake.parallel.mesh import World, join
from longtake.planner.devices import peak_flops
from longtake.process import STOP_SIGNALS, StopSignal, command
from longtake.run_dir import EventKind, RunDirectory, beside
from longtake.tracking.follower import Follower, tracking_follower
from longtake.tracking.tracker import refuse_missing_packages
from longtake.tracking.wandb import missing_key
from longtake.training.allocator import keep_freed_memory
from longtake.training.announce import (
    announce,
    announce_plan,
    attention_backend,
    slow_attention,
)
from longtake.training.build import build_state
from longtake.training.card import free_memory
from longtake.training.compile_cache import keep_compiled
from longtake.training.compiling import compile_blocks, refuse_missing_compiler
from longtake.training.fit import Fit, run_blocks_by
from longtake.training.gauge import Gauge
from longtake.training.guarding import Guard
from longtake.training.kept_plan import keep_plan, plan_of
from longtake.training.latent_cache import captions_of
from longtake.training.loop import Ending, Watch, train_steps
from longtake.training.parts import (
    assemble_around_cache,
    assemble_in_turn,
    count_flops,
    missing_vocabulary,
)
from longtake.training.peak import PeakCheck, refuse_out_of_memory
from longtake.training.record import keep_record
from longtake.training.resume import refuse_other_plans
from longtake.training.rollback import choose, go_back, newest_kept, skip_batches
from longtake.training.run_lease import RunLease, hold_run
from longtake.training.saved import SavedTrainer, go_on_from
from longtake.training.share import refuse_idle_ranks
from longtake.training.step import TrainingState
from longtake.training.watching import Watcher, watched


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
    rollbacks: int = 0
    """How often it has gone back, in this launch and those before."""
    run: Path | None = None
    """The run directory; with `fresh` it is not the recipe's."""


def train(recipe: Recipe, console: Console, *, fresh: bool = False) -> Outcome:
    """Train a recipe to its end, from its newest checkpoint if there is one.

    Call it in one process, or in each that torchrun started.

    Args:
        recipe: what to train.
        console: where a person looks.
        fresh: begin anew, in a folder beside the run that is there.

    Raises:
        DivergedError: the run diverged, and going back did not help.
        LongtakeError: whatever is wrong with recipe, data or run directory; before the first step
            where it can be known then.
    """
    # Which folder a fresh run gets is agreed upon later than torch's recorders want to know.
    records = None if fresh or not recipe.watch.enabled else heartbeat.heartbeat_dir(recipe.out)
    with (
        watched(recipe) as watcher,
        join(recipe.training.device, recipe.parallel, records) as world,
    ):
        refuse_idle_ranks(recipe.training.batch_size, world.data_size)
        refuse_missing_torchao(recipe.optimizer)
        refuse_missing_packages(recipe.tracking)
        refuse_missing_compiler(recipe, world.device)
        keep_compiled(recipe.training)
        if world.device.type == "cpu":
            keep_freed_memory()
        if fresh:
            recipe = recipe.model_copy(update={"out": from_first(beside(recipe.out), world)})
        run = RunDirectory(recipe.out)
        watcher.join(run, world)
        heartbeat.set_phase("open")
        with (
            tracking_follower(run, recipe.tracking) as follower,
            closing(_open_data(run, recipe, world)) as loader,
        ):
            first_does(lambda: run.claim(recipe), world)
            with hold_run(run, world, console) as lease:
                return _train(recipe, run, loader, watcher, follower, lease, world, console)


def _train(
    recipe: Recipe,
    run: RunDirectory,
    loader: Loader,
    watcher: Watcher,
    follower: Follower,
    lease: RunLease,
    world: World,
    console: Console,
) -> Outcome:
    """Build all parts, in the order in which each can be refused, and train."""
    found = _go_on(run, recipe, loader, world)
    watcher.start()
    refuse_other_plans(loader, world)
    start, total = found.step, recipe.training.steps
    warnings = [*found.warnings, *review(loader.course.plan, recipe.data, total)]
    warnings += filter(None, [missing_key(recipe.tracking)])
    if recipe.data.cache is None:
        loader.begin(loader.end_after(total - start))  # while the model is built and loaded
    precision = _precision(recipe, found.trainer, world)
    heartbeat.set_phase("plan")
    free_bytes = free_memory(recipe, world)
    plan = plan_of(recipe, precision, run, world, free_bytes)
    heartbeat.set_phase("build")
    weights = source_of(recipe, resumed=found.path is not None)
    if recipe.data.cache is None:
        warnings += _look_for_files(loader, world)
        parts = assemble_in_turn(run, recipe, loader, world, weights)
    else:  # only files of which it lacks something are needed, and it looks for those
        parts = assemble_around_cache(run, recipe, loader, watcher, world, console, weights)
    watcher.start()
    step_flops = count_flops(parts, recipe)  # before the weights are spread over ranks
    is_bf16 = "bf16" in (precision, recipe.model.dtype)
    peak_rate = peak_flops(world.device, torch.bfloat16 if is_bf16 else torch.float32)
    if recipe.training.compile:
        compile_blocks(plan.options, parts, recipe)
    else:
        run_blocks_by(plan.options, parts)
    state = build_state(parts, precision, recipe, world)
    guard = Guard(recipe.guard, run, world)
    gauge = Gauge(parts.model, parts.family.blocks(parts.model))
    heartbeat.set_phase("load")
    if found.path is not None:
        go_on_from(found.path, state, guard, gauge, world)
    heartbeat.set_phase("open")
    folder = _begin_ledger(loader, recipe, run, world)
    if world.is_first:
        follower.start()
        keep_plan(plan, recipe, precision, run, world, free_bytes)
        truncated, said = _review_captions(recipe, loader)
        warnings += [*said, *plan.notes]
        backend = attention_backend(world.device)
        warnings += filter(None, [slow_attention(backend, world.device)])
        announce(state, loader, warnings, recipe, run, world, console, attention=backend)
        if truncated is not None:
            run.append_event("captions_truncated", step=start, **truncated)
        announce_plan(plan, state, run, console)
    peak = _peak_check(plan, recipe, world)
    reach = MAX_WINDOWS * recipe.guard.window if recipe.guard.mode == "act" else 0
    begun = time.perf_counter()
    with (
        StopSignal(STOP_SIGNALS, second="interrupt") as stop,
        refuse_out_of_memory(plan, recipe, state, world),
        keep_saver(run, world, recipe.checkpoint, reach=reach, start=start) as saver,
        keep_record(
            start, total, step_flops, peak_rate, lease.launch, run, world, console
        ) as record,
    ):
        watch = Watch(guard, gauge, saver, record, peak, stop, lease)
        ending = _train_through(state, loader, folder, watch, recipe, run, world)
    return _finish(ending, start, time.perf_counter() - begun, state, run, world)


def _finish(
    ending: Ending,
    start: int,
    seconds: float,
    state: TrainingState,
    run: RunDirectory,
    world: World,
) -> Outcome:
    """Write down how a launch ended."""
    if world.is_first:
        kind: EventKind = "interrupted" if ending.signal else "finished"
        run.append_event(kind, step=state.global_step, seconds=round(seconds, 3), by=ending.signal)
    rollbacks = len(from_first(run.rollbacks(), world))
    return Outcome(start, state.global_step, seconds, ending.signal, rollbacks, run.path)


def _train_through(
    state: TrainingState,
    loader: Loader,
    folder: Path,
    watch: Watch,
    recipe: Recipe,
    run: RunDirectory,
    world: World,
) -> Ending:
    """Train to the end, going back as often as the guard demands, and can."""
    streams = stream_names(recipe.data)
    while True:
        with keep_ledger(folder, world.rank, streams, counts=world.speaks_for_data) as ledger:
            ending = train_steps(state, loader, ledger, watch, recipe, world)
        failure = watch.saver.take_failure()  # which waits for the last save
        watch.record.checkpoints(watch.saver.finished())
        watch.record.save_failed(failure)
        verdict, statistics = ending.verdict, ending.statistics
        if statistics is None and failure is not None:
            raise failure
        if statistics is None:
            return ending
        chosen: RollBack | str = ""
        if verdict.kind == "roll_back":
            chosen = choose(
                verdict, watch.guard, statistics, loader, watch.record, recipe, run, world
            )
        if isinstance(chosen, str):
            raise _diverged(verdict, chosen, state, run, world)
        from_step = state.global_step
        heartbeat.set_phase("rollback")
        go_back(chosen, verdict, state, loader, watch.guard, watch.gauge, run, world)
        watch.record.rolled_back(verdict, chosen, from_step)
        folder = _begin_ledger(loader, recipe, run, world)


def _diverged(
    verdict: GuardVerdict, why: str, state: TrainingState, run: RunDirectory, world: World
) -> DivergedError:
    """Record that a run cannot repair itself; the error that ends it."""
    if world.is_first:
        facts = {"reason": verdict.reason, "message": verdict.message, "why": why}
        run.append_event("diverged", step=state.global_step, **facts)
    look = f"{command()} show {shlex.quote(str(run.path))} --around {state.global_step}"
    return DivergedError(" ".join(filter(None, [verdict.message, why, f"Look at it: {look}"])))


def _open_data(run: RunDirectory, recipe: Recipe, world: World) -> Loader:
    """The loader, at the first step; what is wrong with the data is said before there is a run."""
    loader = Loader(
        recipe.data,
        batch_size=recipe.training.batch_size,
        seed=recipe.seed,
        rank=world.data_rank,
        world_size=world.data_size,
        kept=run.catalogs_path,
        hearts=heartbeat.heartbeat_dir(run.path),
    )
    if not run.exists():
        review(loader.course.plan, recipe.data, recipe.training.steps)
    return loader


@dataclass(frozen=True)
class _Found:
    """Where a launch goes on from."""

    path: Path | None
    """A whole checkpoint, or None: from the first step."""
    trainer: SavedTrainer | None
    """What it says of the training."""
    warnings: tuple[str, ...]
    """Of later checkpoints, which are damaged."""

    @property
    def step(self) -> int:
        """Steps that are done."""
        return 0 if self.trainer is None else int(self.trainer["global_step"])


def _none_is_whole(run: RunDirectory, damaged: Sequence[tuple[Path, str]]) -> str:
    path, reason = damaged[0]
    return (
        f"{run.path} has {len(damaged)} checkpoints, and not one of them is whole; of the "
        f"newest, {path.name}, {reason}. Restore one, or start anew beside this run with --fresh."
    )


def _go_on(run: RunDirectory, recipe: Recipe, loader: Loader, world: World) -> _Found:
    """The run's newest whole checkpoint, with the loader brought there."""
    path, damaged = newest_kept(run, world)
    if path is None and damaged:
        raise CheckpointError(_none_is_whole(run, damaged))
    trainer = None if path is None else files.load_trainer(path, SavedTrainer)
    skip_batches(loader, run, world)
    if trainer is not None:
        loader.load_state_dict(trainer["data"])
    step = 0 if trainer is None else trainer["global_step"]
    first_does(lambda: files.refuse_dangling_links(run, step), world)
    if world.is_first:
        for each, reason in damaged:
            run.append_event("checkpoint_damaged", step=step, path=each.name, reason=reason)
    warnings = [
        f"{each} is not whole ({reason}) and was passed over; training goes on from step {step}"
        for each, reason in damaged
    ]
    if trainer is not None:
        warnings += _what_was_lost(run, recipe, loader, step, world)
    return _Found(path, trainer, tuple(warnings))


def _what_was_lost(
    run: RunDirectory, recipe: Recipe, loader: Loader, step: int, world: World
) -> list[str]:
    """Record which files of a resumed run are gone that training can do without (rank 0).

    Raises:
        RunError: on all ranks, if the result would be wrong without them.
    """
    said: list[str] = []

    def look() -> None:
        if (reason := ledger_damage(run.ledger_path)) is not None:
            run.append_event("ledger_damaged", step=step, reason=reason)
            said.append(f"{reason} Training resumes; `longtake data audit` proves nothing")
        said.extend(missing_vocabulary(run, recipe, loader))

    first_does(look, world)
    return said


def _precision(recipe: Recipe, trainer: SavedTrainer | None, world: World) -> Precision:
    """The same on all ranks: bf16 if every one has it. A resumed run keeps its precision."""
    wanted = recipe.training.precision
    if wanted == "auto" and trainer is not None:
        wanted = from_first(trainer["precision"], world)
    everyone = gather_objects(choose_precision(wanted, world.device), world)
    return "fp32" if "fp32" in everyone else "bf16"


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


def _review_captions(recipe: Recipe, loader: Loader) -> tuple[dict[str, int] | None, list[str]]:
    """Facts about truncated captions, None if there are none, and a warning about them."""
    with local_copies():
        facts, warning = review_captions(text_section(recipe), captions_of(loader))
    return (None, []) if warning is None else (facts, [warning])


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
                loader.skipped,
            )
        )

    first_does(begin, world)
    return from_first(made[0] if made else run.ledger_path, world)


def _peak_check(plan: Fit, recipe: Recipe, world: World) -> PeakCheck:
    """Compares one step with its prediction, which knows nothing of encoders at work."""
    encodes = recipe.data.cache is None and recipe.codec.kind != "pixels"
    wanted = plan.activation_bytes if world.is_first and not encodes else None
    return PeakCheck(wanted, plan.bucket, world.device)

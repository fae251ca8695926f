"""One run, from a recipe to its last checkpoint: builds the parts and owns their lifetimes."""

import gc
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from longtake import errors, heartbeat, process
from longtake.checkpoint.files import DamagedCheckpointError
from longtake.checkpoint.store import keep_saver
from longtake.config import Bucket, Recipe
from longtake.data.checks import check_data, large_crops, review
from longtake.data.ledger import Ledger, begin_launch, stream_names
from longtake.data.loader import Loader
from longtake.failures import LOG_VARIABLE
from longtake.guard.history import MAX_WINDOWS
from longtake.lease import Lease
from longtake.models import caption_tokens, lora_files, numerics, pretrained
from longtake.models.components import Components, source_of, text_section
from longtake.models.review import review_model
from longtake.optim.build import refuse_missing_torchao
from longtake.parallel import equality
from longtake.parallel.collectives import first_does, from_first, gather_objects
from longtake.parallel.mesh import World, join
from longtake.parallel.replicas import ReplicaCheck
from longtake.planner.batch_sizes import refuse_idle_ranks, with_batch_sizes
from longtake.planner.devices import peak_flops
from longtake.planner.plan import free_memory, keep_plan, plan_for_training, run_blocks
from longtake.planner.record import MemoryPlan
from longtake.progress import answer_to
from longtake.run_dir import EventKind, Parent, RunDirectory, beside
from longtake.tracking import tracker, wandb
from longtake.tracking.follower import Follower, tracking_follower
from longtake.training import (
    build,
    guard_runner,
    latent_cache,
    record,
    run_lease,
    runtime,
    samples,
    startup,
    statistics,
)
from longtake.training import parent as parents
from longtake.training.loop import LoopExit, train_steps
from longtake.training.session import Session, TrainingState
from longtake.training.state import (
    Monitors,
    ResumePoint,
    find_resume_point,
    restore,
    roll_back,
    sample_presets,
)
from longtake.training.threads import CpuThreads


@dataclass(frozen=True)
class TrainOutcome:
    """How a launch ended."""

    start_step: int  # updates that were done before this launch
    end_step: int  # updates that are done now
    training_seconds: float  # wall-clock time of this launch's steps, saving included
    interrupted_by: str | None  # the signal that ended it before the last step, if one did
    rollbacks: int = 0  # of this launch and those before
    run: Path | None = None  # the run directory; with `fresh` it is not the recipe's


class _Built(NamedTuple):
    """What is built before the first step."""

    plan: MemoryPlan
    state: TrainingState
    guard: guard_runner.GuardRunner
    norms: statistics.NormStats
    threads: CpuThreads
    replicas: ReplicaCheck
    sample_flops: dict[Bucket, int]
    sampler: samples.TrainingSampler | None
    ledger: Path


def train(
    recipe: Recipe,
    console: Console,
    *,
    fresh: bool = False,
    parent: Parent | None = None,
    evaluate: samples.EvaluateSamples | None = None,
) -> TrainOutcome:
    """Train a recipe to its end, from its newest checkpoint if there is one.

    Call it in one process, or in each that torchrun started. `fresh` starts a new run, in a folder
    beside the existing one. A new run begins with the weights of `parent`, if there is one (see
    `longtake.checkpoint.files.find_parent`). `evaluate` samples and measures presets if
    `sampling.every` is set, such as `longtake.evaluation.evaluator.SampleEvaluator`.

    Raises:
        DivergedError: the run diverged, and rolling back did not help.
        LongtakeError: an error in recipe, data or run directory; before the first step where it can
            be known then.
    """
    recipe = with_batch_sizes(recipe)
    # Ranks agree on the folder of a fresh run too late for torch's flight recorder.
    records = None if fresh or not recipe.watch.enabled else heartbeat.heartbeat_dir(recipe.out)
    with (
        runtime.watcher_process(recipe) as watcher,
        join(recipe.training.device, recipe.parallel, records) as world,
    ):
        differences = equality.compare_with_first(equality.software(recipe, world.device), world)
        refuse_idle_ranks(recipe, world.data_size)
        refuse_missing_torchao(recipe.optimizer)
        tracker.refuse_missing_packages(recipe.tracking)
        build.refuse_missing_compiler(recipe, world.device)
        if build.compiles_blocks(recipe, world.device):
            runtime.keep_compiled_code()
        if world.device.type == "cpu":
            process.keep_freed_memory()
        if fresh:
            recipe = recipe.model_copy(update={"out": from_first(beside(recipe.out), world)})
        run = RunDirectory(recipe.out)
        watcher.join(run, world)
        heartbeat.set_phase("open")
        with tracking_follower(run, recipe.tracking) as follower, ExitStack() as opened:
            loader = opened.enter_context(closing(_open_data(run, recipe, world)))
            first_does(lambda: run.claim(recipe), world)
            first_does(lambda: parents.refuse_another_parent(run, parent), world)
            with run_lease.hold_run(run, world, console) as lease:
                damaged: dict[Path, str] = {}
                while True:
                    point = find_resume_point(run, recipe, loader, world, damaged)
                    watcher.start()
                    precision = _choose_precision(recipe, point, world)
                    begun_from = from_first(parents.parent_of(run, parent), world)
                    session = Session(
                        recipe, run, world, console, precision, begun_from, tuple(differences)
                    )
                    try:
                        built = _build(session, point, loader, watcher, follower, evaluate)
                        break
                    except DamagedCheckpointError as error:
                        if error.path != point.path:  # it is the parent's
                            raise
                        damaged[error.path] = error.reason
                    gc.collect()  # the model, before there is another
                    opened.close()
                    loader = opened.enter_context(closing(_open_data(run, recipe, world)))
                return _train(session, built, loader, lease)


def _open_data(run: RunDirectory, recipe: Recipe, world: World) -> Loader:
    """The loader, at the first step; errors in the data are raised before the run exists."""
    loader = Loader(
        recipe.data,
        batch_size=recipe.training.global_batch_size,
        seed=recipe.seed,
        rank=world.data_rank,
        world_size=world.data_size,
        kept=run.catalogs_path,
        heartbeats=heartbeat.heartbeat_dir(run.path),
    )
    samples.refuse_wrong_samples(recipe, run)
    if not run.exists():
        review(loader.plan_history.plan, recipe.data, recipe.training.steps)
    return loader


def _choose_precision(recipe: Recipe, point: ResumePoint, world: World) -> numerics.Precision:
    """The same on all ranks: bf16 if every one has it. A resumed run keeps its precision."""
    wanted = recipe.training.precision
    if wanted == "auto" and point.trainer is not None:
        wanted = from_first(point.trainer["precision"], world)
    everyone = gather_objects(numerics.choose_precision(wanted, world.device), world)
    return "fp32" if "fp32" in everyone else "bf16"


def _build(
    session: Session,
    point: ResumePoint,
    loader: Loader,
    watcher: runtime.NodeWatcher,
    follower: Follower,
    evaluate: samples.EvaluateSamples | None,
) -> _Built:
    """Plan, build and load all that is trained, in the order in which each can be refused."""
    recipe, run, world, precision = session.recipe, session.run, session.world, session.precision
    _refuse_other_plans(loader, world)
    threads = CpuThreads(world, None if point.trainer is None else point.trainer.get("threads"))
    plan_of_data = loader.plan_history.plan
    steps, warnings = recipe.training.steps, list(point.warnings)
    trained = loader.plan_history.stage_before_change()

    def check() -> None:
        found = check_data(plan_of_data, loader.catalogs, recipe.data, steps, trained)
        warnings.extend(found)

    first_does(check, world)
    compiler = build.uncompiled(recipe, world.device)
    warnings += filter(None, [wandb.missing_key(recipe.tracking), compiler, threads.difference()])
    warnings += map(str, session.differences)
    if recipe.data.cache is None:
        loader.begin(loader.end_after(steps - point.step))  # while the model is built and loaded
    heartbeat.set_phase("plan")
    begins = session.parent is not None and point.path is None
    if point.path is None:
        first_does(lambda: parents.refuse_wrong_start(recipe, session.parent), world)
    free_bytes = free_memory(recipe, world)
    plan = plan_for_training(recipe, precision, run, world, free_bytes)
    heartbeat.set_phase("build")
    warnings += large_crops(loader.plan_history.plan)
    resumed = begins or point.path is not None
    source = source_of(recipe, resumed=resumed, is_sharded=world.is_sharded)
    parts = build.build_components(session, loader, watcher, source, plan.options)
    watcher.start()
    warnings += review_model(parts, recipe, has_parent=session.parent is not None)
    if point.path is None and (file := recipe.trainable.init_from) is not None:
        expert = recipe.model.expert
        stored = lora_files.read_lora(file, parts.model, parts.family, expert)
        lora_files.load_lora(stored, parts.model)
    sampler = samples.open_sampler(session, parts, loader, evaluate)
    if sampler is not None and sampler.failure is not None:
        warnings.append(f"No samples are made in this launch. {sampler.failure}")
    sample_flops = build.count_flops(parts, recipe)  # before the weights are sharded
    threads.set_work(sample_flops, recipe.training.global_batch_size)
    if build.compiles_blocks(recipe, world.device):
        build.compile_blocks(plan.options, parts, recipe)
    else:
        run_blocks(plan.options, parts)
    state = build.build_state(session, parts, plan.options, encodes_ahead=plan.encodes_ahead)
    guard = guard_runner.GuardRunner(session)
    norms = statistics.NormStats(parts.model, parts.family.blocks(parts.model), session.world)
    heartbeat.set_phase("load")
    if point.path is not None:
        restore(session, point.path, state, guard, norms)
    elif session.parent is not None:
        warnings += parents.begin_from(session, session.parent, state)
    replicas = ReplicaCheck(world, recipe.guard.compare_replicas_every)
    replicas.refuse_unlike(_tensors(parts), state.global_step)
    heartbeat.set_phase("open")
    ledger = _begin_ledger(session, loader)
    if world.is_first:
        follower.start()
        keep_plan(plan, recipe, precision, run, world, free_bytes)
        with pretrained.local_copies():
            encoder = state.components.family.frozen.text
            facts, truncated = caption_tokens.review_captions(
                text_section(recipe), encoder, latent_cache.captions_of(loader)
            )
        notes = [*filter(None, [truncated]), *plan.notes]
        startup.announce(session, state, loader, [*warnings, *notes])
        if truncated is not None and facts is not None:
            run.append_event("captions_truncated", step=state.global_step, **facts)
        startup.announce_plan(session, plan, state.global_step)
    return _Built(plan, state, guard, norms, threads, replicas, sample_flops, sampler, ledger)


def _tensors(parts: Components) -> dict[str, torch.Tensor]:
    """Trained and frozen weights and buffers of all parts that are there, by name."""
    modules = [parts.model, *parts.codec.modules(), *parts.text.modules()]
    return {
        f"{type(module).__name__}: {name}": each
        for module in modules
        for name, each in (*module.named_parameters(), *module.named_buffers())
        if not each.is_meta
    }


def _refuse_other_plans(loader: Loader, world: World) -> None:
    """Check that all ranks would train the same; each has read the catalogs for itself."""
    mine = (socket.gethostname(), loader.step, loader.plan_history.plan.fingerprint)
    everyone = gather_objects(mine, world)
    other = [rank for rank, facts in enumerate(everyone) if facts[1:] != everyone[0][1:]]
    if other:
        hosts = sorted({everyone[rank][0] for rank in other})
        raise errors.DataError(
            f"{len(other)} of {world.size} ranks (on {', '.join(hosts)}) would train other clips "
            "than rank 0: they have read another catalog, or another checkpoint. Give all nodes "
            "the same files, and start again."
        )


def _begin_ledger(session: Session, loader: Loader) -> Path:
    """The folder of this launch's ledger, with what it will be audited against.

    Only now does the run adopt changed keys of the recipe: everything that could refuse them has
    looked at them.
    """
    run, world = session.run, session.world
    made: list[Path] = []

    def begin() -> None:
        run.adopt(session.recipe)
        loader.keep_catalogs()
        names, history = stream_names(loader.data), loader.plan_history.history
        made.append(
            begin_launch(run.ledger_path, loader.step, world.size, names, history, loader.skipped)
        )

    first_does(begin, world)
    loader.read_known_inputs()
    return from_first(made[0] if made else run.ledger_path, world)


def _train(session: Session, built: _Built, loader: Loader, lease: Lease | None) -> TrainOutcome:
    run, world, state = session.run, session.world, built.state
    start, begun = state.global_step, time.perf_counter()
    with _monitors(session, built, lease) as monitors:
        ended = _train_with_rollbacks(session, state, loader, monitors, built.ledger)
    seconds = time.perf_counter() - begun
    if world.is_first:
        kind: EventKind = "interrupted" if ended.signal else "finished"
        run.append_event(kind, step=state.global_step, seconds=round(seconds, 3), by=ended.signal)
    rollbacks = len(from_first(run.rollbacks(), world))
    return TrainOutcome(start, state.global_step, seconds, ended.signal, rollbacks, run.path)


@contextmanager
def _monitors(session: Session, built: _Built, lease: Lease | None) -> Iterator[Monitors]:
    """What accompanies the steps; a save that is under way is waited for at the end."""
    recipe, run, world = session.recipe, session.run, session.world
    plan, start = built.plan, built.state.global_step
    # The prediction does not include encoders at work.
    encodes = recipe.data.cache is None and recipe.codec.kind != "pixels"
    is_predicted = world.is_first and not encodes and plan.activation_bytes is not None
    predicted = (plan.activation_bytes or 0, plan.bucket) if is_predicted else None
    reach = MAX_WINDOWS * recipe.guard.window if recipe.guard.mode == "act" else 0
    is_bf16 = "bf16" in (session.precision, recipe.model.dtype)
    peak_rate = peak_flops(world.device, torch.bfloat16 if is_bf16 else torch.float32)
    flops = built.sample_flops

    def answer(received: signal.Signals) -> None:
        ranks = heartbeat.read_heartbeats(heartbeat.heartbeat_dir(run.path))
        if world.is_first and LOG_VARIABLE not in os.environ:  # else the launcher has said it
            living = (each for each in ranks if each.role == "rank" and each.is_alive)
            session.console.print(answer_to(received, living), highlight=False, markup=False)

    with (
        process.StopSignal(process.STOP_SIGNALS, second="interrupt", answer=answer) as stop,
        runtime.refuse_out_of_memory(plan, recipe, built.state, world),
        keep_saver(run, world, recipe.checkpoint, reach=reach, start=start) as saver,
        record.keep_recorder(session, lease, start, flops, peak_rate, predicted) as recorder,
    ):
        yield Monitors(
            *(built.guard, built.norms, built.replicas, saver, recorder, stop),
            *(built.threads, built.sampler),
        )


def _train_with_rollbacks(
    session: Session, state: TrainingState, loader: Loader, monitors: Monitors, ledger_path: Path
) -> LoopExit:
    """Train to the end, rolling back as often as the guard demands and allows."""
    names, saver, recorder = stream_names(session.recipe.data), monitors.saver, monitors.recorder
    world, step = session.world, state.global_step
    if samples.samples_at(session.recipe.sampling, step, is_last=False):
        sample_presets(state, monitors)  # what a launch that was killed has not sampled
    while True:
        with Ledger(ledger_path, world.rank, names, counts=world.speaks_for_data) as ledger:
            ended = train_steps(session, state, loader, ledger, monitors)
        failure = saver.take_failure()  # waits for the last save
        recorder.saved(saver.finished())
        recorder.save_failed(failure)
        if ended.statistics is None:
            if failure is not None:
                raise failure
            return ended
        roll_back(session, ended.verdict, ended.statistics, state, loader, monitors)
        ledger_path = _begin_ledger(session, loader)

"""Trains one run from a recipe to its last checkpoint: builds all parts and closes them again."""

import gc
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from longtake import errors, heartbeat, process
from longtake.checkpoint.files import DamagedCheckpointError
from longtake.checkpoint.store import keep_saver
from longtake.config import Recipe
from longtake.data.checks import check_data, large_crops, review, silent_catalogs
from longtake.data.ledger import Ledger, begin_launch, stream_names
from longtake.data.loader import Loader
from longtake.failures import LOG_VARIABLE
from longtake.guard.history import MAX_WINDOWS
from longtake.lease import Lease
from longtake.models import caption_tokens, lora_files, numerics, pretrained
from longtake.models.codec import kept_tile
from longtake.models.components import Components, audio_wanted, source_of, text_section
from longtake.models.frozen_adapter import attach_adapters
from longtake.models.objective import build_objective
from longtake.models.review import review_model
from longtake.optim.build import refuse_missing_torchao
from longtake.parallel import equality
from longtake.parallel.collectives import first_does, from_first, gather_objects
from longtake.parallel.mesh import World, join
from longtake.parallel.replicas import ReplicaCheck
from longtake.planner.batch_sizes import bucket_tokens, refuse_idle_ranks, with_batch_sizes
from longtake.planner.devices import peak_flops
from longtake.planner.plan import free_memory, keep_plan, plan_for_training, run_blocks
from longtake.planner.record import MemoryPlan
from longtake.progress import answer_to
from longtake.run_dir import EventKind, Parent, RunDirectory, beside
from longtake.tracking import tracker, wandb
from longtake.tracking.follower import Follower, tracking_follower
from longtake.training import build, latent_cache, run_lease, runtime, samples, startup, statistics
from longtake.training import compiled as compiling
from longtake.training import parent as parents
from longtake.training.exports import export_lora, path_of, refuse_wrong_export
from longtake.training.guard_runner import GuardRunner
from longtake.training.loop import LoopExit, train_steps
from longtake.training.parts import BuiltRun, Training
from longtake.training.record import Recorder
from longtake.training.resume import ResumePoint, find_resume_point, restore, roll_back
from longtake.training.saving import is_sampled_after, sample_presets
from longtake.training.session import Session, TrainingState
from longtake.training.threads import CpuThreads


@dataclass(frozen=True)
class TrainOutcome:
    """Result of a launch of `train`: steps, seconds, and the signal that ended it."""

    start_step: int  # steps done before this launch
    end_step: int  # steps done at its end
    training_seconds: float  # wall-clock time of this launch's steps, with saves
    interrupted_by: str | None  # signal that ended it before the last step; None: none did
    rollbacks: int = 0  # number in all launches of the run
    run: Path | None = None  # run directory, which `fresh` may choose beside the recipe's


@dataclass(frozen=True)
class _Launch:
    """Recipe, ranks and other facts of a launch that do not depend on the resumed checkpoint."""

    recipe: Recipe
    run: RunDirectory
    world: World
    console: Console
    parent: Parent | None
    evaluate: samples.EvaluateSamples | None
    differences: tuple[equality.RankDifference, ...]
    watcher: runtime.NodeWatcher
    follower: Follower


def train(
    recipe: Recipe,
    console: Console,
    *,
    fresh: bool = False,
    parent: Parent | None = None,
    evaluate: samples.EvaluateSamples | None = None,
) -> TrainOutcome:
    """Train a recipe to its end, from its newest checkpoint if there is one.

    Call it in one process, or in each that torchrun started.

    Args:
        recipe: recipe to train.
        console: console on which rank 0 shows progress.
        fresh: start a new run, in a folder beside the existing one.
        parent: checkpoint whose weights a new run begins with, from
            `longtake.checkpoint.files.find_parent`.
        evaluate: samples and measures presets if the recipe samples in training, such as
            `longtake.evaluation.evaluator.SampleEvaluator`.

    Raises:
        DivergedError: the run diverged, and rolling back did not help.
        LongtakeError: an error in recipe, data or run directory, before the first step where it can
            be found then.
    """
    recipe = with_batch_sizes(recipe)
    # torch's flight recorder needs its folder before the ranks have agreed on that of a fresh run.
    records = None if fresh or not recipe.watch.enabled else heartbeat.heartbeat_dir(recipe.out)
    with (
        runtime.watcher_process(recipe) as watcher,
        join(recipe.training.device, recipe.parallel, records) as world,
    ):
        differences = _refuse_launch(recipe, world)
        if compiling.compiles_blocks(recipe, world.device):
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
                launch = _Launch(
                    recipe, run, world, console, parent, evaluate, differences, watcher, follower
                )
                return _train(_build_newest(launch, loader, opened), lease)


def _refuse_launch(recipe: Recipe, world: World) -> tuple[equality.RankDifference, ...]:
    """Refuse a recipe that these ranks cannot train.

    Returns differences between the ranks' machines that may change results.
    """
    differences = equality.compare_with_first(equality.software(recipe, world.device), world)
    refuse_idle_ranks(recipe, world.data_size)
    refuse_missing_torchao(recipe.optimizer)
    tracker.refuse_missing_packages(recipe.tracking)
    compiling.refuse_missing_compiler(recipe, world.device)
    return tuple(differences)


def _open_data(run: RunDirectory, recipe: Recipe, world: World) -> Loader:
    """Open a data loader at the first step; raises errors in the data before the run exists."""
    loader = Loader(
        recipe.data,
        batch_size=recipe.training.global_batch_size,
        seed=recipe.seed,
        rank=world.data_rank,
        world_size=world.data_size,
        kept=run.catalogs_path,
        heartbeats=heartbeat.heartbeat_dir(run.path),
        audio=audio_wanted(recipe),
    )
    samples.refuse_wrong_samples(recipe, run)
    # An existing run was reviewed when it began.
    if not run.exists():
        plan = loader.plan_history.plan
        review(plan, recipe.data, recipe.with_steps(plan.end_step).training.steps)
    return loader


def _build_newest(launch: _Launch, loader: Loader, opened: ExitStack) -> BuiltRun:
    """Build the run from its newest checkpoint, or from an older one if its bytes are damaged.

    Args:
        launch: this rank's launch.
        loader: a loader at the first step; each further attempt opens a new one.
        opened: stack that closes the loaders.
    """
    run, world = launch.run, launch.world
    damaged: dict[Path, str] = {}
    while True:
        point = find_resume_point(run, launch.recipe, loader, world, damaged)
        # Of the plan that the checkpoint goes on with: changed data make another number of steps.
        recipe = launch.recipe.with_steps(loader.plan_history.end_step)
        launch.watcher.start()
        precision = recipe.training.precision
        if precision == "auto" and point.trainer is not None:  # a resumed run keeps its own
            precision = from_first(point.trainer["precision"], world)
        # bf16 if each rank supports it.
        everyone = gather_objects(numerics.choose_precision(precision, world.device), world)
        precision = "fp32" if "fp32" in everyone else "bf16"
        parent = from_first(parents.parent_of(run, launch.parent), world)
        session = Session(recipe, run, world, launch.console, precision, parent, launch.differences)
        try:
            return _build(launch, session, point, loader)
        except DamagedCheckpointError as error:
            if error.path != point.path:  # the parent run's checkpoint
                raise
            damaged[error.path] = error.reason
        gc.collect()  # frees the model before another one is built
        opened.close()
        loader = opened.enter_context(closing(_open_data(run, recipe, world)))


def _build(launch: _Launch, session: Session, point: ResumePoint, loader: Loader) -> BuiltRun:
    """Plan, build and load all objects of a training; checks that fail soonest come first."""
    recipe, world = session.recipe, session.world
    _refuse_other_plans(loader, world)
    # Before the plan, whose memory on a CPU depends on the number of threads.
    threads = CpuThreads(world, None if point.trainer is None else point.trainer.get("threads"))
    warnings = [*point.warnings, *_check(session, loader, threads)]
    if recipe.data.cache is None:  # decodes while the model is built and loaded
        loader.begin(loader.end_after(recipe.training.steps - point.step))
    heartbeat.set_phase("plan")
    if point.path is None:
        first_does(lambda: parents.refuse_wrong_start(recipe, session.parent), world)
    free_bytes = free_memory(recipe, world)
    plan = plan_for_training(recipe, session.precision, session.run, world, free_bytes)
    heartbeat.set_phase("build")
    warnings += large_crops(loader.plan_history.plan)
    if recipe.model.uses_audio and world.is_first:
        warnings += silent_catalogs(loader.plan_history.plan)
    parts = _build_parts(launch, session, point, loader, plan, warnings)
    # A cache that others began, or a run, goes on with its own tiles.
    plan = replace(plan, encode_tile=kept_tile(recipe.codec, session.run.components_path))
    sampler = samples.open_sampler(session, parts, loader, launch.evaluate)
    if sampler is not None and sampler.failure is not None:
        warnings.append(f"No samples are made in this launch. {sampler.failure}")
    objective = build_objective(recipe)
    sample_flops = build.count_flops(parts, recipe, objective)  # before the weights are sharded
    threads.set_work(sample_flops, recipe.training.global_batch_size)
    # Before sharding: FSDP2's gathering of weights cannot be compiled.
    if compiling.compiles_blocks(recipe, world.device):
        compiling.compile_blocks(plan.options, parts, recipe)
    else:
        run_blocks(plan.options, parts)
    state = build.build_state(
        session, parts, plan.options, objective=objective, encodes_ahead=plan.encodes_ahead
    )
    guard = GuardRunner(session)
    norms = statistics.NormStats(parts.model, parts.family.blocks(parts.model), world)
    heartbeat.set_phase("load")
    if point.path is not None:
        restore(session, point.path, state, guard, norms)
    elif session.parent is not None:
        warnings += parents.begin_from(session, session.parent, state)
    # Replicas must be equal before the first step, else the guard would blame its update.
    replicas = ReplicaCheck(world, recipe.guard.compare_replicas_every)
    replicas.refuse_unlike(_tensors(parts), state.global_step)
    heartbeat.set_phase("open")
    ledger = _begin_ledger(session, loader)
    if world.is_first:
        launch.follower.start()
        keep_plan(plan, recipe, session.precision, session.run, world, free_bytes)
        _announce(session, state, loader, plan, warnings)
    return BuiltRun(
        session, state, loader, guard, norms, replicas, threads, plan, sample_flops, ledger, sampler
    )


def _check(session: Session, loader: Loader, threads: CpuThreads) -> list[str]:
    """Check a launch's data; return warnings about data, packages, CPU threads and other ranks."""
    recipe, world, warnings = session.recipe, session.world, list[str]()
    history = loader.plan_history

    def check() -> None:
        trained = history.stage_before_change()
        steps = recipe.training.steps
        warnings.extend(check_data(history.plan, loader.catalogs, recipe.data, steps, trained))

    first_does(check, world)
    compiler = compiling.uncompiled(recipe, world.device)
    others = [wandb.missing_key(recipe.tracking), compiler, threads.difference()]
    return [*warnings, *filter(None, others), *map(str, session.differences)]


def _build_parts(
    launch: _Launch,
    session: Session,
    point: ResumePoint,
    loader: Loader,
    plan: MemoryPlan,
    warnings: list[str],
) -> Components:
    """Build model, codec and text encoder; load the LoRA file with which a new run begins.

    Warnings about the model are appended to `warnings`.
    """
    recipe, resumed = session.recipe, point.path is not None or session.parent is not None
    source = source_of(recipe, resumed=resumed, is_sharded=session.world.is_sharded)
    parts = build.build_components(session, loader, launch.watcher, source, plan)
    launch.watcher.start()
    # On the CPU, from which the model moves to its device.
    attach_adapters(recipe, parts.model, parts.family, torch.device("cpu"))
    refuse_wrong_export(parts, recipe)
    warnings += review_model(parts, recipe, has_parent=session.parent is not None)
    if point.path is None and (file := recipe.trainable.init_from) is not None:
        stored = lora_files.read_lora(file, parts.model, parts.family, recipe.model.expert)
        lora_files.load_lora(stored, parts.model)
    return parts


def _announce(
    session: Session,
    state: TrainingState,
    loader: Loader,
    plan: MemoryPlan,
    warnings: Sequence[str],
) -> None:
    """Show and record a launch's settings, warnings and memory plan, and truncated captions."""
    with pretrained.local_copies():
        facts, truncated = caption_tokens.review_captions(
            text_section(session.recipe),
            state.components.family.frozen.text,
            latent_cache.captions_of(loader),
        )
    notes = [*filter(None, [truncated]), *plan.notes]
    startup.announce(session, state, loader, [*warnings, *notes])
    if truncated is not None and facts is not None:
        session.run.append_event("captions_truncated", step=state.global_step, **facts)
    startup.announce_plan(session, plan, state.global_step)


def _tensors(parts: Components) -> dict[str, torch.Tensor]:
    """Collect weights and buffers of model, codec and text encoder that have memory, by name."""
    modules = [parts.model, *parts.codec.modules(), *parts.text.modules()]
    return {
        f"{type(module).__name__}: {name}": each
        for module in modules
        for name, each in (*module.named_parameters(), *module.named_buffers())
        # With a cache, codec and text encoder are on the meta device.
        if not each.is_meta
    }


def _refuse_other_plans(loader: Loader, world: World) -> None:
    """Refuse to train if ranks have read different data, as each reads the catalogs for itself.

    Raises:
        DataError: a rank would train other clips than rank 0.
    """
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
    """Create the folder of this launch's ledger of trained samples, with the data plans.

    `longtake data audit` compares the two. The run adopts changed keys of the recipe only here,
    after every check that could refuse them.
    """
    run, world = session.run, session.world
    made: list[Path] = []

    def begin() -> None:
        run.adopt(session.recipe)
        loader.keep_catalogs()
        names, history = stream_names(loader.data), loader.plan_history.history
        made.append(
            begin_launch(
                run.ledger_path, loader.step, world.size, names, history, loader.skipped.spans
            )
        )

    first_does(begin, world)
    # After rank 0 has recorded the digests of input files, which every rank compares.
    loader.keep_catalogs(writes=False)
    return from_first(made[0] if made else run.ledger_path, world)


def _train(built: BuiltRun, lease: Lease | None) -> TrainOutcome:
    """Train a built run to its end, and record how it ended."""
    run, world, state = built.session.run, built.session.world, built.state
    start, begun = state.global_step, time.perf_counter()
    with _opened(built, lease) as training:
        ended = _train_with_rollbacks(training)
    seconds = time.perf_counter() - begun
    if world.is_first:
        kind: EventKind = "interrupted" if ended.signal else "finished"
        run.append_event(kind, step=state.global_step, seconds=round(seconds, 3), by=ended.signal)
    # From rank 0: the view that other nodes have of a shared disk may be older.
    rollbacks = len(from_first(run.rollbacks(), world))
    return TrainOutcome(start, state.global_step, seconds, ended.signal, rollbacks, run.path)


@contextmanager
def _opened(built: BuiltRun, lease: Lease | None) -> Iterator[Training]:
    """Open saver, recorder and stop signal of a training, and close them after its steps.

    Closing waits for a pending save.
    """
    session = built.session
    recipe, run, world = session.recipe, session.run, session.world
    plan, start = built.plan, built.state.global_step
    # The plan does not include the memory of encoders at work, so with them nothing is compared.
    encodes = recipe.data.cache is None and recipe.codec.kind != "pixels"
    is_predicted = world.is_first and not encodes and plan.activation_bytes is not None
    predicted = (plan.activation_bytes or 0, plan.bucket) if is_predicted else None
    # A divergence may have begun as early as the guard's history does.
    reach = MAX_WINDOWS * recipe.guard.window if recipe.guard.mode == "act" else 0
    is_bf16 = "bf16" in (session.precision, recipe.model.dtype)
    peak_rate = peak_flops(world.device, torch.bfloat16 if is_bf16 else torch.float32)
    flops, tokens = built.sample_flops, bucket_tokens(recipe, built.state.components)

    def answer(received: signal.Signals) -> None:
        ranks = heartbeat.read_heartbeats(heartbeat.heartbeat_dir(run.path))
        if world.is_first and LOG_VARIABLE not in os.environ:  # else the launcher printed it
            living = (each for each in ranks if each.role == "rank" and each.is_alive)
            session.console.print(answer_to(received, living), highlight=False, markup=False)

    with (
        # The saver is closed before the signal handler: a second Ctrl-C still ends a long last
        # save.
        process.StopSignal(process.STOP_SIGNALS, second="interrupt", answer=answer) as stop,
        runtime.refuse_out_of_memory(plan, recipe, built.state, world),
        compiling.refuse_failed(),
        keep_saver(run, world, recipe.checkpoint, reach=reach, start=start) as saver,
        Recorder(session, lease, start, flops, peak_rate, predicted, tokens) as recorder,
    ):
        yield Training(**vars(built), saver=saver, recorder=recorder, stop=stop)


def _train_with_rollbacks(training: Training) -> LoopExit:
    """Train to the end, and roll back to a checkpoint whenever the guard demands and permits it."""
    session, recorder, ledger_path = training.session, training.recorder, training.ledger
    names, world = stream_names(session.recipe.data), session.world
    # A killed launch may have left the export of its last checkpoint out.
    path = path_of(session.run, session.recipe, training.state.global_step)
    if training.state.global_step and from_first(not path.exists(), world):
        export_lora(training)
    last_batch = training.loader.skipped.last_kept(training.loader.step - 1)
    if is_sampled_after(training, last_batch, is_last=False):
        sample_presets(training)  # a killed launch may have left presets unsampled
    while True:
        with Ledger(ledger_path, world.rank, names, counts=world.speaks_for_data) as ledger:
            ended = train_steps(training, ledger)
        failure = training.saver.take_failure()  # waits for the last save
        recorder.saved(training.saver.finished())
        recorder.save_failed(failure)
        # No verdict ended the loop: it is done, or was asked to stop.
        if ended.decision is None:
            if failure is not None:
                raise failure
            return ended
        roll_back(training, ended.decision)
        # A ledger of its own, since batches after the checkpoint are trained again.
        ledger_path = _begin_ledger(session, training.loader)

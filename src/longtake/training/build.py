"""Builds model, frozen encoders and optimizers on every rank, and creates the run directory."""

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from torch import nn

from longtake import errors, heartbeat
from longtake.config import Bucket, Recipe
from longtake.data.cache import make_folder
from longtake.data.loader import Loader
from longtake.formatting import escape
from longtake.models import pretrained
from longtake.models.codec import keep_tile, kept_tile
from longtake.models.components import (
    Components,
    Kinds,
    Source,
    assemble,
    fetch,
    keep_kinds,
    outline,
)
from longtake.models.objective import Objective, build_objective, training_flops
from longtake.models.streamed import StreamedBlocks
from longtake.optim.build import build_optimizers
from longtake.optim.update import Averages
from longtake.parallel import collectives, context_parallel, equality, fsdp, mesh
from longtake.planner.encoding import describe_tile
from longtake.planner.record import KEEP, MemoryPlan, Options, is_streamed, quantization_of
from longtake.run_dir import RunDirectory
from longtake.training import latent_cache, runtime
from longtake.training.inputs import InputQueue
from longtake.training.session import Session, TrainingState


def build_components(
    session: Session,
    loader: Loader,
    watcher: runtime.NodeWatcher,
    source: Source,
    plan: MemoryPlan,
) -> Components:
    """Build model, codec and text encoder, and create the run directory; all ranks must call it.

    Rank 0 also creates the parts that are not pretrained. With a latent cache, the cache is filled
    first, and codec and text encoder are then on the meta device. The memory plan decides the
    quantisation of each block where model.quantize = "auto", and the tiles in which clips are
    encoded where codec.encode_tile = "auto".

    Raises:
        RunError: another node has other files of the model than rank 0's.
    """
    quantized = quantized_by(plan.options)
    if session.recipe.data.cache is not None:
        return _build_with_cache(session, loader, watcher, source, plan)
    recipe, run, world = session.recipe, session.run, session.world
    captions = latent_cache.captions_of(loader)
    made: list[Components] = []

    def open_run() -> None:
        # Rank 0 alone, so that ranks with a common disk do not download the same files at once.
        fetch(recipe)
        if run.exists():
            return
        with pretrained.local_copies():
            beside = _parents_parts(session)
            new = recipe.with_encode_tile(plan.encode_tile)  # not the one that the parent kept
            parts = assemble(new, captions, beside, weights=source, quantized=quantized)
        # Before the run directory, so that a run which exists has all of its parts.
        parts.codec.save(run.components_path)
        parts.text.save(run.components_path)
        _create(session, plan)
        made.append(parts)

    collectives.first_does(open_run, world)
    _fetch_on_nodes(recipe, world)
    with pretrained.local_copies():
        parts = made[0] if made else assemble(recipe, captions, run.components_path, weights=source)
    parts.codec.to(world.device)
    parts.text.to(world.device)
    return parts


def quantized_by(options: Options) -> Kinds:
    kinds = {name: quantization_of(each.weights) for name, each in options.items()}
    return {name: kind for name, kind in kinds.items() if kind is not None}


def _create(session: Session, plan: MemoryPlan) -> None:
    if session.recipe.model.quantize == "auto":
        keep_kinds(quantized_by(plan.options), session.run.components_path)
    # Of a recipe that names them, too: with "auto" on resume the run goes on with these.
    keep_tile(plan.encode_tile, session.run.components_path)
    session.run.create(session.recipe, session.parent)


def _build_with_cache(
    session: Session,
    loader: Loader,
    watcher: runtime.NodeWatcher,
    source: Source,
    plan: MemoryPlan,
) -> Components:
    recipe, run, world, console = session.recipe, session.run, session.world, session.console
    captions = latent_cache.captions_of(loader)

    def open_run() -> None:
        if not run.exists():
            outline(recipe)  # errors before the run exists
            latent_cache.make_parts(recipe, captions, run.components_path, _parents_parts(session))
            assert recipe.data.cache is not None
            make_folder(recipe.data.cache)
            tile = latent_cache.settle_tile(recipe, run.components_path, lambda: plan.encode_tile)
            _create(session, replace(plan, encode_tile=tile))

    collectives.first_does(open_run, world)
    # The run exists now, and filling the cache may take hours.
    watcher.start()
    heartbeat.set_phase("cache")
    cache, report = latent_cache.fill_cache(recipe, loader, run.components_path, world, console)
    loader.read_from(cache, report.failures, report.incidents)
    if world.is_first:
        how = describe_tile(kept_tile(recipe.codec, run.components_path))
        encoded = f", clips {how}" if how else ""
        console.print(escape(f"  cache {cache.folder}: {report}{encoded}"), highlight=False)
    heartbeat.set_phase("build")
    samples = recipe.sampling.in_training
    collectives.first_does(lambda: fetch(recipe, frozen_parts=samples), world)
    _fetch_on_nodes(recipe, world, frozen_parts=samples)
    made = run.components_path
    with pretrained.local_copies():
        return assemble(recipe, captions, made, frozen_parts=False, weights=source)


def _parents_parts(session: Session) -> Path | None:
    """Return the folder of codec and text encoders that the parent run made; None without a parent.

    The parent is the run of `train --from`, whose weights were trained with these encoders.
    """
    if session.parent is None:
        return None
    return RunDirectory(Path(session.parent["path"])).components_path


def _fetch_on_nodes(recipe: Recipe, world: mesh.World, *, frozen_parts: bool = True) -> None:
    """Download the model's files on each node, and compare what each rank reads.

    One rank of each node downloads what rank 0 has downloaded already, or finds it on a shared
    disk; all ranks wait for it.

    Raises:
        RunError: on every rank; the files of a node are not those of the first.
    """
    with pretrained.local_copies():
        if world.local_rank == 0:
            fetch(recipe, frozen_parts=frozen_parts)
        # A barrier with the long timeout, since a download may take hours.
        collectives.gather_objects(None, world, patiently=True)
        if world.mesh is None:
            return
        paths = fetch(recipe, frozen_parts=frozen_parts)
    if recipe.trainable.init_from is not None:
        paths["trainable.init_from"] = recipe.trainable.init_from
    if recipe.model.training_adapter is not None:
        paths["model.training_adapter"] = recipe.model.training_adapter
    if recipe.sampling.in_training:
        paths |= recipe.sampling.adapters()
    equality.compare_with_first(equality.files_read(paths), world)


def build_state(
    session: Session,
    parts: Components,
    options: Options = MappingProxyType({}),
    *,
    objective: Objective | None = None,
    encodes_ahead: bool = False,
) -> TrainingState:
    """Build the training state at step 0: model, optimizers and averages on the device.

    Args:
        session: recipe and ranks of this launch.
        parts: model, codec and text encoder, the model on the CPU; it is sharded or replicated in
            place.
        options: memory options by name of a block; those with `stream` keep weights in host memory.
        objective: objective of the training, its networks on the CPU; None: the recipe's.
        encodes_ahead: encode one micro-batch ahead, as the memory plan decided.
    """
    recipe, world = session.recipe, session.world
    family, model = parts.family, parts.model
    model.train()
    blocks = family.blocks(model)
    if world.sequence_group is not None:
        sharing = context_parallel.TokenExchange(world, family.block.num_heads(model))
        family.block.share_tokens(model, sharing)
    in_bf16 = recipe.parallel.param_dtype == "bf16" and session.precision == "bf16"
    # Before weights get memory, since streamed weights get it on the host.
    streamed = StreamedBlocks(streamed_by(recipe, options, parts), world.device)
    if not world.is_sharded:
        parts.unfilled.give_memory(model, world.device)
    fsdp.apply_fsdp(model, blocks, world, gather_in_bf16=in_bf16)
    if world.is_sharded:  # only now, when each rank needs memory for its shard alone
        parts.unfilled.give_memory(model, world.device)
    with streamed.on_host():
        parts.unfilled.fill()
    # Random weights may differ between ranks; equal gradients keep them equal from here on.
    fsdp.send_weights(model, world)
    # Muon divides its matrices among ranks that hold the same whole parameters.
    replicas = None if world.mesh is None or world.is_sharded else world.mesh.get_group()
    # Only now: sharding has replaced the parameters that optimizers must hold.
    optimizers = build_optimizers(model, blocks, recipe.optimizer, session.precision, replicas)
    is_encoded = bool(parts.codec.modules() or parts.text.modules())
    group = world.sequence_group if is_encoded else None  # pixels and token ids need no work
    objective = objective or build_objective(recipe)
    for network in objective.networks():
        network.to(world.device)
    inputs = InputQueue(
        parts,
        recipe,
        world.device,
        group,
        encodes_ahead=encodes_ahead,
        with_no_caption=objective.uses_no_caption,
    )
    averages = Averages(model, recipe.ema.averages())
    return TrainingState(parts, optimizers, averages, inputs, objective)


def streamed_by(recipe: Recipe, options: Options, parts: Components) -> list[nn.Module]:
    """Return the model's blocks whose weights are streamed from host memory, in running order."""
    blocks = parts.family.blocks(parts.model)
    if recipe.model.stream == "all":
        return list(blocks)
    names = {module: name for name, module in parts.model.named_modules()}
    return [each for each in blocks if is_streamed(options.get(names[each], KEEP).weights)]


def count_flops(parts: Components, recipe: Recipe, objective: Objective) -> dict[Bucket, int]:
    """Count the floating-point operations of a training step on one clip of each shape.

    Empty if they cannot be counted.
    """
    try:
        return {
            bucket: training_flops(objective, parts, recipe, bucket)
            for bucket in recipe.data.shapes()
        }
    except RuntimeError:  # a module that reads values cannot run on the meta device
        return {}


def missing_vocabulary(run: RunDirectory, recipe: Recipe, loader: Loader) -> list[str]:
    """Return a warning if the tokenizer that a resumed run had made is missing.

    It is made again from the same captions.

    Raises:
        RunError: the tokenizer is missing, and the captions have changed.
    """
    path = run.components_path / "tokenizer" / "tokenizer.json"
    if recipe.text.pretrained is not None or path.exists():
        return []
    then = {
        name: each["fingerprint"]
        for name, each in loader.plan_history.history[0]["catalogs"].items()
    }
    now = {name: catalog.fingerprint for name, catalog in loader.catalogs.items()}
    if then != now:
        raise errors.RunError(
            f"{path} is missing. The run made its tokenizer from the captions that it began with, "
            "and the catalog has changed since: another tokenizer gives captions other token ids, "
            "which the model was not trained with. Restore the file, or start a new run with "
            f"--set out={run.path}-2."
        )
    return [f"{path} is missing; the tokenizer is made again from the same captions"]

"""Builds model, codec and text encoder on every rank, and the run directory with the first ones."""

from rich.console import Console

from longtake import heartbeat
from longtake.config import Bucket, Recipe
from longtake.data.loader import Loader
from longtake.errors import RunError
from longtake.formatting import escape
from longtake.models.build import Components, Source, assemble, fetch, latent_shape, outline
from longtake.models.numerics import training_flops
from longtake.models.objective import forward_flops
from longtake.models.pretrained import local_copies
from longtake.parallel.collectives import first_does, gather_objects
from longtake.parallel.mesh import World
from longtake.run_dir import RunDirectory
from longtake.training.latent_cache import captions_of, fill_cache, make_parts
from longtake.training.watching import Watcher


def missing_vocabulary(run: RunDirectory, recipe: Recipe, loader: Loader) -> list[str]:
    """A warning if a resumed run's own tokenizer is gone, and can be made again as it was.

    Raises:
        RunError: it would be made of other captions, and give captions other token ids.
    """
    path = run.components_path / "tokenizer" / "tokenizer.json"
    if recipe.text.pretrained is not None or path.exists():
        return []
    then = {
        name: each["fingerprint"] for name, each in loader.course.history[0]["catalogs"].items()
    }
    now = {name: catalog.fingerprint for name, catalog in loader.catalogs.items()}
    if then != now:
        raise RunError(
            f"{path} is missing. The run made its tokenizer from the captions that it began with, "
            "and the catalog has changed since: another tokenizer gives captions other token ids, "
            "which the model was not trained with. Restore the file, or start a new run with "
            f"--set out={run.path}-2."
        )
    return [f"{path} is missing; the tokenizer is made again from the same captions"]


def assemble_in_turn(
    run: RunDirectory, recipe: Recipe, loader: Loader, world: World, weights: Source
) -> Components:
    """Build the parts on every rank: at once, but that rank 0 makes what exists nowhere else.

    `weights`: where the model gets them.
    """
    captions = captions_of(loader)
    made: list[Components] = []

    def open_run() -> None:
        fetch(recipe)
        if run.exists():
            return
        with local_copies():
            parts = assemble(recipe, captions, None, weights=weights)
        parts.codec.save(run.components_path)
        parts.text.save(run.components_path)
        run.create(recipe)
        made.append(parts)

    first_does(open_run, world)
    _fetch_on_nodes(recipe, world)
    with local_copies():
        parts = (
            made[0] if made else assemble(recipe, captions, run.components_path, weights=weights)
        )
    parts.codec.to(world.device)
    parts.text.to(world.device)
    return parts


def assemble_around_cache(
    run: RunDirectory,
    recipe: Recipe,
    loader: Loader,
    watcher: Watcher,
    world: World,
    console: Console,
    weights: Source,
) -> Components:
    """Fill the cache, and only then build the model, with outlines of codec and text encoder."""
    captions = captions_of(loader)

    def open_run() -> None:
        if not run.exists():
            outline(recipe)  # what is wrong is said before there is a run
            make_parts(recipe, captions, run.components_path)
            run.create(recipe)

    first_does(open_run, world)
    watcher.start()
    heartbeat.set_phase("cache")
    cache, report = fill_cache(recipe, loader, run.components_path, world, console)
    loader.read_from(cache, report.failures, report.incidents)
    if world.is_first:
        console.print(escape(f"  cache {cache.folder}: {report}"), highlight=False)
    heartbeat.set_phase("build")
    first_does(lambda: fetch(recipe, frozen_parts=False), world)
    _fetch_on_nodes(recipe, world, frozen_parts=False)
    made = run.components_path
    with local_copies():
        return assemble(recipe, captions, made, frozen_parts=False, weights=weights)


def _fetch_on_nodes(recipe: Recipe, world: World, *, frozen_parts: bool = True) -> None:
    """On each node one rank downloads what the first rank's node has; where disks are shared, none.

    All ranks wait for them.
    """
    if world.local_rank == 0:
        with local_copies():
            fetch(recipe, frozen_parts=frozen_parts)
    gather_objects(None, world, patiently=True)


def count_flops(parts: Components, recipe: Recipe) -> dict[Bucket, int]:
    """Operations of a training step of all ranks on clips of each shape, if they can be counted."""
    trains_all = recipe.trainable.base() == "full"
    shapes = {bucket: latent_shape(parts.codec, bucket) for bucket in recipe.data.shapes()}
    try:
        return {
            bucket: recipe.training.batch_size
            * training_flops(forward_flops(parts, recipe, shape), trains_all=trains_all)
            for bucket, shape in shapes.items()
        }
    except RuntimeError:  # a module that looks at values cannot be run without any
        return {}

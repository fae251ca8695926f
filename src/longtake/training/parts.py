"""Builds model, codec and text encoder on every rank, and the run directory with the first ones."""

from rich.console import Console
from rich.markup import escape

from longtake import heartbeat
from longtake.config import Bucket, Recipe
from longtake.data.loader import Loader
from longtake.models.assemble import Components, assemble, forward_flops, latent_shape, outline
from longtake.models.flops import training_flops
from longtake.parallel.collectives import first_does
from longtake.parallel.mesh import World
from longtake.run_dir import RunDirectory
from longtake.training.caching import captions_of, fill_cache, make_parts
from longtake.training.watching import Watcher


def assemble_in_turn(run: RunDirectory, recipe: Recipe, loader: Loader, world: World) -> Components:
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


def assemble_around_cache(
    run: RunDirectory,
    recipe: Recipe,
    loader: Loader,
    watcher: Watcher,
    world: World,
    console: Console,
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
    watcher.start()
    heartbeat.enter("cache")
    outcome = fill_cache(recipe, loader, run.components_path, world, console)
    loader.read_from(outcome.filled, outcome.incidents)
    if world.is_first:
        console.print(escape(str(outcome)), highlight=False)
    heartbeat.enter("build")
    first_does(build, world)  # first: it may have to be downloaded
    if not made:
        build()
    return made[0]


def count_flops(parts: Components, recipe: Recipe) -> dict[Bucket, int]:
    """Operations of a training step on clips of each shape, where they can be counted."""
    shapes = {bucket: latent_shape(parts.codec, bucket) for bucket in recipe.data.shapes()}
    try:
        return {
            bucket: recipe.training.batch_size * training_flops(forward_flops(parts, recipe, shape))
            for bucket, shape in shapes.items()
        }
    except RuntimeError:  # a module that looks at values cannot be run without any
        return {}

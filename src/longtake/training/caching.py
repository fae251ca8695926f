"""Where cached latents meet what makes them: fills a cache with a recipe's codec and text encoder.

These are loaded only where something is missing, one after the other, and are gone when the cache
is full: the transformer trains without them.
"""

import gc
import secrets
import shutil
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from longtake.config import Recipe
from longtake.data.cache import Cache, make_folder
from longtake.data.cached import Failure, Filled
from longtake.data.crews.errand import Crew
from longtake.data.fill import (
    Missing,
    Report,
    fill_latents,
    fill_prompts,
    find_missing,
    refuse_too_many,
)
from longtake.data.loader import Loader
from longtake.data.pool import Incident
from longtake.errors import DataError, RecipeError
from longtake.formatting import format_duration
from longtake.heartbeat import HeartbeatDir
from longtake.models.assemble import assemble, outline, text_section
from longtake.models.codec import build_codec
from longtake.models.text import NO_CAPTION, build_text
from longtake.parallel.collectives import first_does, from_first, gather_objects
from longtake.parallel.mesh import World, join, place_in_world
from longtake.progress import counted
from longtake.run_dir import RunDirectory
from longtake.training.encoding import captions_by, fill_on, pixels_by
from longtake.training.fingerprint import codec_fingerprint, text_fingerprint

KINDS = ("latents", "references", "prompts")


@dataclass(frozen=True)
class Outcome:
    """What became of a cache, over all processes.

    Attributes:
        filled: the cache, for a loader.
        present: entries that were there, by kind.
        computed: entries that were made, by kind.
        num_bytes: that these take.
        incidents: what befell this process's decoders.
        seconds: since it was begun.
    """

    filled: Filled
    present: Counter[str]
    computed: Counter[str]
    num_bytes: int
    incidents: list[Incident]
    seconds: float

    def __str__(self) -> str:
        present, computed = sum(self.present.values()), sum(self.computed.values())
        made = (
            f"{computed} computed in {format_duration(self.seconds)}"
            if computed
            else "none is missing"
        )
        return f"  cache {self.filled.cache.folder}: {present} entries were there, {made}"

    def facts(self) -> dict[str, Any]:
        """All of it as JSON."""
        failed = sorted({(each.path, each.reason) for each in self.filled.failures.values()})
        return {
            "cache": str(self.filled.cache.folder),
            **{
                kind: {"present": self.present[kind], "computed": self.computed[kind]}
                for kind in KINDS
            },
            "bytes": self.num_bytes,
            "failed": [{"path": path, "reason": reason} for path, reason in failed],
            "seconds": round(self.seconds, 3),
        }


def cache_ahead(recipe: Recipe, console: Console, crew: Crew | None = None) -> dict[str, Any]:
    """Fill a recipe's cache before it is trained; returns facts as JSON.

    Call it in one process, in several at once, or in each that torchrun started.

    Args:
        recipe: the recipe.
        console: for rank 0.
        crew: who encodes, such as a cluster, if not this process; then there is only one of it.
            On equal devices the cache's files are the same to the byte.

    Raises:
        RecipeError: the recipe names no cache, or its parts do not fit together.
        DataError, ModelError: as `fill_cache`.
        RecipeChangedError: the run directory belongs to another recipe.
    """
    if recipe.data.cache is None:
        raise RecipeError(
            "The recipe names no folder for a cache. Set one, such as --set data.cache=cache, and "
            "how many spans of each clip it holds, such as --set data.windows=1."
        )
    with _world(recipe, crew) as world:
        loader = Loader(recipe.data, batch_size=recipe.training.batch_size, seed=recipe.seed)
        run = RunDirectory(recipe.out)
        if run.exists():
            first_does(lambda: run.claim(recipe), world)
            made = run.components_path
            return fill_cache(recipe, loader, made, world, console, crew).facts()
        with _made_parts(recipe, recipe.data.cache, captions_of(loader), world) as made:
            return fill_cache(recipe, loader, made, world, console, crew).facts()


def _world(recipe: Recipe, crew: Crew | None) -> AbstractContextManager[World]:
    """The world that encodes; a crew's devices are not this process's."""
    if crew is None:
        return join(recipe.training.device, recipe.parallel)
    if (size := place_in_world()[2]) > 1:
        raise RecipeError(
            f"--on has a cluster's workers encode, and this is one of {size} processes that would "
            "each do so. Start it without torchrun."
        )
    return nullcontext(World(0, 0, 1, torch.device("cpu"), None))


@contextmanager
def _made_parts(recipe: Recipe, cache: Path, captions: list[str], world: World) -> Iterator[Path]:
    """The folder of `make_parts` for as long as it is needed, where all ranks see it."""
    made = cache / "aside" / f"parts-{from_first(secrets.token_hex(8), world)}"

    def make() -> None:
        outline(recipe)  # what is wrong is said before there is a folder
        make_folder(cache)
        make_parts(recipe, captions, made)

    first_does(make, world)
    try:
        yield made
    finally:
        if world.is_first:
            shutil.rmtree(made, ignore_errors=True)


def captions_of(loader: Loader) -> list[str]:
    """All captions of a loader's catalogs."""
    return [text for catalog in loader.catalogs.values() for text in catalog.captions()]


def make_parts(recipe: Recipe, captions: Iterable[str], folder: Path) -> None:
    """Make the codec and the encoders that are pretrained nowhere, and keep them in a folder.

    Raises:
        RecipeError: the recipe's parts do not fit together.
        ModelError: weights cannot be loaded.
        DataError: the captions make no vocabulary.
    """
    if not _has_all_pretrained(recipe):
        parts = assemble(recipe, captions, None)  # as a run makes them: of one stream of numbers
        parts.codec.save(folder)
        parts.text.save(folder)


def _has_all_pretrained(recipe: Recipe) -> bool:
    codec, text = recipe.codec, recipe.text
    return (
        (codec.kind == "pixels" or codec.pretrained is not None)
        and text.pretrained is not None
        and (text.pooled is None or text.pooled.pretrained is not None or not text.pooled.config)
    )


def fill_cache(
    recipe: Recipe,
    loader: Loader,
    made: Path,
    world: World,
    console: Console,
    crew: Crew | None = None,
) -> Outcome:
    """Compute what the cache lacks of what a loader will ask for; each rank its share.

    Args:
        recipe: of which data, codec and text say what to encode by what.
        loader: whose newest plan is to be trained.
        made: the folder of `make_parts`.
        world: all ranks; each calls it.
        console: for rank 0.
        crew: who encodes, if not the ranks.

    Raises:
        DataError: the cache cannot be written, is not one folder for all ranks, or too many clips
            cannot be decoded.
        ModelError: codec or text encoder cannot be loaded.
    """
    begun = time.perf_counter()
    fingerprints = _fingerprints(recipe, made, world)
    cache = _open(recipe, fingerprints, world)
    shown = console if world.is_first else Console(quiet=True)
    with counted(shown, "cache: look") as advance:
        missing = find_missing(
            cache,
            loader.course.plan,
            recipe.data,
            share=slice(world.rank, None, world.size),
            without=loader.quarantined,
            progress=advance,
        )
    report = Report(present=missing.present)
    if crew is not None:
        fill_on(crew, missing, recipe, made, fingerprints, shown, report)
        return _together(cache, report, recipe, world, begun)
    _fill_prompts(cache, missing, recipe, made, world.device, shown, report)
    _fill_latents(cache, missing, recipe, made, world.device, shown, report, loader.hearts)
    return _together(cache, report, recipe, world, begun)


def _fingerprints(recipe: Recipe, made: Path, world: World) -> tuple[str, str]:
    """Those of the codec and of the text encoder, as rank 0 has found them."""
    found: list[tuple[str, str]] = []
    first_does(
        lambda: found.append((codec_fingerprint(recipe, made), text_fingerprint(recipe, made))),
        world,
    )
    return from_first(found[0] if found else ("", ""), world)


def _open(recipe: Recipe, fingerprints: tuple[str, str], world: World) -> Cache:
    assert recipe.data.cache is not None
    codec, text = fingerprints
    cache = Cache(
        recipe.data.cache, codec=codec, text=text, data=recipe.data, no_caption=NO_CAPTION
    )
    first_does(lambda: make_folder(cache.folder), world)
    _refuse_other_folders(cache, world)
    return cache


def _refuse_other_folders(cache: Cache, world: World) -> None:
    """Make sure that all ranks see the same folder: each fills only its share."""
    sign = cache.folder / "aside" / from_first(secrets.token_hex(8), world)
    first_does(sign.touch, world)
    seen = gather_objects((socket.gethostname(), sign.exists()), world)
    if world.is_first:
        sign.unlink(missing_ok=True)
    if others := sorted({host for host, is_there in seen if not is_there}):
        raise DataError(
            f"data.cache = {cache.folder} is another folder on {', '.join(others)} than on "
            f"{seen[0][0]}. Name one that all nodes share."
        )


def _fill_prompts(
    cache: Cache,
    missing: Missing,
    recipe: Recipe,
    made: Path,
    device: torch.device,
    console: Console,
    report: Report,
) -> None:
    if not missing.captions:
        return
    text = build_text(text_section(recipe), (), made)
    text.to(device)
    with counted(console, "cache: captions") as advance:
        fill_prompts(cache, missing.captions, captions_by(text), report, advance)
    text.to(torch.device("cpu"))
    _free(device)


def _fill_latents(
    cache: Cache,
    missing: Missing,
    recipe: Recipe,
    made: Path,
    device: torch.device,
    console: Console,
    report: Report,
    hearts: HeartbeatDir | None,
) -> None:
    if not missing.places:
        return
    codec = build_codec(recipe.codec, made)
    codec.to(device)
    with counted(console, "cache: clips") as advance:
        fill_latents(
            cache,
            missing.places,
            recipe.data,
            pixels_by(codec, device),
            report,
            advance,
            hearts,
        )
    codec.to(torch.device("cpu"))
    _free(device)


def _free(device: torch.device) -> None:
    """Hand a card's memory back; what is on the CPU goes with its last name."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _together(cache: Cache, report: Report, recipe: Recipe, world: World, begun: float) -> Outcome:
    """What all ranks did; they wait for each other, however long one of them has to encode."""
    mine = (report.present, report.computed, report.num_bytes, report.failures)
    present, computed, num_bytes = Counter[str](), Counter[str](), 0
    failures: dict[str, Failure] = {}
    for there, made, size, failed in gather_objects(mine, world, patiently=True):
        present.update(there)
        computed.update(made)
        num_bytes += size
        failures |= failed
    refuse_too_many(list(failures.values()), recipe.data.max_quarantined_clips)
    seconds = time.perf_counter() - begun
    filled = Filled(cache.reopened(), failures)
    return Outcome(filled, present, computed, num_bytes, report.incidents, seconds)

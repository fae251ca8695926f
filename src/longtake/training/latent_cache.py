"""Fills a cache of latents and text embeddings with a recipe's codec and text encoder.

The codec and the text encoder are loaded only if something is missing, one after the other, and
freed when the cache is full: the transformer trains without them. On a CPU each sample is encoded
alone, here or on a cluster, so that entries do not depend on how the work was divided. Workers use
as many threads as this process, since entries may depend on that number.
"""

import gc
import hashlib
import json
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from torch import Tensor

from longtake import errors, progress
from longtake.config import Bucket, PooledSection, Recipe, TextSection
from longtake.data import cache_fill, checks
from longtake.data.cache import Cache, ContentHashes, SamplePart, make_folder
from longtake.data.loader import Loader
from longtake.data.tasks import ALL_CORES, Work
from longtake.data.training_captions import all_captions
from longtake.fsio import Count, read_record, write_once
from longtake.models.audio import take_audio
from longtake.models.base import family_of
from longtake.models.codec import build_codec, keep_tile, kept_tile
from longtake.models.components import assemble, audio_wanted, outline, text_section
from longtake.models.conditioning import (
    encoded_together,
    further_encoders,
    text_reads_pictures,
)
from longtake.models.pretrained import PipelinePart, locate
from longtake.models.releases import find_part
from longtake.models.text import (
    LENGTH_STEP,
    NO_CAPTION,
    TextEncoder,
    build_text,
    outline_text,
    place_text,
)
from longtake.parallel.collectives import first_does, from_first, gather_objects
from longtake.parallel.mesh import World, join, pick_device, place_in_world
from longtake.planner.encoding import TileChoice, describe_tile
from longtake.planner.plan import tile_to_fill
from longtake.run_dir import RunDirectory
from longtake.sampling.memory_strategy import try_within_memory

_PIXELS, _CAPTIONS, _SOUND = 1, 2, 1  # versions of the code that feeds codecs and text encoder
_TILES = "encoders/tile-{}.json"  # in a cache, by the codec's fingerprint
_LARGE_BYTES = 2**24  # smaller files are read each time, which is as fast as looking up their hash
_SHA256 = re.compile("[0-9a-f]{64}")


def cache_ahead(
    recipe: Recipe,
    console: Console,
    work: Work = ALL_CORES,
    part: tuple[int, int] = (0, 1),
) -> dict[str, Any]:
    """Fill a recipe's latent cache before training; returns counts and times for JSON.

    Call it in one process, in several at once, or in each that torchrun started. The entries are
    equal byte by byte on equal devices.

    Args:
        recipe: recipe whose cache is filled.
        console: shows progress.
        work: the Ray cluster whose workers encode, and their number; by default this process does.
        part: (i, n) fills one of n parts, and leaves the others to other commands.

    Raises:
        RecipeError: the recipe names no cache, or its parts do not fit together.
        DataError, ModelError: as `fill_cache`.
        RecipeChangedError: the run directory belongs to another recipe.
    """
    if recipe.data.cache is None:
        raise errors.RecipeError(
            "The recipe names no folder for a cache. Set one, such as --set data.cache=cache, and "
            "how many spans of each clip it holds, such as --set data.windows=1."
        )
    with _world(recipe, work.on) as world:
        # The loader is that of one rank: `fill_cache` divides entries, not batches, among ranks.
        loader = Loader(recipe.data, batch_size=recipe.training.global_batch_size, seed=recipe.seed)
        first_does(
            lambda: checks.refuse_missing_conditioning(loader.plan_history.plan, recipe.data), world
        )
        run = RunDirectory(recipe.out)
        # An existing run has its own parts; without one they are made for this command only.
        if run.exists():
            first_does(lambda: run.claim(recipe), world)
            parts: AbstractContextManager[Path] = nullcontext(run.components_path)
        else:
            choose = tile_to_fill(recipe, world, elsewhere=work.on is not None)
            parts = _made_parts(recipe, recipe.data.cache, captions_of(loader), choose, world)
        with parts as made:
            cache, report = fill_cache(recipe, loader, made, world, console, work, part)
            tile = kept_tile(recipe.codec, made)
        return {"cache": str(cache.folder), "encode_tile": tile, **report.facts()}


def _world(recipe: Recipe, on: str | None) -> AbstractContextManager[World]:
    """Return the ranks that fill a latent cache; one process if a cluster's workers encode."""
    if on is None:
        return join(recipe.training.device, recipe.parallel)
    if (size := place_in_world()[2]) > 1:
        raise errors.RecipeError(
            f"--on has a cluster's workers encode, and this is one of {size} processes that would "
            "each do so. Start it without torchrun."
        )
    return nullcontext(World(0, 0, 1, torch.device("cpu"), None))


@contextmanager
def _made_parts(
    recipe: Recipe, cache: Path, captions: list[str], choose: Callable[[], int], world: World
) -> Iterator[Path]:
    """Create a new codec and text encoder in a folder that all ranks see, deleted at the end."""
    made = cache / "aside" / f"parts-{from_first(secrets.token_hex(8), world)}"

    def make() -> None:
        outline(recipe)  # raises errors of the recipe before there is a folder
        make_folder(cache)
        make_parts(recipe, captions, made)
        keep_tile(settle_tile(recipe, made, choose), made)

    first_does(make, world)
    try:
        yield made
    finally:
        if world.is_first:
            shutil.rmtree(made, ignore_errors=True)


def settle_tile(recipe: Recipe, made: Path, choose: Callable[[], int]) -> int:
    """Return the tiles in which a recipe's cache holds clips: see `kept_tile`.

    For `codec.encode_tile` = "auto" they are chosen when the cache is first filled, and kept in its
    folder, so that everybody who fills it or trains from it finds the same entries, on whatever
    device.

    Args:
        recipe: recipe with a cache, whose folder exists.
        made: folder with the codec, unless it is pretrained.
        choose: chooses tiles for a cache that has none of this codec.
    """
    if recipe.codec.encode_tile != "auto" or recipe.codec.kind == "pixels":
        return kept_tile(recipe.codec, None)
    assert recipe.data.cache is not None
    path = _tile_path(recipe, recipe.data.cache, made)
    kept = read_record(path, dict[str, Count])
    if kept is None:
        write_once(path, {"pixels": choose()})
        # Another command may have been first.
        kept = read_record(path, dict[str, Count])
    return (kept or {}).get("pixels", 0)


def begun_tile(recipe: Recipe) -> TileChoice | None:
    """Return the tiles in which clips of a recipe are encoded already; None where none are.

    They are those of its run, or those of its cache, for whose codec no weights are downloaded.
    """
    run, cache = RunDirectory(recipe.out), recipe.data.cache
    if run.exists():
        return TileChoice(kept_tile(recipe.codec, run.components_path))
    is_auto = recipe.codec.encode_tile == "auto" and recipe.codec.kind != "pixels"
    if not is_auto or cache is None or not any(cache.glob(_TILES.format("*"))):
        return None
    with suppress(errors.ModelError):  # a codec that is not here
        path = _tile_path(recipe, cache, run.components_path, files="config.json")
        kept = read_record(path, dict[str, Count])
        return None if kept is None else TileChoice(kept.get("pixels", 0))
    return None


def _tile_path(recipe: Recipe, cache: Path, made: Path, files: str = "*") -> Path:
    return cache / _TILES.format(codec_fingerprint(recipe.with_encode_tile(0), made, files))


def captions_of(loader: Loader) -> list[str]:
    return all_captions(loader.catalogs, loader.data)


def make_parts(
    recipe: Recipe, captions: Iterable[str], folder: Path, made: Path | None = None
) -> None:
    """Save those of a recipe's codec and text encoders that are not pretrained to a folder.

    Args:
        recipe: recipe that describes the parts.
        captions: texts from which a vocabulary is made.
        folder: folder to create; left alone if all parts are pretrained.
        made: folder of another run whose parts are taken instead of new ones.
    """
    codec, text, pooled = recipe.codec, recipe.text, recipe.text.pooled
    is_pretrained = (
        (codec.kind == "pixels" or codec.pretrained is not None)
        and text.pretrained is not None
        and (pooled is None or pooled.pretrained is not None or not pooled.config)
    )
    if not is_pretrained:
        parts = assemble(recipe, captions, made)  # all at once: a run draws them in one stream
        parts.codec.save(folder)
        parts.text.save(folder)


def fill_cache(
    recipe: Recipe,
    loader: Loader,
    made: Path,
    world: World,
    console: Console,
    work: Work = ALL_CORES,
    part: tuple[int, int] = (0, 1),
) -> tuple[Cache, cache_fill.CacheReport]:
    """Encode this rank's share of the clips and captions that a latent cache lacks.

    Returns the cache, reopened, and a report over all ranks. All ranks must call it.

    Raises:
        DataError: more clips failed than `data.max_quarantined_clips`, or ranks see other folders.
        ModelError: the codec or a text encoder cannot be loaded.
    """
    begun = time.perf_counter()
    cache = _open(recipe, made, world)
    shown = console if world.is_first else Console(quiet=True)
    with progress.counted(shown, "cache: look") as advance:
        missing = cache_fill.find_missing(
            cache,
            loader.plan_history.plan,
            # A command's part of the entries is divided among its ranks.
            share=slice(world.rank + part[0] * world.size, None, world.size * part[1]),
            without=loader.quarantine.clips,
            known_inputs=loader.known_inputs,
            progress=advance,
        )
    mine = cache_fill.CacheReport(missing.present, refused=cache.packs.refused)
    mine.failures |= missing.changed
    _encode_missing(cache, missing, recipe, loader, made, world.device, mine, shown, work)
    # Each rank keeps the incidents of its own decoders; all else is gathered from all ranks.
    report = cache_fill.CacheReport(incidents=mine.incidents)
    mine.incidents = []
    # With the long timeout: a rank may have to encode for hours after another is done.
    for each in gather_objects(mine, world, patiently=True):
        report.add(each)
    report.refuse_too_many(recipe.data.max_quarantined_clips)
    for failure in dict.fromkeys(report.failures.values()):
        shown.print(escape(f"  {failure.path}: {failure.reason}"))
    for path, reason in report.refused.items():
        shown.print(escape(f"  not used: {path} {reason}"))

    def save_index() -> None:
        cache.packs.refresh()
        cache.packs.save()

    first_does(save_index, world)
    report.seconds = time.perf_counter() - begun
    return replace(cache), report  # a copy reads the index again, with the entries of other ranks


def _open(recipe: Recipe, made: Path, world: World) -> Cache:
    """Open the latent cache for the codec and text encoder whose fingerprints rank 0 computes."""
    assert recipe.data.cache is not None
    together = encoded_together(family_of(recipe.model), recipe)
    found: list[tuple[str, ...]] = []
    wanted = audio_wanted(recipe)

    def find() -> None:
        codec, text = codec_fingerprint(recipe, made), text_fingerprint(recipe, made)
        inputs = inputs_fingerprint(recipe, made) if together else ""
        found.append((codec, text, inputs, audio_fingerprint(recipe) if wanted else ""))

    first_does(find, world)
    codec, text, inputs, audio = from_first(found[0] if found else ("",) * 4, world)
    seen = tuple(family_of(recipe.model).text.seen_pictures(recipe.model_inputs()))
    facts = codec, text, recipe.data, NO_CAPTION, together, inputs, seen, wanted, audio
    cache = Cache(recipe.data.cache, *facts)
    first_does(lambda: make_folder(cache.folder), world)
    # Each rank fills only its share, so a folder that is not the same on all ranks is refused.
    sign = cache.folder / "aside" / f"sign-{from_first(secrets.token_hex(8), world)}"
    first_does(sign.touch, world)
    hosts = gather_objects((socket.gethostname(), sign.exists()), world)
    if world.is_first:
        sign.unlink(missing_ok=True)
    if others := sorted({host for host, is_there in hosts if not is_there}):
        raise errors.DataError(
            f"data.cache = {cache.folder} is another folder on {', '.join(others)} than on "
            f"{hosts[0][0]}. Name one that all nodes share."
        )
    return cache


def _encode_missing(
    cache: Cache,
    missing: cache_fill.Missing,
    recipe: Recipe,
    loader: Loader,
    made: Path,
    device: torch.device,
    report: cache_fill.CacheReport,
    console: Console,
    work: Work,
) -> None:
    """Encode captions and clips that a cache lacks, in this process or by a cluster's workers."""
    threads, uses_gpu = torch.get_num_threads(), recipe.training.device != "cpu"
    fill_latents = partial(cache_fill.fill_latents, heartbeats=loader.heartbeats)
    steps: Sequence[tuple[str, Sequence[Any], Callable[..., Any], Callable[..., None]]] = (
        ("captions", missing.captions, _load_caption_encoder, cache_fill.fill_prompts),
        ("clips", missing.clips, _load_part_encoder, fill_latents),
    )
    # Text encoder and codec work one after the other: a GPU need not hold both at once.
    for label, items, load, fill in steps:
        if not items:
            continue
        # Loaded before its progress begins, which estimates the time that is left.
        encode = load(recipe, made, device) if work.on is None else None
        with progress.counted(console, f"cache: {label}") as advance:
            if work.on is None:
                fill(cache, items, encode, report, advance)
            else:
                # Resolved, since a worker may have another current directory.
                load_there = partial(_load_on_worker, load, recipe, made.resolve(), threads)
                task = cache_fill.EncodeTask(cache, load_there, threads, uses_gpu)
                cache_fill.run_encode_task(task, items, report, replace(work, progress=advance))
        del encode
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _load_on_worker(
    load: Callable[[Recipe, Path, torch.device], Any], recipe: Recipe, made: Path, threads: int
) -> Any:
    torch.set_num_threads(threads)
    return load(recipe, made, pick_device(recipe.training.device))


def _text(recipe: Recipe, made: Path) -> TextEncoder:
    return build_text(text_section(recipe), family_of(recipe.model), (), made)


def _load_part_encoder(recipe: Recipe, made: Path, device: torch.device) -> cache_fill.EncodePart:
    chosen = family_of(recipe.model)
    codec = build_codec(recipe.codec, chosen.frozen.codec, made)
    codec.to(device)
    if text_reads_pictures(recipe):
        text = _text(recipe, made)
        place_text(text, device)
    else:
        text = outline_text(text_section(recipe), chosen)

    def encode(part: SamplePart, read: Mapping[str, NDArray[np.uint8]]) -> dict[str, Tensor]:
        given = {name: torch.from_numpy(each)[None].to(device) for name, each in read.items()}
        if part.made == "audio":
            encoded = take_audio(recipe, codec.audio, given, part.bucket)
            return {name: each[0] for name, each in encoded.items()}
        if part.made == "latents":
            (pixels,) = given.values()
            encoded_clip = try_within_memory(codec.encode, pixels)
            if encoded_clip is None:
                raise _no_memory_to_encode(device, part.bucket, codec.encode_tile)
            return {"latents": encoded_clip[0]}
        if part.made == "prompt":
            encoded = text.encode([part.caption], given)
        else:
            encoded = chosen.inputs.encode(codec, text, given, part.bucket)
        return {name: each[0] for name, each in encoded.items()}

    return encode


def _no_memory_to_encode(device: torch.device, bucket: Bucket, tile: int) -> errors.PlanError:
    return errors.PlanError(
        f"{device} has no memory left to encode a clip of {bucket} "
        f"{describe_tile(tile) or 'as a whole'}, as its cache was begun. Fill it on a larger GPU "
        "by `longtake data cache`, or set codec.encode_tile to smaller tiles or codec.dtype to "
        "bf16, for which all clips are encoded again."
    )


def _load_caption_encoder(
    recipe: Recipe, made: Path, device: torch.device
) -> cache_fill.EncodeCaptions:
    """Return a function that encodes captions: as many at once as fit a GPU, one by one on a CPU.

    On a GPU the last bits of an embedding may depend on the captions encoded with it.
    """
    text = _text(recipe, made)
    place_text(text, device)
    at_once = None if device.type == "cuda" else 1  # None: all

    def encode(captions: Sequence[str]) -> list[dict[str, Tensor]]:
        nonlocal at_once
        encoded = list[dict[str, Tensor]]()
        while len(encoded) < len(captions):
            some = captions[len(encoded) :][:at_once]
            found = try_within_memory(text.encode, some)
            if found is None:
                # Tried, not predicted: most captions are shorter than the longest.
                if len(some) == 1:
                    raise errors.PlanError(
                        f"{device} has no memory left for the text encoder to encode one caption. "
                        "Lower text.max_tokens, or set text.quantize to int8 or nf4."
                    )
                at_once = len(some) // 2
                continue
            on_host = {name: each.cpu() for name, each in found.items()}
            encoded += [
                {name: each[row] for name, each in on_host.items()} for row in range(len(some))
            ]
        return encoded

    return encode


def codec_fingerprint(recipe: Recipe, made: Path, files: str = "*") -> str:
    """Return a checksum (32 hex digits) of everything that decides how pixels become latents.

    `files` is the pattern of those of the codec that are downloaded first.
    """
    section, part = recipe.codec, family_of(recipe.model).frozen.codec
    if section.kind == "pixels":
        return _fingerprint(recipe, [_PIXELS, section.kind], [])
    if section.pretrained is None:
        folders = [made / "vae"]
    else:
        part = find_part(section.pretrained, part)
        folders = [locate(section.pretrained, part.folder, files) / part.folder]
    # The dtype is a part of it, since it changes the last bits of latents.
    facts: list[object] = [_PIXELS, section.kind, part.class_name, section.dtype]
    # Of one autoencoder, families may have different latents.
    facts += [] if part.codec_class is None else [part.codec_class.__name__]
    # So do tiles; without them nothing is added, so that older caches stay valid.
    facts += [["tiles", tile]] if (tile := kept_tile(section, made)) else []
    return _fingerprint(recipe, facts, folders)


def audio_fingerprint(recipe: Recipe) -> str:
    """Return a checksum (32 hex digits) of everything that decides how sound becomes latents."""
    where, part = recipe.codec.pretrained, family_of(recipe.model).frozen.codec.audio[0]
    assert where is not None
    part = find_part(where, part)
    folder = locate(where, part.folder) / part.folder
    return _fingerprint(recipe, [_SOUND, part.class_name], [folder])


def inputs_fingerprint(recipe: Recipe, made: Path) -> str:
    """Return a checksum (32 hex digits) of everything that decides how references are encoded."""
    section, chosen = text_section(recipe), family_of(recipe.model)
    facts: list[object] = [recipe.model.family, chosen.inputs.version]
    facts.append(codec_fingerprint(recipe, made))
    folders = list[Path]()
    for each in further_encoders(recipe, of_captions=False):
        part, of_part = _encoder_folders(each, section.pretrained, made)
        facts += [part.class_name, section.kept_in()]
        folders += of_part
    return _fingerprint(recipe, facts, folders)


def text_fingerprint(recipe: Recipe, made: Path) -> str:
    """Return a checksum (32 hex digits) of everything that decides how captions are encoded."""
    section, chosen = text_section(recipe), family_of(recipe.model)
    parts = chosen.frozen
    if section.kind == "words":
        facts: list[object] = [section.kind, section.num_tokens()]
        return _fingerprint(recipe, [_CAPTIONS, *facts], [made / "tokenizer"])
    part, folders = _encoder_folders(parts.text, section.pretrained, made)
    facts = [section.kind, part.class_name, section.num_tokens(), section.kept_in()]
    facts += _quantization(section)
    # Added only where it matters, so that older caches stay valid.
    if chosen.text.version > 1:
        facts.append(["version", chosen.text.version])
    if chosen.text.by_length and section.num_tokens() > LENGTH_STEP:
        facts.append(["padded to a multiple of", LENGTH_STEP])
    if (second := section.second_encoder()) is not None:
        part, of_second = _encoder_folders(parts.pooled, second.pretrained, made)
        facts += [part.class_name, second.max_tokens, *_quantization(second)]
        folders += of_second
    if parts.processor is not None and section.pretrained is not None:
        found = find_part(section.pretrained, parts.processor)
        facts += [recipe.model.family, chosen.inputs.version]
        folders.append(locate(section.pretrained, found.folder) / found.folder)
    for each in further_encoders(recipe, of_captions=True):
        part, of_part = _encoder_folders(each, section.pretrained, made)
        facts.append(part.class_name)
        folders += of_part
    return _fingerprint(recipe, [_CAPTIONS, *facts], folders)


def _quantization(section: TextSection | PooledSection) -> list[str]:
    # Nothing without it, so that the names of older entries stay valid.
    return [] if section.quantize == "none" else [section.quantize]


def _encoder_folders(
    part: PipelinePart, where: str | None, made: Path
) -> tuple[PipelinePart, list[Path]]:
    if where is None:  # folders text_… and tokenizer…
        return part, sorted(path for path in made.glob("t*") if path.is_dir())
    found = find_part(where, part)
    return found, [locate(where, name) / name for name in (found.folder, found.tokenizer)]


def _fingerprint(recipe: Recipe, facts: list[object], folders: list[Path]) -> str:
    digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16)
    cache = recipe.data.cache
    of_large = _sha256 if cache is None else ContentHashes(cache / "encoders", _sha256).of
    for folder in folders:
        # Marks where a folder begins: else a file that moves to the next one would change nothing.
        digest.update(b"folder")
        # Sorted, as file systems list folders in different orders.
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            # Hidden files are a download's bookkeeping, and read by no loader.
            if path.is_file() and not any(part.startswith(".") for part in name.split("/")):
                # A snapshot of the hub consists of links to files; a large one is named by its
                # SHA-256, and need not be read.
                stored = path.resolve()
                if stored.parent.name == "blobs" and _SHA256.fullmatch(stored.name):
                    content = stored.name
                else:
                    is_large = stored.stat().st_size > _LARGE_BYTES
                    content = of_large(str(stored)) if is_large else _sha256(str(stored))
                digest.update(f"{name} {content}".encode())
    return digest.hexdigest()


def _sha256(path: str) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

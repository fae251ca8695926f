"""The commands of `longtake data`: prepare and inspect training data."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from longtake import errors, fsio, progress
from longtake.cli import say
from longtake.cli.index_report import say_failed, say_indexed
from longtake.formatting import plural, printable

if TYPE_CHECKING:
    from longtake.config import Bucket, Recipe
    from longtake.data.catalog import Catalog
    from longtake.inspection.curriculum_facts import BucketCosts, ReviewCaptions

_MOST_SHOWN = 5

data_app = typer.Typer(help="Prepare and inspect what is trained on.", no_args_is_help=True)

CatalogPath = Annotated[Path, typer.Argument(help="A catalog (Parquet), as `index` writes it.")]
Workers = Annotated[
    int | None, typer.Option(min=1, max=1024, help="Processes; one for each core if unset.")
]
On = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="ray[://HOST:PORT]",
        help="Work on a Ray cluster: RAY_ADDRESS's or this machine's, or that client server's.",
    ),
]
MemoryGib = Annotated[
    float, typer.Option(min=2**-10, max=1024, help="Memory in GiB that decoding a file may take.")
]
TimeoutSeconds = Annotated[
    float,
    typer.Option(min=1, max=1e6, help="Time limit of decoding a file, plus 1 s for each 64 KiB."),
]


@data_app.command()
def index(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="SRC…",
            help="Folders and files of videos and images; lists (.txt), tables (.csv .jsonl "
            ".parquet) of paths; WebDataset tars.",
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="The catalog to write (Parquet); with --kohya, a folder of them.")
    ],
    captions: Annotated[
        Path | None,
        typer.Option(
            help='JSON lines of {"video": path, "caption": text}; or `sidecar`: only clip.txt '
            "beside clip.mp4. Unset: what the sources say."
        ),
    ] = None,
    uncaptioned: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="The caption of clips that have none; {stem} in it is the file's name.",
        ),
    ] = "",
    caption_field: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD",
            help="A field with captions in clip.json beside clip.mp4 and in the lines of "
            "--captions; of several, and of a list, each sample takes one.",
        ),
    ] = None,
    caption_lines: Annotated[
        bool,
        typer.Option(
            "--caption-lines",
            help="Each line of a caption is one of its own; each sample takes one.",
        ),
    ] = False,
    conditioning: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN",
            help="A column of the tables that data.conditioning names: paths, or numbers.",
        ),
    ] = None,
    workers: Workers = None,
    on: On = None,
    kohya: Annotated[
        bool,
        typer.Option(
            "--kohya",
            help="SRC has folders named like `10_sks dog` (repeats and class): write a catalog of "
            "each, and print the lines of a recipe.",
        ),
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Read all files again, the unchanged ones too.")
    ] = False,
    trust_metadata: Annotated[
        bool,
        typer.Option(
            "--trust-metadata",
            help="Count frames by the container and decode one: fast, and damage is found by the "
            "training.",
        ),
    ] = False,
    duplicates: Annotated[
        Literal["drop", "keep"],
        typer.Option(
            help="Files of one content with several captions: one clip, or one for each caption."
        ),
    ] = "drop",
    memory_gib: MemoryGib = 1.0,
    timeout_seconds: TimeoutSeconds = 60.0,
    as_json: say.AsJson = False,
) -> None:
    """Decode every clip once and write a catalog of those that can be trained on.

    The next call reads only new and changed files; after Ctrl-C it resumes.
    """
    with progress.phase_lines(say.console(), "importing PyArrow and PyAV") as enter:
        from longtake.data.decode_limits import Limits
        from longtake.data.index import index as index_clips
        from longtake.data.sources import class_folders
        from longtake.data.tasks import Work, connected

        # Called within the context below, which defines `shown`.
        def advance(done: int, total: int) -> None:
            enter("indexing")
            shown(done, total)

        folders = [each for source in sources if kohya for each in class_folders(source)]
        catalogs = {each.name: out / f"{each.name}.parquet" for each in folders}
        # Catalogs of two folders with the same name would replace each other.
        if len(catalogs) < len(folders):
            raise typer.BadParameter(
                "two SRC have a folder of the same class; index each for itself"
            )
        targets = [
            ([each.path], catalogs[each.name], uncaptioned or each.label) for each in folders
        ]
        reports = {}
        enter("looking for clips")
        with connected(on), progress.counted(say.console(), "index") as shown:
            for some, target, label in targets or [(sources, out, uncaptioned)]:
                reports[target] = index_clips(
                    some,
                    captions=captions,
                    out=target,
                    work=Work(on, workers, advance, Limits(memory_gib, timeout_seconds)),
                    fresh=fresh,
                    conditioning=conditioning or (),
                    label=label,
                    trusts_metadata=trust_metadata,
                    keeps_other_captions=duplicates == "keep",
                    by_line=caption_lines,
                    fields=caption_field or (),
                )
    if as_json:
        found = [asdict(report) | {"catalog": str(path)} for path, report in reports.items()]
        for facts, folder in zip(found, folders, strict=False):  # no folders without --kohya
            facts["repeats"] = folder.repeats
        say.result(found if folders else found[0])
        return
    for path, report in reports.items():
        say_indexed(report, path)
    if folders:
        named = ", ".join(f'{name} = "{path}"' for name, path in catalogs.items())
        times = ", ".join(f"{each.name} = {each.repeats}" for each in folders)
        say.line(f"In a recipe:\n[data]\ncatalogs = {{ {named} }}\nrepeats = {{ {times} }}")


@data_app.command()
def cuts(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="SRC…", help="Films: folders, video files, lists and tables of paths."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The table to write (CSV); `data index` reads it.")],
    threshold: Annotated[
        float,
        typer.Option(
            min=1.0,
            max=100.0,
            help="How many times more frames differ at a cut than around it; 1.5 finds more.",
        ),
    ] = 2.0,
    min_seconds: Annotated[
        float, typer.Option(min=0.0, max=86400.0, help="Shorter scenes are left out.")
    ] = 1.0,
    workers: Workers = None,
    on: On = None,
    memory_gib: MemoryGib = 1.0,
    timeout_seconds: TimeoutSeconds = 60.0,
    as_json: say.AsJson = False,
) -> None:
    """Find the cuts of films, and write a table of their scenes as clips; no file is cut.

    After Ctrl-C the same command resumes.
    """
    from longtake.data.decode_limits import Limits
    from longtake.data.scene_cuts import write_scenes
    from longtake.data.tasks import Work, connected

    with connected(on), progress.counted(say.console(), "cuts") as advance:
        report = write_scenes(
            sources,
            out,
            threshold=threshold,
            min_seconds=min_seconds,
            work=Work(on, workers, advance, Limits(memory_gib, timeout_seconds)),
        )
    if as_json:
        say.result(asdict(report) | {"table": str(report.table)})
        return
    say_failed("rejected", report.rejected)
    say.line(
        f"{plural(report.scenes, 'scene')} in {report.table}, of {plural(report.cuts, 'cut')} in "
        f"{plural(report.files, 'file')}; {report.too_short} shorter than {min_seconds:g} s left "
        f"out, {report.short_files} of them whole files without a cut; "
        f"{plural(len(report.rejected), 'file')} rejected. Make clips of the scenes: longtake data "
        f"index {report.table} --out CATALOG"
    )


@data_app.command()
def prepare(
    catalog: CatalogPath,
    size: Annotated[
        list[str],
        typer.Option(
            help="WIDTHxHEIGHT to cover, such as 832x480; several: each clip gets its nearest."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder to write clips and catalog to.")],
    gop: Annotated[int, typer.Option(help="Frames from keyframe to keyframe.")] = 12,
    crf: Annotated[int, typer.Option(help="Quality of x264: 0 (lossless) to 51.")] = 18,
    fps: Annotated[float | None, typer.Option(help="Maximum number of frames per second.")] = None,
    workers: Workers = None,
    on: On = None,
    memory_gib: MemoryGib = 1.0,
    as_json: say.AsJson = False,
) -> None:
    """Transcode clips to the size that they are trained in, so that reading them is cheap."""
    from longtake.data.decode_limits import Limits
    from longtake.data.encode import Settings
    from longtake.data.encode import prepare as prepare_clips
    from longtake.data.tasks import Work, connected

    settings = Settings(tuple(map(_parse_size, size)), gop, crf, fps)
    with connected(on), progress.counted(say.console(), "prepare") as advance:
        work = Work(on, workers, advance, Limits(memory_gib))
        report = prepare_clips(catalog, out, settings=settings, work=work)
    if as_json:
        say.result(asdict(report) | {"catalog": str(report.catalog)})
        return
    say_failed("rejected", report.rejected)
    before, after = (round(num / 2**20, 1) for num in (report.bytes_before, report.bytes_after))
    say.line(
        f"{plural(report.prepared, 'clip')} in {report.catalog} ({report.reused} were there "
        f"already), {before} MiB became {after} MiB; {len(report.rejected)} rejected, "
        f"{plural(report.duplicates, 'duplicate')} left out."
    )


def _parse_size(text: str) -> tuple[int, int]:
    width, _, height = text.lower().partition("x")
    # `int` alone would take signs, spaces and underscores.
    if not all(re.fullmatch("[0-9]{1,5}", side) for side in (height, width)):
        raise errors.DataError(
            f"--size {text[:80]}: expected WIDTHxHEIGHT in pixels, such as 832x480."
        )
    return int(height), int(width)


@data_app.command()
def score(
    catalog: CatalogPath,
    by: Annotated[
        str,
        typer.Option(help="nouns, motion, length, duplicates, or MODULE:FUNCTION of a clip."),
    ],
    name: Annotated[
        str | None, typer.Option(help="What recipes call it; by default as `--by` does.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The catalog to write; by default the same one.")
    ] = None,
    distance: Annotated[
        int,
        typer.Option(
            min=0,
            max=32,
            help="Of `duplicates`: bits of 256 in which two frames that are alike may differ.",
        ),
    ] = 16,
    workers: Workers = None,
    on: On = None,
    memory_gib: MemoryGib = 1.0,
    as_json: say.AsJson = False,
) -> None:
    """Give every clip a number that stages can select by, such as `nouns <= q40`.

    `duplicates == 0` selects one clip of each group of near-duplicates. After Ctrl-C the same
    command resumes.
    """
    from longtake.data.catalog import Catalog
    from longtake.data.decode_limits import Limits
    from longtake.data.index import check_out
    from longtake.data.scores import score as score_clips
    from longtake.data.tasks import Work, connected

    loaded, target = Catalog.load(catalog), out or catalog
    check_out(target)  # now, as scoring may take hours
    with connected(on), progress.counted(say.console(), "score") as advance:
        work = Work(on, workers, advance, Limits(memory_gib))
        scored = score_clips(loaded, by, name=name, out=target, distance=distance, work=work)
    scored.catalog.save(target)
    # Only now may the journal go from which an interrupted call resumes.
    scored.settle()
    unknown = len(scored.values) - scored.num_known
    facts = {
        "catalog": str(target),
        "name": scored.name,
        "scored": scored.num_known,
        "unknown": unknown,
        "failed": [asdict(each) for each in scored.failed],
    }
    if by == "duplicates":
        largest = scored.groups[0].tolist() if scored.groups else ()
        facts["groups"] = len(scored.groups)
        facts["copies"] = sum(len(rows) - 1 for rows in scored.groups)
        facts["largest"] = [scored.catalog.clip(row).path for row in largest]
    if as_json:
        say.result(facts)
        return
    say_failed("not scored", scored.failed)
    say.line(f"{plural(scored.num_known, 'clip')} of {target} with the attribute {scored.name}.")
    if unknown:
        say.line(f"{plural(unknown, 'clip')} without it; no condition on it selects them.")
    if by == "nouns":
        _say_other_languages(loaded)
    if by == "duplicates":
        _say_duplicates(scored.name, facts)


def _say_other_languages(catalog: "Catalog") -> None:
    from longtake.data.scores import caption_language

    languages = Counter(map(caption_language, catalog.captions()))
    others = {name: n for name, n in languages.items() if name not in ("", "English")}
    if others:
        listed = ", ".join(f"{name} ({n:,})" for name, n in others.items())
        say.line(
            f"Captions seem to be {listed}, and `nouns` tags English only: their counts are wrong "
            "or missing. Score them by `length` or by a function of your own that knows the "
            "language (--by module:function)."
        )


def _say_duplicates(name: str, facts: dict[str, Any]) -> None:
    if not facts["groups"]:
        say.line("No two clips are near-duplicates of each other.")
        return
    paths = [printable(path) for path in facts["largest"][:_MOST_SHOWN]]
    more = len(facts["largest"]) - len(paths)
    say.line(
        f"{plural(facts['groups'], 'group')} of near-duplicates with "
        f"{plural(facts['copies'], 'copy', 'copies')}, which a stage with `{name} == 0` leaves "
        f"out. The largest group: {paths[0]} is kept; copies are {', '.join(paths[1:])}"
        + (f" and {more:,} more." if more else ".")
    )


@data_app.command()
def caption(
    catalog: CatalogPath,
    captioner: Annotated[
        str,
        typer.Option(
            "--with",
            metavar="MODULE:CLASS",
            help="What writes captions: models of transformers, or a class of your own.",
        ),
    ] = "longtake.models.caption_writer:TransformersCaptioner",
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            metavar="KEY=VALUE",
            help="An argument of that class, such as model=FOLDER or device=cuda:1.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The catalog to write; by default the same one.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Replace captions too; unset: only clips without one.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Use nothing of an interrupted call.")
    ] = False,
    batch_size: Annotated[
        int, typer.Option(min=1, max=1024, help="Clips that the model is given at once.")
    ] = 1,
    frames: Annotated[
        int, typer.Option(min=1, max=1024, help="Frames of a clip, evenly spaced, at most.")
    ] = 8,
    side: Annotated[
        int, typer.Option(min=16, max=8192, help="Longer side of the frames, in pixels, at most.")
    ] = 512,
    jsonl: Annotated[
        Path | None,
        typer.Option(help="Also write all captions as JSON lines, for `data index --captions`."),
    ] = None,
    workers: Workers = None,
    memory_gib: MemoryGib = 1.0,
    as_json: say.AsJson = False,
) -> None:
    """Caption clips with a local model; after Ctrl-C the same command resumes."""
    from longtake.data import generated_captions
    from longtake.data.catalog import Catalog
    from longtake.data.decode_limits import Limits
    from longtake.data.index import check_out
    from longtake.data.tasks import Work

    loaded, target = Catalog.load(catalog), out or catalog
    check_out(target)  # now, as captioning may take hours
    with progress.phase_lines(say.console(), "loading the captioner"):
        # Before clips are decoded: a model that cannot be loaded ends the command at once.
        made, given = _captioner(captioner, options or ())
    with progress.counted(say.console(), "caption") as advance:
        done = generated_captions.caption(
            loaded,
            made,
            out=target,
            name=captioner,
            options=given,
            every=every,
            fresh=fresh,
            batch_size=batch_size,
            choice=generated_captions.FrameChoice(frames, side),
            work=Work(None, workers, advance, Limits(memory_gib)),
        )
    done.save(target)
    if jsonl is not None:
        generated_captions.write_lines(done.catalog, jsonl)
    facts: dict[str, Any] = {
        "catalog": str(target),
        "captioned": done.num_written,
        "without_caption": sum(not text for text in done.catalog.captions()),
        "failed": [asdict(each) for each in done.failed],
    }
    if as_json:
        say.result(facts)
        return
    say_failed("not captioned", done.failed)
    say.line(f"{plural(done.num_written, 'clip')} of {target} captioned by {captioner}.")
    if facts["without_caption"]:
        say.line(
            f"{plural(facts['without_caption'], 'clip')} without a caption: training leaves such "
            "clips out."
        )


def _captioner(path: str, options: "Sequence[str]") -> tuple[Any, dict[str, object]]:
    """Return the captioner: an object of the class "package.module:Class", and its arguments."""
    from longtake import config, trust
    from longtake.models.pretrained import construct

    if not all(path.partition(":")):
        raise errors.RecipeError(f"--with {path!r} is no name of a class; write module:Class.")
    given = {}
    for text in options:
        key, _, value = (part.strip() for part in text.partition("="))
        if not value or not key.isidentifier():
            raise errors.RecipeError(
                f"--option {text[:80]!r}: expected KEY=VALUE, such as model=FOLDER."
            )
        # Values are parsed as those of --set, so that numbers and booleans are not texts.
        given[key] = config.parse_value(value)
    found = trust.import_class(path, "--with")
    if not callable(getattr(found, "captions", None)):
        raise errors.RecipeError(
            f"--with {path!r} has no method captions(frames, clips) that returns a list of texts; "
            "see docs/guides/fine-tuning-data.md."
        )
    return construct("--option", found, given), given


@data_app.command()
def show(
    catalog: CatalogPath,
    recipe: Annotated[
        Path | None, typer.Argument(help="A recipe: show what it makes of the catalog.")
    ] = None,
    changes: say.Changes = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Also draw it: the name.html to write."),
    ] = None,
    as_json: say.AsJson = False,
) -> None:
    """Show a catalog, and which clips, buckets, crops and stages a recipe makes of it."""
    from longtake import config
    from longtake.data.auto_buckets import with_buckets
    from longtake.inspection import curriculum_facts
    from longtake.inspection.catalog_tables import print_show

    if recipe is None and changes:
        raise typer.BadParameter("there is no RECIPE that --set could change")
    if out is not None:
        from longtake.board import data_page

        fsio.check_picture_name(out, (".html",))
    # `config.load`, not `load_recipe`: looking at data imports nothing that the recipe names.
    loaded = None if recipe is None else with_buckets(config.load(recipe, changes or ()), catalog)
    review_captions = None if loaded is None else _captions_reviewer(loaded)
    loaded, costs = (None, None) if loaded is None else _with_costs(loaded)
    data = curriculum_facts.load(catalog, loaded)
    shown = curriculum_facts.describe(data, review_captions, costs)
    if out is not None:
        data_page.write_catalog_report(out, data, shown)
    if as_json:
        say.result(shown)
    else:
        print_show(say.console(), shown)
        if out is not None:
            say.line(f"wrote {out}")
    # The exit code of `train` and `plan` for a recipe that they refuse.
    if shown.get("refusal"):
        raise typer.Exit(2)


def _with_costs(recipe: "Recipe") -> "tuple[Recipe, BucketCosts]":
    """Return the recipe with batch sizes of all buckets (clip shapes), and their known costs."""
    from longtake.inspection.curriculum_facts import BucketCosts
    from longtake.planner import batch_sizes, cost, devices  # which import torch
    from longtake.trust import training_classes

    if training_classes(recipe).keys() - {"optimizer.kind"}:
        return recipe, BucketCosts()  # the recipe names code of its own, which is not run here
    tokens: dict[Bucket, int] = {}
    try:
        recipe = batch_sizes.with_batch_sizes(recipe)
        tokens = batch_sizes.bucket_tokens(recipe)
        device = devices.device_budget(recipe)
        seconds = cost.clip_seconds(recipe, device, tokens)
    except errors.LongtakeError:
        # Batch sizes follow from tokens here: without them there is nothing to show.
        if recipe.data.tokens_per_batch is not None and not tokens:
            raise
        return recipe, BucketCosts(tokens)  # no configuration here, or parts that do not fit
    return recipe, BucketCosts(tokens, seconds, device.name)


def _captions_reviewer(recipe: "Recipe") -> "ReviewCaptions":
    from functools import partial

    from longtake.models.caption_tokens import review_captions

    if recipe.text.pretrained is None:
        return partial(review_captions, recipe.text, None)
    from longtake.models.base import family  # which imports torch
    from longtake.models.components import text_section

    encoder = family(recipe.model.family).frozen.text
    return partial(review_captions, text_section(recipe), encoder)


@data_app.command()
def cache(
    recipe: Annotated[Path, typer.Argument(help="A recipe (TOML) with data.cache.")],
    changes: say.Changes = None,
    on: On = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of pieces at a time, with --on.")
    ] = None,
    shard: Annotated[str | None, typer.Option(help="Do only part I of N, such as 1/4.")] = None,
    trust: say.Trust = False,
    as_json: say.AsJson = False,
) -> None:
    """Compute a recipe's latents and prompt embeddings ahead, so that training need not wait.

    Only what is missing is computed, so it can be stopped, started again, and run in several
    processes at once: by `torchrun --nproc-per-node 2 -m longtake data cache RECIPE`, with `--on`,
    or alone, each with a `--shard`.
    """
    with progress.phase_lines(say.console(), "importing PyTorch"):
        from longtake.data.auto_buckets import with_buckets
        from longtake.data.packs import CACHE_KINDS
        from longtake.data.tasks import Work, connected
        from longtake.planner.encoding import describe_tile
        from longtake.training.latent_cache import cache_ahead
        from longtake.trust import load_recipe

    if workers and on is None:
        raise typer.BadParameter("--workers is for --on; here, data.workers of the recipe decode")
    number, slash, total = ("1/1" if shard is None else shard).partition("/")
    is_part = slash and number.isdecimal() and total.isdecimal()
    if not is_part or not 1 <= int(number) <= int(total):
        raise typer.BadParameter(f"--shard {shard}: expected I/N, such as 1/4, 2/4, 3/4 and 4/4")
    part = int(number) - 1, int(total)
    # Buckets that are chosen from the catalog decide the latents' shapes, as in training.
    loaded = with_buckets(load_recipe(recipe, changes or (), trust=trust))
    with connected(on):
        facts = cache_ahead(loaded, say.console(), Work(on, workers), part)
    if as_json:
        say.result(facts)
        return
    for failed in facts["failed"]:
        say.line(f"  cannot be decoded: {failed['path']}: {failed['reason']}")
    counts = (
        f"{facts[kind]['present'] + facts[kind]['computed']} {kind} "
        f"({facts[kind]['computed']} computed now)"
        for kind in CACHE_KINDS
    )
    mebibytes = round(facts["bytes"] / 2**20, 1)
    how = describe_tile(facts["encode_tile"])
    tiles = f"; clips {how}" if how else ""
    say.line(f"{facts['cache']}: {', '.join(counts)}{tiles}; {mebibytes} MiB written.")


@data_app.command()
def audit(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    as_json: say.AsJson = False,
) -> None:
    """Prove from the ledger what a run consumed: exit code 1 if a clip was repeated or missed."""
    from longtake.data.audit import audit as audit_run
    from longtake.inspection.audit_tables import audit_sentences, audit_table
    from longtake.inspection.facts import restarts
    from longtake.run_dir import RunDirectory

    directory = RunDirectory(run)
    found, again = audit_run(directory), restarts(directory)
    say.skipped_lines()
    if as_json:
        say.result({"ok": found.ok, **asdict(found), "restarts": again})
    else:
        say.console().print(audit_table(found))
        for sentence in audit_sentences(found, again, _MOST_SHOWN):
            say.line(sentence)
    if not found.ok:
        raise typer.Exit(1)

"""The verbs of `longtake data`: prepare and inspect what is trained on."""

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longtake import errors, progress
from longtake.cli import say
from longtake.formatting import plural, printable

if TYPE_CHECKING:
    from longtake.config import Recipe
    from longtake.data.audit import Audit, EpochAudit
    from longtake.data.index import IndexReport
    from longtake.data.summary import ReviewCaptions

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
    float,
    typer.Option(min=2**-10, max=1024, help="Memory that decoding one file may take, in GiB."),
]
TimeoutSeconds = Annotated[
    float,
    typer.Option(
        min=1,
        max=1e6,
        help="How long decoding one file may take, besides 1 s for each 64 KiB of it.",
    ),
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
    memory_gib: MemoryGib = 1.0,
    timeout_seconds: TimeoutSeconds = 60.0,
    as_json: say.AsJson = False,
) -> None:
    """Decode every clip once and write a catalog of those that can be trained on.

    The next call reads only new and changed files; after Ctrl-C it resumes.
    """
    with progress.phase_lines(say.console(), "importing PyArrow and PyAV") as enter:
        from longtake.data.decode import Limits
        from longtake.data.index import index as index_clips
        from longtake.data.sources import class_folders
        from longtake.data.tasks import connected

        def advance(done: int, total: int) -> None:
            enter("indexing")
            shown(done, total)

        folders = [each for source in sources if kohya for each in class_folders(source)]
        catalogs = {each.name: out / f"{each.name}.parquet" for each in folders}
        if len(catalogs) < len(folders):
            raise typer.BadParameter(
                "two SRC have a folder of the same class; index each for itself"
            )
        targets = [([each.path], catalogs[each.name], each.label) for each in folders]
        reports = {}
        enter("looking for clips")
        with connected(on), progress.counted(say.console(), "index") as shown:
            for some, target, label in targets or [(sources, out, "")]:
                reports[target] = index_clips(
                    some,
                    captions=captions,
                    out=target,
                    on=on,
                    workers=workers,
                    progress=advance,
                    fresh=fresh,
                    limits=Limits(memory_gib, timeout_seconds),
                    conditioning=conditioning or (),
                    label=label,
                )
    if as_json:
        found = [asdict(report) | {"catalog": str(path)} for path, report in reports.items()]
        repeats = [{"repeats": each.repeats} for each in folders]
        merged = [one | more for one, more in zip(found, repeats, strict=bool(folders))]
        say.result(merged or found[0])
        return
    for path, report in reports.items():
        _say_indexed(report, path)
    if folders:
        named = ", ".join(f'{name} = "{path}"' for name, path in catalogs.items())
        times = ", ".join(f"{each.name} = {each.repeats}" for each in folders)
        say.line(f"In a recipe:\n[data]\ncatalogs = {{ {named} }}\nrepeats = {{ {times} }}")


def _say_indexed(report: "IndexReport", out: Path) -> None:
    from longtake.data.sources import describe_ignored

    for rejection in report.rejected:
        say.line(f"  rejected: {printable(rejection.path)}: {printable(rejection.reason)}")
    for name in report.unmatched_captions:
        say.line(f"  no such clip, though a caption names it: {printable(name)}")
    for sentence in describe_ignored(report.passed_over, report.unreadable):
        say.line(f"  {printable(sentence)}")
    if report.scores_dropped:
        say.line(f"  {report.scores_dropped} clips lost their scores: their captions changed")
    say.line(
        f"{plural(report.accepted, 'clip')} in {out}: {report.accepted - report.without_caption} "
        f"with a caption, {report.without_caption} without; "
        f"{plural(len(report.rejected), 'file')} rejected, "
        f"{plural(report.duplicates, 'duplicate')} left out, {report.unchanged} not read again."
    )
    if report.without_caption:
        say.line(
            f"{plural(report.without_caption, 'clip')} without a caption: training leaves such "
            "clips out. Give captions with --captions, or clip.txt beside clip.mp4, and index "
            "again."
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
    fps: Annotated[float | None, typer.Option(help="At most so many frames a second.")] = None,
    workers: Workers = None,
    on: On = None,
    memory_gib: MemoryGib = 1.0,
    as_json: say.AsJson = False,
) -> None:
    """Transcode clips to the size that they are trained in, so that reading them is cheap."""
    from longtake.data.encode import Settings
    from longtake.data.encode import prepare as prepare_clips
    from longtake.data.tasks import connected

    settings = Settings(tuple(map(_parse_size, size)), gop, crf, fps)
    with connected(on), progress.counted(say.console(), "prepare") as advance:
        report = prepare_clips(
            catalog,
            out,
            settings=settings,
            on=on,
            workers=workers,
            progress=advance,
            memory_gib=memory_gib,
        )
    if as_json:
        say.result(asdict(report) | {"catalog": str(report.catalog)})
        return
    for rejection in report.rejected:
        say.line(f"  rejected: {rejection.path}: {rejection.reason}")
    before, after = (round(num / 2**20, 1) for num in (report.bytes_before, report.bytes_after))
    say.line(
        f"{plural(report.prepared, 'clip')} in {report.catalog} ({report.reused} were there "
        f"already), {before} MiB became {after} MiB; {len(report.rejected)} rejected, "
        f"{plural(report.duplicates, 'duplicate')} left out."
    )


def _parse_size(text: str) -> tuple[int, int]:
    width, _, height = text.lower().partition("x")
    if not all(re.fullmatch("[0-9]{1,5}", side) for side in (height, width)):
        raise errors.DataError(
            f"--size {text[:80]}: expected WIDTHxHEIGHT in pixels, such as 832x480."
        )
    return int(height), int(width)


@data_app.command()
def score(
    catalog: CatalogPath,
    by: Annotated[str, typer.Option(help="nouns, motion, length, or MODULE:FUNCTION of a clip.")],
    name: Annotated[
        str | None, typer.Option(help="What recipes call it; by default as `--by` does.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The catalog to write; by default the same one.")
    ] = None,
    workers: Workers = None,
    on: On = None,
    memory_gib: MemoryGib = 1.0,
    as_json: say.AsJson = False,
) -> None:
    """Give every clip a number that stages can select by, such as `nouns <= q40`.

    After Ctrl-C the same command resumes.
    """
    from longtake.data.catalog import Catalog
    from longtake.data.index import check_out
    from longtake.data.scores import score as score_clips
    from longtake.data.tasks import connected

    loaded, target = Catalog.load(catalog), out or catalog
    check_out(target)  # scoring may take hours
    with connected(on), progress.counted(say.console(), "score") as advance:
        scored = score_clips(
            loaded,
            by,
            name=name,
            on=on,
            workers=workers,
            out=target,
            progress=advance,
            memory_gib=memory_gib,
        )
    scored.catalog.save(target)
    scored.settle()
    facts = {
        "catalog": str(target),
        "name": scored.name,
        "scored": scored.num_known,
        "unknown": len(scored.values) - scored.num_known,
        "failed": [asdict(each) for each in scored.failed],
    }
    if as_json:
        say.result(facts)
        return
    for each in scored.failed:
        say.line(f"  not scored: {each.path}: {each.reason}")
    say.line(
        f"{facts['scored']} clips of {facts['catalog']} have the attribute {scored.name}; of "
        f"{facts['unknown']} it is unknown, and no condition on it selects those."
    )


@data_app.command()
def show(
    catalog: CatalogPath,
    recipe: Annotated[
        Path | None, typer.Argument(help="A recipe: show what it makes of the catalog.")
    ] = None,
    changes: say.Changes = None,
    out: Annotated[
        Path | None,
        typer.Option(help="A folder for pictures: buckets, histograms, and a contact sheet."),
    ] = None,
    as_json: say.AsJson = False,
) -> None:
    """Show a catalog, and which clips, buckets, crops and stages a recipe makes of it."""
    from longtake import config
    from longtake.data.auto_buckets import with_buckets
    from longtake.data.summary import print_show
    from longtake.data.summary import show as look_at

    if recipe is None and changes:
        raise typer.BadParameter("there is no RECIPE that --set could change")
    loaded = None if recipe is None else with_buckets(config.load(recipe, changes or ()))
    review_captions = None if loaded is None else _captions_reviewer(loaded)
    with progress.counted(say.console(), "draw") as advance:
        shown = look_at(catalog, loaded, out, advance, review_captions)
    if as_json:
        say.result(shown)
    else:
        print_show(say.console(), shown)
    if shown.get("refusal"):
        raise typer.Exit(2)


def _captions_reviewer(recipe: "Recipe") -> "ReviewCaptions":
    from functools import partial

    from longtake.models.captions import review_captions

    if recipe.text.pretrained is None:
        return partial(review_captions, recipe.text, None)
    from longtake.models.base import family  # which imports torch
    from longtake.models.build import text_section

    encoder = family(recipe.model.family).frozen.text
    return partial(review_captions, text_section(recipe), encoder)


@data_app.command()
def cache(
    recipe: Annotated[Path, typer.Argument(help="A recipe (TOML) with data.cache.")],
    changes: say.Changes = None,
    on: On = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="With --on: at most so many at a time.")
    ] = None,
    trust: say.Trust = False,
    as_json: say.AsJson = False,
) -> None:
    """Compute a recipe's latents and prompt embeddings ahead, so that training need not wait.

    Only what is missing is computed, so it can be stopped, started again, and run in several
    processes at once, alone or by `torchrun --nproc-per-node 2 -m longtake data cache
    RECIPE`.
    """
    with progress.phase_lines(say.console(), "importing PyTorch"):
        from longtake.data.auto_buckets import with_buckets
        from longtake.data.cache_fill import CACHE_KINDS
        from longtake.data.tasks import connected
        from longtake.training.latent_cache import cache_ahead
        from longtake.trust import load_recipe

    if workers and on is None:
        raise typer.BadParameter("--workers is for --on; here, data.workers of the recipe decode")
    loaded = with_buckets(load_recipe(recipe, changes or (), trust=trust))
    with connected(on):
        facts = cache_ahead(loaded, say.console(), on=on, workers=workers)
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
    say.line(f"{facts['cache']}: {', '.join(counts)}; {mebibytes} MiB written.")


@data_app.command()
def audit(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    as_json: say.AsJson = False,
) -> None:
    """Prove from the ledger what a run consumed: exit code 1 if a clip was repeated or missed."""
    from longtake.data.audit import audit as audit_run
    from longtake.run_dir import RunDirectory

    found = audit_run(RunDirectory(run))
    say.skipped_lines()
    if as_json:
        say.result({"ok": found.ok, **asdict(found)})
    else:
        _say_audit(found)
    if not found.ok:
        raise typer.Exit(1)


def _say_audit(found: "Audit") -> None:
    from rich import box
    from rich.table import Table

    names = ("seen", "repeated", "missing", "rejected", "skipped")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("stage", "catalog", "epochs", *names, "over"):
        table.add_column(name, no_wrap=True, justify="right" if name in names else "left")
    for epochs in _alike(found.epochs):
        first, last = epochs[0], epochs[-1]
        counts = (getattr(first, name) for name in names)
        number = f"{first.epoch}-{last.epoch} each" if last is not first else str(first.epoch)
        is_over = "yes" if first.is_over else "no"
        table.add_row(first.stage, first.source, number, *map(str, counts), is_over)
    say.console().print(table)
    for epoch in (epoch for epoch in found.epochs if not epoch.is_exact):
        say.line(
            f"  epoch {epoch.epoch} of stage {epoch.stage}, catalog {epoch.source}: "
            f"{epoch.repeated} repeated, {epoch.missing} missing, {epoch.unplanned} that do not "
            f"belong there; clips whose identity begins with {', '.join(epoch.examples)}"
        )
    steps = found.end_step - found.num_skipped
    say.line(f"{steps} steps; {found.num_abandoned} samples of abandoned steps do not count.")
    if found.num_skipped:
        samples = sum(epoch.skipped for epoch in found.epochs)
        say.line(
            f"The guard skipped {found.num_skipped} batches of {samples} samples for good: they "
            "were not trained in their epochs, and are not missing there."
        )
    for where in found.two_writers[:_MOST_SHOWN]:
        say.line(f"Two launches trained this run at the same time: {where}.")
    exact = "Every clip was trained exactly as often as it should have been."
    if found.two_writers:
        say.line(
            "NOT EXACT: what two launches wrote cannot be separated. Resume from a checkpoint "
            "before that, in a copy of the run."
        )
    else:
        say.line(exact if found.ok else "NOT EXACT: clips were repeated, missed or out of place.")


def _alike(epochs: "Sequence[EpochAudit]") -> "list[list[EpochAudit]]":
    """Runs of epochs of which the same is to be said."""
    runs: list[list[EpochAudit]] = []
    for epoch in epochs:
        if runs and asdict(epoch) | {"epoch": 0} == asdict(runs[-1][0]) | {"epoch": 0}:
            runs[-1].append(epoch)
        else:
            runs.append([epoch])
    return runs

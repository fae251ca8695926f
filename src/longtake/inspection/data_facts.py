"""Facts of a run's catalogs and of the plan that it follows.

Catalogs are read whole, and not at all if they are large: `longtake data show` reads any size.
"""

import shlex
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from longtake import errors, fsio, process
from longtake.config import DataSection, Recipe
from longtake.data import ledger, stages
from longtake.data.catalog import Catalog, check_version
from longtake.data.plan import Plan, begin
from longtake.data.plan_history import PlanRecord, SkippedRanges, parsed_order, rebuild
from longtake.formatting import one_line, printable
from longtake.inspection import catalog_facts, curriculum_facts
from longtake.inspection.reader import RunFacts, said_of_link
from longtake.run_dir import RunDirectory

MOST_CLIPS: Final = 2_000_000
"""Maximum number of clips in all of a run's catalogs; above it, no catalog is read for a page.

A million clips take about 3 s and 650 MiB, once for each change of the catalogs. Clips times
plans are limited alike: above the limit, a run's earlier plans are not made again."""
_MOST_BYTES: Final = 2**30  # of the columns in memory, as lists of timestamps may be long
_MOST_CLIPS_BY_BUCKETS: Final = 32_000_000  # each bucket is tried on each clip
MOST_CATALOGS: Final = 8
_MOST_FILES: Final = 4000
_MOST_STAGES: Final = 64
_NUM_BINS, _NUM_EXAMPLES = 40, 3
_MOST_DRAWN: Final = 1e290  # values beyond it are left out: differences could be infinite
UNREADABLE: Final = (errors.LongtakeError, OSError, ValueError, ArithmeticError, pa.ArrowException)
"""Exceptions that damaged catalogs and records may raise; a page shows them as problems."""


# --- Files ------------------------------------------------------------------------------------


def catalog_files(run: RunDirectory) -> list[Path]:
    """Return the copies of catalogs in a run directory, the newest first.

    Raises:
        DataError: a copy, or the folder of the copies, is a symbolic link.
    """
    _refuse_links(run.catalogs_path)
    found = list(run.catalogs_path.glob("*.parquet"))[:_MOST_FILES]
    _refuse_links(*found)
    return sorted(found, key=lambda path: (-path.lstat().st_mtime_ns, path.name))


def ledger_files(run: RunDirectory) -> list[Path]:
    """Return files of a run's ledger (its record of consumed samples), about `_MOST_FILES` at most.

    Raises:
        DataError: a file or a folder of the ledger is a symbolic link.
    """
    _refuse_links(run.ledger_path)
    folders = sorted(run.ledger_path.glob("launch_*"))
    files = [folder / "launch.json" for folder in folders]
    for folder in folders:
        if len(files) < _MOST_FILES:
            files += sorted(folder.glob("rank_*.bin"))
    _refuse_links(*folders, *files)
    return files


def _refuse_links(*paths: Path) -> None:
    for path in paths:
        if path.is_symlink():
            raise errors.DataError(said_of_link(path))


def versions(paths: Collection[Path]) -> tuple[Hashable, ...]:
    """Return a value that changes when any of the files at the given paths does."""
    return tuple((path.name, fsio.file_version(path)) for path in paths)


# --- Catalogs and the plan --------------------------------------------------------------------


@dataclass(frozen=True)
class CatalogFacts:
    """Facts of one catalog of the recipe: its clips, rejected files and lengths of videos."""

    source: str
    file: str
    stats: dict[str, Any]
    """Facts of the catalog from `catalog_facts.catalog_stats`, without its key `rejected`."""
    rejections: list[dict[str, Any]]
    """`count`, `reason` and `examples` (paths) for each reason why files were rejected, by
    count."""
    seconds: "Histogram | None"
    """Histogram of the lengths of the catalog's videos in seconds; None if it has none."""


@dataclass(frozen=True)
class StageSpan:
    """Clips that one stage selects, within a histogram of all clips: range, mean and counts."""

    stage: str
    place: int
    """Index of the stage among the stages of the curriculum."""
    conditions: str
    low: float
    high: float
    mean: float
    num_clips: int
    counts: list[int]
    """Number of clips that the stage selects in each bin of the histogram."""


@dataclass(frozen=True)
class Histogram:
    """Histogram of one attribute of all clips, with the part of them that each stage selects."""

    name: str
    source: str
    edges: list[float]
    counts: list[int]
    num_unknown: int
    spans: list[StageSpan]


@dataclass(frozen=True)
class StageStrip:
    """Each stage's share of the batches over the run, as a page draws it in a strip."""

    names: list[str]
    shares: list[list[float]]
    """Share of the batches, indexed by stage and then by span of consecutive batches."""
    end: int
    """Total number of batches that the strip covers."""

    def stage_at(self, batch: int) -> str:
        """Return the stage with the largest share of the batches around the given batch number."""
        span = min(len(self.shares[0]) - 1, batch * len(self.shares[0]) // self.end)
        return max(zip(self.shares, self.names, strict=True), key=lambda each: each[0][span])[1]


@dataclass(frozen=True)
class DataFacts:
    """Facts of a run's catalogs and of its recipe's curriculum; unreadable parts are empty."""

    catalogs: list[CatalogFacts]
    summary: dict[str, Any] | None
    """Facts of what the recipe trains from `curriculum_facts.plan_summary`; None if unknown."""
    strip: StageStrip | None
    histograms: list[Histogram]
    num_plans: int
    """Number of plans for the order of clips that the run has followed; each change of data adds
    one."""
    problems: list[str]


NO_DATA: Final = DataFacts([], None, None, [], 0, [])


def read_data(facts: RunFacts) -> DataFacts:
    """Return facts of a run's data; its files are read again only after one has changed."""
    run, problems = facts.run, list[str]()
    try:
        files = catalog_files(run)
    except (errors.LongtakeError, OSError) as error:
        return replace(NO_DATA, problems=[one_line(error)])
    history = list[PlanRecord]()
    try:
        if ledger_files(run):
            history = list(ledger.newest_history(run.ledger_path))
    except (errors.LongtakeError, OSError) as error:
        problems.append(one_line(error))
    if not files:
        return replace(NO_DATA, problems=problems)
    # The ledger's rank files grow with every step, but nothing here depends on them.
    launches = sorted(run.ledger_path.glob("launch_*/launch.json"))[-1:]
    version = versions([*files, *launches, run.recipe_path])
    found = facts.kept("data", version, lambda: _read_data(facts, files, history))
    release_memory()
    return replace(found, problems=[*problems, *found.problems])


def _read_data(facts: RunFacts, files: Sequence[Path], history: Sequence[PlanRecord]) -> DataFacts:
    recipe, catalogs = facts.recipe, dict[str, Catalog]()
    chosen, problems = _sources(recipe, files, history)
    # The plan mixes all catalogs: it can be shown only if every one of them is known and read.
    has_plan = recipe is not None and not problems and len(chosen) <= MOST_CATALOGS
    chosen = dict(list(chosen.items())[:MOST_CATALOGS])
    if _are_large(chosen.values()):
        words = [process.command(), "data", "show", str(next(iter(chosen.values())))]
        if len(chosen) == 1:  # a recipe of several names the original files, not the copies
            words.append(str(facts.run.recipe_path))
        said = (
            f"The run's catalogs have more than {MOST_CLIPS:,} clips or "
            f"{_MOST_BYTES // 2**20} MiB, too many to read for a page. To see all of them: "
            f"{shlex.join([*words, '--out', 'data.html'])}"
        )
        return replace(NO_DATA, num_plans=len(history), problems=[*problems, said])
    for source, path in chosen.items():
        try:
            catalogs[source] = Catalog.load(path)
        except UNREADABLE as error:
            problems.append(one_line(error))
    found = DataFacts(
        [
            _catalog_facts(source, f"catalogs/{chosen[source].name}", catalog)
            for source, catalog in catalogs.items()
        ],
        *(None, None, []),
        num_plans=len(history),
        problems=problems,
    )
    if recipe is None or not has_plan or not catalogs or catalogs.keys() != chosen.keys():
        return found
    try:
        return _with_plan(found, facts, recipe, catalogs, history)
    except (*UNREADABLE, LookupError, TypeError, AssertionError) as error:
        return replace(found, problems=[*problems, one_line(error)])


def _are_large(paths: Iterable[Path]) -> bool:
    num_rows = num_bytes = 0
    for path in paths:
        with suppress(*UNREADABLE):  # a damaged catalog is named where it is read
            check_version(path)
            metadata = pq.read_metadata(path)
            num_rows += metadata.num_rows
            groups = range(metadata.num_row_groups)
            num_bytes += sum(metadata.row_group(number).total_byte_size for number in groups)
    return num_rows > MOST_CLIPS or num_bytes > _MOST_BYTES


def facts_of(loaded: curriculum_facts.LoadedData, summary: dict[str, Any]) -> DataFacts:
    """Return the facts of loaded catalogs; `summary` comes from `curriculum_facts.describe`."""
    catalogs = [
        _catalog_facts(source, str(loaded.paths[source]), catalog)
        for source, catalog in loaded.catalogs.items()
    ]
    found = replace(NO_DATA, catalogs=catalogs)
    if loaded.recipe is None or loaded.plan is None:
        return found
    return replace(
        found,
        summary=summary,
        strip=_strip([loaded.plan], loaded.recipe.training.steps),
        histograms=_histograms(loaded.plan, loaded.recipe.data, loaded.catalogs),
    )


def release_memory() -> None:
    """Return freed memory of read catalogs to the system; malloc and Arrow would keep it."""
    pa.default_memory_pool().release_unused()
    process.return_freed_memory()


def _sources(
    recipe: Recipe | None, files: Sequence[Path], history: Sequence[PlanRecord]
) -> tuple[dict[str, Path], list[str]]:
    """Map each catalog of the run's newest plan to its file; sentences say which are not known."""
    if history:
        names = {name: each["edition"] for name, each in history[-1]["catalogs"].items()}
        known = {path.stem: path for path in files}
        missing = [name for name, edition in names.items() if edition not in known]
        found = {name: known[edition] for name, edition in names.items() if edition in known}
        if not missing:
            return found, []
        gone = ", ".join(map(printable, missing))
        said = f"The run's copy of the catalog {gone} is missing: nothing of its plan can be shown."
        return found, [said]
    sources = [] if recipe is None else list(recipe.data.sources())
    if len(sources) == 1:
        return {sources[0]: files[0]}, []
    said = "Which catalog is which is in the ledger, and there is none: no plan can be shown."
    return {path.stem: path for path in files}, [said]


def _catalog_facts(source: str, file: str, catalog: Catalog) -> CatalogFacts:
    examples = dict[str, list[str]]()
    for each in catalog.rejected:
        paths = examples.setdefault(each.reason, [])
        if len(paths) < _NUM_EXAMPLES:
            paths.append(each.path)
    stats = catalog_facts.catalog_stats(catalog)
    counts = Counter(stats["reject_reasons"]).most_common()
    seconds = catalog.column("duration_seconds").astype(np.float64)
    histogram = _histogram("seconds of video", source, seconds[seconds > 0])
    return CatalogFacts(
        source,
        file,
        {name: value for name, value in stats.items() if name != "rejected"},
        [{"count": n, "reason": why, "examples": examples[why]} for why, n in counts],
        histogram,
    )


def _with_plan(
    found: DataFacts,
    facts: RunFacts,
    recipe: Recipe,
    catalogs: Mapping[str, Catalog],
    history: Sequence[PlanRecord],
) -> DataFacts:
    data, batch_size = recipe.data, recipe.training.global_batch_size
    if history:
        # The recorded order counts: the recipe may have been changed since.
        data = data.model_copy(update=parsed_order(history[-1]))
        batch_size = history[-1]["batch_size"]
    curriculum = data.curriculum()
    num_buckets = max(len(stage.buckets or data.buckets) for stage in curriculum)
    if len(curriculum) > _MOST_STAGES:
        raise errors.DataError(f"The recipe has more than {_MOST_STAGES} stages.")
    if num_buckets * sum(map(len, catalogs.values())) > _MOST_CLIPS_BY_BUCKETS:
        raise errors.DataError(f"The recipe has {num_buckets} buckets, too many for these clips.")
    plan = begin(catalogs, data, batch_size, recipe.seed)
    recipe = recipe.model_copy(update={"data": data})
    result = curriculum_facts.plan_summary(plan, recipe)
    plans, problems = [plan], list(found.problems)
    if len(history) > 1:
        plans, said = _followed(facts, recipe, plan, catalogs, history)
        problems += said
    spans = [each["skipped"] for each in facts.events if each["event"] == "rolled_back"]
    return replace(
        found,
        summary=result,
        # Skipped batches are numbered too, and training makes up for them.
        strip=_strip(plans, recipe.training.steps + len(SkippedRanges.of(spans))),
        histograms=_histograms(plan, data, catalogs),
        problems=problems,
    )


def _followed(
    facts: RunFacts,
    recipe: Recipe,
    plan: Plan,
    catalogs: Mapping[str, Catalog],
    history: Sequence[PlanRecord],
) -> tuple[list[Plan], list[str]]:
    """Return the plans that a run followed as its data changed; else `plan` alone, and why."""
    changes = ", ".join(f"{each['step']:,}" for each in history[1:])
    said = f"The data changed at batch {changes}; the stages are drawn as a new run has them"
    if sum(map(len, catalogs.values())) * len(history) > MOST_CLIPS:
        return [plan], [f"{said}: to make the plans again takes long."]
    try:
        followed = rebuild(history, {}, recipe.data, recipe.seed, facts.run.catalogs_path)
    except UNREADABLE as error:
        return [plan], [f"{said}: {one_line(error)}"]
    return list(followed.plans), []


def _strip(plans: Sequence[Plan], steps: int) -> StageStrip:
    last = plans[-1].end_step
    end = max(1, steps if last is None else min(steps, last))
    shares = curriculum_facts.shares_of_stages(plans, end)
    return StageStrip(list(shares), list(shares.values()), end)


# --- Difficulty -------------------------------------------------------------------------------


def score_of(catalog: Catalog, data: DataSection) -> str:
    """Return the numeric attribute of clips that stages select by, or "duration_seconds"."""
    asked = [stages.parse_condition(each)[0] for stage in data.stages for each in stage.where]
    known = (data.difficulty, *asked, *catalog.attribute_names)
    for name in known:
        with suppress(errors.DataError):
            if name and np.issubdtype(stages.values(catalog, name, data).dtype, np.number):
                is_alias = name == "difficulty" and not data.difficulty
                return catalog.attribute_names[0] if is_alias else name
    return "duration_seconds"


def _histograms(plan: Plan, data: DataSection, catalogs: Mapping[str, Catalog]) -> list[Histogram]:
    found = []
    for source, catalog in catalogs.items():
        name = score_of(catalog, data)
        values = stages.values(catalog, name, data).astype(np.float64)
        histogram = _histogram(name, source, values)
        if histogram is not None:
            found.append(replace(histogram, spans=_spans(plan, source, values, histogram)))
    return found


def _histogram(name: str, source: str, values: NDArray[np.float64]) -> Histogram | None:
    known = values[np.isfinite(values) & (np.abs(values) < _MOST_DRAWN)]
    if not len(known):
        return None
    low, high = float(known.min()), float(known.max())
    # A narrow range of integers gets one bin for each; a constant value gets one bin of width 1.
    if high - low < 2 * _NUM_BINS and np.array_equal(known, np.round(known)):
        edges = np.arange(low, high + 2) - 0.5
    elif high - low <= 1e-9 * max(abs(low), abs(high)):
        edges = np.array([low - 0.5, high + 0.5])
    else:
        edges = np.linspace(low, high, _NUM_BINS + 1)
    counts = np.histogram(known, edges)[0].tolist()
    return Histogram(name, source, edges.tolist(), counts, len(values) - len(known), [])


def _spans(
    plan: Plan, source: str, values: NDArray[np.float64], histogram: Histogram
) -> list[StageSpan]:
    found = []
    for place, stage in enumerate(plan.stages):
        for stream in stage.streams:
            mine = values[stream.parts[-1].members.all_rows()]
            mine = mine[np.isfinite(mine) & (np.abs(mine) < _MOST_DRAWN)]
            if stream.source == source and len(mine):
                conditions = list(stage.section.where)
                if stage.section.drop_hardest:
                    conditions.append(f"without the hardest {100 * stage.section.drop_hardest:g} %")
                counts = np.histogram(mine, np.array(histogram.edges))[0].tolist()
                found.append(
                    StageSpan(
                        stage=stream.stage,
                        place=place,
                        conditions=", ".join(conditions),
                        low=float(mine.min()),
                        high=float(mine.max()),
                        mean=float(mine.mean()),
                        num_clips=len(mine),
                        counts=counts,
                    )
                )
    return found

"""Facts of a run's catalogs and of the plan that it follows.

At most 100,000 clips of large catalogs are read; counts are then estimates.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from longtake import errors, fsio, process
from longtake.config import DataSection, Recipe
from longtake.data import ledger, stages
from longtake.data.catalog import Catalog
from longtake.data.catalog_part import CatalogPart, read_part
from longtake.data.plan import Plan, assemble_plan, begin
from longtake.data.plan_history import PlanRecord, SkippedRanges, parsed_order, rebuild
from longtake.formatting import one_line, printable
from longtake.inspection import catalog_facts, curriculum_facts
from longtake.inspection.curriculum_facts import LoadedData
from longtake.inspection.reader import RunFacts, said_of_link
from longtake.run_dir import RunDirectory

MOST_CLIPS: Final = 100_000
"""Clips that are read at most, over all catalogs together."""
MOST_PLANNED: Final = 200_000
"""Limit of clips times plans above which a run's earlier plans are not made again."""
_MOST_CLIPS_BY_BUCKETS: Final = 4_000_000
_LEAST_CLIPS: Final = 1000
MOST_CATALOGS: Final = 8
_MOST_FILES: Final = 4000
_MOST_STAGES: Final = 64
_NUM_BINS, _NUM_SPANS, _NUM_EXAMPLES = 40, 60, 3
_MOST_DRAWN: Final = 1e290  # values beyond it are left out: differences could be infinite
UNREADABLE: Final = (errors.LongtakeError, OSError, ValueError, ArithmeticError, pa.ArrowException)
"""Exceptions that unexpected catalogs and records may raise; they are shown as problems."""


# --- Files ------------------------------------------------------------------------------------


def catalog_files(run: RunDirectory) -> list[Path]:
    """Return the run's copies of its catalogs, the newest first.

    Raises:
        DataError: a copy, or the folder of the copies, is a symbolic link.
    """
    _refuse_links(run.catalogs_path)
    found = list(run.catalogs_path.glob("*.parquet"))[:_MOST_FILES]
    _refuse_links(*found)
    return sorted(found, key=lambda path: (-path.lstat().st_mtime_ns, path.name))


def ledger_files(run: RunDirectory) -> list[Path]:
    """Return the ledger's files, limited to about `_MOST_FILES`; empty without a ledger.

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
    """Return a value that changes when any of the files does."""
    return tuple((path.name, fsio.file_version(path)) for path in paths)


# --- Catalogs and the plan --------------------------------------------------------------------


@dataclass(frozen=True)
class CatalogFacts:
    """Facts of one catalog of the recipe, computed from the clips that were read."""

    source: str
    file: str
    stats: dict[str, Any]
    """Result of `catalog_stats` for the clips that were read, without `rejected`."""
    num_read: int
    num_clips: int
    num_set_aside: int
    scale: float
    """Number of clips that each clip read stands for."""
    rejections: list[dict[str, Any]]
    """`count`, `reason` and `examples` (paths) of each rejection; the most frequent first."""
    seconds: "Histogram | None"
    """Histogram of the lengths of the videos; None if there are none."""


@dataclass(frozen=True)
class StageSpan:
    """The clips of one stage within a histogram: their range, mean and counts."""

    stage: str
    place: int
    """Index of the stage in the curriculum."""
    conditions: str
    low: float
    high: float
    mean: float
    num_clips: int
    counts: list[int]
    """Number of the stage's clips in each bin of the histogram."""


@dataclass(frozen=True)
class Histogram:
    """Histogram of one attribute of the clips, with the clips that each stage selects."""

    name: str
    source: str
    edges: list[float]
    counts: list[int]
    num_unknown: int
    scale: float
    spans: list[StageSpan]


@dataclass(frozen=True)
class StageStrip:
    """Each stage's share of the batches, from the first batch to the last."""

    names: list[str]
    shares: list[list[float]]
    """Share of the batches, indexed by stage and then by span of batches."""
    end: int
    """Total number of batches."""
    is_exact: bool

    def stage_at(self, batch: int) -> str:
        """Return the stage that has most of the batches in the span around a batch."""
        span = min(len(self.shares[0]) - 1, batch * len(self.shares[0]) // self.end)
        return max(zip(self.shares, self.names, strict=True), key=lambda each: each[0][span])[1]


@dataclass(frozen=True)
class DataFacts:
    """Facts of a run's catalogs and recipe; what could not be read is empty."""

    catalogs: list[CatalogFacts]
    summary: dict[str, Any] | None
    """Result of `plan_summary`, as `longtake data show` prints it, for the clips that were read."""
    strip: StageStrip | None
    histograms: list[Histogram]
    num_plans: int
    """Number of plans that the run has followed; each change of its data adds one."""
    problems: list[str]

    @property
    def is_whole(self) -> bool:
        return all(each.num_read == each.num_clips for each in self.catalogs)

    def scale(self, source: str) -> float:
        return next((each.scale for each in self.catalogs if each.source == source), 1.0)


NO_DATA: Final = DataFacts([], None, None, [], 0, [])


def read_data(facts: RunFacts) -> DataFacts:
    """Return facts of a run's data; files are read again only after one has changed."""
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
    problems, recipe = list[str](), facts.recipe
    chosen, said = _sources(recipe, files, history)
    problems += said
    parts = dict[str, CatalogPart]()
    most = _most_clips(recipe) // max(1, min(len(chosen), MOST_CATALOGS))
    for source, path in list(chosen.items())[:MOST_CATALOGS]:
        try:
            parts[source] = read_part(path, most)
        except UNREADABLE as error:
            problems.append(one_line(error))
    catalogs = [
        _catalog_facts(each, f"catalogs/{chosen[each].name}", parts[each]) for each in parts
    ]
    found = DataFacts(catalogs, None, None, [], len(history), problems)
    # The plan mixes all catalogs: it can be shown only if every one of them was read.
    if recipe is None or not parts or parts.keys() != chosen.keys() or said:
        return found
    try:
        return _with_plan(found, facts, recipe, parts, history)
    except (*UNREADABLE, LookupError, TypeError, AssertionError) as error:
        return replace(found, problems=[*problems, one_line(error)])


def facts_of(loaded: LoadedData, summary: dict[str, Any]) -> DataFacts:
    """Return the facts of catalogs that were read whole; `summary` is what `describe` returned."""
    parts = {
        source: CatalogPart(catalog, len(catalog), len(catalog.rejected) + len(catalog.duplicates))
        for source, catalog in loaded.catalogs.items()
    }
    catalogs = [_catalog_facts(each, str(loaded.paths[each]), parts[each]) for each in parts]
    found = DataFacts(catalogs, None, None, [], 0, [])
    if loaded.recipe is None or loaded.plan is None:
        return found
    return replace(
        found,
        summary=summary,
        strip=_strip([loaded.plan], loaded.recipe.training.steps, is_exact=True),
        histograms=_histograms(loaded.plan, loaded.recipe.data, parts),
    )


def release_memory() -> None:
    """Return freed memory to the operating system; malloc and Arrow keep it otherwise."""
    pa.default_memory_pool().release_unused()
    process.return_freed_memory()


def _most_clips(recipe: Recipe | None) -> int:
    """Limit the clips to read: fewer with many buckets, as each bucket is tried on each clip."""
    if recipe is None:
        return MOST_CLIPS
    buckets = (len(each.buckets or recipe.data.buckets) for each in recipe.data.curriculum())
    by_buckets = _MOST_CLIPS_BY_BUCKETS // max(1, max(buckets, default=1))
    return max(_LEAST_CLIPS, min(MOST_CLIPS, by_buckets))


def _sources(
    recipe: Recipe | None, files: Sequence[Path], history: Sequence[PlanRecord]
) -> tuple[dict[str, Path], list[str]]:
    """Map each catalog of the newest plan to its file; return sentences if that is not known."""
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


def _catalog_facts(source: str, file: str, part: CatalogPart) -> CatalogFacts:
    catalog, examples = part.catalog, dict[str, list[str]]()
    for each in catalog.rejected:
        paths = examples.setdefault(each.reason, [])
        if len(paths) < _NUM_EXAMPLES:
            paths.append(each.path)
    stats = catalog_facts.catalog_stats(catalog)
    counts = Counter(stats["reject_reasons"]).most_common()
    seconds = catalog.column("duration_seconds").astype(np.float64)
    histogram = _histogram("seconds of video", source, seconds[seconds > 0], part.scale)
    return CatalogFacts(
        source,
        file,
        {name: value for name, value in stats.items() if name != "rejected"},
        len(catalog),
        part.num_clips,
        part.num_set_aside,
        part.scale,
        [{"count": n, "reason": why, "examples": examples[why]} for why, n in counts],
        histogram,
    )


def _with_plan(
    found: DataFacts,
    facts: RunFacts,
    recipe: Recipe,
    parts: Mapping[str, CatalogPart],
    history: Sequence[PlanRecord],
) -> DataFacts:
    data, batch_size = recipe.data, recipe.training.global_batch_size
    if history:
        # The recorded order counts: the recipe may have been changed since.
        data = data.model_copy(update=parsed_order(history[-1]))
        batch_size = history[-1]["batch_size"]
    if len(data.curriculum()) > _MOST_STAGES:
        raise errors.DataError(f"The recipe has more than {_MOST_STAGES} stages.")
    catalogs = {source: part.catalog for source, part in parts.items()}
    plan = begin(catalogs, data, batch_size, recipe.seed)
    if not found.is_whole:
        plan = _to_scale(plan, parts)
    recipe = recipe.model_copy(update={"data": data})
    result = curriculum_facts.plan_summary(plan, recipe)
    plans, problems = [plan], list(found.problems)
    if len(history) > 1:
        plans, said = _followed(facts, recipe, plan, parts, history)
        problems += said
    return replace(
        found,
        summary=result,
        strip=_strip(plans, recipe.training.steps + _num_skipped(facts), found.is_whole),
        histograms=_histograms(plan, data, parts),
        problems=problems,
    )


def _to_scale(plan: Plan, parts: Mapping[str, CatalogPart]) -> Plan:
    """Scale the plan of a part of the clips to the number of batches that all would make."""
    found = []
    for stage in plan.stages:
        streams = []
        for stream in stage.streams:
            # A plan that `begin` made has one part per stream.
            scale, (part,) = parts[stream.source].scale, stream.parts
            sizes = tuple(round(size * scale) for size in part.epoch_span.sizes)
            span = replace(part.epoch_span, sizes=sizes)
            streams.append(replace(stream, parts=(replace(part, epoch_span=span),)))
        found.append(replace(stage, streams=tuple(streams)))
    return assemble_plan(plan.version, plan.first_step, found, plan.batch_size)


def _followed(
    facts: RunFacts,
    recipe: Recipe,
    plan: Plan,
    parts: Mapping[str, CatalogPart],
    history: Sequence[PlanRecord],
) -> tuple[list[Plan], list[str]]:
    """Return the plans that a run with changed data followed; if unknown, the given one and why."""
    changes = ", ".join(f"{each['step']:,}" for each in history[1:])
    said = f"The data changed at batch {changes}; the stages are drawn as a new run has them"
    if sum(part.num_clips for part in parts.values()) * len(history) > MOST_PLANNED:
        return [plan], [f"{said}: to make the plans again takes long."]
    try:
        followed = rebuild(history, {}, recipe.data, recipe.seed, facts.run.catalogs_path)
    except UNREADABLE as error:
        return [plan], [f"{said}: {one_line(error)}"]
    return list(followed.plans), []


def _num_skipped(facts: RunFacts) -> int:
    spans = [each["skipped"] for each in facts.events if each["event"] == "rolled_back"]
    return len(SkippedRanges.of(spans))


def _strip(plans: Sequence[Plan], steps: int, is_exact: bool) -> StageStrip:
    last = plans[-1].end_step
    end = max(1, steps if last is None else min(steps, last))
    names = list(dict.fromkeys(stage.name for plan in plans for stage in plan.stages))
    spans = min(end, _NUM_SPANS)
    edges = [end * place // spans for place in range(spans + 1)]
    begins = [plan.first_step for plan in plans]
    counts = np.zeros((len(names), spans))
    # A plan is in force until the next one begins: clamping the edges to that range makes its
    # spans outside of it count nothing.
    for plan, begun, over in zip(plans, begins, [*begins[1:], end], strict=True):
        cut = [min(max(edge, begun), max(begun, over)) for edge in edges]
        taken = np.array([plan.timeline.taken(edge - begun) for edge in cut]).reshape(len(cut), -1)
        for stage, of_stage in zip(plan.stages, np.diff(taken, axis=0).T, strict=True):
            counts[names.index(stage.name)] += of_stage
    shares = counts / np.maximum(np.diff(edges), 1)
    return StageStrip(names, shares.tolist(), end, is_exact)


# --- Difficulty -------------------------------------------------------------------------------


def score_of(catalog: Catalog, data: DataSection) -> str:
    """Return the numeric attribute that stages select or rate clips by, or "duration_seconds"."""
    asked = [stages.parse_condition(each)[0] for stage in data.stages for each in stage.where]
    known = (data.difficulty, *asked, *catalog.attribute_names)
    for name in known:
        with suppress(errors.DataError):
            if name and np.issubdtype(stages.values(catalog, name, data).dtype, np.number):
                is_alias = name == "difficulty" and not data.difficulty
                return catalog.attribute_names[0] if is_alias else name
    return "duration_seconds"


def _histograms(plan: Plan, data: DataSection, parts: Mapping[str, CatalogPart]) -> list[Histogram]:
    found = []
    for source, part in parts.items():
        name = score_of(part.catalog, data)
        values = stages.values(part.catalog, name, data).astype(np.float64)
        histogram = _histogram(name, source, values, part.scale)
        if histogram is not None:
            found.append(replace(histogram, spans=_spans(plan, source, values, histogram)))
    return found


def _histogram(
    name: str, source: str, values: NDArray[np.float64], scale: float
) -> Histogram | None:
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
    return Histogram(name, source, edges.tolist(), counts, len(values) - len(known), scale, [])


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

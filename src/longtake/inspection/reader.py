"""Reads the facts of one run from its files, and again only after these have changed."""

import contextvars
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from longtake import errors, fsio, node_dir
from longtake.config import Recipe
from longtake.formatting import one_line
from longtake.inspection.rows import MetricRows, read_rows
from longtake.inspection.run_list import RunSummary, list_runs, summarize
from longtake.inspection.timeline import Mark, TimePart, all_events, goodput, timeline
from longtake.run_dir import RunDirectory

_MOST_LINKS_LOOKED_AT = 20_000
_LINK_FREE: Final = ("", "evaluations", "guard", "nodes", "stalls", "requests", "tracking")
"""Folders of a run whose entries must not be links, as records are read in them."""

_LARGE: Final = (
    *("checkpoints", "components", "tensorboard", "wandb", "data", "catalogs", "ledger"),
)
"""Folders of a run with large files, which may be links as no page opens their files."""

NO_ROWS: Final = read_rows(RunDirectory(Path(os.devnull) / "none"))
"""Empty rows, for a run without metrics."""

_ENDED: Final = ("finished", "interrupted", "diverged", "dead")

T = TypeVar("T")


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run at one moment; unreadable parts are empty, and `problems` says why."""

    run: RunDirectory
    name: str
    """Path from the folder of runs to the run, with "/"; empty if the run is that folder itself."""
    summary: RunSummary
    kept: "Keep"
    """Function that caches slow results for this run: see `RunReader.kept`."""
    neighbours: "Neighbours"
    """Function that returns the other runs below the same folder by name; none in a report."""
    problems: tuple[str, ...]
    """A sentence for each file of the run that cannot be read."""
    recipe: Recipe | None = None
    record: dict[str, Any] = field(default_factory=dict)
    """The contents of the run's run.json."""
    rows: MetricRows = NO_ROWS
    events: list[dict[str, Any]] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    goodput: list[TimePart] = field(default_factory=list)

    @property
    def title(self) -> str:
        return self.name or self.run.path.resolve().name

    @property
    def steps(self) -> int:
        kept = self.rows.kept
        return int(kept.step[-1]) if len(kept) else 0


Neighbours = Callable[[], Mapping[str, RunDirectory]]


class Keep(Protocol):
    def __call__(self, what: str, version: Hashable, read: Callable[[], T]) -> T: ...


class RunReader:
    """Reads the facts of one run, for several threads; facts of unchanged files are cached."""

    def __init__(self, folder: Path, name: str, neighbours: Neighbours = dict) -> None:
        self.folder, self.name, self.neighbours = folder, name, neighbours
        self.run = RunDirectory(folder / name)
        self._lock = threading.Lock()
        self._rows: MetricRows | None = None
        self._looking: threading.Thread | None = None
        self._share_read = 0.0
        self._kept: dict[str, tuple[Hashable, Any]] = {}

    def share_read(self, patience_seconds: float) -> float | None:
        """Return the share of metrics.jsonl that is read so far, or None once all of it is.

        Waits up to `patience_seconds` for the thread that reads; a later call continues to wait.
        After None, `facts` does not take long.
        """
        looking = self._looking
        if looking is None or not looking.is_alive():
            self._share_read = 0.0
            context = contextvars.copy_context()  # names the folder below which files are opened
            looking = threading.Thread(target=context.run, args=(self.rows,), daemon=True)
            self._looking = looking
            looking.start()
        looking.join(patience_seconds)
        return self._share_read if looking.is_alive() else None

    def rows(self) -> MetricRows:
        """Return the rows of metrics alone, faster than `facts`; empty if they are damaged."""
        with self._lock, suppress(errors.LongtakeError, OSError):
            return self._read_rows()
        return NO_ROWS

    def facts(self) -> RunFacts:
        with self._lock:
            run, problems = self.run, list[str]()
            make_facts = partial(
                RunFacts, run=run, name=self.name, kept=self.kept, neighbours=self.neighbours
            )
            link = next(links_of(run), None)
            # A link could make a page show files from anywhere: then nothing of the run is read.
            if link is not None:
                problem = said_of_link(link)
                summary = RunSummary(self.name or ".", problem=problem)
                return make_facts(summary=summary, problems=(problem,))

            def read_part(read: Callable[[], T], default: T) -> T:
                try:
                    return read()
                except (errors.LongtakeError, OSError) as error:
                    said = one_line(error)
                    if said not in problems:
                        problems.append(said)
                    return default

            def keep_part(what: str, version: Hashable, read: Callable[[], T], default: T) -> T:
                return read_part(lambda: self.kept(what, version, read), default)

            summary = summarize(self.folder, run.path)
            problems += [] if summary.problem is None else [summary.problem]
            rows = read_part(self._read_rows, NO_ROWS)
            nodes = [node.events_path for node in node_dir.all_nodes(run)]
            servers = sorted((run.path / "evaluations" / "servers").glob("*/events.jsonl"))
            files = _versions([run.events_path, run.rollbacks_path, *nodes, *servers])
            events = keep_part("events", files, lambda: all_events(run), list[dict[str, Any]]())
            # Marks are placed at steps, so that they depend on the rows too.
            version, recipe_version = (files, len(rows)), _versions([run.recipe_path])
            return make_facts(
                summary=summary,
                recipe=keep_part("recipe", recipe_version, run.recipe, None),
                record=read_part(lambda: dict[str, Any](run.record()), dict[str, Any]()),
                rows=rows,
                events=events,
                marks=keep_part(
                    "marks", version, lambda: timeline(run, rows, events), list[Mark]()
                ),
                goodput=keep_part(
                    "hours", version, lambda: goodput(run, rows, events), list[TimePart]()
                ),
                problems=tuple(problems),
            )

    def _read_rows(self) -> MetricRows:
        """Return the rows of metrics that were read before, or read them if a file has changed."""

        def note_share(share: float) -> None:
            self._share_read = share

        version = _versions([self.run.metrics_path, self.run.rollbacks_path])
        read = partial(read_rows, self.run, self._rows, note_share)
        self._rows = self.kept("rows", version, read)
        return self._rows

    def kept(self, what: str, version: Hashable, read: Callable[[], T]) -> T:
        """Return a cached fact of the run, by `read`, which is called if the version changes.

        Two threads that call this at once may both call `read`.
        """
        # A version is determined before its files are read: a change meanwhile causes another read.
        known = self._kept.get(what)
        if known is None or known[0] != version:
            known = self._kept[what] = version, read()
        return known[1]


class RunList:
    """The runs in a folder and their summaries; an ended run is read again only after a change."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[Path, tuple[Hashable, RunSummary]] = {}

    def summaries(self) -> list[RunSummary]:
        """Return the summaries of all runs in the folder, as `run_list.list_runs` does."""
        return list_runs(self._folder, self._summary)

    def _summary(self, folder: Path, path: Path) -> RunSummary:
        run = RunDirectory(path)
        records = [run.recipe_path, run.record_path, run.events_path, run.metrics_path]
        records += [run.rollbacks_path, run.lease_path]
        # Of each preset its folder, and the newest result with its scores.
        for preset in _entries(path / "evaluations"):
            steps = (each for each in _entries(preset) if each.name[:5] == "step_")
            newest = max(steps, default=preset)
            records += [preset, newest, newest / "scores.json"]
        version = _versions(records)
        known = self._known.get(path)
        # Only of ended runs: others become silent or stalled without a change of their files.
        if known is not None and known[0] == version and known[1].state in _ENDED:
            return known[1]
        summary = summarize(folder, path)
        self._known[path] = version, summary
        return summary


def _entries(folder: Path) -> list[Path]:
    with suppress(OSError), os.scandir(folder) as entries:
        return sorted(Path(each.path) for each in entries)
    return []


def _versions(paths: Sequence[Path]) -> tuple[Hashable, ...]:
    return tuple(map(fsio.file_version, paths))


def links_of(run: RunDirectory) -> Iterator[Path]:
    """Yield symbolic links in the folders of a run that hold records; none is ever followed."""
    left = _MOST_LINKS_LOOKED_AT
    may_be_links = {run.path / name for name in _LARGE}
    for name in _LINK_FREE:
        folders = [run.path / name]
        if name in ("nodes", "evaluations"):
            with suppress(OSError):
                folders += [Path(each.path) for each in os.scandir(folders[0]) if each.is_dir()]
        for folder in folders:
            with suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    left -= 1
                    if entry.is_symlink() and Path(entry.path) not in may_be_links:
                        yield Path(entry.path)
                    if not left:
                        return


def said_of_link(path: Path) -> str:
    return f"{path} is a symbolic link; links are not followed. Copy what it points to instead."

"""Lists the runs in a folder: a summary of each, read from the ends of its files."""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Final, TypeVar

from longtake import errors, fsio, node_dir
from longtake.evaluation_dir import EvaluationDirectory
from longtake.formatting import natural_key, one_line, plural
from longtake.inspection.files import file_names, folder_names, is_text
from longtake.inspection.rows import read_rows
from longtake.inspection.timeline import goodput, share_of_training
from longtake.metrics import Metrics
from longtake.node_dir import StateKind
from longtake.run_dir import EVENT, RunDirectory

_T = TypeVar("_T")

MAX_RUNS: Final = 1000
MAX_DEPTH: Final = 3
"""Number of levels of subfolders below a folder that are searched for runs."""
_MAX_FOLDERS = 20_000
_TAIL_BYTES = 2**15
_MOST_READ = 2**23  # bytes of metrics.jsonl and of events.jsonl up to which goodput is computed
_NUM_RECENT = 50
_RECORDS = ("recipe.toml", "run.json", "events.jsonl", "metrics.jsonl", "rollbacks.jsonl")
_PICTURES = (".mp4", ".png")
_MAX_DIGITS = 17  # of a step number in a folder's name
_ALARMS: Final[dict[str, tuple[str, ...]]] = {
    "stalled": ("It runs, but does not move.",),
    "dead": ("Its last launch did not end as it should.",),
    "diverged": ("The guard stopped it.",),
}


@dataclass(frozen=True)
class RunSummary:
    """The summary of one run in a list of runs; for a damaged run, only its readable facts."""

    path: str
    """Path from the listed folder to the run, with "/"; "." if the folder itself is the run."""
    problem: str | None = None
    """A sentence that names the unreadable files of the run; None if all are readable."""
    state: StateKind | None = None
    """The run's state as returned by `node_dir.state`; None if it cannot be read."""
    family: str | None = None
    created: str | None = None
    steps: int = 0
    """Number of trained steps; after a rollback, the step that the run went back to."""
    total_steps: int | None = None
    step_seconds: float | None = None
    """Median seconds of the run's most recent steps."""
    seconds_left: float | None = None
    """Estimated seconds until the run's last step; only while it is running."""
    last_seen: float | None = None
    """Last sign of life of the run in seconds since 1970, by the modification times of its
    files."""
    goodput: float | None = None
    """Share of the time since the run's first start that was spent on training steps that it kept
    (see `timeline.goodput`); None if unknown, or if the files are too large to read for a list."""
    loss: float | None = None
    """Loss of the run's newest step; None if it was not finite, or before the first step."""
    recovered: str | None = None
    """A sentence on the run's newest rollback, or restart that lost steps, among its last
    events."""
    alarms: tuple[str, ...] = ()
    """Sentences on measures of samples that drift, and on a run that stalled, died or diverged."""
    sample: str | None = None
    """Path from the listed folder to a video or picture that was sampled from the newest
    checkpoint."""


def list_runs(
    folder: Path, read: Callable[[Path, Path], RunSummary] | None = None
) -> list[RunSummary]:
    """Return summaries of the runs in a folder and its subfolders, by path; at most `MAX_RUNS`.

    Symbolic links are not followed. The folder itself may be a run. `read` replaces `summarize`,
    for example by a function that caches.

    Raises:
        RunError: the folder cannot be read.
    """
    if not folder.is_dir():
        raise errors.RunError(f"{folder} is not a folder. Expected one that has runs in it.")
    try:
        os.scandir(folder).close()
    except OSError as error:
        raise errors.RunError(f"{folder} cannot be read: {error.strerror or error}.") from error
    found = sorted(find_runs(folder), key=lambda path: natural_key(str(path)))
    return [(read or summarize)(folder, path) for path in found]


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield run folders: those with run.json, or metrics.jsonl and recipe.toml; never nested."""
    # Breadth first: if a folder has too many subfolders, the runs near its top are found.
    pending, num_folders, num_runs = [(folder, 0)], 0, 0
    while pending and num_folders < _MAX_FOLDERS:
        path, depth = pending.pop(0)
        num_folders += 1
        files, folders = set(), []
        with suppress(OSError), os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
                else:
                    files.add(entry.name)
        if "run.json" in files or {"metrics.jsonl", "recipe.toml"} <= files:
            yield path
            num_runs += 1
            if num_runs == MAX_RUNS:
                return
        # Folders of a run are not searched: there are many, and none of them is a run.
        elif depth < MAX_DEPTH:
            shown = (name for name in folders if not name.startswith(".") and is_text(name))
            pending += [(path / name, depth + 1) for name in sorted(shown)]


def summarize(folder: Path, path: Path) -> RunSummary:
    """Summarize one run below a folder; errors in its files are stored as `problem`, not raised."""
    run, found = RunDirectory(path), RunSummary(path.relative_to(folder).as_posix())
    linked = [name for name in _RECORDS if (path / name).is_symlink()]
    if linked:
        return replace(found, problem=f"{linked[0]} is a symbolic link; links are not followed.")
    readers = (_read_recipe, _read_record, _read_state, _read_steps)
    # Each reader fails on its own: a damaged recipe still leaves the loss and the samples.
    for read in (*readers, _read_recovery, _read_evaluations):
        try:
            found = read(run, found)
        except (errors.LongtakeError, OSError) as error:
            problem = found.problem or one_line(error)
            found = replace(found, problem=problem)
    return found


def _read_recipe(run: RunDirectory, found: RunSummary) -> RunSummary:
    recipe = run.recipe()
    return replace(found, family=recipe.model.family, total_steps=recipe.training.steps)


def _read_record(run: RunDirectory, found: RunSummary) -> RunSummary:
    return replace(found, created=run.record()["created"])


def _read_state(run: RunDirectory, found: RunSummary) -> RunSummary:
    now = node_dir.state(run)
    last_seen = None if now.silent_seconds is None else time.time() - now.silent_seconds
    return replace(found, state=now.kind, last_seen=last_seen, alarms=_ALARMS.get(now.kind, ()))


def _read_steps(run: RunDirectory, found: RunSummary) -> RunSummary:
    newest = fsio.read_last_record(run.metrics_path, Metrics)
    if newest is None:
        return found
    rollbacks, steps = run.rollbacks(), newest["step"]
    # Nothing was trained since the rollback: the newest line is of the step that it left.
    if rollbacks and "verdict" in newest and rollbacks[-1]["from_step"] == steps:
        steps = rollbacks[-1]["to_step"]
    found = replace(found, steps=steps, loss=newest["loss"])
    recent = list(islice(_newest_records(run.metrics_path, Metrics), _NUM_RECENT))
    if recent:
        seconds = statistics.median(each["step_seconds"] for each in recent)
        found = replace(found, step_seconds=seconds)
        if found.state == "running" and found.total_steps is not None:
            found = replace(found, seconds_left=max(0, found.total_steps - steps) * seconds)
    files = (run.metrics_path, run.events_path)
    # Goodput needs every line, and a list may have hundreds of runs.
    if all(path.stat().st_size <= _MOST_READ for path in files):
        found = replace(found, goodput=share_of_training(goodput(run, read_rows(run))))
    return found


def _read_recovery(run: RunDirectory, found: RunSummary) -> RunSummary:
    """Set a summary's `recovered` by the newest rollback, or restart that lost steps."""
    for event in _newest_records(run.events_path, EVENT):
        if event["event"] == "rolled_back":
            went = f"Rolled back from step {event['from_step']:,} to step {event['step']:,}."
            return replace(found, recovered=went)
        if event["event"] == "resumed" and event.get("lost_steps"):
            lost = plural(event["lost_steps"], "step")
            return replace(found, recovered=f"Restarted; {lost} had not been saved.")
    return found


def _newest_records(path: Path, kind: fsio.Kind[_T]) -> Iterator[_T]:
    """Yield the records in the last `_TAIL_BYTES` bytes of a JSON lines file, the newest first."""
    with fsio.open_regular(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        # The last piece is an unfinished line.
        lines = file.read(_TAIL_BYTES).split(b"\n")[:-1]
    for line in reversed(lines):
        # A first line that is cut off is no record.
        with suppress(errors.RecordError):
            yield fsio.parse_record(line, kind, path, fsio.MAX_LINE_DEPTH)


def _read_evaluations(run: RunDirectory, found: RunSummary) -> RunSummary:
    """Set the newest sample in a run's summary, and add drift alarms of the newest scores."""
    directory, newest, alarms = EvaluationDirectory(run), (-1, ""), list(found.alarms)
    for preset in folder_names(run.path, "evaluations"):
        folders = folder_names(run.path, f"evaluations/{preset}")
        names = [name.removeprefix("step_") for name in folders]
        steps = [int(name) for name in names if name.isdecimal() and len(name) < _MAX_DIGITS]
        if steps:
            newest = max(newest, (max(steps), preset))
            scores = directory.scores(preset, max(steps))
            some = scores["alarms"] if scores else []
            alarms += [alarm["message"] for alarm in some if alarm["kind"] == "drift"]
    found = replace(found, alarms=tuple(alarms))
    if newest[0] < 0:
        return found
    folder = directory.result_path(newest[1], newest[0]).relative_to(run.path).as_posix()
    pictures = [name for name in file_names(run.path, folder) if name.endswith(_PICTURES)]
    # The sheet of all videos is shown only if there is nothing else.
    first = min(pictures, key=lambda name: (name == "sheet.png", name), default=None)
    return found if first is None else replace(found, sample=f"{found.path}/{folder}/{first}")

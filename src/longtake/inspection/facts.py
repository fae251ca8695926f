"""Facts of a run, from its files alone: what `longtake show` prints as JSON or tables."""

import math
import posixpath
import re
import shlex
import statistics
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from longtake import errors, fsio, lease
from longtake.checkpoint.files import find_damage
from longtake.data import ledger
from longtake.data.catalog import Catalog
from longtake.data.catalog_search import find_in_catalogs
from longtake.data.clip import Clip, captions_of
from longtake.data.conditioning import given_to
from longtake.evaluation_dir import EvaluationDirectory
from longtake.formatting import plural
from longtake.inspection.rows import MetricRows, Progress, ignore_progress, read_rows
from longtake.inspection.series import speeds_by_bucket
from longtake.node_dir import read_events, state
from longtake.process import command
from longtake.run_dir import GuardReport, ReportedSample, RunDirectory

_MAX_CLIPS_READ = 64
_NUM_RECENT_STEPS = 50
_START_FACTS = ("time", "step", "seconds", "total", "slowest", "down_seconds")
_REPORT_NAME = re.compile(r"step_(\d+)_(\d+)\.json")

_BATCH_EVENTS = (
    *("stage", "epoch", "settings_changed"),
    *("sample_rejected", "decoder_stalled", "decoder_died"),
)
"""Kinds of events whose `step` is the number of a batch."""
_SOURCES = ("watcher", "rank", "launcher")  # of `rank_failed`; the best informed is last
_NEXT_STEP_EVENTS = ("stalled", "rank_failed", "killed_rank", "restarted_worker")
"""Kinds of events that happened in the step after their `step`, which counts the steps done
before."""
_VERDICT_EVENTS = ("update_skipped", "anomaly_detected")
INCIDENT_EVENTS = (
    *_NEXT_STEP_EVENTS,
    *("decoder_stalled", "decoder_died", "clock_stepped", "clock_slewed", "degraded"),
    *("disk_full", "checkpoint_failed"),
)
"""Kinds of events that `incidents` collects: troubles of processes and nodes, such as stalls."""


# --- A run ------------------------------------------------------------------------------------


def run_facts(run: RunDirectory, progress: Progress = ignore_progress) -> dict[str, Any]:
    """Return facts of a run as a whole (state, launches, checkpoints ...) from its directory.

    Returns:
        JSON: `run`, `id`, `created`, `recipe`, `family`, `steps`, `total_steps`, `state` (running,
        stalled, dead, finished, interrupted or diverged), `holder` (`host`, `pid` and `time` of the
        launch that trains it, or trained it last), `silent_seconds` (since its last sign of life),
        `step_seconds` (the median of recent steps), `speeds` (by bucket, see `BucketSpeed`),
        `seconds_left` (None unless it runs),
        `launches`, `starts` (of each launch that reached its first step: `time`, `step` done before
        it, `seconds` by part, `total`, `slowest` rank by part, and `down_seconds` since the last
        step before a crash), `newest` (the last row of metrics that counts), `abandoned_rows`,
        `checkpoints` (step, bytes, damage, abandoned), `verdicts`, `rollbacks`, `settings` (that
        stages changed), `troubles` (of processes and nodes), `evaluations` (see `evaluated`) and
        `next` (commands, each with what it does).

    Raises:
        RunError: there is no run, or run.json is damaged.
    """
    recipe, record = run.recipe(), run.record()
    rows, now, events = read_rows(run, progress=progress), state(run), list(read_events(run))
    kept, holder = rows.kept, now.holder
    steps = int(kept.step[-1]) if len(kept) else 0
    checkpoints, evaluations = _checkpoints(run, steps), evaluated(run)
    recent = kept.column("step_seconds")[-_NUM_RECENT_STEPS:].tolist()
    seconds = statistics.median(recent) if recent else None
    left = None
    if now.kind == "running" and seconds is not None:
        left = (recipe.training.steps - steps) * seconds
    can_sample = any(each["damage"] is None and not each["abandoned"] for each in checkpoints)
    sampled = [each["preset"] for each in evaluations if each["steps"]]
    return {
        "run": str(run.path),
        "id": record["id"],
        "created": record["created"],
        "recipe": str(run.recipe_path),
        "family": recipe.model.family,
        "steps": steps,
        "total_steps": recipe.training.steps,
        "state": now.kind,
        "holder": holder and {name: holder[name] for name in ("host", "pid", "time")},
        "silent_seconds": now.silent_seconds,
        "step_seconds": seconds,
        "speeds": [{**vars(each), "bucket": str(each.bucket)} for each in speeds_by_bucket(rows)],
        "seconds_left": left,
        "launches": record["launches"],
        "starts": _starts(events),
        "newest": next(iter(kept[-1:].metrics()), None),
        "abandoned_rows": len(rows) - len(kept),
        "checkpoints": checkpoints,
        "verdicts": verdicts(events),
        "rollbacks": run.rollbacks(),
        "settings": settings_changes(events, rows),
        "troubles": incidents(events, rows),
        "evaluations": evaluations,
        "next": next_commands(run, now.kind, rows, can_sample=can_sample, presets=sampled),
    }


def _starts(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the launches that reached their first step, with the seconds until that step."""
    timings = (event for event in events if event["event"] == "startup_timing")
    return [{name: event.get(name) for name in _START_FACTS} for event in timings]


def verdicts(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the events with the guard's verdicts on steps, with `step` as metrics number them."""
    # These events count the steps done before the judged one.
    judged = (each for each in events if each["event"] in _VERDICT_EVENTS)
    return [{**each, "step": each["step"] + 1} for each in judged]


def settings_changes(events: Sequence[Mapping[str, Any]], rows: MetricRows) -> list[dict[str, Any]]:
    """Return events of settings that stages changed, each once even if its step was repeated."""
    found = {
        (event["step"], event["stage"]): {**event, "at": step_of(event, rows)}
        for event in events
        if event["event"] == "settings_changed"
    }
    return list(found.values())


def incidents(events: Sequence[Mapping[str, Any]], rows: MetricRows) -> list[dict[str, Any]]:
    """Return incidents among a run's events (stalls, dead ranks, clocks, disks ...), each once.

    A stall that lasts is diagnosed again and again, and launcher and watcher both report a rank's
    failure. A stall that ended has `lasted_seconds`.
    """
    found: list[dict[str, Any]] = []
    places: dict[tuple[Any, ...], int] = {}  # index in `found` of what later events may concern
    keys: dict[int, tuple[Any, ...]] = {}  # keys of `places` by index
    stalls: dict[str, int] = {}  # index in `found` of each stall, by token
    for event in events:
        # The next stall of the same process is another incident.
        if event["event"] == "stall_cleared" and event.get("token") in stalls:
            over = stalls[event["token"]]
            found[over]["lasted_seconds"] = event.get("seconds")
            if places.get(keys.get(over, ())) == over:
                del places[keys[over]]
        if event["event"] not in INCIDENT_EVENTS:
            continue
        new, key = {**event, "at": incident_step(event, rows)}, None
        # Events with the same key are about the same incident.
        if event["event"] == "rank_failed":
            key = ("rank_failed", event.get("launch"), event["rank"], event["pid"])
        elif event["event"] == "stalled" and event.get("suspects"):
            first = event["suspects"][0]
            key = ("stalled", event.get("launch"), first["host"], first["pid"])
        place = places.get(key, len(found)) if key else len(found)
        if place < len(found):
            found[place] = _merged(found[place], new)
        else:
            found.append(new)
        if key:
            places[key], keys[place] = place, key
        if event["event"] == "stalled" and "token" in event:
            stalls[event["token"]] = place
    return found


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two records of one incident: the newest of a stall, the best informed of a failure."""
    if new["event"] == "stalled":
        return {**new, "time": old["time"], "at": old["at"]}
    other, best = sorted((old, new), key=lambda each: _SOURCES.index(each.get("source", "rank")))
    rest = {name: value for name, value in other.items() if name != "reason"}
    return {**rest, **best}


def restarts(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the launches that repeated steps, as the launch before was lost before it saved them.

    JSON: `time`, `step` (after which the launch began), `lost_steps`, and `cause`: the first failed
    rank of the launch before, as `incidents` describes it, or None.
    """
    events, found, begin = list(read_events(run)), [], 0
    rows = read_rows(run)
    for place, event in enumerate(events):
        if event["event"] not in ("launched", "resumed"):
            continue
        if event.get("lost_steps"):
            failed = (
                each
                for each in incidents(events[begin:place], rows)
                if each["event"] == "rank_failed"
            )
            facts = {name: event[name] for name in ("time", "lost_steps")}
            step, cause = event.get("step") or 0, next(failed, None)
            found.append({**facts, "step": step, "cause": cause})
        begin = place
    return found


def incident_step(event: Mapping[str, Any], rows: MetricRows) -> int:
    """Return the number of the step in which an incident happened, as metrics count steps."""
    step = event.get("step")
    if step is not None:
        return int(step) + (event["event"] in _NEXT_STEP_EVENTS)
    # Without a step, the clock decides where it is drawn, even if the incident is the clock's.
    time = datetime.fromisoformat(event["time"]).timestamp()
    index = bisect_right(rows.column("time"), time)
    return int(rows.step[min(index, len(rows) - 1)]) if len(rows) else 0


def step_of(event: Mapping[str, Any], rows: MetricRows) -> int | None:
    """Return an event's step as metrics count it (steps done with it), or None without one."""
    step: int | None = event.get("step")
    if step is not None and event["event"] in (*_VERDICT_EVENTS, *_NEXT_STEP_EVENTS):
        return step + 1
    if step is None or event["event"] not in _BATCH_EVENTS:
        return step
    trained = rows.step_of_batch(step)
    return step + 1 if trained is None else trained


def _checkpoints(run: RunDirectory, steps: int) -> list[dict[str, Any]]:
    """Return step, bytes, damage (by file sizes; None: whole) and state of a run's checkpoints.

    A run that was killed during a rollback has abandoned checkpoints until its next launch.
    """
    found, has_rolled_back = [], bool(run.rollbacks())
    for step in run.checkpoint_steps():
        path = run.checkpoint_path(step)
        # Checksums would read every byte of every checkpoint.
        what = find_damage(path, checksums=False)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        facts = {"step": step, "bytes": size, "damage": what}
        found.append({**facts, "abandoned": has_rolled_back and step > steps})
    return found


def next_commands(
    run: RunDirectory, state: str, rows: MetricRows, *, can_sample: bool, presets: Sequence[str]
) -> list[dict[str, str]]:
    """Return the commands that a user may run next, the likeliest first, each with its purpose.

    Args:
        run: the run.
        state: the run's state as returned by `node_dir.state`.
        rows: rows of the run's metrics.
        can_sample: whether the run has a whole checkpoint.
        presets: names of presets that were sampled.
    """
    own, path, ways = command(), shlex.quote(str(run.path)), []
    if state in ("interrupted", "dead"):
        ways.append((run.resume_command(), "resume"))
    if state == "stalled":
        ways.append((f"{own} stacks {path}", "where its processes are"))
    judged = rows.step[rows.column("has_verdict")]
    if len(judged):
        ways.append((f"{own} show {path} --around {judged[-1]}", "the newest verdict"))
    if can_sample:
        ways.append((command_to_sample(run), "what it makes"))
    if presets:
        folder = shlex.quote(str(run.path.parent))
        ways.append((f"{own} board {folder}", "its checkpoints side by side"))
    if len(rows):
        ways.append((f"{own} show {path} --out curves.html", "its curves"))
    if run.ledger_path.exists():
        ways.append((f"{own} data audit {path}", "what it was trained on, proved"))
    return [{"command": command, "for": what} for command, what in ways]


def command_to_sample(run: RunDirectory) -> str:
    """Return a complete `longtake sample` command that samples a run.

    For a model with further inputs, it passes those, and the caption, of a clip from the catalog.
    """
    recipe, prompt, inputs = run.recipe(), "…", ""
    if recipe.model_inputs() and (clip := _any_clip(run)) is not None:
        prompt = captions_of(clip.caption)[0] or prompt
        for name, section in recipe.model_inputs().items():
            file = given_to(clip, section)
            # What is not a local file is named as one in the current folder.
            if not isinstance(file, str):
                file = "numbers.json"
            elif "://" in file:
                file = posixpath.basename(file)
            inputs += f" --conditioning {shlex.quote(f'{name}={file}')}"
    suffix = "png" if recipe.data.buckets[0].num_frames == 1 else "mp4"
    words = f"--prompt {shlex.quote(prompt)}{inputs} --out sample.{suffix}"
    return f"{command()} sample {shlex.quote(str(run.path))} {words}"


def _any_clip(run: RunDirectory) -> Clip | None:
    """Return any clip of the run's newest catalog, with a caption if possible."""
    paths = sorted(run.catalogs_path.glob("*.parquet"), key=lambda path: path.stat().st_mtime)
    with suppress(errors.DataError):
        for path in reversed(paths):
            catalog = Catalog.load(path)
            # Usually one of the first clips has a caption; a large catalog is not searched further.
            found = [catalog.clip(row) for row in range(min(len(catalog), _MAX_CLIPS_READ))]
            return next((clip for clip in found if clip.caption), next(iter(found), None))
    return None


# --- Evaluations ------------------------------------------------------------------------------


def evaluated(run: RunDirectory) -> list[dict[str, Any]]:
    """Return facts of each preset (set of prompts) of a run: sampled steps, scores, failures."""
    directory = EvaluationDirectory(run)
    tried = (path.name for path in (directory.path / "claims").glob("*"))
    found = []
    for preset in sorted({*directory.presets(), *tried}):
        steps = directory.steps(preset)
        newest = directory.scores(preset, steps[-1]) if steps else None
        alarms = newest["alarms"] if newest else []
        facts = {
            "preset": preset,
            "steps": steps,
            "measures": newest["measures"] if newest else {},
            "alarms": [alarm["message"] for alarm in alarms if alarm["kind"] == "drift"],
            "unlike": [alarm["measure"] for alarm in alarms if alarm["kind"] == "range"],
            "failed": failed_claims(directory, preset, set(steps)),
        }
        if newest and "held_out" in newest:
            facts["held_out"] = newest["held_out"]
        found.append(facts)
    return found


def failed_claims(
    directory: EvaluationDirectory, preset: str, done: Collection[int]
) -> list[dict[str, Any]]:
    """Return step, reason and attempts of checkpoints whose sampling failed so far."""
    found = []
    for claim in sorted((directory.path / "claims" / preset).glob("step_*")):
        failed = [each for each in lease.history(claim) if each["ended"] == "failed"]
        step = int(claim.name.removeprefix("step_").partition("-")[0])
        if failed and step not in done:
            reason = failed[-1].get("reason", "")
            found.append({"step": step, "reason": reason, "attempts": len(failed)})
    return found


# --- The steps around one ---------------------------------------------------------------------


@dataclass(frozen=True)
class _Report:
    """The guard's report file of one verdict."""

    path: Path
    number: int  # among the verdicts on one step, which may have been trained several times
    facts: GuardReport

    @property
    def step(self) -> int:
        return self.facts["step"] + 1

    def samples_of(self, step: int) -> list[ReportedSample]:
        return samples_of_step(self.facts, step)

    def as_json(self, run: RunDirectory) -> dict[str, Any]:
        state = self.facts.get("state")
        return {
            "path": str(self.path.relative_to(run.path)),
            "step": self.step,
            "batch": self.facts.get("batch"),
            "verdict": self.facts["verdict"],
            "checkpoint": state["checkpoint"] if state else None,
        }


def step_facts(
    run: RunDirectory, step: int, span: int, progress: Progress = ignore_progress
) -> dict[str, Any]:
    """Return facts of a step and of `span` steps on each side of it, from the run's directory.

    Returns:
        JSON: `run`, `step`, `rows` (of metrics, with `abandoned`), `events` (with `at`, their step
        as metrics count), `report` (the guard's nearest one, or None), `clips` (of the step's
        batch, or of the reported one) and `verdict_steps` (of all verdicts of the run).

    Raises:
        RunError: there is no run, it has not reached that step, or a report cannot be read.
        DataError: the ledger is damaged.
    """
    run.recipe()
    rows = read_rows(run, progress=progress)
    last = int(rows.step.max()) if len(rows) else 0
    if step > last:
        reached = f"has done {plural(last, 'step')}" if len(rows) else "has not done a step"
        path = shlex.quote(str(run.path))
        look = f" Look at the last: {command()} show {path} --around {last}." if len(rows) else ""
        raise errors.RunError(
            f"{run.path} {reached} so far, and nothing is known of step {step}.{look}"
        )
    report = _report_near(run, step, span)
    near = rows[np.abs(rows.step - step) <= span]
    columns = near.metrics(), near.column("batch").tolist(), near.is_abandoned.tolist()
    events, events_near = list(read_events(run)), []
    for event in events:
        at = step_of(event, rows)
        steps = [each for each in (at, event.get("from_step")) if each is not None]
        if any(abs(each - step) <= span for each in steps):
            events_near.append({**event, "at": at})
    return {
        "run": str(run.path),
        "step": step,
        "rows": [
            {**metrics, "batch": batch, "abandoned": is_abandoned}
            for metrics, batch, is_abandoned in zip(*columns, strict=True)
        ],
        "events": events_near,
        "report": report and report.as_json(run),
        "clips": _clips(run, step, rows, report),
        "verdict_steps": sorted({each["step"] for each in verdicts(events)}),
    }


def _report_near(run: RunDirectory, step: int, span: int) -> _Report | None:
    """Return the guard's report that says most about a step; None if none is within `span` steps.

    A report with the step's samples comes first, then the nearest, then the newest.
    """
    near = list[_Report]()
    for path in run.guard_path.glob("step_*.json"):
        name = _REPORT_NAME.fullmatch(path.name)
        if name is None or abs(int(name[1]) + 1 - step) > span:
            continue
        try:
            near.append(_Report(path, int(name[2]), fsio.require_record(path, GuardReport)))
        except errors.RecordError as error:
            raise errors.RunError(
                f"{error} It is one of the guard's reports, which nothing else needs: restore it, "
                "or move it away and look at the rest."
            ) from error
    ranked = sorted(near, key=lambda each: (abs(each.step - step), -each.number))
    return next((each for each in ranked if each.samples_of(step)), next(iter(ranked), None))


def samples_of_step(report: GuardReport, step: int) -> list[ReportedSample]:
    """Return a guard report's samples of one step (counted from 1), the highest losses first."""

    def badness(sample: ReportedSample) -> tuple[bool, float]:
        loss = float(sample["loss"])
        return math.isnan(loss), loss  # NaN is worse than any number

    samples = [each for each in report["samples"] if each["step"] + 1 == step]
    return sorted(samples, key=badness, reverse=True)


# --- Clips of a step --------------------------------------------------------------------------


def _clips(
    run: RunDirectory, step: int, rows: MetricRows, report: _Report | None
) -> dict[str, Any]:
    """Return clips of a step: from the guard's report or, if the step was kept, the ledger."""
    if report is not None:
        shown = step if report.samples_of(step) else report.step
        reported = report.samples_of(shown)
        known = _known_clips(run, [each["identity"] for each in reported], [])
        samples = [
            {**each, "path": clip and clip.path}
            for each in reported
            for clip in (known.get(each["identity"]),)
        ]
        batch = samples[0]["batch"] if samples else report.facts.get("batch")
        return {"source": "guard", "step": shown, "batch": batch, "samples": samples}
    index = rows.kept.index_of(step)
    if index is None:
        return {"source": None, "step": step, "batch": None, "samples": []}
    batch = int(rows.kept.column("batch")[index])
    samples = _consumed_clips(run, batch)
    return {"source": "ledger", "step": step, "batch": batch, "samples": samples}


def _consumed_clips(run: RunDirectory, batch: int) -> list[dict[str, Any]]:
    """Return a batch's clips from the ledger (record of consumed samples), in no order.

    Each has `identity`, `caption`, `epoch` and `path`. Empty if the ledger has no clips of the
    batch: none could be decoded, or the batch was abandoned.
    """
    try:
        consumed = ledger.read_ledger(run.ledger_path)
    except errors.DataError:
        if run.ledger_path.exists():
            raise
        return []  # the run was not trained by longtake
    chosen = np.flatnonzero((consumed.step == batch) & ~consumed.is_rejected)
    names = [
        identity.to_bytes(8, "little").hex()[: 2 * ledger.IDENTITY_BYTES]
        for identity in consumed.identity[chosen].tolist()
    ]
    # Catalogs that were in use at this batch are searched first: older ones are rarely needed.
    entries = [entry for entry in consumed.history if entry["step"] <= batch]
    in_force = [each["edition"] for entry in entries[::-1] for each in entry["catalogs"].values()]
    known = _known_clips(run, names, in_force)
    found = []
    for name, epoch in zip(names, consumed.epoch[chosen].tolist(), strict=True):
        clip = known.get(name)
        found.append(
            {
                "identity": clip.identity if clip else name,
                "caption": clip and " | ".join(captions_of(clip.caption)),
                "epoch": epoch,
                "path": clip and clip.path,
            }
        )
    return found


def _known_clips(
    run: RunDirectory, identities: Sequence[str], editions: Sequence[str]
) -> dict[str, Clip]:
    """Find clips by identities in a run's copies of catalogs, first in those of `editions`."""
    first = [run.catalogs_path / f"{edition}.parquet" for edition in editions]
    paths = dict.fromkeys([*first, *sorted(run.catalogs_path.glob("*.parquet"))])
    return find_in_catalogs(filter(Path.is_file, paths), identities)

"""A run at a glance: how far it is, what it has to show for it, and what one can type next."""

import shlex
import statistics
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from longtake.checkpoint.manifest import damage
from longtake.data.catalog import Catalog
from longtake.data.clip import Clip
from longtake.data.references import reference_path
from longtake.errors import DataError
from longtake.inspection.evaluated import evaluated
from longtake.inspection.rows import Row, read_rows
from longtake.inspection.starts import starts
from longtake.inspection.troubles import troubles
from longtake.inspection.verdicts import verdicts
from longtake.node_dir import RunState, state
from longtake.process import command
from longtake.run_dir import RunDirectory

_MOST_LOOKED_AT = 64
_RECENT_STEPS = 50


def glance(run: RunDirectory) -> dict[str, Any]:
    """What a run's directory says of it as a whole.

    Returns:
        JSON: `run`, `id`, `created`, `recipe`, `family`, `steps`, `total_steps`, `state` (running,
        stalled, dead, finished, interrupted or diverged), `holder` (`host`, `pid` and `time` of the
        launch that trains it, or trained it last), `silent_seconds` (since its last sign of life),
        `step_seconds` (the median of recent steps), `seconds_left` (None unless it runs),
        `launches`, `starts` (where the seconds of each went before its first step), `newest` (the
        last row of metrics that counts),
        `abandoned_rows`, `checkpoints` (step, bytes, damage, abandoned), `verdicts`, `rollbacks`,
        `troubles` (of processes and nodes), `evaluations` (see `evaluated`) and `next` (commands,
        each with what it does).

    Raises:
        RunError: there is no run, or run.json is damaged.
    """
    recipe, record = run.recipe(), run.record()
    rows = read_rows(run)
    kept = [row for row in rows if not row.is_abandoned]
    now, steps = state(run), kept[-1].step if kept else 0
    checkpoints, evaluations = _checkpoints(run, steps), evaluated(run)
    return {
        "run": str(run.path),
        "id": record["id"],
        "created": record["created"],
        "recipe": str(run.recipe_path),
        "family": recipe.model.family,
        "steps": steps,
        "total_steps": recipe.training.steps,
        **_course(now, kept, recipe.training.steps - steps),
        "launches": record["launches"],
        "starts": starts(run),
        "newest": kept[-1].metrics if kept else None,
        "abandoned_rows": len(rows) - len(kept),
        "checkpoints": checkpoints,
        "verdicts": verdicts(run),
        "rollbacks": run.rollbacks(),
        "troubles": troubles(run, rows),
        "evaluations": evaluations,
        "next": _next(run, now.kind, checkpoints, rows, evaluations),
    }


def _course(now: RunState, kept: Sequence[Row], steps_left: int) -> dict[str, Any]:
    """Who trains the run, how fast, and for how long still."""
    recent = [row.metrics["step_seconds"] for row in kept[-_RECENT_STEPS:]]
    seconds = statistics.median(recent) if recent else None
    runs, holder = now.kind == "running", now.holder
    return {
        "state": now.kind,
        "holder": holder and {name: holder[name] for name in ("host", "pid", "time")},
        "silent_seconds": now.silent_seconds,
        "step_seconds": seconds,
        "seconds_left": steps_left * seconds if runs and seconds is not None else None,
    }


def command_to_sample(run: RunDirectory) -> str:
    """What to type for a sample of a run.

    A model that uses reference images gets those, and the caption, of a clip it was trained on.
    """
    recipe, prompt, references = run.recipe(), "…", ""
    if recipe.data.references and (clip := _any_clip(run)) is not None:
        prompt = clip.caption or prompt
        references = "".join(
            f" --reference {shlex.quote(f'{name}={reference_path(clip.path, pattern)}')}"
            for name, pattern in recipe.data.references.items()
        )
    suffix = "png" if recipe.data.buckets[0].num_frames == 1 else "mp4"
    words = f"--prompt {shlex.quote(prompt)}{references} --out sample.{suffix}"
    return f"{command()} sample {shlex.quote(str(run.path))} {words}"


def _any_clip(run: RunDirectory) -> Clip | None:
    """A clip of the newest catalog that a run was trained on, with a caption if there is one."""
    paths = sorted(run.catalogs_path.glob("*.parquet"), key=lambda path: path.stat().st_mtime)
    with suppress(DataError):
        for path in reversed(paths):
            catalog = Catalog.load(path)
            clips = (catalog.clip(row) for row in range(min(len(catalog), _MOST_LOOKED_AT)))
            found = list(clips)
            return next((clip for clip in found if clip.caption), next(iter(found), None))
    return None


def _checkpoints(run: RunDirectory, steps: int) -> list[dict[str, Any]]:
    """Step, bytes and damage (by the sizes of files; None: there is none) of each.

    Abandoned ones are there where a run was killed while it went back, until its next launch.
    """
    found, went_back = [], bool(run.rollbacks())
    for step in run.checkpoint_steps():
        path = run.checkpoint_path(step)
        what = damage(path, checksums=False)
        facts = {"step": step, "bytes": _bytes(path), "damage": what}
        found.append({**facts, "abandoned": went_back and step > steps})
    return found


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _next(
    run: RunDirectory,
    state: str,
    checkpoints: Sequence[dict[str, Any]],
    rows: Sequence[Row],
    evaluations: Sequence[dict[str, Any]],
) -> list[dict[str, str]]:
    """Commands, and what each is for; the likeliest first."""
    own, path, ways = command(), shlex.quote(str(run.path)), []
    if state in ("interrupted", "dead"):
        ways.append((run.command_to_go_on(), "resume"))
    if state == "stalled":
        ways.append((f"{own} stacks {path}", "where its processes are"))
    judged = [row.step for row in rows if "verdict" in row.metrics]
    if judged:
        ways.append((f"{own} show {path} --around {judged[-1]}", "the newest verdict"))
    if any(each["damage"] is None and not each["abandoned"] for each in checkpoints):
        ways.append((command_to_sample(run), "what it makes"))
    shown = [each["preset"] for each in evaluations if each["steps"]]
    if shown:
        named = f"--preset {shlex.quote(shown[0])} --out sheet.png"
        ways.append((f"{own} compare {path} {named}", "its checkpoints side by side"))
    if rows:
        ways.append((f"{own} show {path} --out curves.png", "its curves"))
    if run.ledger_path.exists():
        ways.append((f"{own} data audit {path}", "what it was trained on, proved"))
    return [{"command": command, "for": what} for command, what in ways]

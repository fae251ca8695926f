"""Is there room on disk for what a run writes: checkpoints, and what goes through /tmp."""

import os
import tempfile
from pathlib import Path

from longtake.config import EmaProfile, Recipe
from longtake.errors import LongtakeError
from longtake.formatting import format_size
from longtake.preflight.finding import Finding, Judged, Measure, Severity, Skipped
from longtake.preflight.mounts import existing
from longtake.preflight.setting import Facts, Setting
from longtake.run_dir import RunDirectory

NAME = "disk space"

_GIB = 2**30
_SHORT, _OUT = 10 * _GIB, _GIB
"""Bytes below which room is short, or as good as out, where nobody knows what will be needed."""
_FEW_FILES = 10_000
_BYTES_IN_FP32 = 4
_STATES = {"adamw": 8, "muon": 8, "adamw8bit": 2}
"""Bytes that an optimizer saves for each weight; Muon's matrices have 4, so that is the most."""
_ADVICE = "Make room, name another folder with --set out=FOLDER, or keep fewer (checkpoint.keep)."


def measure(setting: Setting) -> Facts:
    """Free bytes and files by folder; on the first process what a checkpoint will take, too."""
    folders = {"temporary files": Path(tempfile.gettempdir())}
    if setting.recipe is not None:
        folders["run directory"] = setting.recipe.out
        if setting.recipe.data.cache is not None:
            folders["data.cache"] = setting.recipe.data.cache
    facts: Facts = {"folders": {name: _free(path) for name, path in folders.items()}}
    if setting.recipe is not None and setting.place.is_first:
        facts["checkpoint"] = _checkpoint_bytes(setting.recipe)
    return facts


def judge(facts: dict[str, Facts], recipe: Recipe | None) -> Judged:
    """Where there is too little for the checkpoints that are kept, and one that is written."""
    judged = Judged()
    known = next((each["checkpoint"] for each in facts.values() if "checkpoint" in each), None)
    needed = None
    if recipe is not None and known and known["bytes"]:
        needed = known["bytes"] * (recipe.checkpoint.keep + 1)
    if recipe is not None and needed is None and known:
        judged.skipped.append(Skipped("room for checkpoints", f"size unknown: {known['source']}"))
    for name in sorted({name for each in facts.values() for name in each["folders"]}):
        free = {n: each["folders"][name] for n, each in facts.items() if name in each["folders"]}
        judged.add(_judge_one(name, free, needed if name == "run directory" else None))
    return judged


def _judge_one(name: str, free: dict[str, dict[str, int]], needed: int | None) -> Judged:
    short = tuple(node for node, each in free.items() if each["bytes"] < (needed or _SHORT))
    gib = {node: each["bytes"] / _GIB for node, each in free.items()}
    judged = Judged(measures=[Measure(f"free for {name}", "GiB", gib, short)])
    if short:
        least = min(free[node]["bytes"] for node in short)
        what = f"{format_size(least)} are free for {name}"
        is_error = least < (needed or _OUT)
        expected = (
            f"{format_size(needed)} for checkpoint.keep and one more"
            if needed
            else format_size(_SHORT)
        )
        severity: Severity = "error" if is_error else "warning"
        judged.findings.append(Finding(severity, NAME, short, what, expected, _ADVICE))
    few = tuple(node for node, each in free.items() if 0 < each["files"] < _FEW_FILES)
    if few:
        what = f"{min(free[node]['files'] for node in few)} more files fit on the disk of {name}"
        judged.findings.append(Finding("warning", NAME, few, what, f"{_FEW_FILES}", _ADVICE))
    return judged


def _free(path: Path) -> dict[str, int]:
    found = os.statvfs(existing(path))
    # A file system without a limit of files says that it has none at all.
    return {"bytes": found.f_bavail * found.f_frsize, "files": found.f_favail or -1}


def _checkpoint_bytes(recipe: Recipe) -> dict[str, int | str | None]:
    """Bytes of one checkpoint and how that is known."""
    run = RunDirectory(recipe.out)
    if steps := run.checkpoint_steps():
        files = run.checkpoint_path(steps[-1]).rglob("*")
        found = sum(path.stat().st_size for path in files if path.is_file())
        return {"bytes": found, "source": f"the checkpoint of step {steps[-1]}"}
    try:
        return {"bytes": _predicted(recipe), "source": "predicted from the model"}
    except (LongtakeError, OSError, ImportError) as error:
        return {"bytes": None, "source": str(error).splitlines()[0]}


def _predicted(recipe: Recipe) -> int:
    """Weights, averages and the optimizer's states of all that trains; an estimate from above."""
    from longtake.models.build import outline
    from longtake.models.trainable import trained_state

    trained = trained_state(outline(recipe).model)
    count = sum(value.numel() for value in trained.values())
    profiles: tuple[EmaProfile, ...] = recipe.ema.averages()
    per_weight = _BYTES_IN_FP32 * (1 + len(profiles)) + _STATES[recipe.optimizer.kind]
    return count * per_weight

"""What evaluation servers have made of a run: results, alarms, what failed, and who is at work."""

from pathlib import Path
from typing import Any

from longtake.evaluation_dir import EvaluationDirectory
from longtake.lease import history
from longtake.run_dir import RunDirectory


def evaluated(run: RunDirectory) -> list[dict[str, Any]]:
    """A dict for each preset that was tried, by name.

    Returns:
        JSON: `preset`, `steps` (those with a result), `measures` and `held_out` (of the newest;
        the second only where it was measured), `alarms` (what drifts at the newest, in words),
        `unlike` (measures of it that lie outside of those of the training's clips) and `failed`
        (step, reason and attempts of each that has no result).
    """
    directory = EvaluationDirectory(run)
    tried = (path.name for path in (directory.path / "claims").glob("*"))
    return [_of_preset(directory, name) for name in sorted({*directory.presets(), *tried})]


def _of_preset(directory: EvaluationDirectory, preset: str) -> dict[str, Any]:
    steps = directory.steps(preset)
    newest = directory.scores(preset, steps[-1]) if steps else None
    alarms = newest["alarms"] if newest else []
    return {
        "preset": preset,
        "steps": steps,
        "measures": newest["measures"] if newest else {},
        **({"held_out": newest["held_out"]} if newest and "held_out" in newest else {}),
        "alarms": [alarm["message"] for alarm in alarms if alarm["kind"] == "drift"],
        "unlike": [alarm["measure"] for alarm in alarms if alarm["kind"] == "range"],
        "failed": _failed(directory, preset, set(steps)),
    }


def _failed(directory: EvaluationDirectory, preset: str, done: set[int]) -> list[dict[str, Any]]:
    found = []
    for claim in sorted((directory.path / "claims" / preset).glob("step_*")):
        attempts = history(claim)
        failed = [each for each in attempts if each["ended"] == "failed"]
        if failed and _step_of(claim) not in done:
            reason = failed[-1].get("reason", "")
            found.append({"step": _step_of(claim), "reason": reason, "attempts": len(failed)})
    return found


def _step_of(claim: Path) -> int:
    return int(claim.name.removeprefix("step_").partition("-")[0])

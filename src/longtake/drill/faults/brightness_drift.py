"""The averages get a little brighter at each save, which no loss can see.

A loss is that of the weights, and what is sampled are their averages: whatever goes wrong with
these alone shows in videos only. Here each later checkpoint is the one before it with a little more
in the bias of the averages' last layer.
"""

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from longtake.drill.fault import Fault
from longtake.drill.ground import Ground
from longtake.drill.place import Place
from longtake.drill.result import Result
from longtake.drill.verdict import Verdict
from longtake.errors import RunError
from longtake.evaluation_dir import Alarm, EvaluationDirectory
from longtake.process import program, start
from longtake.run_dir import RunDirectory

_NAME = "brightness-drift"
_PRESET = "drill"
_PRESETS = f"""\
[{_PRESET}]
num_inference_steps = 4
guidance_scale = 1.0
prompts = ["a red square moving right", "a blue circle moving up"]
seeds = [0, 1]
"""
_BRIGHTER = 0.03
"""A latent is a pixel from -1 to 1: four of 255 grey levels."""
_TIMES = 4
_STEPS_BETWEEN = 5
_LIMIT_SECONDS = 300.0


def drill(ground: Ground) -> Result:
    """Let the averages of a trained run drift, and evaluate its checkpoints."""
    from longtake.drill.brighten import brighten  # whoever lists the faults needs no torch

    place = ground.undisturbed.copied_to(ground.undisturbed.folder.with_name(_NAME))
    before = place.run.checkpoint_steps()
    steps = brighten(place.run, _TIMES, _BRIGHTER, _STEPS_BETWEEN)
    verdict, began = Verdict(_NAME), time.monotonic()
    _evaluate(place)
    verdict.detected_seconds = time.monotonic() - began
    judge(verdict, place.run, before, steps)
    return verdict.result(
        f"Over {_TIMES} checkpoints the averages got brighter by {_TIMES * _BRIGHTER * 127.5:.0f} "
        "grey levels, and no loss changed. The evaluator said: "
        f"{' '.join(each['message'] for each in _drifts(place.run, steps[-1]))}"
    )


def _evaluate(place: Place) -> None:
    """Run `longtake evaluate` over all checkpoints, the oldest first."""
    presets, said = place.folder / "presets.toml", place.folder / "evaluate.log"
    presets.write_text(_PRESETS, encoding="utf-8")
    options = ("--presets", presets.name, "--preset", _PRESET, "--device", "cpu")
    command = program("longtake", "evaluate", "run", *options)
    with said.open("wb") as log:
        process = start(command, log, place.folder, OMP_NUM_THREADS="1")
        try:
            code = process.wait(_LIMIT_SECONDS)
        except subprocess.TimeoutExpired as error:
            process.kill()
            process.wait()
            raise RunError(f"The evaluator has not ended in {_LIMIT_SECONDS:g} s.") from error
    if code:
        raise RunError(f"The evaluator ended with {code}: {_last_line(said)}")


def judge(
    verdict: Verdict, run: RunDirectory, before: Sequence[int], brighter: Sequence[int]
) -> None:
    """Demand an alarm at the last checkpoint, and none before the drift had lasted."""
    directory = EvaluationDirectory(run)
    done = directory.steps(_PRESET)
    verdict.must(done == [*before, *brighter], f"the steps {done} were evaluated")
    early = {step: _drifts(run, step) for step in before if _drifts(run, step)}
    verdict.must(not early, f"an alarm was given before anything drifted: {early}")
    found = _drifts(run, brighter[-1])
    rose = f"brightness of {_PRESET} rose "
    verdict.must(
        any(each["message"].startswith(rose) for each in found),
        f"no alarm was given at step {brighter[-1]}, where brightness was {_course(run)}",
    )


def _drifts(run: RunDirectory, step: int) -> list[Alarm]:
    """Alarms of a brightness that drifts."""
    scores = EvaluationDirectory(run).scores(_PRESET, step)
    alarms = scores["alarms"] if scores else []
    return [each for each in alarms if (each["measure"], each["kind"]) == ("brightness", "drift")]


def _course(run: RunDirectory) -> list[float]:
    scores = EvaluationDirectory(run).all_scores(_PRESET)
    return [round(each["measures"]["brightness"], 1) for each in scores]


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "nothing")


FAULT = Fault(
    _NAME,
    does="Lets a run's averages get a little brighter from checkpoint to checkpoint.",
    must="No loss tells of it; the evaluator gives the alarm, and none before it.",
    drill=drill,
)

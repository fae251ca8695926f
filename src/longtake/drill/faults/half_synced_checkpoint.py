"""A sync stops in the middle of a checkpoint that an evaluation server looks at."""

import os
import signal
import time
from typing import Literal

import tomli_w

from longtake.drill.evaluators import (
    PRESET,
    PROMPTS,
    Evaluator,
    attempts,
    events,
    must_be_evaluated_once,
)
from longtake.drill.fault import Fault
from longtake.drill.ground import Ground
from longtake.drill.place import Place
from longtake.drill.result import Result
from longtake.drill.verdict import Verdict
from longtake.fsio import atomic_write
from longtake.run_dir import RunDirectory

_NAME = "half-synced-checkpoint"
_WITHIN_SECONDS = 5.0
_SOLVER_STEPS = 4
_WEIGHTS = "*.distcp"

_PRESETS = "presets.toml"

State = Literal["whole", "half", "garbled"]


def drill(ground: Ground) -> Result:
    """Sync by hand, in the worst order: COMMITTED first, weights by halves, then of wrong bytes."""
    place = ground.stopped(_NAME)
    early, late = place.run.checkpoint_steps()[-2:]
    there = leave_on_cluster(place)
    copy(there, place.run, late, weights="half")
    copy(there, place.run, early)
    with Evaluator(place, "--presets", _PRESETS, "--follow") as server:
        wait_for(place.run, server, "evaluated", early)
        untouched = not attempts(place.run, late)
        copy(there, place.run, late, weights="garbled")
        wait_for(place.run, server, "evaluation_failed", late)
        copy(there, place.run, late)
        at = time.monotonic()
        wait_for(place.run, server, "evaluated", late)
        seconds = time.monotonic() - at
        os.kill(server.pid, signal.SIGTERM)
        server.finish(expected=128 + signal.SIGTERM)
    verdict = judge(place.run, early, late, untouched, seconds)
    return verdict.result(
        f"Step {late} was left alone while files were short, and refused while their bytes were "
        f"wrong; it was evaluated once, {seconds:.1f} s after it was whole; the other meanwhile."
    )


def leave_on_cluster(place: Place) -> RunDirectory:
    """Leave a run's checkpoints where they were saved; the place's run becomes its mirror."""
    there = RunDirectory(place.folder / "cluster")
    there.path.mkdir()
    place.run.checkpoints_path.rename(there.checkpoints_path)
    preset = {"prompts": [f"a square, number {number}" for number in range(PROMPTS)]}
    text = tomli_w.dumps({PRESET: {**preset, "num_inference_steps": _SOLVER_STEPS}})
    (place.folder / _PRESETS).write_text(text, encoding="utf-8")
    return there


def copy(there: RunDirectory, here: RunDirectory, step: int, weights: State = "whole") -> None:
    """Bring a checkpoint here in the worst order; its weights in some state."""
    source, target = there.checkpoint_path(step), here.checkpoint_path(step)
    files = sorted(path for path in source.rglob("*") if path.is_file())
    for path in sorted(files, key=lambda each: each.name != "COMMITTED"):
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(place) as aside:
            aside.write_bytes(
                _in_state(path.read_bytes(), weights if path.match(_WEIGHTS) else "whole")
            )


def _in_state(content: bytes, state: State) -> bytes:
    """A file's bytes; the first half of them; or as many, of which the second half is zeros."""
    half = len(content) // 2
    rest = {"whole": content[half:], "half": b"", "garbled": bytes(len(content) - half)}
    return content[:half] + rest[state]


def wait_for(run: RunDirectory, server: Evaluator, kind: str, step: int) -> None:
    """Return when a server has told of something.

    Raises:
        RunError: it never does.
    """
    for _ in server.looks():
        if any((each["event"], each.get("step")) == (kind, step) for each in events(run)):
            return


def judge(run: RunDirectory, early: int, late: int, untouched: bool, seconds: float) -> Verdict:
    """Nothing was sampled that was not whole, and everything was that is.

    Args:
        run: the mirror.
        early: the step that came whole.
        late: the step whose sync stopped.
        untouched: whether nobody had tried it while its files were short.
        seconds: from when it was whole until it was evaluated.
    """
    verdict = Verdict(_NAME, detected_seconds=seconds)
    verdict.must(untouched, f"step {late} was tried while its files were short")
    ends = [each["ended"] for each in attempts(run, late)]
    verdict.must(
        ends[-1:] == ["done"] and set(ends[:-1]) == {"damaged"},
        f"step {late} was to be refused until it was whole, and its attempts ended {ends}",
    )
    verdict.must(
        seconds <= _WITHIN_SECONDS,
        f"it was evaluated {seconds:.1f} s after it was whole, not within {_WITHIN_SECONDS:g}",
    )
    must_be_evaluated_once(verdict, run, (early, late))
    return verdict


FAULT = Fault(
    _NAME,
    does=(
        "Syncs a checkpoint to an evaluation server by hand: COMMITTED first, weights by halves, "
        "then of the right size with wrong bytes, and stops in between."
    ),
    must=(
        "It is not sampled before it is whole, and within 5 s then, once; the other checkpoint is "
        "evaluated meanwhile."
    ),
    drill=drill,
)

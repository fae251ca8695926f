"""Checkpoints are deleted while an evaluation server reads them."""

from dataclasses import dataclass, field

from longtake.checkpoint.deletion import delete, needed_steps
from longtake.drill.evaluators import (
    PRESET,
    Evaluator,
    attempts,
    events,
    must_be_evaluated_once,
    must_be_undisturbed,
    partial_videos,
    recipe,
    step_of,
)
from longtake.drill.fault import Fault
from longtake.drill.ground import Ground
from longtake.drill.harms import Sabotage
from longtake.drill.place import STEPS, Place
from longtake.drill.result import Result
from longtake.drill.verdict import Verdict
from longtake.evaluation_dir import EvaluationDirectory
from longtake.fsio import read_json_lines
from longtake.run_dir import RunDirectory

_NAME = "checkpoint-deleted-under-evaluator"
_KEEP = 2
_CHANGES = (f"checkpoint.keep={_KEEP}", "checkpoint.every=1", "evaluation.hold_waiting=0")
_SLOW_FROM = 20
_SOLVER_STEPS = 80
"""So many that several checkpoints are saved while one is sampled."""
_DELETIONS = 3
_LAST = STEPS - 10
"""The newest checkpoint that is deleted: the run's last ones are compared."""


@dataclass
class Seen:
    """What was seen of a run and its server.

    Attributes:
        held: a step whose checkpoint was sampled while the run could have deleted it.
        saves: how many checkpoints were saved meanwhile.
        deleted: steps whose checkpoints were deleted right after they were held.
    """

    held: int = -1
    saves: int = 0
    deleted: list[int] = field(default_factory=list)


def drill(ground: Ground) -> Result:
    """Let a run keep less than its server needs; then delete what is held, as nobody should."""
    place = ground.fresh(_NAME, recipe(_SOLVER_STEPS))
    with (
        Evaluator(place, "--until-finished") as server,
        place.launch(*_CHANGES, sabotage=Sabotage("dawdle", _SLOW_FROM)) as launch,
    ):
        seen = Seen()
        watch_one(place.run, server, seen)
        delete_some(place.run, server, seen)
        launch.finish()
        server.finish()
    verdict = judge(place, seen, ground.undisturbed)
    gone = sum(_ends(place.run, step)[-1:] == ["gone"] for step in seen.deleted)
    return verdict.result(
        f"Step {seen.held} stayed until it was sampled, for {seen.saves} saves. Of {_DELETIONS} "
        f"that were deleted in spite of their holds {gone} are recorded as gone, and all others "
        "were read before. Every step of the training is the undisturbed run's to the bit."
    )


def watch_one(run: RunDirectory, server: Evaluator, seen: Seen) -> None:
    """Count the saves that the first checkpoint outlives of which a video is there.

    Raises:
        RunError: there never is one.
    """
    for _ in server.looks():
        if seen.held < 0 and (videos := partial_videos(run)):
            seen.held = step_of(videos[0])
        if seen.held in run.checkpoint_steps() and seen.held in needed_steps(run):
            seen.saves = max(seen.saves, _num_saved(run, seen.held))
        elif seen.held >= 0:
            return


def delete_some(run: RunDirectory, server: Evaluator, seen: Seen) -> None:
    """Delete checkpoints in the moment in which they are held, before they are read.

    Raises:
        RunError: too few ever are.
    """
    for _ in server.looks():
        for step in needed_steps(run) - {seen.held, *seen.deleted}:
            if step <= _LAST and run.checkpoint_path(step).exists():
                delete([run.checkpoint_path(step)])
                seen.deleted.append(step)
        if len(seen.deleted) >= _DELETIONS or run.metrics()[-1:][0]["step"] > _LAST:
            return


def judge(place: Place, seen: Seen, undisturbed: Place) -> Verdict:
    """What was held stayed; what was deleted is whole or gone; all others were evaluated once.

    Args:
        place: of the run.
        seen: what was seen of it.
        undisturbed: the run that it must be equal to.
    """
    verdict, run = Verdict(_NAME), place.run
    verdict.must(
        seen.saves > _KEEP,
        f"step {seen.held} was held for {seen.saves} saves, and the run keeps {_KEEP} anyway",
    )
    verdict.must(
        len(seen.deleted) == _DELETIONS,
        f"{len(seen.deleted)} checkpoints were deleted under the server, not {_DELETIONS}",
    )
    claimed = sorted({each["step"] for each in events(run) if each["event"] == "evaluating"})
    ends = {step: _ends(run, step) for step in claimed}
    for step, found in ends.items():
        # The run's own retention may be faster than a claim; what is held it must leave alone.
        may_be_gone = step not in run.checkpoint_steps() and step != seen.held
        is_right = found == ["done"] or (found == ["gone"] and may_be_gone)
        verdict.must(is_right, f"step {step} ended as {', '.join(map(str, found))}")
    of_gone = [step for step in ends if _has_result(run, step) and "gone" in ends[step]]
    verdict.must(not of_gone, f"there are results of steps {of_gone}, which were gone")
    done = {step for step, found in ends.items() if "done" in found}
    must_be_evaluated_once(verdict, run, sorted(done | set(run.checkpoint_steps())))
    must_be_undisturbed(verdict, place, undisturbed)
    return verdict


def _ends(run: RunDirectory, step: int) -> list[str | None]:
    return [each["ended"] for each in attempts(run, step)]


def _has_result(run: RunDirectory, step: int) -> bool:
    return EvaluationDirectory(run).result_path(PRESET, step).exists()


def _num_saved(run: RunDirectory, since: int) -> int:
    """How many checkpoints later than a step have become whole."""
    found = (each for each in read_json_lines(run.events_path) if each["event"] == "checkpoint")
    return sum(each["step"] > since for each in found)


FAULT = Fault(
    _NAME,
    does="Deletes checkpoints while an evaluation server reads them.",
    must=(
        "What is held is kept; what is deleted all the same is told as gone, or was read before; "
        "the run is the same to the bit."
    ),
    drill=drill,
)

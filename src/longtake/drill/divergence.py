"""Numbers go wrong inside a run: what must hold then."""

import math
from datetime import datetime
from typing import Any

from longtake.drill.place import Place
from longtake.drill.verdict import Verdict, clips_between, identities_of, steps_skipped
from longtake.fsio import read_json_lines
from longtake.run_dir import RunDirectory

_LAST_BATCHES = 30
_LARGEST_HARM = 0.1
"""Relative, of the loss at the end."""


def judge_repair(
    fault: str,
    place: Place,
    at: int,
    reason: str,
    undisturbed: Place,
    *,
    within: int = 0,
) -> Verdict:
    """It is found in time; the run goes back to before it and round its batches, and ends well.

    Args:
        fault: the fault's name.
        place: where it was injected.
        at: the step that it was in, or began with.
        reason: of the guard's verdict.
        undisturbed: the same run without it.
        within: steps in which it must be found.
    """
    verdict, run = Verdict(fault), place.run
    _judge_report(verdict, run, at, reason, within)
    rollbacks = run.rollbacks()
    verdict.must(len(rollbacks) == 1, f"it went back {len(rollbacks)} times, not once")
    target, first, end = at, 0, 0
    if rollbacks:
        target, (first, end) = rollbacks[0]["to_step"], rollbacks[0]["skipped"]
        verdict.must(target <= at, f"it went back to step {target}, and it began in {at}")
        verdict.must(first <= at < end, f"it goes round batches {first} to {end - 1}, not {at}")
    verdict.must_be_equal(run, undisturbed.run, until=target)
    _judge_end(verdict, place, undisturbed, (first, end))
    return verdict


def judge_skip(fault: str, place: Place, at: int, undisturbed: Place) -> Verdict:
    """The update of that one step is left out, and nothing else changes.

    Arguments are those of `judge_repair`.
    """
    verdict, run = Verdict(fault), place.run
    _judge_report(verdict, run, at, "non_finite", within=0)
    skipped = steps_skipped(run)
    verdict.must(skipped == [at + 1], f"updates of steps {skipped} were left out, not of {at + 1}")
    verdict.must(not run.rollbacks(), "it went back, and had only to leave out one update")
    _judge_end(verdict, place, undisturbed, (0, 0))
    return verdict


def reports(run: RunDirectory) -> list[dict[str, Any]]:
    """What the guard has told of, the first first."""
    events = read_json_lines(run.events_path)
    return [event for event in events if event["event"] in ("skipped", "suspected")]


def harm(run: RunDirectory, undisturbed: RunDirectory) -> float:
    """The loss towards the end over the undisturbed run's: that of the last batches both trained.

    Other batches have other noise levels, which move a loss by more than most faults do.
    """
    one, other = _loss_by_batch(run), _loss_by_batch(undisturbed)
    both = sorted(one.keys() & other.keys())[-_LAST_BATCHES:]
    if not both:
        return math.inf
    return sum(one[batch] for batch in both) / sum(other[batch] for batch in both)


def sentence(run: RunDirectory, undisturbed: RunDirectory) -> str:
    """How a run that went back did so, for people."""
    (rolled_back,) = run.rollbacks()
    first, end = rolled_back["skipped"]
    return (
        f"It went back from step {rolled_back['from_step']} to the checkpoint of step "
        f"{rolled_back['to_step']}, went round batches {first} to {end - 1}, and ended with "
        f"{harm(run, undisturbed):.2f} times the undisturbed run's loss."
    )


def _judge_report(verdict: Verdict, run: RunDirectory, at: int, reason: str, within: int) -> None:
    found = reports(run)
    verdict.must(bool(found), "no event says that the guard saw anything")
    if not found:
        return
    first = found[0]
    step = first["step"]
    verdict.detected_steps = step - at
    verdict.detected_seconds = _seconds_since(run, at, first)
    verdict.must(at <= step <= at + within, f"it was found in step {step}, and it began in {at}")
    said = {event["reason"] for event in found}
    verdict.must(said == {reason}, f"it was taken for {' and '.join(sorted(said))}, not {reason}")
    has_report = all((run.path / event["report"]).is_file() for event in found)
    verdict.must(has_report, "what the guard saw was not kept")


def _judge_end(
    verdict: Verdict, place: Place, undisturbed: Place, skipped: tuple[int, int]
) -> None:
    """All steps are done, on all clips but those it went round; the loss is what it would be."""
    everything = identities_of(place.catalog())
    gone_round = clips_between(undisturbed.run, *skipped)
    verdict.must_be_exact(place.run, everything, everything, skipped=gone_round)
    share = harm(place.run, undisturbed.run)
    verdict.must(
        abs(share - 1) <= _LARGEST_HARM,
        f"it ended with {share:.2f} times the undisturbed run's loss",
    )


def _loss_by_batch(run: RunDirectory) -> dict[int, float]:
    """Of the updates that were made."""
    rows = (row for row in run.metrics() if "verdict" not in row)
    return {row["batch"]: row["loss"] for row in rows if row["loss"] is not None}


def _seconds_since(run: RunDirectory, step: int, event: dict[str, Any]) -> float:
    """From the beginning of a step to an event, by the run's own clock."""
    rows = (row for row in read_json_lines(run.metrics_path) if row["step"] == step)
    began: float = next(rows)["time"]
    return datetime.fromisoformat(event["time"]).timestamp() - began

"""Numerical faults: NaN, loss spikes, slow divergence, weights that change between epochs."""

import math
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from longtake.faults import expect
from longtake.faults.registry import fault
from longtake.faults.sandbox import (
    LONG_RECIPE,
    NAN_PARAMETER,
    NORM_FACTOR,
    ON_TWO_RANKS,
    POISONED_BATCHES,
    RATE_FACTOR,
    STEPS_PER_EPOCH,
    Injection,
    TrainingSite,
)
from longtake.fsio import read_json_lines
from longtake.run_dir import RunDirectory

_NAN_STEP = 20
_POISONED_BATCH = 105
_RATE_STEP = 85
_RATE_WITHIN_STEPS = 100
_NORM_EPOCH = 7
_NORM_STEP = _NORM_EPOCH * STEPS_PER_EPOCH - 1
_LAST_BATCHES = 30  # whose mean is compared: single losses vary by more
_LARGEST_FINAL_LOSS_CHANGE = 0.1  # relative change of the final loss
_LARGEST_LOSS_ERROR = 1e-3  # relative error of a loss whose sums round differently


@fault(
    does="Makes one number of one parameter's gradient NaN, in one step.",
    must="That update alone is skipped, and the message names the parameter.",
)
def nan_gradient(site: TrainingSite, evidence: expect.Evidence) -> None:
    _train(site, Injection("lose-gradient", _NAN_STEP))
    _expect_skip(evidence, _NAN_STEP)
    evidence.expect_equal(until=_NAN_STEP)
    said = _expect_named(evidence, NAN_PARAMETER)
    evidence.message = f"That update was skipped, and it said: {said}"


@fault(
    does="Makes one number of a gradient NaN on one rank of two, in one step.",
    must="Both skip that update, and keep equal weights; the message names the rank.",
)
def nan_on_one_rank(site: TrainingSite, evidence: expect.Evidence) -> None:
    _train(site, Injection("lose-gradient-on-rank-1", _NAN_STEP), *ON_TWO_RANKS, ranks=2)
    _expect_skip(evidence, _NAN_STEP)
    # Not bitwise: two ranks add up a batch in another order than one.
    error = expect.largest_loss_error(site.run, evidence.undisturbed.run, until=_NAN_STEP)
    evidence.expect(error <= _LARGEST_LOSS_ERROR, f"a loss before it differs by {error:.1e}")
    said = _expect_named(evidence, "rank 1 of 2 alone", NAN_PARAMETER)
    sums = [path.read_text(encoding="utf-8") for path in site.folder.glob("weights_of_rank_*")]
    evidence.expect(len(sums) == 2, f"{len(sums)} ranks have reported the weights they ended with")
    evidence.expect(len(set(sums)) == 1, "the ranks ended with different weights")
    evidence.message = (
        f"Both ranks skipped that update and ended with equal weights. It said: {said}"
    )


@fault(
    name="weight-norm-step-at-epoch-end",
    does=f"Raises the norm of a run's weights by {NORM_FACTOR - 1:.1%} where an epoch ends.",
    must="It is found within an epoch; the message names the epoch boundary; the run rolls back.",
    recipe=LONG_RECIPE,
    compared_with="undisturbed_long",
    inject=Injection("raise-norm", _NORM_STEP),
    reason="edge_step",
    within_steps=STEPS_PER_EPOCH,
    told="It said",
    names=(f"epoch {_NORM_EPOCH} of stage all begins",),
)
@fault(
    name="slow-divergence",
    does=f"Raises the learning rate of a run's attention {RATE_FACTOR:g}fold from a step on.",
    must=f"It is found within {_RATE_WITHIN_STEPS} steps, by name; the run rolls back.",
    recipe=LONG_RECIPE,
    compared_with="undisturbed_long",
    inject=Injection("raise-rate", _RATE_STEP),
    reason="divergence",
    within_steps=_RATE_WITHIN_STEPS,
    told="{steps} steps later it said",
)
@fault(
    name="loss-spike",
    does=f"Poisons {POISONED_BATCHES} batches of a run: their pixels are far too bright.",
    must="It is found at its first step; the run rolls back and excludes these batches.",
    recipe=LONG_RECIPE,
    compared_with="undisturbed_long",
    inject=Injection("poison", _POISONED_BATCH),
    reason="spike",
    within_steps=0,
    told=f"{POISONED_BATCHES} batches from {_POISONED_BATCH} on were poisoned, and it said",
)
def rolled_back(
    site: TrainingSite,
    evidence: expect.Evidence,
    inject: Injection,
    reason: str,
    within_steps: int,
    told: str,
    names: Sequence[str] = (),
) -> None:
    """Drill: train with a fault for which the guard must roll back, and check the rollback."""
    _train(site, inject)
    _expect_rollback(evidence, inject.at, reason, within_steps)
    _expect_named(evidence, *names)
    if not evidence.complaints:
        (rollback,) = site.run.rollbacks()
        first, end = rollback["skipped"]
        evidence.message = (
            f"{told.format(steps=evidence.detected_steps)}: "
            f"{guard_reports(site.run)[0]['message']} It rolled back from step "
            f"{rollback['from_step']} to the checkpoint of step {rollback['to_step']}, excluded "
            f"batches {first} to {end - 1}, and ended with "
            f"{_relative_end_loss(evidence):.2f} times the undisturbed run's loss."
        )


def _train(site: TrainingSite, inject: Injection, *changes: str, ranks: int = 1) -> None:
    with site.launch(*changes, ranks=ranks, inject=inject) as process:
        process.finish()


def _expect_rollback(evidence: expect.Evidence, at: int, reason: str, within_steps: int) -> None:
    """Expect that the guard finds the fault in time, and one rollback excludes its batches."""
    _expect_guard_report(evidence, at, reason, within_steps)
    rollbacks = evidence.site.run.rollbacks()
    evidence.expect(len(rollbacks) == 1, f"it rolled back {len(rollbacks)} times, not once")
    target, first, end = at, 0, 0
    if rollbacks:
        target, (first, end) = rollbacks[0]["to_step"], rollbacks[0]["skipped"]
        evidence.expect(target <= at, f"it rolled back to step {target}, and it began in {at}")
        evidence.expect(first <= at < end, f"it excludes batches {first} to {end - 1}, not {at}")
    evidence.expect_equal(until=target)
    _expect_good_end(evidence, (first, end))


def _expect_skip(evidence: expect.Evidence, at: int) -> None:
    """Expect that the guard skips only the update after step `at`, without a rollback."""
    _expect_guard_report(evidence, at, "non_finite", within_steps=0)
    run = evidence.site.run
    skipped = expect.steps_skipped(run)
    evidence.expect(
        skipped == [at + 1], f"updates of steps {skipped} were skipped, not of {at + 1}"
    )
    evidence.expect(not run.rollbacks(), "it rolled back, and had only to skip one update")
    _expect_good_end(evidence, (0, 0))


def guard_reports(run: RunDirectory) -> list[dict[str, Any]]:
    events = read_json_lines(run.events_path)
    return [event for event in events if event["event"] in ("update_skipped", "anomaly_detected")]


def _relative_end_loss(evidence: expect.Evidence) -> float:
    """Return the ratio of the final loss of a run with a fault to the undisturbed run's.

    The ratio is computed on the last batches that both have trained: different batches have
    different noise levels, which change the loss by more than most faults do.
    """
    one, other = _loss_by_batch(evidence.site.run), _loss_by_batch(evidence.undisturbed.run)
    both = sorted(one.keys() & other.keys())[-_LAST_BATCHES:]
    if not both:
        return math.inf
    return sum(one[batch] for batch in both) / sum(other[batch] for batch in both)


def _loss_by_batch(run: RunDirectory) -> dict[int, float]:
    # Updates with a verdict were skipped or rolled back: their losses do not describe the weights.
    rows = (row for row in run.metrics() if "verdict" not in row)
    return {row["batch"]: row["loss"] for row in rows if row["loss"] is not None}


def _expect_guard_report(
    evidence: expect.Evidence, at: int, reason: str, within_steps: int
) -> None:
    run = evidence.site.run
    found = guard_reports(run)
    evidence.expect(bool(found), "no event says that the guard found anything")
    if not found:
        return
    step = found[0]["step"]
    evidence.detected_steps = step - at
    # The file and not `metrics`, which leaves out rows of steps that were rolled back.
    rows = (row for row in read_json_lines(run.metrics_path) if row["step"] == at)
    time = datetime.fromisoformat(found[0]["time"]).timestamp()
    evidence.detected_seconds = time - next(rows)["time"]
    in_time = at <= step <= at + within_steps
    evidence.expect(in_time, f"it was found in step {step}, and it began in {at}")
    said = {event["reason"] for event in found}
    evidence.expect(
        said == {reason}, f"it was taken for {' and '.join(sorted(said))}, not {reason}"
    )
    has_report = all((run.path / event["report"]).is_file() for event in found)
    evidence.expect(has_report, "the guard's report was not kept")


def _expect_good_end(evidence: expect.Evidence, excluded: tuple[int, int]) -> None:
    """Expect all steps, about the undisturbed run's final loss, and each clip once.

    Clips of the excluded batches (a half-open range) must be left out.
    """
    evidence.expect_exact(skipped=expect.clips_between(evidence.undisturbed.run, *excluded))
    share = _relative_end_loss(evidence)
    evidence.expect(
        abs(share - 1) <= _LARGEST_FINAL_LOSS_CHANGE,
        f"it ended with {share:.2f} times the undisturbed run's loss",
    )


def _expect_named(evidence: expect.Evidence, *wanted: str) -> str:
    """Expect the given words in the guard's messages, and return the messages."""
    said = " ".join(report["message"] for report in guard_reports(evidence.site.run))
    for name in wanted:
        evidence.expect(name in said, f"the message does not name {name}: {said}")
    return said

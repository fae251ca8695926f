"""Faults of a node's health: slow ranks and wrong clocks."""

import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from longtake import fsio, node_dir
from longtake.faults.expect import Evidence
from longtake.faults.faulty_processes import CLOCK_FILE
from longtake.faults.faulty_processes import PROGRAM as FAULTY_PROCESSES
from longtake.faults.hangs import expect_rank_named, launch_with_hang
from longtake.faults.registry import fault
from longtake.faults.sandbox import Injection, ObservedEvent, TrainingSite
from longtake.health.clock import STEP_SECONDS
from longtake.process import program, start

_SLOW_CHANGES = ("data.workers=0", "training.steps=600")
_SLOW_SETTINGS = {"health_seconds": 4.0}  # short, as an outlier takes three windows at least
_SLOW_RANK = 1
_SLOW_FROM_STEP = 16
_SLOW_WITHIN_SECONDS = 45.0
_LARGEST_SHARE_ERROR = 0.05  # absolute: 10 % may be reported as 5 to 15 %
_CLOCK_STEP_SECONDS = -2.5
_LARGEST_STEP_ERROR_SECONDS = 1e-3
_CLOCK_PPM = 500.0
_LARGEST_PPM_ERROR = 100.0  # error of the machine's own clock and of the measurement


_SLOW_RANK_NAMED = (
    "It is named, with how much slower it is, though all ranks' steps take the same time."
)


@fault(
    name="slow-rank-by-30",
    family="slow-rank",
    does="Lets one rank of two take 30 % longer for its own part of each step.",
    must=_SLOW_RANK_NAMED,
    kind="slow-rank-1-by-30",
    share=0.3,
)
@fault(
    name="slow-rank-by-10",
    family="slow-rank",
    does="Lets one rank of two take 10 % longer for its own part of each step.",
    must=_SLOW_RANK_NAMED,
    kind="slow-rank-1-by-10",
    share=0.1,
)
def slow_rank(site: TrainingSite, evidence: Evidence, kind: str, share: float) -> None:
    inject = Injection(kind, _SLOW_FROM_STEP)
    with site.launch(*_SLOW_CHANGES, ranks=2, inject=inject, watch=_SLOW_SETTINGS) as process:
        process.wait_for_rows(_SLOW_FROM_STEP)
        began = process.polled_at
        found = process.wait_for_node_event("degraded", lambda event: "rank" in event)
        # The remaining steps are not needed: the end of the block kills the run.
    none = "no event says that a rank is slow"
    evidence.expect_event(found, began, none, within=_SLOW_WITHIN_SECONDS)
    if found:
        rank, slower = found.event["rank"], found.event.get("percent", math.nan) / 100
        wrong = f"rank {rank} is said to be slow, and rank {_SLOW_RANK} is"
        evidence.expect(rank == _SLOW_RANK, wrong)
        evidence.expect(
            abs(slower - share) <= _LARGEST_SHARE_ERROR,
            f"it is said to take {slower:.1%} longer, and takes {share:.0%} longer",
        )
        evidence.message = f"It said: {found.event['message']}"


@fault(
    name="clock-slew",
    does=f"Lets the clock that a run's watcher reads run {_CLOCK_PPM:g} ppm too fast.",
    must="The slew is reported with its rate; no step and no stall is reported.",
    kind="clock_slewed",
    wrong=("--ppm", str(_CLOCK_PPM)),
    slow_from=4,
    within=20.0,
    key="ppm",
    size=(_CLOCK_PPM, _LARGEST_PPM_ERROR),
)
@fault(
    name="clock-step-back",
    does=f"Sets the clock that a run's watcher reads by {_CLOCK_STEP_SECONDS:g} s.",
    must="The step is reported with its size, to a millisecond; no stall is reported.",
    kind="clock_stepped",
    wrong=("--step", str(_CLOCK_STEP_SECONDS), "--after", "1.5"),
    slow_from=38,
    within=3.0,
    key="seconds",
    size=(_CLOCK_STEP_SECONDS, _LARGEST_STEP_ERROR_SECONDS),
)
def wrong_clock(
    site: TrainingSite,
    evidence: Evidence,
    kind: node_dir.NodeEventKind,
    wrong: Sequence[str],
    slow_from: int,
    within: float,
    key: str,
    size: tuple[float, float],
) -> None:
    """Train beside a watcher with a wrong clock; `size`: the value to report and its tolerance."""
    inject = Injection("slow-steps", slow_from)
    # The run's own watcher is disabled, as only one can hold the lock of a node.
    with site.launch("watch.enabled=false", inject=inject) as process:
        process.wait_for_rows(1)
        with _watcher_with_wrong_clock(site, *wrong):
            found = process.wait_for_node_event(kind, _is_clock_event)
            process.finish()
    expect_clock_event(evidence, found, kind, within)
    evidence.expect_undisturbed()
    if found:
        (expected, largest_error), told = size, found.event[key]
        evidence.expect(
            abs(told - expected) <= largest_error,
            f"its {key} were said to be {told:+.6f}, and were {expected:+.6f}",
        )


@fault(
    does=(
        f"Sets the clock that a run's watcher reads by {_CLOCK_STEP_SECONDS:g} s while rank 0 of "
        "two waits in a collective that rank 1 never joins; then kills rank 1."
    ),
    must="The sentences of the stall and of the failed collective name the step of the clock.",
)
def clock_step_during_collective(site: TrainingSite, evidence: Evidence) -> None:
    collective = "hang-rank-1-in-collective"
    with launch_with_hang(site, collective, "watch.enabled=false", restarts=1) as process:
        hang = process.wait_for_hang()
        wrong = ("--step", str(_CLOCK_STEP_SECONDS), "--after", "1.0")
        with _watcher_with_wrong_clock(site, *wrong):
            sentence = expect_rank_named(evidence, process, hang)
            os.kill(hang.pid, signal.SIGKILL)
            process.wait_for_event("resumed")
        process.finish()
    step = f"the clock was set back by {-_CLOCK_STEP_SECONDS:.3f} s"
    evidence.expect(step in sentence, f"the sentence does not say that {step}: {sentence}")
    evidence.expect_output(process.output, "Rank 1 of 2", step)
    evidence.expect_near()
    evidence.message = (
        f"{sentence} Rank 1 was killed, and the message of the collective that failed in rank 0 "
        f"says the same of the clock; {evidence.steps_lost} steps were trained twice."
    )


@contextmanager
def _watcher_with_wrong_clock(site: TrainingSite, *arguments: str) -> Iterator[None]:
    command = program(FAULTY_PROCESSES, "watcher", *arguments, str(site.run.path))
    with (site.folder / "watcher.log").open("wb") as log:
        watcher = start(command, log, site.folder)
    try:
        yield
    finally:
        watcher.kill()
        watcher.wait()


def expect_clock_event(
    evidence: Evidence,
    found: ObservedEvent | None,
    kind: node_dir.NodeEventKind,
    within: float,
) -> None:
    """Expect one event of this kind about the clock in time, and no stall or other such event."""
    site = evidence.site
    began = fsio.read_json(site.folder / CLOCK_FILE).get("at")
    evidence.expect(began is not None, "the clock has never gone wrong")
    none = f"no event {kind} tells of the clock"
    since = time.monotonic() if began is None else began
    evidence.expect_event(found, since, none, within)
    events = filter(_is_clock_event, fsio.read_json_lines(node_dir.this_node(site.run).events_path))
    kinds = [event["event"] for event in events]
    others = {"stalled", "clock_stepped", "clock_slewed", "rank_failed"} - {kind}
    wrong = sorted(others.intersection(kinds))
    evidence.expect(not wrong, f"events of what did not happen: {', '.join(wrong)}")
    evidence.expect(kinds.count(kind) <= 1, f"it was reported {kinds.count(kind)} times")
    evidence.message = (
        f"It said: {found.event['message'] if found else ''} No stall was reported, and every step "
        "is bitwise the undisturbed run's."
    )


def _is_clock_event(event: dict[str, Any]) -> bool:
    return event["event"] != "clock_stepped" or abs(float(event["seconds"])) >= STEP_SECONDS

"""Faults in which decode workers or ranks hang."""

import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from longtake import errors, fsio, heartbeat, node_dir
from longtake.faults.expect import Evidence
from longtake.faults.faulty_processes import Hang
from longtake.faults.registry import fault
from longtake.faults.sandbox import (
    NODE_POLL_SECONDS,
    ON_TWO_RANKS,
    Injection,
    ObservedEvent,
    RunObserver,
    TrainingProcess,
    TrainingSite,
    stop,
    stop_while_decoding,
    stop_while_idle,
)

_LIMIT_SECONDS = 15.0  # longest time from a hang to its report, in a run of short steps
# The pool's own limit is far longer than the watcher needs, so that the watcher ends the worker.
_WORKER_CHANGES = ("watch.action=restart-worker", "data.sample_timeout_seconds=60")
# Windows that a decode worker reads before it hangs: the usual time of a clip is known by then.
_WINDOWS = 40
USUAL_STEPS = 8  # number of steps after which the usual time of a clip is known
_STEP = 23  # step in which rank 1 hangs
_RANK = 1
_WORKER_NAMED = (
    "It is named with its line and clip in 15 s, and replaced; every step is bitwise the same."
)
_RANK_NAMED = "It is named with its line in 15 s, and it is said which rank waits for it."


@fault(
    name="worker-stopped-between-clips",
    does="Stops a decode worker (SIGSTOP) while it waits for its next clip.",
    must="It is named in 15 s with the clip that it was given, at the terminal too, and replaced.",
    how="idle",
)
@fault(
    name="frozen-loader-worker-stopped",
    family="frozen-loader-worker",
    does="Stops a decode worker (SIGSTOP) while it decodes a clip.",
    must=_WORKER_NAMED,
    how="decoding",
)
@fault(
    name="frozen-loader-worker-holding-gil",
    family="frozen-loader-worker",
    does="Lets a decode worker wait for ever in a C library that holds the GIL.",
    must=_WORKER_NAMED,
    how="freeze-worker-holding-gil",
)
@fault(
    name="frozen-loader-worker-in-c",
    family="frozen-loader-worker",
    does="Lets a decode worker wait for ever in a C library that released the GIL.",
    must=_WORKER_NAMED,
    how="freeze-worker-in-c",
)
def frozen_loader_worker(site: TrainingSite, evidence: Evidence, how: str) -> None:
    """Drill: let a decode worker hang, stopped while idle or decoding, or by an injected call."""
    is_stopped = how in ("idle", "decoding")
    inject = None if is_stopped else Injection(how, _WINDOWS)
    with site.launch(*_WORKER_CHANGES, inject=inject) as process:
        if is_stopped:
            process.wait_for_rows(USUAL_STEPS)
        if how == "idle":
            hang = stop_while_idle(process, heartbeat.heartbeat_dir(site.run.path))
        elif how == "decoding":
            hang = stop_while_decoding(process, site.clips)
        else:
            hang = process.wait_for_hang()
        found, diagnosis = _wait_for_stall(process, site)
        expect_diagnosis(evidence, found, diagnosis, hang, rank=0, waiting=[0])
        ended = process.wait_for_node_event("restarted_worker") if found else None
        process.finish()
        _expect_one_stall(evidence, process)
    sentence = str(diagnosis.get("sentence"))
    if how == "idle":
        evidence.expect_output(process.output, sentence)
        evidence.expect("which it was given" in sentence, f"it names no clip: {sentence}")
    pid = ended.event["pid"] if ended else None
    wrong = f"process {hang.pid} was to be ended by the watcher, and {pid} was"
    evidence.expect(pid == hang.pid, wrong)
    evidence.expect_undisturbed()
    evidence.message = (
        f"{sentence} It was ended, another worker read its clip, and every step is bitwise the "
        "undisturbed run's."
    )


@fault(
    name="hung-rank-in-collective",
    family="hung-rank",
    does="Lets one rank of two begin a collective that the other never joins.",
    must=_RANK_NAMED,
    kind="hang-rank-1-in-collective",
)
@fault(
    name="hung-rank-holding-gil",
    family="hung-rank",
    does="Lets one rank of two wait for ever in a C library that holds the GIL.",
    must=_RANK_NAMED,
    kind="hang-rank-1-holding-gil",
)
@fault(
    name="hung-rank-asleep",
    family="hung-rank",
    does="Lets one rank of two sleep for ever in Python.",
    must=_RANK_NAMED,
    kind="hang-rank-1-asleep",
)
def hung_rank(site: TrainingSite, evidence: Evidence, kind: str) -> None:
    with launch_with_hang(site, kind) as process:
        hang = process.wait_for_hang()
        evidence.message = expect_rank_named(evidence, process, hang)


@fault(
    family="hung-rank",
    does="Stops one rank of two (SIGSTOP), and continues it when it was named.",
    must="It is named with its line in 15 s; then the run continues, and nothing is lost.",
)
def hung_rank_stopped(site: TrainingSite, evidence: Evidence) -> None:
    with launch_with_hang(site, "hang-rank-1-stopped") as process:
        hang = process.wait_for_hang()
        sentence = expect_rank_named(evidence, process, hang)
        os.kill(hang.pid, signal.SIGCONT)
        cleared = process.wait_for_node_event("stall_cleared")
        process.finish()
        _expect_one_stall(evidence, process)
    evidence.expect(cleared is not None, "no event says that the stall ended")
    evidence.expect_near()
    evidence.message = f"{sentence} Continued, it trained to its end, and nothing was lost."


@fault(
    does="Stops one rank of two (SIGSTOP), continues it when it was named, and stops it again.",
    must="Both are named in 15 s, at the terminal of `longtake launch` too, and nothing is lost.",
)
def hang_after_a_cleared_hang(site: TrainingSite, evidence: Evidence) -> None:
    sentences = list[str]()
    changes = (*ON_TWO_RANKS, "checkpoint.every=1000")  # the limit of a save is longer
    with site.launch(*changes, ranks=2, restarts=1) as process:
        for number in (1, 2):
            process.wait_for_rows(number * USUAL_STEPS)
            pid = pid_of_rank(site, _RANK)
            at = stop(pid)
            if at is None:
                raise process.failed(f"was over before process {pid} could be stopped")
            # The event of the first stall is in the file, too.
            found = process.wait_for_node_event(
                "stalled", lambda each: each["sentence"] not in sentences
            )
            none = f"no event says that process {pid} is stopped, at stop {number}"
            evidence.expect_event(found, at, none, within=_LIMIT_SECONDS)
            sentences.append(str(found.event["sentence"]) if found else "")
            evidence.expect(str(pid) in sentences[-1], f"it is not named: {sentences[-1]}")
            process.wait_until(
                lambda: sentences[-1] in process.output, "the terminal named it", NODE_POLL_SECONDS
            )
            os.kill(pid, signal.SIGCONT)
            process.wait_for_node_event("stall_cleared")
        process.finish()
    evidence.expect_near()
    evidence.message = f"{sentences[-1]} It was the second time, and nothing was lost."


@fault(
    family="hung-rank",
    does="Lets one rank of two sleep for ever, with watch.action = kill and torchrun's restarts.",
    must="It is named and killed; all ranks resume from the last checkpoint, and the run finishes.",
)
def hung_rank_killed(site: TrainingSite, evidence: Evidence) -> None:
    with launch_with_hang(site, "hang-rank-1-asleep", "watch.action=kill", restarts=1) as process:
        hang = process.wait_for_hang()
        sentence = expect_rank_named(evidence, process, hang)
        killed = process.wait_for_node_event("killed_rank")
        resumed = process.wait_for_event("resumed")
        process.finish()
    pid = killed.event["pid"] if killed else None
    step = resumed.event["step"] if resumed else None
    evidence.expect(pid == hang.pid, f"rank {_RANK} is process {hang.pid}, and {pid} was killed")
    evidence.expect(
        step is not None and 0 < step <= _STEP, f"it resumed from step {step}, and hung in {_STEP}"
    )
    evidence.expect_near()
    seconds = resumed.at - hang.at if resumed else 0.0
    evidence.message = (
        f"{sentence} It was killed, and torchrun started all ranks again: {seconds:.1f} s after "
        f"the hang the run resumed, and trained {evidence.steps_lost} steps twice."
    )


def launch_with_hang(
    site: TrainingSite, kind: str, *changes: str, restarts: int = 0
) -> TrainingProcess:
    inject, changes = Injection(kind, _STEP), ("data.workers=1", *changes)
    return site.launch(*changes, ranks=2, inject=inject, restarts=restarts)


def expect_rank_named(evidence: Evidence, process: TrainingProcess, hang: Hang) -> str:
    found, diagnosis = _wait_for_stall(process, evidence.site)
    expect_diagnosis(evidence, found, diagnosis, hang, rank=_RANK, waiting=[0])
    return str(diagnosis.get("sentence"))


def _wait_for_stall(
    process: TrainingProcess, site: TrainingSite
) -> tuple[ObservedEvent | None, dict[str, Any]]:
    found = process.wait_for_node_event("stalled")
    return found, fsio.read_json(
        node_dir.diagnosis_path(site.run, found.event["token"])
    ) if found else {}


def expect_diagnosis(
    evidence: Evidence,
    found: ObservedEvent | None,
    diagnosis: dict[str, Any],
    hang: Hang,
    rank: int,
    waiting: Iterable[int],
) -> None:
    """Expect that the diagnosis of a stall names only the process that hangs, with line and clip.

    Args:
        evidence: collects complaints.
        found: the event `stalled`; None: there was none.
        diagnosis: the stall's diagnosis.
        hang: the note of the process that hangs.
        rank: rank of that process.
        waiting: ranks that must be reported as waiting.
    """
    none = f"no event says that process {hang.pid} hangs"
    evidence.expect_event(found, hang.at, none, within=_LIMIT_SECONDS)
    if found:
        suspects = diagnosis.get("suspects", [])
        named = [each["pid"] for each in suspects]
        wrong = f"the diagnosis names processes {named}, and {hang.pid} hangs"
        evidence.expect(named == [hang.pid], wrong)
        if hang.pid in named:
            _expect_suspect(evidence, suspects[named.index(hang.pid)], hang, rank)
        sentence, where = diagnosis.get("sentence", ""), f"{Path(hang.file).name}:{hang.line}"
        wanted = [str(hang.pid), Path(hang.path).name, where if hang.line else ""]
        missing = [words for words in wanted if words not in sentence]
        evidence.expect(not missing, f"the sentence does not say {', '.join(missing)}: {sentence}")
    reported = {each for group in diagnosis.get("waiting", []) for each in group["ranks"]}
    wrong = f"ranks {sorted(reported)} are said to wait, and {sorted(waiting)} do"
    evidence.expect(reported == set(waiting), wrong)


def _expect_suspect(evidence: Evidence, suspect: dict[str, Any], hang: Hang, rank: int) -> None:
    found = {"rank": suspect["rank"], "clip": suspect["clip"]}
    found["clip_path"] = str(Path(suspect["clip_path"]))
    found["line"] = _where(suspect["function"], suspect["file"], suspect["line"])
    wanted = {"rank": rank, "clip": hang.clip, "clip_path": hang.path and str(Path(hang.path))}
    wanted["line"] = _where(hang.function, hang.file, hang.line) if hang.line else ""
    for key, value in wanted.items():
        wrong = f"its {key} is said to be {found[key]}, not {value}"
        # A value that is not known beforehand is empty: the line of a process stopped from outside.
        evidence.expect(value in ("", found[key]), wrong)


def _where(function: str, file: str, line: int) -> str:
    return f"{function} ({Path(file).name}:{line})"


def _expect_one_stall(evidence: Evidence, process: RunObserver) -> None:
    stalls = [event for event in process.node_events() if event["event"] == "stalled"]
    wrong = f"{len(stalls)} stalls were reported, and there was one"
    evidence.expect(len(stalls) <= 1, wrong)


def pid_of_rank(site: TrainingSite, rank: int) -> int:
    for pulse in heartbeat.read_heartbeats(heartbeat.heartbeat_dir(site.run.path)):
        if pulse.role == "rank" and pulse.rank == rank and pulse.is_alive:
            return pulse.pid
    raise errors.RunError(f"Rank {rank} of {site.run.path} was over before it could be killed.")

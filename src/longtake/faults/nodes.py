"""Faults of nodes and processes: hangs, slow ranks, wrong clocks, full disks, lost processes."""

import fcntl
import math
import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longtake import errors, fsio, heartbeat, node_dir
from longtake.faults.data import limit_file_size, resume
from longtake.faults.expect import BITWISE, Evidence, Recovery
from longtake.faults.faulty_processes import CLOCK_FILE, Hang
from longtake.faults.faulty_processes import PROGRAM as FAULTY_PROCESSES
from longtake.faults.registry import NotPossibleHereError, fault
from longtake.faults.sandbox import (
    NODE_POLL_SECONDS,
    ON_TWO_RANKS,
    Injection,
    InjectionKind,
    ObservedEvent,
    RunObserver,
    Sandbox,
    TrainingProcess,
    TrainingSite,
    stop,
    stop_while_decoding,
    stop_while_idle,
)
from longtake.health.clock import STEP_SECONDS
from longtake.process import program, read_stat, start

_LIMIT_SECONDS = 15.0  # from the hang until the process is named, in a run of short steps
_WORKER_CHANGES = ("watch.action=restart-worker", "data.sample_timeout_seconds=60")
_WINDOWS = 40  # that a decode worker reads before it hangs
_USUAL_STEPS = 8  # until the usual time of a clip is known
_STEP = 23  # in which rank 1 hangs
_RANK = 1
_WORKER_NAMED = (
    "It is named with its line and clip in 15 s, and replaced; every step is bitwise the same."
)
_RANK_NAMED = "It is named with its line in 15 s, and it is said which rank waits for it."


@fault(
    "frozen-loader-worker-in-c",
    family="frozen-loader-worker",
    does="Lets a decode worker wait for ever in a C library that released the GIL.",
    must=_WORKER_NAMED,
)
def frozen_loader_worker_in_c(sandbox: Sandbox) -> Evidence:
    return _frozen_worker(sandbox, "frozen-loader-worker-in-c", "freeze-worker-in-c")


@fault(
    "frozen-loader-worker-holding-gil",
    family="frozen-loader-worker",
    does="Lets a decode worker wait for ever in a C library that holds the GIL.",
    must=_WORKER_NAMED,
)
def frozen_loader_worker_holding_gil(sandbox: Sandbox) -> Evidence:
    return _frozen_worker(sandbox, "frozen-loader-worker-holding-gil", "freeze-worker-holding-gil")


@fault(
    "frozen-loader-worker-stopped",
    family="frozen-loader-worker",
    does="Stops a decode worker (SIGSTOP) while it decodes a clip.",
    must=_WORKER_NAMED,
)
def frozen_loader_worker_stopped(sandbox: Sandbox) -> Evidence:
    return _frozen_worker(sandbox, "frozen-loader-worker-stopped", None)


@fault(
    "worker-stopped-between-clips",
    does="Stops a decode worker (SIGSTOP) while it waits for its next clip.",
    must="It is named in 15 s with the clip that it was given, at the terminal too, and replaced.",
)
def worker_stopped_between_clips(sandbox: Sandbox) -> Evidence:
    site, evidence = sandbox.fresh("worker-stopped-between-clips"), Evidence()
    with site.launch(*_WORKER_CHANGES) as process:
        process.wait_for_rows(_USUAL_STEPS)
        hang = stop_while_idle(process, heartbeat.heartbeat_dir(site.run.path))
        found, diagnosis = _wait_for_stall(process, site)
        expect_diagnosis(evidence, found, diagnosis, hang, rank=0, waiting=[0])
        ended = process.wait_for_node_event("restarted_worker") if found else None
        process.finish()
        _expect_one_stall(evidence, process)
        sentence = str(diagnosis.get("sentence"))
        evidence.expect_output(process.output, sentence)
    evidence.expect("which it was given" in sentence, f"it names no clip: {sentence}")
    pid = ended.event["pid"] if ended else None
    evidence.expect(pid == hang.pid, f"process {hang.pid} was to be ended, and {pid} was")
    evidence.expect_undisturbed(site, sandbox.undisturbed)
    evidence.message = f"{sentence} It was ended, and every step is bitwise the undisturbed run's."
    return evidence


def _frozen_worker(sandbox: Sandbox, name: str, kind: InjectionKind | None) -> Evidence:
    """Train to the end while one decode worker hangs and another gets its work."""
    site, evidence = sandbox.fresh(name), Evidence()
    inject = Injection(kind, _WINDOWS) if kind else None
    with site.launch(*_WORKER_CHANGES, inject=inject) as process:
        if kind:
            hang = process.wait_for_hang()
        else:
            process.wait_for_rows(_USUAL_STEPS)
            hang = stop_while_decoding(process, site.clips)
        found, diagnosis = _wait_for_stall(process, site)
        expect_diagnosis(evidence, found, diagnosis, hang, rank=0, waiting=[0])
        ended = process.wait_for_node_event("restarted_worker") if found else None
        process.finish()
        _expect_one_stall(evidence, process)
    pid = ended.event["pid"] if ended else None
    wrong = f"process {hang.pid} was to be ended by the watcher, and {pid} was"
    evidence.expect(pid == hang.pid, wrong)
    evidence.expect_undisturbed(site, sandbox.undisturbed)
    evidence.message = (
        f"{diagnosis.get('sentence')} It was ended, another worker read its clip, and every step "
        "is bitwise the undisturbed run's."
    )
    return evidence


@fault(
    "hung-rank-asleep",
    family="hung-rank",
    does="Lets one rank of two sleep for ever in Python.",
    must=_RANK_NAMED,
)
def hung_rank_asleep(sandbox: Sandbox) -> Evidence:
    return _hung_rank(sandbox, "hung-rank-asleep", "hang-rank-1-asleep")


@fault(
    "hung-rank-holding-gil",
    family="hung-rank",
    does="Lets one rank of two wait for ever in a C library that holds the GIL.",
    must=_RANK_NAMED,
)
def hung_rank_holding_gil(sandbox: Sandbox) -> Evidence:
    return _hung_rank(sandbox, "hung-rank-holding-gil", "hang-rank-1-holding-gil")


@fault(
    "hung-rank-stopped",
    family="hung-rank",
    does="Stops one rank of two (SIGSTOP), and continues it when it was named.",
    must="It is named with its line in 15 s; then the run continues, and nothing is lost.",
)
def hung_rank_stopped(sandbox: Sandbox) -> Evidence:
    site, evidence = sandbox.fresh("hung-rank-stopped"), Evidence()
    with _launch(site, "hang-rank-1-stopped") as process:
        hang = process.wait_for_hang()
        sentence = _expect_rank_named(evidence, process, site, hang)
        os.kill(hang.pid, signal.SIGCONT)
        cleared = process.wait_for_node_event("stall_cleared")
        process.finish()
        _expect_one_stall(evidence, process)
    evidence.expect(cleared is not None, "no event says that the stall ended")
    evidence.expect_near(site, sandbox.undisturbed)
    evidence.message = f"{sentence} Continued, it trained to its end, and nothing was lost."
    return evidence


@fault(
    "hang-after-a-cleared-hang",
    does="Stops one rank of two (SIGSTOP), continues it when it was named, and stops it again.",
    must="Both are named in 15 s, at the terminal of `longtake launch` too, and nothing is lost.",
)
def hang_after_a_cleared_hang(sandbox: Sandbox) -> Evidence:
    site, evidence = sandbox.fresh("hang-after-a-cleared-hang"), Evidence()
    sentences = list[str]()
    changes = (*ON_TWO_RANKS, "checkpoint.every=1000")  # the limit of a save is longer
    with site.launch(*changes, ranks=2, restarts=1) as process:
        for number in (1, 2):
            process.wait_for_rows(number * _USUAL_STEPS)
            pid = _pid_of_rank(site, _RANK)
            at = stop(pid)
            if at is None:
                raise process.failed(f"was over before process {pid} could be stopped")
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
    evidence.expect_near(site, sandbox.undisturbed)
    evidence.message = f"{sentences[-1]} It was the second time, and nothing was lost."
    return evidence


@fault(
    "hung-rank-in-collective",
    family="hung-rank",
    does="Lets one rank of two begin a collective that the other never joins.",
    must=_RANK_NAMED,
)
def hung_rank_in_collective(sandbox: Sandbox) -> Evidence:
    return _hung_rank(sandbox, "hung-rank-in-collective", "hang-rank-1-in-collective")


@fault(
    "hung-rank-killed",
    family="hung-rank",
    does="Lets one rank of two sleep for ever, with watch.action = kill and torchrun's restarts.",
    must="It is named and killed; all ranks resume from the last checkpoint, and the run finishes.",
)
def hung_rank_killed(sandbox: Sandbox) -> Evidence:
    site, evidence = sandbox.fresh("hung-rank-killed"), Evidence()
    with _launch(site, "hang-rank-1-asleep", "watch.action=kill", restarts=1) as process:
        hang = process.wait_for_hang()
        sentence = _expect_rank_named(evidence, process, site, hang)
        killed = process.wait_for_node_event("killed_rank")
        resumed = process.wait_for_event("resumed")
        process.finish()
    expect_restart(evidence, hang, killed, resumed)
    evidence.expect_near(site, sandbox.undisturbed)
    seconds = resumed.at - hang.at if resumed else 0.0
    evidence.message = (
        f"{sentence} It was killed, and torchrun started all ranks again: {seconds:.1f} s after "
        f"the hang the run resumed, and trained {evidence.steps_lost} steps twice."
    )
    return evidence


def expect_restart(
    evidence: Evidence, hang: Hang, killed: ObservedEvent | None, resumed: ObservedEvent | None
) -> None:
    """Expect that the rank was killed, and the run resumed from a checkpoint before the hang."""
    pid = killed.event["pid"] if killed else None
    wrong = f"rank {_RANK} is process {hang.pid}, and {pid} was killed"
    evidence.expect(pid == hang.pid, wrong)
    step = resumed.event["step"] if resumed else None
    evidence.expect(
        step is not None and 0 < step <= _STEP, f"it resumed from step {step}, and hung in {_STEP}"
    )


def _hung_rank(sandbox: Sandbox, name: str, kind: InjectionKind) -> Evidence:
    """Train until rank 1 hangs and is named."""
    site, evidence = sandbox.fresh(name), Evidence()
    with _launch(site, kind) as process:
        hang = process.wait_for_hang()
        evidence.message = _expect_rank_named(evidence, process, site, hang)
    return evidence


def _launch(
    site: TrainingSite, kind: InjectionKind, *changes: str, restarts: int = 0
) -> TrainingProcess:
    inject, changes = Injection(kind, _STEP), ("data.workers=1", *changes)
    return site.launch(*changes, ranks=2, inject=inject, restarts=restarts)


def _expect_rank_named(
    evidence: Evidence, process: TrainingProcess, site: TrainingSite, hang: Hang
) -> str:
    found, diagnosis = _wait_for_stall(process, site)
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
    """Expect that the process that hangs is named in time: it alone, with its line and clip."""
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
        evidence.expect(value in ("", found[key]), wrong)


def _where(function: str, file: str, line: int) -> str:
    return f"{function} ({Path(file).name}:{line})"


def _expect_one_stall(evidence: Evidence, process: RunObserver) -> None:
    stalls = [event for event in process.node_events() if event["event"] == "stalled"]
    wrong = f"{len(stalls)} stalls were reported, and there was one"
    evidence.expect(len(stalls) <= 1, wrong)


_SLOW_CHANGES = ("data.workers=0", "training.steps=600")
_SLOW_SETTINGS = {"health_seconds": 4.0}
_SLOW_RANK = 1
_SLOW_FROM_STEP = 16
_SLOW_WITHIN_SECONDS = 45.0
_LARGEST_SHARE_ERROR = 0.05
_CLOCK_STEP_SECONDS = -2.5
_LARGEST_STEP_ERROR_SECONDS = 1e-3
_CLOCK_PPM = 500.0
_LARGEST_PPM_ERROR = 100.0  # of the machine's own clock, and of measuring it
_FULL_SECONDS = 3.0
_FULL_FROM_STEP = 20
_WATCHER_KILLED_STEP = 38
_NEW_WATCHER_SECONDS = 5.0
_WATCHER_STOPPED_STEP = 3
_NEXT_WATCHER_SECONDS = 20.0
_DISK_LIMIT_SECONDS = 20.0  # the watcher tries to read what other nodes say, first
_DISK_BYTES = 64 * 2**20
_FREEZE, _THAW = 0xC0045877, 0xC0045878  # FIFREEZE and FITHAW of <linux/fs.h>
_KILL_STEPS = range(8, 30)  # there is a checkpoint, and the run is far from its end


@fault(
    "slow-rank-by-10",
    family="slow-rank",
    does="Lets one rank of two take 10 % longer for its own part of each step.",
    must="It is named, with how much slower it is, though all ranks' steps take the same time.",
)
def slow_rank_by_10(sandbox: Sandbox) -> Evidence:
    return _slow_rank(sandbox, "slow-rank-by-10", "slow-rank-1-by-10", 0.1)


@fault(
    "slow-rank-by-30",
    family="slow-rank",
    does="Lets one rank of two take 30 % longer for its own part of each step.",
    must="It is named, with how much slower it is, though all ranks' steps take the same time.",
)
def slow_rank_by_30(sandbox: Sandbox) -> Evidence:
    return _slow_rank(sandbox, "slow-rank-by-30", "slow-rank-1-by-30", 0.3)


def _slow_rank(sandbox: Sandbox, name: str, kind: InjectionKind, share: float) -> Evidence:
    """Train until a rank is reported as slow."""
    site, evidence = sandbox.fresh(name), Evidence()
    inject = Injection(kind, _SLOW_FROM_STEP)
    with site.launch(*_SLOW_CHANGES, ranks=2, inject=inject, watch=_SLOW_SETTINGS) as process:
        process.wait_for_rows(_SLOW_FROM_STEP)
        began = process.polled_at
        found = process.wait_for_node_event("degraded", lambda event: "rank" in event)
    expect_slow_rank(evidence, found, began, share)
    evidence.message = f"It said: {found.event['message'] if found else ''}"
    return evidence


def expect_slow_rank(
    evidence: Evidence, found: ObservedEvent | None, began: float, share: float
) -> None:
    """Expect that the slow rank is named in time, with how much slower it is."""
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


@fault(
    "clock-step-back",
    does=f"Sets the clock that a run's watcher reads by {_CLOCK_STEP_SECONDS:g} s.",
    must="The step is reported with its size, to a millisecond; no stall is reported.",
)
def clock_step_back(sandbox: Sandbox) -> Evidence:
    site, evidence = sandbox.fresh("clock-step-back"), Evidence()
    wrong = ("--step", str(_CLOCK_STEP_SECONDS), "--after", "1.5")
    found = _train_by_wrong_clock(site, "clock_stepped", *wrong, slow_from=38)
    expect_clock_event(evidence, site, found, "clock_stepped", within=3.0)
    evidence.expect_undisturbed(site, sandbox.undisturbed)
    if found:
        seconds = found.event["seconds"]
        evidence.expect(
            abs(seconds - _CLOCK_STEP_SECONDS) <= _LARGEST_STEP_ERROR_SECONDS,
            f"it was said to be set by {seconds:+.6f} s, and was by {_CLOCK_STEP_SECONDS:+.6f} s",
        )
    return evidence


@fault(
    "clock-slew",
    does=f"Lets the clock that a run's watcher reads run {_CLOCK_PPM:g} ppm too fast.",
    must="The slew is reported with its rate; no step and no stall is reported.",
)
def clock_slew(sandbox: Sandbox) -> Evidence:
    site, evidence = sandbox.fresh("clock-slew"), Evidence()
    found = _train_by_wrong_clock(site, "clock_slewed", "--ppm", str(_CLOCK_PPM), slow_from=4)
    expect_clock_event(evidence, site, found, "clock_slewed", within=20.0)
    evidence.expect_undisturbed(site, sandbox.undisturbed)
    if found:
        ppm = found.event["ppm"]
        evidence.expect(
            abs(ppm - _CLOCK_PPM) <= _LARGEST_PPM_ERROR,
            f"it was said to be {ppm:+.0f} ppm fast, and was {_CLOCK_PPM:+.0f}",
        )
    return evidence


@fault(
    "clock-step-during-collective",
    does=(
        f"Sets the clock that a run's watcher reads by {_CLOCK_STEP_SECONDS:g} s while rank 0 of "
        "two waits in a collective that rank 1 never joins; then kills rank 1."
    ),
    must="The sentences of the stall and of the failed collective name the step of the clock.",
)
def clock_step_during_collective(sandbox: Sandbox) -> Evidence:
    site, evidence = sandbox.fresh("clock-step-during-collective"), Evidence()
    kind: InjectionKind = "hang-rank-1-in-collective"
    with _launch(site, kind, "watch.enabled=false", restarts=1) as process:
        hang = process.wait_for_hang()
        wrong = ("--step", str(_CLOCK_STEP_SECONDS), "--after", "1.0")
        with _watcher_with_wrong_clock(site, *wrong):
            sentence = _expect_rank_named(evidence, process, site, hang)
            os.kill(hang.pid, signal.SIGKILL)
            process.wait_for_event("resumed")
        process.finish()
    step = f"the clock was set back by {-_CLOCK_STEP_SECONDS:.3f} s"
    evidence.expect(step in sentence, f"the sentence does not say that {step}: {sentence}")
    evidence.expect_output(process.output, "Rank 1 of 2", step)
    evidence.expect_near(site, sandbox.undisturbed)
    evidence.message = (
        f"{sentence} Rank 1 was killed, and the message of the collective that failed in rank 0 "
        f"says the same of the clock; {evidence.steps_lost} steps were trained twice."
    )
    return evidence


def _train_by_wrong_clock(
    site: TrainingSite, kind: node_dir.NodeEventKind, *arguments: str, slow_from: int
) -> ObservedEvent | None:
    """Train a run whose only watcher has a wrong clock; returns what that reported."""
    inject = Injection("slow-steps", slow_from)
    with site.launch("watch.enabled=false", inject=inject) as process:
        process.wait_for_rows(1)
        with _watcher_with_wrong_clock(site, *arguments):
            found = process.wait_for_node_event(kind, _is_clock_event)
            process.finish()
    return found


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
    site: TrainingSite,
    found: ObservedEvent | None,
    kind: node_dir.NodeEventKind,
    within: float,
) -> None:
    """Expect one event of the clock in time, and no stall, dead rank or other clock event."""
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


@fault(
    "full-run-disk",
    does="Leaves a run's watcher no room on the disk, then the run itself; then starts it again.",
    must="The watcher survives and reports it; the run says what is wrong; nothing else is lost.",
)
def full_run_disk(sandbox: Sandbox) -> Evidence:
    site, evidence = sandbox.fresh("full-run-disk"), Evidence()
    with site.launch(inject=Injection("slow-steps", _FULL_FROM_STEP)) as process:
        process.wait_for_rows(_FULL_FROM_STEP)
        watcher = process.wait_for_watcher()
        limit_file_size(watcher, 0)
        at = time.monotonic()
        for _ in process.polls():
            if time.monotonic() - at > _FULL_SECONDS:
                break
        else:
            raise process.failed("ended though it had room")
        limit_file_size(watcher, resource.RLIM_INFINITY)
        found = process.wait_for_node_event("disk_full")
        evidence.expect_event(found, at, "no event tells that the watcher found no room")
        if found is None:  # and the run has ended
            return evidence
        pid = process.wait_for_watcher()
        evidence.expect(pid == watcher, f"the watcher was process {watcher}, and {pid} afterwards")
        step = len(site.run.metrics())
        limit_file_size(process.pid, site.run.metrics_path.stat().st_size)
        code = process.wait()
    expect_disk_error(evidence, site, code, process.output)
    seconds = evidence.detected_seconds
    resume(evidence, site, sandbox.undisturbed)
    evidence.detected_seconds = seconds
    evidence.message = (
        f"Without room for {_FULL_SECONDS:g} s the watcher kept watching, and reported it when it "
        f"could; the run was not affected. Without room itself, after step {step}, it ended with "
        f"an error. Started again, with room, it trained {evidence.steps_lost} steps twice; "
        f"{BITWISE}."
    )
    return evidence


def expect_disk_error(evidence: Evidence, site: TrainingSite, code: int, output: str) -> None:
    """Expect that the trainer ended with an error about the disk, and a checkpoint is left."""
    evidence.expect_exit(code, 2, "without room")
    evidence.expect_output(output, "cannot be written")
    evidence.expect("Traceback" not in output, "it ended with a traceback")
    evidence.expect(bool(site.run.checkpoint_steps()), "no checkpoint is left")


@fault(
    "dead-watcher",
    does="Kills a run's watcher (SIGKILL).",
    must="The run continues, bitwise the same, and has another watcher within 5 s.",
)
def dead_watcher(sandbox: Sandbox) -> Evidence:

    def kill(pid: int) -> float:
        os.kill(pid, signal.SIGKILL)
        return time.monotonic()

    site, step = sandbox.fresh("dead-watcher"), _WATCHER_KILLED_STEP
    evidence, pid, _ = _without_watcher(sandbox, site, step, kill, _NEW_WATCHER_SECONDS)
    evidence.message = (
        f"{evidence.detected_seconds or 0:.1f} s after watcher {pid} was killed there was another; "
        "every step is bitwise the undisturbed run's."
    )
    return evidence


@fault(
    "watcher-stopped",
    does="Stops a run's watcher (SIGSTOP).",
    must="The run continues, bitwise the same, and has another watcher within 20 s.",
)
def watcher_stopped(sandbox: Sandbox) -> Evidence:
    site, step = sandbox.fresh("watcher-stopped"), _WATCHER_STOPPED_STEP
    evidence, pid, is_gone = _without_watcher(sandbox, site, step, stop, _NEXT_WATCHER_SECONDS)
    evidence.expect(is_gone, f"process {pid} is still there")
    evidence.message = (
        f"{evidence.detected_seconds or 0:.1f} s after watcher {pid} was stopped it had been ended "
        "and there was another; every step is bitwise the undisturbed run's."
    )
    return evidence


def _without_watcher(
    sandbox: Sandbox,
    site: TrainingSite,
    step: int,
    disable: Callable[[int], float | None],
    within: float,
) -> tuple[Evidence, int, bool]:
    """Train to the end after a watcher was disabled; also its pid, and whether it was gone."""
    evidence = Evidence()
    with site.launch(inject=Injection("slow-steps", step)) as process:
        process.wait_for_rows(step)
        pid = process.wait_for_watcher()
        at = disable(pid)
        if at is None:
            raise process.failed("had no watcher that could be stopped")
        found = process.wait_for_node_event("watcher_started", lambda event: event["pid"] != pid)
        is_gone = read_stat(pid) is None
        process.finish()
    none = f"no watcher has replaced process {pid}"
    evidence.expect_event(found, at, none, within=within)
    evidence.expect_undisturbed(site, sandbox.undisturbed)
    return evidence, pid, is_gone


@fault(
    "run-disk-frozen",
    does="Freezes the file system of the run directory (fsfreeze) until the hang was named.",
    must="Terminal and hook name it while it is frozen; then the run continues, bitwise the same.",
)
def run_disk_frozen(sandbox: Sandbox) -> Evidence:
    site, evidence = sandbox.fresh("run-disk-frozen"), Evidence()
    hook = site.folder / "alerts.jsonl"
    with _own_disk(site.run.path), site.launch(f"watch.hook=cat >> {hook}") as process:
        process.wait_for_rows(_USUAL_STEPS)
        process.wait_for_watcher()
        with _frozen(site.run.path) as at:
            named = process.wait_until(
                lambda: next(_stalls_of(hook), None), "the hook heard of it", NODE_POLL_SECONDS
            )
            sentence = str(named["sentence"])
            process.wait_until(
                lambda: sentence in process.output, "the terminal named it", NODE_POLL_SECONDS
            )
            found = ObservedEvent(named, time.monotonic())
            written = [each for each in process.node_events() if each["event"] == "stalled"]
        cleared = process.wait_for_node_event("stall_cleared")
        process.finish()
        late = [each["sentence"] for each in process.node_events() if each["event"] == "stalled"]
        evidence.expect_event(found, at, "nothing names the hang", within=_DISK_LIMIT_SECONDS)
        evidence.expect(not written, "the disk was not frozen: the event was written")
        evidence.expect("state D" in sentence, f"the disk is not named: {sentence}")
        evidence.expect(sentence in late, "no event says the same once the disk answers")
        evidence.expect(cleared is not None, "no event says that the stall ended")
        evidence.expect_undisturbed(site, sandbox.undisturbed)
    evidence.message = f"{sentence} Terminal and hook said so while the disk was frozen."
    return evidence


def _stalls_of(hook: Path) -> Iterator[dict[str, Any]]:
    return (each for each in fsio.read_json_lines(hook) if each["event"] == "stalled")


@contextmanager
def _own_disk(folder: Path) -> Iterator[None]:
    """Mount a file system of its own at a new folder, from a file beside it."""
    image = folder.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(_DISK_BYTES)
    folder.mkdir()
    try:
        _as_root("mkfs.ext4", "-q", "-F", str(image))
        _as_root("mount", "-o", "loop", str(image), str(folder))
        try:
            (folder / "lost+found").rmdir()
            yield
        finally:
            _as_root("umount", "--lazy", str(folder))
    finally:
        image.unlink()


def _as_root(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True)  # noqa: S603 - those above
    except (OSError, subprocess.CalledProcessError) as error:
        raise NotPossibleHereError(f"{command[0]} needs root and a loop device: {error}") from error


@contextmanager
def _frozen(folder: Path) -> Iterator[float]:
    """Freeze a file system: writing to it waits until the block ends; yields since when."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, _FREEZE, 0)
        try:
            yield time.monotonic()
        finally:
            fcntl.ioctl(descriptor, _THAW, 0)
    finally:
        os.close(descriptor)


@fault(
    "kill-rank",
    does="Kills one rank of two (SIGKILL) after a random step of `longtake launch`.",
    must="It is named; both resume from the newest checkpoint, and the end is bitwise the same.",
)
def kill_rank(sandbox: Sandbox) -> Evidence:
    site, evidence = sandbox.fresh("kill-rank"), Evidence()
    undisturbed = sandbox.undisturbed_on_two_ranks
    step = random.choice(_KILL_STEPS)  # noqa: S311 - not a secret
    with site.launch(*ON_TWO_RANKS, ranks=2, restarts=1) as process:
        process.wait_for_rows(step)
        process.wait_for_checkpoints(1)
        os.kill(_pid_of_rank(site, 1), signal.SIGKILL)
        recovery = wait_for_recovery(process, site, time.monotonic())
        process.finish()
        evidence.expect_lost_rank_named(process, 1)
        evidence.expect_output(process.output, "Rank 1 of 2")
    evidence.expect_recovered(recovery)
    evidence.expect_undisturbed(site, undisturbed)
    evidence.message = (
        f"Rank 1 was killed after step {step} and named; {recovery.seconds:.1f} s later a step was "
        f"trained again, and {evidence.steps_lost} steps twice; {BITWISE}."
    )
    return evidence


def _pid_of_rank(site: TrainingSite, rank: int) -> int:
    for pulse in heartbeat.read_heartbeats(heartbeat.heartbeat_dir(site.run.path)):
        if pulse.role == "rank" and pulse.rank == rank and pulse.is_alive:
            return pulse.pid
    raise errors.RunError(f"Rank {rank} of {site.run.path} was over before it could be killed.")


def wait_for_recovery(observer: RunObserver, site: TrainingSite, lost_at: float) -> Recovery:
    """Wait until a run that lost a rank at `lost_at` has trained a step again."""
    resumed = observer.wait_for_event("resumed")
    newest = max(site.run.checkpoint_steps(), default=0)
    observer.wait_for_rows(observer.num_rows() + 1)
    return Recovery(resumed, newest, time.monotonic() - lost_at)


@fault(
    "world-2-1-2",
    does="Trains on two ranks, resumes with one, and then with two again.",
    must="No clip is repeated or missing; losses and weights are the same but for rounding.",
)
def world_2_1_2(sandbox: Sandbox) -> Evidence:
    site, evidence = sandbox.fresh("world-2-1-2"), Evidence()
    for ranks, num_checkpoints in ((2, 2), (1, 4)):
        with site.launch(*ON_TWO_RANKS, ranks=ranks) as process:
            process.wait_for_checkpoints(num_checkpoints)
            if not process.kill():
                raise errors.RunError(f"The run was over before {ranks} ranks could be killed.")
    with site.launch(*ON_TWO_RANKS, ranks=2) as process:
        process.finish()
    evidence.expect_world_sizes(site.run, 2, 1, 2)
    evidence.expect_near(site, sandbox.undisturbed_on_two_ranks)
    distance = evidence.expect_near_weights(site, sandbox.undisturbed_on_two_ranks)
    evidence.message = (
        f"Two ranks, one, and two again trained it, and {evidence.steps_lost} steps twice: no clip "
        f"was repeated or missing, and the weights end {distance:.0e} (relative: rounding) from "
        "those of two ranks all the time."
    )
    return evidence

"""Faults of nodes: full and frozen disks, lost watchers and ranks, changed numbers of ranks."""

import fcntl
import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from longtake import errors, fsio
from longtake.faults.data import limit_file_size, resume
from longtake.faults.expect import BITWISE, Evidence, Recovery
from longtake.faults.hangs import USUAL_STEPS, pid_of_rank
from longtake.faults.registry import NotPossibleHereError, fault
from longtake.faults.sandbox import (
    NODE_POLL_SECONDS,
    ON_TWO_RANKS,
    Injection,
    ObservedEvent,
    RunObserver,
    TrainingSite,
    stop,
)
from longtake.process import read_stat

_FULL_SECONDS = 3.0
_FULL_FROM_STEP = 20
_DISK_LIMIT_SECONDS = 20.0  # includes the watcher's attempts to read the frozen disk
_DISK_BYTES = 64 * 2**20
_FREEZE, _THAW = 0xC0045877, 0xC0045878  # FIFREEZE and FITHAW of <linux/fs.h>
_KILL_STEPS = range(8, 30)  # there is a checkpoint, and the run is far from its end


@fault(
    does="Leaves a run's watcher no room on the disk, then the run itself; then starts it again.",
    must="The watcher survives and reports it; the run says what is wrong; nothing else is lost.",
)
def full_run_disk(site: TrainingSite, evidence: Evidence) -> None:
    with site.launch(inject=Injection("slow-steps", _FULL_FROM_STEP)) as process:
        process.wait_for_rows(_FULL_FROM_STEP)
        watcher = process.wait_for_watcher()
        limit_file_size(watcher, 0)
        at = time.monotonic()
        # The training must go on all this time, although its watcher cannot write.
        for _ in process.polls():
            if time.monotonic() - at > _FULL_SECONDS:
                break
        else:
            raise process.failed("ended though it had room")
        limit_file_size(watcher, resource.RLIM_INFINITY)
        found = process.wait_for_node_event("disk_full")
        evidence.expect_event(found, at, "no event tells that the watcher found no room")
        if found is None:  # and the run has ended
            return
        pid = process.wait_for_watcher()
        evidence.expect(pid == watcher, f"the watcher was process {watcher}, and {pid} afterwards")
        step = len(site.run.metrics())
        # The file of metrics has this size already, so the next row cannot be written.
        limit_file_size(process.pid, site.run.metrics_path.stat().st_size)
        code = process.wait()
    evidence.expect_exit(code, 2, "without room")
    evidence.expect_output(process.output, "cannot be written")
    evidence.expect("Traceback" not in process.output, "it ended with a traceback")
    evidence.expect(bool(site.run.checkpoint_steps()), "no checkpoint is left")
    seconds = evidence.detected_seconds
    resume(evidence)
    evidence.detected_seconds = seconds
    evidence.message = (
        f"Without room for {_FULL_SECONDS:g} s the watcher kept watching, and reported it when it "
        f"could; the run was not affected. Without room itself, after step {step}, it ended with "
        f"an error. Started again, with room, it trained {evidence.steps_lost} steps twice; "
        f"{BITWISE}."
    )


def _kill(pid: int) -> float:
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()


@fault(
    name="watcher-stopped",
    does="Stops a run's watcher (SIGSTOP).",
    must="The run continues, bitwise the same, and has another watcher within 20 s.",
    disable=stop,
    step=3,
    within=20.0,  # the trainer ends a watcher that gives no beat for 12 s
)
@fault(
    name="dead-watcher",
    does="Kills a run's watcher (SIGKILL).",
    must="The run continues, bitwise the same, and has another watcher within 5 s.",
    disable=_kill,
    step=38,
    within=5.0,
)
def lost_watcher(
    site: TrainingSite,
    evidence: Evidence,
    disable: Callable[[int], float | None],
    step: int,
    within: float,
) -> None:
    """Drill: disable the node's watcher at a step, and train to the end."""
    with site.launch(inject=Injection("slow-steps", step)) as process:
        process.wait_for_rows(step)
        pid = process.wait_for_watcher()
        at = disable(pid)
        if at is None:
            raise process.failed("had no watcher that could be stopped")
        found = process.wait_for_node_event("watcher_started", lambda event: event["pid"] != pid)
        is_gone = read_stat(pid) is None
        process.finish()
    evidence.expect_event(found, at, f"no watcher has replaced process {pid}", within=within)
    if disable is stop:  # a killed one may still be waited for by its parent
        evidence.expect(is_gone, f"process {pid} is still there")
    evidence.expect_undisturbed()
    evidence.message = (
        f"{evidence.detected_seconds or 0:.1f} s after watcher {pid} was disabled, it had ended "
        "and there was another; every step is bitwise the undisturbed run's."
    )


@fault(
    does="Freezes the file system of the run directory (fsfreeze) until the hang was named.",
    must="Terminal and hook name it while it is frozen; then the run continues, bitwise the same.",
)
def run_disk_frozen(site: TrainingSite, evidence: Evidence) -> None:
    # Not in the run directory, whose disk is frozen when the hook writes.
    hook = site.folder / "alerts.jsonl"
    with _own_disk(site.run.path), site.launch(f"watch.hook=cat >> {hook}") as process:
        process.wait_for_rows(USUAL_STEPS)
        process.wait_for_watcher()
        with _frozen(site.run.path) as at:
            named = process.wait_until(
                lambda: next(
                    (each for each in fsio.read_json_lines(hook) if each["event"] == "stalled"),
                    None,
                ),
                "the hook heard of it",
                NODE_POLL_SECONDS,
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
        evidence.expect_undisturbed()
    evidence.message = f"{sentence} Terminal and hook said so while the disk was frozen."


@contextmanager
def _own_disk(folder: Path) -> Iterator[None]:
    """Mount a small file system, kept in an image file beside it, at a new folder."""
    image = folder.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(_DISK_BYTES)
    folder.mkdir()
    try:
        _as_root("mkfs.ext4", "-q", "-F", str(image))
        _as_root("mount", "-o", "loop", str(image), str(folder))
        try:
            # Made by mkfs; a new run directory is empty.
            (folder / "lost+found").rmdir()
            yield
        finally:
            # Lazily, as a watcher may still have files open there.
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
    """Freeze a file system: writes block until the block ends; yields the time of freezing."""
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
    does="Kills one rank of two (SIGKILL) after a random step of `longtake launch`.",
    must="It is named; both resume from the newest checkpoint, and the end is bitwise the same.",
    compared_with="undisturbed_on_two_ranks",
)
def kill_rank(site: TrainingSite, evidence: Evidence) -> None:
    step = random.choice(_KILL_STEPS)  # noqa: S311 - not a secret
    with site.launch(*ON_TWO_RANKS, ranks=2, restarts=1) as process:
        process.wait_for_rows(step)
        process.wait_for_checkpoints(1)
        os.kill(pid_of_rank(site, 1), signal.SIGKILL)
        recovery = wait_for_recovery(process, site, time.monotonic())
        process.finish()
        evidence.expect_lost_rank_named(process, 1)
        evidence.expect_output(process.output, "Rank 1 of 2")
    evidence.expect_recovered(recovery)
    evidence.expect_undisturbed()
    evidence.message = (
        f"Rank 1 was killed after step {step} and named; {recovery.seconds:.1f} s later a step was "
        f"trained again, and {evidence.steps_lost} steps twice; {BITWISE}."
    )


def wait_for_recovery(observer: RunObserver, site: TrainingSite, lost_at: float) -> Recovery:
    """Wait until a run that lost a rank at time `lost_at` has trained a step again."""
    resumed = observer.wait_for_event("resumed")
    # Read before the resumed run saves its next checkpoint.
    newest = max(site.run.checkpoint_steps(), default=0)
    observer.wait_for_rows(observer.num_rows() + 1)
    return Recovery(resumed, newest, time.monotonic() - lost_at)


@fault(
    does="Trains on two ranks, resumes with one, and then with two again.",
    must="No clip is repeated or missing; losses and weights are the same but for rounding.",
    compared_with="undisturbed_on_two_ranks",
)
def world_2_1_2(site: TrainingSite, evidence: Evidence) -> None:
    for ranks, num_checkpoints in ((2, 2), (1, 4)):
        with site.launch(*ON_TWO_RANKS, ranks=ranks) as process:
            process.wait_for_checkpoints(num_checkpoints)
            if not process.kill():
                raise errors.RunError(f"The run was over before {ranks} ranks could be killed.")
    with site.launch(*ON_TWO_RANKS, ranks=2) as process:
        process.finish()
    evidence.expect_world_sizes(2, 1, 2)
    evidence.expect_near()
    distance = evidence.expect_near_weights()
    evidence.message = (
        f"Two ranks, one, and two again trained it, and {evidence.steps_lost} steps twice: no clip "
        f"was repeated or missing, and the weights end {distance:.0e} (relative: rounding) from "
        "those of two ranks all the time."
    )

"""Faults of checkpoints: runs killed at any time, damaged files, no room on the disk."""

import os
import random
import resource
import signal
from pathlib import Path

from longtake.errors import RunError
from longtake.faults.expect import BITWISE, Evidence
from longtake.faults.registry import fault
from longtake.faults.sandbox import ObservedEvent, Sandbox, TrainingProcess, TrainingSite, stop

_KILL_STEPS = range(8, 36)  # there is a checkpoint, and the run is far from its end
_SAVING_POLL_SECONDS = 0.0005  # a checkpoint of the drills is written in some 50 ms
_ROOM_BYTES = 2**18  # a third of the smallest file of weights; other files are much smaller
_WEIGHTS = "model/__0_0.distcp"
_OPTIMIZER = "optimizer/__0_0.distcp"


@fault(
    "kill",
    does="Kills a run (SIGKILL) after a random step and starts the same command again.",
    must="Every step, and weights, EMA and optimizer at the end, are bitwise the same.",
)
def kill(sandbox: Sandbox) -> Evidence:
    site, step = sandbox.fresh("kill"), random.choice(_KILL_STEPS)  # noqa: S311 - not a secret
    with site.launch() as process:
        process.wait_for_rows(step)
        process.wait_for_checkpoints(1)
        if not process.kill():
            raise RunError(f"The run was over before it could be killed after step {step}.")
    evidence = resume(Evidence(), site, sandbox.undisturbed)
    evidence.message = (
        f"Killed after step {step}, it resumed by the same command; {evidence.steps_lost} steps "
        f"were trained twice; {BITWISE}."
    )
    return evidence


@fault(
    "kill-while-saving",
    does="Kills a run (SIGKILL) while it writes a checkpoint, and starts it again.",
    must="It resumes from the checkpoint before; what follows is bitwise the same.",
)
def kill_while_saving(sandbox: Sandbox) -> Evidence:
    site = sandbox.fresh("kill-while-saving")
    with site.launch() as process:
        process.wait_for_checkpoints(1)
        partial = _stop_while_saving(process, site)
        process.kill()
    evidence = resume(Evidence(), site, sandbox.undisturbed)
    evidence.message = (
        f"Killed while {partial.name} was written, it resumed from the checkpoint before; "
        f"{evidence.steps_lost} steps were trained twice, nothing was left of it, and {BITWISE}."
    )
    return evidence


def _stop_while_saving(process: TrainingProcess, site: TrainingSite) -> Path:
    """Stop a run while a checkpoint is half written; returns its partial folder."""

    def stop_it() -> Path | None:
        if partial := next(site.run.checkpoints_path.glob(".step_*.partial"), None):
            stop(process.pid)
            if partial.is_dir():
                return partial
            os.kill(process.pid, signal.SIGCONT)
        return None

    what = "it could be stopped while it saved"
    return process.wait_until(stop_it, what, _SAVING_POLL_SECONDS)


@fault(
    "truncated-checkpoint",
    does="Kills a run and cuts off half of a file of its newest checkpoint.",
    must="It names the file and resumes from the checkpoint before; the rest is bitwise the same.",
)
def truncated_checkpoint(sandbox: Sandbox) -> Evidence:
    site = sandbox.killed_mid_epoch("truncated-checkpoint")
    path = site.newest_file(_WEIGHTS)
    os.truncate(path, path.stat().st_size // 2)
    evidence = _resume_from_older(site, _WEIGHTS, sandbox.undisturbed)
    evidence.message = (
        f"Half of {_WEIGHTS} was missing. It said so, resumed from the checkpoint before and "
        f"trained {evidence.steps_lost} steps twice; {BITWISE}."
    )
    return evidence


@fault(
    "bit-rot-in-checkpoint",
    does="Kills a run and flips one random bit of its newest checkpoint.",
    must="It names the file and resumes from the checkpoint before; the rest is bitwise the same.",
)
def bit_rot_in_checkpoint(sandbox: Sandbox) -> Evidence:
    site = sandbox.killed_mid_epoch("bit-rot-in-checkpoint")
    path = site.newest_file(_OPTIMIZER)
    bit = random.randrange(8 * path.stat().st_size)  # noqa: S311 - not a secret
    flip(path, bit)
    evidence = _resume_from_older(site, _OPTIMIZER, sandbox.undisturbed)
    evidence.message = (
        f"Bit {bit} of {_OPTIMIZER} was flipped. It said so, resumed from the checkpoint before "
        f"and trained {evidence.steps_lost} steps twice; {BITWISE}."
    )
    return evidence


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file; bit 8 is the lowest of the second byte."""
    with path.open("rb+") as file:
        file.seek(bit // 8)
        octet = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([octet ^ 1 << bit % 8]))


@fault(
    "disk-full-while-saving",
    does="Leaves a run no room for further checkpoints; then makes room and starts it again.",
    must="It says what is lost: the steps since the last whole checkpoint, and nothing else.",
)
def disk_full_while_saving(sandbox: Sandbox) -> Evidence:
    site, evidence = sandbox.fresh("disk-full-while-saving"), Evidence()
    with site.launch() as process:
        process.wait_for_checkpoints(1)
        limit_file_size(process.pid, _ROOM_BYTES)
        at = process.polled_at
        found = process.wait_for_event("checkpoint_failed")
        code = process.wait()
    saved = site.run.checkpoint_steps()[-1]
    expect_unsaved_end(evidence, site, found, code, process.output)
    resume(evidence, site, sandbox.undisturbed)
    if found:
        evidence.detected_seconds = found.at - at
    evidence.message = (
        f"Without room after the checkpoint of step {saved} it said that the steps since then are "
        "lost, and ended with an error. Started again, with room, it trained "
        f"{evidence.steps_lost} steps twice; {BITWISE}."
    )
    return evidence


def limit_file_size(pid: int, num_bytes: int) -> None:
    """Let no file of a process grow beyond a size, as on a full disk.

    RLIMIT_FSIZE meets writes half-way through a file as a full disk does ("File too large" instead
    of "No space left on device"); mounting a small disk needs privileges.
    """
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def expect_unsaved_end(
    evidence: Evidence, site: TrainingSite, found: ObservedEvent | None, code: int, output: str
) -> None:
    """Expect that a run whose checkpoints find no room fails and says what is lost."""
    evidence.expect(found is not None, "no event says that a checkpoint failed")
    evidence.expect_exit(code, 2, "though its end was not saved,")
    kept = site.run.checkpoint_path(site.run.checkpoint_steps()[-1]).name
    evidence.expect_output(output, f"nothing is lost but the steps since {kept}")
    evidence.expect_no_partial_checkpoints(site)


def resume(evidence: Evidence, site: TrainingSite, undisturbed: TrainingSite) -> Evidence:
    """Start the same command again, to the end of the run, and check it."""
    newest = site.run.checkpoint_steps()[-1]
    with site.launch() as process:
        found = process.wait_for_event("resumed")
        process.finish()
    expect_resumed_run(evidence, site, newest, found, undisturbed)
    evidence.expect_lost_steps_reported(found, newest, process.output)
    if found:
        evidence.detected_seconds = found.at - process.began
    return evidence


def _resume_from_older(site: TrainingSite, damaged: str, undisturbed: TrainingSite) -> Evidence:
    """Resume a run with a damaged file in its newest checkpoint, and check it."""
    evidence = Evidence()
    older, newest = site.run.checkpoint_steps()[-2:]
    with site.launch() as process:
        warning = process.wait_for_event("checkpoint_damaged")
        found = process.wait_for_event("resumed")
        process.finish()
    name = site.run.checkpoint_path(newest).name
    expect_warning(evidence, warning, name, damaged, older, process.output)
    expect_resumed_run(evidence, site, older, found, undisturbed)
    evidence.expect_lost_steps_reported(found, older, process.output)
    at = warning or found
    evidence.detected_seconds = at.at - process.began if at else None
    return evidence


def expect_resumed_run(
    evidence: Evidence,
    site: TrainingSite,
    newest: int,
    found: ObservedEvent | None,
    undisturbed: TrainingSite,
) -> None:
    evidence.expect_resumed(found, newest)
    evidence.expect_undisturbed(site, undisturbed)
    evidence.expect_no_partial_checkpoints(site)


def expect_warning(
    evidence: Evidence,
    warning: ObservedEvent | None,
    checkpoint: str,
    damaged: str,
    older: int,
    output: str,
) -> None:
    """Expect an event that names checkpoint and file, and where it resumes in the output."""
    evidence.expect(warning is not None, "no event says that a checkpoint is damaged")
    if warning:
        path, reason = warning.event["path"], warning.event["reason"]
        evidence.expect(path == checkpoint, f"it calls {path} damaged, and {checkpoint} is")
        evidence.expect(damaged in reason, f"the reason does not name {damaged}: {reason}")
    evidence.expect_output(output, f"training resumes from step {older}")

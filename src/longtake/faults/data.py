"""Faults of clips and checkpoints: changed or damaged files, workers that hang, full disks."""

import json
import os
import random
import re
import resource
import signal
from pathlib import Path
from typing import Literal

import numpy as np

from longtake.data import ledger
from longtake.data.catalog import Catalog
from longtake.data.index import index
from longtake.data.plan_history import compare
from longtake.data.tasks import HERE
from longtake.demo.shapes import write_clips
from longtake.errors import RunError
from longtake.faults.expect import BITWISE, Evidence, clips_at, identities_of
from longtake.faults.registry import fault
from longtake.faults.sandbox import (
    NUM_CLIPS,
    ON_TWO_RANKS,
    SAMPLE_TIMEOUT_SECONDS,
    STEPS,
    ObservedEvent,
    TrainingProcess,
    TrainingSite,
    stop,
    stop_while_decoding,
)

Policy = Literal["merge", "finish"]

_ADDED = NUM_CLIPS // 10
_REMOVED = NUM_CLIPS * 3 // 10
_POLICIES = ("merge", "finish", "restart")
_LATE_STEP = 15  # last but one of an epoch's 16 steps
_CORRUPT_STEP = 8


@fault(
    does="Kills a run in mid-epoch and adds a tenth more clips to its catalog.",
    must="It refuses to resume; with on_change=merge it repeats no clip and misses none.",
    begins="killed",
)
def data_grown(site: TrainingSite, evidence: Evidence) -> None:
    old = site.catalog()
    site.write_clips(NUM_CLIPS + _ADDED)
    site.index()
    # The refused launch must not train a step on data that has changed.
    num_rows = len(site.run.metrics())
    with site.launch() as process:
        code = process.wait()
        seconds = process.polled_at - process.began
    evidence.expect_exit(code, 2, "without data.on_change")
    evidence.expect_output(process.output, f"{len(site.catalog()) - len(old)} clips added")
    unnamed = [way for way in _POLICIES if not re.search(rf"^  {way}\b", process.output, re.M)]
    evidence.expect(not unnamed, f"the refusal does not offer {', '.join(unnamed)}")
    evidence.expect(len(site.run.metrics()) == num_rows, "it trained, though the data had changed")
    _resume_by_policy(evidence, old, "merge")
    evidence.detected_seconds = seconds
    evidence.message = f"It refused to resume and said why. {evidence.message}"


@fault(
    does="Kills a run in mid-epoch and deletes three in ten of its clips.",
    must="With on_change=merge it repeats no clip and misses none.",
    begins="killed",
)
def data_shrunk(site: TrainingSite, evidence: Evidence) -> None:
    old = site.catalog()
    for clip in sorted(site.clips.glob("*.mp4"))[:_REMOVED]:
        clip.unlink()
    site.index()
    _resume_by_policy(evidence, old, "merge")


@fault(
    does="Kills a run in mid-epoch and replaces its catalog by one of other clips.",
    must="With on_change=finish it ends the epoch with the old clips, then trains the new ones.",
    begins="killed",
)
def data_swapped(site: TrainingSite, evidence: Evidence) -> None:
    old, folder = site.catalog(), site.folder / "data" / "other_clips"
    captions = write_clips(folder, NUM_CLIPS, seed=1)  # the old clips stay where they are
    index([folder], captions=captions, out=site.catalog_path, work=HERE)
    _resume_by_policy(evidence, old, "finish")


@fault(
    does="Kills a run in mid-epoch and deletes a single clip that was still to come.",
    must="With on_change=merge it repeats no clip and misses none.",
    begins="killed",
)
def one_clip_removed(site: TrainingSite, evidence: Evidence) -> None:
    # The undisturbed run tells which clip comes late: both have the same order of clips.
    old, late = site.catalog(), clips_at(evidence.undisturbed, _LATE_STEP)[0]
    (site.clips / late.name).unlink()
    site.index()
    _resume_by_policy(evidence, old, "merge")


def _resume_by_policy(evidence: Evidence, old: Catalog, policy: Policy) -> None:
    """Resume with this value of `data.on_change`, train to the end, and check its guarantees.

    `merge`: epoch 0 consists of the clips consumed before and the rest of the new catalog.
    `finish`: epoch 0 is the old catalog. With both, later epochs are the new catalog, and the steps
    before the change are bitwise those of the undisturbed run.
    """
    site = evidence.site
    with site.launch(f"data.on_change={policy}") as process:
        found = process.wait_for_event("data_changed", policy=policy)
        process.finish()
    step, first = found.event["step"] if found else 0, identities_of(old)
    if policy == "merge":
        consumed = ledger.read_ledger(site.run.ledger_path)
        # A clip that was consumed and then removed belongs to the epoch nevertheless.
        before = consumed.identity[(consumed.step < step) & (consumed.epoch == 0)]
        first = np.union1d(before, identities_of(site.catalog()))
    evidence.expect_event(found, process.began, f"no event says that the data changed ({policy})")
    evidence.expect(0 < step < STEPS, f"the change was to meet the run in mid-epoch, not at {step}")
    evidence.expect_exact(first)
    evidence.expect_equal(until=step)
    changed, counts = compare(old, site.catalog()), evidence.counts
    assert counts is not None
    evidence.message = (
        f"With {changed.added} clips added and {changed.removed} removed it resumed by {policy}: "
        f"{counts.repeated} samples repeated, {counts.missing} missing; the steps before are "
        "bitwise the undisturbed run's."
    )


@fault(
    does="Overwrites the middle of a clip's file after it was indexed.",
    must="The run rejects the clip with a reason and trains all others.",
)
def corrupt_clip(site: TrainingSite, evidence: Evidence) -> None:
    clip = site.clips / clips_at(evidence.undisturbed, _CORRUPT_STEP)[0].name
    # Invert all bits in the middle third. The file's header, index and length stay valid, so only
    # decoding can find the damage.
    content = bytearray(clip.read_bytes())
    third = len(content) // 3
    content[third : 2 * third] = bytes(0xFF ^ octet for octet in content[third : 2 * third])
    clip.write_bytes(content)
    with site.launch() as process:
        found = process.wait_for_event("sample_rejected")
        process.finish()
    step, reason = 0, ""
    evidence.expect_event(found, process.began, "no event says that a clip could not be decoded")
    if found:
        step, reason = found.event["step"], found.event["reason"]
        wrong = f"it was rejected at step {step}; it was due at {_CORRUPT_STEP}"
        evidence.expect(step == _CORRUPT_STEP, wrong)
        evidence.expect(clip.name in reason, f"another clip was rejected: {reason}")
    evidence.expect_exact(rejected=1)
    evidence.expect_equal(until=step)
    evidence.message = (
        f"The clip was rejected at step {step}, when it was due, and the batch had one sample "
        f"less; the run continued. The reason: {reason.rpartition(': ')[2]}."
    )


@fault(
    name="killed-loader-worker",
    does="Kills a decode worker (SIGKILL) while it decodes a clip.",
    must="It is replaced; every step is bitwise the same.",
    kind="decoder_died",
)
@fault(
    name="decoder-hang",
    does="Stops a decode worker (SIGSTOP) while it decodes a clip.",
    must="It is dumped, killed and replaced at its deadline; every step is bitwise the same.",
    kind="decoder_stalled",
)
def lost_decoder(
    site: TrainingSite,
    evidence: Evidence,
    kind: Literal["decoder_stalled", "decoder_died"],
) -> None:
    """Drill: stop or kill a decode worker while it decodes, and expect that it is replaced."""
    with site.launch() as process:
        process.wait_for_rows(1)
        hang = stop_while_decoding(process, site.clips)
        # A stopped process still dies at SIGKILL; it was stopped to be sure that it decodes.
        if kind == "decoder_died":
            os.kill(hang.pid, signal.SIGKILL)
        found = process.wait_for_event(kind, pid=hang.pid)
        process.finish()
    evidence.expect_event(found, hang.at, f"no event {kind} tells of process {hang.pid}")
    decoded = Path(hang.path).name
    if found:
        named = Path(found.event["path"]).name
        wrong = f"the event names the clip {named}, and it was decoding {decoded}"
        evidence.expect(named == decoded, wrong)
        stacks = site.run.path / found.event["stacks"]
        evidence.expect(stacks.is_file(), f"its stacks were not kept: there is no {stacks}")
    evidence.expect(not Path(f"/proc/{hang.pid}").exists(), f"process {hang.pid} still runs")
    evidence.expect_undisturbed()
    ended = f"Process {hang.pid} was killed while it decoded {decoded}"
    if kind == "decoder_stalled":
        where = f" in {found.event['where']}" if found and found.event["where"] else ""
        ended = (
            f"Process {hang.pid} was stopped while it decoded {decoded}, was past its deadline of "
            f"{SAMPLE_TIMEOUT_SECONDS:g} s, was dumped{where}, killed"
        )
    evidence.message = f"{ended} and replaced; every step is bitwise the undisturbed run's."


@fault(
    does="Kills a run in mid-epoch and resumes it on two ranks instead of one, without workers.",
    must="No clip is repeated or missing; the losses are the same but for rounding.",
    begins="killed",
)
def processes_changed(site: TrainingSite, evidence: Evidence) -> None:
    with site.launch(*ON_TWO_RANKS, ranks=2) as process:
        process.finish()
    evidence.expect_world_sizes(1, 2)
    step = json.loads(site.run.record_path.read_text())["launches"][-1]["start_step"]
    error = evidence.expect_near()
    evidence.message = (
        f"Killed as one process, it resumed from step {step} as two ranks: no clip was repeated or "
        f"missing, and no loss is further than {error:.0e} (relative: rounding) from the "
        "undisturbed run's."
    )


_KILL_STEPS = range(8, 36)  # there is a checkpoint, and the run is far from its end
_SAVING_POLL_SECONDS = 0.0005  # a checkpoint of the drills is written in some 50 ms
_ROOM_BYTES = 2**18  # a third of the smallest file of weights; other files are much smaller
_WEIGHTS = "model/__0_0.distcp"
_OPTIMIZER = "optimizer/__0_0.distcp"


@fault(
    does="Kills a run (SIGKILL) after a random step and starts the same command again.",
    must="Every step, and weights, EMA and optimizer at the end, are bitwise the same.",
)
def kill(site: TrainingSite, evidence: Evidence) -> None:
    step = random.choice(_KILL_STEPS)  # noqa: S311 - not a secret
    with site.launch() as process:
        process.wait_for_rows(step)
        process.wait_for_checkpoints(1)
        if not process.kill():
            raise RunError(f"The run was over before it could be killed after step {step}.")
    resume(evidence)
    evidence.message = (
        f"Killed after step {step}, it resumed by the same command; {evidence.steps_lost} steps "
        f"were trained twice; {BITWISE}."
    )


@fault(
    does="Kills a run (SIGKILL) while it writes a checkpoint, and starts it again.",
    must="It resumes from the checkpoint before; what follows is bitwise the same.",
)
def kill_while_saving(site: TrainingSite, evidence: Evidence) -> None:
    with site.launch() as process:
        process.wait_for_checkpoints(1)
        partial = _stop_while_saving(process, site)
        process.kill()
    resume(evidence)
    evidence.message = (
        f"Killed while {partial.name} was written, it resumed from the checkpoint before; "
        f"{evidence.steps_lost} steps were trained twice, nothing was left of it, and {BITWISE}."
    )


def _stop_while_saving(process: TrainingProcess, site: TrainingSite) -> Path:
    """Stop a run while a checkpoint is half written, and return the partial checkpoint's folder."""

    def stop_it() -> Path | None:
        if partial := next(site.run.checkpoints_path.glob(".step_*.partial"), None):
            stop(process.pid)
            # It may have been renamed before the signal arrived.
            if partial.is_dir():
                return partial
            os.kill(process.pid, signal.SIGCONT)
        return None

    what = "it could be stopped while it saved"
    return process.wait_until(stop_it, what, _SAVING_POLL_SECONDS)


@fault(
    does="Kills a run and cuts off half of a file of its newest checkpoint.",
    must="It names the file and resumes from the checkpoint before; the rest is bitwise the same.",
    begins="killed",
)
def truncated_checkpoint(site: TrainingSite, evidence: Evidence) -> None:
    path = site.newest_file(_WEIGHTS)
    os.truncate(path, path.stat().st_size // 2)
    _resume_from_older(evidence, _WEIGHTS)
    evidence.message = (
        f"Half of {_WEIGHTS} was missing. It said so, resumed from the checkpoint before and "
        f"trained {evidence.steps_lost} steps twice; {BITWISE}."
    )


@fault(
    does="Kills a run and flips one random bit of its newest checkpoint.",
    must="It names the file and resumes from the checkpoint before; the rest is bitwise the same.",
    begins="killed",
)
def bit_rot_in_checkpoint(site: TrainingSite, evidence: Evidence) -> None:
    path = site.newest_file(_OPTIMIZER)
    bit = random.randrange(8 * path.stat().st_size)  # noqa: S311 - not a secret
    flip(path, bit)
    _resume_from_older(evidence, _OPTIMIZER)
    evidence.message = (
        f"Bit {bit} of {_OPTIMIZER} was flipped. It said so, resumed from the checkpoint before "
        f"and trained {evidence.steps_lost} steps twice; {BITWISE}."
    )


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file; bit 8 is the lowest bit of the second byte."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@fault(
    does="Leaves a run no room for further checkpoints; then makes room and starts it again.",
    must="It says what is lost: the steps since the last whole checkpoint, and nothing else.",
)
def disk_full_while_saving(site: TrainingSite, evidence: Evidence) -> None:
    with site.launch() as process:
        process.wait_for_checkpoints(1)
        limit_file_size(process.pid, _ROOM_BYTES)
        at = process.polled_at
        found = process.wait_for_event("checkpoint_failed")
        code = process.wait()
    saved = site.run.checkpoint_steps()[-1]
    evidence.expect(found is not None, "no event says that a checkpoint failed")
    evidence.expect_exit(code, 2, "though its end was not saved,")
    kept = site.run.checkpoint_path(saved).name
    evidence.expect_output(process.output, f"nothing is lost but the steps since {kept}")
    evidence.expect_no_partial_checkpoints()
    resume(evidence)
    if found:
        evidence.detected_seconds = found.at - at
    evidence.message = (
        f"Without room after the checkpoint of step {saved} it said that the steps since then are "
        "lost, and ended with an error. Started again, with room, it trained "
        f"{evidence.steps_lost} steps twice; {BITWISE}."
    )


def limit_file_size(pid: int, num_bytes: int) -> None:
    """Limit the size of any file that a process writes, to simulate a full disk.

    Like a full disk, RLIMIT_FSIZE lets a write fail half-way through a file ("File too large"
    instead of "No space left on device"). A real small disk would need privileges to mount.
    """
    # Only the soft limit: a hard one could not be raised again to make room.
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def resume(evidence: Evidence) -> None:
    """Resume a run by the command of its first launch, train to the end, and check the results."""
    site = evidence.site
    newest = site.run.checkpoint_steps()[-1]
    with site.launch() as process:
        found = process.wait_for_event("resumed")
        process.finish()
    _expect_resumed_run(evidence, newest, found)
    evidence.expect_lost_steps_reported(found, newest, process.output)
    if found:
        evidence.detected_seconds = found.at - process.began


def _resume_from_older(evidence: Evidence, damaged: str) -> None:
    """Resume a run from its older checkpoint, as the newest is damaged, and check the results."""
    site = evidence.site
    older, newest = site.run.checkpoint_steps()[-2:]
    with site.launch() as process:
        warning = process.wait_for_event("checkpoint_damaged")
        found = process.wait_for_event("resumed")
        process.finish()
    evidence.expect(warning is not None, "no event says that a checkpoint is damaged")
    if warning:
        path, reason = warning.event["path"], warning.event["reason"]
        name = site.run.checkpoint_path(newest).name
        evidence.expect(path == name, f"it calls {path} damaged, and {name} is")
        evidence.expect(damaged in reason, f"the reason does not name {damaged}: {reason}")
    evidence.expect_output(process.output, f"training resumes from step {older}")
    _expect_resumed_run(evidence, older, found)
    evidence.expect_lost_steps_reported(found, older, process.output)
    at = warning or found
    evidence.detected_seconds = at.at - process.began if at else None


def _expect_resumed_run(evidence: Evidence, newest: int, found: ObservedEvent | None) -> None:
    evidence.expect_resumed(found, newest)
    evidence.expect_undisturbed()
    evidence.expect_no_partial_checkpoints()

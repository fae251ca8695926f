"""The training loop: the order of a step's operations.

A step has one collective in addition to those of the gradients (`reduce_statistics`), and the host
waits for the device once, for the numbers that go into it. The exceptions:

- A sharded model gathers the weights of each block before the block computes (`parallel/fsdp.py`).
- Ranks that share a batch's tokens compare it first (`begin_step`), agree on what they encode ahead
  (`prepare_next`), both over the CPU, exchange what each of them has encoded (`inputs.py`), and
  exchange keys and values in each attention.
- The host waits once more for the first batch of each shape, whose page-locked memory is allocated,
  in a step with NaN or inf, which are counted, where a text encoder waits for the device, and for
  the checksums of replicas in the steps that compare them.
- All ranks gather what only they know if a clip could not be read, if the verdict is not `ok`, and
  once in the first steps, for weights without gradient (`GuardRunner.judge_gradients`).
- Saving and sampling have collectives and waits of their own. So has the first step of a launch,
  for its report.

With `optimizer.fused_backward`, of which one rank alone is capable, the backward pass updates the
weights (`updating`): before the decision, so that the guard can only roll a bad update back.
"""

from dataclasses import dataclass

from longtake import heartbeat
from longtake.data.batch import Batch
from longtake.data.ledger import Ledger
from longtake.guard import detectors
from longtake.training.guard_runner import Decision
from longtake.training.inputs import clips_not_encoded
from longtake.training.parts import Training
from longtake.training.saving import is_sampled_after, sample_presets, save_if_due
from longtake.training.session import SampleLosses
from longtake.training.statistics import StepSummary, reduce_statistics, replicated_tensors
from longtake.training.step import (
    apply_update,
    begin_step,
    compute_gradients,
    prepare_next,
    skip_update,
    updating,
)

_NOT_ENCODED = (
    "is encoded to {names} that are NaN or infinite; if other clips are too, the weights of the "
    "codec or text encoder are damaged, or their precision (codec.dtype, text.dtype) is too low"
)


@dataclass(frozen=True)
class LoopExit:
    """Reason for which the training loop returned; both fields are None at its regular end."""

    signal: str | None = None  # signal that asked a rank to stop; the state is saved
    decision: Decision | None = None  # with which the guard ended the loop


def train_steps(training: Training, ledger: Ledger) -> LoopExit:
    """Run training steps until the recipe's last step, the end of the data, or a request to stop.

    Raises:
        DataError: too many clips failed to decode.
        CheckpointError: two checkpoints in a row could not be written.
        DivergedError: the last update left NaN or inf in the weights, or replicas unlike.
        RunError: another launch has taken the run over.
    """
    session, state, loader = training.session, training.state, training.loader
    recorder, norms, replicas = training.recorder, training.norms, training.replicas
    end = loader.end_after(session.recipe.training.steps - state.global_step)
    for local_batch in recorder.timed(loader.batches(end)):
        batch = begin_step(session, state, local_batch)
        with (
            # The first step's memory, and the time with this number of CPU threads.
            recorder.measured(state.global_step, batch, training.threads),
            updating(session, state, norms, batch),  # if optimizer.fused_backward is set
        ):
            losses = compute_gradients(session, state, batch)  # forward, backward, accumulate
            prepare_next(session, state, loader)  # while the device computes
        local = training.local_facts()
        summary = reduce_statistics(  # one all-reduce
            session, losses, batch, state, norms, replicas, local
        )
        if summary.num_failures:
            recorder.record_failures(batch, loader)
        decision = decide(training, batch, losses, summary)
        learning_rate = 0.0
        if decision.applies_update:
            weight = session.recipe.data.loss_weight(batch.source)
            with norms.track_update(state.optimizers):  # clip, optimizer, EMA
                learning_rate = apply_update(
                    session,
                    state,
                    weight * summary.statistics.grad_norm,
                    weight * summary.scale,
                    batch.position,
                )
        else:
            skip_update(state)
        recorder.step_done(batch, losses, decision, learning_rate)
        # Before the loop may end: a batch that is rolled back was consumed, too.
        ledger.record(batch.consumed)
        if decision.ends_loop:
            return LoopExit(decision=decision)
        is_last = loader.step == end
        is_sampled = is_sampled_after(training, batch.step, is_last=is_last)
        save_if_due(training, ledger, summary, is_last=is_last, is_sampled=is_sampled)
        heartbeat.end_step(losses.compute_seconds)
        # Only now: the signal's step is saved above, so that the run resumes behind it.
        if summary.stop is not None:
            return LoopExit(signal=summary.stop)
        if is_sampled:
            sample_presets(training)
    return LoopExit()


def decide(
    training: Training, batch: Batch, losses: SampleLosses, summary: StepSummary
) -> Decision:
    """Decide whether a training step's update is applied; every rank decides the same.

    Writes the guard's report and events if the verdict is not `ok`, and quarantines clips that an
    encoder turned into NaN. All ranks must call it.
    """
    session, state, guard = training.session, training.state, training.guard
    statistics = summary.statistics
    verdict, unlike, report = detectors.OK, "", None
    if summary.unlike:
        tensors = replicated_tensors(state)
        unlike = training.replicas.explain(summary.unlike, tensors, statistics.step)
    if statistics.num_samples or unlike:  # else there is nothing to learn or to judge
        verdict = guard.judge(statistics, losses, batch, unlike)
    # Second, as a run whose weights get no gradient is judged only on healthy steps.
    if statistics.num_samples and verdict.kind == "ok":
        verdict = guard.judge_gradients(training.norms, batch, statistics)
    is_allowed = guard.allows(verdict)
    if verdict.kind != "ok":
        if verdict.reason == "non_finite":
            parts, device = state.components, session.world.device
            not_encoded = clips_not_encoded(batch, losses.losses, parts, session.recipe, device)
            for identity, names in not_encoded:
                training.loader.fail(identity, _NOT_ENCODED.format(names=names))
            # Recorded now, and on every rank: there is no next step if the verdict ends the loop.
            # Later batches have a stand-in for such a clip. The quarantine is part of a checkpoint:
            # a run that resumes or rolls back to an earlier one meets the clip again.
            training.recorder.record_failures(batch, training.loader)
        training.saver.wait()  # so that the report names the newest checkpoint
        verdict, report = guard.report(verdict, statistics, losses, state)
    decision = Decision(statistics, verdict, is_allowed)
    if verdict.kind != "ok":
        training.recorder.report_verdict(decision, report)
    return decision

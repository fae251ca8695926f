"""The evaluation server: finds checkpoints to evaluate, and does one after another; torch-free.

All state is in the run directories, so that any number of servers can come, die and share the work.
A server cannot slow or break the training.
"""

import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, Self

from rich.console import Console

from longtake import errors, evaluation_dir, fsio, process
from longtake.evaluation.mirror import Mirror, RemoteRun, open_mirror
from longtake.evaluation.options import ServerOptions, ServerReport, find_runs, raised_at
from longtake.evaluation.pending import PendingTasks, waiting_steps
from longtake.progress import phase_lines
from longtake.run_dir import RunDirectory
from longtake.sampling import claims
from longtake.tracking.follower import Followers

_BEAT_SECONDS = 1.0
_PAUSE_PER_LOOK = 10.0
"""Pause of the keeper's thread between looks at the runs, as a multiple of the last look's
duration."""
_CHECKPOINTS_PER_TURN = 3
"""Number of checkpoints of one run that are evaluated before it is another run's turn, as each turn
loads another model."""
_NICE = 10
"""Niceness of the server on a CPU. Beside a training, a process of this niceness gets about a tenth
of the time; where nothing else wants the cores, it gets all of them that it asks for."""


def evaluate(options: ServerOptions, device: str, console: Console) -> dict[str, Any]:
    """Evaluate checkpoints until none is pending, or a signal requests a stop; imports torch.

    `device` is `auto`, `cpu`, `cuda`, or one GPU, such as `cuda:1`.

    Returns:
        `server` (its name), `stopped_by` (a signal, or None), `evaluation_finished` (the scores of
        all results that it made), `failed` (tasks) and `wrong` (the number of problems).

    Raises:
        RunError: the options do not fit together, or a source cannot be reached or has no run.
        RecipeError: there is no such device.
    """
    options.check()  # before torch is imported, which takes seconds
    with phase_lines(console, "importing PyTorch"):
        from longtake.evaluation.evaluator import CheckpointEvaluator
        from longtake.parallel.mesh import pick_device
    # Before any task is claimed: a device that does not exist must not count as failed attempts.
    if device != "auto":
        pick_device(device)
    report = ServerReport(console)
    # The first signal ends the work in order, a second one at once.
    with process.StopSignal(second="default") as stop:
        evaluator = CheckpointEvaluator(
            device,
            claims.own_name(),
            report,
            options.recipe_of,
            _lower_priority,
            trust=options.trust,
        )
        server = EvaluationServer(options, evaluator, report, stop)
        server.serve()
    # Among other runs that were evaluated, a refused one is only a reported problem.
    if report.untrusted is not None and not (server.evaluated or stop.reason):
        raise report.untrusted
    if not (options.waits or stop.reason or report.num_wrong or find_runs(options.places)):
        raise errors.RunError(
            f"{options.source or options.places[0]} holds no run: expected a folder with "
            "recipe.toml, or a folder of such; with --follow one may come later."
        )
    return {
        "server": server.name,
        "stopped_by": stop.reason,
        "evaluation_finished": server.evaluated,
        "failed": sorted(server.failed),
        "wrong": report.num_wrong,
    }


class EvaluationServer:
    """One process that evaluates the checkpoints of runs."""

    def __init__(
        self,
        options: ServerOptions,
        evaluate: claims.Evaluate,
        report: ServerReport,
        stop: process.StopSignal,
    ) -> None:
        self.name = claims.own_name()
        self.evaluated: list[evaluation_dir.Scores] = []
        self.failed: set[str] = set()
        self._options, self._evaluate, self._report, self._stop = options, evaluate, report, stop
        self._runs: dict[RunDirectory, PendingTasks] = {}
        self._turns = Turns()
        self._keeper = Keeper(self.name, options, report)
        self._mirror = MirrorThread(options, self.name, report)
        self._followers = Followers()

    def serve(self) -> None:
        """Evaluate checkpoints until none is pending, or for as long as the options say."""
        with self._followers, self._mirror, self._keeper:
            while not self._stop.wanted:
                # Before the look, or a checkpoint that is saved in between would be missed.
                may_end = self._may_end()
                self._find_runs()
                tasks = self._pending()
                if self._work_on_first(tasks):
                    continue
                # A task that rests after a failure is waited for.
                if may_end and not any(self._runs[t.run].claims.rests(t) for t in tasks):
                    break
                self._stop.wait(self._options.look_seconds)

    def _find_runs(self) -> None:
        """Find runs to serve: add new ones, and forget those that were deleted."""
        runs = list(self._runs)
        with self._report.log_errors("looking for runs"):
            runs = find_runs(self._options.places)
        known, given = self._runs, (self.name, self._options, self._report)
        self._runs = {run: known.get(run) or PendingTasks(run, *given) for run in runs}
        with self._report.log_errors("trackers of runs"):
            # The trackers of a mirrored run are written at its source.
            self._followers.serve([run for run, each in self._runs.items() if not each.is_mirror])
        self._keeper.publish(runs=tuple(self._runs.values()))
        if not runs and self._options.follows:
            places = ", ".join(map(str, self._options.places))
            self._report.remark(f"There is no run in {places} yet.")

    def _may_end(self) -> bool:
        """Return whether the server may end if it then finds no pending task."""
        are_over = not self._options.follows
        if not are_over and self._options.until_finished and self._runs:
            with self._report.log_errors("events of runs"):
                are_over = all(each.end.is_reached() for each in self._runs.values())
        return are_over and self._mirror.is_settled

    def _pending(self) -> list[claims.EvaluationTask]:
        """Return the pending tasks of all readable runs, in the order in which to try them."""
        by_run: list[list[claims.EvaluationTask]] = []
        for run, pending in self._runs.items():
            with self._report.log_errors(run.path):
                tasks = pending.look()
                by_run.append(tasks)
                pending.report_missed()
        # What has failed before comes last, so that it holds up nothing else.
        tasks = list(chain.from_iterable(by_run))
        return sorted(tasks, key=lambda task: (task.attempts, self._turns.rank(task)))  # stable

    def _work_on_first(self, tasks: Sequence[claims.EvaluationTask]) -> bool:
        """Evaluate the first task that this server can claim (reserve); return whether it did."""
        for task in tasks:
            with self._report.log_errors(task.run.path):
                pending = self._runs[task.run]
                pending.claims.settle()
                claim = None if pending.rests(task) else self._claim(pending, task)
                if claim is not None:
                    self._turns.note(task)
                    self._work_on(pending, claim)
                    return True
        return False

    def _claim(self, pending: PendingTasks, task: claims.EvaluationTask) -> claims.Claim | None:
        try:
            claim = pending.claims.take(task)
        except OSError as error:
            self.failed.add(str(task))
            self._report.remark(f"{task} cannot be claimed: {claims.format_error(error)}")
            return None
        if claim is None or claim.lost_by is None:
            return claim
        pending.log("evaluation_lost", **task.facts, by=claim.lost_by)
        attempts = pending.claims.attempts(task)
        if attempts.is_final:  # enough servers have died over it
            reason = f"the server {claim.lost_by} died over it, after {attempts.number} attempts"
            # Nobody takes this task over, so nobody else would remove the needs of the dead server.
            claims.forget_server(task.run, claim.lost_by, self.name)
            self._end(pending, claim, claims.AttemptOutcome("failed", reason=reason, is_final=True))
            return None
        return claim

    def _work_on(self, pending: PendingTasks, claim: claims.Claim) -> None:
        task, seconds = claim.task, self._options.stuck_seconds
        pending.log("evaluation_started", **task.facts)
        with self._keeper.working_on(task) as publish, self._report.progress_bar(task) as bar:

            def show(what: str, done: int, total: int) -> None:
                bar(what, done, total)
                publish(what, done, total)

            progress = claims.TaskProgress(claim.lease, self._stop, show)
            needing = self._keeper.needing(task)
            outcome = claims.attempt(claim, needing, self._evaluate, progress, self.name, seconds)
        self._end(pending, claim, outcome)

    def _end(
        self, pending: PendingTasks, claim: claims.Claim, outcome: claims.AttemptOutcome
    ) -> None:
        """End a claim (the server's reservation of a task), and report the task's outcome."""
        task, facts = claim.task, dict[str, Any]()
        match outcome.how:
            case "done":
                pending.claims.end(claim, "done")
                scores = outcome.scores
                assert scores is not None, f"{task} is done without scores"
                self.evaluated.append(scores)
                self.failed.discard(str(task))
                facts |= {"seconds": scores["seconds"], "alarms": len(scores["alarms"])}
                pending.log("evaluation_finished", **task.facts, **facts)
                for alarm in scores["alarms"]:
                    if alarm["kind"] == "drift":
                        pending.log("drift_alert", **task.facts, **alarm)
                self._report.evaluated(task, scores)
                # Otherwise the source would get the result only after the next look at it.
                self._mirror.push_soon()
            case "failed" | "damaged":
                facts = {"reason": outcome.reason, "final": outcome.is_final}
                pending.claims.end(claim, outcome.how, **facts, **outcome.facts)
                pending.log("evaluation_failed", **task.facts, attempt=task.attempts + 1, **facts)
                self.failed.add(str(task))
                self._report.remark(f"{task} failed: {outcome.reason}")
                if outcome.how == "damaged":
                    # It is tried again only when a file of the checkpoint changes.
                    pending.note_damage(task)
                if outcome.is_hopeless_here:
                    pending.presets.refuse(task.preset)
                elif outcome.pause_seconds:
                    pending.presets.refuse(task.preset, outcome.pause_seconds)
            case "late":
                pending.claims.end(claim, "released", reason="another server was first")
            case "gone" | "released":
                pending.claims.end(claim, outcome.how)


class Turns:
    """Lets runs take turns of a few checkpoints, so that none waits until the others' runs end."""

    def __init__(self) -> None:
        self._steps: set[int] = set()  # evaluated in the present turn
        self._served: list[RunDirectory] = []  # the run whose turn it is comes last

    def note(self, task: claims.EvaluationTask) -> None:
        """Record that this task is evaluated, which counts for the turn of its run."""
        if self.rank(task) >= 0:
            self._steps = set()
            self._served = [*(run for run in self._served if run != task.run), task.run]
        self._steps.add(task.step)

    def rank(self, task: claims.EvaluationTask) -> int:
        """Return a task's sort key: first this turn's run, then the run not served for longest."""
        has_room = len(self._steps) < _CHECKPOINTS_PER_TURN or task.step in self._steps
        if has_room and self._served[-1:] == [task.run]:
            return -1
        return self._served.index(task.run) + 1 if task.run in self._served else 0


@dataclass(frozen=True)
class ServerSnapshot:
    """The state of the server, published by its loop for the thread that writes heartbeats."""

    runs: tuple[PendingTasks, ...] = ()
    task: claims.EvaluationTask | None = None  # task whose checkpoint is needed now
    doing: Mapping[str, Any] | None = None
    ended: str | None = None  # when the server ended


class Keeper:
    """Thread that writes each second what the server does and which checkpoints it needs kept.

    It needs the checkpoint that it samples and the oldest that wait. All servers need the same
    waiting ones, so that more servers keep no more on disk. If only the newest checkpoint is
    wanted, no waiting one is needed; nor is one of a mirror, which deletes nothing that waits.

    The server's loop publishes a snapshot when something changes. The thread looks for waiting
    checkpoints by itself, as the training saves and deletes while the loop samples.
    """

    def __init__(self, server: str, options: ServerOptions, report: ServerReport) -> None:
        self._server, self._options, self._report = server, options, report
        self._published = ServerSnapshot()
        self._waiting: dict[RunDirectory, set[int]] = {}  # written by the thread
        self._num_beats, self._written_at = 0, float("-inf")
        self._written: dict[RunDirectory, list[int]] = {}
        self._writing = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="keeper", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()
        # A server that has ended needs no checkpoint.
        self._waiting.clear()
        self.publish(task=None, ended=fsio.now())
        self._beat()

    def publish(self, **changes: Any) -> None:
        """Replace fields of the server's published state."""
        # Only the loop publishes, and by one assignment: the thread sees the old snapshot or the
        # new one, and needs no lock.
        self._published = replace(self._published, **changes)

    @contextmanager
    def working_on(self, task: claims.EvaluationTask) -> Iterator[claims.Progress]:
        """Publish in the heartbeat that a task is being done in the block, with its progress."""
        doing = {**task.facts, "run": str(task.run.path), "since": fsio.now()}
        self.publish(doing={**doing, "what": "claim"})

        def show(what: str, done: int, total: int) -> None:
            self.publish(doing={**doing, "what": what, "done": done, "of": total})

        try:
            yield show
        finally:
            self.publish(doing=None)

    @contextmanager
    def needing(self, task: claims.EvaluationTask) -> Iterator[None]:
        """Protect a task's checkpoint from deletion in the block; first writes the heartbeat.

        The checkpoint may have been deleted before that: check that it exists afterwards.
        """
        self.publish(task=task)
        try:
            self._write(evaluation_dir.ServerDirectory(task.run, self._server))
            yield
        finally:
            self.publish(task=None)

    def _keep(self) -> None:
        look_at = 0.0
        while not self._is_over.wait(min(_BEAT_SECONDS, self._options.look_seconds)):
            begun, runs = time.monotonic(), self._published.runs
            if begun >= look_at and self._options.backlog.takes_all:
                self._look(runs)
                # On a slow file system looks are rarer, so that they do not burden the training.
                look_at = time.monotonic() + _PAUSE_PER_LOOK * (time.monotonic() - begun)
            needs = {each.run: self._needs(each.run) for each in runs}
            # Changed needs are written at once: the training may be about to delete a checkpoint.
            if needs != self._written or begun - self._written_at >= _BEAT_SECONDS:
                self._written, self._written_at = needs, begun
                self._beat()

    def _look(self, runs: Sequence[PendingTasks]) -> None:
        """Find checkpoints that wait to be sampled; an unreadable run keeps those found before."""
        waiting = {each.run: self._waiting.get(each.run, set()) for each in runs}
        for pending in runs:
            with self._report.log_errors(pending.run.path):
                if not pending.is_mirror:
                    tasks, needed = pending.look(), self._needs(pending.run)
                    waiting[pending.run] = waiting_steps(pending, tasks, needed)
        self._waiting = waiting

    def _beat(self) -> None:
        self._num_beats += 1
        for pending in self._published.runs:
            with self._report.log_errors(pending.run.path), suppress(OSError):  # a full disk
                self._write(pending.directory)

    def _write(self, directory: evaluation_dir.ServerDirectory) -> None:
        # Two threads write: the loop before it samples, and the keeper at each beat.
        with self._writing:
            record = {
                "server": self._server,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "time": fsio.now(),
                "beat": self._num_beats,
                "doing": self._published.doing,
                "needs": self._needs(directory.run),
                "ended": self._published.ended,
            }
            # A run that was deleted must not come back as a folder with a heartbeat.
            if directory.run.exists():
                directory.write_heartbeat(record)

    def _needs(self, run: RunDirectory) -> list[int]:
        task, steps = self._published.task, self._waiting.get(run, set())
        return sorted(steps | {task.step} if task is not None and task.run == run else steps)


class MirrorThread:
    """Thread that copies checkpoints from a source and sends results; idle without a source."""

    def __init__(self, options: ServerOptions, server: str, report: ServerReport) -> None:
        self._options, self._server, self._report = options, server, report
        self._mirror: Mirror | None = None
        if options.source is not None:
            self._mirror = open_mirror(options.source, options.places[0], server)
        self._pending: dict[RunDirectory, PendingTasks] = {}
        self._remote: list[RemoteRun] = []
        self.is_settled = self._mirror is None
        self._is_over, self._wake = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def push_soon(self) -> None:
        self._wake.set()

    def __enter__(self) -> Self:
        if self._mirror is not None:
            run, mirror = self._run, (self._mirror,)
            self._thread = threading.Thread(target=run, args=mirror, name="mirror", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._mirror is None or self._thread is None:
            return
        self._is_over.set()
        self._wake.set()
        if not self.is_settled:  # the server was asked to end: do not wait for an hour's pull
            self._mirror.interrupt()
        self._thread.join()
        self._push(self._mirror)
        with self._report.log_errors("leaving the mirror"):
            self._mirror.close()

    def _run(self, mirror: Mirror) -> None:
        due = 0.0
        while not self._is_over.is_set():
            if time.monotonic() >= due:
                self._pull_all(mirror)
                due = time.monotonic() + self._options.every_seconds
            else:
                self._push(mirror)
            self._wake.wait(max(0.0, due - time.monotonic()))
            self._wake.clear()

    def _pull_all(self, mirror: Mirror) -> None:
        """Read the source, and copy wanted checkpoints; an error ends this round only."""
        try:
            # Asked before the look: what a run had saved by its end is then seen by that look.
            were_over = bool(self._remote) and all(
                self._of(each.mirror).end.is_reached() for each in self._remote
            )
            self._remote = mirror.look()
            for remote in self._remote:
                self._pull(mirror, remote)
            self.is_settled = were_over or not self._options.follows
        except Exception as error:  # whatever it is, it must not end this thread
            if not self._is_over.is_set():  # else it was interrupted
                known = isinstance(error, errors.LongtakeError)
                reason = str(error) if known else f"{raised_at(error)}: {error}"
                for remote in self._remote:
                    pending = self._of(remote.mirror)
                    pending.log("pull_failed", source=str(self._options.source), reason=reason)
                if self._options.follows:
                    self._report.remark(f"{reason} It is tried again.")
                else:
                    self._report.wrong(reason)
                    self.is_settled = True
        self._push(mirror)

    def _pull(self, mirror: Mirror, remote: RemoteRun) -> None:
        pending, source = self._of(remote.mirror), str(self._options.source)
        steps = list(dict.fromkeys(task.step for task in pending.look(remote.index)))
        for step in steps:
            if self._is_over.is_set():
                return
            for pulled in mirror.pull(remote, [step]):
                facts = {**asdict(pulled), "seconds": round(pulled.seconds, 3)}
                pending.log("checkpoint_synced", source=source, **facts)
        # Checkpoints that are here wait for their turn, even if the source has deleted them.
        mirror.prune(remote.mirror, {*steps, *(task.step for task in pending.look())})
        pending.report_missed(source=source)

    def _push(self, mirror: Mirror) -> None:
        for remote in self._remote:
            with self._report.log_errors(remote.mirror.path):
                try:
                    mirror.push(remote)
                except errors.LongtakeError as error:
                    self._report.remark(f"{error}")

    def _of(self, run: RunDirectory) -> PendingTasks:
        if run not in self._pending:
            self._pending[run] = PendingTasks(run, self._server, self._options, self._report)
        return self._pending[run]


def _lower_priority(device_type: str) -> None:
    """Lower this process's priority on a CPU, to leave the cores to a training on this machine.

    Take half of the cores, because threads of a process of low priority spin while they wait for
    one of them that gets no core: on two cores that a training used as well, eight videos of the
    demo took 1.0 to 2.0 s in one thread, and 0.8 to 39 s in two.
    """
    import torch

    if device_type == "cpu":
        os.nice(_NICE)
        torch.set_num_threads(min(torch.get_num_threads(), max(1, process.num_cores() // 2)))

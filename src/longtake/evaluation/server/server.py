"""The evaluation server: looks for whole checkpoints, and evaluates one after another; torch-free.

What is done is known from the run directories alone, so that any number of servers can come, die
and share the work. Nothing here can slow or break the training.
"""

import os
import socket
from contextlib import ExitStack
from typing import Any

from longtake.evaluation.server.attempt import Outcome, Work, attempt, forget_server, said
from longtake.evaluation.server.claims import Claim
from longtake.evaluation.server.keeper import Keeper
from longtake.evaluation.server.mishaps import Mishaps
from longtake.evaluation.server.options import Options
from longtake.evaluation.server.pulls import Pulls
from longtake.evaluation.server.report import Report
from longtake.evaluation.server.runs import find_runs, is_over
from longtake.evaluation.server.stop import Stop
from longtake.evaluation.server.task import Task
from longtake.evaluation.server.tellers import Tellers
from longtake.evaluation.server.turns import Turns
from longtake.evaluation.server.view import View
from longtake.evaluation_dir import Scores
from longtake.run_dir import RunDirectory
from longtake.trust import is_mirror


def own_name() -> str:
    """The name of this process as a server."""
    return f"{socket.gethostname()}-{os.getpid()}"


class Server:
    """One process that evaluates checkpoints.

    Args:
        options: what it is asked to do.
        work: what it does with a checkpoint.
        report: who is told.
        stop: whether it shall end.

    Attributes:
        name: by which others know it.
        evaluated: what it has made.
        failed: what it has failed at, and nobody has done since, as far as it knows.
    """

    def __init__(self, options: Options, work: Work, report: Report, stop: Stop) -> None:
        self.name = own_name()
        self.evaluated: list[Scores] = []
        self.failed: set[str] = set()
        self._options, self._work, self._report, self._stop = options, work, report, stop
        self._views: dict[RunDirectory, View] = {}
        self._turns = Turns()
        self._mishaps = Mishaps(report)
        self._keeper = Keeper(self.name, options, self._mishaps)
        self._pulls = Pulls(options, self.name, report)
        self._tellers = Tellers()

    def serve(self) -> None:
        """Evaluate what is due, until nothing is, or for as long as it is asked to."""
        with ExitStack() as stack:
            stack.enter_context(self._tellers)
            stack.enter_context(self._pulls)
            stack.enter_context(self._keeper)
            while not self._stop.wanted:
                is_over = self._is_over()
                self._find_runs()
                due = self._due()
                if self._work_on_first(due):
                    continue
                if is_over and not self._is_resting(due):
                    break
                self._stop.wait(self._options.look_seconds)

    def _find_runs(self) -> None:
        """Take in runs that are new, and forget those that were deleted."""
        runs = list(self._views)
        with self._mishaps.kept_to("looking for runs"):
            runs = find_runs(self._options.places)
            self._tellers.serve([run for run in runs if not is_mirror(run.path)])  # as they train
        self._views = {run: self._views.get(run) or self._view(run) for run in runs}
        self._keeper.serve(list(self._views.values()))
        if not runs and self._options.follows:
            places = ", ".join(map(str, self._options.places))
            self._report.remark(f"There is no run in {places} yet.")

    def _view(self, run: RunDirectory) -> View:
        return View(run, self.name, self._options, self._report)

    def _is_over(self) -> bool:
        """Whether it may end when nothing is due; asked before it looks for what is."""
        if not self._options.follows:
            return self._pulls.are_settled
        if not self._options.until_finished or not self._views:
            return False
        are_over = False
        with self._mishaps.kept_to("events of runs"):
            are_over = all(map(is_over, self._views))
        return are_over and self._pulls.are_settled

    def _due(self) -> list[Task]:
        """What is due in all runs that can be looked at; and tell of what was missed."""
        by_run = []
        for run, view in self._views.items():
            with self._mishaps.kept_to(run.path):
                pending = view.due()
                by_run.append(pending)
                self._keeper.promise(view, pending)
                view.tell_missed()
        return self._turns.in_order(by_run)

    def _is_resting(self, due: list[Task]) -> bool:
        """Whether something that has failed is to be tried again soon."""
        return any(self._views[task.run].claims.rests(task) for task in due)

    def _work_on_first(self, due: list[Task]) -> bool:
        """Evaluate the first task that this server can claim; whether there was one."""
        for task in due:
            with self._mishaps.kept_to(task.run.path):
                if self._work_on(self._views[task.run], task):
                    return True
        return False

    def _work_on(self, view: View, task: Task) -> bool:
        """Evaluate a task, if this server can claim it now."""
        view.claims.settle()
        claim = None if view.rests(task) else self._take(view, task)
        if claim is not None:
            self._turns.served(task)
            self._evaluate(view, claim)
        return claim is not None

    def _take(self, view: View, task: Task) -> Claim | None:
        try:
            claim = view.claims.take(task)
        except OSError as error:
            self.failed.add(str(task))
            self._report.remark(f"{task} cannot be claimed: {said(error)}")
            return None
        if claim is None or claim.lost_by is None:
            return claim
        view.note("evaluation_lost", **task.facts, by=claim.lost_by)
        return None if self._gives_up(view, claim) else claim

    def _gives_up(self, view: View, claim: Claim) -> bool:
        """Whether enough servers have died over it."""
        attempts = view.claims.attempts(claim.task)
        if attempts.is_final:
            reason = f"the server {claim.lost_by} died over it, after {attempts.number} attempts"
            forget_server(claim.task.run, claim.lost_by, self.name)
            self._end(view, claim, Outcome("failed", reason=reason, is_final=True))
        return attempts.is_final

    def _evaluate(self, view: View, claim: Claim) -> None:
        task = claim.task
        view.note("evaluating", **task.facts)
        with self._keeper.working_on(task), self._report.bar(task) as bar:

            def shown(what: str, done: int, of: int) -> None:
                bar(what, done, of)
                self._keeper.progress(what, done, of)

            outcome = attempt(
                claim, self._keeper, self._work, self._stop, shown, self._options.stuck_seconds
            )
        self._end(view, claim, outcome)

    def _end(self, view: View, claim: Claim, outcome: Outcome) -> None:
        """Give a claim back, and tell how it ended."""
        task = claim.task
        match outcome.how:
            case "done":
                view.claims.end(claim, "done")
                self._tell_scores(view, task, outcome.scores)
            case "failed" | "damaged":
                self._tell_failure(view, claim, outcome)
            case "late":
                view.claims.end(claim, "released", reason="another server was first")
            case "gone" | "released":
                view.claims.end(claim, outcome.how)

    def _tell_scores(self, view: View, task: Task, scores: Scores | None) -> None:
        assert scores is not None, f"{task} is done without scores"
        self.evaluated.append(scores)
        self.failed.discard(str(task))
        facts: dict[str, Any] = {"seconds": scores["seconds"], "alarms": len(scores["alarms"])}
        view.note("evaluated", **task.facts, **facts)
        for alarm in scores["alarms"]:
            if alarm["kind"] == "drift":
                view.note("drifting", **task.facts, **alarm)
        self._report.evaluated(task, scores)
        self._pulls.push_soon()

    def _tell_failure(self, view: View, claim: Claim, outcome: Outcome) -> None:
        task, attempts = claim.task, claim.task.attempts + 1
        facts: dict[str, Any] = {"reason": outcome.reason, "final": outcome.is_final}
        view.claims.end(claim, outcome.how, **facts, **outcome.facts)
        self.failed.add(str(task))
        view.note("evaluation_failed", **task.facts, attempt=attempts, **facts)
        self._report.remark(f"{task} failed: {outcome.reason}")
        if outcome.how == "damaged":
            view.note_damage(task)
        if outcome.is_hopeless_here:
            view.refuse(task.preset)
        elif outcome.pause_seconds:
            view.refuse(task.preset, outcome.pause_seconds)

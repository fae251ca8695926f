"""torch's elastic agent, which starts this node's ranks, with a better mind of when to restart.

What it changes: ranks that a user's mistake, or a wish, has ended are not started again; restarts
are counted since the last checkpoint, so that weeks may have many and a crash loop ends; and ranks
that wait for one that is lost are given some seconds to say so, not half a minute.
"""

import os
import signal
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rich.console import Console
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from longtake.failures import RankFailure, failure_of, failures_of_launch, failures_of_processes
from longtake.fsio import now
from longtake.heartbeat import Heartbeat, heartbeat_dir, read_heartbeats
from longtake.launch.ending import STOPS, Ended, code_in_words, exit_code_of, judge, last_words
from longtake.launch.logs import RankLogs
from longtake.launch.order import Order
from longtake.launch.ranks import await_end, ended_badly, kernel_kills, tell
from longtake.launch.stop import SECONDS_TO_SAVE, LaunchStop
from longtake.run_dir import LAUNCH_VARIABLE

_SECONDS_AFTER_A_FAILURE = 5.0
"""In which the other ranks find out who failed, and say so."""
_SECONDS_TO_MAKE_ROOM = 30.0
"""In which ranks begin to save before all are started again because a node has come."""
_SAVES = ("checkpoint", "save")


class Agent(LocalElasticAgent):
    """Starts the ranks of this node, again where that helps, until they have ended.

    Args:
        spec: what torch wants to know of them.
        logs: where they say what they say.
        order: what is launched.
        stop: whether somebody wants it to end.
        console: where a person looks.

    Attributes:
        ended: how the ranks of this node ended last, if not well.
    """

    def __init__(
        self, spec: WorkerSpec, logs: RankLogs, order: Order, stop: LaunchStop, console: Console
    ) -> None:
        super().__init__(spec, logs, log_line_prefix_template="${role_name}")  # which is empty
        self.ended: Ended | None = None
        self._logs, self._order, self._stop, self._console = logs, order, stop, console
        self._newest = self._newest_checkpoint()
        self._kills, self._began = 0, ""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._stop.hold()
        self._kills, self._began = kernel_kills(), now()
        if self._order.endpoint:
            os.environ[LAUNCH_VARIABLE] = _launch_of_all_nodes(worker_group.store)
        pids: dict[int, Any] = super()._start_workers(worker_group)
        self._stop.begin(pids.values())
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """As torch does it; but first those of a rank that has failed find out, and end."""
        ranks = {worker.id: worker.global_rank for worker in worker_group.workers}
        if codes := ended_badly(ranks):
            killed = self._let_others_end(codes, ranks)
            codes |= {pid: code for pid, code in ended_badly(ranks).items() if pid not in killed}
            self.ended = self._judge(codes, ranks)
            self._decide(self.ended)
        elif self._stop.is_overdue:
            tell(ranks, signal.SIGKILL)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state.name != "HEALTHY":
            self._stop.end()
        return result

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Before another start: ranks that still run may save; if they hang, not for long."""
        pids = [worker.id for worker in worker_group.workers if worker.id]
        tell(pids, signal.SIGTERM)
        left, seconds = await_end(pids, _SECONDS_TO_MAKE_ROOM), _SECONDS_TO_MAKE_ROOM
        while self._are_saving(left) and seconds < SECONDS_TO_SAVE:
            left, seconds = await_end(left, _SECONDS_TO_MAKE_ROOM), seconds + _SECONDS_TO_MAKE_ROOM
        tell(left, signal.SIGKILL)
        super()._stop_workers(worker_group)
        self._stop.end()

    def _are_saving(self, pids: list[int]) -> bool:
        return any(pulse.phase in _SAVES for pulse in self._pulses(pids))

    def _let_others_end(self, codes: dict[int, int], ranks: dict[int, int]) -> list[int]:
        """Write down what those cannot say that were killed, and wait for the others.

        Returns:
            Those that did not end, and had to be killed.
        """
        if self._stop.first_signal is None:
            self._leave_trail(codes, ranks)
        is_stop = self._stop.first_signal is not None or any(
            code in STOPS for code in codes.values()
        )
        late = await_end(ranks, SECONDS_TO_SAVE if is_stop else _SECONDS_AFTER_A_FAILURE)
        tell(late, signal.SIGKILL)
        return late

    def _leave_trail(self, codes: dict[int, int], ranks: dict[int, int]) -> None:
        run = self._order.run
        known = {failure.pid for failure in failures_of_processes(run, ranks, self._began)}
        for pulse in self._pulses(codes):
            code = codes[pulse.pid]
            if pulse.pid in known or pulse.phase == "ended" or pulse.world_size == 1:
                continue
            said = last_words(self._log(ranks[pulse.pid]))
            words = code_in_words(code) + (f"; it said last: {said}" if said else "")
            if code == -signal.SIGKILL and kernel_kills() > self._kills:
                words = f"the kernel killed it, or another process: out of memory; {words}"
            failure_of(
                pulse, "killed" if code < 0 else "ended", words, str(self._log(pulse.rank))
            ).record(run)

    def _judge(self, codes: dict[int, int], ranks: dict[int, int]) -> Ended:
        by_rank = {ranks[pid]: self._meant(code) for pid, code in codes.items()}
        logs = {rank: self._log(rank) for rank in ranks.values()}
        return judge(by_rank, self._trail(ranks), logs)

    def _meant(self, code: int) -> int:
        """A rank that the signal has ended before it was ready for it has stopped all the same."""
        asked = self._stop.first_signal
        killed = -signal.SIGKILL if self._stop.is_urgent else None
        return exit_code_of(asked) if asked is not None and code in (-asked, killed) else code

    def _trail(self, ranks: dict[int, int]) -> list[RankFailure]:
        """Failures of this launch on all nodes."""
        run = self._order.run
        launches = [pulse.launch for pulse in self._pulses(ranks)]
        launches += [failure.launch for failure in failures_of_processes(run, ranks, self._began)]
        launch = next(filter(None, launches), None)
        return [] if launch is None else failures_of_launch(run, launch)

    def _decide(self, ended: Ended) -> None:
        """Whether the ranks are started again; a new checkpoint allows for all restarts anew."""
        newest, is_asked = self._newest_checkpoint(), self._stop.first_signal is not None
        if newest != self._newest:
            self._newest, self._remaining_restarts = newest, self._order.max_restarts
        if is_asked or ended.kind == "mistake":
            self._remaining_restarts = 0
        elif ended.kind == "stopped":  # on another node; those that are left may go on without it
            self._remaining_restarts = self._order.max_restarts + 1 if self._order.is_elastic else 0
        if ended.kind == "crashed" and not is_asked:
            self._say_what_now(ended)

    def _say_what_now(self, ended: Ended) -> None:
        left, allowed = self._remaining_restarts, self._order.max_restarts
        since = "" if self._newest is None else f" since the checkpoint of step {self._newest}"
        what = f"All ranks are started again ({allowed - left + 1} of {allowed} times{since})."
        if not left:
            what = f"They were started again {allowed} times{since}: this is the end."
        self._console.print(f"{ended.words}\n{what}", markup=False)

    def _pulses(self, pids: Collection[int]) -> list[Heartbeat]:
        hearts = read_heartbeats(heartbeat_dir(self._order.run.path))
        return [pulse for pulse in hearts if pulse.role == "rank" and pulse.pid in pids]

    def _log(self, rank: int) -> Path:
        return self._logs.paths[rank]

    def _newest_checkpoint(self) -> int | None:
        return max(self._order.run.checkpoint_steps(), default=None)


def _launch_of_all_nodes(store: Any) -> str:
    """The launch's name: the first node that asks chooses it, in the store where nodes meet."""
    while hasattr(store, "underlying_store"):  # a PrefixStore: its prefix differs by start
        store = store.underlying_store
    own = os.environ[LAUNCH_VARIABLE]
    return str(store.compare_set("longtake/launch", "", own).decode())

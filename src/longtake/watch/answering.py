"""Answers requests, one after the other, in a thread of its own: dumping takes seconds.

Whoever asked passes the verdict. Should its watcher die meanwhile, every other one does so in its
place.
"""

import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Literal, TypeVar

from longtake.heartbeat import Pulse, read, read_all
from longtake.node_dir import NodeDump, Request, has_beaten
from longtake.watch import flight
from longtake.watch.actions import Actions
from longtake.watch.council import Council
from longtake.watch.disk import Disk
from longtake.watch.dumps import dump_node
from longtake.watch.post import Post
from longtake.watch.pruning import prune_answers, prune_requests
from longtake.watch.report import Reporter
from longtake.watch.requests import Alarm, Inbox, ask
from longtake.watch.stall import Expectations, Overdue, still_holds
from longtake.watch.verdict import Verdict

_LOOK_SECONDS = 1.0
_DISK_SECONDS = 3.0
_SECONDS_UNTIL_HEIRS = 5.0
_SECONDS_UNTIL_FORGOTTEN = 60.0

_T = TypeVar("_T")
Outcome = Literal["stalled", "went_on", "failed"]


@dataclass
class _Pending:
    """A stall of another node's, that waits for the verdict."""

    request: Request
    dump: NodeDump
    answered: float
    asker: Mapping[str, Any] | None
    asker_lived: float


class Answering:
    """Answers this node's alarms and all nodes' requests.

    Args:
        post: the watcher's.
        disk: reads and writes the run directory.
        reporter: is told of verdicts.
        expectations: what phases may take.
    """

    def __init__(
        self, post: Post, disk: Disk, reporter: Reporter, expectations: Expectations
    ) -> None:
        self._post, self._disk, self._reporter = post, disk, reporter
        self._expectations = expectations
        self._actions = Actions(post, reporter, expectations)
        self._council = Council(post, disk, reporter)
        self._inbox = Inbox(post.node)
        self._alarms: SimpleQueue[Alarm] = SimpleQueue()
        self._begun: SimpleQueue[Request] = SimpleQueue()
        self._outcomes: dict[str, Outcome] = {}
        self._pending: dict[str, _Pending] = {}
        self._token = ""
        self._end = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._work, name="answers", daemon=True)
        self.num_stalls = 0

    def start(self) -> None:
        """Begin to look for requests."""
        self._thread.start()

    def new_token(self, launch: str, step: int) -> str:
        """The name of a stall that nobody has asked about yet."""
        return self._inbox.new_token(launch, step)

    def alarm(self, alarm: Alarm) -> None:
        """Ask all nodes about a stall; returns at once."""
        self._alarms.put(alarm)
        self._wake.set()

    def take_begun(self) -> Request | None:
        """A stall that this node has begun to look into since, if any."""
        return _next(self._begun)

    def outcome(self, token: str) -> Outcome | None:
        """What became of a stall of this node's; None: it is looked into."""
        return self._outcomes.get(token)

    def close(self, seconds: float) -> None:
        """Finish what is being answered, for so long at most."""
        self._end.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _work(self) -> None:
        while not self._end.is_set():
            self._wake.wait(_LOOK_SECONDS)
            self._wake.clear()
            try:
                self._answer_all()
                self._follow_up()
            except Exception:  # whatever it is, the next stall is to be looked into as well
                self._outcomes[self._token] = "failed"
                self._reporter.say(f"a request was not answered:\n{traceback.format_exc()}")

    def _answer_all(self) -> None:
        requests = self._requests()
        while (alarm := _next(self._alarms)) is not None:
            launch = self._expectations.launch
            same = [each for each in requests if _is_stall_of(each, launch)]
            if same:  # another node was faster
                self._outcomes[alarm.request["token"]] = "went_on"
                continue
            self._answer(alarm.request, alarm)
            requests = [each for each in requests if each["token"] != alarm.request["token"]]
        for request in requests:
            self._answer(request, None)

    def _requests(self) -> list[Request]:
        try:
            found = self._disk.ask(lambda: self._inbox.look(self._expectations.launch), 2.0)
        except OSError:
            return []
        for reason in self._inbox.take_refused():
            self._reporter.tell("request_refused", is_alert=False, reason=reason)
        return found

    def _answer(self, request: Request, alarm: Alarm | None) -> None:
        token, reason = request["token"], request["reason"]
        self._token = token
        self._inbox.take(token)
        if alarm is not None:
            self._outcomes.pop(token, None)
            try:
                request = self._disk.ask(lambda: ask(self._post.run, request), _DISK_SECONDS)
            except OSError as error:
                self._reporter.say(f"{token}: other nodes cannot be asked: {error}")
        if reason == "stall":
            self._begun.put(request)
        self._reporter.say(f"{token}: dumping all processes ({reason}, asked by {request['by']})")
        before, since = self._council.beats(), time.monotonic()
        dump = self._dump(request)
        if reason != "stall":
            return
        if request["by"] == self._post.host and alarm is not None:
            self._conclude_own(alarm, request, dump, before, since)
        else:
            now, asker = time.monotonic(), before.get(request["by"])
            self._pending[token] = _Pending(request, dump, now, asker, now)

    def _dump(self, request: Request) -> NodeDump:
        post, token = self._post, request["token"]
        ranks = [pulse.rank for pulse in read_all(post.folder) if pulse.role == "rank"]
        before = flight.stamps(post.folder, ranks)
        flight.ask(post.folder, ranks)
        dump = dump_node(
            post.folder,
            post.host,
            token,
            request["reason"],
            rounds=request["rounds"],
            round_seconds=post.section.round_seconds,
            native=bool(request.get("native")),
        )
        target = post.node.flight_path(token)
        try:
            self._disk.ask(
                lambda: flight.collect(post.folder, ranks, target, before), _DISK_SECONDS
            )
            self._disk.ask(lambda: post.node.write_dump(dump), _DISK_SECONDS)
            self._disk.ask(self._prune, _DISK_SECONDS)
        except OSError as error:
            self._reporter.say(f"{token}: the answer is not written: {error}")
        return dump

    def _prune(self) -> None:
        prune_answers(self._post.node)
        prune_requests(self._post.run, self._expectations.launch)

    def _conclude_own(
        self,
        alarm: Alarm,
        request: Request,
        dump: NodeDump,
        before: Mapping[str, Any],
        since: float,
    ) -> None:
        token = request["token"]
        if not self._still_holds(alarm.overdue):
            self._outcomes[token] = "went_on"
            self._reporter.say(f"{token}: {_who(alarm.overdue.pulse)} went on meanwhile")
            return
        dumps, silent = self._council.gather(request, dump, before, since)
        if self._still_holds(alarm.overdue):
            self._take_note_of(self._council.conclude(request, dumps, silent), request)
        else:
            self._outcomes[token] = "went_on"

    def _still_holds(self, overdue: Overdue) -> bool:
        pulse, now = read(overdue.pulse.path), time.monotonic()
        limit = None if pulse is None else self._expectations.limit_of(pulse, now)
        return still_holds(overdue, pulse, limit)

    def _take_note_of(self, verdict: Verdict, request: Request) -> None:
        self._pending.pop(verdict.token, None)
        self._outcomes[verdict.token] = "stalled"
        self.num_stalls += 1
        self._actions.act_on(verdict, request)

    def _follow_up(self) -> None:
        """Act on verdicts that others have passed; pass those that a dead watcher leaves."""
        for token, pending in list(self._pending.items()):
            if verdict := self._council.verdict(token):
                self._take_note_of(verdict, pending.request)
            elif self._is_orphaned(pending):
                self._reporter.say(f"{token}: the watcher of {pending.request['by']} is silent")
                request, answered = pending.request, pending.answered
                found = self._council.gather(request, pending.dump, self._council.beats(), answered)
                self._take_note_of(self._council.conclude(request, *found), request)
            elif time.monotonic() - pending.answered > _SECONDS_UNTIL_FORGOTTEN:
                del self._pending[token]  # it went on: there is no verdict

    def _is_orphaned(self, pending: _Pending) -> bool:
        asker = self._council.beats().get(pending.request["by"])
        if pending.asker is not None and has_beaten(pending.asker, asker):
            pending.asker_lived = time.monotonic()
        pending.asker = asker
        if asker is not None and asker.get("ended"):
            return False
        return time.monotonic() - pending.asker_lived > _SECONDS_UNTIL_HEIRS


def _next(queue: SimpleQueue[_T]) -> _T | None:
    return None if queue.empty() else queue.get()  # nobody else takes from it


def _is_stall_of(request: Request, launch: str) -> bool:
    return request["reason"] == "stall" and request.get("stall", {}).get("launch") == launch


def _who(pulse: Pulse) -> str:
    return f"{pulse.role} of rank {pulse.rank} (process {pulse.pid}, {pulse.phase})"

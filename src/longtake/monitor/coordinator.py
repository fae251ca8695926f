"""Coordination of a stall over all nodes: alarm, requests for stack dumps, and one diagnosis.

A stall has the same token on all nodes: launch, step, and the number of earlier stalls at that
step. The node that detects it writes requests/<token>.json once, and every node dumps the stacks of
its processes. Then the nodes may make the diagnosis in turn, beginning with the requester, so that
a dead watcher does not prevent it.
"""

import threading
import time
import traceback
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Literal

from longtake import node_dir, node_events
from longtake.errors import RecordError
from longtake.fsio import now, read_record, write_once
from longtake.heartbeat import Heartbeat, page_path, read_heartbeat, read_heartbeats
from longtake.monitor import dumps, flight_recorder, observe, reporting
from longtake.monitor.diagnosis import diagnose
from longtake.monitor.stall_record import StallDiagnosis
from longtake.run_dir import RunDirectory

StallOutcome = Literal["stalled", "cleared", "failed"]
_NO_LAUNCH = "start"  # in tokens of stalls before the ranks have met
_MAX_REQUEST_BYTES = 2**16
_LATE_REQUEST_SECONDS = 10.0  # how long the requester waits for dumps
_POLL_SECONDS, _POLL_DUMPS_SECONDS = 1.0, 0.2
_POLL_NEAR_SECONDS = 0.25  # when a stall is near
_ROUND_SECONDS = 0.5  # duration of a round of dumps, and of the watcher's scan before it
_TURN_SECONDS = 5.0  # delay from one node's turn to diagnose to the next one's
_FORGET_SECONDS = 60.0
_SECONDS_FOR_OTHERS = 3.0
_ALIVE_SECONDS = 2.5  # within which a living watcher writes a heartbeat
_READ_SECONDS, _READ_SECONDS_PER_NODE = 3.0, 0.05


# --- Requests.


def stall_request(
    target: reporting.WatchTarget, token: str, overdue: observe.Overdue, launch: str, step: int
) -> node_dir.DumpRequest:
    heartbeat = overdue.heartbeat
    alarm: node_dir.StallAlarm = {
        **{name: getattr(heartbeat, name) for name in ("role", "pid", "rank", "phase", "detail")},  # type: ignore[typeddict-item]
        "launch": launch,
        "step": step,
        "seconds": round(heartbeat.seconds, 3),
        "host": target.host,
        "limit": round(overdue.limit, 3),
    }
    return node_dir.DumpRequest(
        token=token,
        time=now(),
        by=target.host,
        reason="stall",
        rounds=target.settings.rounds,
        native=True,
        stall=alarm,
    )


def write_request(run: RunDirectory, request: node_dir.DumpRequest) -> node_dir.DumpRequest:
    """Write a request for stack dumps, or return another node's request with the same token."""
    path = node_dir.request_path(run, request["token"])
    # Two nodes may raise the alarm at the same moment: the first request is valid for both.
    if not write_once(path, request):
        with suppress(RecordError):
            return read_record(path, node_dir.DumpRequest, _MAX_REQUEST_BYTES) or request
    return request


def run_step(heartbeat: Heartbeat, heartbeats: Iterable[Heartbeat]) -> int:
    """Return the global step at which a process is; for a decode worker, its rank's step."""
    if heartbeat.role == "rank":
        return heartbeat.step
    ranks = [each for each in heartbeats if each.role == "rank"]
    own = [each.step for each in ranks if each.rank == heartbeat.rank]
    return max(own or [each.step for each in ranks] or [0])


class RequestQueue:
    """Finds requests for stack dumps that this node has not answered.

    Of the requests that are older than this watcher it takes recent ones, whose requester still
    waits, and stalls of the current launch without a diagnosis: the watcher before this one may
    have died.
    """

    def __init__(self, node: node_dir.NodeDirectory) -> None:
        self._node, self._run = node, node.run
        self._seen: set[str] = set()
        self._has_looked = False
        self._refused: list[str] = []

    def new_token(self, launch: str, step: int) -> str:
        """Return a token that identifies a new stall on all nodes, and that no request has yet."""
        tokens = (f"stall_{launch or _NO_LAUNCH}_{step:08d}_{number}" for number in count())
        return next(token for token in tokens if token not in self._seen)

    def take(self, token: str) -> None:
        self._seen.add(token)

    def look(self, launch: str) -> list[node_dir.DumpRequest]:
        """Read this launch's unanswered requests for dumps from the run directory, by time."""
        folder = node_dir.requests_path(self._run)
        names = {path.stem for path in folder.glob("[!.]*.json")} if folder.is_dir() else set()
        found = (self._read(name) for name in names - self._seen)
        requests = sorted((each for each in found if each), key=lambda each: each["time"])
        # Requests of former launches, and those answered by an earlier watcher, are not answered
        # again.
        if not self._has_looked:
            self._has_looked = True
            self._seen |= {each["token"] for each in requests if not self._is_open(each, launch)}
            requests = [each for each in requests if each["token"] not in self._seen]
        return requests

    def take_refused(self) -> list[str]:
        refused, self._refused = self._refused, []
        return refused

    def _read(self, name: str) -> node_dir.DumpRequest | None:
        path = node_dir.request_path(self._run, name)
        try:
            request = read_record(path, node_dir.DumpRequest, _MAX_REQUEST_BYTES)
            if request is None:
                return None
            if request["token"] != name:
                raise RecordError(path, f"its token is {request['token']!r}, expected its name")
            if request["reason"] == "stall" and "stall" not in request:
                raise RecordError(path, "its reason is a stall, but it has no field `stall`")
        except RecordError as error:
            # Anybody who can write to the run directory can write a request: it is reported once.
            self._seen.add(name)
            self._refused.append(str(error))
            return None
        return request

    def _is_open(self, request: node_dir.DumpRequest, launch: str) -> bool:
        token = request["token"]
        if request["reason"] != "stall":
            return self._is_awaited(token)
        of = request["stall"]["launch"] if "stall" in request else None
        is_ours = of == launch if launch else self._is_awaited(token)
        return is_ours and not node_dir.diagnosis_path(self._run, token).exists()

    def _is_awaited(self, token: str) -> bool:
        """Return True if a dump was requested just before this watcher began, by file times.

        Both times are set by the disk's server, so the clocks of nodes do not matter.
        """
        try:
            begun = self._node.events_path.stat().st_mtime
            asked = node_dir.request_path(self._run, token).stat().st_mtime
        except OSError:
            return False
        return asked > begun - _LATE_REQUEST_SECONDS and not self._node.dump_path(token).exists()


# --- Collecting dumps and concluding.


def wait_for_dumps(
    disk: reporting.RunDirThread,
    token: str,
    before: Mapping[str, Any],
    since: float,
    seconds: float,
    launch: str | None = None,
) -> dict[str, bool]:
    """Wait until every node with a living watcher has written its stack dump for a request.

    Args:
        disk: thread for the run directory.
        token: token of the request.
        before: heartbeats of all nodes at `since`.
        since: time of the request, by `time.monotonic`.
        seconds: limit of the wait.
        launch: wait only for other nodes of this launch; None: for all nodes.

    Returns:
        Nodes without a dump, by host, and True if their watcher lives or may live.
    """
    run, end = disk.node.run, time.monotonic() + seconds

    def without_dump() -> dict[str, dict[str, Any]]:
        def is_awaited(host: str, heartbeat: Mapping[str, Any]) -> bool:
            is_other = host != disk.node.host and heartbeat.get("launch") == launch
            return not heartbeat.get("ended") and (launch is None or is_other)

        return {
            host: each
            for host, each in node_dir.node_heartbeats(run).items()
            if is_awaited(host, each)
            and not node_dir.NodeDirectory(run, host).dump_path(token).exists()
        }

    missing: dict[str, bool] = {}
    while True:
        with suppress(OSError):
            beats = disk.ask(without_dump)
            # Until a living watcher must have written a heartbeat, every watcher may be alive.
            is_known = time.monotonic() - since > _ALIVE_SECONDS
            missing = {
                host: not is_known or node_dir.has_beaten(before.get(host), each)
                for host, each in beats.items()
            }
        if not any(missing.values()) or time.monotonic() >= end:
            return missing
        time.sleep(_POLL_DUMPS_SECONDS)


def read_dumps(
    disk: reporting.RunDirThread, token: str
) -> tuple[list[node_dir.NodeDump], list[str]]:
    """Read the stack dumps of the nodes for a request, one by one, until time is up.

    Returns:
        The dumps, and the hosts whose dump was not read in time.
    """
    run, found = disk.node.run, list[node_dir.NodeDump]()
    interner, begun = dumps.StackInterner(), time.monotonic()
    try:
        nodes = disk.ask(lambda: nodes_with_dump(run, token), _READ_SECONDS)
    except OSError:
        return [], []
    limit = _READ_SECONDS + _READ_SECONDS_PER_NODE * len(nodes)
    # One call for each node, so that a limit applies, and those read so far are not lost.
    for number, node in enumerate(nodes):
        left, unread = begun + limit - time.monotonic(), [each.host for each in nodes[number:]]
        if left <= 0:
            return found, unread
        try:
            dump = disk.ask(partial(node_dir.read_dump, node.dump_path(token)), left)
        except OSError:
            return found, unread
        if dump:
            found.append(interner.intern(dump))
    return found, []


def nodes_with_dump(run: RunDirectory, token: str) -> list[node_dir.NodeDirectory]:
    return [node for node in node_dir.all_nodes(run) if node.dump_path(token).exists()]


def collect_dumps(
    disk: reporting.RunDirThread,
    request: node_dir.DumpRequest,
    own: node_dir.NodeDump,
    before: Mapping[str, Any],
    since: float,
) -> tuple[list[node_dir.NodeDump], list[str]]:
    """Collect the nodes' stack dumps for a stall, and the hosts of its launch without one."""
    token, launch = request["token"], str(request.get("stall", {}).get("launch", ""))
    missing = wait_for_dumps(disk, token, before, since, _SECONDS_FOR_OTHERS, launch)
    found, unread = read_dumps(disk, token)
    # The own dump from memory: the disk may have refused it.
    by_host = {dump["host"]: dump for dump in found} | {own["host"]: own}
    silent = [host for host in dict.fromkeys([*missing, *unread]) if host not in by_host]
    return list(by_host.values()), silent


def turn_of(host: str, asker: str, answered: Iterable[str]) -> int:
    """Return a node's turn to diagnose a stall: first the requester, then nodes with a stack dump.

    They do not diagnose at the same time: the dumps of a thousand nodes are gigabytes, read from
    one disk.
    """
    order = [asker, *sorted(set(answered) - {asker})]
    return order.index(host) if host in order else len(order)


def read_diagnosis(disk: reporting.RunDirThread, token: str) -> StallDiagnosis | None:
    """Read the published diagnosis of a stall; None: it is missing or unreadable."""
    path = node_dir.diagnosis_path(disk.node.run, token)
    with suppress(OSError, RecordError):
        return disk.ask(lambda: read_record(path, StallDiagnosis))
    return None


@dataclass
class _OpenStall:
    """A stall for which this node has dumped its stacks and that has no diagnosis yet."""

    request: node_dir.DumpRequest
    dump: node_dir.NodeDump  # this node's
    before: Mapping[str, Any]  # heartbeats of the other nodes at the request
    since: float  # time of the request, by time.monotonic()
    dumped_at: float
    turn: int | None = None  # this node's place in the order of diagnosis; None: not known yet


class DumpService:
    """Dumps stacks for alarms of this node and requests of all nodes, in a thread of its own."""

    def __init__(
        self,
        target: reporting.WatchTarget,
        disk: reporting.RunDirThread,
        reporter: reporting.EventReporter,
        timeouts: observe.PhaseTimeouts,
    ) -> None:
        self.num_stalls = 0
        self._target, self._disk, self._reporter = target, disk, reporter
        self._timeouts = timeouts
        self._actions = reporting.StallActions(target, reporter, timeouts)
        self._requests = RequestQueue(target.node)
        self._alarms: deque[node_dir.DumpRequest] = deque()
        self._begun: deque[node_dir.DumpRequest] = deque()
        self._outcomes: dict[str, StallOutcome] = {}
        self._open: dict[str, _OpenStall] = {}
        self._token = ""
        rounds, seconds = target.settings.rounds, target.settings.round_seconds
        self._early = dumps.EarlyRounds(target.folder, rounds, seconds)
        self.lead_seconds = (rounds - 1) * seconds + _ROUND_SECONDS
        self._is_near = False
        self._end = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._work, name="dumps", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def new_token(self, launch: str, step: int) -> str:
        return self._requests.new_token(launch, step)

    def raise_alarm(self, request: node_dir.DumpRequest) -> None:
        self._alarms.append(request)
        self._wake.set()

    def prepare(self, *, is_near: bool) -> None:
        """Begin to dump stacks early, while an alarm may come within `lead_seconds`."""
        if is_near and not self._is_near:
            self._wake.set()
        self._is_near = is_near

    def take_begun(self) -> list[node_dir.DumpRequest]:
        return [self._begun.popleft() for _ in range(len(self._begun))]

    def outcome(self, token: str) -> StallOutcome | None:
        return self._outcomes.get(token)

    def close(self, seconds: float) -> None:
        """Stop answering requests for stack dumps, and wait up to `seconds` for the current one."""
        self._end.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _work(self) -> None:
        while not self._end.is_set():
            self._wake.wait(_POLL_NEAR_SECONDS if self._is_near else _POLL_SECONDS)
            self._wake.clear()
            try:
                self._answer_requests()
                self._conclude_stalls()
                if self._is_near:
                    self._early.collect()
                else:
                    self._early.forget()
            except Exception:  # whatever it is, the next stall must still be answered
                self._outcomes[self._token] = "failed"
                self._open.pop(self._token, None)
                self._reporter.log(f"a request was not answered:\n{traceback.format_exc()}")

    def _answer_requests(self) -> None:
        launch = self._timeouts.launch
        requests = self._disk.try_ask(lambda: self._requests.look(launch), 2.0) or []
        for reason in self._requests.take_refused():
            self._reporter.emit("request_refused", is_alert=False, reason=reason)
        while self._alarms:
            alarm = self._alarms.popleft()
            launch, token = self._timeouts.launch, alarm["token"]
            # Two nodes may notice the same hang: one request is enough for both.
            if any(each.get("stall", {}).get("launch") == launch for each in requests):
                self._outcomes[token] = "cleared"  # another node's request was first
                continue
            self._outcomes.pop(token, None)
            try:
                alarm = self._disk.ask(partial(write_request, self._target.run, alarm))
            except OSError as error:
                self._reporter.log(f"{token}: other nodes cannot be asked: {error}")
            self._answer(alarm)
            requests = [each for each in requests if each["token"] != token]
        for request in requests:
            self._answer(request)

    def _answer(self, request: node_dir.DumpRequest) -> None:
        token, reason = request["token"], request["reason"]
        self._token = token
        # Taken before the work, so that a request that fails is not tried for ever.
        self._requests.take(token)
        if reason == "stall":
            self._begun.append(request)
        self._reporter.log(f"{token}: dumping all processes ({reason}, asked by {request['by']})")
        # Before the dump, which takes seconds: a watcher that beats meanwhile is alive.
        before, since = self._heartbeats(), time.monotonic()
        dump = self._dump(request)
        if reason == "stall":
            self._open[token] = _OpenStall(request, dump, before, since, time.monotonic())
            if request["by"] == self._target.host:
                self._conclude(self._open.pop(token))

    def _dump(self, request: node_dir.DumpRequest) -> node_dir.NodeDump:
        target, token = self._target, request["token"]
        # Flight recorders write in about a second, so they are asked before the rounds of dumps.
        ranks = [each.rank for each in read_heartbeats(target.folder) if each.role == "rank"]
        before = flight_recorder.file_versions(target.folder, ranks)
        flight_recorder.request_files(target.folder, ranks)
        # Early rounds save the wait for later ones, but only fit a request with as many rounds.
        early = []
        if request["reason"] == "stall" and request["rounds"] == target.settings.rounds:
            is_own = request["by"] == target.host
            early = self._early.take(request["stall"]["pid"] if is_own else None)
        dump = dumps.dump_node(
            target.folder, target.host, request, target.settings.round_seconds, early
        )
        copies = target.node.flight_path(token)
        try:
            for work in (
                lambda: flight_recorder.copy_files(target.folder, ranks, copies, before),
                lambda: target.node.write_dump(dump),
                lambda: dumps.prune_dumps(target.node),
                lambda: dumps.prune_requests(target.run, self._timeouts.launch),
            ):
                self._disk.ask(work)
        except OSError as error:
            self._reporter.log(f"{token}: the dump is not written: {error}")
        return dump

    def _conclude_stalls(self) -> None:
        """Act on diagnoses of stalls by other nodes, or diagnose stalls at this node's turn."""
        for token, stall in list(self._open.items()):
            self._token = token
            age = time.monotonic() - stall.dumped_at
            if diagnosis := read_diagnosis(self._disk, token):
                del self._open[token]
                self._act_on(diagnosis, stall.request)
            elif age > _FORGET_SECONDS:
                del self._open[token]
            elif age >= _TURN_SECONDS * self._turn(stall, age):
                del self._open[token]
                # All ranks of a node that has ended did so normally: there was no stall.
                if not self._heartbeats().get(stall.request["by"], {}).get("ended"):
                    self._reporter.log(f"{token}: {stall.request['by']} has not concluded")
                    self._conclude(stall)

    def _turn(self, stall: _OpenStall, age: float) -> int:
        if stall.turn is None and age >= _TURN_SECONDS:
            # Once for each stall: a dump that comes later must not change the order of the turns.
            find = partial(nodes_with_dump, self._target.run, stall.request["token"])
            answered = [each.host for each in self._disk.try_ask(find) or []]
            stall.turn = turn_of(self._target.host, stall.request["by"], answered)
        return 1 if stall.turn is None else stall.turn

    def _conclude(self, stall: _OpenStall) -> None:
        """Diagnose a stall from all nodes' stack dumps; the first diagnosis on disk is valid."""
        request, token, run = stall.request, stall.request["token"], self._target.run
        answers, silent = collect_dumps(self._disk, request, stall.dump, stall.before, stall.since)
        answers = [self._with_current_alarm(each, request) for each in answers]
        folders = [node_dir.NodeDirectory(run, each["host"]).flight_path(token) for each in answers]
        read = self._disk.try_ask(lambda: flight_recorder.read_folders(folders))
        launch = str(request.get("stall", {}).get("launch", ""))
        events = self._disk.try_ask(lambda: node_events.recent(run, launch=launch)) or []
        diagnosis = diagnose(
            request, answers, silent, read[0] if read else {}, self._target.host, events
        )
        path = node_dir.diagnosis_path(run, token)
        # If the file cannot be written, only a real stall is reported.
        is_first = diagnosis.kind != "cleared"
        try:
            is_first = self._disk.ask(lambda: write_once(path, diagnosis.as_dict()))
        except OSError as error:  # rather report a stall twice than never
            self._reporter.log(f"{token}: the diagnosis is not written: {error}")
        if not is_first:
            diagnosis = read_diagnosis(self._disk, token) or diagnosis
        elif diagnosis.kind == "cleared":
            self._reporter.log(f"{token}: {diagnosis.sentence}")
        else:
            found = diagnosis.as_dict()
            names = ("kind", "token", "launch", "step", "phase", "seconds", "limit", "sentence")
            facts = {name: found[name] for name in (*names, "suspects")}
            self._reporter.emit("stalled", **facts, verdict=f"stalls/{path.name}")
        self._act_on(diagnosis, request, is_reported=is_first)

    def _with_current_alarm(
        self, dump: node_dir.NodeDump, request: node_dir.DumpRequest
    ) -> node_dir.NodeDump:
        """Return a stack dump with the current heartbeat of the process that raised the alarm.

        The process may have moved on while the other nodes' dumps were awaited. A dump of another
        node is returned unchanged.
        """
        alarm = request.get("stall")
        if alarm is None or alarm["host"] != self._target.host or dump["host"] != alarm["host"]:
            return dump
        role, pid = alarm["role"], alarm["pid"]
        found = read_heartbeat(page_path(self._target.folder, role, alarm["rank"], pid))
        is_gone = found is None or (role == "decode" and not found.is_alive)
        *rounds, last = dump["rounds"]
        processes = [each for each in last["processes"] if not is_gone or each["pid"] != pid]
        for number, each in enumerate(processes):
            if found is not None and (each["pid"], each["role"]) == (pid, role):
                processes[number] = {**each, "heartbeat": found.as_dict()}
        return {**dump, "rounds": [*rounds, {**last, "processes": processes}]}

    def _act_on(
        self,
        diagnosis: StallDiagnosis,
        request: node_dir.DumpRequest,
        *,
        is_reported: bool = False,
    ) -> None:
        if diagnosis.kind == "cleared":
            self._outcomes[diagnosis.token] = "cleared"
            return
        if not is_reported:  # another node has reported it; this node's terminal shows it too
            self._reporter.tell(diagnosis.sentence)
        self._outcomes[diagnosis.token] = "stalled"
        self.num_stalls += 1
        self._actions.act_on(diagnosis, request)

    def _heartbeats(self) -> dict[str, dict[str, Any]]:
        """Read the other nodes' heartbeats by host; none if the run's disk does not answer."""
        found = self._disk.try_ask(lambda: node_dir.node_heartbeats(self._target.run)) or {}
        return {host: each for host, each in found.items() if host != self._target.host}

"""Requests for dumps of all nodes: what they are called, and which still want an answer.

Two nodes that see the same stall must ask for the same thing, so a stall's name is made of what
both know: the launch, the step, and how many of that step there have been.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from longtake.errors import RecordError
from longtake.fsio import now, read_record, write_once
from longtake.heartbeat import Pulse
from longtake.node_dir import NodeDirectory, Request, request_path, requests_path, verdict_path
from longtake.run_dir import RunDirectory
from longtake.watch.post import Post
from longtake.watch.stall import Overdue

_NOT_YET = "start"  # in place of the launch
_MAX_REQUEST_BYTES = 2**16
_SECONDS_OF_PATIENCE = 10.0  # of whoever asks, until no more is awaited


@dataclass(frozen=True)
class Alarm:
    """A stall that this node has noticed.

    Attributes:
        overdue: the heart, and its limit.
        request: what it asks all nodes for.
    """

    overdue: Overdue
    request: Request


def token_of(launch: str, step: int, number: int) -> str:
    """What a stall is called; `number` counts, from 0, those of a launch's step."""
    return f"stall_{launch or _NOT_YET}_{step:08d}_{number}"


class Inbox:
    """Finds requests that this node has not answered.

    What lay there before the first look was for those who watched then, with two exceptions: what
    was asked so late that its asker waits still; and a stall of the launch that runs, of which no
    verdict was reached, for its asker's node may have lost its watcher.

    Args:
        node: this one, whose events have begun with that somebody watches.
    """

    def __init__(self, node: NodeDirectory) -> None:
        self._node, self._run = node, node.run
        self._seen: set[str] = set()
        self._has_looked = False
        self._refused: list[str] = []

    def new_token(self, launch: str, step: int) -> str:
        """The name of a stall that nobody has asked about."""
        number = 0
        while (token := token_of(launch, step, number)) in self._seen:
            number += 1
        return token

    def take(self, token: str) -> None:
        """Count a request as answered."""
        self._seen.add(token)

    def look(self, launch: str) -> list[Request]:
        """The requests that want an answer, by time; touches the disk.

        Args:
            launch: which runs now.
        """
        folder = requests_path(self._run)
        names = {path.stem for path in folder.glob("[!.]*.json")} if folder.is_dir() else set()
        found = (self._read(name) for name in names - self._seen)
        requests = sorted((each for each in found if each), key=lambda each: each["time"])
        if not self._has_looked:
            self._has_looked = True
            old = [each for each in requests if not self._is_open(each, launch)]
            self._seen.update(each["token"] for each in old)
            requests = [each for each in requests if each["token"] not in self._seen]
        return requests

    def take_refused(self) -> list[str]:
        """What is wrong with each file that `look` refused, once."""
        refused, self._refused = self._refused, []
        return refused

    def _read(self, name: str) -> Request | None:
        path = request_path(self._run, name)
        try:
            request = read_record(path, Request, _MAX_REQUEST_BYTES)
            if request is not None and request["token"] != name:
                raise RecordError(path, f"its token is {request['token']!r}, expected its name")
            if request is not None and request["reason"] == "stall" and "stall" not in request:
                raise RecordError(path, "its reason is a stall, and it says nothing of that")
        except RecordError as error:
            self._seen.add(name)
            self._refused.append(str(error))
            return None
        return request

    def _is_open(self, request: Request, launch: str) -> bool:
        if request["reason"] != "stall":
            return self._is_awaited(request["token"])
        of = request["stall"]["launch"] if "stall" in request else None
        is_ours = of == launch if launch else self._is_awaited(request["token"])
        return is_ours and not verdict_path(self._run, request["token"]).exists()

    def _is_awaited(self, token: str) -> bool:
        """Whether it was asked just before this watcher began, by the disk's own clock."""
        try:
            begun = self._node.events_path.stat().st_mtime
            asked = request_path(self._run, token).stat().st_mtime
        except OSError:
            return False
        return asked > begun - _SECONDS_OF_PATIENCE and not self._node.dump_path(token).exists()


def request_for(post: Post, token: str, overdue: Overdue, launch: str, step: int) -> Request:
    """The request that a stall makes.

    Args:
        post: of who asks.
        token: what the stall is called.
        overdue: the heart that gives the alarm, and the limit that it is past.
        launch: which runs; a decoding process does not know it.
        step: that of the run; a decoding process counts windows.
    """
    heart: Any = {**overdue.pulse.as_dict(), "launch": launch, "step": step}
    heart |= {"host": post.host, "limit": round(overdue.limit, 3)}
    return Request(
        token=token,
        time=now(),
        by=post.host,
        reason="stall",
        rounds=post.section.rounds,
        native=True,
        stall=heart,
    )


def ask(run: RunDirectory, request: Request) -> Request:
    """Write a request, unless another node has asked the same already; returns which stands."""
    path = request_path(run, request["token"])
    if not write_once(path, request):
        with suppress(RecordError):
            return read_record(path, Request, _MAX_REQUEST_BYTES) or request
    return request


def step_of(pulse: Pulse, pulses: list[Pulse]) -> int:
    """The run's step that a process works for."""
    if pulse.role == "rank":
        return pulse.step
    ranks = [each for each in pulses if each.role == "rank"]
    own = [each.step for each in ranks if each.rank == pulse.rank]
    return max(own or [each.step for each in ranks] or [0])

"""Gives the alarm when a heart is past its limit, and not again for the same trouble.

Where one process hangs the others come to wait for it, and pass their own limits. So while a stall
is open on a node, be it its own or one that another node asks about, the next alarm comes when it
has lasted twice as long.
"""

from dataclasses import dataclass

from longtake.heartbeat import Pulse
from longtake.node_dir import Request
from longtake.watch.answering import Answering
from longtake.watch.post import Post
from longtake.watch.report import Reporter
from longtake.watch.requests import Alarm, request_for, step_of
from longtake.watch.sight import Sight
from longtake.watch.stall import Expectations, Overdue, has_moved


@dataclass
class _Stall:
    """A stall that is open: other hearts' alarms say the same, for a while.

    Attributes:
        token: what it is called.
        at: when it was noticed, as `time.monotonic()`.
        seconds: for how long it had lasted.
        overdue: the heart that gave the alarm; None: one of another node.
        is_asker: whether it was this node that asked.
    """

    token: str
    at: float
    seconds: float
    overdue: Overdue | None = None
    is_asker: bool = False

    @property
    def again_at(self) -> float:
        """When it has lasted twice as long."""
        return self.at + self.seconds


class Alarms:
    """The stalls of a node, one at a time.

    Args:
        post: the watcher's.
        reporter: is told when a stall is over.
        expectations: what phases may take.
        answering: looks into alarms.
    """

    def __init__(
        self, post: Post, reporter: Reporter, expectations: Expectations, answering: Answering
    ) -> None:
        self._post, self._reporter = post, reporter
        self._expectations, self._answering = expectations, answering
        self._stall: _Stall | None = None

    @property
    def open_token(self) -> str:
        """What the stall is called that is open; empty: none is."""
        return self._stall.token if self._stall else ""

    def see_to(self, sight: Sight) -> None:
        """Note what other nodes ask, close a stall that is over, and give the next alarm."""
        while (request := self._answering.take_begun()) is not None:
            self._note_asked(request, sight)
        if self._stall is not None:
            self._close_if_over(self._stall, sight)
        over = self._expectations.overdue(sight.living, sight.now)
        if over and (self._stall is None or self._has_doubled(self._stall, sight.now)):
            self._raise_alarm(over[0], sight)

    def _has_doubled(self, stall: _Stall, now: float) -> bool:
        is_looked_into = stall.is_asker and self._answering.outcome(stall.token) is None
        return now >= stall.again_at and not is_looked_into

    def _raise_alarm(self, overdue: Overdue, sight: Sight) -> None:
        pulse, launch = overdue.pulse, self._expectations.launch
        step = step_of(pulse, sight.living)
        token = self._answering.new_token(launch, step)
        self._stall = _Stall(token, sight.now, pulse.seconds, overdue, is_asker=True)
        self._reporter.say(
            f"{token}: {_who(pulse)} has been in {pulse.phase} for {pulse.seconds:.1f} s, "
            f"{overdue.limit:.1f} s is the limit"
        )
        request = request_for(self._post, token, overdue, launch, step)
        self._answering.alarm(Alarm(overdue, request))

    def _note_asked(self, request: Request, sight: Sight) -> None:
        """Take another node's stall for this one's too: what stands still here waits for it."""
        is_own = request["by"] == self._post.host
        if self._stall is not None and self._stall.token == request["token"]:
            self._stall.is_asker = is_own
        elif not is_own:
            seconds = float(request.get("stall", {}).get("seconds", 0.0))
            self._stall = _Stall(request["token"], sight.now, seconds)

    def _close_if_over(self, stall: _Stall, sight: Sight) -> None:
        if stall.overdue is None:
            if sight.now >= stall.again_at:
                self._stall = None
            return
        before = stall.overdue.pulse
        after = next((each for each in sight.living if each.path == before.path), None)
        if after is not None and not has_moved(before, after):
            return
        if self._answering.outcome(stall.token) == "stalled" and stall.is_asker and after:
            names = ("role", "rank", "pid", "phase")
            facts = {name: getattr(before, name) for name in names}
            seconds = round(stall.seconds + sight.now - stall.at, 1)
            step = step_of(before, sight.living)
            text = f"{_who(before)} went on after {seconds} s in {before.phase}."
            self._reporter.tell(
                "went_on", token=stall.token, **facts, step=step, seconds=seconds, reason=text
            )
        self._expectations.excuse(sight.now)
        self._stall = None


def _who(pulse: Pulse) -> str:
    name = "rank" if pulse.role == "rank" else "decoding process of rank"
    return f"{name} {pulse.rank} (process {pulse.pid})"

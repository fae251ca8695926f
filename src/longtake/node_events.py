"""Recent events of clocks, links and GPUs of a run's nodes, in words.

Messages about a stall or a failed collective and `longtake health` name them. The age of an event
is measured by its node's own clock, corrected for steps of that clock.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate, pairwise
from statistics import median
from typing import Any

from longtake import errors
from longtake.formatting import for_seconds, plural, printable
from longtake.node_dir import NodeDirectory, NodeEventKind, all_nodes
from longtake.node_numbers import CAUSES
from longtake.run_dir import RunDirectory

RECENT_SECONDS = 600.0
_MOST_NAMED = 8
_STEPS_OF_A_PERIOD = 4
_IRREGULAR = 0.1  # fraction of a period by which the interval of two steps may differ from it
_MOST_CHARS = 200
_UNKNOWN_END = "not looked for since: its watcher was started again"


@dataclass(frozen=True)
class NodeEvent:
    """One event about a clock, a network link or a GPU of a node."""

    host: str
    kind: NodeEventKind
    key: str  # key in the event's `causes`; for a clock, the kind of event
    text: str
    seconds_ago: float  # time since its beginning
    is_over: bool  # always True for a momentary event, such as a clock step
    time: str = ""  # its beginning, by the node's clock
    end: str = "now over"  # words for the end of an event that lasted

    def __str__(self) -> str:
        ago = for_seconds(self.seconds_ago)
        when = f"for {ago}" if not self.is_over else f"{ago} ago"
        ended = f", {self.end}" if self.is_over and self.kind != "clock_stepped" else ""
        return f"{self.host}: {self.text}, {when}{ended}"


def recent(run: RunDirectory, seconds: float = RECENT_SECONDS, launch: str = "") -> list[NodeEvent]:
    """Return the nodes' events of clocks, links and GPUs that are recent or last, newest first.

    Args:
        run: the run directory.
        seconds: the greatest age of an event that is over.
        launch: only nodes whose watcher watches this launch; empty: all nodes.
    """
    found: list[NodeEvent] = []
    for node in all_nodes(run):
        heartbeat = node.read_heartbeat()
        if launch in ("", heartbeat.get("launch")):
            found += of_node(node, heartbeat)
    kept = (each for each in found if each.seconds_ago <= seconds or not each.is_over)
    return sorted(kept, key=lambda each: each.seconds_ago)


def add_to(text: str, events: Sequence[NodeEvent]) -> str:
    """Append a sentence about node events to a message; without any, return it unchanged."""
    if not events:
        return text
    named = "; ".join(map(str, events[:_MOST_NAMED]))
    left = len(events) - _MOST_NAMED
    more = f"; and {plural(left, 'event')} more (longtake health)" if left > 0 else ""
    return f"{text} Recent events of nodes: {named}{more}."


def of_node(node: NodeDirectory, heartbeat: Mapping[str, Any] | None = None) -> list[NodeEvent]:
    """Return all events of a node's clock, network links and GPUs, oldest first.

    The result is empty if the node's file of events cannot be read.
    """
    events: list[dict[str, Any]] = []
    with suppress(errors.RecordError):
        events = node.events()
    times = [datetime.fromisoformat(str(each["time"])).timestamp() for each in events]
    steps = [_step_of(each) for each in events]
    # Convert each time to the clock as it is now, by adding the clock's later steps.
    later = [sum(steps) - before for before in accumulate(steps)]
    wall = (heartbeat or node.read_heartbeat()).get("wall")
    # Now, by the node's own clock: the clock of the machine that reads may differ.
    end = max([*times[-1:], *([float(wall)] if wall is not None else [])], default=time.time())
    ages = [max(0.0, end - at - shift) for at, shift in zip(times, later, strict=True)]
    return list(_begun(node.host, events, ages))


def _step_of(event: Mapping[str, Any]) -> float:
    return float(event.get("seconds") or 0.0) if event["event"] == "clock_stepped" else 0.0


def _begun(
    host: str, events: Sequence[Mapping[str, Any]], ages: Sequence[float]
) -> Iterator[NodeEvent]:
    lasting: dict[str, NodeEvent] = {}
    pairs = list(zip(events, ages, strict=True))
    stepped = [age for event, age in pairs if event["event"] == "clock_stepped"]
    for event, age in pairs:
        kind = event["event"]
        if kind == "clock_stepped":
            seconds = _step_of(event)
            size, way = abs(seconds), "back" if seconds < 0 else "forward"
            amount = f"{size:.3f} s" if size >= 1 else f"{size * 1e3:.3g} ms"
            text = f"the clock was set {way} by {amount}"
            # Once, at the newest step: the text describes all of them.
            if age == stepped[-1]:
                text += _period_text(stepped)
            yield NodeEvent(host, kind, kind, text, age, is_over=True, time=str(event["time"]))
            continue
        still: Mapping[str, str] = _lasting_texts(event)
        if kind in ("degraded", "recovered", "watcher_started"):
            ended = _ended_by(event, lasting, still)
            end = _UNKNOWN_END if kind == "watcher_started" else NodeEvent.end
            yield from (replace(lasting.pop(key), is_over=True, end=end) for key in ended)
        for key, text in still.items():
            new = NodeEvent(host, kind, key, text, age, is_over=False, time=str(event["time"]))
            # A condition that is reported again keeps its beginning, and gets the newest text.
            old = lasting.get(key, new)
            lasting[key] = replace(new, seconds_ago=old.seconds_ago, time=old.time)
    yield from lasting.values()


def _period_text(ages: Sequence[float]) -> str:
    """Name the interval at which a clock was set, if it is regular: a cron job sets it."""
    gaps = [older - newer for older, newer in pairwise(ages[-_STEPS_OF_A_PERIOD:])]
    if len(gaps) + 1 < _STEPS_OF_A_PERIOD:
        return ""
    usual = median(gaps)
    is_regular = usual > 0 and all(abs(gap - usual) <= _IRREGULAR * usual for gap in gaps)
    return f" (one every {for_seconds(usual)}, {plural(len(ages), 'time')})" if is_regular else ""


def _ended_by(
    event: Mapping[str, Any], lasting: Mapping[str, NodeEvent], still: Mapping[str, str]
) -> list[str]:
    """Return the keys of lasting events (such as a slow link) that an event ends.

    A new watcher ends all of them, as it does not know them. `recovered` without a reason is about
    the clock and ends its slew; other events list all causes that still last.
    """
    slews = {key for key, each in lasting.items() if each.kind == "clock_slewed"}
    if event["event"] == "watcher_started":
        return list(lasting)
    if event["event"] == "recovered" and "reason" not in event:
        return sorted(slews)
    return [key for key in lasting if key not in slews and key not in still]


def _lasting_texts(event: Mapping[str, Any]) -> dict[str, str]:
    """Return texts of the lasting problems of clocks, links and GPUs that an event reports."""
    if event["event"] == "clock_slewed":
        ppm = event.get("ppm")
        rate = f" by {abs(ppm):.0f} ppm" if isinstance(ppm, int | float) else ""
        way = "slow" if isinstance(ppm, int | float) and ppm < 0 else "fast"
        return {"clock_slewed": f"the clock runs too {way}{rate}"}
    causes = event.get("causes")
    if event["event"] != "degraded" or not isinstance(causes, Mapping):
        return {}
    return {
        str(key): printable(str(text)[:_MOST_CHARS])
        for key, text in causes.items()
        if str(key).startswith(CAUSES)
    }

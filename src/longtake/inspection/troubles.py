"""What befell a run's processes and nodes: hangs, deaths, clocks, disks, what grows weaker."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from longtake.inspection.rows import Row
from longtake.inspection.verdicts import events
from longtake.run_dir import RunDirectory

_WORDS = {
    "stalled": "stalled",
    "rank_died": "rank died",
    "rank_failed": "rank failed",
    "killed_rank": "rank killed",
    "restarted_worker": "worker restarted",
    "decoder_stalled": "decoder stalled",
    "decoder_died": "decoder died",
    "clock_stepped": "clock stepped",
    "clock_slewed": "clock slewed",
    "degraded": "degraded",
    "disk_full": "disk full",
    "checkpoint_failed": "save failed",
}
_OF_A_NODE = ("stalled", "rank_died", "rank_failed", "killed_rank", "restarted_worker")
"""Their step is that of the steps that were done, and the trouble is in the next."""


def troubles(run: RunDirectory, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The events of that kind, each with `at`, the step that it met, as metrics count."""
    found = [event for event in events(run) if event["event"] in _WORDS]
    return [{**event, "at": _step_of(event, rows)} for event in found]


def in_words(trouble: Mapping[str, Any]) -> str:
    """What kind of trouble it is, in a word or two; of a clock with its size."""
    words = _WORDS[trouble["event"]]
    if trouble["event"] == "clock_stepped" and "seconds" in trouble:
        return f"{words} {trouble['seconds']:+.3g} s"
    return words


def sentence_of(trouble: Mapping[str, Any]) -> str:
    """What it says for people."""
    said = (trouble.get(name) for name in ("sentence", "message", "reason", "error"))
    text = str(next((each for each in said if each), ""))
    if trouble["event"] == "rank_failed":
        text = f"rank {trouble['rank']} ({trouble['phase']}): {text}"
    host = trouble.get("host", "")
    where = f" on {host}" if host and host not in text else ""
    return f"{in_words(trouble)}{where}{': ' * bool(text)}{text}"


def _step_of(event: Mapping[str, Any], rows: Sequence[Row]) -> int:
    step = event.get("step")
    if step is not None:
        return int(step) + (event["event"] in _OF_A_NODE)
    # What is no step's is placed by the clock, which may be the trouble; it is only a picture.
    at = datetime.fromisoformat(event["time"]).timestamp()
    ends = [float(row.metrics["time"]) for row in rows]
    place = bisect_right(ends, at)
    return rows[min(place, len(rows) - 1)].step if rows else 0

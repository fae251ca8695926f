"""Events of clocks, links and GPUs before a failure."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from longtake.node_dir import NodeDirectory
from longtake.node_events import add_to, recent
from longtake.run_dir import RunDirectory

_NOW = 1_000_000.0
_STEP = {"event": "clock_stepped", "seconds": -2.5}
_SLEW = {"event": "clock_slewed", "ppm": -400.0, "seconds": -0.01}
_POWER = "GPU 3 power 412 W against 655 W median"
_DOWN = "the link ib0 is down"


def _degraded(**causes: str) -> dict[str, Any]:
    return {"event": "degraded", "reason": ", ".join(causes.values()), "causes": causes}


def _write(
    run: Path, host: str, *events: tuple[float, Mapping[str, Any]], launch: str = "one"
) -> None:
    """Write events at seconds before `_NOW`, as the clock of that node said it then."""
    node = NodeDirectory(RunDirectory(run), host)
    node.write_heartbeat({"wall": _NOW, "launch": launch})
    lines = [
        {"time": datetime.fromtimestamp(_NOW - ago, UTC).isoformat(timespec="milliseconds"), **each}
        for ago, each in events
    ]
    node.events_path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([(12, _STEP)], ["a: the clock was set back by 2.500 s, 12 s ago"]),
        (
            [(12, {**_STEP, "seconds": 0.0042})],
            ["a: the clock was set forward by 4.2 ms, 12 s ago"],
        ),
        (
            [(12 + ago, {**_STEP, "seconds": 0.5}) for ago in (6130, 4100, 2030, 0)],
            ["a: the clock was set forward by 500 ms (one every 33 min 50 s, 4 times), 12 s ago"],
        ),
        ([(700, _STEP)], []),
        ([(12, {"event": "stalled"}), (9, _degraded(pressure_cpu_share="busy"))], []),
        ([(7000, _SLEW)], ["a: the clock runs too slow by 400 ppm, for 1 h 56 min"]),
        ([(7000, _SLEW), (30, {"event": "recovered", "seconds": 0.1})], []),
        (
            [(300, _SLEW), (30, {"event": "recovered", "seconds": 0.1})],
            ["a: the clock runs too slow by 400 ppm, 5 min 0 s ago, now over"],
        ),
        (
            [
                (900, _degraded(gpu_power_watts=_POWER)),
                (60, _degraded(gpu_power_watts=_POWER, **{"link_up:ib0": _DOWN})),
            ],
            [f"a: {_DOWN}, for 60 s", f"a: {_POWER}, for 15 min 0 s"],
        ),
        (
            [(60, _degraded(**{"link_up:ib0": _DOWN})), (50, {"event": "recovered", "reason": ""})],
            [f"a: {_DOWN}, 60 s ago, now over"],
        ),
        # What lasted when a watcher ended is not known to last, nor to be over.
        (
            [(60, _degraded(**{"link_up:ib0": _DOWN})), (50, {"event": "watcher_started"})],
            [f"a: {_DOWN}, 60 s ago, not looked for since: its watcher was started again"],
        ),
        ([(900, _degraded(gpu_power_watts=_POWER)), (800, {"event": "watcher_started"})], []),
        # Times from before a step are moved by it: the link went down 20 s ago, and not an hour.
        (
            [(-3580, _degraded(**{"link_up:ib0": _DOWN})), (10, {**_STEP, "seconds": -3600.0})],
            ["a: the clock was set back by 3600.000 s, 10 s ago", f"a: {_DOWN}, for 20 s"],
        ),
        (
            [(9, {"event": "degraded", "causes": "none"}), (9, {**_SLEW, "ppm": "x"})],
            ["a: the clock runs too fast, for 9.0 s"],
        ),
    ],
)
def test_what_happened_is_told_with_how_long_ago(
    tmp_path: Path, events: Sequence[tuple[float, Mapping[str, Any]]], said: list[str]
) -> None:
    _write(tmp_path, "a", *events)
    assert list(map(str, recent(RunDirectory(tmp_path)))) == said


def test_a_failure_is_followed_by_the_events_of_its_launch(tmp_path: Path) -> None:
    """The newest first; of many, the rest is counted."""
    run = RunDirectory(tmp_path)
    _write(tmp_path, "old", (5, _STEP), launch="former")
    for number in range(1, 11):
        _write(tmp_path, f"n{number}", (10 * number, _STEP))
    text = add_to("It failed.", recent(run, launch="one"))
    assert text.startswith("It failed. Recent events of nodes: n1: the clock was set back by 2.5")
    assert text.endswith("s, 80 s ago; and 2 events more (longtake health).")
    assert "old" not in text
    assert add_to("It failed.", recent(run, launch="another")) == "It failed."

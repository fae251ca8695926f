"""What `longtake health` tells of a run's nodes, from files as watchers write them."""

import io
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from longtake.errors import RunError
from longtake.inspection.nodes import node_facts, print_nodes
from longtake.node_dir import NodeDirectory
from longtake.run_dir import RunDirectory

_HEALTHY = {
    "gpu_power_watts": 650.0,
    "gpu_temperature_celsius": 60.0,
    "gpu_sm_clock_mhz": 1755.0,
    "link_speed_bits_per_second": 4e11,
    "disk_write_seconds": 0.002,
    "step_work_seconds": 1.2,
}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    (tmp_path / "recipe.toml").touch()
    return RunDirectory(tmp_path)


def _write(
    run: RunDirectory,
    host: str,
    changed: Mapping[str, float] = {},
    windows: int = 400,
    since: int = 0,
    **heartbeat: Any,
) -> NodeDirectory:
    """A node of two GPUs, whose first GPU (or link, disk, rank) has other numbers at the end."""
    node, draw = NodeDirectory(run, host), random.Random(host)  # noqa: S311 - not a secret
    node.write_heartbeat({"wall": 1e6, **heartbeat})
    with node.health_path.open("w") as file:
        for number in range(windows):
            record: dict[str, Any] = {"time": "2026-01-01T00:00:00.000+00:00", "note": "text"}
            for name, value in _HEALTHY.items():
                is_changed = number >= since and name in changed
                for device in range(2):
                    wanted = changed[name] if is_changed and device == 0 else value
                    record[f"{name}:{device}"] = wanted * draw.uniform(0.99, 1.01)
            use = {f"gpu_utilization_share:{device}": 1.0 for device in range(2)}
            json.dump({**record, **use, "link_up:0": 1, "link_up:1": 1}, file)
            file.write("\n")
    return node


def _said(facts: dict[str, Any]) -> str:
    out = io.StringIO()
    print_nodes(Console(file=out, width=160), facts)
    return out.getvalue()


def _outliers(facts: dict[str, Any]) -> dict[str, set[tuple[str, str]]]:
    return {
        node["host"]: {(each["number"], each["against"]) for each in node["outliers"]}
        for node in facts["nodes"]
    }


@pytest.mark.parametrize(
    ("changed", "since", "against"),
    [
        ({"gpu_power_watts": 400.0}, 0, {"others"}),
        ({"gpu_power_watts": 400.0}, 370, {"others", "own past"}),
        ({"gpu_temperature_celsius": 84.0}, 370, {"others", "own past"}),
        ({"gpu_sm_clock_mhz": 1200.0}, 370, {"others", "own past"}),
        ({"link_speed_bits_per_second": 1e11}, 370, {"others", "own past"}),
        ({"disk_write_seconds": 20.0}, 370, {"others", "own past"}),
        ({"step_work_seconds": 1.6}, 370, {"others"}),
    ],
)
def test_a_node_is_marked_beside_the_others_and_its_own_past(
    run: RunDirectory, changed: Mapping[str, float], since: int, against: set[str]
) -> None:
    """Those that are as always are not; a number that was always so is not worse than before."""
    for host in ("gpu01", "gpu02", "gpu10"):
        _write(run, host)
    _write(run, "gpu03", changed, since=since)
    (name,) = changed
    found = _outliers(node_facts(run))
    expected = {(name, each) for each in against}
    assert found == {"gpu01": set(), "gpu02": set(), "gpu03": expected, "gpu10": set()}


def test_table_marks_events_and_remarks(run: RunDirectory) -> None:
    _write(run, "gpu01")
    node = _write(run, "gpu02", {"gpu_power_watts": 400.0}, ended=True)
    NodeDirectory(run, "gpu03").write_heartbeat({"wall": 1e6})
    node.append_event("clock_stepped", seconds=-2.5)
    facts = node_facts(run)
    assert json.loads(json.dumps(facts)) == facts
    states = {each["host"]: each["state"] for each in facts["nodes"]}
    assert states == {"gpu01": "running", "gpu02": "ended", "gpu03": "running"}
    said = _said(facts)
    rows = {line.split()[0]: line for line in said.splitlines() if line.startswith(" gpu")}
    assert "W*" in rows["gpu02"]
    assert "*" not in rows["gpu01"]
    assert "60 °C" in rows["gpu01"].replace("61", "60").replace("59", "60")
    assert "400 Gb/s" in rows["gpu01"].replace("401", "400").replace("399", "400")
    assert "gpu02: GPU 0 power 40" in said
    assert "gpu02: the clock was set back by 2.500 s" in said
    assert "No samples yet of gpu03." in said


def test_what_there_is_nothing_of_is_said(run: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a run directory"):
        node_facts(RunDirectory(tmp_path / "none"))
    assert "has been watched: it was never trained, or" in _said(node_facts(run))
    node = NodeDirectory(run, "alone")
    node.write_heartbeat({"wall": 1e6})
    node.health_path.write_text('{"disk_write_seconds": 0.001, "disk_free_bytes:run": 1e9}\n{"x\n')
    said = _said(node_facts(run, 600.0))
    assert "1 ms" in said
    assert "No node has an event of clocks, links and GPUs in the 10 min 0 s before" in said
    assert "One node alone: it is compared with its own past only." in said
    assert "No node has a GPU that the driver (NVML) reports." in said
    assert "Of alone there are fewer than 16 samples" in said

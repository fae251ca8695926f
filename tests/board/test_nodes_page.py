"""The page of nodes: from what watchers wrote to HTML."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.board.node_runs import add_nodes, add_stall, make_run

from longtake.board import charts
from longtake.board.nodes_page import render_nodes
from longtake.board.pages import ServerLinks
from longtake.failures import RankFailure
from longtake.inspection.node_reader import HealthHistory
from longtake.inspection.reader import RunReader
from longtake.node_dir import NodeDirectory
from longtake.run_dir import RunDirectory

_HOSTILE = "<script>alert(1)</script>\x1b[2J"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return make_run(tmp_path / "runs" / "run")


def _page(run: RunDirectory, **query: str) -> str:
    facts = RunReader(run.path.parent, run.path.name).facts()
    return render_nodes(facts, ServerLinks(), query)


def _slow(node: int, window: int, health: dict[str, float]) -> None:
    if node == 1:
        health["step_work_seconds:3"] = 1.9


def test_without_a_watcher_the_page_says_what_will_appear(run: RunDirectory) -> None:
    html = _page(run)
    assert "No node of this run is watched" in html
    assert f"longtake watch {run.path}" in html


def test_each_rank_is_a_cell_with_its_number_step_and_phase(run: RunDirectory) -> None:
    add_nodes(run, 5, 2)
    html = _page(run)
    cells = re.findall(r'class="heat-\d"><title>([^<]*)', html)
    assert len(cells) == 10
    assert re.fullmatch(
        r"rank 3 on node001, step 1,200, backward for 0.3 s: own work for a step 1\.\d+ s", cells[3]
    )
    assert "<b>10</b> in backward (B)" in html


def test_an_outlier_is_marked_by_a_shape_and_named(run: RunDirectory) -> None:
    add_nodes(run, 6, 2, change=_slow)
    html = _page(run)
    assert html.count('class="outlier"') == 2  # in the map and in its legend
    assert "1 outlier: rank 3 on node001: 1.9 s" in html
    assert "step 1.9 s against 1.2" in html


def test_the_map_shows_the_number_that_the_url_names(run: RunDirectory) -> None:
    add_nodes(run, 2, 2)
    assert "GPU temperature 6" in _page(run, show="temperature")
    assert "GPU temperature 6" not in _page(run, show="power")
    assert "own work for a step 1." in _page(run, show="nothing of the kind")


def test_a_page_that_cannot_be_asked_again_has_all_maps(run: RunDirectory) -> None:
    class Static(ServerLinks):
        def series(self, run: str) -> str:
            return ""

    add_nodes(run, 2, 2)
    facts = RunReader(run.path.parent, run.path.name).facts()
    assert render_nodes(facts, Static(), {}).count('class="heat-map"') == 5


def test_the_time_of_a_step_is_shown_by_phase(run: RunDirectory) -> None:
    (node,) = add_nodes(run, 1, 2)
    beat = json.loads(node.heartbeat_path.read_text())
    beat["phase_means"][1]["phases"]["forward"] = 0.9
    node.heartbeat_path.write_text(json.dumps(beat))
    html = _page(run)
    assert "650 ms" in html
    assert "900 ms (rank 1)" in html
    del beat["phase_means"]
    node.heartbeat_path.write_text(json.dumps(beat))
    assert "Of older runs they were not written" in _page(run)


def test_ranks_that_have_ended_stay_with_their_last_step(run: RunDirectory) -> None:
    add_nodes(run, 1, 2, ranks=[], ended=True)
    html = _page(run)
    assert "2 ranks on 1 node, 1 ended" in html
    assert "rank 1 on node000, step 1,200: own work" in html


def test_what_watchers_found_is_listed_until_it_is_over(run: RunDirectory) -> None:
    nodes = add_nodes(run, 6, 8)
    causes = {"gpu_power_watts": "GPU 3 power 412 W against 655 W median"}
    nodes[2].append_event("degraded", reason="", causes=causes, message="")
    nodes[3].append_event("degraded", reason="", causes=causes, message="")
    nodes[3].append_event("recovered", reason="", message="")
    html = _page(run)
    assert "<b>node002</b>: GPU 3 power 412 W" in html
    assert "<b>node003</b>" not in html
    assert "node003: GPU 3 power 412 W against 655 W median, " in html  # among past events
    assert "▲ 6" in html  # its power in the table


def test_a_node_alone_has_what_its_watcher_found_against_its_past(run: RunDirectory) -> None:
    (node,) = add_nodes(run, 1, 1)
    said = "GPU 0 temperature 91 °C against 62 °C in its own past"
    node.append_event("degraded", reason="", causes={"gpu_temperature_celsius": said}, message="")
    html = _page(run)
    assert f"<b>node000</b>: {said}" in html
    assert "One node alone is compared with its own past only" in html


def test_a_spike_between_many_samples_is_drawn() -> None:
    x, y = np.arange(100_000.0), np.ones(100_000)
    y[54_321] = 70.0
    axes = charts.Axes("", str, lambda value: f"{value:g}")
    picture = charts.line_plot([charts.Line("a", x, y)], axes)
    assert picture is not None
    heights = [float(each) for each in re.findall(r"[ML]\d+ ([\d.]+)", picture)]
    assert min(heights) < 20 < 100 < max(heights)
    assert ">60<" in picture


def test_numbers_over_time_are_read_once(run: RunDirectory, monkeypatch: Any) -> None:
    (node,) = add_nodes(run, 1, 1, 20)
    history = HealthHistory()
    history.update(run, [node.host])
    with node.health_path.open("a") as file:
        file.write(
            '{"time":"2030-01-01T00:00:00+00:00","step_work_seconds:0":5}\nnot a record\n{"t'
        )
    lines = []
    monkeypatch.setattr(
        "longtake.inspection.node_reader._Past.add", lambda self, it: lines.append(it)
    )
    history.update(run, [node.host])
    assert len(lines) == 2


def test_of_long_files_the_end_and_some_lines_before_it_are_read(
    run: RunDirectory, monkeypatch: Any
) -> None:
    monkeypatch.setattr("longtake.inspection.node_reader._END_BYTES", 2**15)
    (node,) = add_nodes(run, 1, 1, 400)
    history = HealthHistory()
    history.update(run, [node.host])
    times, values = history.of(node.host, "power")
    assert history.is_thin
    assert 60 < len(times) < 200
    assert times[-1] - times[0] > 3900
    assert np.isfinite(values).all()


def test_a_stall_shows_its_cause_and_the_stacks_of_all_processes(run: RunDirectory) -> None:
    nodes = add_nodes(run, 2, 1)
    add_stall(run, nodes, cause=1)
    html = _page(run)
    assert "node001: rank 1 (process 101) in asleep (/own/model.py:54)" in html
    groups = re.findall(r'<details class="group([^"]*)"( open)?>', html)
    assert groups == [(" is-cause", " open"), ("", "")]
    assert '<li class="call-own">asleep (/own/model.py:54)</li>' in html
    assert '<li class="call-library">all_reduce (torch/' in html
    assert "thread saver: <code>_worker (concurrent/futures/thread.py:81)" in html
    assert f"longtake stacks {run.path}" in html


def test_a_stall_says_how_it_ended_and_what_was_done(run: RunDirectory) -> None:
    nodes = add_nodes(run, 2, 1)
    token = add_stall(run, nodes, cause=1)
    assert "No record says that it cleared" in _page(run)
    nodes[1].append_event("restarted_worker", token=token, reason="process 7 was ended.", rank=1)
    assert "process 7 was ended." in _page(run)
    nodes[0].append_event("stall_cleared", token=token, seconds=12.25, reason="")
    assert "It cleared after 12 s." in _page(run)


def test_stacks_of_an_older_stall_are_shown_when_asked_for(run: RunDirectory) -> None:
    nodes = add_nodes(run, 2, 1)
    add_stall(run, nodes, cause=1, token="stall_old", time="2026-01-01T00:00:00+00:00")
    add_stall(run, nodes, cause=0, token="stall_new", time="2026-01-02T00:00:00+00:00")
    assert re.findall(r'id="nodes-(\w+)"', _page(run)) == ["stall_new", "stall_old"]
    assert "stall=stall_old#nodes-stall_old" in _page(run)
    assert "stall=stall_new#nodes-stall_new" in _page(run, stall="stall_old")


def test_a_failed_rank_is_listed_with_the_end_of_its_log(run: RunDirectory) -> None:
    (node,) = add_nodes(run, 1, 1)
    log = node.rank_log_path("20260101", 0)
    log.parent.mkdir(parents=True)
    log.write_text(f"before\n{_HOSTILE}: out of memory\n")
    failed = RankFailure(
        *(0, 1, "one", 9, 7, "forward", "exception", "lost"), log=str(log), source="rank"
    )
    node.append_event("rank_failed", **failed.as_event())
    elsewhere = {**failed.as_event(), "log": "/nodes/x/logs/../y"}
    node.append_event("rank_failed", **elsewhere)
    html = _page(run)
    assert "rank 0 on node000" in html
    assert "nodes/node000/logs/20260101/rank_0000.log" in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\\x1b[2J: out of memory" in html


def test_names_of_others_are_text(run: RunDirectory) -> None:
    host = "<script>alert(1)<"
    node = NodeDirectory(run, host)
    node.path.mkdir(parents=True)
    beat = {"ranks": [{"rank": 0, "step": 1, "phase": _HOSTILE, "seconds": 1.0}], "health": {}}
    node.heartbeat_path.write_text(json.dumps(beat))
    add_stall(run, [node], cause=0, function=_HOSTILE, sentence=_HOSTILE)
    html = _page(run)
    assert "<script>alert" not in html
    assert "\x1b" not in html
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt;\\x1b[2J") >= 3


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nodes/node000/heartbeat.json", '{"ranks": [{"rank": -1}]}'),
        ("nodes/node000/heartbeat.json", "[" * 100_000),
        ("nodes/node000/heartbeat.json", '{"health": {"gpu_power_watts:0": 1e999, "x": []}}'),
        ("nodes/node000/health.jsonl", '[]\n{"time": 5}\n{"time": "2026-99-01"}\n\x00\n'),
        ("nodes/node000/events.jsonl", '{"time": "x"}\n5\n'),
        ("stalls/stall_x_1_0.json", '{"token": "../.."}'),
        ("nodes/node000/stacks/stall_x_1_0.json", '{"rounds": []}'),
    ],
)
def test_damaged_files_leave_the_rest_readable(run: RunDirectory, name: str, text: str) -> None:
    nodes = add_nodes(run, 2, 1)
    add_stall(run, nodes, cause=1)
    (run.path / name).write_text(text)
    html = _page(run)
    assert "node001" in html
    if ("heartbeat" in name and "1e999" not in text) or "x_1_0" in name:
        assert 'class="problem"' in html


def test_hostile_heartbeats_in_dumps_are_left_out(run: RunDirectory) -> None:
    nodes = add_nodes(run, 2, 1)
    token = add_stall(run, nodes, cause=1)
    for node in nodes:
        dump = json.loads(node.dump_path(token).read_text())
        process = dump["rounds"][0]["processes"][0]
        dump["rounds"].insert(0, {"seconds": 0.0, "processes": [{**process, "heartbeat": {}}]})
        process["heartbeat"]["seconds"] = "long"
        dump["missing"] = [{"role": 5}]
        node.dump_path(token).write_text(json.dumps(dump))
    assert "asleep (/own/model.py:54)" in _page(run)

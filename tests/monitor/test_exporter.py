"""What Prometheus finds at a watcher: by the OpenMetrics parser, and by its alerts."""

import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics import parser
from tests.build import listening

from longtake.config import WatchSection
from longtake.monitor.exporter import Exporter
from longtake.monitor.node_health import METRIC_HELP

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "prometheus"
_RANK = {"role": "rank", "pid": 10, "phase": "forward", "seconds": 0.4, "limit": 6.0}
_RECORD: dict[str, Any] = {
    "host": "gpu07",
    "pid": 9,
    "beat": 17,
    "stalls": 0,
    "watch_seconds_late": 0.25,
    "ranks": [
        {**_RANK, "rank": 3, "step": 120, "steps_done": 20, "step_seconds": 0.7},
        {**_RANK, "rank": 4, "step": 121, "steps_done": 21, "step_seconds": None, "phase": "data"},
    ],
    "workers": [{**_RANK, "role": "decode", "pid": 55, "rank": 3, "phase": "decode"}],
    "health": {
        "clock_steps_total": 2,
        "clock_backward_steps_total": 1,
        "clock_slew_ppm": -0.4,
        "gpu_power_watts:0": 412.5,
        "gpu_power_watts:1": 655,
        "link_up:mlx5_0/1": 1.0,
        'disk_free_bytes:/data "a"\\b': 5e9,
        "step_work_seconds:3": 0.71,
        "pressure_cpu_share": 0.1,
    },
}


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    found = Exporter(0, "127.0.0.1")
    found.update(_RECORD)
    yield found
    found.close()


def _scraped(exporter: Exporter) -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{exporter.port}/metrics")
    request.add_header("Accept", "application/openmetrics-text; version=1.0.0")
    with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310 - http
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        return str(answer.read().decode())


def _families(text: str) -> list[Metric]:
    return list(parser.text_string_to_metric_families(text))  # type: ignore[no-untyped-call]


def _samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in _families(text)
        for sample in family.samples
    }


def test_a_parser_takes_all_numbers_of_a_heartbeat_with_their_types(exporter: Exporter) -> None:
    text = _scraped(exporter)
    found = _samples(text)
    node, rank = ("node", "gpu07"), ("rank", "3")
    assert found["longtake_step", (node, rank)] == 120
    assert found["longtake_watcher_beats_total", (node,)] == 17
    assert found["longtake_stalls_total", (node,)] == 0
    assert found["longtake_watcher_late_seconds", (node,)] == 0.25
    assert found["longtake_phase_seconds", (node, ("phase", "forward"), rank)] == 0.4
    assert found["longtake_phase_limit_seconds", (node, ("phase", "forward"), rank)] == 6
    worker = (node, ("phase", "decode"), rank, ("worker", "55"))
    assert found["longtake_worker_seconds", worker] == 0.4
    assert found["longtake_gpu_power_watts", (("device", "1"), node)] == 655
    assert found["longtake_clock_backward_steps_total", (node,)] == 1
    assert found["longtake_disk_free_bytes", (("device", '/data "a"\\b'), node)] == 5e9
    assert found["longtake_step_work_seconds", (node, rank)] == 0.71
    families = {each.name: each for each in _families(text)}
    assert "in total" in families["longtake_watcher_late_seconds"].documentation
    assert families["longtake_clock_steps"].type == "counter"
    assert families["longtake_step"].type == "gauge"
    assert all(
        each.documentation and each.name.startswith("longtake_") for each in families.values()
    )


def test_what_is_not_known_is_not_told(exporter: Exporter) -> None:
    """A rank without a step time has none; before the first heartbeat there is nothing at all."""
    assert 'longtake_rank_step_seconds{node="gpu07",rank="4"}' not in _scraped(exporter)
    exporter.update({})
    assert _samples(_scraped(exporter)) == {}


def test_all_numbers_are_explained() -> None:
    ends = "seconds ppm watts celsius mhz bits bytes share total second stratum up rows xid inodes"
    others = {"open_files", "open_files_limit", "open_files_node", "load_average", "neighbours"}
    others |= {"gpu_is_lost", "disk_is_full", "disk_is_failing", "clock_is_synchronised"}
    others |= {"clock_daemons", "checkpoint_is_near"}
    for name, words in METRIC_HELP.items():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
        assert name in others or name.rpartition("_")[2] in ends.split(), name
        assert len(words) > 5


def test_a_port_in_use_is_a_problem_that_names_the_key(exporter: Exporter) -> None:
    assert exporter.port is not None
    second = Exporter(exporter.port, "127.0.0.1")
    assert second.port is None
    assert second.problem is not None
    assert str(exporter.port) in second.problem
    assert "watch.exporter_port" in second.problem
    second.update(_RECORD)
    second.close()


needs_prometheus = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="Prometheus is not installed"
)


def _promtool(*arguments: str) -> None:
    said = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stdout + said.stderr


@needs_prometheus
def test_examples_are_valid() -> None:
    _promtool("check", "config", str(_EXAMPLES / "prometheus.yml"))


_UNIT_TESTS = """
rule_files: [{rules}]
evaluation_interval: 30s
tests:
  - interval: 30s
    input_series:
      - series: 'longtake_step{{job="longtake",instance="a",node="a",rank="0"}}'
        values: '0+5x10 50x40'
      - series: 'longtake_step{{job="longtake",instance="b",node="b",rank="1"}}'
        values: '0+5x50'
      - series: 'up{{job="longtake",instance="a"}}'
        values: '1x50'
      - series: 'up{{job="longtake",instance="c"}}'
        values: '1x10 0x40'
      - series: 'longtake_clock_backward_steps_total{{job="longtake",instance="a",node="a"}}'
        values: '0x10 1x40'
      - series: 'longtake_gpu_throttle_bits{{job="longtake",instance="a",node="a",device="0"}}'
        values: '4x10 68x40'
      - series: 'longtake_gpu_throttle_bits{{job="longtake",instance="a",node="a",device="1"}}'
        values: '4x50'
      - series: 'longtake_step_work_seconds{{job="longtake",instance="a",node="a",rank="0"}}'
        values: '1.0x50'
      - series: 'longtake_step_work_seconds{{job="longtake",instance="b",node="b",rank="1"}}'
        values: '1.01x50'
      - series: 'longtake_step_work_seconds{{job="longtake",instance="b",node="b",rank="2"}}'
        values: '1.15x50'
      - series: 'longtake_phase_seconds{{job="longtake",instance="a",node="a",phase="f"}}'
        values: '1x10 9x40'
      - series: 'longtake_phase_limit_seconds{{job="longtake",instance="a",node="a",phase="f"}}'
        values: '6x50'
    promql_expr_test:
      - expr: count by (alertname, instance) (ALERTS{{alertstate="firing"}})
        eval_time: 4m
        exp_samples:
          - {{labels: '{{alertname="LongtakeSlowRank",instance="b"}}', value: 1}}
      - expr: count by (alertname, instance) (ALERTS{{alertstate="firing"}})
        eval_time: 20m
        exp_samples:
          - {{labels: '{{alertname="LongtakeSlowRank",instance="b"}}', value: 1}}
          - {{labels: '{{alertname="LongtakeNoSteps",instance="a"}}', value: 1}}
          - {{labels: '{{alertname="LongtakeNoSteps",instance="c"}}', value: 1}}
          - {{labels: '{{alertname="LongtakeStalled",instance="a"}}', value: 1}}
          - {{labels: '{{alertname="LongtakeClockSteppedBack",instance="a"}}', value: 1}}
          - {{labels: '{{alertname="LongtakeGpuHeldDown",instance="a"}}', value: 1}}
"""


@needs_prometheus
def test_alerts_fire_on_what_they_name(tmp_path: Path) -> None:
    path = tmp_path / "tests.yml"
    path.write_text(_UNIT_TESTS.format(rules=_EXAMPLES / "alerts.yml"))
    _promtool("test", "rules", str(path))


def test_it_listens_on_this_machine_only() -> None:
    """Unless watch.exporter_host says otherwise: it tells host names and paths."""
    section = WatchSection(exporter_port=9465)
    exporter = Exporter(0, section.exporter_host)
    hosts = [host for host, port in listening() if port == exporter.port]
    exporter.close()
    assert hosts == ["127.0.0.1"]

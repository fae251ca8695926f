"""Prometheus exporter: serves a node's heartbeat.json (state and health of its ranks) over HTTP.

The name of each metric begins with `longtake_` and contains its unit. Labels are the node and, if
they apply, the rank, the phase or the device. A metric that is missing in the heartbeat is missing
in the response and goes stale, as Prometheus expects.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from longtake.monitor.node_health import METRIC_HELP
from longtake.node_numbers import by_device

# Part of the heartbeat, key in it, metric, labels, help. The label `worker` is the entry's `pid`.
_RANK, _PHASE, _WORKER = ("rank",), ("rank", "phase"), ("rank", "worker", "phase")
_LIMIT = "Duration of the phase from which it is a stall"
_METRICS = (
    ("", "beat", "watcher_beats_total", (), "Heartbeats that the watcher has written"),
    ("", "stalls", "stalls_total", (), "Stalls that the watcher has seen"),
    ("", "watch_seconds_late", "watcher_late_seconds", (), "Delays of the watcher in total"),
    ("ranks", "step", "step", _RANK, "Global step of the rank; it falls at a rollback"),
    ("ranks", "steps_done", "steps_done", _RANK, "Steps that the rank has done in this launch"),
    ("ranks", "step_seconds", "rank_step_seconds", _RANK, "Mean time of the rank's own work"),
    ("ranks", "seconds", "phase_seconds", _PHASE, "Time since the rank's phase began"),
    ("ranks", "limit", "phase_limit_seconds", _PHASE, _LIMIT),
    ("workers", "seconds", "worker_seconds", _WORKER, "Time since a decode worker's phase began"),
    ("workers", "limit", "worker_limit_seconds", _WORKER, _LIMIT),
)


class HeartbeatCollector(Collector):
    """Prometheus collector that converts a node's newest heartbeat to metrics at each request."""

    def __init__(self) -> None:
        self.record: Mapping[str, Any] = {}

    def collect(self) -> Iterator[Metric]:
        # Read once: the watcher's thread replaces it during a request, and never changes it.
        record = self.record
        if not record:
            return
        node = str(record.get("host", ""))
        for part, key, name, labels, words in _METRICS:
            entries = (record.get(part) or []) if part else [record]
            names = ["pid" if label == "worker" else label for label in labels]
            found = (([str(each[name]) for name in names], each.get(key)) for each in entries)
            yield _metric(node, name, words, labels, found)
        # Health numbers are not in the table above: probes explain their own. A number of a device
        # or rank is called `name:device`.
        health: Mapping[str, float] = record.get("health") or {}
        for name in dict.fromkeys(key.partition(":")[0] for key in health):
            values, words = by_device(health, name), METRIC_HELP.get(name, name.replace("_", " "))
            label = "rank" if name in ("step_work_seconds", "steps_per_second") else "device"
            labels = (label,) if any(values) else ()
            samples = (([device][: len(labels)], each) for device, each in values.items())
            yield _metric(node, name, words, labels, samples)

    def describe(self) -> Iterator[Metric]:
        # Without this the registry would call `collect` once to learn the names.
        return iter(())


class Exporter:
    """HTTP server for Prometheus with the metrics of the node's newest heartbeat.

    Attributes:
        port: the port; None: it is not served.
        problem: the reason why it is not served.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._collector = HeartbeatCollector()
        self.port: int | None = None
        self.problem: str | None = None
        # Not the default registry, which adds metrics of this process itself.
        registry = CollectorRegistry()
        registry.register(self._collector)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            self.problem = (
                f"The exporter does not run: it cannot listen at port {port} "
                f"({error.strerror}). Another run's watcher may have it: set watch.exporter_port."
            )
            return
        self.port = int(self._server.server_port)

    def update(self, record: Mapping[str, Any]) -> None:
        self._collector.record = record

    def close(self) -> None:
        if self.port is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
        self.port = None


def _metric(
    node: str,
    name: str,
    words: str,
    labels: Iterable[str],
    samples: Iterable[tuple[list[str], Any]],
) -> Metric:
    """Build a metric of Prometheus: a counter if its name ends in _total, else a gauge."""
    family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    metric = family(f"longtake_{name}", words, labels=["node", *labels])
    for values, number in samples:
        if isinstance(number, int | float):
            metric.add_metric([node, *values], float(number))
    return metric

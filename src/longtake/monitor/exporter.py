"""Serves heartbeat.json to Prometheus over HTTP.

Each metric begins with `longtake_` and has its unit in its name; labels are the node, and where
they apply the rank, the phase or the device. A metric that a heartbeat does not hold is missing and
goes stale, as Prometheus expects.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from longtake.monitor.node_health import METRIC_HELP

_NODE_NUMBERS = {
    "beat": ("watcher_beats_total", "Heartbeats that the watcher has written"),
    "stalls": ("stalls_total", "Stalls that the watcher has seen"),
    "watch_seconds_late": (
        "watcher_late_seconds",
        "Time by which the watcher itself was late, in total",
    ),
}
_RANK_NUMBERS = {
    "step": ("step", "Global step of the rank; it falls at a rollback"),
    "steps_done": ("steps_done", "Steps that the rank has done in this launch"),
    "step_seconds": ("rank_step_seconds", "The rank's own work for a step, on average"),
}
_PHASE_NUMBERS = {
    "seconds": ("phase_seconds", "For how long the rank has been in its phase"),
    "limit": ("phase_limit_seconds", "After how long that would be a stall"),
}
_WORKER_NUMBERS = {
    "seconds": ("worker_seconds", "For how long a decode worker has been in its phase"),
    "limit": ("worker_limit_seconds", "After how long that would be a stall"),
}
Sample = tuple[list[str], float]


class HeartbeatCollector(Collector):
    """Makes metrics of the newest heartbeat at each request."""

    def __init__(self) -> None:
        self.record: Mapping[str, Any] = {}

    def collect(self) -> Iterator[Metric]:
        """All metrics; none before there is a heartbeat."""
        record = self.record
        if not record:
            return
        node = str(record.get("host", ""))
        for key, (name, words) in _NODE_NUMBERS.items():
            yield _metric(name, words, ["node"], _known([([node], record.get(key))]))
        ranks, workers = record.get("ranks") or [], record.get("workers") or []
        yield from _of_ranks(node, ranks)
        yield from _of_workers(node, workers)
        yield from _of_health(node, record.get("health") or {})

    def describe(self) -> Iterator[Metric]:
        return iter(())


class Exporter:
    """Serves the newest heartbeat."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._collector = HeartbeatCollector()
        self.port: int | None = None  # None: it is not served
        self.problem: str | None = None  # why it is not served
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


def _of_ranks(node: str, ranks: list[dict[str, Any]]) -> Iterator[Metric]:
    for key, (name, words) in _RANK_NUMBERS.items():
        found = [([node, str(rank["rank"])], rank.get(key)) for rank in ranks]
        yield _metric(name, words, ["node", "rank"], _known(found))
    for key, (name, words) in _PHASE_NUMBERS.items():
        found = [([node, str(each["rank"]), str(each["phase"])], each.get(key)) for each in ranks]
        yield _metric(name, words, ["node", "rank", "phase"], _known(found))


def _of_workers(node: str, workers: list[dict[str, Any]]) -> Iterator[Metric]:
    for key, (name, words) in _WORKER_NUMBERS.items():
        found = [([node, *_worker(each)], each.get(key)) for each in workers]
        yield _metric(name, words, ["node", "rank", "worker", "phase"], _known(found))


def _worker(worker: Mapping[str, Any]) -> list[str]:
    return [str(worker["rank"]), str(worker["pid"]), str(worker["phase"])]


def _of_health(node: str, health: Mapping[str, float]) -> Iterator[Metric]:
    """Numbers `name:device`: each name is one metric."""
    names = dict.fromkeys(key.partition(":")[0] for key in health)
    for name in names:
        found = {key: each for key, each in health.items() if key.partition(":")[0] == name}
        words = METRIC_HELP.get(name, name.replace("_", " "))
        label = "rank" if name in ("step_work_seconds", "steps_per_second") else "device"
        has_devices = any(":" in key for key in found)
        labels = ["node", label] if has_devices else ["node"]
        values = [
            ([node, key.partition(":")[2]][: len(labels)], each) for key, each in found.items()
        ]
        yield _metric(name, words, labels, _known(values))


def _known(found: list[tuple[list[str], Any]]) -> list[Sample]:
    return [(labels, float(each)) for labels, each in found if isinstance(each, int | float)]


def _metric(name: str, words: str, labels: list[str], samples: list[Sample]) -> Metric:
    """A counter if its name ends in _total, else a gauge."""
    family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    metric = family(f"longtake_{name}", words, labels=labels)
    for values, number in samples:
        metric.add_metric(values, number)
    return metric

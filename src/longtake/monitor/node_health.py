"""Health of a node: sampling of its probes, comparison with other nodes, and reports of problems.

health.jsonl takes some 40 bytes per number: 2 KiB per line for a node without GPUs, 6 KiB with
eight GPUs and InfiniBand ports, so 20 to 50 MiB per day at one line per ten seconds. Above 64 MiB
every second line is removed: the newest hours stay complete, and the oldest get sparse.
"""

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from longtake import node_numbers
from longtake.formatting import format_size
from longtake.fsio import append_json, atomic_write, now
from longtake.health import clock, system
from longtake.health.gpu import HARMFUL_THROTTLES, GpuProbe, throttle_words
from longtake.health.network import BUSY, RATE, UNANSWERED, Ethernet, InfiniBand, PeerConnections
from longtake.heartbeat import heartbeat_dir, read_heartbeats
from longtake.monitor import observe, outliers
from longtake.monitor.reporting import QueueThread
from longtake.node_dir import NodeDirectory, NodeEventKind, all_nodes
from longtake.run_dir import RunDirectory

HealthEvent = tuple[NodeEventKind, dict[str, Any]]
_LOOK_SECONDS = 0.25
_CLOSE_SECONDS, _LOG_CLOSE_SECONDS = 0.5, 0.3


class NodeHealth:
    """Samples the health of a node with probes, in threads of its own, until it is closed."""

    def __init__(
        self,
        run: RunDirectory,
        node: NodeDirectory,
        settings: observe.WatchSettings,
        data_paths: Sequence[Path] = (),
    ) -> None:
        self._host, self._seconds = node.host, settings.health_seconds
        folder = heartbeat_dir(run.path)
        self._clock = clock.Clock()
        self._peers = PeerNodes(run, node.host)
        self._connections = PeerConnections(lambda: _rank_pids(folder))
        self._places = {"run": run.path, **{str(path): path for path in data_paths}}
        may_hang: list[system.HealthProbe] = [
            system.DiskProbe(node.path, self._places),
            clock.Chrony(),
            clock.TimeDaemons(),
            Ethernet(),
            InfiniBand(),
            GpuProbe(),
            self._peers,
            self._connections,
        ]
        self._probes: list[system.HealthProbe] = [
            outliers.StepProbe(folder),
            system.LoadProbe(),
            system.CgroupMemory(),
            clock.KernelClock(),
            *map(system.ThreadedProbe, may_hang),
        ]
        self._outliers, self._slow_links = outliers.OutlierDetector(), outliers.SlowLinks()
        self._rules = HealthRules()
        self._log = HealthLog(node.health_path)
        self._latest: system.Numbers = {}
        self._events: deque[HealthEvent] = deque()
        self._wrong: dict[str, str] = {}
        self._wrong_since = 0.0
        self._full: set[str] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample_all, name="health", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop sampling the node's health; returns within about a second even if a probe hangs."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_SECONDS)
        for probe in self._probes:
            probe.close()
        self._log.close(_LOG_CLOSE_SECONDS)

    def latest(self) -> system.Numbers:
        return dict(self._latest)

    def addresses(self) -> list[str]:
        return self._connections.addresses

    def take_events(self) -> list[HealthEvent]:
        return [self._events.popleft() for _ in range(len(self._events))]

    def _sample_all(self) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            try:
                # The clock is looked at in every round: it detects steps between two samples.
                self._clock.look()
                for change in self._clock.take_changes():
                    # Offsets to other nodes that were measured before the step are wrong now.
                    self._peers.forget_offsets()
                    event = clock_event(self._host, change, clock.time_daemons())
                    self._events.append(event)
                if time.monotonic() >= due:
                    # After a delay no samples are made up for.
                    due = max(due + self._seconds, time.monotonic())
                    self._sample()
            except Exception:  # one failure must not end all later samples
                traceback.print_exc(file=sys.stderr)
            self._stop.wait(_LOOK_SECONDS)

    def _sample(self) -> None:
        # Every probe that may hang is wrapped in a thread, so this returns within seconds.
        found = self._clock.sample()
        self._connections.set_hosts(self._peers.addresses)
        for probe in self._probes:
            found |= probe.sample()
        flagged = self._outliers.judge(found, self._peers.health)
        found |= self._slow_links.judge(found, self._peers.health)
        self._report_wrong(self._rules.wrong(found, flagged), flagged, found)
        full = full_disks(found)
        for name in full.keys() - self._full:
            gib, path = full[name] / 2**30, str(self._places.get(name, name))
            text = f"{self._host}: {gib:.2f} GiB are free on the disk of {path}; make room there."
            fields = {"path": path, "free_gib": round(gib, 3), "message": text}
            self._events.append(("disk_full", fields))
        self._full = set(full)
        self._latest = found
        short = {n: int(x) if float(x).is_integer() else round(x, 9) for n, x in found.items()}
        self._log.put({"time": now(), **short})

    def _report_wrong(
        self, wrong: dict[str, str], flagged: Sequence[outliers.Outlier], found: system.Numbers
    ) -> None:
        if wrong.keys() - self._wrong.keys():
            if not self._wrong:
                self._wrong_since = time.monotonic()
            reason = ", ".join(wrong.values())
            fields: dict[str, Any] = {"reason": reason, "causes": dict(wrong)}
            slow = [each for each in flagged if each.signal.name == "step_work_seconds"]
            if slow:
                worst = max(slow, key=lambda each: each.percent)
                fields |= {"rank": int(worst.device), "percent": round(worst.percent, 1)}
            if peer := next(iter(node_numbers.by_device(wrong, outliers.SLOW)), None):
                fields |= {"peer": peer, "send_bytes_per_second": found.get(f"{RATE}:{peer}")}
            self._events.append(("degraded", {**fields, "message": f"{self._host}: {reason}."}))
        elif self._wrong and not wrong:
            seconds = time.monotonic() - self._wrong_since
            reason = ", ".join(self._wrong.values())
            text = f"{self._host}: as usual again, after {seconds:.0f} s; it was: {reason}."
            self._events.append(("recovered", {"reason": reason, "message": text}))
        self._wrong = wrong


def _rank_pids(folder: Path) -> list[int]:
    found = (each for each in read_heartbeats(folder) if each.role == "rank")
    return [each.pid for each in found if each.phase != "ended"]


# --- Rules: what is wrong, in words.

_PERSISTS = 3  # windows for which a condition must hold before it is reported
_STAYS = 30  # windows for which a momentary error is reported
_CLOCK_DIFFERENCE_SECONDS = 0.1
_SAVING_SECONDS = 60.0  # limit of the disk probe while a checkpoint is written
_MEMORY_SHARE, _FILES_SHARE = 0.02, 0.9
_FULL_BYTES, _FULL_SHARE = 5 * 2**30, 0.05
_FULL_INODES_SHARE = 0.01
_SLOW_SHARE = 1 / 3
_AT_ONCE = (system.HANGS, "disk_is_failing", "clock_offset", UNANSWERED)
# The disk's probe is an exception: an fsync of seconds is usual on ext4 and NFS.
_DISK_HANGS = f"{system.HANGS}:{system.DiskProbe.name}"


class HealthRules:
    """Rules that decide which problems a node has, from the samples of its health so far.

    To add a number: measure and explain it in a probe of `longtake.health`, and add it to a table
    in `node_numbers`, which defines how it is judged or shown. Add a new probe to the probes of
    `NodeHealth` and to `_EXPLAINED`, and a condition that no table can express to `_bad_now`. The
    event `degraded` names a problem; `recovered` follows when nothing is wrong any more.
    """

    def __init__(self) -> None:
        self._before: system.Numbers = {}
        self._was_up: set[str] = set()
        self._ages: dict[str, int] = {}
        self._left: dict[str, tuple[int, str]] = {}

    def wrong(self, numbers: system.Numbers, flagged: Sequence[outliers.Outlier]) -> dict[str, str]:
        """Return a text for each current problem of the node's health, by an identifying key."""
        found: dict[str, str] = {}
        for name in dict.fromkeys(each.signal.name for each in flagged):
            alike = [each for each in flagged if each.signal.name == name]
            others = len({each.device for each in alike}) - 1
            worst = max(alike, key=lambda each: abs(each.percent))
            found[name] = f"{worst} (and {others} more)" if others else f"{worst}"
        bad = dict(_bad_now(numbers))
        self._ages = {key: self._ages.get(key, 0) + 1 for key in bad}
        for key, text in bad.items():
            is_at_once = key.startswith(_AT_ONCE) and key != _DISK_HANGS
            if is_at_once or self._ages[key] >= _PERSISTS:
                found[key] = text
        for device, is_up in node_numbers.by_device(numbers, "link_up").items():
            if is_up:
                self._was_up.add(device)
            # A port that was never up is not connected, which is usual.
            elif device in self._was_up:
                found[f"link_up:{device}"] = f"the link {device} is down"
        self._left = {key: (n - 1, text) for key, (n, text) in self._left.items() if n > 1}
        for name, text in node_numbers.ERROR_COUNTS.items():
            for device, count in node_numbers.by_device(numbers, name).items():
                key = f"{name}:{device}" if device else name
                # A count that is seen for the first time is no increase.
                more = count - self._before.get(key, count)
                if more > 0:
                    xid = numbers.get(f"gpu_last_xid:{device}", 0)
                    self._left[key] = (_STAYS, text.format(count=more, device=device, xid=xid))
        self._before = dict(numbers)
        return found | {key: text for key, (_, text) in self._left.items()}


def full_disks(numbers: system.Numbers) -> dict[str, float]:
    """Return the free bytes of the node's disks that are full or nearly full, by name.

    Nearly full means less than min(5 GiB, 5 %) of space, or less than 1 % of inodes, is free.
    """
    found = {}
    for name, free in node_numbers.by_device(numbers, "disk_free_bytes").items():
        nearly = min(_FULL_BYTES, _FULL_SHARE * numbers.get(f"disk_size_bytes:{name}", 0))
        inodes = numbers.get(f"disk_free_inodes:{name}", 1)
        few = _FULL_INODES_SHARE * numbers.get(f"disk_inodes:{name}", 0)
        if free < nearly or inodes < few or numbers.get(f"disk_is_full:{name}"):
            found[name] = free
    return found


def _bad_now(numbers: system.Numbers) -> Iterator[tuple[str, str]]:
    for device, bits in node_numbers.by_device(numbers, "gpu_throttle_bits").items():
        for word in throttle_words(int(bits) & HARMFUL_THROTTLES):
            yield f"gpu_throttle_bits:{device}:{word}", f"GPU {device} {word}"
    for device, lost in node_numbers.by_device(numbers, "gpu_is_lost").items():
        if lost:
            yield f"gpu_is_lost:{device}", f"the driver no longer reaches GPU {device}"
    for probe, seconds in node_numbers.by_device(numbers, system.HANGS).items():
        is_saving = probe == system.DiskProbe.name and numbers.get(node_numbers.CHECKPOINT)
        if seconds >= (_SAVING_SECONDS if is_saving else system.HANGING_SECONDS):
            yield (
                f"{system.HANGS}:{probe}",
                f"looking at {probe} has been hanging for {seconds:.0f} s",
            )
    if numbers.get("disk_is_failing:run"):
        yield "disk_is_failing", "the run directory can be neither written nor read"
    for host, seconds in node_numbers.by_device(numbers, "clock_offset_at_least_seconds").items():
        if seconds >= _CLOCK_DIFFERENCE_SECONDS:
            yield (
                f"clock_offset:{host}",
                f"its clock and {host}'s differ by at least {seconds:.3f} s",
            )
    for host, seconds in node_numbers.by_device(numbers, UNANSWERED).items():
        if seconds:
            text = f"{host} has acknowledged nothing for {seconds:.0f} s of what is sent to it"
            yield f"{UNANSWERED}:{host}", text
    for host, share in node_numbers.by_device(numbers, outliers.SLOW).items():
        if share <= _SLOW_SHARE:
            rate, busy = numbers[f"{RATE}:{host}"], numbers[f"{BUSY}:{host}"]
            takes = f"{rate / 1e6:.3g} MB/s, {1 / max(share, 1e-4):.0f} times less than usual"
            text = f"the link to {host} carries {takes}, and is busy {busy:.0%} of the time"
            yield f"{outliers.SLOW}:{host}", text
    available = numbers.get("memory_available_bytes")
    if available is not None and available < _MEMORY_SHARE * numbers["memory_size_bytes"]:
        yield "memory", f"{format_size(int(available))} of memory left"
    files, limit = numbers.get("open_files", 0), numbers.get("open_files_limit", 0)
    if limit and files >= _FILES_SHARE * limit:
        yield "open_files", f"a process has {files:.0f} of {limit:.0f} files open"


# --- Changes of the clock, in words.

CLOCK_ADVICE = (
    "Let one program alone correct the clock: chrony, with `makestep 1.0 3` (it sets the clock "
    "in its first three updates only, and slews it afterwards), `rtcsync`, and a `maxslewrate`; "
    "and no ntpdate or `ntpd -q` in cron."
)


def clock_event(
    host: str, change: clock.ClockChange, daemons: Sequence[str]
) -> tuple[NodeEventKind, dict[str, Any]]:
    """Return the event of a change of a node's clock; `daemons` are programs that set the clock."""
    if isinstance(change, clock.ClockSteady):
        moved = _amount(change.seconds)
        text = f"{host}: the clock runs as usual again; it was moved by {moved}."
        return "recovered", {"seconds": change.seconds, "message": text}
    fields: dict[str, Any] = {"seconds": change.seconds}
    kind: NodeEventKind = "clock_stepped"
    if isinstance(change, clock.ClockSlewed):
        kind, fields["ppm"] = "clock_slewed", round(change.ppm, 1)
        way = "fast" if change.ppm > 0 else "slow"
        text = (
            f"the clock runs {abs(change.ppm):.0f} ppm too {way}, {_amount(change.seconds)} so "
            "far: a program corrects it, or its oscillator is broken."
        )
    else:
        way = "back" if change.seconds < 0 else "forward"
        text = (
            f"the clock was set {way} by {_amount(change.seconds)}. Timeouts of collectives and "
            "stores, certificates and file times may be wrong now."
        )
    if daemons:
        verb = "runs" if len(daemons) == 1 else "run, and work against each other"
        text += f" Here {' and '.join(daemons)} {verb}."
    message = f"{host}: {text} {CLOCK_ADVICE}"
    return kind, {**fields, "daemons": list(daemons), "advice": CLOCK_ADVICE, "message": message}


def _amount(seconds: float) -> str:
    if (size := abs(seconds)) >= 1:
        return f"{size:.6f} s"
    return f"{size * 1e3:.6g} ms" if size >= clock.STEP_SECONDS else f"{size * 1e6:.3g} us"


# --- Peers.


class PeerNodes(system.HealthProbe):
    """Health probe that reads the other nodes' heartbeats, to compare this node; it may hang."""

    name = "neighbours"
    numbers: Mapping[str, str] = {
        "neighbours": "Living nodes that this one is compared with",
        **clock.ClockOffsets.numbers,
    }

    def __init__(self, run: RunDirectory, host: str) -> None:
        self._run, self._host = run, host
        self._living = outliers.LivingNodes()
        self._offsets = clock.ClockOffsets(host)
        self._forgets = False
        self.health: dict[str, system.Numbers] = {}  # health numbers of each node, last sample
        self.addresses: dict[str, str] = {}  # node of each address that its ranks use

    def forget_offsets(self) -> None:
        self._forgets = True

    def sample(self) -> system.Numbers:
        """Read health numbers in the other nodes' heartbeats; a new node counts from its second."""
        if self._forgets:
            self._forgets = False
            self._offsets.forget()
        hosts = [node.host for node in all_nodes(self._run)]
        heartbeats, dates = dict[str, dict[str, Any]](), dict[str, float]()
        for host in outliers.peers_of(self._host, hosts):
            heartbeats[host] = NodeDirectory(self._run, host).read_heartbeat()
            # Directly after the file is read: a delay would widen the bounds of the offset.
            dates[host] = clock.read_clocks().real_ns / 1e9
        own = NodeDirectory(self._run, self._host).read_heartbeat()
        living = self._living.of(heartbeats, str(own.get("launch") or ""))
        found_at = {
            str(address): host
            for host, each in heartbeats.items()
            for address in each.get("addresses") or ()
        }
        # A new dictionary, as another thread reads it. Addresses of nodes that are gone stay.
        self.addresses = self.addresses | found_at
        found: system.Numbers = {"neighbours": float(len(living))}
        for host in living:
            found |= self._offsets.look(host, heartbeats[host], dates[host])
        self.health = {
            host: {
                name: each
                for name, each in (heartbeats[host].get("health") or {}).items()
                if isinstance(each, int | float)
            }
            for host in living
        }
        return found


# --- health.jsonl.

_MAX_LOG_BYTES = 64 * 2**20
_MAX_WAITING = 60


class HealthLog(QueueThread[dict[str, Any]]):
    """Writer of health.jsonl, a node's health samples, in its own thread, below `max_bytes`."""

    def __init__(self, path: Path, max_bytes: int = _MAX_LOG_BYTES) -> None:
        self._path, self._max_bytes = path, max_bytes
        super().__init__("health log", self._write, _MAX_WAITING)

    def _write(self, record: dict[str, Any]) -> None:
        with suppress(OSError):  # a full disk is reported elsewhere
            self._path.parent.mkdir(parents=True, exist_ok=True)
            append_json(self._path, record)
            if self._path.stat().st_size > self._max_bytes:
                thin_out(self._path)


def thin_out(path: Path) -> None:
    """Remove every second line of a health log; its last line is kept."""
    with path.open("rb") as file:
        num_lines = sum(1 for _ in file)
    with atomic_write(path) as aside, path.open("rb") as file, aside.open("xb") as thin:
        thin.writelines(line for number, line in enumerate(file) if (num_lines - number) % 2 == 1)


_CLOCKS = (clock.Clock, clock.KernelClock, clock.Chrony, clock.TimeDaemons)
_LINKS = (Ethernet, InfiniBand, PeerConnections, PeerNodes, outliers.SlowLinks)
_REST = (GpuProbe, system.DiskProbe, system.LoadProbe, system.CgroupMemory, outliers.StepProbe)
_EXPLAINED: Any = (*_CLOCKS, *_LINKS, *_REST, system.ThreadedProbe)
METRIC_HELP: Mapping[str, str] = {
    name: words for each in _EXPLAINED for name, words in each.numbers.items()
}
"""Explanation of each of a node's health numbers, by name."""

"""The watcher's loop: look at the hearts of a node, some times a second, and see to what is amiss.

The loop touches nothing but memory. Whatever may wait has a thread of its own: the run directory's
disk, the node's health, dumping processes, alerting people.
"""

import math
import os
import time
from contextlib import suppress
from typing import Any

from longtake.formatting import printable_lines
from longtake.health.cgroup import oom_kills
from longtake.heartbeat import Pulse
from longtake.watch.alarms import Alarms
from longtake.watch.answering import Answering
from longtake.watch.disk import Disk, is_full
from longtake.watch.health import HealthWatch
from longtake.watch.lost import Roll, alert_of
from longtake.watch.post import Lock, Post
from longtake.watch.report import Reporter
from longtake.watch.sight import Eyes, Graves, Sight, look, remove
from longtake.watch.signals import Signals
from longtake.watch.stall import Expectations

_LOOK_SECONDS, _MOST_LOOK_SECONDS = 0.25, 1.0
_COST = 0.002
"""The share of a core that looking may cost; on a node of many processes it looks less often."""
_BEAT_SECONDS = 0.9
_LATE_SECONDS = 1.0
_SECONDS_WITHOUT_HEART = 60.0
_SECONDS_TO_BEGIN = 2.0
_END_SECONDS = 10.0
_SECONDS_FROM_SIGTERM = 600.0
_SECONDS_BETWEEN_WORDS = 60.0


def watch(post: Post) -> None:
    """Watch a node's part of a run until it has ended; returns at once if somebody does already.

    Who was started by a run waits until the one that watches has ended, and a SIGTERM, which a
    scheduler sends to all processes of a job, does not end it while ranks still save.
    """
    with Signals(0.0 if post.by_hand else _SECONDS_FROM_SIGTERM) as signals:
        lock = Lock(post.folder)
        try:
            if _takes_over(post, lock, signals):
                _Watcher(post).watch(signals)
        finally:
            lock.give_back()


def _takes_over(post: Post, lock: Lock, signals: Signals) -> bool:
    seen, has_seen_ranks = time.monotonic(), False
    while not lock.take():
        if post.by_hand:
            _print(f"{post.run.path} is watched already, by process {lock.holder()}.")
            return False
        sight = look(post.folder)
        has_seen_ranks |= any(pulse.role == "rank" for pulse in (*sight.living, *sight.dead))
        if sight.ranks:
            seen = time.monotonic()
        elif has_seen_ranks:  # also if all were dead at the first look: the run was short
            return False
        if time.monotonic() - seen > _SECONDS_WITHOUT_HEART or signals.wait(_LOOK_SECONDS):
            return False
    return True


class _Watcher:
    def __init__(self, post: Post) -> None:
        self._post = post
        self._disk = Disk(post.node)
        self._reporter = Reporter(post, self._disk)
        self._expectations = Expectations(post.section)
        self._answering = Answering(post, self._disk, self._reporter, self._expectations)
        self._health = HealthWatch(post.run, post.node, post.section, post.data)
        self._exporter = self._opened_exporter()
        self._eyes, self._roll, self._graves = Eyes(post.folder), Roll(), Graves()
        self._alarms = Alarms(post, self._reporter, self._expectations, self._answering)
        self._beats = 0
        self._beaten_at = self._lived_at = time.monotonic()
        self._has_seen_ranks = self._has_noted_signal = False
        self._late_said_at = -math.inf

    def watch(self, signals: Signals) -> None:
        """Look until the last rank of the node is gone, or somebody ends this."""
        self._begin()
        interval, planned = _LOOK_SECONDS, time.monotonic()
        while True:
            started = time.thread_time()
            sight = self._eyes.look()
            self._notice_own_lateness(sight.now, planned)
            self._expectations.learn(sight.living)
            self._see_to_the_dead(sight)
            self._alarms.see_to(sight)
            self._see_to_health()
            if sight.now - self._beaten_at >= max(_BEAT_SECONDS, 2 * interval):
                self._beat(sight)
            if self._is_over(sight):
                break
            cost = time.thread_time() - started
            interval = min(max(cost / _COST, _LOOK_SECONDS), _MOST_LOOK_SECONDS)
            planned = time.monotonic() + interval
            if signals.wait(interval):
                self._reporter.say(f"ended by {signals.name}")
                break
            self._note(signals)
        self._end()

    def _note(self, signals: Signals) -> None:
        if signals.name and not self._has_noted_signal:
            self._has_noted_signal = True
            minutes = _SECONDS_FROM_SIGTERM / 60
            self._reporter.say(
                f"{signals.name}: this ends with the last rank, in {minutes:.0f} minutes at most"
            )

    def _begin(self) -> None:
        section, by_hand = self._post.section, self._post.by_hand
        names = ("action", "factor", "min_seconds", "max_seconds")
        limits = {name: getattr(section, name) for name in names}
        self._reporter.tell("watching", pid=os.getpid(), by_hand=by_hand, **limits)
        with suppress(OSError):
            self._disk.ask(lambda: None, _SECONDS_TO_BEGIN)  # the node's folder is there after it
        self._answering.start()
        self._health.start()

    def _end(self) -> None:
        """Finish what is being looked into, say what is to be said, and leave nothing behind."""
        self._answering.close(_END_SECONDS)
        self._health.close()
        self._see_to_health()
        sight = self._eyes.look()
        self._beat(sight)
        self._reporter.close(_END_SECONDS)
        self._disk.close(_END_SECONDS)
        if self._exporter is not None:
            self._exporter.close()
        if not sight.living:
            remove(sight.dead)

    def _notice_own_lateness(self, now: float, planned: float) -> None:
        if now - planned > _LATE_SECONDS:
            self._expectations.was_late(now - planned, now)
            if now - self._late_said_at > _SECONDS_BETWEEN_WORDS:
                self._late_said_at = now
                self._reporter.say(
                    f"nobody looked for {now - planned:.1f} s (in all for "
                    f"{self._expectations.seconds_late:.1f} s): the machine was suspended or too "
                    "busy"
                )

    def _see_to_the_dead(self, sight: Sight) -> None:
        if self._roll.wants_count(sight.now):
            self._roll.count_kills(oom_kills(), sight.now)
        if found := self._roll.call(sight.living, sight.dead):
            kills = self._roll.kills_since(oom_kills())
            for lost in found:
                self._reporter.tell("rank_died", is_alert=False, **lost.as_event(kills))
            if any(lost.is_first for lost in found):
                self._reporter.alert("rank_died", **alert_of(found, kills))
        self._graves.tidy(sight)

    def _see_to_health(self) -> None:
        for kind, fields in self._health.take_events():
            self._reporter.tell(kind, **fields)
        if (trouble := self._disk.take_trouble()) is not None:
            reason = f"{self._post.node.path} cannot be written: {trouble}"
            if is_full(trouble):
                self._reporter.tell("disk_full", path=str(self._post.node.path), reason=reason)
            else:
                self._reporter.say(reason)

    def _beat(self, sight: Sight) -> None:
        self._beaten_at = sight.now
        self._beats += 1
        record = {
            "host": self._post.host,
            "pid": os.getpid(),
            "beat": self._beats,
            "launch": self._expectations.launch,
            "ranks": [self._entry(each, sight) for each in sight.ranks],
            "workers": [self._entry(each, sight) for each in sight.living if each.role != "rank"],
            "health": self._health.latest(),
            "addresses": self._health.addresses(),
            "stalls": self._answering.num_stalls,
            "stall": self._alarms.open_token,
            "watch_seconds_late": round(self._expectations.seconds_late, 3),
            "by_hand": self._post.by_hand,
            "ended": self._have_all_ended(sight),
        }
        self._disk.beat(record)
        if self._exporter is not None:
            times = {"monotonic": time.monotonic(), "wall": time.time()}
            self._exporter.update({**record, **times})

    def _entry(self, pulse: Pulse, sight: Sight) -> dict[str, Any]:
        limit = self._expectations.limit_of(pulse, sight.now)
        own = pulse.work_seconds / pulse.work_count if pulse.work_count else None
        return {**pulse.as_dict(), "limit": limit, "step_seconds": own, "alive": True}

    def _have_all_ended(self, sight: Sight) -> bool:
        gone = [pulse for pulse in sight.dead if pulse.role == "rank"]
        return not sight.ranks and all(pulse.phase == "ended" for pulse in gone)

    def _is_over(self, sight: Sight) -> bool:
        if sight.ranks:
            self._lived_at, self._has_seen_ranks = sight.now, True
            return False
        # Who starts a watcher has a heart already: if it is not seen alive, the run was short.
        self._has_seen_ranks |= any(pulse.role == "rank" for pulse in sight.dead)
        if self._has_seen_ranks and (not self._post.by_hand or self._have_all_ended(sight)):
            return True
        return sight.now - self._lived_at > _SECONDS_WITHOUT_HEART

    def _opened_exporter(self) -> Any:
        section = self._post.section
        if section.exporter_port is None:
            return None
        from longtake.watch.exporter import Exporter  # 2 MiB that most watchers need not have

        exporter = Exporter(section.exporter_port, section.exporter_host)
        if exporter.problem:
            self._reporter.say(exporter.problem)
        return exporter


def _print(text: str) -> None:
    print(printable_lines(text), flush=True)  # noqa: T201 - to a person

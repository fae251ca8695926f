"""Tells what happened, to all who want to know: the node's events, people's alerts, the log."""

import time
from typing import Any

from longtake.fsio import now
from longtake.node_dir import NodeEventKind
from longtake.watch.alerts import Alerts
from longtake.watch.disk import Disk
from longtake.watch.post import Post

_QUIET: frozenset[NodeEventKind] = frozenset({"watching", "clock_slewed"})

_SECONDS_OF_NEWS = 600.0
_Where = tuple[Any, ...]


class Reporter:
    """Hands each event on; none of it waits.

    Args:
        post: the watcher's.
        disk: writes the node's events and the log.
    """

    def __init__(self, post: Post, disk: Disk) -> None:
        self._host, self._run = post.host, str(post.run.path.resolve())
        self._disk = disk
        self._alerts = Alerts(post.section, disk)
        self._alerted: dict[_Where, float] = {}
        self._quiet_tokens: set[str] = set()

    def tell(self, kind: NodeEventKind, /, *, is_alert: bool = True, **fields: Any) -> None:
        """Write an event down, and alert people if it is of a kind that concerns them.

        Args:
            kind: what happened.
            is_alert: False: people have been alerted to the same thing already.
            fields: of the event.
        """
        self._disk.tell(kind, fields)
        self._disk.say(f"{kind}: {_in_words(fields)}")
        if is_alert and kind not in _QUIET and not self._is_old_news(kind, fields):
            self.alert(kind, **fields)

    def alert(self, kind: NodeEventKind, /, **fields: Any) -> None:
        """Alert people, without writing anything down."""
        event = {"time": now(), "event": kind, "host": self._host, **fields, "run": self._run}
        self._alerts.send(event)

    def say(self, text: str) -> None:
        """Write a line to the log."""
        self._disk.say(text)

    def close(self, seconds: float) -> None:
        """Wait until alerts are sent, for so long at most."""
        self._alerts.close(seconds)

    def _is_old_news(self, kind: NodeEventKind, fields: dict[str, Any]) -> bool:
        """Whether people know already of this culprit at this place, or of what has gone on."""
        token = str(fields.get("token", ""))
        if kind == "went_on":
            return token in self._quiet_tokens
        if kind != "stalled" or not fields.get("suspects"):
            return False
        at, suspect = time.monotonic(), fields["suspects"][0]
        where = tuple(suspect.get(name) for name in ("host", "pid", "file", "line"))
        recent = {key: then for key, then in self._alerted.items() if at - then < _SECONDS_OF_NEWS}
        is_old = where in recent
        self._alerted = {where: at} | recent
        if is_old:
            self._quiet_tokens.add(token)
        return is_old


def _in_words(fields: dict[str, Any]) -> str:
    for name in ("sentence", "message", "reason"):
        if name in fields:
            return str(fields[name])
    return " ".join(f"{name}={value}" for name, value in fields.items() if value != "")

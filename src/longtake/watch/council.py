"""Gathers all nodes' answers about a stall, and passes the verdict on them.

Any process that can read the run directory can do so, and the first to write it down tells.
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from longtake.fsio import read_json, write_once
from longtake.node_dir import (
    NodeDirectory,
    NodeDump,
    Request,
    has_beaten,
    read_heartbeats,
    verdict_path,
)
from longtake.watch.answers import read_answers
from longtake.watch.blame import judge
from longtake.watch.disk import Disk
from longtake.watch.post import Post
from longtake.watch.report import Reporter
from longtake.watch.verdict import Verdict

_DISK_SECONDS = 3.0
_SECONDS_FOR_OTHERS = 3.0
_SECONDS_OF_A_BEAT = 2.5  # whoever lives writes a heartbeat in that time


class Council:
    """What the watchers of a run know together.

    Args:
        post: that of this one.
        disk: reads and writes the run directory.
        reporter: is told of the verdicts that this one was the first to pass.
    """

    def __init__(self, post: Post, disk: Disk, reporter: Reporter) -> None:
        self._post, self._disk, self._reporter = post, disk, reporter

    def beats(self) -> dict[str, dict[str, Any]]:
        """The other nodes' heartbeats, by host; none if the disk gives no answer."""
        try:
            found = self._disk.ask(lambda: read_heartbeats(self._post.run), _DISK_SECONDS)
        except OSError:
            return {}
        return {host: each for host, each in found.items() if host != self._post.host}

    def verdict(self, token: str) -> Verdict | None:
        """The verdict that somebody has passed, if any."""
        path = verdict_path(self._post.run, token)
        try:
            found = self._disk.ask(lambda: read_json(path), _DISK_SECONDS)
        except OSError:
            return None
        with suppress(TypeError, KeyError, AttributeError):  # it is damaged, or made up
            return Verdict.from_dict(found) if found else None
        return None

    def gather(
        self, request: Request, own: NodeDump, before: Mapping[str, Any], since: float
    ) -> tuple[list[NodeDump], list[str]]:
        """All nodes' answers, and the nodes of this launch that gave none.

        Nodes whose watchers live are waited for, some seconds.

        Args:
            request: that of the stall.
            own: this node's answer.
            before: the other nodes' heartbeats, as they were before.
            since: when that was, as `time.monotonic()`.
        """
        token, launch = request["token"], request.get("stall", {}).get("launch")
        end = time.monotonic() + _SECONDS_FOR_OTHERS
        silent = self._silent(token, launch)
        while silent and time.monotonic() < end:
            is_known = time.monotonic() - since > _SECONDS_OF_A_BEAT
            if is_known and not any(has_beaten(before.get(host), silent[host]) for host in silent):
                break
            time.sleep(0.2)
            silent = self._silent(token, launch)
        found, unread = read_answers(self._disk, self._post.run, token)
        if unread:
            self._reporter.say(f"{token}: the answers of {len(unread)} nodes were not read in time")
        dumps = {dump["host"]: dump for dump in found} | {self._post.host: own}
        missing = dict.fromkeys([*silent, *unread])
        return list(dumps.values()), [host for host in missing if host not in dumps]

    def _silent(self, token: str, launch: str | None) -> dict[str, dict[str, Any]]:
        """The heartbeats of the other nodes of a launch that have not answered, by host."""
        run = self._post.run
        others = self.beats().items()
        ours = {host: each for host, each in others if each.get("launch") == launch}
        missing = {host: each for host, each in ours.items() if not each.get("ended")}
        try:
            answered = self._disk.ask(
                lambda: {h for h in missing if NodeDirectory(run, h).dump_path(token).exists()},
                _DISK_SECONDS,
            )
        except OSError:
            answered = set()
        return {host: each for host, each in missing.items() if host not in answered}

    def conclude(self, request: Request, dumps: list[NodeDump], silent: list[str]) -> Verdict:
        """Pass the verdict; returns it, or the one that another watcher has passed before."""
        token, run = request["token"], self._post.run
        hosts = [dump["host"] for dump in dumps]
        flights = {host: NodeDirectory(run, host).flight_path(token) for host in hosts}
        verdict = replace(judge(token, request, dumps, silent, flights), host=self._post.host)
        path = verdict_path(run, token)
        try:
            is_first = self._disk.ask(lambda: write_once(path, verdict.as_dict()), _DISK_SECONDS)
        except OSError as error:
            is_first = True  # rather told twice than never
            self._reporter.say(f"{token}: the verdict is not written: {error}")
        if is_first:
            self._reporter.tell("stalled", **_of(verdict), verdict=f"stalls/{path.name}")
            return verdict
        return self.verdict(token) or verdict


def _of(verdict: Verdict) -> dict[str, Any]:
    found = verdict.as_dict()
    names = ("token", "launch", "step", "phase", "seconds", "limit", "sentence", "suspects")
    return {"kind": found["kind"]} | {name: found[name] for name in names}

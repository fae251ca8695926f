"""Where all processes of all nodes are, in groups of those that do the same; as JSON holds it."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from longtake.stacks.frames import Stack, native_of, stack_of
from longtake.stacks.trace import ROLES, Trace, traces
from longtake.watch.asking import Answers

_HALTED = ("T", "t", "D")


def picture(answers: Answers) -> dict[str, Any]:
    """Put together who does the same; the largest group of each role first.

    Returns:
        `groups` of processes of the same role, with the same stack of the main thread, and stopped
        by the same if they are; `missing` (see `NodeDump`), with `host`; `hosts` that answered, and
        those that were `silent`; and `files`, in which all of it lies.
    """
    alike: dict[_Kind, _Alike] = {}
    missing, hosts, launch = [], [], ""
    for dump in answers.dumps():
        hosts.append(dump["host"])
        launch = launch or dump["launch"]
        missing += [{"host": dump["host"], **each} for each in dump["missing"]]
        for trace in traces([dump]):
            alike.setdefault(_kind(trace), _Alike()).add(trace)
    groups = [_described(kind, each) for kind, each in alike.items()]
    return {
        "launch": launch,
        "hosts": hosts,
        "groups": sorted(groups, key=lambda each: (ROLES.index(each["role"]), -each["count"])),
        "missing": missing,
        "silent": list(answers.silent),
        "files": list(map(str, answers.files)),
    }


_Kind = tuple[str, str, str, Stack]
"""Role, command of what is not known otherwise, what it is stopped by, stack."""


@dataclass
class _Alike:
    """Processes that do the same: a few words of each, and the calls of C of one of them."""

    members: list[dict[str, Any]] = field(default_factory=list)
    native: Stack = ()
    threads: Counter[tuple[str, Stack]] = field(default_factory=Counter)

    def add(self, trace: Trace) -> None:
        self.members.append(_member(trace))
        self.threads.update((each["name"], stack_of(each)) for each in trace.threads[1:])
        if trace.threads and not self.native:
            self.native = native_of(trace.threads[0])


def _kind(trace: Trace) -> _Kind:
    command = trace.last["command"] if trace.role == "helper" else ""
    halted = trace.last["state"] if trace.last["state"] in _HALTED else ""
    return trace.role, command, halted, trace.stack


def _described(kind: _Kind, alike: _Alike) -> dict[str, Any]:
    by_stack: dict[Stack, list[tuple[str, int]]] = defaultdict(list)
    for (name, stack), count in alike.threads.most_common():
        by_stack[stack].append((name, count))
    threads = [
        {
            "names": sorted(name for name, _ in named),
            "count": sum(count for _, count in named),
            "stack": _calls(stack),
        }
        for stack, named in by_stack.items()
    ]
    return {
        "role": kind[0],
        "count": len(alike.members),
        "members": alike.members,
        "stack": _calls(kind[-1]),
        "native": _calls(alike.native),
        "threads": threads,
    }


def _member(trace: Trace) -> dict[str, Any]:
    heart, last = trace.heart or {}, trace.last
    return {
        "host": trace.host,
        "pid": trace.pid,
        "role": trace.role,
        "rank": trace.rank,
        "command": last["command"],
        "phase": heart.get("phase"),
        "seconds": heart.get("seconds"),
        "step": heart.get("step"),
        "detail": heart.get("detail"),
        "path_of_clip": heart.get("path_of_clip"),
        "state": last["state"],
        "method": last["method"],
        "has_moved": trace.has_moved if len(trace.rounds) > 1 else None,
        "watched_seconds": round(trace.seconds[-1] - trace.seconds[0], 3),
        "cpu_share": round(trace.cpu_share, 3),
        "raw": last["raw"],
    }


def _calls(stack: Stack) -> list[dict[str, Any]]:
    return [{"function": call[0], "file": call[1], "line": call[2]} for call in stack]

"""One process of a stall as the judge sees it: the thread that matters, and what it waits for."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

from longtake.heartbeat import Phase
from longtake.stacks.frames import Call, Stack, native_of, stack_of
from longtake.stacks.trace import Trace
from longtake.watch.verdict import Suspect
from longtake.watch.waiting import Wait, awaited, own_call, short_file

_ORDER: dict[str, int] = {phase: place for place, phase in enumerate(get_args(Phase))}
Position = tuple[int, int]
"""Steps done in the launch, and the place of the phase in a step."""


@dataclass(frozen=True, eq=False)
class Witness:
    """A rank or a decoding process.

    Attributes:
        trace: the process in all rounds.
        thread: the one that says what it waits for; empty: the main one.
        calls: of that thread, the innermost first, in the last round.
        native: the calls of C below them, where they were read.
        wait: what it waits for.
        has_gil: whether that thread holds Python's lock.
    """

    trace: Trace
    thread: str
    calls: Stack
    native: Stack
    wait: Wait
    has_gil: bool

    @property
    def rank(self) -> int:
        """Its rank, or that of the rank that it belongs to."""
        return -1 if self.trace.rank is None else self.trace.rank

    @property
    def seconds(self) -> float:
        """How long it has been in its phase."""
        return float((self.trace.heart or {}).get("seconds", 0.0))

    @cached_property
    def has_moved(self) -> bool:
        """Whether the thread's stack, or what the process says, changed between rounds."""
        if self.trace.has_moved:
            return True
        seen = self.trace.stacks_of(self.thread) if self.thread else []
        return any(stack != seen[0] for stack in seen[1:])

    @property
    def position(self) -> Position:
        """How far it has come."""
        heart = self.trace.heart or {}
        return int(heart.get("steps_done", 0)), _ORDER.get(str(heart.get("phase")), 0)

    @property
    def place(self) -> Call | None:
        """The line of code that says most about where it is."""
        return own_call(self.calls) or (self.calls[0] if self.calls else None)

    def suspect(self) -> Suspect:
        """What a verdict says of it."""
        trace, heart = self.trace, self.trace.heart or {}
        function, file, line = self.place or ("", "", 0)
        is_decoding = trace.role == "decode"
        return Suspect(
            host=trace.host,
            pid=trace.pid,
            role="decode" if is_decoding else "rank",
            rank=trace.rank,
            thread=self.thread,
            function=function,
            file=file,
            line=line,
            within=_told(self.calls[0]) if self.calls and self.calls[0] != self.place else "",
            doing=str(heart.get("phase", "")),
            step=int(heart.get("step", 0)),
            seconds=round(self.seconds, 2),
            clip=str(heart.get("detail", "")) if is_decoding else "",
            clip_path=str(heart.get("path_of_clip", "")),
            state=trace.last["state"],
            cpu_share=round(max(0.0, trace.cpu_share), 3),
            native=_native(self.native),
            has_gil=self.has_gil,
            moved=self.has_moved,
            waits_in=self.wait,
        )


def witness_of(trace: Trace) -> Witness:
    """Find the thread of a process that says what it waits for.

    A rank that waits for its checkpoint is where the thread is that writes it; one that computes
    gradients on a card, where autograd's is; one that decodes in threads, where these are.
    """
    phase = str((trace.heart or {}).get("phase", ""))
    threads = trace.threads
    if not threads:
        return Witness(trace, "", (), (), awaited((), phase), has_gil=False)
    main = _witness(trace, threads[0], "", phase)
    if trace.role != "rank":
        return main
    for each in threads[1:]:
        if each["frames"] and _stands_in(str(each["name"]), main, each):
            return _witness(trace, each, str(each["name"]), phase)
    return main


def _witness(trace: Trace, thread: Mapping[str, Any], name: str, phase: str) -> Witness:
    calls, native = stack_of(thread), native_of(thread)
    return Witness(trace, name, calls, native, awaited(calls, phase, native), thread["has_gil"])


def _stands_in(name: str, main: Witness, thread: Mapping[str, Any]) -> bool:
    if main.wait == "checkpoint":
        return name.startswith("checkpoint")
    if main.wait == "data":  # "decode_0": of a pool without processes
        return name.startswith("decode_") and own_call(stack_of(thread)) is not None
    in_autograd = bool(main.calls) and main.calls[0][0] == "_engine_run_backward"
    return in_autograd and name.startswith("pt_autograd")


def _told(call: Call) -> str:
    function, file, line = call
    return f"{function} ({short_file(file)}:{line})"


def _native(calls: Stack) -> str | None:
    if not calls:
        return None
    function, file, _ = calls[0]
    return f"{function} ({file.rpartition('/')[2]})" if file else function

"""Puts identical stacks together, and says what of a stack stays over time."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from operator import itemgetter
from typing import Any, Generic, TypeVar

Call = tuple[str, str, int]
"""Function, file and line."""
Stack = tuple[Call, ...]
"""The innermost call first."""

K = TypeVar("K")

_call = itemgetter("function", "file", "line")


@dataclass(frozen=True)
class Group(Generic[K]):
    """Everybody with the same stack."""

    stack: Stack
    members: tuple[K, ...]


def group(stacks: Iterable[tuple[K, Stack]]) -> list[Group[K]]:
    """Put identical stacks together; the largest group first, then the one that was seen first."""
    found: dict[Stack, list[K]] = {}
    for member, stack in stacks:
        if (known := found.get(stack)) is None:
            found[stack] = [member]
        else:
            known.append(member)
    groups = [Group(stack, tuple(members)) for stack, members in found.items()]
    return sorted(groups, key=lambda each: -len(each.members))


def unmoved(stacks: Sequence[Stack]) -> Stack:
    """The calls that are the same in all stacks, counted from the outermost."""
    outermost_first = zip(*(reversed(stack) for stack in stacks), strict=False)
    same = takewhile(lambda calls: len(set(calls)) == 1, outermost_first)
    return tuple(calls[0] for calls in same)[::-1]


def stack_of(thread: Mapping[str, Any]) -> Stack:
    """A thread's Python calls, of a `Thread` as JSON has it.

    Without those of C, so that a stack that was read with them equals one that was not.
    """
    return _of_python(tuple(map(_call, thread["frames"])))


@lru_cache(4096)
def _of_python(calls: Stack) -> Stack:
    return tuple(call for call in calls if is_python(call[1]))


def native_of(thread: Mapping[str, Any]) -> Stack:
    """The calls of C that a thread's innermost Python call has led to; empty if none are known."""
    calls = map(_call, thread["frames"])
    return tuple(takewhile(lambda call: not is_python(call[1]), calls))


def is_python(file: str) -> bool:
    """Whether a call's file is Python code: a module, or such as <string>, <frozen posixpath>."""
    return file.endswith(".py") or file.startswith("<")

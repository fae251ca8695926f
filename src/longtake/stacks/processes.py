"""Which processes belong to which, by /proc."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from longtake.stacks.proc import ProcessFacts, facts, parent_of

__all__ = ["ProcessFacts", "descendants", "facts", "parents"]


def parents() -> dict[int, int]:
    """Each process of this machine, and its parent."""
    found: dict[int, int] = {}
    with suppress(OSError):
        for path in Path("/proc").iterdir():
            if path.name.isdecimal() and (parent := parent_of(int(path.name))):
                found[int(path.name)] = parent
    return found


def descendants(
    pid: int, known: Mapping[int, int] | None = None, without: Collection[int] = ()
) -> list[int]:
    """A process's children, theirs, and so on; parents before their children.

    Args:
        pid: the process, which is not one of them.
        known: what `parents` returned; None: it is asked.
        without: processes that are left out, with all that they have started.
    """
    children: dict[int, list[int]] = defaultdict(list)
    for child, parent in sorted((parents() if known is None else known).items()):
        children[parent].append(child)
    found = [pid]
    for each in found:  # which grows
        found += (child for child in children[each] if child not in without)
    return found[1:]

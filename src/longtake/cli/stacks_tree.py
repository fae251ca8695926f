"""What `longtake stacks` tells, as a tree for people; made of nothing but its JSON."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from longtake.cli.stacks_words import (
    doing,
    is_halted,
    is_library,
    spelled,
    state_of,
    who,
    worth_showing,
)
from longtake.stacks import common_calls

_PIPE_WIDTH = 120
_ROLES = {
    "rank": ("rank", "ranks"),
    "decode": ("decoding process", "decoding processes"),
    "agent": ("process of torchrun", "processes of torchrun"),
    "helper": ("other process", "other processes"),
}
_MOST_CALLS, _MOST_CALLS_OF_WAITING, _MOST_NATIVE_CALLS = 16, 2, 8
_MOST_GROUPS, _MOST_THREADS = 12, 6


def print_stacks(console: Console, facts: Mapping[str, Any]) -> None:
    """Print what `group_processes` returned, with `of` (what it is of) and `silent`."""
    if not console.is_terminal:
        console.width = max(console.width, _PIPE_WIDTH)
    tree = Tree(Text(_title(facts), style="bold"), guide_style="dim")
    for role, groups in groupby(facts["groups"], key=lambda each: str(each["role"])):
        _add_role(tree, role, list(groups))
    for each in facts["missing"]:
        tree.add(Text(f"gone: {who(each['role'], [each])}, {doing([each])}", style="red"))
    for host in facts["silent"]:
        tree.add(Text(f"{host}: its watcher lives, but did not answer within 10 s", style="red"))
    console.print(tree)
    console.print("[dim]Innermost calls first; some of libraries are left out (--json: all).[/dim]")


def _title(facts: Mapping[str, Any]) -> str:
    hosts = facts["hosts"]
    count = sum(each["count"] for each in facts["groups"])
    where = f"on {hosts[0]}" if len(hosts) == 1 else f"on {len(hosts)} nodes"
    return f"{facts['of']}: {count} process{'' if count == 1 else 'es'} {where}"


def _add_role(tree: Tree, role: str, groups: Sequence[Mapping[str, Any]]) -> None:
    """The calls that all of a role are in are printed once, and then where they differ."""
    count = sum(each["count"] for each in groups)
    title = Text(f"{count} {_ROLES[role][count != 1]}", style="bold")
    if shared := _shared(groups) if len(groups) > 1 else 0:
        title.append(f", all in {spelled(groups[0]['stack'][-shared])}", style="not bold")
    branch = tree.add(title)
    for each in groups[:_MOST_GROUPS]:
        _add_group(branch, each, shared)
    if left := groups[_MOST_GROUPS:]:
        number = sum(each["count"] for each in left)
        branch.add(Text(f"{number} more, in {len(left)} further places", style="dim"))


def _shared(groups: Sequence[Mapping[str, Any]]) -> int:
    """How many of the outermost calls all groups are in, up to one that is not a library's.

    Never all that there is of one: something is printed of each.
    """
    stacks = [
        tuple((call["function"], call["file"], call["line"]) for call in each["stack"])
        for each in groups
        if each["stack"]
    ]
    shared = min(len(common_calls(stacks)), min(map(len, stacks), default=1) - 1)
    while shared and is_library(groups[0]["stack"][-shared]):
        shared -= 1
    return shared


def _add_group(branch: Tree, group: Mapping[str, Any], shared: int) -> None:
    members = group["members"]
    head = Text(who(group["role"], members), style="cyan")
    head.append(f"  {doing(members)}", style="bold default")
    if state := state_of(members):
        head.append(f"  {state}", style="bold red" if is_halted(members) else "dim default")
    stack = group["stack"][: len(group["stack"]) - shared]
    waits = group["role"] == "agent" or all(each["phase"] == "idle" for each in members)
    most = _MOST_CALLS_OF_WAITING if waits else _MOST_CALLS
    lines = list(_calls(group["native"], stack, most) if stack else _unread(members[0]))
    branch.add(Text("\n").join([head, *lines, *_threads(group["threads"])]))


def _calls(
    native: Sequence[Mapping[str, Any]], stack: Sequence[Mapping[str, Any]], most: int
) -> Iterator[Text]:
    named = [call for call in native if not call["function"].startswith("0x")]
    for call in named[:_MOST_NATIVE_CALLS]:
        yield Text(f"  {spelled(call)}", style="magenta")
    shown = worth_showing(stack)
    for number, call in enumerate(shown[:most]):
        style = "bold yellow" if number == 0 else ("dim" if is_library(call) else "")
        yield Text(f"  {spelled(call)}", style=style)
    if shown[most:]:
        yield Text(f"  … and {len(shown) - most} more", style="dim")


def _unread(member: Mapping[str, Any]) -> Iterator[Text]:
    waits = re.search(r"^wchan: (\w*[a-z]\w*)", member["raw"], re.MULTILINE)
    where = f"in the kernel's {waits[1]}" if waits else f"state {member['state']}"
    yield Text(f"  its stacks could not be read; it is {where}", style="dim")


def _threads(threads: Sequence[Mapping[str, Any]]) -> Iterator[Text]:
    """Other threads, a line each: the innermost call that is not Python's own."""
    there = [each for each in threads if each["stack"]]
    for each in there[:_MOST_THREADS]:
        stack = each["stack"]
        call = next((call for call in stack if not _is_pythons_own(call)), stack[0])
        times = f" (in {each['count']})" if each["count"] > 1 else ""
        yield Text(f"  thread {', '.join(each['names'][:3])}{times}: {spelled(call)}", style="dim")
    if len(there) > _MOST_THREADS:
        yield Text(f"  and {len(there) - _MOST_THREADS} other kinds of threads", style="dim")


def _is_pythons_own(call: Mapping[str, Any]) -> bool:
    return is_library(call) and "/site-packages/" not in call["file"]

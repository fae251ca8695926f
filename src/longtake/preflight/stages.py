"""What all processes look at, one stage after the other.

Every stage ends where all have told the first process what they found: so what is measured is
measured on all nodes at once, and a process that does not come back is named.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from longtake.config import Recipe
from longtake.preflight import (
    addresses,
    clocks,
    code,
    compute,
    dataset,
    devices,
    discipline,
    environment,
    hostnames,
    inspection,
    limits,
    links,
    packages,
    recipe,
    room,
    run_folder,
    speed,
)
from longtake.preflight.connection import Connection
from longtake.preflight.finding import Finding, Judged, Skipped
from longtake.preflight.meeting import Meeting
from longtake.preflight.setting import Check, Facts, Setting, within

OF_NODES: tuple[Check, ...] = (
    hostnames,
    environment,
    packages,
    code,
    recipe,
    dataset,
    room,
    limits,
    inspection,
    discipline,
    devices,
    addresses,
)
"""Looked at by one process of each node, none of which needs another node."""

TOGETHER: tuple[Check, ...] = (run_folder, speed)
"""Likewise, but all at once."""

_OWN_SHARE = 0.8
"""Of the time in which a process has to tell what it found, that which its checks may take."""


@dataclass
class Seen:
    """What was found: on the first process by all, elsewhere by nobody.

    Attributes:
        facts: by check, and by node or process.
        order: the checks, as they were looked at.
        skipped: what was not looked at.
        hangs: whether a check of this process has not come back.
    """

    facts: dict[str, dict[str, Facts]] = field(default_factory=dict)
    order: list[Check] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    hangs: bool = False


def look(meeting: Meeting, setting: Setting, seen: Seen) -> None:
    """Go through all stages.

    Raises:
        LostError: a process does not answer; `seen` holds what was found until then.
    """
    _stage("nodes", OF_NODES, meeting, setting, seen)
    for check in TOGETHER:
        _stage(check.NAME, [check], meeting, setting, seen)
    _stage(compute.NAME, [compute], meeting, setting, seen, of_all=True)
    if meeting.store is None:
        return
    connection = Connection(meeting, with_cards=_have_cards(meeting, setting, seen))
    is_reachable = not any(map(addresses.is_unreachable, _good(seen, addresses).values()))
    alone = len(setting.hosts) == 1
    if not meeting.from_first("reachable", is_reachable or alone):
        seen.skipped.append(Skipped("clocks and links", "nodes cannot connect to each other"))
        return
    _stage(connection.NAME, [connection], meeting, setting, seen, of_all=True)
    connected = len(_good(seen, connection)) == setting.place.size
    if meeting.from_first("connected", connected):
        _stage(clocks.NAME, [clocks], meeting, setting, seen)
        _stage(links.NAME, [links], meeting, setting, seen, of_all=True)
    else:
        seen.skipped.append(Skipped("clocks and links", "not all processes could connect"))


def judge(seen: Seen, recipe_read: Recipe | None) -> Judged:
    """What the checks say of what was found, and what they could not find."""
    judged = Judged(skipped=list(seen.skipped))
    for check in seen.order:
        for who, each in seen.facts[check.NAME].items():
            if "failed" in each:
                what = f"{check.NAME} could not be looked at: {each['failed']}"
                judged.findings.append(Finding("error", check.NAME, (who,), what))
        if good := _good(seen, check):
            judged.add(check.judge(good, recipe_read))
    return judged


def _stage(
    name: str,
    checks: Sequence[Check],
    meeting: Meeting,
    setting: Setting,
    seen: Seen,
    *,
    of_all: bool = False,
) -> None:
    """Let each process, or one of each node, measure, and bring it together on the first."""
    found: dict[str, Facts] = {}
    # Short of what others wait for this process, so that it can still say that a check hangs.
    end = time.monotonic() + _OWN_SHARE * setting.seconds
    for check in checks if of_all or setting.place.speaks else ():
        meeting.doing(check.NAME)
        left = end - time.monotonic()
        found[check.NAME] = within(left if len(checks) == 1 else left / 2, check, setting)
        seen.hangs |= "hangs" in found[check.NAME]
    meeting.doing(f"waiting after {name}")
    told = meeting.gather(f"stage/{name}", found)
    seen.order += checks
    for check in checks:
        seen.facts[check.NAME] = {
            setting.label(rank) if of_all else setting.node_of(rank): each[check.NAME]
            for rank, each in told.items()
            if check.NAME in each
        }


def _good(seen: Seen, check: Check) -> dict[str, Facts]:
    return {who: each for who, each in seen.facts[check.NAME].items() if "failed" not in each}


def _have_cards(meeting: Meeting, setting: Setting, seen: Seen) -> bool:
    """Whether each process has a card of its own, so that NCCL joins them."""
    cards = {node: each["cards"] for node, each in _good(seen, environment).items()}
    enough = all(
        cards.get(host, 0) >= len(ranks)
        for host, ranks in zip(setting.hosts, setting.ranks, strict=True)
    )
    told: bool = meeting.from_first("cards", enough and torch.distributed.is_nccl_available())
    return told

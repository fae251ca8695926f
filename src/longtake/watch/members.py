"""Which processes of this node belong to a run, and what each of them is.

Ranks and decoding processes are known by their hearts, torchrun's process as the ranks' parent, and
everything else as what one of these has started. Whoever watches does not belong.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from longtake import stacks
from longtake.heartbeat import Pulse, folder_of, read_all
from longtake.stacks.processes import descendants, facts, parents

_AGENTS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_ONLOOKERS = ("longtake.watch", "longtake watch", "longtake stacks", "py-spy")


@dataclass(frozen=True)
class Member:
    """A process that belongs to a run.

    Attributes:
        pid: the process.
        role: what it is.
        rank: its rank, or that of the rank that it belongs to.
        pulse: what it says of itself, if it says anything.
        signal_file: where it writes its stacks when it is asked to, if it does.
    """

    pid: int
    role: Literal["rank", "decode", "agent", "helper"]
    rank: int | None
    pulse: Pulse | None = None
    signal_file: Path | None = None


def members(folder: Path) -> list[Member]:
    """All processes of a run on this node, by the folder of its hearts."""
    pulses = [pulse for pulse in read_all(folder) if pulse.is_alive]
    known = parents()
    ranks = [pulse.pid for pulse in pulses if pulse.role == "rank"]
    agents = _agents({known.get(pid, 0) for pid in ranks})
    return [
        *(_with_heart(pulse) for pulse in pulses),
        *(Member(pid, "agent", None) for pid in agents),
        *_helpers([*agents, *ranks], pulses, known),
    ]


def family(pid: int) -> list[Member]:
    """A process and all that it has started, whether they belong to a run or not."""
    known = parents()
    pids = {pid, *descendants(pid, known)}
    folders = folder_of(Path()).parent.glob("*")
    pulses = [pulse for folder in folders for pulse in read_all(folder) if pulse.pid in pids]
    pulses = [pulse for pulse in pulses if pulse.is_alive]
    agents = _agents({pid})
    found = [
        *(_with_heart(pulse) for pulse in pulses),
        *(Member(agent, "agent", None) for agent in agents),
        *_helpers([pid], pulses, known),
    ]
    is_known = any(member.pid == pid for member in found)
    return found if is_known else [Member(pid, "helper", None), *found]


def _agents(pids: Collection[int]) -> list[int]:
    found = [each for each in map(facts, sorted(pids)) if each]
    return [each.pid for each in found if any(name in each.command for name in _AGENTS)]


def _with_heart(pulse: Pulse) -> Member:
    return Member(pulse.pid, pulse.role, pulse.rank, pulse, _signal_file(pulse))


def _signal_file(pulse: Pulse) -> Path | None:
    """A rank has a file for it; a decoding process writes to memory, which its pool reads."""
    file = stacks.signal_path(pulse.path.parent, pulse.pid)
    if file.exists():
        return file
    stderr = Path(f"/proc/{pulse.pid}/fd/2")
    with suppress(OSError):
        return stderr if str(stderr.readlink()).startswith("/memfd:") else None
    return None


def _helpers(
    roots: Sequence[int], pulses: Sequence[Pulse], known: Mapping[int, int]
) -> list[Member]:
    of_pid = {pulse.pid: pulse for pulse in pulses}
    below = {pid for root in roots for pid in descendants(root, known)}
    onlookers = {pid for pid in below if _is_onlooker(pid)} | {os.getpid()}
    below = {pid for root in roots for pid in descendants(root, known, without=onlookers)}
    helpers = sorted(below - set(of_pid) - set(roots))
    return [Member(pid, "helper", _rank_above(pid, of_pid, known)) for pid in helpers]


def _is_onlooker(pid: int) -> bool:
    found = facts(pid)
    return found is None or found.state in "ZX" or any(name in found.command for name in _ONLOOKERS)


def _rank_above(pid: int, of_pid: Mapping[int, Pulse], known: Mapping[int, int]) -> int | None:
    while pid := known.get(pid, 0):
        if pid in of_pid:
            return of_pid[pid].rank
    return None

"""From dumps of all nodes to one verdict: who is to blame, and who merely waits.

A run of many ranks hangs at one of them, and all others wait for it. So whoever waits is no
suspect; who is waited for is, and of several that one that has come least far:

1. a rank that is gone; then whoever is stopped, or waits for a device that does not answer;
2. where ranks wait for data, the decoding processes that have been at one clip longest; and the
   process that gave the alarm;
3. ranks that wait for nobody while others do: they never joined. (Of a rank that waits for its
   checkpoint it is the saver's thread that counts.)
4. a node that does not answer, if ranks are missing;
5. if all wait: whom the flight recorder names; or who waits at another place than most, or, where
   there is no majority, whoever is behind;
6. if all wait at the same place, nobody: it is what connects them.

A suspect that moves is slow and not stuck, and comes after those that do not.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from typing import Any

from longtake.fsio import now
from longtake.node_dir import NodeDump, Request
from longtake.stacks.trace import Trace
from longtake.watch.flight import Finding, analyse, read_folders
from longtake.watch.scene import Scene, scene_of
from longtake.watch.sentence import sentence
from longtake.watch.verdict import Kind, MissingIn, Suspect, Verdict
from longtake.watch.witness import Witness, witness_of

_MOST_SUSPECTS = 8
_TOGETHER = ("collective", "device")
"""What a rank waits for that waits for other ranks."""


@dataclass(frozen=True)
class _Blame:
    kind: Kind
    suspects: Sequence[Suspect]


def judge(
    token: str,
    request: Request,
    dumps: Sequence[NodeDump],
    silent: Sequence[str],
    flights: Mapping[str, Path],
) -> Verdict:
    """Pass the verdict over what all nodes have answered to a request.

    Args:
        token: of the request.
        request: with the heart that gave the alarm, if one did.
        dumps: the answers.
        silent: nodes that gave none.
        flights: by node, where its ranks' flight recorders' dumps lie, if there are any.

    Returns:
        A verdict, whatever the dumps are.
    """
    recorders, _ = read_folders(flights.values())
    findings = analyse(recorders)
    stalled = frozenset(rank for each in findings for rank in each.stalled_ranks)
    scene = scene_of(dumps, stalled)
    stall: Mapping[str, Any] = request.get("stall", {})
    blame = _blame(scene, stall, silent, findings)
    suspects = tuple(blame.suspects[:_MOST_SUSPECTS])
    first = suspects[0] if suspects else None
    waiting = scene.waiting(blame.suspects)
    missing = _missing_in(findings)
    return Verdict(
        token=token,
        time=now(),
        host=gethostname(),
        kind=blame.kind,
        launch=str(stall.get("launch", "")) or next((each["launch"] for each in dumps), ""),
        step=int(stall.get("step", first.step if first else 0)),
        phase=str(stall.get("phase", first.doing if first else "")),
        seconds=stall.get("seconds"),
        limit=stall.get("limit"),
        suspects=suspects,
        waiting=waiting,
        silent_nodes=tuple(silent),
        missing_in=missing,
        sentence=sentence(blame.kind, blame.suspects, waiting, missing, silent, scene),
    )


def _blame(
    scene: Scene, stall: Mapping[str, Any], silent: Sequence[str], findings: Sequence[Finding]
) -> _Blame:
    if scene.lost:
        return _Blame("lost", scene.lost)
    if found := _halted(scene) or _by_itself(scene, stall):
        return _of(found)
    if scene.absent or (silent and not scene.ranks):
        return _Blame("lost", [Suspect(host, 0, "node", None) for host in silent])
    if found := _recorded(scene, findings) or _out_of_place(scene):
        return _Blame("stuck", [each.suspect() for each in found])
    return _Blame("link" if scene.ranks else "unknown", [])


def _of(found: Sequence[Witness]) -> _Blame:
    return _Blame("slow" if found[0].has_moved else "stuck", [each.suspect() for each in found])


def _halted(scene: Scene) -> list[Witness]:
    """Processes that a signal has stopped, that nobody has reaped, or ranks that a device keeps."""
    ranks = [each for each in scene.ranks if _is_stopped(each.trace) or _is_kept(each)]
    traces = [each for every in scene.decoding.values() for each in every if _is_stopped(each)]
    workers = [witness_of(each) for each in traces]
    return [*sorted(ranks, key=_longest_first), *sorted(workers, key=_longest_first)]


def _is_stopped(trace: Trace) -> bool:
    return trace.last["state"] in ("T", "t", "Z")


def _is_kept(each: Witness) -> bool:
    states = [seen["state"] for seen in each.trace.rounds]
    return len(states) > 1 and set(states) == {"D"} and not each.has_moved


def _by_itself(scene: Scene, stall: Mapping[str, Any]) -> list[Witness]:
    """Whoever waits for no other rank: who gave the alarm, or else who has come least far, first.

    If any do not move, then only those, without such as are only just there.
    """
    starved = {each.rank for each in scene.ranks if each.wait == "data"}
    workers = _decoding(scene, starved, stall)
    fed = {each.rank for each in workers}
    alone = [each for each in scene.ranks if each.wait not in _TOGETHER]
    found = [*workers, *(each for each in alone if each.wait != "data" or each.rank not in fed)]
    still = [each for each in found if not each.has_moved]
    longest = max((each.seconds for each in still), default=0.0)
    found = [each for each in still if 2 * each.seconds >= longest] or found
    position = {each.rank: each.position for each in scene.ranks}
    alarmed = stall.get("host"), stall.get("pid")
    return sorted(
        found,
        key=lambda each: (
            (each.trace.host, each.trace.pid) != alarmed,
            position.get(each.rank, (0, 0)),
            -each.seconds,
        ),
    )


def _decoding(scene: Scene, starved: set[int], stall: Mapping[str, Any]) -> list[Witness]:
    """Decoding processes that ranks wait for, and one that gave the alarm.

    Those that have been at one clip longest, of all that do not move; else the first of the rest.
    """
    is_alarmed = stall.get("role") == "decode"
    owner = {int(stall["rank"])} if is_alarmed else set()
    found: list[Witness] = []
    for trace in scene.busiest(starved | owner):
        if trace.rank in starved or (is_alarmed and trace.pid == stall["pid"]):
            found.append(witness_of(trace))
        if sum(not each.has_moved for each in found[-2 * _MOST_SUSPECTS :]) > _MOST_SUSPECTS:
            break
    return [each for each in found if not each.has_moved] or found[:1]


def _longest_first(each: Witness) -> float:
    return -each.seconds


def _recorded(scene: Scene, findings: Sequence[Finding]) -> list[Witness]:
    """Ranks that the flight recorder names."""
    blamed = {rank for each in findings for rank in each.to_blame}
    return [each for each in scene.ranks if each.rank in blamed]


def _out_of_place(scene: Scene) -> list[Witness]:
    """Of ranks that all wait for each other, those that do it where the others do not."""
    places: dict[Any, list[Witness]] = defaultdict(list)
    for each in scene.ranks:
        places[each.position, each.place].append(each)
    if len(places) < 2:
        return []
    most = max(places.values(), key=len)
    if 2 * len(most) > len(scene.ranks):
        rest = [each for group in places.values() if group is not most for each in group]
    else:
        behind = min(each.position for each in scene.ranks)
        rest = [each for each in scene.ranks if each.position == behind]
    return sorted(rest, key=lambda each: (each.position, -each.seconds))


def _missing_in(findings: Sequence[Finding]) -> tuple[MissingIn, ...]:
    found = []
    for each in findings:
        group, missing = each.description or each.group, set(each.missing_ranks)
        never = tuple(rank for rank in each.to_blame if rank in missing)
        stalled = tuple(rank for rank in each.to_blame if rank not in missing)
        if never:
            found.append(MissingIn(group, each.op, never))
        if stalled:
            found.append(MissingIn(group, each.op, stalled, has_joined=True))
    return tuple(found)

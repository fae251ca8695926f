"""The preflight of nodes that are named: it is started on each over ssh, and one of them tells.

First every node is asked whether it can take part at all; those that cannot are named, and the
others go on without them. Then torchrun is started on each, as it would be for the training. What
rank 0 says comes back as JSON, on whichever node it is.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from longtake.errors import LongtakeError
from longtake.preflight.finding import Finding, Judged, Skipped
from longtake.preflight.launched import Launched, Said
from longtake.preflight.report import Report, concluded, report
from longtake.preflight.ssh import Ssh, explain, python

_AT_ONCE = 64
_SECONDS_TO_ASK = 30.0
_MARGIN = 30.0
_ASK = """
import socket
import longtake
with socket.socket() as free:
    free.bind(("", 0))
    print(free.getsockname()[1])
"""
_NEVER_CAME = ("RendezvousTimeoutError", "timed out after")
_NO_STORE = ("RendezvousConnectionError", "connection to the C10d store has failed")


def preflight_over_ssh(
    nodes: Sequence[str],
    recipe: Path | None,
    changes: Sequence[str],
    seconds: float,
    options: Sequence[str] = (),
) -> Report:
    """Look at some nodes from here.

    Args:
        nodes: their names, as ssh knows them; the first has to be known by that to the others.
        recipe: its path, on the nodes as here; None: look at what every run needs.
        changes: to the recipe.
        seconds: how long a node, or a check, is waited for.
        options: of ssh, such as `User=me`.

    Returns:
        What rank 0 says, and which nodes could not take part.

    Raises:
        LongtakeError: no node is named, or one twice; or there is no ssh here.
    """
    begun = time.monotonic()
    if not nodes or len(set(nodes)) < len(nodes):
        raise LongtakeError(
            f"--nodes {','.join(nodes)}: expected names of nodes, each once, such as gpu00,gpu01."
        )
    ssh = Ssh(options)
    answers = _run_on_all(ssh, dict.fromkeys(nodes, python("-P", "-c", _ASK)), _SECONDS_TO_ASK)
    there = {node: said for node, said in answers.items() if said.status == 0}
    found = [_cannot_take_part(node, answers[node]) for node in nodes if node not in there]
    told = None
    if there:
        commands = _commands(there, recipe, changes, seconds)
        said = _run_on_all(ssh, commands, 2 * seconds + _MARGIN, until_one_fails=True)
        told = _report_of(said)
        found += [] if told else _why_no_report(said, seconds)
    if told is None:
        told = _nothing_told(nodes, recipe)
    told["nodes"] += [
        {"name": node, "processes": 0} for node in nodes if node not in there and told["processes"]
    ]
    told["findings"] += [each.__dict__ | {"nodes": list(each.nodes)} for each in found]
    return concluded({**told, "seconds": round(time.monotonic() - begun, 2)})


def _run_on_all(
    ssh: Ssh,
    commands: Mapping[str, Sequence[str]],
    seconds: float,
    *,
    until_one_fails: bool = False,
) -> dict[str, Said]:
    """Run a command on each node, all at once, and read what each says."""
    running = {node: Launched(ssh.start(node, command)) for node, command in commands.items()}
    end = time.monotonic() + seconds
    while (now := time.monotonic()) < end and any(each.is_running for each in running.values()):
        if until_one_fails and any(each.has_failed for each in running.values()):
            end = min(end, now + 5.0)  # for what the others have to say to it
        time.sleep(0.05)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        said = pool.map(Launched.end, running.values())
        return dict(zip(running, said, strict=True))


def _commands(
    there: Mapping[str, Said], recipe: Path | None, changes: Sequence[str], seconds: float
) -> dict[str, list[str]]:
    first, port = next(iter(there)), int(next(iter(there.values())).out.split()[-1])
    settings = f"join_timeout={math.ceil(seconds)},read_timeout={math.ceil(min(60.0, seconds))}"
    arguments = [str(recipe)] if recipe is not None else []
    arguments += [word for each in changes for word in ("--set", each)]
    return {
        node: python(
            *("-P", "-m", "longtake.preflight.leash"),
            *python("-P", "-m", "torch.distributed.run"),
            *("--nnodes", str(len(there)), "--nproc-per-node", "1", "--max-restarts", "0"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:{port}"),
            *("--rdzv-id", f"preflight-{port}"),
            *("--rdzv-conf", f"{settings},is_host={int(node == first)}"),
            *("-m", "longtake", "preflight", *arguments),
            *("--timeout", f"{seconds:g}", "--relayed"),
        )
        for node in there
    }


def _report_of(said: Mapping[str, Said]) -> dict[str, Any] | None:
    """Rank 0's report, on whichever node it was."""
    for each in said.values():
        start = f"\n{each.out}".find("\n{")  # a login shell may have said something before
        try:
            told: dict[str, Any] = json.loads(each.out[start:] if start >= 0 else "")
        except ValueError:
            continue
        return told
    return None


def _cannot_take_part(node: str, said: Said) -> Finding:
    if said.status is None:
        what = f"it has not answered within {_SECONDS_TO_ASK:g} s"
        advice = f"Look at what hangs there: ssh {node}; its disks, and its load."
        return Finding("error", "nodes", (node,), what, "an answer", advice)
    what, advice = explain(node, said.status, said.error)
    return Finding("error", "nodes", (node,), what, "", advice)


def _why_no_report(said: Mapping[str, Said], seconds: float) -> list[Finding]:
    """Who is to blame for it: not those who have waited for others in vain."""
    blamed = {
        node: each for node, each in said.items() if not any(s in each.error for s in _NEVER_CAME)
    }
    failed = {node: each for node, each in blamed.items() if each.status not in (0, None)}
    return [_blame(node, each, seconds) for node, each in (failed or blamed or said).items()]


def _blame(node: str, said: Said, seconds: float) -> Finding:
    first = "the node that was named first"
    if any(sign in said.error for sign in _NO_STORE):
        what = f"it cannot connect to {first}, where all meet"
        advice = f"Let it resolve the name of {first}, and let the firewall pass their ports."
    elif said.status is None:
        what = (
            f"it has not ended within {2 * seconds + _MARGIN:g} s, or was ended because of another"
        )
        advice = f"Look at what hangs there: ssh {node}; its disks, and its load."
    else:
        what = f"it ended before there was a report: {said.last_line}"
        advice = "Start it there by hand: longtake preflight."
    return Finding("error", "nodes", (node,), what, "", advice)


def _nothing_told(nodes: Sequence[str], recipe: Path | None) -> Report:
    skipped = [Skipped("everything else", "no node has told what it found")]
    facts = [{"name": node, "processes": 0} for node in nodes]
    return report(facts, 0, None if recipe is None else str(recipe), Judged(skipped=skipped), 0)

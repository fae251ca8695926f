"""One process's way through the preflight, from its arrival to the report."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from longtake import config
from longtake.config import Recipe
from longtake.errors import LongtakeError
from longtake.preflight import run_folder
from longtake.preflight.finding import Finding
from longtake.preflight.meeting import LostError, Meeting
from longtake.preflight.nodes import nodes_of
from longtake.preflight.place import find_place
from longtake.preflight.report import Report, report
from longtake.preflight.setting import Setting
from longtake.preflight.stages import Seen, judge, look

_SECONDS_TO_LET_GO = 0.1


def preflight(
    path: Path | None = None, changes: Sequence[str] = (), seconds: float = 120.0
) -> tuple[Report | None, bool]:
    """Look at this node, or at all together with the processes that were started like this one.

    Args:
        path: the recipe; None: look at what every run needs.
        changes: to the recipe, such as `training.steps=100`.
        seconds: how long any process, and any check, is waited for.

    Returns:
        The report, on rank 0 alone; and whether a check still hangs in this process, so that it
        has to be ended without waiting for its threads.

    Raises:
        LongtakeError: a process has not come, or the first one cannot be reached; alone: the
            recipe cannot be used.
    """
    begun = time.monotonic()
    meeting = Meeting(find_place(), seconds)
    setting = _setting(meeting, path, changes, seconds)
    seen, found = Seen(), []
    made, problem = _leave_token(setting)
    try:
        look(meeting, setting, seen)
    except LostError as lost:
        found.append(_lost(lost, setting))
    finally:
        run_folder.clear_away(setting, made)
    told = None
    if setting.place.is_first:
        judged = judge(seen, setting.recipe)
        told_of = {
            node for each in judged.findings if each.check == run_folder.NAME for node in each.nodes
        }
        judged.findings += found if told_of else [*problem, *found]
        taken = time.monotonic() - begun
        name = None if path is None else str(path)
        told = report(_nodes(seen, setting), setting.place.size, name, judged, taken)
    _part(meeting, seen)
    return told, seen.hangs


def _setting(
    meeting: Meeting, path: Path | None, changes: Sequence[str], seconds: float
) -> Setting:
    place = meeting.place
    read, problem = _read_recipe(path, changes)
    if problem and place.size == 1:
        raise LongtakeError(problem)
    hosts, ranks = meeting.from_first("nodes", nodes_of(meeting.came))
    own = next(each for each in ranks if place.rank in each)
    return Setting(
        place=replace(place, local_rank=own.index(place.rank)),
        recipe=read,
        recipe_path=path,
        recipe_problem=problem,
        token=meeting.from_first("token", secrets.token_hex(6)),
        seconds=seconds,
        hosts=hosts,
        ranks=ranks,
    )


def _read_recipe(path: Path | None, changes: Sequence[str]) -> tuple[Recipe | None, str]:
    """The recipe, or why there is none."""
    if path is None:
        return None, ""
    try:
        return config.load(path, changes), ""
    except LongtakeError as error:
        return None, str(error)


def _leave_token(setting: Setting) -> tuple[list[Path], list[Finding]]:
    """What rank 0 does before all look at the run directory: folders it made, or what failed."""
    if not setting.place.is_first:
        return [], []
    try:
        return run_folder.leave_token(setting), []
    except OSError as error:
        assert setting.recipe is not None
        what = f"{setting.recipe.out} cannot be written: {error.strerror or error}"
        nodes = (setting.hosts[0],)
        return [], [Finding("error", run_folder.NAME, nodes, what, "", run_folder.ADVICE)]


def _lost(lost: LostError, setting: Setting) -> Finding:
    nodes = tuple(dict.fromkeys(setting.node_of(rank) for rank in lost.silent))
    advice = "Look at what hangs there: longtake stacks --pid, ps, dmesg."
    return Finding("error", "silence", nodes, str(lost), "an answer", advice)


def _nodes(seen: Seen, setting: Setting) -> list[dict[str, Any]]:
    """Each node's name, how many processes it has, and digests of what should be the same."""
    told = []
    for host, ranks in zip(setting.hosts, setting.ranks, strict=True):
        facts = {name: each.get(host, {}) for name, each in seen.facts.items()}
        told.append(
            {
                "name": host,
                "processes": len(ranks),
                "packages": facts.get("packages", {}).get("digest"),
                "recipe": facts.get("recipe", {}).get("digest"),
                "versions": facts.get("environment", {}).get("versions", {}),
                "inspection": facts.get("inspection", {}).get("method"),
                "clock_daemons": facts.get("clock discipline", {}).get("daemons"),
            }
        )
    return told


def _part(meeting: Meeting, seen: Seen) -> None:
    """Leave the group, and the others, in an order in which nobody misses anybody."""
    try:
        meeting.end()
    except LostError:
        seen.hangs = True
    if dist.is_initialized() and not seen.hangs:
        dist.destroy_process_group()
        time.sleep(_SECONDS_TO_LET_GO)  # see parallel.mesh.join

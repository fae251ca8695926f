"""Keeps the run directory of a run of weeks from filling up with what watchers leave there.

Verdicts and events stay, for they say what happened; answers and requests are what it was found
out from.
"""

from contextlib import suppress
from pathlib import Path

from longtake.fsio import is_linked, read_json, remove_tree
from longtake.node_dir import NodeDirectory, requests_path
from longtake.run_dir import RunDirectory

_MOST_ANSWERS = 50
_SECONDS_OF_REQUESTS = 86400.0
_TOKENS = ("stall_", "asked_")


def prune_answers(node: NodeDirectory, most: int = _MOST_ANSWERS) -> None:
    """Take away a node's answers but for the newest; touches the disk.

    Flight recorders' dumps go with the answers that they belong to.
    What others have left there has other names, and stays.

    Args:
        node: this watcher's own.
        most: how many stay.
    """
    folder = node.dump_path("any").parent
    if is_linked(folder, node.run.path):
        return
    paths = [path for path in folder.glob("*") if path.name.startswith(_TOKENS)]
    times = {path.stem: 0.0 for path in paths}
    for path in paths:
        times[path.stem] = max(times[path.stem], _written(path))
    for token in sorted(times, key=lambda each: times[each], reverse=True)[most:]:
        node.dump_path(token).unlink(missing_ok=True)
        remove_tree(node.flight_path(token))


def prune_requests(run: RunDirectory, launch: str, seconds: float = _SECONDS_OF_REQUESTS) -> None:
    """Take away requests that have been answered long ago; touches the disk.

    Stalls of the launch that runs stay, so that the next one of the same step has another name.

    Args:
        run: the run directory.
        launch: which runs now.
        seconds: by how much a request has to be older than the newest one: by the disk's own
            clock, whatever that is.
    """
    folder = requests_path(run)
    if is_linked(folder, run.path):
        return
    times = {path: _written(path) for path in folder.glob("[!.]*.json")}
    newest = max(times.values(), default=0.0)
    for path in (path for path, at in times.items() if newest - at > seconds):
        stall = read_json(path).get("stall") or {}
        if not launch or stall.get("launch") != launch:
            path.unlink(missing_ok=True)


def _written(path: Path) -> float:
    with suppress(OSError):
        return path.lstat().st_mtime
    return 0.0

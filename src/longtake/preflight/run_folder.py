"""Is the run directory writable, and the same folder on every node.

The first process leaves a file in it, which all others have to see with what is in it: a folder
that only has the same name would take each node's part of a checkpoint to another disk.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

from longtake.config import Recipe
from longtake.preflight.compare import differences, tell_differences
from longtake.preflight.finding import Finding, Judged, Measure, Severity
from longtake.preflight.mounts import filesystem_of
from longtake.preflight.setting import Facts, Setting

NAME = "run directory"

_SECONDS_TO_SEE, _BETWEEN = 5.0, 0.1
_WORTH_TELLING, _SLOW_TO_SEE = 0.5, 3.0
ADVICE = (
    "Put `out` on a disk that all nodes share (NFS, Lustre, ...), mounted at the same place, and "
    "let the user that trains write there."
)


def leave_token(setting: Setting) -> list[Path]:
    """Make the run directory if it is not there, and leave the file; returns folders it made.

    Raises:
        OSError: it cannot be made or written.
    """
    if setting.recipe is None:
        return []
    folder = setting.recipe.out.absolute()
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    with _token_path(setting).open("w") as file:
        file.write(setting.token)
        file.flush()
        os.fsync(file.fileno())
    return made


def clear_away(setting: Setting, made: list[Path]) -> None:
    """Remove the file, and folders that were made for it; the first process does."""
    if setting.recipe is None or not setting.place.is_first:
        return
    with suppress(OSError):
        _token_path(setting).unlink(missing_ok=True)
        for folder in made:
            folder.rmdir()


def measure(setting: Setting) -> Facts:
    """Whether this node sees the file, after how long, and can write a file of its own."""
    if setting.recipe is None:
        return {}
    folder = setting.recipe.out
    seconds = _see(_token_path(setting), setting.token)
    return {
        "path": str(folder.absolute()),
        "filesystem": filesystem_of(folder),
        "exists": folder.is_dir(),
        "seen_after": seconds,
        "cannot_write": _try_to_write(setting),
    }


def judge(facts: dict[str, Facts], recipe: Recipe | None) -> Judged:
    """Who has another folder there, cannot write, or sees new files late.

    Where no node has the folder, it could not be made, which who tried to has said.
    """
    judged = Judged()
    seen = {node: each for node, each in facts.items() if each}
    is_somewhere = any(each["exists"] for each in seen.values())
    for node, each in seen.items() if is_somewhere else ():
        if (said := _problem(each)) is not None:
            judged.findings.append(Finding("error", NAME, (node,), said, "", ADVICE))
    late = {node: each["seen_after"] for node, each in seen.items() if each["seen_after"]}
    slow = tuple(node for node, seconds in late.items() if seconds > _SLOW_TO_SEE)
    if slow:
        what = f"a new file is seen only after {late[slow[0]]:.1f} s"
        expected = f"within {_SLOW_TO_SEE:g} s"
        judged.findings.append(
            Finding("note", NAME, slow, what, expected, "Mount it with a shorter acdirmax=.")
        )
    if any(seconds > _WORTH_TELLING for seconds in late.values()):
        judged.measures.append(Measure("new file seen after", "s", late, slow))
    told = {
        node: {key: str(each[key]) for key in ("path", "filesystem")} for node, each in seen.items()
    }
    found = differences(NAME, told)
    bad: dict[str, Severity] = {"path": "error"}
    judged.differences += found
    judged.findings += tell_differences(NAME, found, bad, ADVICE)
    return judged


def _problem(each: Facts) -> str | None:
    path = each["path"]
    if not each["exists"]:
        return f"{path} is not there, though the first node has made it: it is not shared"
    if each["cannot_write"]:
        return f"{path} cannot be written: {each['cannot_write']}"
    if each["seen_after"] is None:
        waited = f"{_SECONDS_TO_SEE:g} s"
        return f"{path} is another folder than on the first node: its file was not seen in {waited}"
    return None


def _token_path(setting: Setting) -> Path:
    assert setting.recipe is not None
    return setting.recipe.out / f".longtake_preflight_{setting.token}"


def _see(path: Path, token: str) -> float | None:
    """Seconds until a file is seen with a text in it; None: it is not."""
    begun = time.monotonic()
    while (waited := time.monotonic() - begun) < _SECONDS_TO_SEE:
        with suppress(OSError):
            if path.read_text() == token:
                return waited
        if not path.parent.is_dir():
            return None
        time.sleep(_BETWEEN)
    return None


def _try_to_write(setting: Setting) -> str:
    """Why a file cannot be written in the run directory; empty if it can."""
    path = _token_path(setting).with_suffix(f".{setting.place.rank}")
    try:
        path.write_text(setting.token)
        path.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return ""

"""Conditions that hold after any command on any input."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

CANARY = "canary"
"""A file that hostile input would make, if it were run."""
_MOST_LETTERS = 6000  # of a complaint
_CODES = {0, 1, 2}
_TRACES = ("Traceback (most recent call last)", "Fatal Python error", "terminate called")


@dataclass(frozen=True)
class Ended:
    """The end of a command: `code` is negative for a signal, None after the time limit."""

    code: int | None
    stdout: str
    stderr: str
    seconds: float


def complaints(
    ended: Ended,
    before: dict[str, bytes],
    after: dict[str, bytes],
    may_change: tuple[str, ...],
    appended: tuple[str, ...],
) -> list[str]:
    """List the conditions that the end of a command breaks.

    Args:
        ended: the command's end.
        before: files of the place, and their content.
        after: the same after the command.
        may_change: patterns of files that the command may change or remove.
        appended: patterns of files to whose end it may add.
    """
    found = []
    said = ended.stderr + ended.stdout
    if ended.code is None:
        found.append(f"hung: it had not ended after {ended.seconds:.0f} s")
    elif ended.code < 0:
        found.append(f"ended by signal {-ended.code}")
    elif ended.code not in _CODES:
        found.append(f"ended with code {ended.code}")
    found += [f"said: {trace}" for trace in _TRACES if trace in said]
    if any(ord(letter) < 32 and letter not in "\n\t" for letter in said):
        found.append("wrote control characters to the terminal")
    if ended.code == 2 and not ended.stderr.strip():
        found.append("gave no reason")
    # Before the complaint a training has told of its steps.
    complaint = ended.stderr.rpartition("\nlongtake: ")[2]
    if ended.code == 2 and len(complaint) > _MOST_LETTERS:
        found.append(f"complained in {len(complaint):,} letters")
    found += [
        f"lost {name}"
        for name, data in before.items()
        if not _is_kept(name, data, after.get(name), may_change, appended)
    ]
    if any(Path(name).name == CANARY for name in after):
        found.append("ran foreign code")
    return found


def _is_kept(
    name: str,
    before: bytes,
    after: bytes | None,
    may_change: tuple[str, ...],
    appended: tuple[str, ...],
) -> bool:
    if after == before or any(fnmatchcase(name, pattern) for pattern in may_change):
        return True
    is_log = any(fnmatchcase(name, pattern) for pattern in appended)
    return is_log and after is not None and after.startswith(before)

"""What it means that ranks have ended: whether to start them again, and what to tell people."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from longtake.errors import LongtakeError, LostPeerError
from longtake.failures import RankFailure, describe_signal
from longtake.process import EXIT_CODES

STOPS: Final = {code: signal.Signals[name] for name, code in EXIT_CODES.items()}
"""Exit codes of `longtake train` after a signal, when all is saved."""

_MISTAKE, _LOST_PEER = LongtakeError.exit_code, LostPeerError.exit_code
_LAST_BYTES = 4096


@dataclass(frozen=True)
class Ended:
    """How the ranks of a node ended, not all of them well.

    Attributes:
        code: with which the launcher has to end, if they are not started again.
        kind: `stopped`: somebody wanted it; `mistake`: the same again would end the same way;
            `crashed`: another start may go well.
        words: what to tell people.
    """

    code: int
    kind: str
    words: str


def judge(
    codes: Mapping[int, int], trail: Sequence[RankFailure], logs: Mapping[int, Path]
) -> Ended:
    """Say how ranks ended.

    Args:
        codes: exit codes other than 0, by rank; negative: by which signal.
        trail: failures of the same launch on all nodes, the first one first.
        logs: where each rank of this node said what it said.
    """
    stops = [code for code in codes.values() if code in STOPS]
    if trail and trail[0].kind == "error":
        return Ended(_MISTAKE, "mistake", str(trail[0]))
    if _MISTAKE in codes.values() and not trail:
        return Ended(_MISTAKE, "mistake", _in_words(codes, _MISTAKE, logs))
    if stops and not trail:
        return Ended(stops[0], "stopped", f"All ranks stopped by {STOPS[stops[0]].name}.")
    # Whoever only missed another is not the one to look at.
    code = next((each for each in codes.values() if each != _LOST_PEER), _LOST_PEER)
    words = str(trail[0]) if trail else _in_words(codes, code, logs)
    return Ended(code if code > 0 else 128 - code, "crashed", words)


def exit_code_of(stop: signal.Signals) -> int:
    """With which a rank ends after a signal, or would have, had it been ready for it."""
    return EXIT_CODES[stop.name]


def code_in_words(code: int) -> str:
    """How a process ended, by its exit code."""
    return describe_signal(-code) if code < 0 else f"ended with exit code {code}"


def last_words(log: Path) -> str:
    """The last line of what a rank said; empty: nothing."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LAST_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _in_words(codes: Mapping[int, int], code: int, logs: Mapping[int, Path]) -> str:
    rank = next(rank for rank, each in codes.items() if each == code)
    said = last_words(logs[rank])
    last = f" It said last: {said}" if said else ""
    return f"Rank {rank} {code_in_words(code)}.{last} All of it is in {logs[rank]}."

"""How far the nodes' clocks are apart, by asking each for its time over the network.

Cristian's algorithm (Probabilistic clock synchronization, 1989): who asks notes when it asked and
when the answer came; the other's clock is compared with the middle, and cannot be off from that by
more than half the round trip. Of many questions the one with the shortest round trip counts.
"""

import time
from statistics import median

import torch
import torch.distributed as dist

from longtake.config import Recipe
from longtake.preflight.finding import Finding, Judged, Measure, Severity
from longtake.preflight.names import listed
from longtake.preflight.setting import Facts, Setting

NAME = "clocks"

_QUESTIONS = 40
_WARN, _ERROR = 1e-3, 0.1
_ADVICE = (
    "Run chrony on every node with the same servers (`chronyc tracking`, `chronyc sources -v`); "
    "let it step once: chronyc makestep."
)


def measure(setting: Setting) -> Facts:
    """On the first process: how far each other node's clock is ahead, and how sure that is (s)."""
    if not setting.place.speaks:
        return {}
    if not setting.place.is_first:
        _answer()
        return {}
    others = zip(setting.peers[1:], setting.hosts[1:], strict=True)
    return {"offsets": {host: _ask(peer) for peer, host in others}}


def judge(facts: dict[str, Facts], recipe: Recipe | None) -> Judged:
    """Whose clock is off: from the median of all, or, of two, from each other."""
    first = next((node for node, each in facts.items() if "offsets" in each), None)
    if first is None or not facts[first]["offsets"]:
        return Judged()
    found: dict[str, list[float]] = {first: [0.0, 0.0], **facts[first]["offsets"]}
    usual = median(offset for offset, _ in found.values()) if len(found) > 2 else 0.0
    off = {node: (offset - usual, around) for node, (offset, around) in found.items()}
    bad = {node: severity for node, each in off.items() if (severity := _severity(*each))}
    shown = {node: offset * 1000 for node, (offset, _) in off.items()}
    judged = Judged(measures=[Measure("clock ahead", "ms", shown, tuple(bad))])
    of = "the median of all clocks" if len(found) > 2 else f"that of {listed([first])}"
    for node, severity in bad.items():
        offset, around = off[node]
        what = f"its clock is {_signed(offset)} {of} (+-{_in_words(around)})"
        judged.findings.append(Finding(severity, NAME, (node,), what, "within 1 ms", _ADVICE))
    return judged


def _severity(offset: float, uncertainty: float) -> Severity | None:
    """As bad as it is at least, whatever the network has added."""
    certain = abs(offset) - uncertainty
    if certain > _ERROR:
        return "error"
    return "warning" if certain > _WARN else None


def _signed(seconds: float) -> str:
    return f"{_in_words(abs(seconds))} {'ahead of' if seconds > 0 else 'behind'}"


def _in_words(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1000:.3f} ms"


def _ask(peer: int) -> tuple[float, float]:
    """Seconds that a peer's clock is ahead of ours, and half of the shortest round trip."""
    best = (0.0, float("inf"))
    told = torch.zeros(1, dtype=torch.int64)
    for _ in range(_QUESTIONS):
        before = time.monotonic_ns()
        asked = time.time_ns()
        dist.send(torch.zeros(1, dtype=torch.int64), peer)
        dist.recv(told, peer)
        around = time.monotonic_ns() - before
        if around / 2e9 < best[1]:
            best = ((int(told.item()) - asked - around // 2) / 1e9, around / 2e9)
    return best


def _answer() -> None:
    heard = torch.zeros(1, dtype=torch.int64)
    for _ in range(_QUESTIONS):
        dist.recv(heard, 0)
        dist.send(torch.tensor([time.time_ns()]), 0)

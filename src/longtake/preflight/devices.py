"""Are the nodes' network cards up, and as fast as each other's."""

from longtake.config import Recipe
from longtake.health.network import Ethernet, InfiniBand
from longtake.preflight.compare import differences, tell_differences
from longtake.preflight.finding import Finding, Judged, Severity, Skipped
from longtake.preflight.setting import Facts, Setting

NAME = "network devices"

_ADVICE = "Look at the cable, the port of the switch, and ethtool or ibstat on that node."


def measure(setting: Setting) -> Facts:
    """What the kernel says of Ethernet cards and of InfiniBand ports."""
    return {
        "ethernet": _by_card(Ethernet().sample()),
        "infiniband": _by_card(InfiniBand().sample()),
    }


def judge(facts: dict[str, Facts], recipe: Recipe | None) -> Judged:
    """What is down, slower than elsewhere, or has errors."""
    judged = Judged()
    if not any(each["infiniband"] for each in facts.values()):
        judged.skipped.append(Skipped("InfiniBand", "no InfiniBand device"))
    for kind in ("ethernet", "infiniband"):
        told = {node: _words(each[kind]) for node, each in facts.items()}
        found = differences(kind, told)
        # A name alone says little: cards of unlike machines are called differently.
        bad: dict[str, Severity] = {each.name: "warning" for each in found}
        judged.differences += found
        judged.findings += tell_differences(NAME, found, bad, _ADVICE)
    for node, each in facts.items():
        down = [port for port, numbers in each["infiniband"].items() if not numbers.get("link_up")]
        if down:
            what = f"InfiniBand ports are down: {', '.join(down)}"
            judged.findings.append(Finding("warning", NAME, (node,), what, "ACTIVE", _ADVICE))
    return judged


def _by_card(numbers: dict[str, float]) -> dict[str, dict[str, float]]:
    cards: dict[str, dict[str, float]] = {}
    for name, value in numbers.items():
        number, _, card = name.partition(":")
        cards.setdefault(card, {})[number] = value
    return cards


def _words(cards: dict[str, dict[str, float]]) -> dict[str, str]:
    return {name: _word(numbers) for name, numbers in cards.items()}


def _word(numbers: dict[str, float]) -> str:
    state = "up" if numbers.get("link_up") else "down"
    bits = numbers.get("link_speed_bits_per_second")
    return f"{state}, {bits / 1e9:g} Gbit/s" if bits else state

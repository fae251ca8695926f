"""Nodes against each other: who differs from the majority, and whose number is far from the median.

Pure: nothing here asks a machine anything.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median_high

from longtake.preflight.finding import Difference, Finding, Severity
from longtake.preflight.names import listed

ABSENT = "absent"
"""The value of what a node does not have."""

_MOST_NAMED = 3


def differences(group: str, facts: Mapping[str, Mapping[str, str]]) -> list[Difference]:
    """What is not the same everywhere, by the facts' names.

    Args:
        group: what the facts are of, such as packages.
        facts: of each node, values by name.
    """
    names = sorted({name for each in facts.values() for name in each})
    found = []
    for name in names:
        by_node = {node: each.get(name, ABSENT) for node, each in facts.items()}
        if len(set(by_node.values())) > 1:
            found.append(_difference(group, name, by_node))
    return found


def _difference(group: str, name: str, by_node: Mapping[str, str]) -> Difference:
    nodes = defaultdict(list)
    for node, value in by_node.items():
        nodes[value].append(node)
    ranked = sorted(nodes.items(), key=lambda each: -len(each[1]))
    is_clear = len(ranked[0][1]) > len(ranked[1][1])
    values = {value: tuple(some) for value, some in ranked}
    return Difference(group, name, ranked[0][0] if is_clear else None, values)


def tell_differences(
    check: str, found: Sequence[Difference], severities: Mapping[str, Severity], advice: str
) -> list[Finding]:
    """One finding for all facts that the same nodes differ in equally badly.

    Args:
        check: who says so.
        found: the differences.
        severities: how bad each is, by the fact's name; a note where none is given.
        advice: what to do about warnings and errors.
    """
    together: dict[tuple[Severity, tuple[str, ...]], list[Difference]] = defaultdict(list)
    for each in found:
        together[severities.get(each.name, "note"), each.outliers].append(each)
    return [
        Finding(
            severity,
            check,
            nodes,
            _what(some),
            "the same on all nodes",
            "" if severity == "note" else advice,
        )
        for (severity, nodes), some in together.items()
    ]


def _what(some: Sequence[Difference]) -> str:
    said = "; ".join(map(_in_words, some[:_MOST_NAMED]))
    more = len(some) - _MOST_NAMED
    return f"{said}; and {more} more" if more > 0 else said


def _in_words(each: Difference) -> str:
    if each.majority is None:
        by_value = (f"{value} on {listed(nodes)}" for value, nodes in each.values.items())
        return f"{each.name} is {', '.join(by_value)}"
    others = [value for value in each.values if value != each.majority]
    shown = ", ".join(others[:_MOST_NAMED]) + (", ..." if len(others) > _MOST_NAMED else "")
    return f"{each.name} is {shown} instead of {each.majority}"


def far_below(values: Mapping[str, float], share: float) -> tuple[str, ...]:
    """Who has less than a share of the median: of two, of the better one; worst first."""
    if len(values) < 2:
        return ()
    limit = share * middle(values.values())
    return tuple(sorted((each for each, v in values.items() if v < limit), key=values.__getitem__))


def far_above(values: Mapping[str, float], factor: float) -> tuple[str, ...]:
    """Who has more than so many times the median: of two, of the smaller one; worst first."""
    if len(values) < 2:
        return ()
    negative = {each: -value for each, value in values.items()}
    limit = factor * -middle(negative.values())
    return tuple(sorted((each for each, v in values.items() if v > limit), key=negative.get))  # type: ignore[arg-type]


def middle(values: Iterable[float]) -> float:
    """The median; of an even number of values the higher of the two in the middle."""
    return median_high(list(values))

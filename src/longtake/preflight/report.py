"""What all checks together say: what --json prints, and what tables are made of."""

from typing import Any

from longtake import __version__
from longtake.preflight.finding import Judged, Severity, worst, worst_first
from longtake.preflight.names import listed

Report = dict[str, Any]
"""nodes, processes, recipe, findings, differences, measures, skipped, severity, exit_status,
verdict and seconds: what JSON can hold, so that it can be told from one machine to another."""

_EXIT_STATUS: dict[Severity, int] = {"ok": 0, "note": 0, "warning": 0, "error": 1}


def report(
    nodes: list[dict[str, Any]], processes: int, recipe: str | None, judged: Judged, seconds: float
) -> Report:
    """Put together what is to be told.

    Args:
        nodes: of each node its name and digests.
        processes: how many have looked.
        recipe: the recipe's path.
        judged: what all checks say.
        seconds: how long it took.
    """
    facts = {
        "longtake": __version__,
        "recipe": recipe,
        "nodes": nodes,
        "processes": processes,
        **judged.as_dict(),
        "seconds": round(seconds, 2),
    }
    return concluded(facts)


def concluded(facts: Report) -> Report:
    """A report with its findings in order, and with the verdict that follows from them."""
    findings = worst_first(facts["findings"])
    severity = worst(each["severity"] for each in findings)
    told = {**facts, "findings": findings, "severity": severity}
    return {**told, "exit_status": _EXIT_STATUS[severity], "verdict": _verdict(told)}


def _verdict(facts: Report) -> str:
    severities = [each["severity"] for each in facts["findings"]]
    counts = {each: severities.count(each) for each in ("error", "warning", "note")}
    told = [f"{n} {kind}{'s' * (n > 1)}" for kind, n in counts.items() if n]
    number = len(facts["nodes"])
    of = f"{number} node{'s' * (number != 1)}"
    named = {
        node for each in facts["findings"] if each["severity"] == "error" for node in each["nodes"]
    }
    if counts["error"]:
        where = f" (see {listed(named)})" if named else ""
        return f"Not ready: {', '.join(told)} on {of}{where}."
    if counts["warning"]:
        return f"It will run, but look at this first: {', '.join(told)} on {of}."
    return f"Ready: {of}{', ' + ', '.join(told) if told else ', nothing to remark'}."

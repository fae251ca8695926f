"""What tests of checks share."""

from longtake.cluster.findings import CheckResult


def severities(result: CheckResult) -> list[tuple[str, tuple[str, ...]]]:
    """Of each finding, with its nodes."""
    return [(each.severity, each.nodes) for each in result.findings]

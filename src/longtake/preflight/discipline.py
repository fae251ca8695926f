"""Is each node's clock kept by somebody, and by one alone."""

from longtake.config import Recipe
from longtake.health.clock import Chrony, KernelClock, time_daemons
from longtake.preflight.finding import Finding, Judged, Severity
from longtake.preflight.setting import Facts, Setting

NAME = "clock discipline"

_MOST_NTP_OFFSET = 0.001
_ADVICE = (
    "Run chrony on every node, with the same servers, `makestep 1.0 3` (step only at the start) "
    "and without any other program that sets the clock."
)


def measure(setting: Setting) -> Facts:
    """Who sets the clock, and what the kernel and chrony say of it."""
    return {
        "daemons": time_daemons(),
        "kernel": KernelClock().sample(),
        "chrony": Chrony().sample(),
    }


def judge(facts: dict[str, Facts], recipe: Recipe | None) -> Judged:
    """Whose clock runs free, is set by two, or is off by chrony's own account."""
    judged = Judged()
    free = tuple(n for n, e in facts.items() if e["kernel"].get("clock_is_synchronised") == 0)
    if free:
        is_alone = len(facts) == 1
        what = f"nobody keeps the clock (adjtimex: not synchronised; {_who(facts[free[0]])})"
        severity: Severity = "note" if is_alone else "warning"
        judged.findings.append(
            Finding(severity, NAME, free, what, "a clock that follows a source", _ADVICE)
        )
    several = tuple(node for node, each in facts.items() if len(each["daemons"]) > 1)
    if several:
        what = f"several programs set the clock: {', '.join(facts[several[0]]['daemons'])}"
        judged.findings.append(Finding("warning", NAME, several, what, "one", _ADVICE))
    judged.findings += [found for each in facts.items() for found in _off(*each)]
    return judged


def _off(node: str, each: Facts) -> list[Finding]:
    chrony = each["chrony"]
    if chrony.get("clock_ntp_stratum") == 16:
        return [Finding("warning", NAME, (node,), "chrony reaches no source", "one", _ADVICE)]
    off = chrony.get("clock_ntp_offset_seconds", 0.0)
    if abs(off) <= _MOST_NTP_OFFSET:
        return []
    what = f"chrony says that the clock is off by {off * 1000:+.3f} ms"
    return [Finding("warning", NAME, (node,), what, "within 1 ms", "See chronyc sources -v.")]


def _who(each: Facts) -> str:
    daemons: list[str] = each["daemons"]
    return f"running: {', '.join(daemons)}" if daemons else "no chronyd, ntpd or timesyncd is seen"

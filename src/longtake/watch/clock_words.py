"""What is told of a clock that was set, or does not run as it should."""

from collections.abc import Sequence
from typing import Any

from longtake.health.clock import STEP_SECONDS, Change, Slewed, Steady, Stepped
from longtake.node_dir import NodeEventKind

ADVICE = (
    "Let one program alone discipline the clock: chrony, with `makestep 1.0 3` (it sets the clock "
    "in its first three updates only, and slews it afterwards), `rtcsync`, and a `maxslewrate`; "
    "and no ntpdate or `ntpd -q` in cron."
)


def event_of(
    host: str, change: Change, daemons: Sequence[str]
) -> tuple[NodeEventKind, dict[str, Any]]:
    """The event of a change, with a sentence and what to do.

    Args:
        host: of the clock.
        change: what happened.
        daemons: programs on that node that set clocks.
    """
    if isinstance(change, Steady):
        words = f"{host}: the clock runs as usual again; it was moved by {_amount(change.seconds)}"
        return "recovered", {"seconds": change.seconds, "message": f"{words}."}
    kind: NodeEventKind = "clock_stepped" if isinstance(change, Stepped) else "clock_slewed"
    fields: dict[str, Any] = {"seconds": change.seconds}
    if isinstance(change, Slewed):
        fields["ppm"] = round(change.ppm, 1)
    words = _step(change) if isinstance(change, Stepped) else _slew(change)
    told = f"{host}: {words} {_who(daemons)}{ADVICE}"
    return kind, {**fields, "daemons": list(daemons), "advice": ADVICE, "message": told}


def _step(step: Stepped) -> str:
    if abs(step.seconds) < STEP_SECONDS:
        return (
            "the kernel says that the clock was set, yet it is only "
            f"{_amount(step.seconds)} off: it was set back at once, or set by next to nothing."
        )
    way = "back" if step.seconds < 0 else "forward"
    broken = "Time limits of collectives and stores, certificates and files' dates may fail now."
    return f"the clock was set {way} by {_amount(step.seconds)}. {broken}"


def _slew(slew: Slewed) -> str:
    way = "fast" if slew.ppm > 0 else "slow"
    return (
        f"the clock runs {abs(slew.ppm):.0f} ppm too {way}, {_amount(slew.seconds)} so far: "
        "somebody corrects it, or its oscillator is broken."
    )


def _who(daemons: Sequence[str]) -> str:
    if not daemons:
        return ""
    verb = "runs" if len(daemons) == 1 else "run, and work against each other"
    return f"Here {' and '.join(daemons)} {verb}. "


def _amount(seconds: float) -> str:
    size = abs(seconds)
    if size >= 1:
        return f"{size:.6f} s"
    return f"{size * 1e3:.6g} ms" if size >= STEP_SECONDS else f"{size * 1e6:.3g} us"

"""Diagnoses and clock changes in words, for people."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from longtake.health.clock import STEP_SECONDS, ClockChange, ClockSlewed, ClockSteady, ClockStepped
from longtake.node_dir import NodeEventKind
from longtake.stacks import short_file

if TYPE_CHECKING:
    from longtake.monitor.diagnosis import (
        MissingIn,
        StallDiagnosis,
        StallSnapshot,
        Suspect,
        WaitingRanks,
    )

_MAX_NAMED = 3
_PHASES = {
    "start": "while it starts",
    "rendezvous": "while the ranks find each other",
    "open": "while it opens data and run directory",
    "plan": "while it plans the memory",
    "build": "while it builds the model",
    "load": "while it loads the checkpoint",
    "cache": "while it fills the cache",
    "data": "waiting for data after step {step}",
    "forward": "in the forward pass of step {step}",
    "backward": "in the backward pass of step {step}",
    "collective": "where the ranks compare step {step}",
    "optimizer": "in the update of step {step}",
    "checkpoint": "at the checkpoint after step {step}",
    "save": "waiting for a checkpoint to be complete, after step {step}",
    "rollback": "while it rolls back from step {step}",
    "evaluate": "in the evaluation after step {step}",
}
_STATES = {
    "T": "is stopped (state T: by a signal)",
    "t": "is stopped by a debugger (state t)",
    "Z": "has ended and was not reaped (state Z)",
    "D": "waits for a device that does not answer (state D: a disk, a network disk or a driver)",
}


def describe(diagnosis: "StallDiagnosis", snapshot: "StallSnapshot") -> str:
    """Which process caused a stall, where it is and since when; who waits; what else is known."""
    suspects, silent = diagnosis.suspects, diagnosis.silent_nodes
    if diagnosis.kind == "cleared":
        return "The process that raised the alarm moved on while the processes were dumped."
    return " ".join(
        [
            *_causes(diagnosis, snapshot),
            *_waiting(diagnosis.waiting, any(each.role != "node" for each in suspects)),
            *_absent(snapshot.absent, silent, suspects),
            *map(_recorded, diagnosis.missing_in),
        ]
    )


def ranges(ranks: Sequence[int]) -> str:
    cuts = [0, *(at for at, (a, b) in enumerate(pairwise(ranks), 1) if b != a + 1), len(ranks)]
    runs = [(ranks[first], ranks[end - 1]) for first, end in pairwise(cuts) if end > first]
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def _of_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {ranges(sorted(ranks))}"


def place_of(suspect: "Suspect") -> str:
    if not suspect.function:
        return ""
    return f"{suspect.function} ({short_file(suspect.file)}:{suspect.line})"


def for_seconds(seconds: float) -> str:
    """`12 s`, `4 min 10 s`, `2 h 5 min`."""
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _causes(diagnosis: "StallDiagnosis", snapshot: "StallSnapshot") -> Iterator[str]:
    suspects = diagnosis.suspects
    if suspects:
        yield _cause(suspects[0], snapshot.rounds)
    if more := suspects[1 : 1 + _MAX_NAMED]:
        rest = len(suspects) - 1 - len(more)
        named = [f"{_who(each)}{_at(each)}" for each in more]
        named += [f"{rest} more"] if rest else []
        yield f"Also: {'; '.join(named)}."
    if diagnosis.kind == "link":
        one = max(snapshot.ranks, key=lambda each: each.seconds).suspect()
        yield (
            f"All {len(snapshot.ranks)} ranks are in {place_of(one) or 'the same place'}, "
            f"{_doing(one)}, for {for_seconds(one.seconds)}: none of them is the cause. Check the "
            "network between them: links, switches and network cards."
        )
    if diagnosis.kind == "unknown":
        yield "No node has answered, so it is not known where the ranks are."


def _cause(suspect: "Suspect", rounds: int) -> str:
    if suspect.role == "node":
        return f"{suspect.host} gives no answer."
    if not suspect.state:
        return (
            f"{_who(suspect)} is gone: {for_seconds(suspect.seconds)} ago it was "
            f"{_doing(suspect)}, and it did not end as it should."
        )
    stopped = f" {_STATES[suspect.state]}; it" if _is_halted(suspect) else ""
    return f"{_who(suspect)}{stopped} has been {_where(suspect)}{_motion(suspect, rounds)}."


def _is_halted(suspect: "Suspect") -> bool:
    return suspect.state in _STATES and not suspect.moved


def _who(suspect: "Suspect") -> str:
    if suspect.role == "node":
        return suspect.host
    if suspect.role == "decode":
        return f"{suspect.host}: decode worker {suspect.pid} of rank {suspect.rank}"
    who = f"rank {suspect.rank} (process {suspect.pid})"
    return f"{suspect.host}: " + (f"thread {suspect.thread} of {who}" if suspect.thread else who)


def _at(suspect: "Suspect") -> str:
    place = place_of(suspect)
    since = f" for {for_seconds(suspect.seconds)}" if suspect.state else ""
    return f" in {place}{since}" if place else since


def _where(suspect: "Suspect") -> str:
    since = f"for {for_seconds(suspect.seconds)}"
    if not suspect.function:
        return f"{_doing(suspect)} {since}"
    within = f", and there in {suspect.within}," if suspect.within else ""
    return f"in {place_of(suspect)}{within} {since}, {_doing(suspect)}"


def _doing(suspect: "Suspect") -> str:
    if suspect.role == "decode":
        clip = suspect.clip_path or suspect.clip
        return f"on clip {clip}" if clip else "without a clip"
    return _PHASES.get(suspect.doing, f"in {suspect.doing}").format(step=suspect.step)


def _motion(suspect: "Suspect", rounds: int) -> str:
    times = f"{rounds} rounds" if rounds != 1 else "the only round"
    cores = suspect.cpu_share
    used = "no processor time" if cores < 0.02 else f"{cores:.2f} of a core"
    if cores >= 0.9:
        used = "a full core" if cores < 1.1 else f"{cores:.1f} cores"
    if suspect.moved:
        return f"; it is slow and not stuck: it has moved in {times}, and uses {used}"
    native = f" (in {suspect.native})" if suspect.native else ""
    gil = "; it holds the GIL, so no other thread of it runs" if suspect.has_gil else ""
    if suspect.waits_in == "collective" and not _is_halted(suspect):
        return "; none of the others has joined that collective"
    if cores >= 0.9 and not _is_halted(suspect):
        return f", and has not moved in {times}, but uses {used}: it is busy in C{native}{gil}"
    return f", and has not moved in {times}; it uses {used}{native}{gil}"


def _waiting(waiting: Sequence["WaitingRanks"], has_suspect: bool) -> Iterator[str]:
    if waiting and has_suspect:
        first, *rest = waiting
        verb = "waits" if len(first.ranks) == 1 else "wait"
        named = [f"{_of_ranks(first.ranks).capitalize()} only {verb} for {first.doing}"]
        named += [f"{_of_ranks(each.ranks)} for {each.doing}" for each in rest]
        yield f"{', and '.join(named)}."


def _absent(
    absent: Sequence[int], silent: Sequence[str], suspects: Sequence["Suspect"]
) -> Iterator[str]:
    if absent:
        yield f"There is no sign of {_of_ranks(absent)}; all others wait."
    elif silent and not any(each.role == "node" for each in suspects):
        yield f"No answer came from {', '.join(silent)}."


def _recorded(missing: "MissingIn") -> str:
    did = "joined and has not finished" if missing.has_joined else "never joined"
    did = did.replace("has", "have") if len(missing.ranks) > 1 else did
    who = _of_ranks(missing.ranks)
    return f"By the flight recorder {who} {did} {missing.op} of {missing.group}."


CLOCK_ADVICE = (
    "Let one program alone correct the clock: chrony, with `makestep 1.0 3` (it sets the clock "
    "in its first three updates only, and slews it afterwards), `rtcsync`, and a `maxslewrate`; "
    "and no ntpdate or `ntpd -q` in cron."
)


def clock_event(
    host: str, change: ClockChange, daemons: Sequence[str]
) -> tuple[NodeEventKind, dict[str, Any]]:
    """The event of a clock change; `daemons`: programs on that node that set clocks."""
    if isinstance(change, ClockSteady):
        moved = _amount(change.seconds)
        text = f"{host}: the clock runs as usual again; it was moved by {moved}."
        return "recovered", {"seconds": change.seconds, "message": text}
    fields: dict[str, Any] = {"seconds": change.seconds}
    kind: NodeEventKind = "clock_stepped"
    if isinstance(change, ClockSlewed):
        kind, fields["ppm"] = "clock_slewed", round(change.ppm, 1)
        way = "fast" if change.ppm > 0 else "slow"
        text = (
            f"the clock runs {abs(change.ppm):.0f} ppm too {way}, {_amount(change.seconds)} so "
            "far: a program corrects it, or its oscillator is broken."
        )
    else:
        text = _step(change)
    if daemons:
        verb = "runs" if len(daemons) == 1 else "run, and work against each other"
        text += f" Here {' and '.join(daemons)} {verb}."
    message = f"{host}: {text} {CLOCK_ADVICE}"
    return kind, {**fields, "daemons": list(daemons), "advice": CLOCK_ADVICE, "message": message}


def _step(step: ClockStepped) -> str:
    amount = _amount(step.seconds)
    if abs(step.seconds) < STEP_SECONDS:
        return (
            f"the kernel reports that the clock was set, but it is only {amount} off: it was set "
            "back at once, or by next to nothing."
        )
    way = "back" if step.seconds < 0 else "forward"
    effects = "Timeouts of collectives and stores, certificates and file times may be wrong now."
    return f"the clock was set {way} by {amount}. {effects}"


def _amount(seconds: float) -> str:
    size = abs(seconds)
    if size >= 1:
        return f"{size:.6f} s"
    return f"{size * 1e3:.6g} ms" if size >= STEP_SECONDS else f"{size * 1e6:.3g} us"

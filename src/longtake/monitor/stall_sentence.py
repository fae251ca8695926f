"""The diagnosis of a stall in sentences for users."""

from collections.abc import Iterator, Sequence

from longtake import stacks
from longtake.formatting import for_seconds, number_ranges, plural
from longtake.heartbeat import PHASE_WORDS, STORE_WAIT
from longtake.monitor.stall_record import StallDiagnosis, Suspect
from longtake.monitor.stall_snapshot import StallSnapshot

_MAX_NAMED = 3
_STATES = {
    "T": "is stopped (state T: by a signal)",
    "t": "is stopped by a debugger (state t)",
    "Z": "has ended and was not reaped (state Z)",
    "D": "waits for a device that does not answer (state D: a disk, a network disk or a driver)",
}


def describe(diagnosis: StallDiagnosis, snapshot: StallSnapshot) -> str:
    """Describe a stall: the process that caused it, its place and time, and the waiting ranks."""
    suspects, silent = diagnosis.suspects, diagnosis.silent_nodes
    if diagnosis.kind == "cleared":
        return "The process that raised the alarm moved on while the processes were dumped."
    sentences = list(_causes(diagnosis, snapshot))
    if diagnosis.waiting and any(each.role != "node" for each in suspects):
        first, *rest = diagnosis.waiting
        verb = "waits" if len(first.ranks) == 1 else "wait"
        named = [f"{_of_ranks(first.ranks).capitalize()} only {verb} for {first.doing}"]
        named += [f"{_of_ranks(each.ranks)} for {each.doing}" for each in rest]
        sentences.append(f"{', and '.join(named)}.")
    if snapshot.absent:
        sentences.append(f"There is no sign of {_of_ranks(snapshot.absent)}; all others wait.")
    elif silent and not any(each.role == "node" for each in suspects):
        sentences.append(f"No answer came from {', '.join(silent)}.")
    for missing in diagnosis.missing_in:
        has = "has" if len(missing.ranks) == 1 else "have"
        did = f"joined and {has} not finished" if missing.has_joined else "never joined"
        sentences.append(
            f"By the flight recorder {_of_ranks(missing.ranks)} {did} {missing.op} of "
            f"{missing.group}."
        )
    return " ".join(sentences)


def _of_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {number_ranges(sorted(ranks))}"


def place_of(suspect: Suspect) -> str:
    if not suspect.function:
        return ""
    return f"{suspect.function} ({stacks.short_file(suspect.file)}:{suspect.line})"


def _causes(diagnosis: StallDiagnosis, snapshot: StallSnapshot) -> Iterator[str]:
    suspects = diagnosis.suspects
    if suspects and (store := _store_of(suspects[0])):
        alike = [each for each in suspects if _store_of(each) == store]
        yield _waits_for_store(suspects[0], store, alike[1:])
        # One sentence for all workers that wait for the same store: it is the cause, and not they.
        suspects = (suspects[0], *(each for each in suspects if each not in alike))
    elif suspects:
        yield _cause(suspects[0], snapshot.rounds)
    if more := suspects[1 : 1 + _MAX_NAMED]:
        rest = len(suspects) - 1 - len(more)
        named = []
        for each in more:
            place = place_of(each)
            since = f" for {for_seconds(each.seconds)}" if each.state else ""
            named.append(f"{_who(each)} in {place}{since}" if place else f"{_who(each)}{since}")
        named += [f"{rest} more"] if rest else []
        yield f"Also: {'; '.join(named)}."
    if diagnosis.kind == "link":
        one = max(snapshot.ranks, key=lambda each: each.seconds_in_phase).suspect()
        yield (
            f"All {len(snapshot.ranks)} ranks are in {place_of(one) or 'the same place'}, "
            f"{_doing(one)}, for {for_seconds(one.seconds)}: none of them is the cause. Check the "
            "network between them: links, switches and network cards."
        )
    if diagnosis.kind == "unknown":
        yield "No node has answered, so it is not known where the ranks are."


def _store_of(suspect: Suspect) -> str:
    """Return the object store that a suspected decode worker waits for; empty: none or stopped."""
    if _is_halted(suspect):
        return ""
    return suspect.clip_path.partition(STORE_WAIT)[2].partition(" ")[0]


def _waits_for_store(first: Suspect, store: str, others: Sequence[Suspect]) -> str:
    clip, _, said = first.clip_path.partition(STORE_WAIT)
    also = ""
    if others:
        hosts = sorted({each.host for each in others})
        named = ", ".join(hosts[:_MAX_NAMED])
        more = f" and {len(hosts) - _MAX_NAMED} more nodes" if len(hosts) > _MAX_NAMED else ""
        verb = "has" if len(others) == 1 else "have"
        also = f", and so {verb} {plural(len(others), 'other worker')} on {named}{more}"
    return (
        f"The store {said.removesuffix(')')}. {_who(first)} has been waiting for it for "
        f"{for_seconds(first.seconds)}, for clip {clip}{also}: training continues when the store "
        "answers."
    )


def _cause(suspect: Suspect, rounds: int) -> str:
    if suspect.role == "node":
        return f"{suspect.host} gives no answer."
    if not suspect.state:
        return (
            f"{_who(suspect)} is gone: {for_seconds(suspect.seconds)} ago it was "
            f"{_doing(suspect)}, and it did not end as it should."
        )
    stopped = f" {_STATES[suspect.state]}; it" if _is_halted(suspect) else ""
    where = f"{_doing(suspect)} for {for_seconds(suspect.seconds)}"
    if suspect.function:
        within = f", and there in {suspect.within}," if suspect.within else ""
        place, since = place_of(suspect), for_seconds(suspect.seconds)
        where = f"in {place}{within} for {since}, {_doing(suspect)}"
    return f"{_who(suspect)}{stopped} has been {where}{_motion(suspect, rounds)}."


def _is_halted(suspect: Suspect) -> bool:
    return suspect.state in _STATES and not suspect.moved


def _who(suspect: Suspect) -> str:
    if suspect.role == "node":
        return suspect.host
    if suspect.role == "decode":
        return f"{suspect.host}: decode worker {suspect.pid} of rank {suspect.rank}"
    who = f"rank {suspect.rank} (process {suspect.pid})"
    return f"{suspect.host}: " + (f"thread {suspect.thread} of {who}" if suspect.thread else who)


def _doing(suspect: Suspect) -> str:
    if suspect.role == "decode":
        clip = suspect.clip_path or suspect.clip
        if clip and suspect.doing == "idle":
            return f"before clip {clip}, which it was given"
        return f"on clip {clip}" if clip else "without a clip"
    return PHASE_WORDS.get(suspect.doing, f"in {suspect.doing}").format(step=suspect.step)


def _motion(suspect: Suspect, rounds: int) -> str:
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

"""The words for a verdict: one sentence that names the culprit, and one for whoever waits."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from longtake.watch.scene import Scene
from longtake.watch.verdict import Kind, MissingIn, Suspect, Waiting
from longtake.watch.waiting import short_file

_MOST_NAMED = 3
_PHASES = {
    "start": "while it starts",
    "rendezvous": "while the ranks find each other",
    "open": "while it opens data and run directory",
    "plan": "while it plans the memory",
    "build": "while it builds the model",
    "load": "while it loads the checkpoint",
    "cache": "while it fills the cache",
    "data": "on its way to the data after step {step}",
    "forward": "in the forward pass of step {step}",
    "backward": "in the backward pass of step {step}",
    "collective": "where the ranks compare step {step}",
    "optimizer": "in the update of step {step}",
    "checkpoint": "at the checkpoint after step {step}",
    "save": "waiting for a checkpoint to be whole, after step {step}",
    "rollback": "while it goes back from step {step}",
    "evaluate": "in the evaluation after step {step}",
}
_STATES = {
    "T": "is stopped (state T: by a signal)",
    "t": "is stopped by a debugger (state t)",
    "Z": "has ended, and nobody has noticed (state Z)",
    "D": "waits for a device that does not answer (state D: a disk, a network disk or a driver)",
}


def sentence(
    kind: Kind,
    suspects: Sequence[Suspect],
    waiting: Sequence[Waiting],
    missing: Sequence[MissingIn],
    silent: Sequence[str],
    scene: Scene,
) -> str:
    """Say who is to blame, where it is, since when; who waits for it; and what else is known."""
    return " ".join(
        [
            *_named(kind, suspects, scene),
            *_who_waits(waiting, any(each.role != "node" for each in suspects)),
            *_absent(scene, silent, suspects),
            *map(_recorded, missing),
        ]
    )


def ranges(ranks: Sequence[int]) -> str:
    """Numbers in ascending order, runs of them in short: `0-6, 8`."""
    cuts = [0, *(at for at, (a, b) in enumerate(pairwise(ranks), 1) if b != a + 1), len(ranks)]
    runs = [(ranks[first], ranks[end - 1]) for first, end in pairwise(cuts) if end > first]
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def of_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0-6, 8`."""
    return f"rank{'' if len(ranks) == 1 else 's'} {ranges(sorted(ranks))}"


def place_of(suspect: Suspect) -> str:
    """`read (longtake/data/decode.py:88)`; empty where that is not known."""
    if not suspect.function:
        return ""
    return f"{suspect.function} ({short_file(suspect.file)}:{suspect.line})"


def for_seconds(seconds: float) -> str:
    """A time as one says it: `12 s`, `4 min 10 s`, `2 h 5 min`."""
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _named(kind: Kind, suspects: Sequence[Suspect], scene: Scene) -> Iterator[str]:
    if suspects:
        yield _accused(suspects[0], scene.rounds)
    if more := suspects[1 : 1 + _MOST_NAMED]:
        rest = len(suspects) - 1 - len(more)
        told = [f"{_who(each)}{_at(each)}" for each in more]
        told += [f"{rest} more"] if rest else []
        yield f"Likewise: {'; '.join(told)}."
    if kind == "link":
        yield _all_alike(scene)
    if kind == "unknown":
        yield "No node has answered, so nothing is known of where the ranks are."


def _accused(suspect: Suspect, rounds: int) -> str:
    if suspect.role == "node":
        return f"{suspect.host} gives no answer."
    if not suspect.state:
        return (
            f"{_who(suspect)} is gone: {for_seconds(suspect.seconds)} ago it was "
            f"{_doing(suspect)}, and it did not end as it should."
        )
    stopped = f" {_STATES[suspect.state]}; it" if _is_halted(suspect) else ""
    return f"{_who(suspect)}{stopped} has been {_where(suspect)}{_motion(suspect, rounds)}."


def _is_halted(suspect: Suspect) -> bool:
    return suspect.state in _STATES and not suspect.moved


def _who(suspect: Suspect) -> str:
    if suspect.role == "node":
        return suspect.host
    if suspect.role == "decode":
        return f"{suspect.host}: decoding process {suspect.pid} of rank {suspect.rank}"
    who = f"rank {suspect.rank} (process {suspect.pid})"
    return f"{suspect.host}: " + (f"thread {suspect.thread} of {who}" if suspect.thread else who)


def _at(suspect: Suspect) -> str:
    place = place_of(suspect)
    since = f" for {for_seconds(suspect.seconds)}" if suspect.state else ""
    return f" in {place}{since}" if place else since


def _where(suspect: Suspect) -> str:
    since = f"for {for_seconds(suspect.seconds)}"
    if not suspect.function:
        return f"{_doing(suspect)} {since}"
    within = f", and there in {suspect.within}," if suspect.within else ""
    return f"in {place_of(suspect)}{within} {since}, {_doing(suspect)}"


def _doing(suspect: Suspect) -> str:
    if suspect.role == "decode":
        clip = suspect.clip_path or suspect.clip
        return f"on clip {clip}" if clip else "with no clip yet"
    return _PHASES.get(suspect.doing, f"in {suspect.doing}").format(step=suspect.step)


def _motion(suspect: Suspect, rounds: int) -> str:
    times = f"{rounds} rounds" if rounds != 1 else "the one round that there was"
    cores = suspect.cpu_share
    used = _cores(cores)
    if suspect.moved:
        return f"; it is slow and not stuck: it has moved in {times}, and uses {used}"
    native = f" (in {suspect.native})" if suspect.native else ""
    lock = "; it holds Python's lock, so no other thread of it goes on" if suspect.has_gil else ""
    if suspect.waits_in == "collective" and not _is_halted(suspect):
        return "; none of the others has joined that collective"
    if cores >= 0.9 and not _is_halted(suspect):
        return f", and has not moved in {times}, but uses {used}: it is busy in C{native}{lock}"
    return f", and has not moved in {times}; it uses {used}{native}{lock}"


def _cores(cores: float) -> str:
    if cores < 0.02:
        return "no processor time"
    if cores < 0.9:
        return f"{cores:.2f} of a core"
    return "a full core" if cores < 1.1 else f"{cores:.1f} cores"


def _who_waits(waiting: Sequence[Waiting], has_suspect: bool) -> Iterator[str]:
    if waiting and has_suspect:
        first, *rest = waiting
        verb = "waits" if len(first.ranks) == 1 else "wait"
        said = of_ranks(first.ranks).capitalize()
        told = [f"{said} only {verb} for {first.doing}"]
        told += [f"{of_ranks(each.ranks)} for {each.doing}" for each in rest]
        yield f"{', and '.join(told)}."


def _absent(scene: Scene, silent: Sequence[str], suspects: Sequence[Suspect]) -> Iterator[str]:
    if absent := scene.absent:
        yield f"There is no sign of {of_ranks(absent)}; all others wait."
    elif silent and not any(each.role == "node" for each in suspects):
        yield f"No answer came from {', '.join(silent)}."


def _recorded(missing: MissingIn) -> str:
    did = "joined and has not finished" if missing.has_joined else "never joined"
    who = of_ranks(missing.ranks)
    did = did.replace("has", "have") if len(missing.ranks) > 1 else did
    return f"By the flight recorder {who} {did} {missing.op} of {missing.group}."


def _all_alike(scene: Scene) -> str:
    one = max(scene.ranks, key=lambda each: each.seconds).suspect()
    count = len(scene.ranks)
    return (
        f"All {count} ranks are in {place_of(one) or 'the same place'}, {_doing(one)}, for "
        f"{for_seconds(one.seconds)}: none of them is to blame. Look at what connects them: links, "
        "switches and network cards."
    )

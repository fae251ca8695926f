"""A process hangs: what must be said of it, by whom it is waited for, and how soon."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from longtake.drill.hangs import Hang
from longtake.drill.launch import Launch
from longtake.drill.looking import Sighting
from longtake.drill.place import Place
from longtake.drill.verdict import Verdict
from longtake.fsio import read_json
from longtake.node_dir import verdict_path

LIMIT_SECONDS = 15.0
"""From the moment a process hangs until its name is known, in a run of short steps."""


def find_stall(launch: Launch, place: Place) -> tuple[Sighting | None, dict[str, Any]]:
    """Wait for the word that something hangs; returns it, and the verdict that it speaks of."""
    found = launch.find_on_node("stalled")
    return found, read_json(verdict_path(place.run, found.event["token"])) if found else {}


def judge(
    verdict: Verdict, found: Sighting | None, said: dict[str, Any], hang: Hang, rank: int
) -> None:
    """The process that hangs is named in time: it alone, with its line and its clip.

    Args:
        verdict: takes note of what is wrong.
        found: the event.
        said: what is written of it over all nodes.
        hang: what the process itself had said; with line 0 where it did not know.
        rank: of the process, or the rank that it works for.
    """
    verdict.must(found is not None, f"no event says that process {hang.pid} hangs")
    if not found:
        return
    seconds = verdict.detected_seconds = found.at - hang.at
    verdict.must(
        seconds <= LIMIT_SECONDS,
        f"it was named after {seconds:.1f} s, not within {LIMIT_SECONDS:g}",
    )
    suspects = said.get("suspects", [])
    named = [each["pid"] for each in suspects]
    verdict.must(named == [hang.pid], f"the verdict names processes {named}, and {hang.pid} hangs")
    if hang.pid in named:
        _judge_suspect(verdict, suspects[named.index(hang.pid)], hang, rank)
    _judge_sentence(verdict, said.get("sentence", ""), hang)


def must_wait(verdict: Verdict, said: dict[str, Any], ranks: Iterable[int]) -> None:
    """Demand that of these ranks, and of no others, it is said that they only wait."""
    waiting = {rank for each in said.get("waiting", []) for rank in each["ranks"]}
    wanted = set(ranks)
    verdict.must(
        waiting == wanted, f"ranks {sorted(waiting)} are said to wait, and {sorted(wanted)} do"
    )


def must_be_the_only_alarm(verdict: Verdict, launch: Launch) -> None:
    """Demand that nobody was called stuck but the one that was."""
    stalls = [event for event in launch.node_events() if event["event"] == "stalled"]
    verdict.must(len(stalls) <= 1, f"{len(stalls)} stalls were called, and there was one")


def _judge_suspect(verdict: Verdict, suspect: dict[str, Any], hang: Hang, rank: int) -> None:
    verdict.must(
        suspect["rank"] == rank, f"it is taken for rank {suspect['rank']}'s, and is rank {rank}'s"
    )
    if hang.line:
        line = (suspect["function"], Path(suspect["file"]).name, suspect["line"])
        wanted = (hang.function, Path(hang.file).name, hang.line)
        verdict.must(line == wanted, f"it is said to be in {_where(*line)}, not {_where(*wanted)}")
    if hang.clip:
        verdict.must(
            suspect["clip"] == hang.clip,
            f"it is said to decode the clip {suspect['clip']}, not {hang.clip}",
        )
    if hang.path:
        path = suspect["clip_path"]
        verdict.must(Path(path) == Path(hang.path), f"it is said to decode {path}, not {hang.path}")


def _judge_sentence(verdict: Verdict, sentence: str, hang: Hang) -> None:
    wanted = [str(hang.pid), *filter(None, [Path(hang.path).name])]
    if hang.line:
        wanted.append(f"{Path(hang.file).name}:{hang.line}")
    missing = [word for word in wanted if word not in sentence]
    verdict.must(not missing, f"the sentence does not say {', '.join(missing)}: {sentence}")


def _where(function: str, file: str, line: int) -> str:
    return f"{function} ({file}:{line})"

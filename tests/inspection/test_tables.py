"""What people read of a run."""

import json
import re
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from longtake.inspection.facts import run_facts, step_facts
from longtake.inspection.tables import print_run, print_steps, said
from longtake.run_dir import RunDirectory


def _printed(tell: Callable[[Console, dict[str, Any]], None], facts: dict[str, Any]) -> list[str]:
    text = StringIO()
    tell(Console(file=text, highlight=False, soft_wrap=True), facts)
    return text.getvalue().splitlines()


def test_a_glance_says_how_the_run_stands(told: RunDirectory) -> None:
    lines = _printed(print_run, run_facts(told))
    assert lines[0] == f"{told.path}: tubelet, step 24 of 40, interrupted and saved"
    text = "\n".join(line.rstrip() for line in lines)
    assert "from step 0, 1 process on cpu of " in text
    assert re.search(r"begun +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", text)
    assert "24 (epoch 2): loss 0.04167, gradient norm 0.5, 0.25 s" in text
    assert "step 12; the newest has " in text
    assert "step 24 is damaged: model/weights has 9 bytes, and had 2,000" in text
    assert "step 20: roll back: step 20 is bad" in text
    assert "from step 20 to 12 (divergence), batches 13 to 21 skipped" in text
    assert "8 steps that were done, and given up" in text
    place = lines.index("  resume:")
    assert lines[place + 1] == f"    {told.resume_command()}"


def test_a_run_that_was_killed_before_its_first_launch_was_recorded_is_shown(
    told: RunDirectory,
) -> None:
    record = json.loads((told.path / "run.json").read_text())
    (told.path / "run.json").write_text(json.dumps(record | {"launches": []}))
    assert _printed(print_run, run_facts(told))[0].startswith(f"{told.path}: tubelet, step 24")


def test_the_newest_step_says_what_stores_gave(told: RunDirectory) -> None:
    *before, last = told.metrics_path.read_text().splitlines(keepends=True)
    fetched = {"store_bytes": 3 * 10**6, "store_seconds": 0.5, "store_retries": 2}
    told.metrics_path.write_text(
        "".join(before) + json.dumps(json.loads(last) | {"data_seconds": 0.125} | fetched) + "\n"
    )
    words = " ".join(" ".join(_printed(print_run, run_facts(told))).split())
    assert (
        "0.25 s, 0.125 s of it waiting for data; fetched 2.86 MiB from stores at 5.72 MiB/s a "
        "request, 2 retries" in words
    )


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (
            {
                "event": "cache_filled",
                "seconds": {"wait": 258.6741, "encode": 3.0},
                "clips": [1, 2],
            },
            "cache filled: seconds (wait 258.7, encode 3), clips 1, 2",
        ),
        (
            {"event": "sample_rejected", "at": 4, "step": 3, "reason": "no such file"},
            "sample rejected at step 4: reason no such file",
        ),
        ({"event": "finished", "at": 9, "step": 9, "by": None}, "finished at step 9"),
    ],
)
def test_events_are_told_in_words(event: dict[str, Any], text: str) -> None:
    assert said({"time": "2026-01-02T03:04:05+00:00", **event}) == text


def test_long_lists_are_shortened(told: RunDirectory) -> None:
    for record in told.rollbacks() * 20:
        told.append_rollback(record)
    text = "\n".join(_printed(print_run, run_facts(told)))
    assert "… and 9 before that" in text
    assert text.count("batches 13 to 21 skipped") == 12


def _cells(lines: list[str], step: int) -> list[list[str]]:
    cells = [line.split() for line in lines]
    marks = [row[1:] if row[:1] == ["→"] else row for row in cells]
    return [row for row in marks if row[:1] == [str(step)] and len(row) > 8]


def test_the_steps_around_one_are_a_table(told: RunDirectory) -> None:
    lines = _printed(print_steps, step_facts(told, 20, 2))
    first, again = _cells(lines, 20)
    assert first[:2] == ["20", "19"]
    assert first[-3:] == ["roll", "back,", "abandoned"]
    sigmas = ["0.05", "0.05", "0.05"]
    assert again == ["20", "28", "0.05", *sigmas, "0.5", "720", "1.0e-03"]
    assert sum(line.startswith(" →") for line in lines) == 2
    text = "\n".join(lines)
    assert "went back from step 20 to the checkpoint of step 12; batches 13 to 21" in text
    assert "The guard at step 20, batch 19: roll back" in text
    assert "It began after step 14." in text
    (skipped,) = _cells(_printed(print_steps, step_facts(told, 9, 0)), 9)
    assert skipped[2:4] == ["no", "number"]


def test_clips_are_listed_with_their_captions_and_files(told: RunDirectory) -> None:
    for step, by in ((9, "as the guard saw them"), (24, "by the ledger")):
        facts = step_facts(told, step, 1)
        lines = _printed(print_steps, facts)
        place = next(n for n, line in enumerate(lines) if line.startswith("The clips of step"))
        assert lines[place].endswith(by)
        listed = "\n".join(lines[place:])
        for sample in facts["clips"]["samples"]:
            assert sample["caption"] in listed
            assert sample["path"] in listed
            assert sample["identity"][:12] in listed
        assert ("0.25" in listed) == (by == "as the guard saw them")


def test_why_there_are_no_clips_is_said(killed: RunDirectory) -> None:
    for path in killed.guard_path.iterdir():
        path.unlink()
    lines = _printed(print_steps, step_facts(killed, 20, 1))
    (line,) = [each for each in lines if each.startswith("No clips are known of step 20")]
    assert "was abandoned, and no report of the guard is near" in line
    assert line.endswith("Its verdicts are on the steps 9, 20.")
    killed.ledger_path.rename(killed.path / "elsewhere")
    lines = _printed(print_steps, step_facts(killed, 12, 1))
    assert "No clips are known of step 12: the ledger has none of them." in lines


def test_text_that_looks_like_markup_is_printed_as_it_is(told: RunDirectory) -> None:
    facts = step_facts(told, 9, 1)
    facts["clips"]["samples"][0]["caption"] = "a [red] ball [/b]"
    facts["report"]["verdict"]["message"] = "see [bold]"
    text = "\n".join(_printed(print_steps, facts))
    assert "a [red] ball [/b]" in text
    assert "see [bold]" in text

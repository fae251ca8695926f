"""The steps around one: every pass over them, and the clips of its batch."""

import json
from pathlib import Path
from typing import Any

import pytest

from longtake.data.batch import Batch
from longtake.data.catalog import Catalog
from longtake.errors import DataError, RunError
from longtake.inspection.around import around
from longtake.run_dir import RunDirectory

Seen = dict[int, Batch]


def _paths(catalog: Path) -> dict[str, str]:
    return {clip.identity: clip.path for clip in Catalog.load(catalog).clips()}


def test_rows_of_all_passes_are_there(told: RunDirectory) -> None:
    """In the order in which they were trained, with all that metrics say."""
    facts = around(told, 20, 2)
    rows = [(row["step"], row["batch"], row["abandoned"]) for row in facts["rows"]]
    first = [(18, 17, True), (19, 18, True), (20, 19, True)]
    again = [(18, 26, False), (19, 27, False), (20, 28, False), (21, 29, False), (22, 30, False)]
    assert rows == first + again
    assert facts["rows"][2]["verdict"] == "roll_back"
    assert facts["rows"][2]["loss_by_sigma"][1] is None
    assert facts["verdict_steps"] == [9, 20]


def test_the_clips_of_a_judged_step_are_those_that_the_guard_saw(
    told: RunDirectory, seen: Seen, shapes_catalog: Path
) -> None:
    """The highest loss first, one that is no number before it; with where their files lie."""
    facts = around(told, 9, 3)
    report, clips = facts["report"], facts["clips"]
    assert (report["step"], report["batch"], report["verdict"]["kind"]) == (9, 8, "skip")
    assert report["path"] == "guard/step_00000008_0.json"
    assert (clips["source"], clips["step"], clips["batch"]) == ("guard", 9, 8)
    assert [each["loss"] for each in clips["samples"]] == ["nan", 3.0, 2.0, 1.0]
    order = [seen[9].identities[place] for place in (3, 1, 2, 0)]
    assert [each["identity"] for each in clips["samples"]] == order
    paths = _paths(shapes_catalog)
    assert [each["path"] for each in clips["samples"]] == [paths[each] for each in order]
    assert clips["samples"][0]["caption"] == seen[9].captions[3]


def test_a_step_shortly_before_a_verdict_has_its_own_clips(told: RunDirectory, seen: Seen) -> None:
    """The report has those of several steps, abandoned ones too; of others, those of its own."""
    clips = around(told, 19, 2)["clips"]
    assert (clips["source"], clips["step"], clips["batch"]) == ("guard", 19, 18)
    clips = around(told, 22, 2)["clips"]
    assert (clips["source"], clips["step"], clips["batch"]) == ("guard", 20, 19)
    assert {each["identity"] for each in clips["samples"]} & set(seen[22].identities) == set()


def test_the_newest_of_the_reports_of_a_step_is_shown(told: RunDirectory) -> None:
    """The run came there twice."""
    path = told.guard_report_path(19, 0)
    told.write_guard_report(
        told.guard_report_path(19, 1), json.loads(path.read_bytes()) | {"roll_back": None}
    )
    assert around(told, 20, 1)["report"]["path"] == "guard/step_00000019_1.json"


def test_elsewhere_clips_are_those_of_the_ledger(
    told: RunDirectory, seen: Seen, shapes_catalog: Path
) -> None:
    """Of the batch that the step was trained on at last; captions are from the kept catalog."""
    facts = around(told, 24, 2)
    clips = facts["clips"]
    assert facts["report"] is None
    assert (clips["source"], clips["step"], clips["batch"]) == ("ledger", 24, 32)
    wanted = zip(seen[24].identities, seen[24].captions, seen[24].epochs, strict=True)
    paths = _paths(shapes_catalog)
    found = [tuple(each.values()) for each in clips["samples"]]
    assert sorted(found) == sorted((*each, paths[each[0]]) for each in wanted)


def test_clips_that_no_kept_catalog_has_are_named_by_what_is_known(
    told: RunDirectory, seen: Seen
) -> None:
    """The beginnings of their identities, or all that the report says."""
    for path in told.catalogs_path.iterdir():
        path.unlink()
    samples = around(told, 24, 1)["clips"]["samples"]
    assert {each["identity"] for each in samples} == {name[:14] for name in seen[24].identities}
    assert {(each["caption"], each["path"]) for each in samples} == {(None, None)}
    samples = around(told, 9, 1)["clips"]["samples"]
    assert {each["identity"] for each in samples} == set(seen[9].identities)
    assert {each["path"] for each in samples} == {None}


def test_a_step_that_was_given_up_without_a_report_has_no_clips(killed: RunDirectory) -> None:
    """Neither has a run without a ledger; a damaged one is an error."""
    for path in killed.guard_path.iterdir():
        path.unlink()
    clips = around(killed, 20, 1)["clips"]
    assert (clips["source"], clips["samples"]) == (None, [])
    assert len(around(killed, 12, 1)["clips"]["samples"]) == 4
    (killed.ledger_path / "launch_0001" / "launch.json").write_text("{")
    with pytest.raises(DataError, match=r"launch\.json cannot be read"):
        around(killed, 12, 1)
    killed.ledger_path.rename(killed.path / "elsewhere")
    clips = around(killed, 12, 1)["clips"]
    assert (clips["source"], clips["samples"]) == ("ledger", [])


def _events(facts: dict[str, Any]) -> list[tuple[str, int]]:
    return [(event["event"], event["at"]) for event in facts["events"]]


def test_events_are_at_the_steps_that_metrics_count(told: RunDirectory) -> None:
    """A verdict is about the step that it stopped, an epoch begins with the step of its batch."""
    assert _events(around(told, 9, 2)) == [("skipped", 9)]
    went_back = [("suspected", 20), ("rolled_back", 12)]
    assert _events(around(told, 20, 1)) == went_back
    assert _events(around(told, 12, 1)) == [("checkpoint", 12), went_back[1]]
    end = [("epoch", 24), ("checkpoint", 24), ("interrupted", 24)]
    assert _events(around(told, 24, 1)) == end
    # Batch 16 began epoch 1 in step 17, which was given up; now batch 22 does, in step 14.
    assert _events(around(told, 14, 1))[-1] == ("epoch", 14)
    assert ("launched", 0) in _events(around(told, 1, 1))


def test_a_step_that_the_run_has_not_done_is_refused(told: RunDirectory, tmp_path: Path) -> None:
    """With how far it is, and what to look at instead."""
    message = rf"run has done 24 steps so far.*step 25\. .*longtake show {told.path} --around 24"
    with pytest.raises(RunError, match=message):
        around(told, 25, 5)
    told.metrics_path.unlink()
    with pytest.raises(RunError, match=r"has not done a step so far, and none is known of step 3"):
        around(told, 3, 5)
    with pytest.raises(RunError, match=r"is not a run directory"):
        around(RunDirectory(tmp_path), 3, 5)


def test_a_damaged_report_is_named(told: RunDirectory) -> None:
    """What it lacks, and that the rest can be looked at without it."""
    path = told.guard_report_path(8, 0)
    path.write_text('{"step": 8}')
    with pytest.raises(RunError, match=r"step_00000008_0\.json cannot be read: verdict: .*move it"):
        around(told, 9, 1)
    assert around(told, 20, 1)["report"]["step"] == 20

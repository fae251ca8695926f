"""Facts of a run, of the steps around one, of its incidents and its evaluations."""

import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.build import bare_recipe
from tests.data.build import clip
from tests.data.catalogs import make_catalog

from longtake.cli.app import app
from longtake.config import STEM
from longtake.data.batch import Batch
from longtake.data.catalog import Catalog
from longtake.data.clip import Media
from longtake.errors import DataError, RunError
from longtake.evaluation_dir import EvaluationDirectory
from longtake.inspection.facts import (
    command_to_sample,
    evaluated,
    incidents,
    restarts,
    run_facts,
    step_facts,
)
from longtake.inspection.rows import read_rows
from longtake.inspection.tables import _evaluated, incident_sentence, restart_sentence
from longtake.lease import Leases
from longtake.node_dir import NodeDirectory, read_events
from longtake.run_dir import RunDirectory


def test_a_run_is_summed_up(told: RunDirectory) -> None:
    checkpoint = told.checkpoint_path(12)
    shutil.copytree(checkpoint, checkpoint.with_name(f"{checkpoint.name}.bak"))  # not the run's
    facts = run_facts(told)
    assert (facts["family"], facts["steps"], facts["total_steps"]) == ("tubelet", 24, 40)
    assert (facts["state"], facts["abandoned_rows"]) == ("interrupted", 8)
    assert [launch["start_step"] for launch in facts["launches"]] == [0]
    assert facts["newest"] == told.metrics()[-1]
    first, second = facts["checkpoints"]
    assert (first["step"], first["damage"]) == (12, None)
    assert first["bytes"] > 1000
    assert (second["step"], "has 9 bytes, and had 2,000" in second["damage"]) == (24, True)
    verdicts = [(each["step"], each["verdict"], each["reason"]) for each in facts["verdicts"]]
    assert verdicts == [(9, "skip", "non_finite"), (20, "roll_back", "divergence")]
    assert facts["rollbacks"] == told.rollbacks()


def _commands(facts: dict[str, Any]) -> list[str]:
    return [way["command"] for way in facts["next"]]


def test_what_to_type_next_follows_from_how_it_ended(told: RunDirectory) -> None:
    go_on = told.resume_command()
    assert _commands(run_facts(told))[:2] == [go_on, f"longtake show {told.path} --around 20"]
    assert run_facts(told)["next"][0]["for"] == "resume"
    told.append_event("resumed", step=24)
    facts = run_facts(told)
    assert facts["state"] == "running"  # its files are young
    assert go_on not in _commands(facts)
    _make_old(told)
    facts = run_facts(told)
    assert facts["state"] == "dead"
    assert facts["next"][0] == {"command": go_on, "for": "resume"}
    told.append_event("finished", step=40)
    facts = run_facts(told)
    assert facts["state"] == "finished"
    assert go_on not in _commands(facts)
    assert f"longtake data audit {told.path}" in _commands(facts)
    told.append_event("diverged", step=40, message="again", why="no checkpoint")
    assert run_facts(told)["state"] == "diverged"
    assert _commands(run_facts(told))[0] == f"longtake show {told.path} --around 20"


def test_each_command_to_type_next_is_a_verb(
    told: RunDirectory, add_scores: Callable[..., Path]
) -> None:
    add_scores(told, "unseen", 20)
    _make_old(told)
    commands = _commands(run_facts(told))
    assert f"longtake board {told.path.parent}" in commands
    verbs = {shlex.split(each)[1] for each in commands}
    assert verbs <= typer.main.get_command(app).commands.keys()  # type: ignore[attr-defined]


def _make_old(run: RunDirectory) -> None:
    for path in (run.metrics_path, run.events_path):
        os.utime(path, (0, 0))


def test_a_run_that_has_just_begun(teller_of: Callable[[Path], Any], tmp_path: Path) -> None:
    facts = run_facts(teller_of(tmp_path / "new").run)
    assert (facts["steps"], facts["newest"], facts["state"]) == (0, None, "running")
    assert (facts["checkpoints"], facts["verdicts"], facts["rollbacks"]) == ([], [], [])
    assert facts["next"] == []


def test_a_folder_without_a_run_or_with_half_of_one_is_named(
    told: RunDirectory, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=r"nowhere is not a run directory"):
        run_facts(RunDirectory(tmp_path / "nowhere"))
    told.record_path.write_text("{}")
    with pytest.raises(RunError, match=r"run\.json cannot be read: id: .* holds a run"):
        run_facts(told)


def test_checkpoints_that_a_rollback_gave_up_are_told_apart(killed: RunDirectory) -> None:
    """The run was killed before it could delete them, and trained no step since."""
    facts = run_facts(killed)
    assert facts["steps"] == 12
    abandoned = [(each["step"], each["abandoned"]) for each in facts["checkpoints"]]
    assert abandoned == [(12, False), (24, True)]


@pytest.mark.parametrize(
    ("path", "given"),
    [
        ("/clips/a cat.png", "/before/a cat.png"),
        ("s3://films/clips/a cat.png", "a cat.png"),  # which is to be fetched
    ],
)
def test_the_suggested_sample_has_a_clips_further_inputs(
    path: str, given: str, tmp_path: Path
) -> None:
    shape = {"num_frames": 1, "height": 32, "width": 32}
    before = {"kind": "picture", "path": f"../before/{STEM}.png"}
    data = {"buckets": [shape], "conditioning": {"before": before}}
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    run.create(bare_recipe(run.path, model={"family": "flux"}, data=data))
    run.catalogs_path.mkdir()
    picture = clip(0, media=Media(path), kind="image", caption="a cat's hat", num_frames=1)
    make_catalog([picture]).save(run.catalogs_path / "0.parquet")
    words = shlex.split(command_to_sample(run))
    assert words[:3] == ["longtake", "sample", str(run.path)]
    assert words[3:] == [
        *("--prompt", "a cat's hat"),
        *("--conditioning", f"before={given}"),
        *("--out", "sample.png"),
    ]


Seen = dict[int, Batch]


def _paths(catalog: Path) -> dict[str, str]:
    return {clip.identity: clip.path for clip in Catalog.load(catalog).clips()}


def test_rows_of_all_passes_are_there(told: RunDirectory) -> None:
    facts = step_facts(told, 20, 2)
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
    facts = step_facts(told, 9, 3)
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
    clips = step_facts(told, 19, 2)["clips"]
    assert (clips["source"], clips["step"], clips["batch"]) == ("guard", 19, 18)
    clips = step_facts(told, 22, 2)["clips"]
    assert (clips["source"], clips["step"], clips["batch"]) == ("guard", 20, 19)
    assert {each["identity"] for each in clips["samples"]} & set(seen[22].identities) == set()


def test_the_newest_of_the_reports_of_a_step_is_shown(told: RunDirectory) -> None:
    path = told.guard_report_path(19, 0)
    told.write_record(
        told.guard_report_path(19, 1), json.loads(path.read_bytes()) | {"roll_back": None}
    )
    assert step_facts(told, 20, 1)["report"]["path"] == "guard/step_00000019_1.json"


def test_elsewhere_clips_are_those_of_the_ledger(
    told: RunDirectory, seen: Seen, shapes_catalog: Path
) -> None:
    facts = step_facts(told, 24, 2)
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
    for path in told.catalogs_path.iterdir():
        path.unlink()
    samples = step_facts(told, 24, 1)["clips"]["samples"]
    assert {each["identity"] for each in samples} == {name[:14] for name in seen[24].identities}
    assert {(each["caption"], each["path"]) for each in samples} == {(None, None)}
    samples = step_facts(told, 9, 1)["clips"]["samples"]
    assert {each["identity"] for each in samples} == set(seen[9].identities)
    assert {each["path"] for each in samples} == {None}


def test_a_step_that_was_given_up_without_a_report_has_no_clips(killed: RunDirectory) -> None:
    for path in killed.guard_path.iterdir():
        path.unlink()
    clips = step_facts(killed, 20, 1)["clips"]
    assert (clips["source"], clips["samples"]) == (None, [])
    assert len(step_facts(killed, 12, 1)["clips"]["samples"]) == 4
    (killed.ledger_path / "launch_0001" / "launch.json").write_text("{")
    with pytest.raises(DataError, match=r"launch\.json cannot be read"):
        step_facts(killed, 12, 1)
    killed.ledger_path.rename(killed.path / "elsewhere")
    clips = step_facts(killed, 12, 1)["clips"]
    assert (clips["source"], clips["samples"]) == ("ledger", [])


def _events(facts: dict[str, Any]) -> list[tuple[str, int]]:
    return [(event["event"], event["at"]) for event in facts["events"]]


def test_events_are_at_the_steps_that_metrics_count(told: RunDirectory) -> None:
    assert _events(step_facts(told, 9, 2)) == [("update_skipped", 9)]
    went_back = [("anomaly_detected", 20), ("rolled_back", 12)]
    assert _events(step_facts(told, 20, 1)) == went_back
    assert _events(step_facts(told, 12, 1)) == [("checkpoint", 12), went_back[1]]
    end = [("epoch", 24), ("checkpoint", 24), ("interrupted", 24)]
    assert _events(step_facts(told, 24, 1)) == end
    # Batch 16 began epoch 1 in step 17, which was given up; now batch 22 does, in step 14.
    assert _events(step_facts(told, 14, 1))[-1] == ("epoch", 14)
    assert ("launched", 0) in _events(step_facts(told, 1, 1))


def test_a_step_that_the_run_has_not_done_is_refused(told: RunDirectory, tmp_path: Path) -> None:
    message = rf"run has done 24 steps so far.*step 25\. .*longtake show {told.path} --around 24"
    with pytest.raises(RunError, match=message):
        step_facts(told, 25, 5)
    told.metrics_path.unlink()
    with pytest.raises(
        RunError, match=r"has not done a step so far, and nothing is known of step 3"
    ):
        step_facts(told, 3, 5)
    with pytest.raises(RunError, match=r"is not a run directory"):
        step_facts(RunDirectory(tmp_path), 3, 5)


def test_a_damaged_report_is_named(told: RunDirectory) -> None:
    path = told.guard_report_path(8, 0)
    path.write_text('{"step": 8}')
    with pytest.raises(RunError, match=r"step_00000008_0\.json cannot be read: verdict: .*move it"):
        step_facts(told, 9, 1)
    assert step_facts(told, 20, 1)["report"]["step"] == 20


def _incidents(run: RunDirectory) -> list[dict[str, Any]]:
    return incidents(list(read_events(run)), read_rows(run))


def test_what_is_of_a_step_is_placed_there_and_the_rest_by_its_time(told: RunDirectory) -> None:
    """A stall after four steps is in the fifth; a clock's step has no step but a time."""
    node, sentence = NodeDirectory(told, "gpu07"), "gpu07: rank 3 has been in read for 12 s"
    node.append_event("watcher_started", pid=1)
    node.append_event("stalled", step=4, sentence=sentence)
    node.append_event("clock_stepped", seconds=-2.5, message="the clock went back by 2.5 s")
    newest = read_rows(told).step[-1]
    assert [(each["event"], each["at"], incident_sentence(each)) for each in _incidents(told)] == [
        ("stalled", 5, f"stalled: {sentence}"),
        ("clock_stepped", newest, "clock stepped -2.5 s on gpu07: the clock went back by 2.5 s"),
    ]


def test_a_rank_that_failed_is_told_with_where_and_of_what(told: RunDirectory) -> None:
    facts = {"rank": 3, "world_size": 4, "launch": "a", "pid": 7, "step": 4}
    facts |= {"phase": "backward", "kind": "killed", "log": "rank_0003.log"}
    node = NodeDirectory(told, "gpu07")
    reason = "rank 3 (process 7) is gone without having ended: step 4, backward."
    node.append_event("rank_failed", **facts, source="watcher", error="gone", reason=reason)
    (failed,) = _incidents(told)
    assert failed["at"] == 5
    assert incident_sentence(failed) == f"rank failed on gpu07: {reason}"
    # The rank itself knows more, its launcher most, and it failed once.
    error = "ValueError: a layer broke"
    for source in ("rank", "watcher"):
        text = error if source == "rank" else "gone"
        node.append_event("rank_failed", **facts, source=source, error=text, reason=reason)
    assert [each["error"] for each in _incidents(told)] == [error]
    node.append_event("rank_failed", **facts, source="launcher", error="killed by SIGKILL")
    (failed,) = _incidents(told)
    said = "rank failed on gpu07: rank 3 (phase backward): killed by SIGKILL"
    assert incident_sentence(failed) == said
    time.sleep(0.002)  # events of two files are put in order by their milliseconds
    told.append_event("resumed", step=2, lost_steps=2)
    (restart,) = restarts(told)
    assert re.fullmatch(
        r"Steps 3 to 4 were trained again by the launch that began at .* UTC, because at [\d:]+ "
        rf"UTC a {re.escape(said)}",
        restart_sentence(restart),
    )


def test_a_stall_that_is_diagnosed_again_is_told_once_with_its_length(told: RunDirectory) -> None:
    """Until it ended; a later one of the same worker is another. Clock steps change no order."""
    node, suspects = NodeDirectory(told, "gpu07"), [{"host": "gpu07", "pid": 9}]

    def stall(token: str, sentence: str, **facts: Any) -> None:
        found = {"launch": "a", "step": 4, "token": token, "suspects": suspects} | facts
        node.append_event("stalled", sentence=sentence, **found)

    stall("a", "for 6 s")
    node.append_event("clock_stepped", time="2020-01-01T00:00:00+00:00", seconds=-1e8)
    stall("b", "for 12 s", time="2020-01-01T00:00:01+00:00")
    stall("c", "another", suspects=[{"host": "gpu08", "pid": 9}])
    node.append_event("stall_cleared", token="b", seconds=14.0)
    stall("d", "for 7 s")
    assert [incident_sentence(each) for each in _incidents(told)] == [
        "stalled for 14 s on gpu07: for 12 s",
        "clock stepped -1e+08 s on gpu07",
        "stalled on gpu07: another",
        "stalled on gpu07: for 7 s",
    ]


def test_the_newest_result_stands_for_a_preset(
    add_scores: Callable[..., Path], tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path)
    add_scores(run, "demo", 100)
    message = "brightness of demo rose 4 checkpoints in a row, +9 %"
    alarm = {"measure": "brightness", "kind": "drift", "message": message}
    unlike = {"measure": "frame_change", "kind": "range", "message": "it is 9"}
    facts = {"measures": {"brightness": 0.5}, "held_out": {"mean": 0.3}}
    add_scores(run, "demo", 200, **facts, alarms=[alarm, unlike])
    (found,) = evaluated(run)
    assert (found["preset"], found["steps"]) == ("demo", [100, 200])
    assert (found["measures"], found["held_out"]) == ({"brightness": 0.5}, {"mean": 0.3})
    assert found["alarms"] == [message]
    first, second, third = _evaluated(found)
    assert first == "2 checkpoints, the newest of step 200: brightness 0.5, held-out loss 0.3"
    assert second == f"alarm: {message}"
    assert third == "differs from the training clips (a comparison, not a fault): frame change"


def test_what_failed_is_told_until_there_is_a_result(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert evaluated(run) == []
    claim = EvaluationDirectory(run).claim_path("low4s", 100, "abcd1234")
    for reason in ("no space left", "still none"):
        lease = Leases(60, {}).take(claim)
        assert lease is not None
        lease.end("failed", reason=reason)
    (found,) = evaluated(run)
    assert found["failed"] == [{"step": 100, "reason": "still none", "attempts": 2}]
    assert _evaluated(found) == ["step 100 failed 2 times: still none"]

"""The pages of runs as functions from files to HTML."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longtake.board import overview, report
from longtake.board.charts import ticks
from longtake.board.pages import ServerLinks, embedded, number, percent
from longtake.board.plots import panels_of, series_payload
from longtake.board.runs_page import differing_keys, render_comparison, render_runs
from longtake.inspection.reader import NO_ROWS, RunList, RunReader
from longtake.inspection.run_list import list_runs
from longtake.run_dir import RunDirectory

LINKS = ServerLinks()


def _reader(run: RunDirectory) -> RunReader:
    return RunReader(run.path.parent, run.path.name)


def _overview(run: RunDirectory) -> str:
    return overview.render_overview(_reader(run).facts(), LINKS, {})


def _embedded(html: str, name: str) -> Any:
    found = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', html)
    assert found is not None
    return json.loads(found[1])


def test_a_run_page_has_state_events_hours_and_recipe(told: RunDirectory) -> None:
    html = _overview(told)
    assert "interrupted" in html
    assert "step 24 of 40" in html
    assert "went back from step 20 to the checkpoint of step 12" in html
    assert 'class="waterfall"' in html
    assert "<code>training.global_batch_size</code></td><td><code>4</code>" in html
    kinds = {mark["kind"] for mark in _embedded(html, "marks")}
    assert kinds >= {"launch", "stage", "skip", "rollback", "checkpoint", "end"}
    assert "longtake data audit" in html


def test_only_keys_that_differ_from_defaults_come_first(told: RunDirectory) -> None:
    keys = {each.name: each for each in overview.keys_of(told.recipe())}
    assert not keys["training.global_batch_size"].is_default
    assert keys["training.global_batch_size"].default == ""
    assert keys["ema.decay"].is_default
    assert keys["data.buckets"].value.startswith("[{ num_frames = 8")


def test_facts_follow_the_files(told: RunDirectory) -> None:
    reader = _reader(told)
    before = reader.facts()
    told.append_metrics({**told.metrics()[-1], "step": 25})
    told.append_event("diverged", step=25, message="the loss is infinite")
    after = reader.facts()
    assert (before.steps, after.steps) == (24, 25)
    assert len(after.marks) == len(before.marks) + 1
    assert reader.facts().events is after.events


def test_tokens_per_second_have_a_row_for_each_bucket_if_the_run_has_them(
    told: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "Speed by bucket" not in _overview(told)
    last = told.metrics()[-1]
    for step, frames in enumerate((33, 33, 1), last["step"] + 1):
        assert ">MFU<" not in _overview(told)
        speed = {"bucket": [frames, 256, 480], "tokens_per_second": 1e5 * frames}
        speed |= {"mfu": 0.375} if frames == 1 else {}
        told.append_metrics({**last, "step": step, **speed})  # type: ignore[typeddict-item]
    html = _overview(told)
    assert re.search(r"33 frames of 480x256.*2.*3,300,000", html)
    assert re.search(r"1 frame of 480x256.*1.*100,00.*37.5 %", html)
    assert ">MFU<" in html
    monkeypatch.setattr(overview, "_MOST_BUCKETS", 1)
    html = _overview(told)
    assert "1 frame of 480x256" not in html
    assert "The 1 of 2 buckets with the most steps." in html


@pytest.mark.parametrize("name", ["events.jsonl", "run.json", "recipe.toml", "metrics.jsonl"])
def test_what_cannot_be_read_is_a_sentence_beside_the_rest(told: RunDirectory, name: str) -> None:
    (told.path / name).unlink()
    (told.path / name).mkdir()
    facts = _reader(told).facts()
    assert any(name in problem for problem in facts.problems)
    html = overview.render_overview(facts, LINKS, {})
    assert '<p class="problem" role="alert">' in html
    assert "What happened" in html


@pytest.mark.parametrize(
    "name",
    ["metrics.jsonl", "nodes/vm", "nodes/x/heartbeat.json", "evaluations/low4s", "guard/x.json"],
)
def test_records_behind_a_link_are_not_read(told: RunDirectory, tmp_path: Path, name: str) -> None:
    path = told.path / name
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(tmp_path)
    facts = _reader(told).facts()
    assert len(facts.rows) == 0
    assert f"{path} is a symbolic link; links are not followed" in " ".join(facts.problems)


def test_the_end_of_a_log_is_shown_by_its_name(told: RunDirectory) -> None:
    (told.path / "evaluate.log").write_text("first\n" + "x" * 20_000 + "\nlast line\n")
    facts = _reader(told).facts()
    shown = overview.read_log(facts, "evaluate.log")
    assert shown is not None
    assert shown["text"] == "last line\n"
    for other in ("../run/evaluate.log", "/etc/passwd", "run.json"):
        assert overview.read_log(facts, other) is None


def test_a_list_of_runs_shows_each_with_its_state(told: RunDirectory) -> None:
    folder = told.path.parent
    (folder / "broken").mkdir()
    (folder / "broken" / "run.json").write_text("{")
    html = render_runs(folder, list_runs(folder), LINKS)
    assert 'href="/run/overview/run"' in html
    assert "interrupted" in html
    assert html.count('class="problem"') == 1


def test_a_comparison_has_only_keys_that_differ(told: RunDirectory) -> None:
    other = RunDirectory(told.path.with_name("other"))
    other.path.mkdir()
    text = told.recipe_path.read_text().replace("global_batch_size = 4", "global_batch_size = 8")
    other.recipe_path.write_text(text)
    runs = [_reader(told).facts(), _reader(other).facts()]
    assert differing_keys(runs) == [("training.global_batch_size", ["4", "8"])]
    html = render_comparison(runs, LINKS)
    assert [each["name"] for each in _embedded(html, "curves")] == ["run", "other"]


def test_a_run_without_a_step_has_empty_states(told: RunDirectory) -> None:
    told.metrics_path.unlink()
    assert "No step has been trained yet." in _overview(told)


# --- Numbers of plots -------------------------------------------------------------------------


def test_a_pixel_keeps_the_least_and_the_greatest_number(told: RunDirectory) -> None:
    rows = _reader(told).facts().rows
    whole = series_payload(rows, {"names": "loss"})["series"][0]
    (few,) = series_payload(rows, {"names": "loss", "pixels": "2"})["series"]
    known = [value for value in whole["mean"] if value is not None]
    assert min(few["low"]) == min(known)
    assert max(few["high"]) == max(known)


def test_a_branch_that_was_given_up_is_apart(told: RunDirectory) -> None:
    found = series_payload(_reader(told).facts().rows, {"names": "loss"})
    (branch,) = found["branches"]
    assert (branch["first"], branch["last"], branch["returned_to"]) == (13, 20, 12)
    assert found["x"] == list(range(1, 25))


def test_numbers_that_are_not_finite_are_named_but_for_empty_parts_of_the_sigmas(
    told: RunDirectory,
) -> None:
    rows = _reader(told).facts().rows
    loss, part = series_payload(rows, {"names": "loss,loss_sigma_2"})["series"]
    assert loss["bad"] == [9]
    assert (part["bad"], part["sparse"]) == ([], True)


def test_no_steps_have_no_numbers() -> None:
    found = series_payload(NO_ROWS, {"names": "loss", "pixels": "0"})
    assert (found["x"], found["series"][0]["mean"]) == ([], [])
    assert "flops" not in {panel.key for panel in panels_of(NO_ROWS)}


# --- Filters ----------------------------------------------------------------------------------


def test_embedded_json_cannot_end_its_script() -> None:
    text = "</script><!--\u2028&"
    assert not set("<>&\u2028") & set(embedded(text))
    assert json.loads(embedded(text)) == text


def test_numbers_are_short_and_shares_percent() -> None:
    values = (0.123456, 12345, None, float("nan"))
    assert [number(each) for each in values] == ["0.1235", "12,345", "-", "-"]
    assert [percent(each) for each in (0.123, 1.0, None)] == ["12.3 %", "100 %", "-"]


# --- The report -------------------------------------------------------------------------------


def test_a_report_is_one_file_that_begins_with_the_result_and_the_videos(
    told: RunDirectory, add_scores: Callable[..., Path], tmp_path: Path
) -> None:
    folder = add_scores(told, "unseen", 20, measures={"motion": 3.0, "adherence": 1.0})
    (folder / "00_s0.png").write_bytes(b"")
    out = tmp_path / "report.html"
    report.write_report(told.path, out)
    html = out.read_text()
    assert not re.search(r'(src|href)="(?!#|data:)[^"]', html)
    assert "default-src &#39;none&#39;" in html
    assert _embedded(html, "series")["newest"] == 24
    assert "Preset unseen at step 20: adherence 100%, motion 3" in html
    assert html.index('<section id="samples"') < html.index('<section id="overview"')
    # Scripts find embedded data by ids, which the sections of a report must not take.
    ids = re.findall(r'<[a-z]+ [^<>]*\bid="([\w-]+)"', html)
    assert {"samples", "marked-samples", "series"} <= set(ids)
    assert len(ids) == len(set(ids))


def test_the_newest_and_the_oldest_samples_come_first() -> None:
    assert report._spread([10, 20, 30, 40, 50]) == [50, 10, 30, 20, 40]
    assert report._spread([]) == []


def test_a_list_reads_a_run_that_has_ended_again_if_it_has_changed(told: RunDirectory) -> None:
    runs = RunList(told.path.parent)
    (before,) = runs.summaries()
    (same,) = runs.summaries()
    assert same is before
    told.append_event("resumed", step=24)
    told.append_event("finished", step=24, seconds=1.0)
    (after,) = runs.summaries()
    assert (before.state, after.state) == ("interrupted", "finished")


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 32, [0, 10, 20, 30]),
        (0.3, 2.2, [0.5, 1, 1.5, 2]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
        (0, 10, [0, 2.5, 5, 7.5, 10]),
        (3, 3, [3]),
    ],
)
def test_ticks_are_round_numbers_within_the_range(
    low: float, high: float, expected: list[float]
) -> None:
    assert ticks(low, high) == pytest.approx(expected)

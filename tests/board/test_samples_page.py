"""The page of samples, from a run's files to HTML."""

import json
import re
import shutil
from collections.abc import Mapping
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from tests.board.sampled_run import PROMPTS, STEPS, add_result, make_run, write_reference
from tests.build import bare_recipe

from longtake.board.pages import ServerLinks
from longtake.board.samples_page import cell_size, columns, render_samples, sample_options
from longtake.board.server import Board
from longtake.evaluation_dir import Alarm, EvaluationDirectory
from longtake.inspection.reader import RunReader
from longtake.lease import Leases
from longtake.run_dir import RunDirectory


class FileLinks(ServerLinks):
    """Those of a page that is one file: some videos are in it, others only as stills."""

    layout = "bare.html"

    def series(self, run: str) -> str:
        return ""

    def media(self, run: str, path: str) -> str | None:
        return "data:video/mp4;base64,AAAA" if "00_s0" in path else None

    def poster(self, run: str, path: str) -> str | None:
        return "data:image/png;base64,AAAA"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return make_run(tmp_path / "runs" / "own")


def page(run: RunDirectory, links: ServerLinks | None = None, **query: str) -> str:
    reader = RunReader(run.path.parent, run.path.name)
    return render_samples(reader.facts(), links or ServerLinks(), rename(query))


def rename(query: Mapping[str, str]) -> dict[str, str]:
    return {"with" if name == "against" else name: value for name, value in query.items()}


def payload(html: str) -> dict[str, Any]:
    found = re.search(r'id="samples-data">(.*?)</script>', html)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def texts(html: str, pattern: str) -> list[str]:
    return [unescape(re.sub(r"<[^>]*>", "", each)).strip() for each in re.findall(pattern, html)]


def prompts(html: str) -> list[str]:
    return texts(html, r'<th scope="row"><span class="samples-prompt" title=".*?">(.*?)</span>')


def test_without_samples_the_page_says_how_to_make_some(run: RunDirectory) -> None:
    html = page(run)
    assert "No checkpoint has been sampled yet" in html
    assert f'data-copy="longtake evaluate {run.path}"' in html


def test_prompts_are_down_and_checkpoints_across_the_newest_last(run: RunDirectory) -> None:
    for step in (80, 40, 1200):
        add_result(run, "shapes", step)
    html = page(run)
    headings = texts(html, r'data-samples-step="\d+" title="step \d+">(.*?)</button>')
    assert headings == ["40", "80", "1,200"]
    assert prompts(html) == list(PROMPTS)
    assert "/media/own/evaluations/shapes/step_00000040/01_s0.mp4" in html
    assert "/poster/own/evaluations/shapes/step_00000040/01_s0.mp4" in html
    assert len(re.findall(r'<video muted loop playsinline preload="none"', html)) == 6


@pytest.mark.parametrize(
    ("count", "chosen", "expected"),
    [
        (4, 0, [0, 33, 66, 99]),
        (4, 35, [0, 35, 66, 99]),
        (4, 98, [0, 33, 98, 99]),
        (200, 5, list(range(100))),
    ],
)
def test_of_many_checkpoints_the_first_the_chosen_and_the_newest_have_columns(
    count: int, chosen: int, expected: list[int]
) -> None:
    assert columns(range(100), chosen, count) == expected


def test_a_page_of_many_checkpoints_has_few_videos_and_knows_all(run: RunDirectory) -> None:
    for step in range(1, 41):
        add_result(run, "shapes", step)
    html = page(run, step="17")
    assert html.count("<video ") == 2 * 12
    data = payload(html)
    assert [each["step"] for each in data["steps"]] == list(range(1, 41))
    assert data["sets"] == [["00_s0.mp4", "01_s0.mp4"]]
    assert len(page(run, columns="4")) < len(html)


def test_the_nearest_sample_of_a_step_is_chosen_and_said(run: RunDirectory) -> None:
    for step in STEPS:
        add_result(run, "shapes", step)
    html = page(run, step="130", preset="missing")
    assert "Step 130 was not sampled; the nearest is 120." in html
    assert "There is no sample of a preset missing; this is shapes." in html
    assert payload(html)["choice"]["step"] == 120
    assert payload(page(run, step="x"))["choice"]["step"] == 200


def test_the_preset_with_the_step_or_else_the_newest_is_shown(run: RunDirectory) -> None:
    add_result(run, "early", 40)
    add_result(run, "late", 80)
    assert payload(page(run))["preset"] == "late"
    assert payload(page(run, step="40"))["preset"] == "early"
    assert payload(page(run, preset="early"))["preset"] == "early"


def test_drift_is_marked_where_it_was_found_and_said(run: RunDirectory) -> None:
    drift = Alarm(measure="brightness", kind="drift", message="brightness rose <4> in a row")
    add_result(run, "shapes", 40)
    add_result(run, "shapes", 80, alarms=[drift])
    add_result(run, "shapes", 120)
    html = page(run, step="80")
    assert texts(html, r"<li class=\"alarm\">(.*?)</li>") == ["brightness rose <4> in a row"]
    assert "<title>step 80: brightness rose &lt;4&gt; in a row</title>" in html
    assert payload(html)["alarms"] == [[], [[drift["message"], "drift"]], []]


def test_what_differs_from_the_training_clips_is_a_note_and_no_alarm(run: RunDirectory) -> None:
    said = "frame_change of shapes is 9; of 64 training clips 98 % lie between 1 and 2."
    add_result(
        run, "shapes", 40, alarms=[Alarm(measure="frame_change", kind="range", message=said)]
    )
    html = page(run)
    assert texts(html, r"<li class=\"alarm\">(.*?)</li>") == []
    (note,) = texts(html, r"<li class=\"note\">(.*?)</li>")
    assert note.startswith("A comparison, not a fault: frame change of shapes is 9")


def test_measures_have_values_units_and_the_range_of_training_clips(run: RunDirectory) -> None:
    for step in STEPS:
        add_result(run, "shapes", step)
    write_reference(run, "shapes", 50.0, 90.0)
    html = page(run, step="160")
    shown = texts(html, r"(?s)<figcaption>(.*?)</figcaption>")
    assert shown[:2] == ["brightness 200 grey levels", "motion 30 % of height a second"]
    assert shown[2:] == [
        "held-out loss 0.625",
        "held-out loss, sigma 0.1 3",
        "held-out loss, sigma 0.9 0.1",
    ]
    assert "training clips 50 to 90" in html
    assert html.count('class="spark-band"') == 1


def test_a_tiny_clip_is_enlarged_by_a_whole_factor(run: RunDirectory) -> None:
    add_result(run, "tiny", 40)
    add_result(run, "large", 40, settings={"height": 480, "width": 832})
    assert 'width="96" height="96"' in page(run, preset="tiny")
    assert "is-tiny" in page(run, preset="tiny")
    assert "is-tiny" not in page(run, preset="large")
    assert cell_size(48, 100, 96) == (100, 48)
    assert cell_size(480, 832, 96) == (144, 83)
    assert cell_size(None, 832, 96) is None


def test_images_are_shown_as_images(run: RunDirectory) -> None:
    add_result(run, "stills", 40, suffix=".png", settings={"num_frames": 1})
    html = page(run)
    assert "<video" not in html
    assert '<img src="/media/own/evaluations/stills/step_00000040/00_s0.png"' in html


def test_inputs_stand_beside_their_prompt(run: RunDirectory) -> None:
    given = {"conditioning": {"pose": ["aa", "bb"], "speed": ["cc", "dd"]}}
    add_result(run, "posed", 40, settings=given)
    folder = run.path / "evaluations" / "posed" / "pictures"
    folder.mkdir()
    (folder / "01_pose.png").write_bytes(b"")
    html = page(run)
    assert re.findall(r'class="samples-input" src="(.*?)"', html) == [
        "/media/own/evaluations/posed/pictures/01_pose.png"
    ]
    assert "--conditioning pose=FILE" in payload(html)["command"]["prompts"][0]


# --- What is compared -------------------------------------------------------------------------


def test_another_preset_with_the_same_prompts_is_offered_and_given_to_the_script(
    run: RunDirectory,
) -> None:
    add_result(run, "average", 40)
    add_result(run, "raw", 80, weights="model", prompts=PROMPTS[::-1])
    add_result(run, "others", 40, prompts=["a dog"])
    html = page(run, preset="average", against="preset:raw", view="compare")
    assert '<option value="preset:raw" selected>raw (model)</option>' in html
    assert "preset:others" not in html
    other = payload(html)["other"]
    assert (other["title"], other["weights"]) == ("own, raw", "model")
    assert other["sets"] == [["01_s0.mp4", "00_s0.mp4"]]
    assert payload(page(run, preset="average", against="model"))["other"]["preset"] == "raw"
    assert payload(page(run, preset="average", against="preset:x"))["other"] is None


def test_other_runs_that_share_the_preset_are_offered(run: RunDirectory) -> None:
    twin, stranger = (make_run(run.path.parent / name) for name in ("group/twin", "stranger"))
    linked = make_run(run.path.parent / "linked")
    for each in (run, twin, linked):
        add_result(each, "shapes", 40)
    add_result(stranger, "strange", 40)
    shutil.move(linked.path / "evaluations" / "shapes", linked.path / "away")
    (linked.path / "evaluations" / "shapes").symlink_to(linked.path / "away")
    facts = Board(run.path.parent).reader("own").facts()
    html = render_samples(facts, ServerLinks(), {"with": "run:group/twin"})
    assert re.findall(r'<option value="(run:.*?)"', html) == ["run:group/twin"]
    other = payload(html)["other"]
    assert other["title"] == "group/twin, shapes"
    assert other["steps"][0]["media"] == "/media/group/twin/evaluations/shapes/step_00000040"
    assert "run:group/twin" not in page(run)  # a reader that knows no other runs


def test_a_page_that_is_one_file_has_each_video_once(run: RunDirectory) -> None:
    add_result(run, "shapes", 40)
    add_result(run, "shapes", 80)
    add_result(run, "raw", 40)
    html = page(run, FileLinks(), preset="shapes")
    assert html.count("data:video/mp4") == 3  # two, and the newest of the other preset
    assert "Preset raw" in html
    assert "only a still, as this page would be too large" in html
    assert re.findall(r'<option value="(before|first|preset:raw)"', html) == ["before", "first"]
    assert [each["media"] for each in payload(html)["steps"]] == [None, None]


def test_a_prompt_is_a_row_for_each_of_its_settings(run: RunDirectory) -> None:
    folder = add_result(run, "own", 40, prompts=["a", "a"], settings={"height": 480, "width": 832})
    scores = json.loads((folder / "scores.json").read_text())
    scores["videos"][1]["settings"] = {"width": 480, "guidance_scale": 3.0}
    (folder / "scores.json").write_text(json.dumps(scores))
    html = page(run)
    assert prompts(html) == ["a", "a"]
    notes = [each["note"] for each in payload(html)["scenes"]]
    assert notes == ["seed 0", "seed 0, guidance_scale 3.0, width 480"]
    assert texts(html, r'</span><span class="note">(seed.*?)</span>') == notes
    assert 'width="144" height="83"' in html
    assert 'width="144" height="144"' in html
    with_own, plain = payload(html)["command"]["prompts"][::-1]
    assert "--guidance 3.0" in with_own
    assert "--width 480" in with_own
    assert "--width 832" in plain


# --- The command ------------------------------------------------------------------------------


def test_the_command_samples_the_same_video_again(run: RunDirectory) -> None:
    add_result(run, "shapes", 40, prompts=["it's a $HOME", "b"], settings={"shift": 9.0})
    command = payload(page(run))["command"]
    assert command["before"] == f"longtake sample {run.path}"
    assert command["prompts"][0] == """--prompt 'it'"'"'s a $HOME' --seed 0 --shift 9.0"""
    assert command["checkpoints"] == []


def test_the_command_has_options_that_are_not_the_recipes() -> None:
    recipe = bare_recipe(Path("run"), ema={"decay": 0.9}, sampling={"num_inference_steps": 20})
    settings = {"num_inference_steps": 20, "solver": "heun", "height": 64, "negative_prompt": "a b"}
    options = ["--solver heun", "--height 64", "--negative 'a b'"]
    assert sample_options(settings, "ema/main", recipe) == options
    assert sample_options({}, "model", recipe) == ["--no-ema"]
    assert sample_options({}, "ema/long", recipe) == ["--profile long"]
    assert sample_options({"num_inference_steps": 20}, "", None) == ["--steps 20"]


# --- Damage -----------------------------------------------------------------------------------


def test_what_failed_is_said(run: RunDirectory) -> None:
    add_result(run, "shapes", 40)
    lease = Leases(60, {}).take(EvaluationDirectory(run).claim_path("shapes", 80, "0a1b2c3d"))
    assert lease is not None
    lease.end("failed", reason="out of <memory>")
    said = "Step 80 of shapes could not be sampled (1 attempt): out of &lt;memory&gt;"
    assert said in page(run)
    shutil.rmtree(EvaluationDirectory(run).result_path("shapes", 40))
    assert said in page(run)


@pytest.mark.parametrize("content", [None, "{", '{"preset": "other"}', "[" * 100])
def test_videos_of_a_damaged_result_are_shown_without_measures(
    run: RunDirectory, content: str | None
) -> None:
    add_result(run, "shapes", 40)
    path = add_result(run, "shapes", 80) / "scores.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    html = page(run, step="80")
    assert "Step 80 of shapes has no measures: " in html
    assert prompts(html) == list(PROMPTS)
    assert "/media/own/evaluations/shapes/step_00000080/01_s0.mp4" in html
    assert payload(html)["measures"][0]["values"] == [80.0, None]


def test_a_result_that_is_half_removed_shows_what_is_there(run: RunDirectory) -> None:
    (add_result(run, "shapes", 40) / "00_s0.mp4").unlink()
    html = page(run)
    assert "00_s0.mp4 is gone" in html
    assert html.count("<video ") == 1


def test_a_result_of_the_same_checkpoint_that_is_written_anew_is_read(run: RunDirectory) -> None:
    reader = RunReader(run.path.parent, "own")
    folder = add_result(run, "shapes", 40)
    old = EvaluationDirectory(run).superseded_path("shapes", 40, "0a1b2c3d")
    assert "brightness" in render_samples(reader.facts(), ServerLinks(), {})
    old.parent.mkdir()
    folder.rename(old)
    add_result(run, "shapes", 40, measures={"redness": 1.0})
    html = render_samples(reader.facts(), ServerLinks(), {})
    assert "redness" in html
    assert "superseded" not in html


def test_a_result_that_is_a_link_is_not_shown(run: RunDirectory, tmp_path: Path) -> None:
    folder = add_result(run, "shapes", 40)
    folder.rename(tmp_path / "away")
    folder.symlink_to(tmp_path / "away")
    html = page(run)
    assert "/media/" not in html
    assert "links are not followed" not in html or "symbolic link" in html


def test_hostile_names_and_texts_are_only_text(run: RunDirectory) -> None:
    evil = "</script><script>alert(1)</script>\x1b[2J"
    add_result(
        run,
        "a b?<i>",
        40,
        prompts=[evil, "x" * 100_000],
        weights=evil,
        measures={evil: 1.0, "huge": 1e300},
        held_out={evil: 1.0},
        settings={"height": "tall", "width": -3, "num_frames": True, "shift": evil, "solver": None},
        alarms=[Alarm(measure=evil, kind="drift", message=evil)],
    )
    html = page(run, preset="<b>", against="run:../..", mode="<u>", view="\0", prompt="9" * 30)
    assert "<script>alert" not in html
    assert "\x1b" not in html
    assert "<b>&lt;" not in html
    data = payload(html)
    assert data["scenes"][0]["prompt"] == evil
    assert len(data["scenes"][1]["prompt"]) < 3000
    assert (data["width"], data["height"], data["frames"]) == (0, 0, 0)
    assert "/media/own/evaluations/a%20b%3F%3Ci%3E/step_00000040/00_s0.mp4" in html


def test_numbers_that_are_not_finite_are_gaps(run: RunDirectory) -> None:
    add_result(run, "shapes", 40)
    folder = add_result(run, "shapes", 80)
    text = (folder / "scores.json").read_text().replace('"motion": 30.0', '"motion": NaN')
    (folder / "scores.json").write_text(text)
    html = page(run)
    values = {each["name"]: each["values"] for each in payload(html)["measures"]}
    assert values["motion"] in ([30.0, None], [30.0])

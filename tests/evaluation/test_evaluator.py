"""A real run's checkpoints become videos, with what was measured of them."""

import json
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import av
import pytest
from PIL import Image
from rich.console import Console
from tests.evaluation.build import claims_of, steps_in

from longtake.data.index import index
from longtake.demo.oracle import Adherence
from longtake.demo.shapes import write_clips
from longtake.evaluation import evaluator, measures
from longtake.evaluation.evaluator import CheckpointEvaluator
from longtake.evaluation.options import ServerOptions, ServerReport, parse_backlog, sentence
from longtake.evaluation.server import EvaluationServer
from longtake.evaluation_dir import EvaluationDirectory
from longtake.process import StopSignal
from longtake.run_dir import RunDirectory
from longtake.sampling.claims import EvaluationTask, own_name
from longtake.sampling.presets import find_preset

_PRESETS = """
[evaluation.presets.small]
num_frames = 8
height = 32
width = 32
num_inference_steps = 2
seeds = [0, 1]
prompts = ["a red circle moving down", "a blue circle moving right"]
batch_size = 3
measures = ["longtake.demo.oracle:Adherence"]

[evaluation.presets.raw]
num_inference_steps = 2
prompts = [
    { prompt = "a red square moves left", num_inference_steps = 1, seeds = [5] },
    "a red square moves left",
]
ema = "none"

[evaluation.presets.odd]
height = 36
width = 36
num_inference_steps = 2
prompts = ["a red square moves left"]

[evaluation.presets.nobody]
prompts = ["a red square moves left"]
ema = "no such profile"
"""


@pytest.fixture(scope="module")
def served(
    tiny_run: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunDirectory, list[EvaluationServer]]:
    run = RunDirectory(tmp_path_factory.mktemp("served") / "run")
    shutil.copytree(tiny_run, run.path)
    for step in run.checkpoint_steps()[:-2]:
        shutil.rmtree(run.checkpoint_path(step))
    folder = run.path.with_name("held_out")
    held_out = folder / "catalog.parquet"
    index([folder], captions=write_clips(folder, num_clips=2, seed=1), out=held_out)
    _change_recipe(run, "reference_clips = 64", "reference_clips = 4")
    _change_recipe(run, "tensorboard = true", "tensorboard = false")
    _change_recipe(run, "[evaluation]", f'[evaluation]\nheld_out = "{held_out}"')
    run.recipe_path.write_text(run.recipe_path.read_text() + _PRESETS)
    servers = [_serve(run) for _ in range(2)]
    return run, servers


@pytest.fixture
def run(served: tuple[RunDirectory, list[EvaluationServer]]) -> RunDirectory:
    """The run that was served twice."""
    return served[0]


@pytest.fixture
def fresh(run: RunDirectory, tmp_path: Path) -> RunDirectory:
    """A copy of the run without its evaluations."""
    shutil.copytree(run.path, tmp_path / "run", ignore=shutil.ignore_patterns("evaluations"))
    return RunDirectory(tmp_path / "run")


def test_each_preset_of_each_checkpoint_has_its_videos(
    served: tuple[RunDirectory, list[EvaluationServer]],
) -> None:
    """And what is done stays done."""
    run, (first, second) = served
    directory = EvaluationDirectory(run)
    assert directory.steps("small") == run.checkpoint_steps()
    for scores in directory.all_scores("small"):
        folder = directory.result_path("small", scores["step"])
        assert len(scores["videos"]) == 4
        for video in scores["videos"]:
            with av.open(str(folder / video["file"])) as container:
                frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
            assert [frame.shape for frame in frames] == [(32, 32, 3)] * 8
            assert 0 <= video["measures"]["brightness"] <= 255
        with Image.open(folder / "sheet.png") as sheet:
            assert sheet.height > 100
        assert scores["measures"]["motion"] >= 0
        assert {"wait", "load", "first_video", "sample", "measure"} <= scores["seconds"].keys()
        assert scores["weights"].startswith("ema/")
    assert "prompts" not in directory.all_scores("small")[0]["settings"]
    assert len(first.evaluated) == 4
    assert second.evaluated == []


def test_a_result_bears_a_presets_own_measures_and_the_held_out_loss(run: RunDirectory) -> None:
    for scores in EvaluationDirectory(run).all_scores("small"):
        judged = [video["measures"]["adherence"] for video in scores["videos"]]
        assert scores["measures"]["adherence"] == sum(judged) / 4
        assert scores["held_out"].keys() == {"0.1", "0.3", "0.5", "0.7", "0.9", "mean"}
        assert scores["held_out"]["mean"] > 0
    task = EvaluationTask(
        run, find_preset(run.recipe(), "small", run.path), scores["step"], scores["key"]
    )
    numbers = [fact.split()[0] for fact in sentence(task, scores).split(" · ")[1:]]
    assert numbers == ["adherence", "held-out", "brightness", "motion"]
    raw = EvaluationDirectory(run).scores("raw", scores["step"])
    assert raw is not None
    assert "adherence" not in raw["measures"]
    assert raw["weights"] == "model"
    assert raw["key"] != scores["key"]
    own, plain = raw["videos"]
    assert (own["file"], own["seed"], own["settings"]) == (
        "00_s5.mp4",
        5,
        {"num_inference_steps": 1},
    )
    assert (plain["file"], plain["seed"], "settings" in plain) == ("01_s0.mp4", 0, False)


class _Broken:
    name = "broken"

    def __call__(self, videos: Any, prompts: Any, fps: float) -> list[float]:
        return [0.0] * (len(videos) + 1)


def test_what_cannot_be_measured_loses_no_video(
    fresh: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    _change_recipe(fresh, str(fresh.recipe().evaluation.held_out), str(tmp_path / "none.parquet"))
    monkeypatch.setattr(evaluator, "load_extras", lambda names: [_Broken(), Adherence()])

    def full_disk(*arguments: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(measures, "reference_of", full_disk)
    server = _serve(fresh, presets=("small",), backlog=parse_backlog("newest"))
    (scores,) = server.evaluated
    assert server.failed == set()
    assert {"adherence", "brightness"} <= scores["measures"].keys()
    assert "broken" not in scores["measures"]
    assert "held_out" not in scores
    said = capsys.readouterr().out
    assert "there is no broken: The measure broken gave 5 numbers for 4 videos" in said
    assert "there is no held-out loss: " in said
    assert "there is no comparison with training clips: OSError: " in said


def test_a_measure_that_cannot_be_had_costs_nothing(
    fresh: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.delenv("LONGTAKE_CLIP", raising=False)
    clip_score = "longtake.evaluation.extra_measures:ClipScore"
    _change_recipe(fresh, "longtake.demo.oracle:Adherence", clip_score)
    server = _serve(fresh, presets=("small",))
    assert server.evaluated == []
    assert len(server.failed) == 1
    said = capsys.readouterr().out
    assert said.count("LONGTAKE_CLIP") == 1
    (record,) = claims_of(fresh, fresh.checkpoint_steps()[0], "small")
    assert (record["ended"], record["final"]) == ("failed", False)
    assert not list(fresh.path.glob("evaluations/*/.*"))


def test_who_is_asked_to_end_does_so_between_training_clips(fresh: RunDirectory) -> None:
    """Decoding all of them takes minutes; the claim is given back, and no reference is kept."""
    stop, clips = StopSignal(), list[str]()

    def work(screening: CheckpointEvaluator, task: EvaluationTask, folder: Path, tick: Any) -> Any:
        def noted(what: str, done: int, of: int) -> None:
            if what == "training clips":
                clips.append(what)
                stop.request("SIGTERM")
            tick(what, done, of)

        return screening(task, folder, noted)

    server = _serve(fresh, work, stop, presets=("raw",), backlog=parse_backlog("newest"))
    assert (len(clips), server.evaluated, server.failed) == (1, [], set())
    claims = claims_of(fresh, fresh.checkpoint_steps()[-1], "raw")
    assert [record["ended"] for record in claims] == ["released"]
    assert not EvaluationDirectory(fresh).reference_path("raw").exists()


def test_held_out_clips_that_come_later_are_measured_then(fresh: RunDirectory) -> None:
    held_out = fresh.recipe().evaluation.held_out
    assert held_out is not None
    late = held_out.with_name("late.parquet")
    _change_recipe(fresh, str(held_out), str(late))

    def work(screening: CheckpointEvaluator, task: EvaluationTask, folder: Path, tick: Any) -> Any:
        if task.step == fresh.checkpoint_steps()[-1]:
            shutil.copy(held_out, late)
        return screening(task, folder, tick)

    first, second = _serve(fresh, work, presets=("raw",)).evaluated
    assert "held_out" not in first
    assert second["held_out"]["mean"] > 0


def _change_recipe(run: RunDirectory, before: str, after: str) -> None:
    recipe = run.recipe_path.read_text()
    assert before in recipe
    run.recipe_path.write_text(recipe.replace(before, after))


def _serve(
    run: RunDirectory,
    work: Callable[
        [CheckpointEvaluator, EvaluationTask, Path, Any], Any
    ] = CheckpointEvaluator.__call__,
    stop: StopSignal | None = None,
    **options: Any,
) -> EvaluationServer:
    report = ServerReport(Console(width=600))
    given = ServerOptions(places=(run.path,), **options)
    screening = CheckpointEvaluator("cpu", own_name(), report)
    with stop or StopSignal() as entered:
        server = EvaluationServer(given, partial(work, screening), report, entered)
        server.serve()
    return server


def test_a_recipe_may_change_between_two_presets_of_a_checkpoint(
    fresh: RunDirectory, tmp_path: Path
) -> None:
    own = tmp_path / "own.toml"
    preset = "num_inference_steps = 1\nprompts = ['a red square moves left']\n"
    own.write_text(f"[one]\n{preset}[two]\n{preset}")

    def work(screening: CheckpointEvaluator, task: EvaluationTask, folder: Path, tick: Any) -> Any:
        scores = screening(task, folder, tick)
        with fresh.recipe_path.open("a") as recipe:
            recipe.write("# changed\n")
        return scores

    presets = ("one", "two")
    server = _serve(fresh, work, presets=presets, own_presets=own, backlog=parse_backlog("newest"))
    assert [each["preset"] for each in server.evaluated] == ["one", "two"]
    assert server.failed == set()
    assert steps_in(fresh, "evaluation_failed") == []


def test_presets_that_cannot_be_are_told_of_and_the_rest_goes_on(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(EvaluationDirectory(run).path / "claims" / "odd", ignore_errors=True)
    _serve(run, presets=("odd", "nobody", "small"))
    said = capsys.readouterr().out
    assert "no such profile" in said
    assert said.count("odd") >= 1
    assert not EvaluationDirectory(run).steps("odd")


def test_the_command_serves_a_run_and_ends(
    run: RunDirectory, warm: list[str], tmp_path: Path
) -> None:
    """`longtake evaluate RUN --json`: the scores on stdout, and a line for people on stderr."""
    own = tmp_path / "own.toml"
    own.write_text('[mine]\nnum_inference_steps = 1\nprompts = ["a red square moves left"]\n')
    command = [*warm, "1", "-m", "longtake", "evaluate", str(run.path), "--presets", str(own)]
    command += ["--backlog", "newest", "--json", "--device", "cpu"]
    ended = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, timeout=600, check=False
    )
    assert ended.returncode == 0, ended.stderr
    (scores,) = json.loads(ended.stdout)["evaluation_finished"]
    assert scores["preset"] == "mine"
    assert "mine of step 6: 1 video in" in ended.stderr

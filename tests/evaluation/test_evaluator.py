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

from longtake.data.index import index
from longtake.demo.oracle import Adherence
from longtake.demo.shapes import write_clips
from longtake.evaluation import evaluator, measures
from longtake.evaluation.evaluator import CheckpointEvaluator
from longtake.evaluation.options import ServerOptions, ServerReport, parse_backlog, sentence
from longtake.evaluation.server import EvaluationServer
from longtake.evaluation_dir import EvaluationDirectory
from longtake.lease import history
from longtake.node_dir import read_events
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
prompts = ["a red square moves left"]
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


def index_held_out(folder: Path) -> Path:
    captions = write_clips(folder, num_clips=2, seed=1)
    catalog = folder / "catalog.parquet"
    index([folder], captions=captions, out=catalog)
    return catalog


@pytest.fixture(scope="module")
def served(
    tiny_run: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunDirectory, EvaluationServer, list[EvaluationServer]]:
    run = RunDirectory(tmp_path_factory.mktemp("served") / "run")
    shutil.copytree(tiny_run, run.path)
    for step in run.checkpoint_steps()[:-2]:
        shutil.rmtree(run.checkpoint_path(step))
    held_out = index_held_out(run.path.with_name("held_out"))
    recipe = run.recipe_path.read_text()
    for before, after in (
        ("reference_clips = 64", "reference_clips = 4"),
        ("tensorboard = true", "tensorboard = false"),
        ("[evaluation]", f'[evaluation]\nheld_out = "{held_out}"'),
    ):
        assert before in recipe
        recipe = recipe.replace(before, after)
    run.recipe_path.write_text(recipe + _PRESETS)
    servers = [_serve(run) for _ in range(2)]
    return run, servers[0], servers


def test_each_preset_of_each_checkpoint_has_its_videos(served: Any) -> None:
    run, server, _ = served
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
    assert len(server.evaluated) == 4


def test_a_result_bears_a_presets_own_measures_and_the_held_out_loss(served: Any) -> None:
    run, _, _ = served
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
    raw = EvaluationDirectory(run).all_scores("raw")[0]
    assert "adherence" not in raw["measures"]


class _Broken:
    name = "broken"

    def __call__(self, videos: Any, prompts: Any, fps: float) -> list[float]:
        return [0.0] * (len(videos) + 1)


def test_what_cannot_be_measured_loses_no_video(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run = _copy(served[0], tmp_path)
    held_out = run.recipe().evaluation.held_out
    assert held_out is not None
    recipe = run.recipe_path.read_text().replace(str(held_out), str(tmp_path / "none.parquet"))
    run.recipe_path.write_text(recipe)
    monkeypatch.setattr(evaluator, "load_extras", lambda names: [_Broken(), Adherence()])

    def full_disk(*arguments: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(measures, "reference_of", full_disk)
    server = _serve(run, presets=("small",), backlog=parse_backlog("newest"))
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
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.delenv("LONGTAKE_CLIP", raising=False)
    run = _copy(served[0], tmp_path)
    path = "longtake.evaluation.extra_measures:ClipScore"
    recipe = run.recipe_path.read_text()
    run.recipe_path.write_text(recipe.replace("longtake.demo.oracle:Adherence", path))
    server = _serve(run, presets=("small",))
    assert server.evaluated == []
    assert len(server.failed) == 1
    said = capsys.readouterr().out
    assert said.count("LONGTAKE_CLIP") == 1
    (claim,) = (EvaluationDirectory(run).path / "claims" / "small").iterdir()
    (record,) = history(claim)
    assert (record["ended"], record["final"]) == ("failed", False)
    assert not list(run.path.glob("evaluations/*/.*"))


def test_who_is_asked_to_end_does_so_between_training_clips(served: Any, tmp_path: Path) -> None:
    """Decoding all of them takes minutes; the claim is given back, and no reference is kept."""
    run, stop, clips = _copy(served[0], tmp_path), StopSignal(), list[str]()

    def work(screening: CheckpointEvaluator, task: EvaluationTask, folder: Path, tick: Any) -> Any:
        def noted(what: str, done: int, of: int) -> None:
            if what == "training clips":
                clips.append(what)
                stop.request("SIGTERM")
            tick(what, done, of)

        return screening(task, folder, noted)

    server = _serve(run, work, stop, presets=("raw",), backlog=parse_backlog("newest"))
    assert (len(clips), server.evaluated, server.failed) == (1, [], set())
    (claim,) = (EvaluationDirectory(run).path / "claims" / "raw").iterdir()
    assert [record["ended"] for record in history(claim)] == ["released"]
    assert not EvaluationDirectory(run).reference_path("raw").exists()


def test_held_out_clips_that_come_later_are_measured_then(served: Any, tmp_path: Path) -> None:
    run = _copy(served[0], tmp_path)
    held_out = run.recipe().evaluation.held_out
    assert held_out is not None
    late = held_out.with_name("late.parquet")
    recipe = run.recipe_path.read_text().replace(str(held_out), str(late))
    run.recipe_path.write_text(recipe)

    def work(screening: CheckpointEvaluator, task: EvaluationTask, folder: Path, tick: Any) -> Any:
        if task.step == run.checkpoint_steps()[-1]:
            shutil.copy(held_out, late)
        return screening(task, folder, tick)

    first, second = _serve(run, work, presets=("raw",)).evaluated
    assert "held_out" not in first
    assert second["held_out"]["mean"] > 0


def _copy(run: RunDirectory, tmp_path: Path) -> RunDirectory:
    shutil.copytree(run.path, tmp_path / "run", ignore=shutil.ignore_patterns("evaluations"))
    return RunDirectory(tmp_path / "run")


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
    served: Any, tmp_path: Path
) -> None:
    run, own = _copy(served[0], tmp_path), tmp_path / "own.toml"
    preset = "num_inference_steps = 1\nprompts = ['a red square moves left']\n"
    own.write_text(f"[one]\n{preset}[two]\n{preset}")

    def work(screening: CheckpointEvaluator, task: EvaluationTask, folder: Path, tick: Any) -> Any:
        scores = screening(task, folder, tick)
        with run.recipe_path.open("a") as recipe:
            recipe.write("# changed\n")
        return scores

    presets = ("one", "two")
    server = _serve(run, work, presets=presets, own_presets=own, backlog=parse_backlog("newest"))
    assert [each["preset"] for each in server.evaluated] == ["one", "two"]
    assert server.failed == set()
    events = [each["event"] for each in read_events(run)]
    assert "evaluation_failed" not in events


def test_raw_weights_have_another_key_than_averages(served: Any) -> None:
    run, _, _ = served
    directory = EvaluationDirectory(run)
    step = run.checkpoint_steps()[-1]
    raw, averaged = directory.scores("raw", step), directory.scores("small", step)
    assert raw is not None
    assert averaged is not None
    assert raw["weights"] == "model"
    assert raw["key"] != averaged["key"]


def test_what_is_done_stays_done(served: Any) -> None:
    _, _, (_, second) = served
    assert second.evaluated == []


def test_presets_that_cannot_be_are_told_of_and_the_rest_goes_on(
    served: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _, _ = served
    shutil.rmtree(EvaluationDirectory(run).path / "claims" / "odd", ignore_errors=True)
    _serve(run, presets=("odd", "nobody", "small"))
    said = capsys.readouterr().out
    assert "no such profile" in said
    assert said.count("odd") >= 1
    assert not EvaluationDirectory(run).steps("odd")


def test_the_command_serves_a_run_and_ends(served: Any, warm: list[str], tmp_path: Path) -> None:
    """`longtake evaluate RUN --json`: the scores on stdout, and a line for people on stderr."""
    run, _, _ = served
    own = tmp_path / "own.toml"
    own.write_text('[mine]\nnum_inference_steps = 1\nprompts = ["a red square moves left"]\n')
    command = [*warm, "1", "-m", "longtake", "evaluate", str(run.path), "--presets", str(own)]
    backlog = ["--backlog", "newest", "--json", "--device", "cpu"]
    ended = subprocess.run(
        [*command, *backlog],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    (scores,) = json.loads(ended.stdout)["evaluation_finished"]
    assert scores["preset"] == "mine"
    assert "mine of step 6: 1 video in" in ended.stderr

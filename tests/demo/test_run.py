"""A whole demo, small: what it writes, that it is not done twice, and that it can be stopped."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import av
import pytest
from PIL import Image
from rich.console import Console
from tests.build import not_none, wait_until

from longtake import config
from longtake.config import Recipe
from longtake.demo import run as demo
from longtake.demo.report import PRESETS
from longtake.demo.shapes import held_out_captions
from longtake.errors import RecipeChangedError, RecipeError
from longtake.evaluation_dir import EvaluationDirectory
from longtake.run_dir import RunDirectory

_STEPS = 30
_SMALLER = (
    "training.global_batch_size=8",
    "sampling.num_inference_steps=4",
    "watch.enabled=false",
    "tracking.tensorboard=false",
)
_SMALL = {"NUM_CLIPS": 200, "NUM_CHECKED": 24}
_PROGRAM = f"""
from longtake import cli, config
from longtake.demo import run

whole = run.demo_recipe
run.demo_recipe = lambda *given, **named: config.changed(whole(*given, **named), {_SMALLER})
vars(run).update({_SMALL})
cli.main()
"""


@pytest.fixture(scope="module")
def small() -> Any:
    whole = demo.demo_recipe

    def recipe(*given: Any, **named: Any) -> Recipe:
        return config.changed(whole(*given, **named), _SMALLER)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "demo_recipe", recipe)
        for name, number in _SMALL.items():
            patch.setattr(demo, name, number)
        yield


@pytest.fixture(scope="module")
def finished(small: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "run"
    summary = _demo(out)
    assert summary == json.loads((out / "summary.json").read_text())
    return out


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    """A folder for another run, with the clips of the finished one: its training begins soon."""
    shutil.copytree(finished / "data", tmp_path / "run" / "data")
    return tmp_path / "run"


def _demo(out: Path, **settings: Any) -> Any:
    wanted: dict[str, Any] = {"steps": _STEPS, "minutes": None, "seed": 0, "evaluate": False}
    return demo.run_demo(out=out, **(wanted | {"console": Console(quiet=True)} | settings))


def _said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if name in ("src", "href") and value]


def test_the_summary_has_the_numbers_of_the_run(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    metrics = RunDirectory(finished).metrics()
    assert summary.keys() >= {"adherence", "held_out_adherence", "num_parameters"}
    assert 0 <= summary["held_out_adherence"] <= 1
    assert (summary["steps"], len(metrics), summary["clips"]) == (_STEPS, _STEPS, 200)
    seconds = sum(row["step_seconds"] for row in metrics)
    assert summary["training_seconds"] == pytest.approx(seconds, abs=0.06)
    assert summary["steps_per_second"] == pytest.approx(_STEPS / seconds, abs=0.01)
    mean = sum(row["loss"] or 0.0 for row in metrics) / _STEPS
    assert summary["final_loss"] == pytest.approx(mean, abs=1e-5)


def test_the_checked_videos_are_presets_of_the_run(finished: Path) -> None:
    """24 held-out captions and 12 of the others, each with a video that decodes."""
    run = RunDirectory(finished)
    directory, found = EvaluationDirectory(run), {}
    for name in PRESETS.values():
        (scores,) = directory.all_scores(name)
        found[name] = [each["prompt"] for each in scores["videos"]]
        assert {each["measures"]["adherence"] for each in scores["videos"]} <= {0.0, 1.0}
        for each in scores["videos"]:
            with av.open(directory.result_path(name, _STEPS) / each["file"]) as container:
                assert [frame.width for frame in container.decode(video=0)] == [32] * 8
    assert set(found[PRESETS[True]]) == set(held_out_captions())
    assert len(found[PRESETS[False]]) == 12


def test_the_contact_sheet_opens_and_the_report_is_one_file(finished: Path) -> None:
    with Image.open(finished / "contact_sheet.png") as picture:
        picture.load()
        assert picture.width > 500
    links = _Links()
    links.feed((finished / "report.html").read_text())
    assert all(link.startswith(("#", "data:")) for link in links.found)


def test_a_finished_demo_is_not_trained_again(finished: Path, small: None) -> None:
    before = json.loads((finished / "summary.json").read_text())
    trained = (finished / "metrics.jsonl").read_bytes()
    assert _demo(finished) == before
    console = Console(file=io.StringIO(), width=500)
    assert _demo(finished, steps=None, minutes=5.0, console=console) == before
    assert f"{finished} holds a demo of {_STEPS} steps and resumes it." in _said(console)
    assert (finished / "metrics.jsonl").read_bytes() == trained


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 40}, r"training\.steps 30 there and 40 now"),
        ({"seed": 1}, r"seed 0 there and 1 now"),
    ],
)
def test_other_settings_need_a_folder_of_their_own(
    finished: Path, small: None, settings: dict[str, int], message: str
) -> None:
    with pytest.raises(RecipeChangedError, match=f"{message}.*such as --out {finished}-2"):
        _demo(finished, **settings)


def test_steps_and_minutes_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="give one of them"):
        _demo(tmp_path / "run", minutes=5.0)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_minutes_become_steps_by_a_short_measurement(
    out: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_PACE_STEPS", 8)
    monkeypatch.setattr(demo, "_PACE_WARM_UP", 4)
    summary = _demo(out, steps=None, minutes=0.03)
    assert summary is not None
    assert 1 <= summary["steps"] < demo.DEFAULT_STEPS
    assert not (out / "pace").exists()


def test_a_demo_stopped_while_measuring_ends_without_a_run(
    out: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_PACE_STEPS", 1000)
    wait = f"import os, signal, time, pathlib; seen = pathlib.Path({str(out / 'pace')!r})\n"
    wait += "while not (seen / 'metrics.jsonl').is_file(): time.sleep(0.02)\n"
    stopper = subprocess.Popen(
        [sys.executable, "-c", wait + f"os.kill({os.getpid()}, signal.SIGINT)"]
    )
    assert _demo(out, steps=None, minutes=5.0) == "SIGINT"
    assert stopper.wait(timeout=300) == 0
    assert not RunDirectory(out).exists()
    assert not (out / "pace").exists()
    assert (out / "data" / "catalog.parquet").is_file()


@pytest.mark.slow
def test_each_checkpoint_is_sampled_beside_the_training(
    out: Path, small: None, start_warm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "start", start_warm)
    monkeypatch.setattr(demo, "NUM_CHECKPOINTS", 2)
    assert _demo(out, steps=8, evaluate=True) is not None
    results = EvaluationDirectory(RunDirectory(out)).all_scores("demo")
    assert [scores["step"] for scores in results] == [4, 8]
    for scores in results:
        assert len(scores["videos"]) == 8
        assert "adherence" in scores["measures"]
        assert scores["held_out"]["mean"] > 0


@pytest.mark.parametrize("has_ended", [True, False])
def test_one_is_told_what_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_ended: bool
) -> None:
    """The evaluation server may still sample; one that has ended is not waited for."""
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as server:
        end = not_none(server.stdin).close
        monkeypatch.setattr("time.sleep", lambda _: end())
        if has_ended:
            end()
            server.wait()
        console = Console(file=io.StringIO())
        demo.EvaluationProcess(tmp_path / "log", server).finish(console)
    assert _said(console) == ("" if has_ended else "sampling the last checkpoints\n")


@pytest.mark.slow
def test_an_interrupted_demo_goes_on_where_it_was(
    out: Path, warm: list[str], tmp_path: Path
) -> None:
    """Ctrl-C saves and exits with 130; the same command finishes it."""
    program = tmp_path / "small_demo.py"
    program.write_text(_PROGRAM)
    options = ["--no-evaluate", "--steps", "60", "--out", str(out), "--json"]
    command = [*warm, "1", str(program), "demo", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    run = RunDirectory(out)
    wait_until(lambda: len(run.metrics()) >= 3 or process.poll() is not None)
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=300)
    assert (process.returncode, stdout) == (130, "")
    assert f"Stopped by SIGINT. What {out} holds by now is kept; the same command resumes" in stderr
    (step,) = run.checkpoint_steps()
    assert 3 <= step < 60
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 60
    assert re.search(rf"step {step} to 60", done.stderr)
    assert [row["step"] for row in run.metrics()] == list(range(1, 61))


def test_another_seed_after_a_stop_before_training_has_its_own_clips(
    small: None, tmp_path: Path
) -> None:
    run, catalog = RunDirectory(tmp_path), tmp_path / "data" / "catalog.parquet"
    demo.make_catalog(run, 0, Console(quiet=True))
    first = catalog.read_bytes()
    demo.make_catalog(run, 1, Console(quiet=True))
    assert catalog.read_bytes() != first


def test_the_recipe_is_short() -> None:
    shipped = Path(demo.__file__).with_name("recipe.toml").read_text(encoding="utf-8")
    assert len(shipped.splitlines()) <= 24

"""What a person meets at the command line: verbs, results, and one message per mistake."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tests.build import MakeRecipe
from tests.cli.conftest import Call, Refuse

from longtake import __version__, config
from longtake.cli.train import _say_what_was_done
from longtake.data.encode import write_video
from longtake.process import command
from longtake.run_dir import RunDirectory
from longtake.training.train import TrainOutcome

_MISTAKES = {
    "a folder without clips": (
        "data index {place}/empty --out {tmp}/c.parquet",
        r"No video or image was found\. Looked in: \S+/empty; for files that end in .*\.mp4",
    ),
    "captions that are not there": (
        "data index {clips} --captions {tmp}/none.jsonl --out {tmp}/c.parquet",
        r"The captions \S+none\.jsonl cannot be read: No such file",
    ),
    "a catalog below a file": (
        "data index {clips} --out {place}/file/c.parquet",
        r"The catalog \S+ cannot be written: (Not a directory|File exists)",
    ),
    "a catalog by the name of another format": (
        "data index {clips} --out {tmp}/c.csv",
        r"A catalog is written as Parquet, and \S+/c\.csv ends in \.csv\. Name it \S+/c\.parquet",
    ),
    "no recipe": (
        "train {tmp}/none.toml",
        r"There is no recipe \S+none\.toml\. `\S+ init` writes one",
    ),
    "clips without captions": (
        "train {recipe} --set out={tmp}/run --set data.catalog={place}/silent.parquet",
        r"None of the catalog's 64 clips can be trained on: 64 \(no caption\)",
    ),
    "a size that a tubelet cannot divide": (
        "train {recipe} --set out={tmp}/run "
        "--set 'data.buckets=[{{num_frames=8,height=30,width=32}}]'",
        r"8 frames of 32x30 do not divide into tubes of .* nearest that do are 8 frames of 32x32",
    ),
    "a size that an autoencoder cannot divide": (
        "train {recipe} --set out={tmp}/run --set codec.kind=autoencoder "
        "--set codec.config.base_dim=8",
        r"8 frames of 32x32 cannot be encoded: .* The nearest that fits is 29 frames of 32x32",
    ),
    "no catalog": (
        "train {recipe} --set out={tmp}/run --set data.catalog={tmp}/none.parquet",
        r"The catalog \S+none\.parquet does not exist\. Run `longtake data index`",
    ),
    "a run below a file": (
        "train {recipe} --set out={place}/file/run",
        r"The run directory \S+file/run cannot be written: Not a directory\.",
    ),
    "a run of another recipe": (
        "train {recipe} --set optimizer.learning_rate=0.5 --set seed=7",
        r"never overwritten\. They differ in\n"
        r"  optimizer\.learning_rate: 0\.001 there, 0\.5 now\n  seed: 0 there, 7 now\n"
        r"(?:.|\n)*--from(?:.|\n)*Start beside it, from scratch, with --set out=\S+run-2",
    ),
    "sampling a run without checkpoint": (
        "sample {place}/begun --prompt red --out {tmp}/x.mp4",
        r"begun has no whole checkpoint yet\. Train on with longtake train \S+begun/recipe\.toml",
    ),
    "sampling to what is no mp4": (
        "sample {run} --prompt red --out {tmp}/x.gif",
        r"--out \S+x\.gif: samples are videos; expected the name of an mp4 file",
    ),
    "sampling to below a file": (
        "sample {run} --prompt red --out {place}/file/x.mp4",
        r"--out \S+file/x\.mp4 cannot be written: (Not a directory|File exists)\. Choose another",
    ),
    "a size that the model does not divide": (
        "sample {run} --prompt red --out {tmp}/x.mp4 --width 34",
        r"8 frames of 34x32 do not divide into tubes",
    ),
    "a size that the model was not built for": (
        "sample {run} --prompt red --out {tmp}/x.mp4 --frames 16",
        r"\[3, 16, 32, 32\] does not fit .* built for \[3, 8, 32, 32\]",
    ),
    "an unknown solver": (
        "sample {run} --prompt red --out {tmp}/x.mp4 --solver eule",
        r"sampling\.solver is 'eule'; it should be 'euler', 'heun' or 'unipc'",
    ),
    "no steps of the solver": (
        "sample {run} --prompt red --out {tmp}/x.mp4 --steps 0",
        r"sampling\.num_inference_steps is 0; it should be greater than 0",
    ),
    "a picture without its name": (
        "sample {run} --prompt red --out {tmp}/x.mp4 --conditioning pose.png",
        r"--conditioning pose\.png: expected NAME=FILE\. Give it like --conditioning pose=pict",
    ),
    "exporting what diffusers does not have": (
        "export {run} --out {tmp}/pipeline",
        r"diffusers has no pipeline for the tubelet family, so it cannot be exported",
    ),
    "an average and the weights themselves": (
        "export {run} --profile main --no-ema --out {tmp}/pipeline",
        r"--profile main names an average, but --no-ema asks for the weights themselves",
    ),
    "exporting what ComfyUI does not have": (
        "export {run} --format comfyui --out {tmp}/x.safetensors",
        r"ComfyUI has no model of the tubelet family",
    ),
    "a folder for ComfyUI": (
        "export {run} --format comfyui --out {tmp}/x",
        r"--out \S+x: expected the name of a \.safetensors file, such as mine\.safetensors",
    ),
    "auditing what is not there": ("data audit {place}/nowhere", r"is not a run directory"),
    "showing no catalog": ("data show {place}/file", r"file is not a catalog of longtake"),
    "a condition that is none": (
        'data show {catalog} {recipe} --set \'data.stages=[{{name="a", where=["fps"]}}]\'',
        r"`fps` is not a condition of a stage\. Expected ATTRIBUTE OPERATOR VALUE",
    ),
    "difficulty without a score": (
        "data show {catalog} {recipe} --set 'data.stages=[{{name=\"a\", drop_hardest=0.1}}]'",
        r"A stage asks for `difficulty`.*The catalog has none\..*longtake data score",
    ),
    "a captioner that is no class's name": (
        "data caption {catalog} --with json",
        r"--with 'json' is no name of a class; write module:Class",
    ),
    "a class that does not caption": (
        "data caption {catalog} --with json:JSONDecoder",
        r"--with 'json:JSONDecoder' has no method captions\(frames, clips\)",
    ),
    "a captioner's option without a value": (
        "data caption {catalog} --option model",
        r"--option 'model': expected KEY=VALUE, such as model=FOLDER",
    ),
    "a captioner's option that is misspelt": (
        "data caption {catalog} --option modle={place}/empty",
        r"--option\.modle is not an argument of TransformersCaptioner; did you mean model",
    ),
    "a captioner without its option": (
        "data caption {catalog}",
        r"--option lacks model: TransformersCaptioner has no default for it",
    ),
    "a captioner without a model": (
        "data caption {catalog} --option model={place}/empty",
        r"ModelError: .*/empty is no folder with a config\.json.*nothing is downloaded",
    ),
    "a size that is none": (
        "data prepare {catalog} --size 16 --out {tmp}/small",
        r"--size 16: expected WIDTHxHEIGHT",
    ),
    "stages that end before the training": (
        "train {recipe} --set out={tmp}/run --set 'data.stages=[{{name=\"a\", steps=1}}]'",
        r"The stages end after step 1 \(a: 1\), but training\.steps is 2",
    ),
}


@pytest.mark.parametrize("mistake", _MISTAKES)
def test_a_mistake_becomes_one_message_and_exit_code_2(
    mistake: str, place: Path, shapes_catalog: Path, tmp_path: Path, refuse: Refuse
) -> None:
    command, message = _MISTAKES[mistake]
    known = {"place": place, "tmp": tmp_path, "run": place / "run", "clips": shapes_catalog.parent}
    recipe = place / "recipe.toml"
    said = refuse(*shlex.split(command.format(recipe=recipe, catalog=shapes_catalog, **known)))
    assert sum(line.startswith("longtake: ") for line in said.splitlines()) == 1
    assert re.search(message, said), f"{message!r} not found in:\n{said}"
    assert _contents(tmp_path) == {}


@pytest.mark.parametrize(
    "command",
    ["sample RUN --prompt x --out x.mp4 --guidance abc", "sample RUN --out x.mp4", "trian x"],
)
def test_a_command_that_cannot_be_read_exits_2(command: str, call: Call) -> None:
    code, out, err = call(*command.split())
    assert (code, out) == (2, "")
    assert re.match(r"Usage: .*longtake", err)
    assert "Traceback" not in err


def test_a_refused_recipe_leaves_the_run_as_it_was(place: Path, refuse: Refuse) -> None:
    before = _contents(place / "run")
    refuse("train", place / "recipe.toml", "--set", "optimizer.learning_rate=0.5")
    assert _contents(place / "run") == before


def _contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_without_a_verb_all_verbs_are_named(call: Call) -> None:
    code, out, err = call()
    assert code == 2
    assert all(verb in out + err for verb in ("demo", "train", "sample", "export", "data"))


def test_a_damaged_clip_among_good_ones_is_named_and_left_out(tmp_path: Path, call: Call) -> None:
    clip = np.random.default_rng(0).integers(0, 255, (8, 32, 32, 3), dtype=np.uint8)
    write_video(tmp_path / "good.mp4", clip, 8.0)
    (tmp_path / "good.txt").write_text("noise")
    (tmp_path / "bad.mp4").write_text("<html>404</html>")
    arguments = ("data", "index", tmp_path, "--out", tmp_path / "c.parquet")
    code, out, err = call(*arguments)
    assert (code, out) == (0, "")
    assert "rejected: " in err
    assert "bad.mp4: not a readable video" in err
    assert "1 clip in" in err
    code, out, err = call(*arguments, "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert (report["accepted"], report["without_caption"]) == (1, 0)
    assert [Path(each["path"]).name for each in report["rejected"]] == ["bad.mp4"]


def test_training_again_goes_on_or_says_that_it_is_done(place: Path, call: Call) -> None:
    code, out, err = call("train", place / "recipe.toml")
    assert (code, out) == (0, "")
    assert f"{place}/run has done its 2 steps already." in err


@pytest.mark.parametrize(
    ("length", "said"),
    [
        ({"epochs": 2}, r"9 steps already \(3 epochs\), more than training\.epochs = 2\."),
        ({"epochs": 3}, r"9 steps already\."),
        ({"steps": 4}, r"9 steps already, more than training\.steps = 4\."),
    ],
)
def test_a_length_that_a_run_has_passed_is_named(
    length: dict[str, int], said: str, small_recipe: MakeRecipe, capsys: pytest.CaptureFixture[str]
) -> None:
    values = small_recipe().model_dump(exclude_none=True)
    values["training"] = {**length, "global_batch_size": 2}
    recipe = config.parse(values, "test")
    recipe.out.mkdir()
    RunDirectory(recipe.out).create(recipe.with_steps(9))
    _say_what_was_done(TrainOutcome(9, 9, 1.0, None), recipe, 3, as_json=False)
    assert re.search(said, capsys.readouterr().err)


def test_sampling_writes_a_video_for_each_prompt_and_names_unknown_words(
    place: Path, tmp_path: Path, call: Call
) -> None:
    prompts = ["a red circle moving up", "a purple [/]star", ""]
    options = [part for prompt in prompts for part in ("--prompt", prompt)]
    out_path = tmp_path / "new" / "x.mp4"
    code, out, err = call("sample", place / "run", *options, "--out", out_path, "--json")
    assert code == 0
    assert "words that no caption of the training has: purple, [/], star" in err
    written = json.loads(out)
    assert written["step"] == 2
    assert [Path(video).name for video in written["videos"]] == [f"x_0{i}.mp4" for i in range(3)]
    names = {"x_00.mp4", "x_01.mp4", "x_02.mp4", "x.png"}
    assert {path.name for path in out_path.parent.iterdir()} == names


def test_version_is_the_packages(call: Call) -> None:
    assert call("--version") == (0, f"longtake {__version__}\n", "")


def test_a_fresh_run_begins_beside_the_one_that_is_there(place: Path, call: Call) -> None:
    before = _contents(place / "run")
    code, out, err = call("train", place / "recipe.toml", "--fresh", "--json")
    assert code == 0
    run = place / "run-2"
    try:
        assert json.loads(out)["run"] == str(run)
        assert json.loads(out)["start_step"] == 0
        assert f"longtake sample {run} " in err
        assert f'out = "{run}"' in (run / "recipe.toml").read_text()
        assert _contents(place / "run") == before
    finally:
        shutil.rmtree(run)


def test_the_command_that_is_printed_for_more_steps_trains_them(
    place: Path, tmp_path: Path, call: Call, refuse: Refuse
) -> None:
    shutil.copytree(place / "run", tmp_path / "run")
    recipe = tmp_path / "run" / "recipe.toml"
    recipe.write_text(recipe.read_text().replace(str(place / "run"), str(tmp_path / "run")))
    said = refuse("train", recipe, "--set", "training.steps=4")
    (line,) = [line for line in said.splitlines() if line.startswith("  longtake train ")]
    code, _, err = call(*shlex.split(line)[1:])
    assert code == 0, err
    assert "step 2 to 4" in err


@pytest.mark.parametrize("verb", ["train", "plan", "launch", "preflight", "evaluate", "drill"])
def test_help_fills_its_lines(call: Call, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """A paragraph breaks where the next word has no room, not where the source's line ends."""
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = call(verb, "--help")
    text = out.partition("╭")[0].partition("Usage:")[2]
    paragraphs = [each.split("\n")[:] for each in re.split(r"\n\s*\n", text)[1:]]
    for lines in paragraphs:
        for line, following in pairwise([each.strip() for each in lines if each.strip()]):
            assert len(f"{line} {following.split()[0]}") > 78, (line, following)


def test_a_suggested_command_is_typed_as_the_program_was_called(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By its name where a shell finds it; else by the path, as after `make demo`."""
    scripts = tmp_path / "project" / ".venv" / "bin"
    scripts.mkdir(parents=True)
    for name in ("longtake", "tensorboard"):
        (scripts / name).write_text("#!/bin/sh\n")
        (scripts / name).chmod(0o755)
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setattr(sys, "argv", [".venv/bin/longtake", "demo"])
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert command() == ".venv/bin/longtake"
    assert command("tensorboard") == ".venv/bin/tensorboard"
    monkeypatch.setenv("PATH", f"{scripts}:/usr/bin:/bin")
    assert (command(), command("tensorboard")) == ("longtake", "tensorboard")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    (tmp_path / "elsewhere with a space").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere with a space")
    monkeypatch.setattr(sys, "argv", [str(scripts / "longtake"), "demo"])
    assert command() == str(scripts / "longtake")


def test_a_second_ctrl_c_says_what_is_kept(
    place: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("longtake.training.train.train", interrupted)
    code, _, err = call("train", place / "run" / "recipe.toml")
    assert code == 130
    assert "without saving: the newest checkpoint is of step 2. The same command resumes" in err
    monkeypatch.setattr("longtake.evaluation.server.evaluate", interrupted)
    code, _, err = call("evaluate", place / "run")
    assert code == 130
    assert "whole results are kept" in err


def test_the_installed_command_says_it_in_one_message(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "longtake", "train", "none.toml"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "longtake: There is no recipe none.toml. `longtake init` writes one."
    ]

"""Presets that are sampled between two steps."""

import shutil
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.build import QUIET, Recipes, assert_saved_alike, events, rows, train_by

from longtake import heartbeat
from longtake.config import Recipe
from longtake.data.loader import Loader
from longtake.errors import RecipeError
from longtake.evaluation.evaluator import CheckpointEvaluator, SampleEvaluator
from longtake.evaluation.options import ServerOptions, ServerReport
from longtake.evaluation.server import EvaluationServer
from longtake.evaluation_dir import EvaluationDirectory, Scores
from longtake.models.components import Components, Part
from longtake.optim.update import Averages
from longtake.process import StopSignal
from longtake.run_dir import RunDirectory
from longtake.sampling.claims import own_name
from longtake.sampling.presets import find_preset
from longtake.sampling.sampler import Sampler, load_sampler
from longtake.sampling.videos import sample_preset
from longtake.training.saving import is_sampled_after
from longtake.training.train import train

_PRESET = (
    "evaluation.presets.tiny={prompts=['a red circle moving up', 'a blue square'],"
    "num_inference_steps=2,seeds=[3,4],batch_size=4}"
)
_EVERY = ("sampling.every=4", "evaluation.reference_clips=2", _PRESET)
_KEYS = ("step", "batch", "loss", "grad_norm", "weight_norm", "update_ratio")


def _train(recipe: Recipe) -> None:
    train(recipe, QUIET, evaluate=SampleEvaluator(own_name(), ServerReport(QUIET)))


def _results(recipe: Recipe) -> list[Scores]:
    return EvaluationDirectory(RunDirectory(recipe.out)).all_scores("tiny")


def _serve(run: RunDirectory) -> EvaluationServer:
    report, options = ServerReport(QUIET), ServerOptions(places=(run.path,))
    with StopSignal() as stop:
        server = EvaluationServer(
            options, CheckpointEvaluator("cpu", own_name(), report), report, stop
        )
        server.serve()
    return server


@pytest.mark.parametrize(
    ("batch_size", "epochs"),
    # Of 64 clips 4 fill no batch of 6, and are trained within the next epoch.
    [(4, [16, 32, 40]), (6, [10, 21, 32, 40])],
)
def test_samples_are_due_by_steps_or_after_the_last_whole_batch_of_epochs(
    small_recipe: Recipes, batch_size: int, epochs: list[int]
) -> None:
    plain = small_recipe("training.steps=40")
    with closing(Loader(plain.data, batch_size=batch_size)) as loader:
        due = dict[str, list[int]]()
        for interval in ("every=12", "every_epochs=1", "every_epochs=2"):
            session = SimpleNamespace(recipe=small_recipe(f"sampling.{interval}"))
            for step in range(1, 41):
                loader.step = step
                state = SimpleNamespace(global_step=step)
                training: Any = SimpleNamespace(session=session, state=state, loader=loader)
                if is_sampled_after(training, step - 1, is_last=step == 40):
                    due.setdefault(interval, []).append(step)
    assert due == {
        "every=12": [12, 24, 36, 40],
        "every_epochs=1": epochs,
        "every_epochs=2": [*epochs[1::2][:1], 40],
    }


def test_the_training_is_bitwise_the_same_and_no_server_repeats_what_was_sampled(
    small_recipe: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = small_recipe.trained("training.compile=false", name="plain")
    recipe, phases = small_recipe(*_EVERY, "sampling.at_start=true"), set[str]()
    sample = SampleEvaluator.__call__

    def watched(*given: Any) -> Scores:
        phases.add(str(heartbeat.current_phase()))
        return sample(*given)

    monkeypatch.setattr(SampleEvaluator, "__call__", watched)
    _train(recipe)
    assert rows(recipe, *_KEYS) == rows(plain, *_KEYS)
    assert_saved_alike(recipe, plain, 12)
    assert phases == {"sampling"}

    run = RunDirectory(recipe.out)
    assert [each["step"] for each in events(recipe, "sampled")] == [0, 4, 8, 12]
    assert run.checkpoint_steps() == [4, 6, 8, 12]
    assert [each["step"] for each in _results(recipe)] == [0, 4, 8, 12]
    assert [each["step"] for each in _serve(run).evaluated] == [6]

    # What the run began with is sampled by itself as `longtake sample --step 0` does.
    start, preset = load_sampler(recipe.out, step=0, device="cpu"), find_preset(recipe, "tiny")
    assert start.weights == "ema/main"
    for made in sample_preset(start, preset, tmp_path, lambda *_: None):
        in_training = run.evaluation_path("tiny", 0) / made.path.name
        assert in_training.read_bytes() == made.path.read_bytes()

    # What a server makes of the same checkpoint: the same files, bit for bit.
    kept = tmp_path / "kept"
    shutil.move(run.evaluation_path("tiny", 12), kept)
    assert [each["step"] for each in _serve(run).evaluated] == [12]
    for name in sorted(path.name for path in kept.iterdir() if path.name != "scores.json"):
        again = run.evaluation_path("tiny", 12) / name
        assert again.read_bytes() == (kept / name).read_bytes(), name


def test_a_failed_sample_is_an_event_and_training_continues(
    small_recipe: Recipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small_recipe(*_EVERY, "ema.decay=0")
    sample = SampleEvaluator.__call__

    def fails_once(*given: Any) -> Scores:
        if given[1].step == 4:
            raise OSError(28, "No space left on device")
        return sample(*given)

    def cannot_move(parts: Components, part: Part | None, device: torch.device) -> None:
        if part is None and fails.pop(0):
            raise RuntimeError("out of memory")

    fails = [False, False, True, False]  # prompts at launch, then after steps 4, 8 and 12
    monkeypatch.setattr(SampleEvaluator, "__call__", fails_once)
    monkeypatch.setattr(Components, "bring", cannot_move)
    _train(recipe)
    failed, moved = events(recipe, "sampling_failed")
    assert (failed["step"], failed["preset"]) == (4, "tiny")
    assert "No space left" in failed["reason"]
    assert (moved["step"], moved["preset"]) == (8, "presets")
    assert "out of memory" in moved["reason"]
    assert [each["step"] for each in _results(recipe)] == [8, 12]
    assert len(rows(recipe, "step")) == 12
    assert {each["weights"] for each in _results(recipe)} == {"model"}


def test_neither_averages_nor_prompts_that_cannot_be_had_end_a_run(
    small_recipe: Recipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def runs_out(*_: Any) -> Any:
        raise MemoryError("no memory is left")

    few = ("training.steps=4", "checkpoint.every=4")
    plain = small_recipe.trained(*few, name="plain")
    for owner, name in ((Averages, "in_place_of_weights"), (Sampler, "encode_prompts")):
        recipe = small_recipe(*few, *_EVERY, name=name)
        with monkeypatch.context() as broken:
            broken.setattr(owner, name, runs_out)
            _train(recipe)
        (failed,) = events(recipe, "sampling_failed")
        assert (failed["step"], failed["preset"]) == (4, "tiny")
        assert "no memory is left" in failed["reason"]
        assert rows(recipe, *_KEYS) == rows(plain, *_KEYS)
        assert_saved_alike(recipe, plain, 4)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (("sampling.every=4", "sampling.presets=['smal']"), "There is no preset smal"),
        (("sampling.presets=['tiny']",), "sampling.every is unset"),
        (
            ("sampling.every=4", "evaluation.presets.tiny={height=30}"),
            "Preset tiny: 8 frames of 32x30",
        ),
    ],
)
def test_what_cannot_be_sampled_is_refused_before_the_run_begins(
    small_recipe: Recipes, changes: tuple[str, ...], expected: str
) -> None:
    with pytest.raises(RecipeError, match=expected):
        _train(small_recipe(*changes))


_BROKEN_ON_ONE_RANK = """
import os
import sys

from longtake.__main__ import main
from longtake.models.tubelet import Block

forward, calls = Block.forward, []


def broken(block, *args, **given):
    if not block.training and os.environ["RANK"] == "1":
        calls.append(block)
        if len(calls) == 2:
            raise RuntimeError("a broken kernel")
    return forward(block, *args, **given)


Block.forward = broken
sys.exit(main())
"""


@pytest.mark.slow
def test_ranks_that_share_a_model_and_clips_sample_it_together(
    small_recipe: Recipes, on_two_processes: list[str], tmp_path: Path
) -> None:
    """They train as without it; the videos are those of one process, up to rounding.

    After an error of one rank in a forward pass, in which the other waits, they train on likewise.
    """
    sharded = ("parallel.strategy=shard", "training.steps=4", "checkpoint.every=4")
    plain = small_recipe(*sharded, name="plain")
    train_by(on_two_processes, plain)
    recipe = small_recipe(*sharded, "sampling.every=2", *_EVERY[1:])
    train_by(on_two_processes, recipe)
    assert rows(recipe, *_KEYS) == rows(plain, *_KEYS)
    assert_saved_alike(recipe, plain, 4)
    program = tmp_path / "broken.py"
    program.write_text(_BROKEN_ON_ONE_RANK)
    broken = small_recipe(*sharded, "sampling.every=2", *_EVERY[1:], name="broken")
    train_by(on_two_processes, broken, program=[str(program)])
    (failed,) = events(broken, "sampling_failed")
    assert (failed["step"], failed["preset"]) == (2, "tiny")
    assert "rank 1: RuntimeError: a broken kernel" in failed["reason"]
    assert [each["step"] for each in _results(broken)] == [4]
    assert rows(broken, *_KEYS) == rows(plain, *_KEYS)
    assert_saved_alike(broken, plain, 4)

    mine = {each["step"]: each for each in _results(recipe)}
    assert list(mine) == [2, 4]
    run = RunDirectory(recipe.out)
    shutil.rmtree(run.evaluation_path("tiny", 4))
    (again,) = _serve(run).evaluated
    assert [video["seed"] for video in again["videos"]] == [3, 4, 3, 4]
    for video, expected in zip(mine[4]["videos"], again["videos"], strict=True):
        assert video["file"] == expected["file"]
        for name in ("brightness", "contrast"):
            difference = abs(video["measures"][name] - expected["measures"][name])
            assert difference < 0.5, (video["file"], name)

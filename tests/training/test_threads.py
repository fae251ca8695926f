"""The number of threads of a training on a CPU."""

import json
from collections.abc import Iterator

import pytest
import torch
from tests.build import ALONE, QUIET, MakeRecipe, events

from longtake import process
from longtake.config import Bucket
from longtake.run_dir import RunDirectory
from longtake.training import threads
from longtake.training.threads import CpuThreads, SavedThreads, ThreadChoice, ThreadTuner
from longtake.training.train import train


@pytest.fixture(autouse=True)
def _no_fixed_number(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(process, "num_cores", lambda: 2)
    yield
    torch.set_num_threads(before)


def _steps(
    tuner: ThreadTuner, count: int, seconds: dict[int, float], work: float = 1.0
) -> list[ThreadChoice]:
    found = (tuner.step_done(seconds[tuner.number] * work, work) for _ in range(count))
    return [choice for choice in found if choice is not None]


def test_the_faster_number_is_chosen_and_again_when_the_cores_are_busy() -> None:
    quiet, busy = {2: 0.075, 1: 0.096}, {2: 0.586, 1: 0.187}
    tuner = ThreadTuner([2, 1])
    (first,) = _steps(tuner, 200, quiet)
    assert (first.number, first.is_first) == (2, True)
    (second,) = _steps(tuner, 200, busy)
    assert (second.before, second.number, second.is_first) == (2, 1, False)
    assert second.seconds == pytest.approx(busy)
    (third,) = _steps(tuner, 200, quiet)
    assert third.number == 2


def test_a_number_that_is_far_slower_is_tried_once() -> None:
    tuner, numbers = ThreadTuner([1, 2]), []
    for _ in range(20):
        numbers.append(tuner.number)
        tuner.step_done({1: 1.0, 2: 5.0}[tuner.number], 1.0)
    assert numbers.count(2) == 1


def test_another_number_is_kept_only_if_it_gains() -> None:
    tuner = ThreadTuner([2, 1])
    (choice,) = _steps(tuner, 50, {2: 1.0, 1: 0.95})
    assert choice.number == tuner.number == 2


def test_steps_of_more_work_are_not_slower() -> None:
    tuner = ThreadTuner([2, 1])
    _steps(tuner, 100, {2: 1.0, 1: 2.0})
    assert not _steps(tuner, 200, {2: 1.0, 1: 2.0}, work=40.0)


def test_a_run_begins_with_the_number_of_its_checkpoint_and_tries_no_other() -> None:
    tuner = ThreadTuner([1, 2], usual=0.1)
    assert not _steps(tuner, 300, {1: 0.1, 2: 0.01})


def test_a_resumed_run_keeps_its_number(
    small_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_FLOPS_PER_THREAD", 1.0)
    recipe = small_recipe("training.steps=12", "checkpoint.every=12")
    run = RunDirectory(recipe.out)
    train(recipe, QUIET)
    (chosen,) = events(recipe, "threads_chosen")
    assert set(chosen["seconds"]) == {"1", "2"}
    assert chosen["bitwise"]
    saved = json.loads((run.checkpoint_path(12) / "trainer.json").read_text())["threads"]
    assert saved["number"] == chosen["threads"]
    assert saved["seconds"] > 0
    train(small_recipe("training.steps=24", "data.on_change=finish"), QUIET)
    assert len(events(recipe, "threads_chosen")) == 1
    assert torch.get_num_threads() == saved["number"]


def test_a_fixed_number_is_kept_and_a_difference_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    fixed = CpuThreads(ALONE, SavedThreads(number=2, seconds=0.1))
    assert torch.get_num_threads() == fixed.state()["number"] == 1
    assert "here by 1 CPU threads, and before by 2" in str(fixed.difference())
    assert CpuThreads(ALONE, SavedThreads(number=1, seconds=0.1)).difference() is None


def test_a_tiny_model_computes_with_one_thread() -> None:
    shape = Bucket(num_frames=1, height=8, width=8)
    found = CpuThreads(ALONE)
    found.set_work({shape: 10**9}, 4)
    assert torch.get_num_threads() == 2
    found.set_work({shape: 10**6}, 4)
    assert torch.get_num_threads() == found.state()["number"] == 1

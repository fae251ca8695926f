"""A training and an evaluation server beside it, as a user starts them, told to the trackers."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import pytest
from tests.build import MakeRecipe, wait_until
from wandb.proto import wandb_internal_pb2

from longtake import config
from longtake.config import Recipe
from longtake.evaluation_dir import EvaluationDirectory
from longtake.run_dir import RunDirectory

_STEPS = (6, 12, 18)
_PRESET = (
    "evaluation.presets.tiny={prompts=['a red circle moving up'],num_inference_steps=2,"
    "seeds=[3,4],batch_size=2}"
)
_RECORD: Any = wandb_internal_pb2.Record  # type: ignore[attr-defined]


def _chunks(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Of LevelDB's log format, after W&B's own seven bytes: kind and data."""
    at = 7
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        yield kind, data[at + 7 : at + 7 + length]
        at += 7 + length


def _rows(path: Path) -> list[dict[str, Any]]:
    """What a .wandb file says was logged, by the keys with dots in them."""
    rows, whole = [], b""
    for kind, data in _chunks(path.read_bytes()):
        whole = data if kind in (1, 2) else whole + data
        if kind in (1, 4):
            record = _RECORD.FromString(whole)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append(
                    {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}
                )
    return rows


def _train_and_evaluate(recipe: Recipe, folder: Path, warm: list[str]) -> list[int]:
    """Start the server before there is a run, then the training; the steps that it evaluated."""
    file = folder / "recipe.toml"
    file.write_text(config.dump(recipe))
    longtake = [*warm, "1", "-m", "longtake"]
    options = ["--follow", "--until-finished", "--device", "cpu", "--json"]
    ours: dict[str, Any] = {
        "cwd": folder,
        "env": {**os.environ, "OMP_NUM_THREADS": "1"},
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    evaluator = subprocess.Popen([*longtake, "evaluate", str(recipe.out), *options], **ours)
    try:
        trained = subprocess.run([*longtake, "train", str(file)], check=False, timeout=600, **ours)
        assert trained.returncode == 0, trained.stderr
        said, complaints = evaluator.communicate(timeout=600)
    finally:
        evaluator.kill()
        evaluator.wait()
    assert evaluator.returncode == 0, complaints
    return [scores["step"] for scores in json.loads(said)["evaluation_finished"]]


@pytest.mark.slow
def test_wandb_holds_every_step_and_every_evaluation_of_such_a_pair(
    small_recipe: MakeRecipe, warm: list[str], tmp_path: Path
) -> None:
    recipe = small_recipe(f"training.steps={_STEPS[-1]}", "tracking.wandb=offline", _PRESET)
    run = RunDirectory(recipe.out)
    assert _train_and_evaluate(recipe, tmp_path, warm) == list(_STEPS)
    results = {scores["step"]: scores for scores in EvaluationDirectory(run).all_scores("tiny")}
    assert list(results) == list(_STEPS)
    for step, scores in results.items():
        for video in scores["videos"]:
            with av.open(run.evaluation_path("tiny", step) / video["file"]) as opened:
                assert len(list(opened.decode(video=0))) == 8

    def sent() -> list[dict[str, Any]]:
        return [
            row for path in sorted(run.path.glob("wandb/*run-*/*.wandb")) for row in _rows(path)
        ]

    # a server's follower may continue for a minute by itself
    wait_until(lambda: sum("eval/checkpoint_step" in row for row in sent()) >= len(_STEPS))
    rows = sent()
    numbers = [row["_step"] for row in rows]
    assert numbers == sorted(set(numbers))
    steps = [row["train/step"] for row in rows if "train/step" in row]
    assert sorted(steps) == list(range(1, _STEPS[-1] + 1))
    evaluated = {row["eval/checkpoint_step"]: row for row in rows if "eval/checkpoint_step" in row}
    assert sorted(evaluated) == list(_STEPS)
    assert len(rows) == _STEPS[-1] + len(_STEPS)
    for step, row in evaluated.items():
        told, known = row["eval/tiny/brightness"], results[step]["measures"]["brightness"]
        assert told == pytest.approx(known)
    assert len(list(run.path.glob("wandb/*run-*/files/media/**/*.mp4"))) == 2 * len(_STEPS)

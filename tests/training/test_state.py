"""A run that was stopped or rolled back goes on as if it had not been, to the bit."""

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.build import (
    QUIET,
    Recipes,
    all_saved,
    assert_saved_alike,
    events,
    forget_after,
    rows,
    saved,
    wait_until,
)
from tests.data.catalogs import make_catalog

from longtake import config
from longtake.checkpoint import files
from longtake.config import Recipe
from longtake.data.audit import audit
from longtake.data.batch import Batch
from longtake.data.catalog import Catalog
from longtake.data.ledger import read_ledger
from longtake.errors import (
    CheckpointError,
    DataChangedError,
    DataError,
    DivergedError,
    RecipeChangedError,
    RunError,
)
from longtake.fsio import write_json
from longtake.guard.detectors import OK, GuardVerdict
from longtake.guard.history import StepStatistics
from longtake.inspection import facts, tables
from longtake.planner.batch_sizes import bucket_tokens
from longtake.run_dir import RunDirectory
from longtake.training import loop
from longtake.training.guard_runner import GuardRunner
from longtake.training.session import SampleLosses, Session, TrainingState
from longtake.training.step import apply_update, compute_gradients
from longtake.training.train import train

_CURVE = ("step", "epoch", "loss", "grad_norm", "learning_rate")
_ROW = ("step", "batch", "epoch", "loss", "grad_norm", "weight_norm", "update_ratio")


def _num_rows(recipe: Recipe) -> int:
    path = RunDirectory(recipe.out).metrics_path
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.mark.parametrize(("kind", "dtype"), [("adamw", "bf16"), ("muon", "fp32")])
def test_an_interrupted_run_is_the_straight_run(
    small_recipe: Recipes, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str
) -> None:
    changes = (
        f"model.dtype={dtype}",
        f"optimizer.kind={kind}",
        "training.steps=20",
        "checkpoint.every=100",
    )
    straight = small_recipe.trained(*changes, name="straight")
    stopped = small_recipe(*changes)

    def interrupted(session: Session, state: TrainingState, *of_step: Any) -> float:
        if state.global_step == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return apply_update(session, state, *of_step)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "apply_update", interrupted)
        outcome = train(stopped, QUIET)
    assert (outcome.interrupted_by, outcome.end_step) == ("SIGINT", 7)
    rest = train(stopped, QUIET)
    assert (rest.start_step, rest.end_step) == (outcome.end_step, 20)
    assert rows(stopped, *_CURVE) == rows(straight, *_CURVE)
    assert_saved_alike(stopped, straight, 20)


# In its sixth step it waits for a file.
_PROGRAM = """
import time
from pathlib import Path
from longtake import cli
from longtake.training import loop

apply_update = loop.apply_update


def apply_later(session, state, *of_step):
    while state.global_step == 5 and not Path("may_update").exists():
        time.sleep(0.01)
    return apply_update(session, state, *of_step)


loop.apply_update = apply_later
cli.main()
"""


@pytest.fixture
def start(start_warm: Callable[..., Any], tmp_path: Path) -> Callable[[Path], Any]:
    """Starts `longtake train` with a recipe, as a process; said.log has what it says."""
    file = tmp_path / "program.py"
    file.write_text(_PROGRAM)

    def begin(recipe: Path) -> Any:
        # As many threads as here: other sums round otherwise.
        threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        with (tmp_path / "said.log").open("wb") as log:
            command = [sys.executable, str(file), "train", str(recipe)]
            return start_warm(command, log, tmp_path, **threads)

    return begin


def test_the_command_says_how_to_go_on(
    small_recipe: Recipes, start: Callable[[Path], Any], tmp_path: Path
) -> None:
    """Exit code 130 and a command that can be pasted; the pasted command finishes the run."""
    recipe = small_recipe("training.steps=40", "checkpoint.every=1000")
    path = tmp_path / "recipe.toml"
    path.write_text(config.dump(recipe))
    process = start(path)
    wait_until(lambda: _num_rows(recipe) == 5)
    process.send_signal(signal.SIGINT)
    (tmp_path / "may_update").touch()
    code, said = process.wait(timeout=600), (tmp_path / "said.log").read_text()
    assert code == 130, said
    stopped_at = RunDirectory(recipe.out).checkpoint_steps()[-1]
    assert "SIGINT: training ends after this step and saves it." in said
    assert f"Stopped by SIGINT after step {stopped_at}, which is saved." in said
    words = said.splitlines()[-1].split()
    assert words[:-1] == ["longtake", "train"]
    rest = train(config.load(Path(words[-1])), QUIET)
    assert (rest.start_step, rest.end_step) == (stopped_at, 40)
    straight = small_recipe.trained("training.steps=40", name="straight")
    assert rows(recipe, *_CURVE) == rows(straight, *_CURVE)


def test_a_damaged_checkpoint_is_named_and_passed_over(
    small_recipe: Recipes, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its bytes are compared when they are loaded; the run resumes from the one before."""
    recipe = small_recipe.trained("training.steps=8", "checkpoint.every=4")
    straight, saved = rows(recipe, *_CURVE), all_saved(recipe, 8)
    damaged = RunDirectory(recipe.out).checkpoint_path(8)
    with next((damaged / "model").glob("*.distcp")).open("r+b") as file:
        file.write(b"\xff")
    outcome = train(recipe, Console(soft_wrap=True))
    assert outcome.start_step == 4
    said = capsys.readouterr().out
    assert re.search(rf"warning: {damaged} is not whole \(model/.*was passed over", said)
    (event,) = events(recipe, "checkpoint_damaged")
    assert event["path"] == damaged.name
    assert event["reason"].startswith("model/__0_0.distcp has other bytes than were saved")
    assert "from step 4" in said
    assert rows(recipe, *_CURVE) == straight
    torch.testing.assert_close(all_saved(recipe, 8), saved, rtol=0, atol=0)
    train(recipe, Console(soft_wrap=True))
    assert "warning" not in capsys.readouterr().out


@pytest.fixture
def fewer(shapes_catalog: Path, tmp_path: Path) -> Path:
    """A catalog of 40 of the 64 clips."""
    catalog = Catalog.load(shapes_catalog)
    make_catalog(list(catalog.clips())[:40]).save(tmp_path / "fewer.parquet")
    return tmp_path / "fewer.parquet"


def test_steps_after_the_last_checkpoint_are_trained_again_and_audited_once(
    small_recipe: Recipes,
) -> None:
    recipe = small_recipe.trained("training.steps=20", "checkpoint.every=8")
    run, before = RunDirectory(recipe.out), rows(recipe, *_CURVE)
    forget_after(recipe, 8)
    assert train(recipe, QUIET).start_step == 8
    assert rows(recipe, *_CURVE) == before
    found = audit(run)
    assert found.ok
    assert (found.end_step, found.num_abandoned) == (20, 12 * 4)
    assert [(each.epoch, each.seen) for each in found.epochs] == [(0, 64), (1, 16)]


_EPOCHS = (
    "training={epochs=3, global_batch_size=6, device='cpu'}",
    "checkpoint={every_epochs=1, keep=20}",
)


def test_a_run_of_epochs_saves_after_each_and_goes_on_with_other_clips(
    small_recipe: Recipes, fewer: Path
) -> None:
    """Its steps, its learning rates and when it saves follow from the clips."""
    recipe = small_recipe.trained(*_EPOCHS, "optimizer.schedule=linear")
    run, before = RunDirectory(recipe.out), rows(recipe, *_ROW)
    # 64 clips in batches of 6: 10 whole ones an epoch, and the rest is carried into the next.
    assert run.checkpoint_steps() == [10, 21, 32]
    assert run.recipe().training.steps == 32
    assert rows(recipe, "learning_rate")[-1] == [0.0]
    forget_after(recipe, 21)
    assert train(config.load(run.recipe_path), QUIET).start_step == 21
    assert rows(recipe, *_ROW) == before
    found = audit(run)
    assert found.ok
    assert [(each.epoch, each.seen) for each in found.epochs] == [(n, 64) for n in range(3)]
    # Two clips of the second epoch are left, and the third has 40 clips.
    forget_after(recipe, 21)
    changes = (*_EPOCHS, "optimizer.schedule=linear", f"data.catalog={fewer}")
    changed = small_recipe(*changes, "data.on_change=finish")
    assert train(changed, QUIET).end_step == run.recipe().training.steps == 21 + 1 + 7
    assert rows(changed, "learning_rate")[-1] == [0.0]
    found = audit(run)
    assert found.ok
    assert [(each.epoch, each.seen) for each in found.epochs] == [(0, 64), (1, 64), (2, 40)]


_STAGES = (
    "training.steps=12",
    "checkpoint.every=1",
    "checkpoint.keep=20",
    "optimizer.schedule=constant",
    """data.stages=[
        { name = "a", steps = 5 },
        { name = "b", steps = 4, ramp_steps = 2, learning_rate = 1e-3, warmup_steps = 3,
          ema_decay = 0.5, global_batch_size = 8, shift = 3.0, caption_dropout = 0.5 },
        { name = "c", global_batch_size = 6, learning_rate = 2e-3 },
    ]""".replace("\n", " "),
)


@pytest.fixture
def staged(small_recipe: Recipes) -> Recipe:
    """A run whose stages change learning rate, warm-up, EMA, batch, shift and dropout."""
    return small_recipe.trained(*_STAGES)


def test_stages_change_what_they_say_and_a_resume_is_exact_anywhere(staged: Recipe) -> None:
    run, before, last = RunDirectory(staged.out), rows(staged, *_ROW), all_saved(staged, 12)
    rates = [rate for (rate,) in rows(staged, "learning_rate")]
    assert rates[4:] == pytest.approx([3e-3, *(1e-3 * n / 4 for n in (1, 2, 3, 4)), *[2e-3] * 3])
    found = read_ledger(run.ledger_path)
    per_step = [int((found.step == step).sum()) for step in range(12)]
    assert (per_step[:4], per_step[6:9], per_step[9:]) == ([4] * 4, [8] * 3, [6] * 3)
    assert sorted(per_step[4:6]) == [4, 8]  # the ramp
    said = events(staged, "settings_changed")
    assert [(each["step"], each["stage"]) for each in said] == [(5, "b"), (9, "c")]
    assert said[0]["changes"] == {
        "learning_rate": [3e-3, 1e-3],
        "ema_decay": [0.9, 0.5],
        "global_batch_size": [4, 8],
        "shift": [1.0, 3.0],
        "caption_dropout": [None, 0.5],
        "warmup_steps": [None, 3],
    }
    shown = [tables.said(each) for each in facts.run_facts(run)["settings"]]
    assert shown[1] == (
        "step 10: in stage c learning_rate 0.001 to 0.002, ema_decay 0.5 to 0.9, "
        "global_batch_size 8 to 6, shift 3 to 1, caption_dropout 0.5 to unset"
    )
    stages = found.history[-1]["order"]["stages"]  # the ledger has them too
    assert [each["global_batch_size"] for each in stages] == [None, 8, 6]
    for step in (5, 7, 9):  # in the ramp at its border, in the warm-up, at a border
        forget_after(staged, step)
        assert train(staged, QUIET).start_step == step
        assert rows(staged, *_ROW) == before, step
        torch.testing.assert_close(all_saved(staged, 12), last, rtol=0, atol=0)
    assert audit(run).ok


def test_a_rate_restarts_also_in_a_resumed_run_and_the_guard_is_told(
    small_recipe: Recipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: dict[int, tuple[float, int]] = {}

    def judge(_: Any, now: StepStatistics, __: Any) -> GuardVerdict:
        judged[now.step] = (now.learning_rate_factor, now.num_restarts)
        return OK

    monkeypatch.setattr("longtake.training.guard_runner.judge", judge)
    recipe = small_recipe.trained(
        *("optimizer.schedule=cosine_restarts", "optimizer.schedule_cycles=2"),
        *("optimizer.warmup_steps=0", "training.steps=9", "checkpoint.every=3"),
    )
    before, first = rows(recipe, *_ROW), judged.copy()
    full, falling = recipe.optimizer.learning_rate, [1.0, 0.8536, 0.5, 0.1464]
    expected = [*falling, *falling, 0.0]
    rates = [rate for (rate,) in rows(recipe, "learning_rate")]
    assert rates == pytest.approx([full * each for each in expected], rel=1e-3)
    # Each step measures the update before it.
    assert [first[step][0] for step in range(1, 9)] == pytest.approx(expected[:-1], rel=1e-3)
    assert [first[step][1] for step in range(9)] == [0] * 5 + [1] * 4
    forget_after(recipe, 3)
    assert train(recipe, QUIET).start_step == 3
    assert rows(recipe, *_ROW) == before
    assert judged == first


def test_what_a_stage_sets_is_what_the_recipe_s_own_keys_set(small_recipe: Recipes) -> None:
    same = ("training.steps=5", "training.micro_batch_size=2")
    own = (
        *("training.global_batch_size=8", "optimizer.learning_rate=1.5e-3", "ema.decay=0.15"),
        *("flow.shift=3.0", "data.caption_dropout=0.5"),
    )
    plain = small_recipe.trained(*same, *own, name="plain")
    stage = (
        '{ name = "all", global_batch_size = 8, learning_rate = 1.5e-3, ema_decay = 0.15, '
        "shift = 3.0, caption_dropout = 0.5 }"
    )
    staged = small_recipe.trained(*same, f"data.stages=[{stage}]")
    assert rows(staged, *_ROW, "learning_rate") == rows(plain, *_ROW, "learning_rate")
    for name in ("model", "ema/main"):
        torch.testing.assert_close(saved(staged, 5, name), saved(plain, 5, name), rtol=0, atol=0)


def test_a_bucket_of_another_batch_size_is_trained_as_a_run_of_that_batch_size(
    small_recipe: Recipes, tmp_path: Path
) -> None:
    """In as many micro-batches as the recipe's batch: two of three clips instead of two of two.

    The size is the bucket's own, or as many clips as have so many tokens.
    """
    shape = "num_frames = 8, height = 32, width = 32"
    (tokens,) = bucket_tokens(small_recipe()).values()
    found = {}
    for name, size, micro, own in (
        ("plain", 6, 3, f"data.buckets=[{{ {shape} }}]"),
        ("own", 4, 2, f"data.buckets=[{{ {shape}, batch_size = 6 }}]"),
        ("tokens", 4, 2, f"data.tokens_per_batch={7 * tokens - 1}"),
    ):
        recipe = small_recipe.trained(
            *("training.steps=4", f"training.global_batch_size={size}", own),
            f"training.micro_batch_size={micro}",
            name=name,
        )
        found[name] = rows(recipe, *_ROW)
        run = RunDirectory(recipe.out)
        assert (read_ledger(run.ledger_path).step == 1).sum() == 6
        assert run.recipe().data.buckets[0].batch_size == (None if name == "plain" else 6)
        assert train(recipe, QUIET).start_step == 4  # the same recipe resumes
    assert found["tokens"] == found["own"] == found["plain"]


def test_a_run_resumes_with_another_catalog_as_the_recipe_says(
    small_recipe: Recipes, fewer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else it is refused; what it consumed is proved afterwards, resumed once more or not."""
    constant, other = "optimizer.schedule=constant", f"data.catalog={fewer}"
    train(small_recipe("training.steps=5", constant), QUIET)
    message = r"changed since step 5:\n.*0 clips added, 24 removed"
    with pytest.raises(DataChangedError, match=message) as caught:
        train(small_recipe("training.steps=9", constant, other), QUIET)
    assert "--set data.on_change=merge" in str(caught.value)
    assert len(rows(small_recipe(), "step")) == 5
    merged = small_recipe("training.steps=9", constant, other, "data.on_change=merge")
    train(merged, Console(soft_wrap=True))
    assert "changed, resuming with merge: the catalog" in capsys.readouterr().out
    recipe = small_recipe("training.steps=30", constant, other)
    train(recipe, Console(soft_wrap=True))
    assert "changed" not in capsys.readouterr().out
    (event,) = events(recipe, "data_changed")
    assert (event["step"], event["policy"], event["plan_version"]) == (5, "merge", 1)
    assert "24 removed" in event["changes"]
    found = audit(RunDirectory(recipe.out))
    assert found.ok
    assert found.end_step == 30
    whole = {each.seen for each in found.epochs if each.is_over}
    assert 40 in whole
    assert 64 not in whole


def test_a_finished_run_trains_nothing_and_refuses_another_recipe(small_recipe: Recipes) -> None:
    recipe = small_recipe.trained("training.steps=2")
    curve = rows(recipe, *_CURVE)
    outcome = train(recipe, QUIET)
    assert (outcome.start_step, outcome.end_step, outcome.interrupted_by) == (2, 2, None)
    assert rows(recipe, *_CURVE) == curve
    before = _files(recipe.out)
    with pytest.raises(RecipeChangedError, match="seed: 0 there, 1 now"):
        train(small_recipe("training.steps=2", "seed=1"), QUIET)
    assert _files(recipe.out) == before


def test_the_recorded_precision_is_kept(small_recipe: Recipes) -> None:
    recipe = small_recipe.trained(
        "training.steps=4", "checkpoint.every=2", "training.precision=auto"
    )
    forget_after(recipe, 2)
    run = RunDirectory(recipe.out)
    folder = run.checkpoint_path(2)
    trainer = files.load_trainer(folder, files.SampledTrainer)
    other = {"bf16": "fp32", "fp32": "bf16"}[trainer["precision"]]
    write_json(folder / "trainer.json", trainer | {"precision": other})
    files.commit(folder, files.describe_files(folder, files.list_files(folder)))
    train(recipe, QUIET)
    assert json.loads(run.record_path.read_text())["launches"][-1]["precision"] == other


def test_weights_that_are_no_numbers_stop_a_run_that_has_nothing_to_go_back_to(
    small_recipe: Recipes,
) -> None:
    recipe = small_recipe(
        "optimizer.learning_rate=1e30", "optimizer.warmup_steps=0", "checkpoint.every=1"
    )
    with pytest.raises(DivergedError, match=r"the update of step 1 .* longtake show") as raised:
        train(recipe, QUIET)
    assert len(rows(recipe, *_CURVE)) == 2
    assert re.search(r"first: \S+ \(.*\), \d+ .* of \d+ numbers", str(raised.value))
    assert RunDirectory(recipe.out).checkpoint_steps() == []


def test_damaged_lines_of_logs_stop_no_resume(
    small_recipe: Recipes, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = small_recipe.trained("training.steps=4", "checkpoint.every=2")
    forget_after(recipe, 2)
    run = RunDirectory(recipe.out)
    for path in (run.metrics_path, run.events_path, run.rollbacks_path):
        with path.open("a", encoding="utf-8") as file:
            file.write('[]\n5\n{}\n{"step": "x", "time": 1}\n' + "[" * 60_000 + "\n")
    train(recipe, Console(soft_wrap=True, width=500))
    assert rows(recipe, *_CURVE)[-1][0] == 4
    (resumed,) = (each for each in run.events() if each["event"] == "resumed")
    assert resumed["lost_steps"] == 2
    assert f"{run.rollbacks_path}: 5 lines are no records" in capsys.readouterr().out
    assert audit(run).ok


def test_a_resume_without_its_ledger_says_what_can_no_longer_be_proved(
    small_recipe: Recipes, capsys: pytest.CaptureFixture[str]
) -> None:
    """As an event too; an audit accuses nobody of what is not known."""
    recipe = small_recipe.trained("training.steps=4", "checkpoint.every=2")
    forget_after(recipe, 2)
    run = RunDirectory(recipe.out)
    shutil.rmtree(run.ledger_path)
    train(recipe, Console(soft_wrap=True, width=500))
    assert "`longtake data audit` proves nothing" in capsys.readouterr().out
    (event,) = events(recipe, "ledger_damaged")
    assert event["step"] == 2
    with pytest.raises(DataError, match="begins at batch 2"):
        audit(run)


def test_a_missing_tokenizer_is_made_again_of_the_same_captions_only(
    small_recipe: Recipes, fewer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of others it would give captions other token ids."""
    changes = ("training.steps=4", "checkpoint.every=2", "data.on_change=merge")
    recipe = small_recipe.trained(*changes)
    forget_after(recipe, 2)
    run = RunDirectory(recipe.out)
    shutil.rmtree(run.components_path / "tokenizer")
    with pytest.raises(RunError, match=r"tokenizer\.json is missing.*other token ids"):
        train(small_recipe(*changes, f"data.catalog={fewer}"), QUIET)
    train(recipe, Console(soft_wrap=True, width=500))
    assert "the tokenizer is made again from the same captions" in capsys.readouterr().out


def test_a_checkpoint_with_other_weights_is_refused(small_recipe: Recipes) -> None:
    small = small_recipe.trained("training.steps=2")
    changed = small_recipe("training.steps=2", "model.config.num_blocks=3")
    RunDirectory(small.out).recipe_path.write_text(config.dump(changed))
    with pytest.raises(CheckpointError, match="recipe that the run was started with"):
        train(changed, QUIET)


def test_a_way_to_go_on_is_said_anew_each_time(small_recipe: Recipes, fewer: Path) -> None:
    short = ("training.steps=12", "checkpoint.every=2")
    forget_after(small_recipe.trained(*short), 10)
    run = RunDirectory(small_recipe().out)
    kept = run.recipe_path.read_text()
    away = ('data.stages=[{name="x"}]', "data.on_change=merge")
    with pytest.raises(DataChangedError, match="stage all, which is no longer"):
        train(small_recipe(*short, *away), QUIET)
    assert run.recipe_path.read_text() == kept
    changes = (*short, f"data.catalog={fewer}")
    with pytest.raises(DataChangedError, match="24 removed"):
        train(small_recipe(*changes), QUIET)
    train(small_recipe(*changes, "data.on_change=merge"), QUIET)
    assert run.recipe().data.on_change == "refuse"
    assert audit(run).ok


_STYLE = "examples.modules.style_residual:StyleResidual"
_ADAPTERS = {
    "lora": ("trainable.kind=lora", "trainable.rank=2"),
    "lora in bf16": ("trainable.kind=lora", "trainable.rank=2", "model.dtype=bf16"),
    "module": (
        f"trainable.modules.style.module={_STYLE}",
        "trainable.modules.style.options.rank=2",
    ),
}


@pytest.mark.parametrize("kind", _ADAPTERS)
def test_a_run_of_adapters_goes_on_to_the_bit_and_saves_nothing_else(
    small_recipe: Recipes, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    changes = (*_ADAPTERS[kind], "model.config.hidden_size=96", "training.steps=8")
    straight = small_recipe.trained(*changes, name="straight")
    stopped = small_recipe.trained(*changes, "checkpoint.every=4")
    forget_after(stopped, 4)
    assert train(stopped, QUIET).start_step == 4
    assert rows(stopped, *_CURVE) == rows(straight, *_CURVE)
    assert_saved_alike(stopped, straight, 8)
    saved = all_saved(stopped, 8)
    assert saved["model"].keys() == saved["ema/main"].keys()
    assert all("lora_" in name or "added_modules." in name for name in saved["model"])
    assert {average.dtype for average in saved["ema/main"].values()} == {torch.float32}
    named = {name.removeprefix("state.") for name in saved["optimizer"] if "state." in name}
    assert {name.rpartition(".")[0] for name in named} == saved["model"].keys()
    folder = RunDirectory(stopped.out).checkpoint_path(8)
    for name in ("model", "ema/main"):  # the frozen weights would be 2.5 MB in each
        assert sum(path.stat().st_size for path in (folder / name).iterdir()) < 100_000


_GUARD = ("training.steps=30", "checkpoint.every=5")
_HARM = (13, 14)
"""Batches with which the gradient is lost, whatever the state is."""
_SKIPPED = [11, 17]


@pytest.fixture(scope="module", autouse=True)
def _few_skips() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        few_skips = partial(GuardRunner, max_skips=1, margin_batches=2)
        patch.setattr("longtake.training.train.GuardRunner", few_skips)
        yield


class _KilledError(Exception):
    """As if the process had ended here."""


def _compute(harm: tuple[int, ...], killed_at: int | None = None) -> Callable[..., SampleLosses]:
    """`compute_gradients`, whose gradients are lost with some batches."""

    def compute(session: Session, state: TrainingState, batch: Batch) -> SampleLosses:
        if batch.step == killed_at:
            raise _KilledError
        samples = compute_gradients(session, state, batch)
        if batch.step in harm:
            last = list(state.components.model.parameters())[-1]
            assert last.grad is not None
            last.grad.fill_(float("nan"))
        return samples

    return compute


@pytest.fixture(scope="module")
def rolled_back(
    small_recipe_in: Callable[[Path], Recipes], tmp_path_factory: pytest.TempPathFactory
) -> Recipe:
    """A run that went back once, and came to its end."""
    recipe = small_recipe_in(tmp_path_factory.mktemp("rolled_back"))(*_GUARD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "compute_gradients", _compute(_HARM))
        train(recipe, QUIET)
    return recipe


def test_it_goes_back_and_round_the_batches(rolled_back: Recipe) -> None:
    """To the checkpoint before; the steps and the schedule are whole, the batches are ahead."""
    run = RunDirectory(rolled_back.out)
    (event,) = events(rolled_back, "rolled_back")
    assert (event["step"], event["from_step"], event["skipped"]) == (10, 15, _SKIPPED)
    assert event["reason"] == "non_finite"
    (skipped,) = events(rolled_back, "update_skipped")
    assert (skipped["step"], skipped["batch"]) == (13, 13)
    rows = run.metrics()
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert [row["batch"] for row in rows] == [*range(11), *range(17, 36)]
    assert [row["learning_rate"] for row in rows][-1] == 0.0  # the schedule aims at its end
    assert all("verdict" not in row for row in rows)
    (record,) = run.rollbacks()
    assert record["skipped"] == _SKIPPED
    assert run.checkpoint_steps()[-1] == 30


def test_a_clip_that_is_encoded_to_nan_is_recorded_before_its_step_ends_the_run(
    small_recipe: Recipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small_recipe(*_GUARD, 'guard.mode="report"')
    honest, harmed = compute_gradients, list[str]()

    def compute(session: Session, state: TrainingState, batch: Batch) -> SampleLosses:
        samples = honest(session, state, batch)
        if batch.step == 3:
            samples.on_device[0] = float("nan")
            harmed.append(batch.identities[0])
        return samples

    monkeypatch.setattr(loop, "compute_gradients", compute)
    monkeypatch.setattr(loop, "clips_not_encoded", lambda *_: [(harmed[0], "latents")])
    with pytest.raises(DivergedError):
        train(recipe, QUIET)
    (event,) = events(recipe, "sample_rejected")
    assert (event["step"], event["identity"]) == (3, harmed[0])
    assert "is encoded to latents that are NaN" in event["reason"]


def test_the_ledger_counts_what_was_skipped(rolled_back: Recipe) -> None:
    audited = audit(RunDirectory(rolled_back.out))
    assert audited.ok
    assert audited.num_skipped == _SKIPPED[1] - _SKIPPED[0]
    assert sum(epoch.skipped for epoch in audited.epochs) == 4 * audited.num_skipped
    steps = read_ledger(RunDirectory(rolled_back.out).ledger_path).step
    assert set(steps.tolist()) == {*range(11), *range(17, 36)}


def test_the_report_has_batch_and_state(rolled_back: Recipe) -> None:
    """The clips of the batch with captions and losses, the steps before, and the checkpoint."""
    run = RunDirectory(rolled_back.out)
    (event,) = events(rolled_back, "update_skipped")
    report = json.loads((run.path / event["report"]).read_text())
    assert (report["step"], report["batch"]) == (13, 13)
    assert "parameters" in report["verdict"]["message"]
    mine = [sample for sample in report["samples"] if sample["step"] == 13]
    assert len(mine) == 4
    assert all(sample["caption"] and 0 < sample["sigma"] < 1 for sample in mine)
    assert report["state"]["checkpoint"] == 10
    assert [row["step"] for row in report["history"]] == list(range(14))
    assert report["history"][-1]["verdict"] == "skip"


@pytest.mark.parametrize(("killed_at", "start_step"), [(22, 15), (18, 10)])
def test_killed_after_it_went_back_it_is_the_same(
    rolled_back: Recipe,
    small_recipe: Recipes,
    monkeypatch: pytest.MonkeyPatch,
    killed_at: int,
    start_step: int,
) -> None:
    recipe = small_recipe(*_GUARD)
    monkeypatch.setattr(loop, "compute_gradients", _compute(_HARM, killed_at))
    with pytest.raises(_KilledError):
        train(recipe, QUIET)
    monkeypatch.setattr(loop, "compute_gradients", _compute(_HARM))
    assert train(recipe, QUIET).start_step == start_step
    assert len(events(recipe, "rolled_back")) == 1
    assert rows(recipe, *_ROW) == rows(rolled_back, *_ROW)
    assert_saved_alike(recipe, rolled_back, 30)
    assert audit(RunDirectory(recipe.out)).ok


def test_killed_while_it_goes_back_it_is_the_same(
    small_recipe: Recipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise _KilledError

    recipe = small_recipe(*_GUARD, "checkpoint.keep=9")
    harm = (14, 15)
    monkeypatch.setattr(loop, "compute_gradients", _compute(harm))
    monkeypatch.setattr("longtake.checkpoint.files.delete_after", killed)
    with pytest.raises(_KilledError):
        train(recipe, QUIET)
    assert RunDirectory(recipe.out).checkpoint_steps() == [5, 10, 15]
    monkeypatch.undo()
    monkeypatch.setattr(loop, "compute_gradients", _compute(harm))
    assert train(recipe, QUIET).start_step == 10
    straight = small_recipe.trained(*_GUARD, "checkpoint.keep=9", name="straight")
    assert rows(recipe, *_ROW) == rows(straight, *_ROW)


def test_a_run_that_cannot_be_helped_stops(
    small_recipe: Recipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a number of rollbacks without progress; the error says what, where and how to look."""
    recipe = small_recipe(*_GUARD, "guard.max_rollbacks=2")
    monkeypatch.setattr(loop, "compute_gradients", _compute(tuple(range(13, 200))))
    with pytest.raises(DivergedError, match="longtake show") as stopped:
        train(recipe, QUIET)
    assert re.search("2 (rollbacks|times)", str(stopped.value))
    assert len(events(recipe, "rolled_back")) == 2
    assert len(events(recipe, "diverged")) == 1


def test_without_a_checkpoint_from_before_it_stops(
    small_recipe: Recipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small_recipe(*_GUARD, "checkpoint.every=100")
    monkeypatch.setattr(loop, "compute_gradients", _compute(_HARM))
    with pytest.raises(DivergedError, match=r"checkpoint\.every"):
        train(recipe, QUIET)


@pytest.mark.parametrize("mode", ["report", "off"])
def test_a_guard_that_does_not_act_stops_at_what_is_no_number(
    small_recipe: Recipes, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Nobody may go on with it; the update is not made."""
    recipe = small_recipe(*_GUARD, f"guard.mode={mode}")
    monkeypatch.setattr(loop, "compute_gradients", _compute(_HARM))
    with pytest.raises(DivergedError):
        train(recipe, QUIET)
    assert RunDirectory(recipe.out).metrics()[-1]["step"] == 14

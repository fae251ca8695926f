"""A run that skipped an update, went back, and was interrupted: trained by hand, on real clips."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.build import bare_recipe, make_row

from longtake.checkpoint.files import commit, describe_files, list_files
from longtake.data.batch import Batch
from longtake.data.ledger import Ledger, begin_launch, stream_names
from longtake.data.loader import Loader
from longtake.fsio import now
from longtake.metrics import Metrics
from longtake.run_dir import RunDirectory

TOTAL, SPIKED, TOOK, DIVERGED, CHECKPOINT, ENDED = 40, 9, (13, 22), 20, 12, 24


class Teller:
    def __init__(self, path: Path, catalog: Path) -> None:
        data = {"catalog": str(catalog), "workers": 0}
        recipe = bare_recipe(path, data=data, training={"steps": TOTAL})
        path.mkdir()
        self.run = RunDirectory(path)
        self.run.create(recipe)
        self.loader = Loader(recipe.data, batch_size=4, kept=self.run.catalogs_path)
        self.loader.keep_catalogs()
        self.states: list[dict[str, Any]] = [self.loader.state_dict()]
        self.seen: dict[int, Batch] = {}
        self.run.record_launch(start_step=0, world_size=1, device="cpu", precision="fp32")
        self.run.append_event("launched", step=0, world_size=1)
        self.run.append_event("stage", step=0, stage="all", source="catalog")

    def train(self, end: int, verdicts: dict[int, str]) -> None:
        loader, names = self.loader, stream_names(self.loader.data)
        place = (loader.step, 1, names, loader.plan_history.history, loader.skipped.spans)
        folder = begin_launch(self.run.ledger_path, *place)
        count = end - len(self.states) + 1
        with Ledger(folder, 0, names) as ledger:
            for batch in loader.batches(loader.end_after(count)):
                if batch.begins_epoch:
                    where = {"step": batch.step, "stage": "all", "source": "catalog"}
                    self.run.append_event("epoch", **where, epoch=batch.epoch)
                step = len(self.states)
                self.run.append_metrics(_row(step, batch, verdicts.get(step)))
                ledger.record(batch.consumed)
                self.seen[step] = batch
                self.states.append(loader.state_dict())

    def go_back(self, to_step: int, skipped: tuple[int, int], reason: str) -> None:
        from_step = len(self.states) - 1
        facts = {"skipped": list(skipped), "reason": reason, "message": "the loss has risen"}
        rollback: Any = {"time": now(), "from_step": from_step, "to_step": to_step, **facts}
        self.run.append_rollback(rollback)
        self.loader.skip(*skipped)
        self.loader.load_state_dict(self.states[to_step])
        self.states = self.states[: to_step + 1]
        self.run.append_event("rolled_back", step=to_step, from_step=from_step, **facts)

    def judge(self, step: int, kind: str, reason: str, began: int, number: int = 0) -> None:
        batch = self.seen[step]
        facts = {"reason": reason, "message": f"step {step} is bad", "began": began}
        samples = [
            sample for each in range(max(1, step - 15), step + 1) for sample in self._samples(each)
        ]
        place = {"step": step - 1, "batch": batch.step}
        report = {**place, "verdict": {"kind": kind, **facts}, "time": now(), "samples": samples}
        path = self.run.guard_report_path(step - 1, number)
        self.run.write_record(path, {**report, "history": [], "state": {"checkpoint": 0}})
        told: dict[str, Any] = {**place, "verdict": kind, **facts}
        self.run.append_event(
            "update_skipped" if kind == "skip" else "anomaly_detected",
            **told,
            report=str(path.relative_to(self.run.path)),
        )

    def _samples(self, step: int) -> list[dict[str, Any]]:
        batch = self.seen[step]
        losses: list[float | str] = [1.0, 3.0, 2.0, "nan" if step == SPIKED else 0.5]
        clips = zip(batch.identities, batch.captions, batch.epochs, losses, strict=True)
        return [
            {
                "step": step - 1,
                "batch": batch.step,
                "rank": 0,
                "host": "here",
                "identity": identity,
                "caption": caption,
                "epoch": epoch,
                "sigma": 0.25,
                "loss": loss,
            }
            for identity, caption, epoch, loss in clips
        ]

    def save(self, step: int, num_bytes: int) -> Path:
        path = self.run.checkpoint_path(step)
        (path / "model").mkdir(parents=True)
        (path / "model" / "weights").write_bytes(bytes(num_bytes))
        commit(path, describe_files(path, list_files(path)))
        self.run.append_event("checkpoint", step=step, path=path.name)
        return path


def _row(step: int, batch: Batch, verdict: str | None) -> Metrics:
    loss = 1.0 / step + (0.5 * (step - 12) if verdict else 0.0)
    judged = {} if verdict is None else {"verdict": verdict}
    return make_row(
        step,
        None if verdict == "skip" else loss,
        epoch=batch.epoch,
        grad_norm=0.5,
        step_seconds=0.25,
        time=time.time(),
        batch=batch.step,
        loss_by_sigma=[loss, None, loss, loss],
        weight_norm=700.0 + step,
        update_ratio=1e-3,
        **judged,
    )


@pytest.fixture(scope="session")
def teller_of(shapes_catalog: Path) -> Callable[[Path], Teller]:
    """Makes tellers of new runs of 40 steps, over 64 clips in batches of four."""
    return lambda path: Teller(path, shapes_catalog)


@pytest.fixture(scope="session")
def _told(teller_of: Callable[[Path], Teller], tmp_path_factory: pytest.TempPathFactory) -> Teller:
    teller = teller_of(tmp_path_factory.mktemp("told") / "run")
    teller.train(DIVERGED, {SPIKED: "skip", DIVERGED: "roll_back"})
    teller.judge(SPIKED, "skip", "non_finite", SPIKED - 1)
    teller.judge(DIVERGED, "roll_back", "divergence", 14)
    teller.save(CHECKPOINT, 1000)
    teller.go_back(CHECKPOINT, TOOK, "divergence")
    teller.train(ENDED, {})
    damaged = teller.save(ENDED, 2000)
    (damaged / "model" / "weights").write_bytes(b"too short")
    teller.run.append_event("interrupted", step=ENDED, seconds=3.0, by="SIGINT")
    return teller


@pytest.fixture
def told(_told: Teller, tmp_path: Path) -> RunDirectory:
    """A run's directory, to change as one likes.

    Step 9 was skipped (its loss was no number); at step 20 it diverged and went back to 12, without
    batches 13 to 21; at step 24 it was interrupted, and that checkpoint is damaged.
    """
    shutil.copytree(_told.run.path, tmp_path / "run")
    return RunDirectory(tmp_path / "run")


@pytest.fixture
def killed(told: RunDirectory) -> RunDirectory:
    """The same, killed right after it had gone back: no step was trained since."""
    lines = told.metrics_path.read_text().splitlines(keepends=True)
    told.metrics_path.write_text("".join(lines[:DIVERGED]))
    return told


@pytest.fixture
def seen(_told: Teller) -> dict[int, Batch]:
    return _told.seen

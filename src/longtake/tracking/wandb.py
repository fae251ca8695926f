"""W&B: one run, written by one process at a time, each in a segment (a `.wandb` file) of its own.

Every row has a number that never goes back, whoever writes it: W&B drops a row whose number is
lower than the one before, and merges rows of the same number. Steps of the training and of
checkpoints are axes of their own. What has arrived is read from the file that W&B writes: it hands
rows over to another process, which may be killed before they are on disk.
"""

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from longtake.config import TrackingSection
from longtake.fsio import read_json
from longtake.run_dir import RunDirectory
from longtake.tracking.cursor import Position
from longtake.tracking.log import say
from longtake.tracking.news import Evaluation
from longtake.tracking.tracker import scalars, wait_for_a_second_of_its_own, words
from longtake.tracking.wandb_access import base_url, demand_answer, missing_key

_AXES = {
    "train/*": "train/step",
    "eval/*": "eval/checkpoint_step",
    "events/*": "events/step",
}
_IDENTITY = (
    *("train/step", "train/time"),
    *("events/step", "events/time"),
    *("eval/preset", "eval/checkpoint_step", "eval/key"),
)
_FLUSH_SECONDS = 0.5
_INIT_SECONDS = 20.0
_FINISH_SECONDS = 20.0


class Wandb:
    """Writes a run's rows to W&B, or to the run's folder `wandb` for `wandb sync`."""

    name = "wandb"

    def __init__(self, run: RunDirectory, section: TrackingSection) -> None:
        self._run, self._section = run, section
        self._segment: _Segment | None = None
        self._already: set[tuple[Any, ...]] = set()
        self._has_failed = False

    def open(self, position: Position) -> int:
        """Begin a segment; see `Tracker`."""
        if self._section.wandb == "online":
            _demand_access(self._section)
        import wandb  # a second, and only where it is wanted

        from longtake.tracking.wandb_file import WandbFile, rows_from

        if self._has_failed:
            wandb.teardown()  # its other process may be gone, or hang
        self._has_failed = True
        run_id = run_id_of(self._run)
        unsure = rows_from(position.rows, self._run.path / "wandb", run_id)
        self._already = {_identity(row) for row in unsure}
        first = max((row["_step"] + 1 for row in unsure), default=position.rows)
        wandb_run = self._begin(run_id)
        first = max(first, wandb_run.step if wandb_run.resumed else 0)
        self._segment = _Segment(wandb_run, WandbFile(Path(wandb_run.settings.sync_file)), first)
        self._has_failed = False
        return first

    def _begin(self, run_id: str) -> Any:
        folder = self._run.path / "wandb"
        wait_for_a_second_of_its_own(folder, f"*run-%Y%m%d_%H%M%S-{run_id}")
        with _nothing_left_of_a_failure(folder, run_id):
            run = self._init(run_id)
        for names, axis in _AXES.items():
            run.define_metric(axis)
            run.define_metric(names, step_metric=axis)
        return run

    def _init(self, run_id: str) -> Any:
        import wandb

        return wandb.init(
            id=run_id,
            project=self._section.project,
            entity=self._section.entity,
            name=self._section.name or self._run.path.resolve().name,
            dir=str(self._run.path.resolve()),
            resume="allow",
            settings=_settings(self._section),
        )

    def write_row(self, number: int, row: Mapping[str, Any]) -> bool:
        """Each number of a row, as `train/...`."""
        return self._log(number, {f"train/{name}": value for name, value in scalars(row)})

    def write_event(self, number: int, event: Mapping[str, Any]) -> bool:
        """What an event says, as `events/<kind>`."""
        at = datetime.fromisoformat(event["time"]).timestamp()
        facts = {"events/step": event.get("step") or 0, "events/time": at}
        return self._log(number, {**facts, f"events/{event['event']}": words(event)})

    def write_evaluation(self, number: int, evaluation: Evaluation) -> bool:
        """Its numbers, its sheet and its videos, as `eval/<preset>/...`."""
        preset, step, key = evaluation.identity
        facts: dict[str, Any] = {
            "eval/checkpoint_step": step,
            "eval/preset": preset,
            "eval/key": key,
            "eval/time": evaluation.time,
        }
        if _identity(facts) in self._already:
            return False
        measured = evaluation.scalars().items()
        facts |= {f"eval/{preset}/{name}": value for name, value in measured}
        return self._log(number, facts | _media(preset, evaluation))

    def _log(self, number: int, facts: dict[str, Any]) -> bool:
        assert self._segment is not None
        if _identity(facts) in self._already:
            return False
        self._segment.run.log(facts, step=number, commit=True)
        return True

    def flush(self) -> int:
        """See `Tracker`; W&B writes its file twice a second, of its own accord."""
        assert self._segment is not None
        return self._segment.kept()

    def close(self) -> int:
        """End the segment."""
        if self._segment is None:
            return 0
        segment, self._segment = self._segment, None
        self._has_failed = True
        try:
            segment.run.finish()
        except TimeoutError:
            folder = Path(segment.run.settings.sync_dir)
            say(f"wandb: not all has arrived; to send it: wandb sync --include-online {folder}")
            return segment.kept()
        self._has_failed = False
        return segment.kept()


@dataclass
class _Segment:
    """A `.wandb` file that is being written."""

    run: Any
    file: Any
    next: int

    def kept(self) -> int:
        """The number after the last row that the file has."""
        for row in self.file.new_rows():
            self.next = row["_step"] + 1
        return self.next


@contextmanager
def _nothing_left_of_a_failure(folder: Path, run_id: str) -> Iterator[None]:
    """Remove the folder of a segment that could not be begun; there may be one every 2 minutes."""
    before = set(folder.glob(f"*run-*-{run_id}"))
    try:
        yield
    except Exception:
        for path in set(folder.glob(f"*run-*-{run_id}")) - before:
            shutil.rmtree(path, ignore_errors=True)
        raise


def run_id_of(run: RunDirectory) -> str:
    """The run's id as W&B allows it, which is the same wherever it is written from.

    Raises:
        ValueError: the run has none.
    """
    found = read_json(run.record_path).get("id")
    if not found:
        raise ValueError(f"{run.record_path} has no id.")
    return re.sub(r"[^A-Za-z0-9_-]+", "-", str(found))[-64:]


def _demand_access(section: TrackingSection) -> None:
    """Raises ConnectionError where nothing could be sent."""
    if reason := missing_key(section):
        raise ConnectionError(reason)
    demand_answer(base_url())


def _settings(section: TrackingSection) -> Any:
    """W&B takes no part in the process: no console, no code, no git, no statistics, no words."""
    import wandb

    return wandb.Settings(
        mode=section.wandb,
        console="off",
        silent=True,
        save_code=False,
        disable_code=True,
        disable_git=True,
        disable_job_creation=True,
        x_disable_stats=True,
        x_disable_meta=True,
        x_disable_machine_info=True,
        x_save_requirements=False,
        x_transaction_log_flush_interval=_FLUSH_SECONDS,
        init_timeout=_INIT_SECONDS,
        finish_timeout=_FINISH_SECONDS,
        finish_timeout_raises=True,
    )


def _media(preset: str, evaluation: Evaluation) -> dict[str, Any]:
    import wandb

    found: dict[str, Any] = {
        f"eval/{preset}/{path.stem}": wandb.Image(str(path), caption=caption)
        if path.suffix == ".png"
        else wandb.Video(str(path), caption=caption, format="mp4")
        for path, caption in evaluation.videos()
    }
    if evaluation.sheet is not None:
        found[f"eval/{preset}/sheet"] = wandb.Image(str(evaluation.sheet))
    return found


def _identity(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells a row from all others."""
    return tuple(row.get(name) for name in _IDENTITY)

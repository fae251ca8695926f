"""W&B cannot be reached while a run is trained."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from longtake.config import TrackingSection
from longtake.drill.fault import Fault
from longtake.drill.ground import Ground
from longtake.drill.launch import Launch
from longtake.drill.place import Place
from longtake.drill.result import Result
from longtake.drill.verdict import Verdict, identities_of
from longtake.evaluation_dir import cursor_path, writer_path
from longtake.lease import history, is_alive, newest
from longtake.run_dir import RunDirectory
from longtake.tracking import cursor
from longtake.tracking.event_file import event_files, events_in
from longtake.tracking.process import Follower
from longtake.tracking.wandb_access import refuse_missing_wandb

_NAME = "tracker-down"
_NOBODY = "http://127.0.0.1:9"
_LONGEST_STEP_SECONDS = 10.0
_LONGEST_FOLLOWER_SECONDS = 60.0
_ONLINE = TrackingSection(wandb="online")
_OFFLINE = TrackingSection(wandb="offline")


def drill(ground: Ground) -> Result:
    """Train with a W&B that nobody answers for; then tell one that works what it missed.

    Raises:
        RecipeError: W&B is not installed.
    """
    refuse_missing_wandb(_ONLINE)
    place = ground.fresh(_NAME)
    changes = ("tracking.wandb=online", "tracking.tensorboard=true")
    with _unreachable(), place.launch(*changes) as launch:
        seen = _wait_for_trouble(launch, place.run)
        launch.finish()
    before = cursor.load(cursor_path(place.run, "wandb"))
    _tell_later(place.run)
    verdict = judge(place, before, ground.undisturbed)
    verdict.must(seen is not None, "nobody has noticed that W&B cannot be reached")
    verdict.detected_seconds = None if seen is None else seen - launch.began
    return verdict.result(
        "The run is the undisturbed one's to the bit; TensorBoard has every row, and so has W&B "
        "since it can be written to."
    )


@contextmanager
def _unreachable() -> Iterator[None]:
    """What is started meanwhile looks for W&B where nothing listens, with a key."""
    before = dict(os.environ)
    os.environ.update(WANDB_BASE_URL=_NOBODY, WANDB_API_KEY="0" * 40)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _wait_for_trouble(launch: Launch, run: RunDirectory) -> float | None:
    """When the follower has said that W&B cannot be reached; None if the run ends before that."""
    for _ in launch.looks(0.05):
        writers = history(writer_path(run))
        if any("wandb" in writer.get("troubles", {}) for writer in writers):
            return time.monotonic()
    return None


def _tell_later(run: RunDirectory) -> None:
    """A later launch's follower, with W&B in the run's own folder, after the first one's end."""
    writer, until = newest(writer_path(run)), time.monotonic() + _LONGEST_FOLLOWER_SECONDS
    if writer is not None and writer["ended"] is None and is_alive(writer):
        os.kill(writer["pid"], signal.SIGTERM)  # it would try for a minute
        while is_alive(writer) and time.monotonic() < until:
            time.sleep(0.1)
    follower = Follower(run, "trainer", _OFFLINE)
    follower.start()
    follower.close(_LONGEST_FOLLOWER_SECONDS)


def judge(place: Place, before: cursor.Position, undisturbed: Place) -> Verdict:
    """Nothing was disturbed, nothing is missing.

    Args:
        place: of the run.
        before: what W&B had been told when the training had ended.
        undisturbed: the run that it must be equal to.
    """
    from longtake.tracking.wandb import run_id_of
    from longtake.tracking.wandb_file import rows_from

    verdict, run = Verdict(_NAME), place.run
    steps = [row["step"] for row in run.metrics()]
    longest = max(row["step_seconds"] for row in run.metrics())
    verdict.must(longest < _LONGEST_STEP_SECONDS, f"a step took {longest:.1f} s")
    verdict.must(_board(run) == steps, "TensorBoard has not every step once")
    verdict.must(before.rows == 0, f"W&B was told {before.rows} rows though nobody answers")
    rows = rows_from(0, run.path / "wandb", run_id_of(run))
    told = sorted(row["train/step"] for row in rows if "train/step" in row)
    verdict.must(told == steps, "W&B was not told later every step once")
    everything = identities_of(place.catalog())
    verdict.must_be_exact(run, everything, everything)
    verdict.must_be_equal(run, undisturbed.run)
    return verdict


def _board(run: RunDirectory) -> list[int]:
    """Steps of which TensorBoard has a row."""
    files = event_files(run.tensorboard_path)
    events = (event for path in files for event in events_in(path))
    return [event.step for event in events if event.summary.value]


FAULT = Fault(
    _NAME,
    does="Lets W&B be unreachable for as long as a run is trained.",
    must=(
        "No step waits for it; the run is the same to the bit. TensorBoard has every row, and so "
        "has W&B once it can be written to."
    ),
    drill=drill,
)

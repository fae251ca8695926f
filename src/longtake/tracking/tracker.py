"""The protocol of experiment trackers, and the table of all; it imports no tracker's library.

To add a tracker: write a module with a class of the protocol `Tracker`, and add a row to `TRACKERS`
and a key of the same name to `config.TrackingSection`.
"""

import json
import sys
import time
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Protocol

from longtake import errors, fsio
from longtake.config import TrackingSection
from longtake.run_dir import RunDirectory


class TrackerRow(NamedTuple):
    """A tracker that recipes can name, as a row of `TRACKERS`."""

    class_name: str  # class in longtake.tracking.<key>; arguments: run, `tracking` section
    title: str
    package: str | None  # package that it imports; None: none
    requirement: str = ""  # requirement for pip


TRACKERS: Final = {
    "tensorboard": TrackerRow("TensorBoard", "TensorBoard", "tensorboard", "tensorboard"),
    "wandb": TrackerRow("Wandb", "W&B", "wandb", "longtake[wandb]"),
}
"""All experiment trackers by their keys in the recipe's `tracking`; false, "off" or unset disables
one."""


class MediaFile(NamedTuple):
    """A picture (.png) or video (.mp4) that is sent to a tracker."""

    path: Path
    caption: str  # may be empty


@dataclass(frozen=True)
class TrackedRecord:
    """A record for trackers: a line of metrics.jsonl, an event or an evaluation.

    `scalars` has the finite numbers, with names such as `train/loss` and `train/grad_norm/blocks`.
    """

    kind: Literal["train", "events", "eval"]
    step: int
    time: float
    identity: dict[str, Any]
    scalars: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    media: dict[str, MediaFile] = field(default_factory=dict)


class Tracker(Protocol):
    """Protocol of an experiment tracker (TensorBoard, W&B), used by one thread.

    Every method may raise any error of the tracker's library. Every record has a number, which
    rises strictly over all openings by all processes.
    """

    def open(self, first: int) -> int:
        """Open the tracker, to write records from number `first` on.

        A process that was killed may have written some of them, and `write` gets these again. A
        tracker that counts its records returns the number after the last; another one returns
        `first`, and its `write` must recognise records that exist.

        Returns:
            The number of the next record, at least `first`.
        """

    def write(self, number: int, record: TrackedRecord) -> bool:
        """Write a run's record; returns False if the tracker has it, so its number stays free."""

    def flush(self) -> int:
        """Send the written records to the tracker's server or files.

        Returns:
            The number below which all records arrive even if this process is killed now.
        """

    def close(self) -> int:
        """Flush and close the tracker, which may be opened again; return the result of `flush`."""


def wanted_trackers(section: TrackingSection) -> list[str]:
    return [key for key in TRACKERS if getattr(section, key) not in (None, False, "off")]


def make_trackers(run: RunDirectory, section: TrackingSection) -> dict[str, Tracker]:
    """Create the trackers that a recipe enables, by key; only their modules are imported."""
    found = {}
    for key in wanted_trackers(section):
        module = import_module(f"longtake.tracking.{key}")
        found[key] = getattr(module, TRACKERS[key].class_name)(run, section)
    return found


def refuse_missing_packages(section: TrackingSection) -> None:
    """Refuse a recipe that enables a tracker whose package is not installed.

    Raises:
        RecipeError: a package is not installed.
    """
    for key in wanted_trackers(section):
        row, value = TRACKERS[key], getattr(section, key)
        # `find_spec` imports nothing: a tracker's library takes a second or more.
        if row.package is not None and find_spec(row.package) is None:
            off = "off" if isinstance(value, str) else "false"
            raise errors.RecipeError(
                f"tracking.{key} = {json.dumps(value)}, and {row.title} is not installed. Install "
                f"it with `pip install {row.requirement}`, or leave it with "
                f"--set tracking.{key}={off}."
            )


def log(text: str) -> None:
    sys.stderr.write(f"{fsio.now()} {text}\n")
    sys.stderr.flush()


def wait_for_unused_second(folder: Path, pattern: str) -> int:
    """Wait until no file name in the folder has the current second; return it (since 1970).

    Trackers name files by seconds and read them in that order.
    """
    while True:
        second = int(time.time())
        name = time.strftime(pattern, time.localtime(second)).replace("{second}", f"{second:010d}")
        if not any(folder.glob(name)):
            return second
        time.sleep(0.05)

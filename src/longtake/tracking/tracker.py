"""What a tracker is, and which there are; imports no tracker's library.

To add one: a module with a class of the protocol `Tracker`, its row in `TRACKERS`, and a key of the
same name in `config.TrackingSection`.
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
    """A row of `TRACKERS`."""

    class_name: str  # in longtake.tracking.<key>; made with the run and the recipe's section
    title: str
    package: str | None  # that it imports; None: none
    requirement: str = ""  # that pip installs


TRACKERS: Final = {
    "tensorboard": TrackerRow("TensorBoard", "TensorBoard", "tensorboard", "tensorboard"),
    "wandb": TrackerRow("Wandb", "W&B", "wandb", "longtake[wandb]"),
}
"""By their keys in the recipe's `tracking`, where false, "off" and no value switch one off."""


class MediaFile(NamedTuple):
    """A picture (.png) or a video (.mp4)."""

    path: Path
    caption: str  # may be empty


@dataclass(frozen=True)
class TrackedRecord:
    """A line of metrics.jsonl, an event or an evaluation, as trackers are sent it.

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
    """A tracker. One thread uses it. All of it may raise whatever its library raises.

    Every record has a number, which rises strictly over all openings, whichever process writes.
    """

    def open(self, first: int) -> int:
        """Begin to write.

        A process that was killed may have written records from `first` on, and `write` gets them
        again: a tracker that counts what it has written returns the number after the last; one
        that does not returns `first`, and its `write` recognises what is there.

        Returns:
            The number of the next record, at least `first`.
        """

    def write(self, number: int, record: TrackedRecord) -> bool:
        """Write a record; False if it was there already, and the number is still free."""

    def flush(self) -> int:
        """Send what was written.

        Returns:
            The number below which all records arrive, whatever becomes of this process.
        """

    def close(self) -> int:
        """Flush, and end; returns what `flush` does. It may be opened again."""


def wanted_trackers(section: TrackingSection) -> list[str]:
    return [key for key in TRACKERS if getattr(section, key) not in (None, False, "off")]


def make_trackers(run: RunDirectory, section: TrackingSection) -> dict[str, Tracker]:
    """The trackers that a recipe wants, by their keys; only their modules are imported."""
    found = {}
    for key in wanted_trackers(section):
        module = import_module(f"longtake.tracking.{key}")
        found[key] = getattr(module, TRACKERS[key].class_name)(run, section)
    return found


def refuse_missing_packages(section: TrackingSection) -> None:
    """Refuse a recipe that wants a tracker whose package is not installed.

    Raises:
        RecipeError: one is not.
    """
    for key in wanted_trackers(section):
        row, value = TRACKERS[key], getattr(section, key)
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
    """Wait until no file's name has the current second; returns it, since 1970.

    Trackers name files by seconds, and read them in that order.
    """
    while True:
        second = int(time.time())
        name = time.strftime(pattern, time.localtime(second)).replace("{second}", f"{second:010d}")
        if not any(folder.glob(name)):
            return second
        time.sleep(0.05)

"""W&B: one run, written by one process at a time, each in a segment (a `.wandb` file) of its own.

W&B drops a row whose number is lower than the one before, merges rows of the same number, and
hands rows to another process, which may be killed: what has arrived is read from its file.
"""

import netrc
import os
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from longtake.config import TrackingSection
from longtake.fsio import read_json
from longtake.run_dir import RunDirectory
from longtake.tracking.tracker import TrackedRecord, log, wait_for_unused_second

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
_ANSWER_SECONDS = 5.0
_CLOUD_URL = "https://api.wandb.ai"
_KEY_VARIABLES = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


class Wandb:
    """Writes a run's rows to W&B, or to the run's folder `wandb` for `wandb sync`."""

    def __init__(self, run: RunDirectory, section: TrackingSection) -> None:
        self._run, self._section = run, section
        self._segment: _Segment | None = None
        self._already: set[tuple[Any, ...]] = set()
        self._has_failed = False

    def open(self, first: int) -> int:
        """Begin a segment; see `Tracker`."""
        if self._section.wandb == "online":
            if reason := missing_key(self._section):
                raise ConnectionError(reason)
            _require_answer(base_url())
        import wandb  # a second, and only where it is wanted

        from longtake.tracking.wandb_file import WandbFile, rows_from

        if self._has_failed:
            wandb.teardown()  # its other process may be gone, or hang
        self._has_failed = True
        run_id = run_id_of(self._run)
        rows = rows_from(first, self._run.path / "wandb", run_id)  # of a writer that was killed
        self._already = {_identity(row) for row in rows}
        first = max((row["_step"] + 1 for row in rows), default=first)
        wandb_run = self._begin(run_id)
        first = max(first, wandb_run.step if wandb_run.resumed else 0)
        self._segment = _Segment(wandb_run, WandbFile(Path(wandb_run.settings.sync_file)), first)
        self._has_failed = False
        return first

    def write(self, number: int, record: TrackedRecord) -> bool:
        """See `Tracker`; a record is a row."""
        assert self._segment is not None
        if _identity(record.identity) in self._already:
            return False
        row = {**record.identity, f"{record.kind}/time": record.time}
        row |= {**record.scalars, **record.texts, **_media(record)}
        self._segment.run.log(row, step=number, commit=True)
        return True

    def flush(self) -> int:
        assert self._segment is not None
        return self._segment.arrived()

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
            log(f"wandb: not all has arrived; to send it: wandb sync --include-online {folder}")
            return segment.arrived()
        self._has_failed = False
        return segment.arrived()

    def _begin(self, run_id: str) -> Any:
        import wandb

        folder = self._run.path / "wandb"
        wait_for_unused_second(folder, f"*run-%Y%m%d_%H%M%S-{run_id}")
        before = set(folder.glob(f"*run-*-{run_id}"))
        try:
            run = wandb.init(
                id=run_id,
                project=self._section.project,
                name=os.environ.get("WANDB_NAME") or self._run.path.resolve().name,
                dir=str(self._run.path.resolve()),
                resume="allow",
                settings=_settings(self._section),
            )
        except Exception:  # there may be one every 2 minutes: nothing is left of it
            for path in set(folder.glob(f"*run-*-{run_id}")) - before:
                shutil.rmtree(path, ignore_errors=True)
            raise
        for names, axis in _AXES.items():
            run.define_metric(axis)
            run.define_metric(names, step_metric=axis)
        return run


@dataclass
class _Segment:
    """A `.wandb` file that is being written."""

    run: Any
    file: Any
    next: int

    def arrived(self) -> int:
        for row in self.file.new_rows():
            self.next = row["_step"] + 1
        return self.next


def run_id_of(run: RunDirectory) -> str:
    """The run's id as W&B allows it, which is the same wherever it is written from.

    Raises:
        ValueError: the run has none.
    """
    found = read_json(run.record_path).get("id")
    if not found:
        raise ValueError(f"{run.record_path} has no id.")
    return re.sub(r"[^A-Za-z0-9_-]+", "-", str(found))[-64:]


def missing_key(section: TrackingSection) -> str | None:
    """What to say where a recipe wants W&B online and there is no key for it; None: there is."""
    if section.wandb != "online" or _has_key():
        return None
    return (
        f'tracking.wandb = "online", and there is no key for {base_url()} (neither WANDB_API_KEY '
        "nor a line of netrc; `wandb login` writes one), so nothing is sent yet"
    )


def base_url() -> str:
    return os.environ.get("WANDB_BASE_URL", _CLOUD_URL).rstrip("/")


def _has_key() -> bool:
    if any(os.environ.get(name) for name in _KEY_VARIABLES):
        return True
    home = Path.home()
    for path in filter(None, [os.environ.get("NETRC"), home / ".netrc", home / "_netrc"]):
        with suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(str(path)).authenticators(urlsplit(base_url()).hostname or ""):
                return True
    return False


def _require_answer(url: str) -> None:
    """Return if a server answers, whatever it says; W&B's own library would wait for minutes."""
    try:
        urllib.request.urlopen(url, timeout=_ANSWER_SECONDS).close()  # noqa: S310 - the user's own
    except urllib.error.HTTPError:
        return
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConnectionError(f"{url} cannot be reached: {reason}") from error


def _settings(section: TrackingSection) -> Any:
    """W&B touches nothing else in the process: no console, code, git or statistics; no prints."""
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


def _media(record: TrackedRecord) -> dict[str, Any]:
    import wandb

    return {
        name: wandb.Image(str(path), caption=caption or None)
        if path.suffix == ".png"
        else wandb.Video(str(path), caption=caption, format="mp4")
        for name, (path, caption) in record.media.items()
    }


def _identity(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in _IDENTITY)

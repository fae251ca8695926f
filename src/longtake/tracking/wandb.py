"""W&B: one W&B run, written by one process at a time, each with its own `.wandb` file (segment).

W&B drops rows whose number is lower than the last one's, and merges rows with the same number. It
passes rows to another process, which may be killed, so the rows that have arrived are read from its
file.
"""

import json
import netrc
import os
import re
import shutil
import struct
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
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
_BLOCK = 32 * 1024
_FILE_HEADER = 7
_CHUNK_HEADER = struct.Struct("<IHB")
_FULL, _FIRST, _LAST = 1, 2, 4


class Wandb:
    """Tracker for W&B: sends rows online, or writes them to the folder `wandb` for `wandb sync`."""

    def __init__(self, run: RunDirectory, section: TrackingSection) -> None:
        self._run, self._section = run, section
        self._segment: _Segment | None = None
        self._already: set[tuple[Any, ...]] = set()
        self._has_failed = False

    def open(self, first: int) -> int:
        """Begin a segment (a `.wandb` file) of the W&B run; see `Tracker.open`."""
        if self._section.wandb == "online":
            if reason := missing_key(self._section):
                raise ConnectionError(reason)
            _require_answer(base_url())
        import wandb  # takes a second, so only if W&B is used

        if self._has_failed:
            wandb.teardown()  # W&B's other process may be gone, or hang
        # Set until all below has succeeded, as an error leaves W&B's process in an unknown state.
        self._has_failed = True
        run_id = run_id_of(self._run)
        rows = rows_from(first, self._run.path / "wandb", run_id)  # from a writer that was killed
        self._already = {_identity(row) for row in rows}
        first = max((row["_step"] + 1 for row in rows), default=first)
        wandb_run = self._begin(run_id)
        # The server may know rows of a folder that was removed here, and drops lower numbers.
        first = max(first, wandb_run.step if wandb_run.resumed else 0)
        self._segment = _Segment(wandb_run, WandbFile(Path(wandb_run.settings.sync_file)), first)
        self._has_failed = False
        return first

    def write(self, number: int, record: TrackedRecord) -> bool:
        """Write a run's record as a row of W&B; see `Tracker.write`."""
        import wandb

        assert self._segment is not None
        if _identity(record.identity) in self._already:
            return False
        row = {**record.identity, f"{record.kind}/time": record.time}
        row |= {**record.scalars, **record.texts}
        for name, (path, caption) in record.media.items():
            if path.suffix == ".png":
                row[name] = wandb.Image(str(path), caption=caption or None)
            else:
                row[name] = wandb.Video(str(path), caption=caption, format="mp4")
        self._segment.run.log(row, step=number, commit=True)
        return True

    def flush(self) -> int:
        assert self._segment is not None
        return self._segment.arrived()

    def close(self) -> int:
        """End the segment (the `.wandb` file) of the W&B run; see `Tracker.close`."""
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
        # W&B names a segment's folder by the second: two in one second would share a file.
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
        except Exception:  # retries would leave a folder every 2 minutes: remove it
            for path in set(folder.glob(f"*run-*-{run_id}")) - before:
                shutil.rmtree(path, ignore_errors=True)
            raise
        # W&B's default axis is its own row number, which counts evaluations and events, too.
        for names, axis in _AXES.items():
            run.define_metric(axis)
            run.define_metric(names, step_metric=axis)
        return run


@dataclass
class _Segment:
    """The `.wandb` file that W&B writes now, and the number of the row that comes next in it."""

    run: Any
    file: Any
    next: int

    def arrived(self) -> int:
        for row in self.file.new_rows():
            self.next = row["_step"] + 1
        return self.next


def run_id_of(run: RunDirectory) -> str:
    """Return the run's id for W&B, in its alphabet; it is the same for all writing processes.

    Raises:
        ValueError: the run has no id.
    """
    found = read_json(run.record_path).get("id")
    if not found:
        raise ValueError(f"{run.record_path} has no id.")
    # The end is kept, as it is the random part.
    return re.sub(r"[^A-Za-z0-9_-]+", "-", str(found))[-64:]


def missing_key(section: TrackingSection) -> str | None:
    """Return a message if W&B is used online without an API key; None: there is a key."""
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
    """Check that W&B's server answers; W&B's own library would wait for minutes.

    Raises:
        ConnectionError: there is no answer.
    """
    # Any HTTP status is an answer.
    try:
        urllib.request.urlopen(url, timeout=_ANSWER_SECONDS).close()  # noqa: S310 - the user's own
    except urllib.error.HTTPError:
        return
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConnectionError(f"{url} cannot be reached: {reason}") from error


def _settings(section: TrackingSection) -> Any:
    """Return W&B's settings to record only rows: no console, code, git or statistics."""
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


def _identity(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in _IDENTITY)


# --- W&B's `.wandb` files, also while they are being written ----------------------------------


class WandbFile:
    """Reader of a `.wandb` file that grows: each reading yields the rows since the last one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = _FILE_HEADER

    def new_rows(self) -> Iterator[dict[str, Any]]:
        for record in self._new_records():
            if record.WhichOneof("record_type") == "history":
                row: dict[str, Any] = {}
                for item in record.history.item:
                    *above, name = item.nested_key or [item.key]
                    place = row
                    for key in above:  # nested keys become nested dictionaries
                        place = place.setdefault(key, {})
                    place[name] = json.loads(item.value_json)
                yield row

    def _new_records(self) -> Iterator[Any]:
        from wandb.proto import wandb_internal_pb2

        # The module's classes are created at run time, which type checkers do not see.
        record: Any = wandb_internal_pb2.Record  # type: ignore[attr-defined]
        # The offset moves only after a complete record: one that is half written is read again.
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            parts: list[bytes] = []
            for kind, data, end in _chunks(file, self._offset):
                parts = [data] if kind in (_FULL, _FIRST) else [*parts, data]
                if kind in (_FULL, _LAST):
                    self._offset = end
                    yield record.FromString(b"".join(parts))


def rows_from(number: int, folder: Path, run_id: str) -> list[dict[str, Any]]:
    """Read the rows of a W&B run with `number` and above, from the `.wandb` files in a folder."""
    files = list(folder.glob(f"*run-*-{run_id}/run-{run_id}.wandb"))
    found: list[dict[str, Any]] = []
    for path in sorted(files, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        rows = list(WandbFile(path).new_rows())
        found += [row for row in rows if row["_step"] >= number]
        if any(row["_step"] < number for row in rows):
            break  # older files have only lower numbers
    return found


def _chunks(file: Any, offset: int) -> Iterator[tuple[int, bytes, int]]:
    """Yield kind, data and end offset of complete chunks of a `.wandb` file, from an offset on.

    The file is framed like LevelDB's logs (leveldb/doc/log_format.md) after a header of 7 bytes:
    blocks of 32 KiB with chunks of checksum, length, kind and data. A record, a protobuf, consists
    of one chunk or several.
    """
    while True:
        left = _BLOCK - offset % _BLOCK
        # The end of a block that is too short for a chunk's header is padding.
        if left < _CHUNK_HEADER.size:
            offset += left
            continue
        file.seek(offset)
        header = file.read(_CHUNK_HEADER.size)
        if len(header) < _CHUNK_HEADER.size:
            return
        _, length, kind = _CHUNK_HEADER.unpack(header)
        if kind == 0:  # the rest of a block that is not used, or not yet
            return
        data = file.read(length)
        if len(data) < length:
            return
        offset += _CHUNK_HEADER.size + length
        yield kind, data, offset

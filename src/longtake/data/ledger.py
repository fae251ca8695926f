"""The ledger: which clips each optimizer step consumed, by identity.

    ledger/launch_0000/launch.json       start step, world size, streams, the course's history, and
                                         the batches that are skipped
    ledger/launch_0000/rank_0000.bin     15 bytes a sample, appended after each update

Every rank writes what it really trained on, from the batch in its hands and not from the plan, so
that the two can be compared. A record is never changed: the records of a launch from the step on
at which a later launch began were abandoned, and count no more. Steps are numbers of batches here:
those of updates are others where a run went back and skipped some (a launch of its own, too).
"""

import errno
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from longtake.config import DataSection
from longtake.data.skipped import Skipped, Span
from longtake.errors import DataError
from longtake.records import write_json

if TYPE_CHECKING:
    from longtake.data.batch import Batch  # which imports torch; an audit needs none

IDENTITY_BYTES = 7
_RECORD = np.dtype(
    [
        ("identity", f"V{IDENTITY_BYTES}"),  # the first bytes of it
        ("step", "<u4"),
        ("stream", "u1"),  # an index into the launch's streams; the highest bit: rejected
        ("epoch", "V3"),  # little-endian
    ]
)
_REJECTED = 0x80
_NOTHING = 0xFF  # instead of a stream: this rank had no sample in the step
_MOST_STREAMS = 0x7F


@dataclass(frozen=True)
class Consumed:
    """What a run consumed, abandoned steps left out. All arrays: [N], one entry a sample."""

    identity: NDArray[np.uint64]
    """The first bytes of it, as `short_identity` gives them."""
    step: NDArray[np.int64]
    stream: NDArray[np.int64]
    """An index into `streams`."""
    epoch: NDArray[np.int64]
    is_rejected: NDArray[np.bool_]
    """Planned, but it could not be decoded; not trained on."""
    streams: tuple[str, ...]
    """`stage/source` of each stream."""
    end_step: int
    """The step after the last one that all ranks have trained."""
    num_abandoned: int
    """Samples of steps that were trained and then given up."""
    history: Sequence[dict[str, Any]]
    """Of the course of the newest launch."""
    skipped: tuple[Span, ...] = ()
    """[first, end) of the steps that were left out on purpose, as the newest launch knew them."""


class Ledger:
    """Appends what this rank consumed.

    Args:
        path: of the file.
        streams: of the launch.
        counts: whether this rank speaks of its clips; of ranks that share the tokens of the same
            clips one does, and the others note only that the step is done.
    """

    def __init__(self, path: Path, streams: Sequence[str], *, counts: bool = True) -> None:
        self._path, self._counts = path, counts
        with _writing(path):
            self._file = path.open("ab", buffering=0)
        self._streams = {name: index for index, name in enumerate(streams)}

    def record(self, batch: "Batch") -> None:
        """Note one step's samples, after its update.

        Raises:
            DataError: they cannot be written.
        """
        stream = self._streams[f"{batch.stage}/{batch.source}"]
        trained = [
            (identity, epoch)
            for identity, epoch, weight in zip(
                batch.identities, batch.epochs, batch.weights.tolist(), strict=True
            )
            if weight
        ]
        lines = [_packed(*sample, batch.step, stream) for sample in trained]
        lines += [_packed(*sample, batch.step, stream | _REJECTED) for sample in batch.rejected]
        nothing = _packed("00" * IDENTITY_BYTES, 0, batch.step, _NOTHING)
        whole = (
            b"".join(lines) if self._counts else b""
        ) or nothing  # so that the step is seen to be done
        with _writing(self._path):
            if self._file.write(whole) != len(whole):  # half a record would spoil all after it
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def flush(self) -> None:
        """Return when all records are on disk.

        Raises:
            DataError: they cannot be written.
        """
        with _writing(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """End the file."""
        self._file.close()


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"The ledger {path} cannot be written: {error.strerror or error}. Make room or make it "
            "writable, and start the same command again: it goes on from the newest checkpoint."
        ) from error


def _packed(identity: str, epoch: int, step: int, stream: int) -> bytes:
    return (
        bytes.fromhex(identity)[:IDENTITY_BYTES]
        + step.to_bytes(4, "little")
        + stream.to_bytes(1, "little")
        + epoch.to_bytes(3, "little")
    )


@contextmanager
def keep_ledger(
    folder: Path, rank: int, streams: Sequence[str], *, counts: bool = True
) -> Iterator[Ledger]:
    """The ledger of this rank in a launch's folder, which `begin_launch` made; see `Ledger`."""
    ledger = Ledger(folder / f"rank_{rank:04d}.bin", streams, counts=counts)
    try:
        yield ledger
    finally:
        ledger.close()


def stream_names(data: DataSection) -> list[str]:
    """`stage/source` of all pairs of the recipe's stages and catalogs."""
    return [f"{stage.name}/{source}" for stage in data.curriculum() for source in data.sources()]


def begin_launch(
    ledger: Path,
    start_step: int,
    world_size: int,
    streams: Sequence[str],
    history: Sequence[dict[str, Any]],
    skipped: Sequence[Span] = (),
) -> Path:
    """Make the folder of a new launch (rank 0), or of one that went back; returns it.

    Args:
        ledger: the folder of all launches.
        start_step: number of the first batch, `Loader.step`.
        world_size: ranks that will keep a ledger.
        streams: `stream_names` of the recipe.
        history: of the loader's course.
        skipped: `Loader.skipped`.

    Raises:
        DataError: there are more streams than a record can tell apart, or it cannot be written.
    """
    if len(streams) > _MOST_STREAMS:
        raise DataError(
            f"The recipe has {len(streams)} pairs of stage and catalog; the ledger can tell apart "
            f"{_MOST_STREAMS}. Use fewer stages or catalogs."
        )
    number = len(_launch_folders(ledger))
    folder = ledger / f"launch_{number:04d}"
    aside = ledger / f".launch_{number:04d}.partial"  # a launch has its facts from the first
    facts = {
        # Before what is skipped: an earlier launch may have trained that, and gave it up.
        "start_step": Skipped.of(skipped).before(start_step),
        "world_size": world_size,
        "streams": list(streams),
        "history": list(history),
        "skipped": [list(span) for span in skipped],
    }
    with _writing(folder):
        aside.mkdir(parents=True, exist_ok=True)
        write_json(aside / "launch.json", facts)
        aside.rename(folder)
    return folder


def read_ledger(ledger: Path) -> Consumed:
    """All that a run consumed and did not abandon.

    Raises:
        DataError: there is no ledger, or it is damaged.
    """
    folders = _launch_folders(ledger)
    if not folders:
        raise DataError(
            f"{ledger.parent} has no ledger: it is not the directory of a run that was trained."
        )
    launches = [_launch(folder) for folder in folders]
    streams = tuple(dict.fromkeys(name for launch in launches for name in launch["streams"]))
    parts, num_abandoned, end_step = [], 0, 0
    for number, (folder, launch) in enumerate(zip(folders, launches, strict=True)):
        later = [other["start_step"] for other in launches[number + 1 :]]
        records, whole_until = _records(folder, launch)
        until = min([whole_until, *later])
        counts = records["step"] < until
        num_abandoned += int(np.count_nonzero(~counts))
        end_step = until
        parts.append(_unpacked(records[counts], launch["streams"], streams))
    identity, step, stream, epoch, is_rejected = map(np.concatenate, zip(*parts, strict=True))
    return Consumed(
        identity=identity,
        step=step,
        stream=stream,
        epoch=epoch,
        is_rejected=is_rejected,
        streams=streams,
        end_step=end_step,
        num_abandoned=num_abandoned,
        history=launches[-1]["history"],
        skipped=Skipped.of(launches[-1].get("skipped", ())).spans,  # none in older ledgers
    )


def short_identity(identities: NDArray[np.void] | NDArray[np.uint8]) -> NDArray[np.uint64]:
    """[N] the first bytes of identities (at least so many bytes each), as numbers."""
    if not len(identities):
        return np.empty(0, np.uint64)  # which cannot be reshaped
    octets = np.ascontiguousarray(identities).view(np.uint8).reshape(len(identities), -1)
    padded = np.zeros((len(identities), 8), np.uint8)
    padded[:, :IDENTITY_BYTES] = octets[:, :IDENTITY_BYTES]
    return padded.view("<u8")[:, 0].astype(np.uint64)


def _launch_folders(ledger: Path) -> list[Path]:
    return sorted(ledger.glob("launch_*"))


def _launch(folder: Path) -> dict[str, Any]:
    path = folder / "launch.json"
    try:
        launch: dict[str, Any] = json.loads(path.read_bytes())
        for key in ("start_step", "world_size", "streams", "history"):
            launch[key]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(
            f"{path} cannot be read: {error}. Without it the ledger proves nothing; restore it."
        ) from error
    return launch


def _records(folder: Path, launch: dict[str, Any]) -> tuple[NDArray[np.void], int]:
    """All ranks' records of a launch, and the step up to which every rank has some.

    A process that was killed may leave half a record, or a step that not all ranks have done.
    """
    by_rank = []
    for rank in range(launch["world_size"]):
        path = folder / f"rank_{rank:04d}.bin"
        data = path.read_bytes() if path.exists() else b""
        by_rank.append(
            np.frombuffer(data[: len(data) // _RECORD.itemsize * _RECORD.itemsize], _RECORD)
        )
    ends = [int(records["step"].max()) + 1 if len(records) else None for records in by_rank]
    whole_until = min(launch["start_step"] if end is None else end for end in ends)
    records = np.concatenate(by_rank)
    records = records[records["stream"] != _NOTHING]
    if ((records["stream"] & ~np.uint8(_REJECTED)) >= len(launch["streams"])).any():
        raise DataError(
            f"{folder}/rank_….bin is damaged: a record names a stream that launch.json does not "
            "list. Restore the file; without it the ledger proves nothing."
        )
    return records, whole_until


def _unpacked(
    records: NDArray[np.void], names: Sequence[str], streams: Sequence[str]
) -> tuple[NDArray[Any], ...]:
    number = np.array([streams.index(name) for name in names], np.int64)
    epoch = np.zeros((len(records), 4), np.uint8)
    epoch[:, :3] = np.ascontiguousarray(records["epoch"]).view(np.uint8).reshape(-1, 3)
    return (
        short_identity(records["identity"]),
        records["step"].astype(np.int64),
        number[records["stream"] & ~np.uint8(_REJECTED)],
        epoch.view("<u4")[:, 0].astype(np.int64),
        (records["stream"] & _REJECTED) > 0,
    )

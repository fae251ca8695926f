"""The ledger of a run: a record of the clips that each optimizer step consumed, by identity.

launch_0000/launch.json     start step, world size, streams, plans, skipped batches
launch_0000/rank_0000.bin   16 bytes per sample, appended after each update
"""

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import TypedDict

from longtake import fsio
from longtake.config import DataSection
from longtake.data.plan_history import History, PlanRecord, SkippedRanges
from longtake.errors import DataError, RecordError

IDENTITY_BYTES = 7
# Every rank writes what it really trained, from its batch and not from the plan. Records never
# change: a launch's records from the first step of a later launch on count as abandoned. Steps are
# numbers of batches, which differ from those of updates after a rollback.
_RECORD = np.dtype(
    [
        ("identity", f"V{IDENTITY_BYTES}"),  # first bytes of the identity
        ("step", "<u4"),
        ("stream", "u1"),  # index into the launch's streams; highest bit: rejected
        ("epoch", "V3"),  # little-endian
        ("checksum", "u1"),  # CRC-8 of the bytes before it
    ]
)
_REJECTED = 0x80
_MOST_BYTES = 2**36
_NOTHING = 0xFF  # in place of a stream: this rank had no sample in the step
_MOST_STREAMS = 0x7F
FORMAT: Final = 1


def _crc_table() -> bytes:
    """Return the table of CRC-8 with x^8 + x^2 + x + 1, which detects bursts of up to 8 bits."""
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte << 1) ^ (0x107 if byte & 0x80 else 0)
        table.append(byte)
    return bytes(table)


_CRC = _crc_table()
_CRC_START = 0xFF  # makes zeros, which a power cut may leave, an invalid record


class _Launch(TypedDict):
    """Content of launch.json, the ledger's description of one launch."""

    format: fsio.format_number(FORMAT)  # type: ignore[valid-type]
    start_step: fsio.Count
    world_size: Annotated[int, Field(ge=1, le=2**24)]
    streams: Annotated[list[str], Field(max_length=_MOST_STREAMS)]
    history: History
    skipped: list[fsio.Span]
    checksum: str  # hash of all other keys by `with_checksum`


@dataclass(frozen=True)
class Consumed:
    """Samples that a run consumed, as arrays with one entry per sample.

    Samples of steps that a resume or a rollback abandoned are not among them.
    """

    identity: NDArray[np.uint64]  # first bytes of the identity, as `short_identity` returns them
    step: NDArray[np.int64]
    stream: NDArray[np.int64]  # index into `streams`
    epoch: NDArray[np.int64]
    is_rejected: NDArray[np.bool_]  # planned but not decodable, so not trained on
    streams: tuple[str, ...]  # `stage/source` of each stream
    end_step: int  # step after the last one that all ranks have trained
    num_abandoned: int  # number of samples of steps that were trained and then given up
    history: Sequence[PlanRecord]  # plans as the newest launch recorded them
    # Half-open ranges of the steps that the newest launch skipped on purpose.
    skipped: tuple[tuple[int, int], ...] = ()


class StepSamples(NamedTuple):
    """Samples that one rank trained or rejected in one step, each as (clip's identity, epoch)."""

    step: int
    stream: str  # `stage/source`
    trained: Sequence[tuple[str, int]]
    rejected: Sequence[tuple[str, int]]  # planned, but not decodable


class Ledger:
    """Appends the samples that this rank trained to its launch's folder (`begin_launch`).

    Ranks of one context-parallel group have the same clips: `counts` is True for one of them, and
    the others record only that a step is done.
    """

    def __init__(
        self, folder: Path, rank: int, streams: Sequence[str], *, counts: bool = True
    ) -> None:
        self._path, self._counts = folder / f"rank_{rank:04d}.bin", counts
        with _writing(self._path):
            # Unbuffered: what `record` has written survives a killed process.
            self._file = open(self._path, "ab", buffering=0, opener=fsio.no_follow)  # noqa: SIM115 - closed by `__exit__`
        self._streams = {name: index for index, name in enumerate(streams)}

    def record(self, samples: StepSamples) -> None:
        """Record the samples of one training step; called after its update.

        Raises:
            DataError: the file cannot be written.
        """
        step, stream = samples.step, self._streams[samples.stream]
        records = [_packed(*sample, step, stream) for sample in samples.trained]
        records += [_packed(*sample, step, stream | _REJECTED) for sample in samples.rejected]
        if not records or not self._counts:  # shows that the step is done
            records = [_packed("00" * IDENTITY_BYTES, 0, step, _NOTHING)]
        data = b"".join(records)
        with _writing(self._path):
            if self._file.write(data) != len(data):  # half a record would spoil all later ones
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def flush(self) -> None:
        """Wait until all records of samples are on disk.

        Raises:
            DataError: the file cannot be written.
        """
        with _writing(self._path):
            os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"The ledger {path} cannot be written: {error.strerror or error}. Make room or make it "
            "writable, and run the same command again: it resumes from the newest checkpoint."
        ) from error


def _packed(identity: str, epoch: int, step: int, stream: int) -> bytes:
    record = (
        bytes.fromhex(identity)[:IDENTITY_BYTES]
        + step.to_bytes(4, "little")
        + stream.to_bytes(1, "little")
        + epoch.to_bytes(3, "little")
    )
    return with_crc(record)


def with_crc(record: bytes) -> bytes:
    """Return the record of one sample with its checksum appended."""
    checksum = _CRC_START
    for byte in record:
        checksum = _CRC[checksum ^ byte]
    return record + bytes([checksum])


def stream_names(data: DataSection) -> list[str]:
    """Return `stage/catalog` for each such pair of a recipe, as a ledger numbers them."""
    return [f"{stage.name}/{source}" for stage in data.curriculum() for source in data.sources()]


def begin_launch(
    ledger: Path,
    start_step: int,
    world_size: int,
    streams: Sequence[str],
    history: Sequence[PlanRecord],
    skipped: Sequence[tuple[int, int]] = (),
) -> Path:
    """Make the ledger folder of a new launch and return it; called on rank 0.

    A run that rolls back gets a new one, too.

    Args:
        ledger: the folder of all launches.
        start_step: number of the first batch, `Loader.step`.
        world_size: number of ranks that will write records.
        streams: `stream_names` of the recipe.
        history: `Loader.plan_history.history`.
        skipped: spans of `Loader.skipped`.

    Raises:
        DataError: there are more streams than a record can number, or the folder cannot be written.
    """
    if len(streams) > _MOST_STREAMS:
        raise DataError(
            f"The recipe has {len(streams)} pairs of stage and catalog; the ledger can number "
            f"{_MOST_STREAMS}. Use fewer stages or catalogs."
        )
    # The next free number, so that no launch ever writes into the folder of another.
    number = max((_number(folder) + 1 for folder in _launch_folders(ledger)), default=0)
    folder = ledger / f"launch_{number:04d}"
    facts: dict[str, Any] = {
        "format": FORMAT,
        # The skipped range counts too: an earlier launch may have trained those steps, which are
        # given up now.
        "start_step": SkippedRanges.of(skipped).first_skipped(start_step),
        "world_size": world_size,
        "streams": list(streams),
        "history": list(history),
        "skipped": [list(span) for span in skipped],
    }
    with _writing(folder), fsio.atomic_folder(folder) as partial:  # never without launch.json
        fsio.write_json(partial / "launch.json", with_checksum(facts))
    return folder


def read_ledger(ledger: Path) -> Consumed:
    """Read the samples that a run trained; without steps that a resume or rollback abandoned.

    Raises:
        DataError: there is no ledger, or it is damaged.
    """
    folders = _launch_folders(ledger)
    if not folders:
        raise DataError(
            f"{ledger.parent} has no ledger: it is not the directory of a run that was trained."
        )
    launches = _launches(folders)
    streams = tuple(dict.fromkeys(name for launch in launches for name in launch["streams"]))
    parts, num_abandoned, end_step = [], 0, 0
    for number, (folder, launch) in enumerate(zip(folders, launches, strict=True)):
        later = [other["start_step"] for other in launches[number + 1 :]]
        records, whole_until = _records(folder, launch)
        # Later launches repeat steps from their start on; the last step may lack some ranks.
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
        skipped=SkippedRanges.of(launches[-1]["skipped"]).spans,
    )


def short_identity(identities: NDArray[np.void] | NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return the first bytes of clips' identities as numbers [N]; each has at least 7 bytes."""
    if not len(identities):
        return np.empty(0, np.uint64)  # cannot be reshaped
    octets = np.ascontiguousarray(identities).view(np.uint8).reshape(len(identities), -1)
    # Padded to 8 bytes, so that identities can be compared as integers.
    padded = np.zeros((len(identities), 8), np.uint8)
    padded[:, :IDENTITY_BYTES] = octets[:, :IDENTITY_BYTES]
    return padded.view("<u8")[:, 0].astype(np.uint64)


def damage(ledger: Path) -> str | None:
    """Return the reason why a ledger is damaged or incomplete; None if it is whole."""
    try:
        _launches(_launch_folders(ledger))
    except DataError as error:
        return str(error)
    return None


def newest_history(ledger: Path) -> Sequence[PlanRecord]:
    """Return the run's data plans as the newest launch recorded them in the ledger.

    Raises:
        DataError: there is no ledger, or that launch's file is damaged.
    """
    folders = _launch_folders(ledger)
    if not folders:
        raise DataError(f"{ledger.parent} has no ledger.")
    return _launch(folders[-1])["history"]


def num_records(ledger: Path) -> int:
    """Return the number of records in a ledger, by the sizes of its files."""
    files = (path for folder in _launch_folders(ledger) for path in folder.glob("rank_*.bin"))
    return sum(path.stat().st_size for path in files) // _RECORD.itemsize


def _launches(folders: Sequence[Path]) -> list[_Launch]:
    """Return the content of each launch's launch.json; raise if an earlier launch is missing."""
    there = {_number(folder) for folder in folders}
    # The first number without a folder must come after all that exist.
    missing = [number for number in range(len(there) + 1) if number not in there]
    missing = missing if not there or missing[0] < max(there) else []
    if missing:
        raise DataError(
            f"The ledger lacks launch_{missing[0]:04d}. Without it the ledger does not say what "
            "was trained then: restore the folder."
        )
    launches = [_launch(folder) for folder in folders]
    if launches and launches[0]["start_step"] > 0:
        raise DataError(
            f"The ledger begins at batch {launches[0]['start_step']}. What was trained before it "
            "is not known: restore the folders of the earlier launches."
        )
    return launches


def _launch_folders(ledger: Path) -> list[Path]:
    return sorted((each for each in ledger.glob("launch_*") if _number(each) >= 0), key=_number)


def _number(folder: Path) -> int:
    number = folder.name.removeprefix("launch_")
    is_one = number.isdecimal() and folder.name == f"launch_{int(number[:9]):04d}"
    return int(number) if is_one else -1


def with_checksum(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a launch.json with a hash of all its other keys as `checksum`."""
    others = {name: value for name, value in facts.items() if name != "checksum"}
    text = json.dumps(others, sort_keys=True, separators=(",", ":"))
    return {**others, "checksum": hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}


def _launch(folder: Path) -> _Launch:
    path = folder / "launch.json"
    try:
        facts = fsio.require_record(path, dict[str, Any])
        launch = fsio.check_record(facts, _Launch, path)
        if facts != with_checksum(facts):
            raise RecordError(path, "its checksum differs, so it was changed after it was written")
    except RecordError as error:
        raise DataError(
            f"{error} Without it the ledger proves nothing: restore the file."
        ) from error
    return launch


def _records(folder: Path, launch: _Launch) -> tuple[NDArray[np.void], int]:
    """Read all ranks' records of a launch; return them with the step up to which all have some.

    A process that was killed may leave half a record, or a step that not all ranks have done.
    """
    numbers = [path.stem.removeprefix("rank_") for path in folder.glob("rank_*.bin")]
    ranks = {int(number) for number in numbers if number.isdecimal() and len(number) < 10}
    ours = sorted(rank for rank in ranks if rank < launch["world_size"])
    by_rank = [_records_of_rank(folder / f"rank_{rank:04d}.bin") for rank in ours]
    ends = [int(records["step"].max()) + 1 for records in by_rank if len(records)]
    whole_until = min(ends) if len(ends) == launch["world_size"] else launch["start_step"]
    records = np.concatenate([*by_rank, np.empty(0, _RECORD)])
    records = records[records["stream"] != _NOTHING]
    if ((records["stream"] & ~np.uint8(_REJECTED)) >= len(launch["streams"])).any():
        raise DataError(
            f"{folder}/rank_….bin is damaged: a record names a stream that launch.json does not "
            "list. Restore the file; without it the ledger proves nothing."
        )
    return records, whole_until


def _records_of_rank(path: Path) -> NDArray[np.void]:
    """Check and return one rank's records of samples, without half a record or zeros at the end."""
    try:
        data = fsio.read_regular(path, _MOST_BYTES)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    records = np.frombuffer(data[: len(data) // _RECORD.itemsize * _RECORD.itemsize], _RECORD)
    octets = records.view(np.uint8).reshape(-1, _RECORD.itemsize)
    # A power cut may leave zeros at the end of a file that was extended but not written.
    written = np.flatnonzero(octets.any(axis=1))
    octets = octets[: written[-1] + 1 if len(written) else 0]
    # The CRC runs over all records at once, one byte position at a time.
    table, checksum = np.frombuffer(_CRC, np.uint8), np.full(len(octets), _CRC_START, np.uint8)
    for place in range(_RECORD.itemsize - 1):
        checksum = table[checksum ^ octets[:, place]]
    damaged = np.flatnonzero(checksum != octets[:, -1])
    if len(damaged):
        more = f", and so do those of {len(damaged) - 1} others" * (len(damaged) > 1)
        raise DataError(
            f"{path} is damaged: the checksum of record {damaged[0]} (from byte "
            f"{damaged[0] * _RECORD.itemsize:,} on) differs{more}. What was trained then "
            "is not known: restore the file."
        )
    return records[: len(octets)]


def _unpacked(
    records: NDArray[np.void], names: Sequence[str], streams: Sequence[str]
) -> tuple[NDArray[Any], ...]:
    number = np.array([streams.index(name) for name in names], np.int64)
    # Three bytes of the record and a zero are a 32-bit integer.
    epoch = np.zeros((len(records), 4), np.uint8)
    epoch[:, :3] = np.ascontiguousarray(records["epoch"]).view(np.uint8).reshape(-1, 3)
    return (
        short_identity(records["identity"]),
        records["step"].astype(np.int64),
        number[records["stream"] & ~np.uint8(_REJECTED)],
        epoch.view("<u4")[:, 0].astype(np.int64),
        (records["stream"] & _REJECTED) > 0,
    )

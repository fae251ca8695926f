"""The files of checkpoints: the list COMMITTED, detection of damage, retention and deletion.

A checkpoint is a folder with `model/`, `ema/<profile>/`, `optimizer/` (torch's distributed
checkpoints), `trainer.json`, and COMMITTED, which is written last. This module imports no torch.
"""

import io
import os
import stat
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar

import xxhash
from pydantic import Field
from typing_extensions import TypedDict

from longtake import errors, evaluation_dir, fsio
from longtake.config import CheckpointSection, EvaluationSection
from longtake.run_dir import Parent, RunDirectory
from longtake.trust import refuse_foreign_code

FORMAT: Final = 2
BLOCK_BYTES: Final = 2**20
"""Bytes of a file per checksum; a reader of a part of a file verifies only the blocks that contain
it."""
STALE_SECONDS = 900.0
"""Age of an evaluation server's heartbeat, in seconds before the newest COMMITTED, from which the
server counts as dead."""
NOTHING_KNOWN: Final[Mapping[Path, str]] = MappingProxyType({})
_DIGITS = 16
"""Number of hexadecimal digits of a checksum in COMMITTED."""
_BUFFER_BYTES = 2**16
"""Bytes of the buffer that joins small writes: torch makes a dozen for each tensor."""
_DROP_BYTES = 2**23
"""Written bytes after which the kernel is asked to write them to disk and drop their pages. Pages
that are reused at once are cheaper than new ones: this saves a third of the CPU time of a save."""
_KEPT_BLOCKS = 4
"""Number of a file's blocks that a reader keeps: torch reads a tensor's end before its
beginning."""
LINK_REMEDY = (
    "mount or restore what the link points to, or delete the link, and start the same command again"
)
"""Advice in messages about a checkpoint that is a dangling symbolic link."""

_COMMITTED = "COMMITTED"
_MAX_COMMITTED_BYTES = 64 * 2**20
_CHECKSUM_THREADS = 4  # more threads do not read faster from one disk

_T = TypeVar("_T")


# --- COMMITTED and trainer.json ---------------------------------------------------------------


class FileEntry(TypedDict):
    bytes: fsio.Count
    xxh3_64: Annotated[str, Field(pattern="^([0-9a-f]{16})*$")]
    """Checksums of successive blocks of `BLOCK_BYTES`, in hexadecimal, joined."""


class CommittedRecord(TypedDict):
    format: fsio.format_number(FORMAT)  # type: ignore[valid-type]
    block_bytes: Literal[1048576]
    files: dict[fsio.InnerPath, FileEntry]


@fsio.with_other_fields
class Trainer(TypedDict):
    """Fields that the trainer.json of every checkpoint has."""

    global_step: fsio.Count


class SampledTrainer(Trainer):
    """Fields of a checkpoint's trainer.json that sampling reads."""

    precision: Literal["bf16", "fp32"]


def list_files(folder: Path) -> list[str]:
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(str(path) for path in paths if str(path) != _COMMITTED)


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    """Compute the sizes and checksums of a checkpoint's files, by name in its folder."""
    entries: dict[str, FileEntry] = {}
    for name in names:
        with fsio.open_regular(folder / name) as file:
            blocks = iter(lambda: file.read(BLOCK_BYTES), b"")
            digests = "".join(map(xxhash.xxh3_64_hexdigest, blocks))
            entries[name] = {"bytes": file.tell(), "xxh3_64": digests}
    return entries


def commit(folder: Path, entries: Mapping[str, FileEntry]) -> None:
    """Write COMMITTED, which makes a checkpoint complete, and wait until it is on disk."""
    fsio.write_json(
        folder / _COMMITTED,
        {"format": FORMAT, "block_bytes": BLOCK_BYTES, "files": dict(sorted(entries.items()))},
    )


def read_committed(folder: Path) -> dict[str, FileEntry]:
    """Read sizes and checksums of a checkpoint's files from its COMMITTED, by name.

    Raises:
        OSError: it cannot be read; FileNotFoundError: it does not exist.
        RecordError: it holds something else.
    """
    path = folder / _COMMITTED
    return fsio.parse_record(fsio.read_regular(path, _MAX_COMMITTED_BYTES), CommittedRecord, path)[
        "files"
    ]


def load_trainer(path: Path, kind: type[_T]) -> _T:
    """Read the trainer.json of a checkpoint as a type that declares the required fields.

    Raises:
        CheckpointError: the file is damaged, or lacks a field.
    """
    if (reason := find_damage(path, checksums=True, within="trainer.json")) is not None:
        raise DamagedCheckpointError(path, reason)
    try:
        return fsio.require_record(path / "trainer.json", kind)
    except errors.RecordError as error:
        raise errors.CheckpointError(f"{error} Use an earlier checkpoint.") from error


# --- Checksums --------------------------------------------------------------------------------


class DamagedFileError(errors.CheckpointError):
    """Raised for a checkpoint's file that is not as it was saved; the message tells how."""


class DamagedCheckpointError(errors.CheckpointError):
    """Raised for a checkpoint that cannot be used because one of its files is damaged."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} is damaged: {reason}. Use an earlier checkpoint.")
        self.path, self.reason = path, reason


class _HashedFile(io.FileIO):
    """A new file that is written from beginning to end, computing its checksums.

    The kernel is asked to write it to disk and drop it from the page cache: a checkpoint is seldom
    read soon, and its pages would displace the training's clips.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "wb")
        self._size, self._block = 0, xxhash.xxh3_64()
        self._digests: list[str] = []
        self._dropped = 0

    def write(self, data: Any, /) -> int:
        written = super().write(data)
        view = memoryview(data).cast("B")[:written]
        # One write may span several blocks.
        while view:
            part = view[: BLOCK_BYTES - self._size % BLOCK_BYTES]
            self._block.update(part)
            self._size += len(part)
            view = view[len(part) :]
            if self._size % BLOCK_BYTES == 0:
                self._digests.append(self._block.hexdigest())
                self._block.reset()
        if self._size - self._dropped >= _DROP_BYTES:
            # The call starts to write dirty pages to disk, and drops those that an earlier call
            # has written.
            os.posix_fadvise(self.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            self._dropped = self._size
        return written

    def entry(self) -> FileEntry:
        rest = [self._block.hexdigest()] if self._size % BLOCK_BYTES else []
        return {"bytes": self._size, "xxh3_64": "".join([*self._digests, *rest])}


class ChecksummedFile(io.BufferedWriter):
    """A buffered writer of a checkpoint's file; its checksums are known after it is closed."""

    def __init__(self, path: Path) -> None:
        self._file = _HashedFile(path)
        super().__init__(self._file, _BUFFER_BYTES)

    def fileno(self) -> int:
        """Return the file descriptor after flushing, so that the file can be synced to disk."""
        self.flush()
        return super().fileno()

    def entry(self) -> FileEntry:
        return self._file.entry()


class VerifiedFile(io.RawIOBase):
    """A file of a checkpoint whose blocks are compared with their checksums when they are read.

    Raises:
        DamagedFileError: also by `readinto`; the file is missing, or not as it was saved.
    """

    def __init__(self, folder: Path, name: str, entry: FileEntry) -> None:
        if reason := _wrong_size(folder, name, entry):
            raise DamagedFileError(reason)
        self._name, self._entry, self._at = name, entry, 0
        self._blocks: dict[int, memoryview] = {}
        self._file = fsio.open_regular(folder / name)

    def close(self) -> None:
        self._file.close()
        super().close()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._entry["bytes"]}
        self._at = begin[whence] + offset
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        # No bytes beyond the file's end, even after a seek behind it.
        view = memoryview(buffer).cast("B")[: max(0, self._entry["bytes"] - self._at)]
        filled = 0
        while filled < len(view):
            number, offset = divmod(self._at, BLOCK_BYTES)
            length = min(BLOCK_BYTES, self._entry["bytes"] - number * BLOCK_BYTES)
            if offset == 0 and length <= len(view) - filled:  # without a copy
                taken = self._read_block(number, view[filled : filled + length])
            else:
                taken = self._block(number, length)[offset : offset + len(view) - filled]
                view[filled : filled + len(taken)] = taken
            filled += len(taken)
            self._at += len(taken)
        return filled

    def _block(self, number: int, length: int) -> memoryview:
        if number not in self._blocks:
            # The oldest block goes first: dicts keep the order of insertion.
            while len(self._blocks) >= _KEPT_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[number] = self._read_block(number, memoryview(bytearray(length)))
        return self._blocks[number]

    def _read_block(self, number: int, room: memoryview) -> memoryview:
        self._file.seek(number * BLOCK_BYTES)
        read = self._file.readinto(room)
        digest = xxhash.xxh3_64_hexdigest(room)
        saved = self._entry["xxh3_64"][_DIGITS * number : _DIGITS * (number + 1)]
        if read != len(room) or digest != saved:
            raise DamagedFileError(
                f"{self._name} has other bytes than were saved: its checksum (xxh3_64) differs"
            )
        return room


# --- Damage -----------------------------------------------------------------------------------


def find_damage(
    folder: Path, *, checksums: bool, within: str = "", share: tuple[int, int] = (0, 1)
) -> str | None:
    """Return a sentence that names a damaged file of a checkpoint; None if no file is damaged.

    Args:
        folder: the checkpoint's folder.
        checksums: read all bytes, in a few threads; else compare sizes only.
        within: prefix of the files to check, such as `model/`.
        share: (i, n) reads one n-th of the files, so that n processes verify them together.
    """
    try:
        listed = read_committed(folder)
    except FileNotFoundError:
        return f"it has no {_COMMITTED}: its save was interrupted"
    except OSError as error:
        return f"{_COMMITTED} cannot be read: {error.strerror or error}"
    except errors.RecordError as error:
        return f"{_COMMITTED} cannot be read: {error.reason}"
    files = {name: entry for name, entry in listed.items() if name.startswith(within)}
    if not files:
        return f"it holds no {within or 'files'}"
    damaged = [each for item in files.items() if (each := _wrong_size(folder, *item))]
    if not damaged and checksums:
        with ThreadPoolExecutor(_CHECKSUM_THREADS) as threads:
            mine = sorted(files.items())[share[0] :: share[1]]
            found = threads.map(lambda item: _wrong_bytes(folder, *item), mine)
            damaged = [each for each in found if each]
    if not damaged:
        return None
    more = f", and {len(damaged) - 1} more of its files are damaged" * (len(damaged) > 1)
    return damaged[0] + more


def newest_whole(run: RunDirectory, part: str = "") -> Path | None:
    """Return the newest checkpoint whose files have the sizes that were saved; None without one.

    With a `part`, such as `ema/main`, only that part and trainer.json need be complete, since
    sampling needs no optimizer.
    """
    within = (f"{part}/", "trainer.json") if part else ("",)
    paths = (run.checkpoint_path(step) for step in reversed(run.checkpoint_steps()))
    whole = (path for path in paths if all(_is_whole(path, each) for each in within))
    return next(whole, None)


def passed_over(run: RunDirectory, step: int) -> list[str]:
    """Describe each checkpoint after a step that is committed but not complete."""
    newer = (run.checkpoint_path(each) for each in run.checkpoint_steps() if each > step)
    damaged = ((path, find_damage(path, checksums=False)) for path in newer)
    return [describe_damage(path, reason) for path, reason in damaged if reason]


def describe_damage(path: Path, reason: str) -> str:
    return f"{path} is not whole ({reason}) and was passed over"


class LatestCheckpoint(NamedTuple):
    """The newest checkpoint that a run can resume from, and newer ones that are damaged."""

    path: Path | None  # None: no checkpoint is whole
    damaged: tuple[tuple[Path, str], ...]  # newer checkpoints, newest first, with their damage


def newest_undamaged(
    run: RunDirectory, at_most: int | None = None, known: Mapping[Path, str] = NOTHING_KNOWN
) -> LatestCheckpoint:
    """Find the newest checkpoint with complete files and a readable trainer.json.

    Args:
        run: run whose checkpoints are looked at.
        at_most: latest step that counts.
        known: damage found before, by checkpoint, which is not looked for again.
    """
    damaged: list[tuple[Path, str]] = []
    for step, path in sorted(_folders(run).items(), reverse=True):
        if at_most is not None and step > at_most:
            continue
        reason = known.get(path) or find_damage(path, checksums=False)
        # The file is small and read next, so its bytes are verified here.
        reason = reason or find_damage(path, checksums=True, within="trainer.json")
        try:
            if reason is None:
                fsio.require_record(path / "trainer.json", Trainer)
                return LatestCheckpoint(path, tuple(damaged))
        except errors.RecordError as error:
            reason = f"trainer.json cannot be read: {error.reason}"
        damaged.append((path, reason))
    return LatestCheckpoint(None, tuple(damaged))


def find_parent(
    text: str, *, weights_only: bool, trust: bool, begun: Parent | None = None
) -> Parent:
    """Return the checkpoint that `--from RUN` or `RUN@STEP` names; for a run, its newest whole one.

    Args:
        text: the option's value.
        weights_only: leave optimizer states behind.
        trust: the user passed `--trust`.
        begun: checkpoint that the run to resume began with. If `text` names it, it is returned,
            whatever the parent has trained or deleted since.

    Raises:
        errors.RunError: there is no run, or it names code and another user began it.
        errors.CheckpointError: there is no such checkpoint, or it is damaged.
    """
    name, _, number = text.rpartition("@")
    # The name of a run directory may itself end in @ and digits.
    has_step = bool(name) and number.isdecimal() and not RunDirectory(Path(text)).exists()
    run = RunDirectory(Path(name if has_step else text))
    if begun is not None:
        named = int(number) if has_step else begun["step"], weights_only, str(run.path.resolve())
        if named == (begun["step"], begun["weights_only"], begun["path"]):
            return begun
    recipe = run.recipe()
    without = recipe.model_copy(update={"evaluation": EvaluationSection()})  # it is not used
    refuse_foreign_code(run, trust=trust, recipe=without)
    steps = run.checkpoint_steps()
    if has_step and int(number) not in steps:
        known = f"steps {', '.join(map(str, steps))}" if steps else "none"
        raise errors.CheckpointError(
            f"--from {text}: {run.path} has no whole checkpoint of step {number}. Its "
            f"checkpoints: {known}."
        )
    path = run.checkpoint_path(int(number)) if has_step else newest_whole(run, "model")
    if path is None:
        raise errors.CheckpointError(
            f"--from {text}: {run.path} has no whole checkpoint. Train it on with "
            f"{run.resume_command()}, or name another run."
        )
    return Parent(
        path=str(run.path.resolve()),
        id=run.record()["id"],
        step=run.step_of(path),
        weights_only=weights_only,
    )


def dangling_link(path: Path) -> str | None:
    if not path.is_symlink() or path.exists():
        return None
    return f"{path} is a symbolic link to {path.readlink()}, which does not exist"


def refuse_dangling_links(run: RunDirectory, after_step: int) -> None:
    """Refuse to train towards a checkpoint whose folder is a dangling symbolic link.

    Raises:
        CheckpointError: the folder of a step after `after_step` is one.
    """
    for step in run.checkpoint_folders():
        found = dangling_link(run.checkpoint_path(step)) if step > after_step else None
        if found is not None:
            raise errors.CheckpointError(
                f"{found}. Training would resume from step {after_step} and could not save step "
                f"{step} there: {LINK_REMEDY}."
            )


def _wrong_size(folder: Path, name: str, entry: FileEntry) -> str | None:
    try:
        status = (folder / name).stat()
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    # Opening a named pipe would wait for a writer that never comes.
    if not stat.S_ISREG(status.st_mode):
        return f"{name} is no regular file"
    if status.st_size != entry["bytes"]:
        had = f"{entry['bytes']:,} when it was saved"
        return f"{name} has {status.st_size:,} bytes, and had {had}"
    return None


def _wrong_bytes(folder: Path, name: str, entry: FileEntry) -> str | None:
    try:
        with VerifiedFile(folder, name, entry) as file:
            # Reading is enough: each block is compared as it is read.
            block = bytearray(BLOCK_BYTES)
            while file.readinto(block):
                pass
    except DamagedFileError as error:
        return str(error)
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return None


def _is_whole(path: Path, within: str = "") -> bool:
    return find_damage(path, checksums=False, within=within) is None


def _folders(run: RunDirectory) -> dict[int, Path]:
    paths = {step: run.checkpoint_path(step) for step in run.checkpoint_folders()}
    return {step: path for step, path in paths.items() if path.is_dir()}


# --- Which are needed -------------------------------------------------------------------------


def needed_steps(run: RunDirectory) -> set[int]:
    """Return the steps whose checkpoints evaluation servers need, by their fresh heartbeats.

    Freshness compares two times of one file system: those of a heartbeat and of the newest
    COMMITTED. An unreadable heartbeat needs nothing.
    """
    commits = []
    for path in run.checkpoints_path.glob(f"step_*/{_COMMITTED}"):
        with suppress(OSError):
            commits.append(path.stat().st_mtime)
    # The clock of this machine is not asked: that of the file server may differ.
    oldest = max(commits, default=0.0) - STALE_SECONDS
    needed: set[int] = set()
    with suppress(OSError):
        for server in evaluation_dir.all_servers(run):
            with suppress(OSError):
                is_fresh = server.heartbeat_path.stat().st_mtime > oldest
                heartbeat = server.read_heartbeat() if is_fresh else None
                needed |= set(heartbeat["needs"]) if heartbeat else set()
    return needed


def unneeded_steps(
    steps: Collection[int], *, keep: int, keep_every: int | None, needed: Iterable[int], reach: int
) -> list[int]:
    """Return the steps whose checkpoints may be deleted, ascending.

    Args:
        steps: steps of all whole checkpoints.
        keep: number of newest checkpoints that stay.
        keep_every: multiples of this step stay for good.
        needed: steps that evaluation servers need.
        reach: steps that a rollback must be able to go back; 0: no rollback.
    """
    ascending = sorted(steps)
    kept = {*ascending[-keep:], *needed}
    if keep_every is not None:
        kept |= {step for step in ascending if step % keep_every == 0}
    if reach and ascending:
        # The newest checkpoint that is old enough stays, and its successor, which will replace it.
        # Without the successor the run could soon only go back to its beginning, since the newest
        # `keep` are all too young.
        border = ascending[-1] - reach
        kept.update([step for step in ascending if step <= border][-1:])
        kept.update([step for step in ascending if step > border][:1])
    return [step for step in ascending if step not in kept]


# --- Deletion ---------------------------------------------------------------------------------


def prune(
    run: RunDirectory, saved: int, since: int, section: CheckpointSection, reach: int
) -> None:
    """Delete a run's checkpoints that are no longer needed, and remains of interrupted saves.

    Incomplete checkpoints do not count, and are deleted. So are those after `since`, the step of
    the save before `saved` or of the launch's beginning, as the run has resumed from before them:
    they are damaged, or were rolled back. Evaluation servers' needs do not keep these. What cannot
    be deleted is tried again after the next save.

    Call it on rank 0 only, and never during a save.
    """
    folders = _folders(run)
    # After a rollback `saved` is below `since`, and the steps in between are abandoned.
    gone = {
        step
        for step, path in folders.items()
        if step != saved and (step > min(since, saved) or not _is_whole(path))
    }
    unneeded = unneeded_steps(
        folders.keys() - gone,
        keep=section.keep,
        keep_every=section.keep_every,
        needed=needed_steps(run),
        reach=reach,
    )
    # Damaged ones have stayed until now, when there is a whole one.
    delete(folders[step] for step in sorted(gone))
    for step in unneeded:
        with suppress(OSError):
            delete_unless_needed(run, step)
    # Hidden names: unfinished saves, and interrupted deletions.
    for leftover in run.checkpoints_path.glob(".step_*"):
        fsio.remove_tree(leftover)


def delete_after(run: RunDirectory, step: int) -> None:
    """Delete all checkpoints after a step to which the run rolls back.

    They are deleted even if an evaluation server needs them, since the run saves these steps again.
    Call it on rank 0 only, and never during a save.
    """
    later = {each: path for each, path in _folders(run).items() if each > step}
    delete(later[each] for each in sorted(later, reverse=True))


def delete(paths: Iterable[Path]) -> None:
    for path in paths:
        with suppress(OSError):
            fsio.remove_tree(hide(path))


def delete_unless_needed(run: RunDirectory, step: int) -> bool:
    """Delete a checkpoint unless an evaluation server needs it; returns true if it is gone.

    A server first writes that it needs a checkpoint, then looks whether it exists. Therefore this
    function renames the checkpoint, looks at the needs once more, and renames it back if it is
    needed now. A server that writes later finds it gone.

    Raises:
        OSError: the checkpoint cannot be renamed.
    """
    if step in needed_steps(run):
        return False
    path = run.checkpoint_path(step)
    try:
        hidden = hide(path)
    except FileNotFoundError:  # another process deleted it
        return True
    if step in needed_steps(run):
        hidden.rename(path)
        return False
    fsio.remove_tree(hidden)
    return True


def hide(path: Path) -> Path:
    """Rename a checkpoint to a name that readers ignore, and return the new path."""
    hidden = path.with_name(f".{path.name}.deleted")
    fsio.remove_tree(hidden)  # left by an interrupted deletion
    return path.rename(hidden)

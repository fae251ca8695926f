"""Saves and loads checkpoints with torch's distributed checkpoint (DCP).

A save is written to a temporary folder in the background, renamed when it is complete, and verified
when it is loaded. No pickle in a checkpoint can run code. Another number of ranks can load it.
"""

import copy
import io
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from pathlib import Path, PurePath
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, WriteItem, WriteItemType
from torch.serialization import _get_layout
from torch.utils.serialization import config as serialization

from longtake import errors, heartbeat, trust
from longtake.checkpoint import files
from longtake.config import CheckpointSection
from longtake.fsio import flush_to_disk, remove_tree, write_json
from longtake.parallel import collectives, mesh
from longtake.parallel.transfer import host_like
from longtake.run_dir import RunDirectory

State = dict[str, Any]
"""State of a model or optimizer: a dict of tensors, possibly nested; DTensors are saved and loaded
in shards."""

_METADATA_CLASSES = (
    "_MEM_FORMAT_ENCODING",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
)

_PLAIN = (bool, int, float, str, type(None))

T = TypeVar("T")


# --- Loading ----------------------------------------------------------------------------------


def latest_checkpoint(
    run: RunDirectory,
    world: mesh.World,
    at_most: int | None = None,
    *,
    checksums: bool = True,
    known: Mapping[Path, str] = files.NOTHING_KNOWN,
) -> files.LatestCheckpoint:
    """Find a run's newest checkpoint that is not damaged; all ranks must call it.

    Args:
        run: run whose checkpoints are looked at.
        world: the ranks.
        at_most: latest step that counts.
        checksums: let each rank verify its share of the files; else only sizes are compared, and
            loading finds damaged bytes.
        known: damage found before, by checkpoint, which is not looked for again.
    """
    damage = dict(known)
    while True:
        # Rank 0 chooses, since all ranks have to load the same checkpoint.
        found = files.LatestCheckpoint(None, ())
        if world.is_first:
            found = files.newest_undamaged(run, at_most, damage)
        found = collectives.gather_objects(found, world, patiently=True)[0]
        if found.path is None or not checksums:
            return found
        share = (world.rank, world.size)
        reason = files.find_damage(found.path, checksums=True, share=share)
        reasons = collectives.gather_objects(reason, world, patiently=True)
        reason = next((each for each in reasons if each), None)
        if reason is None:
            return found
        damage[found.path] = reason


def load_parts(path: Path, parts: Mapping[str, State], world: mesh.World | None = None) -> None:
    """Fill states (weights, averages, optimizers) from a checkpoint, resharding them if necessary.

    All ranks must call it. Parts are `model`, `ema/<profile>` and `optimizer`; parts that are not
    asked for need not exist. The bytes that a rank reads are compared with their checksums.

    Raises:
        DamagedCheckpointError: on every rank; a rank has read other bytes than were saved.
        CheckpointError: the checkpoint is incomplete, or holds another model.

        After an error, some of the given tensors may have been filled.
    """
    _silence_single_process_warning()
    logging.getLogger().addFilter(_is_no_warning_of_the_loader)
    alone = world is None or world.mesh is None
    for name, state in parts.items():
        reader = CheckpointReader(path, name)
        reason = reader.find_damage()
        if world is not None:
            reasons = collectives.gather_objects(reason, world)
            reason = next((each for each in reasons if each), None)
        if reason is not None:
            raise files.DamagedCheckpointError(path, reason)
        try:
            state_dict_loader.load(
                state, storage_reader=reader, planner=SafeLoadPlanner(), no_dist=alone
            )
        except (Exception, CheckpointException) as error:  # torch raises many types
            # Damage is found while torch reads, and comes wrapped in torch's error.
            if damage := _damaged_file(error):
                raise files.DamagedCheckpointError(path, str(damage)) from error
            raise errors.CheckpointError(
                f"{path / name} cannot be loaded into the model that the recipe describes: "
                f"{_last_line(error)}. Its files are damaged, or hold another model: take the "
                "recipe that the run was started with, or an earlier checkpoint."
            ) from error


def part_shapes(path: Path, part: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in a checkpoint's part; () for other entries.

    Raises:
        DamagedFileError: the part's metadata is damaged.
        OSError: it cannot be read.
        ValueError: it is not in torch's format.
    """
    saved = CheckpointReader(path, part).read_metadata().state_dict_metadata
    return {name: tuple(getattr(each, "size", ())) for name, each in saved.items()}


class _VerifiedFiles(FileSystem):
    """Lets torch read a checkpoint's files, comparing what is read with their checksums."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: Mapping[str, files.FileEntry] | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        assert mode == "rb"
        if self._entries is None:
            self._entries = files.read_committed(self._path)
        name = str(Path(path).relative_to(self._path))
        if name not in self._entries:
            raise files.DamagedFileError(f"it holds no {name}")
        with files.VerifiedFile(self._path, name, self._entries[name]) as file:
            yield file


class CheckpointReader(FileSystemReader):
    """Reads a part of a checkpoint, such as `ema/main`, and verifies its checksums.

    `.metadata` is unpickled with only those classes that torch writes there.
    """

    def __init__(self, path: Path, part: str) -> None:
        super().__init__(path / part)
        self.fs = _VerifiedFiles(path)
        self._checkpoint, self._part = path, part

    def find_damage(self) -> str | None:
        """Find files of this part with a wrong size, or with a wrong checksum of `.metadata`."""
        folder, part = self._checkpoint, self._part
        return files.find_damage(folder, checksums=False, within=f"{part}/") or files.find_damage(
            folder, checksums=True, within=f"{part}/.metadata"
        )

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        with self.fs.create_stream(path, "rb") as file:
            try:
                buffered = io.BufferedReader(cast("io.RawIOBase", file))
                found = trust.RestrictedUnpickler(buffered, _allowed_globals()).load()
                # A name with a path could make torch read files outside of the checkpoint.
                if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
                    raise TypeError("it does not describe a checkpoint")
                for name in (str(each.relative_path) for each in found.storage_data.values()):
                    if name != PurePath(name).name or name == "..":
                        raise ValueError(f"it names the file {name!r} outside the checkpoint")
            except files.DamagedFileError:
                raise
            except Exception as error:  # a damaged pickle can raise anything
                raise ValueError(f"{path.name} cannot be read: {error}") from error
        found.storage_meta = StorageMeta(load_id=self.load_id)
        return found


class SafeLoadPlanner(DefaultLoadPlanner):
    """Loads a checkpoint's entries that are not tensors, such as learning rates.

    They are unpickled without running code.
    """

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, weights_only=True)
        name = read_item.dest_index.fqn
        # The rest is what the base class does with what it unpickles without restriction.
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded


def _no_path(*_parts: object) -> None:
    """Unpickle as None the path at which a checkpoint was saved, since nothing reads it."""


@cache
def _allowed_globals() -> Mapping[tuple[str, str], Any]:
    named = {(metadata.__name__, name): getattr(metadata, name) for name in _METADATA_CLASSES}
    dtypes = {
        ("torch", name): each for name, each in vars(torch).items() if type(each) is torch.dtype
    }
    return {
        **named,
        **dtypes,
        (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): _get_layout,
        ("pathlib", "PosixPath"): _no_path,
        ("pathlib._local", "PosixPath"): _no_path,  # Python 3.13
    }


def _damaged_file(error: BaseException) -> files.DamagedFileError | None:
    """Return the damaged file that some rank found while loading; equal on every rank."""
    failures = error.failures if isinstance(error, CheckpointException) else {0: (error, None)}
    found = (each for _, (each, _) in sorted(failures.items()))
    return next((each for each in found if isinstance(each, files.DamagedFileError)), None)


def _is_no_warning_of_the_loader(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or record.pathname != state_dict_loader.__file__


def _silence_single_process_warning() -> None:
    """Silence torch's warning that a single process saves or loads without torch.distributed.

    It stays silenced, since filters belong to all threads, and saving has a thread of its own.
    """
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


def _last_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1].rstrip(".")


# --- Saving in the background -----------------------------------------------------------------


class Saver:
    """Writes checkpoints one after another in a thread, and deletes older ones.

    Every rank has a saver, and makes the same calls in the same order.

    Args:
        run: run whose checkpoints are written.
        world: the ranks.
        section: the recipe's `checkpoint`.
        start: step that training resumes from. Later checkpoints are damaged, and are deleted
            after the next complete save.
        reach: steps that a rollback must be able to go back.
    """

    def __init__(
        self,
        run: RunDirectory,
        world: mesh.World,
        section: CheckpointSection,
        *,
        start: int,
        reach: int = 0,
    ) -> None:
        self.world = world
        self._run, self._section, self._reach = run, section, reach
        is_alone = world.mesh is None
        # A process group of its own: collectives of a save must not mix with those of training.
        self._group = None if is_alone else mesh.new_group(world, "checkpoint")
        self._staging = Staging()
        self._thread = ThreadPoolExecutor(1, "checkpoint", _prepare_thread, (world.device,))
        self._pending: Future[Path] | None = None
        self._since = start
        self._begun = time.monotonic()
        self._seconds = 0.0
        self._finished: list[Path] = []
        self._failure: BaseException | None = None
        self.failures_in_a_row = 0  # since the last save that succeeded; equal on all ranks
        _silence_single_process_warning()

    def save(self, step: int, parts: Mapping[str, State], trainer: Mapping[str, Any]) -> None:
        """Start to save a checkpoint, as `write` does; returns when the state may change.

        Waits for a pending save first. A save that fails sets `failed`.
        """
        # There is memory for one copy, and a pending save still reads it.
        self.wait()
        heartbeat.set_phase("checkpoint")
        self._begun = time.monotonic()
        copied = self._staging.copy(parts)
        self._pending = self._thread.submit(self._save, step, copied, trainer, self._since)
        self._since = step

    @property
    def is_due(self) -> bool:
        """True if a save is due by `checkpoint.minutes` and rank 0's clock; false on others."""
        minutes = self._section.minutes
        if minutes is None or not self.world.is_first:
            return False
        return time.monotonic() - self._begun >= 60 * minutes

    @property
    def failed(self) -> bool:
        self._collect()
        return self._failure is not None

    def finished(self) -> list[Path]:
        self._collect()
        finished, self._finished = self._finished, []
        return finished if self.world.is_first else []

    def wait(self) -> None:
        """Wait until no save of a checkpoint is pending."""
        if self._pending is not None:
            heartbeat.set_phase("save")
            wait([self._pending])
        self._collect()

    def take_failure(self) -> errors.CheckpointError | None:
        """Return the last save's failure, equal on every rank, and forget it; None without one.

        Waits for a pending save. All ranks must call it.
        """
        self.wait()
        failure, self._failure = self._failure, None
        reasons = collectives.gather_objects(None if failure is None else str(failure), self.world)
        message = next((each for each in reasons if each is not None), None)
        if failure is not None and not isinstance(failure, errors.CheckpointError):
            raise failure  # a defect of longtake
        return None if message is None else errors.CheckpointError(message)

    def close(self, *, waits: bool = True) -> None:
        self._thread.shutdown(wait=waits)
        self._collect()

    def _save(
        self, step: int, parts: Mapping[str, State], trainer: Mapping[str, Any], since: int
    ) -> Path:
        begun = time.monotonic()
        path = write(self._run, step, parts, trainer, self.world, self._group)
        self._seconds = time.monotonic() - begun
        if self.world.is_first:
            files.prune(self._run, step, since, self._section, self._reach)
        return path

    def _collect(self) -> None:
        """Note the result of the pending save if it has ended; only one thread may call this."""
        if self._pending is None or not self._pending.done():
            return
        ended, self._pending = self._pending, None
        error = ended.exception()
        if error is None:
            self._finished.append(ended.result())
            heartbeat.record_duration("save", self._seconds)
            self.failures_in_a_row = 0
        else:
            self.failures_in_a_row += 1
            self._failure = error


@contextmanager
def keep_saver(
    run: RunDirectory, world: mesh.World, section: CheckpointSection, *, start: int, reach: int = 0
) -> Iterator[Saver]:
    """Keep a saver of checkpoints while the context lasts, and wait for its pending save.

    It waits also after an error or Ctrl-C, but not after a defect or the loss of a rank: then the
    save cannot be completed, and others wait for this process to end. If the context ends without
    an error, a failed save is raised on every rank.
    """
    saver, waits = Saver(run, world, section, start=start, reach=reach), True
    try:
        yield saver
        if error := saver.take_failure():
            raise error
    except Exception as error:
        waits = isinstance(error, errors.LongtakeError) or world.mesh is None
        raise
    finally:
        saver.close(waits=waits)


def _prepare_thread(device: torch.device) -> None:
    # The thread keeps the training's priority: one that waits for a processor holds the GIL, and
    # the training would wait with it.
    if device.type == "cuda":
        torch.cuda.set_device(device)


class Staging:
    """Copies states to host memory, from which a checkpoint is written while training continues.

    torch's own stagers are not used: `BlockingAsyncStager` cannot reuse memory without a GPU, and
    `DefaultStager` cannot copy the 8-bit states of an optimizer. The memory is as large as this
    rank's shards of the largest state so far, and page-locked if that was on a GPU.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def copy(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Copy nested dicts of tensors to host memory, in place of the last copy."""
        copied: dict[str, Any] = self._copied(parts, "")
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # copies from a GPU are asynchronous
        return copied

    def _copied(self, value: Any, key: str) -> Any:
        if isinstance(value, Mapping):
            return {name: self._copied(each, f"{key}/{name}") for name, each in value.items()}
        if isinstance(value, Tensor):
            return self._copied_tensor(value.detach(), key)
        return copy.deepcopy(value)

    def _copied_tensor(self, tensor: Tensor, key: str) -> Tensor:
        """Copy a tensor to host memory; a DTensor or an 8-bit state is copied part by part."""
        if not hasattr(tensor, "__tensor_flatten__"):
            buffer = self._buffers.get(key)
            if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                buffer = self._buffers[key] = host_like(tensor)
            return buffer.copy_(tensor, non_blocking=True)
        made = cast("Any", tensor)
        names, context = made.__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in names}  # a DTensor's mesh is among them
        for name, each in inner.items():
            if isinstance(each, Tensor):
                inner[name] = self._copied_tensor(each, f"{key}/{name}")
        return type(made).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())


# --- Writing one checkpoint -------------------------------------------------------------------


def write(
    run: RunDirectory,
    step: int,
    parts: Mapping[str, State],
    trainer: Mapping[str, Any],
    world: mesh.World,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write a checkpoint to a temporary folder, and rename it once it is complete and on disk.

    All ranks must call it.

    Args:
        run: run to which the checkpoint belongs.
        step: number of steps done in the saved state.
        parts: states by folder of the checkpoint.
        trainer: everything else that is needed to resume, as JSON.
        world: the ranks.
        group: process group of all ranks, used by nothing else; None for a single process.

    Raises:
        CheckpointError: on every rank; it cannot be written. Nothing of it remains, and older
            checkpoints are untouched.
    """
    whole = run.checkpoint_path(step)
    aside = whole.with_name(f".{whole.name}.partial")
    is_first = world.is_first

    def begin() -> None:
        if is_first and (link := files.dangling_link(whole)):
            raise OSError(link)
        if is_first:
            remove_tree(aside)
            aside.mkdir(parents=True)

    try:
        _on_all_ranks(begin, group)
        mine: dict[str, files.FileEntry] = {}
        for name, state in parts.items():
            mine |= _write_part(aside, name, state, group)
        described = _on_all_ranks(lambda: mine, group)
        _on_all_ranks(
            lambda: _commit(aside, whole, trainer, described) if is_first else None, group
        )
    except (OSError, CheckpointException) as error:
        # Remove the files of the failed save: the disk may be full.
        if is_first:
            remove_tree(aside)
        raise errors.CheckpointError(_describe_loss(run, step, error)) from error
    return whole


def _on_all_ranks(work: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """Let every rank do its part of a save, wait for all, and return their results by rank.

    Raises:
        OSError: on every rank, if the work failed on any of them.
    """
    result: T | None = None
    mistake: str | None = None
    try:
        result = work()
    except Exception as error:  # any other ending leaves the other ranks waiting forever
        mistake = str(error) if isinstance(error, OSError) else repr(error)
    everyone: list[Any] = [(result, mistake)]
    if group is not None:
        everyone = collectives.gather_in_group(everyone[0], group)
    for _, each in everyone:
        if each is not None:
            raise OSError(each)
    return [each for each, _ in everyone]


class _ChecksummedFiles(FileSystem):
    """Lets torch write files of a checkpoint's part, computing their checksums meanwhile.

    If a disk is full it raises that error, where torch raises that a file is too short.
    """

    def __init__(self) -> None:
        self.entries: dict[str, files.FileEntry] = {}  # by file name

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        assert mode == "wb"
        with files.ChecksummedFile(Path(path)) as stream:
            try:
                yield stream
            except RuntimeError as error:
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise
        self.entries[Path(path).name] = stream.entry()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.entries[Path(new_path).name] = self.entries.pop(Path(path).name)


class _Entries:
    """Transforms of torch's checkpoint streams that do nothing, and so save time.

    torch's own create a class for each entry of a file, and flush the file after it.
    """

    def transform_save_stream(self, _: WriteItem, stream: Any) -> tuple[Any, list[str]]:
        return _Entry(stream), []


class _Entry:
    """Stream for one entry of a checkpoint's file that ignores closing and flushing."""

    def __init__(self, stream: Any) -> None:
        self.write = stream.write

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class _SavePlanner(DefaultSavePlanner):
    """Saves the optimizer's state without torch's cost for each of its many equal numbers.

    The state is the single entry of another one. An optimizer has a dozen hyperparameters per
    parameter. torch would log two records for each of them, and serialise each as a zip archive, in
    half of a save's CPU time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._serialised: dict[str, bytes] = {}

    def set_up_planner(
        self,
        state_dict: State,
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        (state,) = state_dict.values()
        super().set_up_planner(state, storage_meta, is_coordinator)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002
        parts = object if type(object) is tuple else (object,)
        is_plain = all(type(each) in _PLAIN for each in parts)
        if write_item.type != WriteItemType.BYTE_IO or not is_plain:
            return super().transform_object(write_item, object)
        known = self._serialised
        # The key is the repr, because 1, 1.0 and True are equal as keys.
        if (name := repr(object)) not in known:
            known[name] = super().transform_object(write_item, object).getvalue()
        return io.BytesIO(known[name])


def _write_part(
    aside: Path, part: str, state: State, group: dist.ProcessGroup | None
) -> dict[str, files.FileEntry]:
    """Write this rank's files of a checkpoint's part; return their sizes and checksums by name."""
    # Tensors are on the CPU already. With copy-ahead, torch would wait after every 10 MB for the
    # current CUDA stream, on which training has queued seconds of work.
    writer = FileSystemWriter(aside / part, per_thread_copy_ahead=0)
    writer.fs = disk = _ChecksummedFiles()
    writer.transforms = cast("Any", _Entries())
    alone = group is None
    options: Any = serialization
    with options.patch("save.compute_crc32", False):  # `disk` computes a faster checksum
        state_dict_saver.save(
            {part: state},
            storage_writer=writer,
            planner=_SavePlanner(),
            process_group=group,
            no_dist=alone,
        )
    return {f"{part}/{name}": entry for name, entry in disk.entries.items()}


def _commit(
    aside: Path,
    whole: Path,
    trainer: Mapping[str, Any],
    described: list[dict[str, files.FileEntry]],
) -> None:
    write_json(aside / "trainer.json", trainer)
    entries = {name: entry for each in described for name, entry in each.items()}
    # trainer.json, which no writer has described.
    rest = [name for name in files.list_files(aside) if name not in entries]
    files.commit(aside, entries | files.describe_files(aside, rest))
    # Names of files are on disk only when their folder is.
    for folder in (aside, *(path for path in aside.rglob("*") if path.is_dir())):
        flush_to_disk(folder)
    # A checkpoint of this step may exist: the step is trained again, because it was damaged.
    replaced = files.hide(whole) if whole.exists() else None
    aside.rename(whole)
    flush_to_disk(whole.parent)
    if replaced is not None:
        remove_tree(replaced)


def _describe_loss(run: RunDirectory, step: int, error: BaseException) -> str:
    last = files.newest_whole(run)
    lost = (
        f"nothing is lost but the steps since {last.name}, which is whole"
        if last is not None
        else "there is no earlier one, so all steps so far are lost if the run ends now"
    )
    is_link = files.dangling_link(run.checkpoint_path(step)) is not None
    remedy = files.LINK_REMEDY if is_link else "make room and start the same command again"
    return (
        f"The checkpoint of step {step} in {run.path} cannot be written "
        f"({_last_line(error)}); {lost}: {remedy}."
    )

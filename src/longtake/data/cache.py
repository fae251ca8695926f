"""Latents and prompt embeddings that were computed once: names, files, reading.

    CACHE/latents/3f/3f09….safetensors      of a window of a clip
    CACHE/conditioning/07/07b1….safetensors of a further input: latents, or values as they were read
    CACHE/prompts/a2/a2c1….safetensors      of a caption
    CACHE/hashes/5b27….jsonl                content hashes of further inputs, by path
    CACHE/encoders/90c1….jsonl              content hashes of encoders' weights, by path
    CACHE/aside/                            files that are being written

A name is a hash of the content, the window and the encoder's fingerprint, so several recipes and
processes share a folder.
"""

import hashlib
import json
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load, save
from torch import Tensor

from longtake.config import Bucket, DataSection
from longtake.data.clip import Clip, Media
from longtake.data.conditioning import (
    ConditioningInput,
    ConditioningPixels,
    conditioning_of,
)
from longtake.data.decode import content_hash
from longtake.data.window import Window
from longtake.data.workers import WorkerIncident
from longtake.errors import ClipError, DataError, RecordError
from longtake.fsio import make_writable, open_regular, read_records, read_regular

_FORMAT = 1
_DAMAGED = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
_FACTS = "longtake"  # the key of what a file says about itself
_MOST_HEADER_BYTES = 2**20
_OLD_SECONDS = 24 * 3600
_THREADS = 4

_Stamp = tuple[int, int]


@dataclass(frozen=True)
class CacheEntry:
    """One file of a cache."""

    path: Path  # where it lies, or would
    what: str  # what it holds, for people

    @property
    def key(self) -> str:
        return self.path.stem

    @property
    def kind(self) -> str:
        return self.path.parents[1].name

    def is_whole(self) -> bool:
        """Whether the file is there in its whole length; its content is checked by `read`."""
        try:
            with open_regular(self.path) as file:
                start = file.read(8)
                header = file.read(min(int.from_bytes(start, "little"), _MOST_HEADER_BYTES))
                return _parse(start, header, file.seek(0, 2)) is not None
        except OSError:
            return False

    def read(self) -> dict[str, Tensor]:
        try:
            data = read_regular(self.path)
        except FileNotFoundError as error:
            reason = f"the cache does not hold {self.what}; longtake data cache RECIPE fills it"
            raise ClipError(self.path, reason) from error
        except OSError as error:
            raise ClipError(self.path, f"cannot be read: {error.strerror or error}") from error
        try:
            return _unpacked(data)
        except (*_DAMAGED, safetensors.SafetensorError) as error:
            with suppress(OSError):
                self.path.unlink()
            raise ClipError(self.path, f"{self.what} is damaged in the cache: {error}") from error

    def write(self, tensors: Mapping[str, Tensor]) -> int:
        """Write it, whole or not at all; returns the size in bytes."""
        data = _packed(tensors, self.what)
        # Several processes may write it at once: each has a name of its own.
        aside = self.path.parents[2] / "aside" / f"{self.key}.{secrets.token_hex(4)}"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                aside.write_bytes(data)
                aside.replace(self.path)
            finally:
                with suppress(OSError):
                    aside.unlink()
        except OSError as error:
            raise cannot_write(self.path, error) from error
        return len(data)


@dataclass(frozen=True)
class CacheFailure:
    """A window is not in the cache, as it, or a further input of it, cannot be decoded."""

    identity: str
    path: str
    reason: str


@dataclass(frozen=True)
class Cache:
    """What a recipe's encoders make of clips, further inputs and captions; can be pickled."""

    folder: Path  # whether it is there yet or not
    codec: str  # fingerprint of what encodes clips and further inputs
    text: str  # fingerprint of what encodes captions
    data: DataSection
    no_caption: str  # what a dropped caption is encoded as

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @cached_property
    def unconditional(self) -> dict[str, Tensor]:
        """The embeddings of no caption.

        Raises:
            ClipError: they are not there, or damaged.
        """
        return self.prompt(self.no_caption).read()

    @cached_property
    def _hashes(self) -> "ContentHashes":
        return ContentHashes(self.folder / "hashes")

    def latents(self, window: Window) -> CacheEntry:
        facts = (
            *(window.identity, window.kind, window.stream_index, window.rotation),
            *(window.start, window.num_frames, window.stride),
            *(window.scaled_height, window.scaled_width, window.top, window.left),
            *(window.height, window.width, window.is_flipped),
            *([window.frames] if window.frames else []),
        )
        what = f"the latents of {window.media} from frame {window.start}"
        return self._entry("latents", self.codec, facts, what)

    def conditioning(self, name: str, wanted: ConditioningInput) -> CacheEntry:
        """Where a further input is: `latents` if the codec encodes it, else `values`.

        Raises:
            ClipError: the input's file cannot be read.
        """
        values = getattr(wanted, "values", None)
        facts = [self._hashes.of(wanted.media.path) if values is None else values]
        if isinstance(wanted, ConditioningPixels):
            facts += [wanted.kind, wanted.clip_height, wanted.clip_width]
            facts += [*astuple(wanted.clip_crop), wanted.height, wanted.width, wanted.is_flipped]
        else:
            facts += ["numbers", wanted.width, wanted.is_per_frame, wanted.clip_frames]
        facts += [wanted.start, wanted.num_frames, wanted.stride]
        codec = self.codec if self.is_encoded(name) else ""
        return self._entry("conditioning", codec, tuple(facts), f"{name} {wanted.media}")

    def is_encoded(self, name: str) -> bool:
        return self.data.conditioning[name].is_encoded

    def inputs(self, clip: Clip, window: Window) -> dict[str, ConditioningInput]:
        return conditioning_of(clip, window, self.data.conditioning)

    def prompt(self, caption: str) -> CacheEntry:
        return self._entry("prompts", self.text, (caption,), f"the embeddings of {caption!r}")

    def _entry(self, kind: str, encoder: str, facts: tuple[object, ...], what: str) -> CacheEntry:
        text = json.dumps([_FORMAT, kind, encoder, *facts], separators=(",", ":"))
        key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        return CacheEntry(self.folder / kind / key[:2] / f"{key}.safetensors", what)


@dataclass(frozen=True)
class _Content:
    """A sample: latents [C, F', H', W'], what is encoded of its conditioning, and what is not."""

    latents: Tensor
    conditioning: dict[str, Tensor]
    inputs: dict[str, Tensor]


class CachedSource:
    """Reads samples from a cache, several at a time; a `SampleSource`.

    `failures`: by the key of a window's latents, why they are not there.
    """

    def __init__(self, cache: Cache, failures: Mapping[str, CacheFailure]) -> None:
        self.cache = cache
        self._failures = failures
        self.threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="cache")

    def buffer(self, shape: Bucket, num_places: int) -> "CachedBuffer":
        return CachedBuffer(self, shape, num_places)

    def incidents(self) -> list[WorkerIncident]:
        return []

    def close(self) -> None:
        self.threads.shutdown(wait=True, cancel_futures=True)

    def content(self, clip: Clip, window: Window) -> _Content:
        cache = self.cache
        entry = cache.latents(window)
        if failure := self._failures.get(entry.key):
            raise ClipError(failure.path, failure.reason)
        _ = cache.unconditional  # missing there, it is missing to every sample
        conditioning, inputs = cache.prompt(clip.caption).read(), dict[str, Tensor]()
        for name, wanted in cache.inputs(clip, window).items():
            found = cache.conditioning(name, wanted).read()
            if cache.is_encoded(name):
                conditioning[f"{name}_latents"] = found["latents"]
            else:
                frames = getattr(wanted, "num_frames", 1)
                values = found["values"]  # of equal frames one is kept
                inputs[name] = values.expand(-1, frames, -1, -1) if values.ndim == 4 else values
        return _Content(entry.read()["latents"], conditioning, inputs)


class CachedBuffer:
    """The samples of one batch."""

    def __init__(self, source: CachedSource, shape: Bucket, num_places: int) -> None:
        self._source = source
        self._shape = shape
        self._pending: dict[int, Future[_Content]] = {}
        self._filled: list[_Content | None] = [None] * num_places

    def begin(self, place: int, clip: Clip, window: Window) -> None:
        self._pending[place] = self._source.threads.submit(self._source.content, clip, window)

    def wait(self, place: int) -> None:
        self._filled[place] = self._pending.pop(place).result()

    def copy(self, source: int, place: int) -> None:
        self._filled[place] = self._filled[source]

    def fields(self) -> dict[str, Any]:
        contents = [each for each in self._filled if each is not None]
        assert len(contents) == len(self._filled)
        no_caption = self._source.cache.unconditional
        size = (len(contents), 3, 0, self._shape.height, self._shape.width)
        return {
            "videos": torch.empty(size, dtype=torch.uint8),
            "latents": torch.stack([each.latents for each in contents]),
            "conditioning": _stacked([each.conditioning for each in contents]),
            "inputs": _stacked([each.inputs for each in contents]),
            "no_caption": {name: each[None] for name, each in no_caption.items()},
        }


def _stacked(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([each[name] for each in samples]) for name in samples[0]}


class ContentHashes:
    """Remembers in a folder what files held, so that no later process reads them again.

    Each process appends to a file of its own and reads those of all, once.

    Args:
        folder: of the files; where it cannot be written, nothing is remembered.
        hash_of: from a path to what is remembered: BLAKE2b-128 of the content unless given. Those
            of one folder are of one kind.
    """

    def __init__(self, folder: Path, hash_of: Callable[[str], str] | None = None) -> None:
        self._folder = folder
        self._hash_of = hash_of or (lambda path: content_hash(Media(path)))
        self._mine = folder / f"{secrets.token_hex(8)}.jsonl"
        self._known: dict[str, tuple[_Stamp, str]] | None = None
        self._lock = threading.Lock()

    def of(self, path: str) -> str:
        """A file's hash, as hex digits.

        Raises:
            ClipError: there is no such file, it is empty or cannot be read.
        """
        known, stamp = self._remembered(), _stamp(path)
        if (found := known.get(path)) and found[0] == stamp:
            return found[1]
        content = self._hash_of(path)
        with self._lock:
            known[path] = stamp, content
            with suppress(OSError):  # then somebody reads it again
                if not self._mine.exists():
                    make_writable(self._folder)
                with self._mine.open("ab") as file:
                    file.write(json.dumps([path, *stamp, content]).encode() + b"\n")
        return content

    def _remembered(self) -> dict[str, tuple[_Stamp, str]]:
        with self._lock:
            if self._known is None:
                self._known = {}
                for file in sorted(self._folder.glob("*.jsonl")):
                    with suppress(RecordError):
                        for record in read_records(file, tuple[str, int, int, str]):
                            self._known[record[0]] = record[1:3], record[3]
            return self._known


def make_folder(folder: Path) -> None:
    """Make a cache's folder where it is not there, and tidy up after processes that were killed.

    Raises:
        DataError: it cannot be written.
    """
    aside = folder / "aside"
    try:
        make_writable(aside)
        for left in aside.iterdir():
            with suppress(FileNotFoundError):  # somebody else tidies up, too
                if time.time() - left.stat().st_mtime > _OLD_SECONDS:
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
    except OSError as error:
        raise cannot_write(folder, error) from error


def cannot_write(path: Path, error: OSError) -> DataError:
    return DataError(
        f"The cache cannot be written: {path}: {error.strerror or error}. Make room or make it "
        "writable, or choose another folder with --set data.cache=FOLDER."
    )


def _stamp(path: str) -> _Stamp:
    try:
        status = Path(path).stat()
    except OSError as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else error.strerror
        raise ClipError(path, f"{reason or error}") from error
    return status.st_size, status.st_mtime_ns


def _packed(tensors: Mapping[str, Tensor], what: str) -> bytes:
    """A file's content, with what is needed to undo the packing and to find damage.

    Values that bf16 can hold are stored as bf16, which halves the embeddings of a bf16 encoder.
    Rows of zeros at the end, as captions are padded with, are left out.
    """
    packed, shapes = {}, {}
    for name, tensor in sorted(tensors.items()):
        # A copy: no memory is shared, and no row or column has an odd stride.
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        shapes[name] = [str(tensor.dtype).removeprefix("torch."), len(tensor)]
        packed[name] = _narrow(_without_last_zeros(tensor))
    facts = {"format": _FORMAT, "what": what, "of": shapes, "digest": _digest(packed, shapes)}
    return save(packed, {_FACTS: json.dumps(facts)})


def _unpacked(data: bytes) -> dict[str, Tensor]:
    with_header = _parse(data[:8], data[8 : 8 + _MOST_HEADER_BYTES], len(data))
    if with_header is None:
        raise ValueError(f"its {len(data)} bytes are not all of it")
    facts, packed = json.loads(with_header["__metadata__"][_FACTS]), load(data)
    if facts["format"] != _FORMAT:
        raise ValueError(f"it has format {facts['format']}, and this longtake reads {_FORMAT}")
    if facts["digest"] != _digest(packed, facts["of"]):
        raise ValueError("its content is not what was written")
    found = {}
    for name, (dtype, rows) in facts["of"].items():
        stored = packed[name].to(getattr(torch, dtype))
        found[name] = torch.cat([stored, stored.new_zeros(rows - len(stored), *stored.shape[1:])])
    return found


def _bits(tensor: Tensor) -> Tensor:
    # bytes, as torch.equal does not distinguish 0 and -0
    return tensor.reshape(len(tensor), -1).view(torch.uint8)


def _without_last_zeros(tensor: Tensor) -> Tensor:
    filled = _bits(tensor).any(dim=1).nonzero()
    return tensor[: int(filled[-1]) + 1 if len(filled) else 0]


def _narrow(tensor: Tensor) -> Tensor:
    """The same in bf16, where that loses nothing."""
    if tensor.dtype != torch.float32:
        return tensor
    narrow = tensor.bfloat16()
    is_exact = torch.equal(narrow.float().view(torch.int32), tensor.view(torch.int32))
    return narrow if is_exact else tensor


def _digest(tensors: Mapping[str, Tensor], shapes: Mapping[str, list[Any]]) -> str:
    digest = hashlib.blake2b(json.dumps(shapes).encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _parse(start: bytes, rest: bytes, num_bytes: int) -> dict[str, Any] | None:
    length = int.from_bytes(start, "little")
    try:
        header: dict[str, Any] = json.loads(rest[:length])
        ends = [each["data_offsets"][1] for name, each in header.items() if name[:2] != "__"]
        is_whole = num_bytes == 8 + length + max(ends) and _FACTS in header["__metadata__"]
    except _DAMAGED:
        return None
    return header if is_whole else None

"""Packs: safetensors files with many cache entries each, and the index of all packs.

FOLDER/latents/90c1….safetensors    a pack; its tensors are named <key of the entry>.<name>
FOLDER/index/5b27….safetensors      places of entries, sorted by key: 32 bytes each, memory-mapped
FOLDER/damaged/90c1….07b1…          empty file: this entry of this pack is damaged
FOLDER/damaged/latents.90c1….safetensors  an unusable pack, kept for inspection
"""

import json
import math
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from longtake import errors, fsio

CACHE_KINDS = ("latents", "conditioning", "prompts")
PACK_BYTES = 512 * 2**20  # a pack is written when its entries have this size
PACK_FORMAT = 2

_PACK_SECONDS = 600.0  # or when its first entry is this old: a killed process loses no more
_MAX_PACK_ENTRIES = 2**15  # or when it has this many entries: keeps the header below 20 MB
_MAX_HEADER_BYTES = 100 * 10**6  # limit of the safetensors library
_REFRESH_SECONDS = 60.0  # interval at which a writer looks for packs of other processes
_INDEX_SECONDS = 30 * 24 * 3600.0  # an older index file is mapped by no process any more
_THREADS = 16
_SUFFIX = ".safetensors"
_FOLDERS = (*CACHE_KINDS, "index", "damaged")
_KEY = re.compile("[0-9a-f]{32}")
_INDEX_NAME = re.compile(rf"[0-9a-f]{{16}}{re.escape(_SUFFIX)}")
_FACTS = "longtake"  # metadata key of a file's own format and tables
# The exceptions that a header with arbitrary JSON can cause.
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_TYPE_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_COLUMNS = {"high": "U64", "low": "U64", "pack": "U32", "offset": "U32", "layout": "U32"}
_COLUMNS |= {"checksum": "U32"}  # 32 bits hold an offset, as packs have some 512 MiB
_NUMBERS: dict[str, np.dtype[Any]] = {"U64": np.dtype("<u8"), "U32": np.dtype("<u4")}


class DamagedPackError(ValueError):
    """Raised for a pack file of a cache that cannot be used at all, such as a truncated one."""


@dataclass(frozen=True)
class CacheEntry:
    """Key and description of a cache entry (latents, embeddings ...) that may or may not exist."""

    kind: str  # one of `CACHE_KINDS`
    key: str  # 32 hex digits
    what: str  # description for messages


class _Part(NamedTuple):
    """Layout of one tensor of a cache entry: its form in the file, and that in which it is read."""

    name: str
    stored: str  # dtype in the file, as safetensors names it
    shape: tuple[int, ...]
    dtype: str
    rows: int  # length of the first dimension when read; rows that are not stored are zeros

    def num_bytes(self) -> int:
        """Return the bytes that the tensor takes in the file."""
        return math.prod(self.shape) * _TYPES[self.stored].itemsize


class _Run(NamedTuple):
    """Table of the places of cache entries in files, sorted by the first half of their keys."""

    high: NDArray[np.uint64]  # first half of the key
    low: NDArray[np.uint64]  # second half
    pack: NDArray[np.uint32]
    offset: NDArray[np.uint32]  # position of the entry's first byte in the pack's file
    layout: NDArray[np.uint32]
    checksum: NDArray[np.uint32]


class _Header(NamedTuple):
    """Contents of the header of a pack (a file of cache entries)."""

    name: str
    size: int
    entries: list[tuple[str, int, str, int]]  # key, offset, layout and checksum of each


class _Place(NamedTuple):
    pack: int
    offset: int
    layout: int
    checksum: int


class PackIndex:
    """Finds and reads the cache entries in all packs (files of entries) of a cache's folder.

    Each process has its own index. A new one knows all packs that exist; `refresh` looks for packs
    that other processes have written since. Methods may be called from several threads.

    Args:
        folder: the cache's folder, which need not exist.
        verify: compare the checksum of each entry that is read.

    Raises:
        DataError: packs have an unknown format, or a folder is a symbolic link.
    """

    def __init__(self, folder: Path, *, verify: bool = True) -> None:
        self.folder = folder
        self.refused: dict[Path, str] = {}  # reasons why packs were found unusable, by path
        self._verify = verify
        self._lock = threading.Lock()
        self._packs: list[str] = []
        self._sizes: list[int] = []
        self._numbers: dict[str, int] = {}  # positions in `_packs`, by name
        self._is_there: list[bool] = []
        self._damaged: set[tuple[int, str]] = set()
        self._layouts: list[tuple[_Part, ...]] = []
        self._layout_texts: list[str] = []
        self._layout_numbers: dict[str, int] = {}
        self._runs: list[_Run] = []  # that of the index file, and one of all newer packs
        self._num_saved = 0  # number of runs that came from an index file
        self._listed_at = 0.0
        fsio.refuse_links(folder, _FOLDERS)
        self._load()
        self.refresh()

    def __len__(self) -> int:
        return sum(len(run.high) for run in self._runs)

    def holds(self, entry: CacheEntry) -> bool:
        """Return true if a complete pack holds this cache entry; its content is not read."""
        return next(self._places(entry.key), None) is not None

    def read(self, entry: CacheEntry) -> dict[str, Tensor]:
        """Read the tensors of a cache entry, by name.

        Raises:
            ClipError: no pack holds the entry, it is damaged, or it cannot be read.
        """
        failure: errors.ClipError | None = None
        # An entry may be in several packs: if one is damaged or gone, the next may be good.
        for is_last in (False, True):
            for place in list(self._places(entry.key)):
                path = self._path(self._packs[place.pack])
                try:
                    return self._read(place, path, entry)
                except FileNotFoundError:
                    self._is_there[place.pack] = False
                except OSError as error:
                    reason = f"cannot be read: {error.strerror or error}"
                    raise errors.ClipError(path, reason) from error
                except ValueError as error:
                    self._refuse(place, entry, error)
                    reason = f"{entry.what} is damaged in the cache: {error}"
                    failure = errors.ClipError(path, reason)
            if failure is None and not is_last:  # another process may have written it
                self.refresh()
        reason = f"the cache does not hold {entry.what}; longtake data cache RECIPE fills it"
        raise failure or errors.ClipError(self.folder / entry.kind, reason)

    def written(self, name: str) -> None:
        """Add a pack that this process wrote; look for packs of other processes once a minute."""
        if time.monotonic() - self._listed_at > _REFRESH_SECONDS:
            self.refresh()
            return
        with self._lock:
            self._take_in([name])

    def refresh(self) -> None:
        """Look for packs that were written, cut off or removed since, and for damaged entries."""
        with self._lock:
            found = {name: size for kind in CACHE_KINDS for name, size in self._listed(kind)}
            for number, (name, size) in enumerate(zip(self._packs, self._sizes, strict=True)):
                self._is_there[number] = found.get(name) == size
                # Complete packs never change, so another size means that a disk lost a part of it.
                if name in found and not self._is_there[number]:
                    self._put_aside(name, f"has {found[name]:,} of {size:,} bytes")
            self._take_in([name for name in found if name not in self._numbers])
            self._listed_at = time.monotonic()
            for marker in (self.folder / "damaged").glob("*"):
                name, _, key = marker.name.partition(".")
                for kind in CACHE_KINDS:
                    if (known := self._numbers.get(f"{kind}/{name}")) is not None:
                        self._damaged.add((known, key))

    def save(self) -> None:
        """Write the places of all cache entries to a file that later processes map to memory."""
        with self._lock:
            if len(self._runs) == self._num_saved:
                return
            runs, there = list(self._runs), np.array([*self._is_there, False])
            packs = [(self._packs[number], self._sizes[number]) for number in np.flatnonzero(there)]
        # One column at a time: the columns of 10^8 entries take 3 GB together.
        order = np.argsort(np.concatenate([run.high for run in runs]), kind="stable")
        pack = np.concatenate([run.pack for run in runs])[order]
        is_kept = there[np.minimum(pack, len(there) - 1)]  # a damaged index has any number
        # Packs that are gone are left out of the file, so the others get new, dense numbers.
        order, pack = order[is_kept], (np.cumsum(there) - 1)[pack[is_kept]].astype(np.uint32)
        facts = {"format": PACK_FORMAT, "packs": packs, "layouts": self._layout_texts}
        tensors = {name: (kind, (len(order),)) for name, kind in _COLUMNS.items()}
        header = _header_of(tensors, {_FACTS: json.dumps(facts)})
        folder = self.folder / "index"
        path = folder / f"{secrets.token_hex(8)}{_SUFFIX}"
        with suppress(OSError):  # on failure, later processes read the packs' headers instead
            folder.mkdir(parents=True, exist_ok=True)
            with fsio.atomic_write(path) as partial, partial.open("xb") as file:
                file.write(header)
                for name in _COLUMNS:
                    column = (getattr(run, name) for run in runs)
                    (pack if name == "pack" else np.concatenate([*column])[order]).tofile(file)
            for other in folder.iterdir():
                is_old = time.time() - other.lstat().st_mtime > _INDEX_SECONDS
                if is_old and _INDEX_NAME.fullmatch(other.name):
                    other.unlink(missing_ok=True)

    def _load(self) -> None:
        """Map the newest intact file with places of cache entries to memory."""
        found = sorted(
            (path.stat().st_mtime_ns, path) for path in (self.folder / "index").glob(f"*{_SUFFIX}")
        )
        for _, path in reversed(found):
            try:
                with fsio.open_regular(path) as file:
                    header, start = _parsed(file.read(8), file.read)
                    data = np.memmap(file, np.uint8, "r")
                facts = _facts_of(header, path)
                columns = []
                for name, kind in _COLUMNS.items():
                    begin, end = header[name]["data_offsets"]
                    column = data[start + begin : start + end].view(_NUMBERS[kind])
                    columns.append(np.asarray(column))
                run = _Run(*columns)
                for text in facts["layouts"]:
                    self._layout(text)
                packs = [(str(name), int(size)) for name, size in facts["packs"]]
                if len({len(column) for column in run}) > 1:
                    continue
            except (OSError, *_MALFORMED):
                continue
            for name, size in packs:
                # Sizes are compared by the `refresh` that follows, so an old index is safe to use.
                self._pack(name, size)
            self._runs, self._num_saved = [run], 1
            return

    def _places(self, key: str) -> Iterator[_Place]:
        number = int(key, 16)
        high, low = np.uint64(number >> 64), np.uint64(number & (2**64 - 1))
        # The newest run first. `high` alone is searched: equal first halves of 64 bits are rare.
        for run in reversed(self._runs):
            at = int(np.searchsorted(run.high, high))
            while at < len(run.high) and run.high[at] == high:
                if run.low[at] == low:
                    place = _Place(*(int(column[at]) for column in run[2:]))
                    # Only a damaged index has numbers of no pack or layout.
                    is_known = place.pack < len(self._packs) and place.layout < len(self._layouts)
                    is_usable = is_known and (place.pack, key) not in self._damaged
                    if is_usable and self._is_there[place.pack]:
                        yield place
                at += 1

    # The size is compared again on the open file: it may have changed since the last refresh.
    def _read(self, place: _Place, path: Path, entry: CacheEntry) -> dict[str, Tensor]:
        layout = self._layouts[place.layout]
        num_bytes = sum(part.num_bytes() for part in layout)
        if place.offset + num_bytes > self._sizes[place.pack]:
            raise ValueError("it would end after the pack")
        data = torch.empty(num_bytes, dtype=torch.uint8)
        with fsio.open_regular(path) as file:
            if (size := os.fstat(file.fileno()).st_size) != self._sizes[place.pack]:
                raise DamagedPackError(f"it has {size:,} of {self._sizes[place.pack]:,} bytes")
            file.seek(place.offset)
            if (count := file.readinto(data.numpy().data)) < num_bytes:
                raise ValueError(f"{count:,} of its {num_bytes:,} bytes are there")
        text = self._layout_texts[place.layout]
        if self._verify and _checksum(entry.key, text, [data]) != place.checksum:
            raise ValueError("its content is not what was written")
        found, begin = {}, 0
        for part in layout:
            end = begin + part.num_bytes()
            stored = data[begin:end].view(_TYPES[part.stored]).reshape(part.shape)
            stored, begin = stored.to(_TYPES[part.dtype]), end
            if part.shape and (missing := part.rows - len(stored)):
                stored = torch.cat([stored, stored.new_zeros(missing, *stored.shape[1:])])
            found[part.name] = stored
        return found

    def _refuse(self, place: _Place, entry: CacheEntry, error: ValueError) -> None:
        """Record that a cache entry or pack is damaged, so that every process computes it again."""
        name = self._packs[place.pack]
        if isinstance(error, DamagedPackError):
            self._is_there[place.pack] = False
            self._put_aside(name, str(error).removeprefix("it "))
            return
        self._damaged.add((place.pack, entry.key))
        with suppress(OSError):
            (self.folder / "damaged").mkdir(exist_ok=True)
            (self.folder / "damaged" / f"{Path(name).name}.{entry.key}").touch()

    def _put_aside(self, name: str, reason: str) -> None:
        """Move a damaged pack file to the folder of damaged ones."""
        path, folder = self._path(name), self.folder / "damaged"
        self.refused[path] = f"{reason}, and was moved to {folder}; its entries are computed again"
        with suppress(OSError):
            folder.mkdir(exist_ok=True)
            path.rename(folder / f"{name.replace('/', '.')}{_SUFFIX}")

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{_SUFFIX}"

    def _listed(self, kind: str) -> Iterator[tuple[str, int]]:
        """Yield name and size of each pack of a kind, except those that are being written."""
        folder = self.folder / kind
        try:
            with os.scandir(folder) as found:
                for each in found:
                    if each.name.endswith(_SUFFIX) and not each.name.startswith("."):
                        with suppress(FileNotFoundError):
                            size = each.stat().st_size
                            yield f"{kind}/{each.name.removesuffix(_SUFFIX)}", size
        except OSError as error:
            if not fsio.is_missing(error):
                why = error.strerror or error
                raise errors.DataError(f"The cache cannot be read: {folder}: {why}.") from error

    def _header(self, name: str) -> _Header | None:
        path = self._path(name)
        try:
            with fsio.open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                header, start = _parsed(file.read(8), file.read)
            _facts_of(header, path)
            return _Header(name, size, list(_entries_of(header, start, size)))
        except FileNotFoundError:
            return None
        except OSError as error:
            self.refused[path] = f"cannot be read: {error.strerror or error}"
            return None
        except _MALFORMED as error:
            if isinstance(error, DamagedPackError):
                self._put_aside(name, str(error))
            else:  # the file may not be longtake's
                self.refused[path] = "has no header of a pack, and was left where it is"
            return None

    def _take_in(self, names: Sequence[str]) -> None:
        runs = list[_Run]()
        with ThreadPoolExecutor(_THREADS) as pool:
            for header in filter(None, pool.map(self._header, names)):
                pack = self._pack(header.name, header.size)
                rows = [
                    (int(key[:16], 16), int(key[16:], 16), pack, at, self._layout(text), checksum)
                    for key, at, text, checksum in header.entries
                ]
                # Columns are made per pack: they take less memory than the rows of many packs.
                table = np.array(rows, [(name, _NUMBERS[kind]) for name, kind in _COLUMNS.items()])
                runs.append(_Run(*(table[name] for name in _COLUMNS)))
        if runs:
            # The run of the index file stays as it is, mapped and out of memory.
            saved, others = self._runs[: self._num_saved], self._runs[self._num_saved :]
            columns = [np.concatenate(each) for each in zip(*others, *runs, strict=True)]
            order = np.argsort(columns[0], kind="stable")
            self._runs = [*saved, _Run(*(column[order] for column in columns))]

    def _pack(self, name: str, size: int) -> int:
        self._numbers[name] = len(self._packs)
        self._packs.append(name)
        self._sizes.append(size)
        self._is_there.append(True)
        return self._numbers[name]

    def _layout(self, text: str) -> int:
        if text not in self._layout_numbers:
            self._layouts.append(tuple(_part(*each) for each in json.loads(text)))
            self._layout_texts.append(text)
            self._layout_numbers[text] = len(self._layouts) - 1
        return self._layout_numbers[text]


@dataclass
class _OpenPack:
    """Cache entries in memory that will be written to one pack file."""

    since: float
    header: dict[str, tuple[str, tuple[int, ...]]]
    metadata: dict[str, str]
    contents: list[Tensor]
    num_bytes: int = 0


class PackWriter:
    """Collects cache entries in memory and writes them as packs; the last when the context ends.

    Raises:
        DataError: a pack cannot be written.
    """

    def __init__(self, index: PackIndex) -> None:
        self.num_bytes = 0  # size of all files written
        self._index = index
        self._open: dict[str, _OpenPack] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Also after an error or Ctrl-C, so that nothing that was encoded is lost.
        for kind in list(self._open):
            self._write(kind)

    def holds(self, entry: CacheEntry) -> bool:
        """Return true if a cache entry waits in memory or is in a pack."""
        pack = self._open.get(entry.kind)
        return (pack is not None and entry.key in pack.metadata) or self._index.holds(entry)

    def add(self, entry: CacheEntry, tensors: Mapping[str, Tensor]) -> None:
        """Add the tensors of a cache entry, which is written with its pack.

        The file holds float32 as bfloat16 where that is exact, and no rows of zeros at the end;
        `read` restores both.
        """
        pack = self._open.get(entry.kind)
        if pack is None:
            pack = self._open[entry.kind] = _OpenPack(time.monotonic(), {}, {}, [])
        stored = {}
        for name, tensor in tensors.items():
            # A copy: no memory is shared, and no row or column has an odd stride.
            tensor = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
            rows = len(tensor) if tensor.ndim else 0  # scalars have no rows
            stored[name] = tensor.dtype, rows, _narrow(_without_last_zeros(tensor))
        # Sorted by falling item size, so that each tensor is aligned to the size of its numbers.
        names = sorted(stored, key=lambda name: (-stored[name][2].itemsize, name))
        parts, contents = [], []
        for name in names:
            dtype, rows, tensor = stored[name]
            kind, shape = _TYPE_NAMES[tensor.dtype], tuple(tensor.shape)
            parts.append(_Part(name, kind, shape, _TYPE_NAMES[dtype], rows))
            contents.append(tensor.reshape(-1).view(torch.uint8))
            pack.header[f"{entry.key}.{name}"] = kind, shape
        checksum = _checksum(entry.key, _text_of(parts), contents)
        of = {part.name: [part.dtype, part.rows] for part in parts}
        pack.metadata[entry.key] = json.dumps({"what": entry.what, "checksum": checksum, "of": of})
        pack.contents += contents
        pack.num_bytes += sum(len(each) for each in contents)
        is_old = time.monotonic() - pack.since > _PACK_SECONDS
        if pack.num_bytes >= PACK_BYTES or len(pack.metadata) >= _MAX_PACK_ENTRIES or is_old:
            self._write(entry.kind)

    def _write(self, kind: str) -> None:
        pack, folder = self._open.pop(kind), self._index.folder / kind
        path = folder / f"{secrets.token_hex(8)}{_SUFFIX}"
        facts = {_FACTS: json.dumps({"format": PACK_FORMAT})}
        header = _header_of(pack.header, facts | pack.metadata)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with fsio.atomic_write(path) as partial:
                with partial.open("xb") as file:
                    file.write(header)
                    for each in pack.contents:
                        file.write(each.numpy().data)
                # Before it gets its name: after a power failure a pack is whole or absent.
                fsio.flush_to_disk(partial)
        except OSError as error:
            raise cannot_write(path, error) from error
        self.num_bytes += len(header) + pack.num_bytes
        self._index.written(f"{kind}/{path.stem}")


def cannot_write(path: Path, error: OSError) -> errors.DataError:
    return errors.DataError(
        f"The cache cannot be written: {path}: {error.strerror or error}. Make room or make it "
        "writable, or choose another folder with --set data.cache=FOLDER."
    )


def _part(name: str, stored: str, shape: Sequence[int], dtype: str, rows: int) -> _Part:
    part = _Part(name, stored, tuple(shape), dtype, rows)
    if not {stored, dtype} <= _TYPES.keys() or not 0 <= (*shape, 0)[0] <= rows:
        raise ValueError(f"unknown layout: {part}")
    return part


def _text_of(parts: Sequence[_Part]) -> str:
    return json.dumps([list(part) for part in parts], separators=(",", ":"))


def _checksum(key: str, layout: str, contents: Sequence[Tensor]) -> int:
    """Return the lower half of XXH3-64 over a cache entry; it detects damage, not tampering."""
    found = xxhash.xxh3_64(f"{key} {layout}".encode())
    for each in contents:
        found.update(each.numpy().data)
    return found.intdigest() % 2**32


def _header_of(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """Return the header of a safetensors file; its tensors must follow in this order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    begin = 0
    for name, (kind, shape) in tensors.items():
        itemsize = _NUMBERS[kind].itemsize if kind in _NUMBERS else _TYPES[kind].itemsize
        end = begin + math.prod(shape) * itemsize
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # Tensors start at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _parsed(start: bytes, read: Callable[[int], Any]) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and the offset at which its tensors begin."""
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > _MAX_HEADER_BYTES:
        raise ValueError("no header")
    header: dict[str, Any] = json.loads(bytes(read(length)))
    return header, 8 + length


def _facts_of(header: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the metadata that longtake wrote into the file of a pack or index.

    Raises:
        DataError: the file has another format.
    """
    facts: dict[str, Any] = json.loads(header["__metadata__"][_FACTS])
    if facts["format"] != PACK_FORMAT:
        raise errors.DataError(
            f"{path} has format {facts['format']}, and this longtake reads format {PACK_FORMAT}: "
            "use the longtake that wrote it, or another folder with --set data.cache=FOLDER."
        )
    return facts


def _entries_of(
    header: Mapping[str, Any], start: int, size: int
) -> Iterator[tuple[str, int, str, int]]:
    """Yield (key, offset, layout, checksum) of each cache entry in a pack, which they must fill."""
    end = 0
    tensors = (name for name in header if name != "__metadata__")
    for key, names in groupby(tensors, key=lambda name: name.partition(".")[0]):
        facts, begin, layout = json.loads(header["__metadata__"][key]), end, []
        for name in names:
            short, each = name.partition(".")[2], header[name]
            dtype, rows = facts["of"][short]
            part = _part(short, each["dtype"], each["shape"], dtype, rows)
            if each["data_offsets"] != [end, end + part.num_bytes()]:
                raise ValueError("tensors do not follow each other")
            layout.append(part)
            end += part.num_bytes()
        offset, checksum = start + begin, facts["checksum"]
        is_entry = _KEY.fullmatch(key) and 0 <= checksum < 2**32 and offset < 2**32
        if not is_entry or len(layout) != len(facts["of"]):
            raise ValueError(f"no entry: {key}")
        yield key, offset, _text_of(layout), checksum
    if start + end != size:
        raise DamagedPackError(f"has {size:,} of {start + end:,} bytes")


def _without_last_zeros(tensor: Tensor) -> Tensor:
    if not tensor.ndim:
        return tensor
    # Compared as bytes, because -0.0 equals 0.0 but must be kept.
    filled = tensor.reshape(len(tensor), -1).view(torch.uint8).any(dim=1).nonzero()
    return tensor[: int(filled[-1]) + 1 if len(filled) else 0]


def _narrow(tensor: Tensor) -> Tensor:
    """Convert a tensor to bfloat16 if that is exact; else return it unchanged."""
    if tensor.dtype != torch.float32:
        return tensor
    narrow = tensor.bfloat16()
    is_exact = torch.equal(narrow.float().view(torch.int32), tensor.view(torch.int32))
    return narrow if is_exact else tensor

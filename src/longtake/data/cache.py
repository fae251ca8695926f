"""Latents and prompt embeddings that were computed once: the keys of entries, and reading batches.

    CACHE/latents/…             packs (see `longtake.data.packs`) of windows of clips
    CACHE/conditioning/…        of further inputs: latents, values as they were read, or what a
                                family makes of several
    CACHE/prompts/…             of captions, alone or with their pictures
    CACHE/index/, damaged/      of all packs
    CACHE/hashes/5b27….jsonl    content hashes of further inputs, by path
    CACHE/encoders/90c1….jsonl  content hashes of encoders' weights, by path
    CACHE/aside/                encoders with random weights while a cache is filled
    CACHE/longtake_cache.json   marks the folder as longtake's

A key is a hash of the content, the window and the encoder's fingerprint, so several recipes and
processes share a folder.
"""

import hashlib
import json
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any, Literal

import torch
from torch import Tensor

from longtake.config import Bucket, DataSection
from longtake.data import stores
from longtake.data.clip import IMAGE_SUFFIXES, Clip, Media
from longtake.data.conditioning import (
    ConditioningPixels,
    Wanted,
    conditioning_of,
)
from longtake.data.decode import content_hash
from longtake.data.packs import CACHE_KINDS, PACK_FORMAT, CacheEntry, PackIndex, cannot_write
from longtake.data.window import Window
from longtake.data.workers import WorkerIncident
from longtake.errors import ClipError, RecordError
from longtake.fsio import claim_folder, make_writable, read_records, remove_tree

_OLD_SECONDS = 24 * 3600
_LEFT_BEHIND = re.compile(r"(parts|sign)-[0-9a-f]{16}|\.[0-9a-f]{16}\.partial\.safetensors")
_THREADS = 4


_Stamp = tuple[int, int]


@dataclass(frozen=True)
class CacheFailure:
    """A window is not in the cache, as it, or a further input of it, cannot be decoded."""

    identity: str
    path: str
    reason: str


@dataclass(frozen=True)
class SamplePart:
    """One entry of a sample: what is read for it, and what becomes of that.

    `latents`: the codec's. `values`: as they were read. `inputs`: what the family makes of all of
    them together (`Family.encode_inputs`). `prompt`: what text encoders make of a caption and them.
    """

    made: Literal["latents", "values", "inputs", "prompt"]
    reads: Mapping[str, Wanted]  # by names in data.conditioning; "" is the clip itself
    bucket: Bucket  # the clip's
    caption: str = ""  # of a prompt


@dataclass(frozen=True)
class Cache:
    """What a recipe's encoders make of clips, further inputs and captions; can be pickled."""

    folder: Path  # whether it is there yet or not
    codec: str  # fingerprint of what encodes clips and further inputs
    text: str  # fingerprint of what encodes captions
    data: DataSection
    no_caption: str  # what a dropped caption is encoded as
    together: tuple[str, ...] = ()  # names of the inputs that the family encodes itself
    inputs: str = ""  # fingerprint of what encodes them
    with_text: tuple[str, ...] = ()  # names of the pictures that are encoded with captions

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @cached_property
    def unconditional(self) -> dict[str, Tensor]:
        """The embeddings of no caption.

        Raises:
            ClipError: they are not there, or damaged.
        """
        return self.packs.read(self.prompt(self.no_caption))

    @cached_property
    def packs(self) -> PackIndex:
        """All packs that are there when it is first asked for."""
        return PackIndex(self.folder, verify=self.data.cache_checksums)

    def stored(self, latents: Tensor) -> Tensor:
        """What `data.cache_dtype` leaves of an encoder's output."""
        is_rounded = self.data.cache_dtype == "bf16" and latents.dtype == torch.float32
        return latents.bfloat16().float() if is_rounded else latents

    @cached_property
    def _hashes(self) -> "ContentHashes":
        return ContentHashes(self.folder / "hashes")

    def hash_of_file(self, path: str) -> str:
        return self._hashes.of(path)

    def parts(self, clip: Clip, window: Window, captions: Iterable[str] = ()) -> list[SamplePart]:
        """All that a sample consists of, but captions that are encoded without pictures.

        Args:
            clip: of the sample.
            window: of the clip.
            captions: that are encoded with its pictures; its own and no caption, if there are none.
        """
        inputs = conditioning_of(clip, window, self.data.conditioning)
        size = {"height": window.height, "width": window.width}
        bucket = Bucket(num_frames=window.num_frames, **size)
        parts = [SamplePart("latents", {"": window}, bucket)]
        for name, wanted in inputs.items():
            if name not in self.together:
                made: Any = "latents" if self.data.conditioning[name].is_encoded else "values"
                parts.append(SamplePart(made, {name: wanted}, bucket))
        if self.together:
            mine = {name: inputs[name] for name in self.together}
            parts.append(SamplePart("inputs", mine, bucket))
        if self.with_text:
            seen = {name: inputs[name] for name in self.with_text}
            texts = dict.fromkeys(captions or (clip.caption, self.no_caption))
            parts += [SamplePart("prompt", seen, bucket, each) for each in texts]
        return parts

    def entry(self, part: SamplePart) -> CacheEntry:
        """Where a part of a sample is.

        Raises:
            ClipError: an input's file cannot be read.
        """
        if part.made in ("latents", "values"):
            ((name, wanted),) = part.reads.items()
            return self.conditioning(name, wanted)
        each = [[name, *self._facts(wanted)] for name, wanted in part.reads.items()]
        what = ", ".join(f"{name} {wanted.media}" for name, wanted in part.reads.items())
        if part.made == "prompt":
            what = f"the embeddings of {part.caption!r} with {what}"
            return self._entry("prompts", self.text, (part.caption, *each), what)
        facts = [part.bucket.num_frames, part.bucket.height, part.bucket.width]
        return self._entry("conditioning", self.inputs, (*facts, *each), what)

    def latents(self, window: Window) -> CacheEntry:
        what = f"the latents of {window.media} from frame {window.start}"
        return self._entry("latents", self.codec, self._facts(window), what)

    def conditioning(self, name: str, wanted: Wanted) -> CacheEntry:
        """Where a further input is: `latents` if the codec encodes it, else `values`.

        Raises:
            ClipError: the input's file cannot be read.
        """
        if isinstance(wanted, Window):  # a frame of the clip
            return self.latents(wanted)
        codec = self.codec if self.data.conditioning[name].is_encoded else ""
        return self._entry("conditioning", codec, self._facts(wanted), f"{name} {wanted.media}")

    def _facts(self, wanted: Wanted) -> tuple[object, ...]:
        """What decides the numbers that are read."""
        if isinstance(wanted, Window):
            facts: list[object] = [wanted.identity, wanted.kind, wanted.stream_index]
            facts += [wanted.rotation, wanted.start, wanted.num_frames, wanted.stride]
            facts += [wanted.scaled_height, wanted.scaled_width, wanted.top, wanted.left]
            facts += [wanted.height, wanted.width, wanted.is_flipped]
            facts += [wanted.untagged] if wanted.is_untagged and wanted.untagged != "bt601" else []
            return (*facts, *([wanted.frames] if wanted.frames else []))
        values = getattr(wanted, "values", None)
        facts = [self._hashes.of(wanted.media.path) if values is None else values]
        if isinstance(wanted, ConditioningPixels):
            facts += [wanted.kind, wanted.clip_height, wanted.clip_width]
            is_video = PurePath(wanted.media.path).suffix.lower() not in IMAGE_SUFFIXES
            facts += [wanted.untagged] if is_video and wanted.untagged != "bt601" else []
            facts += ["over black"] if wanted.kind == "mask" else []  # older ones were over white
            facts += [*astuple(wanted.clip_crop), wanted.height, wanted.width, wanted.is_flipped]
        else:
            facts += ["numbers", wanted.width, wanted.is_per_frame, wanted.clip_frames]
        facts += [wanted.start, wanted.num_frames, wanted.stride]
        return (*facts, *([wanted.frames] if wanted.frames else []))

    def prompt(self, caption: str) -> CacheEntry:
        return self._entry("prompts", self.text, (caption,), f"the embeddings of {caption!r}")

    def _entry(self, kind: str, encoder: str, facts: tuple[object, ...], what: str) -> CacheEntry:
        dtype = [self.data.cache_dtype] if encoder and self.data.cache_dtype != "fp32" else []
        text = json.dumps([PACK_FORMAT, kind, encoder, *dtype, *facts], separators=(",", ":"))
        return CacheEntry(kind, hashlib.blake2b(text.encode(), digest_size=16).hexdigest(), what)


@dataclass(frozen=True)
class _Content:
    """A sample: latents [C, F', H', W'], what is encoded of its conditioning, and what is not."""

    latents: Tensor
    conditioning: dict[str, Tensor]
    inputs: dict[str, Tensor]
    no_caption: dict[str, Tensor]


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

    def take_fetched(self) -> stores.Fetched:
        return stores.Fetched()

    def close(self) -> None:
        self.threads.shutdown(wait=True, cancel_futures=True)

    def content(self, clip: Clip, window: Window) -> _Content:
        cache = self.cache
        entry = cache.latents(window)
        if failure := self._failures.get(entry.key):
            raise ClipError(failure.path, failure.reason)
        packs, inputs = cache.packs, dict[str, Tensor]()
        conditioning, no_caption = dict[str, Tensor](), dict[str, Tensor]()
        if not cache.with_text:
            no_caption = cache.unconditional  # missing there, it is missing to every sample
            conditioning = packs.read(cache.prompt(clip.caption))
        for part in cache.parts(clip, window):
            found = packs.read(cache.entry(part))
            if part.made == "inputs":
                conditioning |= found
                continue
            if part.made == "prompt":
                no_caption = found if part.caption == cache.no_caption else no_caption
                conditioning |= found if part.caption == clip.caption else {}
                continue
            ((name, wanted),) = part.reads.items()
            if part.made == "latents":
                conditioning[f"{name}_latents" if name else ""] = found["latents"]
            else:
                frames = getattr(wanted, "num_frames", 1)
                values = found["values"]  # of equal frames one is kept
                inputs[name] = values.expand(-1, frames, -1, -1) if values.ndim == 4 else values
        return _Content(conditioning.pop(""), conditioning, inputs, no_caption)


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

    def reshaped(self, shape: Bucket) -> "CachedBuffer":
        return CachedBuffer(self._source, shape, len(self._filled))

    def copy(self, source: int, place: int) -> None:
        self._filled[place] = self._filled[source]

    def fields(self) -> dict[str, Any]:
        contents = [each for each in self._filled if each is not None]
        assert len(contents) == len(self._filled)
        no_captions = [each.no_caption for each in contents]
        if not self._source.cache.with_text:
            no_captions = no_captions[:1]
        size = (len(contents), 3, 0, self._shape.height, self._shape.width)
        return {
            "videos": torch.empty(size, dtype=torch.uint8),
            "latents": torch.stack([each.latents for each in contents]),
            "conditioning": _stacked([each.conditioning for each in contents]),
            "inputs": _stacked([each.inputs for each in contents]),
            "no_caption": _stacked(no_captions),
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
        self._asked = set[str]()
        self._lock = threading.Lock()

    def of(self, path: str) -> str:
        """A file's hash, as hex digits.

        Raises:
            ClipError: there is no such file, it is empty or cannot be read.
        """
        known = self._remembered()
        if path in self._asked:  # a store is asked once
            return known[path][1]
        stamp = _stamp(path)
        if (found := known.get(path)) and found[0] == stamp:
            self._asked |= {path} if "://" in path else set()
            return found[1]
        content = self._hash_of(path)
        with self._lock:
            known[path] = stamp, content
            with suppress(OSError):  # then somebody reads it again
                if not self._mine.exists():
                    claim_folder(self._folder.parent, [self._folder.name])
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
        DataError: it cannot be written, holds files of others, or links.
    """
    places = [folder / name for name in ("aside", *CACHE_KINDS)]
    try:
        claim_folder(folder, [path.name for path in places])
        make_writable(folder / "aside")
        for left in (path for place in places if place.is_dir() for path in place.iterdir()):
            with suppress(FileNotFoundError):  # another process tidies up, too
                is_old = time.time() - left.lstat().st_mtime > _OLD_SECONDS
                if is_old and _LEFT_BEHIND.fullmatch(left.name):
                    remove_tree(left) if left.is_dir() else left.unlink()
    except OSError as error:
        raise cannot_write(folder, error) from error


def _stamp(path: str) -> _Stamp:
    media = Media(path)
    if media.is_remote:
        media = stores.measured(media)
        return media.num_bytes or 0, media.stamp
    try:
        status = Path(path).stat()
    except OSError as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else error.strerror
        raise ClipError(path, f"{reason or error}") from error
    return status.st_size, status.st_mtime_ns

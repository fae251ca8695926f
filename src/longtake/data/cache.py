"""Cached latents and prompt embeddings: the keys of cache entries, and reading batches of them.

    CACHE/latents/…             packs (see `longtake.data.packs`) of windows of clips
    CACHE/conditioning/…        packs of further inputs: latents, plain values, or what a family
                                computes from several
    CACHE/prompts/…             packs of captions, alone or with their pictures
    CACHE/index/, damaged/      index and damaged entries of all packs
    CACHE/hashes/5b27….jsonl    content hashes of further inputs, by path
    CACHE/encoders/90c1….jsonl  content hashes of encoders' weights, by path
    CACHE/aside/                encoders with random weights while a cache is filled
    CACHE/longtake_cache.json   marks the folder as longtake's

A key is a hash of the content, the window and the encoder's fingerprint, so several recipes and
processes can share a folder. Further inputs are those of `data.conditioning`.
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

from longtake.config import AUDIO, AudioFormat, Bucket, DataSection
from longtake.data import stores
from longtake.data.audio import AudioWindow, audio_of
from longtake.data.clip import IMAGE_SUFFIXES, Clip, Media
from longtake.data.conditioning import ConditioningPixels, Wanted, conditioning_of
from longtake.data.decode import content_hash
from longtake.data.packs import CACHE_KINDS, PACK_FORMAT, CacheEntry, PackIndex, cannot_write
from longtake.data.window import Window
from longtake.data.workers import WorkerIncident
from longtake.errors import ClipError, RecordError
from longtake.fsio import claim_folder, make_writable, read_records, remove_tree

# Files that killed processes left behind are removed when they are this old.
_OLD_SECONDS = 24 * 3600
_LEFT_BEHIND = re.compile(r"(parts|sign)-[0-9a-f]{16}|\.[0-9a-f]{16}\.partial\.safetensors")
_THREADS = 4  # threads that read entries for batches


@dataclass(frozen=True)
class CacheFailure:
    """Reason why a clip's window is not in the cache: it, or an input of it, cannot be decoded."""

    identity: str
    path: str
    reason: str


@dataclass(frozen=True)
class SamplePart:
    """The content of one cache entry of a training sample: the inputs to encode, and how.

    Values of `made`: `latents` (the codec's output), `values` (the input as it was read), `inputs`
    (what the family computes from several inputs, `Family.encode_inputs`), `prompt` (embeddings of
    a caption, with pictures where the family uses them), `audio` (latents of the clip's sound, and
    where it is).
    """

    made: Literal["latents", "values", "inputs", "prompt", "audio"]
    reads: Mapping[str, Wanted]  # inputs by name in data.conditioning; "" is the clip itself
    bucket: Bucket  # shape of the clip's window
    caption: str = ""  # for a prompt


@dataclass(frozen=True)
class Cache:
    """A recipe's cache of encoded clips, conditioning inputs and captions; can be pickled."""

    folder: Path  # need not exist
    codec: str  # fingerprint of the encoder of clips and further inputs
    text: str  # fingerprint of the encoders of captions
    data: DataSection
    no_caption: str  # text that is encoded in place of a dropped caption
    together: tuple[str, ...] = ()  # names of the inputs that the family itself encodes together
    inputs: str = ""  # fingerprint of the encoder of the inputs `together`
    with_text: tuple[str, ...] = ()  # names of the pictures that are encoded together with captions
    audio: AudioFormat | None = None  # sound that the model takes; None: none is kept
    audio_codec: str = ""  # fingerprint of its encoder

    def __getstate__(self) -> dict[str, Any]:
        # The open packs and hashes are cached properties: another process opens its own.
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @cached_property
    def unconditional(self) -> dict[str, Tensor]:
        """Embeddings of the empty caption.

        Raises:
            ClipError: the entry is missing or damaged.
        """
        return self.packs.read(self.prompt(self.no_caption))

    @cached_property
    def packs(self) -> PackIndex:
        """Index of the cache's pack files, opened at the first use."""
        return PackIndex(self.folder, verify=self.data.cache_checksums)

    def stored(self, latents: Tensor) -> Tensor:
        """Round an encoder's output to `data.cache_dtype`, and return it in its own dtype."""
        is_rounded = self.data.cache_dtype == "bf16" and latents.dtype == torch.float32
        return latents.bfloat16().float() if is_rounded else latents

    @cached_property
    def hashes(self) -> "ContentHashes":
        """Content hashes of the files of `data.conditioning` inputs."""
        return ContentHashes(self.folder / "hashes")

    def parts(self, clip: Clip, window: Window, captions: Iterable[str] = ()) -> list[SamplePart]:
        """Return the cache entries of a sample, without captions that are encoded alone.

        Args:
            clip: clip of the sample.
            window: window of the clip.
            captions: texts to encode together with pictures; if empty, the clip's caption and the
                empty caption.
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
        if self.audio is not None:
            sound = audio_of(clip, window, self.audio)
            parts.append(SamplePart("audio", {AUDIO: sound}, bucket))
        if self.with_text:
            seen = {name: inputs[name] for name in self.with_text}
            texts = dict.fromkeys(captions or (clip.caption, self.no_caption))
            parts += [SamplePart("prompt", seen, bucket, each) for each in texts]
        return parts

    def entry(self, part: SamplePart) -> CacheEntry:
        """Return the key under which the cache holds a part (latents, prompt ...) of a sample.

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
        if part.made == "audio":
            assert self.audio is not None
            length = self.audio.seconds(part.bucket.num_frames)
            return self._entry("conditioning", self.audio_codec, (length, *each), what)
        facts = [part.bucket.num_frames, part.bucket.height, part.bucket.width]
        return self._entry("conditioning", self.inputs, (*facts, *each), what)

    def latents(self, window: Window) -> CacheEntry:
        """Return the key under which the cache holds the latents of a clip's window."""
        what = f"the latents of {window.media} from frame {window.start}"
        return self._entry("latents", self.codec, self._facts(window), what)

    def conditioning(self, name: str, wanted: Wanted) -> CacheEntry:
        """Return the key of a `data.conditioning` input: its latents if encoded, else its values.

        Raises:
            ClipError: the input's file cannot be read.
        """
        if isinstance(wanted, Window):  # the input is a frame of the clip
            return self.latents(wanted)
        codec = self.codec if self.data.conditioning[name].is_encoded else ""
        return self._entry("conditioning", codec, self._facts(wanted), f"{name} {wanted.media}")

    def _facts(self, wanted: Wanted) -> tuple[object, ...]:
        """Return all that decides the pixels or numbers of an input, for its entry's cache key."""
        if isinstance(wanted, Window):
            facts: list[object] = [wanted.identity, wanted.kind, wanted.stream_index]
            facts += [wanted.rotation, wanted.start, wanted.num_frames, wanted.stride]
            facts += [wanted.scaled_height, wanted.scaled_width, wanted.top, wanted.left]
            facts += [wanted.height, wanted.width, wanted.is_flipped]
            # Facts that were added later are left out at their old default, so that old keys stay
            # valid.
            facts += [wanted.untagged] if wanted.is_untagged and wanted.untagged != "bt601" else []
            facts += ["tone map"] if wanted.hdr else []
            return (*facts, *([wanted.frames] if wanted.frames else []))
        if isinstance(wanted, AudioWindow):
            facts = [wanted.identity, wanted.stream_index, wanted.first, wanted.offset]
            return (*facts, wanted.num_samples, wanted.rate, wanted.channels)
        values = getattr(wanted, "values", None)
        facts = [values or ("alpha", wanted.identity)]  # of the clip itself, which may be in a tar
        if values is None and not getattr(wanted, "is_alpha", False):
            facts = [self.hashes.of(wanted.media.path)]
        # The crop follows from the clip's size as well as its own, so both are part of the key.
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
        """Return the key under which the cache holds a caption encoded without pictures."""
        return self._entry("prompts", self.text, (caption,), f"the embeddings of {caption!r}")

    def _entry(self, kind: str, encoder: str, facts: tuple[object, ...], what: str) -> CacheEntry:
        # "fp32" is the oldest choice, and not a part of its keys.
        dtype = [self.data.cache_dtype] if encoder and self.data.cache_dtype != "fp32" else []
        text = json.dumps([PACK_FORMAT, kind, encoder, *dtype, *facts], separators=(",", ":"))
        return CacheEntry(kind, hashlib.blake2b(text.encode(), digest_size=16).hexdigest(), what)


@dataclass(frozen=True)
class _Content:
    """Tensors of one sample: latents [C, F', H', W'], encoded conditioning, and plain inputs."""

    latents: Tensor
    conditioning: dict[str, Tensor]
    inputs: dict[str, Tensor]
    no_caption: dict[str, Tensor]


class CachedSource:
    """Reads training samples from a cache of latents and embeddings, with several threads.

    `failures` holds the reasons why windows are not in the cache, by the key of their latents.
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
            no_caption = cache.unconditional  # if missing, every sample fails here
            conditioning = packs.read(cache.prompt(clip.caption))
        # The clip's latents are under "" until the end, like the codec's inputs under their names.
        for part in cache.parts(clip, window):
            found = packs.read(cache.entry(part))
            if part.made in ("inputs", "audio"):
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
                values = found["values"]  # only one of equal frames was stored
                inputs[name] = values.expand(-1, frames, -1, -1) if values.ndim == 4 else values
        return _Content(conditioning.pop(""), conditioning, inputs, no_caption)


class CachedBuffer:
    """The samples of one batch, which threads read from the latent cache."""

    def __init__(self, source: CachedSource, shape: Bucket, num_places: int) -> None:
        self.source = source
        self._shape = shape
        self._pending: dict[int, Future[_Content]] = {}
        self._filled: list[_Content | None] = [None] * num_places

    def begin(self, place: int, clip: Clip, window: Window) -> None:
        """Start to read a sample's cache entries for a place (index) in the batch."""
        self._pending[place] = self.source.threads.submit(self.source.content, clip, window)

    def wait(self, place: int) -> None:
        """Wait until the sample of a place is read; raise ClipError if it cannot be."""
        self._filled[place] = self._pending.pop(place).result()

    def copy(self, source: int, place: int) -> None:
        """Fill a place of the batch with a copy of the sample of another place."""
        self._filled[place] = self._filled[source]

    def fields(self) -> dict[str, Any]:
        """Return the fields of `Batch` that hold tensors; every place must be filled."""
        contents = [each for each in self._filled if each is not None]
        assert len(contents) == len(self._filled)
        no_captions = [each.no_caption for each in contents]
        if not self.source.cache.with_text:
            # Without pictures the empty caption's embeddings are the same for all samples.
            no_captions = no_captions[:1]
        # No pixels: zero frames keep the shape that the training loop expects.
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
    """Content hashes of files, kept in a folder so that later processes need not read the files.

    Each process appends to a file of its own and reads the files of all processes once.

    Args:
        folder: folder of the records; if it cannot be written, nothing is kept.
        hash_of: function from a path to its hash, by default BLAKE2b-128 of the content. One folder
            holds hashes of one function only.
    """

    def __init__(self, folder: Path, hash_of: Callable[[str], str] | None = None) -> None:
        self._folder = folder
        self._hash_of = hash_of or (lambda path: content_hash(Media(path)))
        # On network disks, appends of several machines to one file can overwrite each other.
        self._mine = folder / f"{secrets.token_hex(8)}.jsonl"
        self._of_stores: dict[str, str] = {}
        self._lock = threading.Lock()

    @cached_property
    def _known(self) -> dict[str, tuple[tuple[int, int], str]]:
        """Size, time and content hash of files by path, from the records of all processes."""
        known = {}
        for file in sorted(self._folder.glob("*.jsonl")):
            with suppress(RecordError):
                for record in read_records(file, tuple[str, int, int, str]):
                    known[record[0]] = record[1:3], record[3]
        return known

    def of(self, path: str) -> str:
        """Return a file's hash, as hex digits.

        Raises:
            ClipError: the file does not exist, is empty or cannot be read.
        """
        if path in self._of_stores:  # a store is asked once per process: each request costs time
            return self._of_stores[path]
        media = Media(path)
        if media.is_remote:
            media = stores.measured(media)
            stamp = media.num_bytes or 0, media.stamp
        else:
            try:
                status = Path(path).stat()
            except OSError as error:
                reason = (
                    "does not exist" if isinstance(error, FileNotFoundError) else error.strerror
                )
                raise ClipError(path, f"{reason or error}") from error
            stamp = status.st_size, status.st_mtime_ns
        with self._lock:  # from Python 3.12 on, `cached_property` has none of its own
            known = self._known.get(path)
        if known is None or known[0] != stamp:
            known = stamp, self._hash_of(path)
            self._keep(path, *known)
        if media.is_remote:
            self._of_stores[path] = known[1]
        return known[1]

    def _keep(self, path: str, stamp: tuple[int, int], content: str) -> None:
        with self._lock:
            self._known[path] = stamp, content
            with suppress(OSError):  # on failure, a later process reads the file again
                # Made at the first hash only: to look into a cache that does not exist leaves
                # nothing behind.
                if not self._mine.exists():
                    claim_folder(self._folder.parent, [self._folder.name])
                    make_writable(self._folder)
                with self._mine.open("ab") as file:
                    file.write(json.dumps([path, *stamp, content]).encode() + b"\n")


def make_folder(folder: Path) -> None:
    """Create a cache's folder if needed, and remove what killed processes left behind.

    Raises:
        DataError: the folder cannot be written, or holds files of others or links.
    """
    places = [folder / name for name in ("aside", *CACHE_KINDS)]
    try:
        claim_folder(folder, [path.name for path in places])
        make_writable(folder / "aside")
        for left in (path for place in places if place.is_dir() for path in place.iterdir()):
            with suppress(FileNotFoundError):  # another process may be removing the same files
                is_old = time.time() - left.lstat().st_mtime > _OLD_SECONDS
                if is_old and _LEFT_BEHIND.fullmatch(left.name):
                    remove_tree(left) if left.is_dir() else left.unlink()
    except OSError as error:
        raise cannot_write(folder, error) from error

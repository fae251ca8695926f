"""Latents and prompt embeddings that were computed before: how they are named, written and read.

    CACHE/latents/3f/3f09….safetensors      of a window of a clip
    CACHE/references/07/07b1….safetensors   of a further picture, cut as its clip is
    CACHE/prompts/a2/a2c1….safetensors      of a caption
    CACHE/hashes/5b27….jsonl                content hashes of further pictures, by path
    CACHE/encoders/90c1….jsonl              content hashes of encoders' weights, by path
    CACHE/aside/                            what is being written

A name is a hash of all that decides what the file holds: the content that is encoded, how it is
cut, and the encoder's fingerprint. So nothing is ever out of date, a cache is extended by what is
missing, and several recipes and processes share one folder: each file is written aside and renamed,
and whoever comes second writes the same again.

Files hold exactly what the encoder gave. A value that bf16 can hold is stored as bf16, which halves
the embeddings of a text encoder that computes in bf16; rows of zeros at the end, as captions are
padded with, are left out.
"""

import hashlib
import json
import secrets
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import safetensors
import torch
from safetensors.torch import load, save
from torch import Tensor

from longtake.config import DataSection
from longtake.data.hashes import ContentHashes
from longtake.data.references import Reference, references_of
from longtake.data.window import Window
from longtake.errors import ClipError, DataError
from longtake.fsio import make_writable, open_regular, read_regular

_FORMAT = 1
_DAMAGED = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
_FACTS = "longtake"  # the key of what a file says about itself
_MOST_HEADER_BYTES = 2**20
_OLD_SECONDS = 24 * 3600


@dataclass(frozen=True)
class Entry:
    """One file of a cache.

    Attributes:
        path: where it lies, or would.
        what: what it holds, for people.
    """

    path: Path
    what: str

    @property
    def key(self) -> str:
        """What names it among all entries."""
        return self.path.stem

    @property
    def kind(self) -> str:
        """`latents`, `references` or `prompts`."""
        return self.path.parents[1].name

    def is_whole(self) -> bool:
        """Whether the file is there in its whole length; its content is checked by `read`."""
        try:
            with open_regular(self.path) as file:
                return _header(file) is not None
        except OSError:
            return False

    def read(self) -> dict[str, Tensor]:
        """What was written.

        Raises:
            ClipError: it is not there, or is damaged; then it is removed, to be computed again.
        """
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
        """Write it, whole or not at all; returns the size in bytes.

        Raises:
            DataError: it cannot be written.
        """
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


class Cache:
    """What a recipe's encoders make of clips, pictures and captions.

    Args:
        folder: that holds it, whether it is there yet or not.
        codec: fingerprint of what encodes clips and pictures.
        text: fingerprint of what encodes captions.
        data: the recipe's section.
        no_caption: what a dropped caption is encoded as.
    """

    def __init__(
        self, folder: Path, *, codec: str, text: str, data: DataSection, no_caption: str
    ) -> None:
        self.folder = folder
        self.no_caption = no_caption
        self._codec = codec
        self._text = text
        self._data = data
        self._hashes = ContentHashes(folder / "hashes")
        self._unconditional: dict[str, Tensor] | None = None

    def reopened(self) -> "Cache":
        """The same, with what other processes have meanwhile noted of pictures."""
        return Cache(
            self.folder,
            codec=self._codec,
            text=self._text,
            data=self._data,
            no_caption=self.no_caption,
        )

    def latents(self, window: Window) -> Entry:
        """Where the latents of a window are."""
        facts = (
            *(window.identity, window.kind, window.stream_index, window.rotation),
            *(window.start, window.num_frames, window.stride),
            *(window.scaled_height, window.scaled_width, window.top, window.left),
            *(window.height, window.width, window.is_flipped),
        )
        what = f"the latents of {window.media} from frame {window.start}"
        return self._entry("latents", self._codec, facts, what)

    def reference(self, name: str, reference: Reference) -> Entry:
        """Where the latents of a further picture are.

        Raises:
            ClipError: the picture's file cannot be read.
        """
        facts = (
            *(self._hashes.of(reference.media.path), reference.clip_height, reference.clip_width),
            *astuple(reference.clip_crop),
            *(reference.height, reference.width, reference.is_flipped),
        )
        what = f"the latents of {name} {reference.media}"
        return self._entry("references", self._codec, facts, what)

    def references(self, window: Window) -> dict[str, Reference]:
        """The further pictures of a clip of which a window is trained on, by name."""
        return references_of(window, self._data.references)

    def prompt(self, caption: str) -> Entry:
        """Where the embeddings of a caption are."""
        return self._entry("prompts", self._text, (caption,), f"the embeddings of {caption!r}")

    def unconditional(self) -> dict[str, Tensor]:
        """The embeddings of no caption; read once.

        Raises:
            ClipError: they are not there, or damaged.
        """
        if self._unconditional is None:
            self._unconditional = self.prompt(self.no_caption).read()
        return self._unconditional

    def _entry(self, kind: str, encoder: str, facts: tuple[object, ...], what: str) -> Entry:
        text = json.dumps([_FORMAT, kind, encoder, *facts], separators=(",", ":"))
        key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        return Entry(self.folder / kind / key[:2] / f"{key}.safetensors", what)


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
    """The error that says that a cache cannot be written."""
    return DataError(
        f"The cache cannot be written: {path}: {error.strerror or error}. Make room or make it "
        "writable, or choose another folder with --set data.cache=FOLDER."
    )


def _packed(tensors: Mapping[str, Tensor], what: str) -> bytes:
    """A file's content, with what is needed to undo the packing and to find damage."""
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
    """[rows, bytes of a row] uint8: what torch calls equal may differ, such as 0 and -0."""
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


def _header(file: BinaryIO) -> dict[str, Any] | None:
    """The header of a safetensors file; None if the file has not the length that it says."""
    start = file.read(8)
    header = file.read(min(int.from_bytes(start, "little"), _MOST_HEADER_BYTES))
    return _parse(start, header, file.seek(0, 2))


def _parse(start: bytes, rest: bytes, num_bytes: int) -> dict[str, Any] | None:
    length = int.from_bytes(start, "little")
    try:
        header: dict[str, Any] = json.loads(rest[:length])
        ends = [each["data_offsets"][1] for name, each in header.items() if name[:2] != "__"]
        is_whole = num_bytes == 8 + length + max(ends) and _FACTS in header["__metadata__"]
    except _DAMAGED:
        return None
    return header if is_whole else None

"""Checks that a clip's bytes are still those that were indexed: by size and time, else by content.

Files are often copied without their times, so another time alone is not a change: the content is
hashed then, once per process.
"""

import hashlib
import os
import sys
from collections.abc import Callable
from contextlib import suppress

from longtake.data.clip import Media
from longtake.errors import ClipError
from longtake.fsio import version_of

_READ_BYTES = 4 * 2**20
_MAX_UNEVEN = 100_000  # frames by which a span's start may differ from that at an even rate
_MAX_KNOWN = 100_000
MAX_COPIES = 256

_hashes: dict[tuple[object, ...], str] = {}  # content hashes of files by place, size and time


def check_unchanged(
    media: Media,
    progress: Callable[[], object] = lambda: None,
    hash_of_file: Callable[[str], str] | None = None,
) -> None:
    """Raise ClipError if a local file differs from what was indexed.

    Media that no catalog names are not checked, and a missing file is left to its reader. See
    `known_hash` for `hash_of_file`.
    """
    indexed = media.indexed
    if indexed is None or indexed.file_bytes is None:
        return
    try:
        status = os.stat(media.path)  # noqa: PTH116 - called for every window, as `fsio.is_there`
    except OSError:
        return
    if status.st_size != indexed.file_bytes:
        raise changed(media, f"{status.st_size:,} bytes instead of {indexed.file_bytes:,}")
    if status.st_mtime_ns == indexed.mtime_ns or not indexed.identity:
        return
    if not is_indexed(media, known_hash(media, progress, hash_of_file)):
        raise changed(media, "another content")


def known_hash(
    media: Media,
    progress: Callable[[], object] = lambda: None,
    hash_of_file: Callable[[str], str] | None = None,
) -> str:
    """Return the content hash of a file on disk, computed once per process and version of it.

    `hash_of_file` returns the hash of a whole file from a lasting record.
    """
    version = None
    with suppress(OSError):  # reading a missing file raises the error with the reason
        version = version_of(media.file.stat())
    key = media.file, media.offset, media.num_bytes, version
    if key not in _hashes:
        # The record is of whole files, so a member of a tar is hashed here.
        if hash_of_file and media.num_bytes is None:
            found = hash_of_file(media.path)
        else:
            found = content_hash(media, progress)
        if len(_hashes) >= _MAX_KNOWN:
            _hashes.clear()
        _hashes[key] = found
    return _hashes[key]


def changed(media: Media, how: str) -> ClipError:
    """Return the error for a clip's file that has changed since it was indexed, with the remedy."""
    reason = f"has changed since it was indexed ({how}). Run longtake data index again"
    if media.indexed is not None and media.indexed.is_by_run:
        reason = (
            f"has changed since this run first used it ({how}). Put the former file back, or train "
            "with this one in a run of its own (longtake train --from)"
        )
    return ClipError(str(media), reason)


def is_indexed(media: Media, found: str) -> bool:
    """Return true if a file or tar member with this content hash is the one that was indexed."""
    indexed = media.indexed
    assert indexed is not None
    if media.span is None:
        return _is_of(indexed.identity, found)
    guess = round(media.span[0] * indexed.fps)  # number of the first frame at an even rate
    # The identity of a span contains its first frame, which is unknown if the rate varies: search
    # for it from the guess outwards.
    return any(
        _is_of(indexed.identity, span_identity(found, first, indexed.num_frames))
        for distance in range(_MAX_UNEVEN)
        for first in {guess - distance, guess + distance}
    )


def copy_identity(identity: str, number: int) -> str:
    """Return the identity of a further clip with the same content as another clip.

    Number 0 is the first clip. Only the first two of 32 digits differ, so that the content can
    still be compared.
    """
    return f"{(int(identity[:2], 16) + number) % MAX_COPIES:02x}{identity[2:]}"


def _is_of(identity: str, found: str) -> bool:
    return found[2:] == identity[2:]


def span_identity(file: str, first: int, num_frames: int) -> str:
    """Return the identity of a clip that is a span of frames of the file with this identity."""
    facts = f"{file}:{first}:{first + num_frames}".encode()
    return hashlib.blake2b(facts, digest_size=16).hexdigest()


def content_hash(media: Media, progress: Callable[[], object] = lambda: None) -> str:
    """Return BLAKE2b-128 of a file's bytes on disk as 32 hex digits, independent of its name.

    Raises:
        ClipError: the file is missing, empty, shorter than recorded, or cannot be read.
    """
    path = media.file
    digest, num_read = hashlib.blake2b(digest_size=16), 0
    try:
        if not path.is_file():  # reading a pipe or a device would never end
            raise ClipError(str(media), "is not a file" if path.exists() else "does not exist")
        with path.open("rb") as file:
            file.seek(media.offset)
            size = sys.maxsize if media.num_bytes is None else media.num_bytes
            while piece := file.read(min(size - num_read, _READ_BYTES)):
                digest.update(piece)
                num_read += len(piece)
                progress()
    except OSError as error:
        raise ClipError(str(media), f"cannot be read: {error.strerror or error}") from error
    if num_read < (media.num_bytes or 0):
        raise ClipError(str(media), f"ends after {num_read} of {media.num_bytes} bytes")
    if not num_read:
        raise ClipError(str(media), "is empty (0 bytes)")
    return digest.hexdigest()

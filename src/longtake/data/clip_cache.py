"""Cache on a node's disk of whole clips that were fetched from object stores."""

import fcntl
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from longtake import fsio
from longtake.data.clip import Media

_LEFT_SHARE = 0.9  # deleting the least recently used files stops at this share of the allowed size
_CLIP_NAME = re.compile(r"[0-9a-f]{32}\.clip")
_PART_NAME = re.compile(r"[0-9a-f]{16}\.part")
_PART_SECONDS = 24 * 3600.0  # an unfinished file that is older belongs to a killed process


class ClipCache:
    """Whole clips from object stores in a local folder; the least recently used are deleted.

    Several processes may use it. Its file `total` holds the bytes of all clips, or slightly more.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes

    def open(self, media: Media, num_bytes: int, write: Callable[[int], None]) -> tuple[int, int]:
        """Return a cached clip's file as (descriptor, size); `write` fills it if it is missing."""
        facts = (media.path, media.member, media.offset, num_bytes, media.stamp)
        name = f"{hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()}.clip"
        with suppress(FileNotFoundError):
            descriptor = os.open(self.folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            if os.fstat(descriptor).st_size == num_bytes:
                # The modification time records the last use: access times are often switched off.
                os.utime(descriptor)
                return descriptor, num_bytes
            os.close(descriptor)
        fsio.claim_folder(self.folder, ["total"])
        part = self.folder / f"{secrets.token_hex(8)}.part"
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Written under another name: no process ever sees a file that is incomplete.
            write(descriptor)
            self._admit(part, name, num_bytes)
        except BaseException:
            os.close(descriptor)
            part.unlink(missing_ok=True)
            raise
        return descriptor, num_bytes

    def _admit(self, part: Path, name: str, num_bytes: int) -> None:
        """Make room for a new clip in the cache and name its file; holds the lock on `total`."""
        with open(self.folder / "total", "a+", opener=fsio.no_follow) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            known = file.read(32)
            # An unreadable total counts as too much, so that the files are counted again.
            total = int(known) + num_bytes if known.isdecimal() else self.max_bytes + 1
            if total > self.max_bytes:
                total = self._delete_oldest(num_bytes) + num_bytes
            # The total before the name: a process that is killed in between leaves a total that is
            # too large, never too small.
            file.truncate(0)
            file.write(str(total))
            file.flush()
            part.replace(self.folder / name)

    def _delete_oldest(self, num_bytes: int) -> int:
        """Delete the oldest clips until a new one has room; return the bytes of those that stay."""
        found = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    is_old = time.time() - status.st_mtime > _PART_SECONDS
                    if _CLIP_NAME.fullmatch(entry.name):
                        found.append((status.st_mtime_ns, status.st_size, entry.path))
                    elif _PART_NAME.fullmatch(entry.name) and is_old:
                        Path(entry.path).unlink(missing_ok=True)
        total = sum(size for _, size, _ in found)
        if total + num_bytes <= self.max_bytes:
            return total
        # Deleted below the limit by a tenth, so that not every new clip lists the folder.
        for _, size, path in sorted(found):
            if total + num_bytes <= _LEFT_SHARE * self.max_bytes:
                break
            Path(path).unlink(missing_ok=True)
            total -= size
        return total

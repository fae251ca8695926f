"""Which checkpoints can be sampled, and what tells their weights from others; torch-free."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from longtake.checkpoint import manifest
from longtake.errors import RecordError
from longtake.run_dir import RunDirectory

Signature = tuple[int, int, int]
"""Of a file: it has been replaced or changed if this has."""

_UNREADABLE = (OSError, RecordError)


def checkpoint_key(checkpoint: Path, weights: str) -> str | None:
    """Eight hexadecimal digits that other weights of the same step do not have.

    They begin the sha256 of the checksums that COMMITTED lists for the files below `weights`, by
    their names.

    Args:
        checkpoint: its folder, of which only COMMITTED has to be there.
        weights: `model`, or `ema/` and the name of a profile.

    Returns:
        None where there is no readable COMMITTED, or it lists no such weights.
    """
    try:
        sums = _sums(checkpoint, f"{weights}/")
    except _UNREADABLE:
        return None
    return hashlib.sha256("\n".join(sums).encode()).hexdigest()[:8] if sums else None


def unreadable(checkpoint: Path) -> str | None:
    """Why its COMMITTED cannot be read, in words; None where it can, or there is none."""
    try:
        _sums(checkpoint, "")
    except FileNotFoundError:
        return None
    except _UNREADABLE as error:
        return error.reason if isinstance(error, RecordError) else f"{error.strerror or error}"
    return None


def damage(checkpoint: Path, weights: str, *, checksums: bool) -> str | None:
    """What is wrong with the files that sampling needs, in words; None where nothing is."""
    parts = (f"{weights}/", "trainer.json")
    found = (manifest.damage(checkpoint, checksums=checksums, within=part) for part in parts)
    return next((each for each in found if each), None)


def state_of_files(checkpoint: Path, weights: str) -> tuple[Signature | None, ...]:
    """Changes when one of the files that sampling needs does."""
    files = sorted((checkpoint / weights).rglob("*"))
    return tuple(map(signature, (checkpoint / "COMMITTED", checkpoint / "trainer.json", *files)))


def signature(path: Path) -> Signature | None:
    """None where there is no such file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


class Checkpoints:
    """Remembers what it has read of a run's checkpoints, until their COMMITTED changes.

    Args:
        run: the run directory.

    Attributes:
        unreadable: steps whose COMMITTED cannot be read, and why.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self.unreadable: dict[int, str] = {}
        self._committed: dict[int, Signature | None] = {}
        self._keys: dict[tuple[int, str], tuple[Signature | None, str | None]] = {}
        self._whole: dict[tuple[int, str], str] = {}

    @property
    def steps(self) -> list[int]:
        """Steps of which there was a COMMITTED, ascending."""
        return sorted(step for step, sign in self._committed.items() if sign is not None)

    @property
    def unfinished(self) -> set[int]:
        """Steps of which there was a folder, and nothing that says what is in it."""
        return {step for step, sign in self._committed.items() if sign is None} | {*self.unreadable}

    def look(self) -> None:
        """See which there are, and forget those that are gone."""
        steps = set(self._run.checkpoint_folders())
        self._committed = {step: self._committed.get(step) for step in steps}
        self.unreadable = {step: why for step, why in self.unreadable.items() if step in steps}
        self._keys = {name: known for name, known in self._keys.items() if name[0] in steps}
        self._whole = {name: key for name, key in self._whole.items() if name[0] in steps}
        self.look_again(steps)

    def look_again(self, steps: Iterable[int]) -> None:
        """See whether these have changed, whose folders were there."""
        for step in steps:
            checkpoint = self._run.checkpoint_path(step)
            before = self._committed.get(step)
            now = self._committed[step] = signature(checkpoint / "COMMITTED")
            if now != before or self.unreadable.pop(step, None) is not None:
                self._read(step, checkpoint)

    def _read(self, step: int, checkpoint: Path) -> None:
        self.unreadable.pop(step, None)
        if why := unreadable(checkpoint):
            self.unreadable[step] = why

    def keys(self, weights: str) -> dict[int, str]:
        """The key of each checkpoint that has these weights, by step, ascending."""
        found = {step: self._key(step, weights) for step in self.steps}
        return {step: key for step, key in found.items() if key is not None}

    def damage(self, step: int, weights: str, key: str) -> str | None:
        """What is wrong with the sizes of its files; they are looked at until nothing is."""
        if self._whole.get((step, weights)) == key:
            return None
        found = damage(self._run.checkpoint_path(step), weights, checksums=False)
        if found is None:
            self._whole[step, weights] = key
        return found

    def _key(self, step: int, weights: str) -> str | None:
        if step in self.unreadable:
            return None
        now = self._committed[step]
        known = self._keys.get((step, weights))
        if known is None or known[0] != now:
            key = checkpoint_key(self._run.checkpoint_path(step), weights)
            known = self._keys[step, weights] = now, key
            self._whole.pop((step, weights), None)
        return known[1]


def _sums(checkpoint: Path, weights: str) -> list[str]:
    listed = manifest.committed(checkpoint)
    return [entry["sha256"] for name, entry in sorted(listed.items()) if name.startswith(weights)]

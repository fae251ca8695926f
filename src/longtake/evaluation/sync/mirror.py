"""The folder that runs are mirrored into: one server mirrors at a time."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from longtake.errors import RunError
from longtake.evaluation.sync.address import Address
from longtake.evaluation.sync.remote import RemoteRun
from longtake.evaluation.sync.selection import our_results
from longtake.fsio import atomic_write, read_json, write_json, write_once
from longtake.lease import Lease, Leases, kept
from longtake.run_dir import RunDirectory
from longtake.trust import MIRROR_NOTE

_INDEX, _OF = MIRROR_NOTE.parts
_LEASE_SECONDS = 30.0


@dataclass
class Mirror:
    """The folder of mirrors.

    Attributes:
        path: the folder.
    """

    path: Path
    _leases: Leases = field(default_factory=lambda: Leases(_LEASE_SECONDS, {}))
    _lease: Lease | None = None

    @classmethod
    def at(cls, path: Path, address: Address) -> "Mirror":
        """A folder that mirrors a source and nothing else.

        Raises:
            RunError: it holds a run of its own, or mirrors another source; or is the source.
        """
        mirror = cls(path)
        if not address.host and path.resolve() == Path(address.path).resolve():
            raise RunError(f"--source {address.text}: it is {path} itself; name it without.")
        note = mirror.index / _OF
        if not note.exists() and _holds_runs(path):
            raise _not_ours(path)
        with mirror.writing():
            if not write_once(note, {"source": address.text}):
                if mirror.runs():
                    _compare(path, read_json(note).get("source"), address)
                else:  # nothing has come from there yet: it may have been a typing error
                    write_json(note, {"source": address.text})
        return mirror

    @property
    def index(self) -> Path:
        """What says at the source that something is whole, and nothing else."""
        return self.path / _INDEX

    def take(self, until: ExitStack) -> bool:
        """Whether it is this process that mirrors, now and until the stack is closed.

        Raises:
            RunError: the folder cannot be written.
        """
        if self._lease is not None and self._lease.is_held:
            return True
        with self.writing():
            self._lease = self._leases.take(self.index / ".lease")
        if self._lease is None:
            return False
        until.callback(_end, self._lease)
        until.enter_context(kept(self._lease))
        return True

    def runs(self) -> list[RemoteRun]:
        """The runs of the source, as it was last looked at."""
        if (self.index / "recipe.toml").is_file():
            return [RemoteRun("", RunDirectory(self.path), RunDirectory(self.index))]
        names = sorted(path.parent.name for path in self.index.glob("[!.]*/recipe.toml"))
        return [self._run(name) for name in names if "\\" not in name]

    def show_signs(self, run: RemoteRun) -> None:
        """Take over what says that a result or the run is whole, as the rest has come.

        Raises:
            OSError: one cannot be written.
        """
        claimed = {Path(each) for each in our_results(run.mirror)}
        for sign in run.index.path.glob("evaluations/*/step_*/scores.json"):
            name = sign.relative_to(run.index.path)
            if name.parent not in claimed and (run.mirror.path / name.parent).is_dir():
                _take_over(sign, run.mirror.path / name)
        _take_over(run.index.recipe_path, run.mirror.recipe_path)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Say in a sentence why the folder cannot be written.

        Raises:
            RunError: it cannot.
        """
        try:
            yield
        except OSError as error:
            raise RunError(
                f"The mirror {self.path} cannot be written: {error.strerror or error}. "
                "Make room or make it writable, or choose another folder."
            ) from error

    def _run(self, name: str) -> RemoteRun:
        return RemoteRun(name, RunDirectory(self.path / name), RunDirectory(self.index / name))


def _end(lease: Lease) -> None:
    with suppress(OSError):  # a full disk: the lease ends by itself
        lease.end("closed")


def _holds_runs(path: Path) -> bool:
    return any(True for names in ("recipe.toml", "*/recipe.toml") for _ in path.glob(names))


def _take_over(sign: Path, place: Path) -> None:
    if not place.exists() or place.read_bytes() != sign.read_bytes():
        with atomic_write(place) as aside:
            with aside.open("xb") as file:
                file.write(sign.read_bytes())
            os.utime(aside, ns=(sign.stat().st_atime_ns, sign.stat().st_mtime_ns))


def _compare(path: Path, source: object, address: Address) -> None:
    if source != address.text:
        raise RunError(
            f"{path} mirrors {source}, not {address.text}: choose another folder for it, or delete "
            f"{path / _INDEX} if it is the same place by another name."
        )


def _not_ours(path: Path) -> RunError:
    return RunError(
        f"{path} holds a run that is no mirror: runs of --source would get mixed up with it. "
        "Choose another folder."
    )

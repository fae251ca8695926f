"""Mirrors runs that another machine trains, and sends evaluation results back; torch-free.

All state is in the mirror, a run directory like any other, and in its hidden folder .source: a
server that is killed resumes where it was. Calls wait for the network, a pull for hours if need be.
"""

import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longtake import process, trust
from longtake.checkpoint.files import delete_unless_needed, find_damage, read_committed
from longtake.errors import RecordError, RunError
from longtake.evaluation import transports
from longtake.evaluation_dir import EvaluationDirectory, ServerDirectory
from longtake.fsio import atomic_write, now, read_json, read_regular, write_json, write_once
from longtake.lease import Lease, Leases, kept
from longtake.run_dir import RunDirectory

_COMMITTED = "COMMITTED"
_INDEX, _NOTE = trust.MIRROR_NOTE.parts
_LEASE_SECONDS = 30.0
_HEARTBEAT_SECONDS = 60.0

_HIDDEN = "- .*"  # partial files, and hidden files of other programs
_COMPLETION_MARKERS = (
    "recipe.toml",
    "checkpoints/step_*/COMMITTED",
    "evaluations/*/step_*/scores.json",
)
"""Patterns of files whose presence says that a run, a checkpoint or a result is complete."""
_LEFT_OUT = (
    "recipe.toml",  # it is copied last: with it the run exists
    "checkpoints/",
    "ledger/",
    "nodes/",
    "tensorboard/",
    "wandb/",
    "tracking/",
    "evaluations/claims/",
    "evaluations/servers/",
    "evaluations/*/step_*/scores.json",
)
"""Paths of a run that are not mirrored as records. Leases (reservations by a process), which are
among them, are never copied: a copy does not tell how long nothing has changed in them. So
servers share work by claims only if they share a mirror, or the run directory itself."""
_RECORDS = (
    *(".json", ".jsonl", ".txt", ".html", ".parquet"),
    *(".png", ".jpg", ".jpeg", ".webp", ".gif", ".mp4"),
    *(".safetensors", ".model"),  # components, and a tokenizer's
)
"""Suffixes of the files of a run that are mirrored: records, pictures and frozen parts, but no
code."""
SCORE_RULES: transports.Rules = (_HIDDEN, *transports.only(["/*/step_*/scores.json"]))
CHECKPOINT_RULES: transports.Rules = ("- /optimizer/",)
"""Rules for copying a checkpoint: without the optimizer's state, which is most of it and which
sampling does not need."""


@dataclass(frozen=True)
class RemoteRun:
    """A run at the source (where it is trained), its local mirror, and an index of its files."""

    name: str
    mirror: RunDirectory
    index: RunDirectory

    def below(self, folder: str) -> str:
        return f"{self.name}/{folder}" if self.name else folder


@dataclass(frozen=True)
class Pulled:
    """A checkpoint that was copied from the source, its bytes, and the seconds that this took."""

    step: int
    bytes: int
    seconds: float


def marker_rules() -> transports.Rules:
    """Return copy rules for the files that mark a run, checkpoint or result as complete."""
    return (
        _HIDDEN,
        *transports.only(
            [f"/{place}{each}" for place in ("", "*/") for each in _COMPLETION_MARKERS]
        ),
    )


def record_rules(runs: Sequence[tuple[str, RunDirectory]]) -> transports.Rules:
    """Return copy rules for the records of runs: no checkpoints, no markers of completion."""
    rules = [_HIDDEN]
    for name, mirror in runs:
        top = f"/{transports.literal(name)}/" if name else "/"
        rules += [f"- {top}{each}" for each in (*_LEFT_OUT, *_claimed_results(mirror))]
        rules += [f"+ {top}"] if name else []
    # In a folder of runs, all else is left out.
    if all(name for name, _ in runs):
        rules.append("- /*")
    return (*rules, "+ */", *(f"+ *{suffix}" for suffix in _RECORDS), "- *")


def result_rules(evaluations: Path) -> transports.Rules:
    """Return copy rules for evaluation results to push, without scores.json and heartbeats."""
    # A result without scores.json may still be in the making.
    halves = [path for path in evaluations.glob("*/step_*") if not (path / "scores.json").exists()]
    names = [path.relative_to(evaluations).as_posix() for path in halves]
    left_out = [f"- /{transports.literal(name)}/" for name in names]
    last = ("- /*/step_*/scores.json", "- /servers/*/heartbeat.json")
    return (_HIDDEN, "- *.partial", "- /claims/", *left_out, *last)


def heartbeat_rules(server: str) -> transports.Rules:
    return transports.only([f"/servers/{transports.literal(server)}/heartbeat.json"])


def _claimed_results(mirror: RunDirectory) -> list[str]:
    """Return folders of results that a server of this mirror has claimed (reserved to make)."""
    claims = EvaluationDirectory(mirror).path / "claims"
    found = (path.relative_to(claims) for path in claims.glob("*/step_*"))
    names = {(path.parts[0], path.parts[1].partition("-")[0]) for path in found}
    return [f"evaluations/{transports.literal(preset)}/{step}/" for preset, step in sorted(names)]


class MirrorFolder:
    """The local folder that holds mirrored runs: of one source, and by one process at a time."""

    def __init__(self, path: Path, address: transports.Address) -> None:
        self.path, self.index = path, path / _INDEX
        self._leases = Leases(_LEASE_SECONDS, {})
        self._lease: Lease | None = None
        if not address.host and path.resolve() == Path(address.path).resolve():
            raise RunError(f"--source {address.text}: it is {path} itself; name it without.")
        note = self.index / _NOTE
        if not note.exists() and any([*path.glob("recipe.toml"), *path.glob("*/recipe.toml")]):
            raise RunError(
                f"{path} holds a run that is no mirror: runs of --source would get mixed up with "
                "it. Choose another folder."
            )
        with self.writing():
            if write_once(note, {"source": address.text}):
                return
            if not self.runs():  # nothing has come from there yet: it may have been a typing error
                write_json(note, {"source": address.text})
                return
        source = read_json(note).get("source")
        if source != address.text:
            raise RunError(
                f"{path} mirrors {source}, not {address.text}: choose another folder for it, or "
                f"delete {self.index} if it is the same place by another name."
            )

    def take(self, until: ExitStack) -> bool:
        """Reserve the folder by a lease until the stack is closed; False if another process has."""
        if self._lease is not None and self._lease.is_held:
            return True
        with self.writing():
            self._lease = self._leases.take(self.index / ".lease")
        if self._lease is None:
            return False
        lease = self._lease

        def end() -> None:
            with suppress(OSError):  # a full disk: the lease expires
                lease.end("closed")

        # Registered first, so that it is called last, when nothing renews the lease any more.
        until.callback(end)
        until.enter_context(kept(lease))
        return True

    def runs(self) -> list[RemoteRun]:
        """Return the runs at the source, as they were when it was last read."""
        if (self.index / "recipe.toml").is_file():
            return [RemoteRun("", RunDirectory(self.path), RunDirectory(self.index))]
        names = sorted(path.parent.name for path in self.index.glob("[!.]*/recipe.toml"))
        return [
            RemoteRun(name, RunDirectory(self.path / name), RunDirectory(self.index / name))
            for name in names
            # In rsync's patterns a backslash would be an escape.
            if "\\" not in name
        ]

    def publish_markers(self, run: RemoteRun) -> None:
        """Copy the files that mark completion into the mirror, after all others are there."""
        # Results that a server here makes are this mirror's own, and were not copied.
        claimed = {Path(each) for each in _claimed_results(run.mirror)}
        for marker in run.index.path.glob("evaluations/*/step_*/scores.json"):
            name = marker.relative_to(run.index.path)
            if name.parent not in claimed and (run.mirror.path / name.parent).is_dir():
                _copy(marker, run.mirror.path / name)
        _copy(run.index.recipe_path, run.mirror.recipe_path)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turn an OSError of writing to the mirror into a RunError that says what to do."""
        try:
            yield
        except OSError as error:
            raise RunError(
                f"The mirror {self.path} cannot be written: {error.strerror or error}. "
                "Make room or make it writable, or choose another folder."
            ) from error


def _copy(marker: Path, place: Path) -> None:
    if not place.exists() or place.read_bytes() != marker.read_bytes():
        with atomic_write(place) as aside:
            with aside.open("xb") as file:
                file.write(marker.read_bytes())
            # With the source's time, so that a push does not take it for newer.
            os.utime(aside, ns=(marker.stat().st_atime_ns, marker.stat().st_mtime_ns))


class Mirror:
    """Mirrors the runs of a source (where they are trained) in a folder, and sends results back."""

    def __init__(self, transport: transports.Rsync, folder: MirrorFolder, server: str) -> None:
        self._transport, self._folder, self._server = transport, folder, server
        self._pushed: dict[RunDirectory, dict[Path, tuple[int, int]]] = {}
        self._stack = ExitStack()
        self._stack.callback(transport.close)

    def look(self) -> list[RemoteRun]:
        """Mirror the source's records, and return its runs; [] if another process mirrors them."""
        if not self._folder.take(self._stack):
            return []
        with self._folder.writing():
            # Markers first: what they mark as complete is then copied whole after them.
            self._transport.fetch("", self._folder.index, marker_rules(), exactly=True)
            runs = self._folder.runs()
            if runs:
                rules = record_rules([(run.name, run.mirror) for run in runs])
                self._transport.fetch("", self._folder.path, rules)
            for run in runs:
                self._folder.publish_markers(run)
                # Partly pulled checkpoints that the source no longer has.
                steps = run.index.checkpoint_steps()
                there = {run.index.checkpoint_path(step).name for step in steps}
                for folder in _arriving(run.mirror, 0).parent.glob("step_*"):
                    if folder.name not in there:
                        shutil.rmtree(folder, ignore_errors=True)
        return runs

    def pull(self, run: RemoteRun, steps: Iterable[int]) -> list[Pulled]:
        """Copy the checkpoints of `steps` from the source, in this order, without optimizer state.

        Checkpoints that are here already, or gone at the source, are skipped. One that was saved
        again at the source waits while a server needs the copy that is here.
        """
        there = set(run.index.checkpoint_steps())
        wanted = [step for step in steps if step in there and not _has_arrived(run, step)]
        if not wanted:
            return []
        with self._folder.writing(), needed_at_source(self._transport, run, wanted, self._server):
            found = [self._pull(run, step) for step in wanted]
        return [each for each in found if each is not None]

    def push(self, run: RemoteRun) -> None:
        """Send evaluation results to the source, scores.json last; only if any are new."""
        with self._folder.writing():
            folder, there = EvaluationDirectory(run.mirror).path, run.below("evaluations")
            # Size and modification time of each file that may have to be sent.
            found: dict[Path, tuple[int, int]] = {}
            for parent, folders, names in os.walk(folder):
                folders[:] = [name for name in folders if name != "claims" and name[0] != "."]
                # The heartbeat changes each second, and would cause a push at each look.
                for path in (Path(parent) / name for name in names if name != "heartbeat.json"):
                    with suppress(FileNotFoundError):  # superseded, or renamed, just now
                        found[path] = (path.stat().st_size, path.stat().st_mtime_ns)
            if found == self._pushed.get(run.mirror, {}):
                return
            self._transport.send(folder, there, result_rules(folder))
            # With scores.json a result is complete, so it follows in a transfer of its own.
            self._transport.send(folder, there, SCORE_RULES)
            if ServerDirectory(run.mirror, self._server).heartbeat_path.exists():
                send_heartbeat(self._transport, run, self._server, ())
            self._pushed[run.mirror] = found

    def prune(self, mirror: RunDirectory, wanted: Collection[int]) -> list[int]:
        """Delete mirrored checkpoints except wanted, newest and needed ones; return their steps."""
        steps = mirror.checkpoint_steps()
        with self._folder.writing():
            going = sorted({*steps} - {*wanted} - {max(steps, default=0)})
            return [step for step in going if delete_unless_needed(mirror, step)]

    def interrupt(self) -> None:
        self._transport.interrupt()

    def close(self) -> None:
        self._stack.close()

    def _pull(self, run: RemoteRun, step: int) -> Pulled | None:
        begun = time.monotonic()
        folder = _arriving(run.mirror, step)
        try:
            there = run.below(f"checkpoints/{folder.name}")
            self._transport.fetch(there, folder, CHECKPOINT_RULES, exactly=True)
        except transports.GoneError:
            return None
        place = run.mirror.checkpoint_path(step)
        if _is_incomplete(folder):
            return None  # it was deleted or saved again meanwhile: the next look will tell
        if place.exists() and not delete_unless_needed(run.mirror, step):
            return None
        # It came with the source's time. Heartbeats here have the time of this file system's clock,
        # and their age is compared with that of the newest COMMITTED.
        os.utime(folder / _COMMITTED)
        folder.rename(place)
        files = [path for path in place.rglob("*") if path.is_file()]
        num_bytes = sum(path.stat().st_size for path in files)
        return Pulled(step, num_bytes, time.monotonic() - begun)


def open_mirror(text: str, into: Path, server: str) -> Mirror:
    """Open the local mirror of a source; the source is not contacted yet."""
    address = transports.parse_address(text)
    return Mirror(transports.Rsync(address), MirrorFolder(into, address), server)


@contextmanager
def needed_at_source(
    transport: transports.Rsync,
    run: RemoteRun,
    steps: Collection[int],
    server: str,
    seconds: float = _HEARTBEAT_SECONDS,
) -> Iterator[None]:
    """Protect checkpoints at the source from deletion by the training while the block runs."""

    def renew() -> None:
        with suppress(RunError, OSError):  # the pull reports what is wrong
            send_heartbeat(transport, run, server, steps)

    # Before the pull: retention at the source may delete a checkpoint at any moment.
    send_heartbeat(transport, run, server, steps)
    try:
        # A heartbeat becomes stale, and a pull may take hours.
        with process.periodic("heartbeat at the source", renew, seconds):
            yield
    finally:
        with suppress(RunError, OSError):  # the heartbeat becomes stale
            send_heartbeat(transport, run, server, ())


def send_heartbeat(
    transport: transports.Rsync, run: RemoteRun, server: str, needs: Collection[int]
) -> None:
    """Send this server's heartbeat to the source, with the steps whose checkpoints it needs.

    The file gets its time from the source's clock: its age tells the training whether it counts.
    """
    here = ServerDirectory(run.mirror, server).read_heartbeat()
    record: dict[str, Any] = {"server": server, "time": now(), **(dict(here) if here else {})}
    # A file of its own: `needs` are steps at the source, and not in the mirror.
    sent = RunDirectory(run.index.path / ".sent")
    try:
        ServerDirectory(sent, server).write_heartbeat({**record, "needs": sorted(needs)})
        folder, rules = EvaluationDirectory(sent).path, heartbeat_rules(server)
        transport.send(folder, run.below("evaluations"), rules, exactly=True)
    finally:
        shutil.rmtree(sent.path, ignore_errors=True)


def _arriving(mirror: RunDirectory, step: int) -> Path:
    return mirror.checkpoints_path / ".pulling" / mirror.checkpoint_path(step).name


def _has_arrived(run: RemoteRun, step: int) -> bool:
    """Return whether the mirror's checkpoint of a step is the one that the source has now."""
    with suppress(OSError):
        there = read_regular(run.index.checkpoint_path(step) / _COMMITTED)
        return there == read_regular(run.mirror.checkpoint_path(step) / _COMMITTED)
    return False


def _is_incomplete(folder: Path) -> bool:
    """Return whether a mirrored checkpoint lacks a file other than the optimizer's state."""
    try:
        names = read_committed(folder)
    except (OSError, RecordError):
        return True
    # Part by part: COMMITTED also lists the optimizer's files, which are not pulled.
    parts = {name.partition("/")[0] + "/" * ("/" in name) for name in names} - {"optimizer/"}
    return any(find_damage(folder, checksums=False, within=part) for part in sorted(parts))

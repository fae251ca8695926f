"""Writes what this process does into its record."""

import mmap
import os
import time
from contextlib import suppress
from pathlib import Path

from longtake.errors import RunError
from longtake.heartbeat.pulse import age_of, start_of
from longtake.heartbeat.record import (
    FACTS,
    FACTS_AT,
    MAGIC,
    PHASES,
    ROLES,
    SEQUENCE,
    SIZE,
    TABLE,
    TABLE_AT,
    TEXT_AT,
    TEXT_BYTES,
    Phase,
    Role,
    make_private,
    open_private,
    path_of,
)

_SETTLING_STEPS = 5
"""The first steps of a launch, from which nothing is learnt (compilation, allocation)."""
_SETTLING_OF_A_SHAPE = 2


class Heart:
    """Writes this process's record.

    Args:
        folder: that of `folder_of`; it is made.
        role: what this process is.
        rank: in the run.
        local_rank: on the node.
        world_size: how many ranks there are.

    Where the folder has no room, nobody sees the record, and nothing else changes.
    """

    def __init__(
        self, folder: Path, role: Role, *, rank: int = 0, local_rank: int = 0, world_size: int = 1
    ) -> None:
        pid = os.getpid()
        self.path = path_of(folder, role, rank, pid)
        self._who = (pid, start_of(pid), ROLES.index(role), rank, local_rank, world_size)
        self._launch = b""
        self._step = self._steps_done = self._steps_since = 0
        self._shapes: dict[str, int] = {}
        self._phase: Phase = "start"
        self._since = time.monotonic_ns()
        self._text, self._clip = b"", b""
        self._is_settled = role != "rank"
        self._table = [0] * (3 * len(PHASES))
        self._work_ns = self._work_count = 0
        self._launch_ns: dict[Phase, int] = {}
        self._sequence = 0
        self._memory = mmap.mmap(-1, SIZE)
        self._write()
        self._share()

    def _share(self) -> None:
        for _ in range(2):  # the watcher of a run that has ended may take the empty folder away
            with suppress(OSError, RunError):
                self._memory = _shared(self.path, self._memory[:])
                break

    def enter(self, phase: Phase, detail: str | None = None, clip: str = "") -> None:
        """Say that a phase begins, which ends the one before; `detail` stays what it was if None.

        Args:
            phase: what begins.
            detail: of a decoding process, the identity of the clip.
            clip: the clip's file.
        """
        now = time.monotonic_ns()
        if self._is_settled:
            self._learn(self._phase, now - self._since)
        self._count_as_launch(now)
        if self._phase != "decode" and phase == "decode":
            self._step += 1
        if phase == "rollback":  # what comes after it begins anew, decoding processes and all
            self._is_settled, self._steps_since = False, 0
            self._shapes.clear()
        self._phase, self._since = phase, now
        if detail is not None:
            self._text, self._clip = detail.encode(), clip.encode()
        self._write()

    def begin_step(self, step: int, shape: str) -> None:
        """Say which step begins, on clips of what shape."""
        known = self._shapes[shape] = self._shapes.get(shape, -1) + 1
        self._is_settled = self._steps_since >= _SETTLING_STEPS and known >= _SETTLING_OF_A_SHAPE
        self._step = step
        self._text, self._clip = shape.encode(), b""
        self._write()

    def end_step(self, work_seconds: float = 0.0) -> None:
        """Say that a step is done, and what this process itself needed for it."""
        self._count_as_launch(time.monotonic_ns())
        self._steps_done += 1
        self._steps_since += 1
        if self._is_settled and work_seconds:
            self._work_ns += int(work_seconds * 1e9)
            self._work_count += 1
        self._write()

    def join(self, launch: str) -> None:
        """Say which launch this is: eight letters that all its ranks have been told."""
        self._launch = launch.encode()
        self._write()

    def begin_with_process(self) -> None:
        """Count what the process did before it had a heart, which is to import its code."""
        age = int(age_of(self._who[0]) * 1e9)
        self._launch_ns["start"] = age - (time.monotonic_ns() - self._since)

    @property
    def phase(self) -> Phase:
        """The present phase."""
        return self._phase

    def launch_seconds(self) -> dict[Phase, float]:
        """How long each phase took before the first step was done, the present one until now."""
        taken = dict(self._launch_ns)
        if not self._steps_done:
            taken[self._phase] = taken.get(self._phase, 0) + time.monotonic_ns() - self._since
        return {phase: nanoseconds / 1e9 for phase, nanoseconds in taken.items()}

    def close(self) -> None:
        """Say that the process ends as it should; the record stays, for the watcher to remove."""
        self.enter("ended")

    def remove(self) -> None:
        """Take the record away, and the folder with the last one."""
        self.path.unlink(missing_ok=True)
        with suppress(OSError):
            self.path.parent.rmdir()

    def took(self, phase: Phase, seconds: float) -> None:
        """Say how long something took that went on beside the phases, for it may be waited for."""
        self._learn(phase, int(seconds * 1e9))
        self._write()

    def move_to(self, folder: Path) -> None:
        """Keep the record in another folder from now on."""
        self.remove()
        self.path = folder / self.path.name
        self._share()

    def _count_as_launch(self, now: int) -> None:
        if not self._steps_done:
            before = self._launch_ns.get(self._phase, 0)
            self._launch_ns[self._phase] = before + now - self._since

    def _learn(self, phase: Phase, nanoseconds: int) -> None:
        at = 3 * PHASES.index(phase)
        self._table[at] += 1
        self._table[at + 1] = max(self._table[at + 1], nanoseconds)
        self._table[at + 2] += nanoseconds

    def _write(self) -> None:
        memory = self._memory
        self._sequence += 1
        memory[: SEQUENCE.size] = SEQUENCE.pack(MAGIC, self._sequence)  # not zero in between
        text, clip = self._text[:128], self._clip[-(TEXT_BYTES - 128) :]
        pid, started, role, rank, local_rank, world_size = self._who
        FACTS.pack_into(
            memory,
            FACTS_AT,
            pid,
            started,
            role,
            rank,
            local_rank,
            world_size,
            self._step,
            self._steps_done,
            PHASES.index(self._phase),
            self._is_settled,
            self._since,
            self._work_ns,
            self._work_count,
            self._launch,
            len(text),
            len(clip),
        )
        memory[TEXT_AT : TEXT_AT + len(text) + len(clip)] = text + clip
        TABLE.pack_into(memory, TABLE_AT, *self._table)
        self._sequence += 1
        memory[: SEQUENCE.size] = SEQUENCE.pack(MAGIC, self._sequence)  # not zero in between


def _shared(path: Path, page: bytes) -> mmap.mmap:
    """A file in memory that holds a page already when it is found.

    Raises:
        OSError: there is no room, or it is not allowed.
        RunError: the folder is another user's.
    """
    make_private(path.parent)
    aside = path.with_suffix(".new")
    with os.fdopen(open_private(aside), "wb+") as file:
        os.posix_fallocate(file.fileno(), 0, SIZE)  # writing to a page that is not there kills
        memory = mmap.mmap(file.fileno(), SIZE)
    memory[:] = page
    aside.rename(path)
    return memory

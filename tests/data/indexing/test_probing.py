"""A file that hangs or crashes its decoder costs itself, not the others."""

import os
import re
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from longtake.data.clip import Media
from longtake.data.crews.processes import Processes
from longtake.data.encode import write_video
from longtake.data.indexing.item import Item
from longtake.data.indexing.probe import Probe
from longtake.data.indexing.probing import probe_all
from longtake.errors import ClipError


def _write(path: Path, level: int) -> None:
    """A clip of its own content for each level."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_video(path, np.full((3, 16, 16, 3), level, np.uint8), fps=8)


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    """A folder with a.mp4, b.mp4 and sub/c.MP4, and no captions."""
    folder = tmp_path / "videos"
    for level, name in enumerate(("a.mp4", "b.mp4", "sub/c.mp4")):
        _write(folder / name, 40 * level)
    (folder / "sub" / "c.mp4").rename(folder / "sub" / "c.MP4")
    return folder


def _children() -> list[int]:
    listed = Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/children").read_text()
    return [int(pid) for pid in listed.split()]


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGSTOP, r"decoding made no progress for 1\.5 s and was stopped"),
        (signal.SIGSEGV, r"decoding it ended the process \(SIGSEGV\)"),
    ],
)
def test_a_worker_that_hangs_or_dies_costs_one_file(
    videos: Path, number: signal.Signals, reason: str
) -> None:
    """The file is rejected with the reason, not for ever, and a new worker does the rest."""
    items = [Item(Media(str(videos / name))) for name in ("a.mp4", "b.mp4", "sub/c.MP4")]
    known = set(_children())
    outcomes = probe_all(items, Processes(1), silence_seconds=1.5)
    first = next(outcomes)
    (worker,) = set(_children()) - known
    os.kill(worker, number)
    second, third = outcomes
    assert isinstance(first.found, Probe)
    assert isinstance(third.found, Probe)
    assert isinstance(second.found, ClipError)
    assert re.fullmatch(reason, second.found.reason)
    assert [each.is_lasting for each in (first, second, third)] == [True, False, True]
    assert [each.item for each in (first, second, third)] == items
    assert set(_children()) == known

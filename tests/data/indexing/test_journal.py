"""What is known is not decoded again, however the index before ended."""

import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from longtake.data.catalog import Catalog
from longtake.data.encode import write_video
from longtake.data.index import IndexReport, index


def _write(path: Path, level: int) -> None:
    """A clip of its own content for each level."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_video(path, np.full((3, 16, 16, 3), level, np.uint8), fps=8)


def _index(
    *sources: Path, out: Path, captions: Path | None = None, workers: int | None = 0
) -> tuple[IndexReport, Catalog]:
    report = index(sources, captions=captions, out=out, workers=workers)
    return report, Catalog.load(out)


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


def test_only_what_is_new_or_changed_is_read_again(videos: Path, tmp_path: Path) -> None:
    """Clips, further copies and rejected files are taken over while their files stay the same."""
    shutil.copyfile(videos / "a.mp4", videos / "copy.mp4")
    (videos / "bad.mp4").write_text("no video")
    out = tmp_path / "catalog.parquet"
    first, before = _index(videos, out=out)
    assert (first.unchanged, first.accepted, first.duplicates) == (0, 3, 1)
    second, again = _index(videos, out=out)
    assert again == before
    assert replace(first, unchanged=5) == second
    _write(videos / "b.mp4", 222)
    _write(videos / "new.mp4", 223)
    (videos / "sub" / "c.MP4").unlink()
    third, after = _index(videos, out=out)
    assert (third.unchanged, third.accepted, third.duplicates) == (3, 3, 1)
    _, fresh = _index(videos, out=tmp_path / "fresh.parquet")
    assert fresh == after
    assert index([videos], captions=None, out=out, fresh=True).unchanged == 0


def test_a_changed_file_is_noticed_by_its_time_or_size(videos: Path, tmp_path: Path) -> None:
    """The same bytes at another time are read again; an untouched file in a moved place too."""
    out = tmp_path / "catalog.parquet"
    _index(videos, out=out)
    os.utime(videos / "a.mp4", ns=(1, 1))
    report, _ = _index(videos, out=out)
    assert report.unchanged == 2


def test_scores_survive_while_clip_and_caption_stay(videos: Path, tmp_path: Path) -> None:
    """A clip with another caption is to be scored again, and the report counts it."""
    for name in ("a", "b"):
        (videos / f"{name}.txt").write_text(f"clip {name}")
    out = tmp_path / "catalog.parquet"
    _, catalog = _index(videos, out=out)
    catalog.with_attribute("nouns", np.array([1.0, 2.0, 3.0])).save(out)
    scores = {Path(clip.path).name: clip.attributes for clip in Catalog.load(out).clips()}
    (videos / "a.txt").write_text("another caption")
    (videos / "b.mp4").rename(videos / "renamed.mp4")
    (videos / "b.txt").rename(videos / "renamed.txt")
    report, catalog = _index(videos, out=out)
    assert {Path(clip.path).name: clip.attributes for clip in catalog.clips()} == {
        "a.mp4": {},
        "renamed.mp4": scores["b.mp4"],
        "c.MP4": scores["c.MP4"],
    }
    assert report.scores_dropped == 1


_ENDLESS = """
import sys, time
from pathlib import Path
from longtake.data.index import index
def tell(done, total):
    print(done, flush=True)
    if done == 3:
        time.sleep(60)
index([Path(sys.argv[1])], captions=None, out=Path(sys.argv[2]), workers=1, progress=tell)
"""


def test_an_index_that_is_killed_loses_nothing(videos: Path, tmp_path: Path) -> None:
    """After kill -9 the next index takes over what was finished, and clears the journal away."""
    for number in range(3):
        _write(videos / f"more{number}.mp4", 120 + 30 * number)
    out = tmp_path / "catalog.parquet"
    command = [sys.executable, "-c", _ENDLESS, str(videos), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(3)] == ["1\n", "2\n", "3\n"]
        process.kill()
    assert not out.exists()
    (journal,) = tmp_path.glob(".catalog.parquet.journal.jsonl")
    with journal.open("a") as file:
        file.write('{"media": "/cut/off in the mid')
    report, catalog = _index(videos, out=out)
    assert (report.unchanged, report.accepted) == (3, 6)
    assert catalog == _index(videos, out=tmp_path / "again.parquet")[1]
    assert not journal.exists()


def test_an_interrupted_index_keeps_its_journal(videos: Path, tmp_path: Path) -> None:
    """Ctrl-C between two files leaves the journal and no catalog, and stops the workers."""

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    out, before = tmp_path / "catalog.parquet", _children()
    with pytest.raises(KeyboardInterrupt):
        index([videos], captions=None, out=out, progress=interrupt)
    assert _children() == before
    assert not out.exists()
    assert index([videos], captions=None, out=out).unchanged >= 1


def test_progress_counts_every_file(videos: Path, tmp_path: Path) -> None:
    """Accepted or rejected, each file moves the count by one up to the total."""
    (videos / "bad.mp4").write_text("no video")
    seen: list[tuple[int, int]] = []
    index(
        [videos],
        captions=None,
        out=tmp_path / "catalog.parquet",
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]

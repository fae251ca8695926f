"""Files are complete or absent; records are validated; logs and journals are read on."""

import errno
import os
import socket
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import TypedDict

from longtake import fsio
from longtake.errors import DataError, RecordError
from longtake.fsio import (
    Count,
    Finite,
    Journal,
    Tail,
    append_json,
    atomic_folder,
    atomic_write,
    make_writable,
    read_json,
    read_last_record,
    read_new_records,
    read_record,
    read_records,
    skipped_lines,
    with_other_fields,
    write_once,
)


def test_the_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    with atomic_write(path) as partial:
        partial.write_text("whole")
        assert not path.exists()
        assert partial.suffix == ".mp4"
        assert partial.name.startswith(".")
    assert [found.name for found in tmp_path.iterdir()] == ["clip.mp4"]
    assert path.read_text() == "whole"


@pytest.mark.parametrize("error", [OSError("no space"), KeyboardInterrupt()])
def test_a_block_that_fails_changes_nothing(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "summary.json"
    path.write_text("old")

    def write() -> None:
        with atomic_write(path) as partial:
            partial.write_text("ha")
            raise error

    with pytest.raises(type(error)):
        write()
    assert [found.name for found in tmp_path.iterdir()] == ["summary.json"]
    assert path.read_text() == "old"


def test_of_many_each_has_a_place_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "reference.json"
    with atomic_write(path, by_many=True) as first, atomic_write(path, by_many=True) as second:
        first.write_text("first")
        second.write_text("second")
        assert first.suffix == second.suffix == ".json"
        assert first.name.startswith(".")
    assert path.read_text() == "first"
    assert [found.name for found in tmp_path.iterdir()] == ["reference.json"]


def test_a_folder_is_made_and_tried(tmp_path: Path) -> None:
    make_writable(tmp_path / "new" / "folder")
    assert not any((tmp_path / "new" / "folder").iterdir())
    (tmp_path / "file").write_text("precious")
    with pytest.raises(OSError, match="file"):
        make_writable(tmp_path / "file" / "below")


def test_a_folder_appears_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "export"
    for content in ("failed", "complete"):
        with suppress(RuntimeError), atomic_folder(path) as partial:
            (partial / "file").write_text(content)
            assert not path.exists()
            if content == "failed":
                raise RuntimeError
    assert (path / "file").read_text() == "complete"
    assert [found.name for found in path.parent.iterdir()] == ["export"]
    with pytest.raises(OSError, match="not empty"), atomic_folder(path) as partial:
        (partial / "file").write_text("another")
    assert (path / "file").read_text() == "complete"


def test_a_cache_that_two_processes_clean_keeps_its_newest_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for age, name in enumerate(("new", "older", "oldest", "gone")):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    scandir = os.scandir

    def scan_beside_another_process(folder: Path) -> Any:
        with scandir(folder) as entries:
            listed = list(entries)
        (tmp_path / "gone").unlink()
        return nullcontext(listed)

    monkeypatch.setattr(os, "scandir", scan_beside_another_process)
    fsio.remove_oldest(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"new", "older"}


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "0.json"

    def full(*arguments: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    for step in ("fsync", "link"):
        with monkeypatch.context() as patch:
            patch.setattr(os, step, full)
            with pytest.raises(OSError, match="No space left"):
                write_once(path, {"by": 1})
        assert list(tmp_path.iterdir()) == []
    assert write_once(path, {"by": 1})


def test_what_is_there_stays_and_is_said_to_be(tmp_path: Path) -> None:
    path = tmp_path / "0.json"
    assert write_once(path, {"by": 1})
    assert not write_once(path, {"by": 2})
    assert read_json(path) == {"by": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_it_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that loses its power leaves no file of 0 bytes that nobody may write again."""
    path, done = tmp_path / "0.json", []
    for step in ("fsync", "link"):
        real = getattr(os, step)

        def noted(*arguments: Any, step: str = step, real: Any = real) -> Any:
            done.append(step)
            return real(*arguments)

        monkeypatch.setattr(os, step, noted)
    assert write_once(path, {"by": 1})
    assert done == ["fsync", "link"]


def test_lines_are_read_on_from_where_they_were_left(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    deep, long = b"[" * 90_000, b'{"a": "' + b"x" * 90_000 + b'"}'
    path.write_bytes(b'{"a": 1}\n{"a"\n' + deep + b'\n{"a": 2}\n' + long + b'\n{"a": 3}\n{"a": ')

    def read_on(offset: int) -> tuple[list[dict[str, int]], int]:
        return read_new_records(path, dict[str, int], offset, 2)

    found, offset = read_on(0)
    assert found == [{"a": 1}, {"a": 2}]
    found, offset = read_on(offset)
    assert found == [{"a": 3}]
    with path.open("ab") as file:
        file.write(b"4}\n")
    assert read_on(offset) == ([{"a": 4}], path.stat().st_size)
    path.write_bytes(b'{"a": 0}\n')
    assert read_on(offset) == ([{"a": 0}], 9)


NO_RECORDS = {
    "another type": b"[]",
    "a number": b"5",
    "no fields": b"{}",
    "another type of field": b'{"step": "1", "loss": 1}',
    "a negative count": b'{"step": -1, "loss": 1}',
    "a count that no float holds": b'{"step": 9007199254740994, "loss": 1}',
    "an integer of 5,000 digits": b'{"step": ' + b"9" * 5000 + b', "loss": 1}',
    "not finite": b'{"step": 1, "loss": NaN}',
    "beyond float range": b'{"step": 1, "loss": 1e999}',
    "a lone surrogate": b'{"step": 1, "loss": 1, "name": "\\ud800"}',
    "not UTF-8": b'{"step": 1, "loss": 1, "name": "\xff"}',
    "nested deeply": b"[" * 60_000 + b"]" * 1000,
    "nested deeper than 8": b'{"step": 1, "loss": 1, "x": [[[[[[[[]]]]]]]]}',
    "too long": b'{"step": 1, "loss": 1, "name": "' + b"x" * 70_000 + b'"}',
    "of several blocks": b'{"step": 1, "loss": 1, "name": "' + b"x" * 900_000 + b'"}',
    "no JSON": b"step 1",
}


@with_other_fields
class Row(TypedDict):
    """A record of these tests."""

    step: Count
    loss: Finite


@pytest.mark.parametrize("line", NO_RECORDS.values(), ids=NO_RECORDS)
def test_a_line_that_is_no_record_is_left_out_and_counted(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b'{"step": 1, "loss": 1}\n' + line + b'\n{"step": 2, "loss": 0.5, "b": [0]}\n\n{"step": 3'
    )
    rows = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5, "b": [0]}]
    skipped_lines()  # those that other tests of this process read
    assert read_records(path, Row) == rows
    assert skipped_lines() == [f"{path}: 1 line is no record and was left out."]
    assert skipped_lines() == []
    assert read_last_record(path, Row) == rows[-1]
    path.write_bytes(line + b"\n")
    assert read_last_record(path, Row) is None


@pytest.mark.parametrize("content", NO_RECORDS.values(), ids=NO_RECORDS)
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "row.json"
    path.write_bytes(content)
    if content.endswith((b'x"}', b"]}")):
        assert read_record(path, Row) is not None  # a whole file may be longer and deeper
        return
    with pytest.raises(RecordError) as error:
        read_record(path, Row)
    assert error.value.path == path
    assert str(error.value).startswith(f"{path} cannot be read: {error.value.reason}")
    assert len(str(error.value)) < 500


def test_brackets_in_strings_are_no_nesting(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    record = {"step": 1, "loss": 1, "name": '[[[[[\\"[[[[[[[[', "b": [[0], [1]] * 20}
    append_json(path, record)
    assert read_records(path, Row) == [record]


@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "socket", "loop", "forbidden"])
def test_only_regular_files_are_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "row.json"
    with socket.socket(socket.AF_UNIX) as server:
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "device":
            path.symlink_to("/dev/zero")
        elif kind == "socket":
            server.bind(str(path))
        elif kind == "loop":
            path.symlink_to(path)
        else:
            path = Path("/proc/1/mem") if os.getuid() else tmp_path / "row\0.json"
        for read in (read_record, read_records, read_last_record):
            with pytest.raises(RecordError):
                read(path, Row)
    assert read_json(path) == {}


def test_no_file_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "row.json", tmp_path / "file" / "row.json"):
        assert read_record(path, Row) is None
        assert read_records(path, Row) == []
        assert read_last_record(path, Row) is None


def test_a_tail_reads_each_record_once_and_restarts_with_another_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = Tail(path, dict[str, int])
    assert tail.read() == []
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert (tail.read(1), tail.read(), tail.read()) == ([{"a": 1}], [{"a": 2}], [])
    restarted = [tail.has_restarted]
    with path.open("a") as file:
        file.write(": 3}\n")
    assert tail.read() == [{"a": 3}]
    other = tmp_path / "other"
    other.write_text('{"a": 4}\n' * 9)
    other.replace(path)
    assert tail.read() == [{"a": 4}] * 9
    assert [*restarted, tail.has_restarted] == [False, True]
    path.write_text('{"a": 5}\n')
    assert (tail.read(), tail.has_restarted) == ([{"a": 5}], True)
    assert (tail.read(), tail.has_restarted) == ([], False)
    path.unlink()
    assert (tail.read(), tail.has_restarted, tail.offset) == ([], True, 0)


@pytest.mark.parametrize("header", [None, {"score": "motion"}])
def test_a_journal_gives_back_what_an_interrupted_command_has_finished(
    tmp_path: Path, header: dict[str, str] | None
) -> None:
    path = tmp_path / ".catalog.journal.jsonl"
    for number in range(2):
        with Journal(path, tuple[int, float], header=header) as journal:
            assert journal.read() == [(each, 0.5) for each in range(number)]
            journal.add((number, 0.5))
        with path.open("a") as file:
            file.write("[3, 0.")  # cut off
    assert Journal(path, tuple[int, float], header=header).read() == [(0, 0.5), (1, 0.5)]
    journal.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_journal_with_another_header_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path, tuple[int, float], header={"by": "motion"}) as journal:
        journal.add((0, 0.5))
    assert Journal(path, tuple[int, float], header={"by": "words"}).read() == []
    assert not path.exists()


def test_a_journal_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.symlink_to(tmp_path / "another")
    with pytest.raises(DataError, match=f"{path} cannot be written.*run the same command again"):
        Journal(path, tuple[int, float]).add((0, 0.5))


def test_readers_stay_below_a_folder_and_follow_no_links_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    top, elsewhere = tmp_path / "top", tmp_path / "elsewhere"
    for folder in (top / "inside", elsewhere, fsio.cache_folder()):
        folder.mkdir(parents=True)
        (folder / "file").write_text("content")
    (top / "file").symlink_to(elsewhere / "file")
    (top / "folder").symlink_to(elsewhere)
    refused = {
        top / "file": "it is a symbolic link",
        top / "folder" / "file": "folder is a symbolic link",
        top / ".." / "elsewhere" / "file": "it is not below the folder",
        elsewhere / "file": "it is not in",
        fsio.cache_folder() / ".." / ".." / "elsewhere" / "file": "it is not in",
    }
    with fsio.reading_below(top):
        for path in (top / "inside" / "file", fsio.cache_folder() / "file"):
            assert fsio.read_regular(path) == b"content"
        for path, why in refused.items():
            with pytest.raises(OSError, match=why):
                fsio.open_regular(path)
        with pytest.raises(FileNotFoundError):
            fsio.open_regular(top / "none")
    for path in refused:
        assert fsio.read_regular(path) == b"content"

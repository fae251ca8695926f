"""Records that several processes write and read."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from longtake.records import read_json, read_json_lines_on, write_json, write_once


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever step finds no room: the error comes out, and no half file stays beside."""
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
    """The second writer is told that it was not it; nothing else lies there."""
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


def test_many_may_replace_a_record_at_a_time(tmp_path: Path, race: Any) -> None:
    """Each writes aside under a name of its own: none fails, and the record is one's, whole."""
    path = tmp_path / "reference.json"
    failed = race(lambda number: write_json(path, {"by": number}, by_many=True))
    assert failed == []
    assert read_json(path)["by"] in range(8)
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def race() -> Any:
    """Does something 25 times in each of 8 threads; gives the errors: `race(do)`."""

    def race(do: Any) -> list[Exception]:
        failed: list[Exception] = []

        def often(number: int) -> None:
            try:
                for _ in range(25):
                    do(number)
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=often, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return failed

    return race


def test_lines_are_read_on_from_where_they_were_left(tmp_path: Path) -> None:
    """Each once; half a line waits, spoilt ones are left out, and a shorter file is another."""
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a"\n{"a": 2}\n{"a": 3}\n{"a": ')
    found, offset = read_json_lines_on(path, 0, 2)
    assert found == [{"a": 1}, {"a": 2}]
    found, offset = read_json_lines_on(path, offset, 2)
    assert found == [{"a": 3}]
    with path.open("ab") as file:
        file.write(b"4}\n")
    assert read_json_lines_on(path, offset, 2) == ([{"a": 4}], path.stat().st_size)
    path.write_bytes(b"{}\n")
    assert read_json_lines_on(path, offset, 2) == ([{}], 3)

"""Columns of appended rows: in memory, in a file, and both."""

from pathlib import Path

import numpy as np
import pytest

from longtake.inspection.columns import DTYPE, ColumnStore

_MANY = 150_000  # two full blocks and a part of one


def _rows(first: int, count: int) -> np.ndarray:
    rows = np.zeros(count, DTYPE)
    rows["step"] = np.arange(first, first + count)
    rows["loss"] = rows["step"] / 7
    rows["mfu"] = rows["step"] % 100
    rows["has_verdict"] = rows["step"] % 3 == 0
    return rows


def _check(store: ColumnStore, count: int) -> None:
    expected = _rows(0, count)
    for name in ("step", "loss", "mfu", "has_verdict", "time"):
        np.testing.assert_array_equal(store.read(name, 0, count), expected[name])


def test_a_column_holds_the_rows_in_their_order() -> None:
    store = ColumnStore()
    for first, count in ((0, 100), (100, 99_900), (100_000, _MANY - 100_000)):
        before = store.read("loss", 0, first)
        store.append(_rows(first, count))
        _check(store, first + count)
        np.testing.assert_array_equal(before, _rows(0, first)["loss"])
    assert store.read("step", 2**16 - 1, 2**16 + 2).tolist() == [65535, 65536, 65537]
    assert store.read("step", 9, 9).tolist() == []
    _check(store, 100)


@pytest.mark.parametrize("count", [0, 1, 2**16, _MANY])
def test_what_was_written_is_loaded_and_grows(tmp_path: Path, count: int) -> None:
    store = ColumnStore()
    store.append(_rows(0, count))
    with (tmp_path / "rows").open("w+b") as file:
        file.write(b"header ")
        checksum = store.write(file)
        file.flush()
        store.read_from(file, 7)
    _check(store, count)
    with (tmp_path / "rows").open("rb") as file:
        file.seek(7)
        loaded = ColumnStore.load(file, count, checksum)
    assert loaded is not None
    (tmp_path / "rows").unlink()  # another process replaced it
    _check(loaded, count)
    for each in (store, loaded):
        each.append(_rows(count, _MANY))
        _check(each, count + _MANY)
        with (tmp_path / "again").open("w+b") as file:
            again = each.write(file)
            file.seek(0)
            reloaded = ColumnStore.load(file, count + _MANY, again)
        assert reloaded is not None
        _check(reloaded, count + _MANY)


def test_a_file_of_another_size_or_content_is_not_loaded(tmp_path: Path) -> None:
    store, path = ColumnStore(), tmp_path / "rows"
    store.append(_rows(0, 10))
    with path.open("wb") as file:
        checksum = store.write(file)
    data = path.read_bytes()
    changed = data[:-5] + b"\2" + data[-4:]
    for octets, num_rows in ((changed, 10), (data[:-1], 10), (data + data, 10), (data, 99_999)):
        path.write_bytes(octets)
        with path.open("rb") as file:
            assert ColumnStore.load(file, num_rows, checksum) is None


def test_a_file_that_was_cut_off_is_an_error(tmp_path: Path) -> None:
    store, path = ColumnStore(), tmp_path / "rows"
    store.append(_rows(0, _MANY))
    with path.open("w+b") as file:
        store.write(file)
        file.flush()
        store.read_from(file, 0)
    path.write_bytes(b"")
    with pytest.raises(OSError, match="shorter than it was"):
        store.read("step", 0, _MANY)

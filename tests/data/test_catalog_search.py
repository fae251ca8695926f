"""Clips are found by identity without reading the whole catalog."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from tests.data.build import clip
from tests.data.catalogs import make_catalog

from longtake.data import catalog as tables
from longtake.data.catalog import Catalog, Duplicate, Rejection
from longtake.data.catalog_search import find_clips
from longtake.data.clip import Clip, Media, Timing
from longtake.errors import DataError


def _clips(count: int) -> list[Clip]:
    clips = []
    for number in range(count):
        one = clip(number, keyframes=tuple(range(number % 5)), attributes={"nouns": float(number)})
        if number % 7 == 0:
            one = replace(one, timing=Timing(0, 0, tuple(range(0, 24, 3))), caption="")
        clips.append(one)
    return clips


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """300 clips, 20 rejected files and 5 copies, in groups of 64 rows."""
    monkeypatch.setattr(tables, "ROWS_PER_GROUP", 64)
    monkeypatch.setattr("longtake.data.catalog_search._ROWS_AT_A_TIME", 16)
    rejected = [Rejection(str(tmp_path / f"{n}.mp4"), f"reason {n % 3}") for n in range(20)]
    copies = [Duplicate(str(tmp_path / f"copy_{n}.mp4"), clip(n).identity) for n in range(5)]
    make_catalog(_clips(300), rejected, copies).save(tmp_path / "c.parquet")
    return tmp_path / "c.parquet"


def test_clips_are_found_by_identity_or_its_beginning(path: Path) -> None:
    whole = Catalog.load(path)
    wanted = [whole.clip(row) for row in (0, 150, 299)]
    names = [bytes.fromhex(each.identity)[: 7 if n else 16] for n, each in enumerate(wanted)]
    assert find_clips(path, [*names, b"\0" * 16], most_groups=8) == wanted
    assert find_clips(path, names, most_groups=1) == wanted[:1]
    assert find_clips(path, [], most_groups=8) == []


def test_a_copy_that_was_left_out_is_no_clip(path: Path) -> None:
    whole = Catalog.load(path)
    name = bytes.fromhex(whole.duplicates[0].identity)
    assert [each.identity for each in find_clips(path, [name], most_groups=8)] == [name.hex()]


def test_what_is_no_catalog_or_damaged_is_named(path: Path) -> None:
    name = bytes.fromhex(Catalog.load(path).clip(0).identity)
    data = bytearray(path.read_bytes())
    data[200:400] = bytes(200)
    path.write_bytes(data)
    with pytest.raises(DataError, match="is damaged"):
        find_clips(path, [name], 8)
    path.write_text("nothing")
    with pytest.raises(DataError, match="is not a catalog"):
        find_clips(path, [name], 8)
    with pytest.raises(DataError, match="does not exist"):
        find_clips(path.with_name("other.parquet"), [name], 8)


def test_paths_of_spans_are_whole(tmp_path: Path) -> None:
    media = Media(str(tmp_path / "film.mp4"), span=(1.5, 2.5))
    make_catalog([clip(1, media=media)]).save(tmp_path / "c.parquet")
    (found,) = find_clips(tmp_path / "c.parquet", [bytes.fromhex(clip(1).identity)], 1)
    assert found.path == f"{tmp_path}/film.mp4#t=1.5,2.5"


def test_a_wrong_bit_in_a_columns_description_is_named_or_harmless(path: Path) -> None:
    wanted = [Catalog.load(path).clip(0)]
    names = [bytes.fromhex(wanted[0].identity)]
    data = path.read_bytes()
    described = data.rindex(b"\x06reason")  # in the file's footer: the last group's column
    for bit in range(8 * (described - 16), 8 * described):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with suppress(DataError):
            assert find_clips(path, names, 8) == wanted

"""A catalog keeps its clips whatever happens to it, and names what decides the training."""

import gc
import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.build import wait_until
from tests.data.build import clip
from tests.data.catalogs import make_catalog

from longtake.data import catalog as catalog_module
from longtake.data.catalog import Catalog, Duplicate, Rejection, Stamp, StoredCatalog
from longtake.data.clip import Clip, Media, Timing
from longtake.errors import DataError


def _clip(number: int, **fields: Any) -> Clip:
    values: dict[str, Any] = {
        "identity": f"{number:032x}",
        "num_frames": 100 + number,
        "width": 64,
        "height": 48,
        "timing": Timing(0, 512),
        "keyframes": (0, 12, 24),
    }
    return clip(number, **values | fields)


_READERS: tuple[Callable[[Path], object], ...] = (Catalog.load, StoredCatalog)


def _sound(clip: Clip) -> Clip:
    """A clip with as many frames as its timestamps name, and keyframes among them."""
    num_frames = len(clip.timing.listed if clip.timing else ()) or clip.num_frames
    keyframes = tuple(frame for frame in clip.keyframes if frame < num_frames)
    return replace(clip, num_frames=num_frames, keyframes=keyframes)


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_TICKS = st.integers(-(2**40), 2**40)
_TIMINGS = st.one_of(
    st.none(),
    st.builds(Timing, _TICKS, st.integers(0, 2**30)),
    st.builds(
        lambda ticks: Timing(ticks[0], 0, tuple(ticks)),
        st.lists(_TICKS, min_size=3, max_size=9, unique=True).map(sorted),
    ),
)
_MEDIA = st.builds(
    Media,
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20).map(
        lambda name: f"/{name}"
    ),
    _TEXT,
    st.integers(0, 2**50),
    st.none() | st.integers(1, 2**50),
)
_CLIPS = st.lists(
    st.builds(
        Clip,
        identity=st.binary(min_size=16, max_size=16).map(bytes.hex),
        media=_MEDIA,
        kind=st.sampled_from(["video", "image"]),
        caption=_TEXT,
        num_frames=st.integers(1, 2**30),
        width=st.integers(1, 2**16),
        height=st.integers(1, 2**16),
        fps=st.floats(0, 1e4),
        duration_seconds=st.floats(0, 1e6),
        stream_index=st.integers(0, 9),
        rotation=st.sampled_from([0, 90, 180, 270]),
        codec=_TEXT,
        pix_fmt=_TEXT,
        color_range=st.sampled_from(["", "limited", "full"]),
        color_transfer=_TEXT,
        timing=_TIMINGS,
        keyframes=st.lists(st.integers(0, 2**30), max_size=5, unique=True).map(
            lambda frames: tuple(sorted(frames))
        ),
        prepared_from=_TEXT,
        attributes=st.dictionaries(
            st.sampled_from(["nouns", "motion", "num_frames"]),
            st.floats(allow_nan=False, allow_infinity=False),
        ),
    ).map(_sound),
    unique_by=lambda clip: clip.identity,
    max_size=8,
)


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(clips=_CLIPS)
def test_every_field_survives_saving_and_loading(tmp_path: Path, clips: list[Clip]) -> None:
    rejected = [Rejection("/data/bad.mp4", "cut short")]
    duplicates = [Duplicate("/data/again.mp4", clip.identity) for clip in clips[:1]]
    stamps = {str(clip.media): Stamp(5, 7) for clip in clips}
    catalog = make_catalog(clips, rejected, duplicates, stamps)
    catalog.save(tmp_path / "catalog.parquet")
    again = Catalog.load(tmp_path / "catalog.parquet")
    expected = sorted(clips, key=lambda clip: clip.identity)
    assert list(again.clips()) == expected
    assert [again.clip(row) for row in range(len(again))] == expected
    assert again == catalog
    assert again.rejected == tuple(rejected)
    assert again.duplicates == tuple(duplicates)
    assert again.fingerprint == catalog.fingerprint == catalog_module.fingerprint_of(again.table)
    assert os.listdir(tmp_path) == ["catalog.parquet"]  # noqa: PTH208 - hidden files too


def test_columns_come_as_arrays() -> None:
    clips = [_clip(2, attributes={"nouns": 3.0}), _clip(1), _clip(7, attributes={"nouns": 0.5})]
    catalog = make_catalog(clips)
    assert catalog.column("num_frames").tolist() == [101, 102, 107]
    np.testing.assert_array_equal(catalog.column("nouns"), [np.nan, 3.0, 0.5])
    assert catalog.captions() == ["clip 1", "clip 2", "clip 7"]
    assert catalog.identities.to_pylist() == [bytes.fromhex(f"{n:032x}") for n in (1, 2, 7)]
    assert catalog.attribute_names == ("nouns",)
    with pytest.raises(DataError, match=r"no attribute 'motion'; it has: nouns.*data score"):
        catalog.column("motion")


def test_scores_are_added_and_replaced_without_changing_the_training_data(tmp_path: Path) -> None:
    catalog = make_catalog(map(_clip, range(3)))
    scored = catalog.with_attribute("nouns", np.array([1.0, np.nan, 3.0]))
    scored = scored.with_attribute("motion", np.zeros(3)).with_attribute("motion", np.ones(3))
    scored.save(tmp_path / "catalog.parquet")
    again = Catalog.load(tmp_path / "catalog.parquet")
    assert [clip.attributes for clip in again.clips()] == [
        {"motion": 1.0, "nouns": 1.0},
        {"motion": 1.0},
        {"motion": 1.0, "nouns": 3.0},
    ]
    assert again.fingerprint == catalog.fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"caption": "another"},
        {"num_frames": 7},
        {"width": 7},
        {"height": 7},
        {"stream_index": 7},
        {"rotation": 90},
        {"identity": f"{9:032x}"},
    ],
)
def test_the_fingerprint_changes_with_what_decides_training(change: dict[str, Any]) -> None:
    before = make_catalog([_clip(1), _clip(2)]).fingerprint
    assert make_catalog([_clip(1), replace(_clip(2), **change)]).fingerprint != before
    assert make_catalog([_clip(1)]).fingerprint != before


def test_the_fingerprint_ignores_where_clips_lie_and_what_was_rejected() -> None:
    before = make_catalog([_clip(1), _clip(2)]).fingerprint
    moved = replace(
        _clip(2), media=Media("/x.tar", "y", 1, 2), attributes={"nouns": 1.0}, prepared_from="z"
    )
    assert make_catalog([moved, _clip(1)], [Rejection("x", "y")]).fingerprint == before


def test_the_fingerprint_does_not_depend_on_how_the_columns_lie() -> None:
    catalog = make_catalog(map(_clip, range(9)))
    pieces = [catalog.table.slice(0, 2), catalog.table.slice(2, 0), catalog.table.slice(2)]
    chunked = Catalog(pa.concat_tables(pieces), catalog.set_aside)
    assert chunked.table["caption"].num_chunks > 1
    assert chunked.fingerprint == catalog.fingerprint
    assert chunked.identities.equals(catalog.identities)
    shifted = [_clip(1, caption="ab"), _clip(2, caption="c")]
    other = [_clip(1, caption="a"), _clip(2, caption="bc")]
    assert make_catalog(shifted).fingerprint != make_catalog(other).fingerprint


def test_a_folder_can_be_moved_with_its_catalog(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    media = [Media(f"{home}/a.mp4"), Media(f"{home}/s.tar", "b.mp4", 512, 9), Media("/far/ü.mp4")]
    clips = [_clip(number, media=each) for number, each in enumerate(media)]
    make_catalog(clips, [Rejection(f"{home}/bad.mp4", "x")]).save(home / "catalog.parquet")
    moved = home.rename(tmp_path / "moved")
    again = Catalog.load(moved / "catalog.parquet")
    assert [str(clip.media) for clip in again.clips()] == [
        f"{moved}/a.mp4",
        f"{moved}/s.tar/b.mp4",
        "/far/ü.mp4",
    ]
    assert again.rejected[0].path == f"{moved}/bad.mp4"


def test_a_large_catalog_is_mapped_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = make_catalog(map(_clip, range(5)))
    catalog.save(tmp_path / "catalog.parquet")
    monkeypatch.setattr(catalog_module, "_MAP_ABOVE_ROWS", 4)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "spill"))
    (tmp_path / "spill").mkdir()
    gc.collect()  # what other tests have left is not freed meanwhile
    before = pa.total_allocated_bytes()
    mapped = Catalog.load(tmp_path / "catalog.parquet")
    wait_until(lambda: pa.total_allocated_bytes() <= before)  # Arrow's threads let go a bit later
    assert mapped == catalog
    assert list((tmp_path / "spill").iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"no table", "is not a catalog"),
        (b"", "is not a catalog"),
        ({}, "is not a catalog"),
        ({"longtake.catalog": "1"}, "has format 1, and this longtake reads format 2"),
        ({"longtake.catalog": "2"}, "is damaged: it has no column identity"),
    ],
)
def test_what_is_not_a_catalog_says_what_to_do(
    tmp_path: Path, content: bytes | dict[str, str] | None, message: str
) -> None:
    path = tmp_path / "catalog.parquet"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        pq.write_table(pa.table({"x": [1]}).replace_schema_metadata(content), path)
    with pytest.raises(DataError, match=message) as caught:
        Catalog.load(path)
    assert "`longtake data index`" in str(caught.value)


def test_a_changed_catalog_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "catalog.parquet"
    make_catalog(map(_clip, range(300))).save(path)
    data = path.read_bytes()
    rows = pq.ParquetFile(path).read()
    captions = pa.array([f"another {number}" for number in range(300)])
    place = rows.column_names.index("caption")
    pq.write_table(rows.set_column(place, "caption", captions), path)
    for reader in _READERS:
        with pytest.raises(DataError, match="was changed after it was written: its fingerprint"):
            reader(path)
    pages = data[4 : int.from_bytes(data[-8:-4], "little") * -1 - 8]
    for at in range(4, 4 + len(pages), len(pages) // 60):
        path.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
        with suppress(DataError):
            assert Catalog.load(path).table == _table_of(data, tmp_path)


def test_a_catalog_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    """A pipe would make every reader wait."""
    os.mkfifo(tmp_path / "catalog.parquet")
    with pytest.raises(DataError, match="cannot be read: it is a named pipe"):
        Catalog.load(tmp_path / "catalog.parquet")


def _table_of(data: bytes, folder: Path) -> pa.Table:
    path = folder / "whole.parquet"
    path.write_bytes(data)
    return Catalog.load(path).table


def test_rows_in_disorder_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "catalog.parquet"
    make_catalog(map(_clip, range(3))).save(path)
    rows = pq.ParquetFile(path).read()
    for order in ([1, 0, 2], [0, 0, 1]):
        for reader in _READERS:
            pq.write_table(rows.take(order), path, row_group_size=len(order) - 1)
            with pytest.raises(DataError, match="damaged: its clips are not sorted by identity"):
                reader(path)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("caption", None, "1 clips have no caption"),
        ("duration_seconds", None, "1 clips have no duration_seconds"),
        ("duration_seconds", math.nan, "a clip's duration_seconds is nan"),
        ("fps", math.inf, "a clip's fps is inf"),
        ("num_frames", 0, "a clip's num_frames is 0"),
        ("width", 2**31 - 1, "a clip's width is 2147483647"),
        ("height", -3, "a clip's height is -3"),
        ("rotation", 45, "a clip's rotation is 45"),
        ("kind", "song", "a clip's kind is 'song'"),
        ("path", "a\0b", "a clip's path is"),
        ("num_bytes", -1, "a clip's num_bytes is -1"),
        ("pts_step", 2**62, "a clip's pts_step is"),
        ("pts", [1, 2], r"a clip's pts is \[1, 2\]"),
        ("keyframes", [0, 12, 12], r"a clip's keyframes is \[0, 12, 12\]"),
        ("keyframes", [0, 2**30], "a clip's keyframes is"),
        ("attributes.nouns", math.inf, "a clip's nouns is inf"),
    ],
)
def test_values_that_no_index_writes_are_damage(
    tmp_path: Path, column: str, value: object, message: str
) -> None:
    path = tmp_path / "catalog.parquet"
    make_catalog(_clip(number, attributes={"nouns": 2.0}) for number in range(3)).save(path)
    rows = pq.ParquetFile(path).read()
    place, field = rows.column_names.index(column), rows.schema.field(column)
    values = [value, *rows[column].to_pylist()[1:]]
    pq.write_table(rows.set_column(place, field, pa.array(values, field.type)), path)
    for reader in _READERS:
        with pytest.raises(DataError, match=f"is damaged: {message}"):
            reader(path)

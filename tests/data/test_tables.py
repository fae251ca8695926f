"""A list or table becomes named media, or an error that says what is wrong with it."""

import io
import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tests.data.build import named_items, write_table, write_tar

from longtake.data.caption_files import read_captions
from longtake.data.clip import captions_of
from longtake.data.sources import find
from longtake.errors import DataError

_PNG = io.BytesIO()
Image.new("RGB", (4, 4), "red").save(_PNG, "png")


def test_a_list_names_paths_relative_to_itself(folder: Path, tmp_path: Path) -> None:
    listing = folder / "sub" / "train.txt"
    listing.write_text(f"\ufeff../a.mp4\n\n  c.webm \n{folder}/b.png\n../0017\n", "utf-8")
    found = find([listing])
    assert set(named_items(found.items, folder)) == {"a.mp4", "sub/c.webm", "b.png", "0017"}


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
@pytest.mark.parametrize("column", ["video", "image", "path", "file", "file_name"])
def test_tables_give_captions_and_scores(folder: Path, suffix: str, column: str) -> None:
    rows: list[dict[str, Any]] = [
        {column: "a.mp4", "caption": " one, two ", "nouns": 2, "width": 9, "ok": True, "id": "x"},
        {column: "0017", "caption": None, "nouns": None, "width": 9, "ok": False, "id": "y"},
    ]
    table = write_table(folder / f"table{suffix}", rows)
    items = named_items(find([table]).items, folder)
    assert {name: (item.caption, item.attributes) for name, item in items.items()} == {
        "a.mp4": ("one, two", {"nouns": 2, "ok": 1}),
        "0017": (None, {"ok": 0}),
    }


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_a_late_row_decides_what_a_column_holds(folder: Path, suffix: str) -> None:
    """Tables are read in batches; the batches before that of the row are not taken otherwise."""
    num_rows, late = 9000, 8500
    rows: list[dict[str, Any]] = [
        {
            "path": "a.mp4",
            "nouns": 2.0,
            "many": 2**60 if number == late else 1,
            "late": 3.0 if number == late else None,
        }
        for number in range(num_rows)
    ]
    table = write_table(folder / f"table{suffix}", rows)
    (item,) = find([table]).items
    # An id among small numbers makes its row unknown in JSON, and all of a typed column an id.
    many = {"many": 1.0} if suffix == ".jsonl" else {}
    assert item.attributes == {"nouns": 2.0, "late": 3.0} | many
    rows[late]["path"] = ""
    if suffix == ".jsonl":
        write_table(table, rows)
        with pytest.raises(DataError, match=f"row {late + 1} has no path"):
            find([table])


@pytest.mark.parametrize("suffix", [".txt", ".csv", ".jsonl"])
def test_missing_files_are_counted_and_shown(folder: Path, suffix: str) -> None:
    names = ["a.mp4", *(f"gone{number}.mp4" for number in range(7))]
    listing = folder / f"list{suffix}"
    if suffix == ".txt":
        listing.write_text("\n".join(names))
    else:
        write_table(listing, [{"path": name} for name in names])
    with pytest.raises(DataError, match="names 8 files, and 7 of them do not exist") as caught:
        find([folder, listing])
    assert f"{folder}/gone4.mp4\n  and 2 more" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "url,caption\na.mp4,x\n", "no column of paths; its columns: url, caption"),
        ("t.csv", "path,caption\na.mp4\n", "line 2.*1 columns instead of the header's 2"),
        ("t.csv", f"path,caption\na.mp4,{'x' * 200_000}\n", "in row 1: field larger than"),
        ("t.csv", 'path,caption\na.mp4,"x\nb.png,y\n', "in row 1: unexpected end of data"),
        ("t.csv", f"path,caption\na.mp4,{'x' * 2**18}\n", "line 2.*field larger than"),
        ("t.csv", "path,path\na.mp4,a.mp4\n", "several columns 'path'"),
        ("t.csv", "path,caption\n,x\n", "row 1 has no path"),
        ("t.jsonl", '{"path": "a.mp4"}\n{"path"', "cannot be read: line 2: Invalid JSON"),
        ("t.jsonl", '{"path": 7}', "column 'path' holds int; expected text"),
        ("t.jsonl", f'{{"path": {"[" * 200_000}', "cannot be read: line 1 has more than 65,536"),
        ("t.jsonl", f'{{"path": {"[" * 9}{"]" * 9}}}', "line 1: it is nested deeper than 8 levels"),
        ("t.jsonl", "", "has no column of paths"),
        ("t.csv", "", "cannot be read: it is empty"),
        ("t.parquet", "no table", "cannot be read"),
        ("t.txt", b"caf\xe9.mp4", "is not UTF-8"),
        ("t.txt", "\n", "No video or image was found"),
    ],
)
def test_lists_that_cannot_be_read_say_why(
    folder: Path, name: str, content: str | bytes, message: str
) -> None:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError, match=message) as caught:
        find([path])
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.jsonl", '{"video_path": "a.mp4", "caption": "moves"}'),
        ("t.jsonl", '{"image_path": "a.mp4", "prompt": "moves"}'),
        ("t.json", '[{"file_path": "a.mp4", "text": "moves", "type": "video"}]'),
        ("t.csv", "video,prompt\na.mp4,moves\n"),
        ("metadata.csv", "video,prompt\na.mp4,moves\n"),
        ("t.csv", "path,caption\na.mp4,moves\n".encode("utf-16")),
    ],
)
def test_tables_of_other_trainers_caption_their_clips(
    folder: Path, name: str, content: str | bytes
) -> None:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    source = folder if name == "metadata.csv" else path
    found = find([source])
    assert (named_items(found.items, folder)["a.mp4"].caption, found.notes) == ("moves", [])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metadata.csv", "file_name,description\na.mp4,moves\n"),
        ("metadata.csv", "video,description\na.mp4,moves\n"),
        ("metadata.jsonl", '{"file_name": "a.mp4", "description": "moves"}'),
    ],
)
def test_columns_that_may_be_captions_are_named(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    (note,) = find([folder]).notes
    assert "description" in note
    assert "caption or text or prompt" in note


def test_keys_of_captions_that_are_not_read_are_named(folder: Path) -> None:
    path = folder / "mine.jsonl"
    path.write_text('{"video": "a.mp4", "caption": "one", "description": "moves"}\n')
    notes: list[str] = []
    read_captions(path, [folder], list, notes)
    assert notes == [f"{path}: not read: description."]
    path.write_text('{"video": "a.mp4", "description": "moves"}\n')
    with pytest.raises(DataError, match=r"line 1 is no caption.* Its keys: video, description\."):
        read_captions(path, [folder], list)


def test_a_list_of_texts_is_several_captions_of_a_clip(folder: Path) -> None:
    row = {"path": "a.mp4", "caption": ["one", " two "]}
    (folder / "t.jsonl").write_text(json.dumps(row))
    (folder / "t.json").write_text(json.dumps([{"path": "a.mp4", "cap": row["caption"]}]))
    pq.write_table(pa.table({name: [value] for name, value in row.items()}), folder / "t.parquet")
    for name in ("t.jsonl", "t.json", "t.parquet"):
        (item,) = find([folder / name]).items
        assert item.caption is not None
        assert captions_of(item.caption) == ["one", "two"]
    for kind in (pa.large_list(pa.large_string()), pa.list_(pa.string(), 2)):
        columns = {"path": ["a.mp4"], "caption": pa.array([row["caption"]], kind)}
        pq.write_table(pa.table(columns), folder / "t.parquet")
        (item,) = find([folder / "t.parquet"]).items
        assert item.caption == "one\x1etwo"
    (folder / "t.jsonl").write_text('{"path": "a.mp4", "caption": ["one", 2]}')
    with pytest.raises(DataError, match=r"column 'caption' holds list; .* a text, or a list of"):
        find([folder / "t.jsonl"])


def test_a_list_of_captions_beside_a_list_of_videos(folder: Path) -> None:
    (folder / "videos.txt").write_text("a.mp4\nsub/c.webm\n")
    (folder / "prompt.txt").write_text("one\ntwo\n")
    captions = {
        name: each.caption for name, each in named_items(find([folder]).items, folder).items()
    }
    assert captions == {"a.mp4": "one", "sub/c.webm": "two", "b.png": None}
    (folder / "prompt.txt").write_text("one\n")
    with pytest.raises(DataError, match=r"names 2 files, and .*prompt\.txt has 1 captions"):
        find([folder])


def test_media_inside_a_table_are_refused(folder: Path) -> None:
    rows = [{"image": {"bytes": b"x", "path": None}}]
    pq.write_table(pa.Table.from_pylist(rows), folder / "t.parquet")
    with pytest.raises(DataError, match=r"column 'image' holds struct.*Media inside a table"):
        find([folder / "t.parquet"])


def test_media_inside_a_hugging_face_table_are_written_once(tmp_path: Path) -> None:
    (tmp_path / "there.png").write_bytes(_PNG.getvalue())
    values: list[dict[str, Any]] = [
        {"bytes": _PNG.getvalue(), "path": "cat.jpg"},
        {"bytes": None, "path": "there.png"},
        {"bytes": b"\0\0\0\x20ftypisom", "path": None},
    ]
    schema = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns: dict[str, Any] = {"image": pa.array(values, schema), "text": ["one", "two", "three"]}
    pq.write_table(pa.table(columns), tmp_path / "train-0.parquet")
    found = list(find([tmp_path / "train-0.parquet"], extracted=tmp_path / "media").items)
    by_caption = {item.caption: Path(item.media.path) for item in found}
    assert by_caption["two"] == tmp_path / "there.png"
    assert by_caption["one"].name == "00000000.png"
    assert by_caption["one"].read_bytes() == _PNG.getvalue()
    assert by_caption["three"].name == "00000002.mp4"
    written = by_caption["one"].stat().st_mtime_ns
    again = find([tmp_path / "train-0.parquet"], extracted=tmp_path / "media").items
    assert list(again) == found
    assert by_caption["one"].stat().st_mtime_ns == written
    values[0] = {"bytes": b"no picture", "path": "cat.exe"}
    columns["image"] = pa.array(values, schema)
    pq.write_table(pa.table(columns), tmp_path / "train-0.parquet")
    with pytest.raises(DataError, match="row 1, column 'image' holds 10 bytes that are no image"):
        find([tmp_path / "train-0.parquet"], extracted=tmp_path / "media")


def test_numbers_that_no_float_can_hold_are_unknown(folder: Path, tmp_path: Path) -> None:
    digits = "1" + "0" * 400
    entry = f'{{"id": {2**53 + 1}, "huge": {digits}, "inf": 1e999, "nouns": 2}}'
    tar = write_tar(tmp_path / "shard.tar", {"a.mp4": "x", "a.json": entry})
    (folder / "t.jsonl").write_text(entry.replace("{", '{"path": "a.mp4", ') + "\n")
    (folder / "t.csv").write_text(f"path,id,huge,inf,nouns\na.mp4,{2**53 + 1},{digits},inf,2\n")
    table = {"path": ["a.mp4"], "id": [2**53 + 1], "inf": [math.inf], "nouns": [2]}
    pq.write_table(pa.table(table), folder / "t.parquet")
    for source in (tar, folder / "t.jsonl", folder / "t.csv", folder / "t.parquet"):
        (item,) = find([source]).items
        assert item.attributes == {"nouns": 2}, source


def test_a_table_of_more_rows_than_bytes_is_not_read(folder: Path) -> None:
    path = folder / "t.parquet"
    pq.write_table(pa.table({"path": pa.array(["a.mp4"]).take(pa.array([0] * 1_100_000))}), path)
    with pytest.raises(DataError, match=r"1,100,000 rows in [\d,]+ bytes repeat the same values"):
        find([path])

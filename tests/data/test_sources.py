"""Whatever people name becomes a list of media, or an error that says what is wrong with it."""

import gzip
import io
import json
import math
import os
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from longtake.data.clip import Item
from longtake.data.sources import describe_ignored, find
from longtake.errors import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a.mp4, b.png, 0017 and sub/c.webm; nobody looks into them here."""
    folder = tmp_path / "media"
    (folder / "sub").mkdir(parents=True)
    for name in ("a.mp4", "b.png", "0017", "sub/c.webm"):
        (folder / name).write_bytes(name.encode())
    return folder


def _named(items: list[Item], folder: Path) -> dict[str, Item]:
    return {str(Path(str(item.media)).relative_to(folder)): item for item in items}


def _tar(path: Path, members: dict[str, bytes | str]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            data = content.encode() if isinstance(content, str) else content
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def _header(
    size: int, pax: dict[str, str] | None = None, kind: bytes = tarfile.REGTYPE, name: str = "b.mp4"
) -> bytes:
    """A header that names any size."""
    member = tarfile.TarInfo(name)
    member.size, member.type, member.pax_headers = size, kind, pax or {}
    return member.tobuf(tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT)


def _many_numbers() -> bytes:
    """A tar whose one sample has 2,000 numbers."""
    text = json.dumps({f"number{index}": index for index in range(2000)}).encode()
    padding = bytes(-len(text) % 512)
    return (
        _header(0, name="a.mp4") + _header(len(text), name="a.json") + text + padding + bytes(1024)
    )


def test_folders_files_and_tars_in_folders_are_found(folder: Path) -> None:
    _tar(folder / "sub" / "shard.tar", {"x.jpg": "x", ".hidden.jpg": "y"})
    found = find([folder, folder / "a.mp4", folder / "sub"])
    kinds = {name: item.kind for name, item in _named(found.items, folder).items()}
    assert kinds == {
        "a.mp4": "video",
        "b.png": "image",
        "sub/c.webm": "video",
        "sub/shard.tar/x.jpg": "image",
    }
    assert found.folders == [folder, folder / "sub"]
    assert found.refused == []


def test_a_list_names_paths_relative_to_itself(folder: Path, tmp_path: Path) -> None:
    listing = folder / "sub" / "train.txt"
    listing.write_text(f"\ufeff../a.mp4\n\n  c.webm \n{folder}/b.png\n../0017\n", "utf-8")
    found = find([listing])
    assert set(_named(found.items, folder)) == {"a.mp4", "sub/c.webm", "b.png", "0017"}


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
@pytest.mark.parametrize("column", ["video", "image", "path", "file", "file_name"])
def test_tables_give_captions_and_scores(folder: Path, suffix: str, column: str) -> None:
    rows: list[dict[str, Any]] = [
        {column: "a.mp4", "caption": " one, two ", "nouns": 2, "width": 9, "ok": True, "id": "x"},
        {column: "0017", "caption": None, "nouns": None, "width": 9, "ok": False, "id": "y"},
    ]
    table = folder / f"table{suffix}"
    if suffix == ".csv":
        table.write_text(f'{column},caption,nouns,width,ok,id\na.mp4," one, two ",2,9,true,x\n')
        with table.open("a") as file:
            file.write("0017,,,9,false,y\n")
    elif suffix == ".jsonl":
        table.write_text("\n".join(map(json.dumps, rows)))
    else:
        pq.write_table(pa.Table.from_pylist(rows), table)
    items = _named(find([table]).items, folder)
    assert (items["a.mp4"].caption, items["a.mp4"].attributes) == (
        "one, two",
        {"nouns": 2, "ok": 1},
    )
    assert (items["0017"].caption, items["0017"].attributes) == (None, {"ok": 0})


@pytest.mark.parametrize("suffix", [".txt", ".csv", ".jsonl"])
def test_missing_files_are_counted_and_shown(folder: Path, suffix: str) -> None:
    """A list that names what is not there is refused as a whole, never shortened."""
    names = ["a.mp4", *(f"gone{number}.mp4" for number in range(7))]
    listing = folder / f"list{suffix}"
    if suffix == ".jsonl":
        listing.write_text("\n".join(json.dumps({"path": name}) for name in names))
    else:
        listing.write_text("\n".join([*(["path"] if suffix == ".csv" else []), *names]))
    with pytest.raises(DataError, match="names 8 files, and 7 of them do not exist") as caught:
        find([folder, listing])
    assert f"{folder}/gone4.mp4\n  and 2 more" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "url,caption\na.mp4,x\n", "no column of paths; its columns are url, caption"),
        ("t.csv", "path,caption\na.mp4\n", "line 2.*1 columns instead of the header's 2"),
        ("t.csv", 'path,caption\na.mp4,"x\nb.png,y\n', "after row 0: unexpected end of data"),
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


def test_media_inside_a_table_are_refused(folder: Path) -> None:
    """A column of bytes instead of paths is named with what to do."""
    rows = [{"image": {"bytes": b"x", "path": None}}]
    pq.write_table(pa.Table.from_pylist(rows), folder / "t.parquet")
    with pytest.raises(DataError, match=r"column 'image' holds struct.*Media inside a table"):
        find([folder / "t.parquet"])


_PNG = io.BytesIO()
Image.new("RGB", (4, 4), "red").save(_PNG, "png")


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_metadata_of_a_hugging_face_folder_captions_its_files(folder: Path, suffix: str) -> None:
    """Each folder may have its own; a table without `file_name` is no metadata."""
    row = {"file_name": "c.webm", "text": "a clip", "nouns": 1.0}
    path = folder / "sub" / f"metadata.{suffix}"
    if suffix == "csv":
        path.write_text("file_name,text,nouns\nc.webm,a clip,1\n")
    elif suffix == "jsonl":
        path.write_text(json.dumps(row))
    else:
        pq.write_table(pa.Table.from_pylist([row]), path)
    (folder / "metadata.csv").write_text("who,what\nme,nothing\n")
    found = _named(find([folder]).items, folder)
    assert found["sub/c.webm"] == Item(
        found["sub/c.webm"].media, "a clip", attributes={"nouns": 1.0}
    )
    assert found["a.mp4"].caption is None
    with pytest.raises(DataError, match="has no column of paths"):
        find([folder / "metadata.csv"])


def test_media_inside_a_hugging_face_table_are_written_once(tmp_path: Path) -> None:
    """Whatever the table calls them, the content decides the ending."""
    (tmp_path / "there.png").write_bytes(_PNG.getvalue())
    values: list[dict[str, Any]] = [
        {"bytes": _PNG.getvalue(), "path": "cat.jpg"},
        {"bytes": None, "path": "there.png"},
        {"bytes": b"\0\0\0\x20ftypisom", "path": None},
    ]
    schema = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns: dict[str, Any] = {"image": pa.array(values, schema), "text": ["one", "two", "three"]}
    pq.write_table(pa.table(columns), tmp_path / "train-0.parquet")
    found = find([tmp_path / "train-0.parquet"], extracted=tmp_path / "media").items
    by_caption = {item.caption: Path(item.media.path) for item in found}
    assert by_caption["two"] == tmp_path / "there.png"
    assert by_caption["one"].name == "00000000.png"
    assert by_caption["one"].read_bytes() == _PNG.getvalue()
    assert by_caption["three"].name == "00000002.mp4"
    written = by_caption["one"].stat().st_mtime_ns
    assert find([tmp_path / "train-0.parquet"], extracted=tmp_path / "media").items == found
    assert by_caption["one"].stat().st_mtime_ns == written
    values[0]["bytes"] = b"no picture"
    values[0]["path"] = "cat.exe"
    columns["image"] = pa.array(values, schema)
    pq.write_table(pa.table(columns), tmp_path / "train-0.parquet")
    with pytest.raises(DataError, match="row 1, column 'image' holds 10 bytes that are no image"):
        find([tmp_path / "train-0.parquet"], extracted=tmp_path / "media")


def test_two_captions_for_one_file_are_refused(folder: Path) -> None:
    (folder / "one.csv").write_text("path,caption,nouns\na.mp4,one,1\n")
    (folder / "two.csv").write_text("path,caption,verbs\na.mp4,one,2\n")
    found = find([folder / "one.csv", folder / "two.csv", folder])
    item = _named(found.items, folder)["a.mp4"]
    assert (item.caption, item.attributes) == ("one", {"nouns": 1, "verbs": 2})
    (folder / "two.csv").write_text("path,caption\na.mp4,two\n")
    with pytest.raises(DataError, match=r"a\.mp4 has two captions: 'one' and 'two'"):
        find([folder / "one.csv", folder / "two.csv"])


def test_members_with_one_key_are_one_sample(tmp_path: Path) -> None:
    """Captions come from .txt, else .json; offsets are where the bytes really lie."""
    members: dict[str, bytes | str] = {
        "./d/0.1/a.mp4": b"A" * 700,
        "./d/0.1/a.txt": "\ufefftext of a\n",
        "./d/0.1/a.json": json.dumps({"caption": "not this", "nouns": 3, "height": 9, "id": "x"}),
        "b.left.png": b"L",
        "b.right.png": b"R",
        "b.json": json.dumps({"text": "both sides"}),
        "c.webm": b"C",
        "c.json": "[1, 2]",
        "notes.md": "passed over",
    }
    tar = _tar(tmp_path / "shard.tar", members)
    items = _named(find([tar]).items, tar)
    assert {name: (item.caption, item.attributes) for name, item in items.items()} == {
        "d/0.1/a.mp4": ("text of a", {"nouns": 3.0}),
        "b.left.png": ("both sides", {}),
        "b.right.png": ("both sides", {}),
        "c.webm": (None, {}),
    }
    data = tar.read_bytes()
    for item in items.values():
        media = item.media
        assert media.num_bytes is not None
        lies = data[media.offset : media.offset + media.num_bytes]
        assert lies in (members.get(media.member), members.get(f"./{media.member}"))


def test_malformed_tars_are_refused_with_a_reason(tmp_path: Path) -> None:
    whole = _tar(tmp_path / "whole.tar", {"a.mp4": b"A" * 2000, "b.mp4": b"B" * 2000}).read_bytes()
    tars = {
        "cut.tar": whole[:4000],
        "cut_header.tar": whole[:3000],
        "cut_between.tar": whole[: 512 + 2048],
        "gzip.tar": gzip.compress(whole),
        "joined.tar": whole + whole,
        "garbled.tar": whole[:2560] + b"\x01" * 512 + whole[3072:],
        "text.tar": b"no tar at all",
        "negative.tar": whole[:2560] + _header(-1024) + whole[3072:],
        "negative_pax.tar": whole[:2560] + _header(2000, {"size": "-3072"}) + whole[3072:],
        "long_pax.tar": whole[:2560] + _header(2**33, kind=tarfile.XHDTYPE) + whole[3072:],
        "long_text.tar": _header(2**21, name="a.txt") + bytes(2**21 + 1024),
        "names.tar": _many_numbers(),
        "empty.tar": b"",
    }
    for name, content in tars.items():
        (tmp_path / name).write_bytes(content)
    _tar(tmp_path / "no_media.tar", {"a.txt": "x"})
    _tar(tmp_path / "bad_json.tar", {"a.mp4": "x", "a.json": "{"})
    with tarfile.open(tmp_path / "twice.tar", "w") as tar:
        for _ in range(2):
            tar.add(tmp_path / "text.tar", "a.mp4")
    with tarfile.open(tmp_path / "link.tar", "w") as tar:
        link = tarfile.TarInfo("a.mp4")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    (tmp_path / "whole.tar").unlink()
    found = find([tmp_path])
    assert found.items == []
    reasons = {Path(error.path).name: error.reason for error in found.refused}
    expected = {
        "cut.tar": "unexpected end of data",
        "cut_header.tar": "damaged at byte 2560",
        "cut_between.tar": "ends without an end marker",
        "gzip.tar": "not a readable tar",
        "joined.tar": "several tars in one file",
        "garbled.tar": "damaged at byte 2560",
        "text.tar": "not a readable tar",
        "negative.tar": "not a readable tar: a member of -1024 bytes",
        "negative_pax.tar": "does not end behind it",
        "long_pax.tar": "a header of 8,589,934,592 bytes",
        "long_text.tar": "a.txt has 2,097,152 bytes; a text has at most 1,048,576",
        "names.tar": "its .json files name 2,000 numbers; at most 1,000 can be",
        "empty.tar": "not a readable tar: empty file",
        "no_media.tar": "no video or image among its 1 members",
        "bad_json.tar": "not a readable tar",
        "twice.tar": "two members have the same name",
        "link.tar": "a.mp4 is not a plain file",
    }
    assert set(reasons) == set(expected)
    for name, reason in expected.items():
        assert reason in reasons[name]


def test_numbers_that_no_float_can_hold_are_unknown(folder: Path, tmp_path: Path) -> None:
    digits = "1" + "0" * 400
    entry = f'{{"id": {2**53 + 1}, "huge": {digits}, "inf": 1e999, "nouns": 2}}'
    tar = _tar(tmp_path / "shard.tar", {"a.mp4": "x", "a.json": entry})
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


def test_a_folder_says_what_it_passes_over(another_user: Path) -> None:
    folder = another_user
    for name in ("a.mp4", "a.flv", "b.FLV", "c.heic", "0017", ".hidden.flv", "notes.json"):
        (folder / name).touch()
    (folder / "locked").mkdir()
    (folder / "locked" / "x.mp4").touch()
    (folder / "locked").chmod(0)
    found = find([folder])
    assert found.passed_over == {".flv": 2, ".heic": 1, "no ending": 1}
    assert [(error.path, error.reason) for error in found.unreadable] == [
        (folder / "locked", "Permission denied")
    ]
    assert describe_ignored(found.passed_over, found.unreadable) == [
        "4 files have another ending and were left out: 2 .flv, 1 .heic, 1 no ending.",
        f"1 folder cannot be read: {folder / 'locked'} (Permission denied).",
    ]
    with pytest.raises(DataError, match=r"No video.* was found.*1 folder cannot be read"):
        find([folder / "locked"])


@pytest.mark.parametrize(
    ("name", "why"),
    [("x" * 300, "File name too long"), ("a\0b", "embedded null"), ("fifo", "neither a file")],
)
def test_impossible_names_are_refused(tmp_path: Path, name: str, why: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(DataError, match=why):
        find([tmp_path / name])
    listing = tmp_path / "list.txt"
    listing.write_text(f"{'x' * 300}\n", "utf-8")
    with pytest.raises(DataError, match="1 of them do not exist"):
        find([listing])

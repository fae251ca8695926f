"""Whatever people name becomes a list of media, or an error that says what is wrong with it."""

import gzip
import json
import os
import tarfile
from pathlib import Path

import pytest
from tests.data.build import named_items, write_table, write_tar

from longtake.data.clip import IMAGE_SUFFIXES, VIDEO_SUFFIXES, Item
from longtake.data.sources import describe_ignored, find
from longtake.errors import DataError


def _header(
    size: int, pax: dict[str, str] | None = None, kind: bytes = tarfile.REGTYPE, name: str = "b.mp4"
) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.type, member.pax_headers = size, kind, pax or {}
    return member.tobuf(tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT)


def _with_json(text: bytes) -> bytes:
    """A tar of an empty clip and its .json."""
    padding = bytes(-len(text) % 512)
    return (
        _header(0, name="a.mp4") + _header(len(text), name="a.json") + text + padding + bytes(1024)
    )


def test_folders_files_and_tars_in_folders_are_found(folder: Path) -> None:
    write_tar(folder / "sub" / "shard.tar", {"x.jpg": "x", ".hidden.jpg": "y"})
    found = find([folder, folder / "a.mp4", folder / "sub"])
    kinds = {name: item.kind for name, item in named_items(found.items, folder).items()}
    assert kinds == {
        "a.mp4": "video",
        "b.png": "image",
        "sub/c.webm": "video",
        "sub/shard.tar/x.jpg": "image",
    }
    assert found.folders == [folder, folder / "sub"]
    assert found.refused == []


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_metadata_of_a_hugging_face_folder_captions_its_files(folder: Path, suffix: str) -> None:
    """Each folder may have its own; a table without `file_name` is no metadata."""
    row = {"file_name": "c.webm", "text": "a clip", "nouns": 1.0}
    write_table(folder / "sub" / f"metadata.{suffix}", [row])
    (folder / "metadata.csv").write_text("who,what\nme,nothing\n")
    found = named_items(find([folder]).items, folder)
    assert found["sub/c.webm"] == Item(
        found["sub/c.webm"].media, "a clip", attributes={"nouns": 1.0}
    )
    assert found["a.mp4"].caption is None
    with pytest.raises(DataError, match="has no column of paths"):
        find([folder / "metadata.csv"])


def test_two_captions_for_one_file_are_refused(folder: Path) -> None:
    (folder / "one.csv").write_text("path,caption,nouns\na.mp4,one,1\n")
    (folder / "two.csv").write_text("path,caption,verbs\na.mp4,one,2\n")
    found = find([folder / "one.csv", folder / "two.csv", folder])
    item = named_items(found.items, folder)["a.mp4"]
    assert (item.caption, item.attributes) == ("one", {"nouns": 1, "verbs": 2})
    (folder / "two.csv").write_text("path,caption\na.mp4,two\n")
    with pytest.raises(DataError, match=r"a\.mp4 has two captions: 'one' and 'two'"):
        find([folder / "one.csv", folder / "two.csv"])


def test_members_with_one_key_are_one_sample(tmp_path: Path) -> None:
    members: dict[str, bytes | str] = {
        "./d/0.1/a.mp4": b"A" * 700,
        "./d/0.1/a.txt": "\ufefftext of a\n",
        "./d/0.1/a.json": json.dumps(
            {"caption": "not this", "nouns": 3, "height": 9, "id": "x", "no float": 10**400}
        ),
        "b.left.png": b"L",
        "b.right.png": b"R",
        "b.json": json.dumps({"text": "both sides"}),
        "c.webm": b"C",
        "c.json": "[1, 2]",
        "notes.md": "passed over",
    }
    tar = write_tar(tmp_path / "shard.tar", members)
    items = named_items(find([tar]).items, tar)
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


def test_what_could_be_captions_in_a_tar_is_named(tmp_path: Path) -> None:
    entry = json.dumps({"description": "it moves", "nouns": 3, "codec": "h264"})
    tar = write_tar(tmp_path / "shard.tar", {"a.mp4": b"A", "a.json": entry})
    (note,) = find([tar]).notes
    assert "shard.tar has no captions; not read: description. If" in note
    write_tar(tar, {"a.mp4": b"A", "a.json": entry, "a.txt": "a caption"})
    assert not find([tar]).notes


def test_malformed_tars_are_refused_with_a_reason(tmp_path: Path) -> None:
    whole = write_tar(
        tmp_path / "whole.tar", {"a.mp4": b"A" * 2000, "b.mp4": b"B" * 2000}
    ).read_bytes()
    many = {f"number{index}": index for index in range(2000)}
    tars = {
        "cut.tar": (whole[:4000], "unexpected end of data"),
        "cut_header.tar": (whole[:3000], "damaged at byte 2560"),
        "cut_between.tar": (whole[: 512 + 2048], "ends without an end marker"),
        "gzip.tar": (gzip.compress(whole), "not a readable tar"),
        "joined.tar": (whole + whole, "several tars in one file"),
        "garbled.tar": (whole[:2560] + b"\x01" * 512 + whole[3072:], "damaged at byte 2560"),
        "text.tar": (b"no tar at all", "not a readable tar"),
        "negative.tar": (
            whole[:2560] + _header(-1024) + whole[3072:],
            "not a readable tar: a member of -1024 bytes",
        ),
        "negative_pax.tar": (
            whole[:2560] + _header(2000, {"size": "-3072"}) + whole[3072:],
            "does not end behind it",
        ),
        "long_pax.tar": (
            whole[:2560] + _header(2**33, kind=tarfile.XHDTYPE) + whole[3072:],
            "a header of 8,589,934,592 bytes",
        ),
        "long_text.tar": (
            _header(2**21, name="a.txt") + bytes(2**21 + 1024),
            "a.txt has 2,097,152 bytes; a text has at most 1,048,576",
        ),
        "deep.tar": (_with_json(b"[" * 100_000), "a.json: it is nested deeper than 32 levels"),
        "surrogate.tar": (
            _with_json(rb'{"caption": "\ud800"}'),
            "a.json: Invalid JSON: unexpected",
        ),
        "names.tar": (
            _with_json(json.dumps(many).encode()),
            "its .json files name 2,000 numbers; at most 1,000 can be",
        ),
        "empty.tar": (b"", "not a readable tar: empty file"),
    }
    for name, (content, _) in tars.items():
        (tmp_path / name).write_bytes(content)
    write_tar(tmp_path / "no_media.tar", {"a.txt": "x"})
    write_tar(tmp_path / "bad_json.tar", {"a.mp4": "x", "a.json": "{"})
    with tarfile.open(tmp_path / "twice.tar", "w") as tar:
        for _ in range(2):
            tar.add(tmp_path / "text.tar", "a.mp4")
    with tarfile.open(tmp_path / "link.tar", "w") as tar:
        link = tarfile.TarInfo("a.mp4")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    (tmp_path / "whole.tar").unlink()
    found = find([tmp_path])
    assert list(found.items) == []
    reasons = {Path(error.path).name: error.reason for error in found.refused}
    expected = {name: reason for name, (_, reason) in tars.items()} | {
        "no_media.tar": "no video or image among its 1 members",
        "bad_json.tar": "not a readable tar",
        "twice.tar": "two members have the same name",
        "link.tar": "a.mp4 is not a plain file",
    }
    assert set(reasons) == set(expected)
    for name, reason in expected.items():
        assert reason in reasons[name]


def test_a_folder_says_what_it_passes_over(another_user: Path) -> None:
    folder = another_user
    for name in ("a.mp4", "a.svg", "b.SVG", "c.heic", "0017", ".hidden.svg", "notes.json"):
        (folder / name).touch()
    (folder / "locked").mkdir()
    (folder / "locked" / "x.mp4").touch()
    (folder / "locked").chmod(0)
    found = find([folder])
    assert found.passed_over == {".svg": 2, ".heic": 1, "no ending": 1}
    assert [(error.path, error.reason) for error in found.unreadable] == [
        (folder / "locked", "Permission denied")
    ]
    assert describe_ignored(found.passed_over, found.unreadable) == [
        "4 files have another ending and were left out: 2 .svg, 1 .heic, 1 no ending.",
        f"1 folder cannot be read: {folder / 'locked'} (Permission denied).",
    ]
    with pytest.raises(DataError, match=r"No video.* was found.*1 folder cannot be read"):
        find([folder / "locked"])


def test_the_guide_lists_the_endings_that_are_read(tmp_path: Path) -> None:
    endings = {"video": VIDEO_SUFFIXES, "image": IMAGE_SUFFIXES}
    guide = Path(__file__).resolve().parents[2] / "docs" / "guides" / "fine-tuning-data.md"
    lines = guide.read_text(encoding="utf-8").splitlines()
    for kind, suffixes in endings.items():
        listed = " ".join(f"`{suffix}`" for suffix in suffixes)
        assert any(line.startswith(f"| {kind}s | {listed}") for line in lines), listed
        for suffix in suffixes:
            (tmp_path / f"a{suffix.upper()}").touch()
    media = find([tmp_path])
    found = {Path(item.media.path).suffix.lower(): item.kind for item in media.items}
    assert found == {suffix: kind for kind, some in endings.items() for suffix in some}
    assert {".mts", ".m2ts", ".wmv", ".flv", ".3gp", ".mxf", ".jfif"} <= set(found)
    assert describe_ignored({".heic": 1}, []) == [
        "1 file has another ending and was left out: 1 .heic."
    ]


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

"""Every file is decoded once; rejected files are reported with the reason."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from PIL import Image
from tests.data.build import section

from longtake.data.buckets import all_windows
from longtake.data.catalog import TRUSTED, Catalog
from longtake.data.clip import captions_of
from longtake.data.encode import encode_frames, write_video
from longtake.data.index import IndexReport, index
from longtake.data.tasks import ALL_CORES, HERE, Work
from longtake.data.window import read_window
from longtake.errors import ClipError, DataError


def _write(path: Path, level: int) -> None:
    """A clip of its own content for each level."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_video(path, np.full((3, 16, 16, 3), level, np.uint8), fps=8)


def _write_lines(path: Path, captions: dict[str, str]) -> None:
    lines = [json.dumps({"video": video, "caption": text}) for video, text in captions.items()]
    path.write_text("\n".join(lines) + "\n\n")


def _index(*sources: Path, out: Path, **options: Any) -> tuple[IndexReport, Catalog]:
    report = index(sources, **{"captions": None, "out": out, "work": HERE, **options})
    return report, Catalog.load(out)


def _captions(catalog: Catalog) -> dict[str, str]:
    return {Path(clip.path).name: clip.caption for clip in catalog.clips()}


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    """A folder with a.mp4, b.mp4 and sub/c.MP4, and no captions."""
    folder = tmp_path / "videos"
    for level, name in enumerate(("a.mp4", "b.mp4", "sub/c.mp4")):
        _write(folder / name, 40 * level)
    (folder / "sub" / "c.mp4").rename(folder / "sub" / "c.MP4")
    return folder


def test_every_real_clip_is_indexed_with_its_frame_count_and_caption(
    material: Path, tmp_path: Path
) -> None:
    """The material's own tables say what is in it, and which files are damaged."""
    videos, table = material / "videos", material / "captions.jsonl"
    expected, damaged = {}, {f"{videos}/derived/trunc_half_sync.mkv"}
    for line in (material / "MATERIAL.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not re.fullmatch(r"[\w-]+/[\w-]+\.\w+", cells[0]):
            continue
        if "InvalidData" in cells[-1] or "OPEN FAILS" in cells[-1]:
            damaged.add(f"{videos}/{cells[0]}")
        else:
            expected[f"{videos}/{cells[0]}"] = int(cells[6].split("/")[0])
    del expected[f"{videos}/derived/trunc_half_sync.mkv"]

    report, catalog = _index(videos, captions=table, out=tmp_path / "c.parquet", work=ALL_CORES)
    assert len(expected) > 60
    assert {clip.path: clip.num_frames for clip in catalog.clips()} == expected
    assert {each.path for each in catalog.rejected} == damaged
    assert all(each.reason for each in catalog.rejected)
    assert report.rejected == list(catalog.rejected)

    captions = {
        Path(entry["video"]).name: entry["caption"]
        for entry in map(json.loads, table.read_text().splitlines())
    }
    assert {name: text for name, text in _captions(catalog).items() if text} == captions
    assert report.unmatched_captions == []
    assert report.without_caption == report.accepted - len(captions)


def test_folders_are_searched_and_suffixes_ignore_case(videos: Path, tmp_path: Path) -> None:
    _write(videos / ".hidden.mp4", 200)
    _write(videos / ".cache" / "d.mp4", 201)
    (videos / "notes.md").write_text("no video")
    (videos / "folder.mp4").mkdir()
    sources = (videos, videos / "a.mp4")
    report, catalog = _index(*sources, out=tmp_path / "catalog.parquet")
    assert _index(*sources, out=tmp_path / "there.parquet", work=Work(workers=1))[1] == catalog
    assert sorted(clip.path for clip in catalog.clips()) == [
        str(videos / name) for name in ("a.mp4", "b.mp4", "sub/c.MP4")
    ]
    assert (report.accepted, report.duplicates, report.without_caption) == (3, 0, 3)


def test_duplicates_are_kept_once_and_a_caption_decides(videos: Path, tmp_path: Path) -> None:
    """The copy with a caption stays, or else the first by path."""
    shutil.copyfile(videos / "a.mp4", videos / "sub" / "copy.mp4")
    shutil.copyfile(videos / "b.mp4", videos / "b2.mp4")
    (videos / "sub" / "copy.txt").write_text("a grey picture\n")
    report, catalog = _index(videos, out=tmp_path / "catalog.parquet")
    assert (report.accepted, report.duplicates) == (3, 2)
    assert _captions(catalog) == {"copy.mp4": "a grey picture", "b.mp4": "", "c.MP4": ""}


_TABLE = '{"video": "a.mp4", "caption": "from the table"}\n'


@pytest.mark.parametrize(
    ("files", "captions", "expected"),
    [
        (
            {"a.txt": "\ufeff  ein grünes Bild\n", "sub/c.txt": "dark"},
            None,
            "ein grünes Bild,,dark",
        ),
        ({"a.txt": "a", "b.txt": "b", "captions.jsonl": _TABLE}, None, "from the table,b,"),
        ({"a.txt": "a", "captions.jsonl": _TABLE}, Path("sidecar"), "a,,"),
    ],
    ids=["text files", "a table comes first", "text files only"],
)
def test_captions_beside_the_clips(
    videos: Path, tmp_path: Path, files: dict[str, str], captions: Path | None, expected: str
) -> None:
    for name, text in files.items():
        (videos / name).write_text(text, "utf-8")
    report, catalog = _index(videos, out=tmp_path / "catalog.parquet", captions=captions)
    texts = expected.split(",")
    assert _captions(catalog) == dict(zip(("a.mp4", "b.mp4", "c.MP4"), texts, strict=True))
    assert report.without_caption == texts.count("")


def test_several_captions_of_a_clip_are_lines_or_fields(videos: Path, tmp_path: Path) -> None:
    """Of clip.json beside clip.mp4, and of JSON lines; a field may have a list."""
    (videos / "a.txt").write_text("short\n\n a long one\n")
    (videos / "b.json").write_text(json.dumps({"tags": ["x, y", None, "z"], "long": "b", "o": 1}))
    (videos / "sub" / "c.txt").write_text("s\x1e\x1e s")
    out, fields = tmp_path / "catalog.parquet", ["long", "tags"]
    report, catalog = _index(videos, out=out, by_line=True, fields=fields)
    found = {name: captions_of(text) for name, text in _captions(catalog).items()}
    assert found == {"a.mp4": ["short", "a long one"], "b.mp4": ["b", "x, y", "z"], "c.MP4": ["s"]}
    assert (report.with_several, report.without_caption) == (2, 0)
    lines = [{"video": "a.mp4", "long": "l"}, {"video": "b.mp4", "tags": "t", "long": ["m"]}]
    table = tmp_path / "mine.jsonl"
    table.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    report, catalog = _index(videos, out=out, captions=table, fields=fields)
    found = {name: captions_of(text) for name, text in _captions(catalog).items()}
    assert found == {"a.mp4": ["l"], "b.mp4": ["m", "t"], "c.MP4": [""]}
    (videos / "b.json").write_text(json.dumps({"long": 1}))
    report, _ = _index(videos, out=out, fields=fields)
    assert "b.json has no caption in long, tags" in report.rejected[0].reason
    table.write_text('{"video": "a.mp4", "caption": "c"}')
    with pytest.raises(DataError, match='"long": "what it shows", "tags": "what'):
        _index(videos, out=out, captions=table, fields=fields)


def test_fields_of_captions_that_nothing_has_are_refused(videos: Path, tmp_path: Path) -> None:
    """As in a tar, whose texts would be taken in their place."""
    (videos / "a.json").write_text('{"caption": "c", "short": "s"}')
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        for name in ("a.mp4", "a.json"):
            tar.add(videos / name, name)
    for source, field in ((tmp_path / "t.tar", "short"), (videos, "shrot")):
        with pytest.raises(DataError, match=f"--caption-field {field}: no clip.json beside a clip"):
            _index(source, out=tmp_path / "catalog.parquet", fields=[field])


def test_captions_match_by_path_or_by_a_name_that_is_there_once(
    videos: Path, tmp_path: Path
) -> None:
    _write(videos / "sub" / "b.mp4", 160)
    table = tmp_path / "elsewhere" / "table.jsonl"
    table.parent.mkdir()
    captions = {
        "../videos/a.mp4": "relative to the table",
        "sub/b.mp4": "relative to the source",
        "old/place/c.MP4": "by name",
        "old/place/b.mp4": "two files have this name",
        "old/place/a.mp4": "this file has a caption by path",
        "gone.mp4": "no such file",
    }
    _write_lines(table, captions)
    (videos / "b.txt").write_text("not asked for")
    report, catalog = _index(videos, captions=table, out=tmp_path / "catalog.parquet")
    assert {clip.path.removeprefix(f"{videos}/"): clip.caption for clip in catalog.clips()} == {
        "a.mp4": "relative to the table",
        "sub/b.mp4": "relative to the source",
        "sub/c.MP4": "by name",
        "b.mp4": "",
    }
    assert report.unmatched_captions == ["old/place/b.mp4", "old/place/a.mp4", "gone.mp4"]


@pytest.mark.parametrize(
    "line",
    [
        "{'video': 'a.mp4', 'caption': 'single quotes'}",
        '["a.mp4", "a list"]',
        '{"video": "a.mp4"}',
        '{"video": "a.mp4", "caption": 7}',
        '{"video": 7, "caption": "text"}',
        r'{"video": "a.mp4", "caption": "half a pair \ud800"}',
    ],
)
def test_a_malformed_caption_names_its_line(videos: Path, tmp_path: Path, line: str) -> None:
    table = tmp_path / "table.jsonl"
    table.write_text('{"video": "a.mp4", "caption": "fine\\u2028still one line"}\n\n' + line)
    with pytest.raises(DataError, match=r'table\.jsonl, line 3 .* Expected .*"clip\.mp4"'):
        _index(videos, captions=table, out=tmp_path / "catalog.parquet")


def test_two_captions_for_one_video_are_refused(videos: Path, tmp_path: Path) -> None:
    table = tmp_path / "table.jsonl"
    same = '{"video": "a.mp4", "caption": "one"}\n'
    table.write_text(same + same + '{"video": "a.mp4", "caption": "two"}')
    with pytest.raises(DataError, match=r"line 3: .*a\.mp4 has another caption in line 1"):
        _index(videos, captions=table, out=tmp_path / "catalog.parquet")


def test_texts_beside_clips_are_read_rejected_or_named(tmp_path: Path) -> None:
    texts = {
        "upper.TXT": b"ok",
        "utf16.txt": "\u72ac".encode("utf-16"),
        "latin.txt": b"caf\xe9",
        "other.json": b"{}",
    }
    for number, (name, text) in enumerate(texts.items()):
        (tmp_path / name).write_bytes(text)
        Image.new("RGB", (32, 32), (50 * number, 0, 0)).save((tmp_path / name).with_suffix(".png"))
    out = tmp_path / "catalog.parquet"
    for _ in range(2):  # a rejected caption is read again
        report, catalog = _index(tmp_path, out=out)
        assert sorted(catalog.captions()) == ["", "ok", "\u72ac"]
        (rejected,) = report.rejected
        assert "latin.txt is not UTF-8" in rejected.reason
        (note,) = report.unread_captions
        assert "other.json" in note
    (tmp_path / "latin.txt").write_bytes(b"cafe")
    assert _index(tmp_path, out=out)[0].num_rejected == 0


def test_unreadable_captions_are_refused(videos: Path, tmp_path: Path) -> None:
    out = tmp_path / "catalog.parquet"
    with pytest.raises(DataError, match=r"captions .*gone\.jsonl cannot be read: No such file"):
        _index(videos, captions=tmp_path / "gone.jsonl", out=out)
    remedy = r"captions are read from JSON lines\. .* longtake data index \S+captions\.csv --out"
    with pytest.raises(DataError, match=remedy):
        _index(videos, captions=tmp_path / "captions.csv", out=out)


def test_damaged_files_never_end_the_run(videos: Path, tmp_path: Path) -> None:
    (videos / "cut.mp4").write_bytes((videos / "a.mp4").read_bytes()[:300])
    (videos / "link.mp4").symlink_to(videos / "gone.mp4")
    os.mkfifo(videos / "pipe.mp4")
    shutil.copyfile(videos / "a.mp4", os.fsencode(videos) + b"/na\xefve.mp4")
    report, catalog = _index(videos, out=tmp_path / "catalog.parquet")
    assert report.accepted == 3
    reasons = {Path(each.path).name: each.reason for each in catalog.rejected}
    assert reasons.pop("cut.mp4").startswith("not a readable video")
    assert reasons == {
        "link.mp4": "does not exist",
        "pipe.mp4": "is not a file",
        r"na\udcefve.mp4": "its name is not valid UTF-8; rename it",
    }


def test_sources_without_videos_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "catalog.parquet"
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"No video .*Looked in: .*empty; .*\.mp4 \.mov"):
        _index(tmp_path / "empty", out=out)
    with pytest.raises(DataError, match=r"gone does not exist. Name a folder of videos"):
        _index(tmp_path / "gone", out=out)
    assert not out.exists()


def test_when_every_file_is_rejected_the_reasons_are_shown(tmp_path: Path) -> None:
    for number in range(7):
        (tmp_path / f"{number}.mp4").write_bytes(b"no video" * number)
    out = tmp_path / "catalog.parquet"
    with pytest.raises(DataError, match="None of 7 files can be trained on") as caught:
        _index(tmp_path, out=out)
    message = str(caught.value)
    assert f"{tmp_path / '0.mp4'}: is empty (0 bytes)" in message
    assert f"{tmp_path / '4.mp4'}: not a readable video" in message
    assert message.endswith("and 2 more")
    assert not out.exists()


def test_an_output_that_cannot_be_written_is_found_before_decoding(
    videos: Path, tmp_path: Path
) -> None:
    decoded: list[int] = []
    blocked = videos / "a.mp4" / "catalog.parquet"
    precious = tmp_path / "captions.jsonl"
    precious.write_text("{}")
    for out, message in (
        (blocked, "cannot be written: (Not a directory|File exists)"),
        (videos, "exists and is not a catalog; it was not overwritten"),
        (precious, r"ends in \.jsonl\. Name it"),
    ):
        with pytest.raises(DataError, match=message):
            index(
                [videos],
                captions=None,
                out=out,
                work=Work(progress=lambda done, _: decoded.append(done)),
            )
    assert decoded == []
    assert precious.read_text() == "{}"


def test_an_older_catalog_is_replaced(videos: Path, tmp_path: Path) -> None:
    out = tmp_path / "catalog.parquet"
    pq.write_table(pa.table({"x": [1]}).replace_schema_metadata({"longtake.catalog": "0"}), out)
    assert _index(videos, out=out)[0].accepted == 3
    (videos / "a.mp4").unlink()
    report, catalog = _index(videos, out=out)
    assert report.accepted == len(catalog) == 2


def test_paths_are_absolute_however_they_were_named(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = _index(videos, out=tmp_path / "absolute.parquet")
    monkeypatch.chdir(videos / "sub")
    _, catalog = _index(Path("..") / "sub" / "..", out=Path("../../relative.parquet"))
    assert catalog == expected


def test_images_are_clips_of_one_frame(videos: Path, tmp_path: Path) -> None:
    Image.new("RGB", (20, 10), "red").save(videos / "red.png")
    Image.new("RGB", (20, 10), "blue").save(videos / "blue.jpg")
    (videos / "blue.txt").write_text("from the text file")
    (videos / "captions.jsonl").write_text('{"image": "red.png", "caption": "a red picture"}')
    _, catalog = _index(videos, out=tmp_path / "catalog.parquet")
    clips = {Path(clip.path).name: clip for clip in catalog.clips()}
    assert {name for name, clip in clips.items() if clip.kind == "image"} == {"red.png", "blue.jpg"}
    assert len(clips) == 5
    red = clips["red.png"]
    assert (red.num_frames, red.height, red.width, red.caption) == (1, 10, 20, "a red picture")
    assert clips["blue.jpg"].caption == "from the text file"


def test_what_a_source_says_comes_before_files_beside_it(videos: Path, tmp_path: Path) -> None:
    (videos / "a.txt").write_text("from the text file")
    (videos / "b.txt").write_text("from the text file")
    table = videos / "table.csv"
    table.write_text('path,caption,motion\na.mp4,"a table, and a comma",0.5\nb.mp4,,1\n')
    _, catalog = _index(table, out=tmp_path / "catalog.parquet")
    assert _captions(catalog) == {"a.mp4": "a table, and a comma", "b.mp4": "from the text file"}
    assert sorted(catalog.column("motion")) == [0.5, 1.0]
    named = tmp_path / "named.jsonl"
    _write_lines(named, {"b.mp4": "named"})
    _, catalog = _index(table, out=tmp_path / "catalog.parquet", captions=named)
    assert _captions(catalog) == {"a.mp4": "", "b.mp4": "named"}


def test_clips_in_a_tar_are_indexed_in_place(videos: Path, tmp_path: Path) -> None:
    (videos / "a.txt").write_text("in the tar")
    with tarfile.open(tmp_path / "shard.tar", "w") as tar:
        for name in ("a.mp4", "a.txt", "b.mp4"):
            tar.add(videos / name, name)
    (tmp_path / "broken.tar").write_bytes((tmp_path / "shard.tar").read_bytes()[:3000])
    out = tmp_path / "catalog.parquet"
    report, catalog = _index(tmp_path / "shard.tar", tmp_path / "broken.tar", out=out)
    _, plain = _index(videos / "a.mp4", videos / "b.mp4", out=tmp_path / "plain.parquet")
    assert catalog.fingerprint == plain.fingerprint
    assert sorted(_captions(catalog).values()) == ["", "in the tar"]
    assert [(Path(each.path).name, each.reason) for each in report.rejected] == [
        ("broken.tar", "not a readable tar: unexpected end of data")
    ]
    again, _ = _index(tmp_path / "shard.tar", tmp_path / "broken.tar", out=out)
    assert again.unchanged == 2
    assert sorted(each.name for each in tmp_path.iterdir() if each.is_file()) == [
        *("broken.tar", "catalog.parquet", "plain.parquet", "shard.tar")
    ]


def _children() -> set[int]:
    listed = Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/children").read_text()
    return {int(pid) for pid in listed.split()}


def test_only_what_is_new_or_changed_is_read_again(videos: Path, tmp_path: Path) -> None:
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
    os.utime(videos / "new.mp4", ns=(1, 1))  # another time alone
    assert _index(videos, out=out)[0].unchanged == 4
    assert _index(videos, out=out, fresh=True)[0].unchanged == 0


def test_scores_survive_while_clip_and_caption_stay(videos: Path, tmp_path: Path) -> None:
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
from longtake.data.tasks import Work
def tell(done, total):
    print(done, flush=True)
    if done == 3:
        time.sleep(600)
work = Work(workers=1, progress=tell)
index([Path(sys.argv[1])], captions=None, out=Path(sys.argv[2]), work=work)
"""


def test_an_index_that_is_killed_loses_nothing(videos: Path, tmp_path: Path) -> None:
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

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    out, before = tmp_path / "catalog.parquet", _children()
    with pytest.raises(KeyboardInterrupt):
        index([videos], captions=None, out=out, work=Work(progress=interrupt))
    assert _children() <= before
    assert not out.exists()
    assert _index(videos, out=out)[0].unchanged >= 1


def test_progress_counts_every_file(videos: Path, tmp_path: Path) -> None:
    (videos / "bad.mp4").write_text("no video")
    seen: list[tuple[int, int]] = []
    work = Work(workers=0, progress=lambda *counts: seen.append(counts))
    _index(videos, out=tmp_path / "c.parquet", work=work)
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def _frame(picture: NDArray[np.uint8], milliseconds: int) -> av.VideoFrame:
    frame = av.VideoFrame.from_ndarray(picture, "rgb24").reformat(format="yuv420p")
    frame.pts, frame.time_base = milliseconds, Fraction(1, 1000)
    return frame


def _write_damaged(path: Path) -> None:
    """A video of 60 frames, each a keyframe, that cannot be decoded from frame 30 on."""
    pictures = np.random.default_rng(0).integers(0, 255, (60, 32, 32, 3), np.uint8)
    frames = (_frame(picture, 125 * number) for number, picture in enumerate(pictures))
    encode_frames(path, frames, fps=8, crf=20, gop=1)
    data = bytearray(path.read_bytes())
    with av.open(path) as container:
        places = [each.pos for each in container.demux(video=0) if each.pos is not None]
    for place in places[30:]:
        data[place : place + 64] = bytes(64)
    path.write_bytes(data)


def test_metadata_that_lies_is_found_by_the_decoder_of_windows(tmp_path: Path) -> None:
    """Trusted clips are marked; a later call that does not trust metadata rejects the damaged."""
    folder, out = tmp_path / "videos", tmp_path / "c.parquet"
    _write(folder / "good.mp4", 80)
    shutil.copyfile(folder / "good.mp4", folder / "same.mp4")
    _write_damaged(folder / "lies.mp4")
    (folder / "cut.mp4").write_bytes((folder / "good.mp4").read_bytes()[:-100])
    Image.new("RGB", (16, 16)).save(folder / "still.png")

    def run(trusts_metadata: bool) -> tuple[IndexReport, dict[str, float | None], Catalog]:
        report, catalog = _index(folder, out=out, trusts_metadata=trusts_metadata)
        marks = {Path(each.path).name: each.attributes.get(TRUSTED) for each in catalog.clips()}
        return report, marks, catalog

    trusted, marks, catalog = run(True)
    assert marks == {"good.mp4": 1.0, "lies.mp4": 1.0, "still.png": 0.0}
    assert (trusted.trusted, trusted.duplicates, trusted.num_rejected) == (2, 1, 1)
    again, marks_again, _ = run(True)
    assert (again.unchanged, marks_again) == (5, marks)
    lies = next(each for each in catalog.clips() if each.num_frames == 60)
    data = section(catalog=out)
    windows = list(all_windows(lies, data.buckets[0], data))
    assert read_window(windows[10]).shape == windows[10].shape
    with pytest.raises(ClipError, match="damaged after"):
        read_window(windows[28])
    strict, marks, _ = run(False)
    assert marks == {"good.mp4": None, "still.png": None}
    assert (strict.trusted, strict.unchanged, strict.num_rejected) == (0, 2, 2)
    assert run(True)[1] == {"good.mp4": 0.0, "still.png": 0.0}


_FILM_FPS = 8


def _write_film(path: Path, gop: int, *, is_uneven: bool = False) -> None:
    """A film whose frame n is of grey 7 n."""
    frames = (
        _frame(np.full((16, 16, 3), 7 * number, np.uint8), 125 * number + number % 2 * is_uneven)
        for number in range(32)
    )
    encode_frames(path, frames, fps=_FILM_FPS, crf=1, gop=gop)


@pytest.mark.parametrize(("gop", "is_uneven"), [(5, False), (100, False), (5, True)])
@pytest.mark.parametrize("fps", [None, 4.0])
def test_a_film_is_as_many_clips_as_its_table_has_spans(
    tmp_path: Path, gop: int, is_uneven: bool, fps: float | None
) -> None:
    film, out = tmp_path / "film.mp4", tmp_path / "c.parquet"
    _write_film(film, gop, is_uneven=is_uneven)
    (tmp_path / "t.csv").write_text(
        "path,caption,start,end\nfilm.mp4,one,0,1\nfilm.mp4,two,1,2.5\nfilm.mp4,three,2.5,\n"
    )
    _, catalog = _index(tmp_path / "t.csv", out=out)
    clips = {clip.caption: clip for clip in catalog.clips()}
    firsts = {"one": 0, "two": 8, "three": 20}
    assert {name: clip.num_frames for name, clip in clips.items()} == {
        "one": 8,
        "two": 12,
        "three": 12,
    }
    assert clips["two"].path == f"{film}#t=1,2.5"
    assert sum(clip.duration_seconds for clip in clips.values()) == pytest.approx(4, abs=0.01)
    data = section(catalog=out, fps=fps)
    shape, stride = data.buckets[0], round(_FILM_FPS / (fps or _FILM_FPS))
    for name, clip in clips.items():
        for start, window in enumerate(all_windows(clip, shape, data)):
            assert gop > 50 or not firsts[name] or window.seek_to is not None
            greys = read_window(window).mean((0, 2, 3))
            numbers = firsts[name] + stride * (start + np.arange(shape.num_frames))
            assert np.abs(greys - 7 * numbers).max() < 2.5, (name, start)
    scored = catalog.with_attribute("score", np.ones(3))
    spans, again = ([clip.media.span for clip in each.clips()] for each in (catalog, scored))
    assert spans == again
    assert _index(tmp_path / "t.csv", out=out)[0].accepted == 3


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("2,1", "row 1 has start = 2.0 and end = 1.0; expected seconds"),
        ("-1,1", "row 1 has start = -1.0 and end = 1.0"),
        ("9,10", "no frame begins in it; the file has 3.875 s"),
        ("9,", "no frame begins in it; the file has 3.875 s"),
        ("00:01,", "row 1 has start = '00:01'; expected seconds from the first frame on, such as"),
    ],
)
def test_a_span_without_frames_is_refused(tmp_path: Path, row: str, words: str) -> None:
    _write_film(tmp_path / "film.mp4", gop=5)
    (tmp_path / "t.csv").write_text(f"path,start,end\nfilm.mp4,{row}\n")
    with pytest.raises(DataError, match=re.escape(words)):
        _index(tmp_path / "t.csv", out=tmp_path / "c.parquet")

"""The catalog holds every clip that can be trained on, once, and says why the others cannot."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtake.data.catalog import Catalog, IndexReport, Rejection, index
from longtake.data.decode import read_frames
from longtake.data.encode import write_video
from longtake.errors import DataError


def _write(path: Path, level: int) -> None:
    """A clip of its own content for each level."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_video(path, np.full((3, 16, 16, 3), level, np.uint8), fps=8)


def _write_lines(path: Path, captions: dict[str, str]) -> None:
    lines = [json.dumps({"video": video, "caption": text}) for video, text in captions.items()]
    path.write_text("\n".join(lines) + "\n\n")


def _index(*sources: Path, out: Path, captions: Path | None = None) -> tuple[IndexReport, Catalog]:
    report = index(sources, captions=captions, out=out)
    return report, Catalog.load(out)


def _captions(catalog: Catalog) -> dict[str, str]:
    return {Path(clip.path).name: clip.caption for clip in catalog.clips}


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    """A folder with a.mp4, b.mp4 and sub/c.MP4, and no captions."""
    folder = tmp_path / "videos"
    for level, name in enumerate(("a.mp4", "b.mp4", "sub/c.mp4")):
        _write(folder / name, 40 * level)
    (folder / "sub" / "c.mp4").rename(folder / "sub" / "c.MP4")
    return folder


class _Indexed(NamedTuple):
    report: IndexReport
    catalog: Catalog
    expected_frames: dict[str, int]
    damaged: set[str]


@pytest.fixture(scope="module")
def indexed(material: Path, tmp_path_factory: pytest.TempPathFactory) -> _Indexed:
    """All real clips in one catalog, and what the material's own table says about them."""
    out = tmp_path_factory.mktemp("indexed") / "catalog.parquet"
    report, catalog = _index(material / "videos", captions=material / "captions.jsonl", out=out)
    expected, damaged = {}, {"derived/trunc_half_sync.mkv"}
    for line in (material / "MATERIAL.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not re.fullmatch(r"[\w-]+/[\w-]+\.\w+", cells[0]):
            continue
        if "InvalidData" in cells[-1] or "OPEN FAILS" in cells[-1]:
            damaged.add(cells[0])
        else:
            expected[cells[0]] = int(cells[6].split("/")[0])
    del expected["derived/trunc_half_sync.mkv"]
    return _Indexed(report, catalog, expected, damaged)


def test_every_real_clip_is_indexed_with_its_frame_count(indexed: _Indexed, material: Path) -> None:
    """All good clips are there with the frames they decode to; all damaged ones are refused."""
    videos = material / "videos"
    counts = {
        str(Path(clip.path).relative_to(videos)): clip.num_frames for clip in indexed.catalog.clips
    }
    assert len(counts) > 60
    assert counts == indexed.expected_frames
    refused = {str(Path(each.path).relative_to(videos)) for each in indexed.catalog.rejected}
    assert refused == indexed.damaged
    assert all(each.reason for each in indexed.catalog.rejected)
    assert indexed.report.rejected == list(indexed.catalog.rejected)


def test_the_materials_captions_reach_their_clips(indexed: _Indexed, material: Path) -> None:
    """Captions are matched by path; the rest of the clips are counted as without one."""
    lines = (material / "captions.jsonl").read_text().splitlines()
    wanted = {Path(entry["video"]).name: entry["caption"] for entry in map(json.loads, lines)}
    found = {name: text for name, text in _captions(indexed.catalog).items() if text}
    assert indexed.report.unmatched_captions == []
    assert found == wanted
    assert indexed.report.without_caption == indexed.report.accepted - len(wanted)


def test_a_clip_tells_all_that_reading_needs(indexed: _Indexed) -> None:
    """Stream, rotation and sizes of the catalog are those of the frames that come out."""
    for clip in indexed.catalog.clips:
        if "nasa_13013" not in clip.path:
            continue
        frames = read_frames(
            Path(clip.path),
            stream_index=clip.stream_index,
            rotation=clip.rotation,
            start=clip.num_frames - 1,
            num_frames=1,
        )
        assert frames.shape == (1, clip.height, clip.width, 3)


def test_folders_are_searched_and_suffixes_ignore_case(videos: Path, tmp_path: Path) -> None:
    """Subfolders count; hidden files, other files and folders named like a video do not."""
    _write(videos / ".hidden.mp4", 200)
    _write(videos / ".cache" / "d.mp4", 201)
    (videos / "notes.md").write_text("no video")
    (videos / "folder.mp4").mkdir()
    report, catalog = _index(videos, videos / "a.mp4", out=tmp_path / "catalog.parquet")
    assert sorted(clip.path for clip in catalog.clips) == [
        str(videos / name) for name in ("a.mp4", "b.mp4", "sub/c.MP4")
    ]
    assert (report.accepted, report.duplicates, report.without_caption) == (3, 0, 3)


def test_duplicates_are_kept_once_and_a_caption_decides(videos: Path, tmp_path: Path) -> None:
    """The copy with a caption stays, or else the first by path; the others are counted."""
    shutil.copyfile(videos / "a.mp4", videos / "sub" / "copy.mp4")
    shutil.copyfile(videos / "b.mp4", videos / "b2.mp4")
    (videos / "sub" / "copy.txt").write_text("a grey picture\n")
    report, catalog = _index(videos, out=tmp_path / "catalog.parquet")
    assert (report.accepted, report.duplicates) == (3, 2)
    assert _captions(catalog) == {"copy.mp4": "a grey picture", "b.mp4": "", "c.MP4": ""}


def test_captions_beside_the_clips(videos: Path, tmp_path: Path) -> None:
    """clip.txt is the caption of clip.mp4, whatever surrounds the text."""
    (videos / "a.txt").write_bytes("\ufeff  ein grünes Bild\n".encode())
    (videos / "sub" / "c.txt").write_text("dark")
    report, catalog = _index(videos, out=tmp_path / "catalog.parquet")
    assert _captions(catalog) == {"a.mp4": "ein grünes Bild", "b.mp4": "", "c.MP4": "dark"}
    assert report.without_caption == 1


def test_a_folders_own_captions_come_before_the_text_files(videos: Path, tmp_path: Path) -> None:
    """captions.jsonl in the source folder is found, and clip.txt fills what it leaves open."""
    (videos / "a.txt").write_text("from the text file")
    (videos / "b.txt").write_text("from the text file")
    _write_lines(videos / "captions.jsonl", {"a.mp4": "from the table"})
    _, catalog = _index(videos, out=tmp_path / "catalog.parquet")
    assert _captions(catalog) == {
        "a.mp4": "from the table",
        "b.mp4": "from the text file",
        "c.MP4": "",
    }


def test_captions_match_by_path_or_by_a_name_that_is_there_once(
    videos: Path, tmp_path: Path
) -> None:
    """Paths count from the table or a source; an ambiguous or unknown name is reported."""
    _write(videos / "sub" / "b.mp4", 160)
    table = tmp_path / "elsewhere" / "table.jsonl"
    table.parent.mkdir()
    _write_lines(
        table,
        {
            "../videos/a.mp4": "relative to the table",
            "sub/b.mp4": "relative to the source",
            "old/place/c.MP4": "by name",
            "old/place/b.mp4": "two files have this name",
            "old/place/a.mp4": "this file has a caption by path",
            "gone.mp4": "no such file",
        },
    )
    (videos / "b.txt").write_text("not asked for")
    report, catalog = _index(videos, captions=table, out=tmp_path / "catalog.parquet")
    captions = {str(Path(clip.path).relative_to(videos)): clip.caption for clip in catalog.clips}
    assert captions == {
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
    """The message has the line's number and shows what a line should be."""
    table = tmp_path / "table.jsonl"
    table.write_text('{"video": "a.mp4", "caption": "fine\\u2028still one line"}\n\n' + line)
    with pytest.raises(DataError, match=r'table\.jsonl, line 3 .* Expected .*"clip\.mp4"'):
        index([videos], captions=table, out=tmp_path / "catalog.parquet")


def test_two_captions_for_one_video_are_refused(videos: Path, tmp_path: Path) -> None:
    """Which of two captions is meant is not guessed; the same one twice is no matter."""
    table = tmp_path / "table.jsonl"
    same = '{"video": "a.mp4", "caption": "one"}\n'
    table.write_text(same + same + '{"video": "a.mp4", "caption": "two"}')
    with pytest.raises(DataError, match=r"line 3: .*a\.mp4 has another caption in line 1"):
        index([videos], captions=table, out=tmp_path / "catalog.parquet")


def test_unreadable_captions_are_refused(videos: Path, tmp_path: Path) -> None:
    """Missing captions and text that is not UTF-8 are named."""
    out = tmp_path / "catalog.parquet"
    with pytest.raises(DataError, match=r"captions .*gone\.jsonl cannot be read: No such file"):
        index([videos], captions=tmp_path / "gone.jsonl", out=out)
    (videos / "b.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"b\.txt is not UTF-8"):
        index([videos], captions=None, out=out)


def test_damaged_files_never_end_the_run(videos: Path, tmp_path: Path) -> None:
    """A cut file, a dangling link, a pipe and a name that is no text are rejected, each by name."""
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
    """The message says where was looked and for what."""
    out = tmp_path / "catalog.parquet"
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"No video .*Looked in: .*empty; .*\.mp4 \.mov"):
        index([tmp_path / "empty"], captions=None, out=out)
    with pytest.raises(DataError, match=r"gone does not exist. Name a folder of videos"):
        index([tmp_path / "gone"], captions=None, out=out)
    assert not out.exists()


def test_when_every_file_is_rejected_the_reasons_are_shown(tmp_path: Path) -> None:
    """The first five files are named with their reasons, and no catalog is written."""
    for number in range(7):
        (tmp_path / f"{number}.mp4").write_bytes(b"no video" * number)
    out = tmp_path / "catalog.parquet"
    with pytest.raises(DataError, match="None of 7 files can be trained on") as caught:
        index([tmp_path], captions=None, out=out)
    message = str(caught.value)
    assert f"{tmp_path / '0.mp4'}: is empty (0 bytes)" in message
    assert f"{tmp_path / '4.mp4'}: not a readable video" in message
    assert message.endswith("and 2 more")
    assert not out.exists()


def test_an_output_that_cannot_be_written_is_found_before_decoding(
    videos: Path, tmp_path: Path
) -> None:
    """No file is decoded for nothing, and nothing but a catalog is ever overwritten."""
    decoded: list[int] = []
    blocked = videos / "a.mp4" / "catalog.parquet"
    precious = tmp_path / "captions.jsonl"
    precious.write_text("{}")
    for out, message in (
        (blocked, "cannot be written: (Not a directory|File exists)"),
        (videos, "exists and is not a catalog; it was not overwritten"),
        (precious, "exists and is not a catalog; it was not overwritten"),
    ):
        with pytest.raises(DataError, match=message):
            index(
                [videos],
                captions=None,
                out=out,
                progress=lambda done, _: decoded.append(done),
            )
    assert decoded == []
    assert precious.read_text() == "{}"


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


def test_a_catalog_survives_saving_and_loading(videos: Path, tmp_path: Path) -> None:
    """All fields come back, the folder is made, and no file beside the catalog is left."""
    (videos / "bad.mp4").write_text("no video")
    out = tmp_path / "new" / "folder" / "catalog.parquet"
    _, catalog = _index(videos, out=out)
    catalog.save(out)
    again = Catalog.load(out)
    assert again == catalog
    assert again.fingerprint == catalog.fingerprint
    assert again.rejected[0].path == str(videos / "bad.mp4")
    assert [clip.identity for clip in again.clips] == sorted(c.identity for c in again.clips)
    assert list(out.parent.iterdir()) == [out]


def test_an_older_catalog_is_replaced(videos: Path, tmp_path: Path) -> None:
    """Indexing again writes over a catalog, whatever its version."""
    out = tmp_path / "catalog.parquet"
    pq.write_table(pa.table({"x": [1]}).replace_schema_metadata({"longtake.catalog": "0"}), out)
    assert index([videos], captions=None, out=out).accepted == 3
    (videos / "a.mp4").unlink()
    assert index([videos], captions=None, out=out).accepted == 2
    assert len(Catalog.load(out).clips) == 2


def test_a_folder_can_be_moved_with_its_catalog(videos: Path, tmp_path: Path) -> None:
    """Paths below the catalog follow it; paths elsewhere stay what they were."""
    _write(tmp_path / "far" / "z.mp4", 220)
    (videos / "bad.mp4").write_text("no video")
    _, before = _index(videos, tmp_path / "far", out=videos / "catalog.parquet")
    moved = videos.rename(tmp_path / "moved")
    after = Catalog.load(moved / "catalog.parquet")
    assert {clip.path for clip in after.clips} == {
        str(moved / "a.mp4"),
        str(moved / "b.mp4"),
        str(moved / "sub" / "c.MP4"),
        str(tmp_path / "far" / "z.mp4"),
    }
    assert after.rejected[0].path == str(moved / "bad.mp4")
    assert after.fingerprint == before.fingerprint


def test_paths_are_absolute_however_they_were_named(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative sources and outputs give the same catalog as absolute ones."""
    _, expected = _index(videos, out=tmp_path / "absolute.parquet")
    monkeypatch.chdir(videos / "sub")
    _, catalog = _index(Path("..") / "sub" / "..", out=Path("../../relative.parquet"))
    assert catalog == expected


def test_the_fingerprint_is_the_content_and_the_captions(videos: Path, tmp_path: Path) -> None:
    """Other paths, other names and another order leave it alone; a caption or a clip changes it."""
    _, catalog = _index(videos, out=tmp_path / "catalog.parquet")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for number, name in enumerate(("sub/c.MP4", "b.mp4", "a.mp4")):
        shutil.copyfile(videos / name, elsewhere / f"{number}.mp4")
    _, copied = _index(elsewhere, out=tmp_path / "copied.parquet")
    assert copied.fingerprint == catalog.fingerprint
    first, *others = catalog.clips
    captioned = Catalog((replace(first, caption="another"), *others))
    fingerprints = {catalog.fingerprint, captioned.fingerprint, Catalog(tuple(others)).fingerprint}
    assert len(fingerprints) == 3
    longer = replace(catalog.clips[0], num_frames=catalog.clips[0].num_frames + 1)
    assert Catalog((longer, *catalog.clips[1:])).fingerprint not in fingerprints
    assert Catalog(catalog.clips, (Rejection("x", "y"),)).fingerprint == catalog.fingerprint


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"no table", "is not a catalog"),
        (b"", "is not a catalog"),
        ({}, "is not a catalog"),
        ({"longtake.catalog": "99"}, "has schema version 99; this longtake reads 1"),
        ({"longtake.catalog": "1"}, "is damaged"),
    ],
)
def test_what_is_not_a_catalog_says_what_to_do(
    tmp_path: Path, content: bytes | dict[str, str] | None, message: str
) -> None:
    """Missing, foreign, newer and damaged files each name the command that writes a catalog."""
    path = tmp_path / "catalog.parquet"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        pq.write_table(pa.table({"x": [1]}).replace_schema_metadata(content), path)
    with pytest.raises(DataError, match=message) as caught:
        Catalog.load(path)
    assert "`longtake data index`" in str(caught.value)

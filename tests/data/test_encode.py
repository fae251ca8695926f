"""Videos that are written come back; prepared clips show the same frames at the same times."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from tests.data.build import indexed, pictures_of
from tests.data.catalogs import make_catalog

from longtake.data.catalog import Catalog
from longtake.data.clip import Clip, Media
from longtake.data.decode import probe, read_image
from longtake.data.encode import (
    PrepareReport,
    Settings,
    encode_frames,
    prepare,
    scaled_size,
    write_video,
)
from longtake.data.index import index
from longtake.data.tasks import HERE, Work
from longtake.errors import DataError


def _smooth(num_frames: int = 6, height: int = 32, width: int = 48) -> NDArray[np.uint8]:
    """Slow colour ramps that move a little, which 4:2:0 chroma can hold."""
    frame, row, column = np.indices((num_frames, height, width))
    red, green, blue = 60 + 2 * column, 60 + 3 * row, 100 + 5 * frame
    return np.stack([red, green, blue], axis=-1).astype(np.uint8)


def test_frames_come_back_nearly_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    frames = _smooth()
    write_video(path, frames, fps=12.5, crf=0)
    read = pictures_of(str(path))
    error = np.abs(read.astype(int) - frames)
    assert error.max() <= 4
    assert error.mean() < 1.5


@pytest.mark.parametrize("fps", [8, 12.5, 30000 / 1001])
def test_the_frame_rate_is_kept(tmp_path: Path, fps: float) -> None:
    write_video(tmp_path / "clip.mp4", _smooth(), fps=fps)
    found = probe(Media(str(tmp_path / "clip.mp4")))
    assert found.fps == pytest.approx(fps, rel=1e-4)
    assert (found.num_frames, found.width, found.height) == (6, 48, 32)


def test_a_higher_crf_makes_a_smaller_file(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (4, 32, 48, 3), np.uint8)
    sizes = []
    for crf in (0, 40):
        write_video(tmp_path / "clip.mp4", noise, fps=8, crf=crf)
        sizes.append((tmp_path / "clip.mp4").stat().st_size)
    assert sizes[1] < sizes[0] / 2


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        (np.zeros((4, 32, 48, 3), np.float32), r"float32 \[4, 32, 48, 3\]; expected uint8"),
        (np.zeros((32, 48, 3), np.uint8), r"uint8 \[32, 48, 3\]; expected uint8 \[frames"),
        (np.zeros((4, 3, 32, 48), np.uint8), r"uint8 \[4, 3, 32, 48\]; expected"),
        (np.zeros((0, 32, 48, 3), np.uint8), "at least one frame"),
        (np.zeros((4, 31, 48, 3), np.uint8), "48x31 pixels; .* Crop or pad to 48x32"),
        (np.zeros((4, 32, 47, 3), np.uint8), "47x32 pixels; .* Crop or pad to 48x32"),
    ],
)
def test_frames_that_do_not_fit_are_refused(
    tmp_path: Path, frames: NDArray[np.uint8], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        write_video(tmp_path / "clip.mp4", frames, fps=8)
    assert list(tmp_path.iterdir()) == []


def test_writing_leaves_only_the_file(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    write_video(path, _smooth(2), fps=8)
    write_video(path, _smooth(5), fps=8)
    assert list(tmp_path.iterdir()) == [path]
    assert probe(Media(str(path))).num_frames == 5


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("folder.mp4", "Is a directory"),
        ("file/clip.mp4", "Not a directory"),
        ("nowhere/clip.mp4", "No such file or directory"),
    ],
)
def test_a_failed_write_says_why_and_leaves_nothing_behind(
    tmp_path: Path, name: str, reason: str
) -> None:
    (tmp_path / "folder.mp4").mkdir()
    (tmp_path / "file").touch()
    before = set(tmp_path.rglob("*"))
    with pytest.raises(DataError, match=f"{name} cannot be written: {reason}"):
        write_video(tmp_path / name, _smooth(2), fps=8)
    assert set(tmp_path.rglob("*")) == before


def test_an_interrupted_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "clip.mp4"
    write_video(path, _smooth(2), fps=8)
    monkeypatch.setattr(np, "ascontiguousarray", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_video(path, _smooth(5), fps=8)
    assert list(tmp_path.iterdir()) == [path]
    assert probe(Media(str(path))).num_frames == 2


_SMALL = Settings(sizes=((32, 48),))


def _prepare(
    folder: Path, settings: Settings = _SMALL
) -> tuple[PrepareReport, dict[str, tuple[Clip, Clip]]]:
    """Index a folder, prepare it, and pair every clip with what was made of it, by name."""
    catalog = folder / "catalog.parquet"
    index([folder], captions=None, out=catalog, work=HERE)
    report = prepare(catalog, folder.parent / "out", settings=settings, work=HERE)
    before = {clip.identity: clip for clip in Catalog.load(catalog).clips()}
    pairs = ((before[clip.prepared_from], clip) for clip in Catalog.load(report.catalog).clips())
    return report, {Path(old.path).name: (old, new) for old, new in pairs}


def _pictures(clip: Clip) -> NDArray[np.uint8]:
    """All frames, [F, H, W, 3], upright."""
    if clip.kind == "image":
        return read_image(clip.media)[None]
    return pictures_of(clip.path, clip.rotation, clip.stream_index)


def _resized(frames: NDArray[np.uint8], clip: Clip) -> NDArray[np.uint8]:
    size = (clip.width, clip.height)
    pictures = (Image.fromarray(each).resize(size, Image.Resampling.BICUBIC) for each in frames)
    return np.stack([np.asarray(each) for each in pictures])


def _seconds(clip: Clip) -> list[float]:
    with av.open(clip.path) as container:
        times = [float(frame.time or 0) for frame in container.decode(video=0)]
    return [time - times[0] for time in times]


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    """a.mp4 and b.mp4 (30 moving frames of 64x96, captioned) and c.png."""
    folder = tmp_path / "videos"
    folder.mkdir()
    y, x = np.mgrid[0:64, 0:96]
    for phase, name in enumerate("ab"):
        waves = [127 + 90 * np.sin((x + 2 * y * phase + 3 * t) / 9) for t in range(30)]
        frames = np.repeat(np.stack(waves)[..., None], 3, -1).astype(np.uint8)
        write_video(folder / f"{name}.mp4", frames, fps=8)
        (folder / f"{name}.txt").write_text(f"clip {name}")
    Image.fromarray(frames[0]).save(folder / "c.png")
    return folder


@pytest.fixture
def catalog(videos: Path) -> Path:
    out = videos / "catalog.parquet"
    index([videos], captions=None, out=out, work=HERE)
    return out


def test_real_clips_keep_frames_times_and_colours(material: Path, tmp_path: Path) -> None:
    names = [
        *("torchcodec/nasa_13013_rotated.mp4", "derived/vfr_bikes_h264.mp4"),
        *("torchcodec/bt601_full_range.mp4", "torchcodec/testsrc2_odd_width_444.mp4"),
        *("torchcodec/discard_first_keyframe.mp4", "torchcodec/test_non_zero_start.mp4"),
        *("decord/video_180.mov", "intel/want.mkv", "torchcodec/sine_stereo_mp2.mpg"),
    ]
    folder = tmp_path / "videos"
    folder.mkdir()
    for name in names:
        (folder / Path(name).name).symlink_to(material / "videos" / name)
    report, pairs = _prepare(folder, Settings(sizes=((112, 200),)))
    assert (report.prepared, report.rejected) == (len(names), [])
    for name, (old, new) in pairs.items():
        assert (new.num_frames, new.rotation, new.codec) == (old.num_frames, 0, "h264"), name
        assert set(new.keyframes) == set(range(0, new.num_frames, 12)), name
        np.testing.assert_allclose(_seconds(new), _seconds(old), atol=1e-4, err_msg=name)
        shown = _pictures(new).astype(np.float64)
        difference = shown - _resized(_pictures(old), new)
        assert np.abs(difference.mean((0, 1, 2))).max() < 1.5, name  # no colour cast
        # A test pattern's thin edges survive neither scaling nor 4:2:0 well; nature does.
        limit = 20 if re.match("testsrc|bt601|discard", name) else 8
        assert np.sqrt((difference**2).mean()) < limit, name


@pytest.mark.parametrize("gop", [6, 100])
def test_a_span_of_a_film_becomes_a_clip_of_its_own(videos: Path, gop: int) -> None:
    (film := videos / "a.mp4").rename(whole := videos / "whole.mp4")
    with av.open(whole) as container:
        encode_frames(film, container.decode(video=0), fps=8, crf=6, gop=gop)
    (videos / "t.csv").write_text(
        "path,caption,start,end\na.mp4,one,0,1\na.mp4,two,1,2.25\na.mp4,three,2.25,\nb.mp4,b,,\n"
    )
    catalog, out = videos / "c.parquet", videos.parent / "out"
    index([videos / "t.csv"], captions=None, out=catalog, work=HERE)
    settings = Settings(sizes=((64, 96),), crf=6)
    report = prepare(catalog, out, settings=settings, work=HERE)
    assert (report.prepared, report.rejected) == (4, [])
    spans = {clip.identity: clip.caption for clip in Catalog.load(catalog).clips()}
    frames, firsts = pictures_of(str(film)).astype(np.float64), {"one": 0, "two": 8, "three": 18}
    for clip in Catalog.load(report.catalog).clips():
        assert spans[clip.prepared_from] == clip.caption
        assert clip.media.span is None
        if (first := firsts.get(clip.caption)) is not None:
            shown = pictures_of(clip.path)
            wanted = frames[first : first + len(shown)]
            assert np.sqrt(((shown - wanted) ** 2).mean()) < 3
            assert _seconds(clip) == [number / 8 for number in range(len(shown))]
    assert report.bytes_before == film.stat().st_size + (videos / "b.mp4").stat().st_size
    shutil.copyfile(videos / "b.mp4", film)
    shutil.rmtree(out)
    changed = prepare(catalog, out, settings=settings, work=HERE)
    reasons = [each.reason for each in changed.rejected]
    assert len(reasons) == 3
    assert all("has changed since it was indexed" in reason for reason in reasons)


def test_captions_scores_and_origin_go_along(videos: Path) -> None:
    _, pairs = _prepare(videos)
    path = videos / "catalog.parquet"
    Catalog.load(path).with_attribute("nouns", np.array([1.0, 2.0, np.nan])).save(path)
    report = prepare(path, videos.parent / "out", settings=_SMALL, work=HERE)
    old = {clip.identity: clip for clip in Catalog.load(path).clips()}
    for clip in Catalog.load(report.catalog).clips():
        source = old[clip.prepared_from]
        assert (clip.caption, clip.attributes) == (source.caption, source.attributes)
        assert clip.identity != source.identity
    assert (pairs["c.png"][1].kind, pairs["c.png"][1].codec) == ("image", "jpeg")
    assert report.bytes_after < report.bytes_before
    assert json.dumps({"catalog": str(report.catalog)})


def test_pictures_are_the_same_but_smaller(videos: Path) -> None:
    _, pairs = _prepare(videos, replace(_SMALL, crf=6))
    for old, new in pairs.values():
        assert (new.height, new.width) == (32, 48)
        difference = _pictures(new).astype(np.float64) - _resized(_pictures(old), new)
        assert np.sqrt((difference**2).mean()) < 3


def test_what_is_there_is_not_written_again(videos: Path) -> None:
    first, pairs = _prepare(videos)
    stamps = {new.path: os.stat(new.path).st_mtime_ns for _, new in pairs.values()}  # noqa: PTH116
    victim = Path(pairs["a.mp4"][1].path)
    content = victim.read_bytes()
    victim.unlink()
    left = victim.with_name(f".{victim.stem}.0123abcd.partial.mp4")
    left.write_bytes(content[:99])  # of a process that was killed
    second, _ = _prepare(videos)
    assert not left.exists()
    assert (first.reused, second.reused, second.prepared) == (0, 2, 3)
    assert victim.read_bytes() == content
    changed = [path for path, stamp in stamps.items() if Path(path).stat().st_mtime_ns != stamp]
    assert changed == [str(victim)]
    third, _ = _prepare(videos, replace(_SMALL, gop=5))
    assert third.reused == 0


def test_a_damaged_prepared_file_is_written_anew_next_time(videos: Path) -> None:
    _, pairs = _prepare(videos)
    victim = Path(pairs["a.mp4"][1].path)
    victim.write_bytes(victim.read_bytes()[:500])
    report, _ = _prepare(videos)
    (rejection,) = report.rejected
    assert rejection.path == pairs["a.mp4"][0].path
    assert rejection.reason.startswith("its prepared file: not a readable video")
    assert _prepare(videos)[0].rejected == []


def test_a_clip_that_is_gone_is_rejected_and_the_rest_prepared(videos: Path, catalog: Path) -> None:
    (videos / "a.mp4").unlink()
    shutil.copyfile(videos / "c.png", videos / "b.mp4")
    out = videos.parent / "out"
    report = prepare(catalog, out, settings=_SMALL, work=HERE)
    assert report.prepared == 1
    reasons = {Path(each.path).name: each.reason for each in report.rejected}
    assert reasons["a.mp4"] == "does not exist"
    assert "has changed since it was indexed" in reasons["b.mp4"]
    (videos / "c.png").unlink()
    shutil.rmtree(out)
    with pytest.raises(DataError, match=r"None of 3 clips could be prepared.*\n.*a\.mp4: does not"):
        prepare(catalog, out, settings=_SMALL, work=HERE)


def test_fps_thins_out_and_never_doubles(videos: Path) -> None:
    _, pairs = _prepare(videos, replace(_SMALL, fps=3.0))
    old, new = pairs["a.mp4"]
    kept = _seconds(new)
    assert set(np.round(kept, 4)) <= set(np.round(_seconds(old), 4))
    assert new.num_frames == len({int(second * 3 + 1e-6) for second in _seconds(old)})
    _, pairs = _prepare(videos, replace(_SMALL, fps=60.0))
    assert pairs["a.mp4"][1].num_frames == 30


@given(st.integers(2, 3000), st.integers(2, 3000), st.integers(1, 512), st.integers(1, 512))
def test_sizes_cover_evenly_and_never_grow(
    height: int, width: int, half_height: int, half_width: int
) -> None:
    size = (2 * half_height, 2 * half_width)
    scaled = scaled_size(height, width, [size])
    for new, old, wanted in zip(scaled, (height, width), size, strict=True):
        assert new % 2 == 0
        assert 2 <= new <= old
        assert new >= min(wanted, old - old % 2)
    if height >= size[0] and width >= size[1]:
        assert scaled[0] == size[0] or scaled[1] == size[1]


def test_each_clip_covers_the_size_it_is_most_like() -> None:
    sizes = [(256, 448), (448, 256)]
    assert scaled_size(720, 1280, sizes) == (256, 456)
    assert scaled_size(1280, 720, sizes) == (456, 256)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(sizes=()), "expected at least 2x2"),
        (Settings(sizes=((0, 8),)), "expected at least 2x2"),
        (Settings(sizes=((8, 8),), gop=0), "gop is 0"),
        (Settings(sizes=((8, 8),), crf=52), "crf 52"),
        (Settings(sizes=((8, 8),), fps=0.0), "fps 0.0"),
    ],
)
def test_settings_that_cannot_be_are_refused_first(
    tmp_path: Path, settings: Settings, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        prepare(tmp_path / "not_read.parquet", tmp_path / "out", settings=settings)
    assert not (tmp_path / "out").exists()


def test_progress_counts_writing_and_checking(catalog: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    prepare(
        catalog,
        tmp_path / "out",
        settings=_SMALL,
        work=Work(progress=lambda *each: told.append(each)),
    )
    assert told == [(done, 6) for done in range(1, 7)]


def test_a_clip_in_a_tar_is_prepared_from_there(videos: Path) -> None:
    media = Media(str(videos / "joined.tar"), "a.mp4", 100, (videos / "a.mp4").stat().st_size)
    (clip,) = indexed(videos / "catalog.parquet", videos / "a.mp4").clips()
    (videos / "joined.tar").write_bytes(b"x" * 100 + (videos / "a.mp4").read_bytes() + b"y" * 100)
    make_catalog([replace(clip, media=media)]).save(videos / "joined.parquet")
    one = prepare(videos / "catalog.parquet", videos / "one", settings=_SMALL).catalog
    two = prepare(videos / "joined.parquet", videos / "two", settings=_SMALL).catalog
    assert Catalog.load(one).fingerprint == Catalog.load(two).fingerprint


def test_neither_the_source_catalog_nor_a_file_of_others_is_overwritten(
    videos: Path, catalog: Path
) -> None:
    with pytest.raises(DataError, match=r"is the catalog to be prepared\. Name another folder"):
        prepare(catalog, videos, settings=_SMALL)
    precious = videos.parent / "out" / "catalog.parquet"
    precious.parent.mkdir()
    precious.write_text("precious")
    with pytest.raises(DataError, match="exists and is not a catalog; it was not overwritten"):
        prepare(catalog, precious.parent, settings=_SMALL)
    assert precious.read_text() == "precious"

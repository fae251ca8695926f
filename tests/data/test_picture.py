"""What a file says of its picture beside its pixels."""

import os
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from av.video.reformatter import Colorspace
from numpy.typing import NDArray
from PIL import Image
from tests.data import build

from longtake.data.buckets import window_of
from longtake.data.cache import Cache
from longtake.data.cache_fill import refuse_not_finite
from longtake.data.catalog import Catalog
from longtake.data.checks import large_crops, plain_masks
from longtake.data.clip import Clip, Media
from longtake.data.conditioning import ConditioningPixels, read
from longtake.data.decode import probe, read_image
from longtake.data.encode import Settings, prepare, write_video
from longtake.data.index import index
from longtake.data.plan import begin
from longtake.data.stores import local
from longtake.data.tasks import HERE
from longtake.data.window import Crop, read_window
from longtake.errors import ClipError, DataError
from longtake.inspection.catalog_facts import catalog_stats

_ONE = 1 << 16


@pytest.mark.parametrize(
    ("a", "b", "c", "d"),
    [
        *((1, 0, 0, 1), (0, 1, -1, 0), (-1, 0, 0, -1), (0, -1, 1, 0)),
        *((-1, 0, 0, 1), (1, 0, 0, -1), (0, 1, 1, 0), (0, -1, -1, 0)),  # mirrored
    ],
)
def test_a_video_is_read_and_prepared_as_its_display_matrix_shows_it(
    tmp_path: Path, a: int, b: int, c: int, d: int
) -> None:
    """The matrix shows right of a decoded picture at (a, b) and down at (c, d); y points down."""
    (tmp_path / "clips").mkdir()
    greys = np.array([[40, 100], [160, 220]])
    picture = np.kron(greys, np.ones((32, 64))).astype(np.uint8)
    build.encode_plainly(
        tmp_path / "clips" / "clip.mp4",
        [np.repeat(picture[..., None], 3, axis=2)] * 2,
        matrix=[each * _ONE for each in (a, b, 0, c, d, 0, 0, 0)] + [1 << 30],
    )
    shown = np.zeros((2, 2))
    for q, p in np.ndindex(2, 2):
        x, y = 2 * p - 1, 2 * q - 1  # around the centre
        shown[int(b * x + d * y > 0), int(a * x + c * y > 0)] = greys[q, p]
    height, width = (128, 64) if a == 0 else (64, 128)
    index([tmp_path / "clips"], captions=None, out=tmp_path / "c.parquet", work=HERE)
    sizes = Settings(((height, width),))
    prepared = prepare(tmp_path / "c.parquet", tmp_path / "prepared", settings=sizes, work=HERE)
    for path in (tmp_path / "c.parquet", prepared.catalog):
        (clip,) = Catalog.load(path).clips()
        assert (clip.height, clip.width) == (height, width)
        window = window_of(clip, range(1), Crop(height, width, 0, 0), height, width)
        found = read_window(window)[0, 0].reshape(2, height // 2, 2, width // 2).mean((1, 3))
        np.testing.assert_allclose(found, shown, atol=5)


@pytest.mark.parametrize(("height", "matrix"), [(64, 6), (720, 1)])
def test_written_videos_are_tagged_as_they_are_converted(
    tmp_path: Path, height: int, matrix: int
) -> None:
    path = tmp_path / "red.mp4"
    write_video(path, np.full((1, height, 64, 3), (200, 40, 40), np.uint8), 16)
    with av.open(str(path)) as file:
        frame = next(file.decode(video=0))
        assert int(frame.colorspace) == matrix
        seen = frame.reformat(format="rgb24", dst_colorspace=Colorspace.DEFAULT).to_ndarray()
    assert abs(seen[32, 32].astype(int) - (200, 40, 40)).max() <= 4


def test_what_is_transparent_is_black_in_a_mask(tmp_path: Path) -> None:
    pixels = np.zeros((4, 4, 4), np.uint8)
    pixels[:2] = 255
    Image.fromarray(pixels).save(tmp_path / "mask.png")
    mask = read_image(Media(str(tmp_path / "mask.png")), "black")
    assert (mask[:2] == 255).all()
    assert not mask[2:].any()


def test_what_is_encoded_must_be_finite() -> None:
    refuse_not_finite(Media("a.png"), {"latents": torch.zeros(2), "mask": torch.ones(2).long()})
    for bad, name in ((float("nan"), "NaN"), (float("inf"), "infinite")):
        with pytest.raises(ClipError, match=f"latents that are {name}"):
            refuse_not_finite(Media("a.png"), {"latents": torch.tensor([0.0, bad])})


def test_duplicates_with_another_caption_are_named(tmp_path: Path) -> None:
    build.write_greys(tmp_path, {"a": "a red coat", "b": "ohwx style", "c": "a red coat"})
    out = tmp_path / "c.parquet"
    report = index([tmp_path], captions=None, out=out, work=HERE)
    assert report.other_captions == [(str(tmp_path / "b.png"), "ohwx style")]
    assert next(iter(Catalog.load(out).clips())).caption == "a red coat"


def test_duplicates_with_another_caption_are_kept_by_choice(tmp_path: Path) -> None:
    (source := tmp_path / "clips").mkdir()
    captions = {"a": "a red coat", "b": "ohwx style", "c": "a red coat", "d": "dusk", "e": ""}
    build.write_greys(source, captions)
    out = tmp_path / "c.parquet"

    def by_caption(*, keeps: bool = True) -> dict[str, Clip]:
        report = index([source], captions=None, out=out, work=HERE, keeps_other_captions=keeps)
        assert report.accepted + report.duplicates == 5
        return {clip.caption: clip for clip in Catalog.load(out).clips()}

    clips = by_caption()
    assert sorted(clips) == ["a red coat", "dusk", "ohwx style"]
    assert len({clip.identity for clip in clips.values()}) == 3
    for clip in clips.values():
        os.utime(clip.path, ns=(1, 1))
        with local(clip.media):  # another time alone
            pass
    assert by_caption() == by_caption()
    kept = {caption: clip.identity for caption, clip in by_caption().items()}
    assert kept == {caption: clip.identity for caption, clip in clips.items()}
    prepare(out, tmp_path / "small", settings=Settings(((16, 16),)), work=HERE)
    small = Catalog.load(tmp_path / "small" / "catalog.parquet").clips()
    assert sorted(clip.caption for clip in small) == sorted(clips)
    assert list(by_caption(keeps=False)) == ["a red coat"]
    build.write_greys(source, {"b": "ohwx style"}, grey=91)
    with pytest.raises(ClipError, match="has changed"), local(clips["ohwx style"].media):
        pass


def test_a_mask_of_one_colour_is_named(tmp_path: Path) -> None:
    (tmp_path / "masks").mkdir()
    for name, halves in enumerate([(255, 255), (0, 0), (0, 255)]):
        build.write_greys(tmp_path, {str(name): "noise"}, grey=name)
        mask = np.repeat(np.array(halves, np.uint8), 8)[None, :, None, None]
        write_video(tmp_path / f"masks/{name}.mp4", np.tile(mask, (1, 1, 16, 3)), 8)
    index([tmp_path], captions=None, out=tmp_path / "c.parquet", work=HERE)
    masks = {"person": {"kind": "mask", "path": "masks/{stem}.mp4"}}
    data = build.section(
        catalog=tmp_path / "c.parquet", buckets=[build.shape(num_frames=1)], conditioning=masks
    )
    plan = begin({"catalog": Catalog.load(tmp_path / "c.parquet")}, data, 2, 0)
    white, black = plain_masks(plan, data)
    assert "1 of 3 masks" in white
    assert "white everywhere, which masks nothing" in white
    assert "masks/0.mp4, of " in white
    assert "black everywhere, which masks everything" in black
    assert "masks/1.mp4" in black


def test_clips_that_lose_most_of_their_picture_are_told() -> None:
    sizes = {0: (64, 16), 1: (16, 24), 2: (128, 16)}  # the second loses a third
    catalog = build.catalog_of(
        range(3), width=lambda number: sizes[number][0], height=lambda number: sizes[number][1]
    )
    data = build.section(buckets=[build.shape()])
    (said,) = large_crops(begin(dict.fromkeys(data.sources(), catalog), data, 2, 0))
    assert "2 of 3 clips lose more than half" in said
    assert "/clips/2.mp4 (88%)" in said


def _circle(ratio: int = 2) -> NDArray[np.uint8]:
    """Two frames of 64x96 that hold a circle where a pixel is `ratio` times as wide as high."""
    y, x = np.mgrid[:96, :64]
    inside = ((x - 31.5) * ratio) ** 2 + (y - 47.5) ** 2 < 40**2
    return np.repeat(np.where(inside, np.uint8(255), np.uint8(0))[None, ..., None], 3, 3)[[0, 0]]


def test_a_clip_of_other_than_square_pixels_is_read_as_it_is_shown(tmp_path: Path) -> None:
    media = build.encode_plainly(
        tmp_path / "circle.mp4", _circle(), pixels="yuv444p", ratio=Fraction(2)
    )
    (tmp_path / "circle.txt").write_text("a circle")
    (clip,) = build.indexed(tmp_path / "c.parquet", media.file).clips()
    assert (clip.width, clip.height) == (128, 96)
    picture = read_window(window_of(clip, range(1), Crop(96, 128, 0, 0), 96, 128))[0, 0] > 127
    across, down = picture.any(0).sum(), picture.any(1).sum()
    assert abs(int(across) - int(down)) <= 2
    as_input = ConditioningPixels("picture", "", media, 0, 0, Crop(0, 0, 0, 0), 96, 128, False)
    assert (abs((read(as_input)[0, 0] > 127) ^ picture)).mean() < 0.02
    as_video = replace(as_input, kind="video")
    assert ((read(as_video)[0, 0] > 127) == picture).all()
    sizes = Settings(((48, 64),))
    report = prepare(tmp_path / "c.parquet", tmp_path / "out", settings=sizes, work=HERE)
    (prepared,) = Catalog.load(report.catalog).clips()
    assert (prepared.width, prepared.height) == (64, 48)


def test_untagged_hd_is_bt709_unless_the_recipe_says_another(tmp_path: Path) -> None:
    """Luma and chroma of (200, 60, 40) by BT.709, in a file that names no matrix."""
    path = tmp_path / "hd.mp4"
    frame = av.VideoFrame(64, 720, "yuv444p")
    for plane, value in zip(frame.planes, (92, 105, 190), strict=True):
        plane.update(bytes([value]) * 720 * plane.line_size)
    build.encode_plainly(path, [frame], pixels="yuv444p")
    catalog = build.indexed(tmp_path / "c.parquet", path)
    (clip,) = catalog.clips()
    assert clip.color_matrix == ""
    assert catalog_stats(catalog)["untagged_hd"] == 1
    windows = [
        window_of(clip, range(1), Crop(720, 64, 0, 0), 720, 64, untagged=matrix)
        for matrix in ("bt709", "bt601")
    ]
    seen = [read_window(window)[:, 0, 9, 9].astype(int) for window in windows]
    assert abs(seen[0] - (200, 60, 40)).max() <= 3
    assert abs(seen[1] - (200, 60, 40)).max() >= 10
    data = build.section(cache=str(tmp_path / "cache"), windows=1)
    cache = Cache(tmp_path / "cache", "codec", "text", data, no_caption="")
    keys = [cache.latents(each).key for each in (*windows, replace(windows[0], is_untagged=False))]
    assert keys[0] != keys[1] == keys[2]  # what is not concerned keeps its key


def test_a_video_with_an_alpha_channel_is_rejected_by_name(tmp_path: Path) -> None:
    frames = np.zeros((1, 16, 16, 4), np.uint8)
    media = build.encode_plainly(tmp_path / "clip.mkv", frames, codec="ffv1", pixels="yuva444p")
    with pytest.raises(ClipError, match=r"alpha channel.*premultiply"):
        probe(media)


def test_a_catalog_without_the_column_of_matrices_is_read_and_indexed_again(tmp_path: Path) -> None:
    media = build.encode_plainly(tmp_path / "clip.mp4", _circle(1))
    out = tmp_path / "c.parquet"
    index([media.file], captions=None, out=out, work=HERE)
    table = pq.read_table(out)
    pq.write_table(table.drop_columns(["color_matrix"]), out)
    (clip,) = Catalog.load(out).clips()
    assert clip.color_matrix is None
    assert index([media.file], captions=None, out=out, work=HERE).unchanged == 0
    assert index([media.file], captions=None, out=out, work=HERE).unchanged == 1


def test_a_refusal_by_max_crop_names_what_is_cropped() -> None:
    catalog = build.catalog_of(range(2), width=lambda number: 16, height=lambda number: 64)
    data = build.section(max_crop=0.2)
    with pytest.raises(DataError, match="of 16x64, loses 75% of its picture to 16x16: add a"):
        begin(dict.fromkeys(data.sources(), catalog), data, 2, 0)

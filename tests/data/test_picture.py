"""What a file says of its picture beside its pixels."""

from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from av.video.reformatter import Colorspace
from PIL import Image
from tests.data import build

from longtake.data.cache_fill import refuse_not_finite
from longtake.data.catalog import Catalog
from longtake.data.clip import Media
from longtake.data.decode import probe, read_image
from longtake.data.encode import write_video
from longtake.data.index import index
from longtake.data.plan import begin, large_crops
from longtake.errors import ClipError

_ONE = 1 << 16


def _write(path: Path, matrix: Sequence[int]) -> Media:
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=24)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        stream.set_display_matrix(list(matrix))
        for _ in range(2):
            out.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8))))
        out.mux(stream.encode())
    return Media(str(path))


@pytest.mark.parametrize(
    "matrix",
    [
        [-_ONE, 0, 0, 0, _ONE, 0, 64 * _ONE, 0, 1 << 30],
        [_ONE, 0, 0, 0, -_ONE, 0, 0, 64 * _ONE, 1 << 30],
        [0, _ONE, 0, _ONE, 0, 0, 0, 0, 1 << 30],
    ],
)
def test_a_mirrored_video_is_rejected_by_name(tmp_path: Path, matrix: list[int]) -> None:
    with pytest.raises(ClipError, match="mirrored"):
        probe(_write(tmp_path / "clip.mp4", matrix=matrix))


def test_a_turned_video_is_not_taken_for_a_mirrored_one(tmp_path: Path) -> None:
    turned = [0, _ONE, 0, -_ONE, 0, 0, 64 * _ONE, 0, 1 << 30]
    assert probe(_write(tmp_path / "clip.mp4", matrix=turned)).rotation in (90, 270)


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
    for name, caption in (("a", "a red coat"), ("b", "ohwx style"), ("c", "a red coat")):
        Image.new("RGB", (32, 32), (90, 90, 90)).save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text(caption)
    out = tmp_path / "c.parquet"
    report = index([tmp_path], captions=None, out=out, workers=0)
    assert report.other_captions == [(str(tmp_path / "b.png"), "ohwx style")]
    assert next(iter(Catalog.load(out).clips())).caption == "a red coat"


def test_clips_that_lose_most_of_their_picture_are_told() -> None:
    sizes = {0: (64, 16), 1: (16, 24), 2: (128, 16)}  # the second loses a third
    catalog = build.catalog_of(
        range(3), width=lambda number: sizes[number][0], height=lambda number: sizes[number][1]
    )
    data = build.section(buckets=[{"num_frames": 4, "height": 16, "width": 16}])
    (said,) = large_crops(begin(dict.fromkeys(data.sources(), catalog), data, 2, 0))
    assert "2 of 3 clips lose more than half" in said
    assert "/clips/2.mp4 (88%)" in said

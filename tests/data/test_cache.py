"""What a cache gives back is what was written, to the bit, or nothing."""

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.build import catalog_of
from torch import Tensor

from longtake.config import Bucket, ConditioningSection, DataSection
from longtake.data.buckets import sample_window
from longtake.data.cache import Cache, CacheEntry, ContentHashes, make_folder
from longtake.data.window import Window
from longtake.errors import ClipError, DataError

_SHAPE = Bucket(num_frames=4, height=16, width=16)


@pytest.fixture
def data(tmp_path: Path) -> DataSection:
    """A section whose pictures lie in a folder of their own."""
    folder = tmp_path / "pose"
    sections = {
        "pose": ConditioningSection(kind="picture", path=f"{folder}/{{stem}}.png"),
        "depth": ConditioningSection(kind="video", path=f"{folder}/{{stem}}.png"),
        "raw": ConditioningSection(kind="video", path=f"{folder}/{{stem}}.png", encode=False),
        "camera": ConditioningSection(
            kind="numbers", path=f"{folder}/{{stem}}.png", width=3, per_frame=True
        ),
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


def _assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape)
        assert tensor.contiguous().numpy().tobytes() == other[name].numpy().tobytes(), name


_ODD = [0.0, -0.0, 1.0, -2.5, 0.1, float("inf"), float("nan"), 1e-42, 3.4e38]


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.sampled_from(_ODD), min_size=4, max_size=48),
    rows=st.integers(1, 4),
    is_narrow=st.booleans(),
)
def test_what_is_read_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, values: list[float], rows: int, is_narrow: bool
) -> None:
    floats = torch.tensor(values[: len(values) // rows * rows]).reshape(rows, -1)
    floats = floats.bfloat16().float() if is_narrow else floats
    written = {
        "floats": floats,
        "turned": floats.T,
        "padded": torch.cat([floats, torch.zeros(3, floats.shape[1])]),
        "zeros": torch.zeros(2, 3),
        "ids": torch.tensor([[4, 0], [0, 0]]),
    }
    entry = CacheEntry(
        tmp_path_factory.mktemp("cache") / "kind" / "ab" / "abc.safetensors", "a test"
    )
    (entry.path.parents[2] / "aside").mkdir()
    size = entry.write(written)
    assert size == entry.path.stat().st_size
    assert entry.is_whole()
    _assert_same_bits(written, entry.read())


def test_embeddings_of_a_bf16_encoder_take_half_and_padding_nothing(
    tmp_path: Path, data: DataSection
) -> None:
    entry = _cache(tmp_path, data).prompt("a cat")
    embeds = torch.randn(512, 64)
    embeds[20:] = 0
    assert entry.write({"prompt_embeds": embeds}) > 20 * 64 * 4
    narrow = {"prompt_embeds": embeds.bfloat16().float()}
    assert entry.write(narrow) < 20 * 64 * 2 + 600
    _assert_same_bits(narrow, entry.read())


def test_a_truncated_entry_is_no_entry(tmp_path: Path, data: DataSection, window: Window) -> None:
    entry = _cache(tmp_path, data).latents(window)
    assert not entry.is_whole()
    entry.write({"latents": torch.randn(4, 2, 3, 3)})
    whole = entry.path.read_bytes()
    for length in (0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1):
        entry.path.write_bytes(whole[:length])
        assert not entry.is_whole()
        with pytest.raises(ClipError, match=r"the latents of .* is damaged in the cache: its \d+"):
            entry.read()
        assert not entry.path.exists()
    entry.path.write_bytes(whole + b"x")
    assert not entry.is_whole()


def test_a_flipped_bit_is_found_when_it_is_read(
    tmp_path: Path, data: DataSection, window: Window
) -> None:
    entry = _cache(tmp_path, data).latents(window)
    entry.write({"latents": torch.randn(4, 2, 3, 3)})
    whole = entry.path.read_bytes()
    for place in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[place] ^= 4
        entry.path.write_bytes(damaged)
        try:
            found = entry.read()
        except ClipError:
            assert not entry.path.exists()
        else:  # what it says for people may have changed, but no number
            entry.path.write_bytes(whole)
            _assert_same_bits(entry.read(), found)


def test_an_entry_that_is_not_there_says_what_it_would_be(
    tmp_path: Path, data: DataSection, window: Window
) -> None:
    cache = _cache(tmp_path, data)
    with pytest.raises(ClipError, match=r"does not hold the latents of /clips/1\.mp4 from frame 1"):
        cache.latents(window).read()
    with pytest.raises(ClipError, match="does not hold the embeddings of 'a red cat'"):
        cache.prompt("a red cat").read()


def test_whatever_decides_the_pixels_decides_the_name(
    tmp_path: Path, data: DataSection, window: Window
) -> None:
    cache = _cache(tmp_path, data)
    changes: list[dict[str, Any]] = [
        {"identity": "0" * 32},
        {"start": 2},
        {"num_frames": 5},
        {"stride": 2},
        {"scaled_height": 20},
        {"scaled_width": 20},
        {"scaled_height": 20, "top": 1},
        {"scaled_width": 20, "left": 1},
        {"is_flipped": True},
        {"stream_index": 1},
        {"rotation": 90},
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
        wanted = cache.inputs(clip, replace(window, media=media, **changes))[name]
        return cache.conditioning(name, wanted).key

    assert key(cache) == key(cache, "2") == key(cache, identity="0" * 32)
    others = [key(cache, "3"), key(cache, is_flipped=True), key(cache, source_width=9)]
    others += [key(_cache(tmp_path, data, codec="other")), cache.latents(window).key]
    others.append(key(cache, scaled_width=20, left=1))
    assert len({key(cache), *others}) == 7
    assert key(cache, start=2) == key(cache)
    frames = [key(cache, name=name, start=at) for name in ("depth", "camera") for at in (1, 2)]
    frames += [key(cache, name="raw"), key(cache)]
    assert len(set(frames)) == 6
    other = _cache(tmp_path, data, codec="other")
    assert key(other, name="raw") == key(cache, name="raw")
    before = key(cache)
    (pose / "1.png").write_bytes(b"changed")
    assert key(cache) != before
    with pytest.raises(ClipError, match=r"9\.png: does not exist"):
        key(cache, "9")


def test_content_is_hashed_once_for_all_processes(tmp_path: Path) -> None:
    file, folder = tmp_path / "a.png", tmp_path / "hashes"
    file.write_bytes(b"abc")
    first = ContentHashes(folder).of(str(file))
    stamp = file.stat()
    file.write_bytes(b"xyz")
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert ContentHashes(folder).of(str(file)) == first
    with next(folder.glob("*.jsonl")).open("ab") as journal:
        journal.write(b'["/half/a/li')
    assert ContentHashes(folder).of(str(file)) == first
    os.utime(file)
    changed = ContentHashes(folder).of(str(file))
    assert changed != first
    assert ContentHashes(folder).of(str(file)) == changed


def test_hashes_that_cannot_be_kept_are_made_again(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"abc")
    (tmp_path / "file").touch()
    hashes = ContentHashes(tmp_path / "file" / "hashes")
    assert hashes.of(str(tmp_path / "a.png")) == ContentHashes(tmp_path).of(str(tmp_path / "a.png"))


def test_writers_of_one_entry_do_not_disturb_each_other(
    tmp_path: Path, data: DataSection, window: Window
) -> None:
    cache = _cache(tmp_path, data)
    entry, latents = cache.latents(window), {"latents": torch.randn(4, 8, 32, 32)}
    done = threading.Event()

    def write() -> None:
        for _ in range(30):
            entry.write(latents)

    writers = [threading.Thread(target=write) for _ in range(3)]
    for writer in writers:
        writer.start()
    num_read = 0
    while any(writer.is_alive() for writer in writers) or not num_read:
        if entry.path.exists():
            assert entry.is_whole()
            _assert_same_bits(latents, entry.read())
            num_read += 1
    done.set()
    assert list((cache.folder / "aside").iterdir()) == []


def test_what_killed_processes_left_is_tidied_up_when_it_is_old(
    tmp_path: Path, data: DataSection
) -> None:
    cache = _cache(tmp_path, data)
    aside = cache.folder / "aside"
    (aside / "parts").mkdir()
    for name in ("old", "young", "parts/half"):
        (aside / name).write_bytes(b"half")
    for name in ("old", "parts"):
        os.utime(aside / name, (0, 0))
    make_folder(cache.folder)
    assert [path.name for path in aside.iterdir()] == ["young"]


def test_a_cache_that_cannot_be_written_says_so(
    tmp_path: Path, data: DataSection, window: Window
) -> None:
    (tmp_path / "file").touch()
    blocked = tmp_path / "file" / "cache"
    with pytest.raises(DataError, match=r"cache cannot be written: .*--set data\.cache=FOLDER"):
        make_folder(blocked)
    cache = _cache(tmp_path, data)
    (cache.folder / "latents").write_bytes(b"in the way")
    with pytest.raises(DataError, match="cache cannot be written: "):
        cache.latents(window).write({"latents": torch.zeros(1, 1)})
    assert list((cache.folder / "aside").iterdir()) == []

"""What packs give back is what was written, to the bit, or nothing."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from longtake.data import packs
from longtake.data.packs import CacheEntry, PackIndex, PackWriter
from longtake.errors import ClipError, DataError

_ROOT = Path(__file__).resolve().parents[2]
_ODD = [0.0, -0.0, 1.0, -2.5, 0.1, float("inf"), float("nan"), 1e-42, 3.4e38]


def _entry(number: int, kind: str = "latents") -> CacheEntry:
    key = f"{number * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128:032x}"
    return CacheEntry(kind, key, f"number {number}")


def _content(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {"latents": torch.randn(4, 2, 3, 1 + number % 3, generator=generator)}


def _write(folder: Path, numbers: range) -> None:
    with PackWriter(PackIndex(folder)) as writer:
        for number in numbers:
            writer.add(_entry(number), _content(number))


def _assert_same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape)
        assert tensor.contiguous().numpy().tobytes() == other[name].numpy().tobytes(), name


def _assert_all_there(index: PackIndex, numbers: range) -> None:
    for number in numbers:
        _assert_same_bits(index.read(_entry(number)), _content(number))


def _packs(folder: Path) -> list[Path]:
    return sorted(folder.glob("latents/*.safetensors"))


@settings(max_examples=50, deadline=None)
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
        "mask": torch.tensor([True, False]),
        "number": torch.tensor(7),
    }
    folder = tmp_path_factory.mktemp("cache")
    with PackWriter(PackIndex(folder)) as writer:
        writer.add(_entry(1), _content(1))
        assert not writer.holds(_entry(2))
        writer.add(_entry(2), written)
        assert writer.holds(_entry(2))
    (pack,) = _packs(folder)
    assert writer.num_bytes == pack.stat().st_size
    for verify in (True, False):
        _assert_same_bits(written, PackIndex(folder, verify=verify).read(_entry(2)))
    with safe_open(pack, "pt") as file:  # so that other programs read it as well
        assert torch.equal(file.get_tensor(f"{_entry(2).key}.ids"), written["ids"][:1])


def test_embeddings_of_a_bf16_encoder_take_half_and_padding_nothing(tmp_path: Path) -> None:
    embeds, sizes = torch.randn(512, 64), []
    embeds[20:] = 0
    for number, each in enumerate((embeds, embeds.bfloat16().float())):
        with PackWriter(PackIndex(tmp_path)) as writer:
            writer.add(_entry(number), {"prompt_embeds": each})
        sizes.append(writer.num_bytes)
        _assert_same_bits({"prompt_embeds": each}, PackIndex(tmp_path).read(_entry(number)))
    assert sizes[0] > 20 * 64 * 4 > 20 * 64 * 2 + 600 > sizes[1]


def test_a_pack_ends_at_its_size_and_an_index_finds_what_all_processes_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packs, "PACK_BYTES", 1000)
    early = PackIndex(tmp_path)
    _write(tmp_path, range(60))
    assert 6 < len(_packs(tmp_path)) < 12
    early.refresh()
    _assert_all_there(early, range(60))
    early.save()
    (saved,) = (tmp_path / "index").iterdir()
    assert saved.stat().st_size < 60 * 32 + 2000
    for number in range(60, 160, 10):  # one pack each: more than are searched one by one
        _write(tmp_path, range(number, number + 10))
    _assert_all_there(early, range(160))
    late = PackIndex(tmp_path)
    assert len(late) == 160
    assert not late.holds(_entry(160))
    late.save()
    _assert_all_there(PackIndex(tmp_path), range(160))


def test_an_index_maps_32_bytes_an_entry_and_reads_no_header_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path, range(2000))
    index = PackIndex(tmp_path)
    index.save()
    (saved,) = (tmp_path / "index").iterdir()
    assert saved.stat().st_size < 2000 * 32 + 1500
    monkeypatch.setattr(PackIndex, "_header", None)
    _assert_all_there(PackIndex(tmp_path), range(0, 2000, 97))


def test_of_two_entries_with_half_a_key_each_is_found(tmp_path: Path) -> None:
    entries = [CacheEntry("latents", f"{7:016x}{low:016x}", "one") for low in (3, 1, 2)]
    with PackWriter(PackIndex(tmp_path)) as writer:
        for number, entry in enumerate(entries):
            writer.add(entry, _content(number))
    index = PackIndex(tmp_path)
    for number, entry in enumerate(entries):
        _assert_same_bits(index.read(entry), _content(number))
    assert not index.holds(CacheEntry("latents", f"{7:016x}{4:016x}", "none"))


def test_a_pack_that_was_cut_off_is_refused_by_name(tmp_path: Path) -> None:
    """Found when a process begins, whether the index knows the pack or not, and when it is read."""
    _write(tmp_path / "whole", range(8))
    PackIndex(tmp_path / "whole").save()
    (pack,) = _packs(tmp_path / "whole")
    size = pack.stat().st_size
    for case, length in enumerate((0, 7, 8, 100, size // 2, size - 1, size + 1)):
        for is_indexed in (True, False):
            folder = tmp_path / f"{case}_{is_indexed}"
            shutil.copytree(tmp_path / "whole", folder)
            if not is_indexed:
                shutil.rmtree(folder / "index")
            cut, running = folder / "latents" / pack.name, PackIndex(folder)
            os.truncate(cut, length)
            index = PackIndex(folder)
            assert not index.holds(_entry(3))
            (reason,) = index.refused.values()
            assert list(index.refused) == [cut]
            if is_known := is_indexed or f"has {length:,} of {size:,} bytes" in reason:
                assert "was moved to" in reason
                assert (folder / "damaged" / f"latents.{pack.name}").stat().st_size == length
            assert cut.exists() != is_known
            with pytest.raises(ClipError, match="number 3"):
                running.read(_entry(3))
            _write(folder, range(8))
            _assert_all_there(running, range(8))
    running = PackIndex(tmp_path / "whole")
    os.truncate(pack, size - 1)
    with pytest.raises(ClipError, match=r"number 3 is damaged in the cache: it has [\d,]+ of"):
        running.read(_entry(3))
    assert list(running.refused) == [pack]


def test_a_flipped_bit_costs_its_entry_only(tmp_path: Path) -> None:
    """The bit is in the pack or in its header."""
    _write(tmp_path / "whole", range(3))
    (pack,) = _packs(tmp_path / "whole")
    whole = pack.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    num_found = 0
    for case, place in enumerate([*range(0, start, 61), *range(start, len(whole), 23)]):
        folder = tmp_path / str(case)
        damaged = bytearray(whole)
        damaged[place] ^= 4
        (folder / "latents").mkdir(parents=True)
        (folder / "latents" / pack.name).write_bytes(damaged)
        index, num_right = PackIndex(folder), 0
        for number in range(3):
            try:
                found = index.read(_entry(number))
            except ClipError:
                assert not PackIndex(folder).holds(_entry(number))
            else:
                _assert_same_bits(found, _content(number))
                num_right += 1
        if place >= start:
            assert num_right == 2
            assert (folder / "latents" / pack.name).exists()
        num_found += num_right
    assert num_found > 20
    _write(folder, range(3))
    _assert_all_there(PackIndex(folder), range(3))


def test_without_checksums_damage_is_not_looked_for(tmp_path: Path) -> None:
    _write(tmp_path, range(1))
    (pack,) = _packs(tmp_path)
    data = bytearray(pack.read_bytes())
    data[-1] ^= 1
    pack.write_bytes(data)
    PackIndex(tmp_path, verify=False).read(_entry(0))
    with pytest.raises(ClipError, match="its content is not what was written"):
        PackIndex(tmp_path).read(_entry(0))


def test_a_damaged_index_is_not_used(tmp_path: Path) -> None:
    _write(tmp_path, range(20))
    PackIndex(tmp_path).save()
    (saved,) = (tmp_path / "index").iterdir()
    whole = saved.read_bytes()
    for length in (0, 9, 300, len(whole) - 8):
        saved.write_bytes(whole[:length])
        _assert_all_there(PackIndex(tmp_path), range(20))


def test_of_a_damaged_index_an_entry_is_lost_and_the_others_are_saved(tmp_path: Path) -> None:
    _write(tmp_path, range(20))
    PackIndex(tmp_path).save()
    (saved,) = (tmp_path / "index").iterdir()
    data = bytearray(saved.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    at, _ = json.loads(data[8:start])["pack"]["data_offsets"]
    data[start + at : start + at + 4] = b"\xff" * 4  # the number of no pack
    saved.write_bytes(data)
    _write(tmp_path, range(20, 30))
    index = PackIndex(tmp_path)
    saved.unlink()
    index.save()
    found = PackIndex(tmp_path)
    held = [number for number in range(30) if found.holds(_entry(number))]
    assert len(held) == len(found) == 29
    for number in held:
        _assert_same_bits(found.read(_entry(number)), _content(number))


def test_a_pack_of_another_format_is_left_alone(tmp_path: Path) -> None:
    _write(tmp_path, range(1))
    (pack,) = _packs(tmp_path)
    pack.write_bytes(pack.read_bytes().replace(b'\\"format\\": 2', b'\\"format\\": 7'))
    with pytest.raises(DataError, match=r"has format 7, and this longtake reads format 2: use the"):
        PackIndex(tmp_path)
    assert pack.exists()


@pytest.mark.parametrize(
    "change",
    [
        {"key": "../../../../etc/passwd"},
        {"checksum": -1},
        {"of": {"latents": ["load", 4]}},
        {"of": {"latents": ["F32", 2]}},
        {"of": {}},
        {"of": [[[[]]]]},
    ],
)
def test_a_header_that_lies_is_not_used_and_its_file_stays(
    tmp_path: Path, change: dict[str, object]
) -> None:
    _write(tmp_path, range(1))
    (pack,) = _packs(tmp_path)
    data = pack.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, key = json.loads(data[8 : 8 + length]), _entry(0).key
    facts = json.loads(header["__metadata__"].pop(key))
    new_key = str(change.get("key", key))
    header["__metadata__"][new_key] = json.dumps(facts | change)
    header[f"{new_key}.latents"] = header.pop(f"{key}.latents")
    text = json.dumps(header).encode()
    pack.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    index = PackIndex(tmp_path)
    assert index.refused == {pack: "has no header of a pack, and was left where it is"}
    assert pack.exists()
    assert not index.holds(_entry(0))


def test_a_linked_folder_of_a_cache_is_refused(tmp_path: Path) -> None:
    (tmp_path / "others").mkdir()
    (tmp_path / "damaged").symlink_to(tmp_path / "others")
    with pytest.raises(DataError, match="damaged is a symbolic link, which is not followed"):
        PackIndex(tmp_path)


_WRITER = """
import sys, time, torch
from pathlib import Path
from tests.data import test_packs as t
from longtake.data import packs
packs.PACK_BYTES = 20_000
folder, first = Path(sys.argv[1]), int(sys.argv[2])
with packs.PackWriter(packs.PackIndex(folder)) as writer:
    for number in range(first, 10**6):
        if not writer.holds(t._entry(number)):
            writer.add(t._entry(number), t._content(number))
            print(number, flush=True)
"""


def test_two_writers_that_are_killed_leave_whole_packs_only(
    warm: list[str], tmp_path: Path
) -> None:
    command = [*warm, "1", "-c", _WRITER, str(tmp_path)]
    writers = [
        subprocess.Popen([*command, first], stdout=subprocess.PIPE, text=True, cwd=_ROOT)
        for first in ("0", "50")
    ]
    while len(_packs(tmp_path)) < 6 and all(each.poll() is None for each in writers):
        time.sleep(0.01)
    for each in writers:
        each.kill()
        each.communicate()
    index = PackIndex(tmp_path)
    assert index.refused == {}
    there = [number for number in range(2000) if index.holds(_entry(number))]
    assert len(there) > 100
    for number in there:
        _assert_same_bits(index.read(_entry(number)), _content(number))
    index.save()
    assert len(PackIndex(tmp_path)) >= len(there)

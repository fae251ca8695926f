"""COMMITTED, damage, which checkpoints are needed, and their deletion."""

import io
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checkpoint.runs import flip_a_bit, need, truncate

from longtake.checkpoint import files
from longtake.run_dir import RunDirectory


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A committed folder of two parts and a file beside them."""
    for name in ("model/.metadata", "model/__0_0.distcp", "ema/main/__0_0.distcp", "trainer.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode() * 1000)
    names = files.list_files(tmp_path)
    files.commit(tmp_path, files.describe_files(tmp_path, names))
    return tmp_path


def test_committed_lists_every_file_with_its_size_and_checksum(folder: Path) -> None:
    listed = json.loads((folder / "COMMITTED").read_text())["files"]
    names = ["ema/main/__0_0.distcp", "model/.metadata", "model/__0_0.distcp", "trainer.json"]
    assert list(listed) == names
    for name, entry in listed.items():
        content = (folder / name).read_bytes()
        assert entry == {"bytes": len(content), "xxh3_64": xxhash.xxh3_64_hexdigest(content)}


def test_nothing_is_wrong_with_what_was_committed(folder: Path) -> None:
    """A file that was put beside the others later is nobody's business."""
    (folder / "notes.txt").write_text("mine")
    assert files.find_damage(folder, checksums=True) is None
    assert files.find_damage(folder, checksums=False) is None


def _replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (Path.unlink, "model/__0_0.distcp is missing"),
        (truncate, "model/__0_0.distcp has 17,999 bytes, and had 18,000 when it was saved"),
        (flip_a_bit, r"model/__0_0.distcp has other bytes than were saved.*xxh3_64"),
        (_replace_by_a_folder, "model/__0_0.distcp is no regular file"),
    ],
)
def test_damage_is_named(folder: Path, harm: Callable[[Path], None], message: str) -> None:
    harm(folder / "model" / "__0_0.distcp")
    found = files.find_damage(folder, checksums=True)
    assert found is not None
    assert re.match(message, found)
    is_seen = files.find_damage(folder, checksums=False) is not None
    assert is_seen == (harm is not flip_a_bit)


_MIB = files.BLOCK_BYTES
_WRITES = st.lists(st.sampled_from([1, 100, 8192, _MIB - 1, _MIB, 2 * _MIB + 7]), max_size=6)


@given(_WRITES)
@settings(max_examples=20, deadline=None)
def test_checksums_do_not_depend_on_how_a_file_was_written(sizes: list[int]) -> None:
    content = np.random.default_rng(0).bytes(sum(sizes))
    with tempfile.TemporaryDirectory() as folder:
        path, left = Path(folder) / "file", io.BytesIO(content)
        with files.ChecksummedFile(path) as file:
            for size in sizes:
                assert file.write(left.read(size)) == size
        assert path.read_bytes() == content
        assert file.entry() == files.describe_files(path.parent, ["file"])["file"]
    blocks = [content[at : at + _MIB] for at in range(0, len(content), _MIB)]
    assert file.entry()["xxh3_64"] == "".join(map(xxhash.xxh3_64_hexdigest, blocks))


_Large = tuple[bytes, files.FileEntry]


@pytest.fixture
def large(tmp_path: Path) -> _Large:
    """The content of `tmp_path / "large"`, of three blocks and a half, and its entry."""
    content = np.random.default_rng(1).bytes(7 * _MIB // 2)
    (tmp_path / "large").write_bytes(content)
    return content, files.describe_files(tmp_path, ["large"])["large"]


def test_what_is_read_is_what_was_saved(tmp_path: Path, large: _Large) -> None:
    content, entry = large
    draw = np.random.default_rng(2)
    with files.VerifiedFile(tmp_path, "large", entry) as file:
        for _ in range(60):
            at = int(draw.integers(len(content) + 9))
            size = int(draw.choice([1, 9, 4096, _MIB, 3 * _MIB]))
            assert file.seek(at) == at
            assert file.read(size) == content[at : at + size]
            assert file.tell() == min(at + size, max(at, len(content)))
        file.seek(-5, io.SEEK_END)
        assert file.read() == content[-5:]


def test_a_reader_of_a_part_of_a_file_finds_the_damage_of_that_part_alone(
    tmp_path: Path, large: _Large
) -> None:
    content, entry = large
    (tmp_path / "large").write_bytes(content[: _MIB + 3] + b"?" + content[_MIB + 4 :])
    with files.VerifiedFile(tmp_path, "large", entry) as file:
        assert file.read(_MIB) == content[:_MIB]
        file.seek(2 * _MIB)
        assert file.read() == content[2 * _MIB :]
        for at in (0, 2 * _MIB - 1):
            file.seek(at)
            with pytest.raises(files.DamagedFileError, match=r"large has other bytes"):
                file.read(_MIB + 1)


@pytest.mark.parametrize(("share", "finds"), [((0, 3), False), ((1, 3), True), ((2, 3), False)])
def test_processes_verify_a_checkpoint_together(
    folder: Path, share: tuple[int, int], finds: bool
) -> None:
    """The second of three reads `model/.metadata`."""
    flip_a_bit(folder / "model" / ".metadata")
    found = files.find_damage(folder, checksums=True, share=share)
    assert (found is not None) == finds


def test_other_parts_can_be_left_out_of_account(folder: Path) -> None:
    flip_a_bit(folder / "model" / "__0_0.distcp")
    assert files.find_damage(folder, checksums=True, within="ema/main/") is None
    assert files.find_damage(folder, checksums=True, within="model/") is not None
    found = files.find_damage(folder, checksums=False, within="ema/other/")
    assert found == "it holds no ema/other/"


def test_the_damage_is_counted(folder: Path) -> None:
    for name in ("model/.metadata", "model/__0_0.distcp", "trainer.json"):
        (folder / name).unlink()
    found = files.find_damage(folder, checksums=False)
    assert found == "model/.metadata is missing, and 2 more of its files are damaged"


@pytest.mark.parametrize(
    "content",
    ["", '{"format": 1, "files": {}}', "[]", "\0"]
    + [
        f'{{"format": 2, "block_bytes": 1048576, "files": {rest}'
        for rest in ("", "3}", '{"a": 3}}', '{"a": {}}}')
    ],
)
def test_a_commitment_that_says_nothing_is_damage(folder: Path, content: str) -> None:
    """Garbled, cut short or of another form: the checkpoint cannot be trusted."""
    (folder / "COMMITTED").write_text(content)
    found = files.find_damage(folder, checksums=False)
    assert found is not None
    assert found.startswith("COMMITTED cannot be read: ")


def test_a_heartbeat_counts_until_it_is_15_minutes_older_than_the_newest_checkpoint(
    run: RunDirectory,
) -> None:
    stale, fresh = need(run, 10), need(run, 20, server="server-2")
    newest = (run.checkpoint_path(20) / "COMMITTED").stat().st_mtime
    os.utime(stale, (newest - 901,) * 2)
    os.utime(fresh, (newest - 899,) * 2)
    assert files.needed_steps(run) == {20}


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"server": "a", "time": "2026", "needs": ["10"]}', '{"needs": 10}']
)
def test_a_heartbeat_that_cannot_be_read_needs_nothing(run: RunDirectory, text: str) -> None:
    need(run, 10, server="whole")
    need(run, 20).write_text(text)
    (run.path / "evaluations" / "servers" / "a file").write_text("")
    assert files.needed_steps(run) == {10}


def test_a_checkpoint_that_is_needed_while_it_is_taken_away_comes_back(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(run.checkpoint_path(10).rglob("*"))
    real = files.hide

    def interrupted(path: Path) -> Path:
        hidden = real(path)
        need(run, 10)
        return hidden

    monkeypatch.setattr(files, "hide", interrupted)
    assert not files.delete_unless_needed(run, 10)
    assert sorted(run.checkpoint_path(10).rglob("*")) == before


@pytest.mark.parametrize("microseconds", [0, 100, 200, 300, 400, 600, 1000, None])
def test_a_server_that_needs_first_and_looks_then_never_reads_what_is_deleted(
    run: RunDirectory, microseconds: int | None
) -> None:
    """A server and a deletion at once: the checkpoint is gone, or it stays whole.

    None: the server comes after the deletion, which must have succeeded.
    """
    checkpoint = run.checkpoint_path(20)
    start = threading.Barrier(2)

    def delete() -> None:
        start.wait()
        files.delete_unless_needed(run, 20)

    thread = threading.Thread(target=delete)
    thread.start()
    start.wait()
    thread.join() if microseconds is None else time.sleep(microseconds / 1e6)
    need(run, 20)
    is_there = (checkpoint / "COMMITTED").exists()
    thread.join()
    if is_there:
        assert (checkpoint / "COMMITTED").exists()
        assert (checkpoint / "model").is_dir()
    assert checkpoint.exists() or not is_there
    assert not (microseconds is None and checkpoint.exists())


def test_a_checkpoint_that_is_gone_already_counts_as_deleted(run: RunDirectory) -> None:
    assert files.delete_unless_needed(run, 15)
    need(run, 20)
    assert not files.delete_unless_needed(run, 20)
    assert run.checkpoint_steps() == [10, 20]


@pytest.mark.parametrize(
    ("rules", "gone"),
    [
        ({"keep": 2}, [100, 200, 300, 400]),
        ({"keep": 2, "keep_every": 200}, [100, 300]),
        ({"keep": 2, "needed": {300, 999}}, [100, 200, 400]),
        # At least 250 before 600 is 300; when 600 has become 700, 400 would take its place.
        ({"keep": 1, "reach": 250}, [100, 200, 500]),
        ({"keep": 1, "reach": 600}, [200, 300, 400, 500]),
        ({"keep": 9}, []),
    ],
)
def test_each_rule_keeps_its_own(rules: dict[str, object], gone: list[int]) -> None:
    """The newest, every so many, what is held, and what a rollback would go to."""
    given: dict[str, object] = {"keep_every": None, "needed": (), "reach": 0} | rules
    assert files.unneeded_steps(range(100, 601, 100), **given) == gone  # type: ignore[arg-type]


_STEPS = st.sets(st.integers(0, 5000), max_size=40)


@given(_STEPS, st.integers(1, 6), st.none() | st.integers(1, 700), _STEPS, st.integers(0, 2000))
def test_nothing_that_is_needed_goes(
    steps: set[int], keep: int, keep_every: int | None, held: set[int], reach: int
) -> None:
    gone = files.unneeded_steps(steps, keep=keep, keep_every=keep_every, needed=held, reach=reach)
    kept = steps - set(gone)
    assert gone == sorted(set(gone) & steps)
    assert kept >= set(sorted(steps)[-keep:])
    assert kept >= steps & held
    assert keep_every is None or all(step % keep_every for step in gone)
    old = [step for step in steps if step <= max(steps) - reach]
    assert not (reach and old) or max(old) in kept


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=120), st.integers(1, 3), st.integers(1, 500)
)
def test_a_run_can_always_go_back_far_enough_and_not_much_further(
    gaps: list[int], keep: int, reach: int
) -> None:
    kept: list[int] = []
    saved = list(accumulate(gaps))
    for step in saved:
        kept.append(step)
        gone = files.unneeded_steps(kept, keep=keep, keep_every=None, needed=(), reach=reach)
        kept = [each for each in kept if each not in gone]
        assert len(kept) <= keep + 2
        if step - saved[0] >= reach:
            targets = [step - each for each in kept if step - each >= reach]
            assert min(targets) < 2 * reach + max(gaps)

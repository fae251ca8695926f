"""What a checkpoint's COMMITTED says, and what it notices."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from longtake.checkpoint import manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A committed folder of two parts and a file beside them."""
    for name in ("model/.metadata", "model/__0_0.distcp", "ema/main/__0_0.distcp", "trainer.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode() * 1000)
    names = manifest.file_names(tmp_path)
    manifest.commit(tmp_path, manifest.describe(tmp_path, names))
    return tmp_path


def test_it_lists_every_file_with_its_size_and_checksum(folder: Path) -> None:
    """Anyone can compare the files with it, such as by sha256sum."""
    files = json.loads((folder / "COMMITTED").read_text())["files"]
    names = ["ema/main/__0_0.distcp", "model/.metadata", "model/__0_0.distcp", "trainer.json"]
    assert list(files) == names
    for name, entry in files.items():
        content = (folder / name).read_bytes()
        assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_nothing_is_wrong_with_what_was_committed(folder: Path) -> None:
    """A file that was put beside the others later is nobody's business."""
    (folder / "notes.txt").write_text("mine")
    assert manifest.damage(folder, checksums=True) is None
    assert manifest.damage(folder, checksums=False) is None


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (Path.unlink, "model/__0_0.distcp is missing"),
        (_truncate, "model/__0_0.distcp has 17,999 bytes, and had 18,000 when it was saved"),
        (_flip_a_bit, r"model/__0_0.distcp has other bytes than were saved.*sha256"),
        (_replace_by_a_folder, "model/__0_0.distcp is no regular file"),
    ],
)
def test_damage_is_named(folder: Path, harm: Callable[[Path], None], message: str) -> None:
    """The file and what is wrong with it; only a flipped bit needs its checksum."""
    harm(folder / "model" / "__0_0.distcp")
    found = manifest.damage(folder, checksums=True)
    assert found is not None
    assert re.match(message, found)
    is_seen = manifest.damage(folder, checksums=False) is not None
    assert is_seen == (harm is not _flip_a_bit)


def test_other_parts_can_be_left_out_of_account(folder: Path) -> None:
    """Whoever reads the averages alone waits for no other checksum, and needs no optimizer."""
    _flip_a_bit(folder / "model" / "__0_0.distcp")
    assert manifest.damage(folder, checksums=True, within="ema/main/") is None
    assert manifest.damage(folder, checksums=True, within="model/") is not None
    found = manifest.damage(folder, checksums=False, within="ema/other/")
    assert found == "it holds no ema/other/"


def test_the_damage_is_counted(folder: Path) -> None:
    """One file is named, the others are counted."""
    for name in ("model/.metadata", "model/__0_0.distcp", "trainer.json"):
        (folder / name).unlink()
    found = manifest.damage(folder, checksums=False)
    assert found == "model/.metadata is missing, and 2 more of its files are damaged"


@pytest.mark.parametrize(
    "content",
    ["", '{"files": ', "[]", '{"files": 3}', '{"files": {"a": 3}}', '{"files": {"a": {}}}', "\0"],
)
def test_a_commitment_that_says_nothing_is_damage(folder: Path, content: str) -> None:
    """Garbled, cut short or of another form: the checkpoint cannot be trusted."""
    (folder / "COMMITTED").write_text(content)
    found = manifest.damage(folder, checksums=False)
    assert found is not None
    assert found.startswith("COMMITTED cannot be read: ")


def test_without_a_commitment_there_is_no_checkpoint(folder: Path) -> None:
    """It is written last, so its lack says that the rest may be missing too."""
    (folder / "COMMITTED").unlink()
    found = manifest.damage(folder, checksums=False)
    assert found == "it has no COMMITTED: its save was interrupted"

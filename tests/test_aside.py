"""A file is whole or not there."""

from pathlib import Path

import pytest

from longtake.aside import make_writable, written_aside


def test_the_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    """Until then nothing of that name exists, and afterwards nothing else does."""
    path = tmp_path / "clip.mp4"
    with written_aside(path) as aside:
        aside.write_text("whole")
        assert not path.exists()
        assert aside.suffix == ".mp4"
        assert aside.name.startswith(".")
    assert [found.name for found in tmp_path.iterdir()] == ["clip.mp4"]
    assert path.read_text() == "whole"


@pytest.mark.parametrize("error", [OSError("no space"), KeyboardInterrupt()])
def test_a_block_that_fails_changes_nothing(tmp_path: Path, error: BaseException) -> None:
    """The old file stays as it was and the half-written one is gone, whatever went wrong."""
    path = tmp_path / "summary.json"
    path.write_text("old")

    def write() -> None:
        with written_aside(path) as aside:
            aside.write_text("ha")
            raise error

    with pytest.raises(type(error)):
        write()
    assert [found.name for found in tmp_path.iterdir()] == ["summary.json"]
    assert path.read_text() == "old"


def test_a_block_that_writes_nothing_is_an_error(tmp_path: Path) -> None:
    """There is nothing to rename, and whoever forgot to write is told so."""
    with pytest.raises(FileNotFoundError), written_aside(tmp_path / "a.txt"):
        pass


def test_of_many_each_has_a_place_of_its_own(tmp_path: Path) -> None:
    """Two write one file at a time: both end well, and the one that ends last is there."""
    path = tmp_path / "reference.json"
    with written_aside(path, by_many=True) as first, written_aside(path, by_many=True) as second:
        first.write_text("first")
        second.write_text("second")
        assert first.suffix == second.suffix == ".json"
        assert first.name.startswith(".")
    assert path.read_text() == "first"
    assert [found.name for found in tmp_path.iterdir()] == ["reference.json"]


def test_a_folder_is_made_and_tried(tmp_path: Path) -> None:
    """Nothing is left in it; what cannot be a folder is an error before anything is written."""
    make_writable(tmp_path / "new" / "folder")
    assert not any((tmp_path / "new" / "folder").iterdir())
    (tmp_path / "file").write_text("precious")
    with pytest.raises(OSError, match="file"):
        make_writable(tmp_path / "file" / "below")

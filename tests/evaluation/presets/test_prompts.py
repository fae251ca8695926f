"""What a file of prompts may hold, and what is said of one that cannot be used."""

from pathlib import Path

import pytest

from longtake.errors import RecipeError
from longtake.evaluation.presets.prompts import read_prompts


def test_a_prompt_a_line(tmp_path: Path) -> None:
    """In order, without the spaces around them, whatever the line ends and the byte order mark."""
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffa red circle \r\n  ein Fluß\r\nthird".encode())
    assert read_prompts(path) == ("a red circle", "ein Fluß", "third")
    path.write_text("one\u2028still one\n")
    assert read_prompts(path) == ("one\u2028still one",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"prompts\.txt is empty"),
        (b"\n \n", r"prompts\.txt is empty"),
        (b"one\n\ntwo\n  \n", r"lines 2, 4 are empty"),
        (b"one\n\n", r"line 2 is empty"),
        (b"\none\n", r"line 1 is empty"),
        (b"one\n" + b"\n" * 30 + b"two", r"lines 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, \.\.\. are"),
        (b"one\ncaf\xe9 noir\n", r"is not UTF-8: line 2 has the byte 0xe9"),
        (b"\xef\xbb\xbfone\ntwo\nthr\xffee\n", r"is not UTF-8: line 3 has the byte 0xff"),
    ],
)
def test_a_file_that_cannot_be_used_names_its_lines(
    content: bytes, message: str, tmp_path: Path
) -> None:
    """Nothing is left out in silence: later prompts would get other numbers."""
    path = tmp_path / "prompts.txt"
    path.write_bytes(content)
    with pytest.raises(RecipeError, match=message):
        read_prompts(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Also a folder in its place."""
    with pytest.raises(RecipeError, match=r"none\.txt cannot be read: No such file"):
        read_prompts(tmp_path / "none.txt")
    with pytest.raises(RecipeError, match="cannot be read: Is a directory"):
        read_prompts(tmp_path)

"""Text in lines, in any writing system."""

from pathlib import Path

import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib.figure import Figure
from PIL import Image, ImageDraw

from longtake import drawing
from longtake.drawing import draw_text, figure_text, line_height, text_width, wrap

_ACCENTS = "Ünïcödé naïve façade œuvre Жук ελληνικά – “a” … × ✓"  # noqa: RUF001


def _drawn(text: str) -> np.ndarray:
    picture = Image.new("L", (400, 40), 255)
    draw_text(ImageDraw.Draw(picture), (4, 4), text, 15, "#000000")
    return np.asarray(picture)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with no fonts but matplotlib's; the folder is for fonts of the user."""
    monkeypatch.setenv("PATH", str(tmp_path))  # no fontconfig
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(drawing, "_FONT_FOLDERS", ())
    monkeypatch.setattr(drawing, "_missing_said", False)
    monkeypatch.setattr(drawing, "_found", [])
    for cached in (drawing._path_of, drawing._installed):
        cached.cache_clear()
    (tmp_path / "fonts").mkdir()
    return tmp_path / "fonts"


def _write_font(path: Path, characters: str) -> None:
    """A font in which each of the characters is a black square."""
    names = [".notdef", *(f"uni{ord(each):04X}" for each in characters)]
    pen = TTGlyphPen(None)
    for place in ((0, 0), (0, 800), (800, 800), (800, 0)):
        (pen.lineTo if place != (0, 0) else pen.moveTo)(place)
    pen.closePath()
    square = pen.glyph()
    font = FontBuilder(1000, isTTF=True)
    font.setupGlyphOrder(names)
    font.setupCharacterMap({ord(each): f"uni{ord(each):04X}" for each in characters})
    font.setupGlyf(dict.fromkeys(names, square))
    font.setupHorizontalMetrics(dict.fromkeys(names, (1000, 0)))
    font.setupHorizontalHeader(ascent=900, descent=-100)
    font.setupNameTable({"familyName": "Squares", "styleName": "Regular"})
    font.setupOS2()
    font.setupPost()
    font.save(str(path))


def test_letters_with_accents_and_other_alphabets_are_no_boxes(
    fresh: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    box = _drawn("\U000e0fff")  # a code point that no font has
    assert capsys.readouterr().err
    for character in _ACCENTS.replace(" ", ""):
        assert not np.array_equal(_drawn(character), box), character
    assert capsys.readouterr().err == ""


def test_what_no_font_has_is_a_box_and_said_once(
    fresh: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _drawn("一只猫 walks")
    _drawn("一只狗 runs")
    said = capsys.readouterr().err
    assert said.startswith("No font of this machine has 一 只 猫: pictures show boxes instead. ")
    assert said.count("\n") == 1
    assert "fonts-noto-cjk" in said


def test_a_font_of_this_machine_has_what_ours_lacks(
    fresh: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write_font(fresh / "NotoSansCJK-Squares.ttf", "猫狗")
    line = _drawn("a 猫")
    square = line[:, 17:32]
    assert (square < 64).sum() > 100
    assert capsys.readouterr().err == ""
    with figure_text("猫"):
        figure = Figure(figsize=(2, 1))
        figure.text(0.1, 0.1, "猫", fontsize=40)
        figure.savefig(fresh / "figure.png")  # a missing glyph would be a warning, thus an error
    assert (np.asarray(Image.open(fresh / "figure.png").convert("L")) < 64).mean() > 0.05


def test_lines_break_between_words_and_fit() -> None:
    words = "A large grey cartoon rabbit steps out of a burrow under a tree"
    lines = wrap(words, 15, 120)
    assert " ".join(lines) == words
    assert len(lines) > 3
    assert max(text_width(line, 15) for line in lines) <= 120


def test_a_word_wider_than_a_line_is_cut() -> None:
    lines = wrap("w" * 100, 15, 120)
    assert "".join(lines) == "w" * 100
    assert max(text_width(line, 15) for line in lines) <= 120


def test_nothing_is_no_line() -> None:
    assert wrap("  ", 15, 120) == []
    assert line_height(15) > 15

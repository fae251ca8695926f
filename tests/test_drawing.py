"""Labelled grids of pictures, and text in any writing system."""

from pathlib import Path

import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from PIL import Image, ImageDraw

from longtake import drawing
from longtake.drawing import (
    RULE,
    Grid,
    GridCell,
    GridRow,
    TextLine,
    draw_text,
    line_height,
    resized,
    save_picture,
    side_by_side,
    text_width,
    wrap,
)
from longtake.errors import RunError

_ACCENTS = "Ünïcödé naïve façade œuvre Жук ελληνικά – “a” … × ✓"  # noqa: RUF001


def _drawn(text: str) -> np.ndarray:
    picture = Image.new("L", (400, 40), 255)
    draw_text(ImageDraw.Draw(picture), (4, 4), text, 15, "#000000")
    return np.asarray(picture)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(drawing, "_FONT_FOLDERS", ())
    monkeypatch.setattr(drawing, "_missing_said", False)
    monkeypatch.setattr(drawing, "_found", [])
    for cached in (drawing._path_of, drawing._installed):
        cached.cache_clear()
    (tmp_path / "fonts").mkdir()
    return tmp_path / "fonts"


def _write_font(path: Path, characters: str) -> None:
    names = [".notdef", *(f"uni{ord(each):04X}" for each in characters)]
    pen = TTGlyphPen(None)
    for place in ((0, 0), (0, 800), (800, 800), (800, 0)):
        (pen.lineTo if place != (0, 0) else pen.moveTo)(place)
    pen.closePath()
    square = pen.glyph()
    font = FontBuilder(1000, isTTF=True)
    font.setupGlyphOrder(names)
    font.setupCharacterMap({ord(each): f"uni{ord(each):04X}" for each in characters})
    font.setupGlyf({**dict.fromkeys(names, square), ".notdef": TTGlyphPen(None).glyph()})
    font.setupHorizontalMetrics(dict.fromkeys(names, (1000, 0)))
    font.setupHorizontalHeader(ascent=900, descent=-100)
    font.setupNameTable({"familyName": "Squares", "styleName": "Regular"})
    font.setupOS2()
    font.setupPost()
    font.save(str(path))


def test_letters_that_pillow_lacks_are_taken_from_a_font_of_this_machine(
    fresh: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write_font(fresh / "NotoSans-Squares.ttf", "".join(sorted(set(_ACCENTS))))
    _drawn("\U0010fffd")  # a code point that no font has
    assert capsys.readouterr().err
    for character in _ACCENTS.replace(" ", ""):
        assert drawing._path_of(character) is not None, character
    assert capsys.readouterr().err == ""


def test_what_no_font_has_is_a_box_and_said_once(
    fresh: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _drawn("一只猫 walks")
    _drawn("一只狗 runs")
    said = capsys.readouterr().err
    assert said.startswith(
        "No font in this machine's usual folders has 一 只 猫: pictures show boxes "
    )
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


def test_fonts_with_most_characters_are_tried_first(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["NotoSansCJK.ttc", "NotoSans.ttf", "DejaVuSans.ttf", "Abel.ttf", "Zeyada.otf"]
    for name in (*names, "NotoSans.txt"):
        (fresh / name).touch()
    monkeypatch.setattr(drawing, "_MOST_FONTS", 4)
    assert [Path(each).name for each in drawing._installed()] == names[:4]


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


_GREEN, _RED = (47, 143, 91), (200, 69, 59)


def _grey(level: int, width: int = 40, height: int = 30) -> Image.Image:
    return Image.new("RGB", (width, height), (level, level, level))


def _count(page: Image.Image, colour: tuple[int, int, int]) -> int:
    return int((np.asarray(page) == colour).all(axis=-1).sum())


def test_each_picture_is_whole_where_corner_says(tmp_path: Path) -> None:
    rows = [
        GridRow([TextLine("one")], [GridCell(_grey(11)), GridCell(_grey(22, 60, 90), gap=9)]),
        GridRow([TextLine("line")] * 9, [GridCell(_grey(33, 200))]),
        GridRow([], [GridCell(_grey(44))]),
    ]
    grid = Grid(rows, label_width=100, title="A title")
    page = grid.draw()
    assert page.size == grid.size
    for row, line in enumerate(rows):
        for number, cell in enumerate(line.cells):
            left, top = grid.corner(row, number)
            width, height = cell.picture.size
            shown = page.crop((left, top, left + width, top + height))
            assert np.array_equal(np.asarray(shown), np.asarray(cell.picture))
            assert _count(page, cell.picture.getpixel((0, 0))) == width * height  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("is_correct", "green", "red"),
    [(True, True, False), (False, False, True), (None, False, False)],
)
def test_a_row_is_marked_left_of_its_label(is_correct: bool | None, green: bool, red: bool) -> None:
    row = GridRow([TextLine("a caption")], [GridCell(_grey(0))], is_correct)
    page = Grid([row], label_width=100, mark_width=30).draw()
    left = page.crop((0, 0, 58, page.height))
    assert (_count(left, _GREEN) > 20, _count(left, _RED) > 20) == (green, red)


def test_a_wide_title_widens_the_page() -> None:
    grid = Grid([GridRow([], [GridCell(_grey(0))])], label_width=100, title="wide " * 40)
    margin = np.asarray(grid.draw())[:, -20:]
    assert (margin == margin[0, 0]).all()


def test_pictures_side_by_side_have_a_gap_between_them() -> None:
    strip = np.asarray(side_by_side([_grey(11), _grey(22, 50, 40)], 3, RULE))
    assert strip.shape == (40, 93, 3)
    assert (strip[:30, :40] == 11).all()
    assert (strip[:, 43:] == 22).all()
    assert (strip[:, 40:43] == (0xE4, 0xE4, 0xDF)).all()


def test_only_a_shrunk_picture_is_smoothed() -> None:
    board = Image.fromarray((np.indices((8, 8)).sum(axis=0) % 2 * 255).astype(np.uint8))
    assert set(np.unique(np.asarray(resized(board, (24, 24))))) == {0, 255}
    assert len(np.unique(np.asarray(resized(board, (7, 7))))) > 2


def test_a_picture_that_cannot_be_written_is_an_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"sheet\.png cannot be written: No such file"):
        save_picture(_grey(0), tmp_path / "missing" / "sheet.png")
    assert list(tmp_path.iterdir()) == []

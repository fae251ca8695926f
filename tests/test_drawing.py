"""Text in lines."""

from longtake.drawing import font, line_height, wrap


def test_lines_break_between_words_and_fit() -> None:
    """No word is lost, no line is wider than asked."""
    words = "A large grey cartoon rabbit steps out of a burrow under a tree"
    lines = wrap(words, 15, 120)
    assert " ".join(lines) == words
    assert len(lines) > 3
    assert max(font(15).getlength(line) for line in lines) <= 120


def test_a_word_wider_than_a_line_is_cut() -> None:
    """Every letter is still there."""
    lines = wrap("w" * 100, 15, 120)
    assert "".join(lines) == "w" * 100
    assert max(font(15).getlength(line) for line in lines) <= 120


def test_nothing_is_no_line() -> None:
    """And lines are taller than their letters."""
    assert wrap("  ", 15, 120) == []
    assert line_height(15) > 15

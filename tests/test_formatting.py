"""Numbers, names, errors and untrusted text in messages."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longtake.errors import RecordError
from longtake.formatting import (
    did_you_mean,
    escape,
    first_line,
    for_seconds,
    format_duration,
    format_short_duration,
    format_size,
    join_words,
    nearest,
    number_ranges,
    plural,
    printable,
    printable_lines,
    reason_of,
)


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (format_size, 0, "0 bytes"),
        (format_size, 1023, "1023 bytes"),
        (format_size, 1024, "1.00 KiB"),
        (format_size, 5 * 2**19, "2.50 MiB"),
        (format_size, 2**30, "1.00 GiB"),
        (format_size, 3 * 2**40, "3072.00 GiB"),
        (format_duration, 0, "0 s"),
        (format_duration, 41.6, "42 s"),
        (format_duration, 59.6, "1:00"),
        (format_duration, 185, "3:05"),
        (format_duration, 3599.7, "1:00:00"),
        (format_duration, 7800, "2:10:00"),
        (format_duration, 48 * 3600 - 1, "47:59:59"),
        (format_duration, 76 * 3600, "3 d 4 h"),
        (format_short_duration, 0.0032, "3.2 ms"),
        (format_short_duration, 0.5, "500 ms"),
        (format_short_duration, 1.25, "1.25 s"),
        (format_short_duration, 42.06, "42.1 s"),
        (format_short_duration, 59.97, "1:00"),
        (for_seconds, 0.42, "0.4 s"),
        (for_seconds, 12.4, "12 s"),
        (for_seconds, 119.6, "120 s"),
        (for_seconds, 250, "4 min 10 s"),
        (for_seconds, 7500, "2 h 5 min"),
        (number_ranges, [3], "3"),
        (number_ranges, [0, 1], "0-1"),
        (number_ranges, [0, 1, 2, 6, 8, 9], "0-2, 6, 8-9"),
        (number_ranges, range(900), "0-899"),
    ],
)
def test_numbers_read_as_people_write_them(
    function: Callable[[Any], str], value: Any, text: str
) -> None:
    assert function(value) == text


def test_lists_read_as_in_a_sentence() -> None:
    found = [join_words(range(number), "or") for number in range(4)]
    assert found == ["", "0", "0 or 1", "0, 1 or 2"]
    counts = [plural(number, "clip") for number in (0, 1, 6000)]
    assert counts == ["0 clips", "1 clip", "6,000 clips"]


def test_a_misspelt_name_is_answered_with_near_names_or_a_list() -> None:
    known = ["height", "weight", "width", "steps"]
    assert did_you_mean("hight", known) == "did you mean height?"
    assert did_you_mean("eight", known) == "did you mean height or weight?"
    assert did_you_mean("zzz", known) == "there are: height, steps, weight, width."
    assert did_you_mean("zzz", known, shown=2) == "there are: height, steps, ...."
    assert did_you_mean("zzz", []) == "there are: none."
    assert did_you_mean("qwen", ["qwen_image_edit", "wan"]) == "did you mean qwen_image_edit?"
    assert did_you_mean("zzz", known, otherwise="no name is near.") == "no name is near."
    assert (nearest("step", known), nearest("zzz", known)) == ("steps", None)


def test_an_error_is_told_by_its_first_line_or_its_reason() -> None:
    assert first_line(ValueError("\nno such file \nmore")) == "no such file"
    assert first_line(ValueError()) == "ValueError"
    assert reason_of(FileNotFoundError(2, "No such file", "/x")) == "No such file"
    assert reason_of(RecordError(Path("/x"), "it is empty")) == "it is empty"
    assert reason_of(ValueError("bad")) == "bad"


_HOSTILE = "a\x1b]0;owned\x07\nforged line\x9b31m\u202egnp"


def test_control_characters_are_spelled() -> None:
    assert printable(_HOSTILE) == r"a\x1b]0;owned\x07\nforged line\x9b31m\u202egnp"
    assert printable_lines("one\n\ttwo\r") == "one\n\ttwo\\r"
    assert printable("naïve 日本語 ✓ \udcff") == "naïve 日本語 ✓ \\udcff"
    assert escape("[red]\n") == "\\[red]\\n"

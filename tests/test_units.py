"""Numbers are written as people read them."""

import pytest

from longtake.units import duration, plural, size


@pytest.mark.parametrize(
    ("num_bytes", "written"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB"),
        (5 * 2**19, "2.50 MiB"),
        (2**30, "1.00 GiB"),
        (3 * 2**40, "3072.00 GiB"),
    ],
)
def test_memory_is_said_in_the_largest_unit_of_which_there_is_one(
    num_bytes: int, written: str
) -> None:
    """Two digits of it; bytes as they are."""
    assert size(num_bytes) == written


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0.04, "0.0 s"),
        (9.44, "9.4 s"),
        (59.7, "1 min 0 s"),
        (190, "3 min 10 s"),
        (8040, "2 h 14 min"),
        (273600, "3 d 4 h"),
    ],
)
def test_a_time_is_said_in_its_two_largest_units(seconds: float, written: str) -> None:
    assert duration(seconds) == written


def test_one_thing_is_not_many() -> None:
    """And thousands are separated."""
    assert [plural(number, "clip") for number in (0, 1, 6000)] == [
        "0 clips",
        "1 clip",
        "6,000 clips",
    ]

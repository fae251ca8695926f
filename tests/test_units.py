"""Numbers are written as people read them."""

import pytest

from longtake.units import plural, size


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


def test_one_thing_is_not_many() -> None:
    """And thousands are separated."""
    assert [plural(number, "clip") for number in (0, 1, 6000)] == [
        "0 clips",
        "1 clip",
        "6,000 clips",
    ]

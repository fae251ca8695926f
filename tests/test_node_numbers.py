"""The table of nodes' numbers: what is far from others, and the columns."""

import pytest

from longtake.node_numbers import COLUMNS, SHOWN_SIGNALS, columns_of, find_far, links_down


def _with_one(usual: float, value: float) -> dict[str, float]:
    return {**{f"node{number}": usual + number / 100 for number in range(9)}, "odd": value}


@pytest.mark.parametrize(
    ("label", "usual", "value", "is_far"),
    [
        ("power", 650.0, 400.0, True),
        ("power", 650.0, 900.0, False),  # more power is no fault
        ("temperature", 60.0, 85.0, True),
        ("temperature", 60.0, 62.0, False),  # within what healthy hardware differs by
        ("disk write", 0.01, 2.0, False),  # below what a checkpoint makes usual
        ("disk write", 0.01, 9.0, True),
    ],
)
def test_a_number_is_far_if_it_is_much_worse_than_others(
    label: str, usual: float, value: float, is_far: bool
) -> None:
    found = find_far(_with_one(usual, value), COLUMNS[label].signal)
    assert found == ({"odd": value} if is_far else {})


def test_no_number_is_far_from_itself() -> None:
    assert find_far({}, SHOWN_SIGNALS[0]) == {}
    assert find_far({"only": 7.0}, SHOWN_SIGNALS[0]) == {}


def test_a_column_has_the_worst_device() -> None:
    numbers = {
        "gpu_power_watts:0": 600.0,
        "gpu_power_watts:1": 400.0,
        "gpu_temperature_celsius:0": 60.0,
        "gpu_temperature_celsius:1": 70.0,
        "link_up:eth0": 1.0,
        "link_up:ib0": 0.0,
    }
    assert columns_of(numbers) == {"power": 400.0, "temperature": 70.0}
    assert links_down(numbers) == ["ib0"]

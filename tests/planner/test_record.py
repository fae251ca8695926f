"""The record of a plan: what stands in it can be read again, and names of blocks are short."""

import pytest

from longtake.planner.record import name_ranges


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["blocks.0", "blocks.1", "blocks.3"], "blocks.0-1, 3"),
        (["caption_block", "blocks.7"], "caption_block, blocks.7"),
        (["a.9", "b.0", "b.1", "b.2"], "a.9, b.0-2"),
    ],
)
def test_names_of_blocks_arename_ranges(names: list[str], expected: str) -> None:
    assert name_ranges(names) == expected

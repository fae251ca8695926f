"""Checksums of weights, and which rank is alone."""

import pytest
import torch
from tests.build import not_none
from torch import Tensor

from longtake.parallel.replicas import checksum, find_unlike


def _sum(*tensors: Tensor) -> int:
    return int(not_none(checksum(tensors)))


def test_a_checksum_changes_with_each_bit_and_each_place() -> None:
    weights = torch.randn(3, 4099)  # rows of words and a rest
    small = torch.randn(5, dtype=torch.bfloat16)  # no whole word
    whole = _sum(weights, small)
    assert _sum(weights.clone(), small.clone()) == whole
    for tensor, bits in ((weights, torch.int32), (small, torch.int16)):
        flat = tensor.view(-1).view(bits)
        for place in (0, 1, len(flat) // 2, len(flat) - 1):
            for bit in (0, 8 * flat.itemsize - 1):
                flat[place] ^= torch.tensor(1, dtype=bits) << bit
                assert _sum(weights, small) != whole
                flat[place] ^= torch.tensor(1, dtype=bits) << bit
    assert _sum(weights, small) == whole
    assert _sum(weights.flip(0), small) != whole
    assert _sum(weights.roll(2), small) != whole
    assert _sum(torch.tensor([0.0])) != _sum(torch.tensor([-0.0]))


def test_tensors_are_added_alike_together_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longtake.parallel.replicas._BYTES_TOGETHER", 64)
    tensors = [torch.randn(size) for size in (3, 100, 1, 7, 4)]
    assert _sum(*tensors) == _sum(*(each.clone() for each in tensors))
    assert _sum(*tensors) != _sum(*tensors[::-1])
    assert checksum([torch.empty(0)]) is None


def test_of_three_the_one_that_is_alone_is_found_and_of_two_both() -> None:
    assert find_unlike("aaa", [[0, 1, 2]]) == []
    assert find_unlike("aba", [[0, 1, 2]]) == [1]
    assert find_unlike("ab", [[0, 1]]) == [0, 1]
    assert find_unlike("aabb", [[0, 1, 2, 3]]) == [0, 1, 2, 3]
    # Hybrid: ranks of one position are compared, and other positions hold other shards.
    assert find_unlike("xyxyzy", [[0, 2, 4], [1, 3, 5]]) == [4]

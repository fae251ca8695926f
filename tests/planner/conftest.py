"""Fixtures of the planner's tests."""

from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _small_vocabulary(few_words: None) -> None: ...


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets how many threads torch has, until the test is over."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)

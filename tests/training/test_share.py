"""What each rank has of a batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtake.data.batch import num_places
from longtake.errors import RecipeError
from longtake.training.share import idle_share, refuse_idle_ranks


@given(batch=st.integers(1, 512), ranks=st.integers(1, 64))
def test_places_hold_the_batch_and_no_rank_has_more_than_it_needs(batch: int, ranks: int) -> None:
    """One place less would not hold it."""
    assert num_places(batch, ranks) * ranks >= batch
    assert (num_places(batch, ranks) - 1) * ranks < batch
    assert idle_share(batch, ranks) == pytest.approx(1 - batch / (num_places(batch, ranks) * ranks))


def test_more_ranks_than_clips_are_refused() -> None:
    """Named with both numbers, and with what helps."""
    refuse_idle_ranks(4, 4)
    with pytest.raises(RecipeError, match=r"batch_size 4 cannot be shared by 5 .*parallel.sequen"):
        refuse_idle_ranks(4, 5)

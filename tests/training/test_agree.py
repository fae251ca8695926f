"""Ranks that share the tokens of the same clips agree on which of them they train on."""

from collections.abc import Callable

import torch

from longtake.config import Bucket, ParallelSection
from longtake.data.batch import Batch
from longtake.parallel.mesh import World, join
from longtake.training.agree import agreed


def test_a_clip_that_one_rank_cannot_decode_is_left_out_by_all_that_share_it(
    run_on_two_ranks: Callable[..., None],
) -> None:
    """Each of them has the weights of both, and knows of all that was rejected."""
    run_on_two_ranks(__file__)


def test_alone_a_batch_is_what_it_was() -> None:
    """Nobody else has its clips."""
    batch = _batch([1.0, 0.0], (("ab", 1),))
    assert agreed(batch, World(0, 0, 1, torch.device("cpu"), None)) is batch


def _batch(weights: list[float], rejected: tuple[tuple[str, int], ...] = ()) -> Batch:
    size = len(weights)
    return Batch(
        step=7,
        stage="all",
        source="catalog",
        epoch=0,
        begins_epoch=False,
        bucket=Bucket(num_frames=1, height=8, width=8),
        videos=torch.zeros(size, 3, 1, 8, 8, dtype=torch.uint8),
        captions=("",) * size,
        seeds=(0,) * size,
        identities=("ab",) * size,
        epochs=(0,) * size,
        weights=torch.tensor(weights),
        rejected=rejected,
    )


def _as_one_of_two() -> None:
    with join("cpu", ParallelSection(sequence=2)) as world:
        assert (world.data_rank, world.data_size) == (0, 1)
        assert world.speaks_for_data == world.is_first
        mine = [_batch([1, 0, 1, 1], (("aa", 1),)), _batch([1, 1, 1, 0], (("bb", 2),))][world.rank]
        batch = agreed(mine, world)
        assert batch.weights.tolist() == [1, 0, 1, 0]
        assert batch.rejected == (("aa", 1), ("bb", 2))


if __name__ == "__main__":
    _as_one_of_two()

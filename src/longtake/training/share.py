"""What each rank has of a batch: as many places as every other, of which the last may be empty."""

from longtake.errors import RecipeError


def places(batch_size: int, data_size: int) -> int:
    """Places of each data rank: enough for all clips of a batch.

    All ranks pass through the model equally often, as collectives want it. Where a batch does not
    divide, stand-ins of weight 0 fill the places beyond it.
    """
    return -(-batch_size // data_size)


def refuse_idle_ranks(batch_size: int, data_size: int) -> None:
    """Refuse more ranks than clips.

    Raises:
        RecipeError: some ranks would never have a clip.
    """
    if batch_size < data_size:
        raise RecipeError(
            f"training.batch_size {batch_size} cannot be shared by {data_size} processes: each "
            "needs a clip. Start fewer processes, let several share a clip's tokens "
            "(parallel.sequence), or begin a run with a larger batch."
        )


def idle_share(batch_size: int, data_size: int) -> float:
    """Share of all places that is empty; what a batch that does not divide wastes."""
    return 1 - batch_size / (places(batch_size, data_size) * data_size)

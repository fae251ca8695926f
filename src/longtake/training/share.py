"""What ranks that do not divide a batch waste, and how many are too many."""

from longtake.data.batch import num_places
from longtake.errors import RecipeError


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
    return 1 - batch_size / (num_places(batch_size, data_size) * data_size)

"""From `--on` to a crew."""

from collections.abc import Iterator
from contextlib import contextmanager

from longtake.data.crews.errand import Crew
from longtake.data.crews.processes import Processes
from longtake.errors import DataError
from longtake.process import num_cores


@contextmanager
def crew_on(where: str | None, workers: int | None = None) -> Iterator[Crew]:
    """Who works, for as long as the block lasts.

    Args:
        where: None: processes of this machine. `ray`: the Ray cluster that RAY_ADDRESS names or
            that this machine belongs to, or else one of this machine alone. `ray://HOST:PORT`: the
            cluster whose client server listens there.
        workers: how many at a time; None: as many as there are cores.

    Raises:
        DataError: there is no such place, Ray is not installed, or it cannot be reached.
    """
    if where is None:
        yield Processes(num_cores() if workers is None else workers)
        return
    if where != "ray" and not where.startswith("ray://"):
        raise DataError(
            f"--on {where}: expected `ray` (the cluster of RAY_ADDRESS, or else this machine), or "
            "`ray://HOST:PORT`, where a cluster's client server listens (10001, as a rule)."
        )
    from longtake.data.crews.cluster import Cluster, connected  # only who wants Ray needs it

    with connected(where) as ray:
        yield Cluster(ray, workers)

"""A real Slurm, of its own, on two hosts of this machine."""

from pathlib import Path

import pytest

from longtake.drill.fault import NotPossibleHereError
from longtake.drill.fleet import cluster_of
from longtake.drill.place import SHORT, Place
from longtake.drill.private_slurm import private_slurm
from longtake.drill.slurm_job import SlurmJob


@pytest.mark.slow
def test_a_job_that_cannot_succeed_does_not_come_again(
    shapes_catalog: Path, tmp_path: Path
) -> None:
    """The preflight says what is wrong, before anything is trained; names may hold spaces."""
    place = Place(tmp_path / "a place")
    place.folder.mkdir()
    place.write_recipe(SHORT.replace("data/catalog.parquet", str(shapes_catalog)))
    options = ("--nodes", "2", "--nproc-per-node", "1", "--set", "data.catalog=not here.parquet")
    try:
        with (
            cluster_of(2, tmp_path) as cluster,
            private_slurm(cluster, tmp_path / "slurm") as slurm,
            SlurmJob(place.folder, slurm, options) as job,
        ):
            code, facts, said = job.wait(), job.facts(), job.said
    except NotPossibleHereError as error:
        pytest.skip(str(error))
    assert (code, facts["JobState"], facts["Restarts"]) == (2, "FAILED", "0")
    assert "not here.parquet" in said
    assert "The nodes are not fit for this run" in said
    assert not place.run.exists()

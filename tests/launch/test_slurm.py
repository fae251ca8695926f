"""A private Slurm on two hosts of this machine."""

from pathlib import Path

import pytest
from tests.cluster import private_slurm
from tests.cluster.hosts import hosts, why_not
from tests.cluster.private_slurm import SlurmJob, SlurmNotStartedError

from longtake.faults.sandbox import SHORT_RECIPE, TrainingSite


@pytest.mark.drill
@pytest.mark.slow
def test_a_job_that_cannot_succeed_is_not_requeued(shapes_catalog: Path, tmp_path: Path) -> None:
    """The preflight says what is wrong, before anything is trained; names may hold spaces."""
    if reason := why_not() or private_slurm.why_not():
        pytest.skip(reason)
    site = TrainingSite(tmp_path / "a place")
    site.folder.mkdir()
    site.write_recipe(SHORT_RECIPE.replace("data/catalog.parquet", str(shapes_catalog)))
    options = ("--nodes", "2", "--nproc-per-node", "1", "--set", "data.catalog=not here.parquet")
    try:
        with (
            hosts(2, tmp_path) as cluster,
            private_slurm.private_slurm(cluster, tmp_path / "slurm") as slurm,
            SlurmJob(site.folder, slurm, options) as job,
        ):
            code, facts, output = job.wait(), job.facts(), job.output
    except SlurmNotStartedError as error:
        pytest.skip(str(error))
    assert (code, facts["JobState"], facts["Restarts"]) == (2, "FAILED", "0")
    assert "not here.parquet" in output
    assert "The nodes are not fit for this run" in output
    assert not site.run.exists()

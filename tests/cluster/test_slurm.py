"""The batch file for Slurm, and a job of a private Slurm on two hosts of this machine."""

import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.cluster import private_slurm
from tests.cluster.hosts import hosts, why_not
from tests.cluster.private_slurm import SlurmJob, SlurmNotStartedError

from longtake import config
from longtake.cluster.options import LaunchOptions
from longtake.cluster.slurm import BatchJob, SlurmOptions
from longtake.errors import LongtakeError
from longtake.faults.sandbox import SHORT_RECIPE, TrainingSite


@pytest.fixture
def job(tmp_path: Path) -> BatchJob:
    """A job of 24 nodes of 8 GPUs, in a folder with a space and a quote in its name."""
    folder = tmp_path / "it's mine"
    recipe = config.parse(
        {
            "out": str(folder / "run"),
            "data": {"catalog": "c", "buckets": [{"num_frames": 1, "height": 32, "width": 32}]},
            "model": {"family": "tubelet"},
            "training": {"steps": 1, "global_batch_size": 1},
        },
        "test",
    )
    changes = ("data.catalog=of $HOME.parquet", "training.steps=9")
    launch = LaunchOptions(folder / "a recipe.toml", changes, recipe, nodes=(24, 24))
    slurm = SlurmOptions(gpus=8, time="1-12:00:00")
    return BatchJob(launch, slurm, folder, Path("/opt/my python/bin/python"))


def _with_slurm(job: BatchJob, **changes: Any) -> BatchJob:
    return replace(job, slurm=replace(job.slurm, **changes))


def _with_launch(job: BatchJob, **changes: Any) -> BatchJob:
    return replace(job, launch=replace(job.launch, **changes))


def test_it_is_a_shell_script(job: BatchJob) -> None:
    forms = [job, _with_slurm(job, runs_preflight=False), _with_slurm(job, requeues=False, cpus=16)]
    for form in forms:
        checked = subprocess.run(["bash", "-n"], input=form.script(), text=True, check=False)
        assert checked.returncode == 0
        assert "{{" not in form.script()
        assert max(map(len, form.script().splitlines())) < 200


def test_it_requests_what_the_options_say(job: BatchJob) -> None:
    requested = [line for line in job.script().splitlines() if line.startswith("#SBATCH")]
    for flag in (
        "--nodes=24",
        "--gpus-per-node=8",
        "--ntasks-per-node=1",
        "--time=1-12:00:00",
        "--signal=B:USR1@300",
        "--open-mode=append",
        "--requeue",
        "--exclusive",
    ):
        assert f"#SBATCH {flag}" in requested


def test_flags_of_the_user_replace_ours(job: BatchJob) -> None:
    flags = ('comment=it is "so"', "mem=100G", "partition=gpu", "--no-kill")
    text = _with_slurm(job, flags=flags, cpus=16).script()
    assert '#SBATCH --comment="it is \\"so\\""\n' in text
    assert "#SBATCH --mem=100G\n" in text
    assert "#SBATCH --mem=0" not in text
    assert "#SBATCH --no-kill\n" in text
    assert "#SBATCH --cpus-per-task=16\n" in text
    assert "#SBATCH --exclusive" not in text


@pytest.mark.parametrize("flag", ["", "=3", "Mem 3", "comment=two\nlines"])
def test_what_sbatch_could_not_read_is_refused(job: BatchJob, flag: str) -> None:
    """It would become another line of the script."""
    with pytest.raises(LongtakeError):
        _with_slurm(job, flags=(flag,)).script()


def test_the_shell_reads_names_and_values_as_they_are(job: BatchJob) -> None:
    lines = [
        line for line in job.script().splitlines() if line.startswith(("longtake=", "recipe="))
    ]
    show = "\n".join([*lines, 'printf "%s\\n" "${longtake[@]}" "${recipe[@]}"'])
    said = subprocess.run(["bash", "-c", show], capture_output=True, text=True, check=True).stdout
    changes = [part for change in job.launch.changes for part in ("--set", change)]
    wanted = [str(job.python), "-P", "-m", "longtake", str(job.launch.path), *changes]
    assert said.splitlines() == wanted


def test_it_is_written_and_submitted(
    job: BatchJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Slurm it is left there, for submission elsewhere."""
    job.write()
    assert job.path.read_text() == job.script()
    assert shlex.quote(str(job.path)) in job.script()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LongtakeError, match="no sbatch"):
        job.submit()


@pytest.mark.parametrize("part", ["recipe", "run", "python", "parent"])
def test_a_name_with_a_line_break_is_refused(job: BatchJob, part: str) -> None:
    """It would become a line of the script, which the job runs."""
    name = Path("/tmp/a\ntouch owned\n.toml")  # noqa: S108
    changed = {
        "recipe": _with_launch(job, path=name),
        "run": _with_launch(job, recipe=job.launch.recipe.model_copy(update={"out": name})),
        "python": replace(job, python=name),
        "parent": _with_launch(job, begin_from=str(name)),
    }
    with pytest.raises(LongtakeError, match=r"control characters\. Rename them"):
        changed[part].script()


@pytest.mark.parametrize("letter", ["\n", "\x1b", "\x9b"])
def test_a_flag_with_a_control_character_is_refused(job: BatchJob, letter: str) -> None:
    """It would become a line of the script, or reach the terminal by --dry-run."""
    changed = replace(job, slurm=SlurmOptions(flags=(f"partition={letter}]0;t",)))
    with pytest.raises(LongtakeError, match="--partition cannot hold a line break or another"):
        changed.script()


def test_a_number_of_processes_is_one_word_of_the_script(job: BatchJob) -> None:
    """The verb refuses anything but a number or auto; the script quotes it all the same."""
    text = _with_launch(job, processes="auto; touch x").script()
    assert "--nproc-per-node 'auto; touch x' " in text


def test_a_job_of_one_node_opens_no_port(job: BatchJob) -> None:
    """Several nodes need one."""
    assert "--rdzv-endpoint" in job.script()
    assert "--rdzv-endpoint" not in _with_launch(job, nodes=(1, 1)).script()


def test_options_of_the_verb_are_passed_on(job: BatchJob) -> None:
    changed = _with_launch(job, begin_from="runs/it's@8", weights_only=True, trust=True)
    options = "--from 'runs/it'\"'\"'s@8' --weights-only --trust "
    assert f"--max-restarts 3 {options}" in changed.script()
    assert "--from" not in job.script()
    assert "--trust" not in job.script()


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

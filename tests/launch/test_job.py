"""The file that is handed to Slurm is one that people can read, edit and trust."""

import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from longtake.errors import LongtakeError
from longtake.launch.job import Job
from longtake.launch.order import refuse_other_count
from longtake.launch.submit import submit, write


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A job of 24 nodes of 8 cards, in a folder with a space and a quote in its name."""
    folder = tmp_path / "it's mine"
    return Job(
        recipe=folder / "a recipe.toml",
        changes=("data.catalog=of $HOME.parquet", "training.steps=9"),
        run=folder / "run",
        folder=folder,
        python=Path("/opt/my python/bin/python"),
        nodes=24,
        gpus=8,
        time="1-12:00:00",
    )


def test_it_is_a_shell_script(job: Job) -> None:
    """In every form that it can have."""
    forms = [job, replace(job, looks_first=False), replace(job, requeues=False, cpus=16)]
    for form in forms:
        checked = subprocess.run(["bash", "-n"], input=form.script(), text=True, check=False)
        assert checked.returncode == 0
        assert "{{" not in form.script()
        assert max(map(len, form.script().splitlines())) < 200


def test_it_asks_slurm_for_what_was_asked_for(job: Job) -> None:
    """One launcher a node; the signal goes to the shell, which knows what to do with it."""
    asked = [line for line in job.script().splitlines() if line.startswith("#SBATCH")]
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
        assert f"#SBATCH {flag}" in asked


def test_what_the_user_says_to_sbatch_takes_the_place_of_ours(job: Job) -> None:
    """Each flag is there once; quotes are written so that sbatch reads them."""
    flags = ('comment=it is "so"', "mem=100G", "partition=gpu", "--no-kill")
    text = replace(job, flags=flags, cpus=16).script()
    assert '#SBATCH --comment="it is \\"so\\""\n' in text
    assert "#SBATCH --mem=100G\n" in text
    assert "#SBATCH --mem=0" not in text
    assert "#SBATCH --no-kill\n" in text
    assert "#SBATCH --cpus-per-task=16\n" in text
    assert "#SBATCH --exclusive" not in text


@pytest.mark.parametrize("flag", ["", "=3", "Mem 3", "comment=two\nlines"])
def test_what_sbatch_could_not_read_is_refused(job: Job, flag: str) -> None:
    """Rather than end up as another line of the script."""
    with pytest.raises(LongtakeError):
        replace(job, flags=(flag,)).script()


def test_the_shell_reads_names_and_values_as_they_are(job: Job) -> None:
    """Spaces, quotes and dollars in them are no shell's business."""
    lines = [
        line for line in job.script().splitlines() if line.startswith(("longtake=", "recipe="))
    ]
    show = "\n".join([*lines, 'printf "%s\\n" "${longtake[@]}" "${recipe[@]}"'])
    said = subprocess.run(["bash", "-c", show], capture_output=True, text=True, check=True).stdout
    changes = [part for change in job.changes for part in ("--set", change)]
    wanted = [str(job.python), "-P", "-m", "longtake", str(job.recipe), *changes]
    assert said.splitlines() == wanted


def test_it_is_written_where_it_says_and_sent_from_there(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no Slurm, it is left to be submitted elsewhere, and that is said."""
    write(job)
    assert job.path.read_text() == job.script()
    assert shlex.quote(str(job.path)) in job.script()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LongtakeError, match="no sbatch"):
        submit(job)


@pytest.mark.parametrize("part", ["recipe", "run", "python"])
def test_a_name_with_a_line_break_is_refused(job: Job, part: str) -> None:
    """It would become a line of the script, which the job runs."""
    with pytest.raises(LongtakeError, match=r"control characters\. Rename them"):
        replace(job, **{part: Path("/tmp/a\ntouch owned\n.toml")}).script()  # type: ignore[arg-type]  # noqa: S108


def test_a_count_of_processes_is_one_word_of_the_script(job: Job) -> None:
    """The verb refuses anything but a number or auto; the script quotes it all the same."""
    assert "--nproc-per-node 'auto; touch x' " in replace(job, processes="auto; touch x").script()
    for text in ("auto; touch x", "banana", "0", "-1", "٣", "9" * 5000):
        with pytest.raises(LongtakeError, match="expected a number of processes, or auto"):
            refuse_other_count(text)


def test_a_job_of_one_node_meets_on_no_port(job: Job) -> None:
    """Where there are several they need one; a job that is trusted passes that on."""
    assert "--rdzv-endpoint" in job.script()
    assert "--rdzv-endpoint" not in replace(job, nodes=1).script()
    assert "--trust" in replace(job, trust=True).script()
    assert "--trust" not in job.script()

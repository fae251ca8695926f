"""The batch file for Slurm, and how it goes on after each end of its steps."""

import os
import shlex
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.build import bare_recipe, change_options, wait_until

from longtake.cluster.options import LaunchOptions
from longtake.cluster.slurm import BatchJob, SlurmOptions
from longtake.errors import LongtakeError


@pytest.fixture
def job(tmp_path: Path) -> BatchJob:
    """A job of 24 nodes of 8 GPUs, in a folder with a space and a quote in its name."""
    folder = tmp_path / "it's mine"
    recipe = bare_recipe(folder / "run")
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
    with pytest.raises(LongtakeError):
        _with_slurm(job, flags=(flag,)).script()


def test_the_shell_reads_names_and_values_as_they_are(job: BatchJob) -> None:
    lines = [
        line for line in job.script().splitlines() if line.startswith(("longtake=", "recipe="))
    ]
    show = "\n".join([*lines, 'printf "%s\\n" "${longtake[@]}" "${recipe[@]}"'])
    said = subprocess.run(["bash", "-c", show], capture_output=True, text=True, check=True).stdout
    changes = change_options(*job.launch.changes)
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
    assert "--rdzv-endpoint" in job.script()
    assert "--rdzv-endpoint" not in _with_launch(job, nodes=(1, 1)).script()


def test_options_of_the_verb_are_passed_on(job: BatchJob) -> None:
    changed = _with_launch(job, begin_from="runs/it's@8", weights_only=True, trust=True)
    options = "--from 'runs/it'\"'\"'s@8' --weights-only --trust "
    assert f"--max-restarts 3 {options}" in changed.script()
    assert "--from" not in job.script()
    assert "--trust" not in job.script()


_PROGRAMS = {
    # The step: the preflight or a launcher. It notes the command that it is given.
    "srun": """echo "${@: -1} $*" | grep --only-matching 'preflight\\|launch' >> called
code=$(sed -n "$(wc --lines < called)p" codes)
[ "$code" = wait ] || exit "$code"
trap 'exit 75' USR1
touch waiting
while true; do sleep 0.01; done""",
    "scontrol": """[ "$1" = show ] && echo node0 || echo "$*" >> called""",
}


def _start(job: BatchJob, folder: Path, *codes: object) -> "subprocess.Popen[str]":
    """Start the batch file with programs in the place of Slurm's; `codes` are those of steps."""
    for name, text in _PROGRAMS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    (folder / "codes").write_text("".join(f"{code}\n" for code in codes))
    (folder / "called").write_text("")
    (job.run_path / "slurm").mkdir(parents=True, exist_ok=True)
    script = job.script().replace("sleep 60", "true")
    names = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[0-1]"}
    env = {**os.environ, **names, "PATH": f"{folder}:{os.environ['PATH']}"}
    command = ["bash", "-c", script]
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True)


def _called(folder: Path) -> list[str]:
    return (folder / "called").read_text().splitlines()


@pytest.mark.parametrize(
    ("codes", "called", "code", "told"),
    [
        ((1,), ["preflight"], 2, "The nodes are not fit for this run (exit code 1"),
        ((0, 0), ["preflight", "launch"], 0, "exit code 0"),
        ((0, 2), ["preflight", "launch"], 2, "A restart would end the same way"),
        ((0, 130), ["preflight", "launch"], 130, "It was stopped. Resume it by: sbatch"),
        ((0, 143), ["preflight", "launch"], 143, "It was stopped. Resume it by: sbatch"),
        ((0, 75), ["preflight", "launch", "requeue 7"], 75, "It resumes as soon as"),
        ((0, 137), ["preflight", "launch", "requeue 7"], 137, "It resumes as soon as"),
    ],
)
def test_a_job_is_requeued_if_a_restart_can_help(
    job: BatchJob, tmp_path: Path, codes: tuple[int, ...], called: list[str], code: int, told: str
) -> None:
    with _start(job, tmp_path, *codes) as process:
        output, _ = process.communicate(timeout=120)
    assert (_called(tmp_path), process.returncode) == (called, code)
    assert told in output


def test_starts_in_a_row_without_a_checkpoint_end_a_job(job: BatchJob, tmp_path: Path) -> None:
    requeued = []
    for saves in (False, False, True, False, False, False, False):
        with _start(job, tmp_path, 0, "wait") as process:
            wait_until(lambda: (tmp_path / "waiting").exists())
            (tmp_path / "waiting").unlink()
            if saves:
                (job.run_path / "checkpoints" / "step_8").mkdir(parents=True)
            process.send_signal(signal.SIGUSR1)
            process.communicate(timeout=120)
        requeued.append("requeue 7" in _called(tmp_path))
    assert requeued == [True] * 6 + [False]


@pytest.mark.parametrize(
    ("codes", "called"),
    [(("wait",), ["preflight"]), ((0, "wait"), ["preflight", "launch"])],
)
def test_a_signal_before_the_limit_is_passed_on_and_the_job_requeued(
    job: BatchJob, tmp_path: Path, codes: tuple[object, ...], called: list[str]
) -> None:
    """Late in a preflight, nothing is launched any more."""
    with _start(job, tmp_path, *codes) as process:
        wait_until(lambda: (tmp_path / "waiting").exists())
        process.send_signal(signal.SIGUSR1)
        process.communicate(timeout=120)
    assert (_called(tmp_path), process.returncode) == ([*called, "requeue 7"], 75)

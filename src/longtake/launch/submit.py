"""Writes a job's file, and hands it to Slurm."""

import shutil
import subprocess

from longtake.errors import LongtakeError, RunError
from longtake.fsio import make_writable, write_text
from longtake.launch.job import Job


def write(job: Job) -> None:
    """Write the file that is submitted.

    Raises:
        RunError: the run directory cannot be written.
    """
    text = job.script()
    try:
        make_writable(job.path.parent)
        write_text(job.path, text)
    except OSError as error:
        raise RunError(f"{job.path} cannot be written: {error.strerror or error}.") from error


def submit(job: Job) -> str:
    """Submit what was written; returns the job's number.

    Raises:
        LongtakeError: there is no Slurm here, or it does not take the job.
    """
    program = shutil.which("sbatch")
    if program is None:
        raise LongtakeError(
            f"There is no sbatch here, so {job.path} was written and not submitted. Submit it "
            "where Slurm is, or look at it with --dry-run."
        )
    command = [program, "--parsable", str(job.path)]
    said = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - ours
    if said.returncode:
        raise LongtakeError(f"Slurm does not take {job.path}: {said.stderr.strip()}")
    return said.stdout.strip().partition(";")[0]

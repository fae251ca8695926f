"""A launch as a Slurm job: a batch file that users can read and edit, and its submission."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from jinja2 import Environment, StrictUndefined

from longtake import errors, fsio
from longtake.cluster import options, topology
from longtake.formatting import printable

_TEMPLATE = Path(__file__).with_name("job.sbatch")
_COMMENTS: Final = {
    "ntasks-per-node": "One launcher per node; it starts the ranks",
    "signal": "To this shell, some time before the limit, so that all ranks can save",
    "open-mode": "Each start appends to the same log",
    "exclusive": "Whole nodes: decoding clips takes cores too",
    "mem": "With all of their memory",
}
_MAX_REQUEUES = 3
"""Number of consecutive starts of a Slurm job that may leave no new checkpoint."""


@dataclass(frozen=True)
class SlurmOptions:
    """Resources that a Slurm job requests, and options for preflight and requeueing."""

    gpus: int | None = None  # GPUs per node; None: no GPUs are requested
    cpus: int | None = None  # cores per node; None: whole nodes with all of their memory
    time: str | None = None  # time limit in Slurm's format; None: the partition's
    flags: tuple[str, ...] = ()  # flags of sbatch, `name=value` or `name`; they replace ours
    signal_seconds: int = 300  # time between the signal and the limit, for saving
    runs_preflight: bool = True
    requeues: bool = True  # after the time limit and after failures


@dataclass(frozen=True)
class BatchJob:
    """A launch as a Slurm job; `folder` is its working directory, `python` its interpreter."""

    launch: options.LaunchOptions
    slurm: SlurmOptions = SlurmOptions()
    folder: Path = field(default_factory=Path.cwd)
    python: Path = Path(sys.executable)

    @property
    def run_path(self) -> Path:
        return self.launch.recipe.out.absolute()

    @property
    def path(self) -> Path:
        return self.run_path / "slurm" / "job.sbatch"

    @property
    def log(self) -> Path:
        return self.run_path / "slurm" / "job_%j.log"

    def script(self) -> str:
        """Render the text of the Slurm batch file.

        Raises:
            LongtakeError: a flag or name has control characters.
        """
        recipe = self.launch.path.absolute()
        # A line break in a comment or a directive would end it, and begin a command.
        names = f"{recipe}{self.run_path}{self.python}{self.launch.begin_from}"
        if printable(names) != names:
            raise errors.LongtakeError(
                f"A job cannot be written for {str(recipe)!r}, the run {str(self.run_path)!r} and "
                f"--from {self.launch.begin_from!r}: their names have control characters. Rename "
                "them."
            )
        template = Environment(  # noqa: S701 - not HTML: values are quoted for a shell
            trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
        ).from_string(_TEMPLATE.read_text(encoding="utf-8"))
        return template.render(
            recipe=shlex.quote(str(recipe)),
            changes=[shlex.quote(change) for change in self.launch.changes],
            run=shlex.quote(str(self.run_path)),
            python=shlex.quote(str(self.python)),
            path=shlex.quote(str(self.path)),
            directives=[
                line for name, value in self._flags().items() for line in _directive(name, value)
            ],
            nodes=self.launch.nodes[1],
            processes=shlex.quote(self.launch.processes),
            cores="" if self.slurm.cpus is None else f" --cpus-per-task={self.slurm.cpus}",
            max_restarts=self.launch.max_restarts,
            max_requeues=_MAX_REQUEUES,
            first_port=topology.FIRST_PORT,
            num_ports=topology.NUM_PORTS,
            runs_preflight=self.slurm.runs_preflight,
            requeues=self.slurm.requeues,
            options="".join(f" {shlex.quote(part)}" for part in self.launch.begin_arguments),
        )

    def write(self) -> None:
        """Write the Slurm batch file into the run directory.

        Raises:
            RunError: the run directory cannot be written.
        """
        text = self.script()
        try:
            fsio.make_writable(self.path.parent)
            fsio.write_text(self.path, text)
        except OSError as error:
            raise errors.RunError(
                f"{self.path} cannot be written: {error.strerror or error}."
            ) from error

    def submit(self) -> str:
        """Submit the written batch file to Slurm, and return the job's number.

        Raises:
            LongtakeError: Slurm is not installed here, or it refuses the job.
        """
        program = shutil.which("sbatch")
        if program is None:
            raise errors.LongtakeError(
                f"There is no sbatch here, so {self.path} was written and not submitted. Submit it "
                "where Slurm is, or print it with --dry-run."
            )
        command = [program, "--parsable", str(self.path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - ours
        if done.returncode:
            raise errors.LongtakeError(f"Slurm refuses {self.path}: {done.stderr.strip()}")
        # --parsable prints `number;cluster` on a federation of clusters.
        return done.stdout.strip().partition(";")[0]

    def _flags(self) -> dict[str, str]:
        """Return the job's flags for sbatch by name; a flag of the user replaces longtake's."""
        slurm = self.slurm
        flags = {
            "job-name": self.run_path.name,
            "chdir": str(self.folder),
            "output": str(self.log),
            "open-mode": "append",
            "nodes": str(self.launch.nodes[1]),
            "ntasks-per-node": "1",
            "signal": f"B:USR1@{slurm.signal_seconds}",
            "requeue" if slurm.requeues else "no-requeue": "",
        }
        flags |= {"time": slurm.time} if slurm.time else {}
        flags |= {} if slurm.gpus is None else {"gpus-per-node": str(slurm.gpus)}
        # `mem=0` requests all of a node's memory; `exclusive` alone may leave the default limit.
        whole = {"exclusive": "", "mem": "0"}
        flags |= whole if slurm.cpus is None else {"cpus-per-task": str(slurm.cpus)}
        for flag in slurm.flags:
            name, _, value = flag.lstrip("-").partition("=")
            if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
                raise errors.LongtakeError(
                    f"--sbatch {flag}: expected a flag of sbatch, such as reservation=mine."
                )
            flags[name] = value
        return flags


def _directive(name: str, value: str) -> Iterator[str]:
    if printable(value) != value:
        raise errors.LongtakeError(
            f"sbatch's --{name} cannot hold a line break or another control character: {value!r}."
        )
    if name in _COMMENTS:
        yield f"# {_COMMENTS[name]}:"
    if not re.fullmatch(r"[\w@%+=:,./-]*", value):
        # sbatch takes a value between double quotes, with a backslash before each inner one.
        value = '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    yield f"#SBATCH --{name}={value}" if value else f"#SBATCH --{name}"

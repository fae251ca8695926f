"""A job for Slurm: what to ask for, and the file that is submitted, which people read and edit."""

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from jinja2 import Environment, StrictUndefined

from longtake.errors import LongtakeError

_TEMPLATE = Path(__file__).with_name("job.sbatch")
_FIRST_PORT, _NUM_PORTS = 20_000, 10_000
_WHY: Final = {
    "ntasks-per-node": "One launcher a node; it starts the ranks",
    "signal": "To this shell, some time before the limit, so that all can be saved",
    "open-mode": "Each start goes on in the same log",
    "exclusive": "Whole nodes: decoding clips takes cores, too",
    "mem": "With all of their memory",
}


@dataclass(frozen=True)
class Job:
    """What a job asks for, and runs.

    Attributes:
        recipe: the recipe's file, absolute.
        changes: to it, `key=value`.
        run: the run directory, absolute.
        folder: where the job works, absolute.
        python: the interpreter, absolute.
        nodes: how many.
        processes: ranks a node, or `auto`.
        gpus: cards a node; None: none are asked for.
        cpus: cores a node; None: the whole node, with all of its memory.
        time: the limit, as Slurm writes it; None: the partition's.
        flags: further ones of sbatch, `name=value` or `name`.
        signal_seconds: before the limit, in which the run saves.
        max_restarts: starts after a crash within a job, without a new checkpoint.
        max_requeues: starts of the job in a row that may leave no new checkpoint.
        looks_first: whether longtake preflight runs before it.
        requeues: whether it comes again by itself.
        trust: whether code that a kept recipe names may be run, whoever began its run.
    """

    recipe: Path
    changes: tuple[str, ...]
    run: Path
    folder: Path
    python: Path
    nodes: int
    processes: str = "auto"
    gpus: int | None = None
    cpus: int | None = None
    time: str | None = None
    flags: tuple[str, ...] = ()
    signal_seconds: int = 300
    max_restarts: int = 3
    max_requeues: int = 3
    looks_first: bool = True
    requeues: bool = True
    trust: bool = False

    @property
    def path(self) -> Path:
        return self.run / "slurm" / "job.sbatch"

    @property
    def log(self) -> Path:
        """What it says; `%j` is the number of the job."""
        return self.run / "slurm" / "job_%j.log"

    def script(self) -> str:
        """The file's text.

        Raises:
            LongtakeError: a flag is none, or a value has a line break.
        """
        if any(ord(letter) < 32 for letter in f"{self.recipe}{self.run}{self.python}"):
            raise LongtakeError(
                f"A job cannot be written for {str(self.recipe)!r} and the run {str(self.run)!r}: "
                "their names have control characters. Rename them."
            )
        template = Environment(  # noqa: S701 - no page: values are quoted for a shell
            trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
        ).from_string(_TEMPLATE.read_text(encoding="utf-8"))
        text: str = template.render(
            recipe=shlex.quote(str(self.recipe)),
            changes=[shlex.quote(change) for change in self.changes],
            run=shlex.quote(str(self.run)),
            python=shlex.quote(str(self.python)),
            path=shlex.quote(str(self.path)),
            directives=[line for name, value in self._asked() for line in _directive(name, value)],
            nodes=self.nodes,
            processes=shlex.quote(self.processes),
            cores="" if self.cpus is None else f" --cpus-per-task={self.cpus}",
            max_restarts=self.max_restarts,
            max_requeues=self.max_requeues,
            first_port=_FIRST_PORT,
            num_ports=_NUM_PORTS,
            looks_first=self.looks_first,
            requeues=self.requeues,
            trust=self.trust,
        )
        return text

    def _asked(self) -> Iterable[tuple[str, str]]:
        """Flags of sbatch; one that the user gives takes the place of ours."""
        asked = {
            "job-name": self.run.name,
            "chdir": str(self.folder),
            "output": str(self.log),
            "open-mode": "append",
            "nodes": str(self.nodes),
            "ntasks-per-node": "1",
            "signal": f"B:USR1@{self.signal_seconds}",
            "requeue" if self.requeues else "no-requeue": "",
        }
        asked |= {"time": self.time} if self.time else {}
        asked |= {} if self.gpus is None else {"gpus-per-node": str(self.gpus)}
        whole = {"exclusive": "", "mem": "0"}
        asked |= whole if self.cpus is None else {"cpus-per-task": str(self.cpus)}
        return {**asked, **dict(map(_parse_flag, self.flags))}.items()


def _parse_flag(flag: str) -> tuple[str, str]:
    name, _, value = flag.lstrip("-").partition("=")
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise LongtakeError(
            f"--sbatch {flag}: expected a flag of sbatch, such as reservation=mine."
        )
    return name, value


def _directive(name: str, value: str) -> Iterator[str]:
    if "\n" in value or "\r" in value:
        raise LongtakeError(f"sbatch's --{name} cannot hold a line break: {value!r}.")
    if name in _WHY:
        yield f"# {_WHY[name]}:"
    yield f"#SBATCH --{name}{f'={_quoted(value)}' if value else ''}"


def _quoted(value: str) -> str:
    """As sbatch reads it: between double quotes, a backslash before each of them."""
    if re.fullmatch(r"[\w@%+=:,./-]+", value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'

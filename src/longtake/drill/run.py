"""Runs drills, one after another, and says how they went."""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from longtake.drill.fault import Fault, NotPossibleHereError
from longtake.drill.ground import Ground
from longtake.drill.registry import find_faults
from longtake.drill.result import Result
from longtake.errors import LongtakeError, RunError
from longtake.formatting import escape, plural
from longtake.fsio import make_writable


def run_drills(names: Sequence[str], console: Console, keep: Path | None = None) -> list[Result]:
    """Inject faults into small runs of this installation and judge what comes of each.

    Args:
        names: of faults; none: all.
        console: where a person looks.
        keep: an empty folder, or one to be made, in which everything is left to be looked at; by
            default a temporary one is used, and removed.

    Returns:
        A result for each fault, also for one that could not be drilled to its end.

    Raises:
        LongtakeError: there is no such fault, the folder cannot be used, or not even a run that
            nothing befalls can be trained here.
    """
    faults = find_faults(names)
    results = []
    with _folder(keep) as folder:
        console.print(f"{plural(len(faults), 'drill')} in {folder}", markup=False, highlight=False)
        ground = Ground(folder, console)
        ground.prepare()
        for number, fault in enumerate(faults, 1):
            label = f"[bold]{number}/{len(faults)} {fault.name}[/bold]: {escape(fault.does)}"
            console.print(label, highlight=False)
            results.append(drill(fault, ground))
            console.print(_outcome(results[-1]), highlight=False)
    return results


def drill(fault: Fault, ground: Ground) -> Result:
    """Run one drill; one that could not be carried out to its end has not passed.

    One that needs what this machine does not have is skipped.
    """
    began = time.monotonic()
    try:
        result = fault.drill(ground)
    except NotPossibleHereError as error:
        told = f"Not possible here: {error}."
        result = Result(fault.name, False, None, None, None, None, told, skipped=str(error))
    except LongtakeError as error:
        result = Result(fault.name, False, None, None, None, None, f"Failed: {error}")
    return replace(result, drill_seconds=round(time.monotonic() - began, 3))


def _outcome(result: Result) -> str:
    if result.skipped is not None:
        return f"  [yellow]skipped[/yellow]. {escape(result.message)}"
    word = "[green]passed[/green]" if result.passed else "[red]failed[/red]"
    return f"  {word} in {result.drill_seconds:.1f} s. {escape(result.message)}"


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    try:
        if keep is None:
            with tempfile.TemporaryDirectory(
                prefix="longtake-drill-", ignore_cleanup_errors=True
            ) as temporary:
                yield Path(temporary)
        else:
            make_writable(keep)
            _refuse_full(keep)
            yield keep
    except OSError as error:
        raise RunError(
            f"The drills could not write what they need: {error}. Make room, or name a folder that "
            "can be written with --keep FOLDER."
        ) from error


def _refuse_full(folder: Path) -> None:
    if any(folder.iterdir()):
        raise RunError(
            f"{folder} is not empty. Name a folder that is, or one that is not there yet."
        )

"""Registry of the faults of `longtake drill`: runs drills and prints their results; torch-free."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Literal

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from longtake import errors, fsio
from longtake.formatting import escape, escape_lines, nearest, plural

if TYPE_CHECKING:
    from longtake.faults.expect import Evidence
    from longtake.faults.sandbox import Sandbox

Drill = Callable[..., None]
ComparedRun = Literal[
    "undisturbed", "undisturbed_on_two_ranks", "undisturbed_on_three_ranks", "undisturbed_long"
]
_ALL = "all"
_MODULES = ("data", "stores", "numerics", "ranks", "hangs", "health", "nodes", "evaluation")
_NAME_WIDTH = 18
_NUMBERS = (
    "found\nin s",
    "after\nsteps",
    "steps\nlost",
    "clips\nskipped",
    "clips\ntwice",
    "clips\nnever",
    "all\nsame",
)


class NotPossibleHereError(errors.LongtakeError):
    """Error of a drill that needs something (a program, a right) that this machine lacks."""


@dataclass(frozen=True)
class Fault:
    """A fault that `longtake drill` can inject into a small run."""

    name: str
    does: str  # the fault, in one line
    must: str  # the required outcome, in one line
    run: Callable[["Sandbox"], "Evidence"]  # trains, injects the fault, and checks the outcome
    module: str  # module of the drill
    family: str  # common name of several faults; empty: none


@dataclass(frozen=True)
class DrillResult:
    """The outcome of one drill (a run with a fault); its fields are keys of `drill --json`."""

    fault: str
    passed: bool
    # Time from the fault to its report; None: it need not be reported, or was not.
    detected_seconds: float | None = None
    # Counts over all epochs; None: the drill ended before they could be counted.
    samples_repeated: int | None = None
    samples_missing: int | None = None
    # True: loss and gradient norm of every step, and the final weights, EMA and optimizer, are
    # bitwise those of the undisturbed run; None: after this fault they cannot be.
    equal_to_undisturbed: bool | None = None
    message: str = ""
    samples_unplanned: int | None = None  # trained in an epoch that they do not belong to
    samples_rejected: int | None = None  # left out because they could not be decoded
    detected_steps: int | None = None  # steps from the fault to its report
    steps_lost: int | None = None  # steps trained and then discarded by a resume or a rollback
    samples_skipped: int | None = None  # samples left out by the guard's skips and rollbacks
    drill_seconds: float = 0.0
    skipped: str | None = None  # reason why it cannot be run on this machine

    @property
    def failed(self) -> bool:
        return not self.passed and self.skipped is None


_faults: dict[str, Fault] = {}


def fault(
    *,
    does: str,
    must: str,
    name: str = "",
    family: str = "",
    begins: Literal["new", "killed", "undisturbed"] = "new",
    recipe: str | None = None,
    compared_with: ComparedRun = "undisturbed",
    **arguments: object,
) -> Callable[[Drill], Drill]:
    """Return a decorator that registers a drill: a function that trains with a fault, and checks.

    A drill gets a training site of its own, an `Evidence` to fill, and `arguments`.

    Args:
        does: the fault, in one line.
        must: the required outcome, in one line.
        name: name of the fault, if a drill has several decorators. Default: the function's name
            with hyphens.
        family: common name of several faults.
        begins: state of the run at the site: not begun, killed in mid-epoch, or trained to its end.
        recipe: recipe of a new run; None: the short one.
        compared_with: the sandbox's run without a fault with which the run is compared.
        arguments: further arguments of the drill.
    """

    def register(drill: Drill) -> Drill:
        known_as = name or drill.__name__.replace("_", "-")

        def run(sandbox: "Sandbox") -> "Evidence":
            # Imported when a drill runs: the list of faults is shown without numpy and PyAV.
            from longtake.faults.expect import Evidence
            from longtake.faults.sandbox import SHORT_RECIPE

            if begins == "new":
                site = sandbox.fresh(known_as, recipe or SHORT_RECIPE)
            else:
                site = sandbox.copied(known_as, begins)
            evidence = Evidence(site, partial(getattr, sandbox, compared_with))
            drill(site, evidence, **arguments)
            return evidence

        _faults[known_as] = Fault(known_as, does, must, run, drill.__module__, family)
        return drill

    return register


def all_faults() -> dict[str, Fault]:
    """Return all faults by name, in the order in which `longtake drill --all` runs them."""
    # A module that was imported before all others has registered its faults first.
    modules = [import_module(f"longtake.faults.{name}").__name__ for name in _MODULES]
    found = (each for each in _faults.values() if each.module in modules)
    in_order = sorted(found, key=lambda each: modules.index(each.module))
    return {each.name: each for each in in_order}


def find_faults(names: Sequence[str]) -> list[Fault]:
    """Find faults by their names, each once; the name `all` or no names select all.

    Args:
        names: names of faults or of families of faults.

    Raises:
        LongtakeError: a name is unknown; the message suggests the nearest.
    """
    faults = all_faults()
    if not names:
        return list(faults.values())
    wanted: dict[str, Fault] = {}
    for name in names:
        found = [each for each in faults.values() if name in (_ALL, each.name, each.family)]
        if not found:
            families = dict.fromkeys(each.family for each in faults.values() if each.family)
            near = nearest(name, (*faults, *families))
            hint = f"did you mean {near}?" if near else "no name is near."
            raise errors.LongtakeError(
                f"There is no fault {name!r} to drill; {hint} There are: {', '.join(faults)}."
            )
        wanted |= {each.name: each for each in found}
    return list(faults.values()) if _ALL in names else list(wanted.values())


def run_drills(
    names: Sequence[str], console: Console, keep: Path | None = None
) -> list[DrillResult]:
    """Inject faults into small runs of this installation, and check the outcomes.

    Args:
        names: names of faults; empty: all.
        console: console to print progress to.
        keep: an empty or new folder in which all runs are kept; None: a temporary folder.

    Returns:
        A result for each fault, even if its drill could not be finished.

    Raises:
        LongtakeError: a name is unknown, the folder cannot be used, or the undisturbed run cannot
            be trained.
    """
    from longtake.faults.sandbox import Sandbox

    faults, results = find_faults(names), []
    with _folder(keep) as folder:
        console.print(f"{plural(len(faults), 'drill')} in {folder}", markup=False, highlight=False)
        sandbox = Sandbox(folder, console)
        sandbox.prepare()
        for number, each in enumerate(faults, 1):
            label = f"[bold]{number}/{len(faults)} {each.name}[/bold]: {escape(each.does)}"
            console.print(label, highlight=False)
            result = run_drill(each, sandbox)
            console.print(
                f"  {_outcome(result).markup}"
                f"{'' if result.skipped else f' in {result.drill_seconds:.1f} s'}. "
                f"{escape_lines(result.message)}",
                highlight=False,
            )
            results.append(result)
    return results


def run_drill(fault: Fault, sandbox: "Sandbox") -> DrillResult:
    """Run the drill of one fault, and return its result: failed if it did not finish.

    A drill is skipped if this machine lacks something that it needs.
    """
    began = time.monotonic()
    try:
        result = DrillResult(fault.name, **fault.run(sandbox).outcome())
    except NotPossibleHereError as error:
        reason = f"Not possible here: {error}."
        result = DrillResult(fault.name, passed=False, message=reason, skipped=str(error))
    # Any other exception is an error of the drill itself, and ends the command.
    except errors.LongtakeError as error:
        result = DrillResult(fault.name, passed=False, message=f"Failed: {error}")
    return replace(result, drill_seconds=round(time.monotonic() - began, 3))


def show_faults(faults: Sequence[Fault], console: Console) -> None:
    """Print a table of faults with their required outcomes."""
    name = Column("fault", no_wrap=True)
    table = Table(name, "what it does", "what must happen", show_lines=True)
    for each in faults:
        table.add_row(Text(each.name, "bold"), each.does, each.must)
    console.print(table)


def show_results(results: Sequence[DrillResult], console: Console) -> None:
    """Print a table of drills' results in 80 columns, and the number of drills that passed.

    Columns: `found in` and `after`: time and steps until the fault was reported; `lost`: discarded
    steps; `skipped`, `twice`, `never`: clips left out on purpose, repeated, missing; `all same`:
    bitwise equal to the undisturbed run.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("fault", no_wrap=True)
    table.add_column("")
    for name in _NUMBERS:
        table.add_column(name, justify="right")
    for each in results:
        seconds = each.detected_seconds
        table.add_row(
            "\n".join(wrap(each.fault, _NAME_WIDTH)),
            _outcome(each),
            "-" if seconds is None else f"{seconds:.1f}",
            _count(each.detected_steps, "-"),
            _count(each.steps_lost),
            _count(each.samples_skipped),
            _count(each.samples_repeated),
            _count(each.samples_missing),
            {True: "yes", False: "no", None: "-"}[each.equal_to_undisturbed],
        )
    console.print(table)
    console.print("?: not measured. -: does not apply.", highlight=False)
    num_passed = sum(each.passed for each in results)
    console.print(f"{num_passed} of {plural(len(results), 'drill')} passed.", highlight=False)
    reasons = [each.skipped for each in results if each.skipped is not None]
    if reasons:
        why = "; ".join(dict.fromkeys(reasons))
        console.print(f"{len(reasons)} not possible here: {why}.", highlight=False, markup=False)


def _outcome(result: DrillResult) -> Text:
    if result.skipped is not None:
        return Text("skipped", "yellow")
    return Text("passed", "green") if result.passed else Text("failed", "red")


def _count(value: int | None, none: str = "?") -> str:
    return none if value is None else str(value)


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    try:
        if keep is None:
            # A process that a drill has killed may still be writing while its folder is removed.
            with tempfile.TemporaryDirectory(
                prefix="longtake-drill-", ignore_cleanup_errors=True
            ) as temporary:
                yield Path(temporary)
            return
        fsio.make_writable(keep)
        if any(keep.iterdir()):
            raise errors.RunError(
                f"{keep} is not empty. Name an empty folder, or one that does not exist."
            )
        yield keep
    except OSError as error:
        raise errors.RunError(
            f"The drills could not write what they need: {error}. Make room, or name a folder that "
            "can be written with --keep FOLDER."
        ) from error

"""What a person reads before and after drills."""

from collections.abc import Sequence
from textwrap import wrap

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from longtake.drill.fault import Fault
from longtake.drill.result import Result
from longtake.formatting import plural

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


def show_faults(faults: Sequence[Fault], console: Console) -> None:
    """Print each fault: what it does, and what must happen."""
    name = Column("fault", no_wrap=True)
    table = Table(name, "what it does", "what must happen", show_lines=True)
    for fault in faults:
        table.add_row(Text(fault.name, "bold"), fault.does, fault.must)
    console.print(table)


def show_results(results: Sequence[Result], console: Console) -> None:
    """Print a table of results in 80 columns, and how many passed.

    `found in`, `after`: until the run reported the fault; `lost`: steps that were given up;
    `skipped`, `twice`, `never`: clips that were left out on purpose, repeated and missed; `all
    same`: whether the run came to what the undisturbed run came to, to the bit.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("fault", no_wrap=True)
    table.add_column("")
    for name in _NUMBERS:
        table.add_column(name, justify="right")
    for result in results:
        table.add_row(
            "\n".join(wrap(result.fault, _NAME_WIDTH)),
            _outcome(result),
            _seconds(result.detected_seconds),
            _count(result.detected_steps, "-"),
            _count(result.steps_lost),
            _count(result.samples_skipped),
            _count(result.samples_repeated),
            _count(result.samples_missing),
            {True: "yes", False: "no", None: "-"}[result.equal_to_undisturbed],
        )
    console.print(table)
    console.print("?: not measured. -: does not apply.", highlight=False)
    num_passed = sum(result.passed for result in results)
    console.print(f"{num_passed} of {plural(len(results), 'drill')} passed.", highlight=False)
    reasons = [result.skipped for result in results if result.skipped is not None]
    if reasons:
        why = "; ".join(dict.fromkeys(reasons))
        console.print(f"{len(reasons)} not possible here: {why}.", highlight=False, markup=False)


def _outcome(result: Result) -> Text:
    if result.skipped is not None:
        return Text("skipped", "yellow")
    return Text("passed", "green") if result.passed else Text("failed", "red")


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _count(value: int | None, none: str = "?") -> str:
    return none if value is None else str(value)

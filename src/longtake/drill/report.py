"""What a person reads before and after drills."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from longtake.drill.fault import Fault
from longtake.drill.result import Result


def show_faults(faults: Sequence[Fault], console: Console) -> None:
    """Print each fault: what it does, and what must happen."""
    name = Column("fault", no_wrap=True)
    table = Table(name, "what it does", "what must happen", show_lines=True)
    for fault in faults:
        table.add_row(Text(fault.name, "bold"), fault.does, fault.must)
    console.print(table)


def show_results(results: Sequence[Result], console: Console) -> None:
    """Print a table of results, and how many passed.

    `found in`: seconds until the run reported the fault; `equal`: whether every step is that of the
    undisturbed run, to the bit.
    """
    name = Column("fault", no_wrap=True)
    table = Table(name, "", "found in", "repeated", "missing", "equal", "took")
    for result in results:
        passed = Text("passed", "green") if result.passed else Text("failed", "red")
        table.add_row(
            result.fault,
            passed,
            _seconds(result.detected_seconds),
            _count(result.samples_repeated),
            _count(result.samples_missing),
            {True: "yes", False: "no", None: "-"}[result.equal_to_undisturbed],
            _seconds(result.drill_seconds),
        )
    console.print(table)
    num_passed = sum(result.passed for result in results)
    console.print(f"{num_passed} of {len(results)} drills passed.", highlight=False)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _count(value: int | None) -> str:
    return "?" if value is None else str(value)

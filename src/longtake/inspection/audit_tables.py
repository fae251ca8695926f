"""The table and the sentences of `longtake data audit`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from longtake.data.audit import Audit
from longtake.inspection.ledger_facts import alike, audit_notes, audit_verdict
from longtake.inspection.tables import restart_sentence

_COUNTS = ("seen", "repeated", "missing", "rejected", "skipped")


def audit_table(found: Audit) -> Table:
    """Return a table of a ledger's audit; consecutive epochs with the same result share a row."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("stage", "catalog", "epochs", *_COUNTS, "over"):
        table.add_column(name, no_wrap=True, justify="right" if name in _COUNTS else "left")
    for epochs in alike(found.epochs):
        first, last = epochs[0], epochs[-1]
        counts = (str(getattr(first, name)) for name in _COUNTS)
        number = f"{first.epoch}-{last.epoch} each" if last is not first else str(first.epoch)
        is_over = "yes" if first.is_over else "no"
        table.add_row(first.stage, first.source, number, *counts, is_over)
    return table


def audit_sentences(
    found: Audit, restarts: Sequence[Mapping[str, Any]], num_examples: int
) -> Iterator[str]:
    """Yield sentences on a ledger's audit and its run's restarts; the last one is the verdict."""
    for epoch in (epoch for epoch in found.epochs if not epoch.is_exact):
        yield (
            f"  epoch {epoch.epoch} of stage {epoch.stage}, catalog {epoch.source}: "
            f"{epoch.repeated} repeated, {epoch.missing} missing, {epoch.unplanned} that do not "
            f"belong there; clips whose identity begins with {', '.join(epoch.examples)}"
        )
    steps, *notes = audit_notes(found, num_examples)
    yield from (steps, *(f"  {restart_sentence(each)}" for each in restarts), *notes)
    yield audit_verdict(found)

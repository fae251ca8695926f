"""Facts of a run's ledger, and a search of its catalogs for clips by their identity."""

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from longtake import errors
from longtake.data import ledger
from longtake.data.audit import Audit, EpochAudit, audit
from longtake.data.catalog_search import find_in_catalogs
from longtake.data.clip import Clip
from longtake.formatting import one_line, plural
from longtake.inspection import data_facts
from longtake.inspection.reader import RunFacts
from longtake.run_dir import RunDirectory

MOST_RECORDS: Final = 500_000
"""Maximum number of ledger records that are compared with the run's plans for a page.

The command `longtake data audit` compares any number. A million records take about 3.5 s, and a
run that trains adds records between two looks at it."""
_MOST_CLIPS: Final = 200_000  # of all catalogs, times the plans that are made again
_MOST_AUDITED_METRICS: Final = 16 * 2**20
_MOST_GROUPS: Final = 16
_NUM_EXAMPLES: Final = 3
_IDENTITY = re.compile("([0-9a-f]{2}){7,64}")


@dataclass(frozen=True)
class EpochRow:
    """Consecutive epochs of a catalog with the same result of a ledger's audit: a table row."""

    audit: EpochAudit
    """Audit result of the first epoch of the row; its other epochs have the same."""
    epochs: str
    words: str


@dataclass(frozen=True)
class LedgerFacts:
    """Facts of a ledger: its epochs, and whether exactly the planned samples were trained."""

    rows: list[EpochRow]
    verdict: str
    is_exact: bool | None
    """True if the ledger has exactly the planned samples; None if it was not compared with the
    plans."""
    notes: list[str]


def read_ledger(facts: RunFacts, data: data_facts.DataFacts) -> LedgerFacts | None:
    """Return facts of a run's ledger (record of consumed samples), or None if it has no ledger.

    Raises:
        DataError: the ledger is damaged.
    """
    run = facts.run
    files = data_facts.ledger_files(run)
    if not files:
        return None
    copies = data_facts.catalog_files(run)
    version = data_facts.versions([*files, *copies, run.recipe_path])
    return facts.kept("ledger", version, lambda: _read_ledger(run, data))


def _read_ledger(run: RunDirectory, data: data_facts.DataFacts) -> LedgerFacts:
    total = ledger.num_records(run.ledger_path)
    # An audit makes all plans again and compares every record: too slow for a page of a large run.
    clips = sum(each.stats["clips"] for each in data.catalogs) * max(1, data.num_plans)
    if total > MOST_RECORDS or clips > _MOST_CLIPS or not data.catalogs:
        said = f"The ledger has {total:,} records: the command compares them with the run's plans."
        return LedgerFacts([], "", None, [said])
    is_short = True
    with suppress(OSError):
        is_short = run.metrics_path.stat().st_size <= _MOST_AUDITED_METRICS
    try:
        # The metrics, which may be long, tell whether two launches trained at the same time.
        found = audit(run, with_metrics=is_short)
    except errors.RunError as error:
        return LedgerFacts([], "", None, [one_line(error)])
    notes = list(audit_notes(found, _NUM_EXAMPLES))
    if not is_short:
        notes.append("Whether two launches trained at the same time is found by the command.")
    rows = []
    for epochs in alike(found.epochs):
        first, last = epochs[0], epochs[-1]
        number = str(first.epoch) if first is last else f"{first.epoch} to {last.epoch}, each"
        rows.append(EpochRow(first, number, epoch_words(first, len(epochs))))
    return LedgerFacts(rows, audit_verdict(found), found.ok, notes)


def audit_verdict(found: Audit) -> str:
    """Return a sentence on whether a ledger's audit found exactly the planned samples."""
    if found.two_writers:
        return (
            "Not exact: what two launches wrote cannot be separated. Resume from a checkpoint "
            "before that, in a copy of the run."
        )
    if not found.ok:
        return "Not exact: clips were repeated, missed or out of place."
    return "By the ledger, every clip was trained exactly as often as it should have been."


def audit_notes(found: Audit, num_examples: int) -> Iterator[str]:
    """Yield sentences on a ledger's audit: steps first, then skipped batches and double writers.

    If two launches trained at the same time, at most `num_examples` places of that are named.
    """
    steps = found.end_step - found.num_skipped
    abandoned = plural(found.num_abandoned, "sample")
    yield f"{plural(steps, 'step')}; {abandoned} of abandoned steps do not count."
    if found.num_skipped:
        samples = sum(epoch.skipped for epoch in found.epochs)
        yield (
            f"The guard skipped {plural(found.num_skipped, 'batch', 'batches')} "
            f"({plural(samples, 'sample')}) for good: they were not trained in their epochs, and "
            "are not missing there."
        )
    for where in found.two_writers[:num_examples]:
        yield f"Two launches trained this run at the same time: {where}."


def alike(epochs: Sequence[EpochAudit]) -> list[list[EpochAudit]]:
    """Group consecutive epochs whose audit results differ in nothing but the epoch's number."""
    found: list[list[EpochAudit]] = []
    for epoch in epochs:
        if found and replace(epoch, epoch=0) == replace(found[-1][0], epoch=0):
            found[-1].append(epoch)
        else:
            found.append([epoch])
    return found


def epoch_words(epoch: EpochAudit, count: int = 1) -> str:
    """Describe an audit's result for an epoch, or for `count` epochs with the same result."""
    named = f"epoch {epoch.epoch}" if count == 1 else f"these {count} epochs"
    if not epoch.is_exact:
        wrong = {
            "repeated": epoch.repeated,
            "missing": epoch.missing,
            "not planned": epoch.unplanned,
        }
        said = ", ".join(f"{number:,} {what}" for what, number in wrong.items() if number)
        return f"{said}: clips whose identity begins with {', '.join(epoch.examples)}"
    but = []
    if epoch.skipped:
        but.append(f"{epoch.skipped:,} that the guard skipped")
    if epoch.rejected:
        but.append(f"{epoch.rejected:,} that could not be decoded")
    rest = f", but for {' and '.join(but)}" if but else ""
    if epoch.is_over:
        return f"each clip of {named} was seen once{rest}"
    return f"{named} is not over: {epoch.seen:,} of its clips seen once so far{rest}"


# --- Clips by identity ------------------------------------------------------------------------


def clips_of(facts: RunFacts, what: str, identities: Collection[str]) -> dict[str, Clip]:
    """Find clips in a run's catalogs by their identities, or by the beginnings of identities.

    Raises:
        DataError: a catalog is a symbolic link, or damaged.
    """
    wanted = frozenset(each for each in identities if _IDENTITY.fullmatch(each))
    files = data_facts.catalog_files(facts.run)
    version = data_facts.versions(files), wanted
    searched = files[: data_facts.MOST_CATALOGS]
    return facts.kept(
        f"clips of {what}", version, lambda: find_in_catalogs(searched, wanted, _MOST_GROUPS)
    )


@dataclass(frozen=True)
class RejectedClip:
    """A clip that training rejected because it could not be decoded."""

    identity: str
    reason: str
    step: int | None
    """Number of the batch that contained the clip; None if the event does not say."""


def rejected_clips(facts: RunFacts) -> list[RejectedClip]:
    """Return the clips that a run could not decode, each once, the newest first."""
    found = dict[str, RejectedClip]()
    for event in facts.events:
        identity = event.get("identity")
        if event["event"] != "sample_rejected" or not isinstance(identity, str):
            continue
        if _IDENTITY.fullmatch(identity):
            reason = str(event.get("reason") or "unknown")
            step = event.get("step")
            # A clip that was rejected again moves to the place of its newest event.
            found.pop(identity, None)
            number = step if isinstance(step, int) else None
            found[identity] = RejectedClip(identity, reason, number)
    return list(found.values())[::-1]

"""Judges a run by what it wrote down: its ledger, its metrics, its events.

What an epoch must hold is worked out here once more, by sets of identities. The plan that the run
followed, and by which `longtake data audit` judges, has no say in it; the two have to agree.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longtake.data.audit import audit
from longtake.data.catalog import Catalog
from longtake.data.ledger import read_ledger, short_identity
from longtake.drill.place import STEPS, Place
from longtake.drill.result import Result
from longtake.run_dir import RunDirectory

Identities = NDArray[np.uint64]

_COMPARED = ("step", "epoch", "loss", "grad_norm", "learning_rate")


@dataclass(frozen=True)
class Tally:
    """Samples of a run, over all epochs."""

    repeated: int
    missing: int
    unplanned: int
    rejected: int


@dataclass
class Verdict:
    """Collects what was not as it must be; whoever finds nothing has passed."""

    fault: str
    complaints: list[str] = field(default_factory=list)
    tally: Tally | None = None
    detected_seconds: float | None = None
    is_equal: bool | None = None

    def must(self, holds: bool, otherwise: str) -> None:
        """Take note of what does not hold."""
        if not holds:
            self.complaints.append(otherwise)

    def must_be_exact(
        self,
        run: RunDirectory,
        first: Identities,
        later: Identities,
        rejected: int = 0,
    ) -> None:
        """Demand that the run ended, and that each clip was seen once in each epoch.

        Args:
            run: the run.
            first: clips of epoch 0.
            later: clips of each epoch after it.
            rejected: clips that cannot be decoded; each is left out in each epoch that is over.
        """
        counts = self.tally = count(run, {0: first}, later)
        audited = audit(run)
        self.must(audited.end_step == STEPS, f"the run ended at step {audited.end_step}")
        self.must(counts.repeated == 0, f"{counts.repeated} samples were repeated")
        self.must(counts.missing == 0, f"{counts.missing} samples are missing")
        self.must(counts.unplanned == 0, f"{counts.unplanned} samples belong to no such epoch")
        clips = {each.rejected for each in audited.epochs if each.is_over}
        self.must(
            clips <= {rejected} and bool(counts.rejected) == bool(rejected),
            f"{counts.rejected} samples were rejected, in epochs of {sorted(clips)} each, and "
            f"{rejected} cannot be decoded",
        )
        found = tuple(
            sum(getattr(each, name) for each in audited.epochs)
            for name in ("repeated", "missing", "unplanned", "rejected")
        )
        ours = (counts.repeated, counts.missing, counts.unplanned, counts.rejected)
        self.must(
            found == ours,
            f"longtake data audit counts {found} and the drill {ours} "
            "(repeated, missing, unplanned, rejected)",
        )

    def must_be_equal(
        self, run: RunDirectory, undisturbed: RunDirectory, until: int = STEPS
    ) -> None:
        """Demand that the steps up to `until` are the undisturbed run's, to the bit."""
        different = first_difference(run, undisturbed, until)
        is_whole = until == STEPS
        if is_whole:
            self.is_equal = different is None
        self.must(different is None, f"step {different} is not the undisturbed run's")

    def result(self, message: str) -> Result:
        """The result; `message` says what happened where nothing is complained of."""
        tally = self.tally
        return Result(
            fault=self.fault,
            passed=not self.complaints,
            detected_seconds=_rounded(self.detected_seconds),
            samples_repeated=tally.repeated if tally else None,
            samples_missing=tally.missing if tally else None,
            equal_to_undisturbed=self.is_equal,
            message=f"Failed: {'; '.join(self.complaints)}." if self.complaints else message,
            samples_unplanned=tally.unplanned if tally else None,
            samples_rejected=tally.rejected if tally else None,
        )


def count(run: RunDirectory, whole: Mapping[int, Identities], later: Identities) -> Tally:
    """Count a run's samples against the clips that each epoch must hold, each once.

    Args:
        run: the run.
        whole: clips by epoch.
        later: clips of each epoch that `whole` does not name. The newest two may hold fewer: the
            one is not over, and what was left over of the other may still come in it.
    """
    consumed = read_ledger(run.ledger_path)
    last = int(consumed.epoch.max())
    repeated = missing = unplanned = 0
    for epoch in range(last + 1):
        is_its = consumed.epoch == epoch
        trained = consumed.identity[is_its & ~consumed.is_rejected]
        had = consumed.identity[is_its]
        wanted = whole.get(epoch, later)
        repeated += len(trained) - len(np.unique(trained))
        unplanned += len(np.setdiff1d(had, wanted))
        missing += len(np.setdiff1d(wanted, had)) if epoch < last - 1 else 0
    return Tally(repeated, missing, unplanned, int(consumed.is_rejected.sum()))


def identities_of(catalog: Catalog) -> Identities:
    """[N] a catalog's clips, as a ledger names them."""
    return short_identity(np.frombuffer(b"".join(catalog.identities.to_pylist()), "V16"))


def seen_before(run: RunDirectory, step: int) -> Identities:
    """What a run has consumed of epoch 0 before a step."""
    consumed = read_ledger(run.ledger_path)
    seen: Identities = consumed.identity[(consumed.step < step) & (consumed.epoch == 0)]
    return seen


def paths_at(place: Place, step: int) -> list[Path]:
    """The files of the clips that a place's run consumed at a step."""
    consumed = read_ledger(place.run.ledger_path)
    wanted = set(consumed.identity[consumed.step == step].tolist())
    catalog = place.catalog()
    names = identities_of(catalog).tolist()
    return [Path(catalog.clip(row).path) for row, name in enumerate(names) if name in wanted]


def first_difference(run: RunDirectory, other: RunDirectory, until: int) -> int | None:
    """The first step, up to `until`, whose metrics differ by even a bit; None: none does."""
    for step, pair in enumerate(zip_longest(_curve(run), _curve(other)), 1):
        if step > until:
            return None
        if pair[0] != pair[1]:
            return step
    return None


def _curve(run: RunDirectory) -> list[list[Any]]:
    rows: list[Any] = list(run.metrics())
    return [[row[key] for key in _COMPARED] for row in rows]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)

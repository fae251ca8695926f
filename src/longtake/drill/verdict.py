"""Judges a run by what it wrote down: its ledger, its metrics, its events.

What an epoch must hold is worked out here once more, by sets of identities. The plan that the run
followed, and by which `longtake data audit` judges, has no say in it; the two have to agree.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longtake.data.audit import audit
from longtake.data.catalog import Catalog
from longtake.data.ledger import read_ledger, short_identity
from longtake.drill.end_state import differences
from longtake.drill.place import Place
from longtake.drill.result import Result
from longtake.fsio import read_json_lines
from longtake.run_dir import RunDirectory

Identities = NDArray[np.uint64]

_NONE: Identities = np.empty(0, np.uint64)
_NOTHING: Mapping[int, Identities] = MappingProxyType({})
_COMPARED = ("step", "epoch", "loss", "grad_norm", "learning_rate")


@dataclass(frozen=True)
class Tally:
    """Samples of a run, over all epochs."""

    repeated: int
    missing: int
    unplanned: int
    rejected: int
    skipped: int = 0


@dataclass
class Verdict:
    """Collects what was not as it must be; whoever finds nothing has passed."""

    fault: str
    complaints: list[str] = field(default_factory=list)
    tally: Tally | None = None
    detected_seconds: float | None = None
    detected_steps: int | None = None
    steps_lost: int | None = None
    samples_skipped: int | None = None
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
        skipped: Mapping[int, Identities] = _NOTHING,
    ) -> None:
        """Demand that the run ended, and that each clip was seen once in each epoch.

        Args:
            run: the run.
            first: clips of epoch 0.
            later: clips of each epoch after it.
            rejected: clips that cannot be decoded; each is left out in each epoch that is over.
            skipped: clips that had to be left out on purpose, by epoch.
        """
        counts = self.tally = count(run, {0: first}, later, skipped)
        audited, recipe = audit(run), run.recipe()
        trained = audited.end_step - audited.num_skipped
        self.must(trained == recipe.training.steps, f"the run ended at step {trained}")
        self.must(counts.repeated == 0, f"{counts.repeated} samples were repeated")
        self.must(counts.missing == 0, f"{counts.missing} samples are missing")
        self.must(counts.unplanned == 0, f"{counts.unplanned} samples belong to no such epoch")
        clips = {each.rejected for each in audited.epochs if each.is_over}
        self.must(
            clips <= {rejected} and bool(counts.rejected) == bool(rejected),
            f"{counts.rejected} samples were rejected, in epochs of {sorted(clips)} each, and "
            f"{rejected} cannot be decoded",
        )
        names = ("repeated", "missing", "unplanned", "rejected", "skipped")
        found = tuple(sum(getattr(each, name) for each in audited.epochs) for name in names)
        ours = tuple(getattr(counts, name) for name in names)
        self.must(
            found == ours,
            f"longtake data audit counts {found} and the drill {ours} ({', '.join(names)})",
        )
        self.steps_lost = steps_given_up(run)
        self.samples_skipped = counts.skipped + len(steps_skipped(run)) * recipe.training.batch_size

    def must_be_equal(
        self, run: RunDirectory, undisturbed: RunDirectory, until: int | None = None
    ) -> None:
        """Demand that a run is the undisturbed one, to the bit.

        Args:
            run: the run.
            undisturbed: the other.
            until: only the steps up to this one; None: all, and what was saved after the last.
        """
        different = first_difference(run, undisturbed, until)
        self.must(different is None, f"step {different} is not the undisturbed run's")
        if until is None:
            saved = differences(run, undisturbed)
            self.must(not saved, f"it ends with another {', '.join(saved)} than the undisturbed")
            self.is_equal = different is None and not saved

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
            detected_steps=self.detected_steps,
            steps_lost=self.steps_lost,
            samples_skipped=self.samples_skipped,
        )


def count(
    run: RunDirectory,
    whole: Mapping[int, Identities],
    later: Identities,
    skipped: Mapping[int, Identities] = _NOTHING,
) -> Tally:
    """Count a run's samples against the clips that each epoch must hold, each once.

    Args:
        run: the run.
        whole: clips by epoch.
        later: clips of each epoch that `whole` does not name. The newest two may hold fewer: the
            one is not over, and what was left over of the other may still come in it.
        skipped: clips that an epoch must not hold after all.
    """
    consumed = read_ledger(run.ledger_path)
    last = int(consumed.epoch.max())
    repeated = missing = unplanned = 0
    for epoch in range(last + 1):
        is_its = consumed.epoch == epoch
        trained = consumed.identity[is_its & ~consumed.is_rejected]
        had = consumed.identity[is_its]
        wanted = np.setdiff1d(whole.get(epoch, later), skipped.get(epoch, _NONE))
        repeated += len(trained) - len(np.unique(trained))
        unplanned += len(np.setdiff1d(had, wanted))
        missing += len(np.setdiff1d(wanted, had)) if epoch < last - 1 else 0
    num_skipped = sum(map(len, skipped.values()))
    return Tally(repeated, missing, unplanned, int(consumed.is_rejected.sum()), num_skipped)


def clips_between(run: RunDirectory, first: int, end: int) -> dict[int, Identities]:
    """By epoch, what a run consumed in its batches `first` .. `end - 1`."""
    consumed = read_ledger(run.ledger_path)
    is_its = (consumed.step >= first) & (consumed.step < end)
    epochs, identities = consumed.epoch[is_its], consumed.identity[is_its]
    return {epoch: identities[epochs == epoch] for epoch in np.unique(epochs).tolist()}


def world_sizes(run: RunDirectory) -> list[int]:
    """How many ranks have trained a run, launch by launch."""
    launches = json.loads(run.record_path.read_text(encoding="utf-8"))["launches"]
    return [launch["world_size"] for launch in launches]


def steps_given_up(run: RunDirectory) -> int:
    """How many steps a run has trained and then gone back from, over all its launches."""
    given_up = done = 0
    for row in read_json_lines(run.metrics_path):
        given_up += max(0, done + 1 - row["step"])
        done = row["step"]
    return given_up


def steps_skipped(run: RunDirectory) -> list[int]:
    """The steps, of those that count, whose update the guard left out."""
    return [row["step"] for row in run.metrics() if row.get("verdict") == "skip"]


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


def first_difference(run: RunDirectory, other: RunDirectory, until: int | None) -> int | None:
    """The first step, up to `until`, whose metrics differ by even a bit; None: none does."""
    for step, pair in enumerate(zip_longest(_curve(run), _curve(other)), 1):
        if until is not None and step > until:
            return None
        if pair[0] != pair[1]:
            return step
    return None


def largest_error(run: RunDirectory, other: RunDirectory, until: int | None = None) -> float:
    """By how much a loss, up to a step, differs at most, relative to the other run's."""
    pairs = list(zip(run.metrics(), other.metrics(), strict=False))[:until]
    losses = ((one["loss"] or math.nan, two["loss"] or math.nan) for one, two in pairs)
    return max(abs(one / two - 1) for one, two in losses)


def _curve(run: RunDirectory) -> list[list[Any]]:
    rows: list[Any] = list(run.metrics())
    return [[row[key] for key in _COMPARED] for row in rows]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)

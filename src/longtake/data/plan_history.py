"""The data plans that a run has followed, rebuilt from a small record in its checkpoints.

The record holds for each plan the step at which it began, its policy, and what it was made from
(fingerprints, batch size, stages). Copies of the catalogs are kept.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, ValidationError
from typing_extensions import TypedDict

from longtake.config import DECIDES_ORDER, DataSection
from longtake.data.catalog import Catalog
from longtake.data.plan import Plan, PlanInputs, PlannedBatch, StagePlan, begin
from longtake.data.replan import Policy, remaining_stages, replan
from longtake.errors import DataChangedError, DataError
from longtake.formatting import plural
from longtake.fsio import Count, FileName, with_other_fields
from longtake.fsio import Span as SpanRecord

ORDER_VERSION = 2  # version of the functions that order clips; a change gives another order
# A record that lacks a key was written before the key existed, and means its default.
_ORDER_KEYS = {key.removeprefix("data.") for key in DECIDES_ORDER if key.startswith("data.")}
_EXAMPLES = 3
Span = tuple[int, int]  # [first, end)


class CatalogNames(TypedDict):
    """Two hashes of a catalog: `fingerprint` of its clips, `edition` also of all attributes."""

    fingerprint: str
    edition: FileName


class PlanRecord(TypedDict):
    """Record of one data plan: the step at which it began, and what it was made from."""

    step: Count
    policy: Literal["start"] | Policy
    batch_size: Annotated[int, Field(ge=1, le=2**24)]
    order: dict[str, Any]
    catalogs: dict[str, CatalogNames]
    plan: str  # the plan's fingerprint


def _ascends(history: list[PlanRecord]) -> list[PlanRecord]:
    if any((entry["policy"] == "start") != (place == 0) for place, entry in enumerate(history)):
        raise ValueError("expected that the first plan starts the run, and no other")
    if any(after["step"] < before["step"] for before, after in pairwise(history)):
        raise ValueError("expected plans in the order of their steps")
    return history


History = Annotated[list[PlanRecord], Field(min_length=1), AfterValidator(_ascends)]


@dataclass(frozen=True)
class SkippedRanges:
    """Numbers of batches that are never trained, such as after a rollback, as half-open ranges."""

    spans: tuple[Span, ...] = ()  # ascending, not empty, not adjacent

    @classmethod
    def of(cls, spans: Iterable[Iterable[int]]) -> Self:
        """Return the union of half-open ranges of batches, in any order; they may overlap.

        Raises:
            DataError: a range is negative or ends before it begins.
        """
        # Sorted by their starts, ranges overlap only with the last one that was merged.
        merged: list[Span] = []
        for first, end in sorted(tuple(span) for span in spans):
            if not 0 <= first <= end:
                raise DataError(
                    f"Batches {first} to {end} cannot be skipped: expected the number of the first "
                    "one, at least 0, and the number after the last one, not below it."
                )
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            elif first < end:
                merged.append((first, end))
        return cls(tuple(merged))

    def count(self, first: int, end: int) -> int:
        """Return the number of skipped batches among batches `first` to `end - 1`."""
        return sum(max(0, min(end, last) - max(first, begun)) for begun, last in self.spans)

    def with_(self, spans: Iterable[Span], since: int) -> "SkippedRanges":
        """Return the union with further ranges of batches, without their numbers below `since`."""
        cut = ((max(first, since), max(end, since)) for first, end in spans)
        return SkippedRanges.of([*self.spans, *cut])

    def __len__(self) -> int:
        return sum(end - first for first, end in self.spans)

    def __contains__(self, number: object) -> bool:
        return any(number in range(first, end) for first, end in self.spans)

    def next_kept(self, number: int) -> int:
        """Return the first batch from number `number` on that is not skipped."""
        return next((end for first, end in self.spans if first <= number < end), number)

    def last_kept(self, number: int) -> int:
        """Return the last batch up to number `number` that is not skipped; may be -1."""
        for first, end in reversed(self.spans):
            if first <= number < end:
                number = first - 1
        return number

    def first_skipped(self, number: int) -> int:
        """Return the first batch of the skipped range that holds or ends at `number`, if any.

        Else it returns `number`.
        """
        return next((first for first, end in self.spans if first <= number <= end), number)

    def after(self, number: int, count: int) -> int:
        """Return the number of the next batch after training `count` batches from `number` on."""
        number = self.next_kept(number)
        for first, end in self.spans:
            if number < first <= number + count:
                number, count = end, count - (first - number)
        return number + count


@with_other_fields
class LoaderState(TypedDict):
    """State of a `Loader` in a checkpoint, as `Loader.state_dict` returns it."""

    order_version: int
    global_step: Count
    seed: int
    plan_version: Count
    history: History
    quarantined: dict[str, str]
    skipped: NotRequired[list[SpanRecord]]


@dataclass(frozen=True)
class PlanHistory:
    """The data plans that a run has followed, the newest last, and a record of each."""

    plans: tuple[Plan, ...]
    history: tuple[PlanRecord, ...]  # one record for each plan
    changes: str = ""  # what changed, if the newest plan was made just now; else empty
    is_current: bool = True  # False if only kept catalogs give this plan, not the present ones

    @property
    def plan(self) -> Plan:
        return self.plans[-1]

    @property
    def end_step(self) -> int | None:
        return self.plan.end_step

    def stage_before_change(self) -> StagePlan | None:
        """Return the stage that was trained until the data changed; None if it did not just now."""
        if not self.changes or len(self.plans) < 2:
            return None
        before, step = self.plans[-2], self.plan.first_step
        is_over = before.end_step is not None and step >= before.end_step
        name = before.stages[-1].name if is_over else before.stage_at(step)[0]
        return next(each for each in before.stages if each.name == name)

    def batch(self, step: int) -> PlannedBatch:
        return self.plan_at(step).batch(step)

    def plan_at(self, step: int) -> Plan:
        """Return the data plan by which a global step is trained."""
        return self.plans[bisect_right([plan.first_step for plan in self.plans], step) - 1]

    def stage_at(self, step: int) -> tuple[str, int]:
        """Return the name and first step of the stage of a global step, under any plan."""
        plan = self.plan_at(step)
        name, first = plan.stage_at(step)
        # A plan's first stage may have begun in the plan before.
        if 0 < first == plan.first_step:
            earlier, begun = self.stage_at(first - 1)
            first = begun if earlier == name else first
        return name, first

    def epochs_before(self, step: int, repeats: Mapping[str, int]) -> tuple[str, int]:
        """Return the stage of a batch, and the number of the stage's epochs that are over before.

        An epoch is over when all of its batches are trained. Of several catalogs it is over when
        each has had its epochs, of which there are as many as `data.repeats` says.
        """
        plan = self.plan_at(step)
        name, _ = plan.stage_at(step)
        stages = zip(plan.stages, plan.taken(step), strict=True)
        stage, counts = next(each for each in stages if each[0].name == name)
        over = (
            stream.epoch_at(count) // repeats.get(stream.source, 1)
            for stream, count in zip(stage.streams, counts, strict=True)
        )
        return name, min(over)

    def position(self, step: int) -> dict[str, Any]:
        """Return stage, epoch and step in the epoch at a global step, and batches by catalog.

        The end of an epoch is step 0 of the next.
        """
        plan = self.plan
        cursors = {
            f"{stream.stage}/{stream.source}": count
            for stage, counts in zip(plan.stages, plan.taken(step), strict=True)
            for stream, count in zip(stage.streams, counts, strict=True)
        }
        if plan.end_step is not None and step >= plan.end_step:
            return {"stage": None, "epoch": None, "step_in_epoch": 0, "cursors": cursors}
        planned = plan.batch(step)
        at = {"stage": planned.stage, "epoch": planned.epoch, "step_in_epoch": planned.number}
        return {**at, "cursors": cursors}


def start(
    catalogs: Mapping[str, Catalog], data: DataSection, batch_size: int, seed: int
) -> PlanHistory:
    """Return the history of a new run, with its first data plan."""
    plan = begin(catalogs, data, batch_size, seed)
    return PlanHistory((plan,), (_entry(plan, "start", catalogs, data),))


def resume(
    history: Sequence[PlanRecord],
    step: int,
    catalogs: Mapping[str, Catalog],
    data: DataSection,
    batch_size: int,
    seed: int,
    kept: Path | None,
) -> PlanHistory:
    """Return the history of a run that resumes at a step; changed data adds a new plan.

    Raises:
        DataChangedError: something changed and `data.on_change` is `refuse`, or an old plan cannot
            be rebuilt.
    """
    changes = _describe(history[-1], catalogs, data, batch_size, kept)
    if changes and data.on_change == "refuse":
        raise DataChangedError(_refusal(changes, step))
    plan_history = rebuild(history, catalogs, data, seed, kept)
    # The catalogs' fingerprints cover clips and not attributes, by which stages may select.
    if not changes and not plan_history.is_current:
        changes = ["attributes of the clips have changed, and stages select by them"]
    if not changes:
        return plan_history
    if data.on_change == "refuse":
        raise DataChangedError(_refusal(changes, step))
    _refuse_earlier_stages(plan_history.plans, step, history[-1], data)
    inputs = PlanInputs(catalogs, data, batch_size, seed)
    plan = replan(plan_history.plans, step, data.on_change, inputs)
    # The new plan joins the record, so that a later resumption rebuilds it the same way.
    entry = _entry(plan, data.on_change, catalogs, data)
    return PlanHistory((*plan_history.plans, plan), (*history, entry), "\n  ".join(changes))


def rebuild(
    history: Sequence[PlanRecord],
    catalogs: Mapping[str, Catalog],
    data: DataSection,
    seed: int,
    kept: Path | None,
) -> PlanHistory:
    """Rebuild a run's data plans from its records, and from the present or the kept catalogs.

    Raises:
        DataChangedError: a plan cannot be rebuilt from either.
    """
    plans: list[Plan] = []
    is_current = True
    for entry in history:
        plan, is_current = _rebuild(plans, entry, catalogs, data, seed, kept)
        plans.append(plan)
    return PlanHistory(tuple(plans), tuple(history), is_current=is_current)


def _rebuild(
    plans: Sequence[Plan],
    entry: PlanRecord,
    catalogs: Mapping[str, Catalog],
    data: DataSection,
    seed: int,
    kept: Path | None,
) -> tuple[Plan, bool]:
    """Rebuild one data plan from its record; return also whether the present catalogs give it."""
    section = data.model_copy(update=parsed_order(entry))
    batch_size, policy = entry["batch_size"], entry["policy"]
    # Present catalogs first, as they hold the clips' present paths; kept copies are exact.
    for use_kept in (False, True):
        then = _catalogs_of(entry, catalogs, kept, use_kept=use_kept)
        try:
            if plans and policy != "start":
                inputs = PlanInputs(then, section, batch_size, seed)
                plan = replan(plans, entry["step"], policy, inputs)
            else:
                plan = begin(then, section, batch_size, seed)
        except DataError:  # such as a score that was removed
            if use_kept:
                raise
            continue
        # Equal fingerprints prove that every batch is the same.
        if plan.fingerprint == entry["plan"]:
            return plan, not use_kept
    raise DataChangedError(
        f"The plan that the run followed from step {entry['step']} on cannot be made again from "
        f"its catalogs ({', '.join(map(str, data.sources().values()))}): attributes that its "
        "stages select by have changed. Restore them, or start a new run with --set out=FOLDER."
    )


def _describe(
    last: PlanRecord,
    catalogs: Mapping[str, Catalog],
    data: DataSection,
    batch_size: int,
    kept: Path | None,
) -> list[str]:
    lines = []
    then = last["catalogs"]
    for source in {**then, **catalogs}:
        if source not in catalogs:
            lines.append(f"the catalog {source} is no longer used")
        elif source not in then:
            lines.append(f"the catalog {source} is new ({plural(len(catalogs[source]), 'clip')})")
        elif then[source]["fingerprint"] != catalogs[source].fingerprint:
            path = _kept_path(kept, then[source]["edition"])
            difference = "its clips have changed"
            if path is not None and path.exists():
                difference = str(compare(Catalog.load(path), catalogs[source]))
            lines.append(f"the catalog {data.sources()[source]}: {difference}")
    order, before = _order(data), _order(data.model_copy(update=parsed_order(last)))
    for key in order:
        if order[key] != before[key]:
            lines.append(f"data.{key} was {before[key]!r} and is {order[key]!r}")
    if batch_size != last["batch_size"]:
        lines.append(f"training.global_batch_size was {last['batch_size']} and is {batch_size}")
    return lines


def _refuse_earlier_stages(
    plans: Sequence[Plan], step: int, last: PlanRecord, data: DataSection
) -> None:
    """Refuse a recipe with new work before the run's current stage, as it would never be done."""
    before = {
        stage.name: stage for stage in data.model_copy(update=parsed_order(last)).curriculum()
    }
    current = remaining_stages(plans, step, data)[0].name
    for stage in takewhile(lambda stage: stage.name != current, data.curriculum()):
        old = before.get(stage.name)
        added = f"a stage {stage.name}" if old is None else ""
        for unit in ("epochs", "steps"):
            now, then = getattr(stage, unit), getattr(old, unit, None)
            if old is not None and now is not None and (then is None or now > then):
                added = f"{unit} = {now} to stage {stage.name}" + (
                    f" (before: {then})" if then else ""
                )
        if added:
            raise DataChangedError(
                f"The recipe gives {added}, but the run is in stage {current}, and no earlier one "
                "is trained again. Give what is to be added to a stage of another name at the end "
                "of data.stages, or change it back."
            )


def _refusal(changes: Sequence[str], step: int) -> str:
    listed = "\n  ".join(changes)
    return (
        f"What is trained on has changed since step {step}:\n  {listed}\n"
        "To continue without a decision would repeat some clips and miss others. Restore what was "
        "there, or set data.on_change, such as by --set data.on_change=merge:\n"
        "  merge     train in the rest of the epoch exactly what it has not seen\n"
        "  finish    end the epoch as it was, then continue with what is new\n"
        "  restart   begin the next epoch at once"
    )


def _entry(
    plan: Plan,
    policy: Literal["start"] | Policy,
    catalogs: Mapping[str, Catalog],
    data: DataSection,
) -> PlanRecord:
    return {
        "step": plan.first_step,
        "policy": policy,
        "batch_size": plan.batch_size,
        "order": _order(data),
        "catalogs": {
            source: {"fingerprint": catalog.fingerprint, "edition": edition(catalog)}
            for source, catalog in catalogs.items()
        },
        "plan": plan.fingerprint,
    }


def _order(data: DataSection) -> dict[str, Any]:
    return data.model_dump(mode="json", include=_ORDER_KEYS)


def parsed_order(entry: PlanRecord) -> dict[str, Any]:
    """Return the keys of the `data` section with which a plan was made, from its record.

    They are for `DataSection.model_copy`.

    Raises:
        DataError: the record holds invalid keys.
    """
    then = dict.fromkeys(entry["catalogs"], "kept")  # weights name the catalogs of that plan
    try:
        section = DataSection.model_validate({"catalogs": then, **entry["order"]})
    except ValidationError as error:
        raise DataError(
            f"What the run's state says of the order of clips at step {entry['step']} is no such "
            f"record: {error.errors()[0]['msg']}. Restore an earlier checkpoint or the ledger."
        ) from None
    return {key: getattr(section, key) for key in _ORDER_KEYS}


def _catalogs_of(
    entry: PlanRecord, catalogs: Mapping[str, Catalog], kept: Path | None, *, use_kept: bool
) -> dict[str, Catalog]:
    """Load the catalogs of a data plan: the present ones if they have the same clips, or copies."""
    found = {}
    for source, names in entry["catalogs"].items():
        now, path = catalogs.get(source), _kept_path(kept, names["edition"])
        is_same = now is not None and now.fingerprint == names["fingerprint"]
        if now is not None and is_same and not (use_kept and path is not None and path.exists()):
            found[source] = now
        elif path is not None and path.exists():
            found[source] = Catalog.load(path)
            # Copies hold the paths of old; clips that moved are read from their present paths.
            for catalog in catalogs.values():
                found[source] = found[source].relocated(catalog)
        else:
            raise DataChangedError(
                f"The catalog {source} held other clips at step {entry['step']} (fingerprint "
                f"{names['fingerprint']}), and to resume, what it held then is needed. "
                f"{path or 'No folder'} does not keep it. Restore the catalog, or start a new run."
            )
    return found


def _kept_path(kept: Path | None, name: str) -> Path | None:
    return None if kept is None else kept / f"{name}.parquet"


def begins_epoch(planned: PlannedBatch, plan_history: PlanHistory, skipped: SkippedRanges) -> bool:
    """Return true if a batch is its epoch's first batch that is not skipped."""
    left, step, earlier = planned.number, planned.step, planned
    # Walks back over earlier batches of the same epoch, which must all be skipped.
    epoch = planned.stage, planned.source, planned.epoch
    # Only skipped batches can lie between it and the first: more batches rule it out at once.
    if left > len(skipped):
        return False
    while left:
        step -= 1
        earlier = plan_history.batch(step)
        if (earlier.stage, earlier.source, earlier.epoch) == epoch:
            if step not in skipped:
                return False
            left -= 1
    return earlier.begins_epoch


# --- Kept catalogs -------------------------------------------------------------------------


def keep_catalogs(plan_history: PlanHistory, catalogs: Mapping[str, Catalog], folder: Path) -> None:
    """Save a copy of each catalog that the newest data plan uses or was made from.

    Raises:
        DataError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"Catalogs cannot be kept in {folder}: {error.strerror or error}. Make room or make it "
            "writable, or choose another folder for the run."
        ) from error
    parts = [part for stream in plan_history.plan.streams() for part in stream.parts]
    needed = [*catalogs.values(), *(part.catalog for part in parts)]
    for catalog in {id(catalog): catalog for catalog in needed}.values():
        path = folder / f"{edition(catalog)}.parquet"
        # The name is a hash of clips and attributes, so an existing file has the same.
        if not path.exists():
            catalog.save(path)


def edition(catalog: Catalog) -> str:
    """Return a hash of a catalog's clips and all their attributes, as 32 hex digits."""
    digest = hashlib.blake2b(catalog.fingerprint.encode(), digest_size=16)
    for name in sorted(catalog.attribute_names):
        digest.update(name.encode())
        digest.update(catalog.column(name).tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class CatalogDifference:
    """Numbers of clips that were added, removed or changed between two catalogs."""

    added: int
    removed: int
    recaptioned: int  # clips in both, with another caption
    reshaped: int  # clips in both, with another frame count, size, stream or rotation
    replaced: int  # paths in both with another content; also counted in `added` and `removed`
    examples: tuple[str, ...]

    def __str__(self) -> str:
        counts = (
            f"{plural(self.added, 'clip')} added, {self.removed} removed, {self.recaptioned} with "
            f"another caption, {self.reshaped} of another shape"
        )
        replaced = (
            f"; {plural(self.replaced, 'file')} with another content" if self.replaced else ""
        )
        return counts + replaced + "".join(f"\n    {example}" for example in self.examples)


def compare(old: Catalog, new: Catalog) -> CatalogDifference:
    """Count the clips that differ between two catalogs, by their identities."""
    added, removed = _without(new, old), _without(old, new)
    # Both catalogs are sorted by identity, so rows of common clips correspond.
    both_old = np.flatnonzero(pc.is_in(old.identities, value_set=new.identities).to_numpy(False))
    both_new = np.flatnonzero(pc.is_in(new.identities, value_set=old.identities).to_numpy(False))
    texts = [
        catalog.table["caption"].take(pa.array(rows))
        for catalog, rows in ((old, both_old), (new, both_new))
    ]
    recaptioned = np.flatnonzero(pc.not_equal(*texts).to_numpy())
    reshaped = np.zeros(len(both_old), bool)
    for name in ("num_frames", "width", "height", "stream_index", "rotation"):
        reshaped |= old.column(name)[both_old] != new.column(name)[both_new]
    paths = [
        # Paths are for the message only, and reading those of many clips takes long.
        {catalog.clip(int(row)).path for row in rows} if len(rows) <= 10**5 else set()
        for catalog, rows in ((new, added), (old, removed))
    ]
    examples = [
        *_examples("added", new, added),
        *_examples("removed", old, removed),
        *_examples("changed", new, both_new[recaptioned]),
        *_examples("changed", new, both_new[reshaped]),
    ]
    return CatalogDifference(
        added=len(added),
        removed=len(removed),
        recaptioned=len(recaptioned),
        reshaped=int(reshaped.sum()),
        replaced=len(paths[0] & paths[1]),
        examples=tuple(examples),
    )


def _without(one: Catalog, other: Catalog) -> NDArray[np.integer[Any]]:
    return np.flatnonzero(~pc.is_in(one.identities, value_set=other.identities).to_numpy(False))


def _examples(what: str, catalog: Catalog, rows: NDArray[np.integer[Any]]) -> list[str]:
    clips = [catalog.clip(int(row)) for row in rows[:_EXAMPLES]]
    return [f"{what}: {clip.identity[:12]} {clip.path}" for clip in clips]

"""The course of a run: its plans, one after another, and the small record that rebuilds them.

The record is part of a checkpoint. It holds no position in any file and no random state: the step
that each plan began at, what it was made from (fingerprints, batch size, stages), and how it took
over from the one before. Catalogs that were trained on are kept in a folder, since what an epoch
has consumed is known only together with them.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, Field, ValidationError
from typing_extensions import TypedDict

from longtake.config import DataSection
from longtake.data.catalog import Catalog
from longtake.data.change import compare, go_on
from longtake.data.plan import Plan, PlannedBatch, begin
from longtake.errors import DataChangedError, DataError
from longtake.fsio import Count, FileName, Span, with_other_fields

ORDER_VERSION = 2
"""Of the functions that order clips. Another version would order the same clips otherwise."""

_ORDER_KEYS = {"buckets", "frame_stride", "stages", "weights", "difficulty"}

Policy = Literal["start", "merge", "finish", "restart"]


class Names(TypedDict):
    fingerprint: str
    edition: FileName


class Entry(TypedDict):
    """How one plan began."""

    step: Count
    policy: Policy
    batch_size: Annotated[int, Field(ge=1, le=2**24)]
    order: dict[str, Any]
    catalogs: dict[str, Names]
    plan: str
    """Its fingerprint."""


def _ascends(history: list[Entry]) -> list[Entry]:
    if any((entry["policy"] == "start") != (place == 0) for place, entry in enumerate(history)):
        raise ValueError("expected that the first plan starts the run, and no other")
    if any(after["step"] < before["step"] for before, after in pairwise(history)):
        raise ValueError("expected plans in the order of their steps")
    return history


History = Annotated[list[Entry], Field(min_length=1), AfterValidator(_ascends)]


@with_other_fields
class LoaderState(TypedDict):
    """What `Loader.state_dict` returns."""

    order_version: int
    global_step: Count
    seed: int
    plan_version: Count
    history: History
    quarantined: dict[str, str]
    skipped: NotRequired[list[Span]]


@dataclass(frozen=True)
class Course:
    """The plans of a run, the newest last."""

    plans: tuple[Plan, ...]
    history: tuple[Entry, ...]
    """One entry for each plan."""
    changes: str = ""
    """What was different when the newest plan took over just now, for people; else empty."""
    is_of_now: bool = True
    """Whether the catalogs of now make the newest plan, not only those that were kept."""

    @property
    def plan(self) -> Plan:
        return self.plans[-1]

    @property
    def end_step(self) -> int | None:
        """The global step after the last one that is planned; None: endless."""
        return self.plan.end_step

    def batch(self, step: int) -> PlannedBatch:
        return self.plan_at(step).batch(step)

    def plan_at(self, step: int) -> Plan:
        return self.plans[bisect_right([plan.first_step for plan in self.plans], step) - 1]

    def position(self, step: int) -> dict[str, Any]:
        """Where a run stands when the steps before this one are done.

        The end of an epoch is the beginning of the next: (epoch + 1, 0).
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


def start(catalogs: Mapping[str, Catalog], data: DataSection, batch_size: int, seed: int) -> Course:
    """The course of a new run.

    Raises:
        DataError: a stage selects no clips, or does not fit on the timeline.
    """
    plan = begin(catalogs, data, batch_size, seed)
    return Course((plan,), (_entry(plan, "start", catalogs, data),))


def resume(
    history: Sequence[Entry],
    step: int,
    catalogs: Mapping[str, Catalog],
    data: DataSection,
    batch_size: int,
    seed: int,
    kept: Path | None,
) -> Course:
    """The course of a run that goes on after a number of steps; with a new plan if data changed.

    Raises:
        DataChangedError: something changed and `on_change` is `refuse`, or an older catalog that
            is needed is not kept.
        DataError: what is new cannot be planned.
    """
    changes = _describe(history[-1], catalogs, data, batch_size, kept)
    if changes and data.on_change == "refuse":
        raise DataChangedError(_refusal(changes, step))
    course = rebuild(history, catalogs, data, seed, kept)
    if not changes and not course.is_of_now:
        changes = ["attributes of the clips have changed, and stages select by them"]
    if not changes:
        return course
    if data.on_change == "refuse":
        raise DataChangedError(_refusal(changes, step))
    plan = go_on(course.plans, step, data.on_change, catalogs, data, batch_size, seed)
    entry = _entry(plan, data.on_change, catalogs, data)
    return Course((*course.plans, plan), (*history, entry), "\n  ".join(changes))


def rebuild(
    history: Sequence[Entry],
    catalogs: Mapping[str, Catalog],
    data: DataSection,
    seed: int,
    kept: Path | None,
) -> Course:
    """The course that a history stands for, from the catalogs of now or else the kept ones.

    Raises:
        DataChangedError: a catalog that was trained on is neither there nor kept.
    """
    plans: list[Plan] = []
    is_of_now = True
    for entry in history:
        plan, is_of_now = _rebuild(plans, entry, catalogs, data, seed, kept)
        plans.append(plan)
    return Course(tuple(plans), tuple(history), is_of_now=is_of_now)


def keep_catalogs(course: Course, catalogs: Mapping[str, Catalog], folder: Path) -> None:
    """Keep a copy of each catalog that the newest plan trains on, or was made from.

    Raises:
        DataError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"Catalogs cannot be kept in {folder}: {error.strerror or error}. Make room or make it "
            "writable, or choose another folder for the run."
        ) from error
    parts = [part for stream in course.plan.streams() for part in stream.parts]
    needed = [*catalogs.values(), *(part.catalog for part in parts)]
    for catalog in {id(catalog): catalog for catalog in needed}.values():
        path = folder / f"{edition(catalog)}.parquet"
        if not path.exists():
            catalog.save(path)


def edition(catalog: Catalog) -> str:
    """Names a catalog's content with all its attributes; 32 hex digits."""
    digest = hashlib.blake2b(catalog.fingerprint.encode(), digest_size=16)
    for name in sorted(catalog.attribute_names):
        digest.update(name.encode())
        digest.update(catalog.column(name).tobytes())
    return digest.hexdigest()


def _rebuild(
    plans: Sequence[Plan],
    entry: Entry,
    catalogs: Mapping[str, Catalog],
    data: DataSection,
    seed: int,
    kept: Path | None,
) -> tuple[Plan, bool]:
    """The plan that an entry stands for, and whether the catalogs of now make it."""
    section = data.model_copy(update=_parsed_order(entry))
    batch_size, policy = entry["batch_size"], entry["policy"]
    for use_kept in (False, True):
        then = _catalogs_of(entry, catalogs, kept, use_kept=use_kept)
        try:
            if plans and policy != "start":
                plan = go_on(plans, entry["step"], policy, then, section, batch_size, seed)
            else:
                plan = begin(then, section, batch_size, seed)
        except DataError:  # such as a score that is no longer there
            if use_kept:
                raise
            continue
        if plan.fingerprint == entry["plan"]:
            return plan, not use_kept
    raise DataChangedError(
        f"The plan that the run followed from step {entry['step']} on cannot be made again from "
        f"its catalogs ({', '.join(map(str, data.sources().values()))}): attributes that its "
        "stages select by have changed. Restore them, or start a new run with --set out=FOLDER."
    )


def _describe(
    last: Entry,
    catalogs: Mapping[str, Catalog],
    data: DataSection,
    batch_size: int,
    kept: Path | None,
) -> list[str]:
    """What is different from the newest entry, a line each; empty if nothing is."""
    lines = []
    then = last["catalogs"]
    for source in {**then, **catalogs}:
        if source not in catalogs:
            lines.append(f"the catalog {source} is no longer used")
        elif source not in then:
            lines.append(f"the catalog {source} is new ({len(catalogs[source])} clips)")
        elif then[source]["fingerprint"] != catalogs[source].fingerprint:
            path = _kept_path(kept, then[source]["edition"])
            difference = "its clips have changed"
            if path is not None and path.exists():
                difference = str(compare(Catalog.load(path), catalogs[source]))
            lines.append(f"the catalog {data.sources()[source]}: {difference}")
    order = _order(data)
    for key in order:
        if order[key] != last["order"].get(key):
            lines.append(f"data.{key} was {last['order'].get(key)!r} and is {order[key]!r}")
    if batch_size != last["batch_size"]:
        lines.append(f"training.batch_size was {last['batch_size']} and is {batch_size}")
    return lines


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


def _entry(plan: Plan, policy: Policy, catalogs: Mapping[str, Catalog], data: DataSection) -> Entry:
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


def _parsed_order(entry: Entry) -> dict[str, Any]:
    then = dict.fromkeys(entry["catalogs"], "kept")  # of then: weights name them
    try:
        section = DataSection.model_validate({"catalogs": then, **entry["order"]})
    except ValidationError as error:
        raise DataError(
            f"What the run's state says of the order of clips at step {entry['step']} is no such "
            f"record: {error.errors()[0]['msg']}. Restore an earlier checkpoint or the ledger."
        ) from None
    return {key: getattr(section, key) for key in _ORDER_KEYS}


def _catalogs_of(
    entry: Entry, catalogs: Mapping[str, Catalog], kept: Path | None, *, use_kept: bool
) -> dict[str, Catalog]:
    """The catalogs that an entry was made from: those of now where they hold the same clips."""
    found = {}
    for source, names in entry["catalogs"].items():
        now, path = catalogs.get(source), _kept_path(kept, names["edition"])
        is_same = now is not None and now.fingerprint == names["fingerprint"]
        if now is not None and is_same and not (use_kept and path is not None and path.exists()):
            found[source] = now
        elif path is not None and path.exists():
            found[source] = _where_it_is_now(Catalog.load(path), catalogs)
        else:
            raise DataChangedError(
                f"The catalog {source} held other clips at step {entry['step']} (fingerprint "
                f"{names['fingerprint']}), and to go on, what it held then is needed. "
                f"{path or 'No folder'} does not keep it. Restore the catalog, or start a new run."
            )
    return found


def _where_it_is_now(kept: Catalog, catalogs: Mapping[str, Catalog]) -> Catalog:
    for catalog in catalogs.values():
        kept = kept.relocated(catalog)
    return kept


def _kept_path(kept: Path | None, name: str) -> Path | None:
    return None if kept is None else kept / f"{name}.parquet"

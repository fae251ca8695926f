"""Checks the data of a plan before training: when a run starts, when data changed, or by `plan`.

They compare each stage with the stages before it (drift), and look for small buckets, large crops,
missing files, missing columns and files of further inputs that do not fit. Data that would spoil
the training is refused; everything else becomes a warning.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from longtake.config import ConditioningSection, DataSection, Recipe
from longtake.data import stores
from longtake.data.audio import has_sound
from longtake.data.buckets import shares_cut
from longtake.data.catalog import CONDITIONING, Catalog
from longtake.data.clip import Media
from longtake.data.conditioning import conditioning_path, only_colour, read, whole_numbers
from longtake.data.plan import Plan, StagePlan, begin
from longtake.data.tails import FALSE_ALARMS, tail_excess
from longtake.data.training_captions import refuse_unset_trigger
from longtake.errors import ClipError, DataError

_LARGE_CROP = 0.5  # share of a picture that a crop removes
_LOOKS = 16  # clips of a catalog whose files are opened
_NUMBERS = ("num_frames", "width", "height", "fps", "duration_seconds")
_MAX_FILES = 20_000  # upper limit of files whose existence is checked
_MAX_PATHS = 2**20  # upper limit of paths to choose them from; larger catalogs are sampled first
_MASKS_READ = 256  # number of mask files read by `plain_masks`
_NUMBERS_READ = 64  # number of files of numbers read from each part of a plan
_EXAMPLES = 3
_THREADS = 16  # threads that wait for network disks
_T = TypeVar("_T")


def check_data(
    plan: Plan,
    catalogs: Mapping[str, Catalog],
    data: DataSection,
    num_steps: int,
    trained: StagePlan | None = None,
) -> list[str]:
    """Run all checks on a data plan before training begins, for `train` and `longtake plan`.

    Returns:
        Warnings.

    Raises:
        DataError: files are missing, or `review` refuses the plan.
    """
    refuse_missing_conditioning(plan, data)
    warnings = [*review(plan, data, num_steps, trained), *plain_masks(plan, data)]
    if data.cache is None:  # filling a cache opens only the files that it lacks
        for catalog in catalogs.values():
            warnings += refuse_missing(catalog, data.max_quarantined_clips)
    return warnings


def with_steps(recipe: Recipe) -> Recipe:
    """Return the recipe with the steps that `training.epochs` makes of indexed catalogs.

    Without that key, without the catalogs, or where `review_catalogs` refuses them, it is returned
    as it is.
    """
    data, training = recipe.data, recipe.training
    if training.epochs is None or not all(path.is_file() for path in data.sources().values()):
        return recipe
    try:
        catalogs = {name: Catalog.load(path) for name, path in data.sources().items()}
        plan = begin(catalogs, data, training.global_batch_size, recipe.seed)
    except DataError:
        return recipe
    return recipe.with_steps(plan.end_step)


def review_catalogs(recipe: Recipe) -> tuple[Plan | None, list[str], str | None]:
    """Return a new run's data plan, warnings, and the reason if training would refuse its data.

    Before all catalogs are indexed, the result is (None, [], None).
    """
    data, training, plan = recipe.data, recipe.training, None
    if not all(path.is_file() for path in data.sources().values()):
        return None, [], None
    try:
        catalogs = {name: Catalog.load(path) for name, path in data.sources().items()}
        refuse_wrong_catalogs(catalogs, data)
        plan = begin(catalogs, data, training.global_batch_size, recipe.seed)
        warnings = check_data(plan, catalogs, data, training.steps)
        return plan, [*warnings, *(silent_catalogs(plan) if recipe.model.uses_audio else ())], None
    except DataError as error:
        return plan, [], str(error)


def review(
    plan: Plan, data: DataSection, num_steps: int | None, trained: StagePlan | None = None
) -> list[str]:
    """Return warnings about the stages and buckets (clip shapes) of a data plan.

    Args:
        plan: the plan of the steps to come.
        data: the recipe's `data` section.
        num_steps: the global step at which training ends, if it is known.
        trained: the stage that was trained until the data changed, or None; the plan's first stage
            is compared with it.

    Raises:
        DataError: the stages end before the training, or a coming stage is too different and
            `data.on_drift` is `refuse`.
    """
    _refuse_an_early_end(plan, num_steps)
    # An attribute whose mean moved too far needs no second message about its tail.
    stages = [*filter(None, [trained]), *plan.stages]
    moved = [each for each in drifts(stages) if each.distance > data.drift_limit]
    known = {(each.stage, each.attribute) for each in moved}
    too_far = [str(each) for each in moved]
    too_far += [
        str(each)
        for each in tail_drifts(stages, data.drift_limit)
        if (each.stage, each.attribute) not in known
    ]
    if too_far and data.on_drift == "refuse":
        raise DataError(
            "\n  ".join(
                ["Clips are too different from those before (data.on_drift = refuse):", *too_far]
            )
            + f"\nThe limit is data.drift_limit = {data.drift_limit} standard deviations. Put a "
            "stage between, drop the hardest clips (drop_hardest), or raise the limit."
        )
    borders = [plan.first_step + border for border in plan.timeline.borders]
    unreached = [
        f"stage {stage.name} would begin at step {border}; training ends before"
        for stage, border in zip(plan.stages, borders, strict=True)
        if num_steps is not None and border >= num_steps
    ]
    return [*_small_buckets(plan), *_overlaps(plan), *too_far, *unreached]


def _refuse_an_early_end(plan: Plan, num_steps: int | None) -> None:
    if num_steps is None or plan.end_step is None or plan.end_step >= num_steps:
        return
    lengths = ", ".join(
        f"{stage.name}: {length}"
        for stage, length in zip(plan.stages, plan.timeline.lengths, strict=True)
    )
    raise DataError(
        f"The stages end after step {plan.end_step} ({lengths or 'none is left'}), but "
        f"training.steps is {num_steps}. Set training.steps = {plan.end_step}, or give the last "
        "stage more epochs or steps, or neither: then it does not end."
    )


def _small_buckets(plan: Plan) -> Iterator[str]:
    for stage in plan.stages:
        for stream in stage.streams:
            # The last part has the whole epochs; those before it are rests of epochs of earlier
            # plans.
            members, epochs = stream.parts[-1].members, stream.parts[-1].epoch_span
            where = f"stage {stream.stage}"
            if len(stage.streams) > 1:
                where += f", catalog {stream.source}"
            sizes = list(zip(map(str, members.shapes), members.sizes, strict=True))
            empty = [name for name, num_clips in sizes if not num_clips]
            small: dict[int, list[str]] = {}
            for bucket, (name, num_clips) in enumerate(sizes):
                if 0 < num_clips < (batch_size := epochs.batch_size_of(bucket)):
                    small.setdefault(batch_size, []).append(f"{name} ({num_clips} clips)")
            if empty:
                yield f"{where}: no clip is for {'; '.join(empty)}"
            follows = "its batches reach over several epochs, and a clip may be in one batch twice"
            if epochs.num_epochs == 1:
                follows = "its one batch is padded"
            for batch_size, names in small.items():
                yield (
                    f"{where}: fewer clips than a batch of {batch_size} are for "
                    f"{'; '.join(names)}: {follows}"
                )


def _overlaps(plan: Plan) -> Iterator[str]:
    for stage in plan.stages:
        for one, other in combinations(stage.streams, 2):
            parts = (stream.parts[-1] for stream in (one, other))
            mine, theirs = (
                part.catalog.identities.take(pa.array(part.members.all_rows())) for part in parts
            )
            shared = pc.sum(pc.is_in(mine, value_set=theirs)).as_py() or 0
            if shared:
                yield (
                    f"stage {stage.name}: the catalogs {one.source} and {other.source} share "
                    f"{shared} clips, which are trained in the epochs of both"
                )


def large_crops(plan: Plan) -> Iterator[str]:
    """Yield a warning for each stage, catalog and bucket that crops clips by more than half."""
    for stream in plan.streams():
        members, catalog = stream.parts[-1].members, stream.parts[-1].catalog
        for bucket, shape in enumerate(members.shapes):
            rows = members.candidates(bucket)
            cut = shares_cut(catalog, rows, shape)
            if number := int((cut > _LARGE_CROP).sum()):
                worst = int(cut.argmax())
                yield (
                    f"stage {stream.stage}: {number:,} of {len(rows):,} clips lose more than half "
                    f"of their picture to the crop to {shape.width}x{shape.height}, such as "
                    f"{catalog.clip(int(rows[worst])).path} ({cut[worst]:.0%}); add a bucket of "
                    "their shape, or leave them out with data.max_crop"
                )


def silent_catalogs(plan: Plan) -> Iterator[str]:
    """Yield a warning for each catalog whose files have no sound, by some clips on this machine."""
    catalogs = {id(part.catalog): part for stream in plan.streams() for part in stream.parts}
    for part in catalogs.values():
        rows = part.members.all_rows()
        some = (part.catalog.clip(int(row)) for row in rows[:: max(1, len(rows) // _LOOKS)])
        clips = [clip for clip in some if clip.kind == "video" and not clip.media.is_remote]
        if clips and not any(has_sound(clip.media) for clip in clips):
            yield (
                f"none of {len(clips)} clips that were looked at has sound, such as "
                f"{clips[0].path}: no audio is learnt from silence; index files with sound, or set "
                'model.audio = "off"'
            )


# --- Drift between stages -----------------------------------------------------------------------


@dataclass(frozen=True)
class Drift:
    """Change of a clip attribute's mean (such as motion) from one training stage to the next."""

    stage: str
    attribute: str
    before: float  # mean over the clips of the stage before, weighted as its catalogs are mixed
    after: float  # mean over the clips of this stage
    distance: float  # between the means, in standard deviations before; infinite if they are 0

    def __str__(self) -> str:
        distance = f"{self.distance:.1f} standard deviations"
        if np.isinf(self.distance):
            distance = "and it was the same for all clips before"
        return (
            f"stage {self.stage}: mean {self.attribute} changes from {self.before:.4g} to "
            f"{self.after:.4g}, {distance}"
        )


def drifts(stages: Sequence[StagePlan]) -> list[Drift]:
    """Return the change of each clip attribute's mean from each training stage to the next."""
    found = []
    for before, after in pairwise(stages):
        streams = [*before.streams, *after.streams]
        scores = (set(stream.parts[-1].catalog.attribute_names) for stream in streams)
        for attribute in [*_NUMBERS, *sorted(set.intersection(*scores))]:
            # An attribute that is NaN for all clips of a stage has no moments.
            old, new = _moments(before, attribute), _moments(after, attribute)
            if not old or not new:
                continue
            mean, spread = old[0], float(np.sqrt(old[1]))
            if spread > 1e-9 * max(1.0, abs(mean)):  # more than rounding errors
                distance = abs(new[0] - mean) / spread
            else:
                distance = 0.0 if np.isclose(mean, new[0]) else float("inf")
            found.append(Drift(after.name, attribute, mean, new[0], distance))
    return found


def _moments(stage: StagePlan, attribute: str) -> tuple[float, float] | None:
    """Return mean and variance of a clip attribute over a stage's batches; None if unknown."""
    means, squares, weights = [], [], []
    for stream, weight in zip(stage.streams, stage.weights, strict=True):
        part = stream.parts[-1]
        column = part.catalog.column(attribute)[part.members.all_rows()].astype(np.float64)
        known = column[np.isfinite(column)]
        if len(known):
            means.append(known.mean())
            # Var(mixture) = E[x^2] - mean^2, so the catalogs' second moments are averaged, not
            # variances.
            squares.append(known.var() + known.mean() ** 2)
            weights.append(weight)
    if not means:
        return None
    mean = float(np.average(means, weights=weights))
    return mean, max(0.0, float(np.average(squares, weights=weights)) - mean**2)


@dataclass(frozen=True)
class TailDrift:
    """Clips of a stage whose score (such as motion) is far above that of all earlier clips."""

    stage: str
    attribute: str
    count: int  # number of far harder clips
    num_clips: int  # number of clips that no earlier stage has
    least: float  # smallest value among the far harder clips
    expected: float  # expected number if the stage's clips were like those before
    probability: float  # probability of this many in that case

    def __str__(self) -> str:
        return (
            f"stage {self.stage}: {self.count:,} of {self.num_clips:,} clips that it adds have "
            f"{self.attribute} of {self.least:.4g} or more, where {self.expected:.2g} would be "
            "expected from the stages before (far harder, though the mean may have hardly moved)"
        )


def tail_drifts(stages: Sequence[StagePlan], limit: float) -> list[TailDrift]:
    """Find scores of which a stage has far higher values than all earlier stages.

    The upper tail must be more than `limit` standard deviations beyond. Only clips that no earlier
    stage has are compared. Scores are the catalogs' attributes; numbers such as the width are left
    out, as buckets make them equal.
    """
    found = []
    seen: dict[int, tuple[Catalog, NDArray[np.bool_]]] = {}
    for place, stage in enumerate(stages):
        parts = [stream.parts[-1] for stream in stage.streams]
        for part in parts:
            seen.setdefault(id(part.catalog), (part.catalog, np.zeros(len(part.catalog), bool)))
        rows = [part.members.all_rows() for part in parts]
        pairs = list(zip(parts, rows, strict=True))
        # Clips that an earlier stage trained are no surprise, so only new ones are compared.
        added = [(p.catalog, each[~seen[id(p.catalog)][1][each]]) for p, each in pairs]
        before = [(catalog, np.flatnonzero(mask)) for catalog, mask in seen.values() if mask.any()]
        scores = set.intersection(*(set(each.attribute_names) for each, _ in [*before, *added]))
        num_added = sum(len(each) for _, each in added)
        for attribute in sorted(scores) if place and num_added else ():
            old, new = (
                np.concatenate([catalog.column(attribute)[some] for catalog, some in each])
                for each in (before, added)
            )
            # Bonferroni's correction: the scores of a stage share the probability of a false alarm.
            excess = tail_excess(old, new, limit, FALSE_ALARMS / len(scores))
            if excess is not None:
                found.append(TailDrift(stage.name, attribute, num_clips=num_added, **vars(excess)))
        for part, each in pairs:
            seen[id(part.catalog)][1][each] = True
    return found


# --- Columns and files --------------------------------------------------------------------------


def refuse_wrong_catalogs(catalogs: Mapping[str, Catalog], data: DataSection) -> None:
    """Refuse catalogs whose captions or conditioning inputs do not fit a recipe.

    Raises:
        DataError: `[trigger]` would be trained literally, or `refuse_without_conditioning` refuses.
    """
    for name, catalog in catalogs.items():
        refuse_without_conditioning(catalog, data.conditioning, f"catalog {name}")
        refuse_unset_trigger(name, catalog, data)


def refuse_without_conditioning(
    catalog: Catalog, sections: Mapping[str, ConditioningSection], called: str = "catalog"
) -> None:
    """Refuse a catalog that lacks columns or files which `data.conditioning` names.

    Raises:
        DataError: the message names the column or files, and what to do.
    """
    for name, section in sections.items():
        if section.column is not None:
            _refuse_column(catalog, name, section, called)
    inside = catalog.table.filter(pc.not_equal(catalog.table["member"], ""))
    beside = [name for name, section in sections.items() if section.path is not None]
    if beside and len(inside):
        names = ", ".join(beside)
        raise DataError(
            f"{len(inside)} clips lie in tars, such as {inside['path'][0]}/{inside['member'][0]}: "
            f"data.conditioning ({names}) is found beside a clip's own file. Unpack the tars, and "
            "run longtake data index again."
        )


def _refuse_column(catalog: Catalog, name: str, section: ConditioningSection, called: str) -> None:
    key, column = f"data.conditioning.{name}", section.column or ""
    if column not in catalog.conditioning_names:
        known = ", ".join(catalog.conditioning_names) or "none"
        raise DataError(
            f"{key}.column: the {called} has no column {column!r} of further inputs; it has: "
            f"{known}. Index its table again with --conditioning {column}."
        )
    given = catalog.table[CONDITIONING + column]
    if given.type == pa.string():
        return
    if section.kind != "numbers":
        raise DataError(
            f'{key} is of kind "{section.kind}", but the column {column} of the {called} holds '
            "lists of numbers; expected paths of files."
        )
    frames = catalog.column("num_frames").astype(np.int64) if section.per_frame else 1
    expected = (section.width or 0) * frames
    lengths = pc.list_value_length(given).to_numpy()
    if len(wrong := np.flatnonzero(lengths != expected)):
        clip = catalog.clip(int(wrong[0]))
        rows = f"{clip.num_frames} rows, one for each frame, of " if section.per_frame else ""
        raise DataError(
            f"{key}: {len(wrong)} of {len(catalog)} clips have another count of numbers in the "
            f"column {column}: {clip.path} has {lengths[wrong[0]]}; expected {rows}"
            f"{section.width} ({key}.width)."
        )


def refuse_missing(catalog: Catalog, allowed: int) -> list[str]:
    """Check that a catalog's files exist, or a random sample of very many.

    Files in object stores are not checked one by one; each store is asked for one file.

    Returns:
        A warning if some files are missing but not too many; else nothing.

    Raises:
        DataError: more than `allowed` are missing.
    """
    # Sampled before `unique`, which takes long for very many clips.
    column = catalog.table["path"]
    if len(column) > _MAX_PATHS:
        # A fixed seed: another try looks for the same files and says the same.
        some = np.random.default_rng(0).choice(len(column), _MAX_PATHS, replace=False)
        column = column.take(pa.array(np.sort(some)))
    found: list[str] = pc.unique(column).to_pylist()
    paths = [path for path in found if "://" not in path]
    stores.ask_each(path for path in found if "://" in path)
    looked_for = _some_of(paths)
    # Each look-up waits on a network disk, so threads look at the same time.
    with ThreadPoolExecutor(_THREADS) as pool:
        is_there = pool.map(lambda path: Path(path).is_file(), looked_for)
        missing = [path for path, found in zip(looked_for, is_there, strict=True) if not found]
    if not missing:
        return []
    is_all = len(looked_for) == len(paths) and len(column) == len(catalog)
    of = "" if is_all else " that were looked for"
    said = (
        f"{len(missing)} of the catalog's {len(looked_for)} files{of} are gone, such as "
        f"{', '.join(missing[:_EXAMPLES])}"
    )
    # missing / sample > allowed / all, multiplied out: the number is scaled up to the catalog.
    if len(missing) * len(paths) * len(catalog) > allowed * len(looked_for) * len(column):
        raise DataError(
            f"{said}. At most {allowed} (data.max_quarantined_clips) may fail. Are the files "
            "still where they were indexed? Put them back, or run longtake data index again."
        )
    return [said]


def refuse_missing_conditioning(plan: Plan, data: DataSection) -> None:
    """Check that `data.conditioning` files of all planned clips exist; read some files of numbers.

    Folders are listed once, which takes seconds for millions of clips. Stores are asked for at most
    20,000 files, chosen at random.

    Raises:
        DataError: a file is missing, or a file of numbers is not what the recipe says.
    """
    if not data.conditioning:
        return
    listings: dict[str, frozenset[str]] = {}
    for name, section in data.conditioning.items():
        planned = _planned_files(plan, section)
        files = [(path, clip) for path, clip in planned if "://" not in path]
        remote = _some_of([each for each in planned if "://" in each[0]])
        gone = stores.missing_of(path for path, _ in remote)
        # One listing of each folder is far cheaper than one look-up for each file on a network
        # disk.
        folders = list({path.rpartition("/")[0] for path, _ in files} - listings.keys())
        with ThreadPoolExecutor(_THREADS) as pool:
            listings.update(zip(folders, pool.map(_names_in, folders), strict=True))
        missing = [
            f"{path}, of {clip}"
            for path, clip in files
            if path.rpartition("/")[2] not in listings[path.rpartition("/")[0]]
        ]
        missing += [f"{path}, of {clip}" for path, clip in remote if path in gone]
        if missing:
            num_asked = len(files) + len(remote)
            place = f'"{section.path}" from the clip\'s folder'
            if section.path is None:
                place = f"column {section.column} of the catalog"
            raise DataError(
                f"data.conditioning.{name}: {len(missing)} of {num_asked} clips lack their file "
                f"({place}):{_shown(missing)}\nMake them, correct the recipe or the "
                "table, or index only clips that have one."
            )
        if section.kind == "numbers":
            _refuse_wrong_numbers(name, section, plan)


def plain_masks(plan: Plan, data: DataSection) -> Iterator[str]:
    """Yield warnings about masks that are white or black everywhere, after reading some."""
    for name, section in data.conditioning.items():
        if section.kind != "mask":
            continue
        files = [each for each in _planned_files(plan, section) if "://" not in each[0]]
        files = _some_of(files, _MASKS_READ)
        with ThreadPoolExecutor(_THREADS) as pool:
            colours = list(pool.map(lambda each: only_colour(Media(each[0])), files))
        for colour, so in (("white", "masks nothing"), ("black", "masks everything")):
            pairs = zip(files, colours, strict=True)
            found = [f"{path}, of {clip}" for (path, clip), its in pairs if its == colour]
            if found:
                yield (
                    f"data.conditioning.{name}: {len(found)} of {len(files)} masks that were read "
                    f"are {colour} everywhere, which {so}:{_shown(found)}"
                )


def _some_of(files: list[_T], most: int = _MAX_FILES) -> list[_T]:
    """Return a random sample of files, the same in each call."""
    if len(files) <= most:
        return files
    chosen = np.random.default_rng(0).choice(len(files), most, replace=False)
    return [files[number] for number in chosen]


def files_of_inputs(plan: Plan, data: DataSection) -> list[str]:
    """Return the paths of all `data.conditioning` files of the clips that a plan trains."""
    return [path for each in data.conditioning.values() for path, _ in _planned_files(plan, each)]


def _planned_files(plan: Plan, section: ConditioningSection) -> list[tuple[str, str]]:
    """Return pairs (path of a `data.conditioning` file, path of its clip) of a plan, each once.

    An input that is made of the clip itself has no files.
    """
    if section.is_of_clip:
        return []
    found: dict[tuple[str, str], None] = {}
    column = f"{CONDITIONING}{section.column}"
    for part in (part for stream in plan.streams() for part in stream.parts):
        names = ["path", *(each for each in part.catalog.table.column_names if each == column)]
        table = part.catalog.table.select(names).take(pa.array(part.members.all_rows()))
        clips = table["path"].to_pylist()
        if section.path is not None:
            paths = [conditioning_path(clip, section.path) for clip in clips]
        elif (given := table[column]).type == pa.string():
            paths = given.to_pylist()
        else:
            continue  # the numbers are in the catalog itself
        found.update(dict.fromkeys(zip(paths, clips, strict=True)))
    return list(found)


def _names_in(folder: str) -> frozenset[str]:
    try:
        with os.scandir(folder or "/") as entries:
            return frozenset(entry.name for entry in entries)
    except OSError:
        # All files of a folder that cannot be read count as missing, which the caller reports.
        return frozenset()


def _refuse_wrong_numbers(name: str, section: ConditioningSection, plan: Plan) -> None:
    """Read all numbers (`data.conditioning`) of some random clips; refuse if any is invalid."""
    places = list[tuple[Catalog, int]]()
    for part in (part for stream in plan.streams() for part in stream.parts):
        rows = part.members.all_rows()
        if len(rows) > _NUMBERS_READ:
            rows = np.random.default_rng(0).choice(rows, _NUMBERS_READ, replace=False)
        places += [(part.catalog, int(row)) for row in rows]

    def wrong(place: tuple[Catalog, int]) -> str | None:
        try:
            read(whole_numbers(place[0].clip(place[1]), section))
        except ClipError as error:
            return f"{error.path} {error.reason}"
        return None

    with ThreadPoolExecutor(_THREADS) as pool:
        errors = sorted({error for error in pool.map(wrong, places) if error is not None})
    if errors:
        raise DataError(
            f"data.conditioning.{name}: of {len(places)} files of numbers that were read "
            f"{len(errors)} cannot be used:{_shown(errors)}\nCorrect them, or "
            f"data.conditioning.{name}.width and per_frame."
        )


def _shown(lines: Sequence[str]) -> str:
    more = f"\n  and {len(lines) - _EXAMPLES} more" if len(lines) > _EXAMPLES else ""
    return "".join(f"\n  {line}" for line in lines[:_EXAMPLES]) + more

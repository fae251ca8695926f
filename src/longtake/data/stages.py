"""The stages of a curriculum: the clips that a stage selects, and the stage of each step."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from longtake.config import DataSection, Stage
from longtake.data import buckets
from longtake.data.catalog import MATRIX, Catalog
from longtake.data.order import shares
from longtake.errors import DataError

NO_CAPTION = "no caption"

_CONDITION = re.compile(r"\s*([\w.]+)\s*(<=|>=|==|!=|<|>)\s*(\S.*?)\s*")
_QUANTILE = re.compile(r"q(\d+(?:\.\d+)?)")
_TEXTS = ("kind", "codec", "pix_fmt", "color_range", "color_transfer", MATRIX)
_NUMBERS = ("num_frames", "width", "height", "fps", "duration_seconds")
_COMPARE = {
    "<=": np.less_equal,
    ">=": np.greater_equal,
    "<": np.less,
    ">": np.greater,
    "==": np.equal,
    "!=": np.not_equal,
}


@dataclass(frozen=True)
class Selection:
    """Clips that a training stage selects, in their buckets, and the number that it leaves out."""

    members: buckets.BucketAssignment
    dropped: Counter[str]  # number of dropped clips by reason, in the order of the checks


def select(catalog: Catalog, stage: Stage, data: DataSection) -> Selection:
    """Select the clips that meet all conditions of a stage, sorted into buckets (clip shapes).

    Raises:
        DataError: no clip is left, or a condition is invalid.
    """
    dropped, num_left = Counter[str](), len(catalog)
    for reason, kept in drop_in_turn(catalog, stage, data):
        dropped[reason] += num_left - len(kept)
        num_left = len(kept)
    shapes = stage.buckets or data.buckets
    members, unfit = buckets.sort_into_buckets(
        catalog,
        kept,
        shapes,
        data.frame_stride,
        stills=data.stills_from_videos,
        fps=data.fps,
        max_crop=data.max_crop,
        upscale=data.upscale,
        has_shares=True,
    )
    dropped = Counter({reason: n for reason, n in (dropped + unfit).items() if n})
    if not len(members):
        raise DataError(_nothing_left(catalog, stage, data, dropped))
    return Selection(members, dropped)


def drop_in_turn(
    catalog: Catalog, stage: Stage, data: DataSection
) -> Iterator[tuple[str, buckets.Rows]]:
    """Yield each reason of a stage to drop clips, with the catalog rows that remain after it."""
    # Quantiles of each condition are over all captioned clips, so the order of conditions does not
    # matter.
    kept = everyone = captioned_rows(catalog, data)
    yield NO_CAPTION, kept
    if data.min_size is not None:
        shorter = np.minimum(catalog.column("width"), catalog.column("height"))
        kept = kept[shorter[kept] >= data.min_size]
        yield f"smaller than data.min_size = {data.min_size}", kept
    for condition in stage.where:
        meets = np.zeros(len(catalog), bool)
        meets[everyone] = _meets(catalog, condition, everyone, data)
        kept = kept[meets[kept]]
        yield f"not {condition}", kept
    if stage.drop_hardest:
        kept = kept[~_hardest(catalog, kept, stage.drop_hardest, data)]
        yield "the hardest", kept


def captioned_rows(catalog: Catalog, data: DataSection) -> buckets.Rows:
    """Return the rows of all clips that have a caption, or need none."""
    if data.keep_uncaptioned:
        return np.arange(len(catalog), dtype=np.uint32)
    rows, first, count = np.empty(len(catalog), np.uint32), 0, 0
    for captions in catalog.table["caption"].chunks:
        found = np.flatnonzero(pc.not_equal(captions, "").to_numpy(zero_copy_only=False))
        rows[count : count + len(found)] = found + first
        first, count = first + len(captions), count + len(found)
    return rows[:count]


def values(catalog: Catalog, name: str, data: DataSection) -> NDArray[Any]:
    """Return an attribute of all clips as an array [N], by its name in stages' conditions.

    Raises:
        DataError: the catalog has no such attribute.
    """
    if name == "difficulty":
        scores = catalog.attribute_names
        if not data.difficulty and len(scores) != 1:
            raise DataError(
                "A stage asks for `difficulty`, but which score is that? The catalog has "
                f"{', '.join(scores) or 'none'}. Set data.difficulty to one of them; `longtake "
                "data score CATALOG --by nouns` makes one."
            )
        name = data.difficulty or scores[0]
    if name == "aspect":
        return catalog.column("width") / catalog.column("height")
    if name in _TEXTS:
        return catalog.table[name].to_numpy()
    if name in (*_NUMBERS, *catalog.attribute_names):
        return catalog.column(name)
    known = ", ".join([*_NUMBERS, "aspect", *_TEXTS, *catalog.attribute_names])
    raise DataError(
        f"The catalog has no attribute {name}; it has {known}. Scores are added by `longtake data "
        "score CATALOG --by nouns`."
    )


def parse_condition(condition: str) -> tuple[str, str, str]:
    """Split a stage's condition such as `num_frames >= 48` into attribute, operator and value."""
    parsed = _CONDITION.fullmatch(condition)
    if parsed is None:
        raise DataError(
            f"`{condition}` is not a condition of a stage. Expected ATTRIBUTE OPERATOR VALUE, such "
            "as `num_frames >= 48`, `nouns <= q40` or `codec == h264`."
        )
    return parsed[1], parsed[2], parsed[3]


def _meets(
    catalog: Catalog, condition: str, rows: buckets.Rows, data: DataSection
) -> NDArray[np.bool_]:
    """Return true where clips meet a stage's condition; its quantiles are over these clips."""
    name, operator, text = parse_condition(condition)
    column = values(catalog, name, data)[rows]
    if name in _TEXTS:
        bound: Any = text.strip("\"'")
        if operator not in ("==", "!="):
            raise DataError(f"`{condition}`: {name} is a text, and only == and != compare those.")
    else:
        bound = _bound(column, condition, text)
    meets: NDArray[np.bool_] = _COMPARE[operator](column, bound)
    return meets if name in _TEXTS else meets & ~np.isnan(column)  # an unknown score never does


def _bound(column: NDArray[Any], condition: str, text: str) -> float:
    known = column[np.isfinite(column)]
    if quantile := _QUANTILE.fullmatch(text):
        share = float(quantile[1]) / 100
        if share > 1:
            raise DataError(f"`{condition}`: quantiles go from q0 to q100.")
        return float(np.quantile(known, share)) if len(known) else np.nan
    try:
        return float(text)
    except ValueError:
        raise DataError(
            f"`{condition}`: {text} is neither a number nor a quantile such as q40."
        ) from None


def _hardest(
    catalog: Catalog, rows: buckets.Rows, share: float, data: DataSection
) -> NDArray[np.bool_]:
    """Return true for the `share` of clips with the highest difficulty; of equal ones the last."""
    difficulty = values(catalog, "difficulty", data)[rows]
    is_hardest = np.zeros(len(rows), bool)
    count = round(share * len(rows)) or int(len(rows) > 1)  # at least one, if there are two clips
    # Unknown scores count as the easiest, so they are dropped last. A stable sort gives the same
    # clips on every machine, also where many scores are equal.
    order = np.argsort(np.nan_to_num(difficulty, nan=-np.inf), kind="stable")
    is_hardest[order[len(rows) - count :]] = True
    return is_hardest


def _nothing_left(catalog: Catalog, stage: Stage, data: DataSection, dropped: Counter[str]) -> str:
    reasons = ", ".join(f"{count} ({reason})" for reason, count in dropped.items())
    shapes = ", ".join(map(str, stage.buckets or data.buckets))
    longest = int(buckets.frame_counts(catalog, data.fps).max()) if len(catalog) else 0
    rate = "" if data.fps is None else f" at data.fps = {data.fps:g}"
    which = f"Stage {stage.name}: none" if data.stages else "None"
    stills = " Or set data.stills_from_videos = true to train on single frames of videos."
    small = " Or add a smaller bucket, or let clips be enlarged (data.upscale = true)."
    return (
        f"{which} of the catalog's {len(catalog)} clips can be trained on: "
        f"{reasons or 'it is empty'}. The buckets are {shapes}; the longest clip has {longest} "
        f"frames{rate}. Index clips with captions (longtake data index … --captions FILE.jsonl), "
        "lower data.buckets' num_frames, data.frame_stride or data.fps, or relax the stage's "
        f"`where`.{_quantile_values(catalog, stage, data)}"
        + (stills if buckets.ONLY_STILLS in dropped else "")
        + (small if buckets.TOO_SMALL in dropped else "")
        + (_least_cut(catalog, stage, data) if buckets.CROPPED in dropped else "")
    )


def _least_cut(catalog: Catalog, stage: Stage, data: DataSection) -> str:
    rows = np.arange(len(catalog), dtype=np.uint32)
    cuts = [
        (float(cut.min()), shape, catalog.clip(int(cut.argmin())))
        for shape in stage.buckets or data.buckets
        for cut in [buckets.shares_cut(catalog, rows, shape)]
    ]
    share, shape, clip = min(cuts, key=lambda each: each[0])
    return (
        f" The clip that is cropped least, {clip.path} of {clip.width}x{clip.height}, loses "
        f"{share:.0%} of its picture to {shape.width}x{shape.height}: add a bucket of its shape or "
        f"raise data.max_crop ({data.max_crop:g})."
    )


def _quantile_values(catalog: Catalog, stage: Stage, data: DataSection) -> str:
    """Return a sentence with the values of a stage's quantiles, since equal values merge them."""
    found = []
    for condition in stage.where:
        name, operator, text = parse_condition(condition)
        if _QUANTILE.fullmatch(text):
            known = values(catalog, name, data)[captioned_rows(catalog, data)]
            found.append(f"`{condition}` is {name} {operator} {_bound(known, condition, text):g}")
    if not found:
        return ""
    return f" Here {' and '.join(found)}; many clips with one number make quantiles equal."


@dataclass(frozen=True)
class StagePosition:
    """The stage that an update belongs to, and the number of updates before it in that stage.

    From the middle of a ramp on, it is the later stage.
    """

    name: str
    num_before: int  # number of earlier updates of the stage; skipped batches do not count


@dataclass(frozen=True)
class StageTimeline:
    """Maps global steps to stages of the curriculum, and to batches within a stage.

    A ramp of R steps lies half before and half after the border of two stages. Of its first j
    steps, round(j^2 / 2R) belong to the later stage. Its share thus rises linearly from 0 to 1, and
    every batch of either stage is still trained exactly once.
    """

    lengths: tuple[int | None, ...]  # steps of each stage; None (endless) only for the last
    ramps: tuple[int, ...]  # steps (even) in which each stage is mixed with the one before

    @property
    def borders(self) -> list[int]:
        """Steps at which the stages would begin if no ramps mixed them."""
        borders = [0]
        for length in self.lengths[:-1]:
            assert length is not None, "only the last stage may be endless"
            borders.append(borders[-1] + length)
        return borders[: len(self.lengths)]

    @property
    def total(self) -> int | None:
        """Number of training steps of all stages; None if the last one is endless."""
        if not self.lengths:
            return 0
        last = self.lengths[-1]
        return None if last is None else self.borders[-1] + last

    def at(self, step: int) -> tuple[int, int]:
        """Return the index of a step's stage, and the number of that stage's earlier batches."""
        return _advanced(self.taken(step), self.taken(step + 1))

    def taken(self, step: int) -> list[int]:
        """Return how many batches of each stage are trained before a step."""
        borders = self.borders
        taken = [
            max(0, step - border) if length is None else min(max(0, step - border), length)
            for border, length in zip(borders, self.lengths, strict=True)
        ]
        for stage, (border, ramp) in enumerate(zip(borders, self.ramps, strict=True)):
            into = step - (border - ramp // 2)
            if ramp and 0 < into < ramp:
                # round(into^2 / 2 ramp) in integers, less the batches that come after the border
                # anyway.
                early = (into * into + ramp) // (2 * ramp) - max(0, step - border)
                taken[stage] += early
                taken[stage - 1] -= early
        return taken


def mixed(index: int, weights: Sequence[float]) -> tuple[int, int]:
    """Return which catalog gives a stage's batch `index`, and how many it gave before."""
    return _advanced(shares(index, weights), shares(index + 1, weights))


def _advanced(before: Sequence[int], after: Sequence[int]) -> tuple[int, int]:
    """Return the index of the only count that is larger in `after`, and its value before."""
    grown = next(i for i, (old, new) in enumerate(zip(before, after, strict=True)) if new > old)
    return grown, before[grown]

"""The page of a run's data: catalogs, buckets, stages, ledger, and batches around verdicts."""

import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from markupsafe import Markup

from longtake import errors, process
from longtake.board import data_pictures as pictures
from longtake.board.overview import status_of
from longtake.board.pages import PageLinks, render, render_file, write_file
from longtake.data.clip import Clip
from longtake.formatting import one_line
from longtake.inspection import batch_facts, data_facts, ledger_facts, stills
from longtake.inspection.curriculum_facts import LoadedData
from longtake.inspection.reader import RunFacts

_MOST_ROWS: Final = 10  # rows up to which reasons, sizes and values of one kind are listed
_MOST_EPOCHS: Final = 60
_MUCH_IS_CUT: Final = 0.25
VERDICTS: Final = {"skip": "update skipped", "roll_back": "rolled back", "stop": "stopped"}
SCORE_NAMES: Final = {
    "duration_seconds": "length, seconds",
    "num_frames": "frames",
    "fps": "frames per second",
    "width": "width, pixels",
    "height": "height, pixels",
    "aspect": "width / height",
}
_COUNTED: Final = {
    "aspects": "Aspect ratios",
    "codecs": "Codecs",
    "pixel_formats": "Pixel formats",
    "color_transfers": "Colour transfer",
}


def render_data(facts: RunFacts, links: PageLinks, query: Mapping[str, str]) -> str:
    """Return the HTML of the page of a run's data: catalogs, stages, ledger.

    Args:
        facts: the run's facts.
        links: how the page refers to others.
        query: the URL's query; `step` is the step of the verdict that is open.
    """
    asked = query.get("step", "")
    # isdecimal() alone accepts digits of other scripts; 15 digits fit into 64 bits.
    step = int(asked) if asked.isascii() and asked.isdecimal() and len(asked) <= 15 else None
    data = data_facts.read_data(facts)
    batches, num_verdicts = batch_facts.batches_around_verdicts(facts, step)
    ledger, trouble = None, ""
    try:
        ledger = ledger_facts.read_ledger(facts, data)
    except (errors.LongtakeError, OSError) as error:
        trouble = one_line(error)
    path = shlex.quote(str(facts.run.path))
    return render(
        "data.html",
        links,
        page="data",
        facts=facts,
        status=status_of(facts),
        **catalog_values(data, current_batch(facts)),
        ledger=ledger,
        epochs=[] if ledger is None else ledger.rows[-_MOST_EPOCHS:],
        ledger_problem=trouble,
        rejected=rejected_view(facts),
        batches=batches,
        num_verdicts=num_verdicts,
        step=step,
        verdicts=VERDICTS,
        audit_command=f"{process.command()} data audit {path}",
        around_command=f"{process.command()} show {path} --around {step}",
        show_command=show_command(facts, data),
    )


def catalog_values(data: data_facts.DataFacts, current: int | None) -> dict[str, Any]:
    """Return values for the HTML templates of catalogs and of the stages that train them."""
    return {
        "data": data,
        "catalogs": [CatalogView.of(each) for each in data.catalogs],
        "plan": data.summary,
        "stages": [] if data.summary is None else stages_of(data, current),
        "strip": None if data.strip is None else pictures.strip(data.strip, current),
        "histograms": [(each, histogram_of(each)) for each in data.histograms],
        "score_names": SCORE_NAMES,
        "colour": pictures.colour,
    }


def write_catalog_report(out: Path, loaded: LoadedData, summary: dict[str, Any]) -> None:
    """Write an HTML file on catalogs, and on what a recipe trains of them.

    Raises:
        RunError: the file cannot be written.
    """
    values = catalog_values(data_facts.facts_of(loaded, summary), None)
    text = render_file("catalog_report.html", title=str(loaded.path), show_command="", **values)
    write_file(out, text)


def current_batch(facts: RunFacts) -> int | None:
    """Return the number of batches of its plan that the run has passed; None before step 1."""
    kept = facts.rows.kept
    if not len(kept):
        return None
    # Batches are numbered from 0.
    return max(0, int(kept.column("batch")[-1])) + 1


def show_command(facts: RunFacts, data: data_facts.DataFacts) -> str:
    """Return the command that prints the run's catalog and stages, computed from all clips."""
    run = facts.run.path
    path = run / (data.catalogs[0].file if data.catalogs else "catalogs")
    words = ["data", "show", str(path)]
    if len(data.catalogs) == 1:  # a recipe of several names the original files, not the copies
        words.append(str(facts.run.recipe_path))
    return f"{process.command()} {shlex.join(words)}"


# --- Catalogs ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class CatalogView:
    """One catalog in the form that the data page shows."""

    facts: data_facts.CatalogFacts
    sizes: Markup
    lengths: Markup | str | None
    counted: list[tuple[str, list[tuple[str, int]]]]
    numbers: list[tuple[str, dict[str, Any]]]
    special: list[tuple[str, int]]
    rejections: list[dict[str, Any]]
    num_other_reasons: int

    @classmethod
    def of(cls, facts: data_facts.CatalogFacts) -> "CatalogView":
        stats = facts.stats
        sizes = [(f"{each['width']}x{each['height']}", each["clips"]) for each in stats["sizes"]]
        special = {
            "HDR": stats["hdr"],
            "variable frame rate": stats["variable_frame_rate"],
            "decoded from the beginning for want of timestamps": stats["unreliable_timestamps"],
            "transcoded by data prepare": stats["prepared"],
        }
        numbers = [*stats["numbers"].items(), *stats["attributes"].items()]
        counted = []
        for name, title in _COUNTED.items():
            values = list(stats[name].items())[:_MOST_ROWS]
            counted.append((title, [(value or "unspecified", count) for value, count in values]))
        return cls(
            facts,
            pictures.counted_bars(sizes[:_MOST_ROWS]),
            None if facts.seconds is None else histogram_of(facts.seconds),
            counted,
            [(name.replace("_", " "), each) for name, each in numbers if each["known"]],
            [(name, count) for name, count in special.items() if count],
            facts.rejections[:_MOST_ROWS],
            max(0, len(facts.rejections) - _MOST_ROWS),
        )


def histogram_of(found: data_facts.Histogram) -> Markup | str:
    """Return a picture of a histogram, or a sentence if all clips have the same value."""
    if len(found.counts) > 1:
        return pictures.histogram(found)
    value = (found.edges[0] + found.edges[-1]) / 2
    return f"{value:.4g} for each of the {found.counts[0]:,} clips that have it"


# --- Buckets ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class BucketView:
    """One bucket (clip shape) in the form that the data page shows."""

    facts: Mapping[str, Any]
    box: Markup
    clips: Markup
    share: float
    cut: Markup | None
    is_cut_much: bool


@dataclass(frozen=True)
class StageView:
    """One catalog in one stage of the curriculum, in the form that the data page shows."""

    facts: Mapping[str, Any]
    place: int
    """Index of the stage among the stages of the curriculum."""
    buckets: list[BucketView]
    dropped: Markup | None
    examples: list[tuple[str, int, list[str]]]
    is_open: bool


def stages_of(data: data_facts.DataFacts, current: int | None) -> list[StageView]:
    """Return the data page's view of each catalog in each stage; the current batch's is open."""
    assert data.summary is not None
    now = data.strip.stage_at(current or 0) if data.strip else None
    entries = data.summary["stages"]
    names = list(dict.fromkeys(each["stage"] for each in entries))
    shapes = [bucket for each in entries for bucket in each["buckets"]]
    # One scale for the boxes of all stages, so that they can be compared.
    largest = max((max(each["width"], each["height"]) for each in shapes), default=1)
    longest = max((each["num_frames"] for each in shapes), default=1)
    found = []
    for entry in entries:
        selected = max(1, entry["selected"])
        most = max((each["kept"] for each in entry["buckets"]), default=1)
        buckets = [
            BucketView(
                each,
                pictures.box(each, largest, longest),
                pictures.bar(each["kept"], most),
                each["kept"] / selected,
                None if each["share_cut"] is None else pictures.cut(each["share_cut"]),
                (each["share_cut"] or 0.0) > _MUCH_IS_CUT,
            )
            for each in entry["buckets"]
        ]
        dropped = [(why, count) for why, count in entry["dropped"].items() if count]
        picture = None
        if dropped:
            rows = [("kept", entry["selected"]), *dropped]
            picture = pictures.counted_bars(rows, "2", "good")
        found.append(
            StageView(
                facts=entry,
                place=names.index(entry["stage"]),
                buckets=buckets,
                dropped=picture,
                examples=[(why, count, entry["examples"][why]) for why, count in dropped],
                is_open=entry["stage"] == now,
            )
        )
    return found


# --- The ledger, and clips that could not be decoded ------------------------------------------


@dataclass(frozen=True)
class RejectedView:
    """A clip that could not be decoded, as the data page shows it; the newest ones have stills."""

    clips: list[tuple[ledger_facts.RejectedClip, Clip | None, stills.Still | None]]
    others: list[ledger_facts.RejectedClip]
    reasons: list[tuple[str, int]]
    why_no_stills: str
    problem: str
    num_clips: int


def rejected_view(facts: RunFacts) -> RejectedView:
    rejected, problem, why = ledger_facts.rejected_clips(facts), "", ""
    shown = rejected[: stills.MOST_STILLS]
    known, found = dict[str, Clip](), dict[str, stills.Still]()
    if shown:
        try:
            known = ledger_facts.clips_of(facts, "rejected", [each.identity for each in shown])
            why = stills.why_none(facts.run, data_facts.catalog_files(facts.run)) or ""
            found = {} if why else stills.stills_of(list(known.values()))
        except (errors.LongtakeError, OSError) as error:
            problem = one_line(error)
    clips = [
        (each, clip, found.get(clip.identity) if clip else None)
        for each in shown
        for clip in (known.get(each.identity),)
    ]
    reasons = Counter(each.reason for each in rejected).most_common(_MOST_ROWS)
    others = rejected[len(shown) :][:200]
    return RejectedView(clips, others, reasons, why, problem, len(rejected))

"""The page of all runs in a folder, and the page that compares some of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from longtake import config
from longtake.board.overview import said_of_speed, spelled, status_line
from longtake.board.pages import PageLinks, render
from longtake.board.plots import PANELS, series_payload
from longtake.inspection.reader import RunFacts
from longtake.inspection.run_list import RunSummary

_COMPARED = ("loss", "loss_smoothed", "grad_norm", "weight_norm", "learning_rate", "step_seconds")


@dataclass(frozen=True)
class ListedRun:
    """One run in the list as the page shows it."""

    summary: RunSummary
    name: str
    """Path from the folder to the run; empty if the run is the folder itself."""
    title: str
    line: dict[str, str]
    sample: str | None
    is_video: bool


def render_runs(folder: Path, summaries: Sequence[RunSummary], links: PageLinks) -> str:
    listed = [_listed(folder, each, links) for each in summaries]
    return render("runs.html", links, folder=folder, runs=listed, said_of_speed=said_of_speed)


def _listed(folder: Path, summary: RunSummary, links: PageLinks) -> ListedRun:
    name = "" if summary.path == "." else summary.path
    sample, url = summary.sample, None
    if sample is not None:
        inside = PurePosixPath(sample).relative_to(summary.path)
        url = links.media(name, inside.as_posix())
    return ListedRun(
        summary,
        name,
        name or folder.resolve().name,
        status_line(summary),
        url,
        sample is not None and sample.endswith(".mp4"),
    )


def render_comparison(folder: Path, runs: Sequence[RunFacts], links: PageLinks) -> str:
    """Return a page with the curves of runs in one plot, and the recipe keys that differ."""
    return render(
        "compare.html",
        links,
        folder=folder,
        runs=runs,
        keys=differing_keys(runs),
        panels=[each for each in PANELS if set(each.names) & set(_COMPARED)],
        curves=[_curves(each) for each in runs],
    )


def _curves(facts: RunFacts) -> dict[str, Any]:
    found = series_payload(facts.rows, {"names": ",".join(_COMPARED), "pixels": "1000"})
    return {"name": facts.title, "x": found["x"], "series": found["series"]}


def differing_keys(runs: Sequence[RunFacts]) -> list[tuple[str, list[str]]]:
    """Return the recipe keys that differ between runs, with the value of each run."""
    flat = [config.flat(each.recipe) if each.recipe else {} for each in runs]
    names = dict.fromkeys(name for each in flat for name in each)
    found = []
    for name in sorted(names):
        values = [spelled(each[name]) if name in each else "-" for each in flat]
        # `out` differs between any two runs.
        if len(set(values)) > 1 and name != "out":
            found.append((name, values))
    return found

"""The page of all runs in a folder, and the page that compares some of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from longtake import config
from longtake.board.overview import spelled, status_line
from longtake.board.pages import PageLinks, render
from longtake.board.plots import PANELS, series_payload
from longtake.inspection.reader import RunFacts
from longtake.inspection.run_list import RunSummary

_COMPARED = ("loss", "loss_smoothed", "grad_norm", "weight_norm", "learning_rate", "step_seconds")


@dataclass(frozen=True)
class ListedRun:
    """One run of the list of runs, in the form that the page shows."""

    summary: RunSummary
    name: str
    """Path from the listed folder to the run; empty if the run is that folder itself."""
    title: str
    line: dict[str, str]
    sample: str | None
    is_video: bool


def render_runs(folder: Path, summaries: Sequence[RunSummary], links: PageLinks) -> str:
    runs = []
    for summary in summaries:
        name, sample = "" if summary.path == "." else summary.path, None
        if summary.sample is not None:
            inside = PurePosixPath(summary.sample).relative_to(summary.path)
            sample = links.media(name, inside.as_posix())
        runs.append(
            ListedRun(
                summary=summary,
                name=name,
                title=name or folder.resolve().name,
                line=status_line(summary),
                sample=sample,
                is_video=(summary.sample or "").endswith(".mp4"),
            )
        )
    return render("runs.html", links, folder=folder, runs=runs)


def render_comparison(runs: Sequence[RunFacts], links: PageLinks) -> str:
    """Return a page that compares runs: curves in one plot, and the recipe keys that differ."""
    query = {"names": ",".join(_COMPARED), "pixels": "1000"}
    return render(
        "compare.html",
        links,
        runs=runs,
        keys=differing_keys(runs),
        panels=[each for each in PANELS if set(each.names) & set(_COMPARED)],
        curves=[
            {"name": each.title, "x": payload["x"], "series": payload["series"]}
            for each in runs
            for payload in (series_payload(each.rows, query),)
        ],
    )


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

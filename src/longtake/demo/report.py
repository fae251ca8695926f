"""Writes the demo's results: numbers, a contact sheet, a loss plot, a page; prints a summary."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console
from rich.panel import Panel

from longtake import drawing, errors, fsio, process
from longtake.data.encode import write_video
from longtake.evaluation.compare import choose, draw_sheet
from longtake.evaluation_dir import EvaluationDirectory
from longtake.formatting import escape, format_duration
from longtake.inspection.plots import axis_scale
from longtake.run_dir import Metrics, RunDirectory
from longtake.sampling.sampler import Sampler
from longtake.sampling.videos import SheetRow, contact_sheet

_PRESET = "demo"
_VIDEOS, _CHECKPOINTS = "videos", "checkpoints.png"
_ENLARGED = 4
"""Videos on the page are enlarged, so that neither chroma subsampling nor a browser blurs them."""
_TRAINED_ON_PAGE = 12
_LAST_LOSSES = 100
_RAW, _SMOOTH, _INK, _GRID = "#a9bfd8", "#1f4e8c", "#22252a", "#e4e4df"


@dataclass(frozen=True)
class CheckedVideo:
    """A sampled video, and whether it shows what its caption asks for."""

    caption: str
    is_held_out: bool  # no training clip showed this combination
    video: NDArray[np.uint8]  # [F, H, W, 3]
    is_right: bool


def write_report(
    run: RunDirectory,
    sampler: Sampler,
    videos: Sequence[CheckedVideo],
    clips: int,
    console: Console,
) -> dict[str, Any]:
    """Write summary.json, contact_sheet.png, loss.png and index.html; returns the summary.

    If each checkpoint was sampled too, also checkpoints.png.
    """
    metrics = [row for row in run.metrics() if row["loss"] is not None]
    summary = _summarise(metrics, sampler, videos, clips)
    shown = _choose_shown(videos)
    steps = [row["step"] for row in metrics]
    losses = [row["loss"] or 0.0 for row in metrics]
    held_out = f"{summary['held_out_adherence']:.0%} of held-out prompts"
    rows = [SheetRow(one.caption, one.video, one.is_right) for one in shown if one.is_held_out]
    try:
        contact_sheet(
            rows, run.path / "contact_sheet.png", title=f"Never seen in training: {held_out}"
        )
        loss_plot(steps, losses, run.path / "loss.png", title="Velocity loss")
        _write_page(run, sampler, shown, summary)
        fsio.write_json(run.path / "summary.json", summary)
    except OSError as error:
        raise errors.RunError(f"{run.path} cannot be written: {error.strerror}.") from error
    _show_last_screen(run, summary, console)
    return summary


def _summarise(
    rows: Sequence[Metrics], sampler: Sampler, videos: Sequence[CheckedVideo], clips: int
) -> dict[str, Any]:
    seconds = sum(row["step_seconds"] for row in rows)
    last = [row["loss"] or 0.0 for row in rows[-_LAST_LOSSES:]]
    return {
        "adherence": _share(one.is_right for one in videos if not one.is_held_out),
        "held_out_adherence": _share(one.is_right for one in videos if one.is_held_out),
        "training_seconds": round(seconds, 1),
        "steps": sampler.step,
        "steps_per_second": round(len(rows) / seconds, 2),
        "num_parameters": sum(p.numel() for p in sampler.components.model.parameters()),
        "final_loss": round(float(np.mean(last)), 5),
        "clips": clips,
        "seed": sampler.recipe.seed,
        "videos_checked": len(videos),
    }


def _share(verdicts: Iterable[bool]) -> float:
    return round(float(np.mean(list(verdicts))), 4)


def _choose_shown(videos: Sequence[CheckedVideo]) -> list[CheckedVideo]:
    """One video of each held-out caption, and of some trained captions."""
    first = {one.caption: one for one in reversed(videos)}.values()
    held_out = [one for one in first if one.is_held_out][::-1]
    trained = [one for one in first if not one.is_held_out][::-1]
    # Not an even stride, which would choose the same two colours again and again.
    stride = max(1, len(trained) // _TRAINED_ON_PAGE - 1)
    return held_out + trained[::stride][:_TRAINED_ON_PAGE]


def _write_page(
    run: RunDirectory, sampler: Sampler, shown: Sequence[CheckedVideo], summary: dict[str, Any]
) -> None:
    folder = run.path / _VIDEOS
    folder.mkdir(exist_ok=True)
    cards = []
    for index, one in enumerate(shown):
        path = folder / f"{index:02d}.mp4"
        enlarged = one.video.repeat(_ENLARGED, axis=1).repeat(_ENLARGED, axis=2)
        write_video(path, enlarged, sampler.recipe.sampling.fps)
        cards.append({"one": one, "video": path.relative_to(run.path).as_posix()})
    text = resources.files("longtake.demo").joinpath("page.html").read_text(encoding="utf-8")
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(text)
    results = EvaluationDirectory(run).all_scores(_PRESET)
    if results:
        draw_sheet(choose([run.path], _PRESET), run.path / _CHECKPOINTS)
    page = template.render(cards=cards, summary=summary, run=run.path.name, results=results)
    fsio.write_text(run.path / "index.html", page)


def _show_last_screen(run: RunDirectory, summary: dict[str, Any], console: Console) -> None:
    path = escape(str(run.path))
    lines = [
        f"[bold]{summary['held_out_adherence']:.0%}[/bold] of prompts it never saw and "
        f"[bold]{summary['adherence']:.0%}[/bold] of prompts it did are shown right",
        f"{summary['steps']} steps in {format_duration(summary['training_seconds'])} "
        f"({summary['steps_per_second']:.1f} steps/s), {summary['num_parameters'] / 1e6:.2f} M "
        f"parameters, {summary['clips']} clips",
    ]
    console.print(Panel("\n".join(lines), title="longtake demo", expand=False), soft_wrap=False)
    checkpoints = run.path / _CHECKPOINTS
    evaluated = f"Checkpoints    {escape(str(checkpoints))}\n" if checkpoints.exists() else ""
    console.print(
        f"Videos         {path}/index.html  (open it in a browser)\n"
        f"Contact sheet  {path}/contact_sheet.png\n"
        f"{evaluated}"
        f"Loss           {path}/loss.png\n"
        f"Numbers        {path}/summary.json\n"
        f"TensorBoard    {escape(process.command('tensorboard'))} --logdir {path}/tensorboard\n\n"
        "Sample it yourself:\n"
        f"  {escape(process.command())} sample {path} --prompt 'a blue square moving up left' "
        "--out blue.mp4"
    )


def loss_plot(steps: Sequence[int], losses: Sequence[float], path: Path, *, title: str) -> None:
    """Write a PNG of the loss over the steps: every value pale, their running mean dark.

    NaN and infinite losses leave a gap. The file is written aside and renamed.
    """
    assert 0 < len(steps) == len(losses), f"{len(steps)} steps and {len(losses)} losses"
    values = np.asarray(losses, dtype=np.float64)
    values = np.where(np.isfinite(values), values, np.nan)
    figure = Figure(figsize=(9, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, values, color=_RAW, linewidth=0.8, label="each step")
    axes.plot(steps, smooth(values), color=_SMOOTH, linewidth=1.8, label="running mean")
    axes.legend(frameon=False, labelcolor=_INK)
    axes.set_yscale(axis_scale(values))
    axes.set_title(title, loc="left", color=_INK)
    axes.set_xlabel("global step (optimizer updates)", color=_INK)
    axes.set_ylabel("velocity loss (mean square)", color=_INK)
    axes.grid(color=_GRID, linewidth=0.7)
    axes.margins(x=0.01)
    axes.spines[["top", "right"]].set_visible(False)
    drawing.save_picture(figure, path)


def smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a running mean over about a 25th of the curve, of the same length.

    The window is centred, so that the mean does not lag behind a falling loss, and shrinks at both
    ends. NaN values are left out; a window of NaN values only gives NaN.
    """
    reach = len(values) // 50
    weights = np.hanning(2 * reach + 3)[1:-1]  # without the two zeros at its ends
    known = ~np.isnan(values)
    total = np.convolve(np.where(known, values, 0.0), weights, mode="same")
    weight = np.convolve(known.astype(np.float64), weights, mode="same")
    means = np.full(len(values), np.nan)
    np.divide(total, weight, out=means, where=weight > 1e-9)
    return means

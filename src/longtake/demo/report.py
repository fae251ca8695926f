"""What the demo shows at its end: numbers, a contact sheet, a loss plot, a page, a last screen."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from numpy.typing import NDArray
from rich.console import Console
from rich.panel import Panel

from longtake.data.encode import write_video
from longtake.demo.plots import loss_plot
from longtake.errors import RunError
from longtake.evaluation.comparing.choose import MAX_COLUMNS, choose
from longtake.evaluation.comparing.draw import draw_sheet
from longtake.evaluation.sampling.sheet import SheetRow, contact_sheet
from longtake.evaluation.sampling.studio import Sampler
from longtake.evaluation_dir import EvaluationDirectory
from longtake.formatting import escape, format_duration
from longtake.fsio import write_json, write_text
from longtake.process import command
from longtake.run_dir import Metrics, RunDirectory

_PRESET = "demo"
_VIDEOS, _CHECKPOINTS = "videos", "checkpoints.png"
_ENLARGED = 4
"""Videos on the page are enlarged, so that neither chroma subsampling nor a browser blurs them."""
_TRAINED_ON_PAGE = 12
_LAST_LOSSES = 100


@dataclass(frozen=True)
class Judged:
    """A generated video and the oracle's verdict."""

    caption: str
    is_held_out: bool
    """Whether no training clip showed this combination."""
    video: NDArray[np.uint8]
    """[F, H, W, 3]"""
    is_right: bool


def write_report(
    run: RunDirectory, sampler: Sampler, judged: Sequence[Judged], clips: int, console: Console
) -> dict[str, Any]:
    """Write summary.json, contact_sheet.png, loss.png and index.html; returns the summary.

    And checkpoints.png, where each checkpoint was sampled too.

    Raises:
        RunError: a file cannot be written.
    """
    metrics = [row for row in run.metrics() if row["loss"] is not None]
    summary = _summarise(metrics, sampler, judged, clips)
    shown = _for_the_page(judged)
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
        write_json(run.path / "summary.json", summary)
    except OSError as error:
        raise RunError(f"{run.path} cannot be written: {error.strerror}.") from error
    _show_last_screen(run, summary, console)
    return summary


def _summarise(
    rows: Sequence[Metrics], sampler: Sampler, judged: Sequence[Judged], clips: int
) -> dict[str, Any]:
    seconds = sum(row["step_seconds"] for row in rows)
    last = [row["loss"] or 0.0 for row in rows[-_LAST_LOSSES:]]
    return {
        "adherence": _share(one.is_right for one in judged if not one.is_held_out),
        "held_out_adherence": _share(one.is_right for one in judged if one.is_held_out),
        "training_seconds": round(seconds, 1),
        "steps": sampler.step,
        "steps_per_second": round(len(rows) / seconds, 2),
        "num_parameters": sum(p.numel() for p in sampler.components.model.parameters()),
        "final_loss": round(float(np.mean(last)), 5),
        "clips": clips,
        "seed": sampler.recipe.seed,
        "videos_judged": len(judged),
    }


def _share(verdicts: Iterable[bool]) -> float:
    return round(float(np.mean(list(verdicts))), 4)


def _for_the_page(judged: Sequence[Judged]) -> list[Judged]:
    """One video of each held-out caption, and of some that were trained on."""
    first = {one.caption: one for one in reversed(judged)}.values()
    held_out = [one for one in first if one.is_held_out][::-1]
    trained = [one for one in first if not one.is_held_out][::-1]
    # One less than an even stride, which would meet the same two colours again and again.
    stride = max(1, len(trained) // _TRAINED_ON_PAGE - 1)
    return held_out + trained[::stride][:_TRAINED_ON_PAGE]


def _write_page(
    run: RunDirectory, sampler: Sampler, shown: Sequence[Judged], summary: dict[str, Any]
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
        chosen = choose([run.path], _PRESET, None, None, MAX_COLUMNS)
        draw_sheet(chosen, run.path / _CHECKPOINTS)
    page = template.render(cards=cards, summary=summary, run=run.path.name, results=results)
    write_text(run.path / "index.html", page)


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
        f"TensorBoard    {escape(command('tensorboard'))} --logdir {path}/tensorboard\n\n"
        "Sample it yourself:\n"
        f"  {escape(command())} sample {path} --prompt 'a blue square moving up left' "
        "--out blue.mp4"
    )

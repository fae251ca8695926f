"""Writes the results of the demo: numbers, a contact sheet, a report; prints a summary."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.panel import Panel

from longtake import errors, fsio, process
from longtake.board.report import write_report as write_pages
from longtake.data.encode import write_video
from longtake.evaluation_dir import EvaluationDirectory, Scores, VideoScores
from longtake.formatting import escape, format_duration
from longtake.metrics import Metrics
from longtake.run_dir import RunDirectory
from longtake.sampling.claims import checkpoint_key
from longtake.sampling.presets import OF_PROMPTS, Preset, settings_for
from longtake.sampling.sampler import Sampler
from longtake.sampling.videos import SheetRow, contact_sheet

PRESETS: Final = {True: "unseen_prompts", False: "trained_prompts"}
"""Names of the presets that the demo's checked videos become, by whether their captions were held
out of training."""
_REPORT = "report.html"
_TRAINED_ON_PAGE = 12
_LAST_LOSSES = 100


@dataclass(frozen=True)
class CheckedVideo:
    """A video that the demo sampled, and whether it shows what its caption asks for."""

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
    """Write the demo's summary.json, contact_sheet.png and report.html, and return the summary.

    The videos become results of two presets of the run, so that its pages show them with those of
    evaluation servers.
    """
    metrics = [row for row in run.metrics() if row["loss"] is not None]
    summary = _summarise(metrics, sampler, videos, clips)
    shown = _choose_shown(videos)
    held_out = f"{summary['held_out_adherence']:.0%} of held-out prompts"
    rows = [SheetRow(one.caption, one.video, one.is_right) for one in shown if one.is_held_out]
    try:
        contact_sheet(
            rows, run.path / "contact_sheet.png", title=f"Never seen in training: {held_out}"
        )
        for is_held_out, name in PRESETS.items():
            _keep_videos(run, sampler, name, [x for x in shown if x.is_held_out == is_held_out])
        fsio.write_json(run.path / "summary.json", summary)
        # Last, as the pages show what was written above.
        write_pages(run.path, run.path / _REPORT)
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
    """Return videos for the contact sheet: one per held-out caption, some of trained ones."""
    # Reversed, as the last video of a caption stays in the dictionary: that is the first one then.
    first = {one.caption: one for one in reversed(videos)}.values()
    held_out = [one for one in first if one.is_held_out][::-1]
    trained = [one for one in first if not one.is_held_out][::-1]
    # Not an even stride, which would choose the same two colours again and again.
    stride = max(1, len(trained) // _TRAINED_ON_PAGE - 1)
    return held_out + trained[::stride][:_TRAINED_ON_PAGE]


def _keep_videos(
    run: RunDirectory, sampler: Sampler, name: str, videos: Sequence[CheckedVideo]
) -> None:
    """Store checked videos as an evaluation server does a preset's, with measure `adherence`."""
    settings, bucket = settings_for(sampler.recipe)
    prompts = tuple(one.caption for one in videos)
    preset = Preset(name, prompts, (0,), settings, bucket, sampler.weights)
    directory, step = EvaluationDirectory(run), sampler.step
    folder = directory.result_path(name, step)
    fsio.remove_tree(folder)  # left by an earlier call for the same checkpoint
    with fsio.atomic_folder(folder) as partial:
        scored = []
        for request, one in zip(preset.requests(), videos, strict=True):
            file, measures = request.file, {"adherence": float(one.is_right)}
            write_video(partial / file, one.video, settings.fps)
            scored.append(VideoScores(file=file, prompt=one.caption, seed=0, measures=measures))
        scores = Scores(
            preset=name,
            step=step,
            key=checkpoint_key(run.checkpoint_path(step), sampler.weights) or "unknown",
            weights=sampler.weights,
            time=fsio.now(),
            server="demo",
            settings={k: v for k, v in preset.as_record().items() if k not in OF_PROMPTS},
            videos=scored,
            measures={"adherence": _share(one.is_right for one in videos)},
            alarms=[],
            seconds={},
        )
        fsio.write_json(partial / "scores.json", scores)
    fsio.write_json(directory.preset_path(name), preset.as_record())


def _show_last_screen(run: RunDirectory, summary: dict[str, Any], console: Console) -> None:
    path = escape(str(run.path))
    lines = [
        f"[bold]{summary['held_out_adherence']:.0%}[/bold] of held-out prompts and "
        f"[bold]{summary['adherence']:.0%}[/bold] of trained prompts were generated correctly",
        f"{summary['steps']} steps in {format_duration(summary['training_seconds'])} "
        f"({summary['steps_per_second']:.1f} steps/s), {summary['num_parameters'] / 1e6:.2f} M "
        f"parameters, {summary['clips']} clips",
    ]
    console.print(Panel("\n".join(lines), title="longtake demo", expand=False), soft_wrap=False)
    console.print(
        f"Report         {path}/{_REPORT}  (open it in a browser)\n"
        f"Contact sheet  {path}/contact_sheet.png\n"
        f"Numbers        {path}/summary.json\n"
        f"TensorBoard    {escape(process.command('tensorboard'))} --logdir {path}/tensorboard\n\n"
        "Sample it yourself:\n"
        f"  {escape(process.command())} sample {path} --prompt 'a blue square moving up left' "
        "--out blue.mp4\n"
        "Look at it, and at every run beside it, in a browser:\n"
        f"  {escape(process.command())} board {escape(str(run.path.parent))}"
    )

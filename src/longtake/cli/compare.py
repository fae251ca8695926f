"""The verb `longtake compare`: videos of several checkpoints, or of several runs, side by side."""

import re
from pathlib import Path
from typing import Annotated

import typer

from longtake.cli import say
from longtake.cli.say import AsJson
from longtake.errors import RunError
from longtake.progress import phase_lines


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN…", help="One run: its checkpoints. Several: side by side."),
    ],
    out: Annotated[Path, typer.Option(help="The sheet.png or sheet.mp4 to write.")],
    preset: Annotated[
        str | None,
        typer.Option(help="Name of the preset [default: the only one that the runs have]."),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(help="Prompts, counted from 0: 0:4 (the first four), or 2 [default: all]."),
    ] = None,
    steps: Annotated[
        str | None, typer.Option(metavar="STEP,…", help="Which checkpoints, such as 100,200.")
    ] = None,
    columns: Annotated[
        int, typer.Option(min=1, help="At most so many checkpoints of a run, evenly spaced.")
    ] = 8,
    as_json: AsJson = False,
) -> None:
    """Draw what checkpoints make of the same prompts: prompts down, checkpoints across."""
    with phase_lines(say.console(), "reading the results") as enter:
        from longtake.evaluation.compare import check_out, choose, draw

        check_out(out)
        comparison = choose(runs, preset, prompts, _numbers(steps), columns)
        enter("drawing")
        draw(comparison, out)
    shown = [{"run": str(c.run.path), "step": c.scores["step"]} for c in comparison.columns]
    if as_json:
        facts = {"preset": comparison.preset, "videos": len(comparison.scenes)}
        say.result({"out": str(out), **facts, "columns": shown})
    else:
        say.line(f"{len(comparison.scenes)} x {len(shown)} videos of {comparison.preset}: {out}")


def _numbers(steps: str | None) -> list[int] | None:
    if steps is None:
        return None
    numbers = [step.strip() for step in steps.split(",")]
    if not all(re.fullmatch("[0-9]{1,12}", number) for number in numbers):
        raise RunError(f"--steps {steps[:80]}: expected steps such as 100,200.")
    return [int(number) for number in numbers]

"""The verb `longtake show`: what became of a run, and of the steps around one."""

from pathlib import Path
from typing import Annotated

import typer

from longtake.cli import say
from longtake.cli.say import AsJson
from longtake.progress import phase_lines


def show(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    around: Annotated[
        int | None,
        typer.Option(min=1, max=10**9, metavar="STEP", help="Look at the steps around this one."),
    ] = None,
    span: Annotated[
        int | None,
        typer.Option(
            min=0, max=10**9, help="Steps on each side: 8 in tables, 100 in pictures, if unset."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="A PNG to write: loss, gradient norm and weight norm.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show how a run goes, or everything about the steps around one: numbers, events and clips."""
    from longtake.run_dir import RunDirectory

    directory = RunDirectory(run)
    with phase_lines(say.console(), "reading the run's records") as enter:
        from longtake.fsio import check_picture_name
        from longtake.inspection.facts import run_facts, step_facts
        from longtake.inspection.tables import print_run, print_steps

        if out is not None:
            check_picture_name(out)
        if around is None:
            facts, tell = run_facts(directory), print_run
        else:
            facts = step_facts(directory, around, 8 if span is None else span)
            tell = print_steps
        if out is not None:
            enter("drawing")
            from longtake.inspection.plots import draw_curves

            draw_curves(directory, out, around, 100 if span is None else span)
            facts["picture"] = str(out)
    say.skipped_lines()
    if as_json:
        say.result(facts)
        return
    tell(say.stdout_console(), facts)
    if out is not None:
        say.line(f"wrote {out}")

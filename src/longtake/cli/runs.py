"""The verbs that read a run: `show`, `stacks` and `watch`."""

from pathlib import Path
from typing import Annotated

import typer

from longtake.cli import say
from longtake.cli.say import AsJson, Trust
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


def stacks(
    run: Annotated[
        Path | None, typer.Argument(help="A run directory: all processes of all its nodes.")
    ] = None,
    pid: Annotated[
        int | None, typer.Option(min=1, help="Or a process of this node, with all it has started.")
    ] = None,
    native: Annotated[
        bool,
        typer.Option("--native", help="Calls of C as well; each process is paused for a second."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show where all processes of a run are: identical stacks together, over all nodes.

    Nothing is stopped for it, but for --native.
    """
    from longtake.cli.stacks_report import print_stacks
    from longtake.errors import RunError
    from longtake.monitor.coordinator import dump_process_tree, dump_run
    from longtake.monitor.dumps import group_processes
    from longtake.run_dir import RunDirectory

    if run is not None and pid is None:
        found, of = dump_run(RunDirectory(run), native=native), str(run)
    elif run is None and pid is not None:
        found, of = dump_process_tree(pid, native=native), f"process {pid}"
    else:
        raise RunError("Name a run directory, or a process with --pid: one of the two.")
    facts = {"of": of, **group_processes(found.dumps()), "silent": list(found.silent)}
    facts["files"] = list(map(str, found.files))
    if as_json:
        say.result(facts)
    else:
        print_stacks(say.stdout_console(), facts)


def watch(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    trust: Trust = False,
) -> None:
    """Watch a run's processes on this node, and report what is wrong; Ctrl-C ends it.

    `train` starts a watcher on each node by itself, unless watch.enabled is false.
    """
    from longtake.errors import RunError
    from longtake.monitor.reporting import watch_target
    from longtake.monitor.watcher import watch as watch_node

    if not run.is_dir():
        raise RunError(f"{run} is not a folder. Expected the `out` folder of a recipe.")
    target = watch_target(run, by_hand=True, trust=trust)
    say.line(f"Watching {run} on {target.host}; action: {target.settings.action}. Ctrl-C ends it.")
    if not any(target.folder.glob("rank_*")):
        say.line("No rank of it runs on this node now: this waits for one.")
    if target.settings.hook is None and _names_a_hook(run):
        say.line("watch.hook is not run: this user did not begin the run here (see --trust).")
    watch_node(target)


def _names_a_hook(run: Path) -> bool:
    from longtake.errors import LongtakeError
    from longtake.run_dir import RunDirectory

    try:
        return RunDirectory(run).recipe().watch.hook is not None
    except LongtakeError:
        return False

"""The verb `longtake stacks`: where all processes of a run are, now."""

from pathlib import Path
from typing import Annotated

import typer

from longtake.cli import say
from longtake.cli.say import AsJson


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
    from longtake.cli.stacks_tree import print_stacks
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

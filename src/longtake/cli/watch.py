"""The verb `longtake watch`: the watcher in the foreground, by hand."""

from pathlib import Path
from typing import Annotated

import typer

from longtake.cli import say
from longtake.cli.say import Trust


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

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
    """Watch a run's processes on this node, and say what is amiss; Ctrl-C ends it.

    `train` starts a watcher on each node by itself, unless watch.enabled is false.
    """
    from longtake.errors import RunError
    from longtake.watch.post import post_at
    from longtake.watch.watcher import watch as watch_at

    if not run.is_dir():
        raise RunError(f"{run} is not a folder. Expected the `out` folder of a recipe.")
    post = post_at(run, by_hand=True, trust=trust)
    say.line(f"Watching {run} on {post.host}; action: {post.section.action}. Ctrl-C ends it.")
    if not any(post.folder.glob("rank_*")):
        say.line("No rank of it runs on this node now: this waits for one.")
    if post.section.hook is None and _names_a_hook(run):
        say.line("watch.hook is not run: this user did not begin the run here (see --trust).")
    watch_at(post)


def _names_a_hook(run: Path) -> bool:
    from longtake.errors import LongtakeError
    from longtake.run_dir import RunDirectory

    try:
        return RunDirectory(run).recipe().watch.hook is not None
    except LongtakeError:
        return False

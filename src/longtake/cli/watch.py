"""The verb `longtake watch`: the watcher in the foreground, by hand."""

from pathlib import Path
from typing import Annotated

import typer

from longtake.cli import say


def watch(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
) -> None:
    """Watch a run's processes on this node, and say what is amiss; Ctrl-C ends it.

    `train` starts a watcher on each node by itself, unless watch.enabled is false.
    """
    from longtake.errors import RunError
    from longtake.watch.post import post_at
    from longtake.watch.watcher import watch as watch_at

    if not run.is_dir():
        raise RunError(f"{run} is not a folder. Expected the `out` folder of a recipe.")
    post = post_at(run, by_hand=True)
    say.line(f"Watching {run} on {post.host}; action: {post.section.action}. Ctrl-C ends it.")
    watch_at(post)

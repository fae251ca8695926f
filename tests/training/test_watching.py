"""What training starts to be watched."""

import time
from collections.abc import Callable

import psutil
import torch

from longtake.config import Recipe
from longtake.heartbeat import Heart, folder_of
from longtake.parallel.mesh import World
from longtake.run_dir import RunDirectory
from longtake.training.watching import Watcher


def _watchers() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "longtake.watch" in " ".join(p.cmdline())]


def test_the_hook_is_not_on_the_watchers_command_line(
    small_recipe: Callable[..., Recipe],
) -> None:
    """It is run all the same: the watcher finds it in its environment."""
    recipe = small_recipe("watch.enabled=true", "watch.hook='echo s3cret'")
    run = RunDirectory(recipe.out)
    run.claim(recipe)
    run.create(recipe)
    watcher = Watcher(recipe, Heart(folder_of(recipe.out), "rank"), is_wanted=True)
    watcher.join(run, World(0, 0, 1, torch.device("cpu"), None))
    watcher.start()
    until = time.monotonic() + 30
    while not (found := _watchers()) and time.monotonic() < until:
        time.sleep(0.01)
    [process] = found
    try:
        assert "s3cret" not in " ".join(process.cmdline())
        assert "s3cret" in process.environ()["LONGTAKE_WATCH_SECTION"]
    finally:
        process.terminate()
        watcher.close(waits=False)
        process.wait(10)

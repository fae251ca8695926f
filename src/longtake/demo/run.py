"""The demo from clips to page: every step of it is what a user's own run does."""

import shutil
import statistics
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console

from longtake import config, heartbeat
from longtake.config import Recipe
from longtake.data.catalog import Catalog
from longtake.data.index import index
from longtake.demo.beside import evaluated
from longtake.demo.oracle import shows
from longtake.demo.report import Judged, write_report
from longtake.demo.shapes import held_out_captions, training_captions, write_clips
from longtake.errors import RecipeChangedError, RecipeError
from longtake.evaluation.sampling.studio import Request, Sampler, load_sampler, settings_for
from longtake.evaluation.sampling.write import sample_in_batches
from longtake.progress import counted, phase_lines
from longtake.run_dir import RunDirectory
from longtake.training.run import train
from longtake.training.starting import starting_phase

DEFAULT_STEPS = 1500
NUM_CLIPS = 6000
NUM_HELD_OUT_CLIPS = 48
"""Of captions that are not trained on: the loss on them is measured at each checkpoint."""
NUM_CHECKPOINTS = 6
NUM_JUDGED = 96
"""Videos judged of the held-out captions, and as many of captions that were trained on."""

_BATCH_SIZE = 48
_PACE_STEPS, _PACE_WARM_UP = 60, 20


def demo_recipe(out: Path, steps: int, seed: int) -> Recipe:
    """The recipe that ships beside this file, for a run directory of the user's choice."""
    text = resources.files("longtake.demo").joinpath("recipe.toml").read_text(encoding="utf-8")
    values = tomllib.loads(text)
    values |= {"out": str(out), "seed": seed}
    values["data"]["catalog"] = str(_catalog_path(out))
    values["evaluation"]["held_out"] = str(_held_out_path(out))
    values["training"]["steps"] = steps
    values["checkpoint"] = {"every": max(1, -(-steps // NUM_CHECKPOINTS))}
    return config.parse(values, source="the demo's recipe")


def run_demo(
    *,
    out: Path,
    steps: int | None,
    minutes: float | None,
    seed: int,
    console: Console,
    evaluate: bool = True,
) -> dict[str, Any] | None:
    """Write clips, index them, train on them, sample, judge, and draw what came out.

    Called again after an interruption it goes on where it was; of a demo that is done it repeats
    only the sampling.

    Args:
        out: the run directory.
        steps: optimizer updates, 1500 by default; or
        minutes: how long to train, which a new demo turns into steps by a short measurement.
        seed: of the run and of its clips.
        console: where a person looks.
        evaluate: sample each checkpoint as well, by a server beside the training.

    Returns:
        What summary.json holds, or None if it was interrupted (what was done is kept).

    Raises:
        RecipeError: both steps and minutes are given.
        RecipeChangedError: `out` holds a demo with other settings.
    """
    if steps is not None and minutes is not None:
        raise RecipeError("--steps and --minutes are two ways to say how long; give one of them.")
    run = RunDirectory(out)
    if minutes is not None and run.exists():
        steps = run.recipe().training.steps
        console.print(f"{out} has begun with {steps} steps and goes on to them.", markup=False)
    _refuse_other_settings(run, demo_recipe(out, steps or DEFAULT_STEPS, seed))
    _make_catalog(run, seed, console)
    if minutes is not None and not run.exists():
        steps = _steps_within(minutes, out, seed, console)
        if steps is None:
            return None
    recipe = demo_recipe(out, steps or DEFAULT_STEPS, seed)
    if not _train(recipe, evaluate, console):
        return None
    sampler = load_sampler(out, ema=True, device="auto")
    judged = _judge(sampler, console)
    return write_report(run, sampler, judged, len(Catalog.load(_catalog_path(run.path))), console)


def _train(recipe: Recipe, evaluate: bool, console: Console) -> bool:
    """Train to the end, with an evaluation server beside it; False if it was interrupted."""
    heartbeat.restart_launch_timer()  # writing clips is no part of the training's start
    if not evaluate:
        return _is_trained(recipe, console)
    with evaluated(recipe.out) as evaluator:
        if not _is_trained(recipe, console):
            return False
        evaluator.finish(console)
    return True


def _is_trained(recipe: Recipe, console: Console) -> bool:
    """Train to the end; False if it was interrupted."""
    with phase_lines(console, "starting", starting_phase):
        return train(recipe, console).interrupted_by is None


def _catalog_path(out: Path) -> Path:
    return out / "data" / "catalog.parquet"


def _held_out_path(out: Path) -> Path:
    return out / "data" / "held_out.parquet"


def _refuse_other_settings(run: RunDirectory, recipe: Recipe) -> None:
    changed = config.differences(run.recipe(), recipe) if run.exists() else []
    if changed:
        listed = ", ".join(f"{key} {old} there and {new} now" for key, old, new in changed)
        raise RecipeChangedError(
            f"{run.path} holds a demo with other settings: {listed}. Give this one a folder of its "
            f"own, such as --out {run.path}-2, or ask for the same settings again."
        )


def _make_catalog(run: RunDirectory, seed: int, console: Console) -> None:
    """Write the clips and index them, as `longtake data index` does a user's."""
    catalog = _catalog_path(run.path)
    if run.exists() and catalog.exists():
        return
    # Of the seed, because a demo that was stopped before its run began may have had another.
    folder = catalog.parent / f"clips_{seed}"
    with counted(console, "write clips") as advance:
        captions = write_clips(folder, NUM_CLIPS, seed, lambda done: advance(done, NUM_CLIPS))
    with counted(console, "index clips") as advance:
        index([folder], captions=captions, out=catalog, progress=advance)
    folder = catalog.parent / f"held_out_{seed}"
    captions = write_clips(folder, NUM_HELD_OUT_CLIPS, seed, held_out=True)
    index([folder], captions=captions, out=_held_out_path(run.path))


def _steps_within(minutes: float, out: Path, seed: int, console: Console) -> int | None:
    """How many steps fit into some minutes, by a short run that is thrown away; None if stopped."""
    aside = RunDirectory(out / "pace")
    shutil.rmtree(aside.path, ignore_errors=True)  # of a measurement that was killed
    values = demo_recipe(out, _PACE_STEPS, seed).model_dump(mode="json", exclude_none=True)
    values["out"] = str(aside.path)
    try:
        recipe = config.parse(values, source="the demo's recipe")
        if train(recipe, Console(quiet=True)).interrupted_by:
            return None
        rows = aside.metrics()[_PACE_WARM_UP:]
        seconds = statistics.median(row["step_seconds"] for row in rows)
    finally:
        shutil.rmtree(aside.path, ignore_errors=True)
    steps = max(1, int(minutes * 60 / seconds))
    console.print(f"{1 / seconds:.1f} steps/s: {steps} steps in {minutes:g} minutes")
    return steps


def _judge(sampler: Sampler, console: Console) -> list[Judged]:
    """Sample held-out and trained captions, and let the oracle read what came out."""
    held_out, trained = held_out_captions(), training_captions()
    wanted = [(held_out[i % len(held_out)], True, i // len(held_out)) for i in range(NUM_JUDGED)]
    stride = len(trained) / NUM_JUDGED
    wanted += [(trained[int(i * stride)], False, 0) for i in range(NUM_JUDGED)]
    requests = [Request(caption, seed) for caption, _, seed in wanted]
    settings, bucket = settings_for(sampler.recipe)
    videos = sample_in_batches(sampler, requests, settings, bucket, _BATCH_SIZE, console)
    return [
        Judged(caption, is_held_out, video, shows(video, caption))
        for (caption, is_held_out, _), video in zip(wanted, videos, strict=True)
    ]

"""Runs the demo from clips to report; every step is one that a user's own run has."""

import shutil
import statistics
import subprocess
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console

from longtake import config, errors, heartbeat, progress
from longtake.data.catalog import Catalog
from longtake.data.index import index
from longtake.data.tasks import Work
from longtake.demo import oracle, report, shapes
from longtake.process import program, start
from longtake.run_dir import RunDirectory
from longtake.sampling.presets import Request, settings_for
from longtake.sampling.sampler import Sampler, load_sampler
from longtake.sampling.videos import sample_in_batches
from longtake.training.train import train

DEFAULT_STEPS = 1500
NUM_CLIPS = 6000
NUM_HELD_OUT_CLIPS = 48
"""Number of clips with held-out captions, on which the loss is measured at each checkpoint."""
NUM_CHECKPOINTS = 6
NUM_CHECKED = 96
"""Number of videos that are sampled and checked: of held-out captions, and the same of trained
ones."""

_BATCH_SIZE = 48
_PACE_STEPS, _PACE_WARM_UP = 60, 20
_EVALUATION_SECONDS = 300.0
"""Maximum seconds after the training in which the evaluation server samples the last
checkpoints."""
_POLL_SECONDS = 0.1
_TERMINATION_SECONDS = 10.0


@dataclass(frozen=True)
class EvaluationProcess:
    """An evaluation server in its own process that samples each checkpoint of the demo's run."""

    log: Path
    _process: "subprocess.Popen[bytes]"

    def finish(self, console: Console) -> None:
        """Wait until every checkpoint of the demo is sampled; its server's failure is no error."""
        begun = time.monotonic()
        if self._process.poll() is None:
            console.print("sampling the last checkpoints", highlight=False)
        while self._process.poll() is None and time.monotonic() - begun < _EVALUATION_SECONDS:
            time.sleep(_POLL_SECONDS)
        if self._process.returncode != 0:
            console.print(
                f"not every checkpoint was sampled; see {self.log}", markup=False, highlight=False
            )


@contextmanager
def evaluation_process(out: Path) -> Iterator[EvaluationProcess]:
    """Run a server that evaluates the run in `out` during the block; the run may begin later."""
    log = out / "evaluate.log"
    with log.open("ab") as file:
        # In its own session: Ctrl-C is for the training, whose end ends this process.
        arguments = ("evaluate", str(out), "--follow", "--until-finished")
        process = start(program("longtake", *arguments), file)
    try:
        yield EvaluationProcess(log, process)
    finally:
        process.terminate()  # it ends after the current step of its solver
        try:
            process.wait(_TERMINATION_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def demo_recipe(out: Path, steps: int, seed: int) -> config.Recipe:
    """Return the recipe that the demo ships, with the paths, steps and seed of one demo."""
    text = resources.files("longtake.demo").joinpath("recipe.toml").read_text(encoding="utf-8")
    values = tomllib.loads(text)
    values |= {"out": str(out), "seed": seed}
    values["data"]["catalog"] = str(_catalog_path(out))
    values["evaluation"]["held_out"] = str(out / "data" / "held_out.parquet")
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
) -> dict[str, Any] | str:
    """Run the demo: write clips, index them, train on them, sample, check samples, and report.

    A call after an interruption resumes; a call after the end samples and checks again.

    Args:
        out: the run directory.
        steps: number of optimizer updates, 1500 by default.
        minutes: training time instead of `steps`; a new demo converts it after a short measurement.
        seed: seed of the run and of its clips.
        console: for progress and results.
        evaluate: also sample each checkpoint during the training, by a second process.

    Returns:
        The content of summary.json; or the name of the signal that interrupted it, such as SIGTERM
        (what was done is kept).

    Raises:
        RecipeError: both steps and minutes are given.
        RecipeChangedError: `out` holds a demo with other settings.
    """
    if steps is not None and minutes is not None:
        raise errors.RecipeError(
            "--steps and --minutes are two ways to say how long; give one of them."
        )
    run = RunDirectory(out)
    if minutes is not None and run.exists():
        steps = run.recipe().training.steps
        console.print(f"{out} holds a demo of {steps} steps and resumes it.", markup=False)
    # Checked before any clip is written, which takes a while.
    asked = demo_recipe(out, steps or DEFAULT_STEPS, seed)
    if changed := config.differences(run.recipe(), asked) if run.exists() else []:
        listed = ", ".join(f"{key} {old} there and {new} now" for key, old, new in changed)
        raise errors.RecipeChangedError(
            f"{run.path} holds a demo with other settings: {listed}. Give this one a folder of its "
            f"own, such as --out {run.path}-2, or ask for the same settings again."
        )
    make_catalog(run, seed, console)
    if minutes is not None and not run.exists():
        measured = _steps_within(minutes, out, seed, console)
        if isinstance(measured, str):
            return measured
        steps = measured
    recipe = demo_recipe(out, steps or DEFAULT_STEPS, seed)
    if signal_name := _train(recipe, evaluate, console):
        return signal_name
    sampler = load_sampler(out, ema=True, device="auto")
    videos = _sample_and_check(sampler, console)
    return report.write_report(
        run, sampler, videos, len(Catalog.load(_catalog_path(run.path))), console
    )


def _train(recipe: config.Recipe, evaluate: bool, console: Console) -> str | None:
    """Train the demo's model with evaluation; return the name of a signal that interrupted it."""
    heartbeat.restart_launch_timer()  # writing clips is not part of the training's start
    with evaluation_process(recipe.out) if evaluate else nullcontext() as evaluation:
        with progress.phase_lines(console, "starting", progress.starting_phase):
            if signal_name := train(recipe, console).interrupted_by:
                return signal_name
        if evaluation is not None:
            evaluation.finish(console)
    return None


def _catalog_path(out: Path) -> Path:
    return out / "data" / "catalog.parquet"


def make_catalog(run: RunDirectory, seed: int, console: Console) -> None:
    """Write and index the demo's clips, as `longtake data index` does for a user's clips."""
    catalog = _catalog_path(run.path)
    if run.exists() and catalog.exists():
        return
    # Named by the seed: a demo that was stopped before its run began may have had another.
    folder = catalog.parent / f"clips_{seed}"
    with progress.counted(console, "write clips") as advance:
        captions = shapes.write_clips(
            folder, NUM_CLIPS, seed, lambda done: advance(done, NUM_CLIPS)
        )
    with progress.counted(console, "index clips") as advance:
        index([folder], captions=captions, out=catalog, work=Work(progress=advance))
    folder = catalog.parent / f"held_out_{seed}"
    captions = shapes.write_clips(folder, NUM_HELD_OUT_CLIPS, seed, held_out=True)
    index([folder], captions=captions, out=catalog.with_name("held_out.parquet"))


def _steps_within(minutes: float, out: Path, seed: int, console: Console) -> int | str:
    """Return the steps that fit into some minutes, by a short run; or a signal's name."""
    aside = RunDirectory(out / "pace")
    shutil.rmtree(aside.path, ignore_errors=True)  # left by a measurement that was killed
    values = demo_recipe(out, _PACE_STEPS, seed).model_dump(mode="json", exclude_none=True)
    values["out"] = str(aside.path)
    try:
        recipe = config.parse(values, source="the demo's recipe")
        if signal_name := train(recipe, Console(quiet=True)).interrupted_by:
            return signal_name
        # The first steps are slower than those that follow.
        rows = aside.metrics()[_PACE_WARM_UP:]
        seconds = statistics.median(row["step_seconds"] for row in rows)
    finally:
        shutil.rmtree(aside.path, ignore_errors=True)
    steps = max(1, int(minutes * 60 / seconds))
    console.print(f"{1 / seconds:.1f} steps/s: {steps} steps in {minutes:g} minutes")
    return steps


def _sample_and_check(sampler: Sampler, console: Console) -> list[report.CheckedVideo]:
    """Sample held-out and trained captions of the demo, and check each video's agreement."""
    held_out, trained = shapes.held_out_captions(), shapes.training_captions()
    wanted = [(held_out[i % len(held_out)], True, i // len(held_out)) for i in range(NUM_CHECKED)]
    stride = len(trained) / NUM_CHECKED
    wanted += [(trained[int(i * stride)], False, 0) for i in range(NUM_CHECKED)]
    requests = [Request(caption, seed) for caption, _, seed in wanted]
    settings, bucket = settings_for(sampler.recipe)
    videos = sample_in_batches(sampler, requests, settings, bucket, _BATCH_SIZE, console)
    return [
        report.CheckedVideo(caption, is_held_out, video, oracle.shows(video, caption))
        for (caption, is_held_out, _), video in zip(wanted, videos, strict=True)
    ]

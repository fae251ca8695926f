"""The command `train`, and options that it shares with `launch`."""

import os
import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longtake import errors, process, progress
from longtake.cli import say
from longtake.run_dir import RunDirectory

if TYPE_CHECKING:
    from longtake.config import Recipe
    from longtake.run_dir import Parent
    from longtake.training.train import TrainOutcome

Fresh = Annotated[
    bool,
    typer.Option("--fresh", help="Start a new run in OUT-2, OUT-3, ... if OUT holds one."),
]

From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="RUN[@STEP]",
        help="Begin a new run with the weights, averages and optimizer states of another run.",
    ),
]
WeightsOnly = Annotated[
    bool, typer.Option("--weights-only", help="With --from: leave optimizer states behind.")
]


def _tell_how_to_resume(value: str | None) -> None:
    if value is not None:
        raise errors.RecipeError(
            "No option names a checkpoint to load: the same command again resumes the run in the "
            "recipe's `out` from its newest checkpoint. --from RUN[@STEP] begins a new run with "
            "another run's weights, averages and optimizer states; with --weights-only its weights "
            "alone."
        )


Load = Annotated[
    str | None,
    typer.Option(
        *("--load", "--resume", "--resume-from", "--checkpoint", "--ckpt"),
        hidden=True,
        callback=_tell_how_to_resume,
    ),
]
"""Options of other trainers for loading a checkpoint; the error names what to use here."""


def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe (TOML).")],
    changes: say.Changes = None,
    fresh: Fresh = False,
    begin_from: From = None,
    weights_only: WeightsOnly = False,
    trust: say.Trust = False,
    as_json: say.AsJson = False,
    load: Load = None,
) -> None:
    """Train a recipe; the same command again resumes where it stopped.

    With several processes: `longtake launch RECIPE`, or `torchrun
    --nproc-per-node 2 --shutdown-timeout 600 -m longtake train RECIPE` (the timeout is what
    saving may take after Ctrl-C).

    After a signal it finishes the step and saves. Exit code 130 after SIGINT, 143 after SIGTERM,
    75 after SIGUSR1; 69 if another process was lost, and 2 if another try would not help.
    """
    from longtake.data.auto_buckets import with_buckets
    from longtake.trust import load_recipe

    loaded = with_buckets(load_recipe(recipe, changes or (), trust=trust, fresh=fresh))
    # A fresh run gets a folder of its own, and so does not resume what is in `out`.
    begun = None if fresh else loaded.out
    there = RunDirectory(loaded.out)
    epochs = there.recipe().training.epochs if begun and there.exists() else None
    parent = parent_of(begun, begin_from, weights_only=weights_only, trust=trust)
    try:
        with (
            # Importing takes seconds in which there is nothing to save: a signal ends the process.
            process.leave_on_signals(),
            progress.phase_lines(say.console(), "importing PyTorch", progress.starting_phase),
        ):
            if launcher := os.environ.pop(process.LAUNCHER_VARIABLE, None):
                # Without its launcher nothing would end this rank: two launches would train a run.
                process.end_with(int(launcher), by=signal.SIGTERM)
            from longtake.training.train import train as train_recipe

            # Passed from here, because `training` does not import `evaluation`.
            evaluate = None
            if loaded.sampling.in_training:
                from longtake.evaluation.evaluator import SampleEvaluator
                from longtake.evaluation.options import ServerReport
                from longtake.sampling.claims import own_name

                evaluate = SampleEvaluator(own_name(), ServerReport(say.console()))
            outcome = train_recipe(
                loaded, say.console(), fresh=fresh, parent=parent, evaluate=evaluate
            )
    except process.LeftError as left:
        say.line(f"Stopped by {left.signal_name}; there was nothing to save.")
        raise
    except KeyboardInterrupt:
        # A fresh run has a folder of its own, which is not known here.
        if not fresh:
            _say_what_is_kept(loaded.out)
        raise typer.Exit(process.EXIT_CODES["SIGINT"]) from None
    if outcome.interrupted_by:
        _say_how_to_resume(outcome, outcome.run or loaded.out, fresh=fresh)
        raise typer.Exit(process.EXIT_CODES[outcome.interrupted_by])
    _say_what_was_done(outcome, loaded, epochs, as_json=as_json)


def parent_of(
    out: Path | None, begin_from: str | None, *, weights_only: bool, trust: bool
) -> "Parent | None":
    """Return the checkpoint that `--from` names, or None; `out` may be a run that is resumed."""
    from longtake.checkpoint.files import find_parent

    if begin_from is None:
        if weights_only:
            raise errors.RecipeError(
                "--weights-only needs --from RUN, the run whose weights are taken."
            )
        return None
    run = None if out is None else RunDirectory(out)
    # A run that is resumed keeps its parent, whatever that has trained or deleted since.
    begun = run.record().get("parent") if run is not None and run.exists() else None
    return find_parent(begin_from, weights_only=weights_only, trust=trust, begun=begun)


def _say_what_is_kept(out: Path) -> None:
    steps = RunDirectory(out).checkpoint_steps()
    kept = (
        f"the newest checkpoint is of step {steps[-1]}" if steps else "there is no checkpoint yet"
    )
    say.line(f"Stopped at once, without saving: {kept}. The same command resumes from there.")


def _say_how_to_resume(outcome: "TrainOutcome", out: Path, *, fresh: bool) -> None:
    say.line(f"Stopped by {outcome.interrupted_by} after step {outcome.end_step}, which is saved.")
    say.line("Resume with:" if fresh else "The same command resumes, and so does:")
    say.line(RunDirectory(out).resume_command())


def _say_what_was_done(
    outcome: "TrainOutcome", recipe: "Recipe", epochs: int | None, *, as_json: bool
) -> None:
    """Say what a launch has trained; `epochs` are those that the run had before it."""
    from longtake.inspection.facts import command_to_sample

    out = outcome.run or recipe.out
    steps = outcome.end_step - outcome.start_step
    if as_json:
        say.result(
            {
                "run": str(out),
                "start_step": outcome.start_step,
                "steps": outcome.end_step,
                "training_seconds": round(outcome.training_seconds, 3),
                "steps_per_second": round(steps / outcome.training_seconds, 3) if steps else None,
                "rollbacks": outcome.rollbacks,
            }
        )
    elif steps:
        say.line(f"Done: step {outcome.end_step} of {out}.")
    else:
        asked, more = recipe.training, ""
        if asked.epochs and epochs and asked.epochs < epochs:
            more = f" ({epochs} epochs), more than training.epochs = {asked.epochs}"
        elif not asked.epochs and asked.steps < outcome.end_step:
            more = f", more than training.steps = {asked.steps}"
        say.line(f"{out} has done its {outcome.end_step} steps already{more}.")
    if outcome.rollbacks:
        times = "once" if outcome.rollbacks == 1 else f"{outcome.rollbacks} times"
        say.line(f"It went back {times}; see why: {process.command()} show {shlex.quote(str(out))}")
    planned = RunDirectory(out).recipe().training.steps
    if outcome.end_step < planned:
        say.line(
            f"The data ended {planned - outcome.end_step} steps before training.steps = {planned}, "
            "because batches were skipped."
        )
    say.line(f"Sample it: {command_to_sample(RunDirectory(out))}")

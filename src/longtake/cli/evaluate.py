"""The command `evaluate`: samples and measures checkpoints."""

import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from longtake.cli import say

_NOTHING = (
    "Nothing is due: each checkpoint that is wanted has been evaluated, is with another server, or "
    "was given up."
)


def evaluate(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN…", help="Run directories, or folders of run directories."),
    ],
    preset: Annotated[
        list[str] | None,
        typer.Option(help="Preset to sample; may be repeated [default: the recipe's]."),
    ] = None,
    presets: Annotated[Path | None, typer.Option(help="A TOML file with presets.")] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(
            help="Take [evaluation] and [sampling] from this recipe (TOML) [default: the run's]."
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Wait for further checkpoints and runs.")
    ] = False,
    until_finished: Annotated[
        bool, typer.Option("--until-finished", help="Follow until all runs have ended.")
    ] = False,
    backlog: Annotated[
        str,
        typer.Option(
            metavar="all|newest|every=K",
            help="Every checkpoint, oldest first; only the newest; or every K steps.",
        ),
    ] = "all",
    source: Annotated[
        str | None,
        typer.Option(
            metavar="[USER@]HOST:PATH|PATH",
            help="Where the runs are trained; RUN is the folder they are mirrored into.",
        ),
    ] = None,
    every: Annotated[
        float, typer.Option(min=0.1, help="Seconds between two looks at the source.")
    ] = 100.0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, or one GPU: cuda:1.")] = "auto",
    trust: say.Trust = False,
    as_json: say.AsJson = False,
) -> None:
    """Sample and measure each checkpoint of runs, while they train or afterwards.

    Results are written to RUN/evaluations. Several servers, on one machine or on many, share the
    work; a preset is sampled with the same prompts and seeds at each checkpoint. Exit code 1 if
    something could not be evaluated. Ctrl-C or SIGTERM ends it (exit code 130 or 143); work that
    it had begun is left to other servers.
    """
    # Waiting threads must not spin on cores that a training uses. Read when PyTorch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from longtake.evaluation.options import ServerOptions, parse_backlog
    from longtake.evaluation.server import evaluate as serve

    options = ServerOptions(
        places=tuple(runs),
        presets=tuple(preset or ()),
        own_presets=presets,
        recipe=recipe,
        backlog=parse_backlog(backlog),
        follows=follow or until_finished,
        until_finished=until_finished,
        source=source,
        every_seconds=every,
        trust=trust,
    )
    try:
        ended = serve(options, device, say.console())
    except KeyboardInterrupt:  # a second Ctrl-C
        say.line("Stopped at once: whole results are kept, and what was begun is begun again.")
        # 128 + the signal's number is the shells' code for a process that a signal has ended.
        raise typer.Exit(128 + signal.SIGINT) from None
    if as_json:
        say.result(ended)
    elif ended["stopped_by"]:
        say.line(f"Stopped by {ended['stopped_by']}.")
    elif not (ended["evaluation_finished"] or ended["failed"] or ended["wrong"]):
        say.line(_NOTHING)
    if ended["stopped_by"]:
        raise typer.Exit(128 + signal.Signals[ended["stopped_by"]])
    if ended["failed"] or ended["wrong"]:
        raise typer.Exit(1)

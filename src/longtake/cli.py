"""The verbs: parse, call, print.

What a verb needs is imported inside it, so that --help is instant.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from longtake import __version__
from longtake.errors import LongtakeError

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    name="longtake",
    help="Trains video and image diffusion transformers with flow matching.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
data_app = typer.Typer(help="Prepare and inspect what is trained on.", no_args_is_help=True)
app.add_typer(data_app, name="data")

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Ema = Annotated[bool, typer.Option(help="Take the averaged weights, or the raw ones.")]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option()]
AtStep = Annotated[int | None, typer.Option(help="Which checkpoint; the newest by default.")]
_RUN_HELP = "A run directory, or one of its checkpoints."


def main() -> None:
    """Run a verb; a user's mistake becomes one message on stderr and exit code 2."""
    try:
        app()
    except LongtakeError as error:
        _complain(str(error))
        sys.exit(2)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"longtake {__version__}")  # noqa: T201
        raise typer.Exit


@app.callback()
def longtake(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Trains video and image diffusion transformers with flow matching."""


@app.command()
def demo(
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimizer updates; 3000 by default.")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.1, help="Instead of steps: as many as fit, by a short measurement."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed is another run.")] = 0,
    out: Annotated[Path, typer.Option(help="The run directory.")] = Path("runs/demo"),
    as_json: AsJson = False,
) -> None:
    """Train a small text-to-video model from nothing, sample it, and judge what it made."""
    from longtake.demo.run import run_demo

    summary = run_demo(out=out, steps=steps, minutes=minutes, seed=seed, console=_console())
    if summary is None:
        _say(f"Stopped. What {out} holds by now is kept; the same command goes on from there.")
        raise typer.Exit(130)
    if as_json:
        _print_json(summary)


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe (TOML).")],
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a key, such as training.steps=100."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a recipe; the same command again goes on where it stopped.

    Alone or on several processes: [bold]torchrun --nproc-per-node 2 --shutdown-timeout 600 -m
    longtake train RECIPE[/bold] (the time-out is what saving may take after Ctrl-C)
    """
    from longtake import config
    from longtake.run_dir import RunDirectory
    from longtake.training.run import train as train_recipe

    loaded = config.load(recipe, changes or ())
    outcome = train_recipe(loaded, _console())
    if outcome.interrupted_by:
        _say(f"Stopped by {outcome.interrupted_by} after step {outcome.end_step}, which is saved.")
        _say("The same command goes on from there, and so does:")
        _say(RunDirectory(loaded.out).command_to_go_on())
        raise typer.Exit(130)
    steps = outcome.end_step - outcome.start_step
    facts = {
        "run": str(loaded.out),
        "start_step": outcome.start_step,
        "steps": outcome.end_step,
        "training_seconds": round(outcome.training_seconds, 3),
        "steps_per_second": round(steps / outcome.training_seconds, 3) if steps else None,
    }
    if as_json:
        _print_json(facts)
    elif steps:
        _say(f"Done: step {outcome.end_step} of {loaded.out}.")
    else:
        _say(f"{loaded.out} has done its {outcome.end_step} steps already.")
    _say(f"See what it makes: longtake sample {loaded.out} --prompt '…' --out sample.mp4")


@app.command()
def sample(
    run: Annotated[Path, typer.Argument(help=_RUN_HELP)],
    prompt: Annotated[list[str], typer.Option(help="What the video shows; may be repeated.")],
    out: Annotated[Path, typer.Option(help="The mp4 to write; numbered for several prompts.")],
    seed: Annotated[int, typer.Option(min=0, help="The same seed makes the same video.")] = 0,
    step: AtStep = None,
    ema: Ema = True,
    solver: Annotated[str | None, typer.Option(help="euler or heun.")] = None,
    num_inference_steps: Annotated[
        int | None, typer.Option("--steps", help="Steps of the solver.")
    ] = None,
    guidance_scale: Annotated[
        float | None, typer.Option("--guidance", help="How closely to follow the prompt; 1: none.")
    ] = None,
    shift: Annotated[float | None, typer.Option(help="Shift of the sigmas toward noise.")] = None,
    num_frames: Annotated[
        int | None, typer.Option("--frames", help="Those of the recipe's first bucket, if unset.")
    ] = None,
    height: Annotated[int | None, typer.Option(help="Likewise.")] = None,
    width: Annotated[int | None, typer.Option(help="Likewise.")] = None,
    fps: Annotated[float | None, typer.Option(help="Frames a second of the mp4.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Videos sampled at once.")] = 4,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Sample videos from a run, with a contact sheet beside them."""
    from longtake.evaluation.sample import load_sampler, settings_for
    from longtake.evaluation.write import check_out, write_samples

    check_out(out)
    sampler = load_sampler(run, step=step, ema=ema, device=device)
    settings, bucket = settings_for(
        sampler.recipe,
        num_frames=num_frames,
        height=height,
        width=width,
        solver=solver,
        num_inference_steps=num_inference_steps,
        guidance_scale=guidance_scale,
        shift=shift,
        fps=fps,
    )
    written = write_samples(sampler, prompt, seed, settings, bucket, out, batch, _console())
    if as_json:
        _print_json({"step": sampler.step, **written})
    else:
        _say(f"Step {sampler.step}: {', '.join(written['videos'])} and {written['sheet']}")


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help=_RUN_HELP)],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    step: AtStep = None,
    ema: Ema = True,
    as_json: AsJson = False,
) -> None:
    """Write a run's model as a diffusers pipeline folder, for `from_pretrained`."""
    from longtake.evaluation.export import check_out, export_pipeline
    from longtake.evaluation.sample import load_sampler

    check_out(out)
    sampler = load_sampler(run, step=step, ema=ema, device="cpu")
    export_pipeline(sampler, out)
    if as_json:
        _print_json({"step": sampler.step, "pipeline": str(out)})
    else:
        _say(f"Step {sampler.step} as a diffusers pipeline: {out}")


@data_app.command("index")
def data_index(
    sources: Annotated[list[Path], typer.Argument(metavar="SRC…", help="Folders or video files.")],
    out: Annotated[Path, typer.Option(help="The catalog to write (Parquet).")],
    captions: Annotated[
        Path | None,
        typer.Option(
            help='JSON lines of {"video": path, "caption": text}; else clip.txt beside clip.mp4.'
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Decode every video once and write a catalog of those that can be trained on."""
    from longtake.data.catalog import index
    from longtake.progress import counted

    with counted(_console(), "index") as advance:
        report = index(sources, captions=captions, out=out, progress=advance)
    if as_json:
        _print_json(asdict(report) | {"catalog": str(out)})
        return
    for rejection in report.rejected:
        _say(f"  rejected: {rejection.path}: {rejection.reason}")
    for video in report.unmatched_captions:
        _say(f"  no such video, though a caption names it: {video}")
    _say(
        f"{report.accepted} clips in {out}: {report.accepted - report.without_caption} with a "
        f"caption, {report.without_caption} without; {len(report.rejected)} files rejected, "
        f"{report.duplicates} duplicates left out."
    )


def _console() -> "Console":
    """Where people read: stderr, so that stdout is for results."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def _rank() -> int:
    """This process's rank where torchrun started it, else 0."""
    return int(os.environ.get("RANK", "0"))


def _say(line: str) -> None:
    if _rank() == 0:
        print(line, file=sys.stderr)  # noqa: T201 - this is what a command line does


def _complain(message: str) -> None:
    prefix = f"[rank {_rank()}] " if _rank() else ""
    print(f"{prefix}longtake: {message}", file=sys.stderr)  # noqa: T201


def _print_json(result: Any) -> None:
    if _rank() == 0:
        print(json.dumps(result, indent=2))  # noqa: T201

"""The command line application `longtake` with its commands.

Each command imports what it needs inside its function, so that --help is instant.
"""

import errno
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from longtake import __version__, errors, process, progress
from longtake.cli import say
from longtake.cli.board import board, report
from longtake.cli.data import data_app
from longtake.cli.evaluate import evaluate
from longtake.cli.export import RUN_HELP, AtStep, Ema, OtherExpert, Profile, export, load_sampler
from longtake.cli.init import init
from longtake.cli.launch import launch, preflight
from longtake.cli.plan import plan
from longtake.cli.runs import bundle, health, show, stacks, watch
from longtake.cli.train import train

app = typer.Typer(
    name="longtake",
    help="Trains video and image diffusion transformers with flow matching.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

_NOT_OURS = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR, errno.ENOTDIR),
)
"""Error numbers of the operating system that a user can solve: permissions, space, names of
files."""

Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option()]


def main() -> None:
    """Run a command; a user's mistake becomes one message on stderr and an exit code, mostly 2."""
    # Before torch is imported: its C++ code warns of memory allocated before a measurement.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        app()
    except errors.LostPeerError as error:
        say.complain(str(error))
        sys.stdout.flush()
        # All ranks are started again once this one is gone: do not wait for threads whose results
        # have become useless.
        os._exit(error.exit_code)
    except errors.LongtakeError as error:
        say.complain(str(error))
        sys.exit(error.exit_code)
    except OSError as error:
        # Anything else is a bug, which keeps its traceback.
        if error.errno not in _NOT_OURS:
            raise
        name = f"{error.filename} cannot be used: " if error.filename else ""
        # 2, as for a LongtakeError: it tells a launcher that a restart would meet the same error.
        say.complain(f"{name}{error.strerror}. Check its permissions and the room on its disk.")
        sys.exit(2)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"longtake {__version__}")  # noqa: T201
        raise typer.Exit


@app.callback()
def longtake(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Trains video and image diffusion transformers with flow matching."""


def demo(
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimizer updates; 1500 by default.")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.1, help="Train for about this number of minutes, instead of --steps."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the clips and of the training.")] = 0,
    out: Annotated[Path, typer.Option(help="The run directory.")] = Path("runs/demo"),
    with_server: Annotated[
        bool,
        typer.Option(
            "--evaluate/--no-evaluate",
            help="Sample each checkpoint during the training, in a second process.",
        ),
    ] = True,
    as_json: say.AsJson = False,
) -> None:
    """Train a small text-to-video model from scratch, sample it, and check the samples."""
    with progress.phase_lines(say.console(), "importing PyTorch"):
        from longtake.demo.run import run_demo

    summary = run_demo(
        out=out,
        steps=steps,
        minutes=minutes,
        seed=seed,
        console=say.console(),
        evaluate=with_server,
    )
    if isinstance(summary, str):
        say.line(
            f"Stopped by {summary}. What {out} holds by now is kept; the same command resumes from "
            "there."
        )
        # The codes of `train`: a script then knows that the same command resumes.
        raise typer.Exit(process.EXIT_CODES[summary])
    if as_json:
        say.result(summary)


def sample(
    run: Annotated[Path, typer.Argument(help=RUN_HELP)],
    prompt: Annotated[list[str], typer.Option(help="The text prompt; may be repeated.")],
    out: Annotated[
        Path,
        typer.Option(help="The file to write: .mp4, or .png of one frame."),
    ],
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the noise.")] = 0,
    step: AtStep = None,
    ema: Ema = None,
    profile: Profile = None,
    solver: Annotated[
        str | None, typer.Option(help="euler, heun or unipc [default: the recipe's].")
    ] = None,
    num_inference_steps: Annotated[
        int | None, typer.Option("--steps", help="Number of solver steps [default: the recipe's].")
    ] = None,
    guidance_scale: Annotated[
        float | None,
        typer.Option("--guidance", help="Guidance scale; 1: no guidance [default: the recipe's]."),
    ] = None,
    guidance_scale_2: Annotated[
        float | None,
        typer.Option(
            "--guidance-2",
            help="Guidance of the low-noise expert, if there are two [default: --guidance].",
        ),
    ] = None,
    shift: Annotated[
        float | None, typer.Option(help="Shift of the sigmas toward noise [default: the recipe's].")
    ] = None,
    num_frames: Annotated[
        int | None,
        typer.Option("--frames", help="Frames per video [default: the recipe's first bucket]."),
    ] = None,
    height: Annotated[
        int | None, typer.Option(help="Height in pixels [default: the recipe's first bucket].")
    ] = None,
    width: Annotated[
        int | None, typer.Option(help="Width in pixels [default: the recipe's first bucket].")
    ] = None,
    fps: Annotated[
        float | None, typer.Option(help="Frames per second of the mp4 [default: the recipe's].")
    ] = None,
    negative_prompt: Annotated[
        str | None,
        typer.Option("--negative", help="What guidance moves away from [default: the recipe's]."),
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option(help="A LoRA file for samples alone [default: the recipe's].")
    ] = None,
    adapter_strength: Annotated[
        float | None, typer.Option(help="Strength of --adapter; 0: none [default: the recipe's].")
    ] = None,
    conditioning: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILE", help="A further input, by its name in data.conditioning."
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Videos sampled at once.")] = 4,
    other_expert: OtherExpert = None,
    device: Device = "auto",
    trust: say.Trust = False,
    as_json: say.AsJson = False,
) -> None:
    """Sample videos from a run, and write a contact sheet of them."""
    with progress.phase_lines(say.console(), "importing PyTorch") as enter:
        from longtake.sampling.checkpoints import find_run
        from longtake.sampling.videos import check_samples, write_samples

        # Python passes bytes that are not UTF-8 as lone surrogates, which no tokenizer takes.
        if any("\ud800" <= letter <= "\udfff" for each in prompt for letter in each):
            raise typer.BadParameter("a prompt is not valid UTF-8")
        prompts, inputs, settings, bucket = check_samples(
            find_run(run).recipe(),
            prompt,
            conditioning or (),
            out,
            num_frames=num_frames,
            height=height,
            width=width,
            solver=solver,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            guidance_scale_2=guidance_scale_2,
            shift=shift,
            fps=fps,
            negative_prompt=negative_prompt,
            adapter=adapter,
            adapter_strength=adapter_strength,
        )
        enter("loading the model")
        sampler = load_sampler(
            run,
            step,
            ema=ema,
            profile=profile,
            device=device,
            trust=trust,
            sampling=settings,
            other_expert=other_expert,
        )
    written = write_samples(
        sampler, prompts, seed, settings, bucket, out, batch, say.console(), inputs
    )
    if as_json:
        say.result({"step": sampler.step, "weights": sampler.weights, **written})
    else:
        files = f"{', '.join(written['videos'])} and {written['sheet']}"
        say.line(f"Step {sampler.step}, {sampler.weights}: {files}")


def drill(
    faults: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FAULT]…", help="Faults to inject; none: list all faults."),
    ] = None,
    run_all: Annotated[
        bool, typer.Option("--all", help="Inject all faults; this takes an hour or more.")
    ] = False,
    show_list: Annotated[
        bool,
        typer.Option("--list", help="List faults, and what must happen, without injecting them."),
    ] = False,
    keep: Annotated[
        Path | None, typer.Option(help="A folder to leave the drills' runs in, to look at.")
    ] = None,
    as_json: say.AsJson = False,
) -> None:
    """Inject faults into small runs on this machine, and check that each run survives.

    Without a fault's name it lists all faults. Exit code 1 if a drill failed; a drill that this
    machine cannot carry out is skipped.
    """
    from longtake.faults.registry import find_faults, run_drills, show_faults, show_results

    if show_list or not (faults or run_all):
        found = find_faults(faults or ())
        if as_json:
            say.result([{"fault": f.name, "does": f.does, "must": f.must} for f in found])
        else:
            show_faults(found, say.console())
            if not show_list:
                say.line(f"Run some: {process.command()} drill {found[0].name}; or all: --all.")
        return
    results = run_drills(() if run_all else faults or (), say.console(), keep)
    if as_json:
        say.result([asdict(result) for result in results])
    else:
        show_results(results, say.console())
    if any(result.failed for result in results):
        raise typer.Exit(1)


# --help lists them in this order, in which users come to need them.
_BEFORE, _AFTER = (
    (demo, init, plan, preflight, train, launch),
    (evaluate, sample, export, show),
)
for _verb in (*_BEFORE, *_AFTER, board, report, health, watch, stacks, bundle, drill):
    app.command()(_verb)
app.add_typer(data_app, name="data")

"""The command `export`, and the loading of a run's model that `sample` shares."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from longtake import progress
from longtake.cli import say
from longtake.formatting import plural

if TYPE_CHECKING:
    from longtake.sampling.sampler import Sampler

Ema = Annotated[
    bool | None,
    typer.Option(
        "--ema/--no-ema",
        show_default=False,
        help="Use the EMA weights or the trained weights [default: EMA if the run has it].",
    ),
]
Profile = Annotated[str | None, typer.Option(help="Name of the EMA profile [default: the first].")]
AtStep = Annotated[
    int | None,
    typer.Option(help="Step of the checkpoint; 0: the run's beginning [default: the newest]."),
]
OtherExpert = Annotated[
    Path | None,
    typer.Option(
        show_default=False,
        metavar="RUN",
        help="Of a release with two transformers: the run, or one of its checkpoints, that trained "
        "the other one [default: sampling.other_expert, else the release's].",
    ),
]
RUN_HELP = "A run directory, or one of its checkpoints."
_Dtype = Annotated[
    Literal["fp32", "bf16", "fp16", "fp8_scaled"] | None,
    typer.Option(
        help="For comfyui and peft: data type of the weights [default: as kept]. fp8_scaled, of a "
        "whole model for ComfyUI: the blocks' matrices in fp8 with a scale each, the rest in bf16."
    ),
]
_ExtractLora = Annotated[
    int | None,
    typer.Option(
        metavar="RANK",
        min=1,
        max=2**14,
        help="Of a run that trained all weights: the LoRA of this rank that is nearest to their "
        "change, in any format; for diffusers it is one file.",
    ),
]
_Like = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="For comfyui, of a whole model: a file of this model, whose names and layout are "
        "taken [default: model.pretrained, if that is one file].",
    ),
]
_Title = Annotated[
    str | None, typer.Option(help="Title that other tools show [default: the run's name].")
]
_Author = Annotated[str | None, typer.Option(help="Author that other tools show.")]
_License = Annotated[
    str | None, typer.Option("--license", help="Licence that other tools show, such as apache-2.0.")
]

_Push = Annotated[
    str | None,
    typer.Option(
        metavar="REPO",
        help="Send the export to this repository of the Hugging Face Hub, too, with a model card. "
        "The token is that of `hf auth login`.",
    ),
]
_Private = Annotated[
    bool, typer.Option("--private/--public", help="With --push: who sees a new repository.")
]
_Update = Annotated[
    bool, typer.Option(help="With --push: send to a repository that exists, and replace its files.")
]
_DryRun = Annotated[
    bool, typer.Option(help="With --push: write the export, show what would be sent, send nothing.")
]


def load_sampler(path: Path, step: int | None, **options: Any) -> "Sampler":
    """Load a run's checkpoint for sampling; without a step, name newer ones that are damaged."""
    from longtake.checkpoint.files import passed_over
    from longtake.sampling import sampler as sampling
    from longtake.sampling.checkpoints import find_run

    # After loading, which has passed over the checkpoints that are damaged.
    sampler, run = sampling.load_sampler(path, step=step, **options), find_run(path)
    # A checkpoint that was named by its path has no newer ones to mention.
    if step is None and run.path == path:
        for sentence in passed_over(run, sampler.step):
            say.complain(f"{sentence}.")
    return sampler


def export(
    run: Annotated[Path, typer.Argument(help=RUN_HELP)],
    out: Annotated[Path, typer.Option(help="The folder to write; for comfyui, the file.")],
    wanted: Annotated[
        Literal["diffusers", "peft", "comfyui"],
        typer.Option("--format", help="A pipeline folder, LoRA alone, or one file for ComfyUI."),
    ] = "diffusers",
    step: AtStep = None,
    ema: Ema = None,
    profile: Profile = None,
    other_expert: OtherExpert = None,
    dtype: _Dtype = None,
    extract_lora: _ExtractLora = None,
    like: _Like = None,
    title: _Title = None,
    author: _Author = None,
    licence: _License = None,
    push: _Push = None,
    private: _Private = True,
    update: _Update = False,
    dry_run: _DryRun = False,
    trust: say.Trust = False,
    as_json: say.AsJson = False,
) -> None:
    """Write a run's model for other tools: diffusers' `from_pretrained`, peft or ComfyUI."""
    with progress.phase_lines(say.console(), "importing PyTorch") as enter:
        from longtake.evaluation.export import ExportChoice, check_export
        from longtake.evaluation.export import export as write
        from longtake.evaluation.push import check_push, collect, list_files, send
        from longtake.models.file_header import Words
        from longtake.sampling.checkpoints import find_run

        # Refused before the model is loaded, which can take minutes.
        words, is_pushed = Words(title, author, licence), push is not None
        choice = ExportChoice(wanted, dtype, words, extract_lora, like, is_pushed)
        check_export(find_run(run).recipe(), out, choice)
        if push is None and (dry_run or update or not private):
            raise typer.BadParameter("--dry-run, --update and --public are for --push")
        if push is not None and not dry_run:
            check_push(push, update=update)
        enter("loading the model")
        sampler = load_sampler(
            run,
            step,
            ema=ema,
            profile=profile,
            device="cpu",
            trust=trust,
            exact=True,
            other_expert=other_expert,
            # A pipeline holds both transformers of a release; LoRA and ComfyUI files hold one.
            with_other=wanted == "diffusers" and extract_lora is None,
        )
        enter("writing the export")
        remarks = write(sampler, out, **choice._asdict())
        if push is not None:
            files = collect(sampler, out, choice, push)
            if dry_run:
                remarks += [f"Would be sent to {push}:", *list_files(files)]
            else:
                enter(f"sending {plural(len(files), 'file')} to {push}")
                message = f"Step {sampler.step}"
                url = send(push, files, message, private=private, update=update)
                remarks.append(f"Sent {plural(len(files), 'file')}: {url}")
    if as_json:
        facts = {"step": sampler.step, "weights": sampler.weights, "format": wanted}
        say.result({**facts, "out": str(out), "remarks": remarks})
        return
    say.line(f"Step {sampler.step}, {sampler.weights}, for {wanted}: {out}")
    for remark in remarks:
        say.line(remark)

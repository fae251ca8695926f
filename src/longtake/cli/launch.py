"""The verb `longtake launch`: all ranks of a node, or a job of Slurm."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longtake.cli import say
from longtake.cli.say import Changes, Trust
from longtake.cli.train import Fresh
from longtake.process import command

if TYPE_CHECKING:
    from longtake.launch.job import Job

_SLURM = "Slurm (with --slurm)"


def launch(
    recipe: Annotated[Path, typer.Argument(help="A recipe (TOML).")],
    nproc_per_node: Annotated[
        str, typer.Option(metavar="N|auto", help="Ranks a node; auto: one for each GPU.")
    ] = "auto",
    nnodes: Annotated[
        str, typer.Option(metavar="M|MIN:MAX", help="Nodes; MIN:MAX continues when some are lost.")
    ] = "1",
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:PORT]", help="Address where nodes meet: the same node for all."
        ),
    ] = None,
    rdzv_id: Annotated[
        str, typer.Option(metavar="ID", help="Tells launches apart that meet at one place.")
    ] = "longtake",
    max_restarts: Annotated[
        int,
        typer.Option(min=0, help="Starts after a crash, without a new checkpoint in between."),
    ] = 3,
    tee: Annotated[bool, typer.Option("--tee/--no-tee", help="Show here what rank 0 says.")] = True,
    changes: Changes = None,
    fresh: Fresh = False,
    trust: Trust = False,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Submit it as a job.", rich_help_panel=_SLURM)
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the job's file instead.", rich_help_panel=_SLURM),
    ] = False,
    nodes: Annotated[int, typer.Option(min=1, rich_help_panel=_SLURM)] = 1,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(min=1, help="GPUs per node [default: none].", rich_help_panel=_SLURM),
    ] = None,
    cpus_per_task: Annotated[
        int | None,
        typer.Option(min=1, help="Cores a node; unset: whole nodes.", rich_help_panel=_SLURM),
    ] = None,
    time: Annotated[
        str | None, typer.Option(help="The limit, such as 1-12:00:00.", rich_help_panel=_SLURM)
    ] = None,
    partition: Annotated[str | None, typer.Option(rich_help_panel=_SLURM)] = None,
    account: Annotated[str | None, typer.Option(rich_help_panel=_SLURM)] = None,
    qos: Annotated[str | None, typer.Option(rich_help_panel=_SLURM)] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FLAG=VALUE",
            help="Another option of sbatch; may be repeated.",
            rich_help_panel=_SLURM,
        ),
    ] = None,
    signal_seconds: Annotated[
        int,
        typer.Option(
            min=1, help="Seconds before the limit at which the job saves.", rich_help_panel=_SLURM
        ),
    ] = 300,
    with_preflight: Annotated[
        bool,
        typer.Option(
            "--preflight/--no-preflight", help="Look at the nodes first.", rich_help_panel=_SLURM
        ),
    ] = True,
    requeue: Annotated[
        bool,
        typer.Option(
            "--requeue/--no-requeue",
            help="Requeue the job after the time limit and after failures.",
            rich_help_panel=_SLURM,
        ),
    ] = True,
) -> None:
    """Train a recipe with several ranks, which are started again after a crash.

    One node: `longtake launch RECIPE --nproc-per-node 8`. Several: the same command on
    each, `longtake launch RECIPE --nnodes 4 --rdzv-endpoint node1:29400`. By Slurm:
    `longtake launch RECIPE --slurm --nodes 4 --gpus-per-node 8 --time 12:00:00`.

    What each rank says is in RUN/nodes/HOST/logs. A signal (Ctrl-C, SIGTERM, SIGUSR1) lets all
    save. Exit code 0; 2 if trying again is of no use; 130, 143 or 75 after such a signal.
    """
    from longtake.launch.order import (
        Order,
        count_processes,
        parse_endpoint,
        parse_nodes,
        read_recipe,
        refuse_other_count,
    )

    numbers = parse_nodes(nnodes)
    is_alone = slurm or numbers == (1, 1)
    read, given = read_recipe(
        recipe, tuple(changes or ()), fresh=fresh, is_alone=is_alone, trust=trust
    )
    if slurm:
        from longtake.launch.job import Job

        named = {"partition": partition, "account": account, "qos": qos}
        flags = [f"{name}={value}" for name, value in named.items() if value is not None]
        job = Job(
            recipe=recipe.absolute(),
            changes=given,
            run=read.out.absolute(),
            folder=Path.cwd(),
            python=Path(sys.executable),
            nodes=nodes,
            processes=refuse_other_count(nproc_per_node),
            gpus=gpus_per_node,
            cpus=cpus_per_task,
            time=time,
            flags=(*flags, *(sbatch or ())),
            signal_seconds=signal_seconds,
            max_restarts=max_restarts,
            looks_first=with_preflight,
            requeues=requeue,
            trust=trust,
        )
        _submit(job, dry_run=dry_run)
        return
    order = Order(
        path=recipe,
        changes=given,
        recipe=read,
        processes=count_processes(nproc_per_node),
        nodes=numbers,
        endpoint=parse_endpoint(rdzv_endpoint, numbers),
        run_id=rdzv_id,
        max_restarts=max_restarts,
        tee=tee,
        trust=trust,
    )
    from longtake.launch.start import launch as start

    raise typer.Exit(start(order, say.console()))


def _submit(job: "Job", *, dry_run: bool) -> None:
    from longtake.launch.submit import submit, write

    if dry_run:
        print(job.script(), end="")  # noqa: T201 - a result, for a file or a pager
        say.line(f"Not written to {job.path}, and not submitted.")
        return
    write(job)
    number = submit(job)
    say.line(f"Job {number}: {job.path}")
    say.line(f"  squeue --jobs {number}")
    say.line(f"  tail -F {str(job.log).replace('%j', number)}")
    say.line(f"  {command()} show {shlex.quote(str(job.run))}")
